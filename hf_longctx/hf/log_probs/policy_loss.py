"""Computes the loss of `GRPOTrainer` token by token, so that plans train it in one forward and backward.

At importance ratios of tokens, TRL's loss is a sum over tokens, each of its own log-probability and of numbers that are known
before (advantage, earlier log-probabilities, weight in the mean). These travel as columns with the tokens to the tiles of the
output head. TRL's own code runs afterwards, on the log-probabilities of that pass, for its metrics, and its slopes must be those
that were trained (`two_passes.py`). What mixes tokens is left to two passes: ratios of sequences (GSPO, VESPO), masks of
whole rows by their divergence, quantiles of entropies, and the balance of experts.

Shapes: B rows, S columns of prompts and completions, C of completions, T tokens of all rows without padding, K columns of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_longctx.hf.log_probs.documents import FUSED, LocalDocuments, read_documents
from hf_longctx.hf.rules.trl import trl_class
from hf_longctx.runtime.core.loss import IGNORE_INDEX

# columns in order, and the names of TRL's batch; the last one multiplies the loss, and is 0 for tokens that are not trained
_COLUMNS = {
    "old": "old_per_token_logps",
    "reference": "ref_per_token_logps",
    "correction": "importance_sampling_ratio",
    "advantage": "advantages",
    "weight": "completion_mask",
}
# methods that a user may replace, so that the loss may be any function
_METHODS = {"_compute_loss", "_get_per_token_logps_and_entropies", "compute_loss"}


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a token in `GRPOTrainer` (TRL 1.16, `_compute_loss`). kind: its loss_type."""

    kind: str
    low: float
    high: float
    # most that a ratio counts on the side that is not clipped
    delta: float | None
    # coefficient of the divergence from the reference, and whether ratios correct its estimate
    beta: float
    corrects_divergence: bool
    # scales of SAPO, for advantages above 0 and others
    temperatures: tuple[float, float]

    def __call__(self, log_probs_T: Tensor, columns: dict[str, Tensor]) -> Tensor:
        """Returns losses [T]."""
        advantages_T, old_T = columns["advantage"], columns.get("old", log_probs_T.detach())
        ratios_T = torch.exp(log_probs_T - old_T)
        if self.kind == "cispo":
            losses_T = -ratios_T.clamp(max=self.high).detach() * advantages_T * log_probs_T
        elif self.kind == "sapo":
            above, below = self.temperatures
            temperatures_T = torch.full_like(ratios_T, below).masked_fill(advantages_T > 0, above)
            losses_T = -torch.sigmoid(temperatures_T * (ratios_T - 1)) * 4 / temperatures_T * advantages_T
        else:
            open_T = ratios_T if self.delta is None else ratios_T.clamp(max=self.delta)
            losses_T = -torch.min(open_T * advantages_T, ratios_T.clamp(1 - self.low, 1 + self.high) * advantages_T)
        if "correction" in columns:
            losses_T = losses_T * columns["correction"]
        if self.beta:
            above_T = columns["reference"] - log_probs_T
            divergences_T = torch.exp(above_T) - above_T - 1
            losses_T = losses_T + self.beta * (divergences_T * ratios_T if self.corrects_divergence else divergences_T)
        return losses_T * columns["weight"]


def policy_loss(trainer: Any) -> PolicyLoss | None:
    """Returns the loss of a token of this trainer; None if its loss is not TRL's own, or no sum over tokens."""
    base, args = trl_class(type(trainer)), trainer.args
    if base is None or base.__name__ != "GRPOTrainer":
        return None
    own = [cls for cls in type(trainer).__mro__ if cls.__module__.split(".", 1)[0] not in ("hf_longctx", "transformers", "trl")]
    if any(_METHODS & set(vars(each)) for each in (trainer, *own)):
        return None
    mixes = [
        trainer.importance_sampling_level != "token",
        trainer.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"),
        trainer.off_policy_mask_threshold is not None,
        trainer.top_entropy_quantile < 1.0,
        trainer.aux_loss_enabled,
    ]
    if any(mixes):
        return None
    temperatures = args.sapo_temperature_pos, args.sapo_temperature_neg
    clips = trainer.epsilon_low, trainer.epsilon_high, args.delta
    return PolicyLoss(trainer.loss_type, *clips, trainer.beta, args.use_bias_correction_kl, temperatures)


def column_names(inputs: dict[str, Any]) -> tuple[str, ...]:
    """Returns the columns that a batch of TRL has, in order."""
    return tuple(name for name, source in _COLUMNS.items() if inputs.get(source) is not None)


def policy_rows(trainer: Any, inputs: dict[str, Any], names: Sequence[str]) -> tuple[LocalDocuments, Tensor]:
    """Returns this rank's rows, as TRL's forward is asked for them, and the columns `names` [T, K] of their tokens."""
    ids_BS = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask_BS = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    first = inputs["prompt_ids"].shape[1]
    labels_BS = ids_BS.masked_fill(mask_BS == 0, IGNORE_INDEX)
    labels_BS[:, :first] = IGNORE_INDEX
    documents = read_documents({"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS, FUSED: True})
    columns_TK = []
    for name in names:
        given = _weights(trainer, inputs) if name == "weight" else inputs[_COLUMNS[name]].double()
        values_BS = torch.zeros_like(ids_BS, dtype=torch.float64)
        # beside the token before, which has it as its label
        values_BS[:, first - 1 : -1] = given.unsqueeze(1) if given.dim() == 1 else given
        columns_TK.append(values_BS[documents.kept_BS])
    return documents, torch.stack(columns_TK, dim=1)


def _weights(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Returns the weight [B, C] of each token's loss in the mean that TRL takes on this rank, 0 where it masks the token."""
    mask_BC = inputs["completion_mask"].double()
    if "tool_mask" in inputs:
        mask_BC = mask_BC * inputs["tool_mask"]
    num_rows, num_parts = len(mask_BC), trainer.current_gradient_accumulation_steps
    kind = trainer.loss_type
    if kind in ("cispo", "dapo"):
        share = num_parts / trainer.args.steps_per_generation / trainer.accelerator.num_processes
        return mask_BC / (inputs["num_items_in_batch"].double().clamp(min=1.0) * share)
    if kind in ("grpo", "sapo"):
        mask_BC = mask_BC / mask_BC.sum(dim=1, keepdim=True).clamp(min=1.0) / num_rows
    elif kind == "bnpo":
        mask_BC = mask_BC / mask_BC.sum().clamp(min=1.0)
    else:
        mask_BC = mask_BC / (num_rows if kind == "luspo" else num_rows * trainer.max_completion_length)
    return mask_BC / num_parts

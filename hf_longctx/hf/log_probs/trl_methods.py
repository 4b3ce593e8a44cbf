"""Overrides methods of TRL's trainers whose losses are functions of log-probabilities.

These private methods of TRL are overridden, only here: `_get_per_token_logps_and_entropies` of `GRPOTrainer` and `RLOOTrainer`,
`_precompute_ref_logps` of `DPOTrainer` and `KTOTrainer`, and `_compute_loss` of all four, which only that of `GRPOTrainer` needs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from datasets import is_caching_enabled
from transformers import Trainer

from hf_longctx.hf.checkpoints.weight_source import WeightSource
from hf_longctx.hf.log_probs.policy_loss import column_names, policy_loss, policy_rows
from hf_longctx.hf.log_probs.two_passes import TwoPasses
from hf_longctx.hf.log_probs.vllm_colocated import Colocated
from hf_longctx.hf.log_probs.vllm_server import generate_apart, generates_apart, own_client, send_weights
from hf_longctx.hf.ranks.agreement import raise_together
from hf_longctx.runtime.core.loss import LossOfLogProbs
from hf_longctx.runtime.parameters.away import Away, Kind, states_of, tensors_of

# users put the mixin before a Trainer subclass, so type checkers treat it as one
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class LogProbMixin(_TrainerBase):
    """Part of `LongContextMixin` for methods of TRL that compute log-probabilities.

    _two_passes: forwards of a trainer whose loss is a function of log-probabilities; None for others, and before the start.
    """

    _two_passes: TwoPasses | None = None
    # vLLM on the devices of this training
    _colocated: Colocated | None = None

    if TYPE_CHECKING:

        def _placed_model(self) -> Any: ...

        def _train_by_token(self, batch: dict[str, Any], loss: LossOfLogProbs) -> None: ...

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: Any, batch_size: Any = None, **kwargs: Any
    ) -> Any:
        """Runs TRL's method for all rows at once: plans bound memory, and `batch_size` would make a plan for every part."""
        found: Any = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        return found(model, input_ids, attention_mask, logits_to_keep, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any, *more: Any) -> Any:
        """Runs TRL's method, whose log-probabilities are computed and trained before it if its loss is a sum over tokens."""
        if self._colocated is not None:
            # a rollout function may have asked vLLM itself
            self._colocated.come_back()
        passes = self._two_passes
        loss = None if passes is None or not (torch.is_grad_enabled() and model.training) else policy_loss(self)
        if passes is not None and loss is not None:
            names = column_names(inputs)
            token_loss = LossOfLogProbs(loss, names, passes.scoring.temperature)
            passes.train_ahead(partial(policy_rows, self, inputs, names), token_loss, self._train_by_token)
        return super()._compute_loss(model, inputs, *more)  # type: ignore[misc]

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Runs TRL's method with forwards under plans; TRL also calls it in its constructor, before a run exists."""
        if self._two_passes is None:
            return dataset
        return super()._precompute_ref_logps(dataset, name, batch_size)  # type: ignore[misc]

    def _use_vllm(self, control: dist.ProcessGroup | None) -> None:
        """Makes vLLM get whole weights of shards, asks a server apart on ranks with tools, and makes room for a colocated one."""
        if (generation := getattr(self, "vllm_generation", None)) is None:
            return
        if generation.mode == "colocate":
            self._colocated = Colocated(generation, self.weight_source, self._on_device, Away(self.args.device))
            return
        generation.sync_weights = lambda: send_weights(generation, self.weight_source(), control)
        if generates_apart(self):
            client = own_client(generation)
            generation.generate = partial(generate_apart, generation, client)

    def _on_device(self) -> dict[Kind, list[Any]]:
        """Tensors that this training keeps on its device between steps, by kind."""
        models = [each for each in (self.model, getattr(self, "ref_model", None)) if each is not None]
        return {
            "weights": [tensor for each in models for tensor in tensors_of(each)],
            "states": states_of(self.optimizer),
        }

    def weight_source(self) -> WeightSource:
        """Whole weights as a checkpoint has them, with adapters added, for a server that a rollout function asks.

        Each iteration is collective over all ranks.
        """
        return WeightSource(self._placed_model())

    def _precompute_references(self) -> None:
        """Scores all sets by the reference, if TRL's arguments have `precompute_ref_log_probs`. Collective."""
        if not getattr(self, "precompute_ref_logps", False):
            return
        self._check_files()
        args: Any = self.args
        batch_sizes = (args.per_device_train_batch_size, args.per_device_eval_batch_size)
        per_train, per_eval = (args.precompute_ref_batch_size or each for each in batch_sizes)
        self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", per_train)
        if isinstance(held_out := self.eval_dataset, dict):
            held_out = {name: self._precompute_ref_logps(each, name, per_eval) for name, each in held_out.items()}
        elif held_out is not None:
            held_out = self._precompute_ref_logps(held_out, "eval", per_eval)
        self.eval_dataset = held_out

    def _check_files(self) -> None:
        """Raises ValueError on every rank if TRL would write the reference's values to a file that other ranks cannot find."""
        assert self._two_passes is not None
        pool, held_out = self._two_passes.pool, self.eval_dataset
        many = held_out if isinstance(held_out, dict) else {"eval_dataset": held_out}
        sets = {name: each for name, each in {"train_dataset": self.train_dataset, **many}.items() if each is not None}
        # datasets keeps files of other sets in a temporary folder of the process
        alone = [name for name, each in sets.items() if not (is_caching_enabled() and getattr(each, "cache_files", None))]
        problems = [
            f"precompute_ref_log_probs=True hands values of {name} to other ranks in a file beside its own, but it lies in "
            f"memory or caching of datasets is disabled; load it from a file (dataset.save_to_disk, datasets.load_from_disk), "
            f"enable caching, or set precompute_ref_log_probs=False"
            for name in alone
            if pool.num_ranks > 1
        ]
        raise_together(problems, pool.control)

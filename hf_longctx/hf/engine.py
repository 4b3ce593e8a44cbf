"""`LongContextEngine`: plans for any loop of reinforcement learning, below `Trainer`.

A user's own loop asks for log-probabilities, trains any function of them, steps the optimizer and sends weights to a server.
Every call takes this rank's rows, however many; groups, slices and micro-batches form inside. The two passes are those of the
mixin before TRL's trainers (`log_probs/two_passes.py`, `train_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import TrainingArguments

from hf_longctx.hf.checkpoints.manifest import OPTIMIZER_FILE
from hf_longctx.hf.checkpoints.optimizer_states import load_whole_optimizer
from hf_longctx.hf.checkpoints.weight_source import WeightSource, weight_problems
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.log_probs.documents import LocalDocuments
from hf_longctx.hf.log_probs.rewards import RewardPasses, passes_of
from hf_longctx.hf.log_probs.two_passes import Remembered, ScoredModel
from hf_longctx.hf.models.dropout import check_rates
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.ranks.agreement import failing_together
from hf_longctx.hf.rules.trl import dropped_weight_problems
from hf_longctx.hf.run.optimizers import fit_optimizer
from hf_longctx.hf.run.placement import read_weights
from hf_longctx.hf.run.run import RunRequest, start_run
from hf_longctx.hf.run.steps import train_loss
from hf_longctx.runtime.core.loss import (
    IGNORE_INDEX,
    LossOfLogProbs,
    OwnLogit,
    Scoring,
    TemperedCrossEntropy,
    TokenLoss,
    ValueLoss,
)
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.away import Away, states_of, tensors_of
from hf_longctx.runtime.parameters.master_weights import drop_master_weights, host_steps_of

# tokens with which a loss by tokens is tried before each pass
_PROBED = 8


@dataclass(frozen=True)
class TokenRow:
    """A row of token ids [n]. is_scored: marks [n] of the tokens whose log-probabilities are wanted; None for all."""

    ids: Sequence[int] | Tensor
    is_scored: Sequence[bool] | Tensor | None = None


@dataclass(frozen=True)
class RowValues:
    """Values [n] of the tokens of each row, 0 for those that are not scored."""

    # log-probability of each token, given those before it; 0 for the first
    log_probs: list[Tensor] = field(default_factory=list)
    # entropy of the distribution from which it was drawn; without a gradient
    entropies: list[Tensor] = field(default_factory=list)
    # output of a value model's head, also at the first token; such a model has no other values
    values: list[Tensor] = field(default_factory=list)


class LongContextEngine:
    """A model, its plans and its optimizer. All methods are collective: every rank calls them, in the same order.

    model: a causal language model, or a value model: `...ForTokenClassification` with one label. It computes in its own dtype.
    optimizer: makes the optimizer of trained weights, once they lie where they are trained; None for a model that is only scored.
    temperature: of the distribution that is trained, unless a call has another. output_dir: for records of the run. Raises
    ValueError on every rank, listing all problems, for what plans cannot run.

    Example:

        engine = LongContextEngine(model, LongContextConfig(max_length=131072), lambda weights: AdamW(weights, lr=1e-6))
        old = engine.log_probs(rows).log_probs
        loss, metrics = engine.forward_backward(rows, lambda values: (policy_loss(values.log_probs, old, advantages), {}))
        norm = engine.optimizer_step(max_norm=1.0)
        for name, tensor in engine.weights():
            ...
    """

    def __init__(
        self,
        model: nn.Module,
        config: LongContextConfig,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        temperature: float = 1.0,
        output_dir: str = "engine_output",
    ) -> None:
        args = TrainingArguments(
            output_dir, use_cpu=not torch.cuda.is_available(), bf16=False, report_to="none", disable_tqdm=True, save_strategy="no"
        )
        problems = []
        if config.may_have_stages:
            problems.append(
                f"stages={config.stages!r} leaves a rank some of the layers, but weights() of an engine is one stream of whole "
                f"tensors, and those of other stages would have to be sent between ranks first; use stages=1, with "
                f"parameters='sharded' if memory is short"
            )
        if config.parameters == "replicated":
            model.to(args.device)
        facts = ModelFacts.of(model)
        if config.frozen_weights == "fp8":
            problems.append("frozen_weights='fp8' packs weights that a server would need unpacked; leave it out")
        if facts.head_kind == "document" or (facts.head_kind == "token" and facts.num_outputs != 1):
            problems.append(
                f"{facts.name} has a head of {facts.num_outputs} output(s) per {facts.head_kind}; an engine runs ...ForCausalLM, "
                f"or ...ForTokenClassification with num_labels=1"
            )
        problems += weight_problems(model) + dropped_weight_problems(facts)
        self._has_values = facts.head_kind == "token"
        token_loss = OwnLogit() if self._has_values else None
        self.run = start_run(RunRequest(config, facts, args, None, problems, token_loss=token_loss))
        self.model, self.temperature, self.device = model, temperature, args.device
        most, placeholders = self.run.sets.longest_sequence, self.run.setup.placeholders
        self._passes = passes_of(self.run.source, most, placeholders, temperature, self.run.task)
        self._scored = ScoredModel(self._executor, self.run.activations.engine, Remembered())
        self._kept: StepExecutor | None = None
        # calls of `forward_backward` so far, each of which drops other values
        self._num_trained = 0
        # whether gradients of a whole step are there
        self._is_reduced = False
        self._away = Away(args.device)
        self.run.placement.prepare(model)
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            self.optimizer = optimizer([weight for weight in model.parameters() if weight.requires_grad])
            fit_optimizer(self.run, model, self.optimizer)

    def log_probs(self, rows: Sequence[TokenRow], temperature: float | None = None) -> RowValues:
        """Scores this rank's rows, perhaps none. Rows that were scored with the present weights are not scored again.

        A value model returns its values.
        """
        with torch.no_grad():
            return self._values(rows, temperature, is_trained=False)[0]

    def forward_backward(
        self,
        rows: Sequence[TokenRow],
        loss_fn: Callable[[RowValues], tuple[Tensor, Any]],
        temperature: float | None = None,
        is_last: bool = True,
    ) -> tuple[Tensor, Any]:
        """Adds the gradients of the mean over ranks of `loss_fn`; returns this rank's own loss, and what else `loss_fn` returns.

        loss_fn: any function of the values of this rank's rows, with a loss of its own for no rows. is_last: false if more calls
        follow before `optimizer_step`, whose gradients are added. An error of `loss_fn` on one rank ends the call on all. Raises
        ValueError on every rank if the loss depends on the model in other ways, and FloatingPointError if gradients are not
        finite.
        """
        executor, others = self._begin(), []
        wanted = self._wanted(temperature)
        token_loss = OwnLogit() if self._has_values else None if wanted == 1 else TemperedCrossEntropy(wanted)

        def compute() -> Tensor:
            with torch.enable_grad():
                values, leaf = self._values(rows, temperature, is_trained=True)
                with failing_together(self.run.pool.control, self.run.config.collective_timeout_s, "the loss has failed"):
                    loss, other = loss_fn(values)
                    others.append(other)
                    # a loss of no rows may be a constant
                    (loss + 0.0 * leaf.sum()).backward()
            return loss.detach()

        def train(batch: dict[str, Any], is_end: bool, part: Tensor) -> None:
            self._train(batch, token_loss, 1.0, is_end and is_last, part)

        loss = train_loss(self.run, self._passes, executor, compute, train)
        self._is_reduced, self._num_trained = is_last, self._num_trained + 1
        return loss, others[0]

    def forward_backward_by_token(
        self,
        rows: Sequence[TokenRow],
        token_loss: Callable[[Tensor, dict[str, Tensor]], Tensor],
        columns: Mapping[str, Sequence[Sequence[float] | Tensor]],
        temperature: float | None = None,
        is_last: bool = True,
    ) -> Tensor:
        """Adds the gradients of the mean over ranks of a sum over tokens, in one forward and backward; returns that mean.

        token_loss: from log-probabilities [T] of any scored tokens and their columns [T], by name, to losses [T], each of its own
        token alone, so that it fits losses against the sampler's log-probabilities or those of an earlier epoch. columns: numbers
        [n] of the tokens of each row; the same names on all ranks. is_last: as in `forward_backward`. Raises ValueError on every
        rank if the loss of a token changes with other tokens, and FloatingPointError if gradients are not finite.
        """
        executor, names = self._begin(), tuple(sorted(columns))
        if self._has_values:
            raise ValueError("a value model has no log-probabilities; use forward_backward")
        self._begin_dropout()
        loss = LossOfLogProbs(token_loss, names, self._wanted(temperature))

        def read() -> tuple[LocalDocuments, Tensor]:
            documents = _documents(rows, self.device)
            values_TK = _columns(rows, [columns[name] for name in names], self.device)
            _check_apart(loss, values_TK[documents.rows_T2[:, 1] != IGNORE_INDEX][:_PROBED])
            return documents, values_TK

        batch = self._passes.single_pass(read, names, loss.temperature)
        if executor.routers is not None:
            # without the balance of experts, as in two passes
            executor.routers.forget()
            executor.balance(executor.routers.summed(self.run.pool.everyone), torch.zeros((), device=self.device))
        mean = self._train(batch, loss, self.run.pool.num_ranks, is_last)
        self._is_reduced, self._num_trained = is_last, self._num_trained + 1
        return mean

    def optimizer_step(self, max_norm: float = math.inf) -> float:
        """Clips gradients to `max_norm`, updates the weights and drops the gradients; returns their norm before that."""
        if self.optimizer is None or not self._is_reduced:
            what = "no optimizer" if self.optimizer is None else "no gradients of a whole step"
            raise ValueError(f"the engine has {what}; pass optimizer=..., and call forward_backward(..., is_last=True) before")
        self._place("weights", "states")

        def clip() -> Tensor:
            norm = self.run.placement.clip(max_norm)
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm) if norm is None else norm

        host = host_steps_of(self.optimizer)
        norm = clip() if host is None else host.clipped(clip, max_norm)
        self.optimizer.step()
        self.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.model.zero_grad(set_to_none=True)
        self._is_reduced = False

    def weights(self) -> WeightSource:
        """Whole weights as a checkpoint has them, with adapters added; all ranks walk through them, one tensor at a time."""
        self._place()
        return WeightSource(self.model, partial(self.to_device, states=False))

    def save(self, folder: str) -> None:
        """Writes a checkpoint of transformers or PEFT to `folder`, which all ranks see, and the states of the optimizer.

        Give each checkpoint a folder of its own: files are written in place, so one that is overwritten is lost if a rank ends.
        """
        self._place("weights", "states")
        model: Any = self.model
        placement, is_writer = self.run.placement, self.run.args.should_save
        Path(folder).mkdir(parents=True, exist_ok=True)
        weights = placement.save(model, folder, is_writer)
        if not placement.writes_weights and is_writer:
            model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
        if self.optimizer is not None and not placement.save_optimizer(model, self.optimizer, folder) and is_writer:
            torch.save(self.optimizer.state_dict(), Path(folder) / OPTIMIZER_FILE)
        PartialState().wait_for_everyone()

    def load(self, folder: str) -> None:
        """Reads what `save` wrote, at any number of ranks. Raises ValueError for a folder without it."""
        self._place("weights", "states")
        placement, optimizer = self.run.placement, self.optimizer
        if not placement.load(self.model, folder):
            read_weights(self.model, folder)
        if optimizer is None:
            return
        if not placement.load_optimizer(self.model, optimizer, folder):
            if not (Path(folder) / OPTIMIZER_FILE).exists():
                raise ValueError(f"{folder} has no states of an optimizer; give a folder that save() wrote")
            load_whole_optimizer(optimizer, str(Path(folder) / OPTIMIZER_FILE))
        drop_master_weights(optimizer)

    def to_host(self, weights: bool = True, states: bool = True) -> None:
        """Moves weights with gradients, and optimizer states, to host memory, for a server on this device, until needed."""
        if weights and not self._away.holds("weights"):
            self.run.release_model()
            self.run.placement.prepare(self.model)
            self._away.move("weights", tensors_of(self.model))
        if states:
            self._away.move("states", states_of(self.optimizer))

    def to_device(self, weights: bool = True, states: bool = True) -> None:
        """Moves back what `to_host` moved; all methods that need it do so themselves, `weights()` before each tensor."""
        if weights:
            self._away.restore("weights")
        if states:
            self._away.restore("states")

    def close(self) -> None:
        """Ends the run, and gives the model its own layers back. Idempotent."""
        self.to_device()
        self._kept = None
        self.run.close()

    def _begin(self) -> StepExecutor:
        """Returns the executor for a call that adds gradients. Raises ValueError if those of the step are summed already."""
        if self._is_reduced:
            raise ValueError(
                "the gradients of this step were summed over ranks already (is_last=True); call optimizer_step() or zero_grad(), "
                "or pass is_last=False in all calls of a step but its last"
            )
        self._passes.forget()
        return self._executor()

    def _train(
        self,
        batch: dict[str, Any],
        token_loss: TokenLoss | ValueLoss | None,
        weight: float,
        reduces: bool,
        part: Tensor | None = None,
    ) -> Tensor:
        """Runs a batch forward and backward; returns its loss. part: the loss if it is another. Drops gradients not finite."""
        executor, plan = self._executor(), batch["step"].plan
        rank_plan = plan.for_rank(self.run.pool.rank)
        self.run.make_room(plan)
        engine = self.run.activations.engine(executor.model, rank_plan)
        executor.token_loss = token_loss
        result = executor.run(rank_plan, batch["chunks"], weight, reduces, plan.estimate.peak_bytes, engine)
        loss = result.loss if part is None else part
        if reduces and not (result.is_finite and math.isfinite(float(loss))):
            self.zero_grad()
            raise FloatingPointError(
                f"the loss ({float(loss):g}) or the gradients of this step are not finite, so they were dropped; look at the "
                f"loss function and its rows"
            )
        return loss

    def _place(self, *kinds: str) -> None:
        """Puts weights where they are trained, and what else is named."""
        self.to_device(states="states" in kinds)
        self.run.placement.prepare(self.model)

    def _wanted(self, temperature: float | None) -> float:
        """Returns the temperature of a call; raises ValueError for one that no distribution has."""
        wanted = self.temperature if temperature is None else temperature
        if not 0 < wanted < math.inf:
            raise ValueError(f"temperature is {wanted}; give a number above 0")
        return wanted

    def _executor(self) -> StepExecutor:
        """Returns the executor of the placed model, which owns buffers of gradients."""
        if torch.is_autocast_enabled(self.device.type):
            raise ValueError(
                "an engine was called inside torch.autocast, but it computes in the model's own dtype; call it outside, and load "
                "the model in bfloat16"
            )
        self._place()
        if self._kept is None:
            self._kept = self.run.executor(self.model, self.run.config.fp32_gradients)
        else:
            self.run.fused.bind(self.model)
        return self._kept

    def _values(self, rows: Sequence[TokenRow], temperature: float | None, is_trained: bool) -> tuple[RowValues, Tensor]:
        """Returns the values of rows, and the leaf that collects the slopes of all their log-probabilities."""
        passes = self._passes
        passes.scoring = Scoring(self._wanted(temperature), with_extras=True)
        self._begin_dropout()
        lengths, found = [len(row.ids) for row in rows], list[LocalDocuments]()

        def read() -> LocalDocuments:
            found.append(passes.checked(_documents(rows, self.device, is_shifted=not self._has_values)))
            return found[0]

        if isinstance(passes, RewardPasses):
            leaf = passes.numbers(self._scored, read, is_trained)
            marks_T = found[0].rows_T2[:, 1] != IGNORE_INDEX
            return RowValues(values=list(leaf.new_zeros(len(marks_T)).masked_scatter(marks_T, leaf).split(lengths))), leaf
        values = passes.values(self._scored, read, is_trained)

        def by_row(column_BS: Tensor) -> list[Tensor]:
            # the value at a token is that of the next one
            parts = nn.functional.pad(column_BS[0], (0, 1))[: sum(lengths)].split(lengths)
            return [nn.functional.pad(part[:-1], (1, 0)) for part in parts]

        return RowValues(by_row(values.log_probs), by_row(values.entropy.detach())), values.log_probs

    def _begin_dropout(self) -> None:
        """Chooses the masks of the next forward and backward. Raises ValueError for rates that were changed."""
        check_rates(self.model)
        if (dropout := self.run.dropout) is not None:
            dropout.begin_step(self._num_trained, {})
            # so that forwards of a loop's own, between these, drop as torch does
            dropout.rest()


def _documents(rows: Sequence[TokenRow], device: torch.device, is_shifted: bool = True) -> LocalDocuments:
    """Returns rows as documents, one after the other, each token with the next one as its label if that is scored.

    is_shifted: false if a scored token has a label of its own, 0.
    """
    parts = []
    for number, row in enumerate(rows):
        ids_n = torch.as_tensor(row.ids, dtype=torch.int64, device=device)
        scored_n = torch.ones_like(ids_n) if row.is_scored is None else torch.as_tensor(row.is_scored, device=device)
        if ids_n.dim() != 1 or not len(ids_n) or scored_n.shape != ids_n.shape:
            raise ValueError(
                f"row {number} has token ids of shape {tuple(ids_n.shape)} and is_scored of shape {tuple(scored_n.shape)}; give "
                f"one token id at least, and as many marks"
            )
        labels_n = (ids_n if is_shifted else 0 * ids_n).where(scored_n.bool(), IGNORE_INDEX)
        if is_shifted:
            labels_n = nn.functional.pad(labels_n[1:], (0, 1), value=IGNORE_INDEX)
        parts.append(torch.stack([ids_n, labels_n], dim=1))
    rows_T2 = torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64, device=device)
    # without a row there is one column of padding
    kept_BS = torch.ones(1, len(rows_T2), dtype=torch.bool, device=device) if parts else torch.zeros(1, 1, dtype=torch.bool)
    return LocalDocuments(rows_T2, [len(part) for part in parts], kept_BS.to(device))


def _columns(rows: Sequence[TokenRow], columns: Sequence[Sequence[Any]], device: torch.device) -> Tensor:
    """Returns the columns [T, K] of all rows' tokens, in fp64, each row beside the token before, which has it as its label."""
    lengths, parts = [len(row.ids) for row in rows], []
    for column in columns:
        found = [torch.as_tensor(part, dtype=torch.float64, device=device) for part in column]
        if [tuple(part.shape) for part in found] != [(length,) for length in lengths]:
            raise ValueError(
                f"the rows have {lengths} tokens, and a column has {[tuple(part.shape) for part in found]} numbers; give one per "
                f"token"
            )
        parts.append(
            torch.cat([part.roll(-1) for part in found]) if found else torch.zeros(0, dtype=torch.float64, device=device)
        )
    return torch.stack(parts, dim=1) if parts else torch.zeros(sum(lengths), 0, dtype=torch.float64, device=device)


def _check_apart(loss: LossOfLogProbs, values_TK: Tensor) -> None:
    """Raises ValueError if the loss of one of these tokens changes if it is alone."""
    log_probs_T = -torch.linspace(0.1, 3.0, len(values_TK), dtype=torch.float64, device=values_TK.device)
    given = {name: values_TK[:, place] for place, name in enumerate(loss.columns)}
    together = loss.loss(log_probs_T, given)
    alone = [loss.loss(log_probs_T[i : i + 1], {name: x[i : i + 1] for name, x in given.items()}) for i in range(len(values_TK))]
    # vector code of some functions rounds otherwise
    if together.shape != log_probs_T.shape or not torch.allclose(together, torch.cat([together[:0], *alone]), equal_nan=True):
        raise ValueError(
            f"the loss of a token differs if it is computed alone, but plans compute it beside any others (it returned shape "
            f"{tuple(together.shape)} for {len(log_probs_T)} tokens); return one loss per token, without sums over tokens, "
            f"or use forward_backward"
        )

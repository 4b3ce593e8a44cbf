"""Stops before an optimizer step whose loss or gradients are NaN or infinite, and says where they arose; or leaves it out.

`LongContextMixin.training_step` hands every plan of a step to `NonfiniteGuard`. Everything here is the same on every rank,
because loss and flag of a step are sums over all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_longctx.hf.checkpoints.manifest import read_record
from hf_longctx.hf.data.collator import PlannedStep
from hf_longctx.hf.data.sampler import IntArray
from hf_longctx.hf.models.adapters import is_adapted
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.run.run import Run
from hf_longctx.hf.start.losses import loss_name
from hf_longctx.plan.core.messages import listed
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.runtime.execution.stage_model import LAYER_RANGE_KEYWORD
from hf_longctx.runtime.parameters.gradients import nonfinite_names

# file of a saved step, and the folder beside it that holds the model
STEP_FILE, MODEL_FOLDER = "step.json", "model"
# (layer range of the stage, stage, call): the order in which a token passes modules
ModelOrder = tuple[int, int, int]
# token ids, shifted labels, and their weights or nothing
_Tokens = tuple[list[int], list[int], list[float]]


@dataclass(frozen=True)
class _Plan:
    """A plan of the present step with this rank's inputs."""

    step: PlannedStep
    chunks: Sequence[Sequence[ChunkInputs]]
    engine: ActivationEngine | None


@dataclass
class _Mean:
    """The mean of numbers that are added one by one; NaN without any."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Adds a number."""
        self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count if self.count else math.nan


class NonfiniteGuard:
    """Checks every optimizer step of a run before its update.

    was_skipped: whether the present step was left out.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.was_skipped = False
        self._plans: list[_Plan] = []
        self._loss: Tensor | None = None
        # sums and numbers of the losses that were used, since the last log and in all, where steps may be left out
        self._since_log, self._in_all = _Mean(), _Mean()
        self._num_skipped_since_log, self._num_skipped_here = 0, 0
        run.recorder.num_skipped = 0

    def count_on_from(self, folder: str | None) -> None:
        """Goes on counting where the training that wrote this checkpoint was."""
        try:
            record = (read_record(Path(folder)) if folder else None) or {}
        except ValueError:
            # named when the checkpoint was chosen
            record = {}
        before = record.get("skipped_steps", 0)
        self.run.recorder.num_skipped = before if isinstance(before, int) else 0

    @property
    def num_skipped(self) -> int:
        """Steps that were left out so far, also by trainings that this one goes on with."""
        return self.run.recorder.num_skipped

    def begin(self) -> None:
        """Forgets the plans of a step that did not end."""
        self._plans, self._loss, self.was_skipped = [], None, False

    def plan_done(
        self,
        step: PlannedStep,
        chunks: Sequence[Sequence[ChunkInputs]],
        engine: ActivationEngine | None,
        result: StepResult,
        ends: bool,
    ) -> bool:
        """Takes a finished plan; at the step's last one (`ends`) returns false if the step cannot be used. Collective then."""
        self._plans.append(_Plan(step, chunks, engine))
        self._loss = result.loss if self._loss is None else self._loss + result.loss
        if not ends:
            return True
        is_good = result.is_finite and math.isfinite(self.loss)
        if is_good:
            if self.run.config.on_nonfinite == "skip":
                self._since_log.add(self.loss)
                self._in_all.add(self.loss)
            self.begin()
        return is_good

    def skip(self, model: nn.Module) -> None:
        """Leaves the present step out: no parameter keeps a gradient, so no optimizer moves it."""
        model.zero_grad(set_to_none=True)
        self.run.recorder.num_skipped += 1
        self._num_skipped_here += 1
        self._num_skipped_since_log += 1
        self.begin()
        self.was_skipped = True

    def counted(self, loss: Tensor) -> Tensor:
        """The loss of a plan as `Trainer` may add it up: zero for a step that is left out, since a sum would stay NaN."""
        return torch.zeros_like(loss) if self.was_skipped else torch.nan_to_num(loss, posinf=0.0, neginf=0.0)

    def metrics(self) -> dict[str, float]:
        """The mean loss of the steps since the last call that were used, and the count of skipped ones; empty if none was."""
        mean, self._since_log = self._since_log, _Mean()
        num_skipped, self._num_skipped_since_log = self._num_skipped_since_log, 0
        if not self.num_skipped:
            return {}
        return {"skipped_steps": self.num_skipped, **({"loss": mean.value} if num_skipped else {})}

    def total_metrics(self) -> dict[str, float]:
        """The mean loss of all steps that this training used, and the count of skipped ones; empty if none was skipped."""
        if not self.num_skipped:
            return {}
        return {"skipped_steps": self.num_skipped, **({"train_loss": self._in_all.value} if self._num_skipped_here else {})}

    def explain(self, executor: StepExecutor, number: int, rows: IntArray | None) -> str:
        """Says which sequences, module and weights of step `number` are concerned. Collective: runs its forwards once more.

        rows: the dataset's row of every sequence; None for a stream, whose rows have no numbers.
        """
        weights = nonfinite_names(executor.model)
        gradients = nonfinite_names(executor.model, of_gradients=True)
        module = self._first_module(executor)
        everyone = gather_objects((weights, module, gradients), self.run.control)
        has_overflow = math.isfinite(self.loss) and not any(any(each) for each in everyone)
        what = "but the norm of the gradients overflows" if has_overflow else "but gradients are not finite"
        what = what if math.isfinite(self.loss) else "which is not finite"
        lines = [f"step {number}: the loss is {self.loss:g}, {what}, so no weight was changed"]
        for each in self._plans:
            lengths = each.step.plan.lengths
            named = [f"{length} tokens" for length in lengths]
            if rows is not None:
                named = [f"row {rows[i]} ({length} tokens)" for i, length in zip(each.step.sequences, lengths, strict=True)]
            lines.append(f"plan {each.step.plan.layout} of {listed(named)}")
        bad_weights = list(dict.fromkeys(name for names, *_ in everyone for name in names))
        if bad_weights:
            lines.append(f"weights that are not finite: {listed(bad_weights)}")
        found = [
            (order, name, place) for place, (_, where, _) in enumerate(everyone) if where is not None for order, name in [where]
        ]
        if found:
            _, name, place = min(found)
            lines.append(f"first output that is not finite: {name}, on rank {place}")
        elif has_overflow:
            lines.append(
                "all outputs and gradients are finite, but clipping by an infinite norm would set every gradient to zero, and "
                "Adam would keep infinite squares"
            )
        elif not bad_weights:
            names = list(dict.fromkeys(name for *_, names in everyone for name in names))
            lines.append(
                f"all outputs of a forward are finite, but there are gradients that are not: {listed(list(reversed(names)))}"
            )
        return "\n".join(lines)

    def save(self, folder: Path, number: int) -> None:
        """Writes the plans and tokens of the present step to `folder`; rank 0 writes. Collective."""
        parts = gather_objects([_held_tokens(each) for each in self._plans], self.run.control)
        if self.run.pool.rank:
            return
        plans = []
        for place, each in enumerate(self._plans):
            tokens: dict[int, dict[int, _Tokens]] = {}
            for rank_parts in parts:
                for (sequence, start), values in rank_parts[place].items():
                    tokens.setdefault(sequence, {})[start] = values
            sequences = []
            for sequence in range(len(each.step.plan.lengths)):
                pieces = [tokens[sequence][start] for start in sorted(tokens[sequence])]
                ids, labels, weights = ([token for piece in pieces for token in piece[side]] for side in (0, 1, 2))
                saved = {"input_ids": ids, "shift_labels": labels}
                sequences.append({**saved, "loss_weights": weights} if weights else saved)
            plans.append({"plan": json.loads(plan_to_json(each.step.plan)), "sequences": sequences})
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": 1, "step": number, "loss": str(self.loss), "bf16": bool(self.run.args.bf16), "plans": plans}
        content["loss_of_a_token"] = loss_name(self.run.token_loss)
        content["head"] = self.run.task.kind
        if is_adapted(self.run.stage.model):
            content["adapters"] = [str(name) for name in cast(Any, self.run.stage.model).active_adapters]
        if (dropout := self.run.dropout) is not None:
            content["dropout"] = {"seed": dropout.seed, "step": dropout.step}
        (folder / STEP_FILE).write_text(json.dumps(content))

    @property
    def loss(self) -> float:
        """Loss of the present step."""
        return math.nan if self._loss is None else float(self._loss)

    def _first_module(self, executor: StepExecutor) -> tuple[ModelOrder, str] | None:
        """(order, name) of the first module of this rank whose output is not finite in the step's forwards; None if all are."""
        found: list[tuple[ModelOrder, str]] = []
        with watched(executor.model, executor.stage.stage, found):
            for each in self._plans:
                executor.evaluate(each.step.plan.for_rank(self.run.pool.rank), each.chunks, each.engine)
        return min(found) if found else None


@contextmanager
def watched(model: nn.Module, stage: int, found: list[tuple[ModelOrder, str]]) -> Iterator[None]:
    """Context that adds to `found`, in model order, the first module of each layer range with an output that is not finite."""
    num_calls, layer_range = 0, 0
    seen: set[int] = set()

    def begin(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        nonlocal layer_range
        layer_range = keywords.get(LAYER_RANGE_KEYWORD) or 0

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            floats = [x for x in (output if isinstance(output, tuple | list) else [output]) if isinstance(x, Tensor)]
            if layer_range not in seen and not all(torch.isfinite(x).all() for x in floats if x.is_floating_point()):
                seen.add(layer_range)
                found.append(((layer_range, stage, num_calls), name or type(module).__name__))

        return hook

    handles = [model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)]
    handles += [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _held_tokens(each: _Plan) -> dict[tuple[int, int], _Tokens]:
    """Token ids, shifted labels and their weights, if any, of this rank's pieces of a plan, by (sequence, first token)."""
    step = each.step
    _, position = step.plan.place(step.rank)
    held: dict[tuple[int, int], _Tokens] = {}
    for (group, _), chunks in zip(step.plan.for_rank(step.rank).rounds, each.chunks, strict=True):
        for chunk, inputs in zip(group.chunks, chunks, strict=True):
            offset = 0
            for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]:
                stop = offset + piece.num_tokens
                if piece.document < len(chunk.spans):
                    span = chunk.spans[piece.document]
                    ids, labels = (t[0, offset:stop].tolist() for t in (inputs.input_ids, inputs.shift_labels))
                    weights = [] if inputs.loss_weights is None else inputs.loss_weights[0, offset:stop].tolist()
                    held[span.sequence, span.start + piece.start] = ids, labels, weights
                offset = stop
    return held

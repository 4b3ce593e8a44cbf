"""Explains an optimizer step whose loss or gradients are NaN or infinite: where they arose, and how to run the step again.

`StepRunner` calls it before an optimizer could use them. Everything here is the same on every rank, because loss and flag of a
step are sums over all ranks.
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
from hf_longctx.runtime.core.loss import IGNORE_INDEX, LossOfLogProbs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import LAYER_RANGE_KEYWORD
from hf_longctx.runtime.parameters.gradients import nonfinite_names

# file of a saved step, and the folder beside it that holds the model
STEP_FILE, MODEL_FOLDER = "step.json", "model"
# (layer range of the stage, stage, call): the order in which a token passes modules
ModelOrder = tuple[int, int, int]
# token ids, shifted labels, and their weights or nothing
_Tokens = tuple[list[int], list[int], list[float]]


@dataclass(frozen=True)
class PlanWithInputs:
    """A plan of an optimizer step with this rank's inputs."""

    step: PlannedStep
    chunks: Sequence[Sequence[ChunkInputs]]
    engine: ActivationEngine | None


@dataclass(frozen=True)
class RefusedStep:
    """An optimizer step that cannot be used, before its gradients are dropped. All methods are collective over all ranks."""

    run: Run
    # number of the step, its plans with this rank's inputs, and its loss
    number: int
    plans: Sequence[PlanWithInputs]
    loss: float

    def explain(self, executor: StepExecutor, rows: IntArray | None) -> str:
        """Says which sequences, module and weights are concerned. Runs the step's forwards once more.

        rows: the dataset's row of every sequence; None for a stream, whose rows have no numbers.
        """
        weights = nonfinite_names(executor.model)
        gradients = nonfinite_names(executor.model, of_gradients=True)
        module = self._first_module(executor)
        everyone = gather_objects((weights, module, gradients), self.run.control)
        has_overflow = math.isfinite(self.loss) and not any(any(each) for each in everyone)
        what = "but the norm of the gradients overflows" if has_overflow else "but gradients are not finite"
        what = what if math.isfinite(self.loss) else "which is not finite"
        lines = [f"step {self.number}: the loss is {self.loss:g}, {what}, so no weight was changed"]
        for each in self.plans:
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

    def save(self, folder: Path) -> None:
        """Writes the step's plans and tokens to `folder`; rank 0 writes."""
        is_next_token = self.run.task.kind == "next_token"
        parts = gather_objects([_held_tokens(each, is_next_token) for each in self.plans], self.run.control)
        if self.run.pool.rank:
            return
        plans = []
        for place, each in enumerate(self.plans):
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
        content = {"format": 1, "step": self.number, "loss": str(self.loss), "bf16": bool(self.run.args.bf16), "plans": plans}
        has_values = any(inputs.label_values is not None for each in self.plans for chunks in each.chunks for inputs in chunks)
        content["loss_of_a_token"] = LossOfLogProbs.name if is_next_token and has_values else loss_name(self.run.token_loss)
        content["head"] = self.run.task.kind
        # pixels are not saved
        content["has_media"] = self.run.sets.has_media("train_dataset")
        if is_adapted(self.run.stage.model):
            content["adapters"] = [str(name) for name in cast(Any, self.run.stage.model).active_adapters]
        if (dropout := self.run.dropout) is not None:
            content["dropout"] = {"seed": dropout.seed, "step": dropout.step}
        (folder / STEP_FILE).write_text(json.dumps(content))

    def _first_module(self, executor: StepExecutor) -> tuple[ModelOrder, str] | None:
        """(order, name) of the first module of this rank whose output is not finite in the step's forwards; None if all are."""
        found: list[tuple[ModelOrder, str]] = []
        with watched(executor.model, executor.stage.stage, found):
            for each in self.plans:
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


def _held_tokens(each: PlanWithInputs, is_next_token: bool) -> dict[tuple[int, int], _Tokens]:
    """Token ids, shifted labels and their weights, if any, of this rank's pieces of a plan, by (sequence, first token).

    is_next_token: values of a label begin with the label itself, as in `LossOfLogProbs`.
    """
    step = each.step
    _, position = step.plan.place(step.rank)
    held: dict[tuple[int, int], _Tokens] = {}
    for (group, _), chunks in zip(step.plan.for_rank(step.rank).rounds, each.chunks, strict=True):
        for chunk, inputs in zip(group.chunks, chunks, strict=True):
            labels_1T, values_NK = inputs.shift_labels, inputs.label_values
            if is_next_token and values_NK is not None:
                rows_1T = labels_1T.where(labels_1T != IGNORE_INDEX, 0)
                labels_1T = values_NK[rows_1T, 0].long().where(labels_1T != IGNORE_INDEX, IGNORE_INDEX)
            offset = 0
            for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]:
                stop = offset + piece.num_tokens
                if piece.document < len(chunk.spans):
                    span = chunk.spans[piece.document]
                    ids, labels = (t[0, offset:stop].tolist() for t in (inputs.input_ids, labels_1T))
                    weights = [] if inputs.loss_weights is None else inputs.loss_weights[0, offset:stop].tolist()
                    held[span.sequence, span.start + piece.start] = ids, labels, weights
                offset = stop
    return held

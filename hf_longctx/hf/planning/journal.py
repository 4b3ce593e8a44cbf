"""Writes the journal of a run on rank 0: one line per plan, log and training, for the page of `hf-longctx report`."""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from hf_longctx._version import __version__
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.planning.step_record import StepRecord
from hf_longctx.journal import Line, append_lines
from hf_longctx.plan.core.types import PASSES, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel, training_operations
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.timeline import TimelineEvent

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "flash-attn", "flash-linear-attention", "triton")


class RunJournal:
    """Appends to the journal in the output folder, on the rank that writes it; methods do nothing on others.

    If it cannot be written, it ends with one warning, and training continues.
    """

    def __init__(self, config: LongContextConfig, source: PlanSource) -> None:
        self.config, self.source = config, source
        self._training = _new_name()
        self._is_running = self._has_trained = False
        self._begun_s = time.time()
        self._step_begun_s = 0.0
        self._waited_s = 0.0
        self._is_broken = False

    def begin(self, args: TrainingArguments, state: TrainerState, model: Any, opening: str) -> None:
        """Writes machine and settings of a training, once, before its first step."""
        if self._has_trained:
            self._training = _new_name()
        self._is_running = self._has_trained = True
        self._begun_s, self._waited_s = time.time(), self.source.waited_s
        if self._writes(args, state):
            self._write(args, [self._line("start", state.global_step, **self._facts(args, model, opening))])

    def step_begins(self) -> None:
        """Starts the clock of an optimizer step, whose plans are now known."""
        self._step_begun_s = time.perf_counter()

    def step_ends(self, args: TrainingArguments, state: TrainerState, records: Sequence[StepRecord], num_labels: int) -> float:
        """Writes a line for every plan of an optimizer step; num_labels: label tokens of the step, each counted once.

        Returns the seconds of the step, including waits for its plans; 0 without `step_begins`.
        """
        waited_s, self._waited_s = self.source.waited_s - self._waited_s, self.source.waited_s
        begun_s, self._step_begun_s = self._step_begun_s, 0.0
        # losses were read from the device, so its work is finished
        wall_s = time.perf_counter() - begun_s + waited_s if begun_s else 0.0
        if not records or not self._writes(args, state):
            return wall_s
        lines = [self._line("step", state.global_step, **_step_facts(record, self.source.costs)) for record in records]
        lines[-1] |= {
            "labels": num_labels,
            "wall_s": wall_s,
            "plan_wait_s": waited_s,
            "elapsed_s": time.time() - self._begun_s,
        }
        self._write(args, lines)
        return wall_s

    def logs(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Writes the numbers that the trainer logged."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if numbers and self._writes(args, state):
            self._write(args, [self._line("log", state.global_step, logs=numbers)])

    def end(
        self, args: TrainingArguments, state: TrainerState, panels: Mapping[str, Sequence[TimelineEvent]], steps: Sequence[int]
    ) -> None:
        """Writes the end of the training, with timelines of the optimizer steps `steps`."""
        was_running, self._is_running = self._is_running, False
        if was_running and self._writes(args, state):
            drawn = {name: [_event(event) for event in events] for name, events in panels.items()}
            elapsed_s = time.time() - self._begun_s
            self._write(
                args, [self._line("end", state.global_step, elapsed_s=elapsed_s, timeline={"steps": steps, "panels": drawn})]
            )

    def _writes(self, args: TrainingArguments | None, state: TrainerState) -> bool:
        has_folder = args is not None and args.output_dir is not None
        return has_folder and state.is_world_process_zero and not self._is_broken

    def _line(self, kind: str, step: int, **facts: Any) -> Line:
        return {"kind": kind, "training": self._training, "step": step, **facts}

    def _write(self, args: TrainingArguments, lines: list[Line]) -> None:
        try:
            append_lines(Path(args.output_dir or "."), lines)
        except (OSError, ValueError) as error:
            self._is_broken = True
            logger.warning("the journal in %s ends here, so a report lacks later steps: %s", args.output_dir, error)

    def _facts(self, args: TrainingArguments, model: Any, opening: str) -> dict[str, Any]:
        spec, cluster = self.source.costs.model, self.source.costs.cluster
        is_cuda = args.device.type == "cuda"
        return {
            "time": time.time(),
            "versions": {"python": platform.python_version(), "hf_longctx": __version__, **_versions(), "cuda": _cuda()},
            "machine": {
                "host": socket.gethostname(),
                "system": platform.platform(),
                "device": torch.cuda.get_device_name(args.device) if is_cuda else f"CPU {platform.machine()}",
                "device_type": args.device.type,
                "ranks": cluster.num_ranks,
                "ranks_per_node": cluster.ranks_per_node,
                "device_bytes": cluster.hardware.device_bytes,
                "cores": len(os.sched_getaffinity(0)),
                "threads_per_rank": torch.get_num_threads(),
                "command": sys.argv,
            },
            "model": {
                "class": type(model).__name__,
                "parameters": spec.num_parameters,
                "layers": spec.num_layers,
                "hidden_size": spec.hidden_size,
                "precision": "bf16 autocast" if args.bf16 else str(getattr(model, "dtype", "")).removeprefix("torch."),
            },
            "opening": opening,
            "settings": asdict(self.config),
            "changed": [each.name for each in fields(self.config) if getattr(self.config, each.name) != each.default],
            "arguments": args.to_dict(),
        }


def _step_facts(record: StepRecord, costs: CostModel) -> dict[str, Any]:
    plan, estimate = record.plan, record.plan.estimate
    seconds = {
        name: sum(interval.stop_s - interval.start_s for interval in record.intervals if interval.kind in kinds)
        for name, kinds in (("compute", PASSES), ("reduce", ("reduce",)), ("messages", ("SF", "RF", "SB", "RB")))
    }
    is_predicted = record.error is not None
    return {
        "place": record.place,
        "count": record.count,
        "loss": record.loss,
        "measured_s": record.measured_s,
        "predicted_s": estimate.step_s if is_predicted else None,
        "bound_s": estimate.lower_bound_s if is_predicted and record.gap is not None else None,
        "tokens": record.num_tokens,
        "operations": training_operations(plan.lengths, costs.model),
        "padding_share": record.padding_share,
        "micro_batches": len(plan.micro_batches),
        "layout": plan.folded_layout,
        "group_tokens": _group_tokens(plan),
        "lengths": _length_counts(plan.lengths),
        "sequences": list(plan.lengths),
        "solver": estimate.solver,
        "solve_s": estimate.solve_s,
        "seconds": seconds,
        "bytes": asdict(record.memory),
        "predicted_bytes": asdict(record.predicted_memory),
        "idle_share": record.idle_share,
        "predicted_idle": record.predicted_idle,
        "rank_seconds": _rank_seconds(plan, costs),
    }


def _rank_seconds(plan: StepPlan, costs: CostModel) -> dict[str, float] | None:
    """Returns predicted seconds of all ranks together, and of copies that nothing hides; None while costs are guesses."""
    if not costs.coefficients.is_measured:
        return None
    # some lent stages cannot be predicted
    with suppress(ValueError):
        run = evaluate_plan(plan, costs, with_events=False)
        found = {name: sum(getattr(rank, f"{name}_s") for rank in run.ranks) for name in ("compute", "exchange", "idle")}
        found["copies"] = 0.0
        if any(run.host_bytes):
            hardware = replace(costs.cluster.hardware, copy_bytes_per_s=1e30)
            free = replace(costs, cluster=replace(costs.cluster, hardware=hardware))
            shown_s = run.step_s - evaluate_plan(plan, free, with_events=False).step_s
            # copies of the slowest rank, for which all others wait
            found["copies"] = max(0.0, shown_s) * plan.num_ranks
            found["compute"] = max(0.0, found["compute"] - found["copies"])
        return found
    return None


def _group_tokens(plan: StepPlan) -> dict[int, int]:
    """Counts tokens that run in groups of each degree."""
    tokens: Counter[int] = Counter()
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            tokens[group.degree] += group.num_tokens
    return dict(sorted(tokens.items()))


def _length_counts(lengths: Iterable[int]) -> dict[int, int]:
    """Counts sequences by length class: class n has lengths from 2^(n / 2) to 2^((n + 1) / 2), without the end."""
    counts = Counter(math.floor(2 * math.log2(length)) for length in lengths if length > 0)
    return dict(sorted(counts.items()))


def _event(event: TimelineEvent) -> list[Any]:
    return [event.rank, event.kind, event.name, round(event.start_s, 6), round(event.stop_s, 6), event.detail]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cuda() -> str:
    return torch.version.cuda or "none"


def _new_name() -> str:
    return f"{time.time_ns():x}"

"""Says when a training begins how long it will take and what it writes where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainingArguments

from hf_longctx.hf.planning.source import PlanSource, quick
from hf_longctx.journal import JOURNAL
from hf_longctx.plan.core.messages import duration
from hf_longctx.plan.planner import plan_step

# sequences of the step that is planned to predict an epoch: more would take seconds
_MOST_SEQUENCES = 512


def outlook(source: PlanSource, args: TrainingArguments, loader: Any, timeline_steps: int, has_journal: bool = True) -> list[str]:
    """Two lines: steps of the training and predicted seconds of an epoch; the output folder and what comes into it."""
    return [_steps(source, args, loader), _files(args, timeline_steps, has_journal)]


def typical_step_s(source: PlanSource, lengths: Sequence[int], num_steps: int) -> float:
    """Predicted seconds of a step whose sequences are spread evenly over `lengths`; 0 for one that cannot be planned."""
    count = max(1, round(len(lengths) / num_steps))
    planned = min(count, _MOST_SEQUENCES)
    places = ((np.arange(planned) + 0.5) * len(lengths) / planned).astype(int)
    typical = np.sort(np.asarray(lengths))[places].tolist()
    config = quick(source.config)
    try:
        return plan_step(0, typical, source.costs, config).estimate.step_s * count / planned
    except ValueError:
        # the error comes with the step itself
        return 0.0


def _steps(source: PlanSource, args: TrainingArguments, loader: Any) -> str:
    lengths = getattr(getattr(getattr(loader, "dataset", None), "index", None), "lengths", None)
    try:
        num_plans = len(loader)
    except TypeError:
        # a stream
        return f"training: {args.max_steps:,} steps" if args.max_steps > 0 else f"training: {args.num_train_epochs:g} epochs"
    per_epoch = max(1, num_plans // args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    line = f"training: {steps:,} steps; an epoch has {per_epoch:,}"
    if lengths is None or not len(lengths):
        # batches are planned as they come
        return line
    seconds = num_plans * typical_step_s(source, lengths, num_plans)
    if not seconds:
        return line
    how = "predicted" if source.costs.coefficients.is_measured else "a guess from rated speeds; the first steps are measured"
    return f"{line}, which take about {duration(seconds)} ({how})"


def _files(args: TrainingArguments, timeline_steps: int, has_journal: bool) -> str:
    folder = Path(str(args.output_dir))
    how = {"no": "no checkpoints before the end", "steps": f"a checkpoint every {args.save_steps:g} steps"}
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    saved = how.get(strategy, f"checkpoints ({strategy})")
    timeline = ", the timeline of the last steps" if timeline_steps else ""
    journal = f", {JOURNAL} (hf-longctx report {folder} makes a page of it)" if has_journal else ""
    return f"written to {folder}: {saved}{timeline}{journal}"

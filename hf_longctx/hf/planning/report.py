"""Reports on a run: its outlook at the start, one line per log, metrics, samples for the cost model, and timeline files.

The line of a log describes the steps since the last one, by means or sums.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.planning.console import Console
from hf_longctx.hf.planning.journal import RunJournal
from hf_longctx.hf.planning.refit import CostRefit
from hf_longctx.hf.planning.source import PlanSource, quick
from hf_longctx.hf.planning.step_record import StepRecord, padding_share, predicted_idle, predicted_memory
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.journal import JOURNAL
from hf_longctx.plan.core.messages import counted, duration
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.fitting import Residuals
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.timeline import TimelineEvent, chrome_trace, save_png_timeline

# most sequences of the step that is planned to predict an epoch: more would take seconds
_MOST_SEQUENCES = 512


def outlook(source: PlanSource, args: TrainingArguments, loader: Any, timeline_steps: int, has_journal: bool = True) -> list[str]:
    """Makes two lines: steps of the training and predicted seconds of an epoch; the output folder and its contents."""
    return [_steps(source, args, loader), _files(args, timeline_steps, has_journal)]


def typical_step_s(source: PlanSource, lengths: Sequence[int], num_steps: int) -> float:
    """Predicts seconds of a step with sequences spread evenly over `lengths`; 0 if it cannot be planned."""
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


# least share of a step's seconds outside its plans (optimizer, clipping, waits for plans) with which both are shown
_TOLD_OUTSIDE = 0.05


def record_parts(records: Sequence[StepRecord], wall_s: float) -> list[str]:
    """Makes the parts of the line about steps with these records; none without records.

    wall_s: seconds of all these steps from begin to end, including the optimizer; 0 if not measured.
    """
    if not records:
        return []
    plans, num_steps = [record.plan for record in records], sum(record.ends_step for record in records)
    plans_s = sum(record.measured_s for record in records)
    parts = [seconds_part(wall_s or plans_s, num_steps, _compared(records, wall_s, num_steps))]
    parts.append(speed_part(plans, wall_s or plans_s))
    return [*parts, *plan_parts(plans, num_steps), *_quality(records), *_idle(records), *_bytes(records)]


def seconds_part(seconds: float, num_steps: int, beside: str = "") -> str:
    """Formats seconds of a step, as a mean over `num_steps`."""
    each = " a step" if num_steps > 1 else ""
    return f"{duration(seconds / num_steps):>7}{each}{beside}"


def speed_part(plans: Sequence[StepPlan], seconds: float) -> str:
    """Formats tokens per second of all ranks, without dummies."""
    return f"{sum(sum(plan.lengths) for plan in plans) / seconds:7,.0f} tokens/s"


def plan_parts(plans: Sequence[StepPlan], num_steps: int) -> list[str]:
    """Formats padding and micro-batches of a step, and the layout of a single plan."""
    count = sum(len(plan.micro_batches) for plan in plans) / num_steps
    micro_batches = f"{count:.3g} micro-batch{'' if count == 1 else 'es'}{' a step' if num_steps > 1 else ''}"
    if plans[0].num_ranks == 1:
        # a single rank has neither padding nor groups
        return [] if count == 1 else [micro_batches]
    layout = f" {plans[0].folded_layout}" if len(plans) == 1 else ""
    return [f"padding {mean_padding(plans):4.1%}", micro_batches + layout]


def mean_padding(plans: Sequence[StepPlan]) -> float:
    """Returns the share of dummy tokens among all tokens of these plans."""
    num_tokens = [sum(plan.lengths) for plan in plans]
    run = sum(count / (1 - padding_share(plan)) for count, plan in zip(num_tokens, plans, strict=True))
    return 1 - sum(num_tokens) / run if run else 0.0


def mean_gap(records: Sequence[StepRecord]) -> float | None:
    """Returns predicted seconds of all plans above the sum of their bounds, as a share of it; None if one has no bound."""
    if any(record.gap is None for record in records):
        return None
    estimates = [record.plan.estimate for record in records]
    return sum(each.counted_s for each in estimates) / sum(each.lower_bound_s for each in estimates) - 1


def _compared(records: Sequence[StepRecord], wall_s: float, num_steps: int) -> str:
    """Formats predicted seconds of the plans, and measured ones if they are not nearly the whole step."""
    plans_s, told = sum(record.measured_s for record in records), []
    if wall_s - plans_s > _TOLD_OUTSIDE * wall_s:
        told.append(f"plan {duration(plans_s / num_steps)}")
    if all(record.error is not None for record in records):
        told.append(f"predicted {duration(sum(record.plan.estimate.step_s for record in records) / num_steps)}")
    return f" ({', '.join(told)})" if told else ""


def _quality(records: Sequence[StepRecord]) -> list[str]:
    """Formats the distance of plans from the optimum."""
    gap = mean_gap(records)
    return [] if gap is None else [f"within {gap:.1%} of optimal"]


def _idle(records: Sequence[StepRecord]) -> list[str]:
    """Formats the share of time that the first of several stages waits."""
    measured = [record.idle_share for record in records if record.idle_share is not None]
    if len(measured) < len(records):
        return []
    predicted = [record.predicted_idle for record in records if record.predicted_idle is not None]
    before = f"{mean(predicted):.1%} predicted, " if len(predicted) == len(records) else ""
    return [f"first stage idle {before}{mean(measured):.1%} measured"]


def _bytes(records: Sequence[StepRecord]) -> list[str]:
    """Formats predicted and measured memory of the plan that took most of it.

    On CUDA this is device memory; elsewhere saved activations and K/V book, if there are any.
    """
    fullest = max(records, key=lambda record: (record.memory.device_peak, record.memory.saved + record.memory.kv_book))
    now, then = fullest.memory, fullest.predicted_memory
    if now.device_peak:
        text = f"memory {then.device_peak / 2**30:.2f} GiB predicted, {now.device_peak / 2**30:.2f} GiB measured"
    elif now.saved or now.kv_book:
        predicted, measured = then.saved + then.kv_book, now.saved + now.kv_book
        text = f"held {predicted / 2**20:,.1f} MiB predicted, {measured / 2**20:,.1f} MiB measured"
    else:
        return []
    return [text + (f", {now.host / 2**20:,.1f} MiB of {then.host / 2**20:,.1f} on the host" if then.host else "")]


class RunReport(TrainerCallback):
    """Callback for finished steps: prints them, keeps the cost model fitted, writes summary and timeline at the end.

    opening: text that is printed once, when the first training begins or earlier by `open`; its first two lines describe plans
    and memory. `on_step_end` and `on_train_end` are collective on the control group, so every rank needs this callback.
    """

    def __init__(self, config: LongContextConfig, source: PlanSource, opening: str = "") -> None:
        self.config, self.source, self.opening = config, source, opening
        self.console, self._has_opened = Console(config.report_steps), False
        self._pending: list[tuple[StepPlan, StepResult]] = []
        self._last: deque[StepRecord] = deque(maxlen=max(1, config.timeline_steps))
        # bounded, for runs that never log
        self._since_log: deque[StepRecord] = deque(maxlen=1000)
        # seconds of these steps, including the optimizer, and their parts of the next log's line
        self._wall_s, self._parts = 0.0, list[str]()
        # relative errors of all predictions, for the summary
        self._errors: deque[float] = deque(maxlen=10_000)
        # tokens of all plans that have run
        self._num_tokens = 0
        self._refit = CostRefit(source, config.calibration_steps if source.is_timed else 0)
        self._journal = RunJournal(config, source)
        # label tokens of the current optimizer step over all ranks, each counted once
        self.num_labels = 0

    def open(self, args: TrainingArguments, train_loader: Any, writes_files: bool = True) -> None:
        """Prints the run's opening on rank 0, once; a script that evaluates before it trains calls it first.

        writes_files: journal and timeline will be written, since this callback gets the training's events.
        """
        if self._has_opened or not self.config.report_steps or self.source.pool.rank or not self.opening:
            return
        self._has_opened = True
        # indented lines are details for the journal
        lines = [line for line in self.opening.splitlines() if not line.startswith("  ")]
        timeline_steps = self.config.timeline_steps if writes_files else 0
        ahead = outlook(self.source, args, train_loader, timeline_steps, writes_files)
        self.console.say("\n".join([*lines[:2], *ahead, *lines[2:]]))

    def step_done(self, plan: StepPlan, result: StepResult) -> None:
        """Takes a finished plan from the trainer; its results are read at the end of the step, so that no work is delayed."""
        self._pending.append((plan, result))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # a training that stopped inside a step may have left plans here
        self._pending = []
        self._journal.begin(args, state, kwargs.get("model"), self.opening)
        self.open(args, kwargs.get("train_dataloader"))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._journal.step_begins()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._journal.logs(args, state, logs or {})
        if state.is_world_process_zero:
            self.console.logs(state.global_step, logs or {}, self._parts)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        pending, self._pending = self._pending, []
        loss = sum(float(result.loss) for _, result in pending)
        records = []
        for place, (plan, result) in enumerate(pending):
            if place < len(pending) - 1:
                plan = _without_reduction(plan, self.source.costs)
            rank, model = self.source.pool.rank, self.source.costs.model
            memory = result.memory, predicted_memory(plan, rank, model)
            idle = predicted_idle(plan, rank, self.source.costs)
            aux_loss, router_load = (None if value is None else float(value) for value in (result.aux_loss, result.router_load))
            tallied = tuple(float(each) for each in result.tallied)
            intervals = tuple(result.intervals())
            record = StepRecord(plan, rank, loss, intervals, place, len(pending), *memory, idle, aux_loss, router_load, tallied)
            records.append(record)
            self._last.append(record)
            self._since_log.append(record)
            self._num_tokens += record.num_tokens
            if record.error is not None:
                self._errors.append(record.error)
            self.say(self._refit.add(record.measured(self.source.costs), record.ends_step))
        self._wall_s += self._journal.step_ends(args, state, records, self.num_labels)

    def say(self, line: str) -> None:
        """Prints a line between those of logs, on one rank; nothing for an empty line."""
        if line and self.config.report_steps and self.source.pool.rank == 0:
            self.console.say(line)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._errors:
            self.say(self._summary())
        panels: dict[str, list[TimelineEvent]] = {}
        steps: list[int] = []
        if self.config.timeline_steps and self._last:
            measured = gather_objects([record.events() for record in self._last], self.source.pool.control)
            if state.is_world_process_zero and args.output_dir is not None:
                first = state.global_step - sum(record.ends_step for record in self._last) + 1
                steps = [first, state.global_step]
                panels = self._write_timeline(Path(args.output_dir), measured, first, state.global_step)
        self._journal.end(args, state, panels, steps)

    def take_metrics(self) -> dict[str, float]:
        """Returns means over the steps since the last call, for the trainer's log; empty if no step ran.

        Numbers of replaced plans count from the start of the run.
        """
        records, wall_s = list(self._since_log), self._wall_s
        self._since_log.clear()
        # seconds count only if the records of all their steps were kept
        self._wall_s, is_whole = 0.0, len(records) < (self._since_log.maxlen or 0)
        self._parts = record_parts(records, wall_s if is_whole else 0.0)
        if not records:
            return {}
        measured_s = sum(record.measured_s for record in records)
        num_steps = sum(record.ends_step for record in records)
        metrics = {
            "tokens_per_s": sum(record.num_tokens for record in records) / measured_s,
            "measured_step_s": measured_s / num_steps,
            "padding_share": mean_padding([record.plan for record in records]),
            "micro_batches": sum(len(record.plan.micro_batches) for record in records) / num_steps,
            "planning_s": sum(record.plan.estimate.solve_s for record in records) / num_steps,
        }
        for name, values in (
            ("idle_share", [record.idle_share for record in records]),
            ("predicted_idle_share", [record.predicted_idle for record in records]),
        ):
            if None not in values:
                metrics[name] = mean(value for value in values if value is not None)
        for name in ("aux_loss", "router_load"):
            if found := [getattr(record, name) for record in records if getattr(record, name) is not None]:
                metrics[name] = mean(found)
        metrics |= self._token_metrics(records)
        errors = [abs(record.error) for record in records if record.error is not None]
        if len(errors) == len(records):
            metrics["predicted_step_s"] = sum(record.plan.estimate.step_s for record in records) / num_steps
            if (gap := mean_gap(records)) is not None:
                metrics["plan_gap"] = gap
        if errors:
            metrics["prediction_error"] = median(errors)
        return metrics

    def _token_metrics(self, records: Sequence[StepRecord]) -> dict[str, float]:
        """Returns means of the token means of all plans with label tokens, and the run's tokens so far, as logged by TRL."""
        if not (counted := [record.tallied for record in records if record.tallied]):
            return {}
        # entropies that are not finite come from a skipped step
        sums = [each for each in counted if each[0] and isfinite(each[2])]
        means = [(num_right / num_labels, entropy / num_labels) for num_labels, num_right, entropy in sums]
        named = zip(("mean_token_accuracy", "entropy"), map(mean, zip(*means, strict=True)), strict=False)
        return {**dict(named), "num_tokens": float(self._num_tokens)}

    def _summary(self) -> str:
        errors = Residuals.of(list(self._errors))
        return (
            f"predicted against measured: median error {errors.median:.1%}, mean {errors.mean:.1%} over {errors.num_passes} "
            f"plans; the cost model was fitted {counted(self._refit.num_fits, 'time')}"
        )

    def _write_timeline(
        self, folder: Path, measured: list[list[list[TimelineEvent]]], first: int, last_step: int
    ) -> dict[str, list[TimelineEvent]]:
        """Writes timeline.json (Chrome trace), and timeline.png if matplotlib is installed; returns the panels of the picture.

        The picture has the prediction above the measurement, if the cost model was fitted to measurements.
        """
        plans = [record.plan for record in self._last]
        steps = [[event for rank in measured for event in rank[i]] for i in range(len(plans))]
        # without waits for messages, which the prediction does not draw as work either
        drawn = [[event for event in events if event.kind not in ("SF", "RF", "SB", "RB")] for events in steps]
        panels = {"measured": _in_a_row(drawn)}
        if self.source.costs.coefficients.is_measured:
            panels = {"predicted": _in_a_row([_predicted(record, self.source.costs) for record in self._last]), **panels}
        layouts = "  |  ".join(plan.folded_layout for plan in plans)
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / "timeline.json"
        written.write_text(chrome_trace(_in_a_row(steps)))
        if find_spec("matplotlib") is not None:
            written = folder / "timeline.png"
            save_png_timeline(panels, f"steps {first} to {last_step}: {layouts}", written)
        self.console.say(f"timeline of steps {first} to {last_step}: {written}")
        self.console.say(f"page of the run: hf-longctx report {folder}")
        return panels


def _without_reduction(plan: StepPlan, costs: CostModel) -> StepPlan:
    """Returns the plan with an estimate without the gradient reduction, which runs once per optimizer step."""
    estimate = plan.estimate
    if estimate.cost_source == "default":
        return plan
    once_s = costs.coefficients.step_s
    lower_bound_s = max(0.0, estimate.lower_bound_s - once_s)
    return replace(plan, estimate=replace(estimate, step_s=estimate.step_s - once_s, lower_bound_s=lower_bound_s))


def _predicted(record: StepRecord, costs: CostModel) -> list[TimelineEvent]:
    plan, run = record.plan, evaluate_plan(record.plan, costs)
    if not record.ends_step:
        return list(run.events)
    start_s = run.step_s - costs.coefficients.step_s
    reduce = [TimelineEvent(rank, "reduce", "gradients", start_s, run.step_s) for rank in range(plan.num_ranks)]
    return [*run.events, *reduce]


def _in_a_row(steps: list[list[TimelineEvent]]) -> list[TimelineEvent]:
    """Joins the timelines of several steps; each step starts at the end of the slowest rank of the step before."""
    row: list[TimelineEvent] = []
    offset_s = 0.0
    for events in steps:
        row += [replace(e, start_s=e.start_s + offset_s, stop_s=e.stop_s + offset_s) for e in events]
        offset_s = max((event.stop_s for event in row), default=offset_s)
    return row

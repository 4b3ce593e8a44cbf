"""What a run says about itself: one line per step, metrics for the log, samples for the cost model, the timeline files."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.planning.ahead import is_stand_in
from hf_longctx.hf.planning.refit import CostRefit, MeasuredPlan, Samples
from hf_longctx.hf.planning.samples import pass_samples
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.sharding import held_tokens, rank_pieces, shard_tokens
from hf_longctx.plan.core.types import ActivationPolicy, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.fitting import Residuals
from hf_longctx.plan.memory.round_bytes import round_bytes
from hf_longctx.plan.memory.saved_tensors import held_bytes
from hf_longctx.plan.memory.stage import message_bytes, stage_state_bytes
from hf_longctx.plan.prediction.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval
from hf_longctx.runtime.execution.executor import NO_MEMORY, StepMemory, StepResult
from hf_longctx.timeline import TimelineEvent, chrome_trace, save_png_timeline, svg_timeline


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished plan as rank `rank` saw it: plan number `place` of the `count` plans of an optimizer step.

    `loss` is that of the whole optimizer step. `predicted_memory` is what `memory` was expected to be, `predicted_idle` what
    `idle_share` was; None where nothing was measured to predict from. `router_loss`, `router_load`: as in `StepResult`.
    """

    plan: StepPlan
    rank: int
    loss: float
    intervals: tuple[Interval, ...]
    place: int = 0
    count: int = 1
    memory: StepMemory = NO_MEMORY
    predicted_memory: StepMemory = NO_MEMORY
    predicted_idle: float | None = None
    router_loss: float | None = None
    router_load: float | None = None

    @property
    def ends_step(self) -> bool:
        """Whether gradients were reduced behind this plan."""
        return self.place == self.count - 1

    @property
    def measured_s(self) -> float:
        """Seconds from the plan's first action to the end of its gradient reduction."""
        return max(interval.stop_s for interval in self.intervals)

    @property
    def reduce_s(self) -> float:
        """Seconds of the gradient reduction, waiting for other ranks included."""
        return sum(interval.stop_s - interval.start_s for interval in self.intervals if interval.kind == "reduce")

    @property
    def idle_share(self) -> float | None:
        """Of a pipeline's first stage, whose last backward ends it: the share of its seconds outside forwards and backwards.

        None on other stages, whose reduction begins with waiting for the first one, and where there is one stage.
        """
        if self.plan.num_stages == 1 or self.plan.place(self.rank)[0]:
            return None
        busy_s = sum(interval.stop_s - interval.start_s for interval in self.intervals if interval.kind in ("F", "B"))
        return 1 - busy_s / (self.measured_s - self.reduce_s)

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where nothing was measured to predict from."""
        estimate = self.plan.estimate
        return None if estimate.cost_source == "default" else estimate.step_s / self.measured_s - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the plan over all ranks, dummy tokens not counted."""
        return sum(self.plan.lengths)

    @property
    def padding_share(self) -> float:
        """Dummy tokens among all tokens that run."""
        dummies = sum(
            sum(held_tokens(rank_pieces(chunk, group.shape))) - chunk.num_tokens
            for micro_batch in self.plan.micro_batches
            for group in micro_batch.groups
            for chunk in group.chunks
        )
        return dummies / (dummies + self.num_tokens)

    def line(self, step: int) -> str:
        """The plan in one line; '-' where nothing was measured to predict from."""
        estimate, count = self.plan.estimate, len(self.plan.micro_batches)
        place = f" ({self.place + 1}/{self.count})" if self.count > 1 else ""
        predicted = "    -" if self.error is None else f"{estimate.step_s:5.3g}"
        return (
            f"step {step:4d}{place} | loss {self.loss:7.4f} | predicted {predicted} s, measured {self.measured_s:5.3g} s | "
            f"{self.num_tokens / self.measured_s:7,.0f} tokens/s | padding {self.padding_share:4.1%} | "
            f"{count} micro-batch{'' if count == 1 else 'es'} {folded_layout(self.plan)}{self._quality}{self._idle}{self._bytes}"
        )

    @property
    def gap(self) -> float | None:
        """How far the prediction is above the bound below which no plan gets, as a share of that; None before calibration."""
        estimate = self.plan.estimate
        if estimate.cost_source == "default" or estimate.lower_bound_s <= 0:
            return None
        return max(0.0, estimate.step_s / estimate.lower_bound_s - 1)

    @property
    def _quality(self) -> str:
        gap = "" if self.gap is None else f" | within {self.gap:.1%} of optimal"
        return f"{gap} | {self.plan.estimate.solver}" if is_stand_in(self.plan) else gap

    @property
    def _idle(self) -> str:
        if self.idle_share is None:
            return ""
        predicted = "-" if self.predicted_idle is None else f"{self.predicted_idle:.1%}"
        return f" | first stage idle {predicted} predicted, {self.idle_share:.1%} measured"

    @property
    def _bytes(self) -> str:
        """Predicted and measured bytes, of a CUDA device or, where something was recomputed or sliced, of what was counted."""
        now, then = self.memory, self.predicted_memory
        if now.device_peak:
            text = f" | memory {then.device_peak / 2**30:.2f} GiB predicted, {now.device_peak / 2**30:.2f} GiB measured"
        elif now.saved or now.kv_book:
            predicted, measured = then.saved + then.kv_book, now.saved + now.kv_book
            text = f" | held {predicted / 2**20:,.1f} MiB predicted, {measured / 2**20:,.1f} MiB measured"
        else:
            return ""
        return text + (f", {now.host / 2**20:,.1f} MiB of {then.host / 2**20:,.1f} on the host" if then.host else "")

    def samples(self, costs: CostModel) -> Samples:
        """This rank's measured chunks, as `pass_samples` makes them."""
        return pass_samples(self.plan, self.rank, self.intervals, costs)

    def measured(self, costs: CostModel) -> MeasuredPlan:
        """What the cost model can learn from this plan."""
        reduce_s = self.reduce_s if self.ends_step else -1.0
        return MeasuredPlan(self.plan, self.samples(costs), self.measured_s, reduce_s, self.error)

    def events(self) -> list[TimelineEvent]:
        """This rank's timeline, from the start of the plan."""
        rounds = self.plan.for_rank(self.rank).rounds
        return [
            TimelineEvent(
                rank=self.rank,
                kind=interval.kind,
                name=interval.name,
                start_s=interval.start_s,
                stop_s=interval.stop_s,
                detail="" if interval.round < 0 else _group_detail(*rounds[interval.round]),
            )
            for interval in self.intervals
        ]


class RunReport(TrainerCallback):
    """Listens to finished steps: prints them, keeps the cost model fitted, writes summary and timeline at the end.

    `opening` is said once, when training begins. `on_step_end` and `on_train_end` hold collectives on the pool's control
    group: every rank has one of these callbacks.
    """

    def __init__(self, config: LongContextConfig, source: PlanSource, opening: str = "") -> None:
        self.config, self.source, self.opening = config, source, opening
        self._pending: list[tuple[StepPlan, StepResult]] = []
        self._last: deque[StepRecord] = deque(maxlen=max(1, config.timeline_steps))
        # bounded, for runs that never log
        self._since_log: deque[StepRecord] = deque(maxlen=1000)
        # relative errors of all predictions, for the summary
        self._errors: deque[float] = deque(maxlen=10_000)
        self._refit = CostRefit(source, config.calibration_steps)

    def step_done(self, plan: StepPlan, result: StepResult) -> None:
        """Called by the trainer after each plan of a step; read at the step's end, when reading no longer delays it."""
        self._pending.append((plan, result))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # what a training that stopped inside a step left behind
        self._pending = []
        # ranks read checkpoints and open trackers at their own pace: as in on_save
        PartialState().wait_for_everyone()
        if self.config.report_steps and state.is_world_process_zero and self.opening:
            tqdm.write(self.opening)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        pending, self._pending = self._pending, []
        loss = sum(float(result.loss) for _, result in pending)
        for place, (plan, result) in enumerate(pending):
            if place < len(pending) - 1:
                plan = _without_reduction(plan, self.source.costs)
            rank, model = self.source.pool.rank, self.source.costs.model
            memory = result.memory, predicted_memory(plan, rank, model)
            idle = predicted_idle(plan, rank, self.source.costs)
            routing = (None if value is None else float(value) for value in (result.router_loss, result.router_load))
            record = StepRecord(plan, rank, loss, tuple(result.intervals()), place, len(pending), *memory, idle, *routing)
            self._last.append(record)
            self._since_log.append(record)
            if record.error is not None:
                self._errors.append(record.error)
            fitted = self._refit.add(record.measured(self.source.costs), record.ends_step)
            if self.config.report_steps and state.is_world_process_zero:
                tqdm.write(record.line(state.global_step) + (f"\n{fitted}" if fitted else ""))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # one rank writes the checkpoint, which may take longer than a step's collectives may wait: all wait for it here,
        # on the default group with its patient time-out
        PartialState().wait_for_everyone()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.config.report_steps and state.is_world_process_zero and self._errors:
            tqdm.write(self._summary())
        if state.is_world_process_zero and (replaced := self._replaced_plans()):
            late, failed = replaced.get("late_plans", 0), replaced.get("failed_plans", 0)
            tqdm.write(f"the fast planner stood in for {late:g} late and {failed:g} failed plans of the solver")
        if not self.config.timeline_steps or not self._last:
            return
        measured = gather_objects([record.events() for record in self._last], self.source.pool.control)
        if state.is_world_process_zero and args.output_dir is not None:
            self._write_timeline(Path(args.output_dir), measured, state.global_step)

    def take_metrics(self) -> dict[str, float]:
        """Means over the steps since the last call, for the trainer's log; empty where no step ran.

        Plans that were replaced are counted from the start.
        """
        records = list(self._since_log)
        self._since_log.clear()
        if not records:
            return {}
        measured_s = sum(record.measured_s for record in records)
        num_steps = sum(record.ends_step for record in records)
        metrics = {
            "tokens_per_s": sum(record.num_tokens for record in records) / measured_s,
            "measured_step_s": measured_s / num_steps,
            "padding_share": mean(record.padding_share for record in records),
            "micro_batches": sum(len(record.plan.micro_batches) for record in records) / num_steps,
            "planning_s": sum(record.plan.estimate.solve_s for record in records) / num_steps,
        }
        for name, values in (
            ("idle_share", [record.idle_share for record in records]),
            ("predicted_idle_share", [record.predicted_idle for record in records]),
        ):
            if None not in values:
                metrics[name] = mean(value for value in values if value is not None)
        for name in ("router_loss", "router_load"):
            if found := [getattr(record, name) for record in records if getattr(record, name) is not None]:
                metrics[name] = mean(found)
        errors = [abs(record.error) for record in records if record.error is not None]
        if len(errors) == len(records):
            metrics["predicted_step_s"] = sum(record.plan.estimate.step_s for record in records) / num_steps
            if all(record.gap is not None for record in records):
                bound_s = sum(record.plan.estimate.lower_bound_s for record in records) / num_steps
                metrics["plan_gap"] = metrics["predicted_step_s"] / bound_s - 1
        if errors:
            metrics["prediction_error"] = median(errors)
        return {**metrics, **self._replaced_plans()}

    def _replaced_plans(self) -> dict[str, float]:
        """How many plans of the run were replaced so far, by reason; without reasons that did not occur. Known on rank 0."""
        drafts = self.source.drafts
        counts = {"late_plans": drafts.late_plans, "failed_plans": drafts.failed_plans}
        return {name: float(count) for name, count in counts.items() if count}

    def _summary(self) -> str:
        errors = Residuals.of(list(self._errors))
        return (
            f"predicted against measured: median error {errors.median:.1%}, mean {errors.mean:.1%} over {errors.num_passes} "
            f"plans; the cost model was fitted {self._refit.num_fits} time(s)"
        )

    def _write_timeline(self, folder: Path, measured: list[list[list[TimelineEvent]]], last_step: int) -> None:
        """timeline.svg (predicted above measured, if predictions were measured) and timeline.json (Chrome trace)."""
        plans = [record.plan for record in self._last]
        steps = [[event for rank in measured for event in rank[i]] for i in range(len(plans))]
        # waiting for messages is no work, as in the prediction
        drawn = [[event for event in events if event.kind not in ("SF", "RF", "SB", "RB")] for events in steps]
        panels = {"measured": _in_a_row(drawn)}
        if self.source.costs.coefficients.is_measured:
            panels = {"predicted": _in_a_row([_predicted(record, self.source.costs) for record in self._last]), **panels}
        first = last_step - sum(record.ends_step for record in self._last) + 1
        layouts = "  |  ".join(folded_layout(plan) for plan in plans)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.svg").write_text(svg_timeline(panels, f"steps {first} to {last_step}: {layouts}"))
        if find_spec("matplotlib") is not None:
            save_png_timeline(panels, f"steps {first} to {last_step}: {layouts}", folder / "timeline.png")
        (folder / "timeline.json").write_text(chrome_trace(_in_a_row(steps)))
        tqdm.write(f"timeline of steps {first} to {last_step}: {folder / 'timeline.svg'}")


def folded_layout(plan: StepPlan) -> str:
    """The plan's layout with equal neighbours folded, for example "<2>,<1,1>x3"."""
    runs = [(layout, len(list(same))) for layout, same in groupby(mb.layout for mb in plan.micro_batches)]
    return ",".join(layout + (f"x{count}" if count > 1 else "") for layout, count in runs)


def predicted_idle(plan: StepPlan, rank: int, costs: CostModel) -> float | None:
    """What `StepRecord.idle_share` of this rank is expected to be; None where it has none or costs are guesses."""
    if plan.num_stages == 1 or plan.place(rank)[0] or not costs.coefficients.is_measured:
        return None
    run = evaluate_plan(plan, costs, with_events=False)
    return 1 - run.busy_s[rank] / (run.step_s - run.once_s)


def predicted_memory(plan: StepPlan, rank: int, model: ModelSpec) -> StepMemory:
    """What `StepResult.memory` of this rank is expected to be."""
    memory = NO_MEMORY
    _, position = plan.place(rank)
    for group, stage in plan.for_rank(rank).rounds:
        place = group.positions.index(position)
        policies = {(policy.part, policy.chunk): policy for policy in stage.activations}
        held: dict[tuple[int, int], tuple[int, int]] = {}
        # whole chunks on one stage are the common case, and nothing of them is asked here
        is_plain = len(group.chunks) == 1 and plan.num_stages == 1
        found = None if is_plain else round_bytes(model, group, stage, place)
        for action in stage.actions:
            key = (action.part, action.chunk)
            if action.kind == "B":
                del held[key]
            if action.kind != "F":
                continue
            tokens = shard_tokens(group.chunks[action.chunk], group.shape)[place]
            policy = policies.get(key, ActivationPolicy(action.chunk))
            # layers that keep everything run as they are, which the engine does not see
            replayed = replace(policy, layers=tuple(layer for layer in policy.layers if not layer.keeps_everything))
            held[key] = held_bytes(model, replayed, len(replayed.layers), tokens)
            saved, host = (sum(column) for column in zip(*held.values(), strict=True))
            memory = memory.most(StepMemory(saved, host, found.book if found else 0))
        if found and plan.num_stages > 1:
            # stages differ, and the plan's estimate is that of the fullest
            most_tokens = max(shard_tokens(chunk, group.shape)[place] for chunk in group.chunks)
            messages = message_bytes(model, stage, plan.num_stages, most_tokens)
            memory = memory.most(StepMemory(device_peak=stage_state_bytes(model, stage, plan) + found.peak + messages))
    return memory if plan.num_stages > 1 else replace(memory, device_peak=plan.estimate.peak_bytes)


def _group_detail(group: Any, stage: Any) -> str:
    num_sequences = sum(len(chunk.spans) for chunk in group.chunks)
    return f"<{group.degree}> {group.num_tokens} tokens in {num_sequences} sequence(s)"


def _without_reduction(plan: StepPlan, costs: CostModel) -> StepPlan:
    """The plan with an estimate that leaves out the gradient reduction, which runs once per optimizer step."""
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
    """Timelines of several steps one after the other, each starting where the slowest rank of the last one ended."""
    row: list[TimelineEvent] = []
    offset_s = 0.0
    for events in steps:
        row += [replace(e, start_s=e.start_s + offset_s, stop_s=e.stop_s + offset_s) for e in events]
        offset_s = max((event.stop_s for event in row), default=offset_s)
    return row

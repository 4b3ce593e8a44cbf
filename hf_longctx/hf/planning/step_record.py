"""Prediction and measurement of one step, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hf_longctx.hf.planning.ahead import is_stand_in
from hf_longctx.hf.planning.refit import MeasuredPlan, Samples
from hf_longctx.hf.planning.samples import pass_samples
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.sharding import held_tokens, rank_pieces, shard_tokens
from hf_longctx.plan.core.types import ActivationPolicy, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.round_bytes import round_bytes
from hf_longctx.plan.memory.saved_tensors import held_bytes
from hf_longctx.plan.memory.stage import message_bytes, stage_state_bytes
from hf_longctx.plan.prediction.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval
from hf_longctx.runtime.execution.results import NO_MEMORY, StepMemory
from hf_longctx.timeline import TimelineEvent


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

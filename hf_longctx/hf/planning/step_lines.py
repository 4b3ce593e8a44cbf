"""Says in one line what the steps since the last log did: means over them, and sums where these are what counts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from hf_longctx.hf.planning.step_record import StepRecord, padding_share
from hf_longctx.plan.core.messages import duration
from hf_longctx.plan.core.types import StepPlan

# share of a step's seconds outside its plans (optimizer, clipping, waits for plans) from which both are told
_TOLD_OUTSIDE = 0.05


def record_parts(records: Sequence[StepRecord], wall_s: float) -> list[str]:
    """Parts of the line of the steps that have these records; none without any.

    wall_s: seconds of all of these steps from begin to end, optimizer included; 0 if nobody has measured them.
    """
    if not records:
        return []
    plans, num_steps = [record.plan for record in records], sum(record.ends_step for record in records)
    plans_s = sum(record.measured_s for record in records)
    parts = [seconds_part(wall_s or plans_s, num_steps, _compared(records, wall_s, num_steps))]
    parts.append(speed_part(plans, wall_s or plans_s))
    return [*parts, *plan_parts(plans, num_steps), *_quality(records), *_idle(records), *_bytes(records)]


def seconds_part(seconds: float, num_steps: int, beside: str = "") -> str:
    """Seconds of a step, as a mean over `num_steps`."""
    each = " a step" if num_steps > 1 else ""
    return f"{duration(seconds / num_steps):>7}{each}{beside}"


def speed_part(plans: Sequence[StepPlan], seconds: float) -> str:
    """Tokens of all ranks, without dummies, over these seconds."""
    return f"{sum(sum(plan.lengths) for plan in plans) / seconds:7,.0f} tokens/s"


def plan_parts(plans: Sequence[StepPlan], num_steps: int) -> list[str]:
    """Padding, and micro-batches of a step; the layout, too, if it is that of a single plan."""
    count = sum(len(plan.micro_batches) for plan in plans) / num_steps
    micro_batches = f"{count:.3g} micro-batch{'' if count == 1 else 'es'}{' a step' if num_steps > 1 else ''}"
    if plans[0].num_ranks == 1:
        # one rank alone has neither padding nor groups
        return [] if count == 1 else [micro_batches]
    layout = f" {plans[0].folded_layout}" if len(plans) == 1 else ""
    return [f"padding {mean_padding(plans):4.1%}", micro_batches + layout]


def mean_padding(plans: Sequence[StepPlan]) -> float:
    """Share of dummy tokens among all tokens of these plans that run."""
    num_tokens = [sum(plan.lengths) for plan in plans]
    run = sum(count / (1 - padding_share(plan)) for count, plan in zip(num_tokens, plans, strict=True))
    return 1 - sum(num_tokens) / run if run else 0.0


def mean_gap(records: Sequence[StepRecord]) -> float | None:
    """Predicted seconds of all plans above the sum of their bounds, as a share of it; None if one of them has no bound."""
    if any(record.gap is None for record in records):
        return None
    estimates = [record.plan.estimate for record in records]
    return sum(each.counted_s for each in estimates) / sum(each.lower_bound_s for each in estimates) - 1


def _compared(records: Sequence[StepRecord], wall_s: float, num_steps: int) -> str:
    """Seconds of the plans where they are not about all of the step, and those predicted for them."""
    plans_s, told = sum(record.measured_s for record in records), []
    if wall_s - plans_s > _TOLD_OUTSIDE * wall_s:
        told.append(f"plan {duration(plans_s / num_steps)}")
    if all(record.error is not None for record in records):
        told.append(f"predicted {duration(sum(record.plan.estimate.step_s for record in records) / num_steps)}")
    return f" ({', '.join(told)})" if told else ""


def _quality(records: Sequence[StepRecord]) -> list[str]:
    """How far plans are from the optimum."""
    gap = mean_gap(records)
    return [] if gap is None else [f"within {gap:.1%} of optimal"]


def _idle(records: Sequence[StepRecord]) -> list[str]:
    """Share of the time that the first of several stages waits."""
    measured = [record.idle_share for record in records if record.idle_share is not None]
    if len(measured) < len(records):
        return []
    predicted = [record.predicted_idle for record in records if record.predicted_idle is not None]
    before = f"{mean(predicted):.1%} predicted, " if len(predicted) == len(records) else ""
    return [f"first stage idle {before}{mean(measured):.1%} measured"]


def _bytes(records: Sequence[StepRecord]) -> list[str]:
    """Predicted and measured memory of the plan that took most of it.

    That is device memory on CUDA; elsewhere saved activations and K/V book, if there are any.
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

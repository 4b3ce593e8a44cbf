"""Writes the replay of a run as text and as JSON."""

from __future__ import annotations

from typing import Any

from hf_longctx.plan.core.messages import duration
from hf_longctx.sim.output.tables import Table
from hf_longctx.sim.run_replay import NewPlan, PastPlan, Replay

_HEAD = ("step", "sequences", "tokens", "longest", "measured", "predicted then", "layout then")


def replay_sections(replay: Replay) -> list[list[str]]:
    """Makes a table of old and new plans, and their sums."""
    shown = f"{len(replay.past)} of {replay.num_plans} plans"
    heading = f"REPLAY of {replay.folder}: {shown}, {replay.num_tokens:,} tokens, on {replay.machine}"
    if (scenario := replay.scenario) is None:
        rows = [(*_cells(plan), plan.layout) for plan in replay.past]
        how = "add --gpus N --hardware NAME to plan the same sequences for another machine (hf-longctx plan --list hardware)"
        return [[heading, Table.of(_HEAD, rows)], [f"measured {duration(replay.measured_s)}{_error(replay)}", how]]
    cluster = scenario.costs.cluster
    heading += f"; now on {cluster.num_ranks} x {cluster.hardware.name}, {scenario.placement.parameters.replace('_', ' ')}"
    rows = [
        (*_cells(plan), plan.layout, duration(new.step_s), new.layout) for plan, new in zip(replay.past, replay.new, strict=True)
    ]
    return [[heading, Table.of((*_HEAD, "predicted now", "layout now"), rows)], _sums(replay), list(scenario.notes)]


def replay_record(replay: Replay) -> dict[str, Any]:
    """Returns the replay as plain data."""
    record: dict[str, Any] = {
        "run": str(replay.folder),
        "machine": replay.machine,
        "num_plans": replay.num_plans,
        "num_tokens": replay.num_tokens,
        "measured_s": replay.measured_s,
    }
    new: tuple[NewPlan | None, ...] = replay.new or (None,) * len(replay.past)
    if (scenario := replay.scenario) is not None:
        record |= {"model": scenario.model_name, "hardware": scenario.hardware_name, "gpus": scenario.costs.cluster.num_ranks}
        record |= {"predicted_s": replay.step_s, "whole_s": sum(plan.whole_s for plan in replay.new)}
        record["notes"] = list(scenario.notes)
    record["plans"] = [_plan_record(plan, now) for plan, now in zip(replay.past, new, strict=True)]
    return record


def _plan_record(plan: PastPlan, new: NewPlan | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "step": plan.step,
        "lengths": list(plan.lengths),
        "measured_s": plan.measured_s,
        "predicted_then_s": plan.predicted_s,
        "layout_then": plan.layout,
    }
    if new is not None:
        record |= {"predicted_now_s": new.step_s, "whole_now_s": new.whole_s, "layout_now": new.layout}
    return record


def _cells(plan: PastPlan) -> tuple[str, ...]:
    predicted = "" if plan.predicted_s is None else duration(plan.predicted_s)
    counts = (str(plan.step), f"{len(plan.lengths):,}", f"{sum(plan.lengths):,}", f"{max(plan.lengths):,}")
    return (*counts, duration(plan.measured_s), predicted)


def _sums(replay: Replay) -> list[str]:
    measured_s, step_s, whole_s = replay.measured_s, replay.step_s, sum(plan.whole_s for plan in replay.new)
    factor = max(measured_s / step_s, step_s / measured_s)
    change = f"{factor:,.0f}" if factor > 99.5 else f"{factor:.3g}"
    change += " times as fast" if step_s <= measured_s else " times as long"
    lines = [f"measured then {duration(measured_s)}{_error(replay)}; predicted now {duration(step_s)}, {change}"]
    if whole_s > step_s:
        lines.append(f"with gathers of weights, sums of gradients and the optimizer, none of them hidden: {duration(whole_s)}")
    return lines


def _error(replay: Replay) -> str:
    """Describes the errors of the run's own predictions, if there were any."""
    known = [(plan.predicted_s, plan.measured_s) for plan in replay.past if plan.predicted_s is not None]
    if not known:
        return ""
    predicted_s, measured_s = (sum(column) for column in zip(*known, strict=True))
    return f" (predicted then: {predicted_s / measured_s - 1:+.1%} over {len(known)} plans)"

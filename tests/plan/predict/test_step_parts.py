"""Parts of a step's seconds sum to the step, and each cause shows in its own part."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from plan.room.test_pipeline_room import GIB, LARGE, costs_of, judged, limit_of, made_to_fit, plan_of

from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.predict.step_parts import step_parts

PLANNING = PlannerConfig(1, (1,))


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("host_bytes", [0, 64 * GIB])
def test_parts_sum_to_the_step_and_name_recomputation(share: float, host_bytes: int) -> None:
    costs = costs_of(LARGE, 4, 2)
    plan = plan_of(costs, [40_000, 30_000, *range(2_000, 12_000, 500)], 6, 4)
    whole_bytes = max(judged(plan, costs).peak_bytes) - limit_of(plan, costs, ActivationBudget(0, 0))
    made = made_to_fit(plan, costs, ActivationBudget(0, int(share * whole_bytes), host_bytes))
    planning = Planning(costs, PLANNING)
    parts = step_parts(made, planning, 1.0)
    assert parts.bound_s == 1.0 and sum(astuple(parts)) == pytest.approx(planning.counted_s(made))
    assert min(astuple(parts)) >= 0 and parts.idle_s > 0
    # with the host, only stages recompute that have less work than the last one, which therefore loses nothing
    assert (parts.recompute_s > 0) == (share < 1 and not host_bytes)


def test_a_heavy_head_shows_as_uneven_stages() -> None:
    uneven_s = []
    for vocab_size in (1_000, 500_000):
        costs = costs_of(replace(LARGE, vocab_size=vocab_size), 4, 2)
        plan = plan_of(costs, [8_000] * 12, 1, 4)
        uneven_s.append(step_parts(plan, Planning(costs, PLANNING), 0.0).uneven_s)
    assert uneven_s[0] < 0.05 * uneven_s[1]

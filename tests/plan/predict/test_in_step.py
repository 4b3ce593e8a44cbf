"""Groups whose ranks gather weights or sum gradients together wait for one another in these passes; others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import HARDWARE, MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.chunks import sliced_in_step
from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import Action, GroupShape, MicroBatch, Parameters, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.planner import build_plan
from hf_longctx.plan.predict.evaluate import evaluate_plan, in_step
from hf_longctx.plan.predict.pipeline_run import StageRun

ORDER = tuple(map(Action.parse, ["0F0", "0F1", "0B1", "0B0"]))


@pytest.mark.daily("gathered_per_step")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_step"])
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=4, max_size=4), min_size=1, max_size=4))
def test_every_pass_in_which_groups_meet_waits_for_the_slowest(
    parameters: Parameters, drawn: list[list[tuple[int, int]]]
) -> None:
    """Each group waits for copies, then runs, four times."""
    runs = []
    for waits in drawn:
        clock, times = 0.0, []
        for wait_s, run_s in waits:
            times.append((clock + wait_s, clock + wait_s + run_s))
            clock += wait_s + run_s
        runs.append(StageRun(ORDER, tuple(times), (0.0,) * 4, 7, 8, 9))
    found, clocks = in_step(runs, parameters, 5.0), [5.0] * len(drawn)
    for place, action in enumerate(ORDER):
        for group, (run, waits) in enumerate(zip(found, drawn, strict=True)):
            wait_s, run_s = waits[place]
            assert run.times[place] == (clocks[group] + wait_s, clocks[group] + wait_s + run_s)
            clocks[group] = run.times[place][1]
        # weights that are kept for the step meet nobody in forwards
        if parameters == "sharded" or action.kind == "B":
            clocks = [max(clocks)] * len(drawn)
    assert max(run.times[-1][1] for run in found) == clocks[0]


def plan_in_step(
    lengths: tuple[int, int, int], shard_ranks: int, parameters: Parameters = "sharded"
) -> tuple[StepPlan, CostModel]:
    """Three groups on four ranks, in step though only the two of one rank share weights if blocks, or nodes, have two ranks."""
    cluster, model = ClusterSpec(4, 4, HARDWARE), replace(MODEL, node_ranks=2)
    costs = CostModel(
        model, cluster, default_coefficients(model, cluster), "ulysses", parameters=parameters, shard_ranks=shard_ranks
    )
    layout = [[PlacedGroup(0, 2, (0,)), PlacedGroup(2, 1, (1,)), PlacedGroup(3, 1, (2,))]]
    plan = build_plan(0, lengths, layout, {1: GroupShape(1), 2: GroupShape(2, 2)}, costs)
    groups = sliced_in_step(plan.micro_batches[0].groups, 3, SpanRates(1e-9, 1e-6))
    sharing = {"shard_ranks": shard_ranks, "node_ranks": costs.node_ranks}
    return validate_plan(StepPlan(0, lengths, 1, 4, parameters, (MicroBatch(groups),), **sharing)), costs


@given(st.tuples(*[st.integers(30, 3000)] * 3), st.sampled_from([(2, "sharded"), (4, "sharded"), (4, "gathered_per_node")]))
@settings(deadline=None, max_examples=40)
def test_a_step_takes_the_slowest_pass_of_every_slot(lengths: tuple[int, int, int], sharing: tuple[int, Parameters]) -> None:
    plan, costs = plan_in_step(lengths, *sharing)
    run, layers = evaluate_plan(plan, costs), costs.model.num_layers
    passes = [
        [
            (costs.forward_s if action.kind == "F" else costs.backward_s)(group.chunks[action.chunk], group.shape, layers)
            for action in group.stages[0].actions
        ]
        for group in plan.micro_batches[0].groups
    ]
    assert plan.in_step(plan.micro_batches[0]) == (((0, 1, 2),) if sharing == (4, "sharded") else ((0,), (1, 2)))
    blocks = [passes] if sharing == (4, "sharded") else [passes[:1], passes[1:]]
    block_s = [sum(map(max, zip(*block, strict=True))) for block in blocks]
    assert run.step_s - run.once_s == pytest.approx(max(block_s), rel=1e-9)
    # waits are no work
    for group, own in zip(plan.micro_batches[0].groups, passes, strict=True):
        for position in group.positions:
            assert run.ranks[position].busy_s == pytest.approx(sum(own), rel=1e-9)
    # events of a group do not overlap, and end with the step
    ends = [event.stop_s for event in run.events]
    assert max(ends) == pytest.approx(max(block_s), rel=1e-9)

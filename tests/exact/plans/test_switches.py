"""Plans made with the planner's switches (nested, time_aware, node_aligned, integer degrees) still match one plain process.

The plans come from `plan_step`, for lengths on which the switch changes the plan; every test asserts what it changed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.models.tiny_models import ModelCase
from helpers.plans.layouts import TINY
from helpers.ranks.rank_steps import check_step
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ClusterSpec, GroupMethod, HardwareSpec, PlannerConfig
from hf_longctx.plan.core.types import SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.planner import plan_step

HARDWARE = HardwareSpec("test", 1e12, 5e11, 1 << 30, 1e9, 1e8, 1e-4)
CASE = ModelCase(promoted=True)
POWERS = (1, 2, 4)
# most tokens of a rank; with it the longest sequence below needs four ranks
CAPACITY = 20


def costs(
    num_ranks: int,
    method: GroupMethod = "auto",
    shard_ranks: int = 0,
    ranks_per_node: int = 0,
    pair_s: float = 1e-6,
    link_byte_s: float = 1e-10,
) -> CostModel:
    """A cost model under which short sequences of the tiny model are worth groups of several sizes."""
    one_pass = PassCoefficients(pair_s, 1e-6, 1e-4, 1e-4, link_byte_s, 1e-9)
    cluster = ClusterSpec(num_ranks, ranks_per_node or num_ranks, HARDWARE)
    parameters = "sharded" if shard_ranks else "replicated"
    coefficients = CostCoefficients(one_pass, one_pass, 0.01, "test")
    return CostModel(TINY, cluster, coefficients, method, parameters=parameters, shard_ranks=shard_ranks or 1)


def num_rounds(plan: StepPlan) -> list[int]:
    """Number of micro-batches that each rank takes part in."""
    return [len(plan.for_rank(rank).rounds) for rank in range(plan.num_ranks)]


def groups_of(plan: StepPlan) -> list[SequenceGroup]:
    return [group for micro_batch in plan.micro_batches for group in micro_batch.groups]


def last_rounds(plan: StepPlan) -> list[int]:
    """Index of the last micro-batch of every rank."""
    return [
        max(index for index, mb in enumerate(plan.micro_batches) if any(rank in group.positions for group in mb.groups))
        for rank in range(plan.num_ranks)
    ]


# ranks; ranks that hold one copy of the parameters (0: replicated); method; lengths; micro-batches of each rank; method of <4>
NESTED: dict[str, tuple[int, int, GroupMethod, list[int], list[int], str]] = {
    "ulysses": (4, 0, "ulysses", [13, 34, 61, 13, 7, 21, 2, 13], [2, 2, 3, 3], "ulysses"),
    "rings": (4, 0, "ring", [21, 21, 2, 9, 61, 34, 21, 9], [3, 3, 4, 3], "ring"),
    "hybrids": (4, 0, "hybrid", [21, 21, 2, 9, 61, 34, 21, 9], [3, 3, 4, 3], "hybrid"),
    "copies of shards, ulysses": (4, 2, "ulysses", [61, 3, 13, 9], [2, 2, 1, 1], "ulysses"),
    "copies of shards, rings": (4, 2, "ring", [34, 61, 34, 34], [3, 3, 2, 2], "ring"),
    "copies of shards, hybrids": (4, 2, "hybrid", [34, 61, 34, 34], [3, 3, 2, 2], "hybrid"),
    "copies of shards, nothing but pairs": (4, 2, "ring", [21, 21, 3, 34, 9, 3, 9], [1, 1, 2, 2], ""),
}


@pytest.mark.daily("hybrids")
@pytest.mark.parametrize("name", NESTED)
def test_nested_plans_match_one_plain_process(ranks, name: str) -> None:
    num_ranks, shard_ranks, method, lengths, rounds, method_of_all = NESTED[name]
    model, config = costs(num_ranks, method, shard_ranks), PlannerConfig(CAPACITY, POWERS)
    plan = plan_step(0, lengths, model, config)
    assert num_rounds(plan) == rounds
    assert {group.method for group in groups_of(plan) if group.degree == num_ranks} == (
        {method_of_all} if method_of_all else set()
    )
    # with the switch off no rank is ever left out
    assert len(set(num_rounds(plan_step(0, lengths, model, replace(config, nested=False))))) == 1
    check_step(ranks(num_ranks), CASE, plan, lengths, shard_ranks)


@pytest.mark.daily("ulysses-lengths0")
@pytest.mark.parametrize("method,lengths", [("ulysses", [61, 3, 13, 9]), ("ring", [61, 21]), ("hybrid", [61, 21])])
def test_a_block_may_be_done_while_its_partner_of_the_last_group_goes_on(ranks, method: GroupMethod, lengths: list[int]) -> None:
    # if a block's last backward summed gradients over copies, it would wait for the other block, which itself waits for this one
    # in the group that both form
    plan = plan_step(0, lengths, costs(4, method, shard_ranks=2), PlannerConfig(CAPACITY, POWERS))
    assert [group.degree for group in plan.micro_batches[0].groups] == [4]
    assert sorted(set(last_rounds(plan))) == [0, 1]
    check_step(ranks(4), CASE, plan, lengths, shard_ranks=2)


@pytest.mark.daily("0")
@pytest.mark.parametrize("shard_ranks", [0, 2])
def test_ranks_that_never_get_work_match(ranks, shard_ranks: int) -> None:
    lengths = [17, 5]
    plan = plan_step(0, lengths, costs(4, shard_ranks=shard_ranks), PlannerConfig(CAPACITY, POWERS))
    idle = [rank for rank in range(4) if not any(group.num_tokens for group, _ in plan.for_rank(rank).rounds)]
    assert len(idle) >= 2 and min(num_rounds(plan)) == 1
    check_step(ranks(4), CASE, plan, lengths, shard_ranks)


@pytest.mark.daily("0-hybrid-lengths1-hybrid")
@pytest.mark.parametrize(
    "method,lengths,kind", [("ring", [7, 61, 5, 13, 34, 3], "ring"), ("hybrid", [13, 5, 21, 2, 3, 61], "hybrid")]
)
@pytest.mark.parametrize("shard_ranks", [0, 2, 4])
def test_groups_of_three_match_one_plain_process(
    ranks, method: GroupMethod, lengths: list[int], kind: str, shard_ranks: int
) -> None:
    model = costs(4, method, shard_ranks, pair_s=1e-5, link_byte_s=1e-9)
    plan = plan_step(0, lengths, model, PlannerConfig(CAPACITY, (1, 2, 3, 4)))
    found = {group.degree: group.method for group in groups_of(plan)}
    assert (found[3], found[4]) == ("ring", kind)
    check_step(ranks(4), CASE, plan, lengths, shard_ranks)


@pytest.mark.daily("0")
@pytest.mark.parametrize("shard_ranks", [0, 4])
def test_plans_cut_by_time_match_one_plain_process(ranks, shard_ranks: int) -> None:
    lengths = [13, 61, 21, 34, 13, 13, 13, 7, 2]
    model, config = costs(4, shard_ranks=shard_ranks, pair_s=1e-5), PlannerConfig(CAPACITY, POWERS, "greedy", nested=False)
    plan = plan_step(0, lengths, model, config)
    off = plan_step(0, lengths, model, replace(config, time_aware=False))
    held = [sorted(s.stop for g in mb.groups for c in g.chunks for s in c.spans) for mb in plan.micro_batches]
    # short sequences fill the slack of a micro-batch of long ones, while sequences of medium length run in another micro-batch
    assert [2, 7, 21, 34] in held and [13, 13, 13, 13] in held
    assert plan.estimate.step_s < off.estimate.step_s
    check_step(ranks(4), CASE, plan, lengths, shard_ranks)


@pytest.mark.wide
def test_groups_that_keep_to_nodes_match_one_plain_process(ranks) -> None:
    # two nodes of three ranks
    lengths, config = [56, 38, 19], PlannerConfig(CAPACITY, (1, 2, 3))
    model = costs(6, "ring", ranks_per_node=3, pair_s=0.0, link_byte_s=1e-9)
    plan, off = plan_step(0, lengths, model, config), plan_step(0, lengths, model, replace(config, node_aligned=False))
    assert sorted(group.positions for group in groups_of(plan)) == [(0, 1), (2,), (3, 4, 5)]
    assert sorted(group.positions for group in groups_of(off)) == [(0, 1), (2, 3, 4), (5,)]
    check_step(ranks(6), CASE, plan, lengths)


@pytest.mark.daily("0")
@pytest.mark.parametrize("shard_ranks", [0, 2, 3])
def test_six_ranks_with_all_degrees_match_one_plain_process(ranks, shard_ranks: int) -> None:
    lengths = [95, 61, 34, 21, 21, 9, 5, 3, 2, 55]
    plan = plan_step(0, lengths, costs(6, "auto", shard_ranks, 2, pair_s=1e-5), PlannerConfig(CAPACITY, (1, 2, 3, 4, 5, 6)))
    assert len({group.degree for group in groups_of(plan)}) > 1
    check_step(ranks(6), CASE, plan, lengths, shard_ranks)


@st.composite
def random_problems(draw: st.DrawFn) -> tuple[list[int], int, GroupMethod, tuple[int, ...], bool, float]:
    lengths = draw(st.lists(st.one_of(st.integers(1, 12), st.sampled_from([17, 31, 53, 79])), min_size=1, max_size=9))
    degrees = draw(st.sampled_from([(1, 2, 4), (1, 2, 3, 4), (2, 4), (1, 4), (4,)]))
    method = draw(st.sampled_from(["auto", "ring", "hybrid"]))
    pair_s = draw(st.sampled_from([1e-7, 1e-6, 1e-5]))
    return lengths, draw(st.sampled_from([0, 2, 4])), method, degrees, draw(st.booleans()), pair_s


@pytest.mark.wide
@pytest.mark.parametrize("examples", [6, pytest.param(16, marks=pytest.mark.wide)])
def test_random_plans_with_all_switches_match(ranks, examples: int) -> None:
    @settings(max_examples=examples, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
    @given(random_problems())
    def matches(problem: tuple[list[int], int, GroupMethod, tuple[int, ...], bool, float]) -> None:
        lengths, shard_ranks, method, degrees, is_small, pair_s = problem
        model = costs(4, method, shard_ranks, ranks_per_node=2 if is_small else 4, pair_s=pair_s)
        check_step(ranks(4), CASE, plan_step(0, lengths, model, PlannerConfig(CAPACITY, degrees)), lengths, shard_ranks)

    matches()

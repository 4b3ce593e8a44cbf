"""Output heads on all pipeline stages give the losses, gradients and clipped steps of one process, in fp64, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.models.tiny_models import ModelCase
from helpers.plans.pipeline_plans import LENGTHS, pipeline_plan
from helpers.plans.policies import num_policies, replayed, with_policies
from helpers.plans.sliced_plans import cut
from helpers.ranks.pipeline_steps import check_pipeline

from hf_longctx.plan.core.types import ActivationPolicy, Parameters, StepPlan

# a long sequence in slices with a hybrid, packs, and other slices
LONG = [*([span] for span in cut(0, [15, 11, 9, 5])[:-1]), [cut(0, [15, 11, 9, 5])[-1], (2, 0, 9)]]
MIXED = [*([span] for span in cut(1, [12, 11])), [(3, 0, 7), (4, 0, 5)]]
# name -> (stages, groups of every micro-batch)
SHAPES: dict[str, tuple[int, list[list[tuple[int, Any]]]]] = {
    "2 x 1": (2, [[(1, [*LONG, *MIXED])], [(1, [[(5, 0, 17)], [(5, 17, 30)]])]]),
    "4 x 1": (4, [[(1, LONG)], [(1, [*MIXED, [(5, 0, 17)], [(5, 17, 30)]])]]),
    # groups side by side have different numbers of chunks
    "2 x 2": (2, [[(1, LONG), (1, MIXED)], [(2, [[(5, 0, 17)], [(5, 17, 30)]])]]),
}
POLICIES = [replayed(0.0, 0.5), replayed(1.0, mlp=0.5, input_host=1.0)]
PARAMETERS: tuple[Parameters, ...] = ("replicated", "gathered_per_round", "gathered_per_step", "sharded")


def plan_of(shape: str, parameters: Parameters = "replicated", has_policies: bool = True, **changes: Any) -> StepPlan:
    """The plan of a shape, in which every stage runs heads, and layers of some chunks are recomputed or offloaded."""
    num_stages, groups = SHAPES[shape]
    plan = pipeline_plan(LENGTHS, groups, num_stages, parameters=parameters, head_shares=(1.0,) * num_stages, **changes)
    heads = [group.head_stages for micro_batch in plan.micro_batches for group in micro_batch.groups]
    assert {stage for each in heads for stage in each.values()} == set(range(num_stages - 1))
    if not has_policies:
        return plan
    policies = [
        ActivationPolicy(0, 0, tuple(POLICIES[: place % 3]), tile_tokens=4 * (place % 2)) for place in range(num_policies(plan))
    ]
    return with_policies(plan, policies)


def num_ranks(plan: StepPlan) -> int:
    return plan.num_stages * plan.ranks_per_stage


# a stage of one rank has nothing to shard
CELLS = [("2 x 1", "replicated"), ("4 x 1", "replicated"), *(("2 x 2", parameters) for parameters in PARAMETERS)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("shape", "parameters"), CELLS)
def test_any_stages_and_parameters_match(ranks, shape: str, parameters: Parameters, tied: bool) -> None:
    plan = plan_of(shape, parameters)
    check_pipeline(ranks(num_ranks(plan)), ModelCase(num_layers=4, tied=tied), plan)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 0.0), (2.0, 1.0)], ids=str)
def test_a_rank_without_heads_beside_one_with_heads_matches(ranks, shares: Any, parameters: Parameters, tied: bool) -> None:
    groups = [(1, LONG), (1, [[(5, 0, 30)]])]
    plan = pipeline_plan(LENGTHS, [groups, [(2, MIXED)]], 2, parameters=parameters, head_shares=shares)
    check_pipeline(ranks(4), ModelCase(num_layers=4, tied=tied), plan)


@pytest.mark.parametrize(("shape", "parameters"), [each for each in CELLS if each[1] != "gathered_per_round"])
def test_rounds_in_turns_match(ranks, shape: str, parameters: Parameters) -> None:
    plan = plan_of(shape, parameters, has_turns=True)
    assert any(list(turns) != sorted(turns) for turns in plan.turns)
    check_pipeline(ranks(num_ranks(plan)), ModelCase(num_layers=4), plan)

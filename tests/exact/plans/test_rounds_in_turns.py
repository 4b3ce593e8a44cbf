"""Micro-batches of one schedule, whose passes take turns, give the loss and gradients of one process, in fp64, on gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.models.tiny_models import ModelCase
from helpers.plans.pipeline_plans import LENGTHS, RANDOM_PIPELINES, pipeline_plan, random_schedules
from helpers.plans.policies import layer_policies, num_policies, replayed, with_policies
from helpers.plans.sliced_plans import cut
from helpers.ranks.pipeline_steps import check_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import ActivationPolicy, Parameters, StepPlan

CASE = ModelCase(num_layers=4)
# a long sequence in slices with a hybrid; slices beside packs
LONG = [(2, [*([span] for span in cut(0, [15, 11, 9, 5])[:-1]), [cut(0, [15, 11, 9, 5])[-1], (2, 0, 9)]])]
SHORT = [(1, [*([span] for span in cut(1, [12, 11])), [(3, 0, 7), (4, 0, 5)]]), (1, [[(5, 0, 30)]])]
POLICIES = [replayed(0.0, 0.5), replayed(1.0, mlp=0.5, input_host=1.0)]


def plan_of(num_stages: int, layouts: list[Any], parameters: Parameters, **changes: Any) -> StepPlan:
    """The plan of these layouts in turns, in which some layers of some chunks are recomputed or offloaded."""
    plan = pipeline_plan(LENGTHS, layouts, num_stages, parameters=parameters, has_turns=True, **changes)
    assert any(len(set(turns)) > 1 and list(turns) != sorted(turns) for turns in plan.turns)
    policies = [
        ActivationPolicy(0, 0, tuple(POLICIES[: place % 3]), tile_tokens=4 * (place % 2)) for place in range(num_policies(plan))
    ]
    return with_policies(plan, policies)


@pytest.mark.daily("<1,1>,<2>-replicated")
@pytest.mark.parametrize("parameters", ["replicated", "sharded", "gathered_per_step"])
@pytest.mark.parametrize("layouts", [[LONG, SHORT], [SHORT, LONG]], ids=["<2>,<1,1>", "<1,1>,<2>"])
def test_ranks_change_groups_without_draining(ranks, layouts: list[Any], parameters: Parameters) -> None:
    check_pipeline(ranks(4), CASE, plan_of(2, layouts, parameters))


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["replicated", "sharded", "gathered_per_step"])
def test_four_stages_of_two_ranks_match(ranks, parameters: Parameters) -> None:
    check_pipeline(ranks(8), CASE, plan_of(4, [LONG, SHORT], parameters))


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_interleaved_layer_ranges_take_turns_too(ranks, parameters: Parameters) -> None:
    plan = plan_of(2, [LONG, SHORT], parameters, schedule="interleaved", num_layers=8, num_ranges=2)
    check_pipeline(ranks(4), ModelCase(num_layers=8), plan)


@pytest.mark.wide
def test_rings_take_turns(ranks) -> None:
    check_pipeline(ranks(4), CASE, plan_of(2, [LONG, SHORT], "sharded", method="ring"))


def test_balanced_experts_count_all_tokens_before_the_first_backward(ranks) -> None:
    case = ModelCase("mixtral", num_layers=4, promoted=True, balance=0.3)
    check_pipeline(ranks(4), case, pipeline_plan(LENGTHS, [LONG, SHORT], 2, has_turns=True))


def test_bytes_of_micro_batches_in_flight_together_are_counted_together(ranks) -> None:
    """A slice of the second sequence runs forward before the last backward of the first."""
    first, second = [(2, [[span] for span in cut(0, [20, 20])])], [(2, [[span] for span in cut(1, [20, 20])])]
    plan = pipeline_plan([40, 40], [first, second], 2, has_turns=True)
    # bytes of 40 keys and values of 8 numbers in two layers; half as many for gradients of the front
    sequence = 40 * 2 * 8 * 8 * 2
    for each, expected in ((replace(plan, turns=()), sequence * 3 // 2), (plan, sequence * 5 // 2)):
        assert {memory.kv_book for _, _, _, memory in check_pipeline(ranks(4), CASE, each)} == {expected}


@st.composite
def planned(draw: st.DrawFn, most_ranks: int, parameters: Parameters) -> StepPlan:
    """Random schedules on two stages, or four of one rank, with random policies."""
    most_stages = 2 if most_ranks > 1 else 4
    plan = draw(random_schedules(most_stages, most_ranks, most_tokens=24, parameters=parameters, fixed=True))
    layers = st.lists(layer_policies(), max_size=2).map(tuple)
    policy = st.builds(ActivationPolicy, st.just(0), st.just(0), layers, st.sampled_from([0, 1, 5, 64]), st.integers(1, 3))
    count = num_policies(plan)
    return with_policies(plan, draw(st.lists(policy, min_size=count, max_size=count)))


@pytest.mark.wide
@pytest.mark.parametrize("examples", [6, pytest.param(25, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("ranks_per_stage", "parameters"), [(1, "replicated"), (2, "replicated"), (2, "sharded"), (2, "gathered_per_step")]
)
def test_random_schedules_match(ranks, examples: int, ranks_per_stage: int, parameters: Parameters) -> None:
    """Runs random plans, of which none may hang."""
    pool = ranks(4)

    @settings(RANDOM_PIPELINES, max_examples=examples)
    @given(planned(ranks_per_stage, parameters))
    def matches(plan: StepPlan) -> None:
        case = ModelCase("qwen3", num_layers=sum(stage.num_layers for stage in plan.micro_batches[0].groups[0].stages))
        check_pipeline(pool, case, plan)

    matches()

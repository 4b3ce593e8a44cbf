"""Types of a plan: actions as text, derived sizes, a rank's path through a step, and identity."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.plans.fixture_plans import FIXTURE_NAMES, fixture
from helpers.plans.layouts import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.types import (
    ACTION_KINDS,
    Action,
    Chunk,
    Estimate,
    GroupShape,
    LayerRange,
    SequenceGroup,
    Span,
    StagePlan,
    TensorShare,
)

pytestmark = pytest.mark.quick

numbers = st.integers(min_value=0, max_value=200)
actions = st.builds(
    Action,
    kind=st.sampled_from(ACTION_KINDS),
    stage=numbers,
    chunk=numbers,
    layer_range=numbers,
    lenders=st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action("F", 2, 0)),
        ("2SB0", Action("SB", 2, 0)),
        ("12RF34", Action("RF", 12, 34)),
        ("3RB1", Action("RB", 3, 1)),
        ("2.1F0", Action("F", 2, 0, layer_range=1)),
        ("2F0@3:0,3:1", Action("F", 2, 0, lenders=((3, 0), (3, 1)))),
        ("2.3B10@0:1", Action("B", 2, 10, layer_range=3, lenders=((0, 1),))),
    ],
)
def test_an_action_reads_and_writes_as_the_design_spells_it(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text


@settings(derandomize=True, deadline=None)
@given(actions)
def test_every_action_survives_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "0D2H0", "0H2D0", "0FREE0", "2F0@", "2F0@3", "2 F0", "2F0 ", "-1F0", "2F0@3:0,", "2.F0", "2f0"],
)
def test_what_is_not_an_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="'2F0'"):
        Action.parse(text)


def test_a_slice_knows_its_prefix() -> None:
    chunk = Chunk(1, (Span(3, 10, 14), Span(4, 0, 6)))
    assert chunk.num_tokens == 10
    assert chunk.prefix_tokens == 10


def test_the_dummy_chunk_is_empty() -> None:
    dummy = Chunk(0)
    assert (dummy.num_tokens, dummy.prefix_tokens) == (0, 0)


def test_a_stage_counts_the_layers_of_all_ranges() -> None:
    assert StagePlan(0, (LayerRange(0, 2), LayerRange(8, 3)), ()).num_layers == 5


def test_the_total_of_a_share_is_the_sum_of_its_three_fields() -> None:
    assert TensorShare("mlp", recompute=0.125, host=0.5, device=0.0625).total == 0.6875


@pytest.mark.parametrize("degree", [1, 4, 6])
def test_a_group_made_of_a_shape_has_this_shape(degree: int) -> None:
    for ulysses in (each for each in range(1, degree + 1) if degree % each == 0):
        shape = GroupShape(degree, ulysses)
        group = SequenceGroup.of(shape, range(2, 2 + degree), (Chunk(0),))
        assert group.shape == shape
        assert group == SequenceGroup(
            tuple(range(2, 2 + degree)), shape.method, (Chunk(0),), (), ulysses if shape.method == "hybrid" else 0
        )


def test_the_layout_follows_positions_not_the_order_of_groups() -> None:
    micro_batch = fixture("flexsp").micro_batches[1]
    assert micro_batch.layout == "<2,1,1>"
    assert dataclasses.replace(micro_batch, groups=micro_batch.groups[::-1]).layout == "<2,1,1>"
    assert fixture("flexsp").layout == "<4>,<2,1,1>,<1,1,1,1>"
    assert fixture("nested").layout == "<4>,<2>,<1,1,2>"


def test_a_rank_finds_its_stage_and_group_in_every_micro_batch() -> None:
    plan = fixture("pp_sp_replicas")
    # rank = stage * ranks_per_stage + position: rank 5 is position 1 of stage 1
    path = plan.for_rank(5)
    assert (path.rank, path.step, path.parameters) == (5, plan.step, plan.parameters)
    [(group, stage)] = path.rounds
    assert group.positions == (0, 1)
    assert stage.stage == 1
    [(group, stage)] = plan.for_rank(2).rounds
    assert (group.positions, stage.stage) == ((2,), 0)


def test_a_rank_skips_the_micro_batches_that_leave_it_out() -> None:
    plan = fixture("nested")
    assert [[group.positions for group, _ in plan.for_rank(rank).rounds] for rank in range(4)] == [
        [(0, 1, 2, 3), (0, 1), (0,)],
        [(0, 1, 2, 3), (0, 1), (1,)],
        [(0, 1, 2, 3), (2, 3)],
        [(0, 1, 2, 3), (2, 3)],
    ]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_plan_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} .*4 ranks"):
        fixture("flexsp").for_rank(rank)


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_plans_can_be_keys_and_cannot_be_changed(name: str) -> None:
    plan = fixture(name)
    assert hash(plan) == hash(fixture(name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step = 1  # type: ignore[misc]
    assert plan_digest(dataclasses.replace(plan, estimate=Estimate(step_s=1e9))) == plan_digest(plan)


def test_equal_neighbours_of_a_layout_are_folded() -> None:
    layout = [[(2, (0,))], [(1, (1,)), (1, (2,))], [(1, (3,))], [(1, (4,))], [(2, (5,))]]
    plan = plan_of(layout, [60, 9, 9, 8, 7, 50], 2)
    runs = {"<2>,<2>,<1,1>,<1,1>,<1,1>": "<2> x2 <1x2> x3"}
    assert runs[plan.layout] == plan.folded_layout


def test_equal_groups_of_one_micro_batch_are_folded() -> None:
    assert plan_of([[(2, (0,)), (1, (1,))]], [9, 3], 4).folded_layout == "<2,1x2>"

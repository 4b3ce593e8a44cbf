"""Cells of pipelines: what they may move costs no seconds, and moments have room for what comes and goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.room.test_pipeline_room import LARGE, costs_of, plan_of

from hf_longctx.plan.core.orders import Schedule
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.policies.fit import with_layers
from hf_longctx.plan.predict.pipeline_run import PredictionCache, run_pipeline
from hf_longctx.plan.room.cells import GroupCells

pytestmark = pytest.mark.quick

LENGTHS = [40_000, 9_000, 3_000, 5_000, 7_000]


def plan_with(plan: StepPlan, group: SequenceGroup) -> StepPlan:
    return replace(plan, micro_batches=(MicroBatch((group,)),))


def moving(cells: GroupCells) -> SequenceGroup:
    """The group with all copies that hide, and nothing recomputed."""
    return cells.under(np.zeros(len(cells.cells)), cells.cells.most_offload)


@pytest.mark.parametrize(("copy_bytes_per_s", "vocab_size"), [(1e11, 32_000), (2e10, 32_000), (1e9, 32_000), (2e10, 128_256)])
@pytest.mark.parametrize(("num_stages", "schedule", "num_ranges"), [(4, "elastic", 1), (2, "1f1b", 1), (2, "interleaved", 2)])
def test_copies_that_hide_cost_no_seconds_and_the_bytes_that_were_counted(
    num_stages: int, schedule: Schedule, num_ranges: int, copy_bytes_per_s: float, vocab_size: int
) -> None:
    model = replace(LARGE, vocab_size=vocab_size)
    costs = costs_of(model, num_stages, 2, copy_bytes_per_s)
    plan = plan_of(costs, LENGTHS, 4 if num_ranges == 1 else 1, num_stages, schedule, num_ranges)
    group, byte_model = with_layers(plan.micro_batches[0].groups[0], {}, 1024), ByteModel(model)
    cells = GroupCells(group, costs, 1024, True, PredictionCache())
    under = moving(cells)
    kept_s, moved_s = (
        max(run.times[-1][1] for run in run_pipeline(plan, each, costs, [0.0] * num_stages)) for each in (group, under)
    )
    # the seconds of the head may hide copies of layers before it, which they do not in fact
    assert moved_s == pytest.approx(kept_s, rel=1e-3 if vocab_size < 100_000 else 0.04)
    assert any(layer.share("mlp").host > 0 for stage in under.stages for policy in stage.activations for layer in policy.layers)
    moments = cells.moments([0.0] * num_stages)
    freed = np.zeros(len(moments.excess_bytes))
    for place, (first, stop) in enumerate(zip(moments.first, moments.stop, strict=True)):
        freed[first:stop] += cells.cells.most_offload[place] * cells.cells.offload_bytes[place]
    peaks = np.concatenate([byte_model.moments(under, stage).peak for stage in under.stages])
    # workspace is counted roughly, and predictions judge what the program finds
    assert (peaks <= 1.05 * (moments.excess_bytes - freed)).all()


def test_as_many_layers_leave_at_once_as_a_backward_hides_that_the_forward_does_not() -> None:
    """A link so slow that a forward hides the copies of some layers, and it and the backward of another chunk those of more."""
    costs = costs_of(LARGE, 4, 2, 2e10)
    group = with_layers(plan_of(costs, LENGTHS, 4, 4, "elastic", 1).micro_batches[0].groups[0], {}, 1024)
    cells = GroupCells(group, costs, 1024, True, PredictionCache())
    under = moving(cells)
    beside_next = 0
    for stage in under.stages:
        kinds = [action for action in stage.actions if action.kind in ("F", "B")]
        after = {one.chunk: other for one, other in pairwise(kinds) if one.kind == "F"}
        for policy in stage.activations:
            following = after[policy.chunk]
            goes_on = following.kind == "B" and following.chunk != policy.chunk
            # nothing leaves beside a forward, which would have to wait, nor beside the backward that needs it
            assert goes_on or policy.leaving_layers == 1
            assert policy.leaving_layers <= len(policy.layers)
            beside_next += policy.leaving_layers > 1
    assert beside_next


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 5000),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)
def test_policies_of_a_cell_recompute_and_offload_what_was_asked_for(
    num_layers: int, num_tokens: int, recompute_share: float, offload_share: float, keeps_attention: bool, moves_needed: bool
) -> None:
    costs = costs_of(replace(LARGE, num_layers=2 * num_layers), 2, 1)
    group = with_layers(plan_of(costs, [num_tokens], 1, 2).micro_batches[0].groups[0], {}, 1024)
    cells = GroupCells(group, costs, 1024, keeps_attention, PredictionCache(), moves_needed=moves_needed)
    # the last layer moves nothing, and no layer recomputes what it moves
    offload = offload_share * (num_layers - 1) / num_layers
    recompute = recompute_share * num_layers * (1 - offload)
    under = cells.under(np.full(2, recompute), np.full(2, offload))
    validate_plan(plan_with(plan_of(costs, [num_tokens], 1, 2), under))
    layers = under.stages[0].activations[0].layers
    again = sum(layer.share("mlp").recompute for layer in layers)
    moved = sum(layer.share("mlp").host for layer in layers)
    # tokens are whole, and steps of layers are rounded up
    slack = num_layers * (1 / num_tokens + 1e-6)
    if keeps_attention:
        assert recompute - 1e-5 <= again <= recompute + 1 / 8 + slack
        assert moved <= num_layers * offload + 1e-9
        # layers that recompute one step more than others may have less to move
        assert moved >= num_layers * offload - (again - recompute) - (num_layers - 1) / 4 / 8 - slack
    else:
        assert recompute - 1e-5 <= again < recompute + 1
    needed = [layer.share("layer_input") for layer in layers]
    assert all(share.recompute == 0 for share in needed)
    if moves_needed:
        assert sum(share.host for share in needed) == pytest.approx(again + moved)
    else:
        assert sum(share.host for share in needed) == pytest.approx(moved)
    assert all(layer.share("attention_output").recompute in (0, 1) for layer in layers)

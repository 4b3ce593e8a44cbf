"""Tokens that see each other both ways: no slice ends inside a block, no ring runs one, and plans keep them in JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.layouts import plan_of
from helpers.plans.sliced_plans import cut, sliced_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.chunks import outside_blocks
from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import Blocks
from hf_longctx.plan.core.validate import PlanError, validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import most_tokens
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step

MODEL = ModelSpec(4, 256, 704, 8, 2, 32, 4096, 1 << 20, bytes_per_element=2)
CLUSTER = ClusterSpec(2, 2, GENERIC_GPU)
COSTS = CostModel(MODEL, CLUSTER, default_coefficients(MODEL, CLUSTER))
DEVICE_BYTES = 256 << 20
BUDGET = ByteModel(MODEL).budget(DEVICE_BYTES, 1 << 26, 2048, is_shared=True)
CONFIG = PlannerConfig(most_tokens(MODEL, DEVICE_BYTES, 1 << 26, 2048, is_shared=True), (1, 2), activations=BUDGET)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], tuple[Blocks, ...]]:
    """Sequences with images of 256 or 1,120 tokens here and there, some too long to keep everything."""
    lengths, blocks = [], []
    for share in draw(st.lists(st.sampled_from([0.01, 0.3, 0.8, 1.95]), min_size=1, max_size=4)):
        length, own, place = int(share * CONFIG.tokens_per_rank), [], 0
        while True:
            begin = place + draw(st.integers(1, 9000))
            place = begin + draw(st.sampled_from([256, 1120]))
            if place > length or len(own) > 30:
                break
            own.append((begin, place))
        lengths.append(length)
        blocks.append(tuple(own))
    return lengths, tuple(blocks)


@pytest.mark.wide
@given(sequences(), st.sampled_from(["replicated", "sharded"]))
@settings(max_examples=15, deadline=None)
def test_no_slice_ends_inside_a_block_and_groups_divide_heads(
    drawn: tuple[list[int], tuple[Blocks, ...]], parameters: str
) -> None:
    lengths, blocks = drawn
    costs = replace(COSTS, parameters=parameters, shard_ranks=2)  # type: ignore[arg-type]
    plan = plan_step(0, lengths, costs, CONFIG, blocks=blocks)
    assert plan.blocks == blocks
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            assert group.shape.num_blocks == 1
            for span in (span for chunk in group.chunks for span in chunk.spans):
                assert not [block for block in blocks[span.sequence] if block[0] < span.stop < block[1]]
    again = plan_from_json(plan_to_json(plan))
    assert again.blocks == blocks
    assert plan_digest(again) == plan_digest(plan) != plan_digest(replace(plan, blocks=()))


def test_equal_lengths_are_cut_by_their_own_blocks() -> None:
    length = int(1.95 * CONFIG.tokens_per_rank)
    # every place but a few is inside some block of one of the sequences
    blocks = tuple(tuple((place, place + 1120) for place in range(first, length - 1120, 1120)) for first in (1, 700))
    plan = plan_step(0, [length, length], COSTS, replace(CONFIG, degrees=(2,)), blocks=blocks)
    assert sum(len(chunk.spans) for m in plan.micro_batches for g in m.groups for chunk in g.chunks) > 2


@given(st.lists(st.integers(0, 100), min_size=2, max_size=9), st.sets(st.integers(1, 99), max_size=8))
def test_bounds_move_to_the_nearer_end_of_a_block(given_bounds: list[int], ends: set[int]) -> None:
    ordered = sorted(ends)
    blocks = tuple(zip(ordered[::2], ordered[1::2], strict=False))
    bounds = sorted({0, 100, *given_bounds})
    found = outside_blocks(bounds, blocks)
    assert found[0] == 0 and found[-1] == 100 and len(set(found)) == len(found)
    for bound in bounds:
        inside = [block for block in blocks if block[0] < bound < block[1]]
        nearest = [min(block, key=lambda end: abs(end - bound)) for block in inside if 2 * bound != sum(block)]
        assert set(nearest) <= set(found)
        assert (bound in found) == (not inside)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (((), ((4, 9),)), "blocks are given for 2 sequences, but the plan has 1"),
        ((((4, 31),),), r"block \(4, 31\) is empty, overlaps the one before, or lies outside its 30 tokens"),
        ((((4, 9), (8, 12)),), r"block \(8, 12\) is empty, overlaps"),
        ((((4, 11),),), r"ends inside the block \(4, 11\)"),
    ],
)
def test_wrong_blocks_are_refused_by_their_places(blocks: tuple[Blocks, ...], said: str) -> None:
    plan = sliced_plan([30], [[span] for span in cut(0, (10, 20))])
    validate_plan(replace(plan, blocks=(((4, 10),),)))
    with pytest.raises(PlanError, match=said):
        validate_plan(replace(plan, blocks=blocks))


def test_rings_are_refused_for_blocks() -> None:
    plan = plan_of([[(2, (0,))]], [30], 2, ulysses=1)
    with pytest.raises(PlanError, match="which rings do not compute; let groups divide heads"):
        validate_plan(replace(plan, blocks=(((4, 10),),)))


def test_blocks_in_json_are_pairs() -> None:
    text = plan_to_json(replace(plan_of([[(1, (0,))]], [30], 1), blocks=(((4, 10),),)))
    with pytest.raises(ValueError, match=r"plan.blocks\[0\]: expected \[begin, end\], found \[4, 10, 11\]"):
        plan_from_json(text.replace("[4, 10]", "[4, 10, 11]"))

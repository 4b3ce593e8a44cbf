"""Stages hold what was predicted: chunks in flight, keys and values, saved tensors on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.measures.stage_memory import check_held_memory
from helpers.models.tiny_models import ModelCase
from helpers.plans.pipeline_plans import LENGTHS, WHOLE, pipeline_plan
from helpers.plans.policies import num_policies, replayed, with_policies
from helpers.plans.sliced_plans import cut

from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy, StepPlan

# families of four and three slices, and a whole sequence; the longest has more slices than there are stages
LONG = [
    *([span] for span in cut(0, [15, 11, 9, 5])),
    *([span] for span in cut(1, [12, 6, 5])),
    [(2, 0, 9), (3, 0, 7)],
    *([span] for span in cut(5, [20, 10])),
    [(4, 0, 5)],
]


PARTS = (replayed(0.0, 0.5), LayerPolicy(), replayed(1.0, mlp=0.5, input_host=1.0), replayed(0.3, 0.2, 0.7))
# ranks that share a chunk hold some heads of all its tokens, so that parts and odd numbers of tokens are rounded otherwise
ALL_OR_NOTHING = (replayed(0.0, 1.0), LayerPolicy(), replayed(1.0, mlp=0.0, input_host=1.0), replayed(0.0))


def mixed_policies(plan: StepPlan, layers: Sequence[LayerPolicy] = PARTS) -> StepPlan:
    """Layers that are replayed, offloaded or left alone, in turns over chunks and parts."""
    policies = [
        ActivationPolicy(0, 0, (layers[place % 4], *layers[: place % 3]), tile_tokens=4 * (place % 2))
        for place in range(num_policies(plan))
    ]
    return with_policies(plan, policies)


@pytest.mark.daily("2-gpipe")
@pytest.mark.parametrize("schedule", ["1f1b", "elastic", "gpipe"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_hold_as_many_chunks_and_bytes_as_the_judge_says(ranks, num_stages: int, schedule) -> None:
    case = ModelCase("qwen3", num_layers=2 * num_stages + 1)
    plan = pipeline_plan(LENGTHS, [[(1, LONG)]], num_stages, schedule, 2 * num_stages + 1)
    memories = check_held_memory(ranks(num_stages), case, plan)
    assert all(memory.kv_book > 0 and not memory.saved for memory in memories)


@pytest.mark.wide
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_ranges", [1, 2])
def test_saved_bytes_under_policies_are_those_predicted_for_every_stage(ranks, num_stages: int, num_ranges: int) -> None:
    num_layers = 2 * num_stages * num_ranges
    schedule = "interleaved" if num_ranges > 1 else "elastic"
    plan = mixed_policies(pipeline_plan(LENGTHS, [[(1, LONG)]], num_stages, schedule, num_layers, num_ranges))
    memories = check_held_memory(ranks(num_stages), ModelCase("qwen3", num_layers=num_layers), plan)
    assert all(memory.saved and memory.host and memory.kv_book for memory in memories)
    # earlier stages wait longer for their backwards
    assert memories[0].saved > memories[-1].saved


@pytest.mark.wide
def test_groups_side_by_side_and_rounds_in_a_row_are_counted_by_rank(ranks) -> None:
    shared, own = [[span] for span in cut(0, [16, 10, 8, 6])], [*([span] for span in cut(1, [12, 11])), [(2, 0, 9), (3, 0, 7)]]
    plan = pipeline_plan(LENGTHS, [[(2, shared)], [(1, own), (1, [[(5, 0, 30)], [(4, 0, 5)]])]], 2)
    memories = check_held_memory(ranks(4), ModelCase(num_layers=4), mixed_policies(plan, ALL_OR_NOTHING))
    # both ranks of a stage share a long sequence, then one of them has more to itself
    assert memories[0].saved != memories[1].saved


@pytest.mark.daily("replicated")
@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_micro_batches_in_turns_are_counted_together_on_every_rank(ranks, parameters) -> None:
    shared, own = [[span] for span in cut(0, [16, 10, 8, 6])], [*([span] for span in cut(1, [12, 11])), [(2, 0, 9), (3, 0, 7)]]
    layouts = [[(2, shared)], [(1, own), (1, [[(5, 0, 30)], [(4, 0, 5)]])]]
    plan = mixed_policies(pipeline_plan(LENGTHS, layouts, 2, parameters=parameters, has_turns=True), ALL_OR_NOTHING)
    together, apart = (check_held_memory(ranks(4), ModelCase(num_layers=4), each) for each in (plan, replace(plan, turns=())))
    assert together[0].kv_book > apart[0].kv_book
    assert sum(memory.saved for memory in together) > sum(memory.saved for memory in apart)


def test_whole_sequences_keep_no_book(ranks) -> None:
    plan = pipeline_plan(LENGTHS, [[(1, WHOLE)]], 2, "1f1b")
    assert [memory.kv_book for memory in check_held_memory(ranks(2), ModelCase(num_layers=4), plan)] == [0, 0]


@pytest.mark.wide
def test_the_elastic_window_holds_fewer_bytes_than_the_fixed_one_behind_a_long_family(ranks) -> None:
    short = [[(1, 0, 23)], [(2, 0, 9)], [(3, 0, 7)], [(4, 0, 5)], [(5, 0, 30)]]
    chunks = [*([span] for span in cut(0, [15, 11, 9, 5])), *short]
    held = {}
    for schedule in ("1f1b", "elastic"):
        plan = pipeline_plan(LENGTHS, [[(1, chunks)]], 2, schedule)
        keep_inputs = ActivationPolicy(0, 0, (replayed(1.0), replayed(1.0)))
        plan = with_policies(plan, [keep_inputs] * num_policies(plan))
        held[schedule] = [memory.saved for memory in check_held_memory(ranks(2), ModelCase(num_layers=4), plan)]
    assert all(elastic <= fixed for elastic, fixed in zip(held["elastic"], held["1f1b"], strict=True))
    assert held["elastic"] != held["1f1b"]

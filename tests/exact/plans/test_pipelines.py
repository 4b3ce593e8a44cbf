"""Any plan of pipeline stages gives the loss and the gradients of one plain Hugging Face process, in fp64, on gloo ranks."""

from __future__ import annotations

import pytest
from helpers.models.tiny_models import ModelCase
from helpers.plans.pipeline_plans import LENGTHS, RANDOM_PIPELINES, SLICED, WHOLE, pipeline_plan, random_chunks
from helpers.plans.policies import layer_policies, num_policies, replayed, with_policies
from helpers.plans.sliced_plans import cut
from helpers.ranks.pipeline_steps import check_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import ActivationPolicy, StepPlan


@pytest.mark.daily("whole-1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "elastic", "gpipe"])
@pytest.mark.parametrize("chunks", [SLICED, WHOLE], ids=["slices", "whole"])
def test_every_schedule_matches_one_plain_process(ranks, schedule, chunks) -> None:
    check_pipeline(ranks(2), ModelCase(num_layers=4), pipeline_plan(LENGTHS, [[(1, chunks)]], 2, schedule))


@pytest.mark.daily("mistral_window")
@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
def test_four_stages_match(ranks, family) -> None:
    check_pipeline(ranks(4), ModelCase(family, num_layers=5), pipeline_plan(LENGTHS, [[(1, SLICED)]], 4, num_layers=5))


@pytest.mark.daily("olmo3")
@pytest.mark.parametrize("family", ["olmo3", "gemma2", "deepseek_v3"])
def test_stages_of_other_windows_and_rotary_embeddings_match(ranks, family) -> None:
    check_pipeline(ranks(2), ModelCase(family, promoted=True), pipeline_plan(LENGTHS, [[(1, SLICED)]], 2, num_layers=2))


@pytest.mark.daily("whole-2")
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("chunks", [SLICED, WHOLE], ids=["slices", "whole"])
def test_interleaved_layer_ranges_match(ranks, num_stages, chunks) -> None:
    case = ModelCase(num_layers=8)
    check_pipeline(ranks(num_stages), case, pipeline_plan(LENGTHS, [[(1, chunks)]], num_stages, "interleaved", 8, num_ranges=2))


def test_stages_times_sequence_groups_match(ranks) -> None:
    sliced = [*([span] for span in cut(0, [15, 11, 9, 5])), [(2, 0, 9)]]
    plan = pipeline_plan([40, 23, 9, 7], [[(2, sliced)], [(1, [[(1, 0, 23)]]), (1, [[(3, 0, 7)]])]], 2)
    check_pipeline(ranks(4), ModelCase("qwen3", num_layers=4), plan)


def test_rings_in_stages_match(ranks) -> None:
    # ranks of one stage send each other keys while those of the other run other slices
    sliced = [*([span] for span in cut(0, [15, 11, 9, 5])), [(2, 0, 9)]]
    plan = pipeline_plan([40, 23, 9], [[(2, sliced)], [(2, [[(1, 0, 13)], [(1, 13, 23)]])]], 2, method="ring")
    check_pipeline(ranks(4), ModelCase("mistral_window", num_layers=4), plan)


@pytest.mark.daily("gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_step", "gathered_per_round"])
def test_sharded_stages_match(ranks, parameters) -> None:
    chunks = [[span] for span in cut(0, [15, 11, 9, 5])]
    plan = pipeline_plan([40, 9, 7], [[(2, chunks)], [(1, [[(1, 0, 9)]]), (1, [[(2, 0, 7)]])]], 2, parameters=parameters)
    check_pipeline(ranks(4), ModelCase(num_layers=4), plan)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_step"])
def test_interleaved_ranges_of_sharded_stages_match(ranks, parameters) -> None:
    case = ModelCase(num_layers=8)
    groups = [(2, SLICED)]
    plan = pipeline_plan(LENGTHS, [groups], 2, "interleaved", 8, num_ranges=2, parameters=parameters)
    check_pipeline(ranks(4), case, plan)


@pytest.mark.wide("16")
@pytest.mark.parametrize("num_slices", [1, 2, 16])
def test_any_number_of_slices_matches(ranks, num_slices) -> None:
    sizes = [3] * (num_slices - 1) + [48 - 3 * (num_slices - 1)]
    chunks = [*([span] for span in cut(0, sizes)), [(1, 0, 5)]]
    check_pipeline(ranks(2), ModelCase(num_layers=3), pipeline_plan([48, 5], [[(1, chunks)]], 2, num_layers=3))


def test_adapters_match(ranks) -> None:
    check_pipeline(ranks(2), ModelCase(num_layers=4), pipeline_plan(LENGTHS, [[(1, SLICED)]], 2), lora=True)


@st.composite
def pipelines(draw: st.DrawFn, num_stages: int) -> StepPlan:
    """Random chunks, schedules, layer ranges, micro-batches and policies on stages of one rank."""
    lengths = [draw(st.integers(8, 24)), *draw(st.lists(st.integers(1, 24), max_size=5))]
    num_ranges = draw(st.integers(1, 2))
    schedule = "interleaved" if num_ranges > 1 else draw(st.sampled_from(["1f1b", "elastic", "gpipe"]))
    place = draw(st.integers(1, len(lengths)))
    rounds = [range(place), range(place, len(lengths))] if place < len(lengths) else [range(place)]
    micro_batches = [[(1, draw(random_chunks(sequences, lengths)))] for sequences in rounds]
    plan = pipeline_plan(lengths, micro_batches, num_stages, schedule, 2 * num_stages, num_ranges)
    layers = st.lists(layer_policies(), max_size=2).map(tuple)
    policy = st.builds(ActivationPolicy, st.just(0), st.just(0), layers, st.sampled_from([0, 1, 5, 64]), st.integers(1, 3))
    count = num_policies(plan)
    return with_policies(plan, draw(st.lists(policy, min_size=count, max_size=count)))


@pytest.mark.wide
@pytest.mark.parametrize("examples", [4, pytest.param(25, marks=pytest.mark.wide)])
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_random_pipelines_with_random_policies_match(ranks, examples: int, num_stages: int) -> None:
    """Runs random plans, of which none may hang."""
    pool = ranks(num_stages)
    case = ModelCase("qwen3", num_layers=2 * num_stages)

    @settings(RANDOM_PIPELINES, max_examples=examples)
    @given(pipelines(num_stages))
    def matches(plan: StepPlan) -> None:
        check_pipeline(pool, case, plan)

    matches()


@pytest.mark.wide
def test_the_union_of_all_four_matches(ranks) -> None:
    """Two stages of groups <2,1>: a long sequence in slices next to packs and a hybrid, some layers recomputed or offloaded."""
    long = [[span] for span in cut(0, [15, 11, 9, 5])]
    mixed = [*([span] for span in cut(1, [12, 11])), [(2, 0, 9), (3, 0, 7)], [(4, 0, 5), (5, 0, 3)]]
    mixed[1] = [*mixed[1], (6, 0, 4)]
    plan = pipeline_plan([40, 23, 9, 7, 5, 3, 4], [[(2, long), (1, mixed)]], 2)
    layers = [replayed(0.0, 0.5), replayed(1.0, mlp=0.5, input_host=1.0)]
    policies = [
        ActivationPolicy(0, 0, tuple(layers[: place % 3]), tile_tokens=4 * (place % 2)) for place in range(num_policies(plan))
    ]
    plan = with_policies(plan, policies)
    assert plan.micro_batches[0].layout == "<2,1>"
    results = check_pipeline(ranks(6), ModelCase(num_layers=4), plan)
    assert any(memory.host for *_, memory in results)


def test_a_tied_weight_gets_the_gradients_of_both_ends(ranks) -> None:
    check_pipeline(ranks(2), ModelCase(num_layers=4, tied=True), pipeline_plan(LENGTHS, [[(1, SLICED)]], 2))

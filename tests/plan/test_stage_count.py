"""The number of stages is within 3 % of what a loop over all stages, layouts and numbers of slices finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import lognormal_lengths
from helpers.plans.pipeline_plans import stage_ranges
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.chunks import elastic_chunks
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.settings import GENERIC_GPU, ActivationBudget, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import GroupShape, Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.pipeline.search import NotFaster
from hf_longctx.plan.pipeline.staged_step import pipeline_by_lead
from hf_longctx.plan.planner import plan_step, step_bound_s
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.plan.stage_count import StageSetup, stage_counts, stage_options

DEGREES = (1, 2, 4, 8)
PLENTY = PlannerConfig(1_000_000, DEGREES)
CASES = {
    "one document": [6000],
    "a long one among short ones": [5000, *lognormal_lengths(4, 30, 600, median=150.0)],
    "mixture": list(lognormal_lengths(5, 24, 4000)),
    "short ones": list(lognormal_lengths(6, 48, 200, median=80.0, sigma=0.5)),
}


def setup(num_stages: int, num_ranges: int, costs: CostModel, config: PlannerConfig) -> StageSetup:
    """The whole model's layers on so many stages, in so many ranges each, and the degrees that fit into one."""
    degrees = tuple(d for d in DEGREES if d <= costs.cluster.num_ranks // num_stages)
    ranges = stage_ranges(costs.model, num_stages, num_ranges) if num_stages > 1 else ()
    return StageSetup(costs, replace(config, degrees=degrees, stages=ranges))


def partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Degrees, descending, that sum up to `total`."""
    if not total:
        yield ()
    for degree in (d for d in DEGREES if d <= min(largest, total)):
        for rest in partitions(total - degree, degree):
            yield (degree, *rest)


def deal(lengths: Sequence[int], layout: Sequence[int], costs: CostModel) -> list[list[int]]:
    """Deals sequences, longest first, each to the group that finishes it first; seconds are the cost model's for whole models."""
    done = [0.0] * len(layout)
    parts: list[list[int]] = [[] for _ in layout]
    added = {d: costs.sequences_s(list(lengths), GroupShape(d, d)).tolist() for d in set(layout)}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        group = min(range(len(layout)), key=lambda g: done[g] + added[layout[g]][i])
        done[group] += added[layout[group]][i]
        parts[group].append(i)
    return parts


def least_group_s(lengths: Sequence[int], part: tuple[int, ...], degree: int, costs: CostModel, stages: int) -> float:
    """Seconds of one group's pipeline with the best of all numbers of slices and sizes of packs."""
    own = {i: lengths[i] for i in part}
    forward, backward = costs.coefficients.forward, costs.coefficients.backward
    pair_s, token_s = forward.pair_s + backward.pair_s, forward.token_s + backward.token_s
    work_s = sum(pair_s * n * n / 2 + token_s * n for n in own.values())
    ways = [(count, 0.0) for count in range(1, 25)] + [(1, work_s / count) for count in range(1, 33)]
    chunks = {elastic_chunks(own, count, SpanRates(pair_s, token_s), 1 << 40, target_s) for count, target_s in ways}
    per_stage, per_node = costs.cluster.num_ranks // stages, costs.cluster.ranks_per_node
    leaves = [(stage + 1) % stages * per_stage // per_node != stage * per_stage // per_node for stage in range(stages)]
    ranges = stage_ranges(costs.model, stages)
    # these seconds equal `evaluate_plan`'s, see test_staged_step.py
    shape = GroupShape(degree, degree)
    pipelines = [pipeline_by_lead([(made, shape)], costs, ranges, "elastic", leaves) for made in chunks]
    return min(pipeline(lead)[0] for pipeline in pipelines for lead in (1.0, 1.5, 2.0))


def exhaustive_s(lengths: Sequence[int], costs: CostModel) -> dict[int, float]:
    """The least seconds of a step for every number of stages."""
    num_ranks, once_s = costs.cluster.num_ranks, costs.coefficients.step_s
    found = {
        1: plan_step(0, lengths, costs, replace(PLENTY, degrees=tuple(d for d in DEGREES if d <= num_ranks))).estimate.step_s
    }
    least = cache(lambda part, degree, stages: least_group_s(lengths, part, degree, costs, stages))
    for stages in (count for count in (2, 4) if num_ranks % count == 0):
        seconds = []
        for layout in partitions(num_ranks // stages, num_ranks):
            parts = zip(deal(lengths, layout, costs), layout, strict=True)
            seconds.append(max(least(tuple(part), degree, stages) for part, degree in parts if part))
        found[stages] = min(seconds) + once_s
    return found


@pytest.mark.daily("4-exchange-one document")
@pytest.mark.parametrize(
    "num_ranks, kind, case",
    [
        *((4, kind, case) for kind in ("attention", "exchange") for case in CASES),
        (8, "attention", "one document"),
        (8, "attention", "mixture"),
        (8, "exchange", "a long one among short ones"),
        (8, "exchange", "short ones"),
    ],
)
def test_the_choice_is_within_3_percent_of_everything(num_ranks: int, kind: str, case: str) -> None:
    costs, lengths = cost_model(kind, num_ranks), CASES[case]
    best = exhaustive_s(lengths, costs)
    counts = stage_counts(num_ranks, costs.model.num_layers, DEGREES)
    options = stage_options(lengths, counts, lambda count, num_ranges, _: setup(count, num_ranges, costs, PLENTY))
    assert {option.num_stages for option in options.fitting} | {count for count, _ in options.slower} == set(best)
    for option in options.fitting:
        assert option.counted_s <= 1.03 * best[option.num_stages]
    for count, least_s in options.slower:
        assert least_s <= 1.03 * best[count]
        assert min(option.counted_s for option in options.fitting if option.num_stages > 1) <= 1.03 * best[count]
    assert best[options.fitting[0].num_stages] <= 1.03 * min(best.values())


def test_a_model_that_one_rank_cannot_hold_gets_stages() -> None:
    costs = cost_model("attention", 4)
    device_bytes = ByteModel(costs.model).states(costs.parameters, costs.shard_ranks)

    def within(count: int, num_ranges: int, _: float) -> StageSetup:
        found = setup(count, num_ranges, costs, PlannerConfig(1000, DEGREES))
        held = ByteModel(costs.model).most_states(found.config.stages, "replicated", 1) if count > 1 else device_bytes
        return replace(found, config=replace(found.config, activations=ActivationBudget(0, device_bytes - held, 0)))

    with pytest.raises(ValueError, match="do not fit beside the model"):
        stage_options([300, 200, 100], [1], within)
    options = stage_options([300, 200, 100], [1, 2, 4], within)
    assert options.fitting and 1 not in {option.num_stages for option in options.fitting}


def test_longer_sequences_than_there_is_room_for_count_as_that_long() -> None:
    costs = cost_model("linear", 2)
    with pytest.raises(ValueError, match="sequence 0 has 5000 tokens"):
        stage_options([5000], [1, 2], lambda count, num_ranges, _: setup(count, num_ranges, costs, PlannerConfig(10, DEGREES)))
    options = stage_options(
        [5000], [1, 2], lambda count, num_ranges, _: replace(setup(count, num_ranges, costs, PLENTY), longest_tokens=12)
    )
    assert {option.plan.lengths for option in options.fitting} == {(12,)}


def test_the_search_ends_after_so_many_that_are_slower_and_the_first_problem_is_named() -> None:
    costs, asked = cost_model("linear", 4), []

    def slower(count: int, num_ranges: int, _: float) -> StageSetup:
        asked.append(count)
        if count in (1, 7):
            raise ValueError(f"not {count} stages")
        return replace(setup(2, num_ranges, costs, PLENTY), longest_tokens=100 * count)

    # 3 is slower than 2, but faster than the one before it
    found = stage_options([5000], [1, 2, 4, 3, 5, 6, 2], slower, most_slower=2)
    assert asked == [1, 2, 4, 3, 5, 6] and [option.num_stages for option in found.fitting] == [2, 3, 4, 5, 6]
    assert found.unfit == ((1, "not 1 stages"),)
    # a stage of more than a node may be slower than one that lies within
    asked.clear()
    stage_options([5000], [2, 4, 5, 6, 8, 9], slower, most_slower=2, num_nodes=8)
    assert asked == [2, 4, 5, 6, 8]
    with pytest.raises(ValueError, match="not 1 stages"):
        stage_options([5000], [1, 7], slower)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=12), st.sampled_from(COST_KINDS), st.integers(2, 3))
def test_interleaving_is_chosen_only_where_it_is_predicted_faster(lengths: list[int], kind: str, interleave: int) -> None:
    costs = deeper(cost_model(kind, 4))
    plain = stage_options(lengths, [2, 4], lambda count, num_ranges, _: setup(count, num_ranges, costs, PLENTY))
    found = stage_options(
        lengths, [2, 4], lambda count, num_ranges, _: setup(count, num_ranges, costs, PLENTY), interleave=interleave
    )
    assert found.fitting[0].counted_s <= plain.fitting[0].counted_s
    assert {option.num_ranges for option in plain.fitting} == {1}
    # options without interleaving equal those of a search without it, but for those that an interleaved one beats
    once = [option.counted_s for option in found.fitting if option.num_ranges == 1]
    assert once == [option.counted_s for option in plain.fitting if option.counted_s in once]
    assert all(option.counted_s in once or option.counted_s >= found.fitting[0].counted_s for option in plain.fitting)
    if found.fitting[0].num_ranges > 1:
        assert found.fitting[0].counted_s <= plain.fitting[0].counted_s
        assert {
            action.layer_range for stage in found.fitting[0].plan.micro_batches[0].groups[0].stages for action in stage.actions
        } == set(range(interleave))


def test_interleaving_divides_the_idle_time_of_few_whole_sequences() -> None:
    costs = deeper(cost_model("fixed", 4))
    costs = replace(costs, coefficients=replace(costs.coefficients, step_s=0.0))
    plain, found = (
        stage_options(
            [400] * 4, [4], lambda count, num_ranges, _: setup(count, num_ranges, costs, PLENTY), interleave=count
        ).fitting[0]
        for count in (1, 2)
    )
    assert found.num_ranges == 2 and found.counted_s < 0.97 * plain.counted_s


def test_interleaving_does_not_count_where_sequences_would_have_to_be_shorter_for_it() -> None:
    costs = deeper(cost_model("linear", 2))

    def short(count: int, num_ranges: int, _: float) -> StageSetup:
        return replace(setup(count, num_ranges, costs, PLENTY), longest_tokens=5000 // num_ranges)

    assert {option.num_ranges for option in stage_options([4000], [2], short, interleave=2).fitting} == {1}
    assert {option.num_ranges for option in stage_options([2500], [2], short, interleave=2).fitting} == {1, 2}


def test_sums_of_gradients_over_a_slow_network_count() -> None:
    # an embedding that is the head, too, would be summed over both stages
    model = replace(named_model("llama-3.2-1b"), tied_embeddings=False)
    hardware = replace(GENERIC_GPU, network_bytes_per_s=2e8)
    cluster = ClusterSpec(4, 2, hardware)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), parameters="replicated", shard_ranks=1)
    one, two = (stage_options([3000] * 6, [count], lambda *way: setup(*way[:2], costs, PLENTY)).fitting[0] for count in (1, 2))
    # stages of one node each sum inside it
    assert weight_seconds(one.plan, costs).left_s > 10 * weight_seconds(two.plan, costs).left_s
    # each of the two ranks sends all bytes of its sum once
    tied = replace(costs, model=replace(model, tied_embeddings=True))
    more_s = weight_seconds(two.plan, tied).left_s - weight_seconds(two.plan, costs).left_s
    assert more_s == pytest.approx(4 * model.vocab_size * model.hidden_size / 2e8, rel=0.01)
    assert one.plan.estimate.counted_s < two.plan.estimate.counted_s and one.counted_s > two.counted_s
    found = stage_options([3000] * 6, [1, 2], lambda *way: setup(*way[:2], costs, PLENTY)).fitting
    assert [option.num_stages for option in found] == [2, 1]


def deeper(costs: CostModel) -> CostModel:
    """The cost model of a model with layers for several ranges per stage."""
    return replace(costs, model=replace(costs.model, num_layers=12, windows=costs.model.windows * 3))


@pytest.mark.wide
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.sampled_from(COST_KINDS),
    st.sampled_from((2, 4)),
    st.sampled_from(("replicated", "sharded", "gathered_per_step", "gathered_per_round")),
    st.floats(0.05, 1.5),
    st.floats(0.5, 1.5),
)
def test_a_plan_that_must_beat_some_seconds_is_the_plan_without_a_limit(
    lengths: list[int], kind: str, stages: int, parameters: Parameters, room: float, factor: float
) -> None:
    """Bounds never drop a plan that is faster, in any way to share parameters and whatever memory is left."""
    costs = cost_model(kind, 8)
    costs = replace(costs, parameters=parameters, shard_ranks=1 if parameters == "replicated" else 8 // stages)
    budget = ActivationBudget(0, int(room * ByteModel(costs.model).kept_bytes(sum(lengths), True)), 1 << 40)
    found = setup(stages, 1, costs, PlannerConfig(1_000_000, DEGREES, activations=budget))
    try:
        plan = plan_step(0, lengths, found.costs, found.config)
    except ValueError:
        return
    counted_s = plan.estimate.counted_s
    assert step_bound_s(lengths, found.costs, found.config) <= counted_s * (1 + 1e-9)
    if factor > 1:
        assert plan_digest(plan_step(0, lengths, found.costs, found.config, factor * counted_s)) == plan_digest(plan)
        return
    with pytest.raises(NotFaster) as caught:
        plan_step(0, lengths, found.costs, found.config, factor * counted_s)
    assert factor * counted_s <= caught.value.least_s <= counted_s * (1 + 1e-9)

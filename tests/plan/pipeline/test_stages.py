"""Which layers every stage gets: the least for the most loaded stage, with the head, with layers of unequal work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.plans.layouts import tiny_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, Ranges, Span
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, PassCoefficients, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.pipeline.stages import balanced_ranges, layer_ranges, stage_layers


def stage_work(stages: Ranges, layer_work: Sequence[float], head: float) -> list[float]:
    """Work of every stage, the head with the last."""
    work = [sum(sum(layer_work[each.first_layer : each.first_layer + each.num_layers]) for each in ranges) for ranges in stages]
    return [*work[:-1], work[-1] + head]


def least_work(layer_work: Sequence[float], num_stages: int, num_ranges: int, head: float) -> float:
    """The least work of the most loaded stage, over all cuts."""
    num_layers, num_virtual = len(layer_work), num_stages * num_ranges
    found = []
    for cut in itertools.combinations(range(1, num_layers), num_virtual - 1):
        ranges = [LayerRange(a, b - a) for a, b in itertools.pairwise((0, *cut, num_layers))]
        found.append(max(stage_work(tuple(tuple(ranges[s::num_stages]) for s in range(num_stages)), layer_work, head)))
    return min(found)


@pytest.mark.parametrize("head_layers", [0.0, 0.4, 1.0, 2.5])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_no_contiguous_cut_has_a_smaller_largest_stage(num_stages: int, head_layers: float) -> None:
    for num_layers in range(num_stages, 12):
        stages = layer_ranges(num_layers, num_stages, head_layers=head_layers)
        counts = [sum(each.num_layers for each in ranges) for ranges in stages]
        cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
        least = min(
            max(b - a + (head_layers if b == num_layers else 0.0) for a, b in itertools.pairwise((0, *cut, num_layers)))
            for cut in cuts
        )
        assert max([*counts[:-1], counts[-1] + head_layers]) == least


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 20), st.sampled_from([0.0, 0.7, 3.0]))
def test_layer_ranges_are_contiguous_in_virtual_order_and_even(num_stages: int, num_ranges: int, more: int, head: float) -> None:
    num_layers = num_stages * num_ranges + more
    stages = layer_ranges(num_layers, num_stages, num_ranges, head)
    in_order = [stages[stage][layer_range] for layer_range in range(num_ranges) for stage in range(num_stages)]
    covered = [
        layer
        for layer_range in in_order
        for layer in range(layer_range.first_layer, layer_range.first_layer + layer_range.num_layers)
    ]
    assert covered == list(range(num_layers))
    counts = [[each.num_layers for each in ranges] for ranges in stages]
    assert all(min(count) >= 1 and max(count) - min(count) <= 1 for count in counts)
    work = [sum(count) for count in counts]
    work[-1] += head
    # nobody could hand a layer to another stage and make the largest smaller
    assert all(max(work) <= other + 1 for other in work) or work[-1] == max(work) == num_ranges + head


def test_the_layers_of_a_small_model_with_a_large_head() -> None:
    ranges = layer_ranges(8, 3, 2, head_layers=1.0)
    assert ranges == (
        (LayerRange(0, 1), LayerRange(3, 2)),
        (LayerRange(1, 1), LayerRange(5, 2)),
        (LayerRange(2, 1), LayerRange(7, 1)),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_layers_of_unequal_work_are_cut_where_the_most_loaded_stage_has_least(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 4))
    layer_work = data.draw(st.lists(st.sampled_from([0.3, 1.0, 2.5, 7.0]), min_size=num_stages, max_size=9))
    head = data.draw(st.sampled_from([0.0, 0.4, 3.0]))
    stages = layer_ranges(len(layer_work), num_stages, head_layers=head, layer_work=layer_work)
    assert max(stage_work(stages, layer_work, head)) <= least_work(layer_work, num_stages, 1, head) + 1e-6
    covered = [
        layer
        for (layer_range,) in stages
        for layer in range(layer_range.first_layer, layer_range.first_layer + layer_range.num_layers)
    ]
    assert covered == list(range(len(layer_work)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_several_ranges_of_unequal_layers_cover_all_and_are_no_worse_than_by_number(data: st.DataObject) -> None:
    num_stages, num_ranges = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    least = num_stages * num_ranges
    layer_work = data.draw(st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=least, max_size=least + 9))
    stages = layer_ranges(len(layer_work), num_stages, num_ranges, 0.5, layer_work)
    in_order = [stages[stage][layer_range] for layer_range in range(num_ranges) for stage in range(num_stages)]
    covered = [
        layer
        for layer_range in in_order
        for layer in range(layer_range.first_layer, layer_range.first_layer + layer_range.num_layers)
    ]
    assert covered == list(range(len(layer_work)))
    assert min(layer_range.num_layers for layer_range in in_order) >= 1
    by_number = layer_ranges(len(layer_work), num_stages, num_ranges, 0.5)
    assert max(stage_work(stages, layer_work, 0.5)) <= max(stage_work(by_number, layer_work, 0.5)) + 1e-6


def test_equal_work_written_out_gives_the_same_layers_as_none() -> None:
    for num_stages, num_ranges in ((2, 1), (4, 1), (3, 2)):
        assert layer_ranges(10, num_stages, num_ranges, 0.7, [1.0] * 10) == layer_ranges(10, num_stages, num_ranges, 0.7)


@pytest.mark.parametrize(("num_layers", "num_stages", "num_ranges"), [(3, 4, 1), (7, 4, 2), (4, 0, 1), (4, 2, 0)])
def test_more_layer_ranges_than_layers_are_refused(num_layers: int, num_stages: int, num_ranges: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{num_layers} layers cannot be cut into {num_stages} stage\(s\) of {num_ranges} layer range"
    ):
        layer_ranges(num_layers, num_stages, num_ranges)


def test_a_dear_head_takes_layers_from_the_last_stage() -> None:
    costs = tiny_costs(2)
    costs = replace(costs, model=replace(costs.model, num_layers=8))
    cheap = replace(costs, model=replace(costs.model, vocab_size=2))
    dear = replace(costs, model=replace(costs.model, vocab_size=2_000))
    assert balanced_ranges(cheap, 2, [50])[1][0].num_layers == 4
    assert balanced_ranges(dear, 2, [50])[1][0].num_layers < 4
    assert balanced_ranges(dear, 1, [50]) == ((LayerRange(0, 8),),)


def test_costs_that_are_nothing_but_constants_split_layers_evenly() -> None:
    costs = tiny_costs(2)
    constant = PassCoefficients(0.0, 0.0, 1.0)
    costs = replace(
        costs,
        model=replace(costs.model, num_layers=8),
        coefficients=replace(costs.coefficients, forward=constant, backward=constant),
    )
    assert [own[0].num_layers for own in balanced_ranges(costs, 2, [50])] == [4, 4]


def test_stages_of_a_model_with_windows_wait_less_for_the_one_with_most_full_layers() -> None:
    model = named_model("gemma-3-27b")
    cluster = ClusterSpec(8, 8, read_profile("h100").spec)
    costs = CostModel(model, cluster, default_coefficients(model, cluster))
    full = [window is None for window in model.windows]

    def slowest_s(ranges: Ranges, length: int) -> float:
        chunk, found = Chunk(0, (Span(0, 0, length),)), []
        for own in ranges:
            count, pairs = sum(each.num_layers for each in own), model.attention_pairs(own)
            passes = (costs.part_s(chunk, GroupShape(1), back, count, own is ranges[-1], pairs=pairs) for back in (False, True))
            found.append(sum(passes))
        return max(found)

    by_number = balanced_ranges(replace(costs, model=replace(model, windows=())), 8, [131_072])
    by_seconds = balanced_ranges(costs, 8, [131_072])
    assert 0 < sum(full) < len(full)
    assert slowest_s(by_seconds, 131_072) < 0.95 * slowest_s(by_number, 131_072)


def work_of(costs: CostModel, ranges: Ranges, length: int, output_shares: Sequence[float]) -> list[float]:
    """Seconds of every stage for a sequence of this length, without constant seconds, as `CostModel` counts them."""
    chunk, shape = Chunk(0, (Span(0, 0, length),)), GroupShape(1)
    bare = costs.coefficients
    bare = replace(bare, forward=replace(bare.forward, chunk_s=0.0), backward=replace(bare.backward, chunk_s=0.0))
    costs = replace(costs, coefficients=bare)
    found = []
    for own, share in zip(ranges, output_shares, strict=True):
        seconds = 0.0
        for is_backward in (False, True):
            seconds += share * costs.part_s(chunk, shape, is_backward, 0, True)
            for each in own:
                pairs = costs.model.attention_pairs((each,))
                seconds += costs.part_s(chunk, shape, is_backward, each.num_layers, False, pairs=pairs)
        found.append(seconds)
    return found


@pytest.mark.parametrize(("name", "num_stages"), [("llama-3.1-70b", 8), ("qwen3-32b", 8), ("qwen3-8b", 8), ("gemma-3-27b", 4)])
def test_stages_share_the_head_if_that_takes_work_off_the_busiest(name: str, num_stages: int) -> None:
    model, length = named_model(name), 65_536
    cluster = ClusterSpec(64, 8, read_profile("h100").spec)
    costs = CostModel(model, cluster, default_coefficients(model, cluster))
    plain = balanced_ranges(costs, num_stages, [length])
    alone = max(work_of(costs, plain, length, (*(num_stages - 1) * (0.0,), 1.0)))
    assert stage_layers(costs, num_stages, 1, [length], spreads_head=False) == (plain, ())
    ranges, shares = stage_layers(costs, num_stages, 1, [length], spreads_head=True)
    if not shares:
        assert ranges == plain
        return
    work = work_of(costs, ranges, length, shares)
    assert sum(shares) == pytest.approx(1) and max(work) < 0.99 * alone
    # the last stages, and each of them some
    first = next(stage for stage, share in enumerate(shares) if share)
    assert all(share > 0 for share in shares[first:]) and first > 0
    # hardly above the least: the mean, or the busiest stage without any head
    least = max(sum(work) / num_stages, *work_of(costs, ranges, length, num_stages * (0.0,)))
    assert max(work) <= 1.016 * least


def test_stages_do_not_share_the_head_of_several_layer_ranges_or_a_cheap_one() -> None:
    costs = tiny_costs(2)
    dear = replace(costs, model=replace(costs.model, num_layers=8, vocab_size=2_000))
    assert stage_layers(dear, 2, 1, [50], spreads_head=True)[1]
    assert not stage_layers(dear, 2, 2, [50], spreads_head=True)[1]
    assert not stage_layers(dear, 1, 1, [50], spreads_head=True)[1]
    cheap = replace(dear, model=replace(dear.model, vocab_size=2))
    assert not stage_layers(cheap, 2, 1, [50], spreads_head=True)[1]

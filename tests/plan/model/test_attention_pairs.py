"""Query-key pairs counted under windows equal those of a causal mask, and the cost model prices attention by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from helpers.plans.cost_models import MODEL, cost_model
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.chunks import slice_bounds
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, Span
from hf_longctx.plan.cost.cost_model import default_coefficients
from hf_longctx.plan.cost.fitting import hardware_rates
from hf_longctx.plan.model.attention_pairs import FULL, AttentionPairs, SpanRates, masked_keys
from hf_longctx.plan.policies.slots import layer_slots

pytestmark = pytest.mark.quick

WINDOWS = st.lists(st.none() | st.integers(1, 90), min_size=1, max_size=5).map(tuple)
# keys that a device computes at once; 0: hidden pairs do not count
TILES = st.sampled_from([0, 16, 64])
ONE = GroupShape(1)


def masked_pairs(windows: tuple[int | None, ...], start: int, stop: int) -> float:
    """Pairs of the rows [start, stop) of causal masks, averaged over layers; a token's pair with itself counts half.

    In a row that a window cuts, the half pair that the window adds at the far end makes up for it: such a row counts in full.
    """
    rows, columns = np.arange(start, stop)[:, None], np.arange(stop)[None, :]
    total = 0.0
    for window in windows:
        mask = columns <= rows if window is None else (columns <= rows) & (columns > rows - window)
        total += float(mask.sum())
        is_cut = rows[:, 0] + 1 > window if window is not None else np.zeros(stop - start, dtype=bool)
        total -= 0.5 * float((~is_cut).sum())
    return total / len(windows)


@given(WINDOWS, st.integers(0, 120), st.integers(1, 120))
def test_pairs_of_a_span_are_those_of_masks(windows: tuple[int | None, ...], start: int, num_tokens: int) -> None:
    pairs = AttentionPairs.of(windows)
    assert pairs.of_span(start, start + num_tokens) == pytest.approx(masked_pairs(windows, start, start + num_tokens))


def test_pairs_by_hand() -> None:
    # 4 tokens after 10 earlier ones have 4 * (10 + 2) pairs; a whole sequence of 6 tokens has 6 * 3
    chunk = Chunk(1, (Span(3, 10, 14), Span(4, 0, 6)))
    assert FULL.of_chunk(chunk) == 48 + 18
    assert FULL.of_chunk(Chunk(0)) == 0
    # under a window of 4 they have 4 * 4 and 4 * 2 + 2 * 4; then two of three layers have this window
    assert AttentionPairs.of((4, 4)).of_chunk(chunk) == 16 + 16
    assert AttentionPairs.of((4, None, 4)).of_chunk(chunk) == pytest.approx((48 + 18 + 2 * 32) / 3)
    # with 3 keys at once, a masked square of 4 tokens computes 3, 3, 3 and 4 keys: 5 more than half of it, for every 4 tokens.
    # All 4 tokens of the slice are beyond the window, and 2 of the whole sequence
    assert masked_keys(4, 3) == 5 / 4
    assert AttentionPairs.of((4, None), 3).of_chunk(chunk) == pytest.approx((48 + 18 + 32 + 6 * 5 / 4) / 2)
    assert AttentionPairs.of((None, None), 3) == AttentionPairs.of((), 3) == FULL


@given(WINDOWS, TILES, st.lists(st.integers(0, 200), min_size=2, max_size=6, unique=True))
def test_slices_have_as_many_pairs_as_the_whole_sequence(
    windows: tuple[int | None, ...], tile_keys: int, bounds: list[int]
) -> None:
    pairs, bounds = AttentionPairs.of(windows, tile_keys), sorted(bounds)
    counts = [pairs.of_span(start, stop) for start, stop in pairwise(bounds)]
    assert sum(counts) == pytest.approx(pairs.of_span(bounds[0], bounds[-1]))
    # planner and solvers rely on this count being convex and increasing
    density = [count / (stop - start) for count, (start, stop) in zip(counts, pairwise(bounds), strict=True)]
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(density)) and min(density) > 0


RATES = st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1e-3, 1.0), (0.5, 1.0)])


@given(WINDOWS, TILES, st.integers(1, 400), st.floats(1e-3, 1), RATES)
def test_tokens_in_is_the_inverse_of_seconds(
    windows: tuple[int | None, ...], tile_keys: int, num_tokens: int, share: float, rates: tuple[float, float]
) -> None:
    spans = SpanRates(*rates, AttentionPairs.of(windows, tile_keys))
    seconds = share * spans.of_span(0, num_tokens)
    tokens = spans.tokens_in(seconds)
    assert spans.pair_s * spans.pairs.of_span(0, tokens) + spans.token_s * tokens == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_slices_are_cut_the_more_evenly_the_more_layers_have_windows() -> None:
    rates = [SpanRates(1.0, 0.0, AttentionPairs.of(windows)) for windows in ((None, None), (10, None), (10, 10))]
    sizes = [[stop - start for start, stop in pairwise(slice_bounds(10_000, 8, each))] for each in rates]
    spread = [max(each) / min(each) for each in sizes]
    assert spread[0] > 5 and spread[0] > spread[1] > spread[2] and spread[2] < 1.01
    # one layer of each kind: half of a full triangle plus half of a band of 10
    triangle, band = 10_000**2 / 2, 10 * 10_000 - 50
    assert rates[1].of_span(0, 10_000) == (triangle + band) / 2


def test_layers_are_priced_by_their_own_windows() -> None:
    costs = replace(cost_model("attention", 1), model=replace(MODEL, windows=(20, 20, None, None)))
    chunk, front, back = Chunk(0, (Span(0, 30, 130),)), (LayerRange(0, 2),), (LayerRange(2, 2),)
    # seconds of one layer, at 1e-6 s for a pair in all four layers
    banded_s, full_s = 1e-6 * 100 * 20 / 4, 1e-6 * 100 * 80 / 4
    base_s = cost_model("linear", 1).part_s(chunk, ONE, False, 2, has_head=True) + 2 * 1e-3 / 4
    for layer_ranges, layer_s in ((front, banded_s), (back, full_s), ((), (banded_s + full_s) / 2)):
        pairs = costs.model.attention_pairs(layer_ranges)
        assert costs.part_s(chunk, ONE, False, 2, True, pairs=pairs) == pytest.approx(base_s + 2 * layer_s)
    slots = layer_slots(costs, chunk, ONE)
    again_s = [next(item for item in slot.saved if item.tensor_class == "attention_output").recompute_s for slot in slots]
    assert again_s == pytest.approx([banded_s, banded_s, full_s, full_s])
    # the front half of the rows has half of the band's pairs, and 50 * (30 + 25) of the 100 * 80 pairs of full attention
    halves_s = [item.recompute_part_s(0.5) for slot in slots for item in slot.saved if item.tensor_class == "attention_output"]
    assert halves_s == pytest.approx([banded_s / 2, banded_s / 2, full_s * 2750 / 8000, full_s * 2750 / 8000])
    assert [slot.forward_s - slots[0].forward_s for slot in slots] == pytest.approx([0, 0, full_s - banded_s, full_s - banded_s])


@pytest.mark.parametrize("tile_keys", [0, 16])
def test_whole_sequences_cost_what_their_chunks_do(tile_keys: int) -> None:
    costs = replace(cost_model("attention", 4), model=replace(MODEL, windows=(20, None, 70, 20)))
    costs = replace(costs, cluster=replace(costs.cluster, hardware=replace(costs.cluster.hardware, tile_keys=tile_keys)))
    for degree in (1, 2, 4):
        shape = GroupShape(degree, degree)
        for length in (10, 20, 50, 300):
            chunk = Chunk(0, (Span(0, 0, length),))
            whole_s = costs.forward_s(chunk, shape, 4) + costs.backward_s(chunk, shape, 4)
            assert costs.sequences_s([length], shape)[0] + costs.group_s(shape) == pytest.approx(whole_s)


def test_rates_of_hardware_do_not_depend_on_windows() -> None:
    costs = cost_model("attention", 1)
    windowed = replace(MODEL, windows=(20,) * 4)
    assert default_coefficients(windowed, costs.cluster) == default_coefficients(MODEL, costs.cluster)
    rates = [hardware_rates(model, costs.cluster, costs.coefficients) for model in (windowed, MODEL)]
    assert rates[0] == rates[1]

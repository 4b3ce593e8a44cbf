"""Keep, offload or recompute: hand-worked numbers, SPPO's closed form, brute force, and limits that always hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.layouts import tiny_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.policies.fill import MemoryLimits, _Problem, choose_policy, greedy_shares, outcome_of
from hf_longctx.plan.policies.slots import SavedClass, Slot
from hf_longctx.recipes.bench.papers.sppo import hidden_shares

HUGE = 1e18


def saved(num_bytes: float, recompute_s: float = 1.0, **settings: bool) -> SavedClass:
    return SavedClass("attention_output", num_bytes, recompute_s, **settings)


def slot(num_bytes: float, recompute_s: float = 1.0, forward_s: float = 1.0, backward_s: float = 2.0) -> Slot:
    return Slot(forward_s, backward_s, (saved(num_bytes, recompute_s),))


def shares_of(choice) -> list[tuple[float, float, float]]:
    return [(share.recompute, share.host, share.device) for slot in choice.shares for share in slot]


def test_what_fits_stays() -> None:
    choice = choose_policy([slot(10.0)] * 3, MemoryLimits(30, 100, 1.0))
    assert shares_of(choice) == [(0, 0, 1)] * 3
    assert choice.outcome.cost_s == 0
    assert choice.reason == "nothing is offloaded: everything fits on the device"


def test_without_a_host_the_cheapest_bytes_are_recomputed() -> None:
    # 10 bytes must go; seconds per byte are 0.1, 0.3 and 0.2
    slots = [slot(10.0, 1.0), slot(10.0, 3.0), slot(10.0, 2.0)]
    choice = choose_policy(slots, MemoryLimits(20, 0, 1.0))
    assert np.allclose(shares_of(choice), [(1, 0, 0), (0, 0, 1), (0, 0, 1)], atol=1e-4)
    assert choice.outcome.recompute_s == pytest.approx(1.0, rel=1e-4)
    assert "there is no host memory" in choice.reason


def test_sppo_shares_where_only_the_link_binds() -> None:
    # slices that shrink and take ever longer per byte: alpha_i = min(1, B T_(i+1) / A_i), worked by hand at 10 bytes/s
    slots = [
        Slot(forward, 2 * forward, (saved(size, 50.0),))
        for size, forward in ((100.0, 4.0), (60.0, 5.0), (40.0, 6.0), (30.0, 7.0))
    ]
    alphas = (0.5, 1.0, 1.0, 0.0)
    assert hidden_shares(slots, 10.0) == alphas
    # device bytes that hold what remains, and the two neighbours' copies: G + H_n + H_(n-1) per slot
    remaining = np.cumsum([(1 - a) * s.saved[0].num_bytes for a, s in zip(alphas, slots, strict=True)])
    host = np.array([a * s.saved[0].num_bytes for a, s in zip(alphas, slots, strict=True)])
    peak = float((remaining + host + np.concatenate([[0], host[:-1]])).max())
    assert peak == 50 + 60 + 50
    choice = choose_policy(slots, MemoryLimits(160, HUGE, 10.0))
    assert choice.outcome.cost_s == pytest.approx(0, abs=1e-4)


def test_sppo_shares_are_the_only_free_ones() -> None:
    # two slots at the end that must stay, so that the peak is there: what the other ten leave on the device, beside 200 bytes
    fixed = SavedClass("qkv", 100.0, 0.0, can_recompute=False, can_offload=False)
    slots = [Slot(3.0 + 0.1 * i, 9.0, (saved(100.0 - 4 * i, 1e3),)) for i in range(10)] + [Slot(4.0, 9.0, (fixed,))] * 2
    alphas = [*hidden_shares(slots, 10.0)[:10], 0.0, 0.0]
    # B T_1 / A_0 = 10 * 3.1 / 100
    assert alphas[0] == pytest.approx(0.31)
    least = sum((1 - alpha) * one.saved[0].num_bytes for alpha, one in zip(alphas, slots, strict=True))
    choice = choose_policy(slots, MemoryLimits(least + 1e-3, HUGE, 10.0))
    assert [host for _, host, _ in shares_of(choice)] == pytest.approx(alphas, abs=2e-3)
    assert choice.outcome.cost_s <= 1e-2


def test_slow_links_are_refused_with_the_reason() -> None:
    # a byte back and forth takes 2 s beyond what is hidden, running it again 0.1 s
    slots = [slot(10.0, 1.0, forward_s=0.0, backward_s=0.0)] * 3
    choice = choose_policy(slots, MemoryLimits(20, 100, 1.0))
    assert all(host == 0 for _, host, _ in shares_of(choice))
    assert choice.outcome.recompute_s == pytest.approx(1.0, rel=1e-4)
    assert choice.reason.startswith("nothing is offloaded: recomputing (1 s) is faster than copies over")


def test_exposed_copies_are_taken_where_running_again_takes_longer() -> None:
    slots = [slot(10.0, 100.0, forward_s=0.0, backward_s=0.0)] * 4
    choice = choose_policy(slots, MemoryLimits(30, 100, 1.0))
    # ten bytes out and back at one byte per second
    assert choice.outcome.exposed_s == pytest.approx(20, rel=1e-3)
    assert "without host memory it would take 80 s more" in choice.reason


def test_windows_of_both_ways_count_apart() -> None:
    # no forward window, ample backward ones, one byte per second: ten bytes cost 10 s to copy. The first slot's take 15 s to
    # run again, the second's 5 s, and neither fits beside two slots that must stay: 10 + 5, where greedy counts both ways
    fixed = Slot(0.0, 100.0, (SavedClass("qkv", 10.0, 0.0, can_recompute=False, can_offload=False),))
    slots = [slot(10.0, 15.0, 0.0, 100.0), slot(10.0, 5.0, 0.0, 100.0), fixed, fixed]
    choice = choose_policy(slots, MemoryLimits(20.01, 100, 1.0))
    assert choice.solver == "lp"
    assert choice.outcome.cost_s == pytest.approx(15, rel=1e-3)
    assert np.allclose(shares_of(choice)[:2], [(0, 1, 0), (1, 0, 0)], atol=1e-3)


def test_layer_inputs_are_never_recomputed() -> None:
    inputs = SavedClass("layer_input", 10.0, 0.0, can_recompute=False)
    slots = [Slot(1.0, 2.0, (inputs, saved(10.0, 5.0)))] * 4
    choice = choose_policy(slots, MemoryLimits(40, 100, 10.0))
    assert all(per_slot[0].recompute == 0 for per_slot in choice.shares)


def test_what_may_not_stay_goes() -> None:
    slots = [Slot(1.0, 2.0, (saved(10.0, 1.0, can_keep=False, can_offload=False), saved(10.0, 1.0)))] * 2
    choice = choose_policy(slots, MemoryLimits(1000, 1000, 1.0))
    assert [per_slot[0].recompute for per_slot in choice.shares] == [1, 1]
    assert [per_slot[1].device for per_slot in choice.shares] == [1, 1]


def test_nothing_fits_says_what_is_missing() -> None:
    slots = [Slot(1.0, 2.0, (saved(2.0**30, 1.0, can_recompute=False),))] * 4
    with pytest.raises(ValueError, match=r"4.000 GiB of saved tensors cannot be recomputed, and 1.000 GiB on the device"):
        choose_policy(slots, MemoryLimits(2**30, 2**30, 1e9))


@pytest.mark.parametrize("limits", [MemoryLimits(-1, 0, 1), MemoryLimits(0, -1, 1), MemoryLimits(0, 0, 0)])
def test_senseless_limits_are_refused(limits: MemoryLimits) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        choose_policy([slot(1.0)], limits)


def test_without_slots_there_is_nothing_to_choose() -> None:
    assert choose_policy([], MemoryLimits(0, 0, 1)).shares == ()


def attention(num_bytes: float, recompute_s: float, *documents: tuple[int, int]) -> SavedClass:
    return SavedClass("attention_output", num_bytes, recompute_s, documents=documents)


def test_the_front_of_a_triangle_is_cheap_to_run_again() -> None:
    # ten of twenty bytes must go: half of each triangle, at a quarter of its eight seconds, not one of them whole
    slots = [Slot(1.0, 2.0, (attention(10.0, 8.0, (0, 100)),))] * 2
    choice = choose_policy(slots, MemoryLimits(10.001, 0, 1.0))
    assert choice.outcome.recompute_s == pytest.approx(2 * 8 / 4, rel=1e-3)
    assert np.allclose([share for share, _, _ in shares_of(choice)], 0.5, atol=1e-3)
    greedy = greedy_shares(slots, MemoryLimits(10.001, 0, 1.0))
    assert greedy is not None and np.allclose(greedy[:, 0], 0.5, atol=1e-3)


def test_the_program_fills_cheap_segments_before_other_classes() -> None:
    # ten of twenty bytes go: a triangle's front until its next eighth costs as much as a class of three seconds, 8 / 4^2 and
    # three quarters of three
    slots = [Slot(1.0, 2.0, (attention(10.0, 8.0, (0, 100)), saved(10.0, 3.0)))]
    limits = MemoryLimits(10.0, 0, 1.0)
    solved = _Problem(slots, limits).solve(10.0)
    assert solved is not None
    assert outcome_of(slots, solved, limits).recompute_s == pytest.approx(8 / 16 + 0.75 * 3, rel=1e-3)


def test_outcomes_are_priced_exactly_where_documents_dent_the_curve() -> None:
    # a long document in front of a short one: the hull is below the curve, the price is not
    item = attention(100.0, 10.0, (0, 90), (0, 10))
    slots = [Slot(1.0, 2.0, (item,))]
    choice = choose_policy(slots, MemoryLimits(5.0, 0, 1.0))
    ((share,),) = choice.shares
    assert choice.outcome.recompute_s == pytest.approx(item.recompute_part_s(share.recompute))
    assert choice.outcome.recompute_s > sum(seconds for _, seconds in item.segments()) * 0.95


@st.composite
def cases(draw: st.DrawFn, num_slots: int = 6, num_classes: int = 3, curved: int = 0) -> tuple[list[Slot], MemoryLimits]:
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])
    spans = st.tuples(st.sampled_from([0, 50, 400]), st.sampled_from([8, 100]))
    documents = st.lists(spans, max_size=curved).map(tuple)
    slots = []
    for _ in range(draw(st.integers(1, num_slots))):
        items = [
            SavedClass(
                "mlp",
                draw(st.sampled_from([0.0, 1.0, 7.0, 20.0, 100.0])),
                draw(seconds),
                can_offload=draw(st.booleans()),
                documents=draw(documents),
            )
            for _ in range(draw(st.integers(1, num_classes)))
        ]
        items.append(SavedClass("layer_input", draw(st.sampled_from([1.0, 5.0])), 0.0, can_recompute=False))
        slots.append(Slot(draw(seconds), draw(seconds), tuple(items)))
    total = sum(item.num_bytes for one in slots for item in one.saved)
    part = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 1.1])
    limits = MemoryLimits(total * draw(part) + 12, total * draw(part), draw(st.sampled_from([0.1, 1.0, 10.0, 1000.0])))
    return slots, limits


@pytest.mark.wide
@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(curved=3))
def test_limits_hold_and_greedy_never_wins(case: tuple[list[Slot], MemoryLimits]) -> None:
    slots, limits = case
    greedy = greedy_shares(slots, limits)
    try:
        choice = choose_policy(slots, limits)
    except ValueError:
        assert greedy is None
        return
    table = np.array([(recompute, host) for recompute, host, _ in shares_of(choice)])
    outcome = outcome_of(slots, table, limits)
    assert outcome.device_bytes <= limits.device_bytes * (1 + 1e-9) + 1e-3
    assert outcome.host_bytes <= limits.host_bytes * (1 + 1e-9) + 1e-3
    assert np.all(table >= 0) and np.all(table.sum(1) <= 1 + 1e-9)
    for per_slot, one in zip(choice.shares, slots, strict=True):
        for share, item in zip(per_slot, one.saved, strict=True):
            assert item.can_recompute or share.recompute == 0
            assert item.can_offload or share.host == 0
            assert share.total == pytest.approx(1)
    if greedy is not None:
        held = outcome_of(slots, greedy, limits)
        assert held.device_bytes <= limits.device_bytes * (1 + 1e-9)
        assert choice.outcome.cost_s <= held.cost_s + 1e-9


@pytest.mark.wide
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(num_slots=2, num_classes=1, curved=1))
def test_no_grid_point_is_cheaper(case: tuple[list[Slot], MemoryLimits]) -> None:
    slots, limits = case
    items = [item for one in slots for item in one.saved]
    options = [
        [(r / 4, h / 4) for r in range(5) for h in range(5 - r) if (item.can_recompute or not r) and (item.can_offload or not h)]
        for item in items
    ]
    fitting = [
        outcome.cost_s
        for table in itertools.product(*options)
        if (outcome := outcome_of(slots, np.array(table), limits)).device_bytes <= limits.device_bytes
        and outcome.host_bytes <= limits.host_bytes
    ]
    try:
        choice = choose_policy(slots, limits)
    except ValueError:
        assert not fitting
        return
    # the solver's limits are a millionth tighter
    assert not fitting or choice.outcome.cost_s <= min(fitting) + 1e-3


@settings(max_examples=50, deadline=None, derandomize=True)
@given(cases())
def test_more_memory_or_a_faster_link_never_costs_more(case: tuple[list[Slot], MemoryLimits]) -> None:
    slots, limits = case
    try:
        before = choose_policy(slots, limits).outcome.cost_s
    except ValueError:
        return
    for name in ("device_bytes", "host_bytes", "bytes_per_s"):
        more = replace(limits, **{name: 2 * getattr(limits, name)})
        assert choose_policy(slots, more).outcome.cost_s <= before + 1e-3


def test_slices_of_a_sequence_get_the_shares_of_the_paper() -> None:
    # ever later slices of a sequence see more keys, so that windows and shares rise; the last has nothing to hide behind
    costs, size = tiny_costs(1), 256
    chunks = [Chunk(index, (Span(0, index * size, (index + 1) * size),)) for index in range(8)]
    passes = [(costs.forward_s(chunk, GroupShape(1), 2), costs.backward_s(chunk, GroupShape(1), 2)) for chunk in chunks]
    num_bytes = 1e6
    fixed = SavedClass("qkv", num_bytes, 0.0, can_recompute=False, can_offload=False)
    rate = 0.8 * num_bytes / passes[4][0]
    slots = [Slot(*pair, (SavedClass("mlp", num_bytes, 1e3),)) for pair in passes] + [Slot(1.0, 1.0, (fixed,))] * 2
    alphas = [min(1.0, rate * min(following) / num_bytes) for following in [*passes[1:], (1.0, 1.0)]]
    assert hidden_shares(slots, rate)[:8] == pytest.approx(alphas)
    assert 0 < alphas[0] < alphas[5] <= 1
    least = sum((1 - alpha) * num_bytes for alpha in alphas) + 2 * num_bytes
    choice = choose_policy(slots, MemoryLimits(least + 10, 1e18, rate))
    assert [slot[0].host for slot in choice.shares[:8]] == pytest.approx(alphas, abs=2e-3)
    assert choice.outcome.exposed_s <= 1e-3 * sum(forward for forward, _ in passes)

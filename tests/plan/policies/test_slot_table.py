"""The bound that spares a program, and filling all slots at once: neither may change what is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.policies import fill as filling
from hf_longctx.plan.policies import fill as shares
from hf_longctx.plan.policies.fill import MemoryLimits, _Problem, choose_policy, fill_memory, outcome_of
from hf_longctx.plan.policies.slots import SavedClass, Slot, SlotTable


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[Slot], MemoryLimits]:
    """Equal layers, perhaps of two kinds, as those of a chunk, and limits from almost nothing to almost everything."""
    kinds = []
    for _ in range(draw(st.integers(1, 2))):
        saved = (
            SavedClass("layer_input", 8.0, 0.0, can_recompute=False),
            SavedClass("attention_output", 9.0, draw(st.sampled_from([0.5, 3.0])), documents=((0, 100),)),
            SavedClass("qkv", 12.0, draw(st.sampled_from([0.2, 1.0]))),
            SavedClass("mlp", 30.0, draw(st.sampled_from([0.6, 5.0])), can_offload=draw(st.booleans())),
        )
        kinds.append(Slot(draw(st.sampled_from([0.0, 1.0, 4.0])), draw(st.sampled_from([0.5, 2.0, 9.0])), saved))
    slots = [kinds[place % len(kinds)] for place in range(draw(st.integers(4, 12)))]
    total = 59.0 * len(slots)
    part = st.sampled_from([0.0, 0.15, 0.3, 0.5, 0.8])
    return slots, MemoryLimits(total * draw(part) + 20, total * draw(part), draw(st.sampled_from([0.5, 4.0, 20.0])))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layers())
def test_no_program_is_cheaper_than_the_bound(case: tuple[list[Slot], MemoryLimits]) -> None:
    slots, limits = case
    table = SlotTable(slots)
    solved = _Problem(table, limits).solve(10.0)
    if solved is not None:
        least_s = table.least_cost_s(limits.device_bytes, limits.host_bytes, 1 / limits.bytes_per_s)
        exposed_s = outcome_of(table, solved, limits).exposed_s
        assert table.hull_s(solved[:, 0]) + exposed_s >= least_s - 1e-4 * (1 + least_s)


@pytest.mark.wide
@settings(max_examples=150, deadline=None, derandomize=True)
@given(layers())
def test_a_choice_costs_no_more_than_the_programs(case: tuple[list[Slot], MemoryLimits]) -> None:
    slots, limits = case
    solved = _Problem(slots, limits).solve(10.0)
    if solved is not None:
        choice = choose_policy(slots, limits)
        assert choice.outcome.cost_s <= outcome_of(slots, solved, limits).cost_s + 1e-3


@pytest.mark.wide
@settings(max_examples=200, deadline=None, derandomize=True)
@given(layers())
def test_slots_filled_at_once_hold_what_they_hold_one_by_one(case: tuple[list[Slot], MemoryLimits]) -> None:
    slots, limits = case
    numbers = limits.device_bytes, limits.host_bytes, limits.bytes_per_s
    at_once = fill_memory(SlotTable(slots), *numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_LEAST_AT_ONCE", 10**9)
        one_by_one = fill_memory(SlotTable(slots), *numbers)
    assert (at_once is None) == (one_by_one is None)
    if at_once is not None and one_by_one is not None:
        np.testing.assert_allclose(at_once, one_by_one, atol=1e-9)


def test_equal_layers_need_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a program was solved")

    saved = (SavedClass("layer_input", 8.0, 0.0, can_recompute=False), SavedClass("mlp", 30.0, 1.0))
    slots = [Slot(2.0, 4.0, saved)] * 32
    monkeypatch.setattr(shares._Problem, "solve", refuse)
    choice = choose_policy(slots, MemoryLimits(0.3 * 32 * 38, 1e9, 10.0), explains=False)
    assert choice.solver == "greedy" and choice.outcome.recompute_s > 0
    # equal layers share one object, so that whoever counts them counts few
    assert len({id(of_slot) for of_slot in choice.shares}) <= 8

"""SPPO's bounds against its own table, and its offload shares on slices of one sequence."""

from __future__ import annotations

import pytest
from helpers.plans.steps import tiny_costs
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.activations.shares import MemoryLimits, SavedClass, Slot, choose_policy, hidden_shares
from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.sppo import slice_counts, sppo_degrees

K = 1024


@pytest.mark.parametrize(
    ("num_tokens", "degree", "count"),
    # the paper's choices: 7B on 8 x 4, 65B on 16 x 8
    [(512 * K, 8, 32), (1024 * K, 16, 32), (512 * K, 16, 8)],
)
def test_the_paper_s_numbers_of_slices_are_within_its_bounds(num_tokens: int, degree: int, count: int) -> None:
    assert count in slice_counts(num_tokens, degree)


def test_slice_counts_by_hand() -> None:
    # 64K tokens on two ranks: 32K each, in slices of 16K down to 2K
    assert slice_counts(64 * K, 2) == range(2, 17)
    assert slice_counts(64 * K + 1, 2) == range(3, 17)
    assert list(slice_counts(K, 1)) == [1]


@given(st.integers(1, 1 << 22), st.integers(1, 64))
def test_slices_have_workable_sizes(num_tokens: int, degree: int) -> None:
    for count in slice_counts(num_tokens, degree):
        size = num_tokens / count / degree
        assert size <= 16 * K
        assert size >= 2 * K or count == -(-num_tokens // (16 * K * degree))


def test_degrees_fill_all_ranks_and_stay_in_a_node() -> None:
    assert sppo_degrees(32, 8) == ((8, 4), (4, 8), (2, 16), (1, 32))
    assert sppo_degrees(4, 8) == ((4, 1), (2, 2), (1, 4))
    assert sppo_degrees(6, 8) == ((6, 1), (2, 3), (1, 6))
    for width, stages in sppo_degrees(48, 8):
        assert width * stages == 48 and 8 % width == 0


@pytest.mark.parametrize("call", [lambda: slice_counts(0, 1), lambda: slice_counts(1, 0), lambda: sppo_degrees(0, 8)])
def test_nothing_cannot_be_split(call) -> None:
    with pytest.raises(ValueError, match="give at least one"):
        call()


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

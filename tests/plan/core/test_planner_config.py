"""Limits of the planner: bad settings and degrees are refused by name with the remedy; degrees that may run are listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig, all_degrees, check_degrees, default_degrees
from hf_longctx.plan.core.types import LayerRange


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0"),
        ({"degrees": ()}, "must be positive, ascending"),
        ({"degrees": (2, 1)}, "must be positive, ascending"),
        ({"degrees": (1, 1)}, "must be positive, ascending"),
        ({"degrees": (0, 1)}, "must be positive, ascending"),
        ({"solver": "magic"}, "'magic' is not one of auto, greedy, lp, milp, static"),
        ({"solver_time_limit_s": 0.0}, "solver_time_limit_s is 0.0; give a positive number"),
        ({"static_degree": 8}, r"static_degree 8 is not among the degrees \(1, 2\)"),
        ({"micro_batch_trials": 0}, "micro_batch_trials is 0"),
        ({"longest_tokens": -1}, "longest_tokens is -1"),
    ],
)
def test_a_bad_setting_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    settings = {"tokens_per_rank": 10, "degrees": (1, 2)}
    PlannerConfig(**settings)
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**(settings | changes))


def test_a_sequence_alone_has_more_room_where_it_may_be_cut() -> None:
    config = PlannerConfig(10, (1, 2), activations=ActivationBudget(4, 100), longest_tokens=35)
    assert config.room_tokens == 35 and replace(config, longest_tokens=0).room_tokens == 20
    stages = ((LayerRange(0, 1),), (LayerRange(1, 1),))
    for fixed in ({"one_micro_batch": True}, {"activations": None}, {"stages": stages}):
        assert replace(config, **fixed).room_tokens == 20


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "degrees"),
    [
        (1, 8, (1,)),
        (2, 8, (1, 2)),
        (3, 8, (1, 2, 3)),
        (4, 8, (1, 2, 4)),
        (5, 8, (1, 2, 4, 5)),
        (6, 8, (1, 2, 4, 6)),
        (8, 4, (1, 2, 4)),
        (6, 5, (1, 2, 4)),
        (16, 32, (1, 2, 4, 8, 16)),
        (4, 1, (1,)),
    ],
)
def test_the_default_degrees_are_powers_of_two_and_all_ranks(num_ranks: int, num_heads: int, degrees: tuple[int, ...]) -> None:
    assert default_degrees(num_ranks, num_heads, "ulysses") == degrees
    check_degrees(degrees, num_ranks, num_heads, "ulysses")


@pytest.mark.parametrize(
    ("degrees", "num_ranks", "num_heads", "message"),
    [
        ((1, 8), 4, 32, "degree 8 needs 8 ranks, but the run has 4; lower `degrees`"),
        ((3,), 6, 32, "degree 3 is neither a power of two nor all 6 ranks"),
        ((1, 2, 6), 8, 32, "degree 6 is neither a power of two nor all 8 ranks"),
        ((1, 4), 4, 2, "degree 4 exceeds the model's 2 attention heads.*lower `degrees` to 2"),
    ],
)
def test_a_degree_that_cannot_run_is_refused_with_the_remedy(
    degrees: tuple[int, ...], num_ranks: int, num_heads: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_degrees(degrees, num_ranks, num_heads, "ulysses")


def test_only_ulysses_is_bound_by_heads_and_powers_of_two() -> None:
    for method in ("auto", "hybrid", "ring"):
        assert default_degrees(6, 1, method) == (1, 2, 4, 6)
        check_degrees((1, 3, 5), 6, 1, method)
        with pytest.raises(ValueError, match="degree 7 needs 7 ranks"):
            check_degrees((7,), 6, 1, method)


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, (1,)),
        (6, (1, 2, 3, 4, 5, 6)),
        (12, (*range(1, 9), 12)),
        (32, (*range(1, 9), 16, 24, 32)),
        (200, (*range(1, 9), *range(16, 65, 8), 128, 200)),
    ],
)
def test_all_degrees_are_every_number_in_a_node_and_whole_nodes(num_ranks: int, expected: tuple[int, ...]) -> None:
    assert all_degrees(num_ranks, 4, "auto") == expected
    check_degrees(expected, num_ranks, 4, "ring")


def test_all_degrees_are_refused_by_name_where_ulysses_has_none() -> None:
    with pytest.raises(ValueError, match="degree 3 is neither a power of two nor all 4 ranks"):
        check_degrees(all_degrees(4, 8, "ulysses"), 4, 8, "ulysses")

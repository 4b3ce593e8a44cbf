"""Any plan gives the loss and the gradients of one plain Hugging Face process, in fp64, on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.measures.planted import BUGS
from helpers.models.models import ModelCase, build_model, random_rows, reference_step, relative_error
from helpers.plans.steps import plan_of, run_step, step_on_rank
from helpers.ranks.ranks import RankFailure, RankPool
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.groups.exact import rank_layouts

TOLERANCE = 1e-12

# name -> (ranks, micro-batches of (degree, sequences), lengths)
LAYOUTS = {
    "one rank": (1, [[(1, (0, 1, 2, 3))]], [13, 1, 31, 7]),
    "one rank, several micro-batches": (1, [[(1, (0, 2))], [(1, (1,))], [(1, (3,))]], [13, 1, 31, 7]),
    "<1,1>": (2, [[(1, (0, 1)), (1, (2,))]], [13, 11, 17]),
    "<2>": (2, [[(2, (0, 1, 2))]], [13, 11, 5]),
    "<2>,<1,1>,<2>": (2, [[(2, (0,))], [(1, (1, 2)), (1, (3,))], [(2, (4, 5))]], [41, 3, 19, 7, 2, 1]),
    "<2>,<1,1> with an idle rank": (2, [[(2, (0,))], [(1, (1,))]], [29, 5]),
    "fewer tokens than ranks": (2, [[(2, (0,))], [(2, (1,))]], [1, 23]),
    "<2,1,1>": (4, [[(2, (0, 1)), (1, (2,)), (1, (3, 4))]], [23, 14, 9, 8, 17]),
    "<4>": (4, [[(4, (0, 1, 2))]], [37, 14, 3]),
    "<4>,<2,2>,<1,1,1,1>": (
        4,
        [[(4, (0,))], [(2, (1,)), (2, (2, 3))], [(1, (4,)), (1, (5,)), (1, (6,)), (1, (7,))]],
        [61, 23, 13, 11, 7, 5, 3, 2],
    ),
    "one long, many short": (4, [[(4, (0,))], [(1, tuple(range(1, 12)))]], [97, *range(2, 13)]),
    "<4> of two tokens": (4, [[(4, (0,))], [(4, (1,))]], [2, 19]),
    "<3>": (3, [[(3, (0, 1))], [(2, (2,)), (1, (3,))]], [29, 5, 11, 7]),
}


def check(
    pool: RankPool,
    case: ModelCase,
    layout: list,
    lengths: list[int],
    masked: tuple[int, ...] = (),
    bug: str = "",
    **plan_settings: Any,
) -> None:
    """Asserts that every rank ends with the reference's loss and gradients."""
    rows = random_rows(lengths, masked=masked)
    expected_loss, expected = reference_step(build_model(case), rows)
    for loss, gradients in run_step(pool, case, plan_of(layout, lengths, pool.num_ranks, **plan_settings), rows, bug):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert gradients.keys() == expected.keys()
        errors = {name: relative_error(gradients[name], expected[name]) for name in expected}
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_one_plain_process(ranks, name: str, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check(ranks(num_ranks), ModelCase(family), layout, lengths)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("name", ["<2>,<1,1>,<2>", "<4>,<2,2>,<1,1,1,1>"])
def test_every_admitted_class_matches(ranks, name: str, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check(ranks(num_ranks), ModelCase(family), layout, lengths)


@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6)])
@pytest.mark.parametrize("name", ["<4>", "<2,1,1>", "<3>"])
def test_heads_need_not_divide(ranks, name: str, num_heads: int, num_kv_heads: int) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check(ranks(num_ranks), ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads), layout, lengths)


@pytest.mark.parametrize("masked", [(0,), (1, 2, 3), (0, 1, 2, 3, 4, 5)])
def test_fully_masked_chunks_weigh_nothing(ranks, masked: tuple[int, ...]) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    check(ranks(num_ranks), ModelCase(), layout, lengths, masked=masked)


def test_tied_embeddings_match(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2,1,1>"]
    check(ranks(num_ranks), ModelCase(tied=True), layout, lengths)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rope_matches(ranks, rope_type: str) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    check(ranks(num_ranks), ModelCase(rope_type=rope_type), layout, lengths)


def test_eager_models_match(ranks) -> None:
    # the context road replaces eager attention too, whose own softmax is fp32: compare with sdpa
    num_ranks, layout, lengths = LAYOUTS["<2>"]
    rows = random_rows(lengths)
    expected_loss, expected = reference_step(build_model(ModelCase()), rows)
    for loss, gradients in run_step(ranks(num_ranks), ModelCase(attention="eager"), plan_of(layout, lengths, num_ranks), rows):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE


@st.composite
def random_steps(draw: st.DrawFn, num_ranks: int) -> tuple[list, list[int]]:
    """Random lengths (many tiny, some prime, one long) in random layouts, groups without sequences included."""
    lengths = draw(st.lists(st.one_of(st.integers(1, 12), st.sampled_from([17, 31, 53])), min_size=1, max_size=7))
    degrees = tuple(d for d in (1, 2, 4) if d <= num_ranks)
    homes = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    layout = []
    for home in sorted(set(homes)):
        degrees_here = draw(st.sampled_from(rank_layouts(num_ranks, degrees)))
        members: list[list[int]] = [[] for _ in degrees_here]
        for sequence in (i for i, h in enumerate(homes) if h == home):
            members[draw(st.integers(0, len(degrees_here) - 1))].append(sequence)
        layout.append([(degree, tuple(part)) for degree, part in zip(degrees_here, members, strict=True)])
    return layout, lengths


# promoted norms: a random search would at times meet a value on the edge between two fp32 numbers
@pytest.mark.parametrize("num_ranks,kv", [(2, 2), (4, 1)])
def test_random_plans_match(ranks, num_ranks: int, kv: int) -> None:
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(random_steps(num_ranks))
    def matches(step: tuple[list, list[int]]) -> None:
        check(ranks(num_ranks), ModelCase(num_kv_heads=kv, promoted=True), *step)

    matches()


@pytest.mark.parametrize("bug", BUGS[:3])
def test_planted_bug_is_noticed(ranks, bug: str) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    with pytest.raises(AssertionError):
        check(ranks(num_ranks), ModelCase(), layout, lengths, bug=bug)


def test_planted_order_of_exchanges_is_noticed() -> None:
    # its own pool with a short time-out: ranks that meet in different collectives hang, or exchange nonsense
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    rows = random_rows(lengths)
    _, expected = reference_step(build_model(ModelCase()), rows)
    pool = RankPool(num_ranks, collective_timeout_s=5.0)
    plan = plan_to_json(plan_of(layout, lengths, num_ranks))
    try:
        with pytest.raises((AssertionError, RankFailure)) as noticed:
            for _, gradients in pool.run(step_on_rank, ModelCase(), plan, rows, BUGS[3], 5.0, timeout_s=20.0):
                assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE
        assert "UnusedReplacement" not in str(noticed.value)
    finally:
        pool.close()


def test_the_check_itself_passes_on_the_planted_layout(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    check(ranks(num_ranks), ModelCase(), layout, lengths)

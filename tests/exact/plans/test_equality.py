"""Any plan gives the loss and the gradients of one plain Hugging Face process, in fp64, on real gloo ranks."""

from __future__ import annotations

import pytest
from helpers.measures.planted import BUGS
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of, random_steps
from helpers.ranks.rank_pool import RankFailure, RankPool
from helpers.ranks.rank_steps import check_layout_step, run_step, step_on_rank
from hypothesis import HealthCheck, Phase, given, settings

from hf_longctx.plan.core.serialize import plan_to_json


@pytest.mark.daily(
    "one rank-llama",
    "one rank-qwen3",
    "one rank, several micro-batches-llama",
    "<2>-llama",
    "<2>,<1,1>,<2>-llama",
)
@pytest.mark.quick("<2>,<1,1>,<2>-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_one_plain_process(ranks, name: str, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_layout_step(ranks(num_ranks), ModelCase(family), layout, lengths)


@pytest.mark.daily("<2>,<1,1>,<2>-mistral")
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("name", ["<2>,<1,1>,<2>", "<4>,<2,2>,<1,1,1,1>"])
def test_every_admitted_class_matches(ranks, name: str, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_layout_step(ranks(num_ranks), ModelCase(family), layout, lengths)


@pytest.mark.daily("<2,1,1>-4-1")
@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6)])
@pytest.mark.parametrize("name", ["<4>", "<2,1,1>", "<3>"])
def test_heads_need_not_divide(ranks, name: str, num_heads: int, num_kv_heads: int) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_layout_step(ranks(num_ranks), ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads), layout, lengths)


@pytest.mark.daily("masked2")
@pytest.mark.parametrize("masked", [(0,), (1, 2, 3), (0, 1, 2, 3, 4, 5)])
def test_fully_masked_chunks_weigh_nothing(ranks, masked: tuple[int, ...]) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    check_layout_step(ranks(num_ranks), ModelCase(), layout, lengths, masked=masked)


def test_tied_embeddings_match(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2,1,1>"]
    check_layout_step(ranks(num_ranks), ModelCase(tied=True), layout, lengths)


@pytest.mark.wide("linear")
@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rope_matches(ranks, rope_type: str) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    check_layout_step(ranks(num_ranks), ModelCase(rope_type=rope_type), layout, lengths)


def test_eager_models_match(ranks) -> None:
    # plans replace eager attention too, but its own softmax is fp32, so compare with sdpa
    num_ranks, layout, lengths = LAYOUTS["<2>"]
    rows = random_rows(lengths)
    expected_loss, expected = reference_step(build_model(ModelCase()), rows)
    for loss, gradients in run_step(ranks(num_ranks), ModelCase(attention="eager"), plan_of(layout, lengths, num_ranks), rows):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE


# norms are promoted, because a random search would at times find a value on the edge between two fp32 numbers
@pytest.mark.wide
@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.wide)])
@pytest.mark.parametrize("num_ranks,kv", [(2, 2), (4, 1)])
def test_random_plans_match(ranks, examples: int, num_ranks: int, kv: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(random_steps(num_ranks))
    def matches(step: tuple[list, list[int]]) -> None:
        check_layout_step(ranks(num_ranks), ModelCase(num_kv_heads=kv, promoted=True), *step)

    matches()


@pytest.mark.wide("labels shifted after the cut")
@pytest.mark.parametrize("bug", BUGS[:3])
def test_planted_bug_is_noticed(ranks, bug: str) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    with pytest.raises(AssertionError):
        check_layout_step(ranks(num_ranks), ModelCase(), layout, lengths, bug=bug)


def test_planted_order_of_exchanges_is_noticed() -> None:
    # a pool of its own with a short time-out, because ranks that meet in different collectives hang or exchange wrong data
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

"""In bf16, by autocast or as the weights' dtype, a plan is as close to fp64 as plain Hugging Face in bf16 is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.models.reference import BF16_BAND, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.ranks.rank_steps import run_step

from hf_longctx.runtime.parameters.gradients import GradientSum

AUTOCAST = ModelCase(dtype=torch.float32, autocast=True)
WEIGHTS = ModelCase(dtype=torch.bfloat16)


def errors_against_fp64(pool, case: ModelCase, layout: list, lengths: list[int]) -> tuple[float, float]:
    """Largest relative gradient errors against fp64: the plan's, and that of one plain process in the same precision."""
    rows = random_rows(lengths)
    exact_loss, exact = reference_step(build_model(ModelCase(case.family)), rows)
    _, plain = reference_step(build_model(case), rows)
    (loss, planned), *_ = run_step(pool, case, plan_of(layout, lengths, pool.num_ranks), rows)
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    return (
        max(relative_error(planned[name].double(), exact[name]) for name in exact),
        max(relative_error(plain[name].double(), exact[name]) for name in exact),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("case", [AUTOCAST, WEIGHTS], ids=["autocast", "weights"])
@pytest.mark.parametrize("name", ["one rank", "<2>,<1,1>,<2>", "<4>,<2,2>,<1,1,1,1>"])
def test_bf16_stays_in_the_band_of_plain_bf16(ranks, name: str, case: ModelCase, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    planned, plain = errors_against_fp64(ranks(num_ranks), replace(case, family=family), layout, lengths)
    assert planned <= min(BF16_BAND, 1.5 * plain + 5e-3)


def accumulated(in_fp32: bool) -> float:
    """Sum of one large gradient and 512 small ones of 2^-9 each, which bf16 rounds away next to the large one."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    gradients = GradientSum([parameter], in_fp32)
    for value in [1.0] + [2.0**-9] * 512:
        # without fp32 buffers, autograd adds to the gradient that is already there, in bf16
        (parameter * value).sum().backward()
        gradients.absorb()
    gradients.reduce(None)
    return float(parameter.grad)


def test_small_chunks_are_not_rounded_away() -> None:
    assert accumulated(in_fp32=True) == 2.0
    assert accumulated(in_fp32=False) == 1.0


def test_the_next_step_starts_from_zero() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    gradients = GradientSum([parameter])
    for _ in range(2):
        parameter.grad = None
        (parameter * 3).sum().backward()
        gradients.absorb()
        gradients.reduce(None)
        assert float(parameter.grad) == 3.0


def test_gradients_keep_the_dtype_of_their_weights(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    rows = random_rows(lengths)
    for _, gradients in run_step(ranks(num_ranks), WEIGHTS, plan_of(layout, lengths, num_ranks), rows):
        assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}

"""In bf16, by autocast or as the weights' dtype, a plan is as close to fp64 as plain Hugging Face in bf16 is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.reference import BF16_BAND, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.ranks.rank_steps import group_pool, mesh, note_case, rank_inputs, run_step, whole

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.gradients import GradientSum
from hf_longctx.runtime.parameters.rounded import noted_rounded
from hf_longctx.runtime.parameters.sharded import shard_model

AUTOCAST = ModelCase(dtype=torch.float32, autocast=True)
WEIGHTS = ModelCase(dtype=torch.bfloat16)
LORA = (("r", 4), ("target_modules", ("q_proj", "down_proj")))


def errors_against_fp64(
    pool, case: ModelCase, layout: list, lengths: list[int], parameters: Any = "replicated"
) -> tuple[float, float]:
    """Largest relative gradient errors against fp64: the plan's, and that of one plain process in the same precision."""
    rows = random_rows(lengths)
    exact_loss, exact = reference_step(build_model(replace(case, dtype=torch.float64, autocast=False)), rows)
    _, plain = reference_step(build_model(case), rows)
    plan = plan_of(layout, lengths, pool.num_ranks, parameters=parameters)
    (loss, planned), *_ = run_step(pool, case, plan, rows)
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    return (
        max(relative_error(planned[name].double(), exact[name]) for name in exact),
        max(relative_error(plain[name].double(), exact[name]) for name in exact),
    )


@pytest.mark.daily("one rank-autocast-llama", "one rank-autocast-qwen3", "one rank-weights-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("case", [AUTOCAST, WEIGHTS], ids=["autocast", "weights"])
@pytest.mark.parametrize("name", ["one rank", "<2>,<1,1>,<2>", "<4>,<2,2>,<1,1,1,1>"])
def test_bf16_stays_in_the_band_of_plain_bf16(ranks, name: str, case: ModelCase, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    planned, plain = errors_against_fp64(ranks(num_ranks), replace(case, family=family), layout, lengths)
    assert planned <= min(BF16_BAND, 1.5 * plain + 5e-3)


@pytest.mark.daily("tied-sharded")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
@pytest.mark.parametrize(
    "case",
    [
        AUTOCAST,
        replace(AUTOCAST, tied=True),
        replace(AUTOCAST, lora=LORA),
        replace(AUTOCAST, family="qwen3_moe", fp32_gradients=False),
    ],
    ids=["llama", "tied", "lora", "experts"],
)
def test_weights_gathered_in_bf16_stay_in_the_band_of_plain_autocast(ranks, case: ModelCase, parameters: Any) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    planned, plain = errors_against_fp64(ranks(num_ranks), case, layout, lengths, parameters)
    assert planned <= min(BF16_BAND, 1.5 * plain + 5e-3)


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_gathers_in_bf16_change_no_bit_of_the_loss_and_leave_shards_and_gradients_in_fp32(ranks, parameters: Any) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    plan, rows = plan_of(layout, lengths, num_ranks, parameters=parameters), random_rows(lengths)
    found = ranks(num_ranks).run(gathered_both_ways, AUTOCAST, plan, rows)
    for (loss, gradients, dtypes), (wide_loss, wide_gradients, _) in found:
        assert dtypes == {torch.float32}
        assert loss == wide_loss
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            # in backward, too, products are those of autocast; sums over uses of a weight are made in another order
            assert relative_error(gradient, wide_gradients[name]) <= 1e-6, name


def gathered_both_ways(case: ModelCase, plan: StepPlan, rows: list) -> list[tuple[float, dict[str, torch.Tensor], set]]:
    """Loss, gradients and dtypes of shards of a step with weights gathered in bf16, and of one with weights gathered in fp32."""
    found = []
    for is_rounded in (True, False):
        model = build_model(case)
        if is_rounded:
            note_case(model, case)
            assert noted_rounded(model)
        patch_model(model)
        shard_model(model, model._no_split_modules, mesh(plan.block_ranks))
        cpu = torch.device("cpu")
        executor = StepExecutor(whole_model(model, num_attention_layers(model)), group_pool(), cpu)
        batch = rank_inputs(plan, rows, group_pool().rank)
        result = executor.run(plan.for_rank(group_pool().rank), batch["chunks"], 10)
        gradients = {name: whole(weight.grad) for name, weight in model.named_parameters()}
        found.append((float(result.loss), gradients, {weight.dtype for weight in model.state_dict().values()}))
    return found


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

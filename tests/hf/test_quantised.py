"""Adapters beside frozen weights of four bits (QLoRA): losses and gradients of plain transformers and PEFT on the same weights.

Products of four-bit weights are fp32 islands in these fp64 models: what differs in the last bit before one may differ by 6e-8
behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.engines import EngineStep
from helpers.models import ModelCase, build_model, random_rows, reference_step, relative_error
from helpers.pipelines import pipeline_plan, stage_step_on_rank
from helpers.sliced import cut, sliced_plan
from helpers.steps import plan_of, run_step
from torch import Tensor

from hf_longctx.hf.quantised import four_bit_layers
from hf_longctx.plan.serialize import plan_to_json
from hf_longctx.plan.types import LayerPolicy, TensorShare

bitsandbytes = pytest.importorskip("bitsandbytes")

ISLANDS = 2e-6
LORA = (("r", 2), ("target_modules", "all-linear"))
DORA = (("r", 2), ("use_dora", True), ("use_rslora", True), ("target_modules", ["q_proj", "down_proj"]))
CASE = ModelCase(promoted=True, lora=LORA, four_bit="nf4")
LENGTHS = [13, 1, 31, 7]
ROWS = random_rows(LENGTHS)


def share(name: Any, recompute: float = 0.0) -> TensorShare:
    return TensorShare(name, recompute=recompute, device=1 - recompute)


POLICIES = {
    "recompute": LayerPolicy((share("attention_output", 1.0), share("qkv", 1.0), share("mlp", 1.0))),
    "half": LayerPolicy((share("attention_output", 0.25), share("qkv", 1.0), share("mlp", 0.5))),
}


@pytest.mark.parametrize(("kind", "name", "tile_tokens"), [("nf4", "recompute", 8), ("fp4", "half", 0)])
def test_with_products_in_fp64_all_gradients_are_exact(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, tile_tokens: int
) -> None:
    def product(x: Tensor, weight: Any, quant_state: Any, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, bitsandbytes.functional.dequantize_4bit(weight.data, quant_state).double(), bias)

    def build() -> Any:
        model = build_model(replace(CASE, four_bit=kind))
        for layer in four_bit_layers(model).values():
            layer.compute_dtype = torch.float64
        return model

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", product)
    step = EngineStep(None, LENGTHS, build)
    # their outputs are made again
    assert not step.engine.can_keep_qkv
    loss, _ = step.forward((POLICIES[name],) * 2, tile_tokens)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=1e-12)
    assert step.error() <= 1e-12


def ready() -> None:
    """Takes the package's time to import, which is no part of any step's time limit."""
    import bitsandbytes  # noqa: F401


@pytest.fixture
def pair(ranks) -> Any:
    pool = ranks(2)
    pool.run(ready, timeout_s=280.0)
    return pool


# name -> plan on two ranks
PLANS = {
    "groups": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2),
    "shards, a ring": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2, 1, parameters="sharded"),
    "gathered": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2, parameters="gathered_per_round"),
    "slices": sliced_plan(LENGTHS, [[(0, 0, 13), (1, 0, 1)], *([span] for span in cut(2, [9, 15, 7])), [(3, 0, 7)]], num_ranks=2),
}


def assert_equal(results: list[Any], case: ModelCase = CASE) -> None:
    loss, gradients = reference_step(build_model(case), ROWS)
    for found, own, *_ in results:
        assert found == pytest.approx(loss, rel=ISLANDS)
        assert own and own.keys() <= gradients.keys()
        assert max(relative_error(gradient, gradients[name]) for name, gradient in own.items()) <= ISLANDS
    assert set().union(*(own for _, own, *_ in results)) == gradients.keys()


@pytest.mark.parametrize("name", PLANS)
def test_plans_match_one_plain_process(pair, name: str) -> None:
    case = replace(CASE, lora=DORA) if name == "gathered" else CASE
    assert_equal(run_step(pair, case, PLANS[name], ROWS), case)


def test_stages_match_one_plain_process(pair) -> None:
    chunks = [[(0, 0, 13), (1, 0, 1)], *([span] for span in cut(2, [9, 15, 7])), [(3, 0, 7)]]
    plan = pipeline_plan(LENGTHS, [[(1, chunks)]], 2, num_layers=2)
    assert_equal(pair.run(stage_step_on_rank, CASE, plan_to_json(plan), ROWS))

"""Bytes and seconds of frozen weights in fp8, against numbers worked out by hand for Llama 3.1 8B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import default_coefficients
from hf_longctx.plan.cost.weight_traffic import StageWeights
from hf_longctx.plan.model.model_spec import ModelSpec, PackedSpec
from hf_longctx.plan.setup import lora_adapters

D, KV, INNER, LAYERS, VOCABULARY = 4096, 1024, 14336, 32, 128256
# multiplications of a token by the matrices of a layer, and its rows
MATRICES = D * (D + 2 * KV) + D * D + 3 * D * INNER
ROWS = (D + 2 * KV) + D + 2 * INNER + D


def models() -> tuple[ModelSpec, ModelSpec]:
    """The model with adapters over weights in bf16 and in fp8."""
    plain = replace(named_model("llama-3.1-8b"), bytes_per_element=2)
    plain = replace(plain, adapters=lora_adapters(plain, 16))
    return plain, replace(plain, packed=PackedSpec.fp8(plain))


def cluster(**rates: float) -> ClusterSpec:
    return ClusterSpec(1, 1, replace(GENERIC_GPU, **{"elementwise_bytes_per_s": 2e12, "memory_bytes_per_s": 3e12, **rates}))


def test_a_layer_has_a_byte_for_each_element_and_a_scale_for_each_row() -> None:
    plain, rounded = models()
    assert plain.layer_weights == MATRICES and rounded.packed.fp8_parameters == MATRICES
    assert rounded.packed.layer_bytes == MATRICES + 4 * ROWS
    # gathers of layers have half the bytes, beside the adapters
    gathered = [StageWeights.of(model, LAYERS, True, True) for model in (plain, rounded)]
    assert gathered[0].layers - gathered[1].layers == LAYERS * (MATRICES - 4 * ROWS)
    assert gathered[0].outside == gathered[1].outside and gathered[0].gradients == gathered[1].gradients


@pytest.mark.parametrize(("given", "ratio"), [(0.0, 1.5), (1.85, 1.85)])
def test_seconds_are_those_of_faster_products_and_of_rounding(given: float, ratio: float) -> None:
    before, after = (default_coefficients(model, cluster(fp8_ratio=given)) for model in models())
    saved_s = 2 * LAYERS * MATRICES * (1 - 1 / ratio) / GENERIC_GPU.matmul_flops_per_s
    inputs, outputs = D + D + D + INNER, ROWS
    assert after.forward.token_s - before.forward.token_s == pytest.approx(LAYERS * 3 * inputs / 2e12 - saved_s)
    # frozen weights have no gradients
    assert after.backward.token_s - before.backward.token_s == pytest.approx(LAYERS * 3 * outputs / 2e12 - saved_s)
    assert after.backward.chunk_s - before.backward.chunk_s == pytest.approx(2 * LAYERS * MATRICES / 3e12)
    assert after.forward.chunk_s == before.forward.chunk_s and after.forward.pair_s == before.forward.pair_s


def test_the_heads_seconds_stay_the_same() -> None:
    plain, rounded = models()
    before, after = (default_coefficients(model, cluster()) for model in (plain, rounded))
    for one, other in ((before.forward, after.forward), (before.backward, after.backward)):
        assert one.token_s * one.head_factor == pytest.approx(other.token_s * other.head_factor)
    assert plain.head_share == rounded.head_share


def test_without_rates_of_bytes_products_alone_count() -> None:
    before, after = (default_coefficients(m, cluster(elementwise_bytes_per_s=0.0, memory_bytes_per_s=0.0)) for m in models())
    saved_s = 2 * LAYERS * MATRICES * (1 - 1 / 1.5) / GENERIC_GPU.matmul_flops_per_s
    assert before.forward.token_s - after.forward.token_s == pytest.approx(saved_s)
    assert after.backward.chunk_s == before.backward.chunk_s


def test_experts_stay_as_they_are() -> None:
    model = replace(named_model("qwen3-30b-a3b"), bytes_per_element=2)
    packed = PackedSpec.fp8(model)
    assert packed.fp8_parameters == model.qkv_parameters + model.output_parameters
    rows = model.query_size + model.kv_size + model.hidden_size
    assert packed.layer_bytes == 2 * (model.layer_weights - packed.fp8_parameters) + packed.fp8_parameters + 4 * rows

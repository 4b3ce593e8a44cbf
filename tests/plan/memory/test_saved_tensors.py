"""Bytes per token by hand, and policies of a whole model under limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.layouts import tiny_costs

from hf_longctx.plan.core.types import ActivationPolicy, Chunk, GroupShape, LayerPolicy, Span, TensorShare
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.saved_tensors import (
    class_bytes,
    held_bytes,
    plain_layer_bytes,
    saved_token_bytes,
)
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.policies.fill import MemoryLimits, choose_policy
from hf_longctx.plan.policies.slots import layer_slots
from hf_longctx.recipes.bench.one_document import checkpointed_layer_bytes

# Llama-3.1-8B
LLAMA = ModelSpec(32, 4096, 14336, 32, 8, 128, 128256, 131072, bytes_per_element=2)


def test_plain_bytes_are_those_of_the_formula() -> None:
    d, a, k, f, h = 4096, 4096, 1024, 14336, 32
    assert plain_layer_bytes(LLAMA) == 16 * d + 4 * a + 4 * k + 8 * f + 4 * h + 8
    assert plain_layer_bytes(replace(LLAMA, qk_norms=True)) - plain_layer_bytes(LLAMA) == 6 * a + 6 * k + 4 * (h + 8)
    # 256 KiB per token checkpointed, 516 with attention output and LSE
    assert 32 * checkpointed_layer_bytes(LLAMA) == 256 * 1024
    assert 32 * (checkpointed_layer_bytes(LLAMA) + class_bytes(LLAMA, "attention_output")) == 516 * 1024


SPECS = {
    "bf16": LLAMA,
    "fp32": replace(LLAMA, bytes_per_element=4),
    "fp64": replace(LLAMA, bytes_per_element=8),
    "bf16, q/k norms": replace(LLAMA, qk_norms=True),
    "fp32, q/k norms": replace(LLAMA, qk_norms=True, bytes_per_element=4),
    "no gate": replace(LLAMA, gated_mlp=False),
    "latent attention": replace(LLAMA, num_kv_heads=32, value_head_dim=64, query_rank=512, kv_rank=256, rope_head_dim=64),
    "experts": replace(LLAMA, idle_parameters=2**20, routed_elements=2**14),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_token_takes_what_its_layers_save_and_the_loss(name: str) -> None:
    spec = SPECS[name]
    # the loss keeps logits, their fp32 copy, log-probabilities and a gradient of these
    loss = spec.vocab_size * (spec.bytes_per_element + 3 * max(4, spec.bytes_per_element))
    assert saved_token_bytes(spec) == spec.num_layers * plain_layer_bytes(spec) + loss


def test_held_bytes_by_hand() -> None:
    model = ModelSpec(3, 8, 16, 2, 1, 4, 32, 64, bytes_per_element=2)
    split = LayerPolicy(
        (
            TensorShare("layer_input", host=0.5, device=0.5),
            TensorShare("attention_output", recompute=0.25, host=0.25, device=0.5),
            TensorShare("qkv", recompute=1.0),
            TensorShare("mlp", recompute=1.0),
        )
    )
    # 100 tokens: inputs of 16 bytes, outputs of 16 and LSEs of 8; the third layer is plain
    device, host = held_bytes(model, ActivationPolicy(0, 0, (split, split), 8), 3, 100)
    assert host == 2 * (50 * 16 + 25 * 24)
    assert device == 2 * (50 * 16 + 50 * 24) + 100 * plain_layer_bytes(model)


def chosen(costs: CostModel, limits: MemoryLimits) -> ActivationPolicy:
    """The policy of a chunk of 8,192 tokens on one rank."""
    chunk = Chunk(0, (Span(0, 0, 8192),))
    shares = choose_policy(layer_slots(costs, chunk, GroupShape(1)), limits).shares
    return ActivationPolicy(0, 0, tuple(map(LayerPolicy, shares)))


@pytest.mark.parametrize("part,host_part", [(0.9, 0.0), (0.6, 0.0), (0.6, 1.0), (0.35, 1.0), (0.9, 1.0)])
def test_policies_hold_their_limits(part: float, host_part: float) -> None:
    costs = tiny_costs(1, replace(LLAMA, num_layers=8))
    whole = 8 * 8192 * sum(class_bytes(LLAMA, name) for name in ("layer_input", "attention_output"))
    limits = MemoryLimits(whole * part, whole * host_part, 1e11)
    policy = chosen(costs, limits)
    assert len(policy.layers) == 8
    device, host = held_bytes(costs.model, policy, 8, 8192)
    # shares are rounded to tokens, at most half of one for each cut
    slack = 8 * 4 * class_bytes(LLAMA, "mlp")
    assert device <= limits.device_bytes + slack and host <= limits.host_bytes + slack
    assert all(layer.share("layer_input").recompute == 0 for layer in policy.layers)
    if host_part:
        assert host > 0


@pytest.mark.parametrize("can_keep", [False, True])
def test_queries_keys_and_values_are_kept_where_the_model_allows_it(can_keep: bool) -> None:
    model = replace(LLAMA, num_layers=4, can_keep_qkv=can_keep)
    # room for all classes but the MLP, which takes more bytes for each second
    whole = 4 * 8192 * sum(class_bytes(model, name) for name in ("layer_input", "attention_output", "qkv"))
    policy = chosen(tiny_costs(1, model), MemoryLimits(whole * 1.01, 0.0, 1e11))
    shares = [layer.share("qkv").recompute for layer in policy.layers]
    assert shares == [1.0] * 4 if not can_keep else sum(shares) < 0.5
    device, host = held_bytes(model, policy, 4, 8192)
    assert 0.9 * whole < device <= 1.01 * whole + 4 * 4 * class_bytes(model, "mlp") and host == 0


def test_too_little_memory_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="cannot be recomputed"):
        chosen(tiny_costs(1, LLAMA), MemoryLimits(2**20, 0, 1e9))

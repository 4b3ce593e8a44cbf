"""Bytes that operations without products move, counted operation by operation as torch runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_longctx.hf.models.fused.bind import FusedLayers
from hf_longctx.plan.core.cluster_spec import ClusterSpec
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import default_coefficients
from hf_longctx.plan.cost.elementwise import elementwise_bytes
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.memory.lora import lora_adapters

TOKENS = 256
PRODUCTS = ("mm", "attention", "embedding", "linear")
NOTHING_MOVES = ("detach", "empty", "_unsafe_view", "lift_fresh", "new_empty")


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes of inputs and outputs of every operation but products and views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not func.is_view and not any(word in name for word in PRODUCTS) and not name.startswith(NOTHING_MOVES):
            # operations that overwrite a tensor do not read it
            inputs = args[1:] if name == "copy_" else () if name in ("zeros", "new_zeros", "zero_", "fill_") else args
            found = [x for x in tree_leaves((inputs, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.total += sum(x.numel() * x.element_size() for x in found)
        return out


def counted(num_layers: int, dtype: torch.dtype, adapted: bool) -> tuple[int, int]:
    """Bytes of a forward and of a backward of a model with these layers."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=64,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
        FusedLayers("").bind(model)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=adapted and dtype == torch.bfloat16), MovedBytes() as forward:
        logits = model(input_ids=ids, use_cache=False).logits
    with MovedBytes() as backward:
        logits.float().sum().backward()
    return forward.total, backward.total


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_layer_are_those_that_torch_moves(dtype: torch.dtype, adapted: bool) -> None:
    short, long = counted(2, dtype, adapted), counted(5, dtype, adapted)
    model = replace(named_model("llama-3.1-8b", dtype.itemsize), hidden_size=64, intermediate_size=224)
    model = replace(model, adapters=lora_adapters(model, 1)) if adapted else model
    for expected, few, many in zip(elementwise_bytes(model), short, long, strict=True):
        assert (many - few) / 3 / TOKENS == pytest.approx(expected, rel=0.02)


def test_seconds_of_a_measured_device_count_them() -> None:
    model = named_model("llama-3.1-8b", 2)
    hardware = read_profile("h200").spec
    assert hardware.elementwise_bytes_per_s
    cluster, other = ClusterSpec(1, 1, hardware), ClusterSpec(1, 1, replace(hardware, elementwise_bytes_per_s=0.0))
    for each in (model, replace(model, adapters=lora_adapters(model, 16))):
        found, without = default_coefficients(each, cluster), default_coefficients(each, other)
        for ours, plain, num_bytes in zip(
            (found.forward, found.backward), (without.forward, without.backward), elementwise_bytes(each), strict=True
        ):
            added_s = each.num_layers * num_bytes / hardware.elementwise_bytes_per_s
            assert ours.token_s == pytest.approx(plain.token_s + added_s)
            # the head has no such operations: its seconds stay
            assert ours.head_factor * ours.token_s == pytest.approx(plain.head_factor * plain.token_s)

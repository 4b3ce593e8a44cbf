"""Experts that run apart hold as many bytes as the byte model says: saved ones exactly, and the most while they run."""

from __future__ import annotations

import gc
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers.measures.allocations import measure
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_longctx.hf.models.expert_adapters import split_experts
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.packed_experts import pack_experts
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import LayerPolicy
from hf_longctx.plan.memory.layer import LayerBytes, Load
from hf_longctx.runtime.core.products import make_products

NUM_TOKENS, NUM_EXPERTS, NUM_CHOSEN, HIDDEN, INNER, RANK = 8192, 16, 4, 128, 96, 8
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64}
MIXTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": INNER},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "intermediate_size": INNER},
    ),
}


def unread(x_TC: Tensor, num_features: int, first: Any) -> Tensor:
    """Makes an output that nothing reads."""
    return x_TC.new_empty(len(x_TC), num_features)


@pytest.mark.daily("qwen3_moe-mxfp4-kept-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "for gradients"])
@pytest.mark.parametrize("packed", ["", "mxfp4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_rows_take_what_is_predicted_while_they_run(name: str, packed: Any, kept: bool, dtype: torch.dtype) -> None:
    config_class, model_class, sizes = MIXTURES[name]
    model = model_class(config_class(num_hidden_layers=1, **SIZES, **sizes)).to(dtype).train()
    config = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = peft.get_peft_model(model, config)
    if packed:
        pack_experts(model, packed)
    shapes = model_spec(model)
    FusedLayers("").bind(model)
    (found,) = split_experts(model)
    if not kept:
        make_products(found.experts, lambda: unread)
    x_TC = torch.randn(NUM_TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    # the first expert of most tokens is the same
    chosen_Tk = (torch.arange(NUM_TOKENS)[:, None] % 5 // 4 + torch.arange(NUM_CHOSEN) * 3) % NUM_EXPERTS
    weights_Tk = torch.rand(NUM_TOKENS, NUM_CHOSEN, dtype=dtype, requires_grad=True)

    def run() -> Tensor:
        result: Tensor = found.experts(x_TC, chosen_Tk, weights_Tk)
        return result

    run().sum().backward()
    x_TC.grad = weights_Tk.grad = None
    gc.collect()
    forward_peak, held, y_TC = measure(run)
    gradient_TC = torch.ones_like(y_TC)
    backward_peak, _, _ = measure(lambda: y_TC.backward(gradient_TC))
    layer = LayerBytes(shapes, Load.document(NUM_TOKENS, 1), LayerPolicy(), 0)
    # inner features and their products with A, and the place of each row
    saved = NUM_TOKENS * NUM_CHOSEN * (kept * dtype.itemsize * (2 * INNER + RANK) + 4)
    # hidden states come out; the ends of the rows of every expert
    assert held == saved + NUM_TOKENS * HIDDEN * dtype.itemsize + 4 * NUM_EXPERTS
    work = [layer._expert_work(NUM_TOKENS, is_backward, kept) for is_backward in (False, True)]
    forward, backward = (each + shapes.packed.unpacked_bytes + shapes.adapters.copied_bytes for each in work)
    # in half precision, the CPU sums products of inner features in a copy in fp32
    least = 1.0 if dtype == torch.float32 else 0.85
    assert least <= backward / backward_peak <= 1.1
    if kept:
        assert least <= (saved + forward) / forward_peak <= 1.1
    else:
        # nothing but an output that nothing reads
        assert forward_peak == held


def test_copies_of_routers_are_counted_as_torch_makes_them() -> None:
    config_class, model_class, sizes = MIXTURES["qwen3_moe"]
    model = model_class(config_class(num_hidden_layers=3, **SIZES, **sizes)).train()
    without, router = model_spec(model).adapters, model.model.layers[0].mlp.gate
    weight_bytes = router.weight.nbytes
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["gate.weight"])
    model = peft.get_peft_model(model, config)
    found = model_spec(model).adapters
    assert found.copied_bytes == without.copied_bytes + (3 + 1) * weight_bytes and found.reads_second_norm
    saved = saved_by(model.base_model.model.model.layers[0].mlp.gate)
    # the copy, which is no parameter
    copies = [each for each in saved if each.numel() == router.weight.numel() and each.data_ptr() != router.weight.data_ptr()]
    assert [each.nbytes for each in copies] == [weight_bytes]


def saved_by(router: Any) -> list[Tensor]:
    """Tensors that the forward of a router saves, each once."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        router(torch.randn(8, HIDDEN, requires_grad=True))
    return list(found.values())

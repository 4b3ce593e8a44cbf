"""Low-rank adapters while plans run: PEFT's results and gradients, fewer saved bytes, and PEFT's own code where hooks look."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from helpers.models.reference import relative_error
from torch import Tensor, nn

from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.recipes.bench.one_document import saved_bytes

HIDDEN, TOKENS = 32, 24


class Layers(nn.Module):
    """Two branches and a projection back, as in an MLP, in which adapters stand beside frozen matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def adapted_layers(dtype: torch.dtype, wide: bool = True, **settings: Any) -> Any:
    """The layers in `dtype` with adapters that change what they return; wide: these are in at least fp32."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["gate_proj", "up_proj", "down_proj"], **settings)
    model = peft.get_peft_model(Layers().to(dtype), config, autocast_adapter_dtype=wide)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    return model


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def results(model: Any, dtype: torch.dtype, is_autocast: bool = False) -> list[Tensor]:
    """The output, and gradients of the input and of all trained weights."""
    x = inputs(dtype).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        y = model(x * 1)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *trained], torch.ones_like(y).cumsum(1))]


def bind(model: Any) -> Any:
    FusedLayers("").bind(model)
    return model


def test_exact_in_fp64_and_closed_again() -> None:
    expected = results(adapted_layers(torch.float64), torch.float64)
    model, fused = adapted_layers(torch.float64), FusedLayers("")
    fused.bind(model)
    layer = model.base_model.model.down_proj
    assert "forward" in vars(layer)
    # one node, also behind a bias
    inputs_of = {"gate_proj": inputs(torch.float64), "down_proj": inputs(torch.float64).repeat(1, 1, 2)}
    nodes = [getattr(model.base_model.model, name)(x).grad_fn.name() for name, x in inputs_of.items()]
    assert nodes == ["_AddLowRankBackward", "_AddLowRankBackward"]
    for found, right in zip(results(model, torch.float64), expected, strict=True):
        assert relative_error(found, right) <= 1e-14
    fused.close()
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("wide", [True, False])
def test_under_autocast_no_further_from_fp64_than_peft(wide: bool) -> None:
    exact = results(adapted_layers(torch.bfloat16, wide).to(torch.float64), torch.float64)
    # rounded as the input of the others
    own = results(adapted_layers(torch.bfloat16, wide), torch.bfloat16, is_autocast=True)
    found = results(bind(adapted_layers(torch.bfloat16, wide)), torch.bfloat16, is_autocast=True)
    assert [each.dtype for each in found] == [each.dtype for each in own]
    # largest errors, relative to the largest value of each tensor: rounding is of the same size
    of_peft, ours = ([relative_error(x.double(), right) for x, right in zip(each, exact, strict=True)] for each in (own, found))
    assert max(ours) <= 0.015
    assert sum(ours) <= 1.1 * sum(of_peft)


def test_projections_share_one_saved_input() -> None:
    def measured(model: Any) -> int:
        with torch.autocast("cpu", torch.bfloat16):
            x = inputs(torch.bfloat16).requires_grad_(True)
            return saved_bytes(model, lambda: model(x))[0]

    peft_s, ours = measured(adapted_layers(torch.bfloat16)), measured(bind(adapted_layers(torch.bfloat16)))
    # gate and up share one
    assert peft_s - ours == 2 * TOKENS * HIDDEN


def test_hooks_see_what_peft_shows_them() -> None:
    def seen(model: Any) -> list[Tensor]:
        layers, tensors = model.base_model.model, []
        layers.gate_proj.base_layer.register_forward_hook(lambda module, args, output: tensors.append(output.detach()))
        layers.up_proj.lora_A["default"].register_forward_hook(lambda module, args, output: tensors.append(args[0].detach()))
        layers.down_proj.register_forward_hook(lambda module, args, output: tensors.append(output.detach()))
        results(model, torch.bfloat16, is_autocast=True)
        return tensors

    expected, found = seen(adapted_layers(torch.bfloat16)), seen(bind(adapted_layers(torch.bfloat16)))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    # the output of the frozen module was not written over; the input of a first matrix is as wide as PEFT makes it
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert relative_error(found[2].float(), expected[2].float()) <= 0.02


@pytest.mark.parametrize("case", ["disabled", "merged", "DoRA", "bias", "scaled by a hook", "keyword"])
def test_unusual_adapters_run_as_ever(case: str) -> None:
    def made() -> Any:
        model = adapted_layers(torch.float64, use_dora=case == "DoRA", lora_bias=case == "bias")
        layer = model.base_model.model.gate_proj
        if case == "disabled":
            model.base_model.disable_adapter_layers()
        elif case == "merged":
            model.merge_adapter()
        elif case == "scaled by a hook":
            layer.lora_B["default"].register_forward_hook(lambda module, args, output: 3 * output)
        return model

    def run(model: Any) -> Tensor:
        layer, x = model.base_model.model.gate_proj, inputs(torch.float64)
        result: Tensor = layer(x=x) if case == "keyword" else layer(x)
        return result

    model = made()
    expected, found = run(copy.deepcopy(model)), run(bind(model))
    assert torch.equal(found, expected)

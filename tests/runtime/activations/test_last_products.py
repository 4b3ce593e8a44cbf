"""Products that only an MLP's output needs are left out of its tiles in backward, and of no MLP whose gradients read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_longctx.hf.models.low_rank import bind_adapters
from hf_longctx.runtime.activations import token_tiles as last_products
from hf_longctx.runtime.activations.token_tiles import tokenwise

TOKENS, TILE, HIDDEN = 96, 32, 24
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in PRODUCTS
        return function(*args, **(kwargs or {}))


class Plain(nn.Module):
    """Two projections with biases, and an end of the test's choice, given the output and the input."""

    def __init__(self, end: Callable[[Tensor, Tensor], Tensor] = lambda y, x: y) -> None:
        super().__init__()
        self.up, self.down, self.end = nn.Linear(HIDDEN, 40), nn.Linear(40, HIDDEN), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.down(torch.tanh(self.up(x))), x)


def gated() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=2, mlp_bias=False)
    return LlamaMLP(config).double()


def adapted() -> nn.Module:
    holder = nn.Module()
    holder.mlp = gated()
    settings = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(settings, holder)
    return holder.mlp.double()


def fused() -> nn.Module:
    mlp = adapted()
    bind_adapters(mlp)
    return mlp


def gradients(mlp: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    ends = [x.requires_grad_(), *(p for p in mlp.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(run(x), ends, gradient))


def in_tiles(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: tokenwise(mlp, mlp.forward, x, TILE)


def left_out(mlp: nn.Module) -> tuple[nn.Linear, ...]:
    return last_products._FOUND.get(mlp, ())


def check(mlp: nn.Module) -> int:
    """Compares two backwards in tiles with that of the plain MLP; returns the products of the second."""
    expected = gradients(mlp, mlp)
    for _ in range(2):
        with Products() as products:
            found = gradients(mlp, in_tiles(mlp))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return products.count


# beside a fused adapter, the adapter's part of the output is left out too
@pytest.mark.parametrize(
    "make,num_products",
    [(gated, 1), (adapted, 1), (fused, 2), (lambda: Plain().double(), 1)],
    ids=["gated", "adapters", "fused adapters", "biases"],
)
def test_the_last_product_is_left_out(make: Callable[[], nn.Module], num_products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = make()
    products = check(mlp)
    assert len(left_out(mlp)) == 1
    monkeypatch.setattr(last_products, "_is_plain", lambda linear: False)
    # less in each tile
    assert check(mlp) == products + num_products * TOKENS // TILE


@pytest.mark.parametrize(
    "end",
    [
        lambda y, x: y * y,
        lambda y, x: y + torch.tanh(y),
        # the graph does not show that the value decides
        lambda y, x: y + torch.where(y.detach() > 0, x, 2 * x),
        lambda y, x: y + (x if y.detach().square().sum() > 0 else 2 * x),
    ],
    ids=["square", "added and read", "mask", "branch"],
)
def test_a_product_whose_value_decides_is_computed(end: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    mlp = Plain(end).double()
    check(mlp)
    assert not left_out(mlp)


def test_an_mlp_that_changes_is_run_as_a_whole() -> None:
    mlp = Plain().double()
    check(mlp)
    assert left_out(mlp)
    mlp.end = lambda y, x: torch.tanh(y)
    check(mlp)
    assert not left_out(mlp)


def test_a_module_that_someone_replaced_or_watches_computes() -> None:
    mlp = Plain().double()
    check(mlp)
    seen: list[Tensor] = []
    handle = mlp.down.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    check(mlp)
    # tiles of the first run and of backward see the same values: plain, then two runs of three tiles forward and backward
    outputs = [torch.cat(seen[start : start + 3], 1) for start in (1, 4, 7, 10)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    handle.remove()
    mlp.down.forward = lambda x: 3 * nn.functional.linear(x, mlp.down.weight, mlp.down.bias)  # type: ignore[method-assign]
    check(mlp)


def test_autocast_casts_as_without() -> None:
    mlp = gated().float()
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    results = []
    for run in (mlp, in_tiles(mlp), in_tiles(mlp)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        results.append(torch.autograd.grad(y, [x, *mlp.parameters()], torch.ones_like(y)))
    assert left_out(mlp)
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert one.dtype == other.dtype
            assert float((one - other).abs().max()) <= 0.02 * float(other.abs().max())


def test_nothing_is_left_bound() -> None:
    mlp = gated()
    check(mlp)
    assert not any("forward" in vars(module) or module._forward_hooks for module in mlp.modules())

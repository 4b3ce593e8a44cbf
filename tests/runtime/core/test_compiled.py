"""Compiled functions of tokens: gradients of autograd, a bounded number of compilations, backward as often as one likes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from hf_longctx.runtime.core.kernels import CompiledFunction

# traces and derives like the default one, and leaves out only the compiler of C++
BACKEND = "aot_eager"


def scaled(x_NC: Tensor, weight_C: Tensor) -> Tensor:
    return x_NC * torch.rsqrt(x_NC.square().mean(-1, keepdim=True) + 1e-6) * weight_C


def gated(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    return F.silu(gate_NI) * up_NI


def turned(q_TD: Tensor, k_TD: Tensor, cos_TD: Tensor) -> tuple[Tensor, Tensor]:
    return q_TD * cos_TD + q_TD.flip(-1), k_TD * cos_TD


# function, its shapes with 0 for tokens, the arguments of `CompiledFunction`
CASES: dict[str, Any] = {
    "norm": (scaled, [(0, 6), (6,)], {"token_dims": (0, None), "num_gradients": 2}),
    "gate": (gated, [(0, 6), (0, 6)], {"token_dims": (0, 0), "num_gradients": 2}),
    "linear": (turned, [(0, 6), (0, 6), (0, 6)], {"token_dims": (0, 0, 0), "num_gradients": 2, "num_linear": 2}),
}


def results(function: Any, inputs: list[Tensor], num_gradients: int, again: bool = False) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(place < num_gradients) for place, x in enumerate(inputs)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((output * output.detach().cos()).sum() for output in outputs)
    if again:
        loss.backward(retain_graph=True)
    loss.backward()
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves[:num_gradients])]


@pytest.mark.daily("gate")
@pytest.mark.parametrize("name", CASES)
def test_every_number_of_tokens_has_the_gradients_of_autograd_and_two_compilations(name: str) -> None:
    function, shapes, settings = CASES[name]
    compiled = CompiledFunction(function, **settings, backend=BACKEND)
    generator = torch.Generator().manual_seed(0)
    before = counters["stats"]["unique_graphs"]
    for num_tokens in (8, 13, 1, 2, 40):
        sizes = [tuple(size or num_tokens for size in shape) for shape in shapes]
        inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        for again in (False, True):
            expected, found = (results(each, inputs, settings["num_gradients"], again) for each in (function, compiled))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert compiled.num_compiled == 2
    assert counters["stats"]["unique_graphs"] - before == 2


def test_values_of_linear_inputs_are_not_saved() -> None:
    function, _, settings = CASES["linear"]
    compiled = CompiledFunction(function, **settings, backend=BACKEND)
    saved: list[Tensor] = []
    q, k, cos = (torch.randn(4, 6, requires_grad=place < 2) for place in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compiled(q, k, cos)
    assert [x.data_ptr() for x in saved] == [cos.data_ptr()]


def test_a_frozen_weight_gets_no_gradient() -> None:
    compiled = CompiledFunction(scaled, (0, None), 2, backend=BACKEND)
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6)
    compiled(x, weight).sum().backward()
    own = x.detach().clone().requires_grad_()
    scaled(own, weight).sum().backward()
    torch.testing.assert_close(x.grad, own.grad)
    assert weight.grad is None

"""Kernels launched without torch's dispatcher, in Triton's interpreter; `test_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.triton_runs import poisoned_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.kernels import dropout_mask, jit, merge_attention, reference, sequence_layout, weight_mask

BOUNDS, RANGES = [0, 2, 3], [0, 1, 0, 2]
OPERATORS = {
    merge_attention: ["_accumulate"],
    sequence_layout: ["_scatter_heads", "_sum_heads", "_join_blocks", "_split_blocks"],
    dropout_mask: ["_keep_mask"],
    weight_mask: ["_dropped_weights"],
}


@pytest.fixture(autouse=True)
def direct() -> Iterator[list[str]]:
    """Lets tensors on the CPU go straight to kernels; the names of operators that went through the dispatcher."""
    called: list[str] = []

    def noting(name: str, operator: Any) -> Callable[..., Any]:
        return lambda *args: called.append(name) or operator(*args)

    with poisoned_memory(), patch.object(jit, "DIRECT_DEVICES", ("cpu",)):
        patches = [
            patch.object(module, name, noting(name, getattr(module, name))) for module, each in OPERATORS.items() for name in each
        ]
        for each in patches:
            each.start()
        yield called
        for each in patches:
            each.stop()


def heads(num_tokens: int = 3, head_dim: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(num, num_tokens, head_dim) for num in (3, 2, 2)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def two_results() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator) for shape in [(2, 5, 8), (2, 5)] * 2)


def test_values_and_gradients_are_those_of_the_dispatcher(direct: list[str]) -> None:
    found, expected = [], []
    for results, scatter, join in (
        (found, sequence_layout._scatter, sequence_layout._join),
        (expected, reference.scatter_heads, reference.join_blocks),
    ):
        parts = heads()
        flat = scatter(*parts, BOUNDS, RANGES)
        joined = join(flat[: 5 * 3 * 4], [2, 1], [3, 2], 4)
        (sum((number + 2) * (part**3).sum() for number, part in enumerate(joined)) + (flat**2).sum()).backward()
        results += [flat, *joined, *(part.grad for part in parts)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    with torch.no_grad():
        assert not sequence_layout._scatter(*heads(), BOUNDS, RANGES).requires_grad
    assert not direct


def test_gradients_can_be_differentiated_again(direct: list[str]) -> None:
    flat = torch.randn(2 * 2, dtype=torch.float64).requires_grad_()
    # few values, since every launch takes the interpreter long
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *parts: sequence_layout.scatter_heads(*parts, BOUNDS, RANGES), heads(1, 1), fast_mode=True)
        assert check(lambda flat: sequence_layout._join(flat, [1, 1], [1, 1], 1), flat, fast_mode=True)
    # the operator has a gradient of its gradient, the kernel has none
    assert "_sum_heads" in direct and "_split_blocks" in direct


def test_a_merge_in_place_is_that_of_the_reference_and_seen_by_autograd(direct: list[str]) -> None:
    out, lse, *other = two_results()
    expected, expected_lse = out.clone(), lse.clone()
    reference.accumulate_attention_(expected, expected_lse, *other)
    factor = torch.ones(2, 5, 8, requires_grad=True)
    product = factor * out
    merge_attention.accumulate_attention_(out, lse, *other)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    assert not direct


def test_masks_are_those_of_the_dispatcher(direct: list[str]) -> None:
    positions = torch.arange(6)
    found = [
        dropout_mask.keep_mask(positions, positions, 3, 5, 0.4, 7),
        weight_mask.dropped_weights(positions.view(2, 3), positions.view(2, 3), (1, 3), 4, 3, 5, 0.4),
    ]
    assert not direct
    with patch.object(jit, "DIRECT_DEVICES", ()):
        expected = [
            dropout_mask.keep_mask(positions, positions, 3, 5, 0.4, 7),
            weight_mask.dropped_weights(positions.view(2, 3), positions.view(2, 3), (1, 3), 4, 3, 5, 0.4),
        ]
    assert all(map(torch.equal, found, expected)) and len(direct) == 2


def test_modes_and_graphs_see_operators(direct: list[str]) -> None:
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(*parts: Tensor) -> Tensor:
        return sequence_layout.scatter_heads(*parts, BOUNDS, RANGES)

    parts = [part.detach() for part in heads()]
    with Watching():
        run(*parts)
    assert any("hf_longctx.scatter_heads" in each for each in seen)
    direct.clear()
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    with patch.object(sequence_layout, "_scatter_heads", torch.ops.hf_longctx.scatter_heads.default):
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        assert torch.equal(compiled(*parts), run(*parts))
    assert len(graphs) == 1 and "hf_longctx.scatter_heads" in graphs[0]

"""Gradient reduction: every gradient becomes its sum over ranks, whatever the buckets."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers.ranks.rank_steps import group_pool
from torch import Tensor, nn

from hf_longctx.runtime.parameters import gradients as gradients_module
from hf_longctx.runtime.parameters.gradients import GradientSum

SHAPES = [(3, 5), (7,), (2, 2, 2), (1,), (), (11,)]
DTYPES = [torch.float64, torch.float64, torch.float32, torch.float64, torch.float32, torch.float32]


def parameters_of(rank: int) -> list[nn.Parameter]:
    """Parameters whose gradients are small integers, so that every sum is exact: gradient i of rank r is (r + 1) * (i + 1)."""
    made = []
    for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        place = torch.arange(parameter.numel(), dtype=dtype).reshape(shape)
        parameter.grad = place + (rank + 1) * (i + 1)
        made.append(parameter)
    return made


def reduced_on_rank(bucket_bytes: int) -> list[Tensor]:
    pool = group_pool()
    parameters = parameters_of(pool.rank)
    with patch.object(gradients_module, "_BUCKET_BYTES", bucket_bytes):
        GradientSum(parameters).reduce(pool.everyone)
    return [parameter.grad for parameter in parameters]


@pytest.mark.quick
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_gradients_are_summed_over_ranks_in_buckets_of_any_size(ranks, bucket_bytes: int) -> None:
    expected = [a.grad + b.grad for a, b in zip(parameters_of(0), parameters_of(1), strict=True)]
    for summed in ranks(2).run(reduced_on_rank, bucket_bytes):
        for found, total in zip(summed, expected, strict=True):
            assert found.dtype == total.dtype and torch.equal(found, total)


def transposed_on_rank() -> tuple[bool, Tensor]:
    pool = group_pool()
    parameter = nn.Parameter(torch.zeros(3, 5))
    gradient = (torch.arange(15.0).reshape(5, 3) * (pool.rank + 1)).t()
    parameter.grad = gradient
    GradientSum([parameter]).reduce(pool.everyone)
    return parameter.grad is gradient, parameter.grad


def test_a_gradient_that_is_not_contiguous_is_summed_in_place(ranks) -> None:
    for is_same, gradient in ranks(2).run(transposed_on_rank):
        assert is_same
        assert torch.equal(gradient, torch.arange(15.0).reshape(5, 3).t() * 3)


def frozen_on_rank() -> list[Tensor | None]:
    pool = group_pool()
    frozen, trained = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    trained.grad = torch.full((2,), float(pool.rank))
    GradientSum([frozen, trained]).reduce(pool.everyone)
    return [frozen.grad, trained.grad]


def test_a_parameter_without_gradient_stays_without(ranks) -> None:
    for frozen, trained in ranks(2).run(frozen_on_rank):
        assert frozen is None
        assert trained.tolist() == [1.0, 1.0]


@pytest.mark.quick
def test_one_rank_keeps_its_gradients() -> None:
    parameters = parameters_of(0)
    before = [parameter.grad.clone() for parameter in parameters]
    GradientSum(parameters).reduce(None)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))


def completed_on_rank(dtype: torch.dtype) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Sums of two steps in which rank r has a gradient only for parameter r, and rank 0 also for parameter 2."""
    pool = group_pool()
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(4)]
    gradients, found = GradientSum(parameters), []
    for step in (1.0, 2.0):
        for place in (pool.rank, *([2] if pool.rank == 0 else [])):
            parameters[place].grad = torch.full((3,), step + place, dtype=dtype)
            gradients.absorb()
        gradients.reduce(pool.everyone)
        found.append([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_that_ran_different_layers_end_with_the_same_gradients(ranks, dtype: torch.dtype) -> None:
    for steps in ranks(2).run(completed_on_rank, dtype):
        for step, found in zip((1.0, 2.0), steps, strict=True):
            expected = [torch.full((3,), value, dtype=dtype) for value in (step, step + 1, step + 2)]
            assert all(torch.equal(one, other) for one, other in zip(found[:3], expected, strict=True))
            # no rank used it
            assert found[3] is None


def test_backward_itself_moves_half_precision_gradients_to_their_sums() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8).bfloat16() for _ in range(4)), nn.Linear(8, 8))
    sums = GradientSum(list(layers.parameters()))
    held: list[int] = []

    def count(gradient: Tensor) -> None:
        held.append(sum(weight.grad is not None for weight in layers[:4].parameters()))

    expected = [torch.zeros(weight.shape) for weight in layers.parameters()]
    for seed in range(3):
        torch.manual_seed(seed)
        x, noise = torch.randn(5, 8).bfloat16(), torch.randn(5, 8)
        for gradient, weight in zip(expected, layers.parameters(), strict=True):
            hidden = layers[:4](x)
            (found,) = torch.autograd.grad((layers[4](hidden.float()) * noise).sum(), [weight])
            gradient += found.float()
        with sums.absorbing():
            x.requires_grad_()
            x.register_hook(count)
            (layers[4](layers[:4](x).float()) * noise).sum().backward()
    # the last gradients of a backward may still be on their way
    assert max(held) <= 2
    assert not any(weight._post_accumulate_grad_hooks for weight in layers.parameters())
    assert sums.parameters[0].grad is None and layers[4].weight.grad is not None
    sums.reduce(None)
    for gradient, weight in zip(expected, layers.parameters(), strict=True):
        assert torch.equal(weight.grad, gradient.to(weight.dtype)) or torch.allclose(weight.grad.float(), gradient, rtol=1e-2)

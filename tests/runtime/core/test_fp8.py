"""Products in fp8 against slow ones: rounding by a table of all numbers, products in fp64. The CPU runs torch's real operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.runtime.core import fp8
from hf_longctx.runtime.core.fp8 import RoundedInput, input_gradient, rows_in_fp8, unpacked
from hf_longctx.runtime.core.products import AdaptedProduct, FP8Linear, adapted_products, product

# sums of a product are rounded to fp32 in another order
FP32 = 5e-6
# tokens, input and output features; an odd number of tokens, more than a block of 256, one, none
SHAPES = [(41, 64, 48), (257, 32, 16), (1, 16, 32), (0, 32, 16)]


def numbers() -> Tensor:
    """Numbers of e4m3 from zero up, by their definition: four bits of exponent with bias 7, three of mantissa; one is NaN."""
    found = []
    for byte in range(127):
        exponent, mantissa = byte >> 3, byte & 7
        found.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(found, dtype=torch.float64)


def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as numbers of e4m3 and their scales, in fp64, by their distance from every number."""
    largest = x.float().abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    wanted, table = (x.float() / scales).double(), numbers()
    distances = (table - wanted.abs()[..., None]).abs()
    # half-way between two numbers, the one whose mantissa is even
    odd = torch.arange(127) % 2
    nearest = (distances > distances.amin(-1, keepdim=True)).mul(2).add(odd).argmin(-1)
    return table[nearest].copysign(wanted), scales.double()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers; those with a seed below ten have rows of very different size, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.logspace(0, -20 if seed < 10 else 0, max(1, len(x)))[: len(x), None]).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row relative to its norm."""
    if not len(found):
        return 0.0
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-300)).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_that_of_the_table(shape: tuple[int, int, int]) -> None:
    x = drawn(shape[0], shape[1])
    values, scale = rows_in_fp8(x)
    expected, scales = by_hand(x)
    assert torch.equal(scale.double(), scales)
    assert torch.equal(values.double(), expected)
    assert (values.float() * scale - x.float()).abs().le(x.float().abs() / 16 + 2.0**-10 * scale).all()


def test_a_row_of_zeros_stays_zero_and_one_with_nan_spoils_no_other() -> None:
    x = drawn(4, 32)
    x[1] = 0.0
    alone, _ = rows_in_fp8(x[3:])
    x[2, 5] = float("nan")
    x[0, 5] = float("inf")
    values, scale = rows_in_fp8(x)
    assert not values[1].float().any() and scale[1] > 0
    assert torch.equal(values[3].view(torch.uint8), alone[0].view(torch.uint8))
    w = FP8Linear.rounded(drawn(16, 32, seed=11))
    finite = w(x).isfinite().all(1)
    assert finite.tolist() == [False, True, False, True]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", fp8.RESULTS)
def test_both_passes_are_the_slow_ones(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_inputs, num_outputs = shape
    linear = FP8Linear.rounded(drawn(num_outputs, num_inputs, seed=11))
    x = drawn(num_tokens, num_inputs, dtype=dtype).requires_grad_()
    dy = drawn(num_tokens, num_outputs, seed=2, dtype=dtype)
    y = linear(x)
    y.backward(dy)
    (w8, sw), (x8, sx) = by_hand(drawn(num_outputs, num_inputs, seed=11)), by_hand(x.detach())
    g8, sg = by_hand((dy.float() * sw.float().T).to(dtype))
    rounding = FP32 if dtype == torch.float32 else 2**-8
    assert y.dtype == dtype and error(y.detach(), (x8 * sx) @ (w8 * sw).T) <= rounding
    assert x.grad is not None and error(x.grad, (g8 * sg) @ w8) <= rounding


@pytest.mark.parametrize("dtype", fp8.RESULTS)
@pytest.mark.parametrize("block", [None, (16, 16)])
def test_a_bias_is_added_before_the_result_is_rounded_and_may_be_trained(block: Any, dtype: torch.dtype) -> None:
    w, bias = drawn(48, 64, seed=11), torch.nn.Parameter(drawn(48, 1, seed=13)[:, 0] * 3)
    linear = FP8Linear.rounded(w, bias)
    if block is not None:
        linear = FP8Linear(linear.weight.detach(), torch.rand(3, 4) + 0.5, block, bias)
    x, dy = drawn(41, 64, dtype=dtype).requires_grad_(), drawn(41, 48, seed=2, dtype=dtype)
    y = linear(x)
    y.backward(dy)
    full = unpacked(linear.weight, linear.scale, block, torch.float64)
    x8, sx = by_hand(x.detach()) if block is None else (x.detach().double(), torch.ones(1, dtype=torch.float64))
    exact = (x8 * sx) @ full.T + bias.detach().double()
    assert y.dtype == dtype and torch.equal(linear(x.detach()), y.detach())
    if block is None:
        # rounded once: the nearest number of the dtype, but for sums in another order
        assert (y.detach().double() - exact).abs().le(exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()
    assert error(y.detach(), exact) <= (FP32 if dtype == torch.float32 else 2**-7)
    assert bias.grad is not None and bias.grad.dtype == torch.bfloat16
    assert error(bias.grad[None], dy.double().sum(0)[None]) <= 2**-7
    bias.requires_grad_(False)
    (alone,) = torch.autograd.grad(linear(x), x, dy)
    assert torch.equal(alone, x.grad)


def test_casts_change_a_bias_and_leave_scales() -> None:
    linear = FP8Linear.rounded(drawn(48, 64, seed=11), torch.nn.Parameter(drawn(48, 1, seed=13)[:, 0]))
    scale = linear.scale.detach().clone()
    linear.to(torch.float64)
    assert linear.bias.dtype == torch.float64 and linear.scale.dtype == torch.float32 and torch.equal(linear.scale, scale)


def test_products_are_close_to_those_in_full() -> None:
    """Three bits of mantissa: each element is wrong by 1/36 on average, a sum by a share of its terms."""
    x, w, dy = drawn(64, 128), drawn(96, 128, seed=11), drawn(64, 96, seed=2)
    linear = FP8Linear.rounded(w)
    x.requires_grad_()
    y = linear(x)
    y.backward(dy)
    full = unpacked(linear.weight, linear.scale, None, torch.float64)
    assert x.grad is not None
    found = error(y.detach(), x.detach().double() @ full.T), error(x.grad, dy.double() @ full)
    assert all(0.005 < each < 0.08 for each in found)
    assert error(full, w.double()) < 0.04


def test_tokens_do_not_depend_on_those_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = FP8Linear.rounded(drawn(48, 64, seed=11))

    def both(tokens: slice) -> tuple[Tensor, Tensor]:
        x, dy = drawn(300, 64)[tokens].requires_grad_(), drawn(300, 48, seed=2)[tokens]
        y = linear(x)
        y.backward(dy)
        assert x.grad is not None
        return y.detach(), x.grad

    whole = both(slice(0, 300))
    parts = [both(tokens) for tokens in (slice(0, 7), slice(7, 290), slice(290, 300))]
    for found, expected in zip(map(torch.cat, zip(*parts, strict=True)), whole, strict=True):
        assert torch.equal(found, expected)
    # in blocks of tokens
    monkeypatch.setattr(fp8, "MULTIPLIED", 11 * 48)
    monkeypatch.setattr(reference, "FP8_ROUNDED", 3 * 64)
    for found, expected in zip(both(slice(0, 300)), whole, strict=True):
        assert torch.equal(found, expected)


def adapters(num_inputs: int, sizes: list[int], grads: bool = True) -> list[tuple[Tensor, Tensor]]:
    return [
        (drawn(4, num_inputs, seed=50 + n).requires_grad_(grads), drawn(size, 4, seed=20 + n).requires_grad_(grads))
        for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("given", [(True, True, True), (True, False, True)])
def test_projections_of_one_input_are_one_node_with_one_rounded_input(
    monkeypatch: pytest.MonkeyPatch, given: tuple[bool, ...]
) -> None:
    sizes, scaling = [48, 16, 32], 0.5
    linears = [FP8Linear.rounded(drawn(size, 64, seed=30 + n)) for n, size in enumerate(sizes)]
    pairs = adapters(64, sizes)
    x, dys = drawn(41, 64).requires_grad_(), [drawn(41, size, seed=40 + n) for n, size in enumerate(sizes)]
    calls: list[Any] = []
    run = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **more: calls.append(tuple(b.shape)) or run(a, b, **more))
    monkeypatch.setattr(fp8, "rows_in_fp8", lambda x: calls.append("rounded") or rows_in_fp8(x))
    biases = [None, drawn(16, 1, seed=13)[:, 0], drawn(32, 1, seed=14)[:, 0]]
    products = [
        AdaptedProduct(linear.weight, bias, a, b, scaling, scale_N1=linear.scale)
        for linear, bias, (a, b) in zip(linears, biases, pairs, strict=True)
    ]
    ys = adapted_products(x, products)
    assert calls == ["rounded", (64, 48), (64, 16), (64, 32)] and len({y.grad_fn for y in ys}) == 3
    calls.clear()
    used = [place for place, is_given in enumerate(given) if is_given]
    torch.autograd.backward([ys[place] for place in used], [dys[place] for place in used])
    assert calls == [(sum(sizes[place] for place in used), 64)]
    # one after the other, by hand
    x8, sx = by_hand(x.detach())
    weights = [by_hand(drawn(size, 64, seed=30 + n)) for n, size in enumerate(sizes)]
    side = torch.cat([dys[place].float() * weights[place][1].float().T for place in used], 1).bfloat16()
    g8, sg = by_hand(side)
    dx = (g8 * sg) @ torch.cat([weights[place][0] for place in used])
    for place, ((a, b), (w8, sw)) in enumerate(zip(pairs, weights, strict=True)):
        low = x.detach().double() @ a.detach().double().T
        full = (x8 * sx) @ (w8 * sw).T + scaling * low @ b.detach().double().T
        bias = biases[place]
        full = full if bias is None else full + bias.double()
        assert error(ys[place].detach(), full) <= 2**-7
        if place not in used:
            assert a.grad is None or not a.grad.any()
            continue
        dlow = scaling * dys[place].double() @ b.detach().double()
        assert a.grad is not None and b.grad is not None
        assert error(b.grad, scaling * dys[place].double().T @ low) <= 2**-6
        assert error(a.grad, dlow.T @ x.detach().double()) <= 2**-6
        dx = dx + dlow @ a.detach().double()
    assert x.grad is not None and error(x.grad, dx) <= 2**-6


def test_a_product_may_be_made_from_a_record() -> None:
    linear, x = FP8Linear.rounded(drawn(48, 64, seed=11)), drawn(41, 64).requires_grad_()
    expected = linear(x)
    found = product(linear, x, lambda x_TC, size, first: torch.cat([first(9), expected.detach()[9:]]))
    assert torch.equal(found, expected)
    (dx,) = torch.autograd.grad(found, x, drawn(41, 48, seed=2))
    assert torch.equal(dx, torch.autograd.grad(expected, x, drawn(41, 48, seed=2))[0])


def test_under_autocast_inputs_are_rounded_to_its_dtype_first() -> None:
    linear, x = FP8Linear.rounded(drawn(48, 64, seed=11)), drawn(41, 64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, linear(x.bfloat16()))


def test_inputs_in_full_are_refused() -> None:
    with pytest.raises(ValueError, match=r"an input in torch.float64, but their products are in bf16 or fp32; load the model"):
        RoundedInput(torch.zeros(3, 16, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(32, 64), (20, 50)])
@pytest.mark.parametrize("elements", [2**24, 1])
def test_blocks_are_unpacked_and_multiplied_without_a_second_rounding(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], elements: int
) -> None:
    monkeypatch.setattr(fp8, "UNPACKED", elements)
    num_outputs, num_inputs = shape
    values, _ = rows_in_fp8(drawn(*shape, seed=1))
    scale = torch.rand(-(-num_outputs // 16), -(-num_inputs // 8)) + 0.1
    expected = torch.empty(shape, dtype=torch.float64)
    for row in range(num_outputs):
        for column in range(num_inputs):
            expected[row, column] = float(values[row, column]) * float(scale[row // 16, column // 8])
    linear = FP8Linear(values.view(torch.uint8), scale, (16, 8))
    assert error(unpacked(linear.weight, linear.scale, (16, 8), torch.float64), expected) <= 1e-15
    x = drawn(5, num_inputs, dtype=torch.float64).requires_grad_()
    y = linear(x)
    y.backward(drawn(5, num_outputs, seed=2, dtype=torch.float64))
    assert x.grad is not None
    assert error(y.detach(), x.detach() @ expected.T) <= 1e-15
    assert error(x.grad, drawn(5, num_outputs, seed=2, dtype=torch.float64) @ expected) <= 1e-15


def test_gradients_of_one_matrix_are_the_sum_over_all_of_them() -> None:
    parts = [FP8Linear.rounded(drawn(size, 32, seed=size)) for size in (16, 48)]
    dys = [drawn(9, size, seed=3) for size in (16, 48)]
    found = input_gradient(dys, [each.weight for each in parts], [each.scale for each in parts])
    full = sum(dy.double() @ unpacked(each.weight, each.scale, None, torch.float64) for dy, each in zip(dys, parts, strict=True))
    assert isinstance(full, Tensor) and error(found, full) < 0.2

"""Short convolutions of whole rows: by a function that torch.compile traces, or by causal-conv1d if its numbers are right.

The package is not installed here: stand-ins have the signature of its 1.6 and compute by transformers' torch code.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.reference import relative_error
from torch import Tensor
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn

from hf_longctx.runtime.states.convolution import (
    ConvolutionPackage,
    RowConvolution,
    chooses_convolution,
    compiled_convolution,
    convolution_error,
    drawn_convolution,
)

CPU = torch.device("cpu")
OWN = inspect.unwrap(causal_conv1d_fn)
LENGTHS = (5, 1, 2, 17, 3, 9)
BOUNDS = tuple(pairwise(accumulate(LENGTHS, initial=0)))


def by_document(x_1CN: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return torch.cat([OWN(x_1CN[..., start:stop], weight, bias, activation=activation) for start, stop in BOUNDS], dim=-1)


def results(run: Callable[..., Tensor], dtype: torch.dtype, width: int, has_bias: bool) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(sum(LENGTHS), 6), torch.randn(6, width), *([torch.randn(6)] if has_bias else [])]
    x, weight, *bias = (leaf.to(dtype).requires_grad_() for leaf in leaves)
    output = run(x.t().unsqueeze(0), weight, bias[0] if bias else None)
    gradient = torch.randn(output.shape).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, weight, *bias], gradient)]


@pytest.mark.daily("torch.float64-1e-12-silu-False-2")
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", ""])
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_row_is_that_of_its_documents(dtype: torch.dtype, limit: float, activation: str, has_bias: bool, width: int) -> None:
    convolution = compiled_convolution(activation, backend="eager")
    found = results(lambda x, weight, bias: convolution(x, weight, bias, LENGTHS), dtype, width, has_bias)
    expected = results(partial(by_document, activation=activation or None), dtype, width, has_bias)
    assert found[0].dtype == dtype
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= limit


def test_autocast_rounds_weights_as_it_does_for_the_own_code() -> None:
    choose = chooses_convolution(ConvolutionPackage(), {"silu": compiled_convolution("silu", backend="eager")})
    x, weight = torch.randn(1, 6, sum(LENGTHS), dtype=torch.bfloat16), torch.randn(6, 4, requires_grad=True)
    # without autocast, the own code computes in the dtype of the weight
    assert choose(x, weight, None, "silu") is None
    with torch.autocast("cpu", torch.bfloat16):
        convolution = choose(x, weight, None, "silu")
        assert convolution is not None and choose(x, weight, None, "gelu") is None and choose(x, weight, None, None) is None
        found, expected = convolution(x, weight, None, LENGTHS), by_document(x, weight, None, "silu")
    assert found.dtype == torch.bfloat16 and relative_error(found.float(), expected.float()) <= 2e-2
    (gradient,) = torch.autograd.grad(found.float().sum(), weight)
    assert gradient.dtype == torch.float32


def stand_in(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Convolves documents, whose tokens have equal numbers in `seq_idx` [1, N], of a row whose channels lie side by side."""
    assert x.stride(1) == 1 and x.shape[1] % 8 == 0 and seq_idx is not None and seq_idx.dtype == torch.int32
    counts = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    return torch.cat([OWN(part, weight, bias, activation=activation) for part in x.split(counts, dim=-1)], dim=-1)


def leaking(x: Tensor, *others: Any, seq_idx: Tensor, **more: Any) -> Tensor:
    return stand_in(x, *others, seq_idx=torch.zeros_like(seq_idx), **more)


def without_activation(*args: Any, activation: Any, **more: Any) -> Tensor:
    return stand_in(*args, **more)


def without_bias(*args: Any, bias: Any, **more: Any) -> Tensor:
    return stand_in(*args, bias=None if bias is None else bias * 0, **more)


def without_gradient_of_weights(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
    return stand_in(x, weight.detach() + 0 * weight, **more)


def turned_weights(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
    return stand_in(x, weight.flip(1), **more)


def not_a_number(*args: Any, **more: Any) -> Tensor:
    return stand_in(*args, **more) * float("nan")


def of_another_signature(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
    raise AssertionError("must not be called")


WRONG: dict[str, tuple[Any, str]] = {
    "documents leak": (leaking, "differs from the plain function"),
    "no activation": (without_activation, "differs from the plain function"),
    "no bias": (without_bias, "differs from the plain function"),
    "gradient of weights dropped": (without_gradient_of_weights, "differs from the plain function by 1.0e+00"),
    "weights in another order": (turned_weights, "differs from the plain function"),
    "not a number": (not_a_number, "differs from the plain function by nan"),
    "another signature": (of_another_signature, "it has no argument seq_idx"),
}


@contextmanager
def installed(run: Any = stand_in) -> Iterator[ConvolutionPackage]:
    """Context with a package whose function is `run`, for the CPU."""
    module = ModuleType("causal_conv1d")

    def function(*args: Any, **given: Any) -> Any:
        return run(*args, **given)

    vars(function)["__signature__"] = inspect.signature(run if run is of_another_signature else stand_in)
    vars(module)["causal_conv1d_fn"] = function
    with patch.dict("sys.modules", {"causal_conv1d": module}):
        yield ConvolutionPackage(device_type="cpu")


def inputs(dtype: torch.dtype, channels: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = drawn_convolution(channels, 4, True, dtype, CPU)
    assert bias is not None
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_right_package_runs(dtype: torch.dtype, caplog: Any) -> None:
    x, weight, bias = inputs(dtype)
    with installed() as package:
        convolution = package.convolution(x, weight, bias, "silu")
        assert convolution is not None
        found = convolution(x, weight, bias, (70, 7))
        # neither other numbers of channels nor doubles, nor where sums must have one order
        assert package.convolution(*inputs(dtype, 12), "silu") is None
        assert package.convolution(x.double(), weight.double(), None, "silu") is None
        torch.use_deterministic_algorithms(True)
        try:
            assert package.convolution(x, weight, bias, "silu") is None
        finally:
            torch.use_deterministic_algorithms(False)
    expected = torch.cat([OWN(part, weight, bias, activation="silu") for part in x.split([70, 7], dim=-1)], dim=-1)
    assert torch.equal(found, expected) and not caplog.records


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_package_is_left_out_and_named(name: str, caplog: Any) -> None:
    run, message = WRONG[name]
    x, weight, bias = inputs(torch.bfloat16)
    compiled = compiled_convolution("silu", backend="eager")
    with installed(run) as package, caplog.at_level(logging.WARNING):
        choose = chooses_convolution(package, {"silu": compiled})
        assert choose(x, weight, bias, "silu") is compiled and choose(x, weight, bias, "silu") is compiled
    (record,) = caplog.records
    assert "causal_conv1d_fn of causal-conv1d is not used" in record.getMessage() and message in record.getMessage()


def test_a_package_that_is_missing_is_not_a_warning(caplog: Any) -> None:
    with patch("importlib.util.find_spec", lambda name: None):
        assert ConvolutionPackage(device_type="cpu").convolution(*inputs(torch.bfloat16), "silu") is None
    assert not caplog.records


@pytest.mark.wide
def test_an_error_is_found_in_gradients_of_what_is_trained_alone() -> None:
    right = compiled_convolution("silu", backend="eager")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor) -> Tensor:
        return right.run(x, weight.detach() + 0 * weight, bias, place)

    wrong, drawn = RowConvolution("silu", run), inputs(torch.float32)
    own = partial(OWN, activation="silu")
    assert convolution_error(right, own, drawn) <= 1e-5
    assert convolution_error(wrong, own, drawn) > 0.9 and convolution_error(wrong, own, drawn, (True, False, True)) <= 1e-5


def test_places_of_long_rows_do_not_pile_up_on_the_device() -> None:
    convolution = compiled_convolution("silu", backend="eager")
    rows = [(2**21, length) for length in range(1, 5)]
    made = [convolution.places(lengths, CPU) for lengths in rows]
    assert [int(place[-1]) for place in made] == [0, 1, 2, 3]
    kept = list(convolution._places.values())
    assert kept[-1] is made[-1] is convolution.places(rows[-1], CPU) and sum(map(len, kept)) <= 2**22

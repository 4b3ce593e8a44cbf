"""Computes attention projections with low-rank adapters for some heads at a time: a piece has rows or columns of each matrix.

An adapter adds scaling * B A dropout(x) to the output of its linear module. Queries, keys and values of a piece need rows of B;
the product of A with the input has few features and is computed once for all pieces. For the output projection the input is cut
instead: the products of A's columns with the outputs of the pieces are summed, in at least fp32, before they are multiplied by B.

PEFT casts an adapter's input to the dtype of A, which may be wider than the model's, and applies dropout to it. The copies are
not saved and exist for some tokens at a time, also in backward; dropout masks are drawn again (`runtime.core.dropout`).

Shapes: T tokens of this rank, C input features, N output features, r features of the product with A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_longctx.plan.core.sharding import ADAPTER_ELEMENTS
from hf_longctx.runtime.core.binding import HOOKS, is_written_by, own_forward
from hf_longctx.runtime.core.dropout import SITE, DropoutTokens
from hf_longctx.runtime.core.products import FP8Linear

# an adapter's first matrix, its second, and the bias of the second
Matrices = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An active adapter of a projection. casts_input: casts its input to the dtype of its first matrix."""

    first: nn.Linear
    second: nn.Linear
    dropout: nn.Module
    scaling: float
    casts_input: bool = True


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear module and the adapters whose outputs are added to its output."""

    linear: nn.Linear
    adapters: tuple[Adapter, ...] = ()


# returns the parts of a projection, or why it cannot be cut by heads
Reader = Callable[[Any], Projection | str]


def plain_projection(module: Any) -> Projection | str:
    """Returns a plain linear module as a projection, or why it is none."""
    if type(module) is not nn.Linear:
        return f"is {'missing' if module is None else f'a {type(module).__name__}'}, not a plain linear module"
    return changed_problem(module) or Projection(module)


def only_multiplies(module: Any) -> bool:
    """Whether a linear module only multiplies its input: a plain one, or one with a frozen weight in fp8."""
    if isinstance(module, FP8Linear):
        return not hook_problem(module) and own_forward(module) is None
    return isinstance(plain_projection(module), Projection)


def hook_problem(module: nn.Module) -> str:
    """Describes hooks that read or change a module's inputs or outputs; empty if there are none."""
    return "has hooks, which would see some heads at a time" if any(getattr(module, kind) for kind in HOOKS) else ""


def changed_problem(module: nn.Module) -> str:
    """Describes why a module does not compute what its class computes; empty if it does."""
    is_changed = own_forward(module) is not None or not is_written_by(type(module).forward, "torch", "peft")
    return hook_problem(module) or ("has a forward that is not its class's" if is_changed else "")


def dropout_problem(dropout: nn.Module) -> str:
    """Describes why masks of an adapter's dropout cannot be drawn for some heads; empty if they can."""
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"drops its input by a {type(dropout).__name__}"
    # a dropout module with a site has the forward that draws by token
    return hook_problem(dropout) if SITE in vars(dropout) else changed_problem(dropout)


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """An adapter in one forward of its layer.

    input_dtypes: dtypes to which the input is cast, in order. mask: (tokens, rate, key) of its dropout, if any.
    """

    scaling: float
    input_dtypes: tuple[torch.dtype, ...]
    mask: tuple[DropoutTokens, float, int] | None

    def given(self, x_TC: Tensor, tokens: slice, first_channel: int) -> Tensor:
        """Returns the first matrix's input for some tokens; x_TC has the channels from `first_channel` on."""
        given_TC = x_TC[tokens]
        for dtype in self.input_dtypes:
            given_TC = given_TC.to(dtype)
        return self._dropped(given_TC, tokens, first_channel)

    def back(self, gradient_TC: Tensor, dtype: torch.dtype, tokens: slice, first_channel: int) -> Tensor:
        """Returns the gradient of x in `dtype`, given the gradient of the result of `given`."""
        dtypes = (dtype, *self.input_dtypes)
        found_TC = self._dropped(gradient_TC.to(dtypes[-1]), tokens, first_channel)
        for each in reversed(dtypes[:-1]):
            found_TC = found_TC.to(each)
        return found_TC

    def _dropped(self, x_TC: Tensor, tokens: slice, first_channel: int) -> Tensor:
        if self.mask is None:
            return x_TC
        all_tokens, rate, key = self.mask
        return all_tokens.part(tokens).masked(x_TC, rate, key, first_channel)


def adapter_calls(projection: Projection) -> tuple[AdapterCall, ...]:
    """Returns the adapters of a projection for the running forward; counts one call of each dropout module."""
    dtypes: list[torch.dtype] = []
    calls = []
    for adapter in projection.adapters:
        # each adapter gets the input as cast by the adapter before it
        dtypes += [adapter.first.weight.dtype] if adapter.casts_input else []
        calls.append(AdapterCall(adapter.scaling, tuple(dtypes), _mask(adapter.dropout)))
    return tuple(calls)


def _mask(dropout: nn.Module) -> tuple[DropoutTokens, float, int] | None:
    rate = float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
    if not rate:
        return None
    site = vars(dropout).get(SITE)
    tokens = None if site is None else site.keys.tokens
    if site is None or tokens is None:
        raise RuntimeError(
            f"an adapter's dropout of rate {rate:g} runs in pieces of heads without tokens, which its masks would follow; set "
            f"its rate before the trainer is made"
        )
    return tokens, rate, tokens.call_key(site.name)


class Adapters:
    """The adapters of one projection in one forward or backward.

    low_Tr: products of the first matrices with the input. Gradients of the parameters in `needed` are summed in at least fp32.
    """

    def __init__(self, calls: Sequence[AdapterCall], tensors: Sequence[Tensor | None], num_tokens: int) -> None:
        matrices = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        self._calls, self._matrices = calls, [_given(*each) for each in matrices]
        self._num_tokens = num_tokens
        self.low_Tr = self._sums_Tr()
        self._dlow_Tr: list[Tensor] = []
        self._sums: list[Tensor | None] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def multiply(self, x_TC: Tensor, first_channel: int = 0) -> None:
        """Adds the products of the first matrices with the input's channels from `first_channel` on."""
        channels = slice(first_channel, first_channel + x_TC.shape[1])
        for call, (a_rC, _, _), low_Tr in zip(self._calls, self._matrices, self.low_Tr, strict=True):
            for tokens in self._blocks(x_TC.shape[1]):
                low_Tr[tokens] += F.linear(call.given(x_TC, tokens, first_channel).to(a_rC.dtype), a_rC[:, channels])

    def finish(self) -> list[Tensor]:
        """Rounds the products to the dtype of the matrices and returns them; call it after all channels were added."""
        self.low_Tr = [low_Tr.to(a_rC.dtype) for low_Tr, (a_rC, _, _) in zip(self.low_Tr, self._matrices, strict=True)]
        return self.low_Tr

    def add_to(self, y_TN: Tensor, features: slice) -> Tensor:
        """Adds the adapters' outputs for these features to y_TN, in place, and returns y_TN."""
        for tokens in self._blocks(y_TN.shape[1]) if self else ():
            total_TN = y_TN[tokens]
            for call, (_, b_Nr, bias_N), low_Tr in zip(self._calls, self._matrices, self.low_Tr, strict=True):
                bias = None if bias_N is None else bias_N[features]
                total_TN = total_TN + F.linear(low_Tr[tokens], b_Nr[features], bias) * call.scaling
            y_TN[tokens] = total_TN
        return y_TN

    def begin_backward(self, low_Tr: Sequence[Tensor], needed: Sequence[bool]) -> None:
        """Prepares the backward. needed: for each adapter, whether first matrix, second matrix and bias need gradients."""
        self.low_Tr, self._dlow_Tr = list(low_Tr), self._sums_Tr()
        parts = [part for matrices in self._matrices for part in matrices]
        self._sums = [
            torch.zeros_like(part, dtype=_wide(part.dtype)) if part is not None and needs else None
            for part, needs in zip(parts, needed, strict=True)
        ]

    def add_rows(self, dy_TN: Tensor, features: slice) -> None:
        """Adds the gradients of second matrices and of the first ones' products, given the gradient of some features."""
        for number, (call, (_, b_Nr, _)) in enumerate(zip(self._calls, self._matrices, strict=True)):
            _, db_Nr, dbias_N = self._sums[3 * number : 3 * number + 3]
            for tokens in self._blocks(dy_TN.shape[1]):
                scaled_TN = dy_TN[tokens].to(b_Nr.dtype) * call.scaling
                if db_Nr is not None:
                    db_Nr[features] += scaled_TN.T @ self.low_Tr[number][tokens]
                if dbias_N is not None:
                    dbias_N[features] += scaled_TN.sum(0)
                self._dlow_Tr[number][tokens] += scaled_TN @ b_Nr[features]

    def add_columns(self, x_TC: Tensor, dx_TC: Tensor | None, first_channel: int = 0) -> None:
        """Adds the gradients of the first matrices; to dx_TC, if given, those of the input's channels from `first_channel` on."""
        channels = slice(first_channel, first_channel + x_TC.shape[1])
        for number, (call, (a_rC, _, _)) in enumerate(zip(self._calls, self._matrices, strict=True)):
            da_rC = self._sums[3 * number]
            for tokens in self._blocks(x_TC.shape[1]):
                dlow_Tr = self._dlow_Tr[number][tokens].to(a_rC.dtype)
                if da_rC is not None:
                    da_rC[:, channels] += dlow_Tr.T @ call.given(x_TC, tokens, first_channel).to(a_rC.dtype)
                if dx_TC is not None:
                    dx_TC[tokens] += call.back(dlow_Tr @ a_rC[:, channels], x_TC.dtype, tokens, first_channel)

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the matrices, in the order in which they were given."""
        parts = [part for matrices in self._matrices for part in matrices]
        return [
            None if total is None or part is None else total.to(part.dtype) for total, part in zip(self._sums, parts, strict=True)
        ]

    def _sums_Tr(self) -> list[Tensor]:
        return [a_rC.new_zeros(self._num_tokens, len(a_rC), dtype=_wide(a_rC.dtype)) for a_rC, _, _ in self._matrices]

    def _blocks(self, num_features: int) -> Iterator[slice]:
        """Yields ranges that together cover all tokens."""
        size = max(1, ADAPTER_ELEMENTS // num_features)
        return (slice(first, first + size) for first in range(0, self._num_tokens, size))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _given(a_rC: Tensor | None, b_Nr: Tensor | None, bias_N: Tensor | None) -> Matrices:
    assert a_rC is not None and b_Nr is not None
    return a_rC, b_Nr, bias_N

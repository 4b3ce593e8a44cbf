"""Runs a short causal convolution within each document of a chunk, also if ranks or slices divide a document.

A token reads the `width` - 1 tokens before it. At the start of a document these are zeros. A slice reads those of the slice
before from the state book. If ranks of a group share a document, a rank gets the tokens before each of its own runs of tokens
from the ranks that hold them, which may be several; every rank also gets the last tokens of a slice, since the next slice may
begin on any of them.

`RowConvolution` is a convolution of single channels with its activation, as one kernel for all documents of a row: that of the
package causal-conv1d, if it is installed and its numbers prove right, else one that torch.compile makes (`compiled_convolution`).
It reads and writes every value once, where transformers' torch code makes the row contiguous, convolves and activates it one
document after the other; and it saves its input alone. Like all kernels it rounds once, at its end.

Shapes: C channels, T tokens of this rank, K = `width` - 1 tokens that are read, N some tokens, W = `width`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.kernels import CompiledFunction
from hf_longctx.runtime.core.packages import PackageFunction
from hf_longctx.runtime.states.book import CONVOLUTION, check_not_lent, leave_state, slices_by_document, state_before
from hf_longctx.runtime.states.passing import fetch_tokens, with_backward_of

logger = logging.getLogger(__name__)

# names of the activations that kernels have, in a model's config; "": none
ACTIVATIONS = {"": "", "silu": "silu", "swish": "silu"}
# largest difference of a result from the plain one in fp32, as a share of its norm
_TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# rows whose documents are kept on the device, and most tokens of all of them, whose places take 16 MiB
_KEPT_ROWS, _KEPT_TOKENS = 64, 2**22


def convolve_documents(
    x_1CT: Tensor,
    width: int,
    convolve: Callable[[Tensor], Tensor],
    layer: Hashable,
    context: GroupContext,
    function: str = CONVOLUTION,
    in_row: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None,
) -> Tensor:
    """Returns outputs [1, C, T] of `convolve` within each document; it must read zeros before the first token it gets.

    function: distinguishes several convolutions of one layer. in_row: the same for several documents of these lengths, one after
    the other, in one call; None if there is no such function. Every rank of the context's group must call it for layers in the
    same order; backward repeats the exchange in reverse. Raises ValueError for slices with lent ranks.
    """
    check_not_lent(context)
    num_read, layout = width - 1, context.layout
    slices = slices_by_document(context)
    going_on = [slice_ for slice_ in slices.values() if slice_.stop < slice_.end]
    ranges_1CN, received = fetch_tokens(x_1CT, num_read, tuple(slice_.document for slice_ in going_on), layout)
    earlier = {document: state_before(slice_, function, layer, context) for document, slice_ in slices.items()}
    reads, rows = [], []
    for run, halo_1CN in zip(layout.own, ranges_1CN, strict=False):
        state = earlier.get(run.document)
        before = [x for x in (state, halo_1CN) if x is not None and x.shape[-1]]
        read_1CN = _last(torch.cat(before, dim=-1), num_read) if before else x_1CT[..., :0]
        reads.append(read_1CN)
        rows.append(torch.cat([read_1CN, x_1CT[..., run.tokens]], dim=-1) if before else x_1CT[..., run.tokens])
    if in_row is None:
        made = [convolve(row_1CN) for row_1CN in rows]
    else:
        # tokens that are read stand before those that read them, as parts of their document
        lengths = tuple(row_1CN.shape[-1] for row_1CN in rows)
        whole_1CN = x_1CT if sum(lengths) == x_1CT.shape[-1] else torch.cat(rows, dim=-1)
        found_1CN = in_row(whole_1CN, lengths)
        if whole_1CN is x_1CT:
            made, reads = [found_1CN], [x_1CT[..., :0]]
        else:
            made = list(found_1CN.split(list(lengths), dim=-1))
    outputs = [row_1CN[..., read_1CN.shape[-1] :] for row_1CN, read_1CN in zip(made, reads, strict=True)]
    output_1CT = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    for slice_, end_1CN in zip(going_on, ranges_1CN[len(layout.own) :], strict=True):
        after_1CK = _end_state(end_1CN, earlier[slice_.document], num_read)
        output_1CT = leave_state(slice_, function, layer, context, after_1CK, output_1CT)
    if layout.num_ranks == 1:
        return output_1CT
    # this rank may use neither the received tokens nor the states
    return with_backward_of(output_1CT, *received, *(state for state in earlier.values() if state is not None))


def _end_state(end_1CN: Tensor, before_1CK: Tensor | None, num_read: int) -> Tensor:
    """Returns the last tokens of a slice that the next one reads; a short slice keeps some of those before it."""
    zeros = end_1CN.new_zeros(*end_1CN.shape[:2], num_read) if before_1CK is None else before_1CK
    return _last(torch.cat([zeros, end_1CN], dim=-1), num_read)


def _last(x_1CN: Tensor, num_tokens: int) -> Tensor:
    """Returns the last tokens of `x_1CN`, or all if it has fewer."""
    return x_1CN[..., max(0, x_1CN.shape[-1] - num_tokens) :]


def plain_convolution(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, place_N: Tensor, activation: str) -> Tensor:
    """Returns what transformers' torch code makes of every document, in at least fp32 and rounded once.

    place_N: place of each token in its document. activation: a value of `ACTIVATIONS`.
    """
    dtype = torch.promote_types(torch.promote_types(x_NC.dtype, weight_CW.dtype), torch.float32)
    wide_NC, weight_CW = x_NC.to(dtype), weight_CW.to(dtype)
    total_NC = wide_NC * weight_CW[:, -1]
    for back in range(1, weight_CW.shape[1]):
        earlier_NC = F.pad(wide_NC, (0, 0, back, 0))[: wide_NC.shape[0]]
        reads_N1 = (place_N >= back).unsqueeze(1)
        total_NC = total_NC + torch.where(reads_N1, earlier_NC, 0.0) * weight_CW[:, -1 - back]
    if bias_C is not None:
        total_NC = total_NC + bias_C.to(dtype)
    return (F.silu(total_NC) if activation else total_NC).to(x_NC.dtype)


@dataclass
class RowConvolution:
    """A convolution of single channels with its activation, for all documents of a row at once."""

    # a value of `ACTIVATIONS`
    activation: str
    # (x [N, C], weight [C, W], bias or None, place of each token) -> outputs [N, C]
    run: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    _places: OrderedDict[tuple[tuple[int, ...], torch.device], Tensor] = field(default_factory=OrderedDict)

    def __call__(self, x_1CN: Tensor, weight_CW: Tensor, bias_C: Tensor | None, lengths: tuple[int, ...]) -> Tensor:
        """Returns outputs [1, C, N] for documents of these lengths, in the dtype of the input."""
        x_NC = x_1CN.squeeze(0).transpose(0, 1).contiguous()
        if torch.is_autocast_enabled(x_NC.device.type):
            # products under autocast round their weights, too
            weight_CW, bias_C = weight_CW.to(x_NC.dtype), None if bias_C is None else bias_C.to(x_NC.dtype)
        return self.run(x_NC, weight_CW.contiguous(), bias_C, self.places(lengths, x_NC.device)).transpose(0, 1).unsqueeze(0)

    def places(self, lengths: tuple[int, ...], device: torch.device) -> Tensor:
        """Returns the place of each token in its document; those of the last rows are kept, since every layer needs them.

        At least those of the last row are kept, however long it is.
        """
        key = (lengths, device)
        known = self._places.pop(key, None)
        if known is None:
            # they may be saved for backward later
            with torch.inference_mode(False):
                known = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]).to(device)
            while len(self._places) >= _KEPT_ROWS or sum(map(len, self._places.values())) > max(0, _KEPT_TOKENS - len(known)):
                self._places.popitem(last=False)
        self._places[key] = known
        return known


def compiled_convolution(activation: str, backend: str = "inductor") -> RowConvolution:
    """Makes a convolution with this activation by torch.compile; the first call for new sizes compiles it."""

    def with_bias(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor, place_N: Tensor) -> Tensor:
        return plain_convolution(x_NC, weight_CW, bias_C, place_N, activation)

    def without_bias(x_NC: Tensor, weight_CW: Tensor, place_N: Tensor) -> Tensor:
        return plain_convolution(x_NC, weight_CW, None, place_N, activation)

    has_bias = CompiledFunction(with_bias, (0, None, None, 0), num_gradients=3, backend=backend)
    has_none = CompiledFunction(without_bias, (0, None, 0), num_gradients=2, backend=backend)

    def run(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, place_N: Tensor) -> Tensor:
        found: Tensor = has_none(x_NC, weight_CW, place_N) if bias_C is None else has_bias(x_NC, weight_CW, bias_C, place_N)
        return found

    return RowConvolution(activation, run)


# (x [1, C, N] of one document, weight, bias) -> outputs [1, C, N]
OwnConvolution = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def plain_document(activation: str) -> OwnConvolution:
    """Returns `plain_convolution` of one document."""

    def convolve(x_1CN: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
        place_N = torch.arange(x_1CN.shape[-1], device=x_1CN.device)
        return plain_convolution(x_1CN[0].transpose(0, 1), weight_CW, bias_C, place_N, activation).transpose(0, 1).unsqueeze(0)

    return convolve


def convolution_error(
    convolution: RowConvolution,
    own: OwnConvolution,
    drawn: Sequence[Tensor | None],
    trains: tuple[bool, ...] = (True, True, True),
) -> float:
    """Returns the largest error of outputs and gradients on a small row of documents, as a share of their norms; NaN stays NaN.

    own: says what is right, in at least fp32. drawn: x [1, C, 77], weight and bias. trains: which of these have gradients.
    """
    lengths = (5, 1, 2, 37, 3, 29)
    results = []
    x_1CN, weight_CW, bias_C = drawn
    assert x_1CN is not None and weight_CW is not None
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x_1CN.device.type, enabled=False):
        given = torch.randn(x_1CN.shape, generator=torch.Generator().manual_seed(1)).to(x_1CN)
        for is_plain in (True, False):
            leaves = [x.detach().clone() for x in (x_1CN, weight_CW, bias_C) if x is not None]
            if is_plain:
                leaves = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in leaves]
            x, weight, *bias = (leaf.requires_grad_(need) for leaf, need in zip(leaves, trains, strict=False))
            own_bias = bias[0] if bias else None
            if is_plain:
                output = torch.cat([own(part, weight, own_bias) for part in x.split(list(lengths), dim=-1)], dim=-1)
            else:
                # in the memory format in which projections make it
                output = convolution(x.transpose(1, 2).contiguous().transpose(1, 2), weight, own_bias, lengths)
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            results.append([output.detach(), *torch.autograd.grad(output, trained, given.to(output.dtype))])
    pairs = [(found.double(), wanted.double()) for wanted, found in zip(*results, strict=True)]
    if any(found.shape != wanted.shape for found, wanted in pairs):
        return float("nan")
    errors = [float((found - wanted).norm() / wanted.norm().clamp(min=1e-30)) for found, wanted in pairs]
    return max(errors) if all(error == error for error in errors) else float("nan")


@dataclass
class ConvolutionPackage(PackageFunction):
    """`causal_conv1d_fn` of the package causal-conv1d, which is used if it is installed and right for a dtype and width.

    It adds gradients of weights in any order, so it is left out if deterministic algorithms are asked for.
    """

    package: str = "causal-conv1d"
    module: str = "causal_conv1d"
    name: str = "causal_conv1d_fn"
    arguments: tuple[str, ...] = ("bias", "seq_idx", "activation")
    # why it is not used, or "", by everything that a check depends on
    verdicts: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _convolutions: dict[str, RowConvolution] = field(default_factory=dict)

    def convolution(self, x_1CN: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str) -> RowConvolution | None:
        """Returns the package's convolution for such tensors; None if it is not used. The first call for them checks it."""
        dtype, device = x_1CN.dtype, x_1CN.device
        is_fit = device.type == self.device_type and dtype in _TOLERANCES and x_1CN.shape[1] % 8 == 0
        if not is_fit or torch.are_deterministic_algorithms_enabled():
            return None
        made = self._convolutions.setdefault(activation, RowConvolution(activation, self._run(activation)))
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        key = (dtype, weight_CW.shape[1], bias_C is None, activation, capability)
        if key not in self.verdicts:
            check = partial(self._checked, made, device, dtype, weight_CW.shape[1], bias_C is not None)
            self.verdicts[key] = found = self.problem_in(check)
            if found and self.is_installed:
                logger.warning("%s of %s is not used in %s: %s", self.name, self.package, dtype, found)
        return None if self.verdicts[key] else made

    def _run(self, activation: str) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
        def run(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, place_N: Tensor) -> Tensor:
            number_1N = (place_N == 0).cumsum(0, dtype=torch.int32).unsqueeze(0)
            found: Tensor = self.function(
                x_NC.transpose(0, 1).unsqueeze(0), weight_CW, bias=bias_C, seq_idx=number_1N, activation=activation or None
            )
            return found.squeeze(0).transpose(0, 1)

        return run

    def _checked(self, made: RowConvolution, device: torch.device, dtype: torch.dtype, width: int, has_bias: bool) -> str:
        # the first call may run inside a layer whose saved tensors travel
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            drawn = drawn_convolution(16, width, has_bias, dtype, device)
            error = convolution_error(made, plain_document(made.activation), drawn)
        # written so that NaN fails too
        if not error <= _TOLERANCES[dtype]:
            return f"it differs from the plain function by {error:.1e} of a norm (limit {_TOLERANCES[dtype]:.1e})"
        return ""


def drawn_convolution(
    channels: int, width: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draws x [1, C, 77], weight [C, W] and bias of a convolution, rounded to bf16, for `convolution_error`."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    return drawn(1, channels, 77), drawn(channels, width), drawn(channels) if has_bias else None


# (x [1, C, N], weight, bias, activation of a config) -> the kernel for such a convolution, None if there is none
ChoosesConvolution = Callable[[Tensor, Tensor, Tensor | None, str | None], RowConvolution | None]


def chooses_convolution(package: ConvolutionPackage, compiled: dict[str, RowConvolution]) -> ChoosesConvolution:
    """Returns a function that chooses between the package and compiled kernels, which are given by their activations."""

    def choose(x_1CN: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None) -> RowConvolution | None:
        known = ACTIVATIONS.get(activation or "")
        # without autocast, the torch code computes in the dtype of the weight
        is_rounded = torch.is_autocast_enabled(x_1CN.device.type)
        if known is None or x_1CN.shape[0] != 1 or not (is_rounded or x_1CN.dtype == weight_CW.dtype):
            return None
        return package.convolution(x_1CN, weight_CW, bias_C, known) or compiled.get(known)

    return choose

"""Runs a layer's attention for some heads at a time, so that Q, K, V and outputs of all heads never exist at once.

The activation engine binds `PiecedAttention` to a layer's attention module. A piece is a few neighbouring KV heads with all query
heads that read them. The module's own forward runs once per piece, on a copy of the module whose projections compute only the
heads of the piece (`HeadPiece`); the products of the output projection's columns with the pieces' outputs add up to the layer's
output. Positions, norms of heads, exchanges between ranks, the K/V book, patterns and packs are the same as without pieces.

One autograd node covers all pieces. It saves the input, and output and LSE of attention, but no queries, keys or values. Backward
projects those of one piece again and runs the module's forward with a graph, in which attention takes its output from the node;
then it runs backward through that graph. Per layer and step, attention runs as often as without pieces; the projections to
queries, keys and values, with the exchange of their results, run once more.

In half precision, sums over pieces are rounded once for each piece, as sums over ranks are in tensor parallelism.

Shapes: T tokens of this rank, S of its block, C hidden features, H query heads and G KV heads of the module, h and g those of a
piece, D head size of queries and keys, E of values.

Source: UPipe (arXiv 2602.21196), which cuts Ulysses attention into stages over heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.adapted_projection import (
    AdapterCall,
    Adapters,
    Projection,
    Reader,
    adapter_calls,
    hook_problem,
    plain_projection,
)
from hf_longctx.runtime.activations.records import AttentionRecord, KeptOutput

# projections to queries, keys and values; output projection; norms of query and key heads
_INPUTS, _OUTPUT, _NORMS = ("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm")
_KEPT = TensorShare("attention_output", device=1.0)
# keywords for a cache, in newer and older versions of transformers
_CACHES = ("cache", "past_key_values")
# projections that are cut
PROJECTIONS = (*_INPUTS, _OUTPUT)


def pieces_problem(module: Any, read: Reader = plain_projection) -> str:
    """Describes why the projections of an attention module cannot be cut by heads; empty if they can.

    Linear modules and their adapters, found by `read`, can be cut if no hook reads or changes their inputs or outputs.
    """
    name = type(module).__name__
    parts: dict[str, Any] = {part: getattr(module, part, None) for part in (*PROJECTIONS, *_NORMS)}
    for part, child in parts.items():
        if child is None and part in _NORMS:
            continue
        found = hook_problem(child) if part in _NORMS else read(child)
        if isinstance(found, str) and found:
            return f"{part} of {name} {found}"
    size, (q, k, v) = module.head_dim, (parts[part].out_features for part in _INPUTS)
    if k != v or q % k or k % size or parts[_OUTPUT].in_features != q:
        return f"{name} has projections of {q}, {k} and {v} features, which are not heads of {size} features each"
    norms = (parts[part] for part in _NORMS if parts[part] is not None)
    if any(each.weight.shape != (size,) for each in norms):
        return f"{name} has norms over several heads"
    return ""


def num_kv_heads(module: Any) -> int:
    """Returns the number of an attention module's KV heads, from its projections."""
    return int(module.k_proj.out_features // module.head_dim)


class _Cut(nn.Module):
    """Projection of one piece: computes the piece's heads, and keeps a gradient edge that refers to no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_NC: Tensor | None = None
        self.bias_N: Tensor | None = None
        # adapters of the whole projection
        self.adapters: Adapters | None = None
        self.features = slice(None)
        self.edge: GradientEdge | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.product(x)
        y: Tensor = _Product.apply(x.new_empty((), requires_grad=True), x, self)
        self.edge = get_gradient_edge(y)
        return y

    def product(self, x: Tensor) -> Tensor:
        """Returns the features of the piece, [1, T, N]."""
        assert self.weight_NC is not None and self.adapters is not None
        y = F.linear(x, self.weight_NC, self.bias_N)
        self.adapters.add_to(y.view(-1, y.shape[-1]), self.features)
        return y


class _Product(torch.autograd.Function):
    """Wraps a product as a non-leaf, which is never run backward; a leaf would live as long as the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, cut: _Cut) -> Tensor:
        return cut.product(x)


class HeadPiece:
    """A copy of an attention module that runs some of its heads and returns their outputs before the output projection.

    It shares everything else with the module. The copy is the piece's key in the K/V book, so all chunks must use the same one.
    """

    def __init__(self, module: Any, index: int, count: int) -> None:
        num_heads, num_kv = (getattr(module, name).out_features // module.head_dim for name in _INPUTS[:2])
        self.cuts = tuple(_Cut() for _ in _INPUTS)
        # the piece's ranges among the features of queries, keys and values; outputs have the range of queries
        self.features = tuple(
            slice(heads // count * index * module.head_dim, heads // count * (index + 1) * module.head_dim)
            for heads in (num_heads, num_kv, num_kv)
        )
        self.module = copy.copy(module)
        self.module._modules = {**module._modules, **dict(zip(_INPUTS, self.cuts, strict=True)), _OUTPUT: nn.Identity()}

    def __call__(self, x_1TC: Tensor, given: _Tensors, call: _Call) -> Tensor:
        """Returns the outputs of the piece's heads, [T, h * E]. given: parameters of the whole projections."""
        # training mode may have changed since the copy was made
        self.module.training = call.module.training
        parts = zip(self.cuts, self.features, given.weights, given.biases, given.adapters, strict=False)
        for cut, features, weight_NC, bias_N, adapters in parts:
            assert weight_NC is not None
            cut.weight_NC, cut.bias_N = weight_NC[features], None if bias_N is None else bias_N[features]
            cut.adapters, cut.features = adapters, features
        try:
            output = type(self.module).forward(self.module, hidden_states=x_1TC, **call.keywords)[0]
        finally:
            for cut in self.cuts:
                cut.weight_NC = cut.bias_N = cut.adapters = None
        return output.flatten(0, -2)

    def take_edges(self) -> list[GradientEdge]:
        """Hands over the gradient edges of queries, keys and values in the graph just made."""
        edges = [cut.edge for cut in self.cuts if cut.edge is not None]
        for cut in self.cuts:
            cut.edge = None
        return edges


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an attention module: its keywords except the input, with the chunk's context, and the pieces to run."""

    module: Any
    pieces: tuple[HeadPiece, ...]
    # record of each piece, for what the layer's policy keeps
    records: Sequence[AttentionRecord]
    # adapters of each projection, the output projection last
    adapters: tuple[tuple[AdapterCall, ...], ...]
    keywords: dict[str, Any]
    # (device, dtype, whether autocast is on)
    autocast: tuple[str, torch.dtype, bool]

    def cut(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Splits values, one per parameter of the node, into weights, biases, adapters of each projection, and norms."""
        sizes = (4, 4, *(3 * len(each) for each in self.adapters))
        ends = (0, *accumulate(sizes), len(values))
        return [values[first:last] for first, last in pairwise(ends)]

    def under(self, record: AttentionRecord) -> _Call:
        """Returns the call of one piece, whose attention uses `record` and does not count as a layer."""
        context = self.keywords["longctx"]
        calls = replace(context.calls)
        return replace(self, keywords={**self.keywords, "longctx": replace(context, attention_record=record, calls=calls)})


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The node's parameters in order: weights and biases of q, k, v and o, matrices of their adapters, weights of norms."""

    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    adapters: tuple[Adapters, ...]
    norms: Sequence[Tensor | None]

    @classmethod
    def of(cls, parameters: Sequence[Tensor | None], call: _Call, num_tokens: int) -> _Tensors:
        """Makes the parameters of a call, with adapters for `num_tokens` tokens."""
        parts = call.cut(parameters)
        adapters = tuple(Adapters(*each, num_tokens) for each in zip(call.adapters, parts[2:-1], strict=True))
        return cls(parts[0], parts[1], adapters, parts[-1])


class _Noted(AttentionRecord):
    """Forwards to a piece's record, and keeps output and LSE for the piece's backward."""

    takes_parts = False

    def __init__(self, record: AttentionRecord) -> None:
        super().__init__(record.share)
        self._record, self.is_replay = record, record.is_replay
        self.result: tuple[Tensor, Tensor] | None = None

    def put(self, out_ShE: Tensor, lse_hS: Tensor) -> None:
        self._record.put(out_ShE, lse_hS)
        self.result = out_ShE, lse_hS

    def take(self) -> KeptOutput | None:
        return self._record.take()


class _Given(AttentionRecord):
    """Hands over, once, the output and LSE of a piece's forward.

    Attention's node holds this record and returns the output; a record that kept the output would make a reference cycle.
    """

    takes_parts = False

    def __init__(self, out_ShE: Tensor, lse_hS: Tensor) -> None:
        super().__init__(_KEPT)
        self.is_replay = True
        self._result: KeptOutput | None = KeptOutput(0, out_ShE.detach(), lse_hS)

    def take(self) -> KeptOutput | None:
        result, self._result = self._result, None
        return result


class PiecedAttention:
    """Runs the forward of one attention module in pieces."""

    def __init__(self, module: Any, read: Reader = plain_projection) -> None:
        self.module, self._read = module, read
        # number of pieces -> pieces
        self._pieces: dict[int, tuple[HeadPiece, ...]] = {}

    def __call__(self, records: Sequence[AttentionRecord], hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        """Returns the module's output [1, T, C], computed in one piece per record, and None for attention weights.

        Raises RuntimeError if the module was changed so that pieces would differ from it.
        """
        module, count = self.module, len(records)
        if problem := _problem(module, self._read, keywords):
            raise RuntimeError(
                f"{problem}; undo this, or set it up before the trainer is made, whose plans then cut no attention"
            )
        if count not in self._pieces:
            self._pieces[count] = tuple(HeadPiece(module, index, count) for index in range(count))
        device = hidden_states.device.type
        autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # cast outside of the node, so that gradients are cast back as autocast does it
        cast = partial(_cast, dtype=autocast[1]) if autocast[2] else _same
        projections = self._projections()
        linears = [each.linear for each in projections]
        weights = [cast(linear.weight) for linear in linears]
        biases = [None if linear.bias is None else cast(linear.bias) for linear in linears]
        given = [adapter for each in projections for adapter in each.adapters]
        parts = [part for each in given for part in (each.first.weight, each.second.weight, each.second.bias)]
        matrices = [None if part is None else cast(part) for part in parts]
        call = _Call(module, self._pieces[count], records, tuple(map(adapter_calls, projections)), keywords, autocast)
        keywords["longctx"].calls.count += 1
        output: Tensor = _InPieces.apply(cast(hidden_states), call, *weights, *biases, *matrices, *_norm_weights(module))
        return output, None

    def _projections(self) -> list[Projection]:
        found = [self._read(getattr(self.module, name)) for name in PROJECTIONS]
        return [each for each in found if isinstance(each, Projection)]


def _norm_weights(module: Any) -> list[nn.Parameter]:
    """Returns the weights of the head norms."""
    norms = (getattr(module, name, None) for name in _NORMS)
    return [parameter for norm in norms if norm is not None for parameter in norm.parameters()]


def _problem(module: Any, read: Reader, keywords: dict[str, Any]) -> str:
    """Describes why a call cannot run in pieces; empty if it can."""
    if problem := pieces_problem(module, read):
        return problem
    name = type(module).__name__
    tensors = [each for value in keywords.values() for each in (value if isinstance(value, tuple) else (value,))]
    if any(isinstance(each, Tensor) and each.requires_grad for each in tensors):
        return f"{name} gets a tensor beside hidden states that needs a gradient"
    if any(keywords.get(each) is not None for each in _CACHES):
        return f"{name} gets a cache"
    if module.training and getattr(module, "attention_dropout", 0.0):
        return f"{name} drops attention weights, whose masks follow the heads of the whole layer"
    return ""


class _InPieces(torch.autograd.Function):
    # parameters: see _Tensors
    @staticmethod
    def forward(ctx: Any, x_1TC: Tensor, call: _Call, *parameters: Tensor | None) -> Tensor:
        x_TC = x_1TC.flatten(0, -2)
        given = _Tensors.of(parameters, call, len(x_TC))
        low = [product for each in given.adapters[:3] for product in _multiplied(each, x_TC)]
        weight_CN, outer = given.weights[3], given.adapters[3]
        assert weight_CN is not None
        y_TC: Tensor | None = None
        results: list[Tensor] = []
        for piece, record in zip(call.pieces, call.records, strict=True):
            noted = _Noted(record)
            out_Th = piece(x_1TC, given, call.under(noted))
            assert noted.result is not None
            results += noted.result
            heads = piece.features[0]
            weight_Ch = weight_CN[:, heads]
            y_TC = F.linear(out_Th, weight_Ch, given.biases[3]) if y_TC is None else y_TC.addmm_(out_Th, weight_Ch.T)
            outer.multiply(out_Th, heads.start)
        assert y_TC is not None
        low += outer.finish()
        outer.add_to(y_TC, slice(None))
        # the call holds no tensor of the layer except positions, which the model holds anyway
        ctx.call = call
        ctx.save_for_backward(x_1TC, *parameters, *low, *results)
        return y_TC.view(*x_1TC.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient_1TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        x_1TC, *saved = ctx.saved_tensors
        num_results, num_low = 2 * len(call.records), sum(map(len, call.adapters))
        results = iter(saved[-num_results:])
        low, parameters = saved[-num_results - num_low : -num_results], saved[: -num_results - num_low]
        x_TC = x_1TC.flatten(0, -2)
        given = _Tensors.of(parameters, call, len(x_TC))
        sums = _Sums(given, call.cut(ctx.needs_input_grad[2:]), ctx.needs_input_grad[0], low)
        weight_CN, outer = given.weights[3], given.adapters[3]
        assert weight_CN is not None
        # saved ones are detached after a replay
        trained = [each for each in _norm_weights(call.module) if each.requires_grad]
        gradient_TC = gradient_1TC.flatten(0, -2)
        outer.add_rows(gradient_TC, slice(None))
        device, dtype, is_enabled = call.autocast
        for piece in call.pieces:
            own = call.under(_Given(next(results), next(results)))
            # backward does not restore autocast by itself
            with torch.enable_grad(), torch.autocast(device, dtype, is_enabled):
                out_Th = piece(x_1TC.detach(), given, own)
            heads = piece.features[0]
            sums.add_columns(3, heads, gradient_TC, out_Th.detach())
            dout_Th = gradient_TC @ weight_CN[:, heads]
            outer.add_columns(out_Th.detach(), dout_Th, heads.start)
            edge, ends = get_gradient_edge(out_Th), piece.take_edges()
            # the graph no longer needs the output
            del out_Th
            found = torch.autograd.grad(edge, (*ends, *trained), dout_Th)  # type: ignore[arg-type]
            del edge, ends, dout_Th
            sums.add_norms(found[3:])
            for number, dy_1Th in enumerate(found[:3]):
                sums.add_rows(number, piece.features[number], dy_1Th.flatten(0, -2), x_TC)
            # free before the next piece allocates its own
            del found, dy_1Th
        if sums.biases[3] is not None:
            sums.biases[3] = gradient_TC.sum(0)
        for each in given.adapters[:3]:
            each.add_columns(x_TC, sums.dx_TC)
        return sums.gradients(x_1TC)


def _multiplied(adapters: Adapters, x_TC: Tensor) -> list[Tensor]:
    """Multiplies the adapters' first matrices by the whole input."""
    adapters.multiply(x_TC)
    return adapters.finish()


class _Sums:
    """Sums over pieces of the gradients of input, projections, adapters and head norms.

    needed: which parameters need gradients, split by `_Call.cut`. low: products of adapters' first matrices.
    """

    def __init__(self, given: _Tensors, needed: list[Sequence[bool]], needs_x: bool, low: Sequence[Tensor]) -> None:
        self._given, self._needs_x, self._needs_norms = given, needs_x, needed[-1]
        self.dx_TC: Tensor | None = None
        self.weights = [_empty(*each) for each in zip(given.weights, needed[0], strict=True)]
        self.biases = [_empty(*each) for each in zip(given.biases, needed[1], strict=True)]
        self.norms: list[Tensor] = []
        rest = iter(low)
        for adapters, needs in zip(given.adapters, needed[2:-1], strict=True):
            adapters.begin_backward([next(rest) for _ in needs[::3]], needs)

    def add_rows(self, number: int, features: slice, dy_TN: Tensor, x_TC: Tensor) -> None:
        """Adds the contributions of the gradient of some features of a projection; no other piece has these rows."""
        weight, total, bias = self._given.weights[number], self.weights[number], self.biases[number]
        assert weight is not None
        self._given.adapters[number].add_rows(dy_TN, features)
        if total is not None:
            torch.mm(dy_TN.T, x_TC, out=total[features])
        if bias is not None:
            bias[features] = dy_TN.sum(0)
        if self._needs_x:
            rows = weight[features]
            self.dx_TC = dy_TN @ rows if self.dx_TC is None else self.dx_TC.addmm_(dy_TN, rows)

    def add_columns(self, number: int, features: slice, dy_TC: Tensor, out_Th: Tensor) -> None:
        """Adds the gradient of the output projection's columns that multiply some features."""
        if (total := self.weights[number]) is not None:
            total[:, features] = dy_TC.T @ out_Th

    def add_norms(self, found: Sequence[Tensor]) -> None:
        """Adds gradients of the norms' trained weights, in at least fp32."""
        wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in found]
        self.norms = [total + each for total, each in zip(self.norms, wide, strict=True)] if self.norms else wide

    def gradients(self, x_1TC: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients in the order of the node's inputs."""
        norms = iter(self.norms)
        weights = zip(self._given.norms, self._needs_norms, strict=True)
        of_norms = [next(norms).to(weight.dtype) if weight is not None and needs else None for weight, needs in weights]
        dx_1TC = None if self.dx_TC is None else self.dx_TC.view(x_1TC.shape)
        of_adapters = [gradient for adapters in self._given.adapters for gradient in adapters.gradients()]
        return dx_1TC, None, *self.weights, *self.biases, *of_adapters, *of_norms


def _empty(parameter: Tensor | None, needs: bool) -> Tensor | None:
    """Allocates the gradient of a parameter, if it needs one."""
    return torch.empty_like(parameter) if needs and parameter is not None else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts as autocast does, which leaves fp64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor

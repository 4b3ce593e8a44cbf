"""Runs a module that processes tokens independently (an MLP, a norm) in token tiles, as one autograd node that saves its input.

The activation engine binds `tokenwise` to MLPs and norms; the output head uses its tiles too.

Backward runs each tile forward and backward, so the module's inner tensors live for one tile only; products that only the tile's
output needs are left out (`last_products`). Tiles that a record keeps are
run forward once, with their graph, whose saved tensors stay on the device or go to the host.

In a replay under activation checkpointing, the node of an MLP with a record computes nothing and returns an uninitialised tensor.
If it is the last node of its layer that saves a tensor (only a residual add follows), checkpointing stops the replay inside
`apply`, so nobody can read the output. If control does return, a later node saves tensors that may depend on the output, and only
then is the output computed.

Shapes: T tokens of this rank, C features.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.host_tier import HostTensor, HostTier
from hf_longctx.runtime.activations.last_products import look_for_last_products, run_for_gradients
from hf_longctx.runtime.dropout.keys import on_tiles

# runs a tile, given its tensor and its token range
Run = Callable[[Tensor, slice], Tensor]
# (first token, one past the last, input edge, output edge) of a tile that was run with its graph
KeptTile = tuple[int, int, GradientEdge, GradientEdge]
# tokens that show which products of an MLP its gradients do not need
_TRIAL_TOKENS = 16


class TileRecord:
    """Record that a tiled MLP leaves in one forward of one layer: graphs of the tiles it keeps, and the form of its output."""

    def __init__(self, share: TensorShare, tier: HostTier | None = None) -> None:
        self.share, self.tier = share, tier
        self.is_replay = False
        self.output_like: Tensor | None = None
        self.graphs: list[KeptTile] = []
        # bytes of the graphs' saved tensors on the device, without the module's parameters
        self.kept_bytes = 0
        self.on_host: list[_OnHost] = []
        self.parameter_storages: frozenset[int] = frozenset()

    def cuts(self, num_tokens: int) -> tuple[int, int]:
        """First of `num_tokens` tokens whose inner tensors are kept, and first whose inner tensors are on the device."""
        return self.share.cuts(num_tokens)

    def take_graphs(self) -> list[KeptTile]:
        """Hands over the graphs; the record is empty afterwards."""
        graphs, self.graphs, self.kept_bytes, self.on_host = self.graphs, [], 0, []
        return graphs

    def new_output(self, num_tokens: int) -> Tensor:
        """Uninitialised output with the dtype, device and number of features of the first run's output."""
        assert self.output_like is not None
        return self.output_like.new_empty((1, num_tokens, self.output_like.shape[-1]))


def tokenwise(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    x_1TC: Tensor,
    tile_tokens: int,
    record: TileRecord | None = None,
) -> Tensor:
    """forward(x), the forward of `module`, in tiles of `tile_tokens` tokens (0: one tile); [1, T, C] to [1, T, C']."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    is_unfilled = record is not None and record.is_replay and record.output_like is not None
    tile_tokens, run = tile_tokens or x_1TC.shape[1], on_tiles(module, forward)
    if record is not None:
        record.parameter_storages = frozenset(parameter.untyped_storage().data_ptr() for parameter in module.parameters())
    output: Tensor = _Tokenwise.apply(x_1TC, module, run, tile_tokens, record, is_unfilled, *parameters)
    if is_unfilled:
        # reached only if the layer saves more tensors after this node
        with torch.no_grad():
            output.detach().copy_(_run_tiles(x_1TC.detach(), run, tiles_of(0, x_1TC.shape[1], tile_tokens)))
    return output


class _Tokenwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_1TC: Tensor,
        module: nn.Module,
        run: Run,
        tile_tokens: int,
        record: TileRecord | None,
        is_unfilled: bool,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(x_1TC)
        device = x_1TC.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.settings = module, run, tile_tokens, record, parameters
        num_tokens = x_1TC.shape[1]
        if record is None:
            return _run_tiles(x_1TC, run, tiles_of(0, num_tokens, tile_tokens))
        if is_unfilled:
            return record.new_output(num_tokens)
        kept_from, host_stop = (num_tokens, num_tokens) if record.is_replay else record.cuts(num_tokens)
        bounds = (0, kept_from, host_stop, num_tokens)
        tiles = itertools.chain.from_iterable(tiles_of(start, stop, tile_tokens) for start, stop in itertools.pairwise(bounds))
        output = _run_tiles(x_1TC, run, tiles, record, kept_from)
        record.output_like = output.new_empty((0, output.shape[-1]))
        return output

    @staticmethod
    def backward(ctx: Any, gradient_1TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x_1TC,) = ctx.saved_tensors
        module, run, tile_tokens, record, parameters = ctx.settings
        # taken out of the record: with retain_graph a second backward recomputes
        graphs = record.take_graphs() if record is not None else []
        kept_from = graphs[0][0] if graphs else x_1TC.shape[1]
        dx_1TC = torch.empty_like(x_1TC)
        sums: list[Tensor | None] = [None] * len(parameters)
        device, dtype, is_enabled = ctx.autocast
        few = slice(0, min(kept_from, _TRIAL_TOKENS))
        if kept_from:
            with torch.autocast(device, dtype, is_enabled):
                look_for_last_products(module, _at(run, few), x_1TC[:, few], gradient_1TC[:, few])
        for tile in tiles_of(0, kept_from, tile_tokens):
            x = x_1TC[:, tile].detach().requires_grad_(True)
            # backward does not restore autocast by itself
            with torch.enable_grad(), torch.autocast(device, dtype, is_enabled):
                y = run_for_gradients(module, _at(run, tile), x)
            dx_1TC[:, tile] = add_gradients(sums, x, y, parameters, gradient_1TC[:, tile])
        for start, stop, x, y in graphs:
            dx_1TC[:, start:stop] = add_gradients(sums, x, y, parameters, gradient_1TC[:, start:stop])
        gradients = (
            total.to(gradient_dtype(p)) if total is not None else None for total, p in zip(sums, parameters, strict=True)
        )
        return dx_1TC, None, None, None, None, None, *gradients


def _at(run: Run, tile: slice) -> Callable[[Tensor], Tensor]:
    return lambda x: run(x, tile)


def tiles_of(start: int, stop: int, tile_tokens: int) -> Iterator[slice]:
    """Token ranges of `tile_tokens` each that cover [start, stop); the last may be shorter."""
    return (slice(first, min(first + tile_tokens, stop)) for first in range(start, stop, tile_tokens))


def _run_tiles(x_1TC: Tensor, run: Run, tiles: Iterable[slice], record: TileRecord | None = None, kept_from: int = 0) -> Tensor:
    """run(x) tile by tile; tiles from token `kept_from` on leave their graphs in the record, if there is one."""
    output: Tensor | None = None
    for tile in tiles:
        keeps = record if tile.start >= kept_from else None
        y = run(x_1TC[:, tile], tile) if keeps is None else _kept_tile(x_1TC, run, tile, keeps)
        if output is None:
            output = y.new_empty((1, x_1TC.shape[1], y.shape[-1]))
        output[:, tile] = y
    assert output is not None
    return output


def _kept_tile(x_1TC: Tensor, run: Run, tile: slice, record: TileRecord) -> Tensor:
    """run(x) of one tile; its graph goes to the record, and the graph's saved tensors are hidden from checkpointing."""
    seen = set(record.parameter_storages)
    num_tokens = tile.stop - tile.start
    tier = record.tier if tile.start < record.cuts(x_1TC.shape[1])[1] else None
    # holds the tensors too, so that no address is reused within the tile
    sent: dict[tuple[Any, ...], tuple[_OnHost, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        storage = tensor.untyped_storage()
        if tier is not None and storage.data_ptr() not in seen and tensor.dim() > 1 and tensor.shape[-2] == num_tokens:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in sent:
                sent[key] = (_OnHost(tier.store(tensor)), tensor)
                record.on_host.append(sent[key][0])
            sent[key][0].num_readers += 1
            return sent[key][0]
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            record.kept_bytes += storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, _unpack):
        x: Tensor = _Entry.apply(x_1TC.new_empty((), requires_grad=True), x_1TC[:, tile])
        y = run(x, tile)
    # the graph keeps the function `pack`, and with it whatever that refers to
    sent.clear()
    # edges refer to no tensor, so the graph keeps its saved tensors alive and nothing else
    record.graphs.append((tile.start, tile.stop, get_gradient_edge(x), get_gradient_edge(y)))
    return y.detach()


class _OnHost:
    """A saved tensor on the host that several nodes may read; it stays on the device from the first reader to the last."""

    def __init__(self, home: HostTensor) -> None:
        self.home, self.num_readers = home, 0
        self._fetched: Tensor | None = None

    def read(self) -> Tensor:
        tensor = self.home.fetch() if self._fetched is None else self._fetched
        self.num_readers -= 1
        self._fetched = tensor if self.num_readers else None
        return tensor


def _unpack(packed: Tensor | _OnHost) -> Tensor:
    return packed.read() if isinstance(packed, _OnHost) else packed


class _Entry(torch.autograd.Function):
    """Copies a tile of the input as a non-leaf of the graph; never run backward.

    A view would keep all tokens alive, and the gradient edge of a leaf would keep the leaf alive.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_1TC: Tensor) -> Tensor:
        return x_1TC.clone()


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Dtype in which a parameter takes its gradient: wider than its own where bf16 was gathered from fp32 shards."""
    return parameter.grad_dtype or parameter.dtype


def add_gradients(
    sums: list[Tensor | None],
    x: Tensor | GradientEdge,
    y: Tensor | GradientEdge,
    parameters: tuple[nn.Parameter, ...],
    gradient: Tensor,
) -> Tensor:
    """Gradient of x, given the gradient of y; adds the gradients of the parameters that y uses to `sums`, in at least fp32."""
    ends: Any = (x, *parameters)
    dx, *gradients = torch.autograd.grad(y, ends, gradient, allow_unused=True)
    for index, found in enumerate(gradients):
        if found is None:
            continue
        total = sums[index]
        wide = torch.promote_types(found.dtype, torch.float32)
        sums[index] = found.to(wide) if total is None else total.add_(found)
    return dx

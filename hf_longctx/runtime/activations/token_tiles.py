"""Runs a module that processes tokens independently (an MLP, a norm) in token tiles, as one autograd node that saves its input.

The activation engine binds `tokenwise` to MLPs and norms; the output head uses its tiles too.

Backward runs each tile forward and backward, so the module's inner tensors exist for one tile at a time. Tiles that a record
keeps are run forward once, with their graph, whose saved tensors stay on the device or go to the host.

In a replay under activation checkpointing, the node of an MLP with a record computes nothing and returns an uninitialised tensor.
If it is the layer's last node that saves a tensor (only a residual add follows), checkpointing stops the replay inside `apply`,
so the output is never read. If control returns, a later node saves tensors that may depend on the output, and only then is the
output computed.

Runs for gradients alone leave out products whose values no gradient needs, such as the last projection of an MLP: the gradients
of y = x W' + b need x and W, not y. So if y is only added to something and returned, it can stay uninitialised: a third less work
for a gated MLP. Experts that are one node (`runtime.core.expert_products`) leave everything to their backward. Such modules,
linear ones and experts, are found once per MLP, from the graph of a few tokens, and tested: with NaN in place of their outputs,
the gradient of the input must stay the same. Each later run checks its own graph again and computes everything if the MLP has
changed. An MLP with hooks inside, a linear module with its own forward, or a weight of an unusual type always computes all of it.

Shapes: T tokens of this rank, C features.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.nn.modules import module as everywhere

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.adapted_projection import only_multiplies
from hf_longctx.runtime.activations.host_tier import HostTensor, HostTier
from hf_longctx.runtime.core.dropout import on_tiles
from hf_longctx.runtime.core.products import MAKER, Maker, make_products

# nodes whose backward reads no value of their inputs
_ADDING = frozenset(
    f"{name}Backward0" for name in ("Add", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Transpose", "Squeeze", "Unsqueeze")
)
# nodes that only add to their first input
_ADDING_FIRST = frozenset(("_AddLowRankBackward",))
# largest change of the input's gradient relative to its largest value, since products may be rounded differently
_TOLERANCE = 0.05
# modules found in each MLP, for its lifetime
_FOUND: WeakKeyDictionary[nn.Module, tuple[nn.Module, ...]] = WeakKeyDictionary()


def look_for_last_products(mlp: nn.Module, run: Callable[[Tensor], Tensor], x_1TC: Tensor, gradient_1TC: Tensor) -> None:
    """Finds, once per MLP, which products `run_for_gradients` may leave out; a few tokens suffice.

    run: the forward of `mlp`. gradient: gradient of its output for `x`. Skips an MLP with hooks inside, which would see the run.
    """
    if mlp in _FOUND or _has_hooks(mlp):
        return
    with torch.enable_grad():
        x = x_1TC.detach().requires_grad_(True)
        y, candidates = _watched(mlp, run, x)
        is_right = bool(candidates) and _is_same_without(candidates, run, x, y, gradient_1TC)
    _FOUND[mlp] = candidates if is_right else ()


def run_for_gradients(mlp: nn.Module, run: Callable[[Tensor], Tensor], x_1TC: Tensor) -> Tensor:
    """Returns run(x), the forward of `mlp`, with its graph; values of the output may be uninitialised."""
    plain = [module for module in _FOUND.get(mlp, ()) if _is_plain(module)]
    if not plain or _has_hooks(mlp):
        return run(x_1TC)
    with _trials(plain, torch.Tensor.new_empty) as trials:
        y_1TC = run(x_1TC)
    if _are_only_added(y_1TC, trials.values()):
        return y_1TC
    del _FOUND[mlp]
    return run(x_1TC)


def _has_hooks(mlp: nn.Module) -> bool:
    return any(_hooks(module) for module in mlp.modules() if module is not mlp) or everywhere._has_any_global_hook()


def _hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


class _Trial:
    """Makes the output of one module: computes it, or returns what `unread` gives, which is not read. Counts its calls."""

    def __init__(self, unread: Callable[..., Tensor] | None = None) -> None:
        self.unread, self.num_calls = unread, 0

    def current(self) -> Maker:
        return self

    def __call__(self, x_TC: Tensor, num_features: int, first: Callable[[int], Tensor]) -> Tensor:
        self.num_calls += 1
        return first(len(x_TC)) if self.unread is None else self.unread(x_TC, (len(x_TC), num_features))


@contextmanager
def _trials(modules: Iterable[nn.Module], unread: Callable[..., Tensor] | None = None) -> Iterator[dict[nn.Module, _Trial]]:
    """Context in which trials make the outputs of these modules, with their graph."""
    trials = {module: _Trial(unread) for module in modules}
    undo = [make_products(module, trial.current) for module, trial in trials.items()]
    try:
        yield trials
    finally:
        for each in undo:
            each()


def _watched(mlp: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, tuple[nn.Module, ...]]:
    """Returns run(x), and the modules that ran once and whose outputs were only added."""
    with _trials(each for each in mlp.modules() if _is_plain(each)) as trials:
        y = run(x)
    return y, tuple(module for module, trial in trials.items() if _are_only_added(y, [trial]))


def _is_same_without(
    modules: Sequence[nn.Module], run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, gradient: Tensor
) -> bool:
    """Whether the gradient of x stays the same if the outputs of these modules are NaN."""
    with _trials(modules, partial(torch.Tensor.new_full, fill_value=float("nan"))):
        other = run(x)
    expected, found = (torch.autograd.grad(end, x, gradient, retain_graph=True)[0] for end in (y, other))
    # false for NaN
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module only multiplies, or makes its output by a maker."""
    is_linear = isinstance(module, nn.Linear) and only_multiplies(module) and type(module.weight) is nn.Parameter
    return is_linear or MAKER in vars(module)


def _are_only_added(y: Tensor, trials: Iterable[_Trial]) -> bool:
    """Whether each trial made one output, and all paths from y's node to its node go through nodes that read no values."""
    wanted, reached = set(trials), set[_Trial]()
    seen: set[tuple[Node | None, bool]] = set()
    stack: list[tuple[Node | None, bool]] = [(y.grad_fn, True)]
    while stack:
        step = stack.pop()
        node, adds = step
        if node is None or step in seen:
            continue
        seen.add(step)
        if own := wanted.intersection(getattr(node, "makers", ())):
            if not adds:
                return False
            reached |= own
        adds = adds and not own
        for place, (following, _) in enumerate(node.next_functions):
            is_added = node.name() in _ADDING or (place == 0 and node.name() in _ADDING_FIRST)
            stack.append((following, adds and is_added))
    return reached == wanted and all(trial.num_calls == 1 for trial in wanted)


# runs a tile, given its tensor and its token range
Run = Callable[[Tensor, slice], Tensor]
# (first token, one past the last, input edge, output edge) of a tile that was run with its graph
KeptTile = tuple[int, int, GradientEdge, GradientEdge]
# tokens of the run that finds products to leave out
_TRIAL_TOKENS = 16


class TileRecord:
    """Record of a tiled MLP in one forward of one layer: graphs of the kept tiles, and the form of its output."""

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
        """Returns the first of `num_tokens` tokens whose inner tensors are kept, and the first with them on the device."""
        return self.share.cuts(num_tokens)

    def take_graphs(self) -> list[KeptTile]:
        """Hands over the graphs and empties the record."""
        graphs, self.graphs, self.kept_bytes, self.on_host = self.graphs, [], 0, []
        return graphs

    def new_output(self, num_tokens: int) -> Tensor:
        """Makes an uninitialised output with dtype, device and number of features of the first run's output."""
        assert self.output_like is not None
        return self.output_like.new_empty((1, num_tokens, self.output_like.shape[-1]))


def tokenwise(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    x_1TC: Tensor,
    tile_tokens: int,
    record: TileRecord | None = None,
) -> Tensor:
    """Returns forward(x), [1, T, C] to [1, T, C'], computed in tiles of `tile_tokens` tokens (0: one tile)."""
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
    """Returns token ranges of `tile_tokens` each that cover [start, stop); the last may be shorter."""
    return (slice(first, min(first + tile_tokens, stop)) for first in range(start, stop, tile_tokens))


def _run_tiles(x_1TC: Tensor, run: Run, tiles: Iterable[slice], record: TileRecord | None = None, kept_from: int = 0) -> Tensor:
    """Returns run(x), tile by tile; stores graphs of tiles from token `kept_from` on in the record, if there is one."""
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
    """Returns run(x) of one tile; stores its graph in the record and hides the graph's saved tensors from checkpointing."""
    seen = set(record.parameter_storages)
    num_tokens = tile.stop - tile.start
    tier = record.tier if tile.start < record.cuts(x_1TC.shape[1])[1] else None
    # also holds the tensors, so that no address is reused within the tile
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
    # the graph keeps the function `pack` with everything it refers to
    sent.clear()
    # edges refer to no tensor, so only the graph's saved tensors stay alive
    record.graphs.append((tile.start, tile.stop, get_gradient_edge(x), get_gradient_edge(y)))
    return y.detach()


class _OnHost:
    """A saved tensor on the host that several nodes may read; on the device from its first reader to its last."""

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
    """Returns the dtype of a parameter's gradient: wider than its own if bf16 was gathered from fp32 shards."""
    return parameter.grad_dtype or parameter.dtype


def add_gradients(
    sums: list[Tensor | None],
    x: Tensor | GradientEdge,
    y: Tensor | GradientEdge,
    parameters: tuple[nn.Parameter, ...],
    gradient: Tensor,
) -> Tensor:
    """Returns the gradient of x, given that of y; adds gradients of the parameters of y to `sums`, in at least fp32."""
    ends: Any = (x, *parameters)
    dx, *gradients = torch.autograd.grad(y, ends, gradient, allow_unused=True)
    for index, found in enumerate(gradients):
        if found is None:
            continue
        total = sums[index]
        wide = torch.promote_types(found.dtype, torch.float32)
        sums[index] = found.to(wide) if total is None else total.add_(found)
    return dx

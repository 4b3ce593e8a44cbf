"""Runs an MLP again for its gradients alone, without the products whose values no gradient needs, such as its last projection.

The gradients of y = x W' + b need x and W, not y. So where y is only added to something and returned, a run whose output nobody
reads can leave y uninitialised: a third less work for a gated MLP. Checkpointing does so by stopping early; a tile of an MLP,
whose gradients are computed at once, has no such end.

Which linear modules these are is found once for an MLP, from the graph of a few tokens, and tried: with NaN in place of their
outputs, the gradient of the input must be what it was. Every later run looks at its own graph again, so an MLP that has changed
since is run as a whole. So is one with hooks inside, which would see the values. A linear module with a forward of its own or a
weight of an unusual type always computes.

`token_tiles` calls it in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as everywhere

from hf_longctx.runtime.activations.adapted_projection import Projection, plain_projection
from hf_longctx.runtime.activations.projection_record import autocast_operands, product_gradients
from hf_longctx.runtime.core.binding import put

# nodes whose backward reads no value of their inputs
_ADDING = frozenset(
    f"{name}Backward0" for name in ("Add", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Transpose", "Squeeze", "Unsqueeze")
)
# nodes that only add their first input to something else
_ADDING_FIRST = frozenset(("_AddLowRankBackward",))
# largest change of the input's gradient, relative to its largest value: products may be rounded otherwise
_TOLERANCE = 0.05
# the linear modules of each MLP that were found, for as long as the MLP lives
_FOUND: WeakKeyDictionary[nn.Module, tuple[nn.Linear, ...]] = WeakKeyDictionary()


def look_for_last_products(mlp: nn.Module, run: Callable[[Tensor], Tensor], x_1TC: Tensor, gradient_1TC: Tensor) -> None:
    """Finds out, once for an MLP, which products `run_for_gradients` may leave out; a few tokens suffice.

    run: the forward of `mlp`. gradient: that of its output for `x`. An MLP with hooks inside, which see runs, is left alone.
    """
    if mlp in _FOUND or _has_hooks(mlp):
        return
    with torch.enable_grad():
        x = x_1TC.detach().requires_grad_(True)
        y, candidates = _watched(mlp, run, x)
        is_right = bool(candidates) and _is_same_without(candidates, run, x, y, gradient_1TC)
    _FOUND[mlp] = candidates if is_right else ()


def run_for_gradients(mlp: nn.Module, run: Callable[[Tensor], Tensor], x_1TC: Tensor) -> Tensor:
    """run(x), the forward of `mlp`, with its graph; values of the output may be uninitialised."""
    plain = [linear for linear in _FOUND.get(mlp, ()) if _is_plain(linear)]
    if not plain or _has_hooks(mlp):
        return run(x_1TC)
    with _left_out(plain, torch.Tensor.new_empty) as nodes:
        y_1TC = run(x_1TC)
    if _are_only_added(y_1TC, nodes):
        return y_1TC
    del _FOUND[mlp]
    return run(x_1TC)


def _has_hooks(mlp: nn.Module) -> bool:
    return any(_hooks(module) for module in mlp.modules() if module is not mlp) or everywhere._has_any_global_hook()


def _hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def _watched(mlp: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, tuple[nn.Linear, ...]]:
    """run(x), and the linear modules that ran once and whose outputs were only added."""
    calls: list[tuple[nn.Linear, Node | None]] = []

    def called(linear: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(linear, nn.Linear)
        calls.append((linear, output.grad_fn))

    handles = [
        linear.register_forward_hook(called) for linear in mlp.modules() if isinstance(linear, nn.Linear) and _is_plain(linear)
    ]
    try:
        y = run(x)
    finally:
        for handle in handles:
            handle.remove()
    once = [linear for linear, _ in calls]
    return y, tuple(
        linear for linear, node in calls if node is not None and once.count(linear) == 1 and _are_only_added(y, [node])
    )


def _is_same_without(
    linears: Sequence[nn.Linear], run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, gradient: Tensor
) -> bool:
    """Whether the gradient of x stays what it is if the outputs of these modules are NaN."""
    with _left_out(linears, partial(torch.Tensor.new_full, fill_value=float("nan"))):
        other = run(x)
    expected, found = (torch.autograd.grad(end, x, gradient, retain_graph=True)[0] for end in (y, other))
    # false for NaN
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _is_plain(linear: nn.Linear) -> bool:
    """Whether calling the module does nothing but multiply."""
    return isinstance(plain_projection(linear), Projection) and type(linear.weight) is nn.Parameter


@contextmanager
def _left_out(linears: Sequence[nn.Linear], make: Callable[..., Tensor]) -> Iterator[list[Node | None]]:
    """Context in which these modules return what `make` makes, with their graph; gives the graph's node of every output."""
    nodes: list[Node | None] = []

    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        x, weight_NC, bias_N = autocast_operands(linear, x)
        y_TN: Tensor = _UnreadProduct.apply(x.flatten(0, -2), weight_NC, bias_N, make)
        y = y_TN.view(*x.shape[:-1], y_TN.shape[-1])
        nodes.append(y.grad_fn)
        return y

    undo = [put(linear, "forward", partial(forward, linear)) for linear in linears]
    try:
        yield nodes
    finally:
        for each in undo:
            each()


def _are_only_added(y: Tensor, nodes: Sequence[Node | None]) -> bool:
    """Whether all ways from y's node to these nodes lead through nodes that read no values."""
    wanted, reached = set(nodes), set()
    seen: set[tuple[Node | None, bool]] = set()
    stack: list[tuple[Node | None, bool]] = [(y.grad_fn, True)]
    while stack:
        step = stack.pop()
        node, adds = step
        if node is None or step in seen:
            continue
        seen.add(step)
        if node in wanted:
            if not adds:
                return False
            reached.add(node)
        adds = adds and node not in wanted
        for place, (following, _) in enumerate(node.next_functions):
            is_added = node.name() in _ADDING or (place == 0 and node.name() in _ADDING_FIRST)
            stack.append((following, adds and is_added))
    return reached == wanted


class _UnreadProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None, make: Callable[..., Tensor]) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_TC if needs_weight else None, weight_NC if needs_x else None)
        return make(x_TC, (x_TC.shape[0], weight_NC.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        return *product_gradients(ctx, gradient_TN), None

"""Runs plain low-rank adapters of PEFT in few passes over memory while plans run; projections of one input as one node.

Under autocast PEFT casts hidden states to the adapter's fp32, and autocast casts them back to bf16, bit for bit as they were, for
each projection, forward and backward. Here a low-rank adapter reads them as they are, so that queries, keys and values share one
saved input. Its output is added inside a matrix product.

Which projections read one input is read from the code of the module that calls them: before its first `return`, every call
reaches `self.q_proj(x)`, `self.k_proj(x)` and `self.v_proj(x)` with one variable. The first of these calls makes the outputs of
all, and the others fetch theirs if they get the same tensor in the same mode before the module returns; otherwise they compute
alone.

Adapters with dropout, of several names or another kind, and those beside a module in four bits, with trained weights or with a
hook, run as one node each, or PEFT's own code (`adapted`). So do those beside a weight in fp8 whose blocks have scales; with
scales of rows, projections of one input share the node and the input in fp8.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_longctx.hf.models.adapters import is_in_node, lora_layers, plain_adapter
from hf_longctx.hf.models.forwards import without_renames
from hf_longctx.hf.models.kernel_places import is_hooked, runs_as_written
from hf_longctx.runtime.activations.adapted_projection import Adapter, hook_problem
from hf_longctx.runtime.core.binding import global_hooks, is_ours, is_written_by, own_forward, replace_forward
from hf_longctx.runtime.core.products import AdaptedProduct, FP8Linear, adapted_products, add_low_rank, maker_of


def bind_adapters(model: nn.Module) -> list[Callable[[], None]]:
    """Lets low-rank adapters of `model` run in few passes; returns functions that undo this, in reverse."""
    layers = {id(each): each for each in lora_layers(model).values() if runs_as_written(each)}
    groups: dict[int, SharedInput] = {}
    undo = []
    for module in model.modules():
        named = _named_by_input(module)
        found = [SharedInput([layers[id(each)] for each in names if id(each) in layers]) for names in named]
        if shared := [each for each in found if len(each.layers) > 1]:
            groups.update((id(layer), each) for each in shared for layer in each.layers)
            undo.append(replace_forward(module, partial(_running, shared, module.forward)))
    for place, layer in layers.items():
        group = groups.get(place) or SharedInput([layer])
        undo.append(replace_forward(layer, partial(adapted, layer, layer.forward, group)))
    return undo


def _running(shared: Sequence[SharedInput], own: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Returns the result of `own`, the forward of the module that calls these projections."""
    before = [(each.outputs, each.mode) for each in shared]
    for each in shared:
        each.outputs = {}
    try:
        return own(*args, **keywords)
    finally:
        for each, (outputs, mode) in zip(shared, before, strict=True):
            each.outputs, each.mode = outputs, mode


class SharedInput:
    """Adapted projections that a module calls with one input.

    outputs: those that wait for their call, by id of the layer; None unless the module is running. mode: the input that they
    were made of, and what else they depend on.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.outputs: dict[int, Tensor] | None = None
        self.mode: tuple[Any, ...] = ()

    def take(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Hands over the output of a layer that was made with that of another; None if there is none for this input."""
        if not self.outputs or self.mode[0] is not x or self.mode[1:] != _mode(x):
            return None
        return self.outputs.pop(id(layer), None)

    def make(self, layer: nn.Module, x: Tensor, product: AdaptedProduct) -> Tensor:
        """Returns the output of a layer; makes those of the others too, if the module is running and they can be in the node."""
        products = {id(layer): product}
        # a change of an inference tensor between two calls would not be seen
        is_shared = self.outputs is not None and not x.is_inference()
        for other in self.layers if is_shared else ():
            found = None if other is layer else _product_of_other(other, x)
            if found is not None and (found.scale_N1 is None) == (product.scale_N1 is None):
                products[id(other)] = found
        outputs = dict(zip(products, adapted_products(x, list(products.values())), strict=True))
        y = outputs.pop(id(layer))
        if outputs:
            self.outputs, self.mode = outputs, (x, *_mode(x))
        return y


def _mode(x: Tensor) -> tuple[Any, ...]:
    """Version of `x`, and modes on which a graph and its dtypes depend."""
    device = x.device.type
    return x._version, torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def adapted(layer: Any, own: Callable[..., Any], shared: SharedInput, *args: Any, **keywords: Any) -> Any:
    """Result of `own`, the forward of PEFT's `layer`; calls it only if dtypes, hooks or adapters are not the usual ones."""
    if len(args) != 1 or keywords or (adapter := plain_adapter(layer)) is None:
        return own(*args, **keywords)
    x: Tensor = args[0]
    if not _has_one_dtype(layer, adapter, x) or x.dim() < 2 or not x.numel() or global_hooks():
        return own(x)
    if (y := shared.take(layer, x)) is not None:
        return y
    if (product := _product(layer, adapter, x)) is not None:
        return shared.make(layer, x, product)
    base = layer.base_layer
    y = base(x)
    low = adapter.first(adapter.dropout(x))
    if y.dtype != low.dtype:
        return (y + adapter.second(low) * adapter.scaling).to(y.dtype)
    # a hook may have kept y, and so may another forward of the module below
    is_new = type(base) is nn.Linear and runs_as_written(base) and not is_hooked(base)
    # with a bias, torch returns a view, whose gradient would be copied
    in_place = is_new and y.is_contiguous() and not y._is_view()
    return add_low_rank(y, low, adapter.second.weight.to(low.dtype), adapter.scaling, in_place)


def _has_one_dtype(layer: Any, adapter: Adapter, x: Tensor) -> bool:
    """Whether input, frozen module and adapter compute in one dtype, in whole weights."""
    device, first = x.device.type, adapter.first.weight
    if isinstance(adapter.second.weight, DTensor):
        return False
    if torch.is_autocast_enabled(device):
        return x.dtype == torch.get_autocast_dtype(device)
    # without autocast the output has the dtype of the frozen weight or, in fp8, of the input
    base = layer.base_layer
    return x.dtype == first.dtype == (x if isinstance(base, FP8Linear) else base.weight).dtype


def _product(layer: Any, adapter: Adapter, x: Tensor) -> AdaptedProduct | None:
    """The product of a layer, for a node with its adapter; None if it must be a node of its own."""
    if not is_in_node(layer):
        return None
    base = layer.base_layer
    is_rounded = isinstance(base, FP8Linear)
    frozen = [each for each in (base.weight, base.bias, base.scale if is_rounded else None) if each is not None]
    # other types of tensors may be packed or in shards
    is_plain = {type(each) for each in (*frozen, adapter.first.weight, adapter.second.weight)} <= {nn.Parameter, Tensor}
    if not is_plain or (make := maker_of(base)) is None:
        return None
    first, second = adapter.first.weight.to(x.dtype), adapter.second.weight.to(x.dtype)
    bias = None if base.bias is None else base.bias.to(x.dtype)
    if is_rounded:
        return AdaptedProduct(base.weight, bias, first, second, adapter.scaling, make, base.scale)
    return AdaptedProduct(base.weight.to(x.dtype), bias, first, second, adapter.scaling, make)


def _product_of_other(layer: Any, x: Tensor) -> AdaptedProduct | None:
    """The product of a layer that was not called yet; None if its own call must run."""
    if hook_problem(layer) or not runs_as_written(layer) or (adapter := plain_adapter(layer)) is None:
        return None
    return _product(layer, adapter, x) if _has_one_dtype(layer, adapter, x) else None


def _named_by_input(module: nn.Module) -> list[list[nn.Module]]:
    """Lists of modules inside `module` that its forward, one of transformers, calls with one input each."""
    own, replaced = without_renames(getattr(type(module), "forward", None)), own_forward(module)
    # ours run the code of the class
    if not is_written_by(own, "transformers") or not (replaced is None or is_ours(replaced)):
        return []
    found = ([getattr(module, name, None) for name in names] for names in calls_by_input(own))
    return [[each for each in modules if isinstance(each, nn.Module)] for modules in found]


# parts of code whose own parts may run never, or several times
_PERHAPS = (
    *(ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.BoolOp, ast.Lambda, ast.FunctionDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


@cache
def calls_by_input(forward: Any) -> tuple[tuple[str, ...], ...]:
    """Names of modules that every call of a forward calls once with one variable, by variable; empty if it cannot be read."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ()
    calls: list[tuple[str, tuple[str, int]]] = []
    # how often each variable was assigned to so far
    assigned: dict[str, int] = {}
    for statement in function.body if isinstance(function, ast.FunctionDef) else ():
        if not isinstance(statement, ast.Return) and any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            # calls behind it are not always reached
            break
        for node in _always_run(statement):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=variable)], keywords=[]
                ):
                    calls.append((name, (variable, assigned.get(variable, 0))))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                assigned[node.id] = assigned.get(node.id, 0) + 1
    names = [name for name, _ in calls]
    once = [(name, value) for name, value in calls if names.count(name) == 1]
    groups = [tuple(name for name, value in once if value == each) for each in dict.fromkeys(value for _, value in once)]
    return tuple(group for group in groups if len(group) > 1)


def _always_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of a statement that run whenever it is reached."""
    yield node
    if not isinstance(node, _PERHAPS):
        for child in ast.iter_child_nodes(node):
            yield from _always_run(child)

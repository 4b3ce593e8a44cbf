"""Tells during a backward which layers it has passed, so that the gradients of their weights are final.

A layer is passed where the gradient of its input is known, and not where some weight has its gradient, which an expert without
tokens never gets. A weight that is used outside of the layers that hold it may still get a gradient later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

# level of weights to which the last layers of a backward may add: those before the first layer
AT_END = -1


class LayerOrder:
    """Layers of a model in its order: modules of classes with `gradient_checkpointing`.

    levels: for each weight, the first layer that holds it; weights after all layers count as the last layer's, others as
    `AT_END`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if hasattr(type(module), "gradient_checkpointing")]
        self.levels = _levels(list(model.parameters()), self.layers)

    @contextmanager
    def watching(self, passed: Callable[[int], None]) -> Iterator[None]:
        """Context in which `passed` gets a layer's place whenever a backward has passed the layer."""
        with ExitStack() as hooks:
            for level, layer in enumerate(self.layers):
                hooks.callback(layer.register_forward_pre_hook(partial(_watch, passed, level), with_kwargs=True).remove)
            yield


def _watch(passed: Callable[[int], None], level: int, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Lets the gradient of a layer's input tell that the layer's backward is over."""
    hidden_1TC = next((each for each in (*args, *keywords.values()) if _carries_gradient(each)), None)
    if hidden_1TC is not None:
        hidden_1TC.register_hook(lambda gradient: passed(level))


def _carries_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.dim() == 3


def _levels(weights: Sequence[nn.Parameter], layers: Sequence[nn.Module]) -> dict[nn.Parameter, int]:
    found: dict[nn.Parameter, int] = {}
    for level, layer in enumerate(layers):
        for weight in layer.parameters():
            found.setdefault(weight, level)
    is_after = bool(layers)
    for weight in reversed(weights):
        is_after = is_after and weight not in found
        if is_after:
            found[weight] = len(layers) - 1
    return {weight: found.get(weight, AT_END) for weight in weights}

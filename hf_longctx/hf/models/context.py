"""Passes the context of a plan down through modules that would not pass it on.

Most classes of transformers pass unknown keywords from the model's forward down to attention. Some decoder layers, decoders and
causal language models do not. `ContextPatch` gives these a forward that binds the context to the modules that they call, for as
long as they run. Without a context they run as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.forwards import give, has, take
from hf_longctx.hf.models.towers import text_part
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import is_written_by

# attribute of a module that does not pass the context on: the forward by which a user or accelerate had replaced its class's
OWN_FORWARD = "_longctx_own_forward"


class ContextPatch:
    """Makes modules that would leave out the context pass it to the modules that they call."""

    def needed(self, model: nn.Module) -> bool:
        """Whether the text model has such modules."""
        return any(_called(module) for module in text_part(model).modules())

    def apply(self, model: nn.Module) -> None:
        """Keeps a forward that a user or accelerate put there, and runs it."""
        for module in text_part(model).modules():
            if not _called(module) or has(module, _forward):
                continue
            if (own := vars(module).pop("forward", None)) is not None:
                vars(module)[OWN_FORWARD] = own
            give(module, _forward)

    def undo(self, model: nn.Module) -> None:
        """Leaves a forward that accelerate has wrapped in the meantime."""
        for module in model.modules():
            if take(module, _forward) and (own := vars(module).pop(OWN_FORWARD, None)) is not None:
                vars(module)["forward"] = own


def _called(module: nn.Module) -> list[nn.Module]:
    """The modules to which `module` would not pass the context; none if it passes it on."""
    # sharding puts a class of torch in front of the module's own
    names = [name for each in type(module).__mro__ for name in MODULES.hands_down.get(each.__name__, ())]
    # layers of one class may have different ones
    called = [each for name in names if (each := getattr(module, name, None)) is not None]
    # iterating over the layers of a stage would show only those that are running
    return [each for one in called for each in (one._modules.values() if isinstance(one, nn.ModuleList) else [one])]


def _forward(module: Any, *args: Any, **keywords: Any) -> Any:
    """Runs the forward of a module's class, or a user's; the modules that it calls get the context."""
    if keywords.get("longctx") is None:
        own = vars(module).get(OWN_FORWARD)
        return type(module).forward(module, *args, **keywords) if own is None else own(*args, **keywords)
    if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing and module.training:
        checkpointing: Any = module._gradient_checkpointing_func
        return checkpointing(partial(_run, module, **keywords), *args)
    return _run(module, *args, **keywords)


def _run(module: Any, *args: Any, longctx: GroupContext, **keywords: Any) -> Any:
    """Runs the forward of `module` with the context for its calls; a layer's without checkpointing, which wraps this call."""
    forward = vars(module).get(OWN_FORWARD)
    if forward is None:
        is_layer = isinstance(module, GradientCheckpointingLayer)
        # a user's function around the forward of the class keeps it
        whole = type(module).forward
        is_written = is_written_by(whole, "transformers", "torch")
        forward = partial(inspect.unwrap(whole) if is_layer and is_written else whole, module)
    with _bound(_called(module), longctx), _in_one_piece(module):
        return forward(*args, **keywords)


@contextmanager
def _in_one_piece(module: nn.Module) -> Iterator[None]:
    """Context that sets `module` to training mode if it would run rows in pieces; its children keep their mode."""
    is_training = module.training
    module.training = is_training or any(each.__name__ in MODULES.in_pieces for each in type(module).__mro__)
    try:
        yield
    finally:
        module.training = is_training


@contextmanager
def _bound(called: list[nn.Module], longctx: GroupContext) -> Iterator[None]:
    """Context in which the forward of each of these modules gets `longctx`."""
    before = [(module, vars(module).get("forward")) for module in called]
    for module in called:
        vars(module)["forward"] = partial(module.forward, longctx=longctx)
    try:
        yield
    finally:
        for module, own in before:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own

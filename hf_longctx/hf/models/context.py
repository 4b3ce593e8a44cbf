"""Hands the context of a plan to modules below those that leave it out when they call them.

Most classes of transformers pass keywords that they do not know from the model's forward down to attention. Some decoder layers,
decoders and causal language models do not. `models.attention.patch_model` gives these a forward that binds the context to what
they call, for as long as they run. Without a context they run as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.patch import holds, is_made_by
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import is_written_by

# attribute of a module that leaves the context out, with the forward that a user or accelerate had put in place of its class's
OWN_FORWARD = "_longctx_own_forward"


def hand_context_down(model: nn.Module) -> None:
    """Lets the modules of `model` that would leave the context out hand it to what they call. Idempotent."""
    for module in model.modules():
        own = vars(module).get("forward")
        if not _called(module) or holds(_handing, own):
            continue
        if own is not None:
            vars(module)[OWN_FORWARD] = own
        # a plain method, so that it works on a copy of the model too
        vars(module)["forward"] = MethodType(_handing(type(module)), module)


def leave_context_out(model: nn.Module) -> None:
    """Undoes `hand_context_down`. Idempotent; does nothing where accelerate has wrapped the forward in the meantime."""
    for module in model.modules():
        if is_made_by(_handing, vars(module).get("forward")):
            del vars(module)["forward"]
            if (own := vars(module).pop(OWN_FORWARD, None)) is not None:
                vars(module)["forward"] = own


def _called(module: nn.Module) -> list[nn.Module]:
    """The modules to which `module` would not pass the context; none if it passes it on."""
    # sharding puts a class of torch in front of the module's own
    names = [name for each in type(module).__mro__ for name in MODULES.hands_down.get(each.__name__, ())]
    called = [getattr(module, name) for name in names]
    # iterating over the layers of a stage would show only those that are running
    return [each for one in called for each in (one._modules.values() if isinstance(one, nn.ModuleList) else [one])]


def _handing(kind: Any) -> Callable[..., Any]:
    """A forward with the signature of that of class `kind`, which trainers read."""

    @wraps(kind.forward)
    def forward(module: Any, *args: Any, **keywords: Any) -> Any:
        if keywords.get("longctx") is None:
            own = vars(module).get(OWN_FORWARD)
            return type(module).forward(module, *args, **keywords) if own is None else own(*args, **keywords)
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing and module.training:
            checkpointing: Any = module._gradient_checkpointing_func
            return checkpointing(partial(_run, module, **keywords), *args)
        return _run(module, *args, **keywords)

    return forward


def _run(module: Any, *args: Any, longctx: GroupContext, **keywords: Any) -> Any:
    """Runs the forward of `module`, whose calls get the context; a layer's without checkpointing, which stands around this."""
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
    """Context in which `module` takes itself to be in training if it would run rows in pieces; its children are as before."""
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

"""Makes a shard or a pipeline stage of a model refuse, by name, calls that need a whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.runtime.core.binding import HIDDEN, class_name

# attribute of a module: its refusing functions, also those that other code has wrapped
_REFUSALS = "_longctx_refusals"


def refuse_saving(model: nn.Module, why: str, takes_weights: bool = False) -> None:
    """Makes `save_pretrained` of a part raise RuntimeError, since its files would look like those of a whole model.

    why: the part that this rank holds. takes_weights: weights that are passed as `state_dict` are whole and are written. Adapters
    have their own `save_pretrained` beside the model's. Idempotent: a second reason has no effect.
    """

    def save(this: Any, save_directory: Any, *args: Any, **keywords: Any) -> Any:
        if takes_weights and keywords.get("state_dict") is not None:
            return type(this).save_pretrained(this, save_directory, *args, **keywords)
        name = class_name(this)
        raise RuntimeError(
            f"save_pretrained({str(save_directory)!r}) of {name} would write a part of the weights, since {why}; call "
            f"trainer.save_model(folder) on every rank, which writes all of them"
        )

    for module in _outer_and_base(model):
        if hasattr(module, "save_pretrained"):
            _hide(module, "save_pretrained", save)


def refuse_all(model: nn.Module, stage: int, num_stages: int) -> None:
    """Makes forwards and `save_pretrained` of a stage raise RuntimeError, until `allow_all`."""
    refuse_saving(model, held_stage(model, stage, num_stages))
    message = only_stage(model, stage, num_stages)

    def forward(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError(message)

    _hide(base_of(model), "forward", forward)


def refuses(module: nn.Module, name: str = "forward") -> bool:
    """Whether this function of a module refuses every call."""
    return hasattr(getattr(vars(module).get(name), "__func__", None), HIDDEN)


def allow_all(model: nn.Module) -> None:
    """Removes the refusals of a model, also inside functions that other code has wrapped around them since. Idempotent."""
    for module in _outer_and_base(model):
        vars(module).pop(_REFUSALS, []).clear()
        if refuses(module, "_original_forward"):
            # accelerate has wrapped the refusal in autocast
            vars(module)["forward"] = vars(module).pop("_original_forward")
            vars(module).pop("_is_accelerate_prepared", None)
        for name in ("save_pretrained", "forward"):
            if not refuses(module, name):
                continue
            hidden = getattr(vars(module).pop(name).__func__, HIDDEN)
            if hidden is not None:
                vars(module)[name] = hidden


def held_stage(model: nn.Module, stage: int, num_stages: int) -> str:
    """Describes this rank's stage for error messages."""
    return f"this rank holds only stage {stage} of {num_stages} of {type(base_of(model)).__name__}"


def only_stage(model: nn.Module, stage: int, num_stages: int) -> str:
    """The message with which a stage refuses calls outside of plans."""
    return (
        f"{held_stage(model, stage, num_stages)}, which runs under plans only; for anything else save the model by the "
        f"save_model() of a trainer with plans, and load it whole"
    )


def _outer_and_base(model: nn.Module) -> list[nn.Module]:
    return [model] if model is base_of(model) else [model, base_of(model)]


def _hide(module: nn.Module, name: str, refusal: Callable[..., Any]) -> None:
    """Replaces a module's function by `refusal`, unless another refusal is there already."""
    if refuses(module, name):
        return

    allowed, hidden = getattr(type(module), name), vars(module).get(name)
    refusals: list[Callable[..., Any]] = vars(module).setdefault(_REFUSALS, [])

    # trainers read the signature of a forward
    @functools.wraps(allowed)
    def refuse(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if refuse not in refusals:
            return allowed(this, *args, **keywords) if hidden is None else hidden(*args, **keywords)
        return refusal(this, *args, **keywords)

    refusals.append(refuse)
    vars(refuse)[HIDDEN] = hidden
    vars(module)[name] = MethodType(refuse, module)

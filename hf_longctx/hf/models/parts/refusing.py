"""Lets a model that is one pipeline stage refuse, by name, what only a whole model can do."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

from hf_longctx.hf.models.adapters import base_of

# attribute of a refusing function: the instance's own function that it hides, or None
_HIDDEN = "_longctx_hidden"


def refuse_saving(model: nn.Module, stage: int, num_stages: int) -> None:
    """Lets `save_pretrained` of a stage raise RuntimeError, since its files would look like those of a whole model."""
    for module in _outer_and_base(model):
        _refuse(module, "save_pretrained", only_stage(model, stage, num_stages))


def refuse_all(model: nn.Module, stage: int, num_stages: int) -> None:
    """Lets forwards and `save_pretrained` of a stage raise RuntimeError, until `allow_all`."""
    refuse_saving(model, stage, num_stages)
    _refuse(base_of(model), "forward", only_stage(model, stage, num_stages))


def refuses(module: nn.Module, name: str = "forward") -> bool:
    """Whether this function of a module refuses every call."""
    return hasattr(getattr(vars(module).get(name), "__func__", None), _HIDDEN)


def allow_all(model: nn.Module) -> None:
    """Takes the refusals of a model back. Idempotent."""
    for module in _outer_and_base(model):
        if refuses(module, "_original_forward"):
            # accelerate has wrapped the refusal in autocast
            vars(module)["forward"] = vars(module).pop("_original_forward")
            vars(module).pop("_is_accelerate_prepared", None)
        for name in ("save_pretrained", "forward"):
            if not refuses(module, name):
                continue
            hidden = getattr(vars(module).pop(name).__func__, _HIDDEN)
            if hidden is not None:
                vars(module)[name] = hidden


def only_stage(model: nn.Module, stage: int, num_stages: int) -> str:
    """The sentence with which a stage refuses what is not a plan."""
    return (
        f"this rank holds only stage {stage} of {num_stages} of {type(base_of(model)).__name__}, which runs under plans only; "
        f"for anything else save the model by the save_model() of a trainer with plans, and load it whole"
    )


def _outer_and_base(model: nn.Module) -> list[nn.Module]:
    return [model] if model is base_of(model) else [model, base_of(model)]


def _refuse(module: nn.Module, name: str, message: str) -> None:
    if refuses(module, name):
        return
    allow, hidden = getattr(type(module), name), vars(module).get(name)

    # trainers read the signature of a forward
    @functools.wraps(allow)
    def refuse(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError(message)

    vars(refuse)[_HIDDEN] = hidden
    vars(module)[name] = MethodType(refuse, module)

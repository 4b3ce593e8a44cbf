"""Checks settings about kernels, and finds kernels that a user put into a model, which would not be exact under plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import TrainingArguments

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.context.forwards import without_renames
from hf_longctx.hf.models.fused.find import ROTARY
from hf_longctx.runtime.core import kernels as liger
from hf_longctx.runtime.core.binding import wrapped

# pieces of Liger that `liger_kernel_config` may name, with those that are refused and why
_PIECES = ("rms_norm", "swiglu", "geglu")
_REFUSED = {
    "rope": "its rotary embedding writes over queries and keys that plans keep",
    "cross_entropy": "plans compute the loss in tiles inside the output head",
    "fused_linear_cross_entropy": "plans compute the loss in tiles inside the output head",
}
_LEFT_OUT = (
    "left out: its rotary embedding, which writes over tensors that plans keep, and its losses, which plans compute in tiles"
)
_INSTEAD = "leave it out, and set use_liger_kernel=True (TrainingArguments) or LongContextConfig(compile_layers=True)"


def liger_problems(args: TrainingArguments, compile_layers: bool | None, draws_batches: bool) -> list[str]:
    """Problems with `use_liger_kernel`. draws_batches: whether plans run the model, not the trainer's own loop."""
    if not args.use_liger_kernel:
        return []
    if not draws_batches or type(args).__module__.startswith("trl."):
        return [
            "use_liger_kernel=True is not supported here, since the trainer would use Liger's losses and rotary embedding; leave "
            "it out, and use LongContextTrainer with it, or LongContextConfig(compile_layers=True) with a trainer under plans"
        ]
    problems = []
    if not liger.is_installed():
        problems.append("use_liger_kernel=True needs the package liger-kernel; pip install liger-kernel, or leave it out")
    if compile_layers:
        problems.append("use_liger_kernel=True and compile_layers=True would make the same kernels; leave one of them out")
    for name, value in (args.liger_kernel_config or {}).items():
        if value and name not in _PIECES:
            why = _REFUSED.get(name, f"only {', '.join(_PIECES)} are exact under plans")
            problems.append(f"liger_kernel_config sets {name}={value!r}, but {why}; set it to False or leave it out")
        elif not value and name in _PIECES:
            problems.append(
                f"liger_kernel_config sets {name}={value!r}, which cannot be left out alone; leave use_liger_kernel out"
            )
    return problems


@contextmanager
def without_liger(args: TrainingArguments) -> Iterator[None]:
    """Context of a training, in which `Trainer` does not apply Liger by itself, since plans have bound what is exact of it."""
    before, args.use_liger_kernel = args.use_liger_kernel, False
    try:
        yield
    finally:
        args.use_liger_kernel = before


def kernel_problems(model: nn.Module) -> list[str]:
    """Problems with kernels that a user put into the model, or into all models of its class, before the run."""
    base: Any = base_of(model)
    if getattr(base, "use_kernels", False):
        return [
            f"the model was loaded with use_kernels=True, whose kernels come from the hub in versions that are not tested under "
            f"plans; {_INSTEAD}"
        ]
    if _is_of_liger(F.cross_entropy):
        return [f"Liger replaced torch's cross_entropy, which plans call (cross_entropy=True); {_INSTEAD}"]
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        if _is_of_hub(module, own) and not _is_of_liger(own):
            return [
                f"the forward of {name or type(module).__name__} ({type(module).__name__}) is that of "
                f"{own.__func__.__qualname__}, a kernel of the hub, which stays there when use_kernels is set to False again; "
                f"load the model anew, without kernels; {_INSTEAD}"
            ]
        if any(hasattr(each, "_torchdynamo_orig_callable") for each in wrapped(getattr(own, "__func__", own))):
            return [
                f"the forward of {name or type(module).__name__} was compiled by torch.compile, which would freeze what plans "
                f"change in it; pass a model that is not compiled, and set LongContextConfig(compile_layers=True)"
            ]
        rotary = getattr(without_renames(type(module).forward), "__globals__", {}).get(ROTARY)
        if type(module).__module__.startswith("liger_kernel.") or any(map(_is_of_liger, (own, rotary))):
            return [
                f"Liger was applied to {name or type(module).__name__} ({type(module).__name__}) before the run, also where it "
                f"writes over tensors that plans keep; {_INSTEAD}"
            ]
    return []


def _is_of_hub(module: nn.Module, own: Any) -> bool:
    """Whether the package `kernels` bound the forward of another class to a module of a class that it knows."""
    function = getattr(own, "__func__", None)
    is_method = getattr(function, "__qualname__", "").endswith(".forward")
    return hasattr(type(module), "kernel_layer_name") and is_method and function is not type(module).forward


def _is_of_liger(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("liger_kernel.")

"""Chooses who makes kernels of a model's layers, and makes and checks them before the first step."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from hf_longctx.hf.models.adapters import base_of, hidden_dtype
from hf_longctx.hf.models.fused.bind import FusedLayers
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together

logger = logging.getLogger(__name__)

_LEFT_OUT = "left out: its rotary embedding, which writes over what plans keep, and its losses, which plans compute in tiles"


def compiled_layers(
    model: nn.Module,
    device: torch.device,
    is_autocast: bool,
    compile_layers: bool | None,
    control: dist.ProcessGroup | None,
) -> FusedLayers:
    """Kernels for `model` by torch.compile, compared with its own code; nobody's if they are not wanted, or fail on any rank.

    Collective over the ranks of `control`. compile_layers: None compiles on CUDA. is_autocast: products run in bf16.
    """
    if not (device.type == "cuda" if compile_layers is None else compile_layers):
        return FusedLayers("")
    layers = FusedLayers("compile")
    problem = layers.problem(model, device, _inner_dtype(model, is_autocast))
    failed = next((each for each in gather_objects(problem, control) if each), "")
    if failed and (control is None or dist.get_rank(control) == 0):
        logger.warning(
            "compile_layers is left out, and layers run their own code: %s; torch.compile needs a C++ compiler on CPU and "
            "Triton on a GPU (compile_layers=False does not try)",
            failed,
        )
    return FusedLayers("") if failed else layers


def _inner_dtype(model: nn.Module, is_autocast: bool) -> torch.dtype:
    """Dtype of an MLP's products."""
    return torch.bfloat16 if is_autocast else hidden_dtype(model)


def fused_layers(
    model: nn.Module, args: TrainingArguments, compile_layers: bool | None, control: dist.ProcessGroup | None
) -> tuple[FusedLayers, str]:
    """Kernels for `model`, made and compared with its own code, and a line for the log. Collective over the ranks of `control`.

    compile_layers: None compiles on CUDA. If compiling fails on any rank, all run the model's own code. Raises ValueError on all
    ranks if Liger's kernels cannot run here or differ.
    """
    if args.use_liger_kernel:
        layers = FusedLayers("liger")
        problem = layers.problem(model, args.device, _inner_dtype(model, args.bf16))
        what = f"use_liger_kernel=True cannot be used: {problem}; leave it out (Liger's kernels need a GPU)"
        raise_together([what] if problem else [], control)
    else:
        layers = compiled_layers(model, args.device, args.bf16, compile_layers, control)
    if not layers.maker:
        return layers, ""
    counts = layers.counts(model)
    found = ", ".join(f"{count} {name}" for name, count in counts.items()) or f"nothing in {type(base_of(model)).__name__}"
    return layers, f"Liger runs {found}; {_LEFT_OUT}" if layers.maker == "liger" else f"torch.compile runs {found}"

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


def fused_layers(
    model: nn.Module, args: TrainingArguments, compile_layers: bool | None, control: dist.ProcessGroup | None
) -> tuple[FusedLayers, str]:
    """Kernels for `model`, made and compared with its own code, and a line for the log. Collective over the ranks of `control`.

    compile_layers: None compiles on CUDA. If compiling fails on any rank, all run the model's own code. Raises ValueError on all
    ranks if Liger's kernels cannot run here or differ.
    """
    compiles = args.device.type == "cuda" if compile_layers is None else compile_layers
    layers = FusedLayers("liger" if args.use_liger_kernel else "compile" if compiles else "")
    if not layers.maker:
        return layers, ""
    inner = torch.bfloat16 if args.bf16 else hidden_dtype(model)
    problem, counts = layers.problem(model, args.device, inner), layers.counts(model)
    if layers.maker == "liger":
        what = f"use_liger_kernel=True cannot be used: {problem}; leave it out (Liger's kernels need a GPU)"
        raise_together([what] if problem else [], control)
    elif failed := next((each for each in gather_objects(problem, control) if each), ""):
        if args.process_index == 0:
            logger.warning(
                "compile_layers is left out, and layers run their own code: %s; torch.compile needs a C++ compiler on CPU and "
                "Triton on a GPU (compile_layers=False does not try)",
                failed,
            )
        return FusedLayers(""), ""
    found = ", ".join(f"{count} {name}" for name, count in counts.items()) or f"nothing in {type(base_of(model)).__name__}"
    return layers, f"Liger runs {found}; {_LEFT_OUT}" if layers.maker == "liger" else f"torch.compile runs {found}"

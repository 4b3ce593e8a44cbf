"""Finds before the first step that checkpoints could not be written: a folder that refuses files, or a disk without room."""

from __future__ import annotations

import tempfile
from pathlib import Path
from shutil import disk_usage
from typing import Any

from transformers import TrainingArguments

from hf_longctx.hf.models.adapters import adapter_parameters, is_adapted

# optimizers that keep two values per trained weight, in the weight's own type; others may keep less
_ADAM = "adamw_torch"


def folder_problems(args: TrainingArguments, model: Any) -> list[str]:
    """Reasons why this rank could not write checkpoints to the output folder; empty if it writes none."""
    if not args.should_save or str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        return []
    folder = Path(str(args.output_dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        free_bytes = disk_usage(folder).free
    except OSError as error:
        return [
            f"output_dir {folder} cannot be written to ({error}), so checkpoints would be lost; choose another folder, or set "
            f"save_strategy='no'"
        ]
    needed_bytes = checkpoint_bytes(args, model)
    if free_bytes >= needed_bytes:
        return []
    return [
        f"output_dir {folder} has {free_bytes / 2**30:.2f} GiB free, but a checkpoint takes at least "
        f"{needed_bytes / 2**30:.2f} GiB, and an old one is deleted only when the new one is complete; free some room, choose "
        f"another folder, or set save_only_model=True or save_strategy='no'"
    ]


def checkpoint_bytes(args: TrainingArguments, model: Any) -> int:
    """Bytes that a checkpoint of `model` takes at least: its weights (only adapters, if it has some), and Adam's states.

    A model that was loaded as one pipeline stage counts as that stage alone.
    """
    if not hasattr(model, "parameters"):
        return 0
    weights = list(adapter_parameters(model).values() if is_adapted(model) else model.parameters())
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    if args.save_only_model or str(getattr(args.optim, "value", args.optim)).removesuffix("_fused") != _ADAM:
        return num_bytes
    return num_bytes + 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

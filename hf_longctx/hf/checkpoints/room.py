"""Finds before the first step that checkpoints could not be written: a folder that refuses files, or a disk without room.

A disk without room for one checkpoint is an error; one without room for all that the run will keep at once is a warning, since
their number and size are estimates and other files may go in the meantime.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from transformers import TrainingArguments

from hf_longctx.hf.checkpoints.background import MEMORY_FOLDER
from hf_longctx.hf.checkpoints.staging import step_of
from hf_longctx.hf.models.adapters import adapter_parameters, is_adapted
from hf_longctx.hf.ranks.launch import host_bytes, on_first_rank

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)

# optimizers that keep two values per trained weight, in the weight's own type; others may keep less
_ADAM = "adamw_torch"
# optimizer -> least bytes of both moments per weight that it keeps in few bits
_MOMENT_BYTES = {"adamw_torch_8bit": 2.0, "adamw_torch_4bit": 1.0}


def folder_problems(args: TrainingArguments, model: Any, master_dtypes: Sequence[torch.dtype] = ()) -> list[str]:
    """Reasons why this rank could not write checkpoints to the output folder; empty if it writes none.

    master_dtypes: see `checkpoint_bytes`.
    """
    if not args.should_save or str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        return []
    folder = Path(str(args.output_dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        free_bytes, num_new = disk_usage(folder).free, _most_new(args, folder)
    except OSError as error:
        return [
            f"output_dir {folder} cannot be written to ({error}), so checkpoints would be lost; choose another folder, or set "
            f"save_strategy='no'"
        ]
    needed_bytes = checkpoint_bytes(args, model, master_dtypes)
    if free_bytes >= needed_bytes:
        if free_bytes < num_new * needed_bytes:
            limit = args.save_total_limit
            why = f"save_total_limit={limit}, and a new one beside them" if limit else "no save_total_limit"
            logger.warning(
                "output_dir %s has %.2f GiB free, but %d more checkpoints will stand there at once (%s), which take at least "
                "%.2f GiB, so the run may end when the disk is full; free some room, or %s save_total_limit",
                *(folder, free_bytes / 2**30, num_new, why, num_new * needed_bytes / 2**30, "lower" if limit else "set"),
            )
        return []
    return [
        f"output_dir {folder} has {free_bytes / 2**30:.2f} GiB free, but a checkpoint takes at least "
        f"{needed_bytes / 2**30:.2f} GiB, and an old one is deleted only when the new one is complete; free some room, choose "
        f"another folder, or set save_only_model=True or save_strategy='no'"
    ]


def _most_new(args: TrainingArguments, folder: Path) -> int:
    """Most new checkpoints that are in the folder at once beside those already there; 1 if that is unknown."""
    num_saves = _num_saves(args)
    num_there = sum(step_of(path) is not None for path in folder.iterdir())
    if not args.save_total_limit or args.save_total_limit < 0:
        # a run that resumes has written some of them already
        return max(1, (num_saves or 1) - num_there)
    # the best one stays beside the newest, even if the limit is 1
    limit = max(args.save_total_limit, 2 if args.load_best_model_at_end else 1)
    most = max(1, limit + 1 - num_there)
    return most if num_saves is None else min(most, num_saves)


def _num_saves(args: TrainingArguments) -> int | None:
    """Checkpoints that the arguments alone promise; None if their number depends on the data or on losses."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "steps" and args.save_steps <= 0:
        return 0
    if strategy == "steps" and args.save_steps < 1:
        return math.ceil(1 / args.save_steps)
    if strategy == "steps" and args.max_steps > 0:
        return math.ceil(args.max_steps / args.save_steps)
    if strategy == "epoch" and args.max_steps <= 0:
        return math.ceil(args.num_train_epochs)
    return None


def memory_problems(args: TrainingArguments, model: Any, master_dtypes: Sequence[torch.dtype] = ()) -> list[str]:
    """Reasons why host memory could not hold this rank's part of a checkpoint until it is written; empty if it has no large part.

    The first rank counts all parts of sharded parameters, also those of other nodes, and looks at its own node only.
    """
    if not args.should_save:
        return []
    remedy = "or leave async_save out"
    try:
        with tempfile.TemporaryFile(dir=MEMORY_FOLDER):
            free_bytes = min(disk_usage(MEMORY_FOLDER).free, host_bytes()[0])
    except OSError as error:
        return [
            f"async_save=True holds checkpoints in {MEMORY_FOLDER} until they are written, and it refuses files ({error}); "
            f"mount a tmpfs there, {remedy}"
        ]
    needed_bytes = checkpoint_bytes(args, model, master_dtypes)
    if free_bytes >= needed_bytes:
        return []
    return [
        f"async_save=True holds a checkpoint in host memory until it is written, at least {needed_bytes / 2**30:.2f} GiB, and "
        f"{MEMORY_FOLDER} has room for {free_bytes / 2**30:.2f} GiB; give it more (docker: --shm-size, Kubernetes: an emptyDir "
        f"of medium Memory mounted there), free host memory, {remedy}"
    ]


def checkpoint_bytes(args: TrainingArguments, model: Any, master_dtypes: Sequence[torch.dtype] = ()) -> int:
    """Bytes that a checkpoint of `model` takes at least: its weights (only adapters, if it has some), and Adam's states.

    A model that was loaded as one pipeline stage counts as that stage alone. master_dtypes: dtypes of trained weights
    of which Adam updates fp32 copies, which it saves too.
    """
    if not hasattr(model, "parameters"):
        return 0
    weights = list(adapter_parameters(model) if is_adapted(model) else model.parameters())
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    name = str(getattr(args.optim, "value", args.optim)).removesuffix("_fused")
    if args.save_only_model or name not in (_ADAM, *_MOMENT_BYTES):
        return num_bytes
    for weight in model.parameters():
        if weight.requires_grad:
            has_copy = weight.dtype in master_dtypes
            moment_bytes = _MOMENT_BYTES.get(name, 8 if has_copy else 2 * weight.element_size())
            num_bytes += int(weight.numel() * (moment_bytes + 4 * has_copy))
    return num_bytes

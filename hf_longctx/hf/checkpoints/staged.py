"""Saves pipeline stages as one ordinary Hugging Face checkpoint, and loads stages from one, for any number of stages.

The trainer calls it to save and resume runs with stages.

The first rank of every stage writes the stage's weights into a folder of its own, with the names and shapes that transformers
uses in files. Rank 0 then moves the files to their final names under one index. Until the last rename the previous checkpoint
can still be loaded, so a rank that dies while writing destroys nothing. Tied embeddings are saved once, with the weight and the
optimizer state of the first stage.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from peft.utils import CONFIG_NAME
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers.core_model_loading import revert_weight_conversion

from hf_longctx.hf.checkpoints.adapters import load_adapters
from hf_longctx.hf.checkpoints.sharded import (
    INDEX_FILE,
    SHARDS_FOLDER,
    WEIGHTS_FILE,
    copy_weights,
    gather_weights,
    names_in_files,
    optimizer_states,
    renamed_weights,
    set_optimizer_states,
)
from hf_longctx.hf.checkpoints.unpickling import load_shards
from hf_longctx.hf.models.adapters import ADAPTER_FILE, is_adapted, saved_parameters
from hf_longctx.hf.models.cutting import find_pieces
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

_SHARD = re.compile(r"model(-new)?-\d{5}-of-\d{5}\.safetensors")


def save_stages(
    stage: StageModel,
    folder: str,
    ranks_per_stage: int,
    control: dist.ProcessGroup | None,
    max_shard_size: str = "5GB",
    is_joined: bool = True,
) -> None:
    """Writes the model of all stages to `folder`, where `from_pretrained` can read it; of a model with adapters, only these.

    Collective over all ranks, which must see one shared folder, unless the caller calls `join_stages` later, which brings the
    files of all stages together: `is_joined` is then False. Raises RuntimeError on every rank if some rank could not write; the
    previous checkpoint in the folder is then unchanged.
    """
    rank = dist.get_rank() if control is not None else 0
    is_writer = rank % ranks_per_stage == 0
    only = saved_parameters(stage.model) if is_adapted(stage.model) else None
    weights = gather_weights(stage.model, is_writer, only)
    if stage.tied and stage.stage:
        weights.pop(stage.tied, None)
    error = ""
    partial = partial_folder(folder, stage.stage)
    try:
        if is_writer:
            shutil.rmtree(partial, ignore_errors=True)
            _save_own(stage.model, partial, weights, max_shard_size)
    except Exception as problem:
        error = f"rank {rank}: {type(problem).__name__}: {problem}"
    raise_everywhere(error, control, folder)
    if not is_joined:
        return
    try:
        if rank == 0:
            join_stages(Path(folder), stage.num_stages)
    except Exception as problem:
        error = f"rank {rank}: {type(problem).__name__}: {problem}"
    raise_everywhere(error, control, folder)


def load_stage_weights(stage: StageModel, folder: str) -> None:
    """Copies this stage's weights into its model, from a checkpoint of a whole model or of adapters.

    Every rank reads its own weights. Raises ValueError for a folder without safetensors, for one that lacks a weight of this
    stage, and for a model whose weights have other shapes in files.
    """
    owner = _embedding_name(stage)
    if is_adapted(stage.model):
        return load_adapters(stage.model, folder, {stage.tied: owner} if stage.tied else {})
    renamed = renamed_weights(stage.model)
    also = names_in_files(stage.model, renamed)
    if fused := sorted({*renamed} - {*also.values()}):
        raise ValueError(
            f"{fused[0]} has another shape in files, which stages cannot read back yet; start a new run from the checkpoint's "
            f"weights with load_pipeline_stage, or resume with stages=1"
        )
    if stage.tied and stage.stage:
        also |= dict.fromkeys(names_in_files(stage.model, [owner]), stage.tied)
    copy_weights(stage.model, folder, also, is_part=True)


def save_stage_optimizer(stage: StageModel, optimizer: Any, folder: str) -> None:
    """Writes the optimizer states of all stages by parameter name, each state once. Collective over all ranks."""
    states = optimizer_states(stage.model, optimizer)
    if stage.tied and stage.stage:
        # the first stage writes equal states of the tied weight
        states = {key: value for key, value in states.items() if not _is_of(key, stage.tied)}
    save_shards(states, checkpoint_id=Path(folder) / SHARDS_FOLDER)


def load_stage_optimizer(stage: StageModel, optimizer: Any, folder: str) -> None:
    """Reads optimizer shards from `save_stage_optimizer` or from a run without stages, on any number of stages and ranks.

    Collective over all ranks.
    """
    states = optimizer_states(stage.model, optimizer)
    names = {key: key for key in states}
    if stage.tied and stage.stage:
        owner = _embedding_name(stage)
        names = {key: key.replace(f".{stage.tied}.", f".{owner}.") if _is_of(key, stage.tied) else key for key in states}
    found = {names[key]: value for key, value in states.items()}
    load_shards(found, Path(folder) / SHARDS_FOLDER, optional=MASTER_WEIGHT)
    loaded = {key: found[names[key]] for key in states}
    set_optimizer_states(stage.model, optimizer, loaded)


def _embedding_name(stage: StageModel) -> str:
    """Name that the tied weight has on the first stage; empty without a tied weight.

    All stages have one class, so this stage knows the names of the first one.
    """
    if not stage.tied:
        return ""
    pieces = find_pieces(stage.model)
    names = {id(module): name for name, module in stage.model.named_modules()}
    return f"{names[id(getattr(pieces.decoder, pieces.first[0]))]}.weight"


def _is_of(key: str, parameter: str) -> bool:
    """Whether a key of flat optimizer states (`state.NAME.exp_avg`, `param_groups.NAME.lr`) belongs to `parameter`."""
    return f".{parameter}." in key


def partial_folder(folder: str | Path, stage: int) -> Path:
    """Folder that a stage writes to; it is on the checkpoint's file system, so that files can be renamed instead of copied."""
    return Path(folder) / f"stage-{stage}.partial"


def _save_own(model: Any, partial: Path, weights: dict[str, Tensor], max_shard_size: str) -> None:
    """Writes the weights of one stage. `save_pretrained` cannot: without adapters it writes on global rank 0 only."""
    if is_adapted(model):
        # by the class, since a stage refuses to be saved alone
        type(model).save_pretrained(model, str(partial), state_dict=weights)
        return
    partial.mkdir(parents=True)
    weights = revert_weight_conversion(model, weights)
    pattern = WEIGHTS_FILE.replace(".", "{suffix}.")
    split = split_torch_state_dict_into_shards(weights, filename_pattern=pattern, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name].contiguous() for name in names}, partial / file, metadata={"format": "pt"})
    save_configs(model, partial)


def save_configs(model: Any, folder: Path) -> None:
    """Writes the configs of a model as `save_pretrained` does; the class of a sharded one is named FSDP plus its plain name."""
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(str(folder))
    if model.can_generate():
        model.generation_config.save_pretrained(str(folder))


def raise_everywhere(error: str, control: dist.ProcessGroup | None, folder: str) -> None:
    """Raises RuntimeError on every rank if there is an `error` on one, after waiting for the slowest. Collective."""
    if errors := [found for found in gather_objects(error, control) if found]:
        raise RuntimeError(
            f"the checkpoint in {folder} could not be written, and the previous one is unchanged: {', '.join(errors)}; make "
            f"room, or make the folder writable, and start again with resume_from_checkpoint=True"
        )


def join_stages(folder: Path, num_stages: int) -> None:
    """Moves the files of all stages in `folder` to their final names; a single rename makes them the folder's checkpoint.

    For one rank, when all stages are written.
    """
    partials = [partial_folder(folder, number) for number in range(num_stages)]
    if missing := [partial for partial in partials if not partial.is_dir()]:
        raise FileNotFoundError(f"{missing[0]} does not exist; the ranks of all stages must write to one shared folder")
    if any(partials[0].rglob(ADAPTER_FILE)):
        _join_adapters(partials, folder)
    else:
        _join_weights(partials, folder)
    for partial in partials:
        shutil.rmtree(partial)


def _join_weights(partials: list[Path], folder: Path) -> None:
    """Moves the files of all stages, then the configs, and last writes the index over all files."""
    files = [file for partial in partials for file in sorted(partial.glob("*.safetensors"))]
    width = len(files)
    names = [f"model-{number:05d}-of-{width:05d}.safetensors" for number in range(1, width + 1)]
    index_file = folder / INDEX_FILE
    if index_file.exists() and {*json.loads(index_file.read_text())["weight_map"].values()} & {*names}:
        # do not overwrite shards of the existing checkpoint; shards outside its index are left over from an unfinished save
        names = [f"model-new-{number:05d}-of-{width:05d}.safetensors" for number in range(1, width + 1)]
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file, name in zip(files, names, strict=True):
        with safe_open(file, framework="pt") as reader:
            weight_map.update((key, name) for key in reader.keys())  # noqa: SIM118 (not a mapping)
        num_bytes += _tensor_bytes(file)
        file.replace(folder / name)
    for file in partials[0].glob("*.json"):
        file.replace(folder / file.name)
    index = partials[0] / "index.tmp"
    index.write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": weight_map}, indent=2) + "\n")
    index.replace(index_file)
    # a single weights file takes precedence over an index, so if there was one, removing it switches to the new checkpoint
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    for file in folder.glob("model*.safetensors"):
        if _SHARD.fullmatch(file.name) and file.name not in names:
            file.unlink()


def _join_adapters(partials: list[Path], folder: Path) -> None:
    """Joins the files of every adapter, which may lie in a folder of its name."""
    for inner in [file.parent.relative_to(partials[0]) for file in sorted(partials[0].rglob(ADAPTER_FILE))]:
        adapters: dict[str, Tensor] = {}
        for partial in partials:
            adapters.update(load_file(partial / inner / ADAPTER_FILE))
        joined = partials[0] / inner / "joined.tmp"
        save_file(adapters, joined, metadata={"format": "pt"})
        _join_targets([partial / inner / CONFIG_NAME for partial in partials])
        (folder / inner).mkdir(exist_ok=True)
        for file in (*(partials[0] / inner).glob("*.json"), *(partials[0] / inner).glob("*.md")):
            file.replace(folder / inner / file.name)
        joined.replace(folder / inner / ADAPTER_FILE)
    for file in partials[0].glob("*.md"):
        file.replace(folder / file.name)


def _join_targets(files: list[Path]) -> None:
    """Gives the first adapter config the target modules of all stages, since for "all-linear" a stage names only its own."""
    configs = [json.loads(file.read_text()) for file in files]
    targets = [config["target_modules"] for config in configs]
    if all(isinstance(names, list) for names in targets):
        configs[0]["target_modules"] = sorted(set().union(*targets))
        files[0].write_text(json.dumps(configs[0], indent=2, sort_keys=True) + "\n")


def _tensor_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file: all bytes after the header, whose length is in the first eight bytes."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")

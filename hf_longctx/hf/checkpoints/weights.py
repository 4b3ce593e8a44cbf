"""Weights of a checkpoint: written and read as one ordinary Hugging Face checkpoint, however they lie on ranks.

Sharded weights are gathered one at a time, and with many of them a file at a time, so that the writing rank never holds more than
one file: `Trainer` writes from a mapping of all whole weights, which for 70 billion parameters in bf16 takes 130 GiB of host
memory. `planned_files` decides from shapes alone, so all ranks gather the same weights in the same order.

The first rank of every pipeline stage writes the stage's weights into a folder of its own, with the names and shapes that
transformers uses in files. Rank 0 then moves the files to their final names under one index. Until the last rename the previous
checkpoint can still be loaded, so a rank that dies while writing destroys nothing. Tied embeddings are saved once, with the first
stage.

Every rank reads its own rows of files, at any number of ranks and stages.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from peft.utils import CONFIG_NAME
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_longctx.hf.models.adapters import ADAPTER_FILE, adapter_files, hidden_dtype, is_adapted, saved_parameters
from hf_longctx.hf.models.cutting import find_pieces
from hf_longctx.hf.models.refusing import refuses
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.gradients import first_row

INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
_SHARD = re.compile(r"model(-new)?-\d{5}-of-\d{5}\.safetensors")
# most bytes of a file, unless one weight has more
FILE_BYTES = 5 * 10**9
# the name of a weight up to the number of its layer
_LAYER = re.compile(r".*?\.\d+\.")


def gather_weights(model: nn.Module, is_kept: bool, only: Iterable[nn.Parameter] | None = None) -> dict[str, Tensor]:
    """Gathers whole weights by name, on the CPU of ranks with `is_kept`; returns an empty mapping on other ranks.

    Tied weights are one tensor. `only`: gather these parameters and nothing else. Collective over all ranks; only one weight at a
    time is whole on every device.
    """
    owners = dict(model.named_parameters(remove_duplicate=False))
    wanted = None if only is None else {id(parameter) for parameter in only}
    gathered: dict[int, Tensor] = {}
    weights = {}
    for name, value in model.state_dict().items():
        owner = id(owners.get(name, value))
        if wanted is not None and owner not in wanted:
            continue
        if owner not in gathered:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            gathered[owner] = to_host(whole, is_kept)
        if is_kept:
            weights[name] = gathered[owner]
    return weights


def to_host(whole: Tensor, is_kept: bool) -> Tensor:
    """The gathered weight on the CPU of ranks with `is_kept`; an empty tensor on other ranks, after waiting for the weight.

    If these ran ahead of the rank that copies it to the host, their next collectives would reach their time-outs.
    """
    if is_kept:
        return whole.cpu()
    if whole.is_cuda:
        torch.cuda.current_stream(whole.device).synchronize()
    return torch.empty(0)


def load_weights(model: nn.Module, folder: str) -> None:
    """Copies the weights of a Hugging Face checkpoint into `model`; every rank reads its own shards.

    If some weights have other names or shapes in files, transformers reads the checkpoint into a second, whole model on the CPU
    of rank 0, which sends one weight at a time. Collective over all ranks. Raises ValueError for a folder without safetensors or
    with weights of another model.
    """
    if renamed_weights(model):
        _copy_converted(model, folder)
    else:
        copy_weights(model, folder, {}, is_part=False)


def renamed_weights(model: Any) -> list[str]:
    """Names of the weights that transformers fuses or renames when it reads them from files, such as those of experts."""
    weights = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in model.state_dict().items()}
    return sorted(weights.keys() - revert_weight_conversion(model, dict(weights)).keys())


def names_in_files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Name in files -> name in the model, for those of the named weights that files hold as they are."""
    found: dict[str, str] = {}
    for name in names:
        weight = torch.empty(0, device="meta")
        try:
            reverted = revert_weight_conversion(model, {name: weight})
        except Exception:
            continue
        # fused or turned weights are other tensors
        found.update((renamed, name) for renamed, value in reverted.items() if value is weight)
    return found


def _copy_converted(model: Any, folder: str) -> None:
    # sharding puts a class of torch in front of the model's own
    model_class: Any = next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    targets = {name: [tensors[name]] for name in model.state_dict()}

    def load() -> dict[str, Tensor]:
        checkpoint_files(folder)
        loaded, report = model_class.from_pretrained(
            folder, dtype=hidden_dtype(model), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        found: dict[str, Tensor] = loaded.state_dict()
        if missing := sorted({*report["missing_keys"], *(targets.keys() - found.keys())}):
            raise ValueError(
                f"{folder} lacks {len(missing)} weights of the model (the first is {missing[0]}); resume with its own model"
            )
        return found

    send_from_first(load, targets, dist.group.WORLD if dist.is_initialized() else None)


@torch.no_grad()
def send_from_first(
    load: Callable[[], dict[str, Tensor]], targets: Mapping[str, list[Tensor]], group: dist.ProcessGroup | None
) -> None:
    """Copies weights that the first rank of `group` loads by name, one at a time, into their targets, whole or in shards.

    group: with a long time-out, since `load` takes minutes; None for a single rank. Collective over it. Raises ValueError on all
    of its ranks if `load` fails.
    """
    is_first, first = (True, 0) if group is None else (dist.get_rank(group) == 0, dist.get_global_rank(group, 0))
    whole: dict[str, Tensor] = {}
    errors: list[str | None] = [None]
    if is_first:
        try:
            # weights that the checkpoint lacks may be drawn, and ranks share random states
            with torch.random.fork_rng(devices=[]):
                whole = dict(load())
        except Exception as error:
            errors = [str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"]
    if group is not None:
        dist.broadcast_object_list(errors, first, group)
    if errors[0] is not None:
        raise ValueError(errors[0])
    for name, found in targets.items():
        value = torch.empty(found[0].shape, dtype=found[0].dtype, device=found[0].device)
        if is_first:
            value.copy_(whole.pop(name))
        if group is not None:
            dist.broadcast(value, first, group)
        for target in found:
            target.copy_(sharded_like(target, value))


@torch.no_grad()
def copy_weights(model: nn.Module, folder: str, also: Mapping[str, str], is_part: bool) -> None:
    """Copies weights by name from a checkpoint into `model`.

    `also`: name in the checkpoint -> name in the model, for weights whose names differ. `is_part`: whether `model` is one
    pipeline stage, so that tensors of other stages are skipped. Raises ValueError for missing weights and, unless `is_part`, for
    unknown ones.
    """
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    targets.update((name, targets[own]) for name, own in also.items())
    loaded: set[int] = set()
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                if name not in targets:
                    if is_part:
                        continue
                    raise ValueError(
                        f"{folder} has a weight {name}, but the model does not; resume with the model it was saved from"
                    )
                read_own(targets[name], reader.get_slice(name))
                loaded.add(id(targets[name]))
    missing = [name for name in model.state_dict() if id(targets[name]) not in loaded]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of the model (the first is {missing[0]}); resume with its own model"
        )


def listed_files(folder: Path) -> list[Path]:
    """Safetensors files that a Hugging Face checkpoint has, by its index if it has one."""
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    # like transformers, prefer a single file to an index
    if index.exists() and not single.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [single]


def checkpoint_files(folder: str) -> list[Path]:
    """Safetensors files of a Hugging Face checkpoint; raises ValueError if one is missing."""
    files = listed_files(Path(folder))
    for file in files:
        if not file.exists():
            raise ValueError(f"{folder} has no {file.name}; give a folder that this trainer or save_pretrained() wrote")
    return files


def read_own(target: Tensor, found: Any) -> None:
    """Copies this rank's part of a tensor in a file, a slice of `safe_open`, into `target`, and reads nothing else of it.

    Raises ValueError if their shapes differ.
    """
    if (shape := torch.Size(found.get_shape())) != target.shape:
        raise ValueError(
            f"the checkpoint has a weight of shape {tuple(shape)}, but the model one of {tuple(target.shape)}; load it into the "
            f"model from which it was saved"
        )
    if not isinstance(target, DTensor):
        target.copy_(found[...])
    elif target.placements == (Shard(0),):
        local, first = target.to_local(), first_row(target)
        if len(local):
            local.copy_(found[first : first + len(local)])
    else:
        target.copy_(sharded_like(target, found[...]))


def sharded_like(target: Tensor, whole: Tensor) -> Tensor:
    """Shards `whole` like `target`, on its device; nothing is sent, since every rank has the whole tensor already."""
    if not isinstance(target, DTensor):
        return whole
    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def load_adapters(model: Any, folder: str, file_names: Mapping[str, str] | None = None) -> None:
    """Copies the adapters saved in `folder` into the adapters of `model`, which may be sharded or one pipeline stage.

    Embedding and head too are read if PEFT has saved them. `file_names`: names of the model's weights that have others in the
    file. Every rank reads its own weights. Raises ValueError if the folder has no adapters in safetensors, or not all weights.
    """
    names = file_names or {}
    frozen = {names.get(name, name): weight for name, weight in model.named_parameters(remove_duplicate=False)}
    files = adapter_files(model)
    for inner, targets in files.items():
        file = Path(folder, inner, ADAPTER_FILE)
        if len(files) == 1 and not file.exists():
            # a lone adapter may have had another name
            file = Path(folder, ADAPTER_FILE)
        if not file.exists():
            raise ValueError(f"{file.parent} has no {file.name}; resume adapters from a checkpoint of these adapters")
        with safe_open(file, framework="pt", device="cpu") as reader:
            if missing := sorted(set(targets) - set(reader.keys())):
                raise ValueError(
                    f"{file} lacks {len(missing)} weights of this model's adapters (the first is {missing[0]}); resume with the "
                    f"config of the saved adapters"
                )
            known = targets | {name: frozen[name] for name in reader.keys() if name in frozen}  # noqa: SIM118 (not a mapping)
            for name, target in known.items():
                target.copy_(sharded_like(target, reader.get_tensor(name)))


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
    for name in other_names(stage):
        weights.pop(name, None)
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


def load_stage_weights(
    stage: StageModel, folder: str, load: Callable[[], dict[str, Tensor]], group: dist.ProcessGroup | None
) -> None:
    """Copies this stage's weights into its model, from a checkpoint of a whole model or of adapters.

    Every rank reads its own weights. If transformers fuses some of them when it reads them, such as those of experts, the first
    rank of `group`, the ranks of the stage, gets them all from `load` and sends one at a time. Collective over `group` (None for
    a single rank). Raises ValueError for a folder without safetensors, and for one that lacks a weight of this stage.
    """
    owner = saved_name(stage)
    if is_adapted(stage.model):
        return load_adapters(stage.model, folder, {stage.tied: owner} if stage.tied else {})
    renamed = renamed_weights(stage.model)
    also = names_in_files(stage.model, renamed)
    if {*renamed} - {*also.values()}:
        tensors = {**dict(stage.model.named_parameters(remove_duplicate=False)), **dict(stage.model.named_buffers())}
        return send_from_first(load, {name: [tensors[name]] for name in stage.model.state_dict()}, group)
    if stage.copied:
        also |= dict.fromkeys(names_in_files(stage.model, [owner]), stage.tied)
    copy_weights(stage.model, folder, also, is_part=True)


def stage_names(stage: StageModel, is_saved: bool) -> dict[str, str] | None:
    """Name in the model -> name in a checkpoint, for weights whose states a stage saves or reads; None if all are equal.

    The first stage that holds a tied weight saves its states, under its own name.
    """
    if not stage.copied:
        return None
    names = {name: name for name, _ in stage.model.named_parameters()}
    del names[stage.tied]
    return names if is_saved else names | {stage.tied: saved_name(stage)}


def other_names(stage: StageModel) -> list[str]:
    """Names under which this stage does not save the tied weight, if it has one; another stage or name saves it."""
    if not stage.tied:
        return []
    weight = stage.model.get_parameter(stage.tied)
    names = [name for name, other in stage.model.named_parameters(remove_duplicate=False) if other is weight]
    return names if stage.copied else [name for name in names if name != stage.tied]


def saved_name(stage: StageModel) -> str:
    """Name that the tied weight has on the first stage that holds it, which saves it; empty without a tied weight.

    All stages have one class, so this stage knows the names of the first one.
    """
    pieces = find_pieces(stage.model)
    if not stage.tied or not pieces.is_tied:
        return stage.tied
    names = {id(module): name for name, module in stage.model.named_modules()}
    return f"{names[id(getattr(pieces.decoder, pieces.first[0]))]}.weight"


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
    model.config.architectures = [class_name(model)]
    model.config.dtype = str(hidden_dtype(model)).removeprefix("torch.")
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


# names of the model's weights in every file; those of a group become tensors of the file together
Files = list[list[list[str]]]
# names of weights that become tensors of files together, and these tensors by name, without values
FileGroups = list[tuple[list[str], dict[str, Tensor]]]


def planned_files(model: Any) -> Files:
    """The files of all weights; empty for a model whose weights `Trainer` must write from one mapping.

    That is a model that fits into one file, has its own `save_pretrained` or its own code, or whose weights get the names and
    shapes of files only all together, or only from their values.
    """
    if not isinstance(model, PreTrainedModel) or _saves_its_own_way(model):
        return []
    weights = model.state_dict()
    ignored = model._keys_to_ignore_on_save or ()
    shapes = {name: without_values(value) for name, value in weights.items() if name not in ignored}
    if sum(map(_num_bytes, shapes.values())) <= FILE_BYTES:
        return []
    # for tensors without values, transformers finds tied weights by the model's parameters
    shapes = remove_tied_weights_from_state_dict(shapes, model)
    return _filled(groups_in_files(model, shapes))


def groups_in_files(model: PreTrainedModel, shapes: Mapping[str, Tensor]) -> FileGroups:
    """Groups weights that become tensors of files together: each alone, or those of a layer.

    shapes: tensors without values by name in the model. Empty if transformers converts weights only all together, or only from
    their values.
    """
    try:
        whole = _described(revert_weight_conversion(model, dict(shapes)))
    except Exception:
        # a conversion that looks at values
        return []
    for group_of in (str, _layer_of):
        groups: dict[str, list[str]] = {}
        for name in shapes:
            groups.setdefault(group_of(name), []).append(name)
        if (found := _converted(model, shapes, groups.values(), whole)) is not None:
            return list(zip(groups.values(), found, strict=True))
    return []


def save_files(model: Any, files: Files, folder: Path, is_writer: bool, control: dist.ProcessGroup | None) -> None:
    """Gathers the weights of one file after the other, on the CPU of ranks with `is_writer`, which write it and free them.

    Collective over all ranks; only one weight at a time is whole on every device. Raises RuntimeError on every rank if one could
    not write; the previous checkpoint in the folder is then unchanged.
    """
    weights, partial, error = model.state_dict(), partial_folder(folder, 0), ""

    def attempt(write: Callable[[], None]) -> None:
        nonlocal error
        try:
            if is_writer and not error:
                write()
        except Exception as problem:
            error = f"rank {dist.get_rank() if control is not None else 0}: {type(problem).__name__}: {problem}"

    def start() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_configs(model, partial)

    attempt(start)
    for number, groups in enumerate(files, start=1):
        tensors: dict[str, Tensor] = {}
        for names in groups:
            own = {}
            for name in names:
                whole = weights[name].full_tensor() if isinstance(weights[name], DTensor) else weights[name]
                own[name] = to_host(whole, is_writer)
            attempt(lambda own=own, tensors=tensors: tensors.update(revert_weight_conversion(model, own)))  # type: ignore[misc]
        attempt(lambda tensors=tensors, number=number: _write(tensors, partial / f"model-{number:05d}.safetensors"))  # type: ignore[misc]
        del tensors
        # all ranks wait here: where they ran ahead, their next collective would wait for a disk
        raise_everywhere(error, control, str(folder))
    attempt(lambda: join_stages(folder, 1))
    raise_everywhere(error, control, str(folder))


def _saves_its_own_way(model: PreTrainedModel) -> bool:
    has_own = "save_pretrained" in vars(model) and not refuses(model, "save_pretrained")
    is_replaced = type(model).save_pretrained is not PreTrainedModel.save_pretrained or has_own
    has_peft = bool(getattr(model, "_hf_peft_config_loaded", False))
    return is_replaced or has_peft or model.is_remote_code() or getattr(model, "hf_quantizer", None) is not None


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})


def _converted(
    model: PreTrainedModel, shapes: Mapping[str, Tensor], groups: Iterable[list[str]], whole: dict[str, object]
) -> list[dict[str, Tensor]] | None:
    """The tensors of every group in files; None if groups alone do not give the tensors that all weights together do."""
    found: dict[str, object] = {}
    converted = []
    for names in groups:
        try:
            own = revert_weight_conversion(model, {name: shapes[name] for name in names})
        except Exception:
            # a conversion that lacks some of its weights raises whatever comes of that
            return None
        if found.keys() & own.keys():
            return None
        found |= _described(own)
        converted.append(own)
    return converted if found == whole else None


def _filled(groups: FileGroups) -> Files:
    """Groups in order, in as few files as hold them."""
    files: Files = []
    left_bytes = 0
    for names, tensors in groups:
        num_bytes = sum(map(_num_bytes, tensors.values()))
        if not files or num_bytes > left_bytes:
            files.append([])
            left_bytes = FILE_BYTES
        files[-1].append(names)
        left_bytes -= num_bytes
    return files


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else name


def without_values(value: Tensor) -> Tensor:
    """A tensor of the same shape and dtype on the meta device; whole for a sharded one."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _num_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _described(tensors: dict[str, Tensor]) -> dict[str, object]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}

"""Checkpoints of sharded models: weights as one ordinary Hugging Face checkpoint, optimizer states as shards.

The trainer calls these functions to save and resume; `checkpoints.staged` builds on them. Weights and states can be read on any
number of ranks. torch.distributed.checkpoint writes sharded optimizer states under parameter names, one file per rank in the
folder `optimizer_shards`, which every rank must be able to read on resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from hf_longctx.hf.checkpoints.trained_weights import check_sizes
from hf_longctx.hf.checkpoints.unpickling import load_shards
from hf_longctx.runtime.parameters.low_bit import is_low_bit, own_moment
from hf_longctx.runtime.parameters.master_weights import (
    MASTER_WEIGHT,
    copied_dtypes,
    has_host_states,
    has_master_weights,
    host_state,
)
from hf_longctx.runtime.parameters.sharded import copies_group
from hf_longctx.runtime.parameters.whole_weights import has_whole_steps, owns_weight

SHARDS_FOLDER = "optimizer_shards"
# states of an optimizer that updates whole weights, each on the rank that owns it: one file for each rank
WHOLE_FOLDER = "optimizer_whole"
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


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
            folder, dtype=model.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        found: dict[str, Tensor] = loaded.state_dict()
        if missing := sorted({*report["missing_keys"], *(targets.keys() - found.keys())}):
            raise ValueError(
                f"{folder} lacks {len(missing)} weights of the model (the first is {missing[0]}); resume with its own model"
            )
        return found

    send_from_first(load, targets)


@torch.no_grad()
def send_from_first(load: Callable[[], dict[str, Tensor]], targets: Mapping[str, list[Tensor]]) -> None:
    """Copies weights that rank 0 loads by name, one at a time, into their targets on all ranks, whole or in shards.

    Collective over all ranks, with the long time-out of their common group, since `load` takes minutes. Raises ValueError on
    every rank if it fails.
    """
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    whole: dict[str, Tensor] = {}
    errors: list[str | None] = [None]
    if rank == 0:
        try:
            # weights that the checkpoint lacks may be drawn, and ranks share random states
            with torch.random.fork_rng(devices=[]):
                whole = dict(load())
        except Exception as error:
            errors = [str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"]
    if num_ranks > 1:
        dist.broadcast_object_list(errors)
    if errors[0] is not None:
        raise ValueError(errors[0])
    for name, found in targets.items():
        value = torch.empty(found[0].shape, dtype=found[0].dtype, device=found[0].device)
        if rank == 0:
            value.copy_(whole.pop(name))
        if num_ranks > 1:
            dist.broadcast(value, src=0)
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


def checkpoint_files(folder: str) -> list[Path]:
    """Safetensors files of a Hugging Face checkpoint; raises ValueError if one is missing."""
    index, single = Path(folder) / INDEX_FILE, Path(folder) / WEIGHTS_FILE
    files = [single]
    # like transformers, prefer a single file to an index
    if index.exists() and not single.exists():
        files = [Path(folder) / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for file in files:
        if not file.exists():
            raise ValueError(f"{folder} has no {file.name}; give a folder that this trainer or save_pretrained() wrote")
    return files


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Writes every rank's shards of the optimizer's states, and its settings. Collective over all ranks."""
    save_shards(optimizer_states(model, optimizer), checkpoint_id=Path(folder) / SHARDS_FOLDER)


def has_optimizer_shards(folder: str) -> bool:
    """Whether this checkpoint has optimizer shards from `save_optimizer`."""
    return (Path(folder) / SHARDS_FOLDER).is_dir()


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Reads what `save_optimizer` wrote, on any number of ranks, for sharded or whole parameters. Collective over all ranks.

    Master weights that the checkpoint lacks are made from the weights. Raises ValueError for an optimizer whose states are whole.
    """
    if has_whole_steps(optimizer):
        raise ValueError(
            f"{folder} holds shards of an optimizer's states, but {type(optimizer).__name__} updates whole weights; resume with "
            f"the optimizer of its run, or start from its weights with a fresh optimizer"
        )
    states = optimizer_states(model, optimizer)
    load_shards(states, Path(folder) / SHARDS_FOLDER, optional=MASTER_WEIGHT)
    set_optimizer_states(model, optimizer, states)


def optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """States and settings of the optimizer in one mapping, by parameter name."""
    with _without_empty_groups(optimizer):
        states: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    return states


def set_optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    """Sets states and settings of the optimizer from the mapping of `optimizer_states`."""
    with _without_empty_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, states, options=_BY_NAME)


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context that hides parameter groups without parameters, such as frozen norms, since states by name cannot describe them."""
    empty = [(index, group) for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for index, group in empty:
            optimizer.param_groups.insert(index, group)


def save_whole_states(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Writes the states of the weights that this rank owns, by name, and its shards of master weights, to a file of its own.

    A rank whose states another copy of the weights has too writes a file without states.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {"class": type(optimizer).__name__, "states": {}, "masters": {}, "groups": []}
    for group in optimizer.param_groups:
        found["groups"].append({name: value for name, value in group.items() if name != "params"})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(parameters):
        name, states = names[id(parameter)], dict(optimizer.state.get(parameter, {}))
        if not _is_first_copy(model, parameter):
            continue
        if isinstance(master := states.pop(MASTER_WEIGHT, None), DTensor):
            found["masters"][name] = (master.device_mesh.get_local_rank(master.device_mesh.ndim - 1), master.to_local().cpu())
        elif master is not None:
            states[MASTER_WEIGHT] = master
        if states and owns_weight(optimizer, place):
            on_device = [key for key, value in states.items() if isinstance(value, Tensor) and value.device.type != "cpu"]
            values = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in states.items()}
            found["states"][name] = {"values": values, "on_device": on_device}
    path = Path(folder) / WHOLE_FOLDER
    path.mkdir(parents=True, exist_ok=True)
    torch.save(found, path / f"rank-{dist.get_rank() if dist.is_initialized() else 0}.pt")


def _is_first_copy(model: nn.Module, parameter: Tensor) -> bool:
    """Whether this rank writes for the ranks with equal shards, or, for a weight without shards, for all ranks."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    # the meshes of shards name one copy alone
    copies = copies_group(model)
    return copies is None or copies.rank() == 0


def has_whole_states(folder: str) -> bool:
    """Whether this checkpoint has states from `save_whole_states`."""
    return (Path(folder) / WHOLE_FOLDER).is_dir()


def load_whole_states(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Reads what `save_whole_states` wrote, on any number of ranks, for sharded or whole parameters.

    Raises ValueError for an optimizer that updates shards, or one of another class than the one that was saved.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not has_whole_steps(optimizer) and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ValueError(
            f"{folder} holds the states of an optimizer that updates whole weights, but {type(optimizer).__name__} updates "
            f"shards; resume with the optimizer of its run, or start from its weights with a fresh optimizer"
        )
    files = sorted((Path(folder) / WHOLE_FOLDER).glob("rank-*.pt"))
    saved = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
    if (kind := saved[0].get("class")) != type(optimizer).__name__:
        raise ValueError(
            f"{folder} holds the states of {kind}, but this run has {type(optimizer).__name__}; resume with the optimizer of its "
            f"run, or start from its weights with a fresh optimizer"
        )
    states = {name: value for each in saved for name, value in each["states"].items()}
    masters: dict[str, dict[int, Tensor]] = {}
    for each in saved:
        for name, (number, shard) in each["masters"].items():
            masters.setdefault(name, {})[number] = shard
    groups = saved[0]["groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder} has {len(groups)} groups of weights, but {type(optimizer).__name__} has {len(optimizer.param_groups)}; "
            f"resume with the optimizer of its run"
        )
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)
    for place, parameter in enumerate(parameters):
        name = names[id(parameter)]
        found: dict[str, Any] = {}
        if name in states and (not has_whole_steps(optimizer) or owns_weight(optimizer, place)):
            for key, value in states[name]["values"].items():
                device = parameter.device if key in states[name]["on_device"] else torch.device("cpu")
                found[key] = _placed(optimizer, value, device) if isinstance(value, Tensor) else value
        if name in masters:
            whole = torch.cat([shard for _, shard in sorted(masters[name].items())]).view(parameter.shape)
            found[MASTER_WEIGHT] = _placed(optimizer, sharded_like(parameter, whole), parameter.device)
        if found:
            optimizer.state[parameter] = found


def _placed(optimizer: torch.optim.Optimizer, value: Tensor, device: torch.device) -> Tensor:
    """A copy of a state on the host if the optimizer's states lie there, or else on `device`."""
    return host_state(optimizer, value) if has_host_states(optimizer) else value.to(device, copy=True)


def load_whole_optimizer(optimizer: torch.optim.Optimizer, file: str) -> None:
    """Reads the `optimizer.pt` of a run with replicated parameters through host memory; every rank keeps its own states."""
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    check_sizes(saved["param_groups"], optimizer.param_groups)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies: dict[Tensor, Tensor] = {}
    if is_whole := has_whole_steps(optimizer):
        others = {index: saved["state"].pop(index) for index in list(saved["state"]) if not owns_weight(optimizer, index)}
        kept = copied_dtypes(has_master_weights(optimizer), has_host_states(optimizer))
        # fp32 copies are shards, of which every rank has one, and set below, since optimizers read no states without moments
        copies = {
            parameters[index]: sharded_like(parameters[index], states[MASTER_WEIGHT]).clone()
            for index, states in others.items()
            if MASTER_WEIGHT in states and parameters[index].dtype in kept
        }
    for index, states in saved["state"].items():
        parameter = parameters[index]
        if is_whole:
            if isinstance(master := states.get(MASTER_WEIGHT), Tensor):
                states[MASTER_WEIGHT] = sharded_like(parameter, master)
            continue
        for name, value in states.items():
            if is_low_bit(value):
                states[name] = own_moment(optimizer, name, value, parameter)
            elif isinstance(value, Tensor) and value.shape == parameter.shape:
                states[name] = host_state(optimizer, sharded_like(parameter, value))
    optimizer.load_state_dict(saved)
    for weight, copy in copies.items():
        optimizer.state[weight] = {MASTER_WEIGHT: copy}


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
        local, mesh = target.to_local(), target.device_mesh
        # rows are dealt out as by torch.chunk
        rows = -(-target.shape[0] // mesh.size())
        first = min(mesh.get_local_rank() * rows, target.shape[0])
        if len(local):
            local.copy_(found[first : first + len(local)])
    else:
        target.copy_(sharded_like(target, found[...]))


def sharded_like(target: Tensor, whole: Tensor) -> Tensor:
    """Shards `whole` like `target`, on its device; nothing is sent, since every rank has the whole tensor already."""
    if not isinstance(target, DTensor):
        return whole
    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)

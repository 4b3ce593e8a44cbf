"""States of sharded and staged optimizers: one safetensors file for each rank, and an index in JSON of their contents.

    optimizer/index.json           {"kind", "optimizer", "weights": {weight: {state: value}}, "groups": [{"weights", "settings"}]}
    optimizer/rank-3.safetensors   tensors "WEIGHT/STATE"

kind: "shards" if every rank updates its shards of weights, "whole" if each weight is updated by one rank (`whole_weights.py`). A
value is a number, a text or a small tensor, or a tensor in files: {"dtype", "shape", "pieces": [[file, first row, last row + 1,
bits], ...]}. Moments of few bits are codes, scales and the table of what codes stand for ("WEIGHT/STATE/codes" and so on).

One of the ranks with equal pieces writes them. A reader takes the rows that it needs, at any number of ranks and stages.
`Trainer` writes and reads the states of replicated weights itself (`optimizer.pt`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_longctx.hf.checkpoints.manifest import dealt, read_json
from hf_longctx.hf.checkpoints.trained_weights import check_sizes
from hf_longctx.hf.checkpoints.values import from_json, tensor_json, to_json
from hf_longctx.hf.checkpoints.weights import sharded_like
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.runtime.parameters.gradients import first_row, local_shard
from hf_longctx.runtime.parameters.low_bit import (
    MOMENTS,
    PackedMoment,
    Part,
    has_low_bit_moments,
    is_low_bit,
    own_moment,
)
from hf_longctx.runtime.parameters.master_weights import (
    MASTER_WEIGHT,
    copied_dtypes,
    has_host_states,
    has_master_weights,
    host_state,
    placed_like,
)
from hf_longctx.runtime.parameters.whole_weights import has_whole_steps, owns_weight

OPTIMIZER_FOLDER = "optimizer"
STATES_INDEX = "index.json"
# names of dtypes in safetensors files
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
# a tensor's rows in one file: the file's name, the first row, the last one + 1, and their bits if they are few, else 0
Piece = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in files. on_device: whether it did not lie in host memory."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    on_device: bool = True


@dataclass(frozen=True)
class SavedStates:
    """The optimizer states of a checkpoint."""

    # their place, for messages
    place: Path
    # see the head of this file
    kind: str
    # name of the optimizer's class, if known
    optimizer: str
    # values by weight and state, with `Stored` for tensors in files
    weights: Mapping[str, Mapping[str, Any]]
    # settings of the group of a weight, by its name
    settings_of: Callable[[str], dict[str, Any]]
    # settings of all groups
    groups: list[dict[str, Any]]
    # reads rows `low` to `high` of a piece of the tensor of a name, or the whole piece if it has few bits
    read: Callable[[str, Piece, int, int], Part]

    @property
    def files(self) -> set[str]:
        """Names of all files with tensors."""
        found: set[str] = set()
        waiting: list[Any] = list(self.weights.values())
        while waiting:
            value = waiting.pop()
            if isinstance(value, Stored):
                found |= {file for file, *_ in value.pieces}
            elif isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list | tuple):
                waiting += value
        return found


def save_states(
    model: nn.Module,
    optimizer: Optimizer,
    folder: str,
    control: dist.ProcessGroup | None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes this rank's share of the optimizer's states to a file, and on the first rank the index. Collective over all ranks.

    names: name in the model -> name in the checkpoint, for all weights whose states are saved; by default all, as named.
    """
    own = _OwnStates()
    for group, weights in _named_groups(model, optimizer, names):
        settings = {name: own.described(value, "") for name, value in group.items() if name not in ("params", "param_names")}
        own.groups.append((list(weights), settings))
        for name, weight in weights.items():
            states = optimizer.state.get(weight, {})
            own.weights[name] = {key: own.described(value, f"{name}/{key}") for key, value in states.items()}
    rank = dist.get_rank() if control is not None else 0
    everyone = gather_objects((rank, own.weights, own.groups, own.pieces), control)
    sizes: dict[tuple[str, int], int] = {}
    holders: dict[tuple[str, int], list[int]] = {}
    for other, _, _, pieces in everyone:
        for name, (first, _, _, num_bytes) in pieces.items():
            sizes[name, first] = num_bytes
            holders.setdefault((name, first), []).append(other)
    shares = dealt(sizes, holders)
    target = Path(folder) / OPTIMIZER_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    if share := {name for name, _ in shares.get(rank, [])}:
        _write_tensors(target / _file_of(rank), {name: own.tensors[name] for name in own.tensors if name in share})
    if rank == 0:
        writers = {key: _file_of(writer) for writer, keys in shares.items() for key in keys}
        kind = "whole" if has_whole_steps(optimizer) else "shards"
        index = {"kind": kind, "optimizer": type(optimizer).__name__, **_joined(everyone, writers)}
        with _naming(target / STATES_INDEX) as file:
            file.write_text(json.dumps(index) + "\n")


def _named_groups(
    model: nn.Module, optimizer: Optimizer, names: Mapping[str, str] | None
) -> Iterator[tuple[dict[str, Any], dict[str, nn.Parameter]]]:
    """The groups of the optimizer, and the weights of each by their name in the checkpoint."""
    known = {id(weight): name for name, weight in model.named_parameters()}
    for group in optimizer.param_groups:
        weights = {known[id(weight)]: weight for weight in group["params"]}
        yield (
            group,
            {
                name if names is None else names[name]: weight
                for name, weight in weights.items()
                if names is None or name in names
            },
        )


def _file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


@dataclass
class _OwnStates:
    """This rank's states in the form of the index, and its tensors by their name in files.

    pieces: first row, last row + 1, bits and bytes of each tensor.
    """

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    def described(self, value: Any, name: str) -> Any:
        """The value as the index holds it; keeps a tensor that goes to a file of this name, which settings have not."""
        return to_json(value, name, lambda tensor, inner: self._tensor(tensor, inner if name else ""), _unknown)

    def _tensor(self, value: Tensor, name: str) -> dict[str, Any]:
        own: Any = local_shard(value.detach())
        shape, is_packed = list(value.shape), is_low_bit(own)
        found = {"dtype": str(value.dtype).removeprefix("torch."), "shape": shape, "on_device": own.device.type != "cpu"}
        if not name or (value.numel() <= 1 and not isinstance(value, DTensor) and not found["on_device"]):
            return {**found, "values": tensor_json(own)["values"]}
        if own.numel():
            first, packed = first_row(value), PackedMoment.of(own) if is_packed else None
            num_bytes = own.nbytes if packed is None else packed.codes.nbytes
            self.tensors[name] = own
            num_rows = own.shape[0] if own.dim() else 1
            self.pieces[name] = (first, first + num_rows, packed.bits if packed else 0, num_bytes)
        return {**found, "pieces": name}


def _joined(everyone: list[Any], writers: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Weights and groups of the index, of what all ranks have."""
    weights: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    pieces: dict[str, dict[int, Any]] = {}
    for _, own_weights, own_groups, own_pieces in everyone:
        for name, states in own_weights.items():
            weights[name] = {**states, **weights.get(name, {})}
        for place, (names, settings) in enumerate(own_groups):
            group = groups.setdefault((place, json.dumps(settings)), {"weights": {}, "settings": settings})
            group["weights"].update(dict.fromkeys(names))
        for name, (first, stop, bits, _) in own_pieces.items():
            pieces.setdefault(name, {})[first] = [writers[name, first], first, stop, bits]

    def located(value: Any) -> Any:
        if isinstance(value, list):
            return [located(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "pieces" in value:
            return {**value, "pieces": [piece for _, piece in sorted(pieces.get(value["pieces"], {}).items())]}
        return {key: located(each) for key, each in value.items()}

    return {
        "weights": {name: {key: located(value) for key, value in states.items()} for name, states in weights.items()},
        "groups": [{**group, "weights": list(group["weights"])} for group in groups.values()],
    }


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file tensor by tensor, while `save_file` would hold all of them in host memory twice."""
    flat: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if is_low_bit(value):
            packed = PackedMoment.of(value)
            parts = {"codes": packed.codes, "scale": packed.scale, "qmap": packed.qmap}
            flat.update((f"{name}/{part}", each) for part, each in parts.items() if each is not None)
        else:
            flat[name] = value
    # the widest first, so that each begins at a multiple of its width
    order = sorted(flat, key=lambda name: -flat[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + flat[name].nbytes
        header[name] = {"dtype": _DTYPES[flat[name].dtype], "shape": list(flat[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _naming(path) as named, named.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(flat[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


@contextmanager
def _naming(path: Path) -> Iterator[Path]:
    """Context in which errors of the operating system name the file; one in the middle of a file does not."""
    try:
        yield path
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def has_states(folder: str | Path) -> bool:
    """Whether a checkpoint has states from `save_states`."""
    return (Path(folder) / OPTIMIZER_FOLDER).is_dir()


def saved_states(folder: str | Path) -> SavedStates:
    """The states from `save_states` in a checkpoint; raises ValueError if their index cannot be read."""
    place = Path(folder) / OPTIMIZER_FOLDER
    try:
        index = read_json(place / STATES_INDEX)
    except (OSError, ValueError) as error:
        raise ValueError(f"{place / STATES_INDEX} cannot be read ({type(error).__name__}: {error})") from error
    try:
        weights = {
            name: {key: _value(value, f"{name}/{key}") for key, value in states.items()}
            for name, states in index["weights"].items()
        }
        group_of = {name: group["settings"] for group in index["groups"] for name in group["weights"]}
        groups = [{name: _value(value, name) for name, value in group["settings"].items()} for group in index["groups"]]
        kind, optimizer = index["kind"], index["optimizer"]
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{place / STATES_INDEX} is no index of optimizer states ({type(error).__name__}: {error})") from error
    files: dict[str, Any] = {}

    def read(name: str, piece: Piece, low: int, high: int) -> Part:
        file, first, stop, bits = piece
        if file not in files:
            files[file] = safe_open(place / file, framework="pt", device="cpu")
        if not bits:
            found = files[file].get_slice(name)
            return low, found[low - first : high - first] if found.get_shape() else files[file].get_tensor(name)
        codes, scale = (files[file].get_tensor(f"{name}/{part}") for part in ("codes", "scale"))
        qmap = None if codes.is_floating_point() else files[file].get_tensor(f"{name}/qmap")
        weight, _, key = name.rpartition("/")
        return first, PackedMoment(codes, scale, qmap, (stop - first, *weights[weight][key].shape[1:]))

    def settings_of(name: str) -> dict[str, Any]:
        if name not in group_of:
            raise ValueError(f"it has no states of {name}; resume with the model and the optimizer of its run")
        return {key: _value(value, key) for key, value in group_of[name].items()}

    return SavedStates(place, kind, optimizer, weights, settings_of, groups, read)


def _unknown(value: Any, name: str) -> dict[str, str]:
    return {"unknown": f"{type(value).__module__}.{type(value).__qualname__}"}


def _value(found: Any, name: str) -> Any:
    """A value of the index; raises ValueError for one of a class that it does not hold, or for pieces outside its folder."""
    return from_json(found, lambda other: _stored(other, name))


def _stored(found: Mapping[str, Any], name: str) -> Stored:
    """A tensor in files."""
    if "pieces" not in found:
        raise ValueError(f"the optimizer's setting {name} is not read, since it is an object of {found['unknown']}")
    pieces = tuple((str(file), int(first), int(stop), int(bits)) for file, first, stop, bits in found["pieces"])
    if foreign := [file for file, *_ in pieces if Path(file).name != file]:
        raise ValueError(f"{STATES_INDEX} sends the reader to {foreign[0]!r}, which is no file of its folder")
    return Stored(tuple(found["shape"]), pieces, bool(found["on_device"]))


def load_states(
    model: nn.Module,
    optimizer: Optimizer,
    saved: SavedStates,
    control: dist.ProcessGroup | None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Reads the rows of saved states that belong to this rank's weights, whole ones or shards. Collective over all ranks.

    names: as in `save_states`. Master weights that the checkpoint lacks are made from the weights. Raises ValueError on every
    rank if one cannot read its states, and for an optimizer that updates shards of weights where the other updated whole ones,
    or the other way round, or that is of another class than one that updated whole weights.
    """
    is_whole = saved.kind == "whole"
    if problem := _kind_problem(optimizer, saved):
        raise ValueError(problem)
    rank, error = dist.get_rank() if control is not None else 0, ""
    states: dict[int, dict[str, Any]] = {}
    settings: list[dict[str, Any]] = []
    try:
        place = 0
        for number, (group, weights) in enumerate(_named_groups(model, optimizer, names)):
            found = saved.groups[number] if is_whole else saved.settings_of(next(iter(weights))) if weights else group
            settings.append({key: _like(group.get(key), value) for key, value in found.items() if key != "params"})
            for name, weight in weights.items():
                own = saved.weights.get(name, {})
                if is_whole and has_whole_steps(optimizer) and not owns_weight(optimizer, place):
                    own = {key: value for key, value in own.items() if key == MASTER_WEIGHT}
                states[place] = {
                    key: _restored(optimizer, weight, key, f"{name}/{key}", value, saved) for key, value in own.items()
                }
                place += 1
    except ValueError as found_here:
        error = str(found_here)
    except Exception as found_here:
        error = f"rank {rank}: {found_here if isinstance(found_here, pickle.UnpicklingError) else repr(found_here)}"
    if errors := list(dict.fromkeys(each for each in gather_objects(error, control) if each)):
        raise ValueError(f"{saved.place} cannot be read: {'; '.join(errors)}")
    _set_states(optimizer, states, settings, is_whole)


def _set_states(optimizer: Optimizer, states: dict[int, dict[str, Any]], settings: list[dict[str, Any]], is_whole: bool) -> None:
    """Gives the optimizer states by the place of their weight, and settings by group."""
    states = {place: each for place, each in states.items() if each}
    if not is_whole:
        places = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
        groups = [
            {**each, "params": [next(places) for _ in group["params"]]}
            for group, each in zip(optimizer.param_groups, settings, strict=True)
        ]
        optimizer.load_state_dict({"state": states, "param_groups": groups})
        return
    # torch would give states of other shapes the dtype of their weight
    for group, each in zip(optimizer.param_groups, settings, strict=True):
        group.update(each)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for place, found in states.items():
        optimizer.state[weights[place]] = found


def _like(held: Any, value: Any) -> Any:
    """A setting on the device of the one that it replaces."""
    return value.to(held.device) if isinstance(held, Tensor) and isinstance(value, Tensor) else value


def _kind_problem(optimizer: Optimizer, saved: SavedStates) -> str:
    """Returns why an optimizer cannot continue with the states of another; empty if it can."""
    folder, name = saved.place.parent, type(optimizer).__name__
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if saved.kind != "whole":
        if not has_whole_steps(optimizer):
            return ""
        return (
            f"{folder} holds shards of an optimizer's states, but {name} updates whole weights; resume with the optimizer of its "
            f"run, or start from its weights with a fresh optimizer"
        )
    if not has_whole_steps(optimizer) and any(isinstance(weight, DTensor) for weight in weights):
        return (
            f"{folder} holds the states of an optimizer that updates whole weights, but {name} updates shards; resume with the "
            f"optimizer of its run, or start from its weights with a fresh optimizer"
        )
    if saved.optimizer != name:
        return (
            f"{folder} holds the states of {saved.optimizer}, but this run has {name}; resume with the optimizer of its run, "
            f"or start from its weights with a fresh optimizer"
        )
    if len(saved.groups) != len(optimizer.param_groups):
        return (
            f"{folder} has {len(saved.groups)} groups of weights, but {name} has {len(optimizer.param_groups)}; resume with the "
            f"optimizer of its run"
        )
    return ""


@torch.no_grad()
def _restored(optimizer: Optimizer, weight: Tensor, key: str, name: str, value: Any, saved: SavedStates) -> Any:
    """A value as this rank's optimizer keeps it for `weight`; tensors like a sharded weight become shards."""
    if isinstance(value, list | tuple):
        return type(value)(_restored(optimizer, weight, key, f"{name}/{place}", each, saved) for place, each in enumerate(value))
    if isinstance(value, dict):
        return {each: _restored(optimizer, weight, key, f"{name}/{each}", found, saved) for each, found in value.items()}
    if not isinstance(value, Stored):
        return value
    is_like, is_whole = value.shape == tuple(weight.shape), saved.kind == "whole"
    is_shard = is_like and isinstance(weight, DTensor) and (not is_whole or key == MASTER_WEIGHT)
    own = local_shard(weight.detach())
    first, num_rows = (first_row(weight), len(own)) if is_shard else (0, value.shape[0] if value.shape else 1)
    cuts = [(max(first, each[1]), min(first + num_rows, each[2]), each) for each in value.pieces]
    parts = [saved.read(name, piece, low, high) for low, high, piece in cuts if low < high]
    if sum(max(0, high - low) for low, high, _ in cuts) != num_rows:
        raise ValueError(f"no file has all rows of {name}; resume from a checkpoint that is whole")
    plain = [(low, part) for low, part in parts if isinstance(part, Tensor)]
    if is_like and (len(plain) < len(parts) or (has_low_bit_moments(optimizer) and key in MOMENTS)):
        return _moment(optimizer, key, parts, weight, first)
    # torch itself takes numbers, such as counts of steps, to where they belong
    is_on_host = has_host_states(optimizer) or not (value.on_device if is_whole else value.shape)
    device = torch.device("cpu") if is_on_host else weight.device
    if tuple(own.shape) == (num_rows, *value.shape[1:]):
        made = torch.empty_like(own, dtype=plain[0][1].dtype if plain else None, device=device)
    else:
        made = torch.empty(value.shape, dtype=plain[0][1].dtype, device=device)
    for low, part in plain:
        rows = made[low - first : low - first + len(part)] if made.dim() else made
        rows.copy_(part)
    return placed_like(weight, made) if is_shard else made


def _moment(optimizer: Optimizer, key: str, parts: list[Part], weight: Tensor, first: int) -> Tensor:
    """A moment in the optimizer's own bits; raises ValueError for one of other bits that are few."""
    found = own_moment(optimizer, key, parts, weight, first)
    if is_low_bit(own := local_shard(found)):
        bits = PackedMoment.of(own).bits
        if any(isinstance(part, PackedMoment) and part.bits != bits for _, part in parts):
            raise ValueError(
                "its moments have another number of bits; set optim as it was in its run, or start a new run from its weights"
            )
    return found


def load_whole_optimizer(optimizer: Optimizer, file: str) -> None:
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
                states[name] = own_moment(optimizer, name, [(0, PackedMoment.of(value))], parameter, first_row(parameter))
            elif isinstance(value, Tensor) and value.shape == parameter.shape:
                states[name] = host_state(optimizer, sharded_like(parameter, value))
    optimizer.load_state_dict(saved)
    for weight, copy in copies.items():
        optimizer.state[weight] = {MASTER_WEIGHT: copy}

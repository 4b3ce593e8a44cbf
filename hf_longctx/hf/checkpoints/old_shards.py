"""Reads states of optimizers and of data streams as releases before 0.2.0 wrote them, without running code in them.

Shards of torch.distributed.checkpoint (`optimizer_shards`) have a table that plain pickle would read, calling any function that
the file names. So its names are checked first, also in `choice.py`, so that all ranks refuse a checkpoint together. The shards
themselves, which may have the size of the model, states of whole weights (`optimizer_whole`) and states of streams go through
torch's restricted reader, which refuses objects that could run code.

Nothing else unpickles, beside the readers of files that `Trainer` writes with torch (`optimizer.pt`, `scheduler.pt`). The next
checkpoint of a run has the new files.
"""

from __future__ import annotations

import base64
import io
import logging
import pickle
import pickletools
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hf_longctx.hf.checkpoints.optimizer_states import Piece, SavedStates, Stored
from hf_longctx.hf.ranks.launch import on_first_rank
from hf_longctx.runtime.parameters.low_bit import PackedMoment, Part, is_low_bit, why_no_torchao
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)

# shards of states, and states of an optimizer that updates whole weights, one file for each rank
SHARDS_FOLDER = "optimizer_shards"
WHOLE_FOLDER = "optimizer_whole"
METADATA_FILE = ".metadata"
# beginning of a stream's state that is no JSON
OLD_STREAM_MARK = "torch:"
# beginnings of the flat names of states and of settings
_STATES, _GROUPS = "state.", "param_groups."
# module -> names that torch writes into the table of shards, beside the data types (`torch.float32` and so on)
_ALLOWED = {
    # Python 3.11.2 writes members of enums as calls of it; `_member` takes its place
    "builtins": {"getattr"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # the folder's own name, which Python 3.13 finds in `pathlib._local`
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
# most bytes of a pickle that are read; the table of a 70B model on 64 ranks has some 20 MB
_MOST_BYTES = 2**30
# deepest nesting of a table of shards; torch writes 12 levels, and the time to hash a key may double with each level
_MOST_LEVELS = 24
# opcodes that change the object below their operands and leave it on the stack
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_READS = {"GET", "BINGET", "LONG_BINGET"}
_WRITES = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_OUTSIDE = {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER"}
_STRINGS = (pickletools.pyunicode, pickletools.pystring, pickletools.pybytes_or_str)


class UnsafePickle(ValueError):
    """A pickle that names something it may not call, or that is damaged or beyond the limits; nothing of it has been run."""


class _Item:
    """Stands for an object while a pickle is scanned: how deeply it is nested, and its text if it is a string."""

    __slots__ = ("levels", "text")

    def __init__(self, levels: int, text: str | None = None) -> None:
        self.levels, self.text = levels, text


_MARK = _Item(0)


class _Effect:
    """Effect of an opcode on the stack: takes all objects above the mark (`to_mark`) and `num_taken` more, leaves `num_left`."""

    __slots__ = ("is_string", "num_left", "num_taken", "to_mark")

    def __init__(self, opcode: pickletools.OpcodeInfo) -> None:
        before = opcode.stack_before
        self.to_mark = pickletools.markobject in before
        self.num_taken = before.index(pickletools.markobject) if self.to_mark else len(before)
        self.num_left = len(opcode.stack_after)
        self.is_string = self.num_left == 1 and opcode.stack_after[0] in _STRINGS


_EFFECTS = {opcode.name: _Effect(opcode) for opcode in pickletools.opcodes}


def pickled_globals(content: bytes) -> set[tuple[str, str]]:
    """Module and name of everything a pickle would import, found by reading its opcodes; nothing is imported or called.

    Raises UnsafePickle for a pickle that is cut short, nested too deeply, or whose names cannot be told without running it.
    """
    found: set[tuple[str, str]] = set()
    stack: list[_Item] = []
    memo: dict[int, _Item] = {}
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            name = opcode.name
            if name == "MARK":
                stack.append(_MARK)
            elif name in _READS:
                stack.append(memo[int(argument or 0)])
            elif name in _WRITES:
                index = len(memo) if name == "MEMOIZE" else int(argument or 0)
                # Python reserves room up to the highest index
                if index > number:
                    raise UnsafePickle("it numbers its objects beyond what it has")
                memo[index] = _whole(stack[-1])
            else:
                _step(name, argument, stack, found)
    except UnsafePickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UnsafePickle(f"it is no whole pickle ({type(error).__name__})") from None
    return found


def _step(name: str, argument: Any, stack: list[_Item], found: set[tuple[str, str]]) -> None:
    """Applies an opcode to the stack, and notes the names that it imports."""
    if name in _OUTSIDE:
        raise UnsafePickle(f"it refers to objects outside the file ({name})")
    effect = _EFFECTS[name]
    taken: list[_Item] = []
    if effect.to_mark:
        while (item := stack.pop()) is not _MARK:
            taken.append(item)
    for _ in range(effect.num_taken):
        taken.append(stack.pop() if name == "POP" else _whole(stack.pop()))
    if name in ("GLOBAL", "INST"):
        module, _, attribute = argument.partition(" ")
        found.add((module, attribute))
    elif name == "STACK_GLOBAL":
        if taken[0].text is None or taken[1].text is None:
            raise UnsafePickle("it makes up the name of what it imports while it is read")
        found.add((taken[1].text, taken[0].text))
    if name in _CHANGES:
        changed = taken.pop()
        changed.levels = max(changed.levels, 1 + max((item.levels for item in taken), default=0))
        stack.append(changed)
    elif effect.num_left:
        levels = 1 + max([item.levels for item in taken]) if taken else 1
        stack += [_Item(levels, argument if effect.is_string else None)] * effect.num_left
    if stack and stack[-1].levels > _MOST_LEVELS:
        raise UnsafePickle(f"it is nested more than {_MOST_LEVELS} levels deep")


def _whole(item: _Item) -> _Item:
    if item is _MARK:
        raise UnsafePickle("it is no whole pickle (a mark in the place of an object)")
    return item


def metadata_fault(file: Path) -> str:
    """Returns why the table of optimizer shards must not be read; empty if it may be, or if it cannot be opened."""
    try:
        if (num_bytes := file.stat().st_size) > _MOST_BYTES:
            return f"it has {num_bytes} bytes; at most {_MOST_BYTES} are read"
        names = pickled_globals(file.read_bytes())
    except UnsafePickle as error:
        return str(error)
    except OSError:
        return ""
    return named_foreign([f"{module}.{name}" for module, name in names if not _is_allowed(module, name)])


def read_metadata(file: Path) -> Metadata:
    """The table of optimizer shards; raises UnsafePickle before anything but torch's own classes is called."""
    with file.open("rb") as opened:
        try:
            metadata = _Unpickler(opened).load()
        except (OSError, UnsafePickle):
            raise
        except Exception as error:
            raise UnsafePickle(f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UnsafePickle("it is no table of shards")
    for stored in metadata.storage_data.values():
        name = getattr(stored, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsafePickle(f"it sends the reader to {name!r}, which is no file of its folder")
    return metadata


def named_foreign(foreign: list[str]) -> str:
    """The fault of a pickle that names these; empty if it names none."""
    return f"it names {', '.join(sorted(foreign))}, which a full reader would import and may call" if foreign else ""


def _is_allowed(module: str, name: str) -> bool:
    return name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))


class _Unpickler(pickle.Unpickler):
    """Finds only names in `_ALLOWED`, in case the scan has missed one."""

    def find_class(self, module: str, name: str) -> Any:
        if not _is_allowed(module, name):
            raise UnsafePickle(named_foreign([f"{module}.{name}"]))
        return _member if module == "builtins" else super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """The member of an enum by its name; raises UnsafePickle for the attribute of anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UnsafePickle(f"it reads the attribute {name!r} of an object that is no enum")
    return kind[name]


def has_old_states(folder: str | Path) -> bool:
    """Whether a checkpoint has optimizer states of an earlier release."""
    return any((Path(folder) / name).is_dir() for name in (SHARDS_FOLDER, WHOLE_FOLDER))


def old_states(folder: str | Path) -> SavedStates:
    """The states in a checkpoint that `has_old_states`; raises ValueError if they cannot be read or would run code."""
    is_whole = (Path(folder) / WHOLE_FOLDER).is_dir()
    place = Path(folder) / (WHOLE_FOLDER if is_whole else SHARDS_FOLDER)
    logger.warning(
        "%s was written by an earlier release: it is converted while it is read; new checkpoints have safetensors", place
    )
    return _whole_states(place) if is_whole else _shards(place)


def old_stream_state(text: str) -> Any:
    """The state of a data stream in a text that begins with `OLD_STREAM_MARK`; raises an error if it could run code."""
    return _loaded(io.BytesIO(base64.b64decode(text.removeprefix(OLD_STREAM_MARK))))


def _shards(place: Path) -> SavedStates:
    """The states in shards of torch.distributed.checkpoint, by their flat names `state.WEIGHT.STATE`."""
    file = place / METADATA_FILE
    try:
        table = read_metadata(file)
    except UnsafePickle as error:
        raise ValueError(f"{file} is not read: {error}; resume from a checkpoint that this package wrote") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({type(error).__name__}: {error})") from None

    infos = {(index.fqn, index.offset[0] if index.offset else 0): info for index, info in table.storage_data.items()}

    def loaded(name: str, first: int) -> Any:
        found = infos[name, first]
        with (place / found.relative_path).open("rb") as opened:
            opened.seek(found.offset)
            return _loaded(io.BytesIO(opened.read(found.length)))

    settings: dict[str, list[str]] = {}
    for name in table.state_dict_metadata:
        if name.startswith(_GROUPS):
            weight, _, setting = name.removeprefix(_GROUPS).rpartition(".")
            settings.setdefault(weight, []).append(setting)
    weights: dict[str, dict[str, Any]] = {}
    for name, stored in table.state_dict_metadata.items():
        if not name.startswith(_STATES):
            continue
        weight, *inner = _split(name.removeprefix(_STATES), settings)
        states = weights.setdefault(weight, {})
        for part in inner[:-1]:
            states = states.setdefault(part, {})
        if isinstance(stored, TensorStorageMetadata):
            chunks = [(each.offsets[0], each.offsets[0] + each.sizes[0]) if each.sizes else (0, 1) for each in stored.chunks]
            pieces = [(infos[name, first].relative_path, first, stop, 0) for first, stop in sorted(chunks) if first < stop]
            states[inner[-1]] = Stored(tuple(stored.size), tuple(pieces))
        else:
            states[inner[-1]] = loaded(name, 0)

    def read(name: str, piece: Piece, low: int, high: int) -> Part:
        _, first, _, _ = piece
        return _rows(loaded(_STATES + name.replace("/", "."), first), first, low, high)

    def settings_of(weight: str) -> dict[str, Any]:
        if weight not in settings:
            raise ValueError(f"it has no states of {weight}; resume with the model and the optimizer of its run")
        found = {}
        for setting in settings[weight]:
            try:
                found[setting] = loaded(f"{_GROUPS}{weight}.{setting}", 0)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"the optimizer's setting {_GROUPS}{weight}.{setting} is not read, since that could run code: {error}"
                ) from None
        return found

    return SavedStates(place, "shards", "", weights, settings_of, [], read)


def _split(name: str, weights: Mapping[str, Any]) -> list[str]:
    """The longest name of a weight with which a flat name begins, and the parts of the rest."""
    weight, inner = name, list[str]()
    while weight not in weights:
        weight, found, part = weight.rpartition(".")
        if not found:
            raise ValueError(f"it has a state {name} of no weight in its groups")
        inner.insert(0, part)
    return [weight, *inner]


def _whole_states(place: Path) -> SavedStates:
    """The states of an optimizer that updates whole weights, of which each rank wrote those of its own."""
    saved = [_loaded(file) for file in sorted(place.glob("rank-*.pt"))]
    if not saved:
        raise ValueError(f"{place} has no file of any rank; resume from another checkpoint")
    weights: dict[str, dict[str, Any]] = {}
    tensors: dict[tuple[str, int], Tensor] = {}

    def described(value: Any, name: str, on_device: bool) -> Any:
        if isinstance(value, dict):
            return {key: described(each, f"{name}/{key}", False) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(described(each, f"{name}/{number}", False) for number, each in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        tensors[name, 0] = value
        rows = value.shape[0] if value.dim() else 1
        return Stored(tuple(value.shape), (("", 0, rows, 0),) if rows else (), on_device)

    masters: dict[str, dict[int, Tensor]] = {}
    for each in saved:
        for weight, found in each["states"].items():
            weights[weight] = {
                key: described(value, f"{weight}/{key}", key in found["on_device"]) for key, value in found["values"].items()
            }
        for weight, (number, shard) in each["masters"].items():
            masters.setdefault(weight, {})[number] = shard
    for weight, shards in masters.items():
        first, pieces = 0, []
        for _, shard in sorted(shards.items()):
            if len(shard):
                tensors[f"{weight}/{MASTER_WEIGHT}", first] = shard
                pieces.append(("", first, first + len(shard), 0))
                first += len(shard)
        shape = (first, *next(iter(shards.values())).shape[1:])
        weights.setdefault(weight, {})[MASTER_WEIGHT] = Stored(shape, tuple(pieces))

    def read(name: str, piece: Piece, low: int, high: int) -> Part:
        return _rows(tensors[name, piece[1]], piece[1], low, high)

    return SavedStates(place, "whole", saved[0].get("class"), weights, lambda weight: {}, saved[0]["groups"], read)


def _rows(value: Any, first: int, low: int, high: int) -> Part:
    """Rows of a tensor that begins at row `first`; one of few bits as it is."""
    if is_low_bit(value):
        return first, PackedMoment.of(value)
    return low, value[low - first : high - first] if value.dim() else value


def _loaded(file: Any) -> Any:
    """Reads a file by torch's restricted reader; raises pickle.UnpicklingError for contents that could run code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # the package, if it is installed, names its safe classes to torch
        if "torchao" not in str(error) or why_no_torchao():
            raise
        if isinstance(file, io.BytesIO):
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)

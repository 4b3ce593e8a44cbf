"""Reads checkpoint files that torch pickles without ever running code that a file names.

torch.distributed.checkpoint reads the table of optimizer shards (`optimizer_shards/.metadata`), and the settings in the shards,
with plain pickle, which calls any function that the file names. `load_shards` takes its place. `choice.py` looks for such names
before a run resumes (`metadata_fault`, `archive_fault`), so that all ranks refuse a checkpoint together.

Only the contents of shards (`optimizer_shards/*.distcp`), which may have the size of the model, are not looked through before:
torch's restricted reader takes both their tensors and, in `load_shards`, their settings, and refuses what could run code when it
meets it. Nothing of the file has run then, and all ranks end with its name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers.trainer_pt_utils import safe_globals

from hf_longctx.runtime.parameters.block_reads import BlockReads
from hf_longctx.runtime.parameters.low_bit import why_no_torchao

METADATA_FILE = ".metadata"
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
# start of the names of states that have few bits
_OF_TORCHAO = "torchao.optim."
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
    """Does to the stack what an opcode does to it, and notes what the opcode imports."""
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
    """Why the table of optimizer shards must not be read; empty if it may be, or cannot be opened, which others say."""
    try:
        if (num_bytes := file.stat().st_size) > _MOST_BYTES:
            return f"it has {num_bytes} bytes; at most {_MOST_BYTES} are read"
        names = pickled_globals(file.read_bytes())
    except UnsafePickle as error:
        return str(error)
    except OSError:
        return ""
    return _named([f"{module}.{name}" for module, name in names if not _is_allowed(module, name)])


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


def archive_fault(file: Path) -> str:
    """Why torch's restricted reader would refuse a file of `torch.save` as unsafe; empty if it would not."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(each.file_size > _MOST_BYTES for each in archive.infolist() if each.filename.endswith("data.pkl")):
                return f"its list of objects has more than {_MOST_BYTES} bytes"
        with safe_globals():
            foreign = get_unsafe_globals_in_checkpoint(str(file))
            # the package, if it is installed, tells torch which of its classes are safe
            if any(name.startswith(_OF_TORCHAO) for name in foreign) and not why_no_torchao():
                foreign = get_unsafe_globals_in_checkpoint(str(file))
    except OSError:
        return ""
    except Exception as error:
        return f"it is no file of torch.save ({type(error).__name__})"
    return _named(foreign)


def load_shards(states: dict[str, Any], folder: Path, optional: str = "") -> None:
    """Reads optimizer shards into `states`, as torch's `load`, but calls nothing that a file names. Collective over all ranks.

    optional: last part of the names of states that keep their values if the shards lack them; none by default. Raises ValueError
    on every rank if one of them cannot read its share.
    """
    reader = _Reader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata if optional else {}
        wanted = {name: value for name, value in states.items() if not optional or name in saved or not name.endswith(optional)}
        state_dict_loader.load(wanted, storage_reader=reader, planner=_Planner(reader))
        states.update(wanted)
    except CheckpointException as error:
        # torch's class is no Exception, which trainers and their callers do not expect
        failures = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
        if "OptimState" in failures:
            failures = (
                "its moments have another number of bits; set optim as it was in its run, or start a new run from its weights"
            )
        raise ValueError(f"{folder} cannot be read: {failures}") from error


def _named(foreign: list[str]) -> str:
    return f"it names {', '.join(sorted(foreign))}, which a full reader would import and may call" if foreign else ""


def _is_allowed(module: str, name: str) -> bool:
    return name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))


class _Unpickler(pickle.Unpickler):
    """Finds only what `_ALLOWED` lists, should the scan ever have missed a name."""

    def find_class(self, module: str, name: str) -> Any:
        if not _is_allowed(module, name):
            raise UnsafePickle(_named([f"{module}.{name}"]))
        return _member if module == "builtins" else super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """The member of an enum by its name; raises UnsafePickle for the attribute of anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UnsafePickle(f"it reads the attribute {name!r} of an object that is no enum")
    return kind[name]


class _Reader(FileSystemReader):
    """Reads shards with a table that is checked first.

    error: why the table is not read. It is raised by the planner, since torch 2.11 hides errors that are raised here.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.error: Exception | None = None

    def read_metadata(self, *args: Any, **settings: Any) -> Metadata:
        file = Path(self.path) / METADATA_FILE
        try:
            metadata = read_metadata(file)
        except UnsafePickle as error:
            self.error = ValueError(f"{file} is not read: {error}; resume from a checkpoint that this package wrote")
        except Exception as error:
            self.error = error
        if self.error is not None:
            metadata = Metadata({})
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads settings of optimizers, such as learning rates, with torch's restricted reader, and moments of any number of bits."""

    _blocks: BlockReads

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self._reader = reader

    def set_up_planner(self, *args: Any, **settings: Any) -> None:
        if self._reader.error is not None:
            raise self._reader.error
        super().set_up_planner(*args, **settings)
        assert self.metadata is not None
        self._blocks = BlockReads(self.metadata, self.lookup_tensor)

    def create_local_plan(self) -> LoadPlan:
        return self._blocks.widen(super().create_local_plan())

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        scratch = self._blocks.scratch(read_item)
        return super().resolve_tensor(read_item) if scratch is None else scratch

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._blocks.take(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"the optimizer's setting {read_item.dest_index.fqn} is not read, since that could run code: {error}"
            ) from None
        plain = io.BytesIO()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)

"""The manifest of a checkpoint: which files it has, their sizes and checksums, and the run that wrote them.

It is written last, so a folder with a manifest was complete once. `staging.py` writes manifests, `choice.py` compares them with
the files before a run resumes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

MANIFEST_FILE = "longctx_checkpoint.json"
DATA_FILE = "longctx_data.json"
STATE_FILE = "trainer_state.json"
# states of the weights of a whole model, numbered
OPTIMIZER_FILE = "optimizer.pt"
_FORMAT = 1
# bytes that are read at once for a checksum
_BLOCK_BYTES = 2**23

# parts that a resumed run reads -> their files; other files of a checkpoint (tokenizer, model card) are for people and programs
_PARTS = {
    "weights": r"(pytorch_)?model(-new)?(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|"
    r"([^/]+/)?adapter_model\.(safetensors|bin)",
    "optimizer": r"optimizer\.(pt|bin)|optimizer(_shards|_whole)?/.*|scaler\.pt|longctx_trained\.json",
    "scheduler": r"scheduler\.pt",
    "rng": r"rng_state(_\d+)?\.pth",
    "state": re.escape(STATE_FILE),
    "data": re.escape(DATA_FILE),
}


# name of a file, or of a tensor with its first row
Name = TypeVar("Name", str, tuple[str, int])


class DamagedManifest(ValueError):
    """A manifest that is there but cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A run's description of its checkpoint. data: the record of the data before it; None if data is not recorded."""

    step: int
    num_ranks: int
    num_stages: int
    parameters: str
    weights_only: bool
    data: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and checksum of a file."""

    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents and files of a checkpoint; files are named by their path inside the folder."""

    contents: Contents
    files: Mapping[str, FileSum]


def part_of(name: str) -> str | None:
    """The part that a resumed run reads from the file of this name: weights, optimizer, scheduler, rng, state, data, or none."""
    return next((part for part, pattern in _PARTS.items() if re.fullmatch(pattern, name)), None)


def file_sum(path: Path, is_flushed: bool = False) -> FileSum:
    """Reads size and checksum of a file; `is_flushed`: waits until its bytes are on the disk, too."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
        if is_flushed:
            os.fsync(file.fileno())
    return FileSum(num_bytes, digest.hexdigest())


def list_files(folder: Path) -> dict[str, int]:
    """Bytes of all files in a checkpoint's folder, by name; without the manifest and without files that are still written."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {name: size for name, size in sorted(found.items()) if name != MANIFEST_FILE and not name.endswith(".tmp")}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest in one move and waits until it is on the disk."""
    files = {name: [found.num_bytes, found.checksum] for name, found in sorted(manifest.files.items())}
    text = {"format": _FORMAT, **asdict(manifest.contents), "files": files}
    write_json(folder / MANIFEST_FILE, {**text, "checksum": _checksum(text)})
    for inner in {folder, *((folder / name).parent for name in files)}:
        flush_folder(inner)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none. Raises DamagedManifest for one that is not as it was written."""
    try:
        text = read_json(folder / MANIFEST_FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedManifest(f"{MANIFEST_FILE} cannot be read ({type(error).__name__})") from None
    if not isinstance(text, dict) or text.pop("checksum", None) != _checksum(text):
        raise DamagedManifest(f"{MANIFEST_FILE} is damaged: its own checksum does not match")
    unknown = DamagedManifest(f"{MANIFEST_FILE} has a format that this version of hf_longctx does not know")
    if text.pop("format", None) != _FORMAT:
        raise unknown
    try:
        files = {name: FileSum(*found) for name, found in text.pop("files").items()}
        return Manifest(Contents(**text), files)
    except (AttributeError, KeyError, TypeError):
        raise unknown from None


def read_record(folder: Path) -> dict[str, Any] | None:
    """The data record of a checkpoint; None if it has none. Raises ValueError, saying why, for one that cannot be read."""
    try:
        record = read_json(folder / DATA_FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{DATA_FILE} cannot be read ({type(error).__name__})") from None
    if not isinstance(record, dict) or not {"settings", "cursor"} <= set(record) or not isinstance(record["settings"], dict):
        raise ValueError(f"{DATA_FILE} is not a data record of this package")
    return record


def read_json(path: Path) -> Any:
    """The JSON of a file; ValueError for what is none, and for lists inside lists without end."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    """Writes JSON in one move, so that it is never read half-written, and waits until it is on the disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def flush_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where the file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        # some network file systems refuse to flush folders
        pass
    finally:
        os.close(handle)


def dealt(sizes: Mapping[Name, int], seen_by: Mapping[Name, Iterable[int]]) -> dict[int, list[Name]]:
    """Deals files out to the ranks that see them, so that every rank reads about as many bytes."""
    loads: dict[int, int] = {}
    shares: dict[int, list[Name]] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(seen_by[name], key=lambda rank: (loads.get(rank, 0), rank))
        loads[rank] = loads.get(rank, 0) + sizes[name]
        shares.setdefault(rank, []).append(name)
    return shares


def _checksum(text: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(text, sort_keys=True).encode())

"""Keeps the scan of a dataset in a file, so that each machine reads all rows only once per dataset fingerprint.

Called by trainer and callback at start-up. The file lies beside the dataset's own cache files. It is trusted only if its
checksum is right and it was made from the same rows for the same purpose: fingerprint, columns, vocabulary, and the size and
time of every Arrow file must match. Every process reads datasets without files again (those made from lists, or of other
classes), since such datasets have no fingerprint that outlives the process, and they fit into memory anyway.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash
from accelerate import PartialState

from hf_longctx.hf.data.labels.padding import Padding
from hf_longctx.hf.data.labels.task import NEXT_TOKEN, HeadTask
from hf_longctx.hf.data.scan import DatasetScan, scan_dataset

logger = logging.getLogger(__name__)

# version of the file; raise it when a scan finds other problems or lengths than before, or writes them differently
_FORMAT = 6


def scan_on_every_rank(
    sets: Mapping[str, Any], vocab_size: int, show_progress: bool, placeholders: tuple[int, ...] = (), task: HeadTask = NEXT_TOKEN
) -> dict[str, DatasetScan]:
    """Scans the named datasets for every rank: one process per machine reads the rows, the others read the file it wrote.

    Collective over all ranks, on the default process group with its long time-out (`ddp_timeout`): every rank must call this
    equally often, whatever its datasets are. `show_progress`: rank 0 shows a bar if reading takes longer than a second.
    """
    state = PartialState()
    show_progress = show_progress and state.is_main_process
    early = [name for name in sets if state.is_local_main_process or not _files(sets[name])]
    found = {name: cached_scan(sets[name], name, vocab_size, show_progress, placeholders, task) for name in early}
    state.wait_for_everyone()
    scans = {
        name: found[name] if name in found else cached_scan(dataset, name, vocab_size, show_progress, placeholders, task)
        for name, dataset in sets.items()
    }
    # if no file could be written, the other processes have just read the rows: wait for them
    state.wait_for_everyone()
    return scans


def cached_scan(
    dataset: Any,
    name: str,
    vocab_size: int,
    show_progress: bool = False,
    placeholders: tuple[int, ...] = (),
    task: HeadTask = NEXT_TOKEN,
) -> DatasetScan:
    """Returns an earlier scan's result from its file, or scans now and writes that file (if the dataset has files)."""
    files = _files(dataset)
    if not files:
        return scan_dataset(dataset, name, vocab_size, show_progress, placeholders, task)
    made_from = _made_from(dataset, files, name, vocab_size) | {"placeholders": list(placeholders), "task": asdict(task)}
    path = cache_path(dataset, name, vocab_size, placeholders, task)
    scan = _read(path, made_from, name) if path.exists() else None
    if scan is None:
        scan = scan_dataset(dataset, name, vocab_size, show_progress, placeholders, task)
        _write(path, made_from, scan, name)
    return scan


def cache_path(
    dataset: datasets.Dataset,
    name: str,
    vocab_size: int,
    placeholders: tuple[int, ...] = (),
    task: HeadTask = NEXT_TOKEN,
) -> Path:
    """File for the scan of a dataset: beside the dataset's files, or in the datasets cache if their folder is read-only."""
    folder = Path(_files(dataset)[0]).parent
    if not os.access(folder, os.W_OK):
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_longctx"
    made_for = [_FORMAT, name, vocab_size, placeholders, asdict(task), len(dataset), _sorted_columns(dataset)]
    purpose = xxhash.xxh3_64_hexdigest(json.dumps(made_for).encode())
    return folder / f"longctx-{dataset._fingerprint}-{purpose}.index"


def _files(dataset: Any) -> list[str]:
    """Files of an Arrow dataset; empty for a dataset in memory or of another class."""
    return [file["filename"] for file in dataset.cache_files] if isinstance(dataset, datasets.Dataset) else []


def _sorted_columns(dataset: datasets.Dataset) -> list[str]:
    # all columns, not only those that are read: the scan refuses some by their name
    return sorted(dataset.column_names)


def _made_from(dataset: datasets.Dataset, files: list[str], name: str, vocab_size: int) -> dict[str, Any]:
    """Collects everything that a scan depends on, as JSON values."""
    states = [(file, Path(file).stat()) for file in files]
    return {
        "format": _FORMAT,
        "name": name,
        "vocab_size": vocab_size,
        "fingerprint": dataset._fingerprint,
        "columns": _sorted_columns(dataset),
        "dataset_format": dataset.format["type"],
        "num_rows": len(dataset),
        "files": [[file, state.st_size, state.st_mtime_ns] for file, state in states],
    }


def _read(path: Path, made_from: dict[str, Any], name: str) -> DatasetScan | None:
    """Reads a scan from its file; returns None, and logs why, if the file is damaged or was made from something else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        logger.warning("%s: the index in %s cannot be read (%s), so it is built again", name, path, error)
        return None
    header_start = content.find(b"\n") + 1
    checksum = content[:header_start].decode(errors="replace").strip()
    if checksum != xxhash.xxh3_128_hexdigest(memoryview(content)[header_start:]):
        logger.warning("%s: the index in %s is damaged, so it is built again", name, path)
        return None
    try:
        found = _parsed(content, header_start, made_from)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        # its checksum is right, so it was written by another version, or by hand
        logger.warning("%s: the index in %s has another form, so it is built again", name, path)
        return None
    if found is None:
        logger.warning("%s: the index in %s was made from other files, so it is built again", name, path)
    return found


def _parsed(content: bytes, header_start: int, made_from: dict[str, Any]) -> DatasetScan | None:
    """The scan in the bytes of an index file, None if it was made from other files; raises an error for another form."""
    lengths_start = content.index(b"\n", header_start) + 1
    values = json.loads(content[header_start:lengths_start])
    if values["made_from"] != made_from:
        return None
    numbers = np.frombuffer(content, dtype=np.int64, offset=lengths_start).copy()
    counts = [None if count is None else int(count) for count in values["counts"]]
    if sum(count for count in counts if count is not None) != len(numbers) or min((c for c in counts if c), default=1) < 0:
        raise ValueError("counts")
    parts = iter(np.split(numbers, np.cumsum([count for count in counts if count is not None])))
    lengths, documents, first = (None if count is None else next(parts) for count in counts)
    if lengths is None or not isinstance(values["digest"], str) or not isinstance(values["problems"], list):
        raise ValueError("lengths")
    padding = Padding(*map(int, values["padding"]))
    return DatasetScan(lengths, values["digest"], values["problems"], None, documents, first, padding)


def _write(path: Path, made_from: dict[str, Any], scan: DatasetScan, name: str) -> None:
    """Writes checksum, header, and the numbers of rows and documents into one file, which appears complete or not at all."""
    arrays = scan.lengths, scan.documents, scan.first_labels
    values: dict[str, Any] = {"made_from": made_from, "digest": scan.digest, "problems": scan.problems}
    values["padding"] = astuple(scan.padding)
    values["counts"] = [None if array is None else len(array) for array in arrays]
    header = json.dumps(values).encode() + b"\n"
    numbers = [array.data for array in arrays if array is not None]
    checksum = xxhash.xxh3_128(header)
    for lengths in numbers:
        checksum.update(lengths)
    # a plain file, which others may read as the umask says
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(checksum.hexdigest().encode() + b"\n" + header)
            for lengths in numbers:
                file.write(lengths.cast("B"))
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: the index could not be written to %s (%s), so the next run reads all rows again", name, path, error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)

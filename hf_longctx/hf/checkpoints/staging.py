"""Writes a checkpoint into a hidden folder and renames it when all ranks have finished, so no half-written one is ever in view.

The trainer's saves go through `StagedCheckpoint`; `seal` alone writes the manifest of a checkpoint that a stock trainer wrote in
place. `recover` clears up after a run that was killed, `rotate` deletes old checkpoints.
"""

from __future__ import annotations

import logging
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from hf_longctx.hf.checkpoints.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Contents,
    DamagedManifest,
    FileSum,
    Manifest,
    dealt,
    file_sum,
    flush_folder,
    list_files,
    read_manifest,
    write_manifest,
)
from hf_longctx.hf.ranks.agreement import gather_objects

logger = logging.getLogger(__name__)

_TOKEN_FILE = "owner"
# seconds until a network file system shows a rank of another node what rank 0 has just written
_VISIBLE_S = 3.0
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
# hidden folders beside the checkpoints: being written, waiting for the one that takes its place, being deleted
_HIDDEN = re.compile(rf"\.({PREFIX_CHECKPOINT_DIR}-\d+)\.(partial|replaced|deleted)")


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after optimizer step `step`."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for a folder with another name."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else None


class StagedCheckpoint:
    """A checkpoint that is being written to `folder`, and will be in view as `final` when `finish` returns.

    root: the hidden folder that takes the place of the output folder while the trainer saves. Where nodes have separate disks,
    the first rank of every node owns the folder there. All methods but `holding` are collective over all ranks.
    """

    def __init__(self, run_dir: Path, step: int, control: dist.ProcessGroup | None) -> None:
        self.final = run_dir / checkpoint_name(step)
        self.root = run_dir / f".{self.final.name}.partial"
        self.folder = self.root / self.final.name
        self._control, self._rank = control, 0 if control is None else dist.get_rank()
        self._owner = 0
        self._error = ""

    def open(self) -> None:
        """Makes the hidden folder; raises RuntimeError on every rank if that fails on one."""
        token = uuid.uuid4().hex
        if self._rank == 0:
            self._make_root(token)
        token = gather_objects(token, self._control)[0]
        hosts = gather_objects((f"{socket.gethostname()}-{uuid.getnode()}", bool(self._error)), self._control)
        sees = self._error != "" or hosts[0][1] or self._sees(token, hosts[self._rank][0] == hosts[0][0])
        everyone = gather_objects(sees, self._control)
        if not sees:
            own_host = hosts[self._rank][0]
            self._owner = next(rank for rank, (host, _) in enumerate(hosts) if host == own_host and not everyone[rank])
            if self._owner == self._rank:
                self._make_root(token)
        self._raise_together()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Context that keeps an error of this rank until `finish`, so that ranks go through the same collectives until then."""
        try:
            yield
        except (Exception, CheckpointException) as error:
            # torch's error about shards is no Exception, and comes on every rank
            self._error = self._error or _described(self._rank, error)
            logger.debug("held until all ranks have finished", exc_info=True)

    def finish(self, contents: Contents) -> None:
        """Writes the manifest and brings the checkpoint into view; raises RuntimeError on every rank if anything failed on one.

        What was written is then removed, and complete checkpoints are as they were.
        """
        self._raise_together()
        with self.holding():
            seal(self.folder, contents, self._control, self._owner)
        self._raise_together()
        if self._owner == self._rank:
            with self.holding():
                publish(self.folder, self.final)
                shutil.rmtree(self.root, ignore_errors=True)
        self._raise_together(is_removed=False)

    def _make_root(self, token: str) -> None:
        with self.holding():
            if self.root.exists():
                shutil.rmtree(self.root)
            self.folder.mkdir(parents=True)
            (self.root / _TOKEN_FILE).write_text(token)

    def _sees(self, token: str, is_same_host: bool) -> bool:
        """Whether rank 0's hidden folder is this rank's as well; another node may see it a little later."""
        until_s = time.monotonic() + (0.0 if is_same_host else _VISIBLE_S)
        while True:
            try:
                if (self.root / _TOKEN_FILE).read_text() == token:
                    return True
            except OSError:
                pass
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.1)

    def _raise_together(self, is_removed: bool = True) -> None:
        # one rank may write for longer than the control group's time-out, so wait on the default group first
        PartialState().wait_for_everyone()
        errors = [error for error in dict.fromkeys(gather_objects(self._error, self._control)) if error]
        if not errors:
            return
        if is_removed and self._owner == self._rank:
            shutil.rmtree(self.root, ignore_errors=True)
        # nobody may end the run, and with it the owner, before everything is removed
        PartialState().wait_for_everyone()
        left = "nothing is left of this one" if is_removed else "this one is complete, but hidden until the next start"
        raise RuntimeError(
            f"{self.final.name} could not be written to {self.final.parent}; earlier checkpoints are unchanged and {left}. "
            f"Errors: {'; '.join(errors)}. Make room, or make the folder writable, and start again with "
            f"resume_from_checkpoint=True"
        )


def seal(folder: Path, contents: Contents, control: dist.ProcessGroup | None, owner: int = 0) -> None:
    """Writes the manifest over all files of a checkpoint, each checked and flushed to the disk by one of the ranks that see it.

    owner: the rank that writes the manifest of this rank's folder. Collective over all ranks; raises RuntimeError on every rank
    if a file cannot be read on one.
    """
    rank = 0 if control is None else dist.get_rank()
    PartialState().wait_for_everyone()
    seen: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for other, (other_owner, found) in enumerate(gather_objects((owner, list_files(folder)), control)):
        if other_owner == owner:
            for name, size in found.items():
                seen.setdefault(name, []).append(other)
                sizes[name] = max(size, sizes.get(name, 0))
    error, sums = "", {}
    try:
        sums = {name: file_sum(folder / name, is_flushed=True) for name in dealt(sizes, seen).get(rank, [])}
    except OSError as problem:
        error = _described(rank, problem)
    PartialState().wait_for_everyone()
    everyone = gather_objects((owner, sums, error), control)
    if errors := [found for _, _, found in everyone if found]:
        raise RuntimeError("; ".join(errors))
    if rank == owner:
        files: dict[str, FileSum] = {}
        for other_owner, found, _ in everyone:
            if other_owner == owner:
                files.update(found)
        write_manifest(folder, Manifest(contents, files))


def publish(folder: Path, final: Path) -> None:
    """Renames a complete `folder` to `final`; one that has that name already stays until then, under a hidden name."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    folder.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(run_dir: Path) -> list[str]:
    """Finishes or removes what a killed run left in hidden folders; returns a line for each checkpoint it brought back.

    A checkpoint that has its manifest is complete, so only the rename is made up for. For one rank per file system.
    """
    if not run_dir.is_dir():
        return []
    lines = []
    hidden = sorted(path for path in run_dir.iterdir() if _HIDDEN.fullmatch(path.name))
    # "partial" before "replaced": what takes the place of another checkpoint is the newer one
    for path in hidden:
        match = _HIDDEN.fullmatch(path.name)
        assert match
        final, kind = run_dir / match[1], match[2]
        inside = path / match[1] if kind == "partial" else path
        if kind != "deleted" and not is_whole(final) and is_whole(inside):
            publish(inside, final)
            lines.append(f"{final} was complete when an earlier run ended, but not renamed yet; it is in its place now")
        elif kind == "replaced" and not final.exists():
            # it has no manifest, so only its owner can say what it is worth
            path.rename(final)
        shutil.rmtree(path, ignore_errors=True)
    return lines


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has a manifest and every file of it in its size."""
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return False
        return all((folder / name).stat().st_size == found.num_bytes for name, found in manifest.files.items())
    except (DamagedManifest, OSError):
        return False


def rotate(new: Path, save_total_limit: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints beside `new`, which is complete, until `save_total_limit` are left; torn ones first.

    `new` and the best one stay. A checkpoint is hidden before its files are deleted, so none is ever in view half deleted.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    folders = [Path(path) for path in sort_checkpoints(str(new.parent), use_mtime=True)]
    folders = [folder for folder in folders if step_of(folder) is not None]
    kept = {new.absolute(), *([Path(best).absolute()] if best else [])}
    deletable = [folder for folder in folders if folder.absolute() not in kept]
    deletable.sort(key=lambda folder: not _is_torn(folder))
    for folder in deletable[: max(0, len(folders) - max(save_total_limit, len(folders) - len(deletable)))]:
        hidden = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            folder.rename(hidden)
        except OSError as error:
            # the new checkpoint is whole, so an old one that stays is no reason to end the run
            logger.warning("%s could not be deleted: %s", folder, error)
            continue
        shutil.rmtree(hidden, ignore_errors=True)


def _is_torn(folder: Path) -> bool:
    has_manifest = (folder / MANIFEST_FILE).exists()
    return (has_manifest and not is_whole(folder)) or not (folder / STATE_FILE).exists()


def _described(rank: int, error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(_described(number, failure[0]) for number, failure in error.failures.items())
    return f"rank {rank}: {type(error).__name__}: {error}"

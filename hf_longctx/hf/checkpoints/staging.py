"""Writes a checkpoint into a hidden folder and renames it when all ranks have finished, so no half-written one is ever in view.

All saves go through `StagedCheckpoint`. `recover` clears up after a run that was killed, `rotate` deletes old checkpoints.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from hf_longctx.hf.checkpoints.background import MemoryCopy
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
    part_of,
    read_manifest,
    write_manifest,
)
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.ranks.lost_ranks import host_identity

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


class SavingRanks(NamedTuple):
    """The ranks that write a checkpoint; they wait for each other and exchange values over `group`.

    A thread needs its own group, since the main thread uses the others meanwhile.
    """

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank()

    def wait(self) -> None:
        """Waits until every rank is here."""
        if self.group is not None:
            dist.barrier(self.group)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, on every rank, in rank order."""
        return gather_objects(value, self.group)


class StagedCheckpoint:
    """A checkpoint that is being written aside, and will be in view as `final` when `finish` returns.

    The trainer saves into `folder`, whose parent `root` takes the place of the output folder: hidden folders beside `final`, or,
    `in_memory`, this rank's own in host memory, from where `write` takes the files to the hidden ones. Where nodes have separate
    disks, the first rank of every node owns the hidden folder there. All methods but `holding` and `drop` are collective over all
    ranks.
    """

    def __init__(self, run_dir: Path, step: int, control: dist.ProcessGroup | None, in_memory: bool = False) -> None:
        self.final = run_dir / checkpoint_name(step)
        self.root = self._hidden = run_dir / f".{self.final.name}.partial"
        self.folder = self._inside = self.root / self.final.name
        self.in_memory = in_memory
        self._copy: MemoryCopy | None = None
        self._ranks = SavingRanks(control)
        self._owner = 0
        self._error = ""

    def open(self) -> None:
        """Makes the folders; raises RuntimeError on every rank if that fails on one."""
        rank, token = self._ranks.rank, uuid.uuid4().hex
        if rank == 0:
            self._make_hidden(token)
        token = self._ranks.gather(token)[0]
        hosts = self._ranks.gather((host_identity(), bool(self._error)))
        sees = self._error != "" or hosts[0][1] or self._sees(token, hosts[rank][0] == hosts[0][0])
        everyone = self._ranks.gather(sees)
        if not sees:
            own_host = hosts[rank][0]
            self._owner = next(other for other, (host, _) in enumerate(hosts) if host == own_host and not everyone[other])
            if self._owner == rank:
                self._make_hidden(token)
        with self.holding():
            if self.in_memory:
                self._copy = MemoryCopy(self.final.name)
                self.root, self.folder = self._copy.root, self._copy.folder
        self._raise_together()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Context that keeps an error of this rank until `finish`, so that ranks go through the same collectives until then."""
        try:
            yield
        except Exception as error:
            where = f" (in host memory, {self.root})" if self._copy is not None and self.root.exists() else ""
            self._error = self._error or _described(self._ranks.rank, error) + where
            logger.debug("held until all ranks have finished", exc_info=True)

    def hold(self) -> None:
        """Ends what the main thread does for a checkpoint in memory; raises RuntimeError on every rank if it failed on one."""
        with self.holding():
            if self._copy is not None:
                self._copy.hold()
        self._raise_together()

    def write(self, ranks: SavingRanks, join: Callable[[Path], None]) -> None:
        """Writes the files in memory to the hidden folder, where rank 0 then calls `join`; raises as `finish`, which comes next.

        For a thread: from now on the ranks wait for each other over `ranks`.
        """
        self._ranks = ranks
        with self.holding():
            if self._copy is not None:
                self._copy.write(self._inside)
        self._raise_together()
        with self.holding():
            if ranks.rank == 0:
                join(self._inside)

    def drop(self) -> None:
        """Frees the memory of a checkpoint that is not written after all; not collective. Idempotent."""
        if self._copy is not None:
            self._copy.drop()

    def finish(self, contents: Contents) -> None:
        """Writes the manifest and brings the checkpoint into view; raises RuntimeError on every rank if anything failed on one.

        What was written is then removed, and complete checkpoints are as they were.
        """
        self._raise_together()
        with self.holding():
            seal(self._inside, contents, self._ranks, self._owner)
        self._raise_together()
        if self._owner == self._ranks.rank:
            with self.holding():
                publish(self._inside, self.final)
                shutil.rmtree(self._hidden, ignore_errors=True)
        self._raise_together(is_removed=False)

    def _make_hidden(self, token: str) -> None:
        with self.holding():
            if is_whole(self._inside):
                # an earlier save that could not be brought into view; it may be the last complete one
                publish(self._inside, self.final)
            if self._hidden.exists():
                shutil.rmtree(self._hidden)
            self._inside.mkdir(parents=True)
            (self._hidden / _TOKEN_FILE).write_text(token)

    def _sees(self, token: str, is_same_host: bool) -> bool:
        """Whether rank 0's hidden folder is this rank's as well; another node may see it a little later."""
        until_s = time.monotonic() + (0.0 if is_same_host else _VISIBLE_S)
        while True:
            try:
                if (self._hidden / _TOKEN_FILE).read_text() == token:
                    return True
            except OSError:
                pass
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.1)

    def _raise_together(self, is_removed: bool = True) -> None:
        # one rank may write for long
        self._ranks.wait()
        errors = [error for error in dict.fromkeys(self._ranks.gather(self._error)) if error]
        if not errors:
            return
        self.drop()
        if is_removed and self._owner == self._ranks.rank:
            shutil.rmtree(self._hidden, ignore_errors=True)
        # no rank may end the run, and with it the owner, before everything is removed
        self._ranks.wait()
        left = "nothing is left of this one" if is_removed else "this one is complete, but hidden until the next start"
        raise RuntimeError(
            f"{self.final.name} could not be written to {self.final.parent}; earlier checkpoints are unchanged and {left}. "
            f"Errors: {'; '.join(errors)}. Make room, or make the folder writable, and start again with "
            f"resume_from_checkpoint=True"
        )


def seal(folder: Path, contents: Contents, ranks: SavingRanks, owner: int = 0) -> None:
    """Writes the manifest over all files of a checkpoint, each checked and flushed to the disk by one of the ranks that see it.

    owner: the rank that writes the manifest of this rank's folder. Collective over all ranks; raises RuntimeError on every rank
    if a file cannot be read on one.
    """
    ranks.wait()
    error, listed, sums = "", {}, {}
    try:
        listed = list_files(folder)
    except OSError as problem:
        error = _described(ranks.rank, problem)
    seen: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for other, (other_owner, found) in enumerate(ranks.gather((owner, listed))):
        if other_owner == owner:
            for name, size in found.items():
                seen.setdefault(name, []).append(other)
                sizes[name] = max(size, sizes.get(name, 0))
    try:
        sums = {name: file_sum(folder / name, is_flushed=True) for name in dealt(sizes, seen).get(ranks.rank, [])}
    except OSError as problem:
        error = error or _described(ranks.rank, problem)
    ranks.wait()
    everyone = ranks.gather((owner, sums, error))
    if errors := [found for _, _, found in everyone if found]:
        raise RuntimeError("; ".join(errors))
    if ranks.rank == owner:
        files: dict[str, FileSum] = {}
        for other_owner, found, _ in everyone:
            if other_owner == owner:
                files.update(found)
        write_manifest(folder, Manifest(contents, files))


def publish(folder: Path, final: Path) -> None:
    """Renames a complete `folder` to `final`; one that has that name already stays until then, under a hidden name.

    Files in it that no checkpoint wrote, such as those of a user's subclass, move to the new one.
    """
    hidden = {kind: final.with_name(f".{final.name}.{kind}") for kind in ("replaced", "deleted")}
    # a checkpoint that was replaced before may itself take the place of a torn one
    earlier = hidden["deleted" if folder == hidden["replaced"] else "replaced"]
    if final.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        final.rename(earlier)
    folder.rename(final)
    flush_folder(final.parent)
    _fold_in(earlier, final)


def _fold_in(earlier: Path, final: Path) -> None:
    """Moves files that no checkpoint wrote from `earlier` to `final`, which takes its place, and deletes all others.

    A folder without manifest and trainer's state is no checkpoint, so files of it that cannot be kept are named.
    """
    try:
        manifest = read_manifest(earlier)
    except DamagedManifest:
        manifest = None
    is_foreign = manifest is None and not (earlier / STATE_FILE).exists()
    lost = []
    try:
        for name in list_files(earlier):
            is_own = part_of(name) is not None if manifest is None else name in manifest.files
            if is_own or (final / name).exists():
                lost.append(name)
            else:
                (final / name).parent.mkdir(parents=True, exist_ok=True)
                (earlier / name).rename(final / name)
    except OSError as error:
        logger.warning("files of %s could not be moved to %s: %s", earlier, final, error)
        return
    if is_foreign and lost:
        logger.warning("%s had files of these names already, which the checkpoint's own replace: %s", final, ", ".join(lost))
    shutil.rmtree(earlier, ignore_errors=True)


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
        if kind != "deleted" and is_whole(inside) and not is_whole(final):
            if final.exists() and not _is_torn(final):
                # it has no manifest, so only its owner can say which of the two is worth more
                continue
            publish(inside, final)
            lines.append(f"{final} was complete when an earlier run ended, but not renamed yet; it is in its place now")
        elif kind == "replaced" and (not final.exists() or (_is_torn(final) and not _is_torn(path))):
            # it has no manifest, so only its owner can say what it is worth
            publish(path, final)
        elif kind == "replaced":
            _fold_in(path, final)
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
    try:
        folders = [Path(path) for path in sort_checkpoints(str(new.parent), use_mtime=True)]
    except OSError as error:
        # somebody deletes one of them at this moment
        logger.warning("no old checkpoint was deleted after %s: %s", new, error)
        return
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
    return f"rank {rank}: {type(error).__name__}: {error}"

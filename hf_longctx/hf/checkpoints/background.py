"""Writes a checkpoint to the disk while training goes on: a copy of its files in host memory, and a thread that writes them.

Every rank saves by the code that writes any checkpoint, only to a folder in host memory (`/dev/shm`), so the copy holds what that
code would have written. Nothing of the trainer, the model or the user's classes runs in the thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from transformers import TrainerState

from hf_longctx.hf.ranks.heartbeats import WRITER_THREAD

MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "longctx-checkpoint-"
# bytes that are copied at once
_BLOCK_BYTES = 2**23


class MemoryCopy:
    """This rank's part of a checkpoint in host memory; the trainer saves into `folder`, which has the checkpoint's name."""

    def __init__(self, name: str) -> None:
        self.root, self._lock = _make_locked_folder()
        self.folder = self.root / name
        self.folder.mkdir()
        self._files: dict[Path, BinaryIO] = {}

    def hold(self) -> None:
        """Keeps the files that are in the folder, without their names: their memory is free again once the process has ended."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                self._files[path.relative_to(self.folder)] = path.open("r+b", buffering=0)
        self._remove()

    def write(self, folder: Path) -> None:
        """Writes the files to `folder`, and frees the memory of each one that is written."""
        while self._files:
            name = next(iter(self._files))
            with self._files.pop(name) as source:
                try:
                    _write(source, folder / name)
                finally:
                    _free(source)

    def drop(self) -> None:
        """Frees the memory. Idempotent."""
        while self._files:
            with self._files.popitem()[1] as source:
                _free(source)
        self._remove()

    def _remove(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.root, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


class BackgroundSave:
    """The thread that does `work` for the checkpoint of one step. state: the trainer's state at that step."""

    def __init__(self, work: Callable[[], None], state: TrainerState) -> None:
        self.state = state
        self._work, self._error = work, ""
        self._thread = threading.Thread(target=self._run, name=WRITER_THREAD, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the work is done, or has failed."""
        return not self._thread.is_alive()

    def wait_for_writer(self) -> str:
        """Returns the error with which the work ended; empty if it is done. Heartbeats know this method by its name."""
        self._thread.join()
        return self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"


def remove_left_copies() -> None:
    """Frees the memory of copies whose process was killed while it made them; those of running processes stay."""
    for root in MEMORY_FOLDER.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(root, os.O_RDONLY)
        except OSError:
            # another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
        except OSError:
            # in use
            pass
        finally:
            os.close(lock)


def _make_locked_folder() -> tuple[Path, int]:
    """Makes a folder in host memory and locks it; makes another if a second job's `remove_left_copies` came before the lock.

    The lock ends with the process, so `remove_left_copies` finds the folders that are no longer used.
    """
    while True:
        root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=MEMORY_FOLDER))
        try:
            lock = os.open(root, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if root.exists():
            return root, lock
        os.close(lock)


def _free(file: BinaryIO) -> None:
    """Frees the memory of a file without a name; closing it is not enough if workers that were forked meanwhile hold it too."""
    file.truncate(0)


def _write(source: BinaryIO, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb", buffering=0) as file:
            shutil.copyfileobj(source, file, _BLOCK_BYTES)
    except OSError as error:
        # an error in the middle of a file does not name it
        raise OSError(error.errno, error.strerror, str(target)) from error

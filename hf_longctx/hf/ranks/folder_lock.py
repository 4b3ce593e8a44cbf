"""Locks an output folder, so that two jobs never write checkpoints into it.

The lock is the operating system's (fcntl): it ends with its process, however that ends, and holds across machines where the file
system passes locks on (NFS with lockd, Lustre with flock). The file tells a refused job who holds the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = ".longctx.lock"


class FolderLock:
    """The lock of one folder; a process can take it once at a time."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / LOCK_NAME
        self._file = -1

    def take(self) -> list[str]:
        """Locks the folder, which is made if it does not exist; returns the problem if another process holds the lock."""
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                return [f"output_dir {self._path.parent} cannot be written ({error.strerror}); choose another output_dir"]
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(file)
                return [
                    f"output_dir {self._path.parent} is in use by {holder}; wait until that training has ended, end it, or "
                    f"choose another output_dir"
                ]
            except OSError as error:
                os.close(file)
                logger.warning(
                    "output_dir %s cannot be locked (%s); make sure that no second job uses it", self._path.parent, error.strerror
                )
                return []
            if self._is_current(file):
                break
            # the holder before this one removed the file between open and lock
            os.close(file)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file
        return []

    def release(self) -> None:
        """Unlocks the folder and removes the file. Idempotent."""
        if self._file >= 0:
            # removed before it is unlocked, or another process could lock a file that is about to vanish
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _is_current(self, file: int) -> bool:
        """Whether the folder's lock file is the one that is open."""
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False

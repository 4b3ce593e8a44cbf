"""Names the ranks that died: those that do not report when a step fails.

`agreement.explain_lost_ranks` uses it. When a run starts, every rank writes its host and process number to the store of the
process group; when a step breaks, it writes a report there. A rank is lost if it does not report in time, or if it is a process
of this host that has ended.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_POLL_S = 0.2
_CONNECT_S = 5.0


class RollCall:
    """One rank's access to the reports of all ranks."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        store.set(_process_key(rank), f"{_host()} {os.getpid()}")

    @classmethod
    def of_launch(cls) -> RollCall | None:
        """Roll call on the store over which the ranks met; None if nobody answers there.

        The variables MASTER_ADDR and MASTER_PORT may name a store that is not there (accelerate's `debug_launcher`) or that of
        another run.
        """
        store = _get_default_store()
        while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
            store = store.underlying_store
        try:
            if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
                # connect once more, since the store of the process group may wait for a key
                timeout = timedelta(seconds=_CONNECT_S)
                store = dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
            return cls(store, dist.get_rank(), dist.get_world_size())
        except RuntimeError:
            return None

    def lost(self, step: int, timeout_s: float) -> list[int]:
        """Ranks that do not report within `timeout_s` that `step` broke for them too; empty if the store is gone."""
        try:
            return self._lost(step, timeout_s)
        except RuntimeError:
            # the store died with the process that held it
            return []

    def _lost(self, step: int, timeout_s: float) -> list[int]:
        self._store.set(_report_key(step, self._rank), "")
        until_s = time.monotonic() + timeout_s
        missing = [rank for rank in range(self._num_ranks) if rank != self._rank]
        while True:
            missing = [rank for rank in missing if not self._store.check([_report_key(step, rank)])]
            if all(map(self._has_ended, missing)) or time.monotonic() > until_s:
                return missing
            time.sleep(_POLL_S)

    def _has_ended(self, rank: int) -> bool:
        """Whether the rank is a process of this host that has ended."""
        if not self._store.check([_process_key(rank)]):
            return False
        host, number = self._store.get(_process_key(rank)).decode().rsplit(" ", 1)
        if host != _host():
            return False
        try:
            # a zombie has ended, although nobody has read its exit code yet
            return bool(psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


def _process_key(rank: int) -> str:
    return f"longctx/process/{rank}"


def _report_key(step: int, rank: int) -> str:
    return f"longctx/broken/{step}/{rank}"


def _host() -> str:
    return f"{socket.gethostname()}-{uuid.getnode()}"

"""Names the ranks that died or stand still: those that do not report when a step fails.

`agreement.explain_lost_ranks` uses it. When a run starts, every rank learns host and process number of all others; when a step
breaks, it writes a report to the store of the process group. A rank is lost if it does not report in time, if it is a process of
this host that has ended, or if its heart stands still (`heartbeats.py`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_POLL_S = 0.2
_CONNECT_S = 5.0

# ranks wait for each other in every step, so two that break together are in steps no further apart than this
_STEPS_APART = 1

# share of a time-out for which the process that holds the store stays, so that all others learn there who is lost
STORE_STAYS = 0.4


class RollCall:
    """One rank's access to the reports of all ranks. `still`: returns the ranks whose hearts stand still.

    attempt: a name that the ranks of this start share, and ranks that used the store before a restart do not.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, attempt: str) -> None:
        self.store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        self.rank, self.num_ranks, self.attempt = rank, num_ranks, attempt
        self.still: Callable[[], list[int]] = list
        self.store.set(_process_key(rank), f"{host_identity()} {os.getpid()}")
        self._processes: dict[int, str] = {}

    @classmethod
    def of_launch(cls, attempt: str) -> RollCall | None:
        """Roll call on the store over which the ranks met; None if nobody answers there."""
        try:
            return cls(connect(), dist.get_rank(), dist.get_world_size(), attempt)
        except RuntimeError:
            return None

    def meet(self) -> None:
        """Learns the processes of all ranks, which must have been made by now; the store may be gone when they are needed."""
        try:
            for rank in range(0 if self._processes else self.num_ranks):
                self._processes[rank] = self.store.get(_process_key(rank)).decode()
        except RuntimeError:
            return

    def lost(self, step: int, timeout_s: float) -> list[int]:
        """Ranks that do not report within `timeout_s` that `step` broke for them too.

        Rank 0 returns after the others know as well, if its process holds the store, which ends with it.
        """
        lost = self._find_lost(step, timeout_s)
        try:
            tell_known(self.store, self.rank)
            until_s = time.monotonic() + STORE_STAYS * timeout_s
            while self._is_needed(lost) and time.monotonic() < until_s:
                time.sleep(_POLL_S)
        except RuntimeError:
            # the store is gone
            pass
        return lost

    def _is_needed(self, lost: list[int]) -> bool:
        """Whether this process holds the store, and another rank still has to learn there who is lost."""
        return not self.rank and rank_0_holds_store() and not all_know(self.store, self.num_ranks, lost, self._has_ended)

    def _find_lost(self, step: int, timeout_s: float) -> list[int]:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        if rank_0_holds_store() and 0 in (still := self.still()):
            # the store would not answer
            return still
        try:
            self.store.set(report_key(self.rank), str(step))
            if self.store.check([_process_key(rank) for rank in others]):
                self.meet()
            return self._missing(others, step, timeout_s)
        except RuntimeError:
            # the store died with the process that held it: rank 0 without a launcher, which may have found a lost rank first
            if still := self.still():
                return still
            ended = [rank for rank in others if self._has_ended(rank)]
            return ended or ([0] if rank_0_holds_store() and self.rank else [])

    def _missing(self, missing: list[int], step: int, timeout_s: float) -> list[int]:
        until_s = time.monotonic() + timeout_s
        while True:
            missing = [rank for rank in missing if not self._has_reported(rank, step)]
            still = self.still()
            if all(rank in still or self._has_ended(rank) for rank in missing) or time.monotonic() > until_s:
                return missing
            time.sleep(_POLL_S)

    def _has_reported(self, rank: int, step: int) -> bool:
        key = report_key(rank)
        return self.store.check([key]) and abs(int(self.store.get(key)) - step) <= _STEPS_APART

    def _has_ended(self, rank: int) -> bool:
        """Whether the rank is a process of this host that has ended."""
        host, _, number = self._processes.get(rank, "").rpartition(" ")
        if host != host_identity():
            return False
        try:
            # a zombie has ended, although nobody has read its exit code yet
            return bool(psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


def connect() -> Any:
    """The store over which the ranks met, by a connection of its own if it is a server's: an answer may never come.

    The variables MASTER_ADDR and MASTER_PORT may name a store that is not there (accelerate's `debug_launcher`) or that of
    another run. Raises RuntimeError if nobody answers.
    """
    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        timeout = timedelta(seconds=_CONNECT_S)
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return store


def rank_0_holds_store() -> bool:
    """Whether the store lives in rank 0's process, as it does unless a launcher holds it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def lost_message(step: int, rank: int, lost: list[int], timeout_s: float) -> str:
    """Says on `rank` which ranks were lost in `step`."""
    who = " and ".join(f"rank {one}" for one in lost) or "another rank"
    return (
        f"step {step} could not finish on rank {rank}: {who} died or did not answer within {timeout_s:g} s; its own "
        f"traceback, printed earlier, says why. If it is only slow, raise collective_timeout_s"
    )


def tell_known(store: Any, rank: int) -> None:
    """Tells the others that this rank knows who is lost."""
    store.set(_known_key(rank), "")


def all_know(store: Any, num_ranks: int, lost: Sequence[int], has_ended: Callable[[int], bool]) -> bool:
    """Whether all ranks but the lost ones know who is lost, or have ended."""
    others = [rank for rank in range(num_ranks) if rank not in lost]
    return all(store.check([_known_key(rank)]) or has_ended(rank) for rank in others)


def report_key(rank: int) -> str:
    """Key of the store under which a rank reports the step that broke."""
    return f"longctx/broken/{rank}"


def _process_key(rank: int) -> str:
    return f"longctx/process/{rank}"


def host_identity() -> str:
    """A text that processes of one machine have in common, and others do not."""
    return f"{socket.gethostname()}-{uuid.getnode()}"


def _known_key(rank: int) -> str:
    return f"longctx/known/{rank}"

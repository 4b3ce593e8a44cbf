"""Finds and describes the ranks for which others waited in vain, for `agreement.explain_lost_ranks`.

When a run starts, the ranks exchange host and process number; when a collective breaks, each writes a report to the store of the
process group. A rank is lost if its process is on this host and has ended, if it raised an error or reached the end of its
script, if its beats have stopped (`heartbeats.py`), or if it does not report in time.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_POLL_S = 0.2
_CONNECT_S = 5.0

# largest distance in steps of two ranks that break together, since ranks wait for each other in every step
_STEPS_APART = 1

# share of a time-out for which the process with the store stays, so that all others can read which ranks are lost
STORE_STAYS = 0.4


# error of a rank whose collective was broken by another rank
BROKEN = "a broken connection to other ranks"


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's state, published several times per time-out."""

    # counts beats
    number: int = 0
    # activity of the main thread, such as "inside `on_evaluate` of MyCallback", and its duration
    doing: str = ""
    since_s: float = 0.0
    # whether the main thread is blocked in a collective
    is_waiting: bool = False
    # number of calls of the package that the rank has begun
    num_calls: int = 0
    # error that ended the last of these calls, or the script after it; whether it was the call
    error: str = ""
    has_failed: bool = False
    # whether the process ends
    has_left: bool = False
    # differs between all starts of a rank, since a launcher that restarts its ranks may keep the store
    start: str = ""
    # seconds until the next beat; longer on a rank that has not yet begun a run with a shorter time-out
    interval_s: float = 0.0

    def text(self) -> str:
        """Formats the beat for the store."""
        return json.dumps(astuple(self))

    @classmethod
    def of(cls, text: str) -> Beat:
        """Parses a published beat; an empty text is a rank that has not begun."""
        return cls(*json.loads(text)) if text else cls()

    def words(self, rank: int) -> str:
        """Describes the rank's activity."""
        return f"rank {rank}, which has been {self.doing} for {self.since_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Lost:
    """Ranks for which others waited in vain when a collective broke.

    ranks: the lost ones; empty if all ranks report the same.
    """

    ranks: tuple[int, ...] = ()
    # working ranks that did not come
    late: tuple[int, ...] = ()
    beats: Mapping[int, Beat] = field(default_factory=dict)
    # where each rank that reports the same waited
    places: Mapping[int, str] = field(default_factory=dict)

    def message(self, what: str, rank: int, timeout_s: float, longest_s: float = 0.0) -> str:
        """Explains on `rank` why `what` could not finish. longest_s: time waited in vain; 0 if a connection broke."""
        head = f"{what} could not finish on rank {rank}" if what else f"rank {rank} cannot go on"
        if self.late:
            who = " and ".join(self.beats[one].words(one) for one in self.late)
            if longest_s:
                return f"{head}: it waited {longest_s:g} s for {who}; raise ddp_timeout if that may take so long"
            return f"{head}: its connection to {who} broke; see what ended it, or check the network"
        if self.places and not self.ranks:
            where = ", ".join(f"rank {one} {place}" for one, place in sorted(self.places.items()))
            if longest_s:
                return (
                    f"{head}: all ranks waited for each other for {longest_s:g} s ({where}); let every rank make the same calls "
                    f"in the same order"
                )
            return f"{head}: a connection between ranks broke, although all of them are alive ({where}); check the network"
        errors = {one: self._beat(one).error for one in self.ranks}
        causes = [one for one in self.ranks if not _is_consequence(errors[one])] or list(self.ranks)
        ended = [one for one in causes if errors[one] or self._beat(one).has_left]
        silent = [one for one in causes if one not in ended]
        parts = [
            f"rank {one} ended with {errors[one]}" if errors[one] else f"rank {one} came to the end of its script"
            for one in ended
        ]
        advice = "let every rank make the same calls"
        if any(errors[one] for one in ended):
            advice = "its own traceback, printed earlier, says more"
        if silent or not ended:
            who = " and ".join(f"rank {one}" for one in silent) or "another rank"
            seen = ", ".join(f"rank {one} was last seen {doing}" for one in silent if (doing := self._beat(one).doing))
            parts.insert(0, f"{who} died or did not answer within {timeout_s:g} s" + (f" ({seen})" if seen else ""))
            advice = "its own traceback, if it printed one, says why. If it only hangs for a while, raise collective_timeout_s"
        return f"{head}: {', '.join(parts)}; {advice}"

    def _beat(self, rank: int) -> Beat:
        return self.beats.get(rank, Beat())


def _goes_on(before: Beat, after: Beat) -> bool:
    return after.number > before.number and after.start == before.start


def _is_consequence(error: str) -> bool:
    """Whether a rank's error was caused by another rank."""
    return any(words in error for words in (BROKEN, "could not finish on rank", "cannot go on: "))


class RollCall:
    """One rank's access to the reports of all ranks. still: returns the ranks whose beats have stopped.

    attempt: name of this start, different from those of earlier starts that used the same store.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, attempt: str) -> None:
        self.store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        self.rank, self.num_ranks, self.attempt = rank, num_ranks, attempt
        # ids of the beats of all ranks
        self.start_ids: tuple[str, ...] = ()
        self.still: Callable[[], list[int]] = list
        # functions: latest beats that were read, current beats in the store, whether the rank of a beat has ended
        self.beats: Callable[[], Mapping[int, Beat]] = dict
        self.fresh_beats: Callable[[], Mapping[int, Beat]] = dict
        self.is_over: Callable[[Beat], bool] = lambda beat: beat.has_left
        self.store.set(_process_key(rank), f"{host_identity()} {os.getpid()}")
        self._processes: dict[int, str] = {}

    @classmethod
    def of_launch(cls, attempt: str) -> RollCall | None:
        """Makes the roll call on the store of the process group; None if it does not answer."""
        try:
            return cls(connect(), dist.get_rank(), dist.get_world_size(), attempt)
        except RuntimeError:
            return None

    def meet(self) -> None:
        """Reads the processes of all ranks, which must exist by now; the store may be gone when they are needed."""
        try:
            for rank in range(0 if self._processes else self.num_ranks):
                self._processes[rank] = self.store.get(_process_key(rank)).decode()
        except RuntimeError:
            return

    def lost(self, step: int, timeout_s: float, place: str = "") -> list[int]:
        """Returns the ranks that do not report within `timeout_s` that `step` broke for them too; see `search`."""
        found = self.search(step, timeout_s, place)
        return list(found.ranks or found.late)

    def search(self, step: int, timeout_s: float, place: str = "") -> Lost:
        """Finds the lost ranks, waiting up to `timeout_s` for others' reports. place: where this rank waited.

        Rank 0 returns after the others have found them too, if the store is in its process and ends with it.
        """
        lost = self._search(step, timeout_s, place)
        try:
            report_known(self.store, self.rank)
            until_s = time.monotonic() + STORE_STAYS * timeout_s
            while self._is_needed(lost.ranks) and time.monotonic() < until_s:
                time.sleep(_POLL_S)
        except RuntimeError:
            # the store is gone
            pass
        return lost

    def _is_needed(self, lost: Sequence[int]) -> bool:
        """Whether the store is in this process, and another rank still has to read the lost ranks from it."""
        return not self.rank and rank_0_holds_store() and not all_know(self.store, self.num_ranks, lost, self._has_ended)

    def _search(self, step: int, timeout_s: float, place: str) -> Lost:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        if rank_0_holds_store() and 0 in (still := self.still()):
            # the store would not answer
            return Lost(tuple(still), beats=self.beats())
        try:
            self.store.set(report_key(self.rank), f"{step}\n{place}")
            if self.store.check([_process_key(rank) for rank in others]):
                self.meet()
            before = self.fresh_beats()
            missing = self._missing(others, step, timeout_s)
            after = self.fresh_beats()
            reports = {rank: self._report(rank)[1] for rank in range(self.num_ranks) if rank not in missing}
        except RuntimeError:
            # the store ended with its process: rank 0 without a launcher, which may have found a lost rank first
            if still := self.still():
                return Lost(tuple(still), beats=self.beats())
            ended = [rank for rank in others if self._has_ended(rank)] or ([0] if rank_0_holds_store() and self.rank else [])
            return Lost(tuple(ended), beats=self.beats())
        late = [
            rank for rank in missing if rank in after and _goes_on(before[rank], after[rank]) and not self.is_over(after[rank])
        ]
        lost = tuple(rank for rank in missing if rank not in late)
        return Lost(lost, () if lost else tuple(late), after, {rank: text for rank, text in reports.items() if text})

    def _missing(self, missing: list[int], step: int, timeout_s: float) -> list[int]:
        until_s = time.monotonic() + timeout_s
        while True:
            missing = [rank for rank in missing if not self._has_reported(rank, step)]
            still, beats = self.still(), self.fresh_beats()
            if all(rank in still or self._has_ended(rank) or self.is_over(beats.get(rank, Beat())) for rank in missing):
                return missing
            if time.monotonic() > until_s:
                return missing
            time.sleep(_POLL_S)

    def _has_reported(self, rank: int, step: int) -> bool:
        return self.store.check([report_key(rank)]) and abs(self._report(rank)[0] - step) <= _STEPS_APART

    def _report(self, rank: int) -> tuple[int, str]:
        step, _, place = self.store.get(report_key(rank)).decode().partition("\n")
        return int(step), place

    def _has_ended(self, rank: int) -> bool:
        """Whether the rank's process is on this host and has ended."""
        try:
            process = self.process_here(rank)
            # a zombie has ended, although its exit code was not read yet
            return process is not None and process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def process_here(self, rank: int) -> psutil.Process | None:
        """Returns the rank's process if it is on this host. Raises psutil.NoSuchProcess if it has ended."""
        host, _, number = self._processes.get(rank, "").rpartition(" ")
        return psutil.Process(int(number)) if host == host_identity() else None


def connect() -> Any:
    """Connects to the store of the process group, separately if it is a server's, since an answer may never come.

    The variables MASTER_ADDR and MASTER_PORT may name a missing store (accelerate's `debug_launcher`) or another run's. Raises
    RuntimeError if it does not answer.
    """
    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        timeout = timedelta(seconds=_CONNECT_S)
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return store


def rank_0_holds_store() -> bool:
    """Whether the store is in rank 0's process, and not in a launcher."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def report_known(store: Any, rank: int) -> None:
    """Publishes that this rank has found the lost ranks."""
    store.set(_known_key(rank), "")


def all_know(store: Any, num_ranks: int, lost: Sequence[int], has_ended: Callable[[int], bool]) -> bool:
    """Whether all ranks except the lost ones have found them, or have ended."""
    others = [rank for rank in range(num_ranks) if rank not in lost]
    return all(store.check([_known_key(rank)]) or has_ended(rank) for rank in others)


def report_key(rank: int) -> str:
    """Returns the store's key for a rank's report of the broken step."""
    return f"longctx/broken/{rank}"


def beat_key(rank: int) -> str:
    """Returns the store's key for a rank's beats."""
    return f"longctx/beat/{rank}"


def _process_key(rank: int) -> str:
    return f"longctx/process/{rank}"


def host_identity() -> str:
    """Returns a text that is the same for all processes of one machine, and different on others."""
    return f"{socket.gethostname()}-{uuid.getnode()}"


def _known_key(rank: int) -> str:
    return f"longctx/known/{rank}"

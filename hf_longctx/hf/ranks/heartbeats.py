"""Ends a rank that would wait for ever: for a rank that stands still, or after the launcher has died.

Collectives of a step have a time-out of their own. Others wait long on purpose, since one rank may write a checkpoint or evaluate
for minutes: logging, saving, callbacks. So every rank writes a heartbeat to the launcher's store while a training runs. A rank
that works keeps beating; the heart of a process that was stopped, or whose machine is gone, stands still.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from hf_longctx.hf.ranks.lost_ranks import STORE_STAYS, all_know, lost_message, report_key, tell_known

# beats per time-out, and the longest and shortest time between two
_BEATS = 10
_LONGEST_S, _SHORTEST_S = 5.0, 0.2

# a collective of the step gives up after one time-out and can then be handled, so end the process a little later
_PATIENCE = 1.4

# beats between the verdict and the end, in which the other ranks come to the same verdict
_LAST_BEATS = 2

# the thread that writes a checkpoint behind training
WRITER_THREAD = "longctx-writer"
# functions in which the main thread writes a checkpoint, or waits for that thread
_WAITS_FOR_WRITER = "wait_for_writer"
_WRITES = ("_save_checkpoint", "save_model", _WAITS_FOR_WRITER)

_LEFT = "left"
_LAUNCHER_POLL_S = 1.0


class Heartbeats:
    """One rank's heart and its view of the other hearts; a context for the time of a training.

    Two threads: one talks to the store, and one judges, since a store whose process stands still never answers. `step`: number
    of the present step, for the message. `in_rank_0`: rank 0's process holds the store, not a launcher.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_s: float, step: Callable[[], int], in_rank_0: bool) -> None:
        self._store, self._rank, self._timeout_s, self._step = store, rank, timeout_s, step
        self._in_rank_0 = in_rank_0
        self._keys = [_beat_key(each) for each in range(num_ranks)]
        self._interval_s = min(_LONGEST_S, max(_SHORTEST_S, timeout_s / _BEATS))
        self._ends = threading.Event()
        # seconds that the judge has run; a clock would go on while this process itself is stopped
        self._lived_s = self._read_s = 0.0
        self._is_blind = self._leaves = False
        self._verdict: tuple[int, list[int]] | None = None
        # all ranks but those that stand still have come to the verdict
        self._all_know = threading.Event()
        self._beats: list[tuple[str, float]] = [("", 0.0)] * num_ranks
        self._threads = [
            threading.Thread(target=target, name=f"longctx-{target.__name__.strip('_')}", daemon=True)
            for target in (self._beat, self._judge)
        ]

    def __enter__(self) -> Heartbeats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        # after an error the heart just stops, since other ranks may wait for this one
        self._leaves = kind is None
        self._ends.set()
        # the first may wait for a store that stands still
        self._threads[0].join(self._interval_s)
        self._threads[1].join()

    def still(self, patience: float = 1.0) -> list[int]:
        """Ranks whose hearts have stood still for `patience` times the time-out."""
        limit_s = patience * self._timeout_s
        is_silent = self._lived_s - self._read_s > limit_s
        if self._is_blind and (found := self._unchanged(limit_s - 2 * self._interval_s)):
            # the store ended with rank 0, which was perhaps the first to find out
            return found
        if self._is_blind or is_silent:
            return [0] if is_silent and _is_waiting() and self._in_rank_0 and self._rank else []
        return self._unchanged(limit_s)

    def _unchanged(self, limit_s: float) -> list[int]:
        return [
            rank
            for rank, (beat, changed_s) in enumerate(self._beats)
            if rank != self._rank and beat not in ("", _LEFT) and self._read_s - changed_s > limit_s
        ]

    def _beat(self) -> None:
        number = 0
        try:
            while not self._ends.is_set():
                number += 1
                self._store.set(self._keys[self._rank], str(number))
                if self._store.check(self._keys):
                    self._take([beat.decode() for beat in self._store.multi_get(self._keys)])
                else:
                    # some rank has not begun
                    self._read_s = self._lived_s
                if self._verdict is not None:
                    self._tell_verdict(*self._verdict)
                self._ends.wait(self._interval_s if self._verdict is None else _SHORTEST_S)
            if self._leaves:
                self._store.set(self._keys[self._rank], _LEFT)
        except RuntimeError:
            # the store is gone, perhaps since rank 0 is through
            self._is_blind = True

    def _tell_verdict(self, step: int, still: list[int]) -> None:
        self._store.set(report_key(self._rank), str(step))
        tell_known(self._store, self._rank)
        if all_know(self._store, len(self._keys), still, lambda rank: False):
            self._all_know.set()

    def _take(self, beats: list[str]) -> None:
        now_s = self._lived_s
        self._beats = [(beat, now_s if beat != known else since) for beat, (known, since) in zip(beats, self._beats, strict=True)]
        self._read_s = now_s

    def _judge(self) -> None:
        last_s = time.monotonic()
        while not self._ends.wait(self._interval_s):
            now_s = time.monotonic()
            self._lived_s += min(now_s - last_s, 2 * self._interval_s)
            last_s = now_s
            if not (still := self.still(_PATIENCE)):
                continue
            if _is_writing():
                # a checkpoint of this rank alone is worth finishing
                continue
            self._verdict = self._step(), still
            stack = traceback.format_stack(_main_frame())
            if self._in_rank_0 and not self._rank:
                # the store ends with this process
                self._all_know.wait(STORE_STAYS * self._timeout_s)
            else:
                time.sleep(_LAST_BEATS * self._interval_s)
            print("".join(stack), file=sys.stderr)
            _end(lost_message(self._verdict[0], self._rank, still, self._timeout_s))


def follow_launcher() -> None:
    """Ends this process once the launcher that started it has died; does nothing without a launcher. Idempotent."""
    name = "longctx-launcher"
    if "TORCHELASTIC_RUN_ID" not in os.environ or any(thread.name == name for thread in threading.enumerate()):
        return
    launcher = os.getppid()

    def follow() -> None:
        while os.getppid() == launcher:
            time.sleep(_LAUNCHER_POLL_S)
        _end(f"rank {os.environ.get('RANK', '0')} ends, since its launcher (process {launcher}) has died")

    threading.Thread(target=follow, name=name, daemon=True).start()


def main_thread_calls() -> Iterator[CodeType]:
    """The code of every function that the main thread is in, innermost first."""
    return _calls(_main_frame())


def _calls(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _writer_frame() -> FrameType | None:
    number = next((thread.ident for thread in threading.enumerate() if thread.name == WRITER_THREAD), None)
    return sys._current_frames().get(number or 0)


def _is_waiting() -> bool:
    """Whether the main thread is in a collective or another function of torch.distributed, or asks who is lost.

    While it waits for the thread that writes a checkpoint, that thread is meant.
    """
    places = f"{os.sep}distributed{os.sep}", f"{os.sep}lost_ranks.py"
    waits_for_writer = any(code.co_name == _WAITS_FOR_WRITER for code in main_thread_calls())
    calls = _calls(_writer_frame()) if waits_for_writer else main_thread_calls()
    return any(place in code.co_filename for code in calls for place in places)


def _is_writing() -> bool:
    """Whether the main thread writes a checkpoint and does not wait for another rank there."""
    return not _is_waiting() and any(code.co_name in _WRITES for code in main_thread_calls())


def _end(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _beat_key(rank: int) -> str:
    return f"longctx/beat/{rank}"

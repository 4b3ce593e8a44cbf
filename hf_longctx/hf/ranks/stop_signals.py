"""Handles signals to stop a training: SIGTERM, SIGUSR1, SIGINT (Ctrl-C) and SIGHUP (a closed terminal; ignored under nohup).

The first signal only sets `asked`; the trainer sends it to all ranks with the next step's token counts, finishes that step, saves
once and returns. A second signal ends the process at once, even inside a collective that never returns: Python runs no signal
handler there, so a thread reads signals from the wake-up descriptor that Python's C handler writes.

A launcher passes on its signals, so one Ctrl-C or one `scancel` may reach a rank twice. Signals within `_SAME_REQUEST_S` of the
first count as one. Launchers and Slurm also signal the workers of data loaders, which then continue, since the last step still
needs their batches (`loader_workers.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

from hf_longctx.plan.core.messages import wrapped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

_SAME_REQUEST_S = 2.0
# columns of a terminal of unknown width
_COLUMNS = 80

# the listener of the current training; processes forked from it must not listen
_listening: StopSignals | None = None


def listening_flag() -> Any:
    """Returns a shared number for loaders' workers that is 1 while this process listens; forked ranks have one each."""
    return _flag_of(os.getpid())


@cache
def _flag_of(process: int) -> Any:
    return RawValue("b", 0)


class StopSignals:
    """Context that listens for signals; does nothing outside the main thread, where Python cannot install handlers.

    Signals that the process ignores stay ignored. At its end the context restores earlier handlers. asked: the first signal that
    arrived; None if none did.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.asked: signal.Signals | None = None
        self._handled: signal.Signals | None = None
        self._rank, self._num_ranks = rank, num_ranks
        self._asked_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._wakeup = self._previous_wakeup = -1

    def counts(self) -> list[int]:
        """Returns for every signal of `SIGNALS` 1 if this rank got it, else 0, for sums over ranks."""
        # the thread that reads signals may be late, so also count what the main thread has handled
        asked = self.asked or self._handled
        return [int(asked is each) for each in SIGNALS]

    def __enter__(self) -> StopSignals:
        global _listening
        self.asked = self._handled = None
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._num_ranks > 1:
            self._read_wakeups()
        for each in SIGNALS:
            found = signal.getsignal(each)
            # None: a handler that Python did not install and cannot restore
            if found is not None and found is not signal.SIG_IGN:
                self._previous[each] = found
                signal.signal(each, self._handle)
        _listening = self
        listening_flag().value = 1
        return self

    def __exit__(self, *error: Any) -> None:
        global _listening
        if _listening is self:
            _listening = None
            listening_flag().value = 0
            self.restore()

    def restore(self) -> None:
        """Restores the handlers found at the start."""
        for each, handler in self._previous.items():
            # a handler that was installed in the meantime stays
            if signal.getsignal(each) == self._handle:
                signal.signal(each, handler)
        self._previous = {}
        if self._wakeup >= 0:
            signal.set_wakeup_fd(self._previous_wakeup)
            # the reading thread ends at the end of the file
            os.close(self._wakeup)
            self._wakeup = -1

    def _read_wakeups(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._previous_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if self._previous_wakeup >= 0:
            # an event loop must not miss signals; a second signal then ends the run at the next line of Python
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(read)
            os.close(write)
            return
        self._wakeup = write
        threading.Thread(target=self._read, args=(read,), name="longctx-signals", daemon=True).start()

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb", buffering=0) as file:
            while heard := file.read(1):
                if heard[0] in SIGNALS:
                    self._hear(signal.Signals(heard[0]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled = self._handled or signal.Signals(number)
        # with a wake-up descriptor the thread reads it
        if self._wakeup < 0:
            self._hear(signal.Signals(number))

    def _hear(self, heard: signal.Signals) -> None:
        now_s = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_s = heard, now_s
            if self._rank and heard is signal.SIGINT and os.isatty(_error_file()):
                # Ctrl-C reaches all ranks of a terminal, and the first one prints it
                return
            say(f"rank {self._rank} got {heard.name}: the training finishes its step, saves and stops; again ends it at once")
        elif now_s - self._asked_s > _SAME_REQUEST_S:
            say(f"rank {self._rank} got {heard.name} after {self.asked.name}: it ends at once, without saving")
            if self._num_ranks == 1 and heard is signal.SIGINT:
                # a notebook or debugger continues
                raise KeyboardInterrupt
            os._exit(128 + heard)


def outlive_signals(is_listening: Any) -> None:
    """Makes this process, a loader's worker, survive stop signals to the whole process group.

    is_listening: `listening_flag` of the rank. SIGTERM still ends the worker after the rank has ended or stopped listening, by a
    thread, since the worker may be inside a library.
    """
    rank = os.getppid()
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def end_when_asked() -> None:
        while heard := os.read(read, 1):
            if heard[0] == signal.SIGTERM and (not is_listening.value or os.getppid() != rank):
                os._exit(0)

    threading.Thread(target=end_when_asked, name="longctx-worker-signals", daemon=True).start()


def say(text: str) -> None:
    """Writes a line to standard error, from any thread."""
    # without the stream's lock, which the interrupted code may hold
    with suppress(OSError, ValueError):
        file = _error_file()
        if os.isatty(file):
            # over the training's bar, which is drawn again; a terminal of unknown size has 0 columns
            text = f"\r\x1b[K{wrapped(text, os.get_terminal_size(file).columns or _COLUMNS)}"
        os.write(file, f"{text}\n".encode())


def _error_file() -> int:
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else 2


def _stop_listening_in_child() -> None:
    """Restores the handlers from before the training in a forked process (a loader's worker), so that it can be ended."""
    global _listening
    if _listening is not None:
        with suppress(ValueError):
            _listening.restore()
        _listening = None


os.register_at_fork(after_in_child=_stop_listening_in_child)

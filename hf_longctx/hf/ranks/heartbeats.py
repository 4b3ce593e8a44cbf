"""Distinguishes working ranks from hung ones: every rank publishes beats, and ends if it waits for one without beats.

Collectives wait as long as those of `Trainer` (`ddp_timeout`), since one rank may sample, upload or prepare data for minutes, at
any time from the constructor to the end of the process. A working rank sends beats from a thread, which describe its activity, so
that waiting ranks can report it. The beats of a process that was stopped, or whose machine is gone, stop; after
`collective_timeout_s` the others end and name it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import psutil

from hf_longctx.hf.ranks import lost_ranks
from hf_longctx.hf.ranks.lost_ranks import STORE_STAYS, Beat, Lost, all_know, beat_key, report_key, report_known
from hf_longctx.hf.ranks.stop_signals import say

# beats per time-out, and the longest and shortest time between two
_BEATS = 10
_LONGEST_S, _SHORTEST_S = 5.0, 0.2

# beats that a rank may miss, for any time-out
_LEAST_BEATS = 3

# share of a time-out without a beat after which a rank counts as lost, so that the process ends within the time-out
_PATIENCE = 0.7

# beats between this verdict and the end, in which the other ranks reach the same verdict
_LAST_BEATS = 2

# seconds of a wait after which a rank logs for whom it waits; a share of the time-out if that is less
_TELLS_AFTER_S, _TELLS_AFTER = 30.0, 0.5

# least processor seconds of a silent process's main thread that show work which keeps the beating thread from running
_WORKS_S = 0.02
# processor seconds of the main thread between two beats below which it counts as blocked
_BLOCKED_S = 0.001

# name of the thread that writes a checkpoint during training
WRITER_THREAD = "longctx-writer"
# functions in which the main thread writes a checkpoint, or waits for the writer thread
_WAITS_FOR_WRITER = "wait_for_writer"
_WRITES = ("_save_checkpoint", "save_model", _WAITS_FOR_WRITER)

_LAUNCHER_POLL_S = 1.0
# how long a process with the store waits at its end for others to end
_LEAVES_S, _POLL_S = 1.0, 0.05

_LAUNCHER = "torch.distributed.elastic"
_LIBRARIES = ("accelerate", "datasets", "hf_longctx", "huggingface_hub", "peft", "tokenizers", "torch", "transformers", "trl")
# packages whose functions describe a script's activity
_TELLING = ("hf_longctx", "peft", "transformers", "trl")
# modules, and one function of another, that wait for messages of other ranks
_RECEIVING = ("torch.distributed.", "hf_longctx.runtime.", "hf_longctx.hf.ranks.")
_EXCHANGES = "exchange_tokens"


class Doing(NamedTuple):
    """Activity of the main thread in step `number`. since_s: time of its beginning."""

    words: str = ""
    is_waiting: bool = False
    number: int = 0
    since_s: float = 0.0


class Heartbeats:
    """Publishes one rank's beats and watches those of all ranks, from `start` to the end of the process.

    Uses two threads, one for the store and one for verdicts, since a store whose process was stopped never answers. timeout_s:
    time without a beat after which a rank is lost. longest_s: longest wait of collectives for a working rank. in_rank_0: the
    store is in rank 0's process, not in a launcher. process_here: returns a rank's process if it is on this host. is_needed:
    whether the process group still exists; beats end with it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        longest_s: float,
        in_rank_0: bool,
        process_here: Callable[[int], psutil.Process | None] = lambda rank: None,
        *,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store, self._rank, self._in_rank_0, self._process_here = store, rank, in_rank_0, process_here
        self.start_id, self._known, self.is_needed = uuid.uuid4().hex, dict[int, str](), is_needed
        # store for reports of lost ranks, after the roll call
        self.reports: Any = None
        self._keys = [beat_key(each) for each in range(num_ranks)]
        self._ends, self._is_due = threading.Event(), threading.Event()
        self.limit(timeout_s, longest_s)
        # seconds that the verdict thread has run; a clock would go on while this process is stopped
        self._lived_s = self._read_s = 0.0
        self.is_blind = self._has_left = False
        self.num_calls, self._error, self._has_failed = 0, "", False
        # running calls of the package in the main thread: number of the step, and description of other work
        self._calls: list[tuple[Callable[[], int], str]] = []
        self._verdict: tuple[int, list[int]] | None = None
        # set after all ranks that do not hang have reached the verdict
        self._all_know = threading.Event()
        self._beats: list[tuple[Beat, float]] = [(Beat(), 0.0)] * num_ranks
        # beats of the first reading, by rank; empty for a rank that had not begun
        self._first: dict[int, Beat] = {}
        self._taking = threading.Lock()
        self._doing, self._has_told, self._main_s = Doing(), False, 0.0
        # processor seconds of silent ranks' main threads
        self._worked: dict[int, float] = {}
        # when this rank found that another had ended or finished the call
        self._over_s: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=target, name=f"longctx-{target.__name__.strip('_')}", daemon=True)
            for target in (self._beat, self._judge)
        ]

    def limit(self, timeout_s: float, longest_s: float) -> None:
        """Sets both limits, for a run with other settings."""
        self.timeout_s, self.longest_s = timeout_s, longest_s
        self._interval_s = min(_LONGEST_S, max(_SHORTEST_S, timeout_s / _BEATS))
        # publish the new interval at once
        self._is_due.set()

    def know(self, start_ids: Sequence[str], reports: Any) -> None:
        """Stores the ids of all ranks' beats after the roll call, and the store for reports."""
        with self._taking:
            self._known, self.reports = dict(enumerate(start_ids)), reports
            for rank, (beat, _) in enumerate(self._beats):
                if beat.start != start_ids[rank]:
                    self._beats[rank] = Beat(), 0.0

    def start(self) -> None:
        """Publishes the first beat, so that others know this rank after the roll call, and starts both threads."""
        # without a store, the thread finds that too
        with suppress(RuntimeError):
            self._publish(1)
        for thread in self._threads:
            thread.start()

    def leave(self, error: str = "") -> None:
        """Publishes that this process ends, with `error` or regularly, and stops."""
        self._error, self._has_left = error or self._error, True
        self._ends.set()
        self._is_due.set()
        # it may wait for a store that does not answer
        self._threads[0].join(_LONGEST_S)

    @contextmanager
    def during(self, number: Callable[[], int], what: str = "") -> Iterator[None]:
        """Context for a call of all ranks; a rank in which it raises an error publishes that.

        Inside, this process ends as soon as another rank is lost; elsewhere, only if it waits for that rank. number: returns the
        current step. what: description of the call if it is no step.
        """
        is_outermost = not self._calls
        if is_outermost:
            self.num_calls, self._error, self._has_failed = self.num_calls + 1, "", False
        self._calls.append((number, what))
        try:
            yield
        except BaseException as error:
            if is_outermost:
                self._error, self._has_failed = described(error), True
                self._is_due.set()
            raise
        finally:
            self._calls.pop()

    def beats(self) -> dict[int, Beat]:
        """Returns the latest beats that were read, by rank."""
        return {rank: beat for rank, (beat, _) in enumerate(self._beats)}

    def still(self, patience: float = _PATIENCE) -> list[int]:
        """Returns ranks without a beat for this share of the time-out."""
        limit_s = patience * self.timeout_s
        is_silent = self._lived_s - self._read_s > limit_s
        if self.is_blind and (found := self._unchanged(limit_s - 2 * self._interval_s)):
            # the store ended with rank 0, which perhaps found the lost rank first
            return found
        if self.is_blind or is_silent:
            is_needed = self._in_rank_0 and self._rank and not self._beats[0][0].has_left
            return [0] if is_silent and is_needed and (self._doing.is_waiting or _is_waiting()) else []
        return self._unchanged(limit_s)

    def _unchanged(self, limit_s: float) -> list[int]:
        return [
            rank
            for rank, (beat, changed_s) in enumerate(self._beats)
            if rank != self._rank
            and beat.number
            and not beat.has_left
            and self._read_s - changed_s > max(limit_s, _LEAST_BEATS * beat.interval_s)
        ]

    def _beat(self) -> None:
        number = 1
        try:
            while not self._has_left:
                number += 1
                self._publish(number)
                self._take(self._read())
                if self._verdict is not None:
                    self._log_verdict(*self._verdict)
                self._is_due.wait(self._interval_s if self._verdict is None else _SHORTEST_S)
                self._is_due.clear()
                if self._ends.is_set() and not self._has_left:
                    return
                if self._in_rank_0 and self._rank and self._beats[0][0].has_left:
                    # the store ends with rank 0
                    self.is_blind = True
                    return
            self._publish(number + 1)
            self._wait_for_others()
        except RuntimeError:
            # the store is gone, perhaps since rank 0 has finished
            self.is_blind = True

    def _wait_for_others(self) -> None:
        """If the store ends with this process, waits until ranks that end at the same time have read this."""
        until_s = time.monotonic() + _LEAVES_S
        while self._in_rank_0 and not self._rank and time.monotonic() < until_s:
            if all(Beat.of(beat.decode()).has_left for beat in self._store.multi_get(self._keys)):
                return
            time.sleep(_POLL_S)

    def _publish(self, number: int) -> None:
        doing = self._doing
        beat = Beat(
            number,
            doing.words,
            max(0.0, self._lived_s - doing.since_s),
            doing.is_waiting,
            self.num_calls,
            self._error,
            self._has_failed,
            self._has_left,
            self.start_id,
            self._interval_s,
        )
        self._store.set(self._keys[self._rank], beat.text())

    def _log_verdict(self, step: int, still: list[int]) -> None:
        if self.reports is None:
            return
        self.reports.set(report_key(self._rank), str(step))
        report_known(self.reports, self._rank)
        if all_know(self.reports, len(self._keys), still, lambda rank: False):
            self._all_know.set()

    def fresh_beats(self) -> dict[int, Beat]:
        """Reads the current beats from the store, by rank. Raises RuntimeError if it does not answer."""
        self._take(self._read())
        return self.beats()

    def _read(self) -> list[Beat]:
        if self._store.check(self._keys):
            return [Beat.of(beat.decode()) for beat in self._store.multi_get(self._keys)]
        # some rank has not begun
        return [Beat.of(self._store.get(key).decode()) if self._store.check([key]) else Beat() for key in self._keys]

    def _take(self, beats: list[Beat]) -> None:
        now_s = self._lived_s
        with self._taking:
            for rank, (beat, (before, since_s)) in enumerate(zip(beats, self._beats, strict=True)):
                is_new = beat != self._first.setdefault(rank, beat)
                if not beat.start or beat.start != self._known.get(rank, beat.start):
                    # a rank that has not begun, or that ended before a restart
                    continue
                # before the roll call, a beat of the first reading may be from before a restart
                if rank in self._known or is_new:
                    self._beats[rank] = beat, since_s if beat == before else now_s
            self._read_s = now_s

    def _judge(self) -> None:
        last_s = time.monotonic()
        while not self._ends.wait(self._interval_s):
            if not self.is_needed():
                self._has_left = True
                self._ends.set()
                self._is_due.set()
                return
            now_s = time.monotonic()
            self._lived_s += min(now_s - last_s, 2 * self._interval_s)
            last_s = now_s
            self._look()
            self._log_wait()
            self._excuse_busy()
            lost = self._lost()
            # finish writing a checkpoint, if this rank does not wait for others
            if not lost or (_is_writing() and not self._doing.is_waiting):
                continue
            calls = list(self._calls)
            number, what = calls[-1] if calls else (int, "")
            self._verdict = number(), lost
            text = what if what or not calls else f"step {self._verdict[0]}"
            message = Lost(tuple(lost), beats=self.beats()).message(text, self._rank, self.timeout_s)
            stack = traceback.format_stack(_main_frame())
            self._is_due.set()
            if self._in_rank_0 and not self._rank:
                # the store ends with this process
                self._all_know.wait(STORE_STAYS * self.timeout_s)
            else:
                time.sleep(_LAST_BEATS * self._interval_s)
            print("".join(stack), file=sys.stderr)
            end_process(message)

    def _lost(self) -> list[int]:
        """Returns the ranks because of which this process must end."""
        doing = self._doing
        if (self._calls or doing.is_waiting) and (found := self.still()):
            return found
        # between calls, user code may have caught an error and wait for a rank that continues
        over = {
            rank: beat
            for rank, beat in self.beats().items()
            if rank != self._rank and self.is_over(beat) and (beat.has_left or self._calls)
        }
        self._over_s = {rank: self._over_s.get(rank, self._lived_s) for rank in over}
        known = [rank for rank, since_s in self._over_s.items() if self._lived_s - since_s > _PATIENCE * self.timeout_s]
        if doing.is_waiting and self._lived_s - doing.since_s > _PATIENCE * self.timeout_s:
            return known
        # this rank may wait for a device, which looks like work; a rank that has finished its part of this call is not needed
        return [rank for rank in known if self._calls and (over[rank].has_failed or over[rank].num_calls < self.num_calls)]

    def is_over(self, beat: Beat) -> bool:
        """Whether a rank's process, or its part of the current call, has ended."""
        return beat.has_left or (beat.has_failed and beat.num_calls >= self.num_calls)

    def _look(self) -> None:
        """Records the activity of the main thread."""
        frames = list(_frames(_main_frame()))
        before_s, self._main_s = self._main_s, _main_thread_s()
        is_waiting = self._main_s - before_s < _BLOCKED_S and _receives(frames)
        words = f"waiting for other ranks {place_of(frames)}" if is_waiting else place_of(frames)
        # time counts from zero in every step
        calls = list(self._calls)
        number = calls[-1][0]() if calls else 0
        if (words, is_waiting, number) != self._doing[:3]:
            self._doing, self._has_told = Doing(words, is_waiting, number, self._lived_s), False

    def _log_wait(self) -> None:
        """Logs once for whom this rank waits, if it is the first waiting rank and has waited long."""
        waited_s, beats = self._lived_s - self._doing.since_s, self.beats()
        if self._has_told or not self._doing.is_waiting or any(beats[rank].is_waiting for rank in range(self._rank)):
            return
        others = {rank: beat for rank, beat in beats.items() if rank != self._rank and beat.number and not self.is_over(beat)}
        silent = self.still(0.5)
        awaited = [beat.words(rank) for rank, beat in others.items() if not beat.is_waiting and rank not in silent]
        if awaited and waited_s > min(_TELLS_AFTER_S, _TELLS_AFTER * self.timeout_s):
            self._has_told = True
            say(f"rank {self._rank} waits for {' and '.join(awaited)} (at most {self.longest_s:g} s: ddp_timeout)")
        elif others and not awaited and not silent and waited_s > self.timeout_s:
            self._has_told = True
            everyone = [f"rank {rank} {beat.doing.removeprefix('waiting for other ranks ')}" for rank, beat in beats.items()]
            say(f"all ranks wait for each other ({', '.join(everyone)}); they end after {self.longest_s:g} s (ddp_timeout)")

    def _excuse_busy(self) -> None:
        """Counts work of a silent rank's process on this host as a beat: its thread cannot beat while another never pauses."""
        silent = self._unchanged(self.timeout_s / 2)
        self._worked = {rank: seconds for rank, seconds in self._worked.items() if rank in silent}
        for rank in silent:
            try:
                process = self._process_here(rank)
                threads = [] if process is None else process.threads()
                seconds = sum(each.user_time + each.system_time for each in threads if process and each.id == process.pid)
            except psutil.Error:
                continue
            before, self._worked[rank] = self._worked.get(rank, seconds), seconds
            if seconds - before >= _WORKS_S:
                self._beats[rank] = self._beats[rank][0], self._read_s


def follow_launcher() -> None:
    """Makes this process end after its launcher has died; does nothing without a launcher. Idempotent."""
    name = "longctx-launcher"
    if "TORCHELASTIC_RUN_ID" not in os.environ or any(thread.name == name for thread in threading.enumerate()):
        return
    launcher = os.getppid()

    def follow() -> None:
        while os.getppid() == launcher:
            time.sleep(_LAUNCHER_POLL_S)
        end_process(f"rank {os.environ.get('RANK', '0')} ends, since its launcher (process {launcher}) has died")

    threading.Thread(target=follow, name=name, daemon=True).start()


def described(error: BaseException | None) -> str:
    """Returns type and first line of an error, for other ranks; empty for a regular end of the script."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def main_thread_calls() -> Iterator[CodeType]:
    """Returns the code objects of the main thread's running functions, innermost first."""
    return (frame.f_code for frame in _frames(_main_frame()))


def place_of(frames: list[FrameType]) -> str:
    """Describes where in the user's code a thread is. frames: innermost first."""
    for frame in frames:
        if frame.f_code.co_name == "call_event" and _module(frame) == "transformers.trainer_callback":
            names = frame.f_locals
            callback = type(names.get("callback"))
            if not callback.__module__.startswith("hf_longctx.") and names.get("event"):
                return f"inside `{names['event']}` of {callback.__name__}"
    number = next((number for number, frame in enumerate(frames) if _is_users(frame)), len(frames))
    called = next((frame for frame in frames[:number] if _module(frame).partition(".")[0] in _TELLING), None)
    call = f"`{called.f_code.co_name}` of {_module(called).partition('.')[0]}" if called is not None else ""
    if number == len(frames):
        return f"inside {call}" if call else "at its end"
    code, name = frames[number].f_code, Path(frames[number].f_code.co_filename).name
    if code.co_name != "<module>":
        return f"inside `{code.co_qualname.replace('<locals>.', '')}` of {name}"
    return f"at line {frames[number].f_lineno} of {name}" + (f", in {call}" if call else "")


def place_of_error(error: BaseException) -> str:
    """Describes where in the user's code an error was raised."""
    frames: list[FrameType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.insert(0, trace.tb_frame)
        trace = trace.tb_next
    return place_of(frames + list(_frames(frames[-1].f_back if frames else None)))


def _is_users(frame: FrameType) -> bool:
    """Whether a frame belongs neither to Python nor to a library."""
    file = frame.f_code.co_filename
    is_installed = file.startswith(("<", *_INSTALLED)) or "-packages" + os.sep in file
    return not is_installed and _module(frame).partition(".")[0] not in _LIBRARIES


_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _main_thread_s() -> float:
    """Returns the processor seconds of the main thread."""
    # not available on every system
    with suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
    return 0.0


def _writer_frame() -> FrameType | None:
    number = next((thread.ident for thread in threading.enumerate() if thread.name == WRITER_THREAD), None)
    return sys._current_frames().get(number or 0)


def _receives(frames: list[FrameType]) -> bool:
    """Whether a thread's innermost function, ignoring torch's operator calls, exchanges messages between ranks."""
    inner = next((frame for frame in frames if _module(frame) != "torch._ops"), None)
    return inner is not None and (_module(inner).startswith(_RECEIVING) or inner.f_code.co_name == _EXCHANGES)


def _is_waiting() -> bool:
    """Whether the main thread is in a function of torch.distributed, such as a collective, or searches for lost ranks.

    While it waits for the writer thread, that thread is examined instead.
    """
    waits_for_writer = any(code.co_name == _WAITS_FOR_WRITER for code in main_thread_calls())
    modules = map(_module, _frames(_writer_frame() if waits_for_writer else _main_frame()))
    # a launcher's decorator encloses the whole script
    return any(
        name == lost_ranks.__name__
        or (name.startswith("torch.distributed.") and not name.startswith("torch.distributed.elastic"))
        for name in modules
    )


def _is_writing() -> bool:
    """Whether the main thread writes a checkpoint and does not wait for other ranks."""
    return not _is_waiting() and any(code.co_name in _WRITES for code in main_thread_calls())


def end_process(text: str) -> None:
    """Writes `text` to stderr and ends this process at once, from any thread."""
    try:
        print(text, file=sys.stderr, flush=True)
    finally:
        os._exit(1)

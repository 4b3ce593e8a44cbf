"""A launcher and its ranks in forked processes that can be killed from outside, with a live report of what rank 0 is doing."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from helpers.ranks.forked import FORKED, free_port, rank_environment, settle

# seconds that a launcher gives the other ranks to end after SIGTERM; torchrun gives 30
_GRACE_S = 10.0
_POLL_S = 0.02
Tell = Callable[[Any], None]
# a start looks for processes that have ended, and must not take the exit code of one that another thread joins
_FORKING = threading.Lock()


class Launched:
    """`function(rank, tell, *arguments)` on every rank under a launcher, which heads a process group of its own.

    As under torchrun, a rank that fails makes the launcher end the others by SIGTERM, then by SIGKILL, unless `ends_others` is
    False. What rank 0 passes to `tell` can be read from `reader`, which ends when the last process has ended.
    """

    def __init__(
        self, function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int, log: str, ends_others: bool = True
    ) -> None:
        self.reader, writer = FORKED.Pipe(duplex=False)
        self._launcher = FORKED.Process(target=_launch, args=(function, arguments, num_ranks, log, writer, ends_others))
        with _FORKING:
            self._launcher.start()
        writer.close()
        # the launcher's first message: process numbers of the ranks
        self.ranks: list[int] = self.reader.recv()

    def kill_rank(self, rank: int) -> None:
        _kill(os.kill, self.ranks[rank])

    def kill_launcher(self) -> None:
        """Kills the launcher alone, which leaves its ranks behind."""
        assert self._launcher.pid
        _kill(os.kill, self._launcher.pid)

    def kill_group(self) -> None:
        """Kills the launcher and all ranks, as a terminal or a scheduler does."""
        assert self._launcher.pid
        _kill(os.killpg, self._launcher.pid)

    def exit_code(self) -> int:
        """The launcher's exit code; call it after `reader` has ended."""
        with _FORKING:
            self._launcher.join()
        assert self._launcher.exitcode is not None
        return self._launcher.exitcode


def _kill(how: Callable[[int, int], None], number: int) -> None:
    with suppress(ProcessLookupError):
        how(number, signal.SIGKILL)


def _launch(
    function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int, log: str, writer: Connection, ends_others: bool
) -> None:
    os.setsid()
    settle()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    port, ranks = free_port(), []
    for rank in range(num_ranks):
        if number := os.fork():
            ranks.append(number)
            continue
        code = 1
        try:
            os.environ.update(rank_environment(rank, num_ranks, port), ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
            # ranks of a launcher end after it
            os.environ["TORCHELASTIC_RUN_ID"] = "none"
            function(rank, writer.send if rank == 0 else _silent, *arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    writer.send(ranks)
    writer.close()
    os._exit(_wait(set(ranks), ends_others))


def _silent(_: Any) -> None:
    pass


def _wait(alive: set[int], ends_others: bool) -> int:
    """Waits for all ranks and returns 0, or 1 if one has failed, whereupon it may end the others."""
    has_failed, until_s = False, float("inf")
    while alive:
        number, status = os.waitpid(-1, os.WNOHANG)
        if number:
            alive.discard(number)
            if status and not has_failed:
                has_failed = True
                if ends_others:
                    until_s = time.monotonic() + _GRACE_S
                for other in alive if ends_others else ():
                    os.kill(other, signal.SIGTERM)
            continue
        if time.monotonic() > until_s:
            for other in alive:
                os.kill(other, signal.SIGKILL)
        time.sleep(_POLL_S)
    return int(has_failed)

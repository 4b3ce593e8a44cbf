"""A persistent pool of ranks, on gloo: processes that run functions of the tests, one pool per world size and session."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import psutil
from helpers.ranks.forked import FORKED, free_port, rank_environment, settle

# also of the server, which imports for eight seconds on a quiet machine
_START_TIMEOUT_S = 240.0
# how long ranks may take to answer after one that failed
_GRACE_S = 5.0

Made = TypeVar("Made")

# process groups of this rank that outlive the function that made them
_LASTING: set[Any] = set()


class RankFailure(RuntimeError):
    """A function raised on some rank, or a rank did not answer in time."""


def _gloo() -> str:
    return "gloo"


class RankPool:
    """`num_ranks` processes joined by gloo; `run` calls a function on all of them and returns their results.

    begin: called by every process before it joins the others; returns the name of their backend.
    """

    def __init__(self, num_ranks: int, collective_timeout_s: float = 60.0, begin: Callable[[], str] = _gloo) -> None:
        self.num_ranks = num_ranks
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = FORKED.Pipe()
            # ranks are no daemons, because data loaders start workers; they end when their pipe closes, even if this process dies
            process = FORKED.Process(target=_serve, args=(rank, num_ranks, port, collective_timeout_s, begin, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.is_alive = True
        self._answers(_START_TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 200.0) -> list[Any]:
        """Runs `function(*args)` on every rank; returns results in rank order. Raises RankFailure with every rank's traceback.

        The pool is closed after a failure, since its ranks may hang in different collectives.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers(timeout_s)

    def close(self) -> None:
        """Ends all processes."""
        self.is_alive = False
        for process in self._processes:
            process.kill()
            process.join()

    def num_threads(self) -> int:
        """Threads of the first rank, of which each of its gloo groups has three."""
        return psutil.Process(self._processes[0].pid).num_threads()

    def _answers(self, timeout_s: float) -> list[Any]:
        found: dict[int, tuple[bool, Any]] = {}
        end_s = time.monotonic() + timeout_s
        while len(found) < self.num_ranks:
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in found], end_s - time.monotonic())
            for rank, pipe in enumerate(self._pipes):
                if rank not in found and (pipe in ready or not ready):
                    found[rank] = self._answer(rank) if ready else (False, "no answer in time")
            if not all(ok for ok, _ in found.values()):
                # the others may wait for a rank that failed
                end_s = min(end_s, time.monotonic() + _GRACE_S)
        failures = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(found.items()) if not ok]
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return [found[rank][1] for rank in range(self.num_ranks)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Whether a rank that has answered or ended succeeded, and its result or its traceback."""
        try:
            ok, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(5.0)
            # a negative number is that of the signal that killed it
            return False, f"the process ended with exit code {self._processes[rank].exitcode}"
        return ok, value


def lasting(make: Callable[[], Made]) -> Made:
    """Result of `make`; process groups that `make` creates stay for later functions.

    All other groups end with the function that created them, because each gloo group has a thread that wakes up a hundred times a
    second, so groups that nobody needs slow all ranks down.
    """
    before = _groups()
    made = make()
    _LASTING.update(_groups() - before)
    return made


def _groups() -> set[Any]:
    from torch.distributed.distributed_c10d import _world

    return set(_world.pg_map)


def _give_up_groups() -> None:
    import torch.distributed as dist

    from hf_longctx.runtime.parameters.sharded import MESH_GROUP

    # groups of meshes stay, since they serve the whole process
    passing = {group for group in _groups() - _LASTING if group.group_desc != MESH_GROUP}
    for group in passing:
        dist.destroy_process_group(group)
    if passing:
        # collect garbage, since reference cycles keep the groups of a finished function alive
        del passing
        gc.collect()


def _serve(rank: int, num_ranks: int, port: int, collective_timeout_s: float, begin: Callable[[], str], pipe: Connection) -> None:
    os.environ.update(rank_environment(rank, num_ranks, port), HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
    import torch
    import torch.distributed as dist

    settle()
    faulthandler.enable()
    torch.set_num_threads(1)
    backend = begin()
    lasting(lambda: dist.init_process_group(backend, timeout=timedelta(seconds=collective_timeout_s)))
    pipe.send((True, rank))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            result = (True, function(*args))
        except Exception:
            result = (False, traceback.format_exc())
        pipe.send(result)
        if not result[0]:
            # the pool is closed
            continue
        # wait for all ranks: gloo's memory gets corrupted if a group ends while another rank still sends in it
        dist.barrier()
        _give_up_groups()

"""Processes that start at once, as forks of a server that has already imported the package and its libraries (eight seconds)."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]


class _ForkedContext(mp.context.ForkServerContext):
    """Start method whose server has imported `preloaded`; in its forks, the system's own method starts loaders' workers."""

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            # the server of Python 3.11 is not told where this process finds its modules
            patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
            # the server imports and does nothing else: no random numbers, process groups or threads that its forks would share
            self.set_forkserver_preload(["helpers.ranks.preloaded"])
            ensure_running()
        return super().Process(*args, **kwargs)


FORKED = _ForkedContext()


def settle() -> None:
    """Prepares a process that was just forked."""
    # imported modules stay for good; a collection would copy all of their pages
    gc.freeze()
    mp.set_start_method("fork", force=True)


# ports below those from which systems choose one for a connection, which could take a free one before its ranks do
_FIRST_PORT, _LAST_PORT = 10_000, 32_000


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    # no seed: other test processes choose at the same moment
    choices = random.SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", choices.randint(_FIRST_PORT, _LAST_PORT)))
            return probe.getsockname()[1]


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Environment variables with which a launcher starts rank `rank` of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class Program:
    """`python script *arguments` in a forked process, which appends its output and errors to two files."""

    def __init__(self, script: Path, arguments: list[str], environment: dict[str, str], out: Path, errors: Path) -> None:
        self._process = FORKED.Process(target=_run, args=(str(script), arguments, environment, str(out), str(errors)))
        self._process.start()

    def wait(self, timeout_s: float) -> int:
        """Waits for the exit code and returns it; after `timeout_s` ends the process and raises TimeoutError."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"no end within {timeout_s:g} s")
        return self._process.exitcode

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


CPU = {"ACCELERATE_USE_CPU": "true"}


def start_ranks(
    script: Path,
    arguments: list[str],
    num_ranks: int,
    folder: Path,
    environment: dict[str, str] | None = None,
    file_per_rank: bool = False,
) -> list[Program]:
    """Starts `script` on ranks of one node. They write to `stdout.txt` and `stderr.txt` in `folder`, or to `stdout0.txt`, ..."""
    port = free_port()
    return [
        Program(
            script,
            arguments,
            {**(environment or {}), **rank_environment(rank, num_ranks, port)},
            *(folder / f"{name}{rank if file_per_rank else ''}.txt" for name in ("stdout", "stderr")),
        )
        for rank in range(num_ranks)
    ]


def run_ranks(
    script: Path, arguments: list[str], num_ranks: int, folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `script` on ranks of one node as a launcher does; ten seconds after a rank fails, the others are ended."""
    out, errors = folder / "stdout.txt", folder / "stderr.txt"
    ranks = start_ranks(script, arguments, num_ranks, folder, environment)
    codes: list[int] = []
    try:
        for rank in ranks:
            codes.append(rank.wait(10.0 if any(codes) else 200.0))
    finally:
        for rank in ranks:
            rank.kill()
    return subprocess.CompletedProcess([str(script), *arguments], max(codes, key=abs), out.read_text(), errors.read_text())


def _run(script: str, arguments: list[str], environment: dict[str, str], out: str, errors: str) -> None:
    settle()
    os.environ.update(environment)
    for number, path in ((1, out), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    run_script(script, arguments)


def run_script(script: str, arguments: list[str]) -> None:
    """Runs a script in this forked process, as `python script *arguments` does."""
    if cache := os.environ.get("HF_DATASETS_CACHE"):
        # the library read the environment when it was imported, before this process set it
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(cache)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")

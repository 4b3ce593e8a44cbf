"""An output folder that another job uses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 1 on elsewhere", file=file, flush=True)
print("holds", flush=True)
time.sleep(600)
"""


@contextmanager
def used_by_another_job(folder: Path) -> Iterator[None]:
    """Context in which another process holds the lock of `folder`, as "process 1 on elsewhere"."""
    program = [sys.executable, "-c", HOLDER, str(folder / ".longctx.lock")]
    holder = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        yield
    finally:
        holder.kill()
        holder.wait()

"""A rank whose main thread is inside a call that never returns is ended by the heartbeats, long before the call's own limit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.ranks.forked import Program, free_port, rank_environment

TIMEOUT_S = 3.0

PROGRAM = """
import ctypes, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from hf_longctx.hf.ranks.agreement import beating, control_group

place, end, file, timeout_s = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
# collectives themselves give up after ten minutes, as those of NCCL do after ten of our limits
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
control_group(timeout_s)
with beating(lambda: 7, timeout_s):
    dist.all_reduce(torch.ones(1))
    # all hearts have been heard
    time.sleep(1.0)
    if place == "receive":
        # rank 0 holds the store, which does not answer any more; a receive of ours waits outside of torch's modules
        lost, work = 0, dist.irecv(torch.ones(1), 0) if dist.get_rank() else None
    else:
        lost = 1
    if dist.get_rank() == lost:
        file.write_text(str(time.time()))
        os.kill(os.getpid(), getattr(signal, end))
    elif place == "receive":
        exec("work.wait()", {"__name__": "hf_longctx.runtime.process_groups", "work": work})
    elif place == "collective":
        dist.all_reduce(torch.ones(1))
    else:
        # releases the interpreter's lock and never looks at signals, as a wait for a device does
        libc = ctypes.CDLL(None)
        while True:
            libc.sleep(600)
"""


# gloo itself notices a peer that was killed, but neither one that was stopped nor, outside a collective, any
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "end"), [("device wait", "SIGKILL"), ("device wait", "SIGSTOP"), ("collective", "SIGSTOP"), ("receive", "SIGSTOP")]
)
def test_a_main_thread_inside_a_blocking_call_does_not_delay_the_verdict(tmp_path: Path, place: str, end: str) -> None:
    program, stopped, port = tmp_path / "program.py", tmp_path / "stopped", free_port()
    program.write_text(PROGRAM)
    ranks = [
        Program(
            program,
            [place, end, str(stopped), str(TIMEOUT_S)],
            rank_environment(rank, 2, port),
            tmp_path / f"stdout{rank}.txt",
            tmp_path / f"stderr{rank}.txt",
        )
        for rank in range(2)
    ]
    try:
        other = int(place == "receive")
        code = ranks[other].wait(60)
        took_s = time.time() - float(stopped.read_text())
    finally:
        for rank in ranks:
            rank.kill()
    errors = (tmp_path / f"stderr{other}.txt").read_text()
    assert code == 1 and f"step 7 could not finish on rank {other}: rank {1 - other} died" in errors, errors
    # the verdict comes after 0.7 limits, and rank 0, which holds the store, stays a little for the others
    assert 0.6 * TIMEOUT_S < took_s < 2 * TIMEOUT_S

"""A rank whose main thread is inside a call that never returns is ended by the heartbeats, long before the call's own limit."""

from __future__ import annotations

import time
from pathlib import Path

from helpers.ranks.forked import start_ranks

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
CASES = [("device wait", "SIGKILL"), ("device wait", "SIGSTOP"), ("collective", "SIGSTOP"), ("receive", "SIGSTOP")]


def test_a_main_thread_inside_a_blocking_call_does_not_delay_the_verdict(tmp_path: Path) -> None:
    """All cases run side by side, since most of their time is a wait."""
    pairs, folders, ended = [], [tmp_path / str(number) for number in range(len(CASES))], dict[int, float]()
    try:
        for folder, (place, end) in zip(folders, CASES, strict=True):
            folder.mkdir()
            program = folder / "program.py"
            program.write_text(PROGRAM)
            arguments = [place, end, str(folder / "stopped"), str(TIMEOUT_S)]
            pairs.append(start_ranks(program, arguments, 2, folder, file_per_rank=True))
        # rank 0 holds the store, which does not answer any more in the last case
        others = [int(place == "receive") for place, _ in CASES]
        until_s = time.monotonic() + 60
        while len(ended) < len(CASES) and time.monotonic() < until_s:
            time.sleep(0.05)
            waiting = [number for number in range(len(CASES)) if number not in ended]
            ended |= {number: time.time() for number in waiting if pairs[number][others[number]].exit_code is not None}
    finally:
        for rank in (each for pair in pairs for each in pair):
            rank.kill()
    for number, (folder, case, other) in enumerate(zip(folders, CASES, others, strict=True)):
        errors = (folder / f"stderr{other}.txt").read_text()
        assert number in ended and pairs[number][other].exit_code == 1, (case, errors)
        assert f"step 7 could not finish on rank {other}: rank {1 - other} died" in errors, (case, errors)
        # the verdict comes after 0.7 limits, and rank 0, which holds the store, stays a little for the others
        assert 0.6 * TIMEOUT_S < ended[number] - float((folder / "stopped").read_text()) < 2 * TIMEOUT_S, case

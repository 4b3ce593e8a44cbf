"""Hearts tell a rank that works from one that stands still, and ranks end after their launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.ranks.forked import free_port

from hf_longctx.hf.data.streams.planned_stream import exchange_tokens
from hf_longctx.hf.ranks.heartbeats import Heartbeats, _frames, _receives

TIMEOUT_S = 2.0

LAUNCHER = """
import subprocess, sys
rank = "import time; from hf_longctx.hf.ranks.heartbeats import follow_launcher; follow_launcher(); follow_launcher(); "
rank += "print('follows', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def hang(hearts: Heartbeats) -> None:
    """Stops the beats without a word, as if the process was stopped."""
    hearts._ends.set()


def wait_for(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits until `holds()`, since threads may be slow on a busy machine; fails after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s"
        time.sleep(0.05)


def has_heard(hearts: Heartbeats, *ranks: int) -> bool:
    """Whether all these ranks count, so that a rank that stops from now on is known."""
    return all(hearts.beats()[rank].number for rank in ranks)


def test_a_rank_that_hangs_is_known_and_one_that_left_is_not_taken_for_it() -> None:
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 3, TIMEOUT_S, 60.0, in_rank_0=False) for rank in range(3)]
    for heart in hearts:
        heart.start()
    wait_for(lambda: has_heard(hearts[0], 1, 2))
    hearts[1].leave()
    hang(hearts[2])
    assert hearts[0].still() == []
    wait_for(lambda: hearts[0].still() == [2])
    # until rank 1 has been silent for longer than that too
    wait_for(lambda: 2 in hearts[0].still(2.0))
    wait_for(lambda: hearts[0].still() == [2])
    assert hearts[0].beats()[1].has_left
    hearts[0].leave()


def test_a_rank_that_stops_right_after_its_start_is_known_after_the_roll_call() -> None:
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 2, TIMEOUT_S / 2, 60.0, in_rank_0=False) for rank in range(2)]
    # stands for a process that was stopped before its threads have run
    hearts[1]._threads.clear()
    hearts[1].start()
    hearts[0].start()
    wait_for(lambda: hearts[0]._read_s > TIMEOUT_S)
    # its beat may be from before a restart
    assert hearts[0].still() == []
    hearts[0].know([heart.start_id for heart in hearts], None)
    wait_for(lambda: hearts[0].still() == [1])
    hearts[0].leave()


def test_a_rank_that_starts_later_and_stops_at_once_is_known_before_the_roll_call() -> None:
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 2, TIMEOUT_S / 2, 60.0, in_rank_0=False) for rank in range(2)]
    hearts[0].start()
    wait_for(lambda: hearts[0]._read_s > 0)
    hearts[1]._threads.clear()
    hearts[1].start()
    wait_for(lambda: hearts[0].still() == [1])
    hearts[0].leave()


def test_a_rank_that_has_not_begun_a_run_with_a_shorter_time_out_is_not_taken_for_one_that_hangs() -> None:
    store = dist.HashStore()
    time_outs_s = (0.5 * TIMEOUT_S, 60.0)
    hearts = [Heartbeats(store, rank, 2, time_outs_s[rank], 60.0, in_rank_0=False) for rank in range(2)]
    for heart in hearts:
        heart.start()
    hearts[0].know([heart.start_id for heart in hearts], None)
    wait_for(lambda: has_heard(hearts[0], 1))
    wait_for(lambda: hearts[0].still() != [] or hearts[0]._read_s > TIMEOUT_S)
    assert hearts[0].still() == []
    hearts[1].limit(0.5 * TIMEOUT_S, 60.0)
    wait_for(lambda: hearts[0].beats()[1].interval_s < TIMEOUT_S)
    hang(hearts[1])
    wait_for(lambda: hearts[0].still() == [1], 10 * TIMEOUT_S)
    hearts[0].leave()


def test_a_rank_that_stands_still_is_known_after_the_store_has_ended() -> None:
    server = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
    hearts = [Heartbeats(store, rank, 3, 2 * TIMEOUT_S, 60.0, in_rank_0=True) for rank, store in enumerate(stores)]
    for heart in hearts:
        heart.start()
    wait_for(lambda: has_heard(hearts[1], 0, 2))
    hang(hearts[2])
    wait_for(lambda: hearts[1].still() == [2])
    del server
    wait_for(lambda: hearts[1].is_blind)
    assert hearts[1].still() == [2]
    for heart in hearts[:2]:
        heart.leave()


def test_ranks_end_when_their_launcher_has_died() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHELASTIC_RUN_ID": "none"}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, env=environment)
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        assert rank.is_running()
        launcher.kill()
        launcher.wait()
        # whoever takes it over may leave it as a zombie
        until_s = time.monotonic() + 20
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until_s:
            time.sleep(0.1)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    finally:
        if rank.is_running():
            rank.kill()


def test_a_rank_that_waits_for_tokens_of_a_stream_waits_for_other_ranks() -> None:
    waits = []

    class Message:
        def wait(self) -> None:
            waits.append(_receives(list(_frames(sys._getframe(1)))))

    def receive(*args: Any) -> Message:
        return Message()

    plan = pipeline_plan([8, 4], [[(1, [[(0, 0, 8)]]), (1, [[(1, 0, 4)]])]], 1)
    with patch.object(dist, "irecv", receive):
        exchange_tokens(plan, [1, 1], {}, False, 0, None)
    assert waits == [True]

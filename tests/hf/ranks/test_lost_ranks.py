"""The roll call of a launch meets on the store of its process group, whatever the launcher's variables say."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.ranks.forked import FORKED, free_port, rank_environment

from hf_longctx.hf.ranks.lost_ranks import Beat, Lost, RollCall, host_identity, report_key


def answer_on_rank(rank: int, port: int, file: str, pipe: Connection) -> None:
    """Meets the other rank over a file; rank 1 then ends, and rank 0 sends which ranks it takes for lost."""
    import torch.distributed as dist

    os.environ.update(rank_environment(rank, 2, port))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    roll_call = RollCall.of_launch("first")
    dist.barrier()
    if rank == 0:
        begun_s = time.monotonic()
        lost = None if roll_call is None else roll_call.lost(step=3, timeout_s=30.0)
        pipe.send((lost, time.monotonic() - begun_s))
    # end like a process that was killed, so that rank 0 alone finds out
    os._exit(0)


def test_ranks_that_met_over_a_file_find_the_lost_one_though_nobody_listens_on_the_port(tmp_path: Path) -> None:
    ours, theirs = FORKED.Pipe()
    port = free_port()
    processes = [FORKED.Process(target=answer_on_rank, args=(rank, port, str(tmp_path / "store"), theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(60)
        lost, seconds = ours.recv()
        # its process has ended, so that nobody waits for its report
        assert lost == [1] and seconds < 15.0
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_rank_0_which_holds_the_store_stays_until_the_others_know_who_is_lost() -> None:
    store = dist.HashStore()
    roll_calls = [RollCall(store, rank, 3, "first") for rank in range(3)]
    for each in roll_calls[:2]:
        each.still = lambda: [2]
    # rank 1 has reported, and asks next who is lost
    roll_calls[1].store.set(report_key(1), "5")
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(roll_calls[0].lost(step=5, timeout_s=20.0)))
    thread.start()
    time.sleep(1.0)
    assert not found
    assert roll_calls[1].lost(step=5, timeout_s=20.0) == [2]
    thread.join(5.0)
    assert found == [[2]]


def test_ranks_meet_at_once_and_know_a_process_that_has_ended() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=200))
    roll_calls = [RollCall(store, rank, 3, "first") for rank in range(3)]
    process = FORKED.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    # stands for the process of rank 2
    roll_calls[2].store.set("longctx/process/2", f"{host_identity()} {process.pid}")
    begin_s = time.monotonic()
    roll_calls[1].meet()
    roll_calls[0].store.set(report_key(0), "5")
    assert roll_calls[1].lost(step=5, timeout_s=200.0) == [2]
    assert time.monotonic() - begin_s < 100


def test_a_report_from_before_a_restart_does_not_count() -> None:
    """A launcher may keep the store, as torchrun does."""
    store = dist.HashStore()
    RollCall(store, 1, 2, "first").store.set(report_key(1), "5")
    again, _ = (RollCall(store, rank, 2, "second") for rank in range(2))
    assert again.lost(step=5, timeout_s=0.5) == [1]


BEATS = {
    0: Beat(number=9, doing="inside `on_evaluate` of MyCallback", since_s=70.4),
    1: Beat(error="ValueError: no room", has_failed=True),
    2: Beat(error="RuntimeError: step 3 could not finish on rank 2: rank 1 ended with ValueError: no room", has_failed=True),
    3: Beat(has_left=True),
    4: Beat(number=5, doing="inside `rows` of data.py"),
}
SLOW = "rank 0, which has been inside `on_evaluate` of MyCallback for 70 s"
PLACES = {0: "at line 3 of a.py", 5: "at line 4 of a.py"}
# loss, seconds of the wait, and the words for them
WORDS = {
    "works": (Lost(late=(0,), beats=BEATS), 60.0, f"it waited 60 s for {SLOW}"),
    "cut off": (Lost(late=(0,), beats=BEATS), 0.0, f"its connection to {SLOW} broke"),
    "raised": (Lost((1,), beats=BEATS), 0.0, "rank 1 ended with ValueError: no room; its own traceback, printed earlier"),
    "raised, and another for that": (Lost((1, 2), beats=BEATS), 0.0, "on rank 5: rank 1 ended with ValueError: no room; its"),
    "left": (Lost((3,), beats=BEATS), 0.0, "rank 3 came to the end of its script; let every rank make the same calls"),
    "died": (
        Lost((4,), beats=BEATS),
        0.0,
        "rank 4 died or did not answer within 8 s (rank 4 was last seen inside `rows` of",
    ),
    "nobody": (Lost(places=PLACES), 60.0, "all ranks waited for each other for 60 s (rank 0 at line 3 of a.py, rank 5 at line 4"),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_message_says_what_is_known_of_each_rank(name: str) -> None:
    lost, longest_s, words = WORDS[name]
    message = lost.message("step 3", 5, 8.0, longest_s)
    assert message.startswith("step 3 could not finish on rank 5: ") and words in message
    assert ("raise ddp_timeout" in message) == (name == "works")

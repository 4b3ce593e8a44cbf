"""The roll call of a launch meets on the store of its process group, whatever the launcher's variables say."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from helpers.ranks.forked import FORKED, free_port, rank_environment

from hf_longctx.hf.ranks.lost_ranks import RollCall


def answer_on_rank(rank: int, port: int, file: str, pipe: Connection) -> None:
    """Meets the other rank over a file; rank 1 then ends, and rank 0 sends which ranks it takes for lost."""
    import torch.distributed as dist

    os.environ.update(rank_environment(rank, 2, port))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    roll_call = RollCall.of_launch()
    dist.barrier()
    if rank == 0:
        pipe.send(None if roll_call is None else roll_call.lost(step=3, timeout_s=30.0))
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
        assert ours.recv() == [1]
    finally:
        for process in processes:
            process.kill()
            process.join()

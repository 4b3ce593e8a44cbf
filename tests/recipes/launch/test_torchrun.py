"""Two nodes, which are two torchrun agents of this machine: the ranks of one are killed, and the training goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.launchers.small_demo import NUM_STEPS, ROOT, SCRIPT, SMALL_DEMO, environment, held_out_loss, steps_of, wait_for
from helpers.models.versions import resuming
from helpers.ranks.forked import free_port


def agent(node: int, endpoint: str, folder: Path, words: list[str], quick_starts: dict[str, str]) -> subprocess.Popen[bytes]:
    """torchrun on one node, with its output in a file."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test", "--local-addr", "127.0.0.1"),
        *(SCRIPT, *words),
    ]
    variables = {**environment(folder), **quick_starts, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"node{node}.txt").open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.slow
@pytest.mark.timeout(900)
@resuming
def test_a_node_whose_ranks_are_killed_rejoins_and_the_run_ends_as_an_undisturbed_one(
    undisturbed_loss: float, quick_starts: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    endpoint = f"127.0.0.1:{free_port()}"
    words = [*SMALL_DEMO, "--output_dir", str(out), "--resume", "auto"]
    agents = [agent(node, endpoint, tmp_path, words, quick_starts) for node in (0, 1)]
    try:
        wait_for(lambda: (out / "checkpoint-4").is_dir())
        (rank,) = psutil.Process(agents[1].pid).children()
        os.kill(rank.pid, signal.SIGKILL)
        codes = [each.wait(600) for each in agents]
    finally:
        for each in agents:
            each.kill()
    logs = [(tmp_path / f"node{node}.txt").read_text() for node in (0, 1)]
    assert codes == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    assert "failed (exitcode: -9)" in logs[1]
    # rank 0 may be on another node after the restart; steps after the checkpoint may run twice, those before it may not
    steps = [step for log in logs for step in steps_of(log)]
    assert set(steps) == set(range(1, NUM_STEPS + 1)) and all(steps.count(step) == 1 for step in range(1, 5))
    assert held_out_loss(out) == pytest.approx(undisturbed_loss, rel=1e-6)

"""Pipeline stages on two nodes, which are two accelerate launchers of this machine with the file for several nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launchers.small_demo import ROOT, SCRIPT, SMALL_DEMO, environment, held_out_loss
from helpers.ranks.forked import free_port


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stage_on_each_node_ends_as_two_ranks_without_stages(
    undisturbed_loss: float, quick_starts: dict[str, str], tmp_path: Path
) -> None:
    variables, port = {**environment(tmp_path), **quick_starts}, str(free_port())
    nodes = []
    for node in (0, 1):
        words = [
            *("--config_file", "recipes/accelerate/nodes.yaml", "--num_processes", "2", "--machine_rank", str(node)),
            *("--main_process_ip", "127.0.0.1", "--main_process_port", port, SCRIPT, *SMALL_DEMO),
            *("--stages", "2", "--expected_world_size", "2", "--output_dir", str(tmp_path / "out")),
        ]
        with (tmp_path / f"node{node}.txt").open("wb") as file:
            command = [sys.executable, "-m", "accelerate.commands.launch", *words]
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [each.wait(600) for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    logs = [(tmp_path / f"node{node}.txt").read_text() for node in (0, 1)]
    assert codes == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    assert "2 ranks on cpu, gloo" in "".join(logs)
    assert held_out_loss(tmp_path / "out") == pytest.approx(undisturbed_loss, rel=1e-5)

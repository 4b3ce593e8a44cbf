"""Ray Train runs the recipe with two CPU workers, and starts it again after one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from helpers.launchers.small_demo import NUM_STEPS, ROOT, SMALL_DEMO, environment, held_out_loss, steps_of, wait_for
from helpers.models.versions import resuming

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


@pytest.mark.slow
@pytest.mark.timeout(900)
@resuming
def test_a_run_whose_worker_is_killed_goes_on_and_ends_as_an_undisturbed_one(undisturbed_loss: float, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log.txt"
    options = ["--workers", "2", "--restarts", "1"]
    # a busy machine needs more than a minute to start workers
    ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}
    variables = {**environment(tmp_path), **ours}
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, "recipes/launch/ray_train.py", *options, *SMALL_DEMO, "--output_dir", str(out)],
            cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    family = psutil.Process(driver.pid)
    try:
        wait_for(lambda: (out / "checkpoint-4").is_dir() or driver.poll() is not None)
        workers = [each for each in family.children(recursive=True) if "RayTrainWorker" in " ".join(each.cmdline())]
        assert len(workers) == 2, log.read_text()[-5000:]
        os.kill(workers[1].pid, signal.SIGKILL)
        code = driver.wait(600)
    finally:
        for each in [*family.children(recursive=True), family] if driver.poll() is None else []:
            each.kill()
    text = log.read_text()
    assert code == 0, text[-5000:]
    assert "2 ranks on cpu, gloo" in text
    steps = steps_of(text)
    assert set(steps) == set(range(1, NUM_STEPS + 1)) and all(steps.count(step) == 1 for step in range(1, 5))
    assert held_out_loss(out) == pytest.approx(undisturbed_loss, rel=1e-6)
    # Ray knows the checkpoints where the ranks have saved them, and has copied none
    assert f"newest checkpoint that Ray knows: {out}/checkpoint-{NUM_STEPS}" in text
    places = {file.parent.name for file in tmp_path.rglob("*.safetensors")}
    assert places == {"out", *(f"checkpoint-{step}" for step in range(4, NUM_STEPS + 1, 4))}
    reported = json.loads((out / "checkpoint_manager_snapshot.json").read_text())["checkpoint_results"]
    assert [each["checkpoint_dir_name"] for each in reported][-1] == f"checkpoint-{NUM_STEPS}"

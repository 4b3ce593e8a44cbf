"""Run without a disturbance, with which all launchers' runs are compared."""

from __future__ import annotations

import pytest
from helpers.launchers.small_demo import NUM_STEPS, ROOT, SCRIPT, SMALL_DEMO, held_out_loss, steps_of
from helpers.ranks.forked import run_ranks


@pytest.fixture(scope="session")
def undisturbed_loss(tmp_path_factory) -> float:
    """Held-out loss of the small demo on two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [str(ROOT / SMALL_DEMO[0]), *SMALL_DEMO[1:], "--output_dir", str(folder / "out")]
    run = run_ranks(ROOT / SCRIPT, words, 2, folder, {"HF_DATASETS_CACHE": str(folder / "cache")})
    assert run.returncode == 0, run.stderr[-3000:]
    assert steps_of(run.stdout) == list(range(1, NUM_STEPS + 1))
    return held_out_loss(folder / "out")

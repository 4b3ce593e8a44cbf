"""The packing benchmark prints a row per distribution and says when its requirement is not met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[4] / "recipes" / "bench" / "cpu" / "packing.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH), *arguments], capture_output=True, text=True, timeout=120)


def test_every_distribution_has_a_row_and_a_file_adds_one(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("7\n90\n200\n3\n")
    numbers = tmp_path / "numbers.json"
    arguments = ["--sequences", "300", "--capacities", "64", "100", "--lengths", str(tmp_path / "mine.txt")]
    run = bench(*arguments, "--no-peer", "--json", str(numbers))
    assert run.returncode == 0, run.stderr
    rows = json.loads(numbers.read_text())
    assert len(rows) == 8 == len(run.stdout.splitlines()) - 1
    # 7 + 90 + 3, and the 200 that was truncated
    assert [row["bins"] for row in rows if row["lengths"] == "mine"] == [3, 2]
    assert all(row["bound"] <= row["bins"] and 0 < row["efficiency"] <= 1 for row in rows)


def test_a_requirement_without_the_peer_to_compare_with_is_an_error() -> None:
    run = bench("--no-peer", "--require", "10", "0.999")
    assert run.returncode == 2 and "install it (pip install trl)" in run.stderr

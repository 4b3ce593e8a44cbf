"""The benchmark of a stream's readers draws batches on gloo ranks and compares one reader with several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[4] / "recipes" / "bench" / "cpu" / "data" / "stream_readers.py"


@pytest.mark.wide
def test_every_source_has_a_rate_for_one_reader_and_for_several(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ["--ranks", "2", "--readers", "2", "--steps", "2", "--rounds", "1", "--rows-per-step", "4", "--wait-ms", "1"]
    run = subprocess.run([sys.executable, BENCH, *sizes, "--json", numbers], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    found = json.loads(numbers.read_text())
    assert {(rate["source"], rate["readers"]) for rate in found["rates"]} == {
        (source, readers) for source in ("waits", "tokenises") for readers in (1, 2)
    }
    assert all(rate["tokens_per_s"] > rate["rows_per_s"] > 0 for rate in found["rates"])
    assert "times as many rows per second with 2 readers as with 1" in run.stdout

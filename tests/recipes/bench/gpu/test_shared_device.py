"""The comparison of several ranks with one process runs on the CPU; a wrong weight, a lost row and a late one fail it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_longctx.recipes.bench.gpu import ranks
from hf_longctx.recipes.bench.gpu.rows import read_rows


@pytest.mark.wide
@pytest.mark.slow
def test_layouts_equal_one_process_and_a_killed_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = ["--only", "Ulysses", "slices", "resumed", "killed"]
    assert ranks.main(["--toy", "--ranks", "2", "--budget-s", "400", *words, "--json", str(file)]) == 0
    rows = {row["name"]: row for row in read_rows(file)}
    assert list(rows) == ["Ulysses", "stages, slices", "shards, resumed as stages", ranks.KILLED]
    assert 0 < rows["Ulysses"]["weight_error"] < 1e-4 and rows["Ulysses"]["note"].startswith("<2>")
    assert "3 cuts" in rows["stages, slices"]["note"] and "rank 1 died" in rows[ranks.KILLED]["note"]
    assert "4 of 4 rows are ok" in capsys.readouterr().out


def test_every_layout_has_a_row_for_two_ranks_and_those_of_blocks_for_four() -> None:
    two, four = (ranks.cases(n, 128) for n in (2, 4))
    assert set(two) < set(four) and list(four)[-1] == ranks.KILLED
    assert {case.model for case in two.values()} == {"dense", "adapters", "fp8", "experts", "states"}


@pytest.mark.parametrize("error", [0.0, 1e-2])
def test_a_wrong_weight_fails_and_is_named(tmp_path: Path, error: float) -> None:
    job = ranks.Job(tmp_path, 2, ("Ulysses",), "cpu", True)
    changes = {"a": torch.ones(4), "b": torch.arange(1.0, 5.0)}
    torch.save(([2.0, 1.0], changes, ""), tmp_path / "dense.pt")
    found = {"a": changes["a"], "b": changes["b"] * (1 + error)}
    row = ranks.compared(job, "Ulysses", ranks.Case({}), ([2.0, 1.0], found, "<2>"))
    assert row.is_good == (error == 0) and row.weight_error == pytest.approx(error, abs=1e-6)
    assert row.note == ("<2>; worst: b" if error else "<2>")
    # NaN is never good, in any place
    wrong = {"a": changes["a"], "b": changes["b"] * float("nan")}
    assert not ranks.compared(job, "Ulysses", ranks.Case({}), ([2.0, 1.0], wrong, "")).is_good
    assert not ranks.compared(job, "Ulysses", ranks.Case({}), ([2.0, float("nan")], changes, "")).is_good
    # a weight that the ranks did not save
    assert not ranks.compared(job, "Ulysses", ranks.Case({}), ([2.0, 1.0], {"a": changes["a"]}, "")).is_good
    # a step without a loss
    assert not ranks.compared(job, "Ulysses", ranks.Case({}), ([2.0], changes, "")).is_good


def test_rows_for_which_no_time_is_left_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.main(["--toy", "--ranks", "2", "--only", "Ulysses", "--budget-s", "-1"]) == 1
    assert "0 of 1 rows are ok, 1 were not run: the time is up" in capsys.readouterr().out


def test_a_reference_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "raise KeyError('none')"]
    monkeypatch.setattr(
        ranks, "start_rank", lambda *_: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    )
    assert ranks.main(["--toy", "--ranks", "2", "--only", "Ulysses", "--budget-s", "200"]) == 1
    said = capsys.readouterr().out
    assert "the reference in one process failed for the model 'dense', so nothing is compared: KeyError: 'none'" in said, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: torch sees no CUDA device")

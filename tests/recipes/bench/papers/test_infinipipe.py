"""The joint plan beats the paper's own method and fixed chunks by the promised factors; bad input ends with a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hf_longctx.recipes.bench.papers import infinipipe as bench

main: Callable[[list[str]], int] = bench.main


# one number of slices, close to the best of every method
@pytest.mark.wide
@pytest.mark.parametrize("case,num_slices", [("96K/35", 16), ("192K/50", 32)])
def test_the_joint_plan_is_as_much_faster_as_promised(case: str, num_slices: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", case, "--seeds", "1", "--slices", str(num_slices), "--json"]) == 0
    rows: dict[str, Any] = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["elastic + joint"]["to_no_limit"] == pytest.approx(1, abs=0.03)
    assert rows["paper"]["to_joint"] > 1.05
    assert rows["fixed chunks"]["to_joint"] > 1.2
    # every idea gains something by itself
    assert rows["elastic + joint"]["step_s"] < rows["elastic + recompute"]["step_s"] < rows["paper"]["step_s"]


def test_the_row_of_pipelines_is_the_best_of_all() -> None:
    # two pipelines, of one and of two kinds of families, against a single one of all three
    seconds = {(0, 1): 3.0, (1, 2): 2.0, (2, 3): 2.0, (0, 2): 6.0, (1, 3): 3.5, (0, 3): 6.6}
    assert bench._shortest(seconds, 3) == (6.5, [(0, 1), (1, 3)])
    assert bench._shortest({**seconds, (0, 3): 6.4}, 3) == (6.4, [(0, 3)])


def test_lengths_are_those_of_the_seed_with_one_of_the_longest() -> None:
    lengths = bench.draw_lengths(98304, 200, 3)
    assert lengths == bench.draw_lengths(98304, 200, 3) != bench.draw_lengths(98304, 200, 4)
    assert lengths[0] == max(lengths) == 98304 and min(lengths) >= 32 and len(lengths) == 200


@pytest.mark.parametrize("arguments", [["--cases", "96K"], ["--cases", "K/35"], ["--seeds", "0"], ["--slices", "0"]])
def test_bad_input_ends_with_a_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "error: --" in capsys.readouterr().err

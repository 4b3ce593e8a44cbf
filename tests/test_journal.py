"""The journal: what stays after kills, resumes and new trainings in one folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_longctx.journal import JOURNAL, append_lines, read_journal

pytestmark = pytest.mark.quick


def start(training: str, step: int) -> dict[str, object]:
    return {"kind": "start", "training": training, "step": step}


def steps(training: str, *numbers: int) -> list[dict[str, object]]:
    return [{"kind": "step", "training": training, "step": number} for number in numbers]


def steps_read(folder: Path) -> list[tuple[str, int]]:
    return [(line["training"], line["step"]) for line in read_journal(folder).of("step")]


def test_a_resumed_training_has_every_step_once(tmp_path: Path) -> None:
    append_lines(tmp_path, [start("a", 0), *steps("a", 1, 2, 3, 4)])
    append_lines(tmp_path, [start("b", 2), *steps("b", 3, 4, 5)])
    append_lines(tmp_path, [start("c", 4), *steps("c", 5, 6)])
    assert steps_read(tmp_path) == [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5), ("c", 6)]
    assert [line["step"] for line in read_journal(tmp_path).of("start")] == [0, 2, 4]
    # nothing is removed from the file
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 12


def test_a_new_training_in_the_folder_begins_anew_with_its_own_evaluations(tmp_path: Path) -> None:
    append_lines(tmp_path, [start("a", 0), *steps("a", 1, 2)])
    log = {"kind": "log", "step": 0, "logs": {"eval_loss": 3.0}}
    append_lines(tmp_path, [{**log, "training": "b"}, start("b", 0), *steps("b", 1)])
    assert steps_read(tmp_path) == [("b", 1)]
    assert len(read_journal(tmp_path).of("log")) == 1


def test_an_evaluation_before_a_resume_is_not_one_of_step_zero(tmp_path: Path) -> None:
    append_lines(tmp_path, [start("a", 0), *steps("a", 1, 2)])
    append_lines(tmp_path, [{"kind": "log", "training": "b", "step": 0, "logs": {}}, start("b", 1), *steps("b", 2)])
    assert read_journal(tmp_path).of("log") == []
    assert steps_read(tmp_path) == [("a", 1), ("b", 2)]


def test_a_line_that_a_kill_cut_off_costs_nothing_else(tmp_path: Path) -> None:
    append_lines(tmp_path, [start("a", 0), *steps("a", 1, 2)])
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-9])
    append_lines(tmp_path, [start("b", 1), *steps("b", 2)])
    assert steps_read(tmp_path) == [("a", 1), ("b", 2)]
    assert read_journal(tmp_path).num_unreadable == 1


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    append_lines(tmp_path, [start("a", 0), {**steps("a", 1)[0], "loss": float("nan"), "all": [float("inf"), 1.5], "at": {2: 3}}])
    (line,) = read_journal(tmp_path).of("step")
    assert (line["loss"], line["all"], line["at"]) == (None, [None, 1.5], {"2": 3})


def test_a_log_is_read_without_the_values_that_no_chart_shows(tmp_path: Path) -> None:
    logs = {"loss": 2.0, "grad_norm": float("nan"), "eval_perplexity": 1e40, "is_best": True}
    append_lines(tmp_path, [start("a", 0), {"kind": "log", "training": "a", "step": 1, "logs": logs}])
    journal = read_journal(tmp_path)
    assert [line["logs"] for line in journal.of("log")] == [{"loss": 2.0}] and journal.num_unreadable == 0


@pytest.mark.parametrize("text", ["", "[]\n", '{"kind": "step", "training": "a", "step": 1}\n', "\xff{"])
def test_a_file_without_a_training_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL).write_text(text)
    with pytest.raises(ValueError, match="no line that begins a training"):
        read_journal(tmp_path)


def test_lines_are_one_json_object_each(tmp_path: Path) -> None:
    append_lines(tmp_path / "new" / "folder", [start("a\n", 0)])
    (line,) = (tmp_path / "new" / "folder" / JOURNAL).read_text().splitlines()
    assert json.loads(line)["training"] == "a\n"

"""Trainings on a terminal: one line per log, above a bar that vanishes, whichever way plans come into a trainer."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from helpers.launchers import told_trainings as told
from helpers.launchers.small_demo import ROOT
from helpers.launchers.terminal import Screen, screens

COLUMNS = 80
OPENING = ("plans for 1 rank", "memory of a rank", "training: ", "written to ", "attention: ")
LINE = re.compile(r"step +(\d+) \| loss +[\d.]+ \| +.*s a step.* \| +[\d,]+ tokens/s .*\| lr [\d.e-]+ \| norm [\d.e-]+")
# the name comes a moment after the bar, and Ctrl-C is shown where it is typed
BAR = re.compile(r"((training|evaluating):)? +\d+%\|[^|]*\|? *[^a-z]*([\d.?]+( steps|it)/s|s/( steps|it))?[\], ]*(\^C)? *")
INTERRUPTED = "rank 0 got SIGINT: the training finishes its step, saves and stops; again ends it at once"
STOPPED = re.compile(
    r"the training stopped after step \d+ of 100000, since it got SIGINT; its checkpoint is in out. "
    r"Go on with train\(resume_from_checkpoint=True\)"
)


def joined(lines: list[str]) -> list[str]:
    """Lines without the breaks that a narrow terminal asked for."""
    whole: list[str] = []
    for line in lines:
        if line.startswith("  ") and whole:
            whole[-1] += f" {line.strip()}"
        elif line.strip():
            whole.append(line.rstrip())
    return whole


# many programs one after another; most of their time is loading
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lines_and_bars_of_every_way_to_train_share_a_terminal(tmp_path: Path) -> None:
    stops: list[str] = []

    def stop(said: str) -> str:
        """Ctrl-C, once, when the last training is under way."""
        if stops or not re.search(r"way: stopped.*step +2 \|", said, re.DOTALL):
            return ""
        stops.append("\x03")
        return stops[0]

    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    command = [sys.executable, str(Path(told.__file__)), "out"]
    seen, screen = set[str](), Screen(COLUMNS)
    for screen in screens(command, COLUMNS, tmp_path, environment, stop):
        bars = [line for line in screen.lines if "%|" in line]
        # at most one of a training and one of an evaluation, which nothing has torn
        assert len(bars) <= 2 and all(BAR.fullmatch(bar) for bar in bars), screen.lines
        seen |= {word for word in ("training", "evaluating") if any(bar.startswith(f"{word}: ") for bar in bars)}
    assert seen == {"training", "evaluating"}
    text = "\n".join(screen.lines)
    assert "%|" not in text and "{'" not in text and "Traceback" not in text, text
    *ways, stopped = [joined(way.splitlines()) for way in text.split("way: ")[1:]]
    assert [way[0] for way in ways] == ["ours", "attached", "given", "added"]
    for name, *lines in ways:
        assert [line.startswith(begin) for line, begin in zip(lines, OPENING, strict=False)] == [True] * 5, lines
        logged = [line for line in lines if line.startswith("step ")]
        assert [int(LINE.fullmatch(line)[1]) for line in logged] == [2, 4], logged
        # each in one line of its own
        assert lines.count(told.WARNING) == 1, lines
        assert sum(line.startswith("evaluation after step 3: loss ") for line in lines) == 1, lines
        assert sum(line.startswith("trained up to step 5 in ") for line in lines) == 1, lines
        assert any(line.startswith("cost model fitted") for line in lines) == (name in ("ours", "attached")), lines
        assert len(lines) == len(set(lines)), lines
    assert STOPPED.fullmatch(stopped[-1]), stopped
    assert sum(line == INTERRUPTED for line in stopped) == 1, stopped

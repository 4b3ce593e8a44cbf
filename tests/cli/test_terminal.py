"""Reports on a terminal have every cell of the plain text, drawn by rich; elsewhere they are the plain text."""

from __future__ import annotations

import re
import sys

import pytest

from hf_longctx.cli import terminal
from hf_longctx.sim.output.tables import Table, as_text

TABLE = Table.of(("rank", "busy", ""), [("0 to 3", "110 ms", "fine"), ("4", "90 ms", "")])


def test_a_table_is_its_text() -> None:
    assert TABLE == "  rank      busy\n  0 to 3  110 ms  fine\n  4        90 ms"


def test_plain_text_goes_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_sections([["MEMORY", TABLE], ["LONGEST"]])
    assert capsys.readouterr().out == as_text([["MEMORY", TABLE], ["LONGEST"]]) + "\n"


def test_a_narrow_terminal_breaks_neither_numbers_nor_words_of_a_header(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "48")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    head = ("rank", "computing", "exchanging", "peak tokens", "")
    terminal.print_sections([["STEP", Table.of(head, [("0 to 3", "1 min 27 s", "110 ms", "6,449", "words that wrap " * 3)])]])
    drawn = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()]
    words = {word for line in drawn for word in line}
    assert {"computing", "exchanging", "peak", "tokens", "6,449"} <= words
    assert any("1 min 27 s" in " ".join(line) for line in drawn) and any("110 ms" in " ".join(line) for line in drawn)


def test_a_terminal_gets_drawn_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.print_sections([["MEMORY  [of a rank]", TABLE]])
    drawn = capsys.readouterr().out
    assert "─" in drawn and "MEMORY  [of a rank]" in drawn
    assert all(cell in drawn for row in (TABLE.head, *TABLE.rows) for cell in row)
    terminal.print_summary("You can train.", [("memory", "word " * 30)], "plain")
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    # long lines wrap below their text, not below their name
    assert len(lines) > 3 and all(line.startswith("        word") for line in lines[2:])
    monkeypatch.setenv("TERM", "dumb")
    terminal.print_summary("You can train.", [], "plain")
    assert capsys.readouterr().out == "plain\n"

"""Times in messages read as people say them, and lines break where people would break them."""

from __future__ import annotations

import io

import pytest

from hf_longctx.plan.core.messages import duration, on_screen, wrapped


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0123456, "12.3 ms"),
        (0.5, "500 ms"),
        (0.9996, "1.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (200.0, "3 min 20 s"),
        (3599.6, "1 h"),
        (7500.0, "2 h 5 min"),
        (674349.54, "7.8 days"),
    ],
)
def test_seconds_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_break_between_words_and_rather_between_parts() -> None:
    assert wrapped("one two three", 8) == "one two\n  three"
    assert wrapped("  a list of\nshort", 9) == "  a list\n    of\nshort"
    line = "step 2 | loss 4.70 | 172 ms a step | 299 tokens/s"
    assert wrapped(line, 29) == "step 2 | loss 4.70 |\n  172 ms a step |\n  299 tokens/s"
    assert wrapped(line, len(line)) == line
    # a column that begins at the same place
    column = " " * 13
    assert wrapped("ok    scans  code in place of it", 20, column) == f"ok    scans  code in\n{column}place\n{column}of it"
    # nothing to break
    assert wrapped("/a/very/long/path", 4) == "/a/very/long/path"


def test_only_a_terminal_gets_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "8")
    file = io.StringIO()
    assert on_screen("one two three", file) == "one two three"
    monkeypatch.setattr(file, "isatty", lambda: True)
    assert on_screen("one two three", file) == "one two\n  three"

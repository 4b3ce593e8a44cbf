"""Texts of a signal handler reach terminals of every kind."""

from __future__ import annotations

import os
import pty

import pytest

from hf_longctx.hf.ranks import stop_signals


def test_a_terminal_that_nobody_has_sized_gets_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = pty.openpty()
    monkeypatch.setattr(stop_signals, "_error_file", lambda: theirs)
    assert os.get_terminal_size(theirs).columns == 0
    stop_signals.say("the training finishes its step, saves and stops " * 3)
    assert os.read(own, 4096).count(b"finishes") == 3
    os.close(own)
    os.close(theirs)

"""A closed terminal asks a training to stop, as SIGTERM does, unless the process ignores it, as under nohup."""

from __future__ import annotations

import os
import signal

import pytest

from hf_longctx.hf.ranks.stop_signals import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_asks_once_and_handlers_come_back(number: signal.Signals) -> None:
    # ignored already if the tests were started under nohup
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignals(0, 1) as signals:
            os.kill(os.getpid(), number)
            assert signals.asked is number
            assert signals.counts() == [int(each is number) for each in SIGNALS]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_closed_terminal_is_among_them_and_nohup_keeps_ignoring_it() -> None:
    assert signal.SIGHUP in SIGNALS
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(0, 1) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.asked is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

"""Some odd arguments of trainers end in a run or a refusal; `constructors.py` tries as many as you like."""

from __future__ import annotations

import threading

from soak.constructors import soak


def test_odd_arguments_end_in_a_run_or_a_refusal() -> None:
    found, wrong = soak(60, 1)
    assert not wrong
    assert min(found["trained"], found["refused"]) > 5
    # threads of transformers that measure memory without a pause
    assert not [thread.name for thread in threading.enumerate() if "peak_monitor" in thread.name]

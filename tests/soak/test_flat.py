"""A short version of `flat.py`, which runs thousands of steps."""

from __future__ import annotations

import pytest
from soak.flat import long_run, many_runs


def test_a_run_holds_nothing_of_its_steps() -> None:
    before, after = long_run(120)
    assert not before.growth(after)


@pytest.mark.wide
def test_a_process_holds_nothing_of_its_trainings() -> None:
    before, after = many_runs(6)
    assert not before.growth(after)

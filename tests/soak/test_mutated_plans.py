"""A thousand damaged plan files are read or refused; `mutated_plans.py` runs as many as you like."""

from __future__ import annotations

import pytest
from soak.mutated_plans import outcome, soak


def test_damaged_plan_files_are_refused_in_words() -> None:
    found = soak(1000)
    assert found["refused"] > 900 and found["valid"] > 1


@pytest.mark.parametrize("text", ["[" * 10**6, "9" * 10**5, "\\x00", "", '{"schema": 1}', '{"schema": ' + "1" * 5000 + "}"])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    assert outcome(text) == "refused"

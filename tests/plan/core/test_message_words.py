"""Times in messages read as people say them."""

from __future__ import annotations

import pytest

from hf_longctx.plan.core.messages import duration


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

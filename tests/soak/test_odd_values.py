"""Some odd values of settings are taken or refused in words; `odd_values.py` tries as many as you like."""

from __future__ import annotations

from pathlib import Path

from soak.odd_values import soak


def test_odd_values_are_taken_or_refused_in_words(tmp_path: Path) -> None:
    found = soak(160, 0, 0, tmp_path)
    assert min(found[f"{kind} {outcome}"] for kind in ("config", "recipe", "plan") for outcome in ("taken", "refused")) > 0

"""Some of the draws of config.json files, which all end in a forecast or a refusal; `odd_configs.py` draws more."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.odd_configs import CONFIGS, SMALL, outcomes

from hf_longctx.plan.model.config import check_fields


def test_odd_configs_are_forecast_or_refused(tmp_path: Path) -> None:
    found = outcomes(150, 7, tmp_path)
    assert set(found) == {"forecast", "refused"} and min(found.values()) > 10


@pytest.mark.parametrize("name", [*CONFIGS, *SMALL])
def test_public_configs_have_sound_fields(name: str) -> None:
    check_fields({**CONFIGS, **SMALL}[name])

"""Two ranks are stopped while they save a part of a model; `stops.py` does that wherever ranks wait, as often as you like."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.stops import Soak, Trial


@pytest.mark.daily("stages-4-0")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks", "rank"), [("sharded", 3, 1), ("stages", 4, 0)])
def test_a_rank_that_stops_in_a_save_is_named_by_all_others_in_time(tmp_path: Path, kind: str, num_ranks: int, rank: int) -> None:
    found = Soak(tmp_path).run_at(Trial(0, kind, num_ranks, rank, "save", 0.0, timeout_s=4.0), 0, 0.02)
    assert found and found.step == 2

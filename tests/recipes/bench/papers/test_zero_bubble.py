"""Split backwards take the time of the published closed form, and gain on long contexts what the schedules say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.plan.core import orders
from hf_longctx.plan.core.orders import compute_actions
from hf_longctx.plan.core.types import Chunk, Span
from hf_longctx.recipes.bench.papers import zero_bubble as bench


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 5.0, 2.0)])
def test_whole_sequences_idle_as_the_papers_say(num_stages: int, times: tuple[float, float, float]) -> None:
    num_chunks = 9
    order = compute_actions([Chunk(i, (Span(i, 0, 1),)) for i in range(num_chunks)], num_stages, "1f1b")
    forward_s, input_s, weight_s = times
    held = [num_stages] * num_stages
    split_s = bench.split_makespan(order, [bench.SliceTimes(*times)] * num_chunks, held)
    whole = [bench.SliceTimes(forward_s, input_s + weight_s, 0.0)] * num_chunks
    whole_s = bench.split_makespan(order, whole, [math.inf] * num_stages)
    # idle time of 1F1B and of ZB-H1 (arXiv 2401.10241, table 2)
    assert whole_s == num_chunks * sum(times) + (num_stages - 1) * sum(times)
    assert split_s == num_chunks * sum(times) + (num_stages - 1) * (forward_s + input_s - weight_s)


def test_the_gain_at_equal_memory_shrinks_with_slices_and_with_length(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    slices, tokens = [1, 2, 4, 8, 16], [32768, 65536, 131072]
    assert bench.main(["--slices", *map(str, slices), "--json", str(numbers)]) == 0
    rows: dict[tuple[int, int], Any] = {(row["tokens"], row["slices"]): row for row in json.loads(numbers.read_text())}
    for length in tokens:
        gains = [rows[length, count]["same_memory"] for count in slices]
        assert gains == sorted(gains, reverse=True)
        # a single sequence leaves 3 of 11 slots idle, and no split saves more than the idle time
        assert rows[length, 1]["no_idle"] == pytest.approx(3 / 11)
        for count in slices:
            row = rows[length, count]
            assert 0 < row["same_memory"] <= row["any_memory"] <= row["no_idle"]
        # twice as many slices save more than the split does
        assert rows[length, 4]["no_idle"] - rows[length, 8]["no_idle"] > rows[length, 4]["same_memory"]
    for count in slices:
        assert rows[32768, count]["same_memory"] > rows[65536, count]["same_memory"] > rows[131072, count]["same_memory"]
    assert max(rows[length, count]["same_memory"] for length in tokens for count in (4, 8, 16)) < 0.04


def test_the_schedules_tell_the_numbers_of_the_simulation() -> None:
    model = bench.named_model("gpt-7b")
    told = re.findall(r"^ +(\d+)K +([\d.]+) % +([\d.]+) % +([\d.]+) %, ([\d.]+) %$", orders.__doc__ or "", re.MULTILINE)
    assert [int(row[0]) for row in told] == [32, 64, 128]
    for row in told:
        four, eight = (bench.gains(model, int(row[0]) * 1024, count, 4, 8) for count in (4, 8))
        found = (four["same_memory"], eight["same_memory"], four["no_idle"], eight["no_idle"])
        assert [f"{100 * share:.1f}" for share in found] == list(row[1:])

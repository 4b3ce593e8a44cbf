"""The simulation of lent stages agrees with a closed form, and counts what has to be moved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.plan.core.lending import lent_order
from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup, Span
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict import lending as lent_slices
from hf_longctx.plan.predict.lending import lent_group
from hf_longctx.recipes.bench.papers import lending as bench


def sliced(num_stages: int, num_slices: int) -> SequenceGroup:
    chunks = tuple(Chunk(place, (Span(0, place, place + 1),)) for place in range(num_slices))
    return pipelined(SequenceGroup((0,), "local", chunks, ()), layer_ranges(num_stages, num_stages))


def unit_s(action: Action, num_running: int) -> float:
    return (1 if action.kind == "F" else 2) / num_running


def forward_slots(num_stages: int, num_slices: int) -> float:
    """Slots of one pass: stage i shares P-1-i first slices with P-i stages, and i last ones with i+1, one stage at a time."""
    fills, filled = [], 0.0
    for stage in range(num_stages):
        filled += (num_stages - 1 - stage) / (num_stages - stage)
        fills.append(filled)
    drained = 0.0
    for stage in range(num_stages):
        drained = max(drained, fills[stage]) + stage / (stage + 1)
    return drained + num_slices - num_stages + 1


@pytest.mark.parametrize(("num_stages", "num_slices"), [(1, 3), (2, 4), (4, 3), (4, 8), (4, 32), (8, 16), (6, 5)])
def test_equal_slices_take_the_closed_form_with_and_without_lending(num_stages: int, num_slices: int) -> None:
    group = sliced(num_stages, num_slices)
    assert bench.lent_makespan(lent_order(group), unit_s) == 3 * (num_slices + num_stages - 1)
    lent_s = bench.lent_makespan(lent_order(lent_group(group)), unit_s)
    assert lent_s == pytest.approx(3 * forward_slots(num_stages, num_slices))
    assert 3 * num_slices <= lent_s + 1e-9


def test_eight_slices_on_four_stages_take_25_of_33_slots() -> None:
    assert bench.lent_makespan(lent_order(lent_group(sliced(4, 8))), unit_s) == pytest.approx(25)


def test_stages_that_wait_for_each_other_are_an_error() -> None:
    rows = [list(row) for row in lent_order(lent_group(sliced(2, 4)))]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]
    with pytest.raises(ValueError, match="deadlock: 0F0@1:0, 1F0 wait for ranks that wait for them"):
        bench.lent_makespan(rows, unit_s)


def test_the_table_orders_what_moves_and_saves_no_more_than_is_idle(tmp_path: Path) -> None:
    def table(bytes_per_s: str) -> list[dict[str, Any]]:
        numbers = tmp_path / "numbers.json"
        assert bench.main(["--bytes-per-s", bytes_per_s, "--json", str(numbers)]) == 0
        rows: list[dict[str, Any]] = json.loads(numbers.read_text())
        return rows

    slow, fast = table("2.5e10"), table("1e30")
    for row, ideal in zip(slow, fast, strict=True):
        assert row["weights"] < row["kv"] < row["free"] < row["idle"]
        # over infinitely fast links, moving costs nothing
        assert ideal["weights"] == pytest.approx(ideal["free"]) == pytest.approx(row["free"])
        # lending uses most of the idle time, but with more slices there is less of it
        assert row["free"] > 0.8 * row["idle"]


def test_what_moves_for_a_first_and_a_last_slice_by_hand() -> None:
    model = bench.named_model("gpt-7b")
    costs = bench.CostModel(model, *_cluster(model))
    chunks = tuple(Chunk(place, (Span(0, 100 * place, 100 * place + 100),)) for place in range(4))
    group = pipelined(SequenceGroup((0, 1), "ring", chunks, ()), layer_ranges(32, 4))
    lending = bench.Lending(costs, lent_group(group), 1.0, True, True)
    lenders = tuple((stage, position) for stage in (0, 1, 2) for position in (0, 1))
    # 100 tokens in bf16: 4096 hidden values there and back, 8 layers of 4096 keys and values; 3 of 4 stages lent, 2 ranks each
    own = 0.75 * 100 * (2 * 4096 + 8 * 2 * 4096) * 2 / 2
    weights = 8 * model.layer_parameters * 2
    # slices 1 to 3 of the last stage are shared; the first brings 100 tokens of earlier keys and values, and weights
    earlier = 0.75 * 100 * 8 * 2 * 4096 * 2 / 2
    assert lending.moved_bytes(Action("F", 3, 1, lenders=lenders), 4) == own + earlier + weights
    assert lending.moved_bytes(Action("F", 3, 2, lenders=lenders), 4) == own
    # backward starts with slice 3, which has 300 tokens before it, and also moves the gradients of all that
    gradients = 0.75 * 100 * (2 * 4096 + 2 * 8 * 2 * 4096) * 2 / 2
    assert lending.moved_bytes(Action("B", 3, 3, lenders=lenders), 4) == gradients + 2 * 3 * earlier + 2 * weights
    assert lending.moved_bytes(Action("B", 3, 1, lenders=lenders), 4) == gradients


def test_the_pass_tells_the_numbers_of_the_simulation() -> None:
    pattern = r"^ +(\d+)K, (\d+) +([\d.-]+) % +([\d.-]+) % +([\d.-]+) %$"
    told = re.findall(pattern, lent_slices.__doc__ or "", re.MULTILINE)
    assert [row[:2] for row in told] == [("128", "8"), ("128", "32"), ("512", "8"), ("512", "32")]
    model = bench.named_model("gpt-7b")
    for num_ktokens, num_slices, *shares in told:
        slow, fast = (bench.gains(model, int(num_ktokens) * 1024, int(num_slices), 4, 8, rate) for rate in (2.5e10, 2e11))
        found = (slow["free"], slow["weights"], fast["weights"])
        assert [f"{100 * share:.1f}" for share in found] == shares


def _cluster(model: Any) -> tuple[Any, Any]:
    cluster = bench.ClusterSpec(8, 2, bench.GENERIC_GPU)
    return cluster, bench.default_coefficients(model, cluster)

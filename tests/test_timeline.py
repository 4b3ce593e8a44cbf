"""Timelines: written pictures and traces can be read back and show when events ran."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from hf_longctx.timeline import TimelineEvent, _merged_boxes, chrome_trace, save_png_timeline

EVENTS = (
    TimelineEvent(0, "F", "0F0", 0.0, 1.0, "<2> 100 tokens in 1 sequence(s)"),
    TimelineEvent(1, "F", "0F0", 0.0, 1.0, "<2> 100 tokens in 1 sequence(s)"),
    TimelineEvent(0, "B", "0B0", 1.0, 3.0),
    TimelineEvent(1, "B", "0B0", 1.5, 4.0),
    TimelineEvent(10, "step", "optimizer", 3.0, 4.0),
)


def test_the_chrome_trace_has_one_complete_event_per_event_in_microseconds() -> None:
    trace = json.loads(chrome_trace(EVENTS))
    assert len(trace["traceEvents"]) == len(EVENTS)
    for record, event in zip(trace["traceEvents"], EVENTS, strict=True):
        assert (record["name"], record["cat"], record["tid"], record["ph"]) == (event.name, event.kind, event.rank, "X")
        assert record["ts"] == pytest.approx(event.start_s * 1e6)
        assert record["dur"] == pytest.approx((event.stop_s - event.start_s) * 1e6)
        assert record["args"]["detail"] == event.detail


def test_nothing_happened_is_a_valid_trace_too() -> None:
    assert json.loads(chrome_trace([]))["traceEvents"] == []


def group(first: int, degree: int, start_s: float, stop_s: float, kind: str = "F") -> list[TimelineEvent]:
    """Equal events of all ranks of one sequence group."""
    ranks = range(first, first + degree)
    return [TimelineEvent(rank, kind, "0F0", start_s, stop_s, f"<{degree}> 9 tokens in 1 sequence(s)") for rank in ranks]


def test_ranks_of_a_group_are_one_box_and_groups_alike_are_not() -> None:
    events = [*group(4, 4, 0.0, 2.0), *group(0, 4, 0.0, 2.0), *group(8, 1, 0.0, 2.0), *group(9, 1, 0.0, 2.0)]
    events += group(0, 2, 2.0, 3.0, "B") + group(2, 2, 2.0, 3.5, "B")
    boxes = sorted((event.rank, event.start_s, num) for event, num in _merged_boxes(events))
    assert boxes == [(0, 0.0, 4), (0, 2.0, 2), (2, 2.0, 2), (4, 0.0, 4), (8, 0.0, 1), (9, 0.0, 1)]


def test_ranks_that_are_not_neighbours_are_boxes_of_their_own() -> None:
    events = [TimelineEvent(rank, "step", "optimizer", 0.0, 1.0) for rank in (0, 1, 5, 6, 7)]
    assert sorted((event.rank, num) for event, num in _merged_boxes(events)) == [(0, 2), (5, 3)]


@pytest.mark.daily("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 64, 512])
def test_a_picture_of_any_number_of_ranks_can_be_looked_at(num_ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    events = [event for rank in range(num_ranks) for event in group(rank, 1, 0.0, 1.0 + rank)]
    save_png_timeline({"predicted": events, "measured": events}, "title", tmp_path / "timeline.png")
    width, height = struct.unpack(">II", (tmp_path / "timeline.png").read_bytes()[16:24])
    assert 1000 <= width <= 2000 and 300 <= height <= 2500


def test_nothing_happened_is_a_picture_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for panels in ({}, {"predicted": []}):
        save_png_timeline(panels, "empty", tmp_path / "timeline.png")
        assert (tmp_path / "timeline.png").stat().st_size > 0


def test_markup_and_events_of_no_duration_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    events = [TimelineEvent(0, "F", "<b>&$x_", 0.0, 0.0, "a < b & $c > d"), TimelineEvent(1, "B", "$\\frac", 0.0, 1e-7)]
    save_png_timeline({"<panel> & $more_": events}, "<title> & '$more^'", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 0

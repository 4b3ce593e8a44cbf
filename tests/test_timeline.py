"""Timelines: written pictures and traces can be read back and show when events ran."""

from __future__ import annotations

import json
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hf_longctx.timeline import TimelineEvent, _merged_boxes, chrome_trace, save_png_timeline, svg_timeline

EVENTS = (
    TimelineEvent(0, "F", "0F0", 0.0, 1.0, "<2> 100 tokens in 1 sequence(s)"),
    TimelineEvent(1, "F", "0F0", 0.0, 1.0, "<2> 100 tokens in 1 sequence(s)"),
    TimelineEvent(0, "B", "0B0", 1.0, 3.0),
    TimelineEvent(1, "B", "0B0", 1.5, 4.0),
    TimelineEvent(10, "step", "optimizer", 3.0, 4.0),
)
_SVG = "{http://www.w3.org/2000/svg}"


def test_the_chrome_trace_has_one_complete_event_per_event_in_microseconds() -> None:
    trace = json.loads(chrome_trace(EVENTS))
    assert len(trace["traceEvents"]) == len(EVENTS)
    for record, event in zip(trace["traceEvents"], EVENTS, strict=True):
        assert (record["name"], record["cat"], record["tid"], record["ph"]) == (event.name, event.kind, event.rank, "X")
        assert record["ts"] == pytest.approx(event.start_s * 1e6)
        assert record["dur"] == pytest.approx((event.stop_s - event.start_s) * 1e6)
        assert record["args"]["detail"] == event.detail


def rows(svg: str) -> list[ET.Element]:
    """Boxes of events: rectangles with a hover title."""
    return [box for box in ET.fromstring(svg).iter(f"{_SVG}rect") if box.find(f"{_SVG}title") is not None]


def test_the_picture_is_xml_with_a_box_per_event() -> None:
    svg = svg_timeline({"predicted": EVENTS, "measured": EVENTS[:2]}, "step 3")
    boxes = rows(svg)
    assert len(boxes) == len(EVENTS) + 2
    texts = [element.text for element in ET.fromstring(svg).iter(f"{_SVG}text")]
    assert "step 3" in texts
    assert "predicted: 4.00 s" in texts
    assert "measured: 1.00 s" in texts
    assert texts.count("rank 0") == 2
    assert texts.count("rank 10") == 1


def test_the_width_of_a_box_is_its_duration_on_one_axis_for_all_panels() -> None:
    boxes = rows(svg_timeline({"predicted": EVENTS, "measured": EVENTS[:2]}, "step 3"))
    durations = {box.find(f"{_SVG}title").text.split(". ")[0]: float(box.get("width")) for box in boxes}  # type: ignore
    one, two, longest = durations["0F0: 1.000 s"], durations["0B0: 2.000 s"], durations["0B0: 2.500 s"]
    assert two == pytest.approx(2 * one, abs=0.2)
    assert longest == pytest.approx(2.5 * one, abs=0.2)
    first, measured = boxes[0], boxes[-2]
    assert (first.get("x"), first.get("width")) == (measured.get("x"), measured.get("width"))


def test_the_picture_stays_inside_its_frame() -> None:
    root = ET.fromstring(svg_timeline({"predicted": EVENTS}, "step 3"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{_SVG}rect"):
        if box.get("width") != "100%":
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_markup_in_names_is_text() -> None:
    events = [TimelineEvent(0, "F", "<b>&\"'", 0.0, 1.0, "a < b & c > d")]
    svg = svg_timeline({"<panel> & more": events}, "<title> & 'more'")
    texts = [element.text for element in ET.fromstring(svg).iter()]
    assert "<title> & 'more'" in texts
    assert "<panel> & more: 1.00 s" in texts
    [box] = rows(svg)
    assert box.find(f"{_SVG}title").text == "<b>&\"': 1.000 s. a < b & c > d"  # type: ignore[union-attr]


@pytest.mark.parametrize("stop_s", [1e-7, 1e-3, 0.37, 12.0, 86400.0, 3e6])
def test_the_axis_has_a_readable_number_of_ticks(stop_s: float) -> None:
    svg = svg_timeline({"run": [TimelineEvent(0, "F", "0F0", 0.0, stop_s)]}, "t")
    ticks = [text.text for text in ET.fromstring(svg).iter(f"{_SVG}text") if text.get("text-anchor") == "middle"]
    assert 1 <= len(ticks) <= 11
    assert ticks[0] == "0 s"


def test_nothing_happened_is_a_valid_picture_too() -> None:
    assert json.loads(chrome_trace([]))["traceEvents"] == []
    assert rows(svg_timeline({}, "empty")) == []
    assert rows(svg_timeline({"predicted": []}, "empty")) == []


def test_an_event_of_no_duration_at_the_start_is_drawn() -> None:
    [box] = rows(svg_timeline({"predicted": [TimelineEvent(0, "F", "0F0", 0.0, 0.0)]}, "short"))
    assert float(box.attrib["width"]) > 0


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

"""Timelines: one event type for predicted and measured runs, written as PNG pictures and as Chrome traces.

The simulator draws predictions with it, and the trainer draws predicted and measured steps side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "H": "#54a24b", "exchange": "#d1495b", "reduce": "#9d9da1", "step": "#b7d3b0"}
_OTHER_COLOUR = "#72b7b2"
_WAITING = "#f2f2f2"
_NAMES = {
    "F": "forward",
    "B": "backward",
    "H": "output head",
    "exchange": "communication inside them",
    "reduce": "gradient reduction",
    "step": "clipping and optimizer",
}
_DPI = 110


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """An activity of one rank from `start_s` to `stop_s`, in seconds from the start of the timeline."""

    rank: int
    # an action kind, or another word that decides the colour
    kind: str
    # short text
    name: str
    start_s: float
    stop_s: float
    # more text, for traces
    detail: str = ""


def chrome_trace(events: Sequence[TimelineEvent], ranks_per_stage: int = 0) -> str:
    """The events as JSON for chrome://tracing and Perfetto, one thread per rank, in one process per pipeline stage.

    ranks_per_stage: 0 if there is one stage.
    """
    stages = sorted({event.rank // ranks_per_stage for event in events}) if ranks_per_stage else []
    records: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": stage, "args": {"name": f"stage {stage}"}} for stage in stages
    ]
    records += [
        {
            "name": event.name,
            "cat": event.kind,
            "ph": "X",
            "pid": event.rank // ranks_per_stage if ranks_per_stage else 0,
            "tid": event.rank,
            "ts": event.start_s * 1e6,
            "dur": (event.stop_s - event.start_s) * 1e6,
            "args": {"detail": event.detail},
        }
        for event in events
    ]
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def save_png_timeline(
    panels: Mapping[str, Sequence[TimelineEvent]],
    title: str,
    path: Path,
    most_inches: float = 9.0,
    wide_inches: float = 14.0,
    ranks_per_stage: int = 0,
) -> None:
    """Write a PNG file with one panel per name (for example "predicted" and "measured"), one row per rank, and one time axis.

    Needs matplotlib (the extra `plot`). Neighbouring ranks that do the same are drawn as one box, as high as their number.
    most_inches: height of a panel of many ranks; the rows of 64 can be told apart in 9 inches. wide_inches: width of the picture;
    the narrower it is, the larger letters are on a page that shows it at another width. ranks_per_stage: lines divide the rows of
    pipeline stages, which have names (0: there is one stage).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = panels or {"nothing": ()}
    # rows of two ranks are not too thin
    heights = [min(most_inches, max(1.2, 0.11 * len({e.rank for e in events}))) for events in panels.values()]
    figure = Figure(figsize=(wide_inches, 1.3 + sum(height + 0.6 for height in heights)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    stop_s = max((event.stop_s for events in panels.values() for event in events), default=0.0) or 1.0
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (name, events), height in zip(grid[:, 0], panels.items(), heights, strict=True):
        _draw_panel(axes, events, stop_s, (wide_inches - 1.5, height), ranks_per_stage)
        axes.set_title(f"{name}: {max((e.stop_s for e in events), default=0.0):.2f} s", fontsize=10, loc="left")
    grid[-1, 0].set_xlabel("seconds; <n>: sequence group of n ranks")
    kinds = {event.kind for events in panels.values() for event in events}
    handles = [Patch(color=_COLOURS.get(kind, _OTHER_COLOUR), label=_NAMES.get(kind, kind)) for kind in _ordered(kinds)]
    handles.append(Patch(facecolor=_WAITING, edgecolor="#cccccc", label="waiting"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(path)


def _draw_panel(
    axes: Any, events: Sequence[TimelineEvent], stop_s: float, inches: tuple[float, float], ranks_per_stage: int = 0
) -> None:
    """Draw one panel of so many inches, width first: boxes by kind, labels that fit into them, names of stages or some ranks."""
    from matplotlib.collections import PolyCollection

    ranks = sorted({event.rank for event in events})
    row = {rank: index for index, rank in enumerate(ranks)}
    boxes = list(_merged_boxes(events))
    for kind in _ordered({event.kind for event in events}):
        corners = [
            [(e.start_s, row[e.rank]), (e.stop_s, row[e.rank]), (e.stop_s, row[e.rank] + num), (e.start_s, row[e.rank] + num)]
            for e, num in boxes
            if e.kind == kind
        ]
        colour = _COLOURS.get(kind, _OTHER_COLOUR)
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.4))
    dots_per_s, dots_per_row = inches[0] * _DPI / stop_s, inches[1] * _DPI / max(1, len(ranks))
    for event, num in boxes:
        label = event.detail.split(" ", 1)[0] if event.detail.startswith("<") else event.name
        # a character is about 6 dots wide and a line 10 dots high at this size
        if (
            event.kind != "exchange"
            and (event.stop_s - event.start_s) * dots_per_s > 6 * len(label) + 3
            and num * dots_per_row > 9
        ):
            middle_s, middle = (event.start_s + event.stop_s) / 2, row[event.rank] + num / 2
            axes.text(middle_s, middle, label, ha="center", va="center", fontsize=7, color="white")
    # ranks wait until the last one has finished
    axes.axvspan(0, max((event.stop_s for event in events), default=0.0), color=_WAITING, linewidth=0, zorder=0)
    axes.set_xlim(0, stop_s)
    axes.set_ylim(max(1, len(ranks)), 0)
    named = ranks[:: ranks_per_stage or max(1, -(-len(ranks) // 16))]
    names = [f"stage {rank // ranks_per_stage}: rank {rank}" if ranks_per_stage else f"rank {rank}" for rank in named]
    axes.set_yticks([row[rank] + 0.5 for rank in named], names, fontsize=8)
    if ranks_per_stage > 1:
        axes.hlines([row[rank] for rank in named[1:]], 0, stop_s, colors="#555555", linewidths=0.6)
    axes.tick_params(axis="y", length=0)


def _merged_boxes(events: Sequence[TimelineEvent]) -> Iterator[tuple[TimelineEvent, int]]:
    """Events with the number of consecutive ranks, starting at the event's own, that do the same, within one group."""
    last: TimelineEvent | None = None
    num = 0
    for event in sorted(events, key=lambda e: (e.start_s, e.stop_s, e.kind, e.detail, e.rank)):
        same = last is not None and num < _degree(last) and replace(last, rank=last.rank + num) == event
        if last is not None and not same:
            yield last, num
        last, num = (last, num + 1) if same else (event, 1)
    if last is not None:
        yield last, num


def _degree(event: TimelineEvent) -> int:
    """Group size n of an event whose detail starts with <n>; a huge number for others, so that they are merged without limit."""
    digits = event.detail[1:].partition(">")[0]
    return int(digits) if event.detail.startswith("<") and digits.isdigit() else 1 << 30


def _ordered(kinds: set[str]) -> list[str]:
    """Kinds in the order of their colours, then those without a colour of their own."""
    return [kind for kind in _COLOURS if kind in kinds] + sorted(kinds - set(_COLOURS))

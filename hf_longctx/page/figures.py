"""Figures of plotly as plain data: the shared look, and the few kinds of traces that the page uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLUE, ORANGE, RED, GREY, GREEN, TEAL, PALE = "#4c78a8", "#f58518", "#d1495b", "#9d9da1", "#54a24b", "#72b7b2", "#c8c8c8"
# colours of things without an order
SERIES = (BLUE, ORANGE, TEAL, RED, GREEN, "#b279a2", "#eeca3b", GREY)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure of the page, with the sentence below its title; `name` is its id. is_wide: it takes the whole width."""

    name: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    is_wide: bool = False
    height: int = 300

    def figure(self) -> dict[str, Any]:
        """The figure as `Plotly.newPlot` takes it."""
        return {"data": self.traces, "layout": {**_look(), "height": self.height, **self.layout}}


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> dict[str, Any]:
    """A line; points of a short series are marked."""
    mode = "lines+markers" if len(x) <= 60 else "lines"
    style = {"line": {"color": colour, "width": 2}, "marker": {"size": 5, "color": colour}}
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name, "connectgaps": False, **style, **more}


def bars(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> dict[str, Any]:
    """Bars, which stand on each other if the layout says so."""
    return {"type": "bar", "x": list(x), "y": list(y), "name": name, "marker": {"color": colour, "line": {"width": 0}}, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title, "font": {"size": 12}, "standoff": 8}, **_AXIS, **more}


def axes(x: str, y: str, x_more: Mapping[str, Any] | None = None, y_more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Both axes of a figure."""
    return {"xaxis": axis(x, **(x_more or {})), "yaxis": axis(y, **{"rangemode": "tozero", **(y_more or {})})}


_AXIS: dict[str, Any] = {"gridcolor": "#eceef1", "zerolinecolor": "#d5d8dd", "linecolor": "#d5d8dd", "automargin": True}


def _look() -> dict[str, Any]:
    return {
        "margin": {"l": 60, "r": 16, "t": 8, "b": 44},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#24292f"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "barmode": "stack",
        "bargap": 0.08,
    }

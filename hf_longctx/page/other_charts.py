"""Charts beside those over steps: the needle grid, the loss by position, and the timeline of the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_longctx.journal import Line
from hf_longctx.page.figures import BLUE, GREY, ORANGE, PALE, RED, TEAL, Chart, axes, axis, line

Run = dict[str, Any]

# kind of an event -> words and colour
_KINDS = {
    "F": ("forward", BLUE),
    "B": ("backward", ORANGE),
    "reduce": ("gradient reduction", GREY),
    "exchange": ("communication", RED),
}
_OTHER = ("other", TEAL)
# boxes of a timeline with more of these would take the browser seconds
_MOST_BOXES = 20_000


def needle_charts(runs: Sequence[Run]) -> list[Chart]:
    """Grids of the share of right answer tokens: of named models, and of the first and the last evaluation."""
    shown = [run for run in _shown(runs) if run["cells"]]
    return [_needle_chart(run, f"needles-{number}") for number, run in enumerate(shown, 1)]


def _needle_chart(run: Run, name: str) -> Chart:
    found = {(cell["length"], cell["depth"]): cell["share_right"] for cell in run["cells"]}
    lengths, depths = sorted({length for length, _ in found}), sorted({depth for _, depth in found})
    trace = {
        "type": "heatmap",
        "z": [[found.get((length, depth)) for length in lengths] for depth in depths],
        "x": [f"{length:,}" for length in lengths],
        "y": [f"{depth:.0%}" for depth in depths],
        "zmin": 0,
        "zmax": 1,
        "colorscale": "YlGnBu",
        "reversescale": True,
        "texttemplate": "%{z:.0%}",
        "showscale": False,
        "hovertemplate": "%{x} tokens, needle at %{y}: %{z:.0%} right<extra></extra>",
        "xgap": 2,
        "ygap": 2,
    }
    layout = {
        "xaxis": axis("tokens of the document", type="category"),
        "yaxis": axis("depth of the needle", autorange="reversed", type="category"),
        "hovermode": "closest",
    }
    note = f"Share of answer tokens that the model finds likeliest; mean {sum(found.values()) / len(found):.0%}."
    return Chart(name, f"Needle grid: {_title(run)}", note, [trace], layout)


def position_chart(runs: Sequence[Run]) -> Chart | None:
    """Held-out loss by position in the document, one line per evaluation; None without it."""
    found = [run for run in runs if run["buckets"]]
    if not found:
        return None
    shown = _shown(found)
    last = [run for run in shown if not run["name"]][-1:]
    traces = []
    for run in found:
        colour = PALE if run not in shown else RED if run["name"] else BLUE if run in last else ORANGE
        # the first bucket is drawn as wide as the second
        x = [max(bucket["first"], (bucket["last"] + 1) // 2) for bucket in run["buckets"]]
        hover = [f"{bucket['first']:,} to {bucket['last']:,}, {bucket['num_tokens']:,} tokens" for bucket in run["buckets"]]
        losses = [bucket["loss"] for bucket in run["buckets"]]
        style = {"customdata": hover, "hovertemplate": "%{y:.3f} at %{customdata}", "showlegend": run in shown}
        traces.append(line(x, losses, _title(run), colour, mode="lines+markers", **style))
    layout = axes("position of the predicted token, from", "mean loss", {"type": "log", "dtick": "D2"}, {"rangemode": "normal"})
    ticks = sorted({place for trace in traces for place in trace["x"]})
    layout["xaxis"] |= {"tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}
    layout["xaxis"].pop("dtick")
    note = "Held-out documents. A long context is of use as far as the loss goes on falling."
    return Chart("positions", "Loss by position", note, traces, layout)


def timeline_chart(end: Line | None) -> Chart | None:
    """Predicted above measured actions of all ranks in the last steps; None if none were recorded."""
    timeline = end["timeline"] if end is not None else {"panels": {}, "steps": []}
    panels = {name: events for name, events in timeline["panels"].items() if events}
    if not panels:
        return None
    rows: list[str] = []
    for name, events in panels.items():
        rows += [_row(name, rank) for rank in sorted({event[0] for event in events})]
    traces = []
    events = [(name, event) for name, drawn in panels.items() for event in drawn][:_MOST_BOXES]
    for kind in sorted({event[1] for _, event in events}, key=lambda kind: list(_KINDS).index(kind) if kind in _KINDS else 99):
        words, colour = _KINDS.get(kind, (kind, _OTHER[1]))
        own = [(name, event) for name, event in events if event[1] == kind]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "x": [stop_s - start_s for _, (_, _, _, start_s, stop_s, _) in own],
                "base": [event[3] for _, event in own],
                "y": [_row(name, event[0]) for name, event in own],
                "customdata": [[event[2], event[5], round(event[4] - event[3], 4)] for _, event in own],
                "hovertemplate": "%{customdata[0]}: %{customdata[2]} s  %{customdata[1]}<extra></extra>",
                "marker": {"color": colour, "line": {"color": "white", "width": 0.5}},
            }
        )
    first, last = timeline["steps"]
    note = (
        f"Steps {first} to {last}, every rank; gaps are waiting. "
        + ("Predicted above measured. " if len(panels) > 1 else "")
        + "The setting timeline_steps says how many; timeline.json opens in Perfetto."
    )
    layout = {
        "barmode": "overlay",
        "hovermode": "closest",
        "bargap": 0.15,
        "xaxis": axis("seconds"),
        "yaxis": axis("", categoryorder="array", categoryarray=rows[::-1], type="category", fixedrange=True),
        "margin": {"l": 130, "r": 16, "t": 8, "b": 44},
    }
    return Chart("timeline", "Timeline", note, traces, layout, is_wide=True, height=min(1200, 140 + 26 * len(rows)))


def _row(panel: str, rank: int) -> str:
    return f"{panel}, rank {rank}"


def _shown(runs: Sequence[Run]) -> list[Run]:
    """Evaluations that are named or labelled: other models, and the first and the last of the training."""
    steps = [run for run in runs if not run["name"]]
    return [run for run in runs if run["name"] or run in steps[:1] + steps[-1:]]


def _title(run: Run) -> str:
    return run["name"] or f"step {run['step']}"

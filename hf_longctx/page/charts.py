"""Charts of a run, as plain data for plotly.

Over the steps: loss, rates, predictions against measurements, layouts, lengths, shares and seconds. Others: the needle grid, the
loss by position, and the timeline of the last steps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hf_longctx.journal import Journal, Line
from hf_longctx.page.history import Step, length_counts

BLUE, ORANGE, RED, GREY, GREEN, TEAL, PALE = "#4c78a8", "#f58518", "#d1495b", "#9d9da1", "#54a24b", "#72b7b2", "#c8c8c8"
# colours of unordered series
SERIES = (BLUE, ORANGE, TEAL, RED, GREEN, "#b279a2", "#eeca3b", GREY)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure of the page, with the sentence below its title. name: its id. is_wide: takes the whole width."""

    name: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    is_wide: bool = False
    height: int = 300

    def figure(self) -> dict[str, Any]:
        """Returns the figure as an argument of `Plotly.newPlot`."""
        return {"data": self.traces, "layout": {**_look(), "height": self.height, **self.layout}}


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> dict[str, Any]:
    """Makes a line, with markers for a short series."""
    mode = "lines+markers" if len(x) <= 60 else "lines"
    style = {"line": {"color": colour, "width": 2}, "marker": {"size": 5, "color": colour}}
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name, "connectgaps": False, **style, **more}


def bars(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> dict[str, Any]:
    """Makes bars, which a layout may stack."""
    return {"type": "bar", "x": list(x), "y": list(y), "name": name, "marker": {"color": colour, "line": {"width": 0}}, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Makes an axis with a title."""
    return {"title": {"text": title, "font": {"size": 12}, "standoff": 8}, **_AXIS, **more}


def axes(x: str, y: str, x_more: Mapping[str, Any] | None = None, y_more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Makes both axes of a figure."""
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


_STEP = "optimizer step"
# losses of one held-out set, or of several named ones; not those by position or of needles
_HELD_OUT = re.compile(r"eval_(?:(?!loss_at_|needle_)(.+)_)?loss")
_DASHES = ("solid", "dot", "dash", "dashdot")
# name in the journal -> (label, colour), from the bottom of the chart to its top
_SECONDS = {
    "compute": ("forward and backward", BLUE),
    "messages": ("messages between stages", TEAL),
    "reduce": ("gradient reduction, with the wait for other ranks", RED),
    "between": ("gaps between them", PALE),
    "after": ("clipping, optimizer and callbacks", GREEN),
    "plan_wait": ("wait for the plan and its data", ORANGE),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Divisors of counted operations. peak: FLOP/s of one device; None if unknown."""

    num_ranks: int
    peak: float | None
    peak_name: str


def loss_chart(steps: Sequence[Step], journal: Journal) -> Chart:
    """Draws the training loss, and the loss of every evaluation of the held-out sets."""
    x, losses = [step.step for step in steps], [step.loss for step in steps]
    many = len(steps) > 40
    traces = [line(x, losses, "training", PALE if many else BLUE)]
    if many:
        traces.append(line(x, _smoothed(losses), "training, moving mean", BLUE))
    held_out: dict[str, dict[int, float]] = {}
    for each in journal.of("log"):
        for name, value in each["logs"].items():
            if (found := _HELD_OUT.fullmatch(name)) is not None:
                held_out.setdefault(found[1] or "", {})[each["step"]] = value
    for (name, values), dash in zip(held_out.items(), itertools.cycle(_DASHES)):
        style = {"color": ORANGE, "dash": dash}
        label = f"held out: {name}" if name else "held out"
        traces.append(line(list(values), list(values.values()), label, ORANGE, mode="lines+markers", line=style))
    note = "Mean over the label tokens of a step, of all ranks, each token once."
    return Chart("loss", "Loss", note, traces, axes(_STEP, "loss", None, {"rangemode": "normal"}))


def speed_chart(steps: Sequence[Step]) -> Chart:
    """Draws tokens per second of whole steps, and label tokens if known."""
    x = [step.step for step in steps]
    traces = [line(x, [step.tokens_per_s for step in steps], "tokens/s", BLUE)]
    if any(step.labels for step in steps):
        rates = [step.labels and step.labels / (step.wall_s or step.measured_s) for step in steps]
        traces.append(line(x, rates, "label tokens/s", ORANGE, line={"color": ORANGE, "dash": "dot"}))
    note = (
        "All ranks together, over the whole step: its plan, optimizer, and the wait for plan and data. Dummy tokens do not "
        "count, each label token counts once."
    )
    return Chart("speed", "Tokens per second", note, traces, axes(_STEP, "tokens/s"))


def operations_chart(steps: Sequence[Step], rates: Rates) -> Chart:
    """Draws model operations per second of a rank, or their share of the device's peak if known."""
    x = [step.step for step in steps]
    per_rank = [step.operations / (step.wall_s or step.measured_s) / rates.num_ranks for step in steps]
    if rates.peak is None:
        note = "No peak is known for this device, so there is no MFU; give --peak-tflops N to see one."
        traces = [line(x, [value / 1e12 for value in per_rank], "model TFLOP/s of a rank", BLUE)]
        return Chart("mfu", "Model FLOP/s", note, traces, axes(_STEP, "TFLOP/s of a rank"))
    note = f"Model operations / seconds / ranks / peak; peak: {rates.peak / 1e12:,.4g} TFLOP/s ({rates.peak_name})."
    traces = [line(x, [value / rates.peak for value in per_rank], "MFU", BLUE)]
    return Chart("mfu", "MFU", note, traces, axes(_STEP, "share of peak", None, {"tickformat": ".0%"}))


def seconds_chart(steps: Sequence[Step]) -> Chart:
    """Draws predicted and measured seconds of the plans of each step."""
    x = [step.step for step in steps]
    measured = line(x, [step.measured_s for step in steps], "measured", BLUE)
    predicted = line(x, [step.predicted_s for step in steps], "predicted", ORANGE, line={"color": ORANGE, "dash": "dot"})
    errors = [abs(step.error) for step in steps if step.error is not None]
    note = "From a plan's first action to the end of its gradient reduction, on rank 0. "
    note += (
        f"Median error of the predictions: {median(errors):.1%}."
        if errors
        else "No prediction yet: costs are guesses until the cost model is fitted to measurements."
    )
    return Chart("seconds", "Predicted and measured seconds", note, [measured, predicted], axes(_STEP, "seconds"))


def bytes_chart(steps: Sequence[Step], machine: dict[str, Any]) -> Chart:
    """Draws predicted and measured memory of rank 0."""
    x = [step.step for step in steps]
    is_cuda = machine["device_type"] == "cuda"
    unit, size = ("GiB", 2**30) if is_cuda else ("MiB", 2**20)

    def sizes(values: Sequence[float | None]) -> list[float | None]:
        return [value / size if value is not None else None for value in values]

    traces = [line(x, sizes([step.predicted_bytes for step in steps]), "predicted", ORANGE)]
    if any(step.held_bytes for step in steps):
        traces.insert(0, line(x, sizes([step.held_bytes for step in steps]), "measured", BLUE))
    if any(step.host_bytes for step in steps):
        traces.append(line(x, sizes([step.host_bytes for step in steps]), "measured, on the host", TEAL))
    if is_cuda:
        limit = machine["device_bytes"] / size
        note = f"Most bytes of rank 0's device in use during a step, of {limit:,.0f} GiB."
    elif any(step.held_bytes for step in steps):
        note = "Saved activations, keys and values of rank 0; a CPU has no counter of all memory in use."
    else:
        note = "Predicted peak of rank 0. A CPU has no counter of memory in use, and no plan sliced or offloaded anything."
    return Chart("bytes", "Predicted and measured memory", note, traces, axes(_STEP, unit))


def layout_chart(steps: Sequence[Step]) -> Chart:
    """Draws the share of tokens that ran in groups of each size, by step."""
    degrees = sorted({degree for step in steps for degree in step.group_tokens})
    x = [step.step for step in steps]
    traces = []
    for place, degree in enumerate(degrees):
        shares = [step.group_tokens.get(degree, 0) / max(1, sum(step.group_tokens.values())) for step in steps]
        name = f"groups of {degree}" if degree > 1 else "single ranks"
        layouts = [step.layout for step in steps]
        hover = "%{y:.0%}<extra>" + name + "</extra>" if place else "%{y:.0%}  %{customdata}<extra>" + name + "</extra>"
        traces.append(bars(x, shares, name, SERIES[place % len(SERIES)], customdata=layouts, hovertemplate=hover))
    note = "Share of a step's tokens by the size of the group that ran them. <n> in the hover text: a group of n ranks."
    return Chart("layouts", "Layouts over time", note, traces, axes(_STEP, "share of tokens", None, {"tickformat": ".0%"}))


def length_chart(journal: Journal) -> Chart:
    """Draws a histogram of trained lengths, with the share of tokens of each class."""
    counts = length_counts(journal)
    edges = {number: (_edge(number), _edge(number + 1)) for number in counts}
    names = [f"{first:,}" for first, _ in edges.values()]
    tokens = [counts[number] * (edges[number][0] + edges[number][1]) / 2 for number in counts]
    total = sum(tokens) or 1
    hover = [f"{first:,} to {stop - 1:,} tokens" for first, stop in edges.values()]
    traces = [
        bars(
            names, list(counts.values()), "sequences", BLUE,
            customdata=hover, hovertemplate="%{customdata}: %{y:,} sequences<extra></extra>",
        ),
        line(
            names, [value / total for value in tokens], "share of tokens", ORANGE,
            yaxis="y2", hovertemplate="%{y:.0%} of tokens<extra></extra>",
        ),
    ]  # fmt: skip
    layout = axes("tokens of a sequence, from", "sequences", {"type": "category"})
    layout["yaxis2"] = axis(
        "share of tokens", overlaying="y", side="right", tickformat=".0%", range=[0, 1.05], dtick=0.25, showgrid=False
    )
    layout["margin"] = {"l": 60, "r": 60, "t": 8, "b": 44}
    note = f"{sum(counts.values()):,} sequences as they were trained, after cuts. Two bars per power of two."
    return Chart("lengths", "Lengths", note, traces, layout)


def share_chart(steps: Sequence[Step]) -> Chart:
    """Draws padding and idle shares by step."""
    x = [step.step for step in steps]
    traces = [line(x, [step.padding_share for step in steps], "padding, of tokens", BLUE)]
    for name, values, colour in (
        ("ranks waiting, predicted", [step.predicted_waiting for step in steps], ORANGE),
        ("first stage idle, measured", [step.idle_share for step in steps], RED),
        ("first stage idle, predicted", [step.predicted_idle for step in steps], GREY),
    ):
        if any(value is not None for value in values):
            traces.append(line(x, values, name, colour))
    note = "Dummy tokens among all tokens that ran; seconds in which ranks wait, of all seconds."
    return Chart("shares", "Padding and idle shares", note, traces, axes(_STEP, "share", None, {"tickformat": ".0%"}))


def where_chart(steps: Sequence[Step]) -> Chart:
    """Draws seconds of rank 0 by activity, stacked to the whole step."""
    x = [step.step for step in steps]
    parts = [_parts(step) for step in steps]
    traces = [
        bars(x, [part[name] for part in parts], words, colour)
        for name, (words, colour) in _SECONDS.items()
        if any(part[name] > 1e-6 for part in parts)
    ]
    note = "Measured on rank 0; they add up to the whole step. Exchanges and copies are inside forward and backward. "
    note += _exposed(steps)
    return Chart("where", "Where the seconds go", note, traces, axes(_STEP, "seconds"), is_wide=True, height=340)


def _parts(step: Step) -> dict[str, float]:
    known = {name: step.seconds.get(name, 0.0) for name in ("compute", "messages", "reduce")}
    between = max(0.0, step.measured_s - sum(known.values()))
    after = max(0.0, (step.wall_s or 0.0) - step.plan_wait_s - step.measured_s)
    return {**known, "between": between, "after": after, "plan_wait": step.plan_wait_s}


def _exposed(steps: Sequence[Step]) -> str:
    """Describes time that is not hidden: measured for planning, predicted for exchanges and copies."""
    num = max(1, len(steps))
    waited_s, solved_s = sum(step.plan_wait_s for step in steps) / num, sum(step.solve_s for step in steps) / num
    text = f"A step waited {waited_s:.3f} s for its plan, which took {solved_s:.3f} s to find."
    known = [step.rank_seconds for step in steps if step.rank_seconds]
    total = sum(sum(each.values()) for each in known)
    if not total:
        return text
    shares = {name: sum(each[name] for each in known) / total for name in ("compute", "exchange", "copies", "idle")}
    return (
        f"{text} Predicted for all ranks: {shares['compute']:.0%} computing, {shares['exchange']:.0%} in exchanges, "
        f"{shares['copies']:.0%} in copies that nothing hides, {shares['idle']:.0%} waiting."
    )


def _smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Returns the moving mean over about a twentieth of the series."""
    width = max(5, len(values) // 20)
    smooth: list[float | None] = []
    for stop in range(1, len(values) + 1):
        known = [value for value in values[max(0, stop - width) : stop] if value is not None]
        smooth.append(sum(known) / len(known) if known else None)
    return smooth


def _edge(number: int) -> int:
    """Returns the fewest tokens of length class `number`."""
    edge = int(2 ** (number / 2))
    return edge if edge >= 2 ** (number / 2) else edge + 1


Run = dict[str, Any]

# kind of an event -> (label, colour)
_KINDS = {
    "F": ("forward", BLUE),
    "B": ("backward", ORANGE),
    "H": ("output head", GREEN),
    "reduce": ("gradient reduction", GREY),
    "exchange": ("communication", RED),
}
_OTHER = ("other", TEAL)
# most boxes of a timeline; with more, the browser would take seconds
_MOST_BOXES = 20_000


def needle_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draws the share of right answer tokens as grids: of named models, and of the first and the last evaluation."""
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
    """Draws held-out loss by position in the document, one line per evaluation; None without evaluations."""
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
    """Draws predicted above measured actions of all ranks in the last steps; None if none were recorded."""
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
    """Selects evaluations to label: other models, and the first and the last of the training."""
    steps = [run for run in runs if not run["name"]]
    return [run for run in runs if run["name"] or run in steps[:1] + steps[-1:]]


def _title(run: Run) -> str:
    return run["name"] or f"step {run['step']}"

"""Charts over the steps of a run: loss, rates, predicted against measured, layouts, lengths, shares and seconds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hf_longctx.journal import Journal
from hf_longctx.page.figures import BLUE, GREEN, GREY, ORANGE, PALE, RED, SERIES, TEAL, Chart, axes, axis, bars, line
from hf_longctx.page.history import Step, length_counts

_STEP = "optimizer step"
# losses of one held-out set, or of several with names; not those by position and of needles
_HELD_OUT = re.compile(r"eval_(?:(?!loss_at_|needle_)(.+)_)?loss")
_DASHES = ("solid", "dot", "dash", "dashdot")
# name in the journal -> words and colour, from the bottom of the chart to its top
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
    """Divisors of the counted operations. peak: FLOP/s of one device; None if it is not known."""

    num_ranks: int
    peak: float | None
    peak_name: str


def loss_chart(steps: Sequence[Step], journal: Journal) -> Chart:
    """The training loss, and the loss of every evaluation of the held-out set, or of each of several sets."""
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
    """Tokens per second of whole steps, and label tokens if they are known."""
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
    """Model operations per second of a rank, or their share of the device's peak if that is known."""
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
    """Predicted against measured seconds of the plans of each step."""
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
    """Predicted against measured memory of rank 0."""
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
    """Share of tokens that ran in groups of each size, by step."""
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
    """Histogram of the lengths that were trained on, with the share of tokens that each class holds."""
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
    """Padding and idle shares by step."""
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
    """Seconds of rank 0 by what it did, stacked to the whole step."""
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
    """A sentence about what is not hidden: planning as measured, exchanges and copies as predicted."""
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
    """Moving mean over about a twentieth of the series."""
    width = max(5, len(values) // 20)
    smooth: list[float | None] = []
    for stop in range(1, len(values) + 1):
        known = [value for value in values[max(0, stop - width) : stop] if value is not None]
        smooth.append(sum(known) / len(known) if known else None)
    return smooth


def _edge(number: int) -> int:
    """Fewest tokens of length class `number`."""
    edge = int(2 ** (number / 2))
    return edge if edge >= 2 ** (number / 2) else edge + 1

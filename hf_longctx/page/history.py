"""Steps of a run for the page: plans of an optimizer step joined, and long runs thinned to means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean
from typing import Any

from hf_longctx.journal import Journal, Line

# points of a chart; a longer run shows means over neighbouring steps
MOST_POINTS = 1500


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, or the mean of several.

    wall_s: seconds of the whole step, including the optimizer and the wait for its plans. None: unknown for this step.
    """

    step: float
    loss: float | None
    tokens: float
    labels: float | None
    operations: float
    wall_s: float | None
    measured_s: float
    predicted_s: float | None
    plan_wait_s: float
    solve_s: float
    seconds: dict[str, float]
    rank_seconds: dict[str, float]
    padding_share: float
    idle_share: float | None
    predicted_idle: float | None
    held_bytes: float | None
    predicted_bytes: float | None
    host_bytes: float | None
    group_tokens: dict[int, float]
    layout: str

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole step, or of its plans if that is unknown."""
        return self.tokens / (self.wall_s or self.measured_s)

    @property
    def error(self) -> float | None:
        """Relative error predicted / measured - 1."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1

    @property
    def predicted_waiting(self) -> float | None:
        """Predicted share of all ranks' seconds spent waiting for others."""
        total = sum(self.rank_seconds.values())
        return self.rank_seconds["idle"] / total if total else None


def steps_of(journal: Journal) -> list[Step]:
    """Returns all optimizer steps of the journal, in order."""
    grouped: dict[int, list[Line]] = {}
    for line in journal.of("step"):
        grouped.setdefault(line["step"], []).append(line)
    return [_joined(step, lines) for step, lines in sorted(grouped.items())]


def thinned(steps: Sequence[Step], most: int = MOST_POINTS) -> list[Step]:
    """Thins steps to at most `most`, each the mean of equally many neighbours."""
    width = ceil(len(steps) / most) if steps else 1
    return list(steps) if width == 1 else [_mean_of(steps[i : i + width]) for i in range(0, len(steps), width)]


def length_counts(journal: Journal) -> dict[int, int]:
    """Counts trained sequences by length class, as in the journal."""
    counts: Counter[int] = Counter()
    for line in journal.of("step"):
        counts.update({int(name): number for name, number in line["lengths"].items()})
    return dict(sorted(counts.items()))


def _joined(step: int, lines: list[Line]) -> Step:
    tokens = sum(line["tokens"] for line in lines)
    last = lines[-1]
    held, predicted, host = _bytes(lines)
    return Step(
        step=step,
        loss=last.get("loss"),
        tokens=tokens,
        # a trainer that draws its own batches does not count them
        labels=last.get("labels") or None,
        operations=sum(line["operations"] for line in lines),
        wall_s=last.get("wall_s"),
        measured_s=sum(line["measured_s"] for line in lines),
        predicted_s=_sum(line.get("predicted_s") for line in lines),
        plan_wait_s=last.get("plan_wait_s") or 0.0,
        solve_s=sum(line["solve_s"] for line in lines),
        seconds=_sums(line["seconds"] for line in lines),
        rank_seconds=_sums(line.get("rank_seconds") or {} for line in lines),
        padding_share=_padding(lines, tokens),
        idle_share=_mean(line.get("idle_share") for line in lines),
        predicted_idle=_mean(line.get("predicted_idle") for line in lines),
        held_bytes=held,
        predicted_bytes=predicted,
        host_bytes=host,
        group_tokens={int(name): number for name, number in _sums(line["group_tokens"] for line in lines).items()},
        layout=" | ".join(line["layout"] for line in lines),
    )


def _padding(lines: list[Line], tokens: float) -> float:
    """Returns the share of dummy tokens in all tokens of several plans."""
    run = sum(line["tokens"] / (1 - line["padding_share"]) for line in lines)
    return 1 - tokens / run if run else 0.0


def _bytes(lines: list[Line]) -> tuple[float | None, float | None, float | None]:
    """Returns the most bytes on the device, measured and predicted, and on the host."""
    on_device = any(line["bytes"]["device_peak"] for line in lines)
    names = ("device_peak",) if on_device else ("saved", "kv_book")
    held = max(sum(line["bytes"][name] for name in names) for line in lines)
    if not held:
        # chunks that are kept whole on a CPU are not counted; there is only the plan's estimate
        names = ("device_peak",)
    predicted = max(sum(line["predicted_bytes"][name] for name in names) for line in lines)
    host = max(line["bytes"]["host"] for line in lines)
    return held or None, predicted or None, host or None


def _mean_of(steps: Sequence[Step]) -> Step:
    """Averages neighbouring steps; shares of groups add up, and the layout is that of the first."""

    def each(read: Callable[[Step], float | None]) -> float | None:
        return _mean(map(read, steps))

    def sure(read: Callable[[Step], float]) -> float:
        return mean(map(read, steps))

    return Step(
        step=steps[-1].step,
        loss=each(lambda s: s.loss),
        tokens=sure(lambda s: s.tokens),
        labels=each(lambda s: s.labels),
        operations=sure(lambda s: s.operations),
        wall_s=each(lambda s: s.wall_s),
        measured_s=sure(lambda s: s.measured_s),
        predicted_s=each(lambda s: s.predicted_s),
        plan_wait_s=sure(lambda s: s.plan_wait_s),
        solve_s=sure(lambda s: s.solve_s),
        seconds=_means(s.seconds for s in steps),
        rank_seconds=_means(s.rank_seconds for s in steps),
        padding_share=sure(lambda s: s.padding_share),
        idle_share=each(lambda s: s.idle_share),
        predicted_idle=each(lambda s: s.predicted_idle),
        held_bytes=each(lambda s: s.held_bytes),
        predicted_bytes=each(lambda s: s.predicted_bytes),
        host_bytes=each(lambda s: s.host_bytes),
        group_tokens=_means(s.group_tokens for s in steps),
        layout=f"{steps[0].layout} (first of {len(steps)} steps)",
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _sums(tables: Iterable[dict[Any, float]]) -> dict[Any, float]:
    total: Counter[Any] = Counter()
    for table in tables:
        total.update(table)  # type: ignore[arg-type]
    return dict(total)


def _means(tables: Iterable[dict[Any, float]]) -> dict[Any, float]:
    tables = list(tables)
    return {name: value / len(tables) for name, value in _sums(tables).items()}

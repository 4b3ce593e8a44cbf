"""Simulates the gain of splitting a backward into input and weight gradients on long contexts.

    python recipes/bench/papers/zero_bubble.py [--model gpt-7b] [--tokens 32768 65536 131072] [--slices 1 2 4 8] [--stages 4]
        [--sequences 8] [--json FILE]

Compares Seq1F1B on slices of equal time with a schedule that has the same order of forwards and input gradients, but runs weight
gradients when a stage would be idle (ZB1P of zero-bubble pipelines, arXiv 2401.10241). Times are operation counts at
the rates of a generic GPU: a backward takes twice the matrix products of a forward, half of them for weights, and 2.5 times its
attention, which has no weights. Messages take no time.

All assumptions favour the split: a weight gradient can be stopped and resumed at any moment, separating it costs nothing, and
its inputs (a slice's activations and the gradients of its matrix products) take no more memory than the slice did before.
Columns are the time saved, as shares of Seq1F1B's time. `same memory`: no stage holds more slices than under Seq1F1B. `any
memory`: no limit, and forwards run twice as far ahead. `no idle`: an upper bound for any schedule.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hf_longctx.plan.chunks import slice_bounds
from hf_longctx.plan.core.orders import compute_actions
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.types import Action, Chunk, Span
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import default_coefficients
from hf_longctx.plan.model.attention_pairs import FULL, SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.recipes.bench.papers.command_line import print_gains


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """Seconds of one slice on one stage: forward, gradient of its input, gradient of the weights."""

    forward_s: float
    input_s: float
    weight_s: float


def slice_times(model: ModelSpec, chunks: Sequence[Chunk], num_stages: int) -> list[SliceTimes]:
    """Times of every chunk on a stage that does not have the output head."""
    costs = default_coefficients(model, ClusterSpec(num_stages, num_stages, GENERIC_GPU)).forward
    token_s = costs.token_s * (1 - model.head_share) / num_stages
    pair_s = costs.pair_s / num_stages
    matrix = [token_s * chunk.num_tokens for chunk in chunks]
    attention = [pair_s * FULL.of_chunk(chunk) for chunk in chunks]
    return [SliceTimes(m + a, m + 2.5 * a, m) for m, a in zip(matrix, attention, strict=True)]


class Stage:
    """The clock of one stage, and the weight gradients that it has put off, oldest first."""

    def __init__(self, times: Sequence[SliceTimes], limit: float) -> None:
        self.times, self.limit = times, limit
        self.clock_s, self.num_held = 0.0, 0
        self.owed_s: list[float] = []

    def run(self, action: Action, ready_s: float) -> float:
        """Runs weight gradients until `ready_s`, when the action's input arrives, then the action; returns when it is done."""
        self.pay(ready_s - self.clock_s)
        times = self.times[action.chunk]
        if action.kind == "F":
            while self.num_held >= self.limit:
                self.pay(self.owed_s[0])
            self.num_held += 1
        self.clock_s = max(self.clock_s, ready_s) + (times.forward_s if action.kind == "F" else times.input_s)
        if action.kind == "B":
            self.owed_s.append(times.weight_s)
        return self.clock_s

    def pay(self, seconds: float) -> None:
        """Runs weight gradients for at most `seconds`; each one that finishes frees its slice."""
        while self.owed_s and (seconds > 0 or self.owed_s[0] <= 0):
            part_s = min(max(0.0, seconds), self.owed_s[0])
            self.clock_s += part_s
            seconds -= part_s
            self.owed_s[0] -= part_s
            if self.owed_s[0] <= 0:
                self.owed_s.pop(0)
                self.num_held -= 1


def split_makespan(order: Sequence[Sequence[Action]], times: Sequence[SliceTimes], limits: Sequence[float]) -> float:
    """Seconds until all stages have run all forwards, input gradients and weight gradients.

    Stage p holds at most `limits[p]` slices between their forward and their weight gradient.
    """
    stages = [Stage(times, limit) for limit in limits]
    places = [0] * len(order)
    done_s: dict[tuple[str, int, int], float] = {}
    while any(place < len(actions) for place, actions in zip(places, order, strict=True)):
        for index, actions in enumerate(order):
            # stages may be simulated in any order, because an action's start depends only on its own stage and its source
            while places[index] < len(actions):
                action = actions[places[index]]
                source = index + (-1 if action.kind == "F" else 1)
                key = (action.kind, source, action.chunk)
                if 0 <= source < len(order) and key not in done_s:
                    break
                done_s[action.kind, index, action.chunk] = stages[index].run(action, done_s.get(key, 0.0))
                places[index] += 1
    for stage in stages:
        stage.pay(math.inf)
    return max(stage.clock_s for stage in stages)


def gains(model: ModelSpec, num_tokens: int, num_slices: int, num_stages: int, num_sequences: int) -> dict[str, float]:
    """Time that the split saves, as shares of Seq1F1B's time."""
    costs = default_coefficients(model, ClusterSpec(num_stages, num_stages, GENERIC_GPU)).forward
    bounds = slice_bounds(num_tokens, num_slices, SpanRates(costs.pair_s, costs.token_s))
    spans = [Span(sequence, a, b) for sequence in range(num_sequences) for a, b in pairwise(bounds)]
    chunks = [Chunk(index, (span,)) for index, span in enumerate(spans)]
    times = slice_times(model, chunks, num_stages)
    whole = [SliceTimes(t.forward_s, t.input_s + t.weight_s, 0.0) for t in times]
    order = compute_actions(chunks, num_stages, "1f1b")
    far = ahead(order, num_stages)
    held = [num_slices + num_stages - 1] * num_stages
    free = [math.inf] * num_stages
    base_s = split_makespan(order, whole, free)
    busy_s = sum(t.forward_s + t.input_s + t.weight_s for t in times)
    return {
        "same_memory": 1 - split_makespan(order, times, held) / base_s,
        "any_memory": 1 - split_makespan(far, times, free) / base_s,
        "no_idle": 1 - busy_s / base_s,
    }


def ahead(order: Sequence[Sequence[Action]], num_stages: int) -> list[list[Action]]:
    """Moves P - 1 - p more forwards (or all that are left) before the first backward of stage p of P."""
    moved = []
    for stage, actions in enumerate(order):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        warm_up = actions.index(backwards[0]) + num_stages - 1 - stage
        row = forwards[:warm_up]
        for place, backward in enumerate(backwards):
            row += [backward, *forwards[warm_up + place : warm_up + place + 1]]
        moved.append(row)
    return moved


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-7b", help="a model of the catalogue (default: gpt-7b)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072], help="lengths of all sequences")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of slices per sequence")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (default: 4)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in a step (default: 8)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    settings = parser.parse_args(arguments)
    model = named_model(settings.model)
    columns = ("same_memory", "any_memory", "no_idle")
    return print_gains(
        settings, columns, lambda tokens, slices: gains(model, tokens, slices, settings.stages, settings.sequences)
    )


if __name__ == "__main__":
    sys.exit(main())

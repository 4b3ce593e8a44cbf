"""Orders of pipeline stages from their published formulas, random families of chunks, and an event loop for tests alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.types import Action, Chunk, MicroBatch, Parameters, SequenceGroup, Span, StepPlan
from hf_longctx.plan.pipeline.stages import layer_ranges

# a family of chunks: (number of slices of one sequence, number of whole sequences packed after its last slice)
FamilyShape = tuple[int, int]


def chunks_of(shapes: Sequence[FamilyShape]) -> tuple[Chunk, ...]:
    """Chunks of families: (3, 0) is a sequence of three slices, (3, 2) ends in a hybrid, (0, 2) is a pack, (0, 0) a dummy."""
    chunks: list[Chunk] = []
    sequence = 0
    for num_slices, num_short in shapes:
        spans = [[Span(sequence, 10 * place, 10 * place + 10)] for place in range(num_slices)] or [[]]
        sequence += bool(num_slices)
        spans[-1] += [Span(sequence + place, 0, 5) for place in range(num_short)]
        sequence += num_short
        chunks += [Chunk(len(chunks) + place, tuple(members)) for place, members in enumerate(spans)]
    return tuple(chunks)


def plan_of(
    chunks: Sequence[Chunk],
    num_stages: int,
    schedule: Schedule,
    num_ranges: int = 1,
    output_shares: Sequence[float] = (),
    lead: float = 1.0,
) -> StepPlan:
    """Plan of a step with one pipelined group, one rank per stage and one layer per layer range."""
    group = SequenceGroup((0,), "local", tuple(chunks), ())
    ranges = layer_ranges(num_stages * num_ranges, num_stages, num_ranges)
    group = pipelined(group, ranges, schedule, lead=lead, output_shares=output_shares)
    stops: dict[int, int] = {}
    for chunk in chunks:
        stops.update({span.sequence: span.stop for span in chunk.spans})
    lengths = tuple(stops[sequence] for sequence in sorted(stops))
    parameters: Parameters = "replicated" if num_ranges > 1 else "gathered_per_round"
    return StepPlan(0, lengths, num_stages, 1, parameters, (MicroBatch((group,)),))


def family_shapes(most_slices: int = 5, most_families: int = 5) -> st.SearchStrategy[list[FamilyShape]]:
    """Random families of up to `most_slices` slices, with and without short sequences, and also packs and dummies."""
    return st.lists(st.tuples(st.integers(0, most_slices), st.integers(0, 2)), min_size=1, max_size=most_families)


def random_shapes(draw: random.Random, most_slices: int = 6, most_families: int = 6) -> list[FamilyShape]:
    """Families like those of `family_shapes`, from a generator of random numbers."""
    return [(draw.randint(0, most_slices), draw.randint(0, 2)) for _ in range(draw.randint(1, most_families))]


def makespan(stages: Sequence[Sequence[Action]], seconds: Callable[[Action], float], num_ranges: int = 1) -> float:
    """Seconds until all stages ran their F and B in order, each as soon as its source is done; messages take no time."""
    num_stages = len(stages)
    last = num_stages * num_ranges - 1
    done: dict[tuple[str, int, int], float] = {}
    clocks, places = [0.0] * num_stages, [0] * num_stages
    order = [[action for action in actions if action.kind in "FB"] for actions in stages]
    while any(place < len(actions) for place, actions in zip(places, order, strict=True)):
        before = list(places)
        for stage, actions in enumerate(order):
            while places[stage] < len(actions):
                action = actions[places[stage]]
                virtual = action.layer_range * num_stages + stage
                needs: list[Any] = [("F", virtual - 1)] if virtual else []
                if action.kind == "B":
                    needs = [("F", virtual)] + ([("B", virtual + 1)] if virtual < last else [])
                keys = [(kind, place, action.chunk) for kind, place in needs]
                if not all(key in done for key in keys):
                    break
                clocks[stage] = max([clocks[stage], *(done[key] for key in keys)]) + seconds(action)
                done[action.kind, virtual, action.chunk] = clocks[stage]
                places[stage] += 1
        assert places != before, "the stages wait for each other"
    return max(clocks)


Stages = tuple[tuple[Action, ...], ...]


def backward_order(num_chunks: int, num_slices: int) -> list[int]:
    """Order of backwards: sequences in order, and the slices of each sequence from last to first."""
    return [i // num_slices * num_slices + num_slices - 1 - i % num_slices for i in range(num_chunks)]


def one_forward_one_backward(num_stages: int, num_chunks: int, num_slices: int = 1) -> Stages:
    """Orders of Seq1F1B, from its formula for the warm-up; of plain 1F1B if sequences are whole."""
    order = backward_order(num_chunks, num_slices)
    stages = []
    for p in range(num_stages):
        ahead = min(num_stages - p - 2 + num_slices, num_chunks)
        actions = [Action("F", p, i) for i in range(ahead)]
        for i in range(num_chunks - ahead):
            actions += [Action("F", p, ahead + i), Action("B", p, order[i])]
        stages.append((*actions, *(Action("B", p, i) for i in order[num_chunks - ahead :])))
    return tuple(stages)


def interleaved(num_stages: int, num_chunks: int, num_ranges: int, num_slices: int = 1) -> Stages:
    """Interleaved orders: rounds of as many chunks as there are stages, with Megatron's warm-up plus that of the slices."""
    order = backward_order(num_chunks, num_slices)
    rounds = range(0, num_chunks, num_stages)
    ranges = range(num_ranges)
    forwards = [(i, v) for r in rounds for v in ranges for i in range(r, r + num_stages)]
    backwards = [(i, v) for r in rounds for v in reversed(ranges) for i in order[r : r + num_stages]]
    total = len(forwards)
    stages = []
    for p in range(num_stages):
        ahead = min((num_ranges - 1) * num_stages + 2 * (num_stages - 1 - p) + num_slices - 1, total)
        units = [("F", *unit) for unit in forwards[:ahead]]
        for i in range(total - ahead):
            units += [("F", *forwards[ahead + i]), ("B", *backwards[i])]
        units += [("B", *unit) for unit in backwards[total - ahead :]]
        stages.append(tuple(Action("F" if kind == "F" else "B", p, i, v) for kind, i, v in units))
    return tuple(stages)


def with_messages(stages: Stages, num_ranges: int = 1) -> Stages:
    """Adds a receive right before, and a send right after, each action that needs one."""
    last = (len(stages) - 1, num_ranges - 1)
    result = []
    for actions in stages:
        full = []
        for a in actions:
            place = (a.stage, a.layer_range)
            receives = place != (0, 0) if a.kind == "F" else place != last
            sends = place != last if a.kind == "F" else place != (0, 0)
            kind = "F" if a.kind == "F" else "B"
            full += [Action(f"R{kind}", a.stage, a.chunk, a.layer_range)] if receives else []  # type: ignore[arg-type]
            full += [a]
            full += [Action(f"S{kind}", a.stage, a.chunk, a.layer_range)] if sends else []  # type: ignore[arg-type]
        result.append(tuple(full))
    return tuple(result)


def without_messages(group: SequenceGroup) -> SequenceGroup:
    """Removes all sends and receives of a group."""
    return replace(
        group,
        stages=tuple(
            replace(stage, actions=tuple(action for action in stage.actions if action.kind not in ("SF", "RF", "SB", "RB")))
            for stage in group.stages
        ),
    )

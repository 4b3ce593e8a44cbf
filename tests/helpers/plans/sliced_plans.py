"""Plans of slices, hand-written and random: one micro-batch with one group, whose sequences are cut into chunks; and the
gathers of weights that ranks with chunks take part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from helpers.plans.layouts import plan_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import Action, Chunk, MicroBatch, SequenceGroup, Span, StagePlan, StepPlan
from hf_longctx.plan.core.validate import validate_plan

Rows = list[dict[str, list[int]]]
# chunks of (sequence, start, stop)
Chunks = Sequence[Sequence[tuple[int, int, int]]]


def cut(sequence: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Slices of these sizes that make up a sequence."""
    return [(sequence, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def forward_then_back(num_chunks: int) -> str:
    """Action words that run all chunks forward, then all backward in reverse order."""
    return " ".join([f"0F{i}" for i in range(num_chunks)] + [f"0B{i}" for i in reversed(range(num_chunks))])


def sliced_plan(
    lengths: list[int], chunks: Chunks, words: str = "", num_ranks: int = 1, validated: bool = True, **settings: Any
) -> StepPlan:
    """Plan of one group of all ranks with these chunks, in the order of `words` (default: all forwards, then all backwards)."""
    plan = plan_of([[(num_ranks, tuple(range(len(lengths))))]], lengths, num_ranks, **settings)
    (group,) = plan.micro_batches[0].groups
    actions = tuple(map(Action.parse, (words or forward_then_back(len(chunks))).split()))
    group = replace(
        group,
        chunks=tuple(Chunk(index, tuple(Span(*span) for span in spans)) for index, spans in enumerate(chunks)),
        stages=(replace(group.stages[0], actions=actions),),
    )
    plan = replace(plan, micro_batches=(MicroBatch((group,)),))
    return validate_plan(plan) if validated else plan


def gathers_of(rounds: Sequence[tuple[SequenceGroup, StagePlan]]) -> list[tuple[int, str]]:
    """Collectives of a rank over its block with sharded parameters on one stage, as FSDP2 does them: (micro-batch, unit or sum).

    A forward gathers every layer. Embedding and head are one unit, gathered by the first forward and by each that follows a
    backward, which frees it; other backwards gather it again. A backward gathers the layers in reverse. The last one of a
    micro-batch sums the gradients of each.
    """
    found: list[tuple[int, str]] = []
    for number, (_, stage) in enumerate(rounds):
        layers, is_held = range(stage.num_layers), False
        left = sum(action.kind == "B" for action in stage.actions)
        for action in stage.actions:
            if not is_held:
                found.append((number, "outside"))
            is_held = action.kind == "F"
            left -= action.kind == "B"
            for layer in layers if action.kind == "F" else reversed(layers):
                found.append((number, f"layer {layer}"))
                if not left:
                    found.append((number, f"sum of layer {layer}"))
        found.append((number, "sum of outside"))
    return found


@st.composite
def random_slicings(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]], str]:
    """Random lengths, cuts, chunks (slices alone or in front of whole sequences) and a random order that slices allow."""
    # one sequence is longer, because a lone token sees only itself, which gives queries and keys no gradient but noise
    lengths = [draw(st.integers(8, 24)), *draw(st.lists(st.integers(1, 24), max_size=3))]
    waiting = []
    for sequence, length in enumerate(lengths):
        bounds = sorted({0, length, *draw(st.lists(st.integers(1, length), max_size=4))})
        waiting.append([(sequence, start, stop) for start, stop in pairwise(bounds)])
    chunks: list[list[tuple[int, int, int]]] = []
    while any(waiting):
        span = draw(st.sampled_from([spans for spans in waiting if spans])).pop(0)
        is_whole = (span[1], span[2]) == (0, lengths[span[0]])
        if is_whole and chunks and draw(st.booleans()):
            chunks[-1].append(span)
        else:
            chunks.append([span])
    return lengths, chunks, _random_order(draw, chunks)


def _random_order(draw: st.DrawFn, chunks: list[list[tuple[int, int, int]]]) -> str:
    """A random order of actions in which slices run forward in order and backward in reverse order."""
    sequences = [{span[0] for span in spans} for spans in chunks]
    num_chunks = len(chunks)
    words: list[str] = []
    while len(words) < 2 * num_chunks:
        ready = [
            (kind, chunk)
            for kind in "FB"
            for chunk in range(num_chunks)
            if f"0{kind}{chunk}" not in words
            and (kind == "F" or f"0F{chunk}" in words)
            and all(
                f"0{kind}{other}" in words
                for other in (range(chunk) if kind == "F" else range(chunk + 1, num_chunks))
                if sequences[other] & sequences[chunk]
            )
        ]
        kind, chunk = draw(st.sampled_from(ready))
        words.append(f"0{kind}{chunk}")
    return " ".join(words)


# name -> sizes of the slices of one sequence of 96 tokens
CUTS = {
    "whole": [96],
    **{f"{count} equal slices": [96 // count] * count for count in (2, 3, 4, 6, 8, 12, 16)},
    "decreasing": [41, 29, 17, 9],
    "with a slice of one token": [60, 1, 30, 5],
    "one token first": [1, 95],
    "one token last": [95, 1],
    "ones at both ends": [1, 1, 92, 1, 1],
}


# name -> (lengths, chunks, words, whether the validator lets such a plan through)
PACKINGS: dict[str, tuple[list[int], Chunks, str, bool]] = {
    "a hybrid: the tail and whole sequences": (
        [30, 7, 5],
        [*([span] for span in cut(0, [12, 11])), [(0, 23, 30), (1, 0, 7), (2, 0, 5)]],
        "",
        True,
    ),
    "slices, hybrids and packs": (
        [70, 33, 12, 9, 20, 5, 41],
        [
            *[[(0, 0, 30)], [(0, 30, 55)], [(0, 55, 70), (2, 0, 12), (5, 0, 5)]],
            *[[(6, 0, 26), (3, 0, 9)], [(6, 26, 41), (4, 0, 20)], [(1, 0, 33)]],
        ],
        "",
        True,
    ),
    "a sequence continues after chunks of others": (
        [20, 9, 17, 6],
        [[(0, 0, 8)], [(1, 0, 9)], [(2, 0, 10)], [(0, 8, 20), (3, 0, 6)], [(2, 10, 17)]],
        "",
        True,
    ),
    "sequences one after the other": (
        [20, 17],
        [[(0, 0, 8)], [(0, 8, 20)], [(1, 0, 10)], [(1, 10, 17)]],
        "0F0 0F1 0B1 0F2 0B0 0F3 0B3 0B2",
        True,
    ),
    "a whole sequence in front": ([24, 16], [[(0, 0, 9)], [(0, 9, 24)], [(1, 0, 16)]], "0F2 0F0 0F1 0B1 0B2 0B0", True),
    "a packed row cut inside documents": (
        [40, 17, 39],
        [[(0, 0, 25)], [(0, 25, 40), (1, 0, 17), (2, 0, 3)], [(2, 3, 23)], [(2, 23, 39)]],
        "",
        False,
    ),
}


def few(max_examples: int) -> Any:
    return settings(max_examples=max_examples, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))

"""Cut a long sequence into slices of equal time, for slice-first execution without a pipeline and for pipelines.

Seq1F1B balances slices by operation counts (arXiv 2406.03488, section 3); here they are balanced by seconds, as in InfiniPipe
(arXiv 2509.21275, section 4). The numbers of slices to try are SPPO's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hf_longctx.plan.core.attention_pairs import SpanRates
from hf_longctx.plan.core.sharding import LENGTHS_PER_OCTAVE, length_step
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup, Span

# tokens per rank of the shortest and of the longest slice that is tried
LEAST_SLICE_TOKENS = 2 * 1024
MOST_SLICE_TOKENS = 16 * 1024


def slice_bounds(num_tokens: int, num_slices: int, rates: SpanRates, rounds: bool = False) -> tuple[int, ...]:
    """Token bounds from 0 to `num_tokens` of slices that take about equal time; fewer slices if some would be empty.

    Later tokens see more tokens before them (unless all layers have windows), so slices get shorter towards the end.

    rounds: slices of many tokens, except the last, get the nearest length for which attention's operators plan, at most a
    sixty-fourth away. The next bound does not move with it, so that errors do not add up: a pipeline of four stages loses less
    than 1 % of a step.
    """
    if num_slices < 1 or num_tokens < 1:
        raise ValueError(f"{num_tokens} tokens cannot be cut into {num_slices} slices; both must be at least 1")
    total_s = rates.of_span(0, num_tokens)
    bounds = [0]
    for index in range(1, num_slices):
        if total_s <= 0:
            tokens = num_tokens * index / num_slices
        else:
            tokens = rates.tokens_in(total_s * index / num_slices)
        size = max(0, round(tokens) - bounds[-1])
        bounds.append(min(num_tokens, bounds[-1] + (_planned_length(size) if rounds else size)))
    return tuple(sorted({*bounds, num_tokens}))


def _planned_length(num_tokens: int) -> int:
    """The length nearest to `num_tokens` for which operators plan; a length stays where these are too far apart."""
    step = length_step(num_tokens)
    return num_tokens if num_tokens < LENGTHS_PER_OCTAVE * step else round(num_tokens / step) * step


def sliced_group(group: SequenceGroup, num_slices: int, rates: SpanRates) -> SequenceGroup:
    """Cut the longest sequence of the group's only chunk into slices; put the others into packs no larger than the largest slice.

    All slices run forward, then backward in reverse order; after them each pack runs forward and backward.
    """
    (chunk,) = group.chunks
    longest = max(chunk.spans, key=lambda span: span.num_tokens)
    bounds = slice_bounds(longest.num_tokens, num_slices, rates, rounds=True)
    slices = [(Span(longest.sequence, longest.start + start, longest.start + stop),) for start, stop in pairwise(bounds)]
    room = max(stop - start for start, stop in pairwise(bounds))
    packs = _packs([span for span in chunk.spans if span != longest], room)
    chunks = tuple(Chunk(index, spans) for index, spans in enumerate([*slices, *packs]))
    order = [("F", i) for i in range(len(slices))] + [("B", i) for i in reversed(range(len(slices)))]
    order += [(kind, i) for i in range(len(slices), len(chunks)) for kind in ("F", "B")]
    (stage,) = group.stages
    actions = tuple(Action(kind, stage.stage, index) for kind, index in order)  # type: ignore[arg-type]
    return replace(group, chunks=chunks, stages=(replace(stage, actions=actions, activations=()),))


def _packs(spans: list[Span], room: int) -> list[tuple[Span, ...]]:
    """Put spans, in their order, into packs of at most `room` tokens; a longer span is alone in its pack."""
    packs: list[list[Span]] = []
    left = 0
    for span in spans:
        if span.num_tokens > left:
            packs.append([])
            left = room
        packs[-1].append(span)
        left -= span.num_tokens
    return [tuple(pack) for pack in packs]


def slice_counts(num_tokens: int, degree: int) -> range:
    """Numbers of equal slices that give each of `degree` ranks 2K to 16K tokens per slice of the sequence.

    A sequence too short for that is not cut.
    """
    if num_tokens < 1 or degree < 1:
        raise ValueError(f"{num_tokens} tokens cannot be cut for {degree} ranks; both must be at least 1")
    fewest = -(-num_tokens // (MOST_SLICE_TOKENS * degree))
    return range(fewest, max(fewest, num_tokens // (LEAST_SLICE_TOKENS * degree)) + 1)

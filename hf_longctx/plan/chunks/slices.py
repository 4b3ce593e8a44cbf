"""Cuts a long sequence of a group into slices of equal time, so that slice-first execution can work on a part of a layer.

Source of the balance: Seq1F1B (arXiv 2406.03488, section 3), by seconds in the place of its operation counts, as InfiniPipe
does (arXiv 2509.21275, section 4).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hf_longctx.plan.core.attention_pairs import SpanRates
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup, Span


def slice_bounds(num_tokens: int, num_slices: int, rates: SpanRates) -> tuple[int, ...]:
    """Bounds, from 0 to `num_tokens`, of slices that take equal time; fewer where some would be empty.

    Later tokens see more before them, as far as windows let them, so that slices get shorter towards the end.
    """
    if num_slices < 1 or num_tokens < 1:
        raise ValueError(f"{num_tokens} tokens cannot be cut into {num_slices} slices; both must be at least 1")
    total_s = rates.of_span(0, num_tokens)
    bounds = [0]
    for place in range(1, num_slices):
        if total_s <= 0:
            tokens = num_tokens * place / num_slices
        else:
            tokens = rates.tokens_in(total_s * place / num_slices)
        bounds.append(min(num_tokens, max(bounds[-1], round(tokens))))
    return tuple(sorted({*bounds, num_tokens}))


def sliced_group(group: SequenceGroup, num_slices: int, rates: SpanRates) -> SequenceGroup:
    """The group with the longest sequence of its one chunk in slices, and the rest of it as packs no larger than these.

    All slices run forward, then backward last first; each pack runs forward and backward behind them.
    """
    (chunk,) = group.chunks
    longest = max(chunk.spans, key=lambda span: span.num_tokens)
    bounds = slice_bounds(longest.num_tokens, num_slices, rates)
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
    """Spans in their order, in packs of at most `room` tokens (a longer span alone)."""
    packs: list[list[Span]] = []
    left = 0
    for span in spans:
        if span.num_tokens > left:
            packs.append([])
            left = room
        packs[-1].append(span)
        left -= span.num_tokens
    return [tuple(pack) for pack in packs]


LEAST_SLICE_TOKENS = 2 * 1024


MOST_SLICE_TOKENS = 16 * 1024


def slice_counts(num_tokens: int, degree: int) -> range:
    """Numbers of slices for which an even slice of a sequence has 2K to 16K tokens on each of `degree` ranks.

    A sequence that is too short for one such slice runs whole.
    """
    if num_tokens < 1 or degree < 1:
        raise ValueError(f"{num_tokens} tokens on {degree} ranks cannot be cut; give at least one of both")
    fewest = -(-num_tokens // (MOST_SLICE_TOKENS * degree))
    return range(fewest, max(fewest, num_tokens // (LEAST_SLICE_TOKENS * degree)) + 1)

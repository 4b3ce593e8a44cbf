"""Sequences of one group to chunks of like time for a pipeline: slices of long sequences, packs of short ones, hybrids of both.

InfiniPipe's sequence processor (arXiv 2509.21275, Algorithm 1): the longest sequence is cut into slices of equal time, all
other long ones on the same mesh of bounds, and short sequences fill buckets, of which each tail slice starts one. A bucket
never gets a second tail, which would keep two long sequences in flight at once.

The listing raises its limit on a bucket's time whenever a sequence fits nowhere, and opens buckets for lack of tokens alone.
Where that starts is not said, and it overloads buckets that hold many short sequences. Here there are as many buckets from
the start as work and tokens need at least, the limit begins at an even share of the work, and a sequence that would raise it
above `_MOST_LOAD` slices opens a bucket. Every chunk costs the same fixed seconds, so these move no bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_longctx.plan.chunks.slices import slice_bounds
from hf_longctx.plan.core.attention_pairs import SpanRates
from hf_longctx.plan.core.types import Chunk, Span

# how far a bucket may exceed the time of a slice
_MOST_LOAD = 1.05


@dataclass(slots=True)
class _Bucket:
    """Spans that become one chunk, a tail slice first if there is one."""

    seconds: float
    num_tokens: int
    spans: list[Span]

    @property
    def density(self) -> float:
        """Seconds per token, 0 while it is empty."""
        return self.seconds / self.num_tokens if self.num_tokens else 0.0


def elastic_chunks(
    lengths: Mapping[int, int],
    num_slices: int,
    rates: SpanRates,
    capacity_tokens: int,
    target_s: float = 0.0,
) -> tuple[Chunk, ...]:
    """Chunks of sequences {number: tokens}: the longest in `num_slices` slices of equal time, and all others to match it.

    rates: forward plus backward. No chunk has more than `capacity_tokens`; slices get shorter where that needs it. target_s: what
    a pack may take where that is more than a slice takes. Families stand longest first, slices of one sequence in a row. One
    slice means whole sequences and packs. Raises ValueError for sequences without tokens and for numbers below 1.
    """
    _check(lengths, num_slices=num_slices, capacity_tokens=capacity_tokens)
    if not lengths:
        return ()
    if rates.pair_s <= 0 and rates.token_s <= 0:
        rates = SpanRates(0.0, 1.0)
    ordered = sorted(lengths, key=lambda sequence: (-lengths[sequence], sequence))
    mesh = _mesh(lengths[ordered[0]], num_slices, rates, capacity_tokens)
    long = [sequence for sequence in ordered if lengths[sequence] > mesh[1]]
    families = [_slices(sequence, lengths[sequence], mesh) for sequence in long]
    tails = [
        _Bucket(rates.of_span(family[-1].start, family[-1].stop), family[-1].num_tokens, [family[-1]]) for family in families
    ]
    short = [(sequence, lengths[sequence]) for sequence in ordered[len(long) :]]
    cell_s = max(rates.of_span(start, stop) for start, stop in pairwise(mesh))
    packs = _pack(tails, [(i, n, rates.of_span(0, n)) for i, n in short], max(cell_s, target_s), capacity_tokens)
    chunks = [[span] for family in families for span in family]
    place = -1
    for family, tail in zip(families, tails, strict=True):
        place += len(family)
        chunks[place] = tail.spans
    return _numbered([*chunks, *(pack.spans for pack in sorted(packs, key=lambda pack: -pack.seconds))])


def fixed_chunks(lengths: Mapping[int, int], chunk_tokens: int) -> tuple[Chunk, ...]:
    """Chunks of about equal tokens, what Seq1F1B (arXiv 2406.03488) makes of packed data: the baseline of `elastic_chunks`.

    Longer sequences are cut evenly into the fewest slices, shorter ones go longest first into the first pack with room.
    """
    _check(lengths, chunk_tokens=chunk_tokens)
    slices: list[list[Span]] = []
    packs: list[list[Span]] = []
    room: list[int] = []
    for sequence in sorted(lengths, key=lambda sequence: (-lengths[sequence], sequence)):
        length = lengths[sequence]
        if length > chunk_tokens:
            count = -(-length // chunk_tokens)
            bounds = [length * place // count for place in range(count + 1)]
            slices += [[Span(sequence, start, stop)] for start, stop in pairwise(bounds)]
            continue
        place = next((place for place, left in enumerate(room) if left >= length), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(chunk_tokens)
        packs[place].append(Span(sequence, 0, length))
        room[place] -= length
    return _numbered([*slices, *packs])


def _check(lengths: Mapping[int, int], **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; give at least 1")
    for sequence, length in lengths.items():
        if length < 1:
            raise ValueError(f"sequence {sequence} has {length} tokens; remove empty sequences before planning")


def _numbered(chunks: Iterable[Sequence[Span]]) -> tuple[Chunk, ...]:
    return tuple(Chunk(index, tuple(spans)) for index, spans in enumerate(chunks))


def _mesh(longest: int, num_slices: int, rates: SpanRates, capacity_tokens: int) -> tuple[int, ...]:
    """Bounds of equal time for the longest sequence, in more slices than asked for where these would be too large."""
    # the first slice has the most tokens, since none before it are attended to
    largest_s = rates.of_span(0, min(capacity_tokens, longest))
    fewest = math.ceil(rates.of_span(0, longest) / largest_s * (1 - 1e-9))
    return slice_bounds(longest, max(num_slices, fewest), rates)


def _slices(sequence: int, length: int, mesh: Sequence[int]) -> list[Span]:
    """A sequence cut at the bounds of the mesh that lie inside it."""
    inside = mesh[: bisect_left(mesh, length)]
    return [Span(sequence, start, stop) for start, stop in pairwise([*inside, length])]


def _pack(tails: list[_Bucket], short: list[tuple[int, int, float]], target_s: float, capacity_tokens: int) -> list[_Bucket]:
    """Puts short sequences (number, tokens, seconds), longest first, behind tails and into new buckets, which it returns.

    Each goes into the bucket with the fewest seconds per token that has time and tokens left: long sequences, dense in time,
    go where time is left, and buckets with the front of a long sequence before them are filled last.
    """
    work_s = sum(seconds for *_, seconds in short) + sum(tail.seconds for tail in tails)
    tokens = sum(length for _, length, _ in short) + sum(tail.num_tokens for tail in tails)
    fewest = max(len(tails), math.ceil(work_s / target_s * (1 - 1e-9)), -(-tokens // capacity_tokens)) if short else len(tails)
    buckets = [*tails, *(_Bucket(0.0, 0, []) for _ in range(fewest - len(tails)))]
    limit_s = work_s / max(1, fewest)
    densities = sorted((bucket.density, place) for place, bucket in enumerate(buckets))
    for sequence, length, seconds in short:
        room = capacity_tokens - length
        rank = next(
            (
                rank
                for rank, (_, place) in enumerate(densities)
                if buckets[place].num_tokens <= room and buckets[place].seconds + seconds <= limit_s
            ),
            -1,
        )
        if rank < 0:
            with_room = (rank for rank, (_, place) in enumerate(densities) if buckets[place].num_tokens <= room)
            rank = min(with_room, key=lambda rank: buckets[densities[rank][1]].seconds, default=-1)
            if rank < 0 or buckets[densities[rank][1]].seconds + seconds > _MOST_LOAD * target_s:
                densities.append((0.0, len(buckets)))
                buckets.append(_Bucket(0.0, 0, []))
                rank = len(densities) - 1
            limit_s = max(limit_s, buckets[densities[rank][1]].seconds + seconds)
        _, place = densities.pop(rank)
        bucket = buckets[place]
        bucket.seconds += seconds
        bucket.num_tokens += length
        bucket.spans.append(Span(sequence, 0, length))
        insort(densities, (bucket.density, place))
    return [bucket for bucket in buckets[len(tails) :] if bucket.spans]

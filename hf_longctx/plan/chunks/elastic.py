"""Make chunks of similar time from the sequences of one group, for a pipeline: slices, packs, and hybrids of both.

The pipeline planner calls this for every number of slices that it tries. The method is InfiniPipe's sequence processor (arXiv
2509.21275, Algorithm 1): cut the longest sequence into slices of equal time, cut all other long sequences at the same token
bounds (the mesh), and put short sequences into buckets. The last slice of every long sequence, its tail, starts a bucket. No
bucket gets a second tail, because that would keep two long sequences in flight at once.

The paper's listing raises its limit on the time of a bucket whenever a sequence fits nowhere, and opens a new bucket only for
lack of token capacity, so buckets with many short sequences get overloaded. It does not say with how many buckets and with which
limit to begin. Here the search begins with the fewest buckets that the work and the tokens need, and with an even share of the
work as the limit; it opens a new bucket before it raises the limit above `_MOST_LOAD` times the time of a slice. Every chunk also
costs fixed seconds, but they are equal for all chunks and change no bound.
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

# longest time that a bucket may take, as a multiple of the time of a slice
_MOST_LOAD = 1.05


@dataclass(slots=True)
class _Bucket:
    """Spans that become one chunk; a tail slice, if there is one, comes first."""

    seconds: float
    num_tokens: int
    spans: list[Span]

    @property
    def density(self) -> float:
        """Seconds per token; 0 for an empty bucket."""
        return self.seconds / self.num_tokens if self.num_tokens else 0.0


def elastic_chunks(
    lengths: Mapping[int, int],
    num_slices: int,
    rates: SpanRates,
    capacity_tokens: int,
    target_s: float = 0.0,
) -> tuple[Chunk, ...]:
    """Cut the longest sequence into `num_slices` slices of equal time, and make chunks of similar time from all others.

    lengths: sequence number -> tokens. rates: seconds of forward plus backward. capacity_tokens: most tokens of a chunk; there
    are more slices if they would exceed it. target_s: seconds that a pack may take, if more than a slice takes. Slices of a
    sequence are consecutive, and sequences come longest first. If `num_slices` is 1, there are only whole sequences and packs.
    Raises ValueError for sequences without tokens and for numbers below 1.
    """
    _check(lengths, num_slices=num_slices, capacity_tokens=capacity_tokens)
    if not lengths:
        return ()
    if rates.pair_s <= 0 and rates.token_s <= 0:
        rates = SpanRates(0.0, 1.0)
    ordered = sorted(lengths, key=lambda sequence: (-lengths[sequence], sequence))
    mesh = _mesh(lengths[ordered[0]], num_slices, rates, capacity_tokens)
    long = [sequence for sequence in ordered if lengths[sequence] > mesh[1]]
    families = [_slices_on_mesh(sequence, lengths[sequence], mesh) for sequence in long]
    tails = [
        _Bucket(rates.of_span(family[-1].start, family[-1].stop), family[-1].num_tokens, [family[-1]]) for family in families
    ]
    short = [(sequence, lengths[sequence]) for sequence in ordered[len(long) :]]
    cell_s = max(rates.of_span(start, stop) for start, stop in pairwise(mesh))
    packs = _pack(tails, [(i, n, rates.of_span(0, n)) for i, n in short], max(cell_s, target_s), capacity_tokens)
    chunks = [[span] for family in families for span in family]
    last = -1
    for family, tail in zip(families, tails, strict=True):
        last += len(family)
        chunks[last] = tail.spans
    return _numbered([*chunks, *(pack.spans for pack in sorted(packs, key=lambda pack: -pack.seconds))])


def fixed_chunks(lengths: Mapping[int, int], chunk_tokens: int) -> tuple[Chunk, ...]:
    """Make chunks of about equal tokens, as Seq1F1B (arXiv 2406.03488) does: the baseline for `elastic_chunks`.

    Sequences longer than a chunk are cut evenly into as few slices as possible. Each of the others, longest first, goes into the
    first pack with room for it.
    """
    _check(lengths, chunk_tokens=chunk_tokens)
    slices: list[list[Span]] = []
    packs: list[list[Span]] = []
    room: list[int] = []
    for sequence in sorted(lengths, key=lambda sequence: (-lengths[sequence], sequence)):
        length = lengths[sequence]
        if length > chunk_tokens:
            count = -(-length // chunk_tokens)
            bounds = [length * index // count for index in range(count + 1)]
            slices += [[Span(sequence, start, stop)] for start, stop in pairwise(bounds)]
            continue
        pack = next((pack for pack, left in enumerate(room) if left >= length), len(packs))
        if pack == len(packs):
            packs.append([])
            room.append(chunk_tokens)
        packs[pack].append(Span(sequence, 0, length))
        room[pack] -= length
    return _numbered([*slices, *packs])


def _check(lengths: Mapping[int, int], **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    for sequence, length in lengths.items():
        if length < 1:
            raise ValueError(f"sequence {sequence} has {length} tokens; remove empty sequences before planning")


def _numbered(chunks: Iterable[Sequence[Span]]) -> tuple[Chunk, ...]:
    return tuple(Chunk(index, tuple(spans)) for index, spans in enumerate(chunks))


def _mesh(longest: int, num_slices: int, rates: SpanRates, capacity_tokens: int) -> tuple[int, ...]:
    """Bounds that cut the longest sequence into slices of equal time; more slices than asked for if the capacity needs it."""
    # the first slice has the most tokens, because its tokens see the fewest tokens before them
    largest_s = rates.of_span(0, min(capacity_tokens, longest))
    fewest = math.ceil(rates.of_span(0, longest) / largest_s * (1 - 1e-9))
    return slice_bounds(longest, max(num_slices, fewest), rates, rounds=True)


def _slices_on_mesh(sequence: int, length: int, mesh: Sequence[int]) -> list[Span]:
    """Cut a sequence at the bounds of the mesh that lie inside it."""
    inside = mesh[: bisect_left(mesh, length)]
    return [Span(sequence, start, stop) for start, stop in pairwise([*inside, length])]


def _pack(tails: list[_Bucket], short: list[tuple[int, int, float]], target_s: float, capacity_tokens: int) -> list[_Bucket]:
    """Put short sequences (number, tokens, seconds), longest first, after tails and into new buckets; return the new buckets.

    Each sequence goes into the bucket with the fewest seconds per token among those that have time and tokens left. So sequences
    with many seconds per token meet buckets with time to spare, and tails with many earlier tokens, whose buckets have the most
    seconds per token, are filled last.
    """
    work_s = sum(seconds for *_, seconds in short) + sum(tail.seconds for tail in tails)
    tokens = sum(length for _, length, _ in short) + sum(tail.num_tokens for tail in tails)
    fewest = max(len(tails), math.ceil(work_s / target_s * (1 - 1e-9)), -(-tokens // capacity_tokens)) if short else len(tails)
    buckets = [*tails, *(_Bucket(0.0, 0, []) for _ in range(fewest - len(tails)))]
    limit_s = work_s / max(1, fewest)
    # (density, index of the bucket) in ascending order; `rank` is an index into this list
    densities = sorted((bucket.density, index) for index, bucket in enumerate(buckets))
    for sequence, length, seconds in short:
        room = capacity_tokens - length
        rank, least_s = -1, math.inf
        for place, (_, index) in enumerate(densities):
            bucket = buckets[index]
            if bucket.num_tokens > room:
                continue
            if bucket.seconds + seconds <= limit_s:
                rank = place
                break
            if bucket.seconds < least_s:
                rank, least_s = place, bucket.seconds
        else:
            # no bucket has time left: the one with the fewest seconds, unless they would be too many
            if rank < 0 or least_s + seconds > _MOST_LOAD * target_s:
                rank = len(densities)
                densities.append((0.0, len(buckets)))
                buckets.append(_Bucket(0.0, 0, []))
            limit_s = max(limit_s, buckets[densities[rank][1]].seconds + seconds)
        _, index = densities.pop(rank)
        bucket = buckets[index]
        bucket.seconds += seconds
        bucket.num_tokens += length
        bucket.spans.append(Span(sequence, 0, length))
        insort(densities, (bucket.density, index))
    return [bucket for bucket in buckets[len(tails) :] if bucket.spans]

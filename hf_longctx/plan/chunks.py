"""Cut a long sequence into slices of equal time, for slice-first execution without a pipeline and for pipelines.

Seq1F1B balances slices by operation counts (arXiv 2406.03488, section 3); here they are balanced by seconds, as in InfiniPipe
(arXiv 2509.21275, section 4). The numbers of slices to try are SPPO's.

Make chunks of similar time from the sequences of one group, for a pipeline: slices, packs, and hybrids of both.

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
from dataclasses import dataclass, replace
from itertools import pairwise

from hf_longctx.plan.core.orders import families
from hf_longctx.plan.core.sharding import LENGTHS_PER_OCTAVE, length_step
from hf_longctx.plan.core.types import Action, Blocks, Chunk, SequenceGroup, Span
from hf_longctx.plan.model.attention_pairs import SpanRates

# tokens per rank of the shortest and of the longest slice that is tried
LEAST_SLICE_TOKENS = 2 * 1024
MOST_SLICE_TOKENS = 16 * 1024
# numbers of slices that are tried on one stage
SLICE_COUNTS = (2, 4, 8, 16, 32, 64)


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


def outside_blocks(bounds: Sequence[int], blocks: Blocks) -> tuple[int, ...]:
    """Moves bounds of slices that lie inside a block to the nearer end of it; fewer slices if some would be empty."""
    found = set()
    for bound in bounds:
        begin, end = next(((begin, end) for begin, end in blocks if begin < bound < end), (bound, bound))
        found.add(begin if bound - begin <= end - bound else end)
    return tuple(sorted(found))


def _planned_length(num_tokens: int) -> int:
    """The length nearest to `num_tokens` for which operators plan; a length stays where these are too far apart."""
    step = length_step(num_tokens)
    return num_tokens if num_tokens < LENGTHS_PER_OCTAVE * step else round(num_tokens / step) * step


def sliced_in_step(
    groups: Sequence[SequenceGroup], num_slices: int, rates: SpanRates, blocks: Sequence[Blocks] = ()
) -> tuple[SequenceGroup, ...]:
    """Cuts groups of one chunk each into equally many slices and packs, so that all run one order.

    All slices run forward, then backward in reverse order; after them each pack, no larger than the largest slice, runs forward
    and backward.

    The longest sequence of a group is cut if a rank's share of it is more than that of the largest slice of the group with the
    longest one. Other groups run packs in place of slices, too. Dummy chunks fill up what is left: those before slices, so that
    these start late and end early, and those of packs at the end.

    blocks: those of every sequence of the step, in which no slice ends; (): none.
    """
    longest = [max(group.chunks[0].spans, key=lambda span: span.num_tokens, default=None) for group in groups]
    shares = [0.0 if span is None else span.num_tokens / group.degree for span, group in zip(longest, groups, strict=True)]
    first = max(range(len(groups)), key=lambda place: shares[place])
    span, degree = longest[first], groups[first].degree
    if span is None:
        raise ValueError("groups without sequences cannot be cut into slices")
    room = max(span.num_tokens for (span,) in _slices(span, num_slices, rates, blocks))
    cuts: list[_Cut] = []
    for group, own in zip(groups, longest, strict=True):
        own_room = room * group.degree // degree
        slices = [] if own is None or own.num_tokens <= own_room else _slices(own, num_slices, rates, blocks)
        cuts.append((slices, _packs([span for span in group.chunks[0].spans if not slices or span != own], own_room)))
    return _run_in_step(groups, cuts)


def even_slice(num_tokens: int, num_slices: int) -> int:
    """Tokens of every slice but the last, where all are equal: at most `num_slices` slices, of a length that operators plan for.

    Never less for more tokens.
    """
    size = -(-num_tokens // num_slices)
    step = length_step(size)
    return size if size < LENGTHS_PER_OCTAVE * step else -(-size // step) * step


def cut_evenly(groups: Sequence[SequenceGroup], num_slices: int, blocks: Sequence[Blocks] = ()) -> tuple[SequenceGroup, ...]:
    """Cuts groups of at most one sequence each into slices of equal tokens, so that all run one order.

    Seconds play no part, so that equal lengths are cut alike in every run. Dummy chunks fill up before slices. blocks: see
    `sliced_in_step`.
    """
    cuts: list[_Cut] = []
    for group in groups:
        (chunk,) = group.chunks
        if not chunk.spans:
            cuts.append(([], []))
            continue
        (span,) = chunk.spans
        size = even_slice(span.num_tokens, num_slices)
        cuts.append((_between(span, [*range(0, span.num_tokens, size), span.num_tokens], blocks), []))
    return _run_in_step(groups, cuts)


# slices and packs of a group, each the spans of a chunk
_Cut = tuple[list[tuple[Span, ...]], list[tuple[Span, ...]]]


def _run_in_step(groups: Sequence[SequenceGroup], cuts: Sequence[_Cut]) -> tuple[SequenceGroup, ...]:
    """The groups with their slices and packs as chunks, filled up with dummy chunks, in one order of actions."""
    num_slices = max(len(slices) for slices, _ in cuts)
    num_packs = max((len(packs) for slices, packs in cuts if slices), default=0)
    slots = [_slots(slices, packs, num_slices, num_packs) for slices, packs in cuts]
    num_chunks = max(map(len, slots))
    order = [("F", i) for i in range(num_slices)] + [("B", i) for i in reversed(range(num_slices))]
    order += [(kind, i) for i in range(num_slices, num_chunks) for kind in ("F", "B")]
    actions = tuple(Action(kind, groups[0].stages[0].stage, index) for kind, index in order)  # type: ignore[arg-type]
    return tuple(_with_chunks(group, own, num_chunks, actions) for group, own in zip(groups, slots, strict=True))


def _slices(span: Span, num_slices: int, rates: SpanRates, blocks: Sequence[Blocks]) -> list[tuple[Span, ...]]:
    return _between(span, slice_bounds(span.num_tokens, num_slices, rates, rounds=True), blocks)


def _between(span: Span, bounds: Sequence[int], blocks: Sequence[Blocks]) -> list[tuple[Span, ...]]:
    """The slices of a whole sequence between these bounds, moved out of its blocks."""
    bounds = outside_blocks(bounds, blocks[span.sequence] if blocks else ())
    return [(Span(span.sequence, span.start + start, span.start + stop),) for start, stop in pairwise(bounds)]


def _slots(
    slices: list[tuple[Span, ...]], packs: list[tuple[Span, ...]], num_slices: int, num_packs: int
) -> list[tuple[Span, ...]]:
    """Spans of the chunks of a group beside groups with `num_slices` slices and `num_packs` packs; () for a dummy chunk.

    Without slices, packs run where others run packs, then in place of slices, then after all.
    """
    last, rest = packs[:num_packs], packs[num_packs:]
    if not slices:
        slices, rest = rest[:num_slices], rest[num_slices:]
    dummies: list[tuple[Span, ...]] = [()]
    return [*dummies * (num_slices - len(slices)), *slices, *last, *dummies * (num_packs - len(last)), *rest]


def _with_chunks(
    group: SequenceGroup, slots: list[tuple[Span, ...]], num_chunks: int, actions: tuple[Action, ...]
) -> SequenceGroup:
    filled = [*slots, *[()] * (num_chunks - len(slots))]
    chunks = tuple(Chunk(index, spans) for index, spans in enumerate(filled))
    (stage,) = group.stages
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
    growth: float = 0.0,
    longest: int = 0,
) -> tuple[Chunk, ...]:
    """Cut the longest sequence into `num_slices` slices of equal time, and make chunks of similar time from all others.

    lengths: sequence number -> tokens. rates: seconds of forward plus backward. capacity_tokens: most tokens of a chunk; there
    are more slices if they would exceed it. target_s: seconds that a pack may take, if more than a slice takes. Slices of a
    sequence are consecutive, and sequences come longest first. If `num_slices` is 1, there are only whole sequences and packs.
    growth: factor by which chunks grow at the beginning and shrink at the end (0: neither), since the stages of a pipeline wait
    for its first and last chunks; these are packs of the shortest sequences. longest: tokens of a sequence of another group, at
    least as long as the longest here, that has the slices of which all others get the bounds (0: the longest here).
    Raises ValueError for sequences without tokens and for numbers below 1.
    """
    _check(lengths, num_slices=num_slices, capacity_tokens=capacity_tokens)
    if not lengths:
        return ()
    if rates.pair_s <= 0 and rates.token_s <= 0:
        rates = SpanRates(0.0, 1.0)
    ordered = sorted(lengths, key=lambda sequence: (-lengths[sequence], sequence))
    mesh = _mesh(longest or lengths[ordered[0]], num_slices, rates, capacity_tokens)
    long = [sequence for sequence in ordered if lengths[sequence] > mesh[1]]
    sliced = [_slices_on_mesh(sequence, lengths[sequence], mesh) for sequence in long]
    tails = [_Bucket(rates.of_span(family[-1].start, family[-1].stop), family[-1].num_tokens, [family[-1]]) for family in sliced]
    short = [(i, lengths[i], rates.of_span(0, lengths[i])) for i in ordered[len(long) :]]
    chunk_s = max(target_s, *(rates.of_span(start, stop) for start, stop in pairwise(mesh)))
    front, back = _ramps(short, chunk_s, growth, capacity_tokens) if growth else ([], [])
    packs = _pack(tails, short, chunk_s, capacity_tokens)
    chunks = [[span] for family in sliced for span in family]
    last = -1
    for family, tail in zip(sliced, tails, strict=True):
        last += len(family)
        chunks[last] = tail.spans
    return _numbered([*front, *chunks, *(pack.spans for pack in sorted(packs, key=lambda pack: -pack.seconds)), *back])


def aligned_chunks(groups: Sequence[Sequence[Chunk]]) -> list[tuple[Chunk, ...]]:
    """Arrange the chunks of groups that run one order, so that slices of their sequences begin and end in the same slots.

    Each list has slices of one sequence next to each other, as from `elastic_chunks`. The first sequences in slices of all groups
    share slots, then the second ones, and so on. A group with fewer slices than another runs whole sequences before them, so that
    no more slices are in flight than those of one sequence of each group. All groups get equally many chunks: dummy chunks fill
    up before the first slices, and after the last ones.
    """
    if len(groups) == 1:
        return [tuple(groups[0])]
    fronts, sliced, whole = [], [], []
    for chunks in groups:
        own = [[chunks[place] for place in family] for family in families(chunks)]
        sliced.append([family for family in own if len(family) > 1])
        singles = [family[0] for family in own if len(family) == 1]
        num_front = next((place for place, family in enumerate(own) if len(family) > 1), 0)
        fronts.append(singles[:num_front])
        whole.append(singles[num_front:])
    slots: list[list[Chunk]] = [[] for _ in groups]

    def fill(most: int, chunks: list[Chunk], own: list[Chunk], others: list[Chunk], takes_others: bool = True) -> None:
        """Adds `most` chunks: some of the others, dummy chunks, and those of `own`."""
        missing = most - len(own)
        taken = others[:missing] if takes_others else []
        del others[: len(taken)]
        chunks += [*taken, *[Chunk(0)] * (missing - len(taken)), *own]

    most = max(map(len, fronts))
    for chunks, front, own, others in zip(slots, fronts, sliced, whole, strict=True):
        fill(most, chunks, front, others, not own)
    for place in range(max(map(len, sliced))):
        most = max(len(own[place]) for own in sliced if place < len(own))
        for chunks, own, others in zip(slots, sliced, whole, strict=True):
            fill(most, chunks, own[place] if place < len(own) else [], others)
    most = max(map(len, whole))
    for chunks, others in zip(slots, whole, strict=True):
        fill(most, chunks, others, [])
    return [_numbered([chunk.spans for chunk in chunks]) for chunks in slots]


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


# time of the first and of the last chunk that grow and shrink, as a share of that of others
_LEAST_CHUNK = 0.25


def _ramps(
    short: list[tuple[int, int, float]], chunk_s: float, growth: float, capacity_tokens: int
) -> tuple[list[list[Span]], list[list[Span]]]:
    """Take the shortest sequences (number, tokens, seconds) off a list, longest first, for chunks that grow and that shrink."""
    front: list[list[Span]] = []
    back: list[list[Span]] = []
    most_s = _LEAST_CHUNK * chunk_s
    while most_s < chunk_s:
        for chunks in (front, back):
            spans: list[Span] = []
            seconds, tokens = 0.0, 0
            while short and (not spans or (seconds + short[-1][2] <= most_s and tokens + short[-1][1] <= capacity_tokens)):
                sequence, length, own_s = short.pop()
                spans.append(Span(sequence, 0, length))
                seconds, tokens = seconds + own_s, tokens + length
            if spans:
                chunks.append(spans)
        most_s *= growth
    return front, back[::-1]


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

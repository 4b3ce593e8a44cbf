"""Divides the tokens and heads of a chunk among the ranks of a group: one rule for collator, runtime and planner.

A group is a ring of blocks (`GroupShape`). With b > 1 blocks every document is cut into 2b pieces, and one block has pieces i and
2b - 1 - i (zigzag), so that all blocks have about the same number of causal query-key pairs in every document. A single block has
whole documents in span order. Within a block the tokens are cut into contiguous shards that differ by at most one token, longer
shards first. So Ulysses ranks have contiguous shards, ring ranks zigzag pieces, and hybrids combine both.

HF layers reject empty tensors, so blocks are padded with dummy tokens until every rank has one token. Each dummy is a separate
document, after the real tokens, and has no loss.

If ranks of other pipeline stages are lent to a slice, the shard of every position is cut again, in zigzag over the stages that
run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from hf_longctx.plan.core.types import Chunk, GroupShape, Media, SequenceGroup, Span, TowerWork


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of one document of a chunk, stored from index `first` on in the tokens of one rank.

    Documents are numbered like the chunk's spans; dummy tokens are further documents after them. start: counts from the start of
    the document's span.
    """

    document: int
    start: int
    stop: int
    first: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> slice:
        """Index range of the piece in the tokens of its rank."""
        return slice(self.first, self.first + self.num_tokens)


def summing_ranks(num_ranks: int, node_ranks: int) -> int:
    """Returns how many consecutive ranks of a group of `num_ranks` that share weights exchange gradients first.

    Those of a node, whose sums then cross nodes in fp32; or all of them at once if there are no nodes of three ranks or more (0:
    one node) that fill the group, since sums of two would take as many bytes as half-precision gradients.
    """
    return node_ranks if 2 < node_ranks < num_ranks and not num_ranks % node_ranks else num_ranks


def node_part(rank: int, num_ranks: int, node_ranks: int) -> tuple[range, range]:
    """Returns the ranks whose shards make up the part of a node's copy on `rank`, and the ranks whose parts have its shard.

    Each node has a copy of all shards in order, and rank i of it the i-th of `node_ranks` equal parts. Ranks are those of one
    group, in whole nodes; one rank of every node has a shard.
    """
    num_nodes = num_ranks // node_ranks
    first = rank % node_ranks * num_nodes
    return range(first, first + num_nodes), range(rank // num_nodes, num_ranks, node_ranks)


def sum_bytes(num_bytes: float, wide_bytes: float, num_ranks: int, node_ranks: int) -> tuple[float, float]:
    """Returns mean bytes that a rank sends to sum gradients of `num_bytes` over a group: inside its node, and to other nodes.

    A node has `summing_ranks`. wide_bytes: of the gradients in fp32 or wider, in which sums leave the ranks that made them. Sums
    that the node itself keeps do not cross, and of these a rank keeps its own.
    """
    near = summing_ranks(num_ranks, node_ranks)
    inside = num_bytes + wide_bytes / num_ranks * (near < num_ranks)
    return inside * (near - 1) / near, wide_bytes * (1 / near - 1 / num_ranks)


def rank_pieces(chunk: Chunk, shape: GroupShape) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of the padded chunk on every rank of a group, in the order of its tokens; at least one token each."""
    if shape.ulysses == 1:
        return block_pieces(chunk, shape)
    return tuple(shard for block in block_pieces(chunk, shape) for shard in _split_block(block, shape.ulysses))


def images_of(chunk: Chunk, media: Sequence[Media]) -> dict[tuple[int, int], TowerWork]:
    """Returns the images with a token in a chunk, by sequence and number. media: those of every sequence, or none."""
    return {
        (span.sequence, number): each
        for span in (chunk.spans if media else ())
        for number, each in enumerate(media[span.sequence])
        if each.start < span.stop and span.start < each.stop
    }


def rank_media(chunk: Chunk, shape: GroupShape, media: Sequence[Media]) -> list[dict[tuple[int, int], int]]:
    """Returns the number of tokens of every image that each rank of a group has, by sequence and number; see `images_of`."""
    images = images_of(chunk, media)
    found: list[dict[tuple[int, int], int]] = [{} for _ in range(shape.degree)]
    of_sequence: dict[int, list[tuple[tuple[int, int], TowerWork]]] = {}
    for key, each in images.items():
        of_sequence.setdefault(key[0], []).append((key, each))
    for own, pieces in zip(found, rank_pieces(chunk, shape) if images else (), strict=False):
        for piece in pieces:
            # behind the documents come dummies
            if piece.document < len(chunk.spans):
                span = chunk.spans[piece.document]
                begin, end = span.start + piece.start, span.start + piece.stop
                for key, each in of_sequence.get(span.sequence, ()):
                    if count := max(0, min(end, each.stop) - max(begin, each.start)):
                        own[key] = own.get(key, 0) + count
    return found


def run_images(chunk: Chunk, group: SequenceGroup, media: Sequence[Media]) -> list[list[tuple[int, int]]]:
    """Returns the images that every rank of a group runs in a chunk, by sequence and number."""
    if not (dealt := group.dealt(chunk)):
        return [list(own) for own in rank_media(chunk, group.shape, media)]
    return [[key for key, rank in dealt.items() if rank == place] for place in range(group.degree)]


def block_pieces(chunk: Chunk, shape: GroupShape) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of the padded chunk in every block of a group: at least one token for each of its ranks."""
    blocks, held = _whole_documents(chunk) if shape.num_blocks == 1 else _zigzag_pieces(chunk, shape.num_blocks)
    dummy = len(chunk.spans)
    for block, count in zip(blocks, held, strict=True):
        for first in range(count, shape.ulysses):
            block.append(Piece(dummy, 0, 1, first))
            dummy += 1
    return tuple(map(tuple, blocks))


def _whole_documents(chunk: Chunk) -> tuple[list[list[Piece]], list[int]]:
    firsts = (0, *accumulate(span.num_tokens for span in chunk.spans))
    pieces = [Piece(document, 0, span.num_tokens, firsts[document]) for document, span in enumerate(chunk.spans)]
    return [pieces], [firsts[-1]]


def _zigzag_pieces(chunk: Chunk, num_blocks: int) -> tuple[list[list[Piece]], list[int]]:
    blocks: list[list[Piece]] = [[] for _ in range(num_blocks)]
    held = [0] * num_blocks
    for document, span in enumerate(chunk.spans):
        least, odd = divmod(span.num_tokens, 2 * num_blocks)
        # the remaining tokens go to the blocks with the fewest, so that blocks stay within one token of each other
        longer = sorted((held[index] + extra, index) for index in range(num_blocks) for extra in (0, 1))[:odd]
        sizes = [least] * (2 * num_blocks)
        for tokens, index in longer:
            pair = (index - document) % num_blocks
            # a block's second extra token goes into its late piece
            sizes[pair if tokens == held[index] else 2 * num_blocks - 1 - pair] += 1
        cuts = (0, *accumulate(sizes))
        for pair in range(num_blocks):
            index = (pair + document) % num_blocks
            for piece in (pair, 2 * num_blocks - 1 - pair):
                if cuts[piece] < cuts[piece + 1]:
                    blocks[index].append(Piece(document, cuts[piece], cuts[piece + 1], held[index]))
                    held[index] += cuts[piece + 1] - cuts[piece]
    return blocks, held


@lru_cache(maxsize=1024)
def _first_document(num_tokens: int, num_blocks: int) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of a first document of `num_tokens` tokens, for every block of a ring."""
    blocks, _ = _zigzag_pieces(Chunk(0, (Span(0, 0, num_tokens),)), num_blocks)
    return tuple(map(tuple, blocks))


def slice_pieces(chunks: Iterable[Chunk], sequence: int, num_blocks: int) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of all slices of a sequence in order, for every block of a ring, counted from the sequence's start.

    They are located among the block's tokens of the sequence. Raises ValueError for a slice that does not come first in its
    chunk.
    """
    found: list[list[Piece]] = [[] for _ in range(num_blocks)]
    for chunk in chunks:
        for index, span in enumerate(chunk.spans):
            if span.sequence != sequence:
                continue
            if index:
                raise ValueError(
                    f"chunk {chunk.index} holds tokens [{span.start}, {span.stop}) of sequence {sequence} after another span; in "
                    f"a ring a slice must come first in its chunk"
                )
            for pieces, own in zip(found, _first_document(span.num_tokens, num_blocks), strict=True):
                held = pieces[-1].tokens.stop if pieces else 0
                pieces += [Piece(0, span.start + each.start, span.start + each.stop, held + each.first) for each in own]
    return tuple(map(tuple, found))


def even_shards(count: int, num_ranks: int) -> tuple[int, ...]:
    """Divides `count` tokens or heads among ranks: shares differ by at most one, larger ones first."""
    base, remainder = divmod(count, num_ranks)
    return tuple(base + (index < remainder) for index in range(num_ranks))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads [q_start, q_stop) of one rank and the KV heads [kv_start, kv_stop) that they read."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_q(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_kv(self) -> int:
        return self.kv_stop - self.kv_start


@lru_cache(maxsize=256)
def head_shares(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """Returns contiguous query heads of each rank, divided as evenly as possible, and the KV heads that they read.

    Raises ValueError if the query heads are not a multiple of the KV heads or a rank would get no head.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if num_ranks > num_heads:
        raise ValueError(
            f"{num_ranks} ranks share {num_heads} heads, but Ulysses needs at least one head per rank; use smaller groups or "
            f"a ring"
        )
    per_kv = num_heads // num_kv_heads
    shares, start = [], 0
    for count in even_shards(num_heads, num_ranks):
        stop = start + count
        shares.append(HeadShare(start, stop, start // per_kv, (stop - 1) // per_kv + 1))
        start = stop
    return tuple(shares)


# most parts in which the ranks of a block exchange their heads, and fewest bytes that a rank sends of a part in the forward of a
# layer: less takes about as long as starting the kernels of another part
MOST_HEAD_PARTS, HEAD_PART_BYTES = 4, 32 << 20


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Equal parts of every rank's heads, which are exchanged one after another while attention of other parts runs."""

    # number of parts
    count: int
    # query heads of a part on a rank, and KV heads that they read
    num_q: int
    num_kv: int
    # parts that read the same KV heads, which travel with the first of them
    per_kv: int

    @property
    def exposed(self) -> float:
        """Share of the bytes of both exchanges that travel while no attention runs: the first inputs, and the last output."""
        num_kv = 2 * self.num_kv * self.count // self.per_kv
        return (2 * self.num_q + 2 * self.num_kv) / (2 * self.num_q * self.count + num_kv)

    def share(self, whole: HeadShare, part: int) -> HeadShare:
        """Returns the heads of a part of a rank's heads."""
        q_start, kv_start = whole.q_start + part * self.num_q, whole.kv_start + part // self.per_kv * self.num_kv
        return HeadShare(q_start, q_start + self.num_q, kv_start, kv_start + self.num_kv)


@lru_cache(maxsize=256)
def head_parts(num_heads: int, num_kv_heads: int, num_ranks: int, most: int) -> HeadParts | None:
    """Returns the most equal parts of the heads of every rank, at most `most`; None if there is no more than one.

    Ranks must divide heads evenly. A part has whole KV heads with all queries of the rank that read them, or some of the queries
    of one KV head.
    """
    if num_heads % num_ranks or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        return None
    num_q, num_kv = num_heads // num_ranks, max(1, num_kv_heads // num_ranks)
    for count in range(min(most, num_q), 1, -1):
        if num_kv % count == 0:
            return HeadParts(count, num_q // count, num_kv // count, 1)
        if count % num_kv == 0 and num_q % count == 0:
            return HeadParts(count, num_q // count, 1, count // num_kv)
    return None


def _split_block(block: tuple[Piece, ...], num_ranks: int) -> list[tuple[Piece, ...]]:
    """Cuts a block's tokens into contiguous shards, one per rank; the block must have at least as many tokens as ranks."""
    ranks, waiting = [], list(reversed(block))
    for room in even_shards(sum(piece.num_tokens for piece in block), num_ranks):
        shard, held = [], 0
        while held < room:
            piece = waiting.pop()
            cut = min(piece.stop, piece.start + room - held)
            shard.append(Piece(piece.document, piece.start, cut, held))
            held += cut - piece.start
            if cut < piece.stop:
                waiting.append(Piece(piece.document, cut, piece.stop, 0))
        ranks.append(tuple(shard))
    return ranks


def travelling_pieces(blocks: tuple[tuple[Piece, ...], ...]) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of every block whose keys a query of another block sees, renumbered from 0; others are not sent."""
    if len(blocks) == 1:
        return ((),)
    # for each document, the start of its last piece, and of its last piece outside the block of that one
    last: dict[int, tuple[int, int]] = {}
    elsewhere: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for piece in block:
            start, owner = last.get(piece.document, (-1, index))
            if piece.start > start:
                if owner != index:
                    elsewhere[piece.document] = start
                last[piece.document] = (piece.start, index)
            elif owner != index:
                elsewhere[piece.document] = max(elsewhere.get(piece.document, -1), piece.start)
    result = []
    for index, block in enumerate(blocks):
        kept, held = [], 0
        for piece in block:
            start, owner = last[piece.document]
            if piece.start < (elsewhere.get(piece.document, -1) if owner == index else start):
                kept.append(Piece(piece.document, piece.start, piece.stop, held))
                held += piece.num_tokens
        result.append(tuple(kept))
    return tuple(result)


def seen_pieces(keys: tuple[Piece, ...], queries: tuple[Piece, ...], first_seen: Callable[[int], int]) -> tuple[Piece, ...]:
    """Returns the keys of one block that queries of another see: all, the last tokens or none of each piece, renumbered.

    first_seen: position of a query in its document -> position of the first key that it sees.
    """
    starts: dict[int, list[int]] = {}
    for query in queries:
        starts.setdefault(query.document, []).append(query.start)
    seen, held = [], 0
    for key in keys:
        nearest = min((start for start in starts.get(key.document, ()) if start >= key.stop), default=-1)
        first = max(key.start, first_seen(nearest)) if nearest >= 0 else key.stop
        if first < key.stop:
            seen.append(Piece(key.document, first, key.stop, held))
            held += key.stop - first
    return tuple(seen)


def runs_of(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Joins pieces of one rank that follow each other both in the document and on the rank."""
    runs: list[Piece] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if last is not None and (last.document, last.stop, last.tokens.stop) == (piece.document, piece.start, piece.first):
            runs[-1] = replace(last, stop=piece.stop)
        else:
            runs.append(piece)
    return tuple(runs)


def passes_states(num_blocks: int, block_ranks: int, num_heads: int) -> bool:
    """Whether ranks of a group pass on the states of `num_heads` heads, because they cannot divide the heads."""
    return num_blocks > 1 or block_ranks > num_heads


def state_readers(runs: tuple[tuple[Piece, ...], ...], going_on: Iterable[int] = ()) -> tuple[tuple[frozenset[int], ...], ...]:
    """Returns for every run of every rank the other ranks that need its effect on a state.

    These have later tokens of the document; if it continues in another chunk (`going_on`), they are all ranks.
    """
    last: dict[int, dict[int, int]] = {}
    for rank, own in enumerate(runs):
        for run in own:
            starts = last.setdefault(run.document, {})
            starts[rank] = max(run.start, starts.get(rank, 0))
    everywhere = frozenset(going_on)
    return tuple(
        tuple(
            frozenset(
                other
                for other in (range(len(runs)) if run.document in everywhere else last[run.document])
                if other != rank and (run.document in everywhere or last[run.document][other] > run.start)
            )
            for run in own
        )
        for rank, own in enumerate(runs)
    )


def sequence_ends(chunks: Iterable[Chunk]) -> dict[int, int]:
    """Returns the end of the last slice of every sequence in these chunks."""
    ends: dict[int, int] = {}
    for span in (span for chunk in chunks for span in chunk.spans):
        ends[span.sequence] = max(span.stop, ends.get(span.sequence, 0))
    return ends


def longest_document(blocks: tuple[tuple[Piece, ...], ...]) -> int:
    """Returns the number of tokens of the longest document in these blocks."""
    return max((piece.stop for block in blocks for piece in block), default=0)


def held_tokens(pieces: tuple[tuple[Piece, ...], ...]) -> tuple[int, ...]:
    """Returns the number of tokens of every rank, including dummy tokens."""
    return tuple(sum(piece.num_tokens for piece in rank) for rank in pieces)


def shard_tokens(chunk: Chunk, shape: GroupShape) -> tuple[int, ...]:
    """Returns the number of tokens of every rank: `held_tokens(rank_pieces(...))`, without making pieces if possible."""
    if shape.num_blocks == 1:
        return even_shards(max(chunk.num_tokens, shape.degree), shape.degree)
    return held_tokens(rank_pieces(chunk, shape))


def fullest_share(chunk: Chunk, shape: GroupShape) -> int:
    """Returns the number of tokens of the rank that has most, as in `shard_tokens`."""
    if shape.num_blocks == 1:
        return -(-max(chunk.num_tokens, shape.degree) // shape.degree)
    return max(shard_tokens(chunk, shape))


def document_bounds(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Returns cumulative document lengths (`cu_seqlens`), starting at 0, of a block with only whole documents."""
    return (0, *accumulate(piece.num_tokens for piece in pieces))


# most tokens of documents that may share a call of attention, and most rows of such a call
PACKED_TOKENS, PACKED_ROWS = 2048, 16384
# rows that the operator's backward allocates for every document besides those of its tokens
_ROWS_PER_DOCUMENT = 128


# numbers of tile lengths for which operators plan between two powers of two; lengths are multiples of `LEAST_LENGTH_STEP`
LENGTHS_PER_OCTAVE, LEAST_LENGTH_STEP = 32, 128


def length_step(num_tokens: int, per_octave: int = 0) -> int:
    """Returns the distance of planned tile lengths around `num_tokens`. per_octave: 0 for `LENGTHS_PER_OCTAVE`."""
    octave = 1 << max(0, (num_tokens - 1).bit_length() - 1)
    return max(LEAST_LENGTH_STEP, octave // (per_octave or LENGTHS_PER_OCTAVE))


def packed_rows(num_tokens: int, num_documents: int = 1) -> int:
    """Returns the rows, as counted for `PACKED_ROWS`, of documents that share a call of attention."""
    return num_tokens + _ROWS_PER_DOCUMENT * num_documents


# most elements of queries with which one call of attention's backward takes all heads of a rank
PART_ELEMENTS = 2**28
# most elements of an adapter's input or output that exist at a time if attention runs in pieces of heads
ADAPTER_ELEMENTS = 2**24
# bytes to a multiple of which the features of an adapter on experts are filled up, as CUDA's grouped products need
RANK_BYTES = 16
# packed experts that a product unpacks at a time, bytes that it holds for each of their elements, and bytes of an element
# that unpacking reads and writes
UNPACKED_AT_ONCE, UNPACKED_BYTES, UNPACKING_BYTES = 4, 12, 14.5


def expert_rows(num_rows: int, num_experts: int, at_once: int = UNPACKED_AT_ONCE) -> int:
    """Returns the most rows of experts that run at once if `at_once` of them are unpacked at a time: their share of all rows."""
    return -(-num_rows * min(at_once, num_experts) // num_experts)


def heads_at_once(num_heads: int, per_kv: int, num_tokens: int, head_dim: int) -> int:
    """Returns the query heads that attention's backward takes at once, since it makes several tensors of their size.

    At least one; whole groups of `per_kv` readers of a KV head, or an equal part of one group. num_tokens: the larger number of
    queries and keys.
    """
    most = max(1, PART_ELEMENTS // max(1, num_tokens * head_dim))
    if most >= num_heads:
        return num_heads
    if most >= per_kv:
        return most // per_kv * per_kv
    return max(size for size in range(1, most + 1) if per_kv % size == 0)

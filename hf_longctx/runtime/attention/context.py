"""What an attention layer must know of the chunk it runs in. It travels as a keyword argument, never as a global."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import HeadShare, Piece, longest_document, seen_pieces
from hf_longctx.runtime.activations.attention_record import AttentionRecord
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.tiles.patterns import AttentionPattern

if TYPE_CHECKING:
    from hf_longctx.runtime.activations.engine import ChunkActivations
    from hf_longctx.runtime.attention.lent_slice import SharedSlice

# a query piece and a key piece, each as it lies in its block
Tile = tuple[Piece, Piece]


@dataclass(slots=True)
class AttentionCalls:
    """How often attention received the context in one forward; the executor compares it with the number of layers."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """The neighbours that share heads (Ulysses): their process group, this rank's place, and the tokens of each of them."""

    process_group: dist.ProcessGroup | None
    index: int
    tokens: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """What blocks send each other directly, where a pattern lets go of keys, seen by one of them.

    incoming: of every block what this one's queries see, lying from 0 on. outgoing: for every block which of this one's tokens
    its queries see, in the order in which they are sent.
    """

    incoming: tuple[tuple[Piece, ...], ...]
    outgoing: tuple[tuple[slice, ...], ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """The blocks of a group, seen by one rank: the ranks that hold the same heads in every block, in ring order.

    process_group: the group of all ranks, whose links messages use (any ranks form a ring without a group of their own).
    index: this rank's block. ranks: the global ranks of the ring. blocks: what every block holds of the documents.
    travelling: of every block, what others see where tokens see all before them. departing: the tokens of this rank's block that
    travel. known_tiles, known_direct: filled by `tiles` and `direct`, for all layers of a chunk.
    """

    process_group: dist.ProcessGroup | None
    index: int
    ranks: tuple[int, ...]
    blocks: tuple[tuple[Piece, ...], ...]
    travelling: tuple[tuple[Piece, ...], ...]
    departing: tuple[slice, ...] = ()
    known_tiles: dict[tuple[AttentionPattern | None, int], list[Tile]] = field(default_factory=dict)
    known_direct: dict[AttentionPattern, DirectBlocks | None] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return len(self.ranks)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank's block holds."""
        return self.blocks[self.index]

    def direct(self, pattern: AttentionPattern) -> DirectBlocks | None:
        """What blocks send each other under a pattern; None where some token sees all of the longest document."""
        if pattern not in self.known_direct:
            self.known_direct[pattern] = self._direct(pattern)
        return self.known_direct[pattern]

    def _direct(self, pattern: AttentionPattern) -> DirectBlocks | None:
        if not pattern.first_seen(longest_document(self.blocks) - 1):
            return None
        own, others = self.pieces, [() if place == self.index else block for place, block in enumerate(self.blocks)]
        incoming = tuple(seen_pieces(block, own, pattern.first_seen) for block in others)
        leaving = (seen_pieces(own, block, pattern.first_seen) for block in others)
        return DirectBlocks(incoming, tuple(departing_tokens(own, pieces) for pieces in leaving))

    def tiles(self, block: int, pattern: AttentionPattern) -> list[Tile]:
        """What this rank's queries see of the keys of a block, as they lie there or, of other blocks, as they arrive.

        A tile may be wholly outside of the pattern.
        """
        direct = self.direct(pattern)
        known = (pattern if direct else None, block)
        if known not in self.known_tiles:
            arriving = direct.incoming if direct else self.travelling
            self.known_tiles[known] = visible_tiles(self.pieces, self.pieces if block == self.index else arriving[block])
        return self.known_tiles[known]


def departing_tokens(pieces: tuple[Piece, ...], travelling: tuple[Piece, ...]) -> tuple[slice, ...]:
    """Where in its block lies what travels of it, pieces or the ends of pieces, in the order of `travelling`."""
    sent = {(piece.document, piece.stop): piece.num_tokens for piece in travelling}
    ends = ((piece.tokens.stop, sent.get((piece.document, piece.stop), 0)) for piece in pieces)
    return tuple(slice(stop - num_tokens, stop) for stop, num_tokens in ends if num_tokens)


def sent_tokens(pieces: tuple[Piece, ...]) -> int:
    """Tokens of pieces that lie from 0 on."""
    return pieces[-1].first + pieces[-1].num_tokens if pieces else 0


def visible_tiles(queries: tuple[Piece, ...], keys: tuple[Piece, ...]) -> list[Tile]:
    """Every tile that is not fully masked: a query piece sees key pieces of its document that do not start behind it."""
    of_document: dict[int, list[Piece]] = {}
    for key in keys:
        of_document.setdefault(key.document, []).append(key)
    return [(query, key) for query in queries for key in of_document.get(query.document, ()) if key.start <= query.start]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """One rank's view of one chunk on its sequence group.

    A group of one block has whole documents in it, with boundaries `cu_seqlens` (starting at 0); of several blocks, the
    layout is `ring.pieces` and `cu_seqlens` is empty. known_readers: filled by `readers`; the pool's, so that it lasts.
    slices: the documents of which other chunks hold the rest, in `book`, the round's.
    documents: of this rank's tokens in order, (how many, the whole tokens of their document) for every piece, dummy tokens as
    documents of their own. activations: what layers do with their saved tensors; None keeps them. kept: of the layer that
    runs, where its attention leaves output and LSE for the replay; None outside layers that are replayed. shared: of a slice
    that other stages' ranks share, in `book`; None elsewhere. position_ids: [1, T], of this rank's tokens in their documents, as
    the model gets them; None where no model runs.
    """

    block: Block
    ring: Ring
    cu_seqlens: tuple[int, ...]
    known_readers: dict[tuple[HeadShare, int, torch.device], KVReaders] = field(default_factory=dict)
    slices: tuple[Slice, ...] = ()
    documents: tuple[tuple[int, int], ...] = ()
    book: KVBook = field(default_factory=KVBook)
    calls: AttentionCalls = field(default_factory=AttentionCalls)
    activations: ChunkActivations | None = None
    kept: AttentionRecord | None = None
    shared: SharedSlice | None = None
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ring.num_blocks == 1 and sum(self.block.tokens) != self.cu_seqlens[-1]:
            raise ValueError(f"shards of {self.block.tokens} tokens do not add up to the chunk's {self.cu_seqlens[-1]} tokens")

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.block.tokens[self.block.index]

    def check_calls(self, num_layers: int) -> None:
        """Raises RuntimeError, behind a forward, if some of `num_layers` attention layers did not get this context."""
        if self.calls.count != num_layers:
            raise RuntimeError(
                f"{self.calls.count} of {num_layers} attention layers received the plan; the model drops extra keyword "
                f"arguments between its forward and its attention, so it cannot be run"
            )

    def readers(self, share: HeadShare, per_kv: int, device: torch.device) -> KVReaders:
        """How the query heads of `share` read its KV heads, made once per run."""
        key = (share, per_kv, device)
        if key not in self.known_readers:
            self.known_readers[key] = KVReaders.of(*key)
        return self.known_readers[key]

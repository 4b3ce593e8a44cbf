"""The context of a chunk: everything that an attention layer needs about the chunk in which it runs.

`GroupPool` makes one per chunk; it is passed through the model's forward as the keyword `longctx`, never as a global.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import (
    HEAD_PART_BYTES,
    MOST_HEAD_PARTS,
    HeadShare,
    Piece,
    longest_document,
    seen_pieces,
    travelling_pieces,
)
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.layout import GroupLayout
from hf_longctx.runtime.attention.state_book import StateBook
from hf_longctx.runtime.core.chunk_inputs import ChunkMedia
from hf_longctx.runtime.core.dropout import DropoutKeys, DropoutTokens
from hf_longctx.runtime.tiles.packs import PackBounds
from hf_longctx.runtime.tiles.patterns import AttentionPattern
from hf_longctx.runtime.tiles.plain import WeightDropout
from hf_longctx.runtime.tiles.stacks import StackChecks

if TYPE_CHECKING:
    from hf_longctx.runtime.activations.engine import ChunkActivations
    from hf_longctx.runtime.attention.rows import AttentionRule

# a query piece and a key piece, each with its location in its block
Tile = tuple[Piece, Piece]


class SharedSlice(Protocol):
    """A slice whose tokens are divided among ranks of several stages; `runtime.execution.lending` makes it."""

    def attend(
        self,
        q_hSD: Tensor,
        k_gSD: Tensor,
        v_gSE: Tensor,
        sinks_h: Tensor | None,
        rule: AttentionRule,
        kv_book: KVBook,
        layer: Hashable,
    ) -> Tensor:
        """Returns attention of this rank's tokens in one layer, [S, h, E]."""
        ...


@dataclass(slots=True)
class AttentionCalls:
    """Counts attention calls that received the context in one forward; the executor compares with the number of layers."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring ranks that divide heads (Ulysses): process group, this rank's index in it, and tokens of each rank."""

    process_group: dist.ProcessGroup | None
    index: int
    tokens: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """Pieces that one block exchanges directly with every other block, if a pattern limits how far back queries see.

    incoming: for each sending block, the key pieces that this block's queries see, located in the tensor that arrives. outgoing:
    for each receiving block, this block's tokens that the receiver's queries see, in the order of sending.
    """

    incoming: tuple[tuple[Piece, ...], ...]
    outgoing: tuple[tuple[slice, ...], ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """One rank's ring: one rank of every block, all with the same heads, in ring order."""

    # the group of all ranks carries the messages, so that any ranks can form a ring without a process group of their own
    process_group: dist.ProcessGroup | None
    # this rank's block
    index: int
    # global ranks of the ring
    ranks: tuple[int, ...]
    # the document pieces of every block, which count from the start of the whole document
    blocks: tuple[tuple[Piece, ...], ...]
    # for every block, the pieces of keys that other blocks see if queries see all earlier tokens; only these are sent
    travelling: tuple[tuple[Piece, ...], ...]
    # places of the travelling pieces among the keys of this rank's block
    departing: tuple[slice, ...] = ()
    # the slice with which the chunk begins, if it begins with one
    slice_: Slice | None = None
    # for every block, the pieces of the slices before it, which the K/V book holds. A block's keys are those of `earlier` that
    # some query sees, then those of its own tokens
    earlier: tuple[tuple[Piece, ...], ...] = ()
    # caches of `keys`, `tiles` and `direct`, shared by all layers of a chunk
    known_keys: dict[int, tuple[tuple[Piece, ...], ...]] = field(default_factory=dict)
    known_tiles: dict[tuple[AttentionPattern | None, int, bool], list[Tile]] = field(default_factory=dict)
    known_direct: dict[AttentionPattern, DirectBlocks | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        index: int,
        ranks: tuple[int, ...],
        blocks: tuple[tuple[Piece, ...], ...],
        slice_: Slice | None = None,
        held: tuple[tuple[Piece, ...], ...] = (),
    ) -> Ring:
        """Makes the ring of blocks with these pieces; those of the slice count from the start of the slice.

        held: for every block, its pieces of all slices of the sequence, from `slice_pieces`.
        """
        travelling = travelling_pieces(blocks)
        if slice_ is None:
            return cls(process_group, index, ranks, blocks, travelling, departing_tokens(blocks[index], travelling[index]))
        blocks, own = (tuple(tuple(_placed(piece, slice_) for piece in each) for each in x) for x in (blocks, travelling))
        earlier = tuple(tuple(piece for piece in pieces if piece.stop <= slice_.start) for pieces in held)
        keys, travelling = (tuple(_joined(*each) for each in zip(earlier, x, strict=True)) for x in (blocks, own))
        departing = departing_tokens(keys[index], travelling[index])
        return cls(process_group, index, ranks, blocks, travelling, departing, slice_, earlier)

    @property
    def num_blocks(self) -> int:
        return len(self.ranks)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Document pieces of this rank's block."""
        return self.blocks[self.index]

    @property
    def slice_tokens(self) -> slice:
        """Range of the slice's tokens among those of this rank's block; empty without a slice."""
        document = None if self.slice_ is None else self.slice_.document
        return slice(0, sum(piece.num_tokens for piece in self.pieces if piece.document == document))

    def keys(self, pattern: AttentionPattern) -> tuple[tuple[Piece, ...], ...]:
        """Returns the key pieces of every block, located among the block's keys, where earlier slices come first."""
        if self.slice_ is None:
            return self.blocks
        first = pattern.first_seen(self.slice_.start)
        if first not in self.known_keys:
            seen = [tuple(replace(p, start=max(p.start, first)) for p in block if p.stop > first) for block in self.earlier]
            self.known_keys[first] = tuple(_joined(*each) for each in zip(seen, self.blocks, strict=True))
        return self.known_keys[first]

    def direct(self, pattern: AttentionPattern) -> DirectBlocks | None:
        """Returns the pieces that blocks exchange directly under `pattern`; None if a token sees the whole longest document."""
        if pattern not in self.known_direct:
            self.known_direct[pattern] = self._direct(pattern)
        return self.known_direct[pattern]

    def _direct(self, pattern: AttentionPattern) -> DirectBlocks | None:
        if not pattern.first_seen(longest_document(self.blocks) - 1):
            return None
        keys = self.keys(pattern)
        others = [index != self.index for index in range(self.num_blocks)]
        incoming = (seen_pieces(block, self.pieces, pattern.first_seen) for block in keys)
        leaving = (seen_pieces(keys[self.index], block, pattern.first_seen) for block in self.blocks)
        return DirectBlocks(
            tuple(pieces if is_other else () for pieces, is_other in zip(incoming, others, strict=True)),
            tuple(
                departing_tokens(keys[self.index], pieces) if is_other else ()
                for pieces, is_other in zip(leaving, others, strict=True)
            ),
        )

    def tiles(self, block: int, pattern: AttentionPattern, needs_positions: bool = True) -> list[Tile]:
        """Returns pairs of a query piece of this rank and a key piece of `block` that it may see.

        A key piece is located among the keys of this rank's own block or, for another block, in the tensor that arrives from it.
        The pattern may still mask a whole pair. needs_positions: pieces must be consecutive tokens; otherwise all keys of
        earlier slices may be one piece, and all queries of the slice another.
        """
        direct = self.direct(pattern)
        known = (pattern if direct else None, block, needs_positions or direct is not None)
        if known not in self.known_tiles:
            keys = (self.keys(pattern) if block == self.index else direct.incoming if direct else self.travelling)[block]
            joined: list[Tile] = []
            if self.slice_ is not None and not known[2]:
                num_earlier = len(self.earlier[block])
                joined, keys = self._all_earlier(sent_tokens(keys[:num_earlier])), keys[num_earlier:]
            self.known_tiles[known] = [*joined, *visible_tiles(self.pieces, keys)]
        return self.known_tiles[known]

    def _all_earlier(self, num_keys: int) -> list[Tile]:
        """Returns the tile of all queries of the slice with the keys of earlier slices, all of them visible."""
        assert self.slice_ is not None
        start, num_rows = self.slice_.start, self.slice_tokens.stop
        return [(Piece(0, start, start + num_rows, 0), Piece(0, start - num_keys, start, 0))] if num_keys and num_rows else []


def _placed(piece: Piece, slice_: Slice) -> Piece:
    """Returns the piece; if it is part of the slice, counted from the start of its sequence."""
    if piece.document != slice_.document:
        return piece
    return replace(piece, start=slice_.start + piece.start, stop=slice_.start + piece.stop)


def _joined(earlier: tuple[Piece, ...], own: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Joins pieces of one tensor, in which those of earlier slices come first."""
    pieces, held = [], 0
    for piece in earlier:
        pieces.append(replace(piece, first=held))
        held += piece.num_tokens
    return (*pieces, *(replace(piece, first=held + piece.first) for piece in own))


def departing_tokens(pieces: tuple[Piece, ...], travelling: tuple[Piece, ...]) -> tuple[slice, ...]:
    """Returns the token ranges of a block that are sent, in the order of `travelling` (whole pieces or ends of pieces)."""
    sent = {(piece.document, piece.stop): piece.num_tokens for piece in travelling}
    ends = ((piece.tokens.stop, sent.get((piece.document, piece.stop), 0)) for piece in pieces)
    return tuple(slice(stop - num_tokens, stop) for stop, num_tokens in ends if num_tokens)


def sent_tokens(pieces: tuple[Piece, ...]) -> int:
    """Returns the number of tokens in a tensor of these pieces."""
    return pieces[-1].first + pieces[-1].num_tokens if pieces else 0


def visible_tiles(queries: tuple[Piece, ...], keys: tuple[Piece, ...]) -> list[Tile]:
    """Returns all pairs that causality does not mask fully: key pieces of the same document that start no later."""
    by_document: dict[int, list[Piece]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    return [(query, key) for query in queries for key in by_document.get(query.document, ()) if key.start <= query.start]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """One rank's view of one chunk on its sequence group."""

    block: Block
    ring: Ring
    # document boundaries from 0 on, if the group has one block; empty for several blocks, whose layout is `ring.pieces`
    cu_seqlens: tuple[int, ...]
    # cache of `readers`; owned by the pool, so it lasts for the run
    known_readers: dict[tuple[HeadShare, int, torch.device], KVReaders] = field(default_factory=dict)
    # boundaries of runs of documents, on the device; shared by all layers of the chunk
    bounds: PackBounds = field(default_factory=PackBounds)
    # see `AttentionRule`; owned by the pool
    stacks: StackChecks | None = None
    # documents whose sequence has tokens in other chunks too; their keys and values are in `kv_book`
    slices: tuple[Slice, ...] = ()
    # (tokens of the piece, tokens of its whole document) for every piece on this rank, in order; each dummy token is a
    # document of its own
    documents: tuple[tuple[int, int], ...] = ()
    # tokens of all ranks of the group, for layers with a state along the sequence
    layout: GroupLayout = field(default_factory=lambda: GroupLayout.of(None, True, (0,), 0, ((),)))
    # K/V book and state book of the micro-batch
    kv_book: KVBook = field(default_factory=KVBook)
    state_book: StateBook = field(default_factory=StateBook)
    calls: AttentionCalls = field(default_factory=AttentionCalls)
    # policies for the saved tensors of layers; None keeps everything
    activations: ChunkActivations | None = None
    # keeps output and LSE of the running layer's attention for its replay; None in layers that are not replayed
    attention_record: AttentionRecord | None = None
    # slice that ranks of several stages compute together; None for chunks that one stage runs alone
    lent_slice: SharedSlice | None = None
    # [1, T], positions of this rank's tokens in their documents, as the model gets them; None if no model runs
    position_ids: Tensor | None = None
    # sequence number in the plan of every piece of `documents`; -1 for dummy tokens
    sequences: tuple[int, ...] = ()
    # sequence number of every document of the chunk
    chunk_sequences: tuple[int, ...] = ()
    # keys of this rank's tokens for dropout; None in a model without it
    tokens: DropoutTokens | None = None
    # for each document of the chunk its ranges of tokens that see each other both ways, in layers that let images do so; (): none
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    # images and videos of this rank's tokens; None without any in the chunk's documents
    media: ChunkMedia | None = None
    # tokens of a rank in the chunks of its group, on average; 0: those of this chunk. They decide on parts of the heads, and all
    # slices of a sequence have equal parts
    mean_tokens: int = 0
    # most parts in which heads are exchanged beside attention, and fewest bytes of one, see `head_parts`
    exchange_parts: int = MOST_HEAD_PARTS
    part_bytes: int = HEAD_PART_BYTES

    def __post_init__(self) -> None:
        if self.ring.num_blocks == 1 and sum(self.block.tokens) != self.cu_seqlens[-1]:
            raise ValueError(
                f"shards of {self.block.tokens} tokens do not add up to the {self.cu_seqlens[-1]} tokens of the chunk"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens on this rank."""
        return self.block.tokens[self.block.index]

    def placed(self, position_ids: Tensor, keys: DropoutKeys | None, media: ChunkMedia | None = None) -> GroupContext:
        """Returns the context with positions of this rank's tokens [1, T], their keys for the model's dropout, and media."""
        if keys is None:
            return replace(self, position_ids=position_ids, media=media)
        pieces = [(count, sequence) for (count, _), sequence in zip(self.documents, self.sequences, strict=True)]
        tokens = keys.of_pieces(pieces, position_ids, [length for _, length in self.documents])
        return replace(self, position_ids=position_ids, tokens=tokens, media=media)

    def weight_dropout(self, rate: float, name: str, heads: HeadShare) -> WeightDropout | None:
        """Returns the dropout of attention weights in layer `name`, for this rank's heads; None at a rate of 0.

        Raises RuntimeError if the context has no keys of tokens, or if its forward is not running.
        """
        if not rate:
            return None
        if self.tokens is None:
            raise RuntimeError(f"{name} are dropped at a rate of {rate:g}, but the context has no keys of tokens; call `placed`")
        # first run and replay both count calls from zero
        if (running := self.tokens.keys.tokens) is None:
            raise RuntimeError(
                f"{name} are dropped outside of the forward of a plan, where another mask would be drawn; leave recomputation of "
                f"layers to plans"
            )
        numbers = tuple(self.tokens.first_document + sequence for sequence in self.chunk_sequences)
        return WeightDropout(rate, running.call_key(name), running.step, numbers, heads.q_start, heads.num_q)

    def running(self) -> AbstractContextManager[None]:
        """Context around a forward of the model that gives this rank's tokens to dropout modules."""
        return nullcontext() if self.tokens is None else self.tokens.running()

    def check_calls(self, num_layers: int) -> None:
        """Raises RuntimeError unless each of `num_layers` attention layers has received this context. Call it after a forward."""
        if self.calls.count != num_layers:
            raise RuntimeError(
                f"{self.calls.count} of {num_layers} attention layers received the plan; the model drops extra keyword "
                f"arguments between its forward and its attention, so plans cannot run it; use another model class, or, if its "
                f"attention was changed since the start (set_attn_implementation), leave that out"
            )

    def readers(self, share: HeadShare, per_kv: int, device: torch.device) -> KVReaders:
        """Returns the readers for the heads of `share`, made once per run."""
        key = (share, per_kv, device)
        if key not in self.known_readers:
            self.known_readers[key] = KVReaders.of(*key)
        return self.known_readers[key]

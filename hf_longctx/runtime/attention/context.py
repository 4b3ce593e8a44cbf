"""The context of a chunk: everything an attention layer must know about the chunk it runs in.

`GroupPool` makes one per chunk; it travels through the model's forward as the keyword `longctx`, never as a global.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import HeadShare, Piece, longest_document, seen_pieces, travelling_pieces
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.layout import GroupLayout
from hf_longctx.runtime.attention.state_book import StateBook
from hf_longctx.runtime.core.dropout import DropoutKeys, DropoutTokens
from hf_longctx.runtime.tiles.packs import PackBounds
from hf_longctx.runtime.tiles.patterns import AttentionPattern
from hf_longctx.runtime.tiles.plain import WeightDropout

if TYPE_CHECKING:
    from hf_longctx.runtime.activations.engine import ChunkActivations
    from hf_longctx.runtime.attention.lent_slice import LentSlice

# a query piece and a key piece, each with its location in its block
Tile = tuple[Piece, Piece]


@dataclass(slots=True)
class AttentionCalls:
    """Number of attention calls that received the context in one forward; the executor compares it with the number of layers."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring ranks that share heads (Ulysses): their process group, this rank's index in it, and each rank's tokens."""

    process_group: dist.ProcessGroup | None
    index: int
    tokens: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """Pieces that one block exchanges directly with each other block, under a pattern that limits how far back queries see.

    incoming: for each sending block, the key pieces that this block's queries see; their locations count from the start of the
    tensor that arrives. outgoing: for each receiving block, this block's tokens that the receiver's queries see, in the order of
    sending.
    """

    incoming: tuple[tuple[Piece, ...], ...]
    outgoing: tuple[tuple[slice, ...], ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring that one rank is in: one rank of every block, all with the same heads, in ring order.

    process_group: the group of all ranks, whose links carry the messages, so that any ranks can form a ring without a group of
    their own. index: this rank's block. ranks: global ranks of the ring. blocks: the document pieces of every block, which count
    from the start of the whole document. travelling: for every block, the pieces of keys that other blocks see if queries see
    all earlier tokens; only these are sent around. departing: the places of these pieces among the keys of this rank's block.

    slice_: the slice of a sequence with which the chunk begins; None without. earlier: for every block, the pieces of the slices
    before it, which the K/V book holds. A block's keys are those of `earlier` that some query sees, then those of its own tokens.

    known_keys, known_tiles, known_direct: caches of `keys`, `tiles` and `direct`, shared by all layers of a chunk.
    """

    process_group: dist.ProcessGroup | None
    index: int
    ranks: tuple[int, ...]
    blocks: tuple[tuple[Piece, ...], ...]
    travelling: tuple[tuple[Piece, ...], ...]
    departing: tuple[slice, ...] = ()
    slice_: Slice | None = None
    earlier: tuple[tuple[Piece, ...], ...] = ()
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
        """The ring of blocks with these pieces, of which those of the slice count from the start of the slice.

        held: for every block, its pieces of all slices of the sequence, as `slice_pieces` finds them.
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
        """Pieces of the keys of every block, located among the block's keys: those of earlier slices first."""
        if self.slice_ is None:
            return self.blocks
        first = pattern.first_seen(self.slice_.start)
        if first not in self.known_keys:
            seen = [tuple(replace(p, start=max(p.start, first)) for p in block if p.stop > first) for block in self.earlier]
            self.known_keys[first] = tuple(_joined(*each) for each in zip(seen, self.blocks, strict=True))
        return self.known_keys[first]

    def direct(self, pattern: AttentionPattern) -> DirectBlocks | None:
        """Pieces that blocks send each other directly under `pattern`; None if some token sees the whole longest document."""
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
        """Pairs of a query piece of this rank and a key piece of `block` that it may see.

        A key piece is located among the keys of this rank's own block, or, if `block` is another one, in the tensor of keys that
        arrives from it. The pattern may still mask a whole pair. needs_positions: pieces are consecutive tokens; without, all
        keys of earlier slices may be one piece, and all queries of the slice another.
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
        """The tile of all queries of the slice with keys of earlier slices, of which they see each."""
        assert self.slice_ is not None
        start, num_rows = self.slice_.start, self.slice_tokens.stop
        return [(Piece(0, start, start + num_rows, 0), Piece(0, start - num_keys, start, 0))] if num_keys and num_rows else []


def _placed(piece: Piece, slice_: Slice) -> Piece:
    """The piece, counted from the start of its sequence if it is one of the slice."""
    if piece.document != slice_.document:
        return piece
    return replace(piece, start=slice_.start + piece.start, stop=slice_.start + piece.stop)


def _joined(earlier: tuple[Piece, ...], own: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Pieces of one tensor, in which those of earlier slices come first."""
    pieces, held = [], 0
    for piece in earlier:
        pieces.append(replace(piece, first=held))
        held += piece.num_tokens
    return (*pieces, *(replace(piece, first=held + piece.first) for piece in own))


def departing_tokens(pieces: tuple[Piece, ...], travelling: tuple[Piece, ...]) -> tuple[slice, ...]:
    """Token ranges of a block that are sent around, in the order of `travelling`, which holds whole pieces or ends of pieces."""
    sent = {(piece.document, piece.stop): piece.num_tokens for piece in travelling}
    ends = ((piece.tokens.stop, sent.get((piece.document, piece.stop), 0)) for piece in pieces)
    return tuple(slice(stop - num_tokens, stop) for stop, num_tokens in ends if num_tokens)


def sent_tokens(pieces: tuple[Piece, ...]) -> int:
    """Number of tokens in a tensor that consists of these pieces."""
    return pieces[-1].first + pieces[-1].num_tokens if pieces else 0


def visible_tiles(queries: tuple[Piece, ...], keys: tuple[Piece, ...]) -> list[Tile]:
    """All pairs that causality does not mask fully: a query piece sees the key pieces of its document that start no later."""
    by_document: dict[int, list[Piece]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    return [(query, key) for query in queries for key in by_document.get(query.document, ()) if key.start <= query.start]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """One rank's view of one chunk on its sequence group.

    cu_seqlens: document boundaries, starting at 0, if the group has one block, which then holds whole documents; empty for
        several blocks, whose layout is `ring.pieces`.
    known_readers: cache of `readers`; it belongs to the pool, so it lasts for the run.
    bounds: boundaries on the device of runs of documents, shared by all layers of the chunk.
    slices: the documents of the chunk whose sequence has tokens in other chunks too; their keys and values are in `kv_book`.
    documents: (tokens of the piece, tokens of its whole document) for every piece of this rank's tokens, in order; each dummy
        token is a document of its own.
    layout: the tokens of all ranks of the group, for layers with a state along the sequence.
    kv_book, state_book: the K/V book of the micro-batch, and its book of states of layers without attention.
    activations: policies for the saved tensors of layers; None keeps everything.
    attention_record: keeps output and LSE of the running layer's attention for its replay; None in layers that are not replayed.
    lent_slice: the slice that ranks of several stages compute together; None for chunks that their stage runs alone.
    position_ids: [1, T], positions of this rank's tokens in their documents, as the model gets them; None if no model runs.
    sequences: the plan's sequence of every piece of `documents`; -1 for dummy tokens. chunk_sequences: that of every document of
        the chunk. tokens: keys of this rank's tokens for dropout; None in a model without it.
    """

    block: Block
    ring: Ring
    cu_seqlens: tuple[int, ...]
    known_readers: dict[tuple[HeadShare, int, torch.device], KVReaders] = field(default_factory=dict)
    bounds: PackBounds = field(default_factory=PackBounds)
    slices: tuple[Slice, ...] = ()
    documents: tuple[tuple[int, int], ...] = ()
    layout: GroupLayout = field(default_factory=lambda: GroupLayout.of(None, True, (0,), 0, ((),)))
    kv_book: KVBook = field(default_factory=KVBook)
    state_book: StateBook = field(default_factory=StateBook)
    calls: AttentionCalls = field(default_factory=AttentionCalls)
    activations: ChunkActivations | None = None
    attention_record: AttentionRecord | None = None
    lent_slice: LentSlice | None = None
    position_ids: Tensor | None = None
    sequences: tuple[int, ...] = ()
    chunk_sequences: tuple[int, ...] = ()
    tokens: DropoutTokens | None = None

    def __post_init__(self) -> None:
        if self.ring.num_blocks == 1 and sum(self.block.tokens) != self.cu_seqlens[-1]:
            raise ValueError(
                f"shards of {self.block.tokens} tokens do not add up to the {self.cu_seqlens[-1]} tokens of the chunk"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens on this rank."""
        return self.block.tokens[self.block.index]

    def placed(self, position_ids: Tensor, keys: DropoutKeys | None) -> GroupContext:
        """The context with the positions of this rank's tokens [1, T], and with their keys for the dropout of a model."""
        if keys is None:
            return replace(self, position_ids=position_ids)
        pieces = [(count, sequence) for (count, _), sequence in zip(self.documents, self.sequences, strict=True)]
        tokens = keys.of_pieces(pieces, position_ids, [length for _, length in self.documents])
        return replace(self, position_ids=position_ids, tokens=tokens)

    def weight_dropout(self, rate: float, name: str, heads: HeadShare) -> WeightDropout | None:
        """Dropout at this rate of the attention weights of the layer `name`, for the heads of this rank; None at a rate of 0.

        Raises RuntimeError if the context has no keys of tokens, or if its forward does not run now.
        """
        if not rate:
            return None
        if self.tokens is None:
            raise RuntimeError(f"{name} are dropped at a rate of {rate:g}, but the context has no keys of tokens; call `placed`")
        # a replay and a first run count calls anew
        if (running := self.tokens.keys.tokens) is None:
            raise RuntimeError(
                f"{name} are dropped outside of the forward of a plan, where another mask would be drawn; leave recomputation of "
                f"layers to plans"
            )
        numbers = tuple(self.tokens.first_document + sequence for sequence in self.chunk_sequences)
        return WeightDropout(rate, running.call_key(name), running.step, numbers, heads.q_start, heads.num_q)

    def running(self) -> AbstractContextManager[None]:
        """Context around a forward of the model: its dropout modules get this rank's tokens."""
        return nullcontext() if self.tokens is None else self.tokens.running()

    def check_calls(self, num_layers: int) -> None:
        """Raises RuntimeError unless each of `num_layers` attention layers received this context. Call it after a forward."""
        if self.calls.count != num_layers:
            raise RuntimeError(
                f"{self.calls.count} of {num_layers} attention layers received the plan; the model drops extra keyword "
                f"arguments between its forward and its attention, so plans cannot run it; use another model class, or, if its "
                f"attention was changed since the start (set_attn_implementation), leave that out"
            )

    def readers(self, share: HeadShare, per_kv: int, device: torch.device) -> KVReaders:
        """Readers for the heads of `share`, made once per run."""
        key = (share, per_kv, device)
        if key not in self.known_readers:
            self.known_readers[key] = KVReaders.of(*key)
        return self.known_readers[key]

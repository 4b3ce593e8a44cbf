"""The K/V book: keys and values of sequences that are cut into slices, kept so that later slices can read earlier ones.

Per layer and sequence the K/V book holds the keys and values of slices and, in backward, the gradients that later slices leave
for earlier ones. `attention.chunk` and `execution.lending` read and write it; the executor makes one per micro-batch.

Slices run backward in reverse order. Each slice adds to the gradients of its front (the earlier tokens that it sees). The
gradient that it returns for its own keys and values is its own contribution plus those that later slices left. So no graph
reaches from one chunk into another, and autograd needs no extra roots. Activation checkpointing, reentrant or not, runs a slice's
forward again, which writes the same values to the same place.

In a ring, the book of a rank holds only tokens of its own block, those of every slice, in order of position.

If a pattern limits how far back queries see, the K/V book drops tokens that no later query sees. Of a slice it keeps the last
tokens, which later slices see; it keeps the whole slice only if its backward runs without a replay of its forward, or once that
replay has run. It keeps gradients only for the front of the slice that ran backward last.

Shapes: G KV heads, T tokens of the slice, U tokens of its front or of one run of keys in it, S tokens of the sequence, N tokens
kept of a slice, D head size of keys, E of values, W = D + E.

Source: Seq1F1B (arXiv 2406.03488), which keeps the prefix as a list of slices and concatenates them for every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import sequence_ends, slice_pieces
from hf_longctx.plan.core.types import Chunk, SequenceGroup
from hf_longctx.runtime.attention.heads import split_kv
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, stop) of a sequence of `end` tokens; the rest of the sequence is in other chunks of the group.

    document: index of the slice among the documents of its chunk. parts: ranges of the sequence's tokens in this rank's block of
    a ring, over all slices in order; None if a block holds all tokens.
    """

    document: int
    sequence: int
    start: int
    stop: int
    end: int
    parts: tuple[tuple[int, int], ...] | None = None

    def __str__(self) -> str:
        return f"tokens [{self.start}, {self.stop}) of sequence {self.sequence}"

    def before(self, position: int) -> int:
        """Returns how many of the sequence's tokens before `position` are in this rank's block."""
        if self.parts is None:
            return position
        return sum(min(stop, position) - start for start, stop in self.parts if start < position)


def slices_of(group: SequenceGroup, chunk: Chunk, block: int = 0) -> tuple[Slice, ...]:
    """Returns the slices of `chunk` in order, as held by a block of the group.

    Slices are documents whose sequence begins or continues in another chunk of the group.
    """
    ends = sequence_ends((*group.chunks, chunk))
    return tuple(
        Slice(document, span.sequence, span.start, span.stop, ends[span.sequence], _parts(group, span.sequence, block))
        for document, span in enumerate(chunk.spans)
        if span.start > 0 or span.stop < ends[span.sequence]
    )


def _parts(group: SequenceGroup, sequence: int, block: int) -> tuple[tuple[int, int], ...] | None:
    if group.shape.num_blocks == 1:
        return None
    return tuple((piece.start, piece.stop) for piece in slice_pieces(group.chunks, sequence, group.shape.num_blocks)[block])


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Keys and values [G, U, W] of consecutive tokens of a sequence from position `first` on, as a view.

    In a ring, these are the tokens from there on in one block.
    """

    first: int
    kv_GUW: Tensor

    @property
    def stop(self) -> int:
        return self.first + self.kv_GUW.shape[1]


class _AllTokens:
    """Keys and values of a whole sequence at one layer in one buffer, and their gradients in another.

    Tokens are the outermost dimension, so that every front is contiguous; each value follows its key.
    """

    def __init__(self, slice_: Slice, k_GTD: Tensor, v_GTE: Tensor) -> None:
        self.kv_SGW = k_GTD.new_empty(slice_.before(slice_.end), k_GTD.shape[0], k_GTD.shape[2] + v_GTE.shape[2])
        self.gradients_UGW: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.kv_SGW.nbytes + (0 if self.gradients_UGW is None else self.gradients_UGW.nbytes)

    def put(self, slice_: Slice, k_GTD: Tensor, v_GTE: Tensor, keeps_own: bool) -> None:
        _fill(self.kv_SGW[_own(slice_)], k_GTD, v_GTE)

    def free_unseen(self, position: int) -> None:
        """Frees nothing: queries from `position` on see every token."""

    def front(self, slice_: Slice) -> tuple[KeyRun, ...]:
        return (KeyRun(0, _heads_first(self.kv_SGW[: slice_.before(slice_.start)])),) if slice_.start else ()

    def own(self, slice_: Slice) -> Tensor:
        return _heads_first(self.kv_SGW[_own(slice_)])

    def open_gradients(self, slice_: Slice) -> tuple[Tensor, Tensor]:
        front, own = slice(slice_.before(slice_.start)), _own(slice_)
        if self.gradients_UGW is not None:
            return _heads_first(self.gradients_UGW[front]), _heads_first(self.gradients_UGW[own])
        wide = torch.promote_types(self.kv_SGW.dtype, torch.float32)
        self.gradients_UGW = torch.zeros_like(self.kv_SGW[front], dtype=wide)
        own_TGW = torch.zeros_like(self.kv_SGW[own], dtype=wide)
        return _heads_first(self.gradients_UGW), _heads_first(own_TGW)

    def free_slice(self, slice_: Slice) -> None:
        """Frees nothing: the buffers are freed after the backward of the first slice."""


class _SeenTokens:
    """Keys and values of one sequence at one layer with a limiting pattern: one run per slice, and gradients of one front."""

    def __init__(self, slice_: Slice, pattern: AttentionPattern) -> None:
        # the number of tokens before a position is the same for every slice of the sequence
        self.pattern, self.before = pattern, slice_.before
        # keyed by the start of the slice, in order
        self.runs: dict[int, KeyRun] = {}
        self.gradients: KeyRun | None = None

    @property
    def num_bytes(self) -> int:
        return sum(run.kv_GUW.nbytes for run in (*self.runs.values(), *([self.gradients] if self.gradients else [])))

    def put(self, slice_: Slice, k_GTD: Tensor, v_GTE: Tensor, keeps_own: bool) -> None:
        seen = self.pattern.first_seen(slice_.stop) if slice_.stop < slice_.end else slice_.stop
        first = slice_.start if keeps_own else max(slice_.start, seen)
        num_kept = self._count(first, slice_.stop)
        run = self.runs.get(slice_.start)
        if run is None or run.first != first:
            # a replay before backward replaces the last tokens by the whole slice
            self.runs.pop(slice_.start, None)
            if first == slice_.stop:
                return
            shape = (num_kept, k_GTD.shape[0], k_GTD.shape[2] + v_GTE.shape[2])
            run = self.runs[slice_.start] = KeyRun(first, _heads_first(k_GTD.new_empty(shape)))
        # a front sent by another stage has only the last tokens, so count from the end
        kept = slice(k_GTD.shape[1] - num_kept, None)
        _fill(_heads_first(run.kv_GUW), k_GTD[:, kept], v_GTE[:, kept])

    def free_unseen(self, position: int) -> None:
        """Frees tokens that queries from `position` on do not see."""
        seen = self.pattern.first_seen(position)
        for start, run in list(self.runs.items()):
            left = self._since(run, seen)
            if not left.kv_GUW.shape[1]:
                del self.runs[start]
            elif left is not run:
                self.runs[start] = KeyRun(seen, _heads_first(_heads_first(left.kv_GUW).clone()))

    def front(self, slice_: Slice) -> tuple[KeyRun, ...]:
        seen = self.pattern.first_seen(slice_.start)
        runs = (self._since(run, seen) for start, run in self.runs.items() if start < slice_.start)
        return tuple(run for run in runs if run.kv_GUW.shape[1])

    def own(self, slice_: Slice) -> Tensor:
        return self.runs[slice_.start].kv_GUW

    def open_gradients(self, slice_: Slice) -> tuple[Tensor, Tensor]:
        kv_GTW, first = self.own(slice_), self.pattern.first_seen(slice_.start)
        wide = torch.promote_types(kv_GTW.dtype, torch.float32)
        own_GTW = torch.zeros_like(kv_GTW, dtype=wide)
        later, self.gradients = self.gradients, None
        if later is not None:
            left = self._since(later, slice_.start)
            own_GTW[:, self._count(slice_.start, left.first) :] = left.kv_GUW
        shape = (self._count(first, slice_.start), kv_GTW.shape[0], kv_GTW.shape[2])
        front_GUW = _heads_first(own_GTW.new_zeros(shape))
        if later is not None and later.first < slice_.start:
            front_GUW[:, self._count(first, later.first) :] = later.kv_GUW[:, : self._count(later.first, slice_.start)]
        self.gradients = KeyRun(first, front_GUW)
        return front_GUW, own_GTW

    def free_slice(self, slice_: Slice) -> None:
        del self.runs[slice_.start]

    def _count(self, first: int, stop: int) -> int:
        """Returns the number of tokens in positions [first, stop)."""
        return self.before(stop) - self.before(first)

    def _since(self, run: KeyRun, first: int) -> KeyRun:
        """Returns a view of a run's tokens from position `first` on."""
        return run if first <= run.first else KeyRun(first, run.kv_GUW[:, self._count(run.first, first) :])


class _Entry:
    """Tokens held for one sequence at one layer, and progress of forward and backward.

    num_written: tokens that have run forward. num_waiting: tokens that have not run backward yet.
    """

    def __init__(self, slice_: Slice, tokens: _AllTokens | _SeenTokens) -> None:
        self.tokens = tokens
        self.num_written, self.num_waiting = 0, slice_.end


class KVBook:
    """Keys and values of the sliced sequences of one micro-batch, and the gradients left for them.

    If every token sees all earlier ones, a sequence of S tokens takes KV heads * W * S elements per layer from the forward of its
    first slice on. From the backward of its last slice on it also takes gradients, in fp32 (fp64 for fp64), for all tokens
    outside that slice. Both are freed by the backward of its first slice.

    If a pattern limits what queries see within the sequence, a slice takes elements from its forward to its backward: for all its
    T tokens with `keeps_own`, else for the tokens that later slices see. After a slice's backward the gradients of its front are
    held until the backward of the slice before.

    has_backward: false if only forwards run; a layer's keys and values are then freed by the forward of the last slice, or as
    soon as no later token sees them. Make one K/V book per micro-batch: two cannot use one at a time.
    """

    def __init__(self, has_backward: bool = True) -> None:
        self.has_backward = has_backward
        self._peak_bytes = 0
        self._entries: dict[tuple[Hashable, int], _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes currently held."""
        return sum(entry.tokens.num_bytes for entry in self._entries.values())

    def take_peak(self) -> int:
        """Returns the most bytes held in the passes since the last call; what was closed between passes no longer counts."""
        peak_bytes, self._peak_bytes = max(self._peak_bytes, self.num_bytes), 0
        return peak_bytes

    def write(
        self,
        layer: Hashable,
        slice_: Slice,
        k_GTD: Tensor,
        v_GTE: Tensor,
        pattern: AttentionPattern = CAUSAL,
        keeps_own: bool = True,
    ) -> tuple[KeyRun, ...]:
        """Stores a slice's keys and values (a replay stores them again); returns the earlier ones that its queries see.

        pattern: must be equal in all calls of a layer. keeps_own: the slice's backward runs without a replay of its forward.
        Raises RuntimeError unless the slice is the next one, or an earlier one that has not run backward yet.
        """
        key = (layer, slice_.sequence)
        entry = self._entries.get(key)
        num_written, num_waiting = (entry.num_written, entry.num_waiting) if entry else (0, slice_.end)
        is_next = slice_.start == num_written
        if not is_next and slice_.stop > num_written:
            raise RuntimeError(
                f"{slice_} ran forward after {num_written} tokens of its sequence; slices must run forward in order, without gaps"
            )
        if slice_.stop > num_waiting:
            raise RuntimeError(f"{slice_} ran forward after its own backward; a slice's forward must run before its backward")
        if entry is None:
            is_limited = pattern.first_seen(slice_.end - 1) > 0
            tokens: _AllTokens | _SeenTokens
            tokens = _SeenTokens(slice_, pattern) if is_limited else _AllTokens(slice_, k_GTD, v_GTE)
            entry = self._entries[key] = _Entry(slice_, tokens)
        front = entry.tokens.front(slice_)
        entry.tokens.put(slice_, k_GTD, v_GTE, keeps_own)
        self._note_peak()
        entry.num_written = max(entry.num_written, slice_.stop)
        if not self.has_backward:
            if slice_.stop < slice_.end:
                entry.tokens.free_unseen(slice_.stop)
            else:
                del self._entries[key]
        return front

    def read(self, layer: Hashable, slice_: Slice) -> tuple[tuple[KeyRun, ...], Tensor]:
        """Returns views of the earlier keys and values that a slice sees, and of its own [G, T, W], for its backward.

        Raises RuntimeError if another slice must run backward first.
        """
        entry = self._entries.get((layer, slice_.sequence))
        if entry is None:
            raise RuntimeError(
                f"{slice_} ran backward, but the K/V book has already freed its sequence; run each slice backward only once"
            )
        if entry.num_waiting != slice_.stop:
            raise RuntimeError(
                f"{slice_} ran backward while tokens up to {entry.num_waiting} had not; slices must run backward once each, the "
                f"last slice first"
            )
        return entry.tokens.front(slice_), entry.tokens.own(slice_)

    def gradients(self, layer: Hashable, slice_: Slice) -> tuple[Tensor, Tensor]:
        """Returns two gradient buffers to add to: for keys and values of the front [G, U, W] and of the slice [G, T, W].

        The front is the U tokens before the slice that its first query sees. The slice's buffer already holds the gradients that
        later slices left. Both are in at least fp32. Call it once for each backward of a slice.
        """
        found = self._entries[layer, slice_.sequence].tokens.open_gradients(slice_)
        self._note_peak()
        return found

    def backward_done(self, layer: Hashable, slice_: Slice) -> None:
        """Notes that a slice has run backward at one layer; frees the layer's buffers if it was the sequence's first slice."""
        entry = self._entries[layer, slice_.sequence]
        entry.num_waiting = slice_.start
        entry.tokens.free_slice(slice_)
        if not slice_.start:
            del self._entries[layer, slice_.sequence]

    def close(self, sequence: int) -> None:
        """Frees the rest of a sequence, because layers below the first trainable weight never run backward."""
        for key in [key for key in self._entries if key[1] == sequence]:
            del self._entries[key]

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self.num_bytes)


def _own(slice_: Slice) -> slice:
    """Returns the range of a slice's tokens among the sequence's tokens in this rank's block."""
    return slice(slice_.before(slice_.start), slice_.before(slice_.stop))


def _heads_first(x_NGW: Tensor) -> Tensor:
    """Transposes [N, G, W] to [G, N, W], or back."""
    return x_NGW.transpose(0, 1)


def _fill(target_NGW: Tensor, k_GND: Tensor, v_GNE: Tensor) -> None:
    for target, new in zip(split_kv(_heads_first(target_NGW), k_GND.shape[2]), (k_GND, v_GNE), strict=True):
        target.copy_(new)

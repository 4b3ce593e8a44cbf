"""Slices: a sequence runs in several chunks, and later ones read the keys and values of earlier ones.

The K/V book holds, per layer and sequence, one buffer with the keys and values of all slices, and in backward one with
the gradients that later slices leave for earlier ones. `chunk_attention` reads and writes it.

Slices run backward last first. Each adds to the gradients of its front (all tokens before the slice), and hands back what
later ones left for its own keys and values as their gradient; so no graph reaches from one chunk into another and autograd
needs no further roots. Checkpointing, reentrant or not, runs a slice's forward again: it writes the same tokens to the same
place.

Shapes: G KV heads, T tokens of the slice, U tokens of its front, S tokens of the sequence, D head size
of keys, E of values, W = D + E.

Source: Seq1F1B (arXiv 2406.03488), whose prefix is a list of slices, concatenated for every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.types import Chunk, SequenceGroup
from hf_longctx.runtime.heads import split_kv


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, stop) of a sequence of which other chunks of the group hold the rest, up to token `end`.

    document: its place among the documents of its chunk.
    """

    document: int
    sequence: int
    start: int
    stop: int
    end: int

    def __str__(self) -> str:
        return f"tokens [{self.start}, {self.stop}) of sequence {self.sequence}"


def document_tokens(group: SequenceGroup, chunk: Chunk) -> dict[int, int]:
    """The whole tokens of every sequence of the group, which has all slices of each of them, and of `chunk`."""
    ends: dict[int, int] = {}
    for span in (span for other in (*group.chunks, chunk) for span in other.spans):
        ends[span.sequence] = max(span.stop, ends.get(span.sequence, 0))
    return ends


def slices_of(group: SequenceGroup, chunk: Chunk) -> tuple[Slice, ...]:
    """The documents of `chunk` that begin or go on in another chunk of its group, in order."""
    ends = document_tokens(group, chunk)
    return tuple(
        Slice(document, span.sequence, span.start, span.stop, ends[span.sequence])
        for document, span in enumerate(chunk.spans)
        if span.start > 0 or span.stop < ends[span.sequence]
    )


class _Entry:
    """One sequence at one layer: its keys and values, the gradients of those, how far forward and backward have come.

    Tokens lie outermost, so that every front is one piece of memory, and a value behind its key. num_written: tokens that ran
    forward. num_waiting: tokens in front of the last slice that ran backward; all at first.
    """

    def __init__(self, part: Slice, k_GTD: Tensor, v_GTE: Tensor) -> None:
        self.kv_SGW = k_GTD.new_empty(part.end, k_GTD.shape[0], k_GTD.shape[2] + v_GTE.shape[2])
        self.gradients_UGW: Tensor | None = None
        self.num_written, self.num_waiting = 0, part.end

    @property
    def num_bytes(self) -> int:
        return self.kv_SGW.nbytes + (0 if self.gradients_UGW is None else self.gradients_UGW.nbytes)


class KVBook:
    """Keys and values of sequences whose slices are on their way through one round, and the gradients left for them.

    A sequence of S tokens takes KV heads * W * S elements per layer from its first slice's forward on. From its
    last slice's backward on, gradients of all tokens but that slice's are there too, in fp32 (fp64 for fp64). Both go
    with the backward of its first slice. `has_backward`: false where only forwards run; then a layer's keys and values go
    with the last slice's forward. Not safe for two rounds at a time: make one per round.
    """

    def __init__(self, has_backward: bool = True) -> None:
        self.has_backward = has_backward
        self.peak_bytes = 0
        self._entries: dict[tuple[Hashable, int], _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now; `peak_bytes` is the most that were ever held."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def write(self, layer: Hashable, part: Slice, k_GTD: Tensor, v_GTE: Tensor) -> Tensor:
        """Puts down a slice's keys and values, or the same ones again; those of its sequence up to its end, [G, U + T, W].

        The result is a view. Raises RuntimeError unless the slice is the next one, or an earlier one that still waits for
        its backward.
        """
        key = (layer, part.sequence)
        entry = self._entries.get(key)
        num_written, num_waiting = (entry.num_written, entry.num_waiting) if entry else (0, part.end)
        is_next = part.start == num_written
        if not is_next and part.stop > num_written:
            raise RuntimeError(
                f"{part} ran forward when {num_written} of its sequence were there; slices run forward in order, first first"
            )
        if part.stop > num_waiting:
            raise RuntimeError(f"{part} ran forward after its own backward; what it would write is not for this step any more")
        if entry is None:
            entry = self._entries[key] = _Entry(part, k_GTD, v_GTE)
            self._note_peak()
        own_GTW = _heads_first(entry.kv_SGW[part.start : part.stop])
        for place, new in zip(split_kv(own_GTW, k_GTD.shape[2]), (k_GTD, v_GTE), strict=True):
            place.copy_(new)
        entry.num_written = max(entry.num_written, part.stop)
        view = _heads_first(entry.kv_SGW[: part.stop])
        if not self.has_backward and part.stop == part.end:
            del self._entries[key]
        return view

    def read(self, layer: Hashable, part: Slice) -> Tensor:
        """Keys and values up to the end of a slice that runs backward, [G, U + T, W], a view.

        Raises RuntimeError if it is not its turn.
        """
        entry = self._entries.get((layer, part.sequence))
        if entry is None:
            raise RuntimeError(f"{part} ran backward, but the book of its sequence was closed; a backward cannot be repeated")
        if entry.num_waiting != part.stop:
            raise RuntimeError(
                f"{part} ran backward when tokens up to {entry.num_waiting} had not; slices run backward in reverse order, last "
                f"first, and once"
            )
        return _heads_first(entry.kv_SGW[: part.stop])

    def gradients(self, layer: Hashable, part: Slice) -> tuple[Tensor, Tensor]:
        """Where to add gradients of the front's keys and values [G, U, W] and of the slice's own [G, T, W].

        The slice's own hold what later slices left. Both are views, in at least fp32.
        """
        entry = self._entries[layer, part.sequence]
        if entry.gradients_UGW is not None:
            front_UGW, own_TGW = entry.gradients_UGW[: part.start], entry.gradients_UGW[part.start : part.stop]
            return _heads_first(front_UGW), _heads_first(own_TGW)
        wide = torch.promote_types(entry.kv_SGW.dtype, torch.float32)
        entry.gradients_UGW = torch.zeros_like(entry.kv_SGW[: part.start], dtype=wide)
        self._note_peak()
        own_TGW = torch.zeros_like(entry.kv_SGW[part.start : part.stop], dtype=wide)
        return _heads_first(entry.gradients_UGW), _heads_first(own_TGW)

    def backward_done(self, layer: Hashable, part: Slice) -> None:
        """After a slice's backward at one layer; that of the first slice frees the layer's buffers."""
        self._entries[layer, part.sequence].num_waiting = part.start
        if not part.start:
            del self._entries[layer, part.sequence]

    def close(self, sequence: int) -> None:
        """Frees what is left of a sequence: layers below the first trainable weight have no backward."""
        for key in [key for key in self._entries if key[1] == sequence]:
            del self._entries[key]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def _heads_first(x_NGW: Tensor) -> Tensor:
    return x_NGW.transpose(0, 1)

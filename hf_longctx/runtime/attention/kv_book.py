"""Slices: a sequence runs in several chunks, and later ones read the keys and values of earlier ones.

The K/V book holds, per layer and sequence, the keys and values of slices, and in backward the gradients that later slices leave
for earlier ones. `chunk_attention` reads and writes it.

Slices run backward last first. Each adds to the gradients of its front (the tokens before the slice that it sees), and hands back
what later ones left for its own keys and values as their gradient; so no graph reaches from one chunk into another and autograd
needs no further roots. Checkpointing, reentrant or not, runs a slice's forward again: it writes the same tokens to the same
place.

Where a pattern lets go of keys, the book does too. Of a slice it keeps what later ones see, the last of its tokens, and all of
it only where its own backward comes without another run of its forward, or as soon as that run has been; of gradients, those of
the front of the slice that ran backward last.

Shapes: G KV heads, T tokens of the slice, U tokens of its front or of a run of it, S tokens of the sequence, N tokens that are
kept of a slice, D head size of keys, E of values, W = D + E.

Source: Seq1F1B (arXiv 2406.03488), whose prefix is a list of slices, concatenated for every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import sequence_ends
from hf_longctx.plan.core.types import Chunk, SequenceGroup
from hf_longctx.runtime.attention.heads import split_kv
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern


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


def slices_of(group: SequenceGroup, chunk: Chunk) -> tuple[Slice, ...]:
    """The documents of `chunk` that begin or go on in another chunk of its group, in order."""
    ends = sequence_ends((*group.chunks, chunk))
    return tuple(
        Slice(document, span.sequence, span.start, span.stop, ends[span.sequence])
        for document, span in enumerate(chunk.spans)
        if span.start > 0 or span.stop < ends[span.sequence]
    )


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Keys and values [G, U, W] of neighbouring tokens of a sequence, the first of them at position `first`. A view."""

    first: int
    kv_GUW: Tensor

    @property
    def stop(self) -> int:
        return self.first + self.kv_GUW.shape[1]

    def since(self, first: int) -> KeyRun:
        """The tokens from `first` on."""
        return self if first <= self.first else KeyRun(first, self.kv_GUW[:, first - self.first :])


class _AllTokens:
    """One sequence at one layer: its keys and values and the gradients of those, each in one piece of memory.

    Tokens lie outermost, so that every front is one piece, and a value behind its key.
    """

    def __init__(self, part: Slice, k_GTD: Tensor, v_GTE: Tensor) -> None:
        self.kv_SGW = k_GTD.new_empty(part.end, k_GTD.shape[0], k_GTD.shape[2] + v_GTE.shape[2])
        self.gradients_UGW: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.kv_SGW.nbytes + (0 if self.gradients_UGW is None else self.gradients_UGW.nbytes)

    def put(self, part: Slice, k_GTD: Tensor, v_GTE: Tensor, keeps_own: bool) -> None:
        _fill(self.kv_SGW[part.start : part.stop], k_GTD, v_GTE)

    def let_go(self, position: int) -> None:
        """The queries from `position` on see every token."""

    def front(self, part: Slice) -> tuple[KeyRun, ...]:
        return (KeyRun(0, _heads_first(self.kv_SGW[: part.start])),) if part.start else ()

    def own(self, part: Slice) -> Tensor:
        return _heads_first(self.kv_SGW[part.start : part.stop])

    def open_gradients(self, part: Slice) -> tuple[Tensor, Tensor]:
        if self.gradients_UGW is not None:
            front_UGW, own_TGW = self.gradients_UGW[: part.start], self.gradients_UGW[part.start : part.stop]
            return _heads_first(front_UGW), _heads_first(own_TGW)
        wide = torch.promote_types(self.kv_SGW.dtype, torch.float32)
        self.gradients_UGW = torch.zeros_like(self.kv_SGW[: part.start], dtype=wide)
        own_TGW = torch.zeros_like(self.kv_SGW[part.start : part.stop], dtype=wide)
        return _heads_first(self.gradients_UGW), _heads_first(own_TGW)

    def forget(self, part: Slice) -> None:
        """All goes with the first slice."""


class _SeenTokens:
    """One sequence at one layer whose pattern lets go of keys: a run of every slice, and the gradients of one front."""

    def __init__(self, pattern: AttentionPattern) -> None:
        self.pattern = pattern
        # by the start of their slice, in order
        self.runs: dict[int, KeyRun] = {}
        self.gradients: KeyRun | None = None

    @property
    def num_bytes(self) -> int:
        return sum(run.kv_GUW.nbytes for run in (*self.runs.values(), *([self.gradients] if self.gradients else [])))

    def put(self, part: Slice, k_GTD: Tensor, v_GTE: Tensor, keeps_own: bool) -> None:
        seen = self.pattern.first_seen(part.stop) if part.stop < part.end else part.stop
        first = part.start if keeps_own else max(part.start, seen)
        run = self.runs.get(part.start)
        if run is None or run.first != first:
            # before a slice's backward all of it takes the place of what later ones saw
            self.runs.pop(part.start, None)
            if first == part.stop:
                return
            shape = (part.stop - first, k_GTD.shape[0], k_GTD.shape[2] + v_GTE.shape[2])
            run = self.runs[part.start] = KeyRun(first, _heads_first(k_GTD.new_empty(shape)))
        # of a front that was sent only what is seen is there
        places = slice(k_GTD.shape[1] - (part.stop - first), None)
        _fill(_heads_first(run.kv_GUW), k_GTD[:, places], v_GTE[:, places])

    def let_go(self, position: int) -> None:
        """Frees what the queries from `position` on do not see."""
        seen = self.pattern.first_seen(position)
        for start, run in list(self.runs.items()):
            if run.stop <= seen:
                del self.runs[start]
            elif run.first < seen:
                self.runs[start] = KeyRun(seen, _heads_first(_heads_first(run.since(seen).kv_GUW).clone()))

    def front(self, part: Slice) -> tuple[KeyRun, ...]:
        seen = self.pattern.first_seen(part.start)
        return tuple(run.since(seen) for run in self.runs.values() if seen < run.stop <= part.start)

    def own(self, part: Slice) -> Tensor:
        return self.runs[part.start].kv_GUW

    def open_gradients(self, part: Slice) -> tuple[Tensor, Tensor]:
        kv_GTW, first = self.own(part), self.pattern.first_seen(part.start)
        wide = torch.promote_types(kv_GTW.dtype, torch.float32)
        own_GTW = torch.zeros_like(kv_GTW, dtype=wide)
        later, self.gradients = self.gradients, None
        if later is not None:
            left = later.since(part.start)
            own_GTW[:, left.first - part.start :] = left.kv_GUW
        shape = (part.start - first, kv_GTW.shape[0], kv_GTW.shape[2])
        front_GUW = _heads_first(own_GTW.new_zeros(shape))
        if later is not None and later.first < part.start:
            front_GUW[:, later.first - first :] = later.kv_GUW[:, : part.start - later.first]
        self.gradients = KeyRun(first, front_GUW)
        return front_GUW, own_GTW

    def forget(self, part: Slice) -> None:
        del self.runs[part.start]


class _Entry:
    """What is held of a sequence at a layer, and how far forward and backward have come.

    num_written: tokens that ran forward. num_waiting: tokens in front of the last slice that ran backward; all at first.
    """

    def __init__(self, part: Slice, tokens: _AllTokens | _SeenTokens) -> None:
        self.tokens = tokens
        self.num_written, self.num_waiting = 0, part.end


class KVBook:
    """Keys and values of sequences whose slices are on their way through one round, and the gradients left for them.

    Where every token sees all before it, a sequence of S tokens takes KV heads * W * S elements per layer from its first slice's
    forward on. From its last slice's backward on, gradients of all tokens but that slice's are there too, in fp32 (fp64 for
    fp64). Both go with the backward of its first slice. Where a pattern lets go of keys inside of the sequence, a slice takes
    elements for what later ones see of it, or for all its T tokens if its forward `keeps_own`, from its forward to its
    backward; and after a slice's backward gradients of its front are there, up to the backward of the slice before.

    `has_backward`: false where only forwards run; then a layer's keys and values go with the last slice's forward, or when no
    later token sees them. Not safe for two rounds at a time: make one per round.
    """

    def __init__(self, has_backward: bool = True) -> None:
        self.has_backward = has_backward
        self.peak_bytes = 0
        self._entries: dict[tuple[Hashable, int], _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now; `peak_bytes` is the most that were ever held."""
        return sum(entry.tokens.num_bytes for entry in self._entries.values())

    def write(
        self,
        layer: Hashable,
        part: Slice,
        k_GTD: Tensor,
        v_GTE: Tensor,
        pattern: AttentionPattern = CAUSAL,
        keeps_own: bool = True,
    ) -> tuple[KeyRun, ...]:
        """Puts down a slice's keys and values, or the same ones again; returns what its queries see in front of it.

        pattern: always the same of a layer. keeps_own: the slice runs backward without another run of its forward.
        Raises RuntimeError unless the slice is the next one, or an earlier one that still waits for its backward.
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
            lets_go = pattern.first_seen(part.end - 1) > 0
            entry = self._entries[key] = _Entry(part, _SeenTokens(pattern) if lets_go else _AllTokens(part, k_GTD, v_GTE))
        front = entry.tokens.front(part)
        entry.tokens.put(part, k_GTD, v_GTE, keeps_own)
        self._note_peak()
        entry.num_written = max(entry.num_written, part.stop)
        if not self.has_backward:
            if part.stop < part.end:
                entry.tokens.let_go(part.stop)
            else:
                del self._entries[key]
        return front

    def read(self, layer: Hashable, part: Slice) -> tuple[tuple[KeyRun, ...], Tensor]:
        """What a slice that runs backward sees in front of it, and its own keys and values [G, T, W]; all views.

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
        return entry.tokens.front(part), entry.tokens.own(part)

    def gradients(self, layer: Hashable, part: Slice) -> tuple[Tensor, Tensor]:
        """Where to add gradients of the front's keys and values [G, U, W] and of the slice's own [G, T, W].

        The front is what the slice's first query sees of it, and ends where the slice starts. The slice's own hold what later
        slices left. Both are in at least fp32. Once for each backward of a slice.
        """
        found = self._entries[layer, part.sequence].tokens.open_gradients(part)
        self._note_peak()
        return found

    def backward_done(self, layer: Hashable, part: Slice) -> None:
        """After a slice's backward at one layer; that of the first slice frees the layer's buffers."""
        entry = self._entries[layer, part.sequence]
        entry.num_waiting = part.start
        entry.tokens.forget(part)
        if not part.start:
            del self._entries[layer, part.sequence]

    def close(self, sequence: int) -> None:
        """Frees what is left of a sequence: layers below the first trainable weight have no backward."""
        for key in [key for key in self._entries if key[1] == sequence]:
            del self._entries[key]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def _heads_first(x_NGW: Tensor) -> Tensor:
    """Also the other way round."""
    return x_NGW.transpose(0, 1)


def _fill(place_NGW: Tensor, k_GND: Tensor, v_GNE: Tensor) -> None:
    for place, new in zip(split_kv(_heads_first(place_NGW), k_GND.shape[2]), (k_GND, v_GNE), strict=True):
        place.copy_(new)

"""Counts bytes of the K/V book: keys and values of sliced sequences and their gradients (`runtime/attention/kv_book.py`).

A layer that sees all tokens holds a sequence's keys and values from its first slice's forward to its first slice's backward. From
the last slice's backward on it also holds gradients of all tokens before that slice. A layer with a window w shorter than the
sequence holds every slice separately, from its forward to its backward: if the layer will be replayed, the slice's last w - 1
tokens, which later slices see (none of the last slice); if not, or after the replay, all tokens. It holds gradients of the last
w - 1 tokens before the slice that ran backward most recently. In a ring, a rank holds those of these tokens in its own block.

The book of states (`runtime/attention/state_book.py`) is counted with it. A layer with a state, with or without attention, holds
the state after a slice, if the sequence continues, from the slice's forward to its backward, and its gradient from the backward
of the next slice on. A layer with an index holds index keys of slices after which the sequence continues, to the end of the
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from hf_longctx.plan.core.sharding import head_shares, passes_states, sequence_ends, slice_pieces
from hf_longctx.plan.core.types import BoolArray, GroupShape, IntArray, SequenceGroup, StagePlan
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import ModelSpec


class BookMoments(NamedTuple):
    """Bytes of the K/V book in every pass of a round."""

    # bytes while the range's last layer runs, which is the first to run backward
    first: IntArray
    # bytes while the first layer runs backward (0 in a forward)
    last: IntArray
    # most bytes at any moment of the pass
    most: IntArray
    # bytes that other layer ranges of the stage hold during the pass
    others: IntArray
    # bytes of all layer ranges after the pass
    after: IntArray


class _Changes(NamedTuple):
    """Bytes by which each chunk changes one layer's K/V book: in its forward, in its replay, by gradients, and by freeing."""

    written: IntArray
    rewritten: IntArray
    left: IntArray
    gone: IntArray


class BookKinds(NamedTuple):
    """Kinds of a model's layers, and for each kind the bytes by which every chunk changes a layer's books.

    A kind has two entries, for layers that are not replayed and that are; a model with only full attention has one entry.
    """

    kinds: list[LayerKind]
    changes: list[_Changes]


def book_kinds(model: ModelSpec, group: SequenceGroup, position: int) -> BookKinds:
    """Returns changes of the book on the rank at `position` of the group, equal on every stage and under every policy."""
    block = group.shape.ulysses
    held = {sequence: _held(group, sequence, position // block) for sequence in sequence_ends(group.chunks)}
    kinds = [kind for kind, _ in model.kind_shares()]
    # replays make no difference if all layers see all tokens
    replays = (False,) if kinds == [ATTENTION] else (False, True)
    index_bytes = 0 if model.index.is_empty else model.index.head_dim * model.bytes_per_element
    states = _state_changes(group, _boundary_bytes(model, group.shape, position))
    changes = []
    for kind, is_replayed in ((kind, is_replayed) for kind in kinds for is_replayed in replays):
        found = _no_changes(group)
        if kind.attends:
            own = model.of_kind(kind)
            heads = head_shares(own.num_heads, own.num_kv_heads, block)[position % block].num_kv
            # bytes of a token's keys and values, and of their gradients, which are in at least fp32
            token_bytes = heads * own.kv_head_size * model.bytes_per_element
            gradient_bytes = heads * own.kv_head_size * max(4, model.bytes_per_element)
            found = _layer_changes(group, held, kind.window, is_replayed, (token_bytes, gradient_bytes, index_bytes))
        if kind.has_state:
            found = _Changes(*(one + other for one, other in zip(found, states, strict=True)))
        changes.append(found)
    return BookKinds(kinds, changes)


# number of first tokens of a sequence -> number of these in a rank's block
_Held = Callable[[int], int]


def _held(group: SequenceGroup, sequence: int, block: int) -> _Held:
    num_blocks = group.shape.num_blocks
    if num_blocks == 1:
        return lambda position: position
    chunks = [chunk for chunk in group.chunks if any(span.sequence == sequence for span in chunk.spans)]
    if len(chunks) == 1:
        return lambda position: position
    pieces = slice_pieces(chunks, sequence, num_blocks)[block]
    return lambda position: sum(min(piece.stop, position) - piece.start for piece in pieces if piece.start < position)


def _boundary_bytes(model: ModelSpec, shape: GroupShape, position: int) -> int:
    """Returns bytes of one layer's state at the end of a slice, on the rank at `position` of its group."""
    states, block = model.states, shape.ulysses
    heads = states.heads
    # ranks that pass on states have all heads
    if heads and not passes_states(shape.num_blocks, block, heads // states.scans):
        own = heads // states.scans
        heads = states.scans * head_shares(own, states.read_heads or own, block)[position % block].num_q
    return states.boundary_bytes(heads, model.bytes_per_element)


def book_moments(
    model: ModelSpec, stage: StagePlan, kinds: BookKinds, num_chunks: int, place: IntArray, is_forward: BoolArray
) -> BookMoments:
    """Returns bytes of the book in every pass of a round.

    place: chunk * layer ranges + layer range of each pass. is_forward: whether the pass is a forward.
    """
    num_ranges, (own_kinds, changes) = len(stage.layer_ranges), kinds
    first, last, most, change = (np.zeros_like(place) for _ in range(4))
    for layer_range, layers in enumerate(stage.layer_ranges):
        if len(changes) == 1:
            found = _equal_layers(changes[0], layers.num_layers)
        else:
            found = _layers_in_turn(changes, _layer_kinds(model, stage, layer_range, own_kinds, num_chunks))
        forward, backward, first_run, last_run, fullest = found
        own = slice(None) if num_ranges == 1 else place % num_ranges == layer_range
        chunk, goes_forward = place[own] // num_ranges, is_forward[own]
        change[own] = np.where(goes_forward, forward[chunk], backward[chunk])
        after = np.cumsum(change[own])
        before = after - change[own]
        first[own] = np.where(goes_forward, after, before + first_run[chunk])
        last[own] = np.where(goes_forward, 0, before + last_run[chunk])
        most[own] = np.where(goes_forward, after, before + fullest[chunk])
    after = np.cumsum(change)
    others = after.copy()
    for layer_range in range(num_ranges):
        own = place % num_ranges == layer_range
        others[own] -= np.cumsum(change[own])
    return BookMoments(first, last, most, others, after)


# bytes for every chunk: change by its forward, change by its backward; then, relative to the book before its backward, bytes
# while the first of its layers runs backward, while the last one does, and the most in between
_PassChanges = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]


def _equal_layers(changes: _Changes, num_layers: int) -> _PassChanges:
    """Returns changes of a layer range whose layers all see every token."""
    net = changes.left - changes.gone
    last_run = (num_layers - 1) * net + changes.left
    return num_layers * changes.written, num_layers * net, changes.left, last_run, np.maximum(changes.left, last_run)


def _layers_in_turn(changes: list[_Changes], kind_CL: IntArray) -> _PassChanges:
    """Returns changes of a layer range with layers of these kinds, [chunks, layers], which run one after the other."""
    known = np.array([list(each) for each in changes], dtype=np.int64).transpose(1, 0, 2)
    # last layer first
    written, rewritten, left, gone = known[:, kind_CL[:, ::-1], np.arange(len(kind_CL))[:, None]]
    net = rewritten + left - gone
    replayed = np.cumsum(net, axis=1) - net + rewritten
    running = replayed + left
    return written.sum(1), net.sum(1), running[:, 0], running[:, -1], np.maximum(replayed, running).max(1)


def _layer_kinds(model: ModelSpec, stage: StagePlan, layer_range: int, known_kinds: list[LayerKind], num_chunks: int) -> IntArray:
    """Returns the kind of every layer of a range for every chunk, [C, L]: 2 * index of its kind, plus 1 if it is replayed."""
    layers = stage.layer_ranges[layer_range]
    places = np.array([2 * known_kinds.index(kind) for kind in model.layer_kinds(layers)], dtype=np.int64)
    kinds = np.broadcast_to(places, (num_chunks, layers.num_layers)).copy()
    # equal layers are mostly one object
    known: dict[int, bool] = {}
    for policy in stage.activations:
        if policy.layer_range == layer_range:
            for layer in policy.layers:
                if id(layer) not in known:
                    known[id(layer)] = not layer.keeps_everything
            row = np.array([known[id(layer)] for layer in policy.layers[: layers.num_layers]], dtype=np.int64)
            kinds[policy.chunk, : len(row)] += row
    return kinds


def _no_changes(group: SequenceGroup) -> _Changes:
    """Makes changes of zero, to which others are added."""
    return _Changes(*(np.zeros(len(group.chunks), dtype=np.int64) for _ in _Changes._fields))


def _state_changes(group: SequenceGroup, num_bytes: int) -> _Changes:
    """Returns bytes by which every chunk's passes change the book of a layer whose state takes `num_bytes`."""
    ends, found = sequence_ends(group.chunks), _no_changes(group)
    for index, span in ((chunk.index, span) for chunk in group.chunks for span in chunk.spans):
        if span.start:
            found.left[index] += num_bytes
        if span.stop < ends[span.sequence]:
            found.written[index] += num_bytes
            # a state is freed with its gradient before the layer's backward leaves one for the state before
            found.rewritten[index] -= 2 * num_bytes
    return found


def _layer_changes(
    group: SequenceGroup,
    held: Mapping[int, _Held],
    window: int | None,
    is_replayed: bool,
    token_sizes: tuple[int, int, int],
) -> _Changes:
    """Returns bytes by which every chunk's passes change the book of a layer with this window (None: it sees all tokens).

    token_sizes: bytes of a token's keys and values, of their gradients, and of an index key, which every rank holds.
    """
    token_bytes, gradient_bytes, index_bytes = token_sizes
    ends = sequence_ends(group.chunks)
    last_starts = {
        span.sequence: span.start for chunk in group.chunks for span in chunk.spans if span.stop == ends[span.sequence]
    }
    found = _no_changes(group)
    for index, span in ((chunk.index, span) for chunk in group.chunks for span in chunk.spans):
        end, is_last, before = ends[span.sequence], span.stop == ends[span.sequence], held[span.sequence]
        if is_last and not span.start:
            continue
        if window is None and not is_last:
            found.written[index] += index_bytes * span.num_tokens
        if not window or window >= end:
            if not span.start:
                found.written[index] += token_bytes * before(end)
                found.gone[index] += token_bytes * before(end) + gradient_bytes * before(last_starts[span.sequence])
            elif is_last:
                found.left[index] += gradient_bytes * before(span.start)
            continue
        own = before(span.stop) - before(span.start)
        # tokens that a window shows before the start and the end of the slice
        front, later = (before(bound) - before(max(0, bound - window + 1)) for bound in (span.start, span.stop))
        seen = 0 if is_last else before(span.stop) - before(max(span.start, span.stop - window + 1))
        kept = seen if is_replayed else own
        found.written[index] += token_bytes * kept
        found.rewritten[index] += token_bytes * (own - kept)
        found.left[index] += gradient_bytes * (front - (0 if is_last else later))
        found.gone[index] += token_bytes * own
    return found

"""Counts bytes of chunks and rounds on a rank: those held between a forward and its backward, and the workspace beside them.

A chunk's *held* bytes stay from its forward to its backward, on the device or on the host. Its *workspace* is the most that one
of its passes needs beyond the bytes that are held when the forward is complete: a layer's replay and backward, or the loss
(`layer.py`). A round adds up the chunks in flight, keys and values of slices (`kv_book.py`), and the workspace of the running
action; `byte_model.py` counts both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from hf_longctx.plan.core.arrays import BoolArray, IntArray
from hf_longctx.plan.core.sharding import sequence_ends, shard_tokens
from hf_longctx.plan.core.types import (
    Chunk,
    SequenceGroup,
    StagePlan,
)
from hf_longctx.plan.memory.layer import Load


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes of one chunk on one rank.

    device, host: bytes held from its forward to its backward; the workspaces come on top of `device`. ending: all bytes of the
    chunk on the device in the backward of its first layer.
    """

    device: int
    host: int
    forward_workspace: int
    backward_workspace: int
    ending: int

    @property
    def workspace(self) -> int:
        return max(self.forward_workspace, self.backward_workspace)


class Passes:
    """Forwards and backwards of a stage, their chunks and parts."""

    def __init__(self, stage: StagePlan) -> None:
        self.actions = tuple(action for action in stage.actions if action.kind in ("F", "B"))
        self.is_forward: BoolArray = np.array([action.kind == "F" for action in self.actions], dtype=bool)
        self.chunks: IntArray = np.array([action.chunk for action in self.actions], dtype=np.int64)
        parts: IntArray = np.array([action.part for action in self.actions], dtype=np.int64)
        # chunk * parts + part of every pass
        self.cells: IntArray = self.chunks * len(stage.parts) + parts
        # cells whose backward comes directly after their forward
        behind = self.cells[1:] == self.cells[:-1]
        self.at_once = frozenset(self.cells[:-1][behind & self.is_forward[:-1]].tolist())


# numbers of a layer, and of everything outside the layers, from which a chunk's bytes are summed
LAYER_NUMBERS = attrgetter("held", "held_host", "forward", "backward", "input_host", "sent")
OUTSIDE_NUMBERS = attrgetter("shared", "head", "forward", "backward")


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """Bytes of one round on one rank.

    saved, host: most that chunks in flight hold on the device and on the host. book: most of keys, values and their gradients.
    workspace: largest workspace of an action. peak: most bytes on the device at one moment, at most the sum of the others.
    """

    saved: int
    host: int
    book: int
    workspace: int
    peak: int


@dataclass(frozen=True, slots=True, eq=False)
class RoundMoments:
    """Bytes of each pass of a round; fields as in `RoundBytes`."""

    saved: IntArray
    host: IntArray
    book: IntArray
    workspace: IntArray
    peak: IntArray

    @property
    def most(self) -> RoundBytes:
        """The largest of each over all passes."""
        return RoundBytes(*(int(getattr(self, one.name).max(initial=0)) for one in fields(RoundBytes)))


def chunk_numbers(layers: IntArray, outside: IntArray, receives: BoolArray) -> IntArray:
    """The numbers of `ChunkBytes` of many chunks on a part of the model, (chunks, 5).

    layers: `LAYER_NUMBERS` of every layer, (chunks, layers, 6). outside: `OUTSIDE_NUMBERS`, (chunks, 4). receives: see `Load`.
    """
    held, host, forward, backward, input_host, sent = np.moveaxis(layers, 2, 0)
    shared, head, loss_forward, loss_backward = outside.T
    # the model's forward holds the embeddings to its end, wherever the first layer's input is stored; hidden states of another
    # part stay until their gradient is there, while the model's own embeddings are freed after the forward
    waiting, embeddings = np.where(receives, input_host[:, 0], 0), np.where(receives, 0, input_host[:, 0])
    under = (shared + waiting)[:, None]
    upto = under + np.cumsum(held, axis=1)
    # a layer's own host tensors are back in its backward, and those of the layer that runs backward next arrive meanwhile
    arriving = host.copy()
    arriving[:, 1:] += host[:, :-1]
    # tensors on their way to the host take as much as one layer has sent; the device waits for them behind a layer that sends
    # nothing, and behind the last layer
    leaving, is_near = sent.max(axis=1), sent > 0
    is_near[:, 1:] |= sent[:, :-1] > 0
    # a layer's forward counts its own input already, which may be on its way
    most_forward = np.max(upto - held + forward - input_host + np.where(is_near, leaving[:, None], 0), axis=1)
    most_backward = np.max(upto + arriving + backward, axis=1)
    below = upto[:, -1]
    device = below + head
    most_forward = np.maximum(most_forward, below + loss_forward) + embeddings
    most_backward = np.maximum(most_backward, below + loss_backward)
    ending = under[:, 0] + held[:, 0] + host[:, 0] + backward[:, 0]
    work = (np.maximum(0, most - device) for most in (most_forward, most_backward))
    return np.stack([device, host.sum(axis=1), *work, ending], axis=1)


def chunk_load(group: SequenceGroup, chunk: Chunk, position: int, like: Load, ends: Mapping[int, int] | None = None) -> Load:
    """The rank's load of one chunk of its group, with the other settings of `like`. Documents are shared evenly.

    ends: length of every sequence of the group; a caller with many chunks computes it once.
    """
    shape, degree = group.shape, group.degree
    ends = sequence_ends(group.chunks) if ends is None else ends
    tokens = shard_tokens(chunk, shape)[position]
    slices = [span for span in chunk.spans if span.start or span.stop < ends[span.sequence]]
    return replace(
        like,
        num_tokens=tokens,
        documents=tuple(-(-span.num_tokens // degree) for span in chunk.spans) or (1,),
        front_tokens=-(-max((span.start for span in slices), default=0) // degree),
        sliced_tokens=min(tokens, sum(-(-span.num_tokens // degree) for span in slices)),
        is_shared=degree > 1,
        num_blocks=shape.num_blocks,
        block_ranks=shape.ulysses,
    )

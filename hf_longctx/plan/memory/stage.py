"""Counts bytes on the ranks of one pipeline stage: weights and optimizer states of its layers, chunks in flight, and messages.

The first stage has the embeddings, the last one the output head, as others before it have that share its work. If embedding and
head are tied, each of these stages holds a copy with its own states.

A chunk's *held* bytes stay from its forward to its backward, on the device or on the host. Its *workspace* is the most that one
of its passes needs besides the bytes held at the end of the forward: a layer's replay and backward, or the loss (`layer.py`). A
round adds up the chunks in flight, keys and values of slices (`kv_book.py`), and the workspace of the running action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from hf_longctx.plan.core.sharding import sequence_ends, shard_tokens
from hf_longctx.plan.core.types import (
    PASSES,
    Action,
    BoolArray,
    Chunk,
    IntArray,
    Parameters,
    SequenceGroup,
    StagePlan,
    frees_every_round,
    gathers_every_pass,
    keeps_node_copies,
    sums_every_backward,
)
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.model.model_spec import UPDATE_PART_BYTES, ModelSpec


def part_state_bytes(
    model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int
) -> int:
    """Returns bytes on a rank of `num_layers` layers' weights, gradients and Adam's states, shared by `shard_ranks` if sharded.

    Adam's states are two fp32 moments for each trained parameter, or fewer bytes with low-bit moments. Master weights add an fp32
    copy of each in half precision, and an fp32 sum of its gradients. Copies and moments may be on the host; see
    `host_state_bytes`.

    is_first, is_last: include the embedding and the head. Sharded states also need gathered tensors besides the shards: weights
    of embedding, head and two layers, or all weights if layers stay gathered, and gradients in flight (`summed_bytes`). When
    these are gone, the sums of half-precision gradients are rounded, and the optimizer reads them in fp32. Weights that autocast
    rounds are gathered in two bytes. If shards of layers are on the host during steps, the device has those of two layers, and
    needs `resting_bytes` otherwise. If nodes keep copies, a rank has its part of that of its node, and of the sums there, which
    make room for the rank's own sums when they cross nodes. Spread experts are not gathered. Frozen weights have neither
    gradients nor moments. Every rank holds all scales of packed weights, one unpacked matrix, and copies of one matrix's adapters
    on experts.
    """
    if model.keeps_all_stages:
        num_layers, is_first, is_last = model.num_layers, True, True
    weights, gradients, updates = _part_bytes(model, num_layers, is_first, is_last)
    beside = num_layers * model.packed.layer_scale_bytes
    beside += model.packed.unpacked_bytes + model.adapters.copied_bytes if num_layers else 0
    if parameters == "replicated":
        return weights + gradients + updates + beside
    unit_weights, _, _ = _part_bytes(model, min(num_layers, 2), is_first, is_last)
    gathers_layers = gathers_every_pass(parameters)
    if gathers_layers:
        # spread experts are not gathered
        unit_weights -= min(num_layers, 2) * model.experts.spread_parameters * model.bytes_per_element
    in_flight = summed_bytes(model, min(num_layers, 1), is_first, is_last, parameters, shard_ranks)
    rounded = 0 if model.updates_on_host else 2 * _num_half(model, num_layers, is_first, is_last)
    in_flight = max(in_flight, -(-rounded // shard_ranks))
    # gathered in addition to the shards, which keep their width
    gathered = unit_weights if gathers_layers else weights
    gathered -= model.rounded_bytes(min(num_layers, 2) if gathers_layers else num_layers, is_last)
    away = _layer_bytes(model, num_layers) - _layer_bytes(model, min(num_layers, 2)) if _leave(model, parameters) else 0
    own = weights - away + gradients - rounded + updates
    of_node = node_bytes(model, num_layers, is_first, is_last, parameters, shard_ranks)
    return -(-own // shard_ranks) + gathered + in_flight + beside + of_node


def node_bytes(model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int) -> int:
    """Returns bytes that copies on nodes add on a rank; 0 without them.

    It has a part of the copy of layers and a part of the sums. Its own sums need no room until these parts cross nodes.
    """
    if not keeps_node_copies(parameters):
        return 0
    trained, trained_bytes = trained_sizes(model, num_layers, is_first, is_last)
    copy, sums = _layer_bytes(model, num_layers) - model.rounded_bytes(num_layers, False), max(4 * trained, trained_bytes)
    return -(-(copy + sums) // model.node_ranks) - -(-sums // shard_ranks)


def resting_bytes(
    model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int
) -> int:
    """Returns bytes of the states on a rank outside of forwards and backwards, with shards of layers back; 0 if none leave.

    Memory of shards of two layers is included.
    """
    if not _leave(model, parameters):
        return 0
    whole = sum(_part_bytes(model, num_layers, is_first, is_last)) + _layer_bytes(model, min(num_layers, 2))
    return -(-whole // shard_ranks)


def host_layer_bytes(
    model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int
) -> int:
    """Returns bytes of host memory for shards of layers; `host_state_bytes` has those of weights that the host updates."""
    if not _leave(model, parameters):
        return 0
    own = _layer_bytes(model, num_layers)
    if model.updates_on_host:
        trained = own - min(own, num_layers * model.frozen_parameters * model.bytes_per_element)
        own -= trained if model.trains_layers else model.adapters.sizes(num_layers, False, False)[1]
    return -(-own // shard_ranks)


def layer_shard_bytes(model: ModelSpec, num_layers: int, parameters: Parameters, shard_ranks: int) -> int:
    """Returns bytes of the shards that leave the device while a step computes; 0 if none do."""
    return -(-_layer_bytes(model, num_layers) // shard_ranks) if _leave(model, parameters) else 0


def _sums_every_backward(model: ModelSpec, parameters: Parameters, is_first: bool, is_last: bool) -> bool:
    """Whether every backward of a stage reduce-scatters its gradients; the only stage has embedding and head."""
    return sums_every_backward(parameters, 1 if is_first and is_last and model.num_head_stages == 1 else 2)


def _leave(model: ModelSpec, parameters: Parameters) -> bool:
    return model.layers_on_host and parameters == "sharded"


def _layer_bytes(model: ModelSpec, num_layers: int) -> int:
    """Returns bytes of the weights of layers, before sharding, without spread experts."""
    weights, _, _ = _part_bytes(model, num_layers, False, False)
    return weights - num_layers * model.experts.spread_parameters * model.bytes_per_element


def accumulated_bytes(
    model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int
) -> int:
    """Returns bytes of gradients on a rank of a stage, besides its states, while a micro-batch runs several backwards.

    Unless every backward sums its gradients over ranks, only the last one does. Until then every rank has whole gradients of all
    weights, those of half-precision weights in fp32, and beside them those of the running backward, of a layer and the head. Last
    come those that others send.
    """
    if parameters == "replicated" or shard_ranks == 1 or _sums_every_backward(model, parameters, is_first, is_last):
        return 0
    flight = InFlight.of(model, min(num_layers, 1), is_first, is_last)
    trained, trained_bytes = trained_sizes(model, num_layers, is_first, is_last)
    spread = num_layers * model.spread_gradients
    whole = max(4 * (trained - spread), trained_bytes - spread * model.bytes_per_element)
    apart = flight.head + flight.layer if flight.layer < 4 * flight.layer_elements else 0
    beside = apart + flight.received(is_wide=True)
    counted = summed_bytes(model, min(num_layers, 1), is_first, is_last, parameters, shard_ranks)
    return max(0, whole + beside - counted)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Bytes of gradients that one backward makes, in its dtype: of a layer, its largest weight, embedding and head."""

    # number of elements of the layer, of embedding and head together, and of the larger of these two
    layer_elements: int
    outside_elements: int
    larger_elements: int
    layer: int
    largest: int
    embedding: int
    head: int
    # embedding and head together, which may be one
    outside: int
    # bytes of an element of a layer's gradients
    element: int

    @classmethod
    def of(cls, model: ModelSpec, num_layers: int, is_first: bool, is_last: bool) -> InFlight:
        """Counts them for a stage; gradients of weights that autocast rounds take two bytes. num_layers: at most one."""
        spread = num_layers * model.spread_gradients
        count, layer = trained_sizes(model, num_layers, False, False)
        count, layer = count - spread, layer - spread * model.bytes_per_element
        rounded, rounded_head = (model.trains_layers * model.rounded_bytes(*part) for part in ((num_layers, False), (0, is_last)))
        layer -= min(layer // 2, rounded)
        element = 2 if rounded else max(1, -(-layer // max(1, count)))
        largest = min(layer, model.largest_matrix * element)
        (of_head, head), (of_embedding, embedding) = (
            trained_sizes(model, 0, *ends) for ends in ((False, is_last), (is_first, False))
        )
        outside_count, outside = trained_sizes(model, 0, is_first, is_last)
        counts = count, outside_count, max(of_head, of_embedding)
        return cls(*counts, layer, largest, embedding, head - rounded_head, outside - rounded_head, element)

    def received(self, is_wide: bool) -> int:
        """Returns bytes that others send of the largest weight of a layer; is_wide: in fp32 or wider."""
        return self.largest * max(4, self.element) // self.element if is_wide else self.largest


def summed_bytes(
    model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int
) -> int:
    """Returns bytes of gradients in flight on a rank that sums them, besides its shards, while one layer's backward runs.

    num_layers: at most one. A layer's gradients arise while those of the layer before are sent, and the largest of them is
    received; those of the head wait meanwhile, for those of the embedding (`runtime/parameters/sums.py`), but are sent at once if
    several stages have it. Weights that stay
    gathered for a micro-batch send gradients in fp32. Those of embedding and head are copied if ranks cannot share their rows
    evenly.
    """
    flight = InFlight.of(model, num_layers, is_first, is_last)
    is_wide = frees_every_round(parameters)
    sent, outside = flight.layer, flight.outside
    if is_wide:
        sent, outside = max(4 * flight.layer_elements, sent), max(4 * flight.outside_elements, outside)
    received = flight.received(is_wide)
    largest_outside = max(flight.head, flight.embedding) * outside // max(1, flight.outside)
    copied = outside if outside > flight.outside or model.vocab_size % shard_ranks else 0
    share = model.node_ranks if keeps_node_copies(parameters) else shard_ranks
    sums, sums_outside = (-(-4 * count // share) for count in (flight.layer_elements, flight.larger_elements))
    of_layer = (0 if model.num_head_stages > 1 else flight.head) + flight.layer + sent + received + sums
    # beside what is left of the last layer, beside copies, and what others send of the copies
    at_end = max(flight.outside + max(sent + received, copied), outside + largest_outside)
    return max(of_layer, at_end + sums_outside)


def host_state_bytes(
    model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, parameters: Parameters, shard_ranks: int
) -> int:
    """Returns bytes of host memory for a rank's updates; 0 if they are on the device.

    Copies of the weights and two moments are fp32. Gradients and weights pass through pinned homes in their own dtype; gradients
    of one part of the weights are also in fp32 (`runtime/parameters/host_steps.py`).
    """
    if not model.updates_on_host:
        return 0
    if model.keeps_all_stages:
        num_layers, is_first, is_last = model.num_layers, True, True
    trained, trained_bytes = trained_sizes(model, num_layers, is_first, is_last)
    share = 1 if parameters == "replicated" else shard_ranks
    widened = 2 * update_part_bytes(model, num_layers, is_first, is_last, share) if trained_bytes < 4 * trained else 0
    return -(-(12 * trained + 2 * trained_bytes) // share) + widened


def update_part_bytes(model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, share: int) -> int:
    """Returns the most bytes of weights that a rank's update on the host moves at once.

    A part may be one large matrix, which is at most a layer, the embedding or the head.
    """
    _, trained_bytes = trained_sizes(model, num_layers, is_first, is_last)
    units = (min(num_layers, 1), False, False), (0, is_first, False), (0, False, is_last)
    largest = max(trained_sizes(model, *unit)[1] for unit in units)
    return min(-(-trained_bytes // share), max(UPDATE_PART_BYTES, -(-largest // share)))


def _part_bytes(model: ModelSpec, num_layers: int, is_first: bool, is_last: bool) -> tuple[int, int, int]:
    """Returns bytes of weights, of gradients, and of everything else for updates."""
    trained, trained_bytes = trained_sizes(model, num_layers, is_first, is_last)
    num_half = _num_half(model, num_layers, is_first, is_last)
    held = model.part_weight_bytes(num_layers, is_first, is_last) + (0 if model.adapters.is_empty else trained_bytes)
    held += model.tower_parameters * model.bytes_per_element * is_first
    if model.updates_on_host:
        # gradients add up in fp32, and are rounded when the sum is known
        return held, trained_bytes, 2 * num_half
    # without master weights, moments of a half-precision weight have its dtype
    wide = 8 * trained - 4 * num_half * (not model.has_master_weights)
    moments = math.ceil(model.moment_bytes * trained) or wide
    # fp32 sums of gradients, and master weights
    return held, trained_bytes, moments + 4 * num_half + 4 * num_half * model.has_master_weights


def _num_half(model: ModelSpec, num_layers: int, is_first: bool, is_last: bool) -> int:
    """Returns the number of trained parameters in half precision."""
    trained, trained_bytes = trained_sizes(model, num_layers, is_first, is_last)
    return max(0, 4 * trained - trained_bytes) // 2


def trained_sizes(model: ModelSpec, num_layers: int, is_first: bool, is_last: bool) -> tuple[int, int]:
    """Returns the number of trained parameters and their bytes: of adapters, or of all own weights that are not frozen.

    The first stage has those of towers, too.
    """
    part = num_layers, is_first, is_last
    count, num_bytes = model.adapters.sizes(*part)
    if model.adapters.is_empty:
        frozen = num_layers * model.frozen_parameters
        count = model.part_parameters(*part) - frozen
        num_bytes = model.part_weight_bytes(*part) - frozen * model.bytes_per_element
    of_towers = model.tower.trained_parameters * is_first
    return count + of_towers, num_bytes + of_towers * model.bytes_per_element


def most_in_flight(actions: Iterable[Action], size: Callable[[Action], int] = lambda action: 1) -> int:
    """Returns the most forwards of a stage that wait for their backward at one time; size: weight of each forward (1)."""
    waiting = most = 0
    for action in actions:
        if action.kind in ("F", "B"):
            waiting += size(action) if action.kind == "F" else -size(action)
            most = max(most, waiting)
    return most


def most_tokens_at_once(is_forward: BoolArray, chunks: IntArray, tokens: Sequence[int], num_ranges: int = 1) -> int:
    """Returns the most tokens of chunks in flight at one time, for the forwards and backwards of these chunks in order."""
    return int(tokens_at_once(is_forward, chunks, tokens, num_ranges).max(initial=0))


def tokens_at_once(is_forward: BoolArray, chunks: IntArray, tokens: Sequence[int], num_ranges: int = 1) -> IntArray:
    """Returns the tokens of chunks in flight after each of the forwards and backwards of these chunks in order.

    A chunk counts once, from its first forward to its last backward, on any number of layer ranges.
    """
    change = np.array(tokens, dtype=np.int64)[chunks]
    if num_ranges == 1:
        return np.cumsum(np.where(is_forward, change, -change))
    first, last = np.unique(chunks, return_index=True)[1], len(chunks) - 1 - np.unique(chunks[::-1], return_index=True)[1]
    ends = np.zeros(len(chunks), dtype=np.int64)
    ends[first], ends[last] = change[first], -change[last]
    return np.cumsum(ends)


def message_bytes(model: ModelSpec, stage: StagePlan, num_stages: int, num_tokens: int) -> int:
    """Returns bytes of messages that no chunk in flight holds, for chunks of at most `num_tokens` tokens on the rank.

    Each direction has a buffer for its next message before that arrives; so have ways to and from output heads on other
    stages, beside what is being sent there. A gradient that arrived stays while its backward runs; a gradient that is sent stays
    until the next one is sent.
    """
    if num_stages == 1:
        return 0
    has_ranges = len(stage.layer_ranges) > 1
    has_before, has_after = stage.stage > 0 or has_ranges, stage.stage < num_stages - 1 or has_ranges
    return (2 * has_before + 2 * has_after + 4 * (model.num_head_stages > 1)) * num_tokens * model.hidden_bytes


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes of one chunk on one rank."""

    # bytes held from forward to backward; workspaces come on top of `device`
    device: int
    host: int
    forward_workspace: int
    backward_workspace: int
    # all device bytes of the chunk during the backward of its first layer
    ending: int
    # bytes that may still be on their way to the host after its forward, until the next pass ends
    leaving: int = 0

    @property
    def workspace(self) -> int:
        return max(self.forward_workspace, self.backward_workspace)


class Passes:
    """Forwards and backwards of a stage, their chunks and layer ranges, and output heads of the last stage's chunks."""

    def __init__(self, stage: StagePlan) -> None:
        self.actions = tuple(action for action in stage.actions if action.kind in ("F", "B"))
        self.is_forward: BoolArray = np.array([action.kind == "F" for action in self.actions], dtype=bool)
        self.chunks: IntArray = np.array([action.chunk for action in self.actions], dtype=np.int64)
        self.layer_ranges: IntArray = np.array([action.layer_range for action in self.actions], dtype=np.int64)
        # chunk * layer ranges + layer range of every pass
        self.cells: IntArray = self.chunks * len(stage.layer_ranges) + self.layer_ranges
        # cells with the backward directly after the forward
        behind = self.cells[1:] == self.cells[:-1]
        self.at_once = frozenset(self.cells[:-1][behind & self.is_forward[:-1]].tolist())
        num_ranges, num_passes = len(stage.layer_ranges), 0
        # chunk of every output head, with the number of the forward or backward before it
        self.heads: list[tuple[int, int]] = []
        # chunks whose hidden states the last layer range sends: on the last stage, those whose head another stage runs
        sent_on: set[int] = set()
        for action in stage.actions:
            num_passes += action.kind in ("F", "B")
            if action.kind == "H":
                self.heads.append((action.chunk, num_passes - 1))
            elif action.kind == "SF" and action.layer_range == num_ranges - 1:
                sent_on.add(action.chunk)
        self.sent_on = frozenset(sent_on)
        # with output heads
        self.with_heads = tuple(action for action in stage.actions if action.kind in PASSES) if self.heads else self.actions


# numbers of a layer, and of everything outside the layers, from which a chunk's bytes are summed
LAYER_NUMBERS = attrgetter("held", "held_host", "forward", "backward", "input_host", "sent")
OUTSIDE_NUMBERS = attrgetter("shared", "head", "forward", "backward")


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """Bytes of one round on one rank."""

    # peak of what chunks in flight hold on the device and on the host
    saved: int
    host: int
    # peak of keys, values and their gradients
    book: int
    # largest workspace of an action
    workspace: int
    # peak of all together on the device, with tensors of the pass before that are leaving for the host
    peak: int


@dataclass(frozen=True, slots=True, eq=False)
class RoundMoments:
    """Bytes of each pass of a round; fields as in `RoundBytes`."""

    saved: IntArray
    host: IntArray
    book: IntArray
    workspace: IntArray
    peak: IntArray
    # bytes that stay after each pass, (3, passes): saved tensors on the device, on the host, and the book
    after: IntArray
    # the peak without tensors that leave and without output heads
    alone: IntArray
    # bytes that are on their way to the host after each pass, and so a part of the peak of the next one, if that is a backward
    leaving: IntArray
    # bytes of the largest output head that runs after each pass
    heads: IntArray
    is_forward: BoolArray

    @property
    def most(self) -> RoundBytes:
        """Returns the largest of each over all passes."""
        return RoundBytes(*(int(getattr(self, one.name).max(initial=0)) for one in fields(RoundBytes)))


def joined_moments(rounds: Sequence[RoundMoments], turns: IntArray) -> RoundMoments:
    """Returns bytes of rounds that one rank runs in turns, in each pass: those of its round and what stays of the others.

    turns: the round of each pass, in running order.
    """
    num_passes = len(turns)
    saved, host, book, workspace, alone, leaving, heads = np.zeros((7, num_passes), dtype=np.int64)
    is_forward = np.zeros(num_passes, dtype=bool)
    after = np.zeros((3, num_passes), dtype=np.int64)
    for index, own in enumerate(rounds):
        places = np.flatnonzero(turns == index)
        # nothing stays after a round
        stays = np.concatenate([own.after[:, :-1], np.zeros((3, 1), dtype=np.int64)], axis=1)
        change = np.zeros((3, num_passes), dtype=np.int64)
        change[:, places] = np.diff(stays, axis=1, prepend=0)
        held = np.cumsum(change, axis=1)
        after += held
        # a pass of this round adds its own moment, and every other pass what the round holds then
        others = turns != index
        for target, of_pass, stays_then in zip((saved, host, book), (own.saved, own.host, own.book), held, strict=True):
            target[places] += of_pass
            target[others] += stays_then[others]
        workspace[places], is_forward[places] = own.workspace, own.is_forward
        # the pass that follows, beside which tensors leave, may be that of another round
        leaving[places], heads[places] = own.leaving, own.heads
        alone[places] += own.alone
        alone[others] += (held[0] + held[2])[others]
    peak = peak_with_leaving(after, alone, leaving, heads, is_forward)
    return RoundMoments(saved, host, book, workspace, peak, after, alone, leaving, heads, is_forward)


def peak_with_leaving(after: IntArray, alone: IntArray, leaving: IntArray, heads: IntArray, is_forward: BoolArray) -> IntArray:
    """Returns the peak of every pass, given the other fields of `RoundMoments`."""
    before = np.concatenate([[0], leaving[:-1]])[: len(leaving)]
    # before a forward, all tensors have left
    peak = alone + np.where(is_forward, 0, before)
    found: IntArray = np.where(heads > 0, np.maximum(peak, after[0] + after[2] + heads + leaving), peak)
    return found


def chunk_numbers(layers: IntArray, outside: IntArray, receives: BoolArray, leaving_layers: IntArray) -> IntArray:
    """Computes the numbers of `ChunkBytes` of many chunks on a part of the model, (chunks, 6).

    layers: `LAYER_NUMBERS` of every layer, (chunks, layers, 6). outside: `OUTSIDE_NUMBERS`, (chunks, 4). receives: see `Load`.
    leaving_layers: see `ActivationPolicy`.
    """
    held, host, forward, backward, input_host, sent = np.moveaxis(layers, 2, 0)
    shared, head, loss_forward, loss_backward = outside.T
    # the model's forward holds the embeddings to its end, even if the first layer's input is stored elsewhere; hidden states of
    # another part stay until their gradient arrives, while the model's own embeddings are freed after the forward
    waiting, embeddings = np.where(receives, input_host[:, 0], 0), np.where(receives, 0, input_host[:, 0])
    under = (shared + waiting)[:, None]
    upto = under + np.cumsum(held, axis=1)
    # a layer's own host tensors are back in its backward, while those of the next one arrive
    arriving = host.copy()
    arriving[:, 1:] += host[:, :-1]
    # tensors in flight to the host take as much as one layer has sent; the device waits for them after a layer that sends
    # nothing, and after the last layer. If several layers may be in flight, it waits for none of these
    lags = leaving_layers > 1
    leaving, is_near = np.minimum(leaving_layers * sent.max(axis=1), sent.sum(axis=1)), sent > 0
    is_near[:, 1:] |= sent[:, :-1] > 0
    is_near |= lags[:, None]
    # a layer's forward already counts its own input, which may be in flight
    most_forward = np.max(upto - held + forward - input_host + np.where(is_near, leaving[:, None], 0), axis=1)
    most_backward = np.max(upto + arriving + backward, axis=1)
    below = upto[:, -1]
    device = below + head
    most_forward = np.maximum(most_forward, below + loss_forward + np.where(lags, leaving, 0)) + embeddings
    most_backward = np.maximum(most_backward, below + loss_backward)
    ending = under[:, 0] + held[:, 0] + host[:, 0] + backward[:, 0]
    work = (np.maximum(0, most - device) for most in (most_forward, most_backward))
    return np.stack([device, host.sum(axis=1), *work, ending, np.where(lags, leaving, 0)], axis=1)


def chunk_load(group: SequenceGroup, chunk: Chunk, position: int, like: Load, ends: Mapping[int, int] | None = None) -> Load:
    """Makes the rank's load of one chunk of its group, with the other settings of `like`. Documents are divided evenly.

    ends: length of every sequence of the group, for callers with many chunks.
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

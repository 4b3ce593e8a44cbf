"""Counts the bytes of one model on a rank: its states, chunks and rounds, and the longest document that fits.

This is the counterpart of `CostModel`. Planning a step needs the same chunks, layers and stages again and again, so results are
cached by value: every value gets a number (`_Numbers`), and results are stored under these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hf_longctx.plan.core.settings import ActivationBudget
from hf_longctx.plan.core.sharding import sequence_ends
from hf_longctx.plan.core.types import (
    LEAST_TILE_TOKENS,
    TILE_SIZES,
    Action,
    ActivationPolicy,
    BoolArray,
    Chunk,
    GroupShape,
    IntArray,
    LayerPolicy,
    LayerRange,
    Parameters,
    SequenceGroup,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.memory.kv_book import BookKinds, BookMoments, book_kinds, book_moments
from hf_longctx.plan.memory.layer import (
    HybridLayerBytes,
    LayerBytes,
    Load,
    OutsideBytes,
    PiecedLayerBytes,
    StateLayerBytes,
    UnmixedLayerBytes,
)
from hf_longctx.plan.memory.stage import (
    LAYER_NUMBERS,
    OUTSIDE_NUMBERS,
    ChunkBytes,
    Passes,
    RoundMoments,
    accumulated_bytes,
    chunk_load,
    chunk_numbers,
    host_layer_bytes,
    host_state_bytes,
    part_state_bytes,
    peak_with_leaving,
    resting_bytes,
)
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import ModelSpec

_KEEPS_EVERYTHING = LayerPolicy()

# passes in which a bound on a peak counts bytes
_MOST_GUESSES = 6
# bytes, counted or guessed
Numbers = np.ndarray[Any, np.dtype[Any]]


class _Numbers:
    """Assigns numbers to values; equal values get equal numbers.

    Hashing and comparing a long plan takes longer than counting its bytes, so each object is compared only once. After that it is
    kept alive and found by its address.
    """

    def __init__(self) -> None:
        self._of_values: dict[Hashable, int] = {}
        self._of_objects: dict[int, tuple[Hashable, int]] = {}

    def of(self, value: Hashable) -> int:
        """Returns the number of a value that lives longer than the call."""
        found = self._of_objects.get(id(value))
        if found is None:
            found = self._of_objects[id(value)] = value, self.of_key(value)
        return found[1]

    def of_key(self, key: Hashable) -> int:
        """Returns the number of a value that exists only for this call."""
        return self._of_values.setdefault(key, len(self._of_values))

    def of_layers(self, layers: tuple[LayerPolicy, ...]) -> int:
        """Returns the number of a chunk's layer policies, most of which are the same object."""
        found = self._of_objects.get(id(layers))
        if found is None:
            found = self._of_objects[id(layers)] = layers, self.of_key(("layers", *map(self.of, layers)))
        return found[1]


@dataclass(frozen=True, slots=True)
class _Loads:
    """Loads of a group's chunks on one rank, with the number of each load and of the whole list."""

    loads: list[Load]
    numbers: list[int]
    number: int


class _Counted:
    """Cache of everything that a `ByteModel` has counted so far."""

    def __init__(self) -> None:
        self.numbers = _Numbers()
        self.passes: dict[tuple[int, int], tuple[tuple[Action, ...], Passes]] = {}
        self.books: dict[tuple[int, GroupShape, int], BookKinds] = {}
        self.loads: dict[tuple[int, GroupShape, int, bool], _Loads] = {}
        self.kinds: dict[LayerRange, tuple[LayerKind, ...]] = {}
        # chunks on one layer range of a stage, and their policies by id
        self.layer_ranges: dict[Hashable, IntArray] = {}
        self.policies: dict[Hashable, tuple[tuple[ActivationPolicy, ...], list[_Policy], int]] = {}
        # layers with their rows in a table of `LAYER_NUMBERS`; rows of all layers of a chunk, and of one without a policy
        self.layers: dict[tuple[int, int, int, LayerKind], tuple[LayerBytes, int]] = {}
        # bytes of layers that do not depend on policies, by load and tokens per tile
        self.of_loads: dict[tuple[int, int, LayerKind], dict[str, Any]] = {}
        self.rows: dict[tuple[int, int, int, int], list[int]] = {}
        self.table: IntArray = np.empty((0, 6), dtype=np.int64)
        self.new_rows: list[tuple[int, ...]] = []
        self.outside: dict[tuple[int, bool, bool, int], tuple[int, ...]] = {}
        # moments of a group on one stage, by the ids of its chunks and of the stage
        self.moments: dict[Hashable, tuple[tuple[Chunk, ...], StagePlan, RoundMoments]] = {}
        # states of stages, and gradients that wait on them
        self.stages: dict[Hashable, int] = {}
        # bytes of output heads on other stages than the last one, by tokens
        self.heads: dict[int, int] = {}
        # peaks of groups that keep everything, by shape and lengths
        self.kept: dict[tuple[GroupShape, tuple[int, ...]], int] = {}


@dataclass(frozen=True, slots=True)
class ByteModel:
    """Predicts bytes of `model` on a rank. Make one per planned step, since it caches everything that it counts."""

    model: ModelSpec
    _counted: _Counted = field(default_factory=_Counted, init=False, repr=False, compare=False)

    def states(self, parameters: Parameters = "replicated", shard_ranks: int = 1) -> int:
        """Returns bytes on a rank of all weights, gradients and Adam's states, shared by `shard_ranks` ranks if sharded."""
        return self._once(part_state_bytes, self.model.num_layers, True, True, parameters, shard_ranks)

    def accumulated(self, parameters: Parameters, shard_ranks: int) -> int:
        """Returns bytes of whole gradients on a rank without stages whose group runs several backwards in a micro-batch."""
        return accumulated_bytes(self.model, self.model.num_layers, True, True, parameters, shard_ranks)

    def host_states(self, parameters: Parameters = "replicated", shard_ranks: int = 1) -> int:
        """Returns bytes of optimizer states, and of shards of layers, in the host memory of a rank without stages."""
        part = self.model.num_layers, True, True, parameters, shard_ranks
        return host_state_bytes(self.model, *part) + host_layer_bytes(self.model, *part)

    def stage_states(self, stage: StagePlan, plan: StepPlan) -> int:
        """Returns bytes of the states on a rank of one stage of the plan."""
        return self._of_stage(part_state_bytes, stage, plan)

    def stage_waiting(self, stage: StagePlan, plan: StepPlan) -> int:
        """Returns bytes of whole gradients on a rank of one stage, from its first to its last backward of a micro-batch."""
        return self._of_stage(accumulated_bytes, stage, plan)

    def _of_stage(self, count: Callable[..., int], stage: StagePlan, plan: StepPlan) -> int:
        """Returns the result of `count` for one stage of the plan, computed once for equal stages."""
        is_first, is_last = stage.stage == 0, self.model.has_head(stage.stage, plan.num_stages)
        return self._once(count, stage.num_layers, is_first, is_last, plan.parameters, plan.block_ranks)

    def _once(self, count: Callable[..., int], *part: Hashable) -> int:
        """Returns the result of `count` for a part of the model, computed once."""
        known, key = self._counted.stages, (count, part)
        if key not in known:
            known[key] = count(self.model, *part)
        return known[key]

    def most_states(
        self, ranges: Sequence[Sequence[LayerRange]], parameters: Parameters, shard_ranks: int, on_host: bool = False
    ) -> int:
        """Returns bytes of states on a rank of the fullest stage, given the layers of every stage. on_host: those on its host."""
        kinds = (host_state_bytes, host_layer_bytes) if on_host else (part_state_bytes,)
        return self._most(ranges, parameters, shard_ranks, *kinds)

    def resting(self, parameters: Parameters, shard_ranks: int, ranges: Sequence[Sequence[LayerRange]] = ()) -> int:
        """Returns bytes of states between computations on a rank of the fullest stage, if shards of layers come back; else 0.

        ranges: layers of every stage; none if there is one stage.
        """
        return self._most(ranges or [[LayerRange(0, self.model.num_layers)]], parameters, shard_ranks, resting_bytes)

    def _most(
        self, ranges: Sequence[Sequence[LayerRange]], parameters: Parameters, shard_ranks: int, *kinds: Callable[..., int]
    ) -> int:
        """Returns the sum of these counts for a rank of the stage where it is largest."""
        counts = [sum(part.num_layers for part in own) for own in ranges]
        has_head = [self.model.has_head(stage, len(counts)) for stage in range(len(counts))]
        parts = [(count, stage == 0, has_head[stage], parameters, shard_ranks) for stage, count in enumerate(counts)]
        return max(sum(count_bytes(self.model, *part) for count_bytes in kinds) for part in parts)

    def kept_tokens(self, device_bytes: int, is_shared: bool = False) -> int:
        """Returns the most tokens of one document that a rank can keep, with workspace, in `device_bytes` besides the states.

        is_shared: see `Load`.
        """
        return _kept_tokens(self.model, device_bytes, is_shared)

    def budget(
        self, device_bytes: int, host_bytes: int, tile_tokens: int | None = None, is_shared: bool = False
    ) -> ActivationBudget:
        """Makes the budget of a rank with these bytes of the device besides the states, and of the host. is_shared: see `Load`.

        tile_tokens: None for the result of the method `tile_tokens`.
        """
        tile = self.tile_tokens(device_bytes) if tile_tokens is None else tile_tokens
        return ActivationBudget(self.kept_tokens(device_bytes, is_shared), device_bytes, host_bytes, tile)

    def tile_tokens(self, device_bytes: int) -> int:
        """Returns tokens per tile of norms and MLP for a rank with these bytes besides the states.

        A device computes a tile of few tokens faster than its host starts the kernels. So tiles are as large as possible while
        inner tensors and gradients of an MLP's tile in backward take at most a thirty-second of the memory.
        """
        element = self.model.bytes_per_element
        token_bytes = 8 * element * max(self.model.intermediate_size, self.model.hidden_size)
        fitting = (tile for tile in TILE_SIZES if tile * token_bytes <= device_bytes // 32)
        return next(fitting, LEAST_TILE_TOKENS)

    def chunk(self, load: Load, policy: ActivationPolicy | None = None, loss_tile_tokens: int = 0) -> ChunkBytes:
        """Returns bytes that one chunk holds and works with under `policy`; without a policy everything is kept.

        loss_tile_tokens: tokens per tile of the loss only, for a policy without tiles.
        """
        tile_tokens = policy.tile_tokens if policy else 0
        policies = [*(policy.layers if policy else ()), *[_KEEPS_EVERYTHING] * load.num_layers][: load.num_layers]
        # equal layers are mostly one object, so each object is counted once
        kinds = self._kinds(LayerRange(0, load.num_layers))
        each = [(id(layer), kind) for layer, kind in zip(policies, kinds, strict=True)]
        distinct = dict(zip(each, policies, strict=True))
        counted = {key: LAYER_NUMBERS(self._counted_layer(load, layer, tile_tokens, key[1])) for key, layer in distinct.items()}
        outside = OutsideBytes(self.model, load, (tile_tokens or loss_tile_tokens) if load.tiles_loss else 0)
        # calibration measures a model with only embedding and head
        layers = [counted[key] for key in each] or [(0,) * 6]
        found = chunk_numbers(
            np.array([layers], dtype=np.int64),
            np.array([OUTSIDE_NUMBERS(outside)], dtype=np.int64),
            np.array([load.receives]),
            np.array([policy.leaving_layers if policy else 1], dtype=np.int64),
        )
        return ChunkBytes(*found[0].tolist())

    def longest(
        self,
        device_bytes: int,
        host_bytes: int,
        policies: Callable[[int], Iterable[ActivationPolicy | None]],
        like: Load,
        loss_tile_tokens: int = 0,
    ) -> int:
        """Finds the most tokens of one document on one rank for which a policy fits, by doubling and bisection.

        policies: returns the policies to try for a number of tokens; a policy of None keeps everything. like: a load with all
        settings except tokens. loss_tile_tokens: see `chunk`.
        """

        def fits(num_tokens: int) -> bool:
            load = replace(like, num_tokens=num_tokens, documents=(num_tokens,))
            found = (self.chunk(load, policy, loss_tile_tokens) for policy in policies(num_tokens))
            return any(one.device + one.workspace <= device_bytes and one.host <= host_bytes for one in found)

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def kept_peak(self, group: SequenceGroup) -> int:
        """Returns the peak on the first rank of a group that runs its one chunk over all layers at once and keeps everything.

        Equals the peak of `moments`, but faster, since most groups of a plain run are like this.
        """
        (chunk,) = group.chunks
        known, key = self._counted.kept, (group.shape, tuple([span.num_tokens for span in chunk.spans]))
        if key not in known:
            known[key] = self._kept(chunk_load(group, chunk, 0, Load(0, (), self.model.num_layers)))
        return known[key]

    def kept_bytes(self, num_tokens: int, is_shared: bool = False) -> int:
        """Returns the peak of one document with `num_tokens` tokens on a rank that keeps everything. is_shared: see `Load`."""
        return self._kept(replace(Load.document(num_tokens, self.model.num_layers), is_shared=is_shared))

    def _kept(self, load: Load) -> int:
        """Returns the peak of a whole chunk that is kept. All layers hold equally much, so the last one reaches the peak."""
        if not self.model.states.is_empty or self.model.heads:
            found = self.chunk(load)
            return found.device + found.workspace
        layer, outside = LayerBytes(self.model, load, _KEEPS_EVERYTHING, 0), OutsideBytes(self.model, load, 0)
        below = outside.shared + load.num_layers * layer.held
        forward = max(below - layer.held + layer.forward, below + outside.forward)
        return max(below + outside.head, forward, below + max(layer.backward, outside.backward))

    def moments(
        self,
        group: SequenceGroup,
        stage: StagePlan,
        position: int = 0,
        tiles_loss: bool = True,
        waiting: int = 0,
    ) -> RoundMoments:
        """Returns bytes that the rank at `position` of the group holds and works with in each F and B of the stage, in order.

        Slices run forward in order and backward in reverse order. waiting: bytes of whole gradients after the first backward.
        """
        # stores the objects with their moments, so that their ids are not reused
        known, key = self._counted.moments, (id(group.chunks), group.shape, id(stage), position, tiles_loss)
        if key not in known:
            known[key] = group.chunks, stage, self._moments(group, stage, position, tiles_loss)
        found = known[key][2]
        return replace(found, peak=found.peak + _waits(self.passes(stage).is_forward, waiting)) if waiting else found

    def _moments(self, group: SequenceGroup, stage: StagePlan, position: int, tiles_loss: bool) -> RoundMoments:
        """Returns the `moments` without waiting gradients."""
        passes, loads = self.passes(stage), self._group_loads(group, position, tiles_loss)
        chunks = self._range_chunks(group, stage, loads, tiles_loss)
        place, is_forward = passes.cells, passes.is_forward
        numbers = chunks[place].T
        device, host, forward_workspace, backward_workspace, _, left = numbers
        saved, on_host = _in_flight(device, is_forward), _in_flight(host, is_forward)
        book = book_moments(self.model, stage, self._book(group, position), len(group.chunks), place, is_forward)
        work = np.where(is_forward, forward_workspace, backward_workspace)
        after = np.stack([_after(device, is_forward), _after(host, is_forward), book.after])
        leaving, heads = np.where(is_forward, left, 0), np.zeros_like(device)
        for chunk, before in passes.heads:
            heads[before] = max(heads[before], self._head_bytes(loads.loads[chunk]))
        work, alone = np.maximum(work, heads), _peak(numbers, saved, is_forward, book)
        peak, books = peak_with_leaving(after, alone, leaving, heads, is_forward), book.most + book.others
        return RoundMoments(saved, on_host, books, work, peak, after, alone, leaving, heads, is_forward)

    def _head_bytes(self, load: Load) -> int:
        """Returns bytes of an output head that runs forward and backward at once, in tiles, on hidden states of another stage."""
        key = load.num_tokens
        if key not in self._counted.heads:
            own = replace(load, has_head=True, keeps_gradients=True)
            outside = OutsideBytes(self.model, own, LEAST_TILE_TOKENS)
            self._counted.heads[key] = outside.shared + max(outside.head, outside.forward, outside.backward)
        return self._counted.heads[key]

    def least_peak(self, group: SequenceGroup, stage: StagePlan, waiting: int = 0) -> int:
        """Returns a lower bound on the peak of `moments` on the first rank: the peak of a few passes that probably need most.

        Bytes of a few chunks are counted, and those of others guessed by their tokens. At the highest guess, all chunks in flight
        are counted, and so on. For many chunks this takes a tenth of the time, and mostly finds the peak.
        """
        passes, loads, num_ranges = self.passes(stage), self._group_loads(group, 0, True), len(stage.layer_ranges)
        place, is_forward = passes.cells, passes.is_forward
        book = book_moments(self.model, stage, self._book(group, 0), len(group.chunks), place, is_forward)
        waits = _waits(is_forward, waiting)
        # passes of the forward and of the backward of every cell
        begins, ends = (passed[np.argsort(place[passed])] for passed in map(np.flatnonzero, (is_forward, ~is_forward)))

        def counted(chunks: IntArray) -> IntArray:
            of_ranges = (
                self._chunks_of(group, stage, layer_range, loads, True, chunks.tolist()) for layer_range in range(num_ranges)
            )
            return np.stack(list(of_ranges), axis=1)

        tokens = np.array([load.num_tokens for load in loads.loads])
        order = np.argsort(tokens, kind="stable")
        sample = order[np.unique([0, len(order) // 2, len(order) - 1])]
        known = counted(sample)
        numbers = np.empty((len(tokens), num_ranges, 6))
        for layer_range, number in np.ndindex(num_ranges, 6):
            numbers[:, layer_range, number] = np.interp(tokens, tokens[sample], known[:, layer_range, number])
        numbers[sample], is_guess = known, ~np.isin(np.arange(len(tokens)), sample)
        moments: list[int] = []
        while True:
            own = numbers.reshape(-1, 6)[place].T
            peak = _peak(own, _in_flight(own[0], is_forward), is_forward, book) + waits
            moment = int(np.argmax(peak))
            in_flight = np.unique(np.flatnonzero((begins <= moment) & (moment <= ends)) // num_ranges)
            guessed = in_flight[is_guess[in_flight]]
            if not len(guessed):
                moments.append(moment)
            if not len(guessed) or len(moments) == _MOST_GUESSES:
                return max(int(peak[each]) for each in moments)
            numbers[guessed], is_guess[guessed] = counted(guessed), False
            moments.append(moment)

    def passes(self, stage: StagePlan) -> Passes:
        """Returns forwards and backwards of the stage, which do not depend on its policies."""
        key = id(stage.actions), len(stage.layer_ranges)
        if key not in self._counted.passes:
            # stores the actions too, so that their id is not reused
            self._counted.passes[key] = stage.actions, Passes(stage)
        return self._counted.passes[key][1]

    def loads(self, group: SequenceGroup, position: int) -> list[Load]:
        """Returns loads of the group's chunks on one rank, which are equal on every layer range of the model."""
        return self._group_loads(group, position, True).loads

    def layer(self, load: Load, policy: LayerPolicy, tile_tokens: int, kind: LayerKind = ATTENTION) -> LayerBytes:
        """Returns bytes of one layer of a load."""
        return self._layer(load, self._counted.numbers.of(load), policy, tile_tokens, kind)[0]

    def kinds(self) -> set[LayerKind]:
        """Returns the kinds of the model's layers."""
        return set(self._kinds(LayerRange(0, self.model.num_layers)))

    def _kinds(self, layer_range: LayerRange) -> tuple[LayerKind, ...]:
        """Returns the kind of each layer of a layer range, without windows, which do not change bytes of layers."""
        known = self._counted.kinds
        if layer_range not in known:
            kinds = self.model.layer_kinds(layer_range) or (ATTENTION,) * layer_range.num_layers
            found = (LayerKind(None if kind.attends else 0, kind.has_state, kind.heads) for kind in kinds)
            # equal kinds are one object
            own: dict[LayerKind, LayerKind] = {}
            known[layer_range] = tuple(own.setdefault(kind, kind) for kind in found)
        return known[layer_range]

    def _book(self, group: SequenceGroup, position: int) -> BookKinds:
        """Returns changes of the K/V book by the group's chunks."""
        key = self._counted.numbers.of(group.chunks), group.shape, position
        if key not in self._counted.books:
            self._counted.books[key] = book_kinds(self.model, group, position)
        return self._counted.books[key]

    def _group_loads(self, group: SequenceGroup, position: int, tiles_loss: bool) -> _Loads:
        numbers, known = self._counted.numbers, self._counted.loads
        key = numbers.of(group.chunks), group.shape, position, tiles_loss
        if key not in known:
            common = Load(0, (), 0, tiles_loss=tiles_loss)
            ends = sequence_ends(group.chunks)
            found = [chunk_load(group, chunk, position, common, ends) for chunk in group.chunks]
            own = [numbers.of(load) for load in found]
            known[key] = _Loads(found, own, numbers.of_key(("loads", *own)))
        return known[key]

    def _layer(
        self, load: Load, load_number: int, policy: LayerPolicy, tile_tokens: int, kind: LayerKind
    ) -> tuple[LayerBytes, int]:
        """Returns bytes of a layer, and its row in the table."""
        policy = policy if policy.shares else _KEEPS_EVERYTHING
        known, key = self._counted.layers, (load_number, self._counted.numbers.of(policy), tile_tokens, kind)
        if key not in known:
            of_load = self._counted.of_loads.setdefault((load_number, tile_tokens, kind), {})
            found = self._counted_layer(load, policy, tile_tokens, kind, of_load)
            known[key] = found, len(known)
            self._counted.new_rows.append(LAYER_NUMBERS(found))
        return known[key]

    def _counted_layer(
        self, load: Load, policy: LayerPolicy, tile_tokens: int, kind: LayerKind, of_load: dict[str, Any] | None = None
    ) -> LayerBytes:
        """Counts the bytes of a layer. of_load: see `LayerBytes`."""
        model = self.model.of_kind(kind)
        if policy.head_pieces > 1 and kind.attends:
            return PiecedLayerBytes(model, load, policy, tile_tokens)
        if not kind.has_state:
            return (LayerBytes if kind.attends else UnmixedLayerBytes)(model, load, policy, tile_tokens, of_load)
        mixer = StateLayerBytes(model, load, policy, tile_tokens)
        return HybridLayerBytes(model, load, policy, tile_tokens, mixer) if kind.attends else mixer

    def _layer_rows(self, load: Load, load_number: int, policy: _Policy, kinds: tuple[LayerKind, ...]) -> list[int]:
        """Returns the table rows of all layers of a load, including layers without a policy."""
        known, key = self._counted.rows, (load_number, policy.number, policy.tile_tokens, self._counted.numbers.of(kinds))
        if key not in known:
            layers = [*policy.layers, *[_KEEPS_EVERYTHING] * len(kinds)]
            # equal layers are mostly one object, and so are their kinds
            each = list(zip(map(id, layers), map(id, kinds), strict=False))
            distinct = dict(zip(each, zip(layers, kinds, strict=False), strict=True))
            row = {
                own: self._layer(load, load_number, layer, policy.tile_tokens, kind)[1] for own, (layer, kind) in distinct.items()
            }
            known[key] = list(map(row.__getitem__, each))
        return known[key]

    def _table(self) -> IntArray:
        """Returns `LAYER_NUMBERS` of every layer counted so far."""
        counted = self._counted
        if counted.new_rows:
            counted.table = np.concatenate([counted.table, np.array(counted.new_rows, dtype=np.int64)])
            counted.new_rows.clear()
        return counted.table

    def _outside(self, load: Load, load_number: int, has_head: bool, keeps_gradients: bool, tile_tokens: int) -> tuple[int, ...]:
        """Returns `OUTSIDE_NUMBERS` of a load."""
        known, key = self._counted.outside, (load_number, has_head, keeps_gradients, tile_tokens)
        if key not in known:
            own = replace(load, has_head=has_head, keeps_gradients=keeps_gradients)
            known[key] = OUTSIDE_NUMBERS(OutsideBytes(self.model, own, tile_tokens))
        return known[key]

    def _range_chunks(self, group: SequenceGroup, stage: StagePlan, loads: _Loads, tiles_loss: bool) -> IntArray:
        """Returns the numbers of `ChunkBytes` of every chunk on every layer range of a stage, (chunks * ranges, 6)."""
        known, passes = self._counted.layer_ranges, self.passes(stage)
        found = np.empty((len(loads.loads), len(stage.layer_ranges), 6), dtype=np.int64)
        for layer_range, owned in enumerate(stage.layer_ranges):
            has_head = _has_head(group, stage, layer_range)
            # equal stages share one entry of the cache
            policies = self._policies(group, stage, layer_range)[1]
            heads = (passes.at_once, passes.sent_on) if has_head else None
            key = loads.number, self._kinds(owned), heads, (stage.stage, layer_range) == (0, 0), policies
            if key not in known:
                known[key] = self._chunks_of(group, stage, layer_range, loads, tiles_loss, range(len(loads.loads)))
            found[:, layer_range] = known[key]
        return found.reshape(-1, 6)

    def _chunks_of(
        self, group: SequenceGroup, stage: StagePlan, layer_range: int, loads: _Loads, tiles_loss: bool, chunks: Sequence[int]
    ) -> IntArray:
        """Returns the numbers of `ChunkBytes` of these chunks on one layer range of a stage, (chunks, 6).

        Output head and loss are on the last layer range of the last stage, unless another stage runs those of a chunk: then the
        norm's input and output stay instead, and the gradient that may come before others are needed.
        """
        is_last, num_ranges, passes = _has_head(group, stage, layer_range), len(stage.layer_ranges), self.passes(stage)
        kinds, policies, is_first = (
            self._kinds(stage.layer_ranges[layer_range]),
            self._policies(group, stage, layer_range)[0],
            not stage.stage + layer_range,
        )
        rows, outside, receives, leaving_layers = [], [], [], []
        for chunk in chunks:
            load, number, policy = loads.loads[chunk], loads.numbers[chunk], policies[chunk]
            rows.append(self._layer_rows(load, number, policy, kinds))
            has_head = is_last and chunk not in passes.sent_on
            keeps_gradients = has_head and chunk * num_ranges + layer_range in passes.at_once
            loss_tile = policy.tile_tokens if tiles_loss else 0
            numbers = self._outside(load, number, has_head, keeps_gradients, loss_tile)
            if is_last and not has_head:
                shared, head, *work = numbers
                numbers = (shared, head + 3 * load.num_tokens * self.model.hidden_bytes, *work)
            outside.append(numbers)
            # hidden states received from another layer range wait for their gradient only if a policy may move them
            receives.append(bool(policy.layers) and not is_first)
            leaving_layers.append(policy.leaving_layers)
        layers: IntArray = self._table()[np.array(rows, dtype=np.int64)]
        return chunk_numbers(
            layers, np.array(outside, dtype=np.int64), np.array(receives), np.array(leaving_layers, dtype=np.int64)
        )

    def _policies(self, group: SequenceGroup, stage: StagePlan, layer_range: int) -> tuple[list[_Policy], int]:
        """Returns the policy of every chunk on one layer range of a stage, and the number of the list."""
        known, key = self._counted.policies, (id(stage.activations), layer_range, len(group.chunks))
        if key not in known:
            numbers = self._counted.numbers
            found = [_Policy((), 0, 1, numbers.of_layers(()))] * len(group.chunks)
            for policy in stage.activations:
                if policy.layer_range == layer_range:
                    number = numbers.of_layers(policy.layers)
                    found[policy.chunk] = _Policy(policy.layers, policy.tile_tokens, policy.leaving_layers, number)
            number = numbers.of_key(("policies", *((own.number, own.tile_tokens, own.leaving_layers) for own in found)))
            # stores the policies too, so that their id is not reused
            known[key] = stage.activations, found, number
        return known[key][1:]


class _Policy(NamedTuple):
    """Policies of one chunk's layers, the number of this tuple of policies, tokens per tile, and layers that leave at once."""

    layers: tuple[LayerPolicy, ...]
    tile_tokens: int
    leaving_layers: int
    number: int


def _in_flight(each: Numbers, is_forward: BoolArray) -> Numbers:
    """Sums bytes of all chunks in flight, each from its forward to the end of its backward, in every pass."""
    held: Numbers = _after(each, is_forward) + np.where(is_forward, 0, each)
    return held


def _after(each: Numbers, is_forward: BoolArray) -> Numbers:
    """Sums bytes of all chunks that wait for their backward after every pass."""
    held: Numbers = np.cumsum(np.where(is_forward, each, -each))
    return held


def _waits(is_forward: BoolArray, waiting: int) -> IntArray:
    """Returns bytes of waiting gradients in every pass: during the first backward, they replace what it frees."""
    found: IntArray = waiting * (np.arange(len(is_forward)) > np.argmin(is_forward))
    return found


def _peak(numbers: Numbers, saved: Numbers, is_forward: BoolArray, book: BookMoments) -> Numbers:
    """Returns bytes of every pass on the device, without waiting gradients.

    numbers: those of `ChunkBytes` of the running chunk, (6, passes). saved: bytes of all chunks in flight, including it.
    """
    device, _, forward_workspace, backward_workspace, ending, _ = numbers
    work = np.where(is_forward, forward_workspace, backward_workspace)
    first, last = saved + work + book.first, saved - device + ending + book.last
    peak: Numbers = np.where(is_forward, first, np.maximum(first, last)) + book.others
    return peak


def _has_head(group: SequenceGroup, stage: StagePlan, layer_range: int) -> bool:
    """Whether output head and loss are on this layer range, the last one of the last stage."""
    return stage.stage == len(group.stages) - 1 and layer_range == len(stage.layer_ranges) - 1


# a forecast uses the same few models and devices a hundred times
@lru_cache(maxsize=256)
def _kept_tokens(model: ModelSpec, device_bytes: int, is_shared: bool) -> int:
    """Computes `ByteModel.kept_tokens` of a model."""
    like = replace(Load.document(1, model.num_layers), is_shared=is_shared)
    return ByteModel(model).longest(device_bytes, 0, lambda _: (None,), like)

"""Makes groups fit by proposing policies until a prediction is within its limits, and finds the longest sequence that fits.

The search has two callers, one for groups on one stage and one for pipelines. Each decides which policies to propose and how to
predict a group. Both share the policies of least memory, which are tried last, and the cache of groups that were solved before.

The longest sequence that a group holds alone, whole or in slices, is a number that every later plan can keep. One chunk of a
sequence may be too large for a device although slices of it fit, since a layer then works on fewer tokens at a time. Packs of
short sequences gain nothing from slices, so a plan may hold more tokens of one sequence than of several.

Only ways to run a sequence are counted whose bytes depend on lengths alone, and not on seconds, which a run measures again while
it trains: one chunk, or slices of equal tokens, that keep at most layer inputs. Within a *piece* of lengths, a way needs more
bytes for more tokens, so only the end of a piece must be checked. A piece ends if a slice is full, and if with more tokens
attention's backward would take fewer heads at once, a scan would run in blocks, or a window would not reach to the start. So
every length up to the result fits in one of the ways, and `GroupRoom` falls back on these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from hf_longctx.plan.chunks import LEAST_SLICE_TOKENS, SLICE_COUNTS, cut_evenly, even_slice
from hf_longctx.plan.core.settings import ActivationBudget, NoRoom
from hf_longctx.plan.core.sharding import PART_ELEMENTS, fullest_share
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Blocks,
    Chunk,
    GroupShape,
    LayerPolicy,
    LayerRange,
    Parameters,
    SequenceGroup,
    Span,
    StagePlan,
    small_tile,
)
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import in_pieces, least_memory_policy
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.memory.stage import RoundBytes
from hf_longctx.plan.model.model_spec import ModelSpec

Room = TypeVar("Room")

# layer policies by stage, chunk and layer range
LayerPolicies = Mapping[tuple[int, int, int], tuple[LayerPolicy, ...]]


@dataclass(frozen=True, slots=True)
class Trial:
    """A group under some policies, and its prediction."""

    group: SequenceGroup
    # predicted for the group alone
    seconds: float
    # bytes above the device limit on each stage, negative if room is left
    over_bytes: tuple[float, ...]
    # bytes above the host limit
    over_host_bytes: float = 0.0
    # added seconds and device bytes that the policy program expected
    counted_s: float = 0.0
    counted_bytes: float = 0.0
    # reason of the program for these policies; empty unless it was asked for
    reason: str = ""
    # seconds that count for gathers of weights which a whole chunk would not need
    gathers_s: float = 0.0

    @property
    def all_s(self) -> float:
        """Seconds by which trials are compared."""
        return self.seconds + self.gathers_s

    @property
    def fits(self) -> bool:
        return max(self.over_bytes) <= 0 and self.over_host_bytes <= 0


# function that proposes policies for a group and predicts the group under each of them
Program = Callable[[], Iterable[Trial]]


def first_fitting(programs: Iterable[Program]) -> list[Trial]:
    """Returns the fitting trials of the first program that has any, without trying later ones; empty if nothing fits."""
    for program in programs:
        if fitting := [trial for trial in program() if trial.fits]:
            return fitting
    return []


def search_room(
    propose: Callable[[Room], Trial | None], next_room: Callable[[Room, Trial], Room | None], room: Room, attempts: int
) -> Trial | None:
    """Returns the fastest trial that fits; None if none does.

    propose: makes a trial with the given room, or None if there is no solution. next_room: gives less room after a trial that
    does not fit; after one that fits, it gives more room, or None to stop. More room that makes nothing faster ends the search.
    """
    best: Trial | None = None
    for _ in range(attempts):
        trial = propose(room)
        if trial is None or (best is not None and not (trial.fits and trial.seconds < best.seconds)):
            break
        if trial.fits:
            best = trial
        following = next_room(room, trial)
        if following is None:
            break
        room = following
    return best


class FittedGroups:
    """Cache of groups that were made to fit, or refused: groups with equal lengths, chunks, shape and actions are solved once.

    Its length is the number of those that fit, without those of `filled`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[SequenceGroup, SequenceGroup]] = {}
        # refusals of groups for which nothing fits
        self._refused: dict[Hashable, str] = {}
        self._of_objects: dict[int, tuple[tuple[Action, ...], int]] = {}
        self._of_actions: dict[tuple[Action, ...], int] = {}

    @cached_property
    def filled(self) -> FittedGroups:
        """Cache of the answers for which no program was solved."""
        return FittedGroups()

    def __len__(self) -> int:
        return len(self._known)

    def _number(self, actions: tuple[Action, ...]) -> int:
        """Number of a stage's actions; equal ones have the same. Each object is compared once, since there may be thousands."""
        found = self._of_objects.get(id(actions))
        if found is None:
            # the actions are stored too, so that their id is not reused
            found = self._of_objects[id(actions)] = actions, self._of_actions.setdefault(actions, len(self._of_actions))
        return found[1]

    def fit(
        self,
        group: SequenceGroup,
        search: Callable[[SequenceGroup], Iterable[Trial]],
        nothing_fits: Callable[[SequenceGroup], str],
        variant: Hashable = None,
    ) -> SequenceGroup:
        """The fastest of the fitting trials that `search` finds, with the sequences and ranks of `group`.

        variant: everything else that the answer depends on. Raises NoRoom with the sentence of `nothing_fits` if there is no
        trial.
        """
        spans = tuple(tuple((span.start, span.stop) for span in chunk.spans) for chunk in group.chunks)
        key = group.shape, spans, tuple(self._number(stage.actions) for stage in group.stages), variant
        if key in self._refused:
            raise NoRoom(self._refused[key])
        if key not in self._known:
            best = min(search(group), key=lambda trial: trial.all_s, default=None)
            if best is None:
                self._refused[key] = nothing_fits(group)
                raise NoRoom(self._refused[key])
            self._known[key] = group, best.group
        return _like(group, *self._known[key])


def _like(group: SequenceGroup, solved: SequenceGroup, found: SequenceGroup) -> SequenceGroup:
    """The answer `found` for the group `solved`, with the sequences and ranks of an equal group."""
    if found.chunks is solved.chunks:
        return replace(found, positions=group.positions, chunks=group.chunks)
    numbers = {
        old.sequence: new.sequence
        for old_chunk, new_chunk in zip(solved.chunks, group.chunks, strict=True)
        for old, new in zip(old_chunk.spans, new_chunk.spans, strict=True)
    }
    chunks = tuple(
        replace(chunk, spans=tuple(replace(span, sequence=numbers[span.sequence]) for span in chunk.spans))
        for chunk in found.chunks
    )
    return replace(found, positions=group.positions, chunks=chunks)


def with_layers(group: SequenceGroup, layers: LayerPolicies, tile_tokens: int) -> SequenceGroup:
    """The group with these layer policies, by stage, chunk and layer range, and with tiles in every chunk."""
    stages = tuple(
        replace(
            stage,
            activations=tuple(
                ActivationPolicy(chunk.index, layer_range, layers.get((stage.stage, chunk.index, layer_range), ()), tile_tokens)
                for chunk in group.chunks
                for layer_range in range(len(stage.layer_ranges))
            ),
        )
        for stage in group.stages
    )
    return replace(group, stages=stages)


def with_equal_stages(
    group: SequenceGroup, layers: Callable[[int, int], tuple[LayerPolicy, ...]], tile_tokens: int
) -> SequenceGroup:
    """The group with tiles, and with the policies that `layers` returns for a chunk, given its index and a number of layers.

    Stages with as many layers share one object, so that they are made and counted once.
    """
    known: dict[tuple[int, ...], tuple[ActivationPolicy, ...]] = {}
    stages = []
    for stage in group.stages:
        sizes = tuple(layer_range.num_layers for layer_range in stage.layer_ranges)
        if sizes not in known:
            known[sizes] = tuple(
                ActivationPolicy(chunk.index, layer_range, layers(chunk.index, count), tile_tokens)
                for chunk in group.chunks
                for layer_range, count in enumerate(sizes)
            )
        stages.append(replace(stage, activations=known[sizes]))
    return replace(group, stages=tuple(stages))


def with_stages_of(group: SequenceGroup, other: SequenceGroup, places: Collection[int]) -> SequenceGroup:
    """The group with the stages of `other`, the same group under other policies, at these places."""
    pairs = zip(group.stages, other.stages, strict=True)
    return replace(group, stages=tuple(theirs if place in places else own for place, (own, theirs) in enumerate(pairs)))


def in_tiles(group: SequenceGroup, tile_tokens: int) -> SequenceGroup:
    """The group with tiles in every chunk, and nothing moved or recomputed."""
    return with_equal_stages(group, lambda *_: (), tile_tokens)


def least_memory_group(
    group: SequenceGroup,
    model: ModelSpec,
    tile_tokens: int,
    host_share: Callable[[int, int], int],
    keeps_attention: bool = False,
    reruns: bool = False,
    head_pieces: int = 1,
) -> SequenceGroup:
    """The group with the least device memory: every layer of every chunk is recomputed.

    host_share: returns the host bytes for a chunk, given its tokens on a rank and the number of layers; called for every chunk,
    once for all stages with as many layers. keeps_attention, reruns: see `least_memory_policy`. head_pieces: see `LayerPolicy`.
    """
    shape = group.shape
    tokens = [fullest_share(chunk, shape) for chunk in group.chunks]
    # equal layers share one object, so that their bytes are counted once
    known: dict[tuple[int, int, int], tuple[LayerPolicy, ...]] = {}

    def layers(chunk: int, num_layers: int) -> tuple[LayerPolicy, ...]:
        size = tokens[chunk], num_layers, host_share(tokens[chunk], num_layers)
        if size not in known:
            policy = least_memory_policy(model, size[0], size[2], tile_tokens, num_layers, keeps_attention, reruns)
            known[size] = in_pieces(policy, head_pieces).layers
        return known[size]

    return with_equal_stages(group, layers, small_tile(tile_tokens))


# numbers of slices of the ways; 1: the sequence as it is
WAYS = (1, *SLICE_COUNTS)
# stop bisecting a piece at one part in so many of its lengths, and searching where a way adds less than that
_PRECISION = 256


def in_equal_slices(
    groups: Sequence[SequenceGroup], model: ModelSpec, budget: ActivationBudget, num_slices: int, blocks: Sequence[Blocks] = ()
) -> list[SequenceGroup]:
    """Groups of at most one sequence each, cut into equal slices that run in step, under policies that keep only layer inputs.

    Each input lies on one side: those of the first slices and layers on the host, as far as it has room. blocks: see
    `sliced_in_step`.
    """
    cut = cut_evenly(groups, num_slices, blocks) if num_slices > 1 else groups
    return [_lean(group, model, budget) for group in cut]


def _lean(group: SequenceGroup, model: ModelSpec, budget: ActivationBudget) -> SequenceGroup:
    left_bytes, token_bytes = budget.host_bytes, class_bytes(model, "layer_input")

    def host_share(num_tokens: int, num_layers: int) -> int:
        nonlocal left_bytes
        layer_bytes = num_tokens * token_bytes
        share = min(num_layers, left_bytes // layer_bytes) * layer_bytes
        # after the first layer without room, later ones get none
        left_bytes = left_bytes - share if share == num_layers * layer_bytes else 0
        return share

    return least_memory_group(group, model, budget.tile_tokens, host_share)


# a forecast asks for the same few models and devices several times
@lru_cache(maxsize=256)
def longest_alone(
    model: ModelSpec, budget: ActivationBudget, shape: GroupShape, parameters: Parameters, shard_ranks: int, known: int, most: int
) -> int:
    """Tokens up to which every sequence fits a group of this shape alone, at most `most`. known: those that fit in one chunk.

    Rings get `known`, since the balance of their shares changes from length to length.
    """
    if shape.num_blocks > 1:
        return min(known, most)
    return _LoneSequences(model, budget, shape, parameters, shard_ranks).longest(known, most)


@dataclass(frozen=True)
class _LoneSequences:
    """Sequences that are alone on the ranks of a group, and their bytes."""

    model: ModelSpec
    budget: ActivationBudget
    shape: GroupShape
    parameters: Parameters
    shard_ranks: int
    _known: dict[tuple[int, int], RoundBytes] = field(default_factory=dict)

    def longest(self, known: int, most: int) -> int:
        """See `longest_alone`."""
        length = begun = known
        while length < most:
            for num_slices in WAYS:
                length, is_hopeless = self._reach(length, num_slices, most)
                if is_hopeless:
                    break
            if length - begun <= begun // _PRECISION:
                break
            begun = length
        return min(length, most)

    def _reach(self, length: int, num_slices: int, most: int) -> tuple[int, bool]:
        """The length up to which all above `length` fit in `num_slices` slices; whether more slices cannot fit beyond it.

        More slices leave more gradients of keys and values.
        """
        while length < most:
            end = min(most, self._piece_end(length, num_slices))
            if self._fits(end, num_slices):
                length = end
                continue
            while end - length > max(1, length // _PRECISION):
                middle = (length + end) // 2
                length, end = (middle, end) if self._fits(middle, num_slices) else (length, middle)
            return length, num_slices > 1 and self._counted(end, num_slices).book > self.budget.device_bytes
        return length, True

    def _piece_end(self, length: int, num_slices: int) -> int:
        """The last length of the piece that begins after `length`."""
        size = even_slice(length + 1, num_slices)
        # tokens of the last slice begin here; it is full at the end
        start = length // size * size if num_slices > 1 else 0
        degree = self.shape.degree
        ends = [start + degree * (keys // degree - -(-start // degree)) for keys in self._most_keys]
        ends += [start + degree * self.model.states.block_tokens, *(window or 0 for window in self.model.windows)]
        ends += [start + size] if num_slices > 1 else []
        return min((end for end in ends if end > length), default=2 * length + 1)

    @cached_property
    def _most_keys(self) -> list[int]:
        """Most keys for which attention's backward takes so many heads at once, for every number of heads."""
        head_dims = {own.head_dim for own in self.model.heads} | {self.model.head_dim}
        return sorted({PART_ELEMENTS // (heads * dim) for dim in head_dims for heads in range(1, self.model.num_heads + 1)})

    def _fits(self, length: int, num_slices: int) -> bool:
        if num_slices > 1 and even_slice(length, num_slices) < LEAST_SLICE_TOKENS * self.shape.degree:
            return False
        found, waiting = self._counted(length, num_slices), self._waiting if num_slices > 1 else 0
        return found.peak + waiting <= self.budget.device_bytes and found.host <= self.budget.host_bytes

    def _counted(self, length: int, num_slices: int) -> RoundBytes:
        if (length, num_slices) not in self._known:
            stage = StagePlan(0, (LayerRange(0, self.model.num_layers),), (Action("F", 0, 0), Action("B", 0, 0)))
            chunk = Chunk(0, (Span(0, 0, length),))
            group = SequenceGroup.of(self.shape, range(self.shape.degree), (chunk,), (stage,))
            (sliced,) = in_equal_slices([group], self.model, self.budget, num_slices)
            self._known[length, num_slices] = self._byte_model.moments(sliced, sliced.stages[0]).most
        return self._known[length, num_slices]

    @cached_property
    def _byte_model(self) -> ByteModel:
        return ByteModel(self.model)

    @cached_property
    def _waiting(self) -> int:
        """Bytes of gradients that wait whole until the last of several backwards."""
        return self._byte_model.accumulated(self.parameters, self.shard_ranks)

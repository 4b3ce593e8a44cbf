"""Makes a group fit: propose policies, predict the run, and offer less memory until the prediction is within its limits.

There are two callers, one for groups on one stage and one for pipelines. Each decides what to propose and how to predict a group.
Both share the policies of least memory, which are tried last, and the cache of groups that were solved before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import Action, ActivationPolicy, LayerPolicy, SequenceGroup, small_tile
from hf_longctx.plan.memory.capacity import in_pieces, lean_policy

Room = TypeVar("Room")

# layer policies by stage, chunk and part
LayerPolicies = Mapping[tuple[int, int, int], tuple[LayerPolicy, ...]]


@dataclass(frozen=True, slots=True)
class Trial:
    """A group under some policies, and its prediction.

    seconds: predicted for the group alone. over_bytes: bytes above the device limit on each stage, negative where room is left;
    over_host_bytes: bytes above the host limit. counted_s, counted_bytes: added seconds and device bytes that the policy program
    expected. reason: why the program chose these policies; empty unless it was asked for. gathers_s: seconds that count for
    gathers of weights which a whole chunk would not need.
    """

    group: SequenceGroup
    seconds: float
    over_bytes: tuple[float, ...]
    over_host_bytes: float = 0.0
    counted_s: float = 0.0
    counted_bytes: float = 0.0
    reason: str = ""
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


def first_fitting(
    programs: Iterable[Program],
    lean: Iterable[Iterable[SequenceGroup]],
    predict: Callable[[SequenceGroup], Trial],
) -> list[Trial]:
    """Returns the fitting trials of the first program that has any, without trying later ones; empty if nothing fits.

    lean: groups under policies of least memory, which are predicted after all programs failed; the groups of one entry are tried
    together, and later entries only if none of them fits.
    """
    for trials in chain((program() for program in programs), (map(predict, groups) for groups in lean)):
        if fitting := [trial for trial in trials if trial.fits]:
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

    Its length is the number of those that fit.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[SequenceGroup, SequenceGroup]] = {}
        # refusals of groups for which nothing fits
        self._refused: dict[Hashable, str] = {}
        self._of_objects: dict[int, tuple[tuple[Action, ...], int]] = {}
        self._of_actions: dict[tuple[Action, ...], int] = {}

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

        variant: everything else that the answer depends on. Raises ValueError with the sentence of `nothing_fits` if there is no
        trial.
        """
        spans = tuple(tuple((span.start, span.stop) for span in chunk.spans) for chunk in group.chunks)
        key = group.shape, spans, tuple(self._number(stage.actions) for stage in group.stages), variant
        if key in self._refused:
            raise ValueError(self._refused[key])
        if key not in self._known:
            best = min(search(group), key=lambda trial: trial.all_s, default=None)
            if best is None:
                self._refused[key] = nothing_fits(group)
                raise ValueError(self._refused[key])
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
    """The group with these layer policies, by stage, chunk and part, and with tiles in every chunk."""
    stages = tuple(
        replace(
            stage,
            activations=tuple(
                ActivationPolicy(chunk.index, part, layers.get((stage.stage, chunk.index, part), ()), tile_tokens)
                for chunk in group.chunks
                for part in range(len(stage.parts))
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
        sizes = tuple(part.num_layers for part in stage.parts)
        if sizes not in known:
            known[sizes] = tuple(
                ActivationPolicy(chunk.index, part, layers(chunk.index, count), tile_tokens)
                for chunk in group.chunks
                for part, count in enumerate(sizes)
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


def lean_group(
    group: SequenceGroup,
    model: ModelSpec,
    tile_tokens: int,
    host_share: Callable[[int, int], int],
    keeps_attention: bool = False,
    reruns: bool = False,
    head_pieces: int = 1,
) -> SequenceGroup:
    """The group with every layer of every chunk recomputed, which needs the least device memory.

    host_share: returns the host bytes for a chunk, given its tokens on a rank and the number of layers; called for every chunk,
    once for all stages with as many layers. keeps_attention, reruns: see `lean_policy`. head_pieces: see `LayerPolicy`.
    """
    shape = group.shape
    tokens = [max(shard_tokens(chunk, shape)) for chunk in group.chunks]
    # equal layers share one object, so that their bytes are counted once
    known: dict[tuple[int, int, int], tuple[LayerPolicy, ...]] = {}

    def layers(chunk: int, num_layers: int) -> tuple[LayerPolicy, ...]:
        size = tokens[chunk], num_layers, host_share(tokens[chunk], num_layers)
        if size not in known:
            policy = lean_policy(model, size[0], size[2], tile_tokens, num_layers, keeps_attention, reruns)
            known[size] = in_pieces(policy, head_pieces).layers
        return known[size]

    return with_equal_stages(group, layers, small_tile(tile_tokens))

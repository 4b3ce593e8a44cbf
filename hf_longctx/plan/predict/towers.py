"""Says for every image of a plan which rank runs it, and whether its graph waits for the chunk's backward or is made again there.

Saved tensors of the text model get memory first: a byte of these saves more seconds, since operations for each saved byte grow
with the width of a model, and text models are wider than towers. Graphs of towers get what is left, those with most seconds for
each byte first. These are large images, since attention takes seconds but hardly any bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from hf_longctx.plan.core.sharding import images_of
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan, TowerRun
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.towers import ImageKey, TowerBytes
from hf_longctx.plan.predict.planning import Planning


def with_towers(plan: StepPlan, planning: Planning, tower_bytes: int) -> StepPlan:
    """Returns the plan with the towers of every group; without a budget of memory, and for frozen towers, no image runs again.

    tower_bytes: of the device, left free beside the budget.
    """
    plan = _changed(replace(plan, media=planning.costs.media), lambda group: _runs(group, planning.costs))
    if planning.config.activations is None or not planning.costs.model.tower.trained_parameters:
        return plan
    towers = TowerBytes(plan, planning.known.byte_model(planning.costs.model))

    def kept(group: SequenceGroup) -> tuple[TowerRun, ...]:
        again = _again(group, towers, planning, tower_bytes) if group.towers else ()
        return tuple(run._replace(keeps=int(run[:3] not in again)) for run in group.towers)

    return _changed(plan, kept)


def _changed(plan: StepPlan, towers: Callable[[SequenceGroup], tuple[TowerRun, ...]]) -> StepPlan:
    """Returns the plan with these towers of every group."""
    groups = (tuple(replace(group, towers=towers(group)) for group in each.groups) for each in plan.micro_batches)
    return replace(plan, micro_batches=tuple(map(MicroBatch, groups)))


def _runs(group: SequenceGroup, costs: CostModel) -> tuple[TowerRun, ...]:
    """Returns the towers of a group, with images dealt to its ranks where that takes fewer seconds."""
    found: list[TowerRun] = []
    for chunk in group.chunks:
        dealt = costs.dealt_images(chunk, group.shape)
        found += [TowerRun(chunk.index, *key, rank=dealt.get(key, -1)) for key in images_of(chunk, costs.media)]
    return tuple(found)


# images that are tried after those that fit together
_MORE = 32


def _again(group: SequenceGroup, towers: TowerBytes, planning: Planning, tower_bytes: int) -> set[ImageKey]:
    """Returns the images of a group whose graphs do not fit above the peak of layers on some rank that runs them."""
    found: set[ImageKey] = set()
    limit_bytes = planning.limit_bytes(replace(towers.plan, media=())) + tower_bytes
    free_bytes = limit_bytes - planning.predict(towers.plan).text_bytes[id(group.chunks), group.positions]
    for place, images in enumerate(towers.images(group)):
        values = {key: planning.costs.tower_s([towers.work(key)], False) / max(1, towers.graph(key)) for key in images}
        ordered = sorted(images, key=lambda key: (-values[key], key))

        def fits(kept: Collection[ImageKey], place: int = place) -> bool:
            def kept_of(other: SequenceGroup) -> Collection[ImageKey]:
                return kept if other.chunks is group.chunks else {key for own in towers.images(other) for key in own}

            return towers.above(group, place, kept_of) <= free_bytes

        low, high = 0, len(ordered)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(set(ordered[:middle])) else (low, middle - 1)
        kept = set(ordered[:low])
        # the next one is too large, but some later ones may fit
        for key in ordered[low + 1 : low + 1 + _MORE]:
            kept |= {key} if fits({*kept, key}) else set()
        found |= set(images) - kept
    return found

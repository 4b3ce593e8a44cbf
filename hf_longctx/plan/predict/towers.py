"""Says for every image of a plan whether the graph of its towers waits for the chunk's backward, or is made again there.

Saved tensors of the text model get memory first: a byte of these saves more seconds, since operations for each saved byte grow
with the width of a model, and text models are wider than towers. Graphs of towers get what is left, those with most seconds for
each byte first. These are large images, since attention takes seconds but hardly any bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hf_longctx.plan.core.sharding import images_of
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan, TowerRun
from hf_longctx.plan.memory.towers import ImageKey, TowerBytes
from hf_longctx.plan.predict.planning import Planning


def with_towers(plan: StepPlan, planning: Planning, tower_bytes: int) -> StepPlan:
    """Returns the plan with the towers of every group; without a budget of memory, and for frozen towers, no image runs again.

    tower_bytes: of the device, left free beside the budget.
    """
    plan = replace(plan, media=planning.costs.media)
    decides = planning.config.activations is not None and planning.costs.model.tower.trained_parameters > 0
    towers = TowerBytes(plan, planning.known.byte_model(planning.costs.model))

    def of_group(group: SequenceGroup) -> SequenceGroup:
        runs = [TowerRun(chunk.index, *key) for chunk in group.chunks for key in images_of(chunk, plan.media)]
        again = _again(group, towers, planning, tower_bytes) if decides and runs else ()
        return replace(group, towers=tuple(run._replace(keeps=int(run[:3] not in again)) for run in runs))

    return replace(plan, micro_batches=tuple(MicroBatch(tuple(map(of_group, each.groups))) for each in plan.micro_batches))


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

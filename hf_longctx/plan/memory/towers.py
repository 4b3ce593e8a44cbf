"""Counts bytes of towers on ranks of the first stage: graphs of images that wait for their chunk's backward, and work.

Towers run before the first layer of a chunk and, in the backward, after it, when no layer of that chunk holds anything. So their
work meets what other chunks hold, and only graphs that wait meet the peak of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from hf_longctx.plan.core.sharding import run_images
from hf_longctx.plan.core.types import SequenceGroup, StepPlan, TowerWork
from hf_longctx.plan.memory.byte_model import ByteModel

# chunk, sequence and number of an image
ImageKey = tuple[int, int, int]


def kept_images(group: SequenceGroup) -> set[ImageKey]:
    """Returns the images of a group whose graphs wait for the backward by its plan."""
    return {run[:3] for run in group.towers if run.keeps}


class TowerBytes:
    """Bytes of the towers of a plan."""

    def __init__(self, plan: StepPlan, byte_model: ByteModel) -> None:
        self.plan, self.byte_model, self.element = plan, byte_model, byte_model.model.bytes_per_element
        self.groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups] if plan.media else []
        self._images: dict[tuple[int, tuple[int, ...]], list[list[ImageKey]]] = {}

    def images(self, group: SequenceGroup) -> list[list[ImageKey]]:
        """Returns the images that every rank of a group runs, chunk by chunk."""
        key = id(group.chunks), group.positions
        if key not in self._images:
            self._images[key] = [[] for _ in group.positions]
            for chunk in group.chunks if self.plan.media else ():
                for found, own in zip(self._images[key], run_images(chunk, group, self.plan.media), strict=True):
                    found += [(chunk.index, *image) for image in own]
        return self._images[key]

    def work(self, key: ImageKey) -> TowerWork:
        """Returns the work of an image."""
        return self.plan.media[key[1]][key[2]]

    def graph(self, key: ImageKey) -> int:
        """Returns bytes of the graph of an image."""
        return self.byte_model.model.tower.graph_bytes(self.work(key), self.element)

    def above(
        self, group: SequenceGroup, place: int, kept_of: Callable[[SequenceGroup], Collection[ImageKey]] = kept_images
    ) -> int:
        """Returns bytes by which towers lift the peak of the rank at a place of a group on the first stage.

        kept_of: returns the images of a group whose graphs wait.
        """
        found, kept = 0, kept_of(group)
        if self.plan.turns:
            # in one schedule, all graphs of the step may wait together
            position = group.positions[place]
            others = (each for each in self.groups if each.chunks is not group.chunks and position in each.positions)
            pairs = ((kept_of(each), self.images(each)[each.positions.index(position)]) for each in others)
            found = sum(self.graph(key) for waiting, own in pairs for key in own if key in waiting)
        images = self.images(group)[place]
        return found + self._above(group, images, kept) if images else found

    @property
    def least(self) -> int:
        """Bytes by which towers lift the peak of some rank if no graph waits."""
        return max((self.above(group, place, lambda _: ()) for group in self.groups for place in range(group.degree)), default=0)

    def _above(self, group: SequenceGroup, images: list[ImageKey], kept: Collection[ImageKey]) -> int:
        model, (stage, *_) = self.byte_model.model, group.stages
        passes, plain = self.byte_model.passes(stage), self.byte_model.moments(group, stage)
        # whole gradients that wait after the first backward
        with_gradients = self.byte_model.moments(group, stage, waiting=self.byte_model.stage_waiting(stage, self.plan)).peak
        after = plain.after[0] + plain.after[2] + with_gradients - plain.peak
        waits, works = np.zeros_like(with_gradients), list[tuple[int, int, int]]()
        for index in sorted({key[0] for key in images}):
            begin, end = np.flatnonzero(passes.cells == index * len(stage.layer_ranges)).tolist()
            held = work = features = 0
            for key in (key for key in images if key[0] == index):
                graph = self.graph(key) if key in kept else 0
                held += graph
                work = max(work, model.tower.work_bytes(self.work(key), self.element) - graph)
                features += model.tower.feature_bytes(self.work(key), model.hidden_bytes)
            waits[begin : end + 1] += held
            works.append((begin, end, work + features))
        peak = int((with_gradients + waits).max())
        for begin, end, work in works:
            before = int(after[begin - 1]) if begin else 0
            peak = max(peak, before + int(waits[begin]) + work, int(after[end] + waits[end]) + work)
        return peak - int(with_gradients.max())

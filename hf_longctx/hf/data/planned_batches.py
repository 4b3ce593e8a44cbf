"""Joins sampler and planner: a batch sampler that draws the sequences of each step and attaches their plan.

Built by the trainer for map-style datasets; `streams.planned_stream.PlannedStream` is its counterpart for iterable ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hf_longctx.hf.data.collator import PlannedStep
from hf_longctx.hf.data.sampler import IntArray, LengthAwareSampler
from hf_longctx.hf.planning.source import PlanSource


class PlannedBatchSampler:
    """A batch sampler whose batches are planned steps; pass it to `DataLoader` as `batch_sampler`.

    The main process of every rank draws the plans, ahead of the loader's workers, which then fetch only the sequences of this
    rank. `steps_done` returns the number of plans that the run finished before it was resumed. A trainer that resumes discards
    the first batches of its epoch, so those batches are empty and not planned.
    """

    def __init__(
        self,
        sampler: LengthAwareSampler,
        lengths: IntArray,
        source: PlanSource,
        explore: bool,
        steps_done: Callable[[], int] = lambda: 0,
    ) -> None:
        self.sampler, self.lengths, self.source, self.explore = sampler, lengths, source, explore
        self.steps_done = steps_done
        # on resume the trainer skips steps through a copy of the loader, which reads these two attributes
        self.batch_size, self.drop_last = None, False

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of `epoch`."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[PlannedStep]]:
        first = self.sampler.epoch * len(self.sampler)
        num_skipped = max(0, self.steps_done() - first)
        for _ in range(num_skipped):
            yield []
        planned, ahead = itertools.tee(itertools.islice(self.sampler, num_skipped, None))
        steps = ((step, self.lengths[batch].tolist()) for step, batch in enumerate(ahead, start=first + num_skipped))
        for batch, plan in zip(planned, self.source.plans(steps, self.explore), strict=True):
            yield [PlannedStep(plan, tuple(batch), self.source.pool.rank)]

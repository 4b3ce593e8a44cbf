"""Batches of planned steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hf_longctx.hf.data.collator import PlannedStep
from hf_longctx.hf.data.sampler import IntArray, LengthAwareSampler
from hf_longctx.hf.planning.source import PlanSource


class PlannedBatchSampler:
    """A batch sampler whose batches are planned steps; goes where `DataLoader` wants a `batch_sampler`.

    Plans are drawn in the main process of every rank, ahead of the loader's workers, which then fetch this rank's
    sequences only. `steps_done` says how many plans of the run are over when an epoch starts: a trainer that resumes
    throws the first batches of its epoch away, so these are not planned.
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
        # the trainer skips steps on resume through a copy of the loader that looks these two up
        self.batch_size, self.drop_last = None, False

    def set_epoch(self, epoch: int) -> None:
        """Selects the shuffle of `epoch`."""
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

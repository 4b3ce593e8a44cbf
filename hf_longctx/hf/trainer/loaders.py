"""Loaders of planned steps: every rank draws the same steps, each with its plan.

For map-style datasets, `PlannedBatchSampler` draws the sequences of each step and attaches their plan; for iterable ones,
`streams.planned_stream.PlannedStream` does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.labels import LABELS_THAT_COUNT, step_without_labels
from hf_longctx.hf.data.resume import data_settings, plans_done
from hf_longctx.hf.data.sampler import IntArray, LengthAwareSampler, SequenceIndex
from hf_longctx.hf.data.scan import token_rows
from hf_longctx.hf.data.streams.planned_stream import PlannedStream, StreamSource
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import raise_together
from hf_longctx.hf.ranks.loader_workers import keep_workers
from hf_longctx.hf.run.run import Run
from hf_longctx.plan.core.messages import listed
from hf_longctx.plan.core.types import Blocks, Media, StepSequences


class PlannedBatchSampler:
    """A batch sampler whose batches are planned steps; pass it to `DataLoader` as `batch_sampler`.

    The main process of every rank draws the plans, ahead of the loader's workers, which then fetch only the sequences of this
    rank. `steps_done` returns the number of plans that the run finished before it was resumed. A trainer that resumes discards
    the first batches of its epoch, so those batches are empty and not planned. `blocks` and `media` return the blocks and images
    of these sequences.
    """

    def __init__(
        self,
        sampler: LengthAwareSampler,
        lengths: IntArray,
        source: PlanSource,
        explore: bool,
        steps_done: Callable[[], int] = lambda: 0,
        blocks: Callable[[list[int]], tuple[Blocks, ...]] = lambda _: (),
        media: Callable[[list[int]], tuple[Media, ...]] = lambda _: (),
    ) -> None:
        self.sampler, self.lengths, self.source, self.explore = sampler, lengths, source, explore
        self.steps_done, self.blocks, self.media = steps_done, blocks, media
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
        steps = ((step, self._sequences(batch)) for step, batch in enumerate(ahead, start=first + num_skipped))
        for batch, plan in zip(planned, self.source.plans(steps, self.explore), strict=True):
            yield [PlannedStep(plan, tuple(batch), self.source.pool.rank)]

    def _sequences(self, batch: list[int]) -> StepSequences:
        return StepSequences(tuple(self.lengths[batch].tolist()), self.blocks(batch), self.media(batch))


# global batches that are read ahead if the settings name no number
_LOOKAHEAD_BATCHES = 4


class LongContextDataLoader(DataLoader):  # type: ignore[type-arg]
    """A `DataLoader` over planned steps that passes the epoch on to its sampler, as the trainer expects."""

    def set_epoch(self, epoch: int) -> None:
        """Selects the shuffle of `epoch`."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def train_loader(run: Run, dataset: Any, global_step: Callable[[], int]) -> DataLoader[Any]:
    """Planned steps of a training set. `global_step` returns the optimizer steps done, when the first step is drawn.

    Raises ValueError for a set that does not fill one step, and on every rank if a checkpoint is resumed with other data.
    """
    if is_stream(dataset):
        return _stream_loader(run, dataset, global_step)
    args = run.args
    index = run.sets.index("train_dataset", dataset)
    sampler = LengthAwareSampler(
        index.lengths,
        sequences_per_step=args.per_device_train_batch_size * args.world_size,
        tokens_per_step=run.config.tokens_per_step,
        seed=args.data_seed if args.data_seed is not None else args.seed,
        shuffle=not str(args.train_sampling_strategy).endswith("sequential"),
        drop_last=args.dataloader_drop_last,
    )
    if not len(sampler):
        raise ValueError(
            f"dataloader_drop_last leaves no step: {len(index)} sequences are fewer than one step of "
            f"{sampler.sequences_per_step}; set it to False or lower per_device_train_batch_size"
        )
    _check_labels(run, sampler, index)
    seed = sampler.seed if sampler.shuffle else None
    _check_resumed(run, run.sets.digest("train_dataset"), seed, run.sets.is_cut("train_dataset"))
    done = partial(_batches_done, run, len(sampler), global_step)
    name = "train_dataset"
    tokens = token_rows(run.sets.rows(name), run.task)
    rows = PlannedDataset(tokens, index, run.sets.scanned(name), run.task, run.sets.reader(name))
    of_rows = run.sets.blocks_of(name, index), run.sets.media_of(name, index)
    return _loader(run, name, rows, PlannedBatchSampler(sampler, index.lengths, run.source, True, done, *of_rows))


def eval_loader(run: Run, name: str, dataset: Any, marks: bool = False) -> DataLoader[Any]:
    """Planned steps of a set, in its order; `name`: the name of the set in messages. marks: see `HeadTask`."""
    index = run.sets.index(name, dataset)
    per_step = run.args.per_device_eval_batch_size * run.args.world_size
    sampler = LengthAwareSampler(index.lengths, per_step, run.config.tokens_per_step, shuffle=False)
    task = replace(run.sets.task_of(name), marks=marks)
    rows = PlannedDataset(token_rows(run.sets.rows(name), run.task), index, run.sets.scanned(name), task, run.sets.reader(name))
    blocks, media = run.sets.blocks_of(name, index), run.sets.media_of(name, index)
    steps = PlannedBatchSampler(sampler, index.lengths, run.source, explore=False, blocks=blocks, media=media)
    return _loader(run, name, rows, steps)


def _loader(run: Run, name: str, rows: PlannedDataset, steps: PlannedBatchSampler) -> DataLoader[Any]:
    args, num_workers = run.args, run.args.dataloader_num_workers
    seed = partial(seed_worker, num_workers=num_workers, rank=args.process_index)
    loader = LongContextDataLoader(
        rows,
        batch_sampler=steps,
        collate_fn=LongContextCollator(run.sets.have_media(name, rows.index)),
        num_workers=num_workers,
        pin_memory=_pins_memory(run),
        prefetch_factor=args.dataloader_prefetch_factor,
        # every evaluation makes a new loader, whose persistent workers would outlive it
        persistent_workers=args.dataloader_persistent_workers and steps.explore,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        worker_init_fn=seed if num_workers else None,
    )
    keep_workers(loader)
    return loader


def _check_labels(run: Run, sampler: LengthAwareSampler, index: SequenceIndex) -> None:
    """Raises ValueError if no label counts in some step of the training, whose mean loss would be 0 / 0."""
    args, labelled = run.args, run.sets.labelled("train_dataset")
    batches_per_step, is_limited = args.gradient_accumulation_steps, args.max_steps > 0
    steps_per_epoch = -(-len(sampler) // batches_per_step)
    num_epochs = -(-args.max_steps // steps_per_epoch) if is_limited else math.ceil(args.num_train_epochs)
    most_steps = args.max_steps if is_limited else math.ceil(args.num_train_epochs * steps_per_epoch)
    found = step_without_labels(sampler, labelled, num_epochs, most_steps, batches_per_step)
    if found is None:
        return
    number, sequences = found
    raise ValueError(
        f"step {number} would have no label that counts: its {len(sequences)} sequences are of train_dataset row "
        f"{listed(sorted({str(index.rows[each]) for each in sequences}, key=int))}, and {int((~labelled).sum())} of "
        f"{len(labelled)} sequences have none ({LABELS_THAT_COUNT}); give a step more sequences "
        f"(per_device_train_batch_size, gradient_accumulation_steps, tokens_per_step), remove such rows, or raise max_length if "
        f"labels were cut off"
    )


def _stream_loader(run: Run, stream: Any, global_step: Callable[[], int]) -> DataLoader[Any]:
    """Planned steps of an iterable training set."""
    args, config = run.args, run.config
    _check_resumed(run, "stream", None, config.long_sequences != "error")
    lookahead = config.lookahead_batches if config.lookahead_batches is not None else _LOOKAHEAD_BATCHES
    source = StreamSource(stream, run.sets.stream_rules(stream), config.stream_readers, lookahead)
    start, per_step = run.recorder.start(config.stream_readers), args.gradient_accumulation_steps
    # the last step of an epoch may have had fewer batches than others
    num_skipped = -(-start.batches // per_step) * per_step
    planned = PlannedStream(source, start, run.source, lambda: global_step() * per_step, num_skipped)
    run.recorder.follow(planned.place)
    return planned.loader(_pins_memory(run))


def _check_resumed(run: Run, train_dataset: str, shuffle_seed: int | None, is_cut: bool) -> None:
    """Records the run's data for later checkpoints; raises on every rank if it resumes from a checkpoint with other data."""
    cut_tokens = run.sets.longest_sequence if is_cut else None
    run.recorder.describe(data_settings(run.args, run.config, train_dataset, shuffle_seed, cut_tokens))
    # on every rank, since each may see a checkpoint of its own
    raise_together(run.recorder.problems(), run.control)


def _batches_done(run: Run, per_epoch: int, global_step: Callable[[], int]) -> int:
    """Number of batches that a resumed run has already used; an epoch has `per_epoch` batches."""
    return 0 if run.args.ignore_data_skip else plans_done(global_step(), per_epoch, run.args)


def _pins_memory(run: Run) -> bool:
    return run.args.dataloader_pin_memory and run.args.device.type == "cuda"

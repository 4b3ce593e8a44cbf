"""The data half of `LongContextMixin`: checked sets, their sequences, and loaders of planned steps."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset
from hf_longctx.hf.data.planned_batches import PlannedBatchSampler
from hf_longctx.hf.data.resume import DataRecorder, data_settings, plans_done, sequences_per_step
from hf_longctx.hf.data.sampler import IntArray, LengthAwareSampler, SequenceIndex
from hf_longctx.hf.data.scan import DatasetScan, token_rows, too_long
from hf_longctx.hf.data.scan_cache import scan_on_every_rank
from hf_longctx.hf.data.streaming import PlannedStream, StreamBatches, StreamRules, is_stream, stream_problems
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import differing_settings, gather_objects, raise_together
from hf_longctx.hf.start.setup import PlanningSetup
from hf_longctx.hf.start.stages import loaded_ranges, own_stage
from hf_longctx.hf.start.trl import read_columns

logger = logging.getLogger(__name__)

# the mixin stands in front of any Trainer subclass; to a type checker it is one
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class LongContextDataLoader(DataLoader):  # type: ignore[type-arg]
    """A `DataLoader` over planned steps that passes the epoch on to its sampler, as the trainer expects."""

    def set_epoch(self, epoch: int) -> None:
        """Selects the shuffle of `epoch`."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class PlannedDataMixin(_TrainerBase):
    """The part of `LongContextMixin` that checks sets of sequences and loads them step by planned step.

    `_prepare_data` comes before `Trainer` is built, `_source` and `_recorder` behind it.
    """

    longctx_config: LongContextConfig
    _control: dist.ProcessGroup | None
    _source: PlanSource
    _recorder: DataRecorder

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Planned steps of the training set; not sharded again by accelerate, since every rank draws the same steps."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        if is_stream(self.train_dataset):
            return self._stream_loader(self.train_dataset)
        index = self._index("train_dataset", self.train_dataset)
        sampler = LengthAwareSampler(
            index.lengths,
            sequences_per_step=self.args.per_device_train_batch_size * self.args.world_size,
            tokens_per_step=self.longctx_config.tokens_per_step,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            shuffle=not str(self.args.train_sampling_strategy).endswith("sequential"),
            drop_last=self.args.dataloader_drop_last,
        )
        if not len(sampler):
            raise ValueError(
                f"dataloader_drop_last leaves no step: {len(index)} sequences are fewer than one step of "
                f"{sampler.sequences_per_step}; set it to False or lower per_device_train_batch_size"
            )
        scan = self._scans["train_dataset"][1]
        is_cut = bool((scan.lengths > self.longest_sequence).any())
        self._check_resumed(scan.digest, sampler.seed if sampler.shuffle else None, is_cut)
        done = partial(self._batches_done, len(sampler))
        steps = PlannedBatchSampler(sampler, index.lengths, self._source, True, done)
        return self._loader(self.train_dataset, index, steps)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Planned steps of an evaluation set, in its order; the set given here is checked as those given at start."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        return self._eval_loader("eval_dataset", dataset)

    def _eval_loader(self, name: str, dataset: Any) -> DataLoader[Any]:
        """Planned steps of a set in its order; `name` is how messages call it."""
        dataset = read_columns(type(self), dataset)
        index = self._index(name, dataset)
        per_step = self.args.per_device_eval_batch_size * self.args.world_size
        sampler = LengthAwareSampler(index.lengths, per_step, self.longctx_config.tokens_per_step, shuffle=False)
        return self._loader(dataset, index, PlannedBatchSampler(sampler, index.lengths, self._source, explore=False))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Sequences of one optimizer step over all ranks; with a token budget, on average (not known for a stream)."""
        if self.longctx_config.tokens_per_step is None or is_stream(self.train_dataset):
            return sequences_per_step(args)
        lengths = self._index("train_dataset", self.train_dataset).lengths
        return max(1, round(self.longctx_config.tokens_per_step / float(lengths.mean())))

    def _prepare_data(self, setup: PlanningSetup, model: Any, args: TrainingArguments, datasets: dict[str, Any]) -> None:
        """Takes over the limits of sequences and checks every set given at start."""
        self._planner_config, self._max_length, self._vocab_size = setup.planner, setup.max_length, setup.costs.model.vocab_size
        self._room_tokens = setup.room_tokens
        self._scans: dict[str, tuple[Any, DatasetScan]] = {}
        self._told: set[str] = set()
        self._check_data(model, args, datasets)

    def _check_data(self, model: Any, args: TrainingArguments, datasets: dict[str, Any]) -> None:
        """Reads every set's row lengths; raises on every rank for unusable rows or sets that differ between ranks."""
        self._shows_progress = not args.disable_tqdm
        problems = stream_problems(datasets, self.longctx_config, args)
        settings: dict[str, Any] = {"model config": model.config.to_json_string()}
        # stages that were loaded alone hold different weights
        if (ranges := loaded_ranges(model)) is None:
            settings["initial weights"] = _weights_digest(model)
        else:
            settings["layers of the stages"] = ranges
            problems += _differing_stages(own_stage(len(ranges)), model, self._control)
        given = {name: dataset for name, dataset in datasets.items() if dataset is not None and not is_stream(dataset)}
        for name, scan in self._scan(given).items():
            problems += scan.problems
            self._scans[name] = (given[name], scan)
            settings[f"tokens of {name}"] = scan.digest
        problems += differing_settings(settings, self._control)
        raise_together(problems, self._control)

    def _scan(self, sets: dict[str, Any]) -> dict[str, DatasetScan]:
        """Lengths and problems of named sets, sequences that are too long included where these are errors."""
        planner = self._planner_config
        scans = scan_on_every_rank(sets, self._vocab_size, self._shows_progress)
        if self.longctx_config.long_sequences != "error":
            return scans
        room = self._room_tokens
        return {
            name: scan
            if scan.problems
            else replace(scan, problems=too_long(scan.lengths, self._max_length, room, planner.tokens_per_rank, name))
            for name, scan in scans.items()
        }

    def _index(self, name: str, dataset: Any) -> SequenceIndex:
        """The sequences of a set after truncation or splitting; a set that was not given at start is checked now."""
        known, scan = self._scans.get(name, (None, None))
        if scan is None or known is not dataset:
            raise_together(stream_problems({name: dataset}, self.longctx_config, self.args), self._control)
            scan = self._scan({name: dataset})[name]
            problems = scan.problems + differing_settings({f"tokens of {name}": scan.digest}, self._control)
            raise_together(problems, self._control)
            self._scans[name] = (dataset, scan)
        limit = self.longest_sequence
        index = SequenceIndex.build(scan.lengths, limit, self.longctx_config.long_sequences)
        if self.args.process_index == 0 and known is not None and name not in self._told:
            self._told.add(name)
            _tell_cuts(name, scan.lengths, index, limit)
        return index

    def _loader(self, dataset: Any, index: SequenceIndex, steps: PlannedBatchSampler) -> DataLoader[Any]:
        args, num_workers = self.args, self.args.dataloader_num_workers
        return LongContextDataLoader(
            PlannedDataset(token_rows(dataset), index),
            batch_sampler=steps,
            collate_fn=LongContextCollator(),
            num_workers=num_workers,
            pin_memory=self._pins_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            # a loader is made for every evaluation, and its workers would outlive it
            persistent_workers=args.dataloader_persistent_workers and steps.explore,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=args.process_index) if num_workers else None,
        )

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a sequence: longer rows are errors, or are cut."""
        return min(self._max_length, self._room_tokens)

    def _stream_loader(self, stream: Any) -> DataLoader[Any]:
        """Planned steps of an iterable training set, read by rank 0 alone."""
        args, config, planner = self.args, self.longctx_config, self._planner_config
        assert config.lookahead_batches is not None
        self._check_resumed("stream", None, config.long_sequences != "error")
        rules = StreamRules(
            name="train_dataset",
            vocab_size=self._vocab_size,
            max_length=self._max_length,
            tokens_per_rank=planner.tokens_per_rank,
            room_tokens=self._room_tokens,
            long_sequences=config.long_sequences,
            sequences_per_step=args.per_device_train_batch_size * args.world_size,
            tokens_per_step=config.tokens_per_step,
            drop_last=args.dataloader_drop_last,
        )
        batches = StreamBatches(stream, rules, self._recorder.start())
        # an epoch of the trainer is the whole run, since nobody knows when the stream ends
        per_epoch = args.max_steps * args.gradient_accumulation_steps
        done = partial(self._batches_done, per_epoch)
        planned = PlannedStream(batches, config.lookahead_batches, self._source, lambda: done() % per_epoch)
        self._recorder.cursor = lambda: planned.cursor
        return planned.loader(self._pins_memory)

    def _check_resumed(self, train_dataset: str, shuffle_seed: int | None, is_cut: bool) -> None:
        """Tells the checkpoints to come which data this is; raises on every rank if the one resumed from had other data."""
        settings = data_settings(
            self.args, self.longctx_config, train_dataset, shuffle_seed, self.longest_sequence if is_cut else None
        )
        self._recorder.settings = settings
        raise_together(self._recorder.problems() if self.args.process_index == 0 else [], self._control)

    def _batches_done(self, per_epoch: int) -> int:
        """Batches that a resumed run has behind it, where an epoch has `per_epoch`."""
        return 0 if self.args.ignore_data_skip else plans_done(self.state.global_step, per_epoch, self.args)

    @property
    def _pins_memory(self) -> bool:
        return self.args.dataloader_pin_memory and self.args.device.type == "cuda"


def _tell_cuts(name: str, row_lengths: IntArray, index: SequenceIndex, limit: int) -> None:
    """Says once how many rows were cut, and what that cost."""
    num_long = int((row_lengths > limit).sum())
    if num_long:
        dropped = int(row_lengths.sum() - index.lengths.sum())
        what = (
            f"truncated, {dropped} tokens dropped" if dropped else f"split, {len(index)} sequences from {len(row_lengths)} rows"
        )
        logger.warning("%s: %d rows above %d tokens %s", name, num_long, limit, what)


def _differing_stages(stage: int, model: nn.Module, control: dist.ProcessGroup | None) -> list[str]:
    """A problem if the ranks of one stage hold different weights, as random adapters would be. Collective."""
    found = gather_objects((stage, _weights_digest(model)), control)
    differing = sorted({number for number, _ in found if len({digest for other, digest in found if other == number}) > 1})
    return [
        f"initial weights differ between the ranks of stage {number}; call set_seed(...) with one number before get_peft_model"
        for number in differing
    ]


def _weights_digest(model: nn.Module) -> str:
    """A hash over one sum per parameter: equal on all ranks if they start from the same weights."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]

"""Checks the sets of sequences that a run reads under plans, on every rank, and cuts rows that are too long."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels.task import NEXT_TOKEN, HeadTask
from hf_longctx.hf.data.sampler import IntArray, SequenceIndex
from hf_longctx.hf.data.scan import DatasetScan, ScannedRows, too_long
from hf_longctx.hf.data.scan_cache import scan_on_every_rank
from hf_longctx.hf.data.streams.rows import StreamRules
from hf_longctx.hf.data.streams.sources import is_stream, source_digest, stream_problems
from hf_longctx.hf.ranks.agreement import differing_settings, gather_objects, raise_together
from hf_longctx.hf.start.setup import RunSetup
from hf_longctx.hf.start.stages import loaded_ranges, own_stage

logger = logging.getLogger(__name__)

# name of a set that is given to `predict`
TEST_SET = "test_dataset"


class SequenceSets:
    """The row lengths of a run's sets, by the name of the set in messages, and the rules for rows that are too long.

    task: the labels of the sets.
    """

    def __init__(
        self,
        config: LongContextConfig,
        args: TrainingArguments,
        setup: RunSetup,
        control: dist.ProcessGroup | None,
        task: HeadTask = NEXT_TOKEN,
    ) -> None:
        self.config, self.args, self.setup, self.control, self.task = config, args, setup, control, task
        self._scans: dict[str, tuple[Any, DatasetScan]] = {}
        # names of the sets whose cut rows were reported already
        self._told: set[str] = set()

    def task_of(self, name: str) -> HeadTask:
        """The labels of a set; a set to predict need not have any, if the model classifies."""
        is_marked = name == TEST_SET and self.task.kind != "next_token"
        return replace(self.task, marks=True) if is_marked else self.task

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a sequence may have; longer rows are errors, or are cut."""
        return min(self.setup.max_length, self.setup.room_tokens)

    def check(self, model: Any, datasets: Mapping[str, Any]) -> None:
        """Reads every set's row lengths; raises on every rank for unusable rows, and if sets or weights differ between ranks."""
        problems = stream_problems(dict(datasets), self.config, self.args)
        settings: dict[str, Any] = {"model config": model.config.to_json_string()}
        # ranks of different stages hold different weights if each loaded its own stage alone
        if (ranges := loaded_ranges(model)) is None:
            settings["initial weights"] = _weights_digest(model)
        else:
            settings["layers of the stages"] = ranges
            problems += _differing_stages(own_stage(len(ranges)), model, self.control)
        if self.config.stream_readers > 1 and is_stream(stream := datasets.get("train_dataset")):
            # each rank takes its own readers' shards
            settings["sources and shuffles of train_dataset"] = source_digest(stream)
        given = {name: dataset for name, dataset in datasets.items() if dataset is not None and not is_stream(dataset)}
        for name, scan in self._scan(given).items():
            problems += scan.problems
            self._scans[name] = (given[name], scan)
            settings[f"tokens of {name}"] = scan.digest
        problems += differing_settings(settings, self.control)
        problems += self._differing_rows({name: self._scans[name][1] for name in given})
        raise_together(problems, self.control)

    def _differing_rows(self, scans: Mapping[str, DatasetScan]) -> list[str]:
        """Problems with the first row that differs between ranks, for sets that run code to make rows. Collective."""
        found = gather_objects({name: (scan.digest, scan.row_digests is not None) for name, scan in scans.items()}, self.control)
        problems = []
        # every rank takes the same sets here, even if some rank was given others
        for name in [name for name in found[0] if all(each.get(name, ("", False))[1] for each in found)]:
            if len({each[name] for each in found}) > 1:
                everyone = gather_objects((scans[name].lengths, scans[name].row_digests), self.control)
                problems += _first_difference(name, everyone)
        return problems

    def index(self, name: str, dataset: Any) -> SequenceIndex:
        """The sequences of a set after truncation or splitting; a set that was not given at the start is checked now."""
        known, scan = self._scans.get(name, (None, None))
        if scan is None or known is not dataset:
            self._told.discard(name)
            raise_together(stream_problems({name: dataset}, self.config, self.args), self.control)
            scan = self._scan({name: dataset})[name]
            problems = scan.problems + differing_settings({f"tokens of {name}": scan.digest}, self.control)
            problems += self._differing_rows({name: scan})
            raise_together(problems, self.control)
            self._scans[name] = (dataset, scan)
        limit = self.longest_sequence
        index = SequenceIndex.build(scan.lengths, limit, self.config.long_sequences, scan.documents)
        if self.args.process_index == 0 and name not in self._told:
            self._told.add(name)
            _tell_cuts(name, scan.sequence_lengths, index, limit)
        return index

    def longest_rows(self, name: str, count: int) -> list[int]:
        """Tokens of the `count` longest rows of a set, at most those of a sequence; empty for a set that was not scanned."""
        if name not in self._scans:
            return []
        lengths: list[int] = np.sort(self._scans[name][1].sequence_lengths)[::-1][:count].clip(1, self.longest_sequence).tolist()
        return lengths

    def scanned(self, name: str) -> ScannedRows:
        """The rows of a set as they were at the start."""
        return ScannedRows(name, self._scans[name][1])

    def digest(self, name: str) -> str:
        """The hash of all tokens of a set."""
        return self._scans[name][1].digest

    def is_cut(self, name: str) -> bool:
        """Whether some row of a set is longer than a sequence may be."""
        return bool((self._scans[name][1].sequence_lengths > self.longest_sequence).any())

    def stream_rules(self) -> StreamRules:
        """The rules by which an iterable training set is read and cut."""
        args, config = self.args, self.config
        return StreamRules(
            name="train_dataset",
            vocab_size=self.setup.costs.model.vocab_size,
            max_length=self.setup.max_length,
            tokens_per_rank=self.setup.planner.tokens_per_rank,
            room_tokens=self.setup.room_tokens,
            long_sequences=config.long_sequences,
            sequences_per_step=args.per_device_train_batch_size * args.world_size,
            tokens_per_step=config.tokens_per_step,
            drop_last=args.dataloader_drop_last,
            placeholders=self.setup.placeholders,
        )

    def _scan(self, sets: dict[str, Any]) -> dict[str, DatasetScan]:
        """Lengths and problems of named sets; with long_sequences="error", rows that are too long are problems too."""
        setup = self.setup
        show_progress = not self.args.disable_tqdm
        # a set to predict is always scanned alone
        task = self.task_of(TEST_SET) if TEST_SET in sets else self.task
        scans = scan_on_every_rank(sets, setup.costs.model.vocab_size, show_progress, setup.placeholders, task)
        if self.config.long_sequences != "error":
            return scans
        limits = setup.max_length, setup.room_tokens, setup.planner.tokens_per_rank
        return {
            name: scan if scan.problems else replace(scan, problems=too_long(scan.sequence_lengths, *limits, name, scan.rows()))
            for name, scan in scans.items()
        }


def _first_difference(name: str, everyone: list[Any]) -> list[str]:
    """Problem with the first row that differs between rank 0 and another rank, given row lengths and row hashes of every rank."""
    (lengths, digests), *others = everyone
    for rank, (other_lengths, other_digests) in enumerate(others, start=1):
        same = min(len(digests), len(other_digests))
        if len(rows := np.flatnonzero(digests[:same] != other_digests[:same])):
            row = int(rows[0])
            return [
                f"{name} row {row} is not the same on rank 0 ({lengths[row]} tokens) and rank {rank} ({other_lengths[row]} "
                f"tokens); give every rank the same rows, and seed random augmentation by the row's number, not by the rank"
            ]
    return []


def _tell_cuts(name: str, row_lengths: IntArray, index: SequenceIndex, limit: int) -> None:
    """Logs how many rows were cut, and how many tokens were dropped or sequences gained."""
    num_long = int((row_lengths > limit).sum())
    if num_long:
        dropped = int(row_lengths.sum() - index.lengths.sum())
        what = f"truncated, {dropped:,} tokens dropped" if dropped else f"split, which makes {len(index):,} sequences"
        logger.warning(
            "%s: %s of %s rows are longer than %s tokens and were %s",
            *(name, f"{num_long:,}", f"{len(row_lengths):,}", limit, what),
        )


def _differing_stages(stage: int, model: nn.Module, control: dist.ProcessGroup | None) -> list[str]:
    """Problems with stages whose ranks hold different weights, such as adapters drawn at random on each rank. Collective."""
    found = gather_objects((stage, _weights_digest(model)), control)
    differing = sorted({number for number, _ in found if len({digest for other, digest in found if other == number}) > 1})
    return [
        f"initial weights differ between the ranks of stage {number}; call set_seed(...) with one number before get_peft_model"
        for number in differing
    ]


def _weights_digest(model: nn.Module) -> str:
    """A hash over one sum per parameter: equal on all ranks if they start from the same weights.

    Bits are added as whole numbers, whose sum does not depend on the number of threads or the kind of processor.
    """
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [parameter.detach().view(whole[parameter.element_size()]).sum(dtype=torch.int64) for parameter in model.parameters()]
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()[:16]

"""Checks the sets of sequences that a run reads under plans, on every rank, and cuts rows that are too long."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from transformers import TrainingArguments

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.fields import MEDIA, token_types_problem, unread_columns
from hf_longctx.hf.data.labels import NEXT_TOKEN, HeadTask, have_labels
from hf_longctx.hf.data.later_pieces import RowChanged, tables_of
from hf_longctx.hf.data.media.processors import FileReader
from hf_longctx.hf.data.media.rows import Medium, tower_work
from hf_longctx.hf.data.sampler import IntArray, SequenceIndex
from hf_longctx.hf.data.scan import DatasetScan, ScannedRows, images_too_long, is_empty, scan_on_every_rank, too_long
from hf_longctx.hf.data.streams.rows import StreamMedia, StreamRules
from hf_longctx.hf.data.streams.sources import is_stream, source_digest, stream_length, stream_problems, whole
from hf_longctx.hf.models.facts import TOKEN_TYPES, ModelFacts
from hf_longctx.hf.models.media import sees_images_both_ways
from hf_longctx.hf.models.towers import tower_parameters
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.rules.collators import Collation
from hf_longctx.hf.rules.media import media_problems, source_columns
from hf_longctx.hf.start.setup import settings_for
from hf_longctx.hf.start.stages import own_stage
from hf_longctx.plan.core.types import Blocks, Media, TowerWork
from hf_longctx.plan.model.towers import TowerSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.setup import Setup

logger = logging.getLogger(__name__)

# name of a set that is given to `predict`
TEST_SET = "test_dataset"


def named_sets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """The sets of a trainer by their names in messages; `eval_dataset` may be a dict of sets, each of which gets a name.

    Iterable evaluation sets become wholes, whose rows can be looked up.
    """
    return {"train_dataset": train_dataset, **evaluation_sets(eval_dataset)}


def evaluation_sets(eval_dataset: Any) -> dict[str, Any]:
    """The evaluation sets by their names in messages: one, or those of a dict."""
    if not isinstance(eval_dataset, dict):
        return {"eval_dataset": whole(eval_dataset)}
    return {f"eval_dataset[{name!r}]": whole(dataset) for name, dataset in eval_dataset.items()}


def evaluation_set_problems(eval_dataset: Any) -> list[str]:
    """Problems with a dict of evaluation sets, whose names become parts of the names of metrics."""
    if not isinstance(eval_dataset, dict):
        return []
    if not eval_dataset:
        return ["eval_dataset is an empty dict; give it a set, or leave it out"]
    problems = [
        f"eval_dataset has the key {name!r} ({type(name).__name__}), but keys are part of the names of metrics; use text"
        for name in eval_dataset
        if not isinstance(name, str)
    ]
    return problems + [
        f"eval_dataset[{name!r}] is {'missing (None)' if dataset is None else 'a dict of sets itself'}; give one set for each key"
        for name, dataset in eval_dataset.items()
        if dataset is None or isinstance(dataset, dict)
    ]


def chosen_evaluation_set(given: Any, eval_dataset: Any) -> tuple[str, Any]:
    """The set that a loader is asked for, and its name in messages.

    given: a set, the name of one in `eval_dataset`, or None for the only one. Raises ValueError if there is none.
    """
    if isinstance(given, str):
        if not isinstance(eval_dataset, dict) or given not in eval_dataset:
            known = f"has {', '.join(map(repr, eval_dataset))}" if isinstance(eval_dataset, dict) else "is no dict of sets"
            raise ValueError(
                f"evaluation was asked for the set {given!r}, but eval_dataset {known}; pass one of its keys, or a set"
            )
        return f"eval_dataset[{given!r}]", whole(eval_dataset[given])
    dataset = whole(eval_dataset if given is None else given)
    if dataset is None:
        raise ValueError("evaluation needs an eval_dataset; pass one to the trainer or to evaluate()")
    if isinstance(dataset, dict):
        raise ValueError(
            f"a loader reads one evaluation set, but was asked for a dict of them ({', '.join(map(str, dataset))}); ask for "
            f"one by its key, or call evaluate(), which reads all"
        )
    own = evaluation_sets(eval_dataset)
    return next((name for name, known in own.items() if known is dataset), "eval_dataset"), dataset


class SequenceSets:
    """The row lengths of a run's sets, by the name of the set in messages, and the rules for rows that are too long.

    task: the labels of the sets. collation: what a user's collator makes of rows. processor: the processing class, which reads
    images.
    """

    def __init__(
        self,
        config: LongContextConfig,
        args: TrainingArguments,
        setup: Setup,
        control: dist.ProcessGroup | None,
        task: HeadTask = NEXT_TOKEN,
        collation: Collation | None = None,
        processor: Any = None,
    ) -> None:
        self.config, self.args, self.setup, self.control, self.task = config, args, setup, control, task
        self.collation = collation if collation is not None else Collation(None)
        self.processor = processor
        # the model, whose towers read images
        self._facts: ModelFacts | None = None
        # whether rows of a set that was given at the start have images; None before these sets were read
        self._reads_media: bool | None = None
        # the rows of scanned sets as the collator makes them
        self._rows: dict[str, Any] = {}
        self._scans: dict[str, tuple[Any, DatasetScan]] = {}
        # for every sequence of a scanned set, whether a label counts in it
        self._labelled: dict[str, NDArray[np.bool_]] = {}
        # why rows of an iterable training set may have no images; empty if they may
        self._no_images = StreamMedia().problem
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

    def check(self, facts: ModelFacts, datasets: Mapping[str, Any]) -> None:
        """Reads every set's row lengths; raises on every rank for unusable rows, and if sets or weights differ between ranks."""
        problems, model = stream_problems(dict(datasets), self.config, self.args), facts.model
        self._facts = facts
        settings: dict[str, Any] = {"model config": model.config.to_json_string()}
        # ranks of different stages hold different weights if each loaded its own stage alone
        if (ranges := facts.loaded_ranges) is None:
            settings["initial weights"] = _weights_digest(model)
        else:
            settings["layers of the stages"] = ranges
            problems += _differing_stages(own_stage(len(ranges)), model, self.control)
        if is_stream(stream := datasets.get("train_dataset")):
            settings["length of train_dataset"] = stream_length(stream, self.config)
            problems += self._stream_media_problems(facts, stream)
            if self.config.stream_readers > 1:
                # each rank takes its own readers' shards
                settings["sources and shuffles of train_dataset"] = source_digest(stream)
        given = {name: dataset for name, dataset in datasets.items() if dataset is not None and not is_stream(dataset)}
        for name, scan in self._scan(given).items():
            problems += scan.problems
            self._scans[name] = (given[name], scan)
            settings[f"tokens of {name}"] = scan.digest
        problems += self._differing_rows({name: self._scans[name][1] for name in given})
        raise_together(problems, self.control, alike=settings)
        self._reads_media = any(map(self.has_media, datasets))
        if self.has_media("train_dataset") and self.args.process_index == 0:
            _log_towers(model, self.setup.costs.model.tower)

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
            late = stream_problems({name: dataset}, self.config, self.args) + self.collation.problems(dataset, name)
            raise_together(late, self.control)
            scan = self._scan({name: dataset})[name]
            problems = scan.problems + self._differing_rows({name: scan})
            raise_together(problems, self.control, alike={f"tokens of {name}": scan.digest})
            self._scans[name] = (dataset, scan)
        index = self._cut(scan)
        if self.args.process_index == 0 and name not in self._told:
            self._told.add(name)
            _log_cuts(name, scan.sequence_lengths, index, self.longest_sequence)
            _log_unlabelled(name, self._labelled[name])
            # a user's collator may read columns that are in none of the rows that it makes
            _log_left_out(name, self._rows[name], scan)
        return index

    def rows(self, name: str) -> Any:
        """The rows of a scanned set, as the collator makes them."""
        return self._rows[name]

    def labelled(self, name: str) -> NDArray[np.bool_]:
        """Whether a label counts in each sequence of a set's index."""
        return self._labelled[name]

    def longest_rows(self, name: str, count: int) -> list[int]:
        """Tokens of the `count` longest rows of a set, at most those of a sequence; empty for a set that was not scanned."""
        if name not in self._scans:
            return []
        lengths: list[int] = np.sort(self._scans[name][1].sequence_lengths)[::-1][:count].clip(1, self.longest_sequence).tolist()
        return lengths

    def scanned(self, name: str) -> ScannedRows:
        """The rows of a set as they were at the start."""
        return ScannedRows(name, self._scans[name][1])

    @property
    def reads_media(self) -> bool:
        """Whether rows of a set that was given at the start have images."""
        return bool(self._reads_media)

    def has_media(self, name: str) -> bool:
        """Whether rows of a scanned set have images, or those of an iterable training set may have some."""
        if name not in self._scans:
            return name == "train_dataset" and not self._no_images
        return self._scans[name][1].media_features is not None

    def have_media(self, name: str, index: SequenceIndex) -> NDArray[np.bool_] | None:
        """Whether each sequence of a set has images, if weights are sharded; None if no loader needs to know."""
        features = self._scans[name][1].media_features
        if features is None or self.setup.costs.parameters == "replicated":
            return None
        return features[index.rows] > 0

    def blocks_of(self, name: str, index: SequenceIndex) -> Callable[[list[int]], tuple[Blocks, ...]]:
        """Returns a function from sequences of a set's index to their blocks; () if none of them has any.

        Sequences with images are whole rows.
        """
        blocks = self._scans[name][1].media_blocks
        if blocks is None or self._facts is None or not sees_images_both_ways(self._facts.model):
            return lambda _: ()

        def found(sequences: list[int]) -> tuple[Blocks, ...]:
            each = tuple(tuple((begin, end) for begin, end in own) for own in _of_rows(blocks, index.rows[sequences]))
            return each if any(each) else ()

        return found

    def media_of(self, name: str, index: SequenceIndex) -> Callable[[list[int]], tuple[Media, ...]]:
        """Returns a function from sequences of a set's index to what towers read for them; () if none of them has images."""
        media, tower = self._scans[name][1].media, self.setup.costs.model.tower
        if media is None or tower.is_empty:
            return lambda _: ()

        def found(sequences: list[int]) -> tuple[Media, ...]:
            each = tuple(tuple(_tower_work(own, tower)) for own in _of_rows(media, index.rows[sequences]))
            return each if any(each) else ()

        return found

    def reader(self, name: str) -> FileReader | None:
        """Opens the images and videos of a scanned set; None if its rows have none."""
        if not self.has_media(name):
            return None
        assert self._facts is not None
        return FileReader.of(self._facts.model, self.processor)

    def digest(self, name: str) -> str:
        """The hash of all tokens of a set."""
        return self._scans[name][1].digest

    def is_cut(self, name: str) -> bool:
        """Whether some row of a set is longer than a sequence may be."""
        return bool((self._scans[name][1].sequence_lengths > self.longest_sequence).any())

    def stream_rules(self, stream: Any) -> StreamRules:
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
            token_types="always" if self._facts is None else self._facts.token_types,
            collate=self.collation.stream_row,
            num_rows=stream_length(stream, config),
            media=self._stream_media(),
        )

    def _stream_media(self) -> StreamMedia:
        """Returns the ways in which images in rows of an iterable training set are read."""
        if self._no_images or self._facts is None:
            return StreamMedia(self._no_images)
        model, costs = self._facts.model, self.setup.costs
        # a copy, since threads of readers may tokenise rows by the processor meanwhile
        reader = FileReader.of(model, copy.deepcopy(self.processor))
        return StreamMedia("", reader, costs.model.tower, sees_images_both_ways(model), costs.parameters != "replicated")

    def _stream_media_problems(self, facts: ModelFacts, stream: Any) -> list[str]:
        """Problems with images in rows of an iterable training set, if its columns say that it has some.

        Without known columns its rows may have images if the processor reads them; otherwise the first row with some is refused.
        """
        columns, problems = source_columns(stream), media_problems(facts, self.processor, self.setup)
        self._no_images = problems[0] if problems else ""
        if columns is None:
            return []
        if MEDIA in columns:
            return problems
        self._no_images = (
            f"rows have images, but the columns of train_dataset ({', '.join(columns)}) have no {MEDIA!r}; name it there"
        )
        return []

    def _scan(self, sets: dict[str, Any]) -> dict[str, DatasetScan]:
        """Lengths and problems of named sets; with long_sequences="error", rows that are too long are problems too."""
        setup = self.setup
        show_progress = not self.args.disable_tqdm
        # a set to predict is always scanned alone
        task = self.task_of(TEST_SET) if TEST_SET in sets else self.task
        sets = {name: self.collation.rows(dataset) for name, dataset in sets.items()}
        self._rows |= sets
        scans = scan_on_every_rank(sets, setup.costs.model.vocab_size, show_progress, setup.placeholders, task)
        limits = setup.max_length, setup.room_tokens, setup.planner.tokens_per_rank
        for name, scan in scans.items():
            problems = list(scan.problems)
            if is_empty(sets[name]) and (limit := getattr(self.args, "max_length", None)) is not None:
                problems = [
                    f"{name} has no rows once its trainer has cut them to max_length={limit} and dropped those without a label "
                    f"that counts; raise max_length in the trainer's arguments, or check the dataset's path, split and labels"
                ]
            if not problems and self._facts is not None and (problem := self._types_problem(name, sets[name])):
                problems = [problem]
            if not problems and scan.media_features is not None:
                problems = self._media_problems(name, scan) + self._late_media_problems(name)
            if not problems and self.config.long_sequences == "error":
                problems = [
                    f"{problem}{self._room_for(int(scan.sequence_lengths.max()))}"
                    for problem in too_long(scan.sequence_lengths, *limits, name, scan.rows())
                ]
            if not problems:
                problems = self._label_problems(name, sets[name], scan, task)
            scans[name] = replace(scan, problems=problems)
        return scans

    def _types_problem(self, name: str, dataset: Any) -> str | None:
        """Problem with types of tokens in rows that the model would read."""
        assert self._facts is not None
        if isinstance(dataset, datasets.Dataset):
            rows = dataset.with_format(None)[TOKEN_TYPES] if TOKEN_TYPES in dataset.column_names else ()
            return token_types_problem(rows, name, self._facts.token_types)
        # all rows have the columns of the first
        rows = (dataset[number] for number in range(len(dataset) if TOKEN_TYPES in dataset[0] else 0))
        return token_types_problem(rows, name, self._facts.token_types)

    def _media_problems(self, name: str, scan: DatasetScan) -> list[str]:
        """Problems with images in rows: of the run, or of the longest row that would have to be cut."""
        assert self._facts is not None and scan.media_features is not None
        if problems := media_problems(self._facts, self.processor, self.setup):
            return problems
        lengths = np.where(scan.media_features > 0, scan.lengths, 0)
        row = int(lengths.argmax())
        if lengths[row] <= self.longest_sequence and sees_images_both_ways(self._facts.model):
            return self._block_problems(name, row, scan)
        if lengths[row] <= self.longest_sequence or self.config.long_sequences == "error":
            return []
        return [images_too_long(f"{name} row {row}", lengths[row], scan.media_features[row], self.longest_sequence)]

    def _block_problems(self, name: str, row: int, scan: DatasetScan) -> list[str]:
        """Problem with the longest row with images if these see each other both ways, and no plan has room for it."""
        assert scan.media_blocks is not None
        index = SequenceIndex.build(scan.lengths[row : row + 1], self.longest_sequence, "truncate")
        own = scan.media_blocks[scan.media_blocks[:, 0] == row, 1:].tolist()
        blocks = (tuple((begin, end) for begin, end in own),)
        try:
            plan_step(0, index.lengths.tolist(), self.setup.costs, self.setup.planner, blocks=blocks)
        except ValueError as error:
            return [f"{name} row {row} has images whose tokens see each other both ways, and cannot be planned alone: {error}"]
        return []

    def _late_media_problems(self, name: str) -> list[str]:
        """Problem with images in a set that comes after the start, if shards of towers were made for rows of text."""
        if self._reads_media is not False or self.setup.costs.parameters == "replicated":
            return []
        return [
            f"{name} has rows with images, but the sets at the start of the run had none, and its shards are made for text; give "
            f"this set to the trainer at the start (eval_dataset)"
        ]

    def _room_for(self, num_tokens: int) -> str:
        """Settings with which memory would hold a sequence that only memory refuses; empty if there are none."""
        setup = self.setup
        if not setup.room_tokens < num_tokens <= setup.max_length or setup.num_stages > 1:
            return ""
        found = settings_for(self.config, setup, num_tokens)
        return f"; memory would hold it, by formula, with {found}" if found else ""

    def _cut(self, scan: DatasetScan) -> SequenceIndex:
        return SequenceIndex.build(scan.lengths, self.longest_sequence, self.config.long_sequences, scan.documents)

    def _label_problems(self, name: str, dataset: Any, scan: DatasetScan, task: HeadTask) -> list[str]:
        """Finds the sequences of a set in which a label counts; a problem if there are none, since its labels were cut off."""
        index = self._cut(scan)

        def read(rows: IntArray) -> Iterator[pa.Table]:
            return tables_of(dataset, rows, ScannedRows(name, scan), task)

        try:
            self._labelled[name] = have_labels(index, scan.sequence_lengths, scan.first_labels, task, read)
        except RowChanged as error:
            # perhaps on this rank alone, for which the others wait where problems are raised
            return [str(error)]
        if self._labelled[name].any():
            return []
        return [
            f"{name} has no label that counts once its rows are cut to {self.longest_sequence} tokens "
            f"(long_sequences={self.config.long_sequences!r}), so there is nothing to learn from it; raise max_length (the limit "
            f"is {self.setup.max_length} by settings, {self.setup.room_tokens} by memory), or check its labels"
        ]


def _of_rows(numbers: IntArray, rows: IntArray) -> list[list[list[int]]]:
    """Returns the lines of a table for each of these rows, whose number is in its first column, without that column."""
    ends = np.searchsorted(numbers[:, 0], np.stack([rows, rows + 1], axis=1)).tolist()
    return [numbers[first:stop, 1:].tolist() for first, stop in ends]


def _tower_work(media: list[list[int]], tower: TowerSpec) -> Iterator[TowerWork]:
    """Yields what a tower reads for lines of `DatasetScan.media` without their rows."""
    for start, stop, num_features, num_parts, elements, is_video in media:
        kind: MediumKind = "video" if is_video else "image"
        yield from tower_work(Medium(kind, start, stop, num_features, num_parts=num_parts, elements=elements), tower)


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


def _log_towers(model: nn.Module, tower: TowerSpec) -> None:
    """Logs how many weights of towers are trained, and if plans cannot count what images cost."""
    trained = sum(weight.numel() for weight in tower_parameters(model) if weight.requires_grad)
    logger.info("rows have images; %s weights of towers are trained", f"{trained:,}" if trained else "no")
    if tower.is_empty:
        logger.warning(
            "rows have images, but the config of %s names no sizes of its tower, so plans count neither its seconds nor its "
            "memory; where memory is short, give a lower device_gib",
            type(model).__name__,
        )


def _log_cuts(name: str, row_lengths: IntArray, index: SequenceIndex, limit: int) -> None:
    """Logs how many rows were cut, and how many tokens were dropped or sequences gained."""
    num_long = int((row_lengths > limit).sum())
    if num_long:
        dropped = int(row_lengths.sum() - index.lengths.sum())
        what = f"truncated, {dropped:,} tokens dropped" if dropped else f"split, which makes {len(index):,} sequences"
        logger.warning(
            "%s: %s of %s rows are longer than %s tokens and were %s",
            *(name, f"{num_long:,}", f"{len(row_lengths):,}", limit, what),
        )


def _log_unlabelled(name: str, labelled: NDArray[np.bool_]) -> None:
    """Logs how many sequences teach nothing."""
    if num_without := int((~labelled).sum()):
        logger.warning(
            "%s: %s of %s sequences have no label that counts (%s), so they are read and teach nothing",
            *(name, f"{num_without:,}", f"{len(labelled):,}", "-100, weight 0, a single token, or cut off with the end of a row"),
        )


def _log_left_out(name: str, dataset: Any, scan: DatasetScan) -> None:
    """Logs how much padding is left out, and which columns nothing reads."""
    if (padding := scan.padding).num_tokens:
        labels = f", {padding.num_labels:,} of which have labels" if padding.num_labels else ""
        logger.warning(
            "%s: %s tokens of padding in %s rows are left out, as attention_mask says%s",
            *(name, f"{padding.num_tokens:,}", f"{padding.num_rows:,}", labels),
        )
    columns = dataset.column_names if hasattr(dataset, "column_names") else dataset[0]
    if unread := unread_columns(columns):
        logger.warning("%s: columns not read: %s", name, ", ".join(unread))


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

"""Records in every checkpoint which data came before it, so that a resumed run takes the next sample or refuses to start.

The trainer writes the record, with the place in a stream, and its manifest (`checkpoints/`); the callback over a stock loader
uses `check_resumed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hf_longctx.hf.checkpoints.manifest import DATA_FILE, read_record
from hf_longctx.hf.config import LongContextConfig


@dataclass(frozen=True, slots=True)
class Anchor:
    """State of a reader's dataset after `row` rows of epoch `epoch`, from which reading can begin.

    digest: hash up to that row. state: text from `take_state`.
    """

    epoch: int
    row: int
    digest: str
    state: str


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of one reader: its next sequence is piece `piece` of row `row` of epoch `epoch`.

    digest: hash of the rows before it, from the beginning of the epoch or from the anchor on.
    """

    epoch: int = 0
    row: int = 0
    piece: int = 0
    digest: str = ""
    anchor: Anchor | None = None

    @property
    def is_begin(self) -> bool:
        """Whether the cursor is at the beginning of an epoch."""
        return not self.row and not self.piece


@dataclass(frozen=True, slots=True)
class Place:
    """Position of all readers between two global batches; reader `turn` gives the next sequence, unless its epoch is over.

    A reader whose epoch is over before that of others is at the beginning of the next one. epochs_ended: epochs that the training
    has ended. batches: global batches used of the epoch after these.
    """

    turn: int
    readers: tuple[Cursor, ...]
    epochs_ended: int = 0
    batches: int = 0

    @classmethod
    def begin(cls, num_readers: int, epoch: int = 0) -> Place:
        """Makes the place at the beginning of an epoch."""
        return cls(0, (Cursor(epoch),) * num_readers, epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next global batch."""
        return min(cursor.epoch for cursor in self.readers)

    def to_json(self) -> dict[str, Any]:
        """Returns the place as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Place:
        """Reads a place from the result of `to_json`; raises ValueError for anything else."""
        try:
            # older records of a single reader are only a cursor
            listed = found.get("readers", [found])
            cursors = tuple(_cursor(each) for each in listed)
            # older records count neither epochs nor batches
            ended = found.get("epochs_ended", min((cursor.epoch for cursor in cursors), default=0))
            place = cls(found.get("turn", 0), cursors, ended, found.get("batches", 0))
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"no place in a stream, but {found!r:.80}") from None
        numbers = list(_numbers(place))
        texts = [text for cursor in place.readers for text in _texts(cursor)]
        is_whole = all(type(number) is int and number >= 0 for number in numbers)
        if not is_whole or not all(isinstance(text, str) for text in texts) or place.turn >= len(place.readers):
            raise ValueError(f"no place in a stream, but {found!r:.80}")
        return place


def _cursor(found: dict[str, Any]) -> Cursor:
    anchor = found.get("anchor")
    return Cursor(**{**found, "anchor": None if anchor is None else Anchor(**anchor)})


def _numbers(place: Place) -> Iterator[Any]:
    yield from (place.turn, place.epochs_ended, place.batches)
    for cursor in place.readers:
        yield from (cursor.epoch, cursor.row, cursor.piece)
        if cursor.anchor is not None:
            yield from (cursor.anchor.epoch, cursor.anchor.row)


def _texts(cursor: Cursor) -> Iterator[Any]:
    yield cursor.digest
    if cursor.anchor is not None:
        yield from (cursor.anchor.digest, cursor.anchor.state)


logger = logging.getLogger(__name__)

# settings that decide which samples a step has -> what to do if one differs from the checkpoint's
_REMEDIES = {
    "train_dataset": "resume with the data of the first run",
    "sequences_per_step": "choose per_device_train_batch_size x ranks x gradient_accumulation_steps as before",
    "sequences_per_plan": "every epoch ends with a whole plan, so choose gradient_accumulation_steps as before",
    "tokens_per_step": "set it back",
    "stream_readers": "every reader has its own shard, on any number of ranks, so set it back",
    "shuffle_seed": "set data_seed (or seed) and train_sampling_strategy back",
    "dataloader_drop_last": "set it back",
    "cut_tokens": "longer sequences are cut at this length, so set max_length, or tokens_per_rank and degrees, back",
}


def data_settings(
    args: TrainingArguments, config: LongContextConfig, train_dataset: str, shuffle_seed: int | None, cut_tokens: int | None
) -> dict[str, Any]:
    """Collects, as JSON values, every setting that decides which samples a step has.

    train_dataset: digest of a map-style dataset, or "stream". cut_tokens: length at which longer sequences are cut; None if none
    is cut.
    """
    by_tokens = config.tokens_per_step is not None
    # how a step is divided into plans matters only if it decides where an epoch ends
    ends_by_plans = not by_tokens and (train_dataset == "stream" or args.dataloader_drop_last)
    return {
        "train_dataset": train_dataset,
        "sequences_per_step": None if by_tokens else sequences_per_step(args),
        "sequences_per_plan": args.per_device_train_batch_size * args.world_size if ends_by_plans else None,
        "tokens_per_step": config.tokens_per_step,
        "stream_readers": config.stream_readers if train_dataset == "stream" and config.stream_readers > 1 else None,
        "shuffle_seed": shuffle_seed,
        "dataloader_drop_last": args.dataloader_drop_last,
        # truncation does not change which samples a step has, unless steps are made by counting tokens
        "cut_tokens": cut_tokens if by_tokens or config.long_sequences == "split" else None,
    }


class DataRecorder:
    """Describes for every checkpoint the settings that decide which samples come next, and compares them after a resume.

    settings: those of the training's data, with a value for every name in `_REMEDIES`.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.place: Callable[[bool], Place | None] = lambda leaves_epoch: None
        self.resumed_from: Path | None = None
        self.starts_anew = False
        # steps skipped so far because their loss or gradients were not finite
        self.num_skipped = 0

    def describe(self, settings: dict[str, Any]) -> None:
        """Stores the settings of the current training's data, for its checkpoints and for `problems`."""
        self.settings = settings

    def follow(self, place: Callable[[bool], Place | None]) -> None:
        """From now on, puts the place in the stream into records.

        place: returns the place, given whether the training leaves the current epoch; collective.
        """
        self.place = place

    def resume(self, folder: Path | None, starts_anew: bool = False) -> None:
        """Stores the checkpoint after which the next training continues; None: data start at the beginning.

        starts_anew: ignore the checkpoint's record, so that a stream starts at its beginning.
        """
        self.resumed_from, self.starts_anew = folder, starts_anew

    def record(self, step: int, leaves_epoch: bool = False) -> dict[str, Any] | None:
        """Returns the record of the data up to the end of optimizer step `step`; None for a stock loader. Collective."""
        if not self.settings:
            return None
        place = self.place(leaves_epoch)
        cursor = None if place is None else place.to_json()
        return {"step": step, "settings": self.settings, "cursor": cursor, "skipped_steps": self.num_skipped}

    def problems(self) -> list[str]:
        """Lists reasons, on any rank, why training cannot continue after the checkpoint's data.

        They are an unreadable record, and settings that differ from the checkpoint's so that samples would repeat or be lost.
        """
        if self.resumed_from is None or self.starts_anew:
            return []
        remedy = "set LongContextConfig(resume_partial=True) to go on without it, or ignore_data_skip=True to start the data anew"
        try:
            record = self._record()
            _place_of(record)
        except ValueError as error:
            return [f"{self.resumed_from}: {error}; {remedy}"]
        if record is None:
            missing = f"{self.resumed_from} has no {DATA_FILE}, which records the data that came before it"
            if self.settings["train_dataset"] == "stream":
                return [f"{missing}, so the stream cannot go on; set ignore_data_skip=True to start the stream anew"]
            if PartialState().is_main_process:
                logger.warning("%s; make sure that the data and batch settings are those of the first run", missing)
            return []
        return [
            f"{name} was {record['settings'].get(name)!r} in {self.resumed_from.name} and is {value!r} now, so samples would be "
            f"repeated or skipped; {_REMEDIES[name]}, or set ignore_data_skip=True to start the data anew"
            for name, value in self.settings.items()
            if record["settings"].get(name) != value
        ]

    def start(self, num_readers: int) -> Place:
        """Returns the place from which a stream with this many readers continues; its beginning if nothing is resumed."""
        return _place_of(self._record()) or Place.begin(num_readers)

    def _record(self) -> dict[str, Any] | None:
        """Reads the record of the checkpoint; raises ValueError if it cannot be read."""
        return None if self.resumed_from is None or self.starts_anew else read_record(self.resumed_from)


def _place_of(record: dict[str, Any] | None) -> Place | None:
    """Returns the place in the stream from a record, if it has one; raises ValueError for an invalid one."""
    if record is None or record["cursor"] is None:
        return None
    try:
        return Place.from_json(record["cursor"])
    except ValueError as error:
        raise ValueError(f"{DATA_FILE} has {error}") from None


def sequences_per_step(args: TrainingArguments) -> int:
    """Returns the number of sequences in one optimizer step over all ranks, for runs without a token budget."""
    return args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps


def plans_done(num_steps: int, plans_per_epoch: int, args: TrainingArguments) -> int:
    """Returns the number of batches (plans, or a loader's batches) in the first `num_steps` optimizer steps of a run.

    `Trainer` takes `gradient_accumulation_steps` batches per step; the last step of an epoch takes the rest.
    """
    per_step = args.gradient_accumulation_steps
    epochs, steps = divmod(num_steps, -(-plans_per_epoch // per_step))
    return epochs * plans_per_epoch + steps * per_step


def check_resumed(args: TrainingArguments, state: TrainerState, train_dataloader: Any) -> None:
    """Raises ValueError if a run over a stock loader would not resume at the sequence where it stopped.

    A stock run writes no data record, but `Trainer` counts optimizer steps. At any world size and accumulation, that count
    determines which sequences were used, as long as an epoch has as many steps as before.
    """
    if not state.global_step or args.ignore_data_skip:
        return
    if not has_length(train_dataloader):
        raise ValueError(
            f"the checkpoint is at step {state.global_step} of a dataset without a length, so the sequence where it stopped is "
            f"not known; use attach(trainer), which records it in checkpoints, or set ignore_data_skip=True"
        )
    if not state.epoch:
        return
    per_epoch = len(train_dataloader)
    expected = plans_done(state.global_step, per_epoch, args) / per_epoch
    if abs(expected - state.epoch) > 1e-6:
        raise ValueError(
            f"the checkpoint is at step {state.global_step} and epoch {state.epoch:.4f}, but with the present batch size "
            f"step {state.global_step} is epoch {expected:.4f}, so other sequences would follow; choose "
            f"per_device_train_batch_size ({args.per_device_train_batch_size}) x ranks ({args.world_size}) x "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) as before and keep the dataset, or set "
            f"ignore_data_skip=True to start with a fresh epoch"
        )

"""Records in every checkpoint which data came before it, so that a resumed run takes the next sample or refuses to start.

Used by the trainer (and by the callback over a stock loader, through `check_resumed`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, has_length

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.streaming import Cursor

logger = logging.getLogger(__name__)

RECORD_NAME = "longctx_data.json"

# the settings that decide which samples a step has -> what to do when one differs from the checkpoint's
_REMEDIES = {
    "train_dataset": "resume with the data of the first run",
    "sequences_per_step": "choose per_device_train_batch_size x ranks x gradient_accumulation_steps as before",
    "sequences_per_plan": "every epoch ends with a whole plan, so choose gradient_accumulation_steps as before",
    "tokens_per_step": "set it back",
    "shuffle_seed": "set data_seed (or seed) and train_sampling_strategy back",
    "dataloader_drop_last": "set it back",
    "cut_tokens": "longer sequences are cut at this length, so set max_length, or tokens_per_rank and degrees, back",
}


def data_settings(
    args: TrainingArguments, config: LongContextConfig, train_dataset: str, shuffle_seed: int | None, cut_tokens: int | None
) -> dict[str, Any]:
    """Collects, as JSON values, every setting that decides which samples a step has.

    `train_dataset` is the digest of a map-style dataset, or "stream". `cut_tokens` is the length at which longer sequences are
    cut, or None if none is cut.
    """
    by_tokens = config.tokens_per_step is not None
    # how a step is divided into plans matters only if it decides where an epoch ends
    ends_by_plans = not by_tokens and (train_dataset == "stream" or args.dataloader_drop_last)
    return {
        "train_dataset": train_dataset,
        "sequences_per_step": None if by_tokens else sequences_per_step(args),
        "sequences_per_plan": args.per_device_train_batch_size * args.world_size if ends_by_plans else None,
        "tokens_per_step": config.tokens_per_step,
        "shuffle_seed": shuffle_seed,
        "dataloader_drop_last": args.dataloader_drop_last,
        # truncation does not change which samples a step has, unless steps are made by counting tokens
        "cut_tokens": cut_tokens if by_tokens or config.long_sequences == "split" else None,
    }


class DataRecorder(TrainerCallback):
    """Writes into every checkpoint the settings that decide which samples come next, and compares them when a run resumes.

    `describe` says what data the training reads, with a value for every name in `_REMEDIES`.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.cursor: Callable[[], Cursor | None] = lambda: None
        self.resumed_from: Path | None = None

    def describe(self, settings: dict[str, Any]) -> None:
        """Stores which data the present training reads, for its checkpoints and for `problems`."""
        self.settings = settings

    def follow(self, cursor: Callable[[], Cursor | None]) -> None:
        """From now on, writes the place in the stream into checkpoints; `cursor` returns that place on rank 0."""
        self.cursor = cursor

    def resume(self, checkpoint: str | bool | None, args: TrainingArguments) -> None:
        """Stores the checkpoint from which the next training resumes; `checkpoint` is the argument of `Trainer.train`."""
        folder = get_last_checkpoint(str(args.output_dir)) if checkpoint is True else checkpoint
        self.resumed_from = Path(folder) if folder and not args.ignore_data_skip else None

    def problems(self) -> list[str]:
        """Lists the settings that differ from the checkpoint's, so that samples would repeat or be skipped. For rank 0."""
        record = self._record()
        if self.resumed_from is None:
            return []
        if record is None:
            missing = f"{self.resumed_from} has no readable {RECORD_NAME}, which records the data that came before it"
            if self.settings["train_dataset"] == "stream":
                return [f"{missing}, so the stream cannot go on; set ignore_data_skip=True to start the stream anew"]
            logger.warning("%s; make sure that the data and batch settings are those of the first run", missing)
            return []
        return [
            f"{name} was {record['settings'].get(name)!r} in {self.resumed_from.name} and is {value!r} now, so samples would be "
            f"repeated or skipped; {_REMEDIES[name]}, or set ignore_data_skip=True to start the data anew"
            for name, value in self.settings.items()
            if record["settings"].get(name) != value
        ]

    def start(self) -> Cursor:
        """Position from which a stream continues; its beginning if nothing is resumed."""
        record = self._record()
        return Cursor(**record["cursor"]) if record is not None and record["cursor"] is not None else Cursor()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        cursor = self.cursor()
        record = {"settings": self.settings, "cursor": None if cursor is None else asdict(cursor)}
        path = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", RECORD_NAME)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(path)

    def _record(self) -> dict[str, Any] | None:
        if self.resumed_from is None:
            return None
        try:
            record = json.loads((self.resumed_from / RECORD_NAME).read_text())
        except (OSError, json.JSONDecodeError):
            return None
        return record if isinstance(record, dict) and {"settings", "cursor"} <= set(record) else None


def sequences_per_step(args: TrainingArguments) -> int:
    """Number of sequences in one optimizer step over all ranks, for runs without a token budget."""
    return args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps


def plans_done(num_steps: int, plans_per_epoch: int, args: TrainingArguments) -> int:
    """Number of batches (plans, or a loader's batches) that the first `num_steps` optimizer steps of a run used.

    `Trainer` takes `gradient_accumulation_steps` batches per step; the last step of an epoch takes what is left.
    """
    per_step = args.gradient_accumulation_steps
    epochs, steps = divmod(num_steps, -(-plans_per_epoch // per_step))
    return epochs * plans_per_epoch + steps * per_step


def check_resumed(args: TrainingArguments, state: TrainerState, train_dataloader: Any) -> None:
    """Raises ValueError if a run over a stock loader would not resume at the sequence where it stopped.

    A stock run writes no data record, but `Trainer` counts optimizer steps. At any world size and accumulation, that count tells
    which sequences were used, as long as an epoch has as many steps as before.
    """
    if not state.global_step or args.ignore_data_skip:
        return
    if not has_length(train_dataloader):
        raise ValueError(
            f"the checkpoint is at step {state.global_step} of a dataset without a length, so the sequence where it stopped is "
            f"not known; use attach(trainer) with lookahead_batches, which records it in checkpoints, or set "
            f"ignore_data_skip=True"
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

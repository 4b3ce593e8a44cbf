"""Settings of a trainer that were changed after it was made: obeyed as a stock trainer obeys them, or refused by name.

Most fields are read where they are used: learning rate, schedule, clipping, accumulation, saving. Those below are read once, when
the trainer is made, and a stock trainer goes on without a word as it was made.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

# field -> what was made with its first value
_AT_START = {
    "seed": "random states and the order of steps",
    "data_seed": "the order of steps",
    "full_determinism": "whether plans follow measured seconds",
    "bf16": "the precision of the run, its plans and its self-test",
    "use_liger_kernel": "the kernels of the model's layers",
    "liger_kernel_config": "the kernels of the model's layers",
}


def values_at_start(args: TrainingArguments) -> dict[str, Any]:
    """The fields that are read once, with their values."""
    return {name: getattr(args, name) for name in _AT_START if hasattr(args, name)}


def late_problems(args: TrainingArguments, first: TrainingArguments, values: dict[str, Any], batch_size: int) -> list[str]:
    """Problems with settings that were changed since a trainer was made.

    first: the object that it was made with. values: its `values_at_start`. batch_size: the sequences of a batch that the trainer
    was made with.
    """
    if args is not first:
        return [
            "trainer.args was replaced by another object after the trainer was made, and plans read the first one; change its "
            "fields (trainer.args.learning_rate = ...), or make the trainer with the new one"
        ]
    made = {name: (value, getattr(args, name), _AT_START[name]) for name, value in values.items()}
    made["per_device_train_batch_size"] = batch_size, args.train_batch_size, "the batches"
    return [
        f"{name} is {now!r} now, but was {value!r} when the trainer was made, which chose {what}; set it in the "
        f"TrainingArguments before the trainer is made"
        for name, (value, now, what) in made.items()
        if value != now
    ]

"""Where in its data a run stands: the trainer counts optimizer steps, the data is counted in batches and sequences."""

from __future__ import annotations

from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length


def plans_done(num_steps: int, plans_per_epoch: int, args: TrainingArguments) -> int:
    """Batches of a run (plans, or a loader's) that its first `num_steps` optimizer steps took.

    `Trainer` takes `gradient_accumulation_steps` of them for a step, and what is left for the last step of an epoch.
    """
    per_step = args.gradient_accumulation_steps
    epochs, steps = divmod(num_steps, -(-plans_per_epoch // per_step))
    return epochs * plans_per_epoch + steps * per_step


def check_resumed(args: TrainingArguments, state: TrainerState, train_dataloader: Any) -> None:
    """Raises ValueError if a resumed run would go on at another sequence of the epoch than the one it stopped at.

    `Trainer` counts optimizer steps. They say which sequences are over at any world size and accumulation, as long as an
    epoch has as many steps as before.
    """
    if not state.global_step or not state.epoch or args.ignore_data_skip or not has_length(train_dataloader):
        return
    per_epoch = len(train_dataloader)
    expected = plans_done(state.global_step, per_epoch, args) / per_epoch
    if abs(expected - state.epoch) > 1e-6:
        raise ValueError(
            f"the checkpoint stands at step {state.global_step} and epoch {state.epoch:.4f}, but with the present batch size "
            f"step {state.global_step} is epoch {expected:.4f}, so other sequences would follow; choose "
            f"per_device_train_batch_size ({args.per_device_train_batch_size}) x ranks ({args.world_size}) x "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) as before and keep the dataset, or set "
            f"ignore_data_skip=True to start with a fresh epoch"
        )

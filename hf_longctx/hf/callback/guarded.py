"""Protects a stock trainer like `LongContextTrainer`, while `LongContextCallback` alone in `callbacks=[...]` runs plans.

The trainer gets checkpoints that are whole or hidden, the choice of one to resume from, a lock on the output folder, signals and
heartbeats. The events of a callback come too late for most of this, and do not name their trainer, so the stack is searched.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.loader_workers import keep_workers
from hf_longctx.hf.rules.training_arguments import without_checkpointing
from hf_longctx.hf.run.saver import Saver
from hf_longctx.hf.trainer.checkpoint_mixin import CheckpointMixin

# attributes that the mixin sets on a trainer
_OWN = ("longctx_config", "longctx_run", "_saver", "_users_values", "_flow")


class Guard(Protocol):
    """A callback that guards a training until `undo` is closed, and returns the control group of all ranks."""

    config: LongContextConfig

    def guard(self, trainer: Trainer, undo: ExitStack) -> dist.ProcessGroup | None: ...


class GuardedMixin(CheckpointMixin):
    """The part of `CheckpointMixin` that needs no plans, and a `train` that chooses a checkpoint before the trainer reads it."""

    _longctx_callback: Guard

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as the trainer's own class does, from a checkpoint that is whole; afterwards the trainer is stock again."""
        callback = self._longctx_callback
        if callback not in self.callback_handler.callbacks:
            take_back(self)
            return self.train(resume_from_checkpoint, *args, **kwargs)
        with ExitStack() as undo, without_checkpointing(self.args, callback.config) as users_values:
            callback.guard(self, undo)
            self._users_values = users_values
            folder = self._choose_checkpoint(resume_from_checkpoint)
            return super().train(folder, *args, **kwargs)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_eval_dataloader(*args, **kwargs)
        keep_workers(loader)
        return loader


def lend(trainer: Trainer, callback: Guard) -> None:
    """Puts `GuardedMixin` in front of the class of this one trainer, unless checkpoints are whole there already."""
    if not isinstance(trainer, CheckpointMixin):
        stock = type(trainer)
        trainer.__class__ = type(f"Guarded{stock.__name__}", (GuardedMixin, stock), {"_longctx_callback": callback})
        # users may save the model before a training, which brings a saver of its own
        vars(trainer)["_saver"] = Saver(callback.config, trainer.args, None)


def take_back(trainer: Trainer) -> None:
    """Restores a trainer's own class. Idempotent."""
    if GuardedMixin in type(trainer).__bases__:
        trainer.__class__ = type(trainer).__bases__[1]
        for name in set(_OWN) & set(vars(trainer)):
            delattr(trainer, name)


def calling_trainer() -> tuple[Trainer, dict[str, Any]]:
    """The trainer whose event is handled now, and the local variables of its method that sent it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names = frame.f_locals
        if isinstance(trainer := names.get("self"), Trainer):
            return trainer, names
        frame = frame.f_back
    raise RuntimeError("an event of LongContextCallback was called from outside a Trainer; pass it in callbacks=[...]")

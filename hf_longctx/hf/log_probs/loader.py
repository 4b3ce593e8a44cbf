"""Checks of a loader that a trainer keeps as its own, when a training begins."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.data.resume import check_resumed
from hf_longctx.hf.ranks.loader_workers import keep_workers


class LoaderCheck(TrainerCallback):
    """Raises ValueError if a resumed training would not go on where it stopped, and keeps the loader's workers alive."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        check_resumed(args, state, train_dataloader)
        keep_workers(train_dataloader)

"""Program: the ways to train, one after another with a warning inside a step, for a test that looks at their terminal.

python told_trainings.py FOLDER
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import datasets
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.stock_runs import OFF, make_stock_trainer
from helpers.trainers.trainer_runs import make_trainer
from transformers import ProgressCallback, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig

NUM_STEPS, LOGGING_STEPS, EVAL_STEPS = 5, 2, 3
WARNING = "a warning inside a step"
CONFIG: dict[str, Any] = {"report_steps": True, "calibration_steps": 1, "timeline_steps": 0}


class Warner(TrainerCallback):
    """Warns in step 4, whose training has logged before."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            logging.getLogger("helpers").warning(WARNING)


def trainer_of(way: str, folder: str, **changes: Any) -> Trainer:
    """A trainer under plans: ours, or a stock one with the callback attached, given, or added later."""
    rows = random_rows([30, 9, 21, 12, 40, 8])
    evaluated = datasets.Dataset.from_list(rows)
    steps = {"max_steps": NUM_STEPS, "logging_steps": LOGGING_STEPS, "eval_strategy": "steps", "eval_steps": EVAL_STEPS}
    arguments = {"per_device_train_batch_size": 2, "disable_tqdm": False, **steps, **changes}
    if way == "ours":
        trainer: Trainer = make_trainer(
            ModelCase(), rows, folder, CONFIG, arguments, eval_dataset=evaluated, callbacks=[Warner()]
        )
        return trainer
    callback = LongContextCallback(LongContextConfig(**CONFIG, **OFF))
    given = [Warner(), *([callback] if way == "given" else [])]
    trainer = make_stock_trainer(ModelCase(), rows, folder, arguments, exact_loss=False, eval_dataset=evaluated, callbacks=given)
    if way == "attached":
        callback.attach(trainer)
    elif way == "added":
        trainer.add_callback(callback)
    return trainer


def main(folder: str) -> None:
    """Trains in every way; the last training goes on until somebody stops it."""
    for way in ("ours", "attached", "given", "added"):
        print(f"way: {way}", flush=True)
        trainer = trainer_of(way, folder)
        trainer.train()
        (own,) = (each for each in trainer.callback_handler.callbacks if type(each) is ProgressCallback)
        # a stock trainer prints by itself again
        assert ("on_log" in vars(own)) == (way == "ours") and own.training_bar is None
    print("way: stopped", flush=True)
    trainer_of("ours", folder, max_steps=100_000, eval_strategy="no", logging_steps=1).train()


if __name__ == "__main__":
    main(sys.argv[1])

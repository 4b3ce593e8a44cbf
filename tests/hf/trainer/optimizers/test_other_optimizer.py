"""A run that resumes with another optimizer than its checkpoint's is refused by name, and does not end in a KeyError."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer


def resume(folder: str, first: str, second: str) -> str:
    """The message with which a run on `second` refuses to go on from one on `first`."""
    for optim, is_resumed in ((first, False), (second, True)):
        arguments = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "optim": optim}
        trainer = make_trainer(ModelCase(), random_rows([13, 5, 8, 21] * 8), folder, {}, arguments)
        try:
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if is_resumed else None)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.daily("adamw_torch-sgd-lack dampening, momentum")
@pytest.mark.parametrize("first,second,expected", [("adamw_torch", "sgd", "lack dampening, momentum"), ("sgd", "sgd", "")])
def test_states_of_another_optimizer_are_refused_by_name(ranks, tmp_path: Path, first: str, second: str, expected: str) -> None:
    (message,) = ranks(1).run(resume, str(tmp_path), first, second)
    assert expected in message and bool(expected) == ("has the states of another optimizer" in message), message

"""A training whose `output_dir` another job uses is refused before it touches anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer
from helpers.trainers.used_folder import used_by_another_job


def test_a_second_job_is_refused_and_runs_once_the_first_has_ended(tmp_path: Path) -> None:
    trainer = make_trainer(ModelCase(), random_rows([9, 12, 5, 7]), str(tmp_path), {}, {"max_steps": 1})
    lock = tmp_path / ".longctx.lock"
    with used_by_another_job(tmp_path):
        with pytest.raises(ValueError, match=f"output_dir {tmp_path} is in use by process 1 on elsewhere"):
            trainer.train()
        assert trainer.state.global_step == 0
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.stopped_by == "" and not lock.exists()

"""The cursor of a resumed run: as many batches as the trainer took, and no other ones than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import TrainerState, TrainingArguments

from hf_longctx.hf.resume import check_resumed, plans_done


def arguments(folder: Path, accumulation: int = 1, **changes: Any) -> TrainingArguments:
    settings = {"gradient_accumulation_steps": accumulation, "report_to": "none", "use_cpu": True, **changes}
    return TrainingArguments(output_dir=str(folder), **settings)


@pytest.mark.parametrize(
    "steps,plans_per_epoch,accumulation,expected", [(7, 5, 1, 7), (4, 10, 2, 8), (4, 5, 2, 7), (3, 5, 2, 5), (2, 3, 8, 6)]
)
def test_optimizer_steps_take_as_many_plans_as_the_trainer_does(
    tmp_path, steps: int, plans_per_epoch: int, accumulation: int, expected: int
) -> None:
    assert plans_done(steps, plans_per_epoch, arguments(tmp_path, accumulation)) == expected


def batches(count: int) -> Any:
    return DataLoader(list(range(count)), batch_size=1)  # type: ignore[arg-type]


def test_a_run_goes_on_where_it_stopped_with_any_accumulation(tmp_path) -> None:
    # 7 steps of an epoch of 5 steps: with half the batch twice per step, 14 of 10 batches
    state = TrainerState(global_step=7, epoch=1.4)
    check_resumed(arguments(tmp_path), state, batches(5))
    check_resumed(arguments(tmp_path, 2), state, batches(10))
    check_resumed(arguments(tmp_path), TrainerState(), batches(3))


def test_other_steps_per_epoch_are_refused_unless_data_is_not_skipped(tmp_path) -> None:
    state = TrainerState(global_step=7, epoch=1.4)
    with pytest.raises(ValueError, match=r"step 7 and epoch 1.4000, but with the present batch size step 7 is epoch 0.7000"):
        check_resumed(arguments(tmp_path), state, batches(10))
    check_resumed(arguments(tmp_path, ignore_data_skip=True), state, batches(10))

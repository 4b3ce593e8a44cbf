"""Whole checkpoints with the rest of the trainer: the best model, limits, uploads, callbacks that add files, weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import training_arguments
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import sort_checkpoints

from hf_longctx import LongContextConfig
from hf_longctx.hf.checkpoints.staging import is_whole
from hf_longctx.hf.trainer.trainer import LongContextMixin

ROWS = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 3)


class Uploads(Trainer):
    """A trainer that notes what it would upload."""

    seen: list[tuple[str, bool]]

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None: ...

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None: ...

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        vars(self).setdefault("seen", []).append((checkpoint_folder, is_whole(Path(checkpoint_folder))))


class Planned(LongContextMixin, Uploads): ...


class AddsFile(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Path(args.output_dir, f"checkpoint-{state.global_step}", "notes.txt").write_text("mine")


class ReadsFolder(AddsFile):
    """A callback that reads checkpoints alone, as those of transformers do, so it may be called later."""

    __module__ = "transformers.integrations"


def trained(folder: str, changes: dict[str, Any], resume: Any = None, config: dict[str, Any] | None = None) -> dict[str, Any]:
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **changes}
    trainer = Planned(
        model=build_model(ModelCase()),
        args=training_arguments(folder, per_device_train_batch_size=8, **arguments),
        train_dataset=datasets.Dataset.from_list(ROWS),
        eval_dataset=datasets.Dataset.from_list(ROWS[:8]),
        callbacks=[ReadsFolder() if (config or {}).get("async_save") else AddsFile()],
        longctx_config=LongContextConfig(report_steps=False, timeline_steps=0, **(config or {})),
    )
    # losses fall and rise, so that the best one is in the middle
    values = iter([5.0, 3.0, 4.0, 2.0, 6.0, 7.0, 8.0, 9.0])
    evaluate = trainer.evaluate

    def scripted(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {**evaluate(*args, **kwargs), "eval_loss": next(values)}

    trainer.evaluate = scripted
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    trainer.longctx_run.close()
    return {"best": state.best_model_checkpoint, "seen": vars(trainer).get("seen", []), "step": state.global_step}


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}


@pytest.mark.wide
@pytest.mark.parametrize(
    "limit,left,is_behind",
    [
        *[(2, [4, 6], False), (3, [4, 5, 6], False), (None, [1, 2, 3, 4, 5, 6], False)],
        *[(1, [4], True), (2, [4, 6], True), (None, [1, 2, 3, 4, 5, 6], True)],
    ],
)
def test_the_best_checkpoint_stays_under_its_own_name(
    tmp_path: Path, limit: int | None, left: list[int], is_behind: bool
) -> None:
    found = trained(str(tmp_path), {**BEST, "save_total_limit": limit}, config={"async_save": is_behind})
    assert found["best"] == str(tmp_path / "checkpoint-4")
    assert [Path(path).name for path in sort_checkpoints(str(tmp_path))] == [f"checkpoint-{step}" for step in left]
    for folder in tmp_path.glob("checkpoint-*"):
        step = int(folder.name.removeprefix("checkpoint-"))
        best = {1: 1, 2: 2, 3: 2}.get(step, 4)
        state = json.loads((folder / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")
        # the list leaves out files that a callback added to the folder
        assert is_whole(folder) and (folder / "notes.txt").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_uploads_read_whole_checkpoints_in_view(tmp_path: Path) -> None:
    found = trained(str(tmp_path), {"push_to_hub": True, "save_steps": 3, "hub_model_id": "nobody/nothing"})
    assert found["seen"] == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (3, 6)]


@pytest.mark.wide
def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    for _ in range(2):
        trained(str(tmp_path), {"save_steps": 3, "save_total_limit": 1})
        assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-6"]
        assert is_whole(tmp_path / "checkpoint-6")


@resuming
def test_weights_alone_are_resumed_on_request(tmp_path: Path, caplog: Any) -> None:
    trained(str(tmp_path), {"save_steps": 3, "save_only_model": True})
    with pytest.raises(ValueError, match="saved with save_only_model=True, so it holds weights only"):
        trained(str(tmp_path), {}, True)
    found = trained(str(tmp_path), {"max_steps": 8}, str(tmp_path / "checkpoint-3"), {"resume_partial": True})
    assert found["step"] == 8 and "the optimizer's states and the learning-rate schedule" in caplog.text

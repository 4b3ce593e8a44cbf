"""The trainer on pipeline stages: the trajectory of one plain process, whatever the number of stages and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, plain_training, training_arguments
from transformers import AutoModelForCausalLM

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage
from hf_longctx.hf.models.cutting import RANGES
from hf_longctx.hf.start.stages import load_stage
from hf_longctx.plan.core.types import LayerRange

NUM_STEPS = 10
ARGUMENTS = {"max_steps": NUM_STEPS, "logging_steps": 1}
CASE = ModelCase(promoted=True, num_layers=4, tied=True)

Rows = list[dict[str, list[int]]]


@pytest.fixture(scope="module")
def expected(rows) -> tuple[list[float], dict[str, Any]]:
    return plain_training(CASE, rows, NUM_STEPS)


def train(rows: Rows, folder: str, config: dict[str, Any]) -> tuple[list[float], list[float], list[int]]:
    """Losses and logged norms of a run on this rank, and the most chunks of a group in every plan; saves the model."""
    trainer = make_trainer(CASE, rows, folder, config, ARGUMENTS)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train()
    trainer.save_model()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return recorder.losses, norms, recorder.num_chunks


# name -> (ranks, settings)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, {"stages": 2, "tokens_per_rank": 64}),
    "four stages": (4, {"stages": 4, "tokens_per_rank": 64}),
    "two stages of two ranks": (4, {"stages": 2, "tokens_per_rank": 32}),
    "gathered per micro-batch": (4, {"stages": 2, "tokens_per_rank": 32, "parameters": "gathered_per_round"}),
    "gathered per step": (4, {"stages": 2, "tokens_per_rank": 32, "parameters": "gathered_per_step"}),
    "gathered per pass": (4, {"stages": 2, "tokens_per_rank": 32, "parameters": "sharded"}),
}


@pytest.mark.daily("two stages")
@pytest.mark.quick("two stages")
@pytest.mark.parametrize("name", RUNS)
def test_clipped_steps_follow_one_plain_process_and_one_checkpoint_comes_out(ranks, rows, expected, tmp_path, name) -> None:
    num_ranks, config = RUNS[name]
    results = ranks(num_ranks).run(train, rows, str(tmp_path), config)
    for losses, norms, num_chunks in results:
        assert max(num_chunks) > 1
        assert losses == pytest.approx(expected[0], rel=1e-10)
        assert norms == results[0][1] and max(norms) > 0.5
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).named_parameters())
    assert saved.keys() == expected[1].keys()
    assert max(float((saved[n] - w).abs().max() / w.abs().max()) for n, w in expected[1].items()) <= 1e-10


def evaluate_loaded_stage(rows: Rows, checkpoint: str, folder: str, stages: Any) -> tuple[float, int]:
    """The loss of a held-out set on stages that each rank loaded alone, and the parameters that this rank holds."""
    args = training_arguments(folder)
    config = LongContextConfig(stages=stages, tokens_per_rank=64, report_steps=False, timeline_steps=0)
    model = load_pipeline_stage(checkpoint, config, dtype=torch.float64)
    trainer = LongContextTrainer(
        model=model,
        args=args,
        eval_dataset=datasets.Dataset.from_list(rows),
        longctx_config=config,
    )
    return trainer.evaluate()["eval_loss"], sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.wide
def test_stages_that_are_loaded_alone_evaluate_as_the_whole_model(ranks, rows, tmp_path: Path) -> None:
    model = build_model(ModelCase(num_layers=4))
    model.save_pretrained(tmp_path / "checkpoint")
    arguments = rows, str(tmp_path / "checkpoint"), str(tmp_path)
    ((whole_loss, num_whole),) = ranks(1).run(evaluate_loaded_stage, *arguments, 1)
    results = ranks(2).run(evaluate_loaded_stage, *arguments, 2)
    assert [loss for loss, _ in results] == pytest.approx([whole_loss] * 2, rel=1e-12)
    assert sum(count for _, count in results) == num_whole
    assert max(count for _, count in results) < 0.75 * num_whole


def refused_after_loading(rows: Rows, checkpoint: str, folder: str) -> str:
    """Why a trainer without stages refuses a model of which this rank holds one stage."""
    args = training_arguments(folder)
    model = load_pipeline_stage(checkpoint, LongContextConfig(stages=2), dtype=torch.float64)
    with pytest.raises(ValueError) as error:
        LongContextTrainer(model=model, args=args, train_dataset=datasets.Dataset.from_list(rows))
    return str(error.value)


def test_a_stage_that_was_loaded_alone_is_refused_without_stages(ranks, rows, tmp_path: Path) -> None:
    build_model(ModelCase(num_layers=4)).save_pretrained(tmp_path / "checkpoint")
    for message in ranks(2).run(refused_after_loading, rows, str(tmp_path / "checkpoint"), str(tmp_path)):
        assert "the model was loaded as one of 2 stages, but stages is 1; load it with the same number" in message


def refused_ranges(rows: Rows, checkpoint: str, folder: str) -> str:
    """Why ranks are refused that loaded stages of different cuts."""
    cut = dist.get_rank() + 1
    ranges = ((LayerRange(0, cut),), (LayerRange(cut, 4 - cut),))
    model = load_stage(checkpoint, ranges, dist.get_rank(), torch.float64)
    setattr(model, RANGES, ranges)
    config = LongContextConfig(stages=2, tokens_per_rank=64)
    dataset = datasets.Dataset.from_list(rows)
    with pytest.raises(ValueError) as error:
        LongContextTrainer(model=model, args=training_arguments(folder), train_dataset=dataset, longctx_config=config)
    return str(error.value)


def test_stages_that_were_cut_differently_are_refused(ranks, rows, tmp_path: Path) -> None:
    # one layer of the four would be in no stage
    build_model(ModelCase(num_layers=4)).save_pretrained(tmp_path / "checkpoint")
    for message in ranks(2).run(refused_ranges, rows, str(tmp_path / "checkpoint"), str(tmp_path)):
        assert "layers of the stages differs between ranks" in message


def chosen(rows: Rows, folder: str) -> tuple[int, list[float]]:
    """The stages that "auto" chose on this rank, and the losses of two steps."""
    trainer = make_trainer(CASE, rows, folder, {"stages": "auto", "tokens_per_rank": 64}, {"max_steps": 2})
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train()
    return trainer.longctx_run.pool.num_stages, recorder.losses


def test_auto_chooses_the_same_stages_on_all_ranks(ranks, rows, expected, tmp_path: Path) -> None:
    results = ranks(2).run(chosen, rows, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][1] == pytest.approx(expected[0][:2], rel=1e-10)


def refused_rows(folder: str) -> str:
    """Why this rank refuses rows without token ids."""
    rows = datasets.Dataset.from_list([{"text": "no tokens"}] * 8)
    with pytest.raises(ValueError) as error:
        make_trainer(CASE, rows, folder, {"stages": 2, "collective_timeout_s": 5.0}, ARGUMENTS)
    return str(error.value)


def test_rows_without_tokens_are_refused_by_name_on_every_rank(ranks, tmp_path: Path) -> None:
    for text in ranks(2).run(refused_rows, str(tmp_path)):
        assert "train_dataset has no column 'input_ids' (it has text)" in text


def refused_optimizer(rows: Rows, folder: str) -> str:
    """Why this rank refuses an optimizer of the weights of all stages."""
    optimizers = (torch.optim.SGD(build_model(CASE).parameters(), lr=0.1), None)
    with pytest.raises(ValueError) as error:
        make_trainer(CASE, rows, folder, {"stages": 2}, ARGUMENTS, optimizers=optimizers)
    return str(error.value)


def test_an_optimizer_of_all_stages_is_refused(ranks, rows, tmp_path: Path) -> None:
    for text in ranks(2).run(refused_optimizer, rows, str(tmp_path)):
        assert "the trainer argument optimizers holds weights of all stages, but stages=2 leaves each rank with one stage" in text


def refused(rows: Rows, folder: str, config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        make_trainer(CASE, rows, folder, config, ARGUMENTS)
    return str(error.value)


@pytest.mark.daily("config2-solver='lp' has no effect on pipeline stages; leave it out")
@pytest.mark.parametrize(
    "config,message",
    [
        ({"stages": 8}, "stages=8 are more than the model's 4 layers; use at most 4"),
        ({"stages": 3}, "stages=3 does not divide the 2 ranks of the run; choose a divisor"),
        ({"stages": 2, "solver": "lp"}, "solver='lp' has no effect on pipeline stages; leave it out"),
    ],
)
def test_what_does_not_go_with_stages_is_refused_by_name(ranks, rows, tmp_path: Path, config, message) -> None:
    for text in ranks(2).run(refused, rows, str(tmp_path), config):
        assert message in text

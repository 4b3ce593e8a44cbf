"""Several evaluation sets: values are those of a stock trainer, every set is checked at the start, and errors name the set."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers.models.chats import number_tokenizer
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import PaddingCollator, quiet_config
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from transformers import Trainer

from hf_longctx import LongContextCallback
from hf_longctx.hf.run.sets import chosen_evaluation_set, evaluation_set_problems

CASE = ModelCase(dtype=torch.float32)
TRAINED = random_rows([9, 5, 14, 7, 12, 6, 4, 10])
ROWS = {"a": random_rows([11, 8, 5], seed=1), "b": random_rows([13, 4], seed=2)}
SETS = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in ROWS.items()})
# every set is one batch of the stock trainer, whose loss is then the mean over label tokens
ARGUMENTS = {
    "max_steps": 4,
    "logging_steps": 1,
    "per_device_eval_batch_size": 4,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "metric_for_best_model": "eval_b_loss",
    "load_best_model_at_end": True,
    "train_sampling_strategy": "sequential",
}


def accuracy(found: Any) -> dict[str, float]:
    """A user's metric: the number of rows."""
    return {"rows": float(len(found.predictions["log_prob"]))}


class Failing(torch.utils.data.IterableDataset):
    """Rows that end in an error."""

    def __iter__(self) -> Any:
        yield from ROWS["a"]
        raise KeyError("shard 7 is gone")


def evaluated_on_rank(
    folder: str, config: dict[str, Any], arguments: dict[str, Any], metric: bool = False, streams: bool = False
) -> tuple[list[dict[str, float]], str | None, dict[str, float], float, float]:
    """Trains with two evaluation sets; the losses of each evaluation, the best checkpoint, and evaluations by hand."""
    kwargs = {"compute_metrics": accuracy} if metric else {}
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    settings = {**ARGUMENTS, "per_device_eval_batch_size": 4 // num_ranks, **arguments}
    sets = {**SETS, "b": SETS["b"].to_iterable_dataset()} if streams else SETS
    trainer = make_trainer(CASE, TRAINED, folder, config, settings, eval_dataset=sets, **kwargs)
    trainer.train()
    history = [{k: v for k, v in log.items() if "loss" in k or "rows" in k} for log in trainer.state.log_history]
    history = [log for log in history if any(name.startswith("eval") for name in log)]
    by_hand = trainer.evaluate({"c": sets["b"], "d": {"e": SETS["a"]}})
    alone = trainer.evaluate("a")["eval_loss"], trainer.evaluate(sets["b"], metric_key_prefix="mine")["mine_loss"]
    best = trainer.state.best_model_checkpoint
    return history, best and Path(best).name, {k: v for k, v in by_hand.items() if k.endswith("loss")}, *alone


@pytest.fixture(scope="module")
def stock() -> tuple[list[dict[str, float]], str, dict[str, float], float, float]:
    """Results of a stock trainer."""
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, **{"per_device_train_batch_size": 8, **ARGUMENTS})
        rows = datasets.Dataset.from_list(TRAINED)
        trainer = Trainer(build_model(CASE), args, PaddingCollator(), rows, SETS)
        trainer.train()
        history = [{k: v for k, v in log.items() if "loss" in k} for log in trainer.state.log_history]
        history = [log for log in history if any(name.startswith("eval") for name in log)]
        by_hand = trainer.evaluate({"c": SETS["b"], "d": {"e": SETS["a"]}})
        alone = trainer.evaluate("a")["eval_loss"], trainer.evaluate(SETS["b"], metric_key_prefix="mine")["mine_loss"]
        best = Path(trainer.state.best_model_checkpoint).name
    return history, best, {k: v for k, v in by_hand.items() if k.endswith("loss")}, *alone


@pytest.mark.wide
@pytest.mark.parametrize(
    "world,config,arguments,streams",
    [
        (1, {}, {}, False),
        (2, {}, {}, False),
        (2, {"parameters": "sharded"}, {}, False),
        (2, {"stages": 2}, {}, False),
        (2, {}, {"dataloader_num_workers": 1}, True),
    ],
    ids=["alone", "replicated", "sharded", "staged", "streams"],
)
def test_each_of_several_sets_has_the_values_of_a_stock_trainer(
    ranks, stock, tmp_path: Path, world, config, arguments, streams
) -> None:
    expected, best, by_hand, first, second = stock
    for found in ranks(world).run(evaluated_on_rank, str(tmp_path / "out"), config, arguments, world == 1, streams):
        losses = [{k: v for k, v in log.items() if k.endswith("_loss")} for log in found[0]]
        assert [sorted(log) for log in losses] == [sorted(log) for log in expected]
        for log, other in zip(losses, expected, strict=True):
            assert log == pytest.approx(other, abs=2e-5)
        assert found[1] == best
        assert found[2] == pytest.approx(by_hand, abs=2e-5)
        assert (found[3], found[4]) == pytest.approx((first, second), abs=2e-5)
        counts = {k: v for log in found[0] for k, v in log.items() if k.endswith("_rows")}
        wanted = {f"eval_{name}_rows": len(rows) for name, rows in ROWS.items()}
        assert counts == (wanted if world == 1 else {})


def attached_on_rank(folder: str, config: dict[str, Any], is_attached: bool) -> list[dict[str, float]]:
    """Losses of the evaluations of a stock trainer with the callback, attached or alone."""
    callback = LongContextCallback(quiet_config(**config))
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sizes = {"per_device_train_batch_size": 8 // num_ranks, "per_device_eval_batch_size": 4}
    args = training_arguments(folder, **{**ARGUMENTS, **sizes})
    rows = datasets.Dataset.from_list(TRAINED)
    trainer = Trainer(build_model(CASE), args, transformers.DataCollatorForSeq2Seq(number_tokenizer("0")), rows, SETS)
    if is_attached:
        callback.attach(trainer)
    else:
        trainer.add_callback(callback)
    trainer.train()
    history = [{k: v for k, v in log.items() if k.endswith("_loss")} for log in trainer.state.log_history]
    return [log for log in history if any(name.startswith("eval") for name in log)]


@pytest.mark.parametrize(
    "world,config,is_attached", [(1, {}, True), (1, {}, False), (2, {"stages": 2}, True)], ids=["attached", "alone", "stages"]
)
def test_callbacks_take_a_dict_of_sets(ranks, stock, tmp_path: Path, world: int, config: Any, is_attached: bool) -> None:
    for found in ranks(world).run(attached_on_rank, str(tmp_path / "out"), config, is_attached):
        assert len(found) == len(stock[0])
        for log, expected in zip(found, stock[0], strict=True):
            assert log == pytest.approx(expected, abs=2e-5)


def refused_on_rank(sets: Any, config: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError) as refused:
        make_trainer(CASE, TRAINED, folder, config, eval_dataset=sets)
    return str(refused.value)


def test_every_set_is_checked_at_the_start(ranks) -> None:
    sets = {**SETS, "long": datasets.Dataset.from_list(random_rows([40, 60]))}
    for message in ranks(2).run(refused_on_rank, sets, {"max_length": 50}):
        assert "eval_dataset['long'] row 1 has 60 tokens, above max_length 50" in message
    streams = {name: each.to_iterable_dataset() for name, each in sets.items()}
    assert "eval_dataset['long'] row 1 has 60 tokens, above max_length 50" in refused_on_rank(streams, {"max_length": 50})
    failed = "row 3 of an iterable dataset that is evaluated cannot be read (KeyError: 'shard 7 is gone')"
    assert failed in refused_on_rank(Failing(), {})


@pytest.mark.parametrize(
    "sets,message",
    [
        ({}, "eval_dataset is an empty dict; give it a set"),
        ({1: SETS["a"]}, "eval_dataset has the key 1 (int), but keys are part of the names of metrics; use text"),
        ({"a": None}, "eval_dataset['a'] is missing (None); give one set for each key"),
        ({"a": dict(SETS)}, "eval_dataset['a'] is a dict of sets itself; give one set for each key"),
    ],
)
def test_a_dict_that_names_no_sets_is_refused(sets: Any, message: str) -> None:
    assert message in evaluation_set_problems(sets)[0]
    assert message in refused_on_rank(sets, {})


def test_a_set_is_found_by_its_key_or_by_itself() -> None:
    assert chosen_evaluation_set("b", SETS) == ("eval_dataset['b']", SETS["b"])
    # a set of the start is not read again
    assert chosen_evaluation_set(SETS["b"], SETS) == ("eval_dataset['b']", SETS["b"])
    assert chosen_evaluation_set(None, SETS["a"]) == ("eval_dataset", SETS["a"])
    with pytest.raises(ValueError, match="was asked for the set 'x', but eval_dataset has 'a', 'b'; pass one of its keys"):
        chosen_evaluation_set("x", SETS)
    with pytest.raises(ValueError, match="was asked for the set 'x', but eval_dataset is no dict of sets"):
        chosen_evaluation_set("x", SETS["a"])
    with pytest.raises(ValueError, match="was asked for a dict of them"):
        chosen_evaluation_set(None, SETS)


def test_predicting_one_of_the_sets_gives_its_rows() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, TRAINED, folder, eval_dataset=SETS)
        found = trainer.predict(SETS["b"])
        assert len(found.predictions) == len(SETS["b"])
        assert found.metrics["test_loss"] == pytest.approx(trainer.evaluate("b")["eval_loss"])
        assert np.isfinite(found.predictions["log_prob"]).all()

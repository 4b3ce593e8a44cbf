"""Flags, settings and metrics that differ between ranks: all do what `Trainer` does on one process with the same callback."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import OFF, EventRecorder, PaddingCollator
from helpers.trainers.trainer_runs import training_arguments
from transformers import DataCollatorWithFlattening, EarlyStoppingCallback, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig, LongContextTrainer

ROWS = random_rows([5, 8, 13, 21, 3, 34, 5, 8])
CASE = ModelCase(dtype=torch.float32)


class Wishes(TrainerCallback):
    """Sets flags or settings at an event of one step, on one rank alone."""

    def __init__(self, event: str, step: int, control: dict[str, Any], state: dict[str, Any]) -> None:
        self.event, self.step, self.wishes, self.settings = event, step, control, state

    def act(self, name: str, state: Any, control: Any) -> None:
        if (name, state.global_step) == (self.event, self.step):
            for flag, value in self.wishes.items():
                setattr(control, flag, value)
            for setting, value in self.settings.items():
                setattr(state, setting, value)


def _acting(event: str) -> Any:
    def run(self: Wishes, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(event, state, control)

    return run


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Wishes, _event, _acting(_event))

# event, step, flags, settings of the state, changed arguments
Case = tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]
STOP, LEAVE, SAVE = {"should_training_stop": True}, {"should_epoch_stop": True}, {"should_save": True}
ALL = {"should_save": True, "should_evaluate": True, "should_log": True}
EVERY_STEP = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
CASES: dict[str, Case] = {
    "stop": ("on_step_end", 2, STOP, {}, {}),
    "save": ("on_step_end", 3, SAVE, {}, {}),
    "evaluate": ("on_step_end", 3, {"should_evaluate": True}, {}, {}),
    "log": ("on_step_end", 3, {"should_log": True}, {}, {}),
    "all": ("on_step_end", 3, ALL, {}, {}),
    "leave": ("on_step_end", 1, LEAVE, {}, {}),
    "all and stop": ("on_step_end", 3, {**ALL, **STOP}, {}, {}),
    "before a step": ("on_step_begin", 2, {**ALL, **STOP}, {}, {}),
    "before an update": ("on_pre_optimizer_step", 2, {**SAVE, **LEAVE}, {}, {}),
    "at the begin": ("on_train_begin", 0, STOP, {}, {}),
    "at the begin of an epoch": ("on_epoch_begin", 2, LEAVE, {}, {}),
    "at the end of an epoch": ("on_epoch_end", 2, {**ALL, **STOP}, {}, {}),
    "in a log": ("on_log", 2, {"should_save": True, "should_evaluate": True}, {}, {"logging_steps": 1}),
    "in an evaluation": ("on_evaluate", 2, {**SAVE, **STOP}, {}, {"eval_strategy": "steps", "eval_steps": 2}),
    "in a forward of it": ("on_prediction_step", 2, {**SAVE, **LEAVE}, {}, {"eval_strategy": "steps", "eval_steps": 2}),
    "in a save": ("on_save", 2, STOP, {}, {"save_strategy": "steps", "save_steps": 2}),
    "in a save, for later": ("on_save", 2, {"should_evaluate": True}, {}, EVERY_STEP),
    "between two batches": ("on_substep_end", 2, STOP, {}, HALVES),
    "before two batches": ("on_step_begin", 2, LEAVE, {}, HALVES),
    "fewer steps": ("on_step_end", 2, {}, {"max_steps": 2}, {}),
    "fewer steps, later": ("on_log", 2, {}, {"max_steps": 4}, {"logging_steps": 1}),
    "other intervals": ("on_step_end", 1, {}, {"logging_steps": 3, "save_steps": 3, "eval_steps": 2}, EVERY_STEP),
}


def run(case: Case, folder: str, door: str, config: dict[str, Any], wishes_here: bool) -> Any:
    event, step, flags, settings, changes = case
    num_ranks = dist.get_world_size() if door != "stock" else 1
    arguments = {"max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 50, "learning_rate": 1e-3, **changes}
    arguments["per_device_train_batch_size"] //= num_ranks
    recorder = EventRecorder()
    given: dict[str, Any] = {
        "model": build_model(CASE),
        "args": training_arguments(folder, **arguments),
        "train_dataset": datasets.Dataset.from_list(ROWS),
        "eval_dataset": datasets.Dataset.from_list(ROWS[:2]),
        "callbacks": [Wishes(event, step, flags, settings)] * wishes_here,
    }
    planned = LongContextConfig(tokens_per_rank=64, report_steps=False, collective_timeout_s=20.0, **OFF, **config)
    if door == "trainer":
        trainer: Trainer = LongContextTrainer(**given, longctx_config=planned)
    else:
        if door == "alone":
            given["callbacks"] = [LongContextCallback(planned), *given["callbacks"]]
        trainer = Trainer(**given, data_collator=PaddingCollator() if door == "stock" else DataCollatorWithFlattening())
    trainer.add_callback(recorder)
    if door == "attached":
        LongContextCallback(planned).attach(trainer)
    trainer.train()
    state = trainer.state
    events = [each for each in recorder.events if not each.startswith(("on_prediction", "on_init"))]
    reached = {name: getattr(state, name) for name in ("global_step", "epoch", "max_steps", "save_steps", "logging_steps")}
    logged = [(sorted(entry.keys() & {"loss", "eval_loss", "train_loss"}), entry["step"]) for entry in state.log_history]
    weights = [whole(p.detach()).clone() for p in trainer.model.parameters()]
    return events, reached, logged, sorted(path.name for path in Path(folder).glob("checkpoint-*")), weights


def on_ranks(names: list[str], door: str, config: dict[str, Any], rank: int) -> dict[str, Any]:
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as own:
            shared = [own]
            dist.broadcast_object_list(shared, src=0)
            found[name] = run(CASES[name], shared[0], door, config, dist.get_rank() == rank)
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(case, folder, "stock", {}, True)
    return found


SOME = ["stop", "all and stop", "in a log", "in a save", "between two batches", "fewer steps", "at the end of an epoch"]
# door, changed settings, rank of the callback, names of cases
DOORS: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "trainer": ("trainer", {}, 1, list(CASES)),
    "first rank": ("trainer", {}, 0, SOME[:3]),
    "sharded": ("trainer", {"parameters": "sharded"}, 1, SOME[:4]),
    "staged": ("trainer", {"stages": 2}, 1, SOME[:4]),
    "attached": ("attached", {}, 1, SOME),
    "alone": ("alone", {}, 1, list(CASES)),
}


@pytest.mark.daily("first rank")
@pytest.mark.parametrize("name", DOORS)
def test_one_ranks_wish_counts_for_all_when_it_would_on_one_process(ranks, stock: dict[str, Any], name: str) -> None:
    door, config, rank, names = DOORS[name]
    results = ranks(2).run(on_ranks, names, door, config, rank)
    for case in names:
        expected = stock[case]
        for events, reached, logged, folders, _ in (result[case] for result in results):
            assert events == expected[0], case
            assert (reached, logged, folders) == expected[1:4], case
        if config.get("stages") != 2:
            first, second = (result[case][4] for result in results)
            assert all(torch.equal(own, other) for own, other in zip(first, second, strict=True)), case


def metrics_by_rank(folder: str, door: str, strategy: str) -> Any:
    """State that is reached with a metric of each rank's own, which gets worse on one rank and better on the other."""
    calls = []

    def compute(_: Any) -> dict[str, float]:
        calls.append(len(calls))
        return {"score": float(calls[-1] if dist.get_rank() else -calls[-1]), f"of_{dist.get_rank()}": 1.0}

    arguments = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": strategy,
        "save_steps": 1,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    given: dict[str, Any] = {
        "model": build_model(CASE),
        "args": training_arguments(folder, **arguments),
        "train_dataset": datasets.Dataset.from_list(ROWS),
        "eval_dataset": datasets.Dataset.from_list(ROWS[:2]),
        "compute_metrics": compute,
        "callbacks": [EarlyStoppingCallback(2)],
    }
    planned = LongContextConfig(tokens_per_rank=64, report_steps=False, collective_timeout_s=20.0, **OFF)
    if door == "trainer":
        trainer: Trainer = LongContextTrainer(**given, longctx_config=planned)
    else:
        given["callbacks"].append(LongContextCallback(planned))
        trainer = Trainer(**given, data_collator=DataCollatorWithFlattening())
    trainer.train()
    state = trainer.state
    scores = [(entry["eval_score"], entry["eval_of_1"]) for entry in state.log_history if "eval_score" in entry]
    best = Path(state.best_model_checkpoint or "").name
    return state.global_step, scores, state.best_metric, best, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.daily("alone-steps")
@pytest.mark.parametrize("door,strategy", [("trainer", "best"), ("trainer", "steps"), ("alone", "steps")])
def test_metrics_of_the_first_rank_choose_the_best_checkpoint_on_all(ranks, tmp_path: Path, door: str, strategy: str) -> None:
    (*first, weights), (*second, others) = ranks(2).run(metrics_by_rank, str(tmp_path), door, strategy)
    # scores fall on the first rank, so its first evaluation is the best, and its second failure ends the training
    assert first == second == [3, [(0.0, 1.0), (-1.0, 1.0), (-2.0, 1.0)], 0.0, "checkpoint-1"]
    assert all(torch.equal(own, other) for own, other in zip(weights, others, strict=True))


def pruned_search() -> Any:
    """The steps of every trial of a search whose second trial is pruned by rank 0, and the best trial."""
    import optuna

    class PrunesSecond(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 1)

    steps: list[int] = []

    class Ends(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_steps": 3, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2}
        trainer = LongContextTrainer(
            args=training_arguments(folder, **arguments),
            model_init=lambda trial=None: build_model(CASE),
            train_dataset=datasets.Dataset.from_list(ROWS),
            eval_dataset=datasets.Dataset.from_list(ROWS[:2]),
            longctx_config=LongContextConfig(tokens_per_rank=64, report_steps=False, collective_timeout_s=20.0, **OFF),
            callbacks=[Ends()],
        )
        best = trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)},
            n_trials=3,
            direction="minimize",
            pruner=PrunesSecond(),
        )
        dist.barrier()
    return steps, None if best is None else best.run_id


def test_a_trial_that_is_pruned_ends_on_all_ranks(ranks) -> None:
    pytest.importorskip("optuna")
    (steps, best), (others, nothing) = ranks(2).run(pruned_search)
    assert steps == others == [3, 2, 3] and best in ("0", "2") and nothing is None

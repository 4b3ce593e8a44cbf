"""Weights that a user's callback freezes, unfreezes or hooks between steps: as in one plain process, or refused on every rank."""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import (
    LossRecorder,
    Rows,
    make_trainer,
    plain_training_with,
    training_arguments,
)
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig

NUM_STEPS = 6
CASE = ModelCase(promoted=True, tied=True)
# weights that are frozen before a step, by a part of their names; on the last stage, the tied embedding is called lm_head
FROZEN = {
    0: ("layers.1.mlp", "layers.0.self_attn", "embed_tokens", "lm_head"),
    2: ("layers.1.mlp",),
    3: (),
    4: ("layers.0.mlp", "norm"),
}


def freeze(model: nn.Module, num_done: int) -> None:
    """Sets which weights train in the step after `num_done` steps."""
    if num_done in FROZEN:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in FROZEN[num_done]))


class Freezing(TrainerCallback):
    """Freezes as `FROZEN` says, on all ranks or on one alone; remembers the weights before each step."""

    def __init__(self, only_rank: int | None = None) -> None:
        self.only_rank = only_rank
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.only_rank in (None, args.process_index):
            freeze(model, state.global_step)
        self.weights.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})


def swap(model: nn.Module, num_done: int) -> torch.optim.Optimizer | None:
    """An optimizer that takes the place of the trainer's after two steps, and gets more weights after four."""
    late = {name: parameter for name, parameter in model.named_parameters() if "layers.0.mlp" in name}
    if num_done == 2:
        early = [parameter for name, parameter in model.named_parameters() if name not in late]
        model.swapped = torch.optim.SGD(early, lr=0.05, momentum=0.9)  # type: ignore[assignment]
        return model.swapped  # type: ignore[return-value]
    if num_done == 4:
        model.swapped.add_param_group({"params": list(late.values()), "lr": 0.01})  # type: ignore[operator, union-attr]
    return None


class Swapping(TrainerCallback):
    """Replaces the trainer's optimizer as `swap` does, and the head's weight before the last step if `is_weight_new`."""

    trainer: Any

    def __init__(self, is_weight_new: bool) -> None:
        self.is_weight_new = is_weight_new

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.trainer.optimizer = swap(model, state.global_step) or self.trainer.optimizer
        if self.is_weight_new and state.global_step == NUM_STEPS - 1 and args.process_index == 1:
            model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


class Hooking(TrainerCallback):
    """Puts a hook on a weight before the third step, on one rank alone."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            getattr(next(iter(model.parameters())), self.kind)(lambda *_: None)


@pytest.fixture(scope="module")
def expected(rows: Rows) -> tuple[list[float], dict[str, Any]]:
    return plain_training_with(freeze, CASE, rows, NUM_STEPS)


def train(rows: Rows, config: dict[str, Any], attached: bool, callback: TrainerCallback) -> tuple[list[float], Any, str]:
    """Losses and last weights of a training whose `callback` changes weights, and the message if it stopped."""
    arguments = {"max_steps": NUM_STEPS, "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        if attached:
            settings = {"report_steps": False, "timeline_steps": 0, **config}
            trainer: Any = Trainer(
                model=build_model(CASE),
                args=training_arguments(folder, per_device_train_batch_size=4, **arguments),
                train_dataset=datasets.Dataset.from_list(rows),
                data_collator=DataCollatorWithFlattening(),
            )
            LongContextCallback(LongContextConfig(**settings)).attach(trainer)
        else:
            trainer = make_trainer(CASE, rows, folder, config, arguments)
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.add_callback(callback)
        if isinstance(callback, Swapping):
            callback.trainer = trainer
        try:
            trainer.train()
        except ValueError as error:
            return recorder.losses, {}, str(error)
    return recorder.losses, {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}, ""


# name -> (ranks, settings, whether a stock trainer gets a callback attached)
RUNS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "replicated": (2, {"tokens_per_rank": 64}, False),
    "sharded": (2, {"parameters": "sharded", "tokens_per_rank": 64}, False),
    "copies of shards": (4, {"parameters": "gathered_per_round", "shard_ranks": 2, "tokens_per_rank": 32}, False),
    "stages": (2, {"stages": 2, "tokens_per_rank": 96}, False),
    "attached": (2, {"tokens_per_rank": 64}, True),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RUNS)
def test_frozen_and_unfrozen_weights_follow_one_plain_process(ranks, rows: Rows, expected, name: str) -> None:
    num_ranks, config, attached = RUNS[name]
    for losses, weights, message in ranks(num_ranks).run(train, rows, config, attached, Freezing()):
        assert not message
        assert losses == pytest.approx(expected[0], rel=1e-10)
        whole_names = {"lm_head.weight": "model.embed_tokens.weight"}
        assert max(float((w - expected[1][whole_names.get(n, n)]).abs().max()) for n, w in weights.items()) <= 1e-10


@pytest.mark.wide
@pytest.mark.parametrize("name", ["replicated", "sharded", "attached"])
def test_an_optimizer_that_a_callback_puts_in_place_trains_as_in_one_plain_process(ranks, rows: Rows, name: str) -> None:
    losses, expected_weights = plain_training_with(swap, CASE, rows, NUM_STEPS)
    num_ranks, config, attached = RUNS[name]
    for found, weights, message in ranks(num_ranks).run(train, rows, config, attached, Swapping(is_weight_new=False)):
        assert not message and found == pytest.approx(losses, rel=1e-10)
        whole_names = {"lm_head.weight": "model.embed_tokens.weight"}
        assert max(float((w - expected_weights[whole_names.get(n, n)]).abs().max()) for n, w in weights.items()) <= 1e-10


def test_a_weight_that_a_callback_puts_in_place_is_refused_on_every_rank(ranks, rows: Rows) -> None:
    results = ranks(2).run(train, rows, {"tokens_per_rank": 64}, False, Swapping(is_weight_new=True))
    for (losses, _, message), which in zip(results, ("a weight of another rank", "the weight model.norm.weight"), strict=True):
        assert len(losses) == NUM_STEPS - 1 and message.startswith(f"{which} is new: ")


@pytest.mark.daily("config0-2")
@pytest.mark.parametrize("config,num_ranks", [({}, 2), ({"parameters": "sharded"}, 2), ({"stages": 2}, 4)])
def test_freezing_on_one_rank_alone_is_refused_on_all(ranks, rows: Rows, config: dict[str, Any], num_ranks: int) -> None:
    messages = [
        message
        for *_, message in ranks(num_ranks).run(train, rows, {"tokens_per_rank": 96, **config}, False, Freezing(only_rank=1))
    ]
    assert all("are trained on some ranks and frozen on others" in message for message in messages), messages
    assert "weights, such as model.embed_tokens.weight" in messages[1]


@pytest.mark.daily("register_hook-config0")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_added_in_training_stops_all_ranks_before_it_acts(ranks, rows: Rows, config: dict[str, Any], kind: str) -> None:
    results = ranks(2).run(train, rows, {"tokens_per_rank": 96, **config}, False, Hooking(kind))
    for (losses, _, message), which in zip(results, ("a weight of another rank", "the weight model.embed_tokens"), strict=True):
        assert len(losses) == 2
        assert message.startswith(which) and "got a hook in training" in message


@pytest.mark.wide
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_frozen_bf16_weights_stay_where_they_are(ranks, rows: Rows, num_ranks: int) -> None:
    for before in ranks(num_ranks).run(weights_before_steps, rows):
        for step in range(4, NUM_STEPS - 1):
            moved = {name for name, weight in before[step].items() if not torch.equal(weight, before[step + 1][name])}
            assert moved
            assert not [name for name in moved if "layers.0.mlp" in name or "norm" in name]


def weights_before_steps(rows: Rows) -> list[dict[str, torch.Tensor]]:
    callback = Freezing()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_steps": NUM_STEPS, "logging_steps": 1}
        trainer = make_trainer(ModelCase(dtype=torch.bfloat16), rows, folder, {"tokens_per_rank": 96}, arguments)
        trainer.add_callback(callback)
        trainer.train()
    return callback.weights

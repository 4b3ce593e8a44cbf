"""A rank whose weights drift from those of its copies is named before anything is saved from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import Rows, make_trainer
from torch import nn
from transformers import TrainerCallback

from hf_longctx.hf.run.saver import checksums

NUM_STEPS = 4
NAME = "model.layers.1.mlp.up_proj.weight"


class Drift(TrainerCallback):
    """Adds the smallest change to one weight of one rank, before the third step."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name, self.num_steps = rank, name, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.num_steps = state.global_step
        if state.global_step == 2 and args.process_index == self.rank:
            weight = dict(model.named_parameters())[self.name].detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(10.0, dtype=weight.dtype))


def train(
    rows: Rows, config: dict[str, Any], rank: int, save_steps: int, folder: str, more: Any = None, name: str = NAME
) -> tuple[str, int, list[str]]:
    """Message of the error that stops the run, the number of finished steps, and the checkpoints."""
    arguments = {"max_steps": NUM_STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": save_steps}
    arguments |= more or {}
    message = ""
    case = ModelCase(promoted=True, num_layers=2 if name == NAME else 4)
    trainer = make_trainer(case, rows, folder, {"tokens_per_rank": 96, **config}, arguments)
    drift = Drift(rank, name)
    trainer.add_callback(drift)
    try:
        trainer.train()
    except RuntimeError as error:
        message = str(error)
    found = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return message, drift.num_steps, found


# name -> (ranks, settings, the rank that drifts, what is said)
RUNS: dict[str, tuple[int, dict[str, Any], int, str]] = {
    "two copies": (2, {}, 1, "ranks 0 and 1 differ"),
    "four copies": (4, {}, 2, "rank 2 differs from rank 0, 1, 3"),
    "copies of shards": (4, {"parameters": "sharded", "shard_ranks": 2}, 2, "ranks 0 and 2 differ"),
    "stages": (4, {"stages": 2}, 3, "ranks 2 and 3 differ"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RUNS)
def test_a_drifting_rank_is_named_before_a_save(ranks, rows: Rows, tmp_path: Path, name: str) -> None:
    num_ranks, config, rank, said = RUNS[name]
    results = ranks(num_ranks).run(train, rows, config, rank, 4, str(tmp_path))
    for message, num_steps, checkpoints in results:
        assert num_steps == 3 and not checkpoints
        assert message.startswith("after step 4, copies of the same weights differ: ") and said in message, message
    assert "first in model." in results[rank][0]


@pytest.mark.daily("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_head_that_drifts_from_its_copy_on_another_stage_is_named(ranks, rows: Rows, tmp_path: Path, num_ranks: int) -> None:
    config = {"stages": 2, **({"parameters": "sharded"} if num_ranks > 2 else {})}
    results = ranks(num_ranks).run(train, rows, config, num_ranks - 1, 4, str(tmp_path), None, "lm_head.weight")
    for message, num_steps, checkpoints in results:
        assert num_steps == 3 and not checkpoints
        first, last = num_ranks // 2 - 1, num_ranks - 1
        assert f"ranks {first} and {last} differ in 1 weights" in message, message
    assert "first in lm_head.weight" in results[-1][0]
    # without drift, two copies of the head are equal
    equal = ranks(num_ranks).run(train, rows, config, -1, 4, str(tmp_path / "equal"), None, "lm_head.weight")
    assert all(not message and checkpoints for message, _, checkpoints in equal)


@pytest.mark.wide
def test_saves_at_the_end_of_an_epoch_are_checked_too(ranks, rows: Rows, tmp_path: Path) -> None:
    # an epoch has five steps
    more = {"save_strategy": "epoch", "max_steps": 7}
    for message, num_steps, checkpoints in ranks(2).run(train, rows, {}, 1, 1, str(tmp_path), more):
        assert num_steps == 4 and not checkpoints
        assert message.startswith("after step 5, copies of the same weights differ: ")


@pytest.mark.wide
def test_the_check_may_be_more_frequent_or_left_out(ranks, rows: Rows, tmp_path: Path) -> None:
    for message, num_steps, _ in ranks(2).run(train, rows, {"replica_check_steps": 1}, 1, 4, str(tmp_path)):
        assert num_steps == 2 and "after step 3" in message
        assert f"in 1 weights, first in {NAME}" in message or "first in model." in message
    for message, _, checkpoints in ranks(2).run(train, rows, {"replica_check_steps": 0}, 1, 2, str(tmp_path)):
        assert not message and checkpoints == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.daily("config0")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}, {"parameters": "sharded", "shard_ranks": 2}, {"stages": 2}])
def test_equal_copies_pass(ranks, rows: Rows, tmp_path: Path, config: dict[str, Any]) -> None:
    num_ranks = 4 if "shard_ranks" in config else 2
    for message, *_ in ranks(num_ranks).run(train, rows, {**config, "replica_check_steps": 1}, -1, 4, str(tmp_path)):
        assert not message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (5, 7), (4093, 2), (9000,), (0,)])
def test_checksums_see_every_bit_and_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype))])
    (before,) = checksums(model)
    assert checksums(model) == [before]
    weight = model[0].detach().view(-1)
    for place in {0, len(weight) // 2, len(weight) - 1} if len(weight) else ():
        old = weight[place].clone()
        weight[place] = -old if old else 1.0
        assert checksums(model) != [before]
        weight[place] = old
    if len(weight) > 4:
        weight[[0, 1]] = weight[[1, 0]].clone()
        assert checksums(model) != [before] or weight[0] == weight[1]

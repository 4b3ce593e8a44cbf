"""Training of bf16 weights: small updates arrive, and fp32 copies pass through checkpoints of every placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import make_trainer

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.runtime.parameters import host_steps
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT, has_host_states

CASE = ModelCase(dtype=torch.bfloat16, tied=True)
ARGUMENTS = {"max_steps": 4, "learning_rate": 1e-5, "warmup_steps": 0, "save_strategy": "steps", "save_steps": 4}
SHARDED = {"tokens_per_rank": 64, "parameters": "sharded"}
CONFIGS: dict[str, dict[str, Any]] = {
    "replicated": {"tokens_per_rank": 64},
    "sharded": SHARDED,
    "staged": {"stages": 2, "tokens_per_rank": 64},
    "on the host": {**SHARDED, "optimizer_states": "host"},
    "layers on the host": {**SHARDED, "optimizer_states": "host", "layer_weights": "host"},
    "whole on the host": {"tokens_per_rank": 64, "optimizer_states": "host"},
    "staged on the host": {"stages": 2, "tokens_per_rank": 64, "optimizer_states": "host"},
}

Found = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def train(rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: str) -> Found:
    """Trains on this rank; returns master weights, second moments, and weights, of the rank's stage."""
    trainer = make_trainer(CASE, rows, folder, config, {**ARGUMENTS, **arguments})
    # updates on the host in several parts, for a model as small as this one
    with patch.object(host_steps, "UPDATE_PART_BYTES", 4096):
        trainer.train(resume_from_checkpoint=resume or None)
    return values_of(trainer)


def values_of(trainer: Any) -> Found:
    """Master weights, second moments, and weights, of this rank's stage."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    states = {names[parameter]: state for parameter, state in trainer._plain_optimizer.state.items()}
    masters = {name: whole(state[MASTER_WEIGHT]).clone() for name, state in states.items() if MASTER_WEIGHT in state}
    squares = {name: whole(state["exp_avg_sq"]).clone() for name, state in states.items()}
    return masters, squares, {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def runs(ranks, rows, tmp_path_factory) -> dict[str, tuple[Path, list[Found]]]:
    """Folder and results on both ranks of a run of every placement."""
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, ranks(2).run(train, rows, str(folder), config, {}, "")
    return made


@pytest.mark.wide("replicated")
@pytest.mark.parametrize("name", CONFIGS)
def test_small_updates_reach_the_master_weights(runs, name: str) -> None:
    start = dict(build_model(CASE).named_parameters())
    for masters, _, weights in runs[name][1]:
        # the stages divide the names, and both hold the tied embedding
        assert set(masters) == set(weights) and masters
        for master_name, master in masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), weights[master_name])
            if master_name in start and master.dim() > 1:
                moved = (master != start[master_name].detach().float()).float().mean()
                rounded = (weights[master_name] != start[master_name]).float().mean()
                assert moved > 0.9 > rounded, "updates at this rate are below what bf16 can hold"


@pytest.mark.parametrize(
    "here,there",
    [
        ("on the host", "sharded"),
        ("layers on the host", "sharded"),
        ("whole on the host", "replicated"),
        ("staged on the host", "staged"),
    ],
)
def test_updates_on_the_host_have_the_bits_of_those_on_the_device(runs, here: str, there: str) -> None:
    for found, expected in zip(runs[here][1], runs[there][1], strict=True):
        for values, others in zip(found, expected, strict=True):
            assert values.keys() == others.keys() and values
            assert all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.daily("staged-2-staged", "whole on the host-1-sharded", "staged-2-layers on the host")
@resuming
@pytest.mark.parametrize(
    "first,num_ranks,then",
    [
        ("replicated", 1, "replicated"),
        ("replicated", 2, "sharded"),
        ("sharded", 4, "sharded"),
        ("sharded", 1, "replicated"),
        ("staged", 2, "staged"),
        ("sharded", 2, "staged"),
        ("staged", 2, "sharded"),
        ("on the host", 4, "sharded"),
        ("sharded", 2, "on the host"),
        ("replicated", 2, "on the host"),
        ("whole on the host", 1, "sharded"),
        ("staged on the host", 2, "staged"),
        ("layers on the host", 1, "replicated"),
        ("staged", 2, "layers on the host"),
    ],
)
def test_master_weights_pass_through_checkpoints(
    ranks, rows, runs, tmp_path: Path, first: str, num_ranks: int, then: str
) -> None:
    folder, results = runs[first]
    saved: tuple[dict[str, torch.Tensor], ...] = tuple({} for _ in range(3))
    for found in results:
        for kept, values in zip(saved, found, strict=True):
            kept.update(values)
    # no step is left to do
    resumed = ranks(num_ranks).run(train, rows, str(tmp_path), CONFIGS[then], {}, str(folder / "checkpoint-4"))
    for found in resumed:
        for kept, values in zip(saved, found, strict=True):
            for name, value in values.items():
                # the last stage has a name of its own for the tied weight
                expected = kept.get(name, kept["model.embed_tokens.weight"])
                assert torch.equal(value, expected), name


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("name", ["replicated", "sharded", "staged"])
def test_a_checkpoint_without_master_weights_can_be_resumed(ranks, rows, tmp_path: Path, name: str) -> None:
    plain = {**CONFIGS[name], "fp32_master_weights": False}
    for masters, _, _ in ranks(2).run(train, rows, str(tmp_path / "first"), plain, {}, ""):
        assert not masters
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    for masters, _, weights in ranks(2).run(train, rows, str(tmp_path / "second"), CONFIGS[name], {"max_steps": 5}, checkpoint):
        assert {key: value.bfloat16().equal(weights[key]) for key, value in masters.items()} == dict.fromkeys(weights, True)


class RoundingOptimizer(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def refused(rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any]) -> str:
    kind = (RoundingOptimizer, {"lr": 1e-5})
    try:
        make_trainer(CASE, rows, folder, config, {"max_steps": 1}, optimizer_cls_and_kwargs=kind).train()
    except ValueError as error:
        return str(error)
    return ""


def test_an_optimizer_that_cannot_keep_them_is_refused_by_name(ranks, rows, tmp_path: Path) -> None:
    (message,) = ranks(1).run(refused, rows, str(tmp_path), {})
    assert "RoundingOptimizer reads states from checkpoints in its own way" in message
    assert "fp32_master_weights=False" in message
    assert ranks(1).run(refused, rows, str(tmp_path), {"fp32_master_weights": False}) == [""]


class HeldBytes(transformers.TrainerCallback):
    """Counts the bytes of weights and of what updates need, on the device and on the host, when backward has ended."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.device_bytes = self.host_bytes = 0

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        weights = list(self.trainer.model.parameters())
        self.device_bytes += bytes_of([*weights, *(weight.grad for weight in weights)])

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        states = self.trainer._plain_optimizer.state.values()
        self.host_bytes += bytes_of([value for state in states for value in state.values() if value.dim()])


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_bytes(rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Bytes of weights with gradients, and of states, after a step, and what plans count for the device and the host."""
    trainer = make_trainer(CASE, rows, folder, config, {"max_steps": 1})
    counted = HeldBytes(trainer)
    trainer.add_callback(counted)
    trainer.train()
    updates = {"has_master_weights": config.get("fp32_master_weights", True), "updates_on_host": "optimizer_states" in config}
    spec = ByteModel(replace(model_spec(trainer.model), **updates))
    return counted.device_bytes, counted.host_bytes, spec.states(), spec.host_states()


@pytest.mark.daily("{}")
@pytest.mark.parametrize("config", [{"fp32_master_weights": False}, {}, {"optimizer_states": "host"}], ids=str)
def test_plans_count_them(ranks, rows, tmp_path: Path, config: dict[str, Any]) -> None:
    ((weights, states, planned, planned_on_host),) = ranks(1).run(held_bytes, rows, str(tmp_path), config)
    # weights and their gradients take 4 bytes for each parameter, and the gradients' fp32 sums another 4 while they add up
    count = weights // 4
    if config.get("optimizer_states"):
        assert planned == pytest.approx(6 * count, rel=0.02)
        # pinned, every weight and its gradient; and the gradients of a part, which is all of this model, in fp32
        assert planned_on_host == pytest.approx(states + 4 * count + 4 * count, rel=0.02)
    else:
        assert planned == pytest.approx(weights + states + 4 * count, rel=0.02)
        assert planned_on_host == 0


def train_where_chosen(
    rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any], resume: str
) -> tuple[Found, str, bool]:
    """Trains like `train`; returns also what the run prints at its start, and whether its states lay on the host."""
    trainer = make_trainer(CASE, rows, folder, config, ARGUMENTS)
    opening = trainer.longctx_run.report.opening
    trainer.train(resume_from_checkpoint=resume or None)
    return values_of(trainer), opening, has_host_states(trainer._plain_optimizer)


@pytest.mark.wide
@resuming
def test_states_go_where_the_longest_row_has_room_and_come_back(ranks, rows, runs, tmp_path: Path) -> None:
    spec = replace(model_spec(build_model(CASE)), has_master_weights=True)
    auto = {**CONFIGS["sharded"], "optimizer_states": "auto"}
    small = {**auto, "device_gib": ByteModel(spec).states("sharded", 2) / 2**30, "tile_tokens": 16}
    pool = ranks(2)
    roomy, moved = (
        pool.run(train_where_chosen, rows, str(tmp_path / name), config, "") for name, config in (("a", auto), ("b", small))
    )
    start = {name: weight.detach().float() for name, weight in build_model(CASE).named_parameters()}
    for results, on_host in ((roomy, False), (moved, True)):
        for (found, opening, is_on_host), expected in zip(results, runs["sharded"][1], strict=True):
            assert is_on_host == on_host
            assert f"optimizer states: on the {'host' if on_host else 'device'}; " in opening
            assert "the longest sequence has 61" in opening
            for values, others, before in zip(found[:2], expected[:2], (start, {}), strict=True):
                for name, value in values.items():
                    if on_host:
                        # other plans round otherwise; weights are compared by how far they moved
                        distance = others[name] - before.get(name, torch.zeros(()))
                        assert (value - others[name]).norm() < 0.1 * distance.norm(), name
                    else:
                        assert torch.equal(value, others[name]), name
    # no step is left to do: the states only move
    for config, first, on_host in ((auto, "b", False), (small, "a", True)):
        resumed = pool.run(
            train_where_chosen, rows, str(tmp_path / f"then-{first}"), config, str(tmp_path / first / "checkpoint-4")
        )
        for (found, _, is_on_host), (expected, _, was_on_host) in zip(resumed, moved if first == "b" else roomy, strict=True):
            assert (is_on_host, was_on_host) == (on_host, not on_host)
            for values, others in zip(found, expected, strict=True):
                assert values.keys() == others.keys() and all(torch.equal(values[name], others[name]) for name in values)

"""Layers on the host: the bits of a run with all shards on the device, while the device has those of two layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import CHUNK_LENGTHS, FBFBFB, FFBFBB, FFFBBB, LAYOUTS, chunks_plan, plan_of
from helpers.ranks.rank_steps import group_pool, mesh, note_case, rank_inputs, whole
from torch import Tensor

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.core.host_copies import PlainCopies
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.gradients import local_shard
from hf_longctx.runtime.parameters.host_layers import NUM_SLOTS, LayerShards
from hf_longctx.runtime.parameters.master_weights import host_steps_of, keep_master_weights
from hf_longctx.runtime.parameters.sharded import layer_shards, shard_model

CPU = torch.device("cpu")
LAYERS = 4
HEAVY = ModelCase(promoted=True, tied=True, num_layers=LAYERS)
LORA = (("r", 2), ("target_modules", "all-linear"))


class CountedCopies(PlainCopies):
    """Counts copies to the device."""

    num_back = 0

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Any, ...], beside: bool = False) -> Any:
        self.num_back += 1
        return super().to_device(source, target, after, beside)


@contextmanager
def watched(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Context that notes, before each forward of a layer, how many layers have shards on the device, and how many slots."""
    found: list[tuple[int, int]] = []
    shards = layer_shards(model)
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]

    def note(*_: Any) -> None:
        own = [layer for layer in shards._layers if any(shard.untyped_storage().nbytes() for shard in layer.shards)]
        found.append((len(own), len(shards._slots)))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers] if shards is not None else []
    yield found
    for hook in hooks:
        hook.remove()


def two_steps(
    case: ModelCase, plan_json: str, rows: list[dict[str, list[int]]], shard_ranks: int, layers_on_host: bool
) -> dict[str, Any]:
    """Losses, whole gradients and weights of two steps with an evaluation between, and of weights that are set in between.

    The first step's plan runs twice before the optimizer's step, as in gradient accumulation.
    """
    pool, plan = group_pool(), plan_from_json(plan_json)
    model = build_model(case)
    patch_model(model)
    note_case(model, case)
    shard_model(model, model._no_split_modules, mesh(shard_ranks), case.fp32_gradients, layers_on_host)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, CPU, case.fp32_gradients)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    shards = layer_shards(model)
    keep_master_weights(optimizer, on_host=True, home_of=None if shards is None else shards.home_of)
    own, chunks = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]
    losses: list[float] = []
    with watched(model) as found:
        for reduce in (False, True):
            losses.append(float(executor.run(own, chunks, 40, reduce=reduce).loss))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight in model.parameters():
                # nothing tells that this happened
                weight.data.mul_(1.01)
        losses.append(float(executor.evaluate(own, chunks)))
        losses.append(float(executor.run(own, chunks, 40).loss))
    pinned = sum(memory.memory.numel() for memory in host_steps_of(optimizer)._memory)
    return {
        "losses": [*losses, float(whole(norm))],
        "gradients": gradients,
        "second": {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None},
        "weights": {name: whole(weight.detach()) for name, weight in model.named_parameters()},
        "found": set(found),
        "pinned": pinned,
        "home": 0 if shards is None else shards._memory.memory.numel(),
    }


def plans() -> dict[str, tuple[int, ModelCase, StepPlan, list[int]]]:
    """name -> ranks, model, plan, lengths; copies of shards on four ranks."""
    orders = {order: chunks_plan((order, order), "sharded") for order in (FFFBBB, FBFBFB, FFBFBB)}
    found = {name: (2, HEAVY, plan, CHUNK_LENGTHS) for name, plan in orders.items()}
    plan = orders[FFBFBB]
    found["bf16"] = (2, ModelCase(dtype=torch.bfloat16, num_layers=LAYERS), plan, CHUNK_LENGTHS)
    found["autocast"] = (2, ModelCase(dtype=torch.float32, num_layers=LAYERS, autocast=True), plan, CHUNK_LENGTHS)
    found["adapters"] = (2, ModelCase(dtype=torch.float32, num_layers=LAYERS, lora=LORA), plan, CHUNK_LENGTHS)
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    found["copies"] = (num_ranks, HEAVY, plan_of(layout, lengths, num_ranks, parameters="sharded"), lengths)
    return found


@pytest.mark.wide
@pytest.mark.parametrize("name", plans())
def test_steps_have_the_bits_of_shards_on_the_device(ranks, name: str) -> None:
    num_ranks, case, plan, lengths = plans()[name]
    run = plan_to_json(plan), random_rows(lengths), 2
    expected, *_ = ranks(num_ranks).run(two_steps, case, *run, False)
    for found in ranks(num_ranks).run(two_steps, case, *run, True):
        assert found["losses"] == expected["losses"]
        for kind in ("gradients", "second", "weights"):
            assert found[kind].keys() == expected[kind].keys()
            for key, value in found[kind].items():
                assert torch.equal(value, expected[kind][key]), (kind, key)
        assert found["found"] == {(0, NUM_SLOTS)}
        # weights that the host updates have one home
        if not case.lora:
            assert expected["pinned"] - found["pinned"] == pytest.approx(found["home"], rel=0.1)


def copies_of_a_step(plan_json: str, rows: list[dict[str, list[int]]]) -> tuple[int, int]:
    """Copies of a step to the device, and those of shards that come back at its end."""
    pool, plan = group_pool(), plan_from_json(plan_json)
    model = build_model(HEAVY)
    patch_model(model)
    shard_model(model, model._no_split_modules, mesh(2), layers_on_host=True)
    shards = layer_shards(model)
    shards._copies = copies = CountedCopies()
    executor = StepExecutor(whole_model(model, LAYERS), pool, CPU)
    executor.run(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"], 40)
    return copies.num_back, sum(len(layer.weights) for layer in shards._layers)


@pytest.mark.wide
def test_each_gather_needs_one_copy_and_the_last_layers_none(ranks) -> None:
    plan, rows = chunks_plan((FBFBFB, FBFBFB), "sharded"), random_rows(CHUNK_LENGTHS)
    for num_back, num_returning in ranks(2).run(copies_of_a_step, plan_to_json(plan), rows):
        # four chunks: a forward fills its slots with all layers but those that the backward before it left there, which needs
        # all but those that the forward left there
        assert num_back - num_returning == LAYERS + 4 * (LAYERS - NUM_SLOTS) + 3 * (LAYERS - NUM_SLOTS)


def broken_steps(plan_json: str, rows: list[dict[str, list[int]]]) -> list[Any]:
    """Findings after a step that failed, and refusals after one whose weights found no room."""
    pool, plan = group_pool(), plan_from_json(plan_json)
    model = build_model(HEAVY)
    patch_model(model)
    shard_model(model, model._no_split_modules, mesh(2), layers_on_host=True)
    before = [local_shard(weight.detach()).clone() for weight in model.parameters()]
    executor = StepExecutor(whole_model(model, LAYERS), pool, CPU)
    own, chunks = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]

    found: list[Any] = []
    with patch.object(executor.parameters, "enter_round", side_effect=ArithmeticError), pytest.raises(ArithmeticError):
        executor.evaluate(own, chunks)
    found.append(all(torch.equal(a, local_shard(b.detach())) for a, b in zip(before, model.parameters(), strict=True)))
    found.append(float(executor.run(own, chunks, 40).loss))
    shards = layer_shards(model)
    assert isinstance(shards, LayerShards)
    shards._is_away = True
    for parameters in ("sharded", "gathered_per_round"):
        changed = plan_from_json(plan_json.replace('"sharded"', f'"{parameters}"'))
        try:
            executor.run(changed.for_rank(pool.rank), chunks, 40)
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    shards._is_away = False
    try:
        shard_model(build_model(HEAVY), model._no_split_modules, mesh(1), layers_on_host=True)
    except ValueError as error:
        found.append(str(error))
    return found


def test_weights_come_back_after_an_error_and_what_cannot_be_is_refused(ranks) -> None:
    plan, rows = chunks_plan((FFFBBB, FFFBBB), "sharded"), random_rows(CHUNK_LENGTHS)
    for is_back, loss, *refused in ranks(2).run(broken_steps, plan_to_json(plan), rows):
        assert is_back and loss > 0
        assert [text.split(",")[0] for text in refused] == [
            "an earlier step failed",
            "the plan gathers all layers at once",
            "shards of layers can lie on the host only if two or more ranks share the parameters; use more ranks",
        ]

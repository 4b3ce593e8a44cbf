"""Sums that start in the last backward of a step: the gradients of sums at its end, whatever ranks run and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import total_weight
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_pool import lasting
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor, nn

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import gradients as early_sums
from hf_longctx.runtime.parameters.gradients import EarlySums
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
LAYERS = 4
CASE = ModelCase(promoted=True, num_layers=LAYERS)
_POOLS: dict[tuple[int, int], GroupPool] = {}


def early_pool(num_stages: int) -> GroupPool:
    """This rank's pool with a group for early sums, made once per process; steps that broke it are forgotten."""
    key = dist.get_world_size(), num_stages
    if key not in _POOLS:
        degrees = tuple(range(1, key[0] + 1))
        _POOLS[key] = lasting(lambda: GroupPool(degrees, 60.0, num_stages=num_stages, sums_early=True))
    return _POOLS[key]


def share_weight(model: Any) -> None:
    """Lets three layers share a weight."""
    for layer in model.model.layers[1:3]:
        layer.mlp.up_proj.weight = model.model.layers[LAYERS - 1].mlp.up_proj.weight


def prepared(case: ModelCase, plan: StepPlan, pool: GroupPool, change: str) -> tuple[nn.Module, StepExecutor, Any]:
    """The model, its executor and its engine. change: "frozen" weights, a weight "shared" by two layers, or none."""
    model = build_model(case)
    if change == "frozen":
        for name, weight in model.named_parameters():
            weight.requires_grad_("layers.2" in name or "layers.1.mlp" in name)
    elif change == "shared":
        share_weight(model)
    patch_model(model)
    has_policies = any(stage.activations for batch in plan.micro_batches for group in batch.groups for stage in group.stages)
    if plan.num_stages > 1:
        ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
        cut_model(model, ranges, pool.stage)
        stage = stage_model(model, ranges, pool.stage)
    else:
        stage = whole_model(model, num_attention_layers(model))
    engine = ActivationEngine(layer_modules(model), head=OutputHead(output_head(model))) if has_policies else None
    return model, StepExecutor(stage, pool, CPU, case.fp32_gradients), engine


def steps_on_rank(
    case: ModelCase, plan_json: str, rows: list[dict[str, list[int]]], change: str = ""
) -> tuple[list[dict[str, Tensor]], list[tuple[int, int]]]:
    """Gradients of three steps, and of each how many early sums there were and how many had started before the step's end.

    change: see `prepared`; "late" lets all sums start before the last layer's backward is over, "long" says that backwards take
    long, "none" sums nothing early.
    """
    plan = plan_from_json(plan_json)
    pool = early_pool(plan.num_stages)
    assert pool.early is not None
    model, executor, engine = prepared(case, plan, pool, change)
    batch = rank_inputs(plan, rows, pool.rank)
    steps: list[dict[str, Tensor]] = []
    counts: list[tuple[int, int]] = []
    start_all = EarlySums.start_all

    def counted(early: EarlySums) -> dict[nn.Parameter, bool]:
        started = len(early._started)
        found = start_all(early)
        counts.append((len(early._started), started))
        return found

    early = executor.parameters.early
    if change == "late":
        early._levels = dict.fromkeys(early._levels, LAYERS - 1)
    elif change == "long":
        early._longest_s = 60.0
    group, pool.early = pool.early, None if change == "none" else pool.early
    with patch.object(early_sums, "_EARLY_BUCKET_BYTES", 4096), patch.object(EarlySums, "start_all", counted):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            executor.run(plan.for_rank(pool.rank), batch["chunks"], total_weight(rows), engine=engine)
            steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    pool.early = group
    return steps, counts


def left_out(plan: StepPlan, rank: int) -> StepPlan:
    """The plan without the group of `rank` in the last micro-batch, so that the rank has nothing to do there."""
    *before, last = plan.micro_batches
    groups = tuple(group for group in last.groups if rank not in group.positions)
    return validate_plan(replace(plan, micro_batches=(*before, replace(last, groups=groups))))


PLANS: dict[str, StepPlan] = {
    "one group": plan_of([[(2, (0, 1))]], [9, 12], 2),
    "groups of one rank": plan_of([[(1, (0,)), (1, (1,))], [(1, (2,)), (1, (3,))]], [9, 12, 5, 11], 2),
    "a rank with nothing to do at the end": left_out(plan_of([[(1, (0,)), (1, (1,))], [(1, (2,))]], [9, 12, 5], 2), 1),
    "unequal groups": plan_of([[(2, (0,)), (1, (1,)), (1, (2,))], [(4, (3,))], [(1, (4,))]], [9, 7, 5, 14, 6], 4),
    "slices": sliced_plan([19, 6], [*([span] for span in cut(0, [8, 6, 5])), [(1, 0, 6)]], num_ranks=2),
    "replays": same_policy(
        plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [9, 12, 5, 8], 2), *[replayed(1.0)] * LAYERS, tile_tokens=4
    ),
    "stages": pipeline_plan(
        [19, 11], [[(2, [[each] for each in cut(0, [8, 6, 5])])], [(2, [[(1, 0, 11)]])]], 2, num_layers=LAYERS
    ),
    "layer ranges": pipeline_plan(
        [9, 7, 8, 6], [[(2, [[(i, 0, n)] for i, n in enumerate([9, 7, 8, 6])])]], 2, "interleaved", LAYERS, num_ranges=2
    ),
}


def check(ranks: Any, case: ModelCase, plan: StepPlan, change: str = "", tolerance: float = TOLERANCE) -> list[Any]:
    """Asserts that every step on every rank has the gradients of one plain process; returns the counts of all ranks."""
    rows = random_rows(list(plan.lengths))
    reference = build_model(case)
    if change == "shared":
        share_weight(reference)
    _, expected = reference_step(reference, rows)
    results = ranks(plan.num_ranks).run(steps_on_rank, case, plan_to_json(plan), rows, change)
    found: set[str] = set()
    for steps, _ in results:
        for gradients in steps:
            errors = {name: relative_error(gradient, expected[name]) for name, gradient in gradients.items()}
            assert max(errors.values()) <= tolerance, errors
            assert gradients.keys() == steps[0].keys()
        found |= steps[0].keys()
    if change != "frozen":
        assert found == expected.keys()
    return [counts for _, counts in results]


@pytest.mark.daily("a rank with nothing to do at the end")
@pytest.mark.parametrize("name", PLANS)
def test_early_sums_are_the_gradients_of_one_process(ranks, name: str) -> None:
    plan = PLANS[name]
    for rank, counts in enumerate(check(ranks, CASE, plan)):
        # the first step measures how long a backward takes
        assert counts[0] == (counts[1][0], 0)
        assert all(number >= 4 and early >= 2 for number, early in counts[1:]), (rank, counts)


@pytest.mark.daily("tied")
@pytest.mark.parametrize("case", [replace(CASE, tied=True), replace(CASE, family="qwen3_moe")], ids=["tied", "experts"])
def test_tied_weights_and_experts(ranks, case: ModelCase) -> None:
    check(ranks, case, PLANS["groups of one rank"])


@pytest.mark.wide
def test_frozen_and_shared_weights(ranks) -> None:
    plan = PLANS["groups of one rank"]
    for counts in check(ranks, CASE, plan, "frozen"):
        assert all(number and early for number, early in counts[1:])
    check(ranks, CASE, plan, "shared")


def test_gradients_that_come_after_their_sum_has_started_are_added(ranks) -> None:
    for counts in check(ranks, CASE, PLANS["groups of one rank"], "late"):
        # weights of earlier layers were late in the second step, and are summed at the end from then on
        (number, _), (left, _) = counts[1:]
        assert 0 < left < number


def test_no_rank_waits_in_a_long_backward(ranks) -> None:
    for counts in check(ranks, CASE, PLANS["groups of one rank"], "long"):
        assert counts[0][0] >= 4 and counts == [(counts[0][0], 0)] * 3


@pytest.mark.wide
@pytest.mark.parametrize("fp32_gradients", [True, False])
def test_two_ranks_get_the_same_bits_as_from_sums_at_the_end(ranks, fp32_gradients: bool) -> None:
    plan = PLANS["groups of one rank"]
    case, rows = (
        ModelCase(num_layers=LAYERS, dtype=torch.bfloat16, fp32_gradients=fp32_gradients),
        random_rows(list(plan.lengths)),
    )
    one, other = (ranks(2).run(steps_on_rank, case, plan_to_json(plan), rows, change) for change in ("", "none"))
    for (early, counts), (late, _) in zip(one, other, strict=True):
        assert counts[-1][1] >= 2
        for step, expected in zip(early, late, strict=True):
            assert step.keys() == expected.keys()
            assert all(torch.equal(step[name], expected[name]) for name in expected)


@pytest.mark.wide
def test_four_ranks_get_the_same_bits_however_long_backwards_take(ranks) -> None:
    plan = PLANS["unequal groups"]
    rows = random_rows(list(plan.lengths))
    one, other = (ranks(4).run(steps_on_rank, CASE, plan_to_json(plan), rows, change) for change in ("", "long"))
    for (early, counts), (late, late_counts) in zip(one, other, strict=True):
        assert counts[-1][1] >= 2 and late_counts[-1][1] == 0
        # also the first step, which sums at its end
        for gradients in (*early[1:], *late):
            assert all(torch.equal(gradients[name], early[0][name]) for name in early[0])


def broken_on_rank(plan_json: str, rows: list[dict[str, list[int]]]) -> tuple[bool, dict[str, Tensor]]:
    """Whether early sums end with a step that raised on every rank, at different places; gradients of the step after it."""
    plan, pool = plan_from_json(plan_json), early_pool(1)
    model, executor, _ = prepared(CASE, plan, pool, "")
    group, batch = pool.early, rank_inputs(plan, rows, pool.rank)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        executor.run(plan.for_rank(pool.rank), batch["chunks"], total_weight(rows))

    def fail(*_: Any) -> None:
        raise KeyError("broken")

    with patch.object(early_sums, "_EARLY_BUCKET_BYTES", 4096):
        run()
        # one rank breaks before its last backward, the other one in it
        broken = model.model.layers[pool.rank * 2].register_full_backward_hook(fail)
        with pytest.raises(KeyError):
            run()
        broken.remove()
        is_dropped = group is not None and pool.early is None
        run()
    return is_dropped, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.wide
def test_a_broken_step_ends_early_sums(ranks) -> None:
    plan = PLANS["groups of one rank"]
    rows = random_rows(list(plan.lengths))
    _, expected = reference_step(build_model(CASE), rows)
    pool = ranks(2)
    for is_dropped, gradients in pool.run(broken_on_rank, plan_to_json(plan), rows):
        assert is_dropped
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE
    pool.run(forget_pools)


def forget_pools() -> None:
    """Lets later tests make new pools."""
    _POOLS.clear()

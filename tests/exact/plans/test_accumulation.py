"""Several plans in one optimizer step, with evaluations between them, give the gradients of one plain process."""

from __future__ import annotations

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_steps import group_pool, mesh, rank_inputs, whole

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import Parameters
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.sharded import shard_model

CASE = ModelCase(promoted=True)
# (micro-batches of (degree, sequences), lengths) of each plan
PLANS = [
    ([[(4, (0,))], [(2, (1,)), (2, (2, 3))]], [61, 23, 13, 11]),
    ([[(2, (0,)), (1, (1,))]], [9, 5]),
    ([[(4, (0, 1))]], [3, 2]),
]
ROWS = [random_rows(lengths, seed=seed) for seed, (_, lengths) in enumerate(PLANS)]


def two_steps(plans_json: list[str], shard_ranks: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Runs two steps with all plans, each evaluated after its run; returns losses and whole gradients."""
    pool, plans = group_pool(), [plan_from_json(text) for text in plans_json]
    model = build_model(CASE)
    patch_model(model)
    if shard_ranks:
        shard_model(model, model._no_split_modules, mesh(shard_ranks))
    executor = StepExecutor(whole_model(model, 2), pool, torch.device("cpu"))
    count = sum(label != -100 for rows in ROWS for row in rows for label in row["labels"][1:])
    steps = []
    for _ in range(2):
        model.zero_grad()
        total = 0.0
        for place, (plan, rows) in enumerate(zip(plans, ROWS, strict=True)):
            path, chunks = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]
            total += float(executor.run(path, chunks, count, reduce=place == len(plans) - 1).loss)
            executor.evaluate(path, chunks)
        steps.append((total, {name: whole(p.grad) for name, p in model.named_parameters()}))
    return steps


@pytest.mark.daily("gathered_per_round-2-0")
@pytest.mark.parametrize(
    "parameters,shard_ranks,ulysses",
    [
        *(("replicated", 0, 0), ("replicated", 0, 1), ("replicated", 0, 2)),
        *(("sharded", 4, 0), ("sharded", 2, 1), ("gathered_per_round", 4, 2), ("gathered_per_round", 2, 0)),
        *(("gathered_per_step", 4, 0), ("gathered_per_step", 2, 2)),
    ],
)
def test_several_plans_of_a_step_match(ranks, parameters: Parameters, shard_ranks: int, ulysses: int) -> None:
    plans = [plan_to_json(plan_of(layout, lengths, 4, ulysses, parameters=parameters)) for layout, lengths in PLANS]
    expected_loss, expected = reference_step(build_model(CASE), [row for rows in ROWS for row in rows])
    for steps in ranks(4).run(two_steps, plans, shard_ranks):
        for loss, gradients in steps:
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE

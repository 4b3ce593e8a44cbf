"""No plan of a fixed battery changes unnoticed: digests and predictions are pinned in `plan_digests.json`.

Where a change of plans is meant, check that it is one for the better and replace the entries that a failing test prints. Steps
under a memory budget are solved by linear programs, whose equal optima differ between solvers, so their seconds alone are pinned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.plans.cost_models import COST_KINDS, MODEL, WINDOWED, cost_model
from helpers.plans.fixture_plans import FIXTURE_NAMES, fixture
from helpers.plans.grouping_problems import lognormal_lengths, plan_stages

from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, HardwareSpec, PlannerConfig, all_degrees
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan

PINNED = Path(__file__).parent / "plan_digests.json"
GPU = HardwareSpec("gpu", 2e14, 1.5e14, 80 << 30, 2e11, 2.5e10, 3e-5)
LENGTHS = {"few": lognormal_lengths(1, 5, 1500, 150.0), "many": lognormal_lengths(3, 50, 1500, 150.0), "none": ()}
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "static": {"solver": "static"},
    "flexsp": {"nested": False, "time_aware": False, "node_aligned": False},
    "at once": {"one_micro_batch": True},
}
Planned = Callable[[], StepPlan]


def group_cases() -> Iterator[tuple[str, Planned]]:
    """Steps on one stage with everything kept."""
    for (lengths_name, lengths), kind in ((pair, kind) for pair in LENGTHS.items() for kind in COST_KINDS):
        for parameters, shards in (("sharded", 2), ("gathered_per_round", 8), ("replicated", 1)):
            costs = replace(cost_model(kind, 8), parameters=parameters, shard_ranks=shards, method="auto")
            for name, settings in SETTINGS.items():
                if name == "at once" and lengths_name == "many":
                    continue
                config = PlannerConfig(400, (1, 2, 4, 8) if name == "flexsp" else all_degrees(8, 8), **settings)
                yield f"{lengths_name}, {kind}, {parameters}, {name}", partial(plan_step, 0, lengths, costs, config)


def stage_cases() -> Iterator[tuple[str, Planned]]:
    """Steps on several stages with everything kept."""
    lengths = lognormal_lengths(1, 30, 6000)
    for kind in COST_KINDS:
        model = replace(MODEL, num_layers=8, windows=WINDOWED.windows * 2 if kind == "windows" else ())
        for num_ranks, num_stages in ((4, 2), (8, 4), (6, 3)):
            for parameters in ("gathered_per_round", "replicated"):
                costs = replace(cost_model(kind, num_ranks), model=model, parameters=parameters)
                config = PlannerConfig(5000, tuple(d for d in (1, 2) if d <= num_ranks // num_stages))
                name = f"{num_stages} stages of {num_ranks} ranks, {kind}, {parameters}"
                yield name, partial(plan_stages, 0, lengths, costs, num_stages, config)


def budget_cases() -> Iterator[tuple[str, Planned]]:
    """Steps that do not fit with everything kept, on one stage and on several."""
    model = named_model("llama-3.1-8b")
    for num_ranks, num_stages in ((1, 1), (4, 1), (8, 4)):
        cluster = ClusterSpec(num_ranks, 8, GPU)
        costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses")
        for host_gib in (0, 16):
            budget = ActivationBudget(8_000, 24 << 30, host_gib << 30, 2048)
            config = PlannerConfig(32_000, tuple(d for d in (1, 2, 4) if d <= num_ranks // num_stages), activations=budget)
            name = f"{num_stages} stages of {num_ranks} ranks, {host_gib} GiB of the host"
            yield name, partial(plan_stages, 0, [20_000, 7_900, 7_800, 900], costs, num_stages, config)


def numbers_of(plan: StepPlan, with_digest: bool) -> list[Any]:
    step_s = float(f"{plan.estimate.step_s:.9g}")
    return [plan_digest(plan), step_s] if with_digest else [step_s]


def check(group: str, found: dict[str, list[Any]], tolerance: float) -> None:
    """Compares with the pinned numbers of a group: words exactly, seconds within a relative tolerance."""
    pinned = json.loads(PINNED.read_text())[group]
    assert found.keys() == pinned.keys()
    changed = {
        name: numbers
        for name, numbers in found.items()
        if numbers[:-1] != pinned[name][:-1] or numbers[-1] != pytest.approx(pinned[name][-1], rel=tolerance)
    }
    assert not changed, f"{len(changed)} of {len(found)} changed; now they are {json.dumps(changed)}"


@pytest.mark.wide
def test_plans_on_one_stage_are_as_they_were() -> None:
    check("groups", {name: numbers_of(plan(), True) for name, plan in group_cases()}, 1e-8)


def test_plans_on_several_stages_are_as_they_were() -> None:
    check("stages", {name: numbers_of(plan(), True) for name, plan in stage_cases()}, 1e-8)


def test_plans_under_a_budget_are_as_fast_as_they_were() -> None:
    check("budgets", {name: numbers_of(plan(), False) for name, plan in budget_cases()}, 1e-3)


def test_plans_written_by_hand_are_predicted_as_they_were() -> None:
    found = {}
    for name, kind in ((name, kind) for name in FIXTURE_NAMES for kind in COST_KINDS):
        plan = fixture(name)
        num_layers = sum(stage.num_layers for stage in plan.micro_batches[0].groups[0].stages)
        costs = cost_model(kind, plan.num_ranks)
        model = replace(
            costs.model, num_layers=num_layers, windows=(WINDOWED.windows * num_layers)[:num_layers] if kind == "windows" else ()
        )
        run = evaluate_plan(plan, replace(costs, model=model, parameters=plan.parameters))
        busy_s = sum(run.busy_s)
        found[f"{name}, {kind}"] = [len(run.events), float(f"{run.step_s + busy_s:.9g}")]
    check("fixtures", found, 1e-8)

"""Steps of two ranks whose devices exchange real data, late at both ends: gradients are those of one plain process.

Receives occupy the device until their message comes. If the first run of an operation then waits for an idle device, no rank may
wait for itself, nor for one that waits for it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.models.reference import TOLERANCE, random_rows
from helpers.models.tiny_models import ModelCase
from helpers.plans.layouts import FFBFBB, chunks_plan, plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_pool import RankPool

from fake_cuda.machine import scenarios
from fake_cuda.machine.removals import Removal
from fake_cuda.machine.steps import Found, steps_on_device
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import StepPlan

LAYERS = 2
CASE = ModelCase(promoted=True, num_layers=LAYERS)
ON_HOST = "layers on the host"
OFFLOADED = replayed(0.0, host=1.0, input_host=1.0)
PLANS: dict[str, StepPlan] = {
    "ring": same_policy(plan_of([[(2, (0, 1))]], [13, 22], 2, ulysses=1), OFFLOADED, replayed(), tile_tokens=8),
    "slices in a ring": same_policy(
        sliced_plan([22, 13], [[(0, 0, 12)], [(0, 12, 22), (1, 0, 13)]], num_ranks=2, ulysses=1),
        *(OFFLOADED, replayed()),
        tile_tokens=8,
    ),
    "slices of heads in parts": same_policy(
        sliced_plan([22, 13], [[(0, 0, 12)], [(0, 12, 22), (1, 0, 13)]], num_ranks=2), *(OFFLOADED, replayed()), tile_tokens=8
    ),
    "shards": same_policy(
        plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [9, 12, 5, 8], 2, parameters="sharded"), OFFLOADED, replayed()
    ),
    "gathered": plan_of([[(1, (0,)), (1, (1,))], [(1, (2,)), (1, (3,))]], [9, 12, 5, 8], 2, parameters="gathered_per_round"),
    ON_HOST: plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [9, 12, 5, 8], 2, parameters="sharded"),
    "summed in every backward": chunks_plan((FFBFBB, FFBFBB), "gathered_per_step"),
    "early sums": plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [9, 12, 5, 8], 2),
    "stages": pipeline_plan(
        [19, 11], [[(1, [[each] for each in cut(0, [8, 6, 5])])], [(1, [[(1, 0, 11)]])]], 2, num_layers=LAYERS
    ),
}


def found_by(pool: RankPool, name: str, *removals: Removal, drains: bool = False) -> list[Found]:
    """Findings of both ranks in steps of a plan, while lines of the package are taken out. drains: see `steps_on_device`."""
    plan = PLANS[name]
    rows, on_host = random_rows(list(plan.lengths)), name == ON_HOST
    # the device has the shards of two layers
    case = replace(CASE, num_layers=2 * LAYERS) if on_host else CASE
    return pool.run(steps_on_device, case, plan_to_json(plan), rows, removals, drains, on_host, timeout_s=280.0)


def test_memory_of_sums_that_cross_nodes_is_not_taken(two_devices: RankPool) -> None:
    assert two_devices.run(scenarios.on_rank, scenarios.parts_taken_while_they_cross, 1, (), timeout_s=280.0) == [0, 0]


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_steps_have_the_gradients_of_one_process(two_devices: RankPool, name: str, drains: bool) -> None:
    for found in found_by(two_devices, name, drains=drains):
        assert max(found.errors) <= TOLERANCE, found
        # the first step sums at its end
        assert (found.num_early > 0) == (name in ("early sums", "ring", "slices in a ring", "slices of heads in parts")), found

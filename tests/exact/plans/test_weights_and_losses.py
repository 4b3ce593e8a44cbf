"""Weights of tokens and losses of users match a plain process under every kind of plan, in fp64, on gloo ranks."""

from __future__ import annotations

import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.token_losses import with_weights
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.pipeline_plans import LENGTHS, SLICED, pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_step, run_step

from hf_longctx.plan.core.types import StepPlan

# rows with weights and cross-entropy; a loss without weights; both
KINDS = [("", True), ("focal", False), ("focal", True), ("smoothed", True)]
ROWS = [23, 14, 9, 8, 17, 2]


def rows_of(lengths: list[int], weighted: bool) -> list[dict[str, list[int]]]:
    rows = random_rows(lengths)
    return with_weights(rows) if weighted else rows


def slices() -> StepPlan:
    return sliced_plan([23, 9], [[span] for span in cut(0, [9, 8, 6])] + [[(1, 0, 9)]], num_ranks=2)


def tiles() -> StepPlan:
    return same_policy(plan_of([[(2, (0,))], [(1, (1, 2)), (1, (3, 4, 5))]], ROWS, 2), replayed(0.5), replayed(), tile_tokens=4)


def tiled_slices() -> StepPlan:
    return same_policy(slices(), replayed(0.5, mlp=0.5), replayed(), tile_tokens=3)


PLANS = {
    "packs and groups": lambda: plan_of([[(2, (0, 1)), (1, (2,)), (1, (3, 4))]], ROWS[:5], 4),
    "an idle rank": lambda: plan_of([[(2, (0,))], [(1, (1,))]], [29, 5], 2),
    "rings": lambda: plan_of([[(4, (0, 1, 2))]], [37, 14, 3], 4, ulysses=1),
    "hybrid": lambda: plan_of([[(4, (0, 1, 2))]], [37, 14, 3], 4, ulysses=2),
    "shards": lambda: plan_of([[(2, (0, 1, 2))], [(1, (3,)), (1, (4, 5))]], ROWS, 2, parameters="sharded"),
    "slices": slices,
    "tiles": tiles,
    "tiled slices": tiled_slices,
}


@pytest.mark.daily("an idle rank--True")
@pytest.mark.parametrize("loss,weighted", KINDS)
@pytest.mark.parametrize("name", PLANS)
def test_weights_and_other_losses_match(ranks, name: str, loss: str, weighted: bool) -> None:
    plan = PLANS[name]()
    lengths = list(plan.lengths)
    check_step(ranks(plan.num_ranks), ModelCase(loss=loss), plan, lengths, rows=rows_of(lengths, weighted))


@pytest.mark.daily("None-focal-True")
@pytest.mark.parametrize("loss,weighted", KINDS)
@pytest.mark.parametrize("tile_tokens", [None, 4])
def test_they_match_in_stages(ranks, tile_tokens: int | None, loss: str, weighted: bool) -> None:
    plan = pipeline_plan(LENGTHS, [[(1, SLICED)]], 2, num_layers=4)
    if tile_tokens is not None:
        plan = same_policy(plan, replayed(0.5), replayed(), tile_tokens=tile_tokens)
    check_pipeline(ranks(2), ModelCase(num_layers=4, loss=loss), plan, rows=rows_of(list(plan.lengths), weighted))


@pytest.mark.wide("tiles-")
@pytest.mark.parametrize("loss", ["", "focal"])
@pytest.mark.parametrize("name", ["packs and groups", "tiles"])
def test_a_step_whose_weights_are_all_zero_has_loss_and_gradients_of_zero(ranks, name: str, loss: str) -> None:
    plan = PLANS[name]()
    rows = with_weights(random_rows(list(plan.lengths)), zero=True)
    for found, gradients in run_step(ranks(plan.num_ranks), ModelCase(loss=loss), plan, rows):
        assert found == 0.0
        assert gradients and all(not gradient.any() for gradient in gradients.values())


def weights_of_the_token_itself(rows: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """Rows whose weights are one place too early, as if they were not shifted with their labels."""
    return [{**row, "loss_weights": [*row["loss_weights"][1:], 0.0]} for row in rows]


def test_weights_that_are_not_shifted_with_labels_or_left_out_do_not_match(ranks) -> None:
    layout, lengths = LAYOUTS["<1,1>"][1:]
    plan, rows = plan_of(layout, lengths, 2), with_weights(random_rows(lengths))
    right = run_step(ranks(2), ModelCase(), plan, rows)[0][0]
    assert abs(run_step(ranks(2), ModelCase(), plan, weights_of_the_token_itself(rows))[0][0] - right) > 1e-3
    assert abs(run_step(ranks(2), ModelCase(), plan, random_rows(lengths))[0][0] - right) > 1e-3

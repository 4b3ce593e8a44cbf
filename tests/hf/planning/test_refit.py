"""When a run fits its cost model again: only where predictions drifted, on what the last plans show, on all ranks alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.layouts import plan_of, tiny_costs
from helpers.ranks.rank_steps import group_pool

from hf_longctx.hf.planning.refit import CostRefit, MeasuredPlan, whole_step_factor, without_waiting
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import Estimate, StepPlan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients, num_tiles
from hf_longctx.plan.cost.fitting import ChunkSample, PassSample
from hf_longctx.plan.cost.traffic import Traffic, mean_traffic
from hf_longctx.plan.model.attention_pairs import FULL
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.process_groups import GroupPool

TRUTH = CostCoefficients(
    forward=PassCoefficients(3e-6, 4e-4, 0.02, 3e-3, 4e-7),
    backward=PassCoefficients(7e-6, 9e-4, 0.03, 5e-3, 5e-7),
    step_s=0.05,
    source="calibrated",
)
PLANS = [
    plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [90, 31, 60, 8], 2),
    plan_of([[(2, (0,))], [(2, (1, 2, 3))], [(1, (4,))]], [200, 40, 30, 20, 11], 2),
    plan_of([[(1, (0,)), (1, (1, 2))]], [150, 3, 2], 2),
    plan_of([[(2, (0,))], [(1, (1, 2)), (1, (3,))]], [120, 33, 12, 70], 2),
]


def scaled(factor: float) -> CostModel:
    """The true costs of a machine that takes `factor` times as long."""

    def scale(costs: PassCoefficients) -> PassCoefficients:
        return replace(costs, **{name: factor * getattr(costs, name) for name in costs.__slots__})

    forward, backward = scale(TRUTH.forward), scale(TRUTH.backward)
    return replace(tiny_costs(2), coefficients=CostCoefficients(forward, backward, factor * TRUTH.step_s, "truth"))


def measured(plan: StepPlan, truth: CostModel, predicted: CostModel, rank: int) -> MeasuredPlan:
    """Measurements of `plan` by `rank` if `truth` holds and `predicted` was used for planning."""
    samples = {}
    for index, (group, stage) in enumerate(plan.for_rank(rank).rounds):
        for chunk in group.chunks:
            passes = []
            for is_backward, seconds in ((False, truth.forward_s), (True, truth.backward_s)):
                tokens = float(max(chunk.num_tokens, group.degree))
                traffic = mean_traffic(truth.model, truth.cluster, group.shape, tokens, is_backward)
                tiles = num_tiles(group.shape, len(chunk.spans))
                took_s = seconds(chunk, group.shape, stage.num_layers)
                passes.append(PassSample(chunk.num_tokens, FULL.of_chunk(chunk), group.degree, traffic, took_s, tiles))
            samples[index, group.positions, chunk.index] = ChunkSample(*passes)
    measured_s, source = evaluate_plan(plan, truth).step_s, predicted.coefficients.source
    error = evaluate_plan(plan, predicted).step_s / measured_s - 1
    plan = replace(plan, estimate=Estimate(cost_source=source))
    return MeasuredPlan(plan, samples, measured_s, truth.coefficients.step_s, None if source == "default" else error)


def lone_refit(costs: CostModel, first_plans: int = 4) -> CostRefit:
    return CostRefit(PlanSource(GroupPool((1,), timeout_s=1.0), costs, PlannerConfig(64, (1, 2))), first_plans)


def run_plans(refit: CostRefit, truth: CostModel, num_plans: int, rank: int = 0) -> list[int]:
    """Plans that the refit hears of; the numbers (from 1) of those that led to a fit."""
    fitted = []
    for number in range(num_plans):
        plan = PLANS[number % len(PLANS)]
        if refit.add(measured(plan, truth, refit.source.costs, rank), ends_step=True):
            fitted.append(number + 1)
    return fitted


def prediction_error(refit: CostRefit, truth: CostModel) -> float:
    return max(abs(evaluate_plan(p, refit.source.costs).step_s / evaluate_plan(p, truth).step_s - 1) for p in PLANS)


def test_guesses_are_replaced_once_and_good_predictions_left_alone() -> None:
    refit, truth = lone_refit(tiny_costs(2)), scaled(1.0)
    assert run_plans(refit, truth, 40) == [5]
    assert refit.source.costs.coefficients.source == "measured"
    assert prediction_error(refit, truth) < 1e-6


def test_a_calibrated_start_is_kept_while_it_is_right() -> None:
    costs = replace(tiny_costs(2), coefficients=TRUTH)
    refit = lone_refit(costs)
    assert run_plans(refit, scaled(1.05), 30) == []
    assert refit.source.costs is costs


def test_a_machine_that_slows_down_is_followed() -> None:
    refit = lone_refit(replace(tiny_costs(2), coefficients=TRUTH))
    assert run_plans(refit, scaled(1.0), 20) == []
    slow = scaled(2.0)
    fits = run_plans(refit, slow, 28)
    # the window must fill with slow plans before they are the majority, and some fast ones are left in it
    assert 1 <= len(fits) <= 3 and refit.num_fits == len(fits)
    assert prediction_error(refit, slow) < 0.05
    assert run_plans(refit, slow, 20) == []


def test_no_steps_mean_no_fit() -> None:
    refit = lone_refit(tiny_costs(2), first_plans=0)
    assert run_plans(refit, scaled(1.0), 20) == []
    assert refit.source.costs.coefficients.source == "default"


def test_a_few_odd_plans_are_no_drift() -> None:
    refit = lone_refit(replace(tiny_costs(2), coefficients=TRUTH))
    for number in range(30):
        truth = scaled(6.0 if number % 4 == 1 else 1.0)
        refit.add(measured(PLANS[number % 4], truth, refit.source.costs, 0), ends_step=True)
    assert refit.num_fits == 0


def test_of_a_group_the_rank_that_waited_least_counts() -> None:
    def sample(forward_s: float, backward_s: float) -> ChunkSample:
        return ChunkSample(*(PassSample(10, 50.0, 2, Traffic(), seconds) for seconds in (forward_s, backward_s)))

    pair, alone = (0, (0, 1), 0), (1, (0,), 0)
    found = without_waiting([{pair: sample(3.0, 4.0), alone: sample(1.0, 2.0)}, {pair: sample(2.0, 5.0)}])
    assert found == [sample(2.0, 4.0), sample(1.0, 2.0)]


@pytest.mark.parametrize("waiting,factor", [(1.0, 1.0), (1.2, 1.2), (9.0, 1.5), (0.1, 0.7)])
def test_steps_that_take_longer_than_their_chunks_are_predicted_so(waiting: float, factor: float) -> None:
    refit, truth = lone_refit(tiny_costs(2)), scaled(1.0)
    for number in range(5):
        plan = measured(PLANS[number % 4], truth, refit.source.costs, rank=0)
        refit.add(replace(plan, measured_s=waiting * plan.measured_s), ends_step=True)
    assert refit.num_fits == 1
    for plan in PLANS:
        expected_s = factor * evaluate_plan(plan, truth).step_s
        assert evaluate_plan(plan, refit.source.costs).step_s == pytest.approx(expected_s, rel=1e-6)


def test_plans_without_a_reduction_are_compared_without_one() -> None:
    costs, plans = scaled(1.0), []
    for plan in PLANS[:2]:
        whole = measured(plan, costs, costs, rank=0)
        plans.append(replace(whole, measured_s=whole.measured_s - TRUTH.step_s, reduce_s=-1.0))
    assert whole_step_factor(plans, [plan.measured_s for plan in plans], costs) == pytest.approx(1.0)


def refit_on_rank() -> tuple[list[int], CostCoefficients]:
    """Rank 1 alone sees no drift; what rank 0 says counts for both."""
    pool = group_pool()
    costs = replace(tiny_costs(2), coefficients=TRUTH)
    hardware = replace(costs.cluster.hardware, gather_bytes_per_s=((2, 1e9),), scatter_bytes_per_s=((2, 1e9),))
    costs = replace(costs, cluster=replace(costs.cluster, hardware=hardware))
    refit = CostRefit(PlanSource(pool, costs, PlannerConfig(64, (1, 2))), 4)
    fits, truth = [], scaled(1.5)
    for number in range(16):
        plan = measured(PLANS[number % 4], truth, refit.source.costs, pool.rank)
        if refit.add(replace(plan, error=0.0) if pool.rank else plan, ends_step=True):
            fits.append(number)
    # passes that a run measured contain its gathers
    assert fits and not refit.source.costs.cluster.hardware.gather_bytes_per_s
    return fits, refit.source.costs.coefficients


def test_all_ranks_fit_at_the_same_plan_and_alike(ranks) -> None:
    first, second = ranks(2).run(refit_on_rank)
    assert first == second
    assert len(first[0]) == 1
    assert first[1].forward.token_s == pytest.approx(1.5 * TRUTH.forward.token_s, rel=0.05)

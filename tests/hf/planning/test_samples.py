"""Measurements of a pipeline's ranks give back the true cost model, including the head's share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.plans.layouts import tiny_costs
from helpers.plans.pipeline_plans import pipeline_plan, random_chunks
from helpers.plans.policies import num_policies, with_policies
from helpers.plans.sliced_plans import cut
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.hf.planning.refit import Samples, pass_samples, without_waiting
from hf_longctx.plan.core.types import Action, ActivationPolicy, GroupShape, LayerPolicy, StepPlan, TensorShare
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, ModelPart, PassCoefficients
from hf_longctx.plan.cost.fitting import ChunkSample, PassSample, fit_coefficients, scaled_coefficients
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval

# most of the layers with windows are on the first stage
SPEC = ModelSpec(8, 32, 48, 4, 2, 8, 200, 512, windows=(20, 20, 9, None, None, 20, None, None), exchange_parts=1)
# a share of 29 % of the matrix products: the head takes 49 % of a token's forward, and 15 % of its backward
TRUTH = CostCoefficients(
    PassCoefficients(3e-6, 4e-4, 0.02, 3e-3, 4e-7, 0.0, 0.0, 1.7),
    PassCoefficients(7e-6, 9e-4, 0.03, 5e-3, 5e-7, 0.0, 0.0, 0.5),
    0.05,
    "truth",
)
LONG = [*([span] for span in cut(0, [60, 31, 9])), [(1, 0, 40), (2, 0, 7)], [(3, 0, 25)], *([span] for span in cut(4, [50, 21]))]
LENGTHS = [100, 40, 7, 25, 71]


def costs_of(num_ranks: int, coefficients: CostCoefficients | None = None) -> CostModel:
    costs = tiny_costs(num_ranks, SPEC)
    return costs if coefficients is None else replace(costs, coefficients=coefficients)


def intervals_of(plan: StepPlan, costs: CostModel, rank: int) -> tuple[Interval, ...]:
    """Measurements of `rank` if `costs` were the truth; names repeat over micro-batches, events are in order."""
    events = iter([event for event in evaluate_plan(plan, costs).events if event.rank == rank])
    return tuple(
        Interval(index, event.kind, event.name, event.start_s, event.stop_s)
        for index, (_, stage) in enumerate(plan.for_rank(rank).rounds)
        for action in stage.actions
        if action.kind in ("F", "B")
        for event in [next(events)]
    )


def all_samples(plans: Sequence[StepPlan], truth: CostModel) -> list[ChunkSample]:
    guess = costs_of(truth.cluster.num_ranks)
    return [
        sample
        for plan in plans
        for sample in without_waiting(
            [pass_samples(plan, rank, intervals_of(plan, truth, rank), guess) for rank in range(plan.num_ranks)]
        )
    ]


def check_pass(found: PassCoefficients, truth: PassCoefficients) -> None:
    assert found.rates[:3] == pytest.approx(truth.rates[:3], rel=1e-6)
    assert found.head_factor == pytest.approx(truth.head_factor, rel=1e-6)


@pytest.mark.parametrize("num_stages,num_ranges", [(2, 1), (4, 1), (2, 2)])
def test_samples_of_a_known_cost_model_give_back_that_model(num_stages: int, num_ranges: int) -> None:
    truth = costs_of(num_stages, TRUTH)
    schedule = "interleaved" if num_ranges > 1 else "elastic"
    plan = pipeline_plan(LENGTHS, [[(1, LONG)]], num_stages, schedule, 8, num_ranges)
    prior = costs_of(num_stages).coefficients
    fit = fit_coefficients(all_samples([plan], truth), 0.05, "run", prior)
    check_pass(fit.coefficients.forward, TRUTH.forward)
    check_pass(fit.coefficients.backward, TRUTH.backward)
    assert fit.residuals.mean < 1e-9
    found = replace(truth, coefficients=fit.coefficients)
    other = pipeline_plan([90, 30], [[(1, [*([span] for span in cut(0, [50, 40])), [(1, 0, 30)]])]], num_stages, "1f1b", 8)
    # messages take what they took before: alone in its group no rank sent any inside a pass
    assert evaluate_plan(other, found).busy_s == pytest.approx(evaluate_plan(other, truth).busy_s, rel=1e-6)


@pytest.mark.wide
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_every_sample_is_predicted_as_part_s_says(data: st.DataObject) -> None:
    num_stages, num_ranges = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    chunks = data.draw(random_chunks(range(len(lengths)), lengths))
    factors = data.draw(st.tuples(*[st.floats(0, 3.4)] * 2))
    coefficients = replace(
        TRUTH,
        forward=replace(TRUTH.forward, head_factor=factors[0]),
        backward=replace(TRUTH.backward, head_factor=factors[1]),
    )
    schedule = "interleaved" if num_ranges > 1 else data.draw(st.sampled_from(["1f1b", "gpipe"]))
    plan = pipeline_plan(lengths, [[(1, chunks)]], num_stages, schedule, 8, num_ranges)
    costs = costs_of(num_stages, coefficients)
    seen = 0
    for rank in range(num_stages):
        ((group, stage),) = plan.for_rank(rank).rounds
        samples = pass_samples(plan, rank, intervals_of(plan, costs, rank), costs)
        for (_, _, name), sample in samples.items():
            action = Action.parse(name)
            has_head = (rank, action.layer_range) == (num_stages - 1, num_ranges - 1)
            for is_backward, one_pass in ((False, sample.forward), (True, sample.backward)):
                one = coefficients.backward if is_backward else coefficients.forward
                layers = stage.layer_ranges[action.layer_range].num_layers
                pairs = costs.attention_pairs(stage.layer_ranges[action.layer_range : action.layer_range + 1])
                chunk = group.chunks[action.chunk]
                expected_s = costs.part_s(chunk, GroupShape(1), is_backward, layers, has_head, pairs=pairs)
                assert one_pass.seconds == pytest.approx(expected_s, rel=1e-9)
                assert one_pass.predicted_s(one) == pytest.approx(expected_s, rel=1e-9)
                seen += 1
    assert seen == 2 * num_stages * num_ranges * len(chunks)


def test_ranks_of_one_stage_share_a_chunk_and_stages_do_not() -> None:
    plan = pipeline_plan([40, 23], [[(2, [[span] for span in cut(0, [24, 16])]), (1, [[(1, 0, 23)]])]], 2, num_layers=8)
    truth = costs_of(6, TRUTH)
    samples: list[Samples] = [
        pass_samples(plan, rank, intervals_of(plan, truth, rank), costs_of(6)) for rank in range(plan.num_ranks)
    ]
    assert samples[0].keys() == samples[1].keys() == {(0, (0, 1), "0F0"), (0, (0, 1), "0F1")}
    assert samples[3].keys() == samples[4].keys() == {(0, (0, 1), "1F0"), (0, (0, 1), "1F1")}
    assert (samples[2].keys(), samples[5].keys()) == ({(0, (2,), "0F0")}, {(0, (2,), "1F0")})
    # one of the two ranks waited in every pass of stage 0
    samples[1] = {
        key: ChunkSample(*(replace(one, seconds=2 * one.seconds) for one in (sample.forward, sample.backward)))
        for key, sample in samples[1].items()
    }
    found = without_waiting(samples)
    assert len(found) == 6
    fit = fit_coefficients(found, 0.0, "run", replace(TRUTH, source="default"))
    assert fit.residuals.mean < 1e-9
    assert fit.residuals.num_passes == 12


def test_what_policies_add_is_taken_off_on_every_stage() -> None:
    replay = LayerPolicy((TensorShare("attention_output", recompute=1.0), TensorShare("mlp", recompute=1.0)))
    away = LayerPolicy((TensorShare("layer_input", host=1.0), TensorShare("qkv", recompute=1.0)))
    plan = pipeline_plan(LENGTHS, [[(1, LONG)]], 2, num_layers=8)
    policies = [
        ActivationPolicy(0, 0, (replay, LayerPolicy(), away)[: 1 + place % 3]) if place % 4 else ActivationPolicy(0)
        for place in range(num_policies(plan))
    ]
    plan, truth = with_policies(plan, policies), costs_of(2, TRUTH)
    for rank in range(2):
        ((group, stage),) = plan.for_rank(rank).rounds
        intervals = intervals_of(plan, truth, rank)
        slower = tuple(replace(one, start_s=3 * one.start_s, stop_s=3 * one.stop_s) for one in intervals)
        raw = {one.name: one.stop_s - one.start_s for one in slower}
        added = 0
        for (_, _, name), sample in pass_samples(plan, rank, slower, truth).items():
            chunk = group.chunks[Action.parse(name).chunk]
            for is_backward, one_pass in ((False, sample.forward), (True, sample.backward)):
                pairs = truth.attention_pairs(stage.layer_ranges)
                expected_s = truth.part_s(chunk, GroupShape(1), is_backward, stage.num_layers, rank == 1, pairs=pairs)
                assert one_pass.seconds == pytest.approx(3 * expected_s, rel=1e-9)
            added += raw[name.replace("F", "B")] > 1.001 * sample.backward.seconds
        assert added


def test_without_a_last_stage_the_head_stays_as_it_was() -> None:
    plan, truth = pipeline_plan(LENGTHS, [[(1, LONG)]], 2, num_layers=8), costs_of(2, TRUTH)
    first = list(pass_samples(plan, 0, intervals_of(plan, truth, 0), costs_of(2)).values())
    prior = replace(TRUTH, source="default")
    found = fit_coefficients(first, 0.0, "run", prior).coefficients
    check_pass(found.forward, TRUTH.forward)
    check_pass(found.backward, TRUTH.backward)


def test_a_machine_of_another_speed_has_the_same_share_of_the_head() -> None:
    doubled = scaled_coefficients(TRUTH, 2.0)
    assert doubled.forward.rates == pytest.approx([2 * rate for rate in TRUTH.forward.rates])
    assert (doubled.forward.head_factor, doubled.backward.head_factor) == (1.7, 0.5)
    sample = PassSample(10, 50.0, 1, Traffic(), 1.0, part=ModelPart(0.25, True, SPEC.head_share))
    assert sample.predicted_s(doubled.forward) == pytest.approx(2 * sample.predicted_s(TRUTH.forward))

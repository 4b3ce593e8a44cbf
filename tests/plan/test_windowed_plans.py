"""Plans for models whose layers have windows: long sequences need fewer ranks, and estimates equal `evaluate_plan`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import WINDOWED, cost_model
from helpers.plans.grouping_problems import lognormal_lengths, plan_stages

from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, HardwareSpec, PlannerConfig
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.layers import Windows
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.lending import lent_group
from hf_longctx.plan.predict.pipeline_run import PredictionCache, run_alone
from hf_longctx.plan.room.cells import GroupCells, recomputed_layer

GPU = HardwareSpec("gpu", 2e14, 1.5e14, 80 << 30, 2e11, 2.5e10, 3e-5)
GEMMA = named_model("gemma-3-12b")
FULL_GEMMA = replace(GEMMA, windows=())
LENGTHS = lognormal_lengths(1, 64, 6000, median=300.0)


def gpu_costs(model: ModelSpec, num_ranks: int = 16) -> CostModel:
    cluster = ClusterSpec(num_ranks, 8, GPU)
    # exchanges that attention hides would change which groups pairs decide
    return CostModel(replace(model, exchange_parts=1), cluster, default_coefficients(model, cluster), "ulysses")


def test_a_long_sequence_under_windows_needs_fewer_ranks() -> None:
    # short sequences fill the ranks that the long one leaves: without windows its pairs need 16 ranks, with windows fewer
    lengths = [120_000, *[8000] * 80]
    config = PlannerConfig(120_000, (1, 2, 4, 8, 16), solver="greedy")
    plans = {model.windows: plan_step(0, lengths, gpu_costs(model), config) for model in (GEMMA, FULL_GEMMA)}
    degrees = {
        windows: next(
            group.degree
            for micro_batch in plan.micro_batches
            for group in micro_batch.groups
            for chunk in group.chunks
            if any(span.sequence == 0 for span in chunk.spans)
        )
        for windows, plan in plans.items()
    }
    assert degrees[GEMMA.windows] < degrees[()]
    # the planner's estimate equals `evaluate_plan`, and each plan is the faster one under its own model
    for model in (GEMMA, FULL_GEMMA):
        own, other = plans[model.windows], plans[() if model is GEMMA else GEMMA.windows]
        own_s = evaluate_plan(own, gpu_costs(model)).step_s
        assert own.estimate.step_s == pytest.approx(own_s) and own_s < evaluate_plan(other, gpu_costs(model)).step_s
        assert own.estimate.lower_bound_s <= own_s


@pytest.mark.daily("windows0")
@pytest.mark.parametrize("windows", [(None,) * 48, (6000, None) * 24])
def test_windows_that_hide_nothing_change_no_plan(windows: Windows) -> None:
    costs, same = gpu_costs(FULL_GEMMA), gpu_costs(replace(FULL_GEMMA, windows=windows))
    budget = ActivationBudget(2000, ByteModel(GEMMA).kept_bytes(2000), 0, 1024)
    config = PlannerConfig(3000, (1, 2, 4, 8), solver="greedy")
    for made in (
        lambda each: plan_step(0, LENGTHS, each, config),
        lambda each: plan_stages(0, LENGTHS, replace(each, parameters="gathered_per_round"), 4, config),
        lambda each: plan_step(0, LENGTHS[:8], each, replace(config, tokens_per_rank=6000, activations=budget)),
    ):
        plan, other = made(costs), made(same)
        assert plan.micro_batches == other.micro_batches
        assert plan.estimate.step_s == pytest.approx(other.estimate.step_s, rel=1e-12)


def two_stages(slices: int = 1, tokens: int = 400) -> tuple[SequenceGroup, StepPlan]:
    """A sequence on two stages of two layers each, of which the first has the smaller windows."""
    bounds = [tokens * place // slices for place in range(slices + 1)]
    chunks = tuple(Chunk(i, (Span(0, bounds[i], bounds[i + 1]),)) for i in range(slices))
    group = pipelined(SequenceGroup((0,), "local", chunks, ()), ((LayerRange(0, 2),), (LayerRange(2, 2),)), "1f1b")
    return group, StepPlan(0, (tokens,), 2, 1, "replicated", (MicroBatch((group,)),))


def pairs_by_hand(window: int | None, tokens: int = 400) -> float:
    return tokens**2 / 2 if window is None else window**2 / 2 + (tokens - window) * window


def test_every_stage_takes_the_seconds_of_its_own_layers() -> None:
    costs = cost_model("windows", 2)
    _, plan = two_stages()
    run = evaluate_plan(plan, costs)
    plain = evaluate_plan(
        plan,
        replace(
            cost_model("linear", 2),
            coefficients=replace(
                costs.coefficients,
                forward=replace(costs.coefficients.forward, pair_s=0.0),
                backward=replace(costs.coefficients.backward, pair_s=0.0),
            ),
        ),
    )
    # 1e-6 forward and 2.5e-6 backward for a pair of all four layers
    for rank, windows in ((0, (100, 30)), (1, (None, 100))):
        attention_s = 3.5e-6 * sum(map(pairs_by_hand, windows)) / 4
        assert run.ranks[rank].compute_s - plain.ranks[rank].compute_s == pytest.approx(attention_s)
    # slices have as much attention as the whole sequence
    _, sliced = two_stages(4)
    extra_s = [use.compute_s for use in evaluate_plan(sliced, costs).ranks]
    assert extra_s == pytest.approx([use.compute_s + 3 * 2.5e-3 * 2 / 4 for use in run.ranks])


def test_a_lent_slice_takes_the_seconds_of_the_layers_that_it_runs_in() -> None:
    costs = cost_model("windows", 2)
    seconds = []
    for model in (WINDOWED, replace(WINDOWED, windows=WINDOWED.windows[::-1])):
        group, plan = two_stages(4)
        lent = replace(plan, micro_batches=(MicroBatch((lent_group(group),)),))
        events = evaluate_plan(lent, replace(costs, model=model)).events
        seconds.append({event.name: event.stop_s - event.start_s for event in events})
    # the first slice has 100 tokens: 30^2 / 2 + 70 * 30 pairs under the window of 30, and 100^2 / 2 in all other layers
    first_s = [each["0F0@1:0"] for each in seconds]
    saved_s = 1e-6 * (5000 - 2550) / 4 / 2
    assert first_s[1] - first_s[0] == pytest.approx(saved_s)


def test_recomputed_attention_costs_what_the_layer_sees() -> None:
    costs = cost_model("windows", 2)
    again = recomputed_layer(keeps_attention=False)
    kept = recomputed_layer(keeps_attention=True)
    group, plan = two_stages()
    seconds = []
    for layer in (again, kept):
        stages = tuple(replace(stage, activations=(ActivationPolicy(0, 0, (layer, layer)),)) for stage in group.stages)
        run = evaluate_plan(replace(plan, micro_batches=(MicroBatch((replace(group, stages=stages),)),)), costs)
        seconds.append([use.compute_s for use in run.ranks])
    added_s = [one - other for one, other in zip(*seconds, strict=True)]
    assert added_s == pytest.approx([1e-6 * sum(map(pairs_by_hand, each)) / 4 for each in ((100, 30), (None, 100))])
    # cells count it for each stage, as the mean over its layers
    every, without = (GroupCells(group, costs, 64, keeps, PredictionCache()).cells for keeps in (False, True))
    assert (every.layer_s - without.layer_s).tolist() == pytest.approx([each / 2 for each in added_s])
    # on one stage it is the sum over all layers
    whole = StagePlan(0, (LayerRange(0, 4),), (Action("F", 0, 0), Action("B", 0, 0)))
    of_layers = [
        run_alone(replace(group, stages=(replace(whole, activations=(ActivationPolicy(0, 0, (layer,) * 4),)),)), costs).times[-1][
            1
        ]
        for layer in (again, kept)
    ]
    assert of_layers[0] - of_layers[1] == pytest.approx(sum(added_s))


def test_a_pipeline_of_mixed_layers_is_planned_as_it_is_judged() -> None:
    costs = replace(gpu_costs(GEMMA), parameters="gathered_per_round")
    plan = plan_stages(0, [60_000, 20_000, *LENGTHS], costs, 4, PlannerConfig(20_000, (1, 2, 4)))
    assert plan.estimate.step_s == pytest.approx(evaluate_plan(plan, costs).step_s)
    full = plan_stages(0, [60_000, 20_000, *LENGTHS], replace(costs, model=FULL_GEMMA), 4, PlannerConfig(20_000, (1, 2, 4)))
    assert plan.estimate.step_s < 0.9 * full.estimate.step_s

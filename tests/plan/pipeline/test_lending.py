"""Stages are lent where the judge says that it pays, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.pipeline_plans import stage_ranges
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import Chunk, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory import byte_model as byte_model_module
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.pipeline.lending import lend
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import Evaluation, evaluate_plan
from hf_longctx.plan.predict.lending import lent_group


def plan_of(
    sequences: list[list[int]], num_stages: int, pack: int = 0, schedule: Schedule = "elastic", num_ranges: int = 1
) -> StepPlan:
    """A micro-batch for each sequence, given as the tokens of its slices, and one for a pack of two."""
    ranges = layer_ranges(4, num_stages, num_ranges)
    batches = []
    for place, sizes in enumerate(sequences):
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        chunks = tuple(Chunk(index, (Span(place, start, stop),)) for index, (start, stop) in enumerate(bounds))
        batches.append(MicroBatch((pipelined(SequenceGroup((0,), "local", chunks, ()), ranges, schedule),)))
    lengths = [sum(sizes) for sizes in sequences]
    if pack:
        spans = tuple(Span(len(sequences) + place, 0, pack) for place in range(2))
        batches.append(MicroBatch((pipelined(SequenceGroup((0,), "local", (Chunk(0, spans),), ()), ranges, schedule),)))
        lengths += [pack, pack]
    return validate_plan(StepPlan(0, tuple(lengths), num_stages, 1, "replicated", tuple(batches)))


def costs(kind: str, num_ranks: int) -> CostModel:
    """Without what a step adds once."""
    model = cost_model(kind, num_ranks)
    return dataclasses.replace(model, coefficients=dataclasses.replace(model.coefficients, step_s=0.0))


def judge(model: CostModel) -> Callable[[StepPlan], Evaluation]:
    """Predicts plans under these costs."""
    return functools.partial(evaluate_plan, costs=model)


@pytest.mark.wide
@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from([2, 4]),
    st.sampled_from(COST_KINDS),
    st.integers(0, 30),
)
def test_a_lent_plan_is_valid_and_never_predicted_slower(sequences, num_stages: int, kind: str, pack: int) -> None:
    plan, model = plan_of(sequences, num_stages, pack), costs(kind, num_stages)
    found = lend(plan, judge(model))
    validate_plan(found.plan)
    plain_s = evaluate_plan(plan, model).step_s
    assert found.lent_s == evaluate_plan(found.plan, model).step_s <= plain_s
    lent = [group for batch in found.plan.micro_batches for group in batch.groups if is_lent(group)]
    assert len(lent) == found.num_lent <= len(sequences)
    assert (found.lent_s < plain_s) == bool(lent) == (plan_digest(found.plan) != plan_digest(plan))


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_one_sequence_gets_the_best_of_all_ways(kind: str, num_stages: int) -> None:
    plan, model = plan_of([[400, 300, 250, 200, 180]], num_stages), costs(kind, num_stages)
    (group,) = plan.micro_batches[0].groups
    ways = [lent_group(group, *sides) for sides in itertools.product((False, True), repeat=2)]
    seconds = [evaluate_plan(dataclasses.replace(plan, micro_batches=(MicroBatch((way,)),)), model).step_s for way in ways]
    assert lend(plan, judge(model)).lent_s == min(seconds)


def test_equal_slices_on_two_stages_save_a_slot_where_lending_is_free() -> None:
    plan, model = plan_of([[300, 300, 300, 300]], 2), costs("linear", 2)
    found = lend(plan, judge(model))
    # five slots a pass, of which the first and the last are shared; the head is not on both stages
    assert 0.15 < 1 - found.lent_s / evaluate_plan(plan, model).step_s <= 0.2 and found.num_lent == 1


def test_a_limit_of_memory_keeps_the_plan() -> None:
    plan, model = plan_of([[400, 300, 250, 200]], 2), costs("linear", 2)
    lent, plain = (max(evaluate_plan(one, model).peak_bytes) for one in (lend(plan, judge(model)).plan, plan))
    assert lend(plan, judge(model), lambda _, run: max(run.peak_bytes) <= lent).num_lent == 1
    assert plain < lent and lend(plan, judge(model), lambda _, run: max(run.peak_bytes) <= plain).plan == plan


def test_what_the_runtime_does_not_share_is_left_alone() -> None:
    model = costs("linear", 2)
    left = [
        plan_of([[200, 100, 90]], 2, schedule="interleaved", num_ranges=2),
        plan_of([], 2, pack=40),
        # fewer tokens than ranks in the first and in the last slice
        plan_of([[1, 100, 1]], 2),
        dataclasses.replace(plan_of([[200, 100, 90]], 2), parameters="gathered_per_round"),
    ]
    for plan in left:
        predicted: list[StepPlan] = []

        def predict(tried: StepPlan, asked: list[StepPlan] = predicted) -> Evaluation:
            asked.append(tried)
            return evaluate_plan(tried, model)

        found = lend(plan, predict)
        # no way to lend its ranks was even tried
        assert (found.plan, found.num_lent, predicted) == (plan, 0, [plan])


@pytest.mark.wide
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=6),
    st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 2)]),
    st.sampled_from(COST_KINDS),
    st.sampled_from([None, 0.5, 2.0]),
)
def test_a_step_with_lent_stages_is_never_predicted_slower(lengths, ranks: tuple[int, int], kind: str, room) -> None:
    num_ranks, num_stages = ranks
    model = dataclasses.replace(costs(kind, num_ranks), parameters="replicated")
    model = dataclasses.replace(model, model=dataclasses.replace(model.model, keeps_all_stages=True))
    stages = stage_ranges(model.model, num_stages)
    # room for some of the tokens, or for all
    device_bytes = int((room or 0) * sum(lengths) / num_ranks * saved_token_bytes(model.model))
    budget = ActivationBudget(0, device_bytes + 400_000) if room else None
    config = PlannerConfig(1000, (1, 2), stages=stages, activations=budget)
    try:
        plain = plan_step(0, lengths, model, config)
    except ValueError:
        return
    lent = plan_step(0, lengths, model, dataclasses.replace(config, lend_stages=True))
    assert lent.estimate.step_s <= plain.estimate.step_s
    has_lenders = any(is_lent(group) for batch in lent.micro_batches for group in batch.groups)
    assert has_lenders == (lent.estimate.step_s < plain.estimate.step_s)
    run = evaluate_plan(lent, model)
    assert run.step_s == lent.estimate.step_s and max(run.peak_bytes) == lent.estimate.peak_bytes
    if budget is not None:
        assert max(run.peak_bytes) <= ByteModel(model.model).states() + budget.device_bytes


def lendable() -> CostModel:
    """Costs of a model whose ranks hold the weights of all stages."""
    model = costs("attention", 4)
    return dataclasses.replace(model, parameters="replicated", model=dataclasses.replace(model.model, keeps_all_stages=True))


@pytest.mark.wide
def test_one_byte_model_counts_all_plans_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    start = byte_model_module._Counted.__init__

    def counting(self: byte_model_module._Counted) -> None:
        made.append(self)
        start(self)

    monkeypatch.setattr(byte_model_module._Counted, "__init__", counting)
    model = lendable()
    config = PlannerConfig(4000, (1,), stages=stage_ranges(model.model, 4), lend_stages=True)
    plan = plan_step(0, [3000, 10, 12], model, config)
    assert any(is_lent(group) for batch in plan.micro_batches for group in batch.groups) and len(made) == 1


def test_lending_is_refused_where_ranks_are_counted_with_one_stage_alone() -> None:
    model = lendable()
    alone = dataclasses.replace(model, model=dataclasses.replace(model.model, keeps_all_stages=False))
    config = PlannerConfig(4000, (1,), stages=stage_ranges(model.model, 4), lend_stages=True)
    with pytest.raises(ValueError, match=r"set ModelSpec\.keeps_all_stages or leave lend_stages out"):
        plan_step(0, [3000, 10, 12], alone, config)
    assert plan_step(0, [3000], alone, dataclasses.replace(config, lend_stages=False)).num_stages == 4


@pytest.mark.wide
def test_a_long_sequence_gets_a_micro_batch_of_its_own_to_be_lent_ranks() -> None:
    model = lendable()
    config = PlannerConfig(4000, (1,), stages=stage_ranges(model.model, 4), lend_stages=True)
    lent = plan_step(0, [3000, 10, 12], model, config)
    plain = plan_step(0, [3000, 10, 12], model, dataclasses.replace(config, lend_stages=False))
    first, *others = [group for batch in lent.micro_batches for group in batch.groups]
    assert is_lent(first) and {span.sequence for chunk in first.chunks for span in chunk.spans} == {0}
    assert not any(map(is_lent, others)) and lent.estimate.step_s < plain.estimate.step_s

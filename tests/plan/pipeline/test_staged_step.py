"""Seconds of pipelines for planners are those of the judge, and of the cost model part by part."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from hypothesis import example, given
from hypothesis import strategies as st

from hf_longctx.plan.chunks import elastic_chunks
from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import Chunk, GroupShape, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.pipeline.staged_step import StageRoom, busiest_rates, pipeline_by_lead
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict.evaluate import evaluate_plan


def with_measured_head(costs: CostModel, factor: float) -> CostModel:
    """Costs whose measured output head takes `factor` times its share of the operations forward, half of that factor backward."""
    forward, backward = costs.coefficients.forward, costs.coefficients.backward
    forward, backward = replace(forward, head_factor=factor), replace(backward, head_factor=factor / 2)
    return replace(costs, coefficients=replace(costs.coefficients, forward=forward, backward=backward))


@pytest.mark.wide
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=12),
    st.sampled_from(COST_KINDS),
    st.sampled_from(
        [
            (2, 1, 1, "elastic"),
            (2, 2, 1, "1f1b"),
            (4, 2, 1, "gpipe"),
            (2, 4, 1, "elastic"),
            (4, 1, 1, "elastic"),
            (2, 2, 2, "interleaved"),
        ]
    ),
    st.integers(1, 6),
    st.sampled_from([1.0, 3.0, 0.2]),
    st.booleans(),
    st.sampled_from([1.0, 1.25, 2.0]),
    st.booleans(),
)
# every other hop crosses nodes
@example([300, 50], "exchange", (4, 1, 1, "elastic"), 3, 1.0, False, 1.0, False)
@example([300, 50], "exchange", (4, 1, 1, "elastic"), 3, 1.0, False, 1.0, True)
@example([300, 50], "linear", (2, 1, 1, "elastic"), 3, 3.0, False, 1.0, False)
def test_seconds_and_tokens_are_the_judges(
    lengths: list[int],
    kind: str,
    what: tuple[int, int, int, Schedule],
    num_slices: int,
    head_factor: float,
    is_ring: bool,
    lead: float,
    spreads_head: bool,
) -> None:
    num_stages, degree, num_ranges, schedule = what
    output_shares = (0.2, *(num_stages - 1) * (1.0,)) if spreads_head and num_ranges == 1 else ()
    costs = with_measured_head(cost_model(kind, num_stages * degree), head_factor)
    ranges = layer_ranges(costs.model.num_layers, num_stages, num_ranges, head_layers=0.5)
    shape = GroupShape(degree, 1 if is_ring else degree)
    chunks = elastic_chunks(dict(enumerate(lengths)), num_slices, SpanRates(1e-3, 1.0), 5000)
    group = SequenceGroup.of(shape, range(degree), chunks)
    group = pipelined(group, ranges, schedule, lead=lead, output_shares=output_shares)
    plan = StepPlan(0, tuple(lengths), num_stages, degree, "replicated", (MicroBatch((group,)),))
    run = evaluate_plan(plan, costs)
    nodes = [stage * degree // costs.cluster.ranks_per_node for stage in range(num_stages)]
    leaves = [node != nodes[(stage + 1) % num_stages] for stage, node in enumerate(nodes)]
    seconds, held, _ = pipeline_by_lead([(chunks, shape)], costs, ranges, schedule, leaves, output_shares)(lead)
    assert seconds == pytest.approx(run.step_s - run.once_s, rel=1e-9)
    assert [int(tokens.max()) for tokens in held] == [run.ranks[stage * degree].peak_tokens for stage in range(num_stages)]


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("head_layers", [0.0, 3.0])
@pytest.mark.parametrize("head_factor", [1.0, 3.0])
def test_rates_are_those_of_the_stage_with_the_most_work(kind: str, head_layers: float, head_factor: float) -> None:
    costs = with_measured_head(cost_model(kind, 2), head_factor)
    # rates count exchanges in full
    costs = replace(costs, model=replace(costs.model, exchange_parts=1))
    # the last stage has fewer layers, or hardly any, beside the head
    ranges = layer_ranges(costs.model.num_layers, 2, head_layers=head_layers)
    shape = GroupShape(2, 2)
    lengths = [300, 40, 7]
    rates = busiest_rates(costs, shape, ranges, np.array(lengths, dtype=float))
    expected = [
        [
            sum(
                costs.part_s(
                    Chunk(0, (Span(0, 0, n),)),
                    shape,
                    backward,
                    own[0].num_layers,
                    stage == 1,
                    pairs=costs.model.attention_pairs(own),
                )
                for backward in (False, True)
            )
            for n in lengths
        ]
        for stage, own in enumerate(ranges)
    ]
    found = rates.sequences_s(np.array(lengths, dtype=float)) + rates.chunk_s
    assert found.tolist() == pytest.approx(max(expected, key=sum), rel=1e-9)


def test_room_is_counted_in_tokens_or_in_bytes_of_layers() -> None:
    costs, ranges = cost_model("linear", 4), layer_ranges(4, 2)
    kept = StageRoom(costs, ranges, PlannerConfig(100, (1,)))
    assert kept.longest_tokens == 200
    assert kept.added_s([200, 200], 9.0, 900) == 0.0 and math.isinf(kept.added_s([201, 0], 9.0, 900))
    budget = ActivationBudget(0, 1 << 20)
    alone = StageRoom(costs, ranges, PlannerConfig(100, (1,), activations=budget))
    most = (1 << 20) / 2 / alone.layer_bytes
    assert alone.added_s([most, most], 9.0, 900) == 0.0
    # a tenth of what is held has to be recomputed, without attention: 900 tokens on two layers
    share = 0.1 * alone.layer_bytes / alone.freed_bytes
    assert alone.added_s([most / 0.9, most], 9.0, 900) == pytest.approx(share * 900 * 2 * alone.again_s)
    # all of it, with attention: a third of forward and backward
    assert alone.added_s([most * alone.layer_bytes / alone.input_bytes / 1.2, most], 9.0, 900) == pytest.approx(3.0)
    # inputs alone are too many
    assert math.isinf(alone.added_s([most * 1.01 * alone.layer_bytes / alone.input_bytes, 0], 9.0, 900))
    # keys, values and their gradients in fp32 of a sliced sequence take the room of a tenth of what is held
    model = costs.model
    book_bytes = model.num_kv_heads * model.kv_head_size * (model.bytes_per_element + 4)
    sliced = 0.1 * (1 << 20) / 2 / book_bytes
    assert alone.added_s([most, most], 9.0, 900, (), 0, sliced) == pytest.approx(share * 900 * 2 * alone.again_s)


def test_copies_that_hide_make_room_before_recomputation() -> None:
    costs, ranges = cost_model("linear", 4), layer_ranges(4, 2)
    alone, beside = (
        StageRoom(costs, ranges, PlannerConfig(100, (1,), activations=ActivationBudget(0, 1 << 20, host_bytes)))
        for host_bytes in (0, 1 << 40)
    )
    held = 1.2 * (1 << 20) / 2 / alone.layer_bytes
    # the copies of one of two layers hide if a forward is long enough
    copied_s = 900 * 2 * alone.layer_bytes / costs.cluster.hardware.copy_bytes_per_s
    assert alone.added_s([held, 0], 3 * copied_s, 900) > 0 == beside.added_s([held, 0], 3 * copied_s, 900)
    assert beside.added_s([held, 0], 0.0, 900) == alone.added_s([held, 0], 0.0, 900)

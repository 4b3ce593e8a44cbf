"""Gradients of sharded weights lie whole on every rank while a micro-batch runs several backwards, and predictions count them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import MODEL, cost_model

from hf_longctx.plan.core.types import Action, Chunk, GroupShape, LayerRange, MicroBatch, SequenceGroup, Span, StagePlan, StepPlan
from hf_longctx.plan.memory.stage import accumulated_bytes, summed_bytes
from hf_longctx.plan.model.model_spec import AdapterSpec
from hf_longctx.plan.predict.evaluate import evaluate_plan

pytestmark = pytest.mark.quick

PARAMETERS = MODEL.part_parameters(MODEL.num_layers, True, True)


def peak_bytes(parameters: str, *chunks: tuple[Span, ...]) -> int:
    """Most predicted bytes on a rank of a group of two that runs these chunks one after the other."""
    actions = tuple(Action(kind, 0, index) for index in range(len(chunks)) for kind in ("F", "B"))  # type: ignore[arg-type]
    stage = StagePlan(0, (LayerRange(0, MODEL.num_layers),), actions)
    own = tuple(Chunk(index, spans) for index, spans in enumerate(chunks))
    group = SequenceGroup.of(GroupShape(2, 2), range(2), own, (stage,))
    plan = StepPlan(0, (64, 64), 1, 2, parameters, (MicroBatch((group,)),))  # type: ignore[arg-type]
    costs = replace(cost_model("linear", 2), parameters=parameters, shard_ranks=2)
    return max(evaluate_plan(plan, costs).peak_bytes)


def test_a_group_of_several_chunks_holds_all_gradients() -> None:
    one, two = ((Span(0, 0, 64),),), ((Span(0, 0, 64),), (Span(1, 0, 64),))
    whole = accumulated_bytes(MODEL, MODEL.num_layers, True, True, "sharded", 2)
    # the chunks run one after the other, so that all else is equal; the workspace of a chunk that keeps its gradients may differ
    assert peak_bytes("sharded", *two) - peak_bytes("sharded", *one) == whole > 0
    assert peak_bytes("replicated", *two) == peak_bytes("replicated", *one)


def test_half_precision_gradients_accumulate_in_fp32() -> None:
    """All of the model's gradients, those of the backward that sums, and what others send, less those that the states count."""
    half = replace(MODEL, bytes_per_element=2)
    layer, head = half.layer_weights, half.vocab_size * half.hidden_size
    whole = 4 * PARAMETERS + 2 * (layer + head) + 4 * half.largest_matrix
    for parameters in ("sharded", "gathered_per_round"):
        counted = summed_bytes(half, 1, True, True, parameters, 2)
        assert accumulated_bytes(half, MODEL.num_layers, True, True, parameters, 2) == whole - counted
    assert accumulated_bytes(half, MODEL.num_layers, True, True, "replicated", 2) == 0


def test_adapters_outside_of_layers_alone_leave_nothing_of_layers_in_flight() -> None:
    model = replace(MODEL, adapters=AdapterSpec(last_parameters=80, last_bytes=320))
    for parameters in ("sharded", "gathered_per_round"):
        # adapters, their copy if they are sent in fp32 anyway, and one sum
        copied = 320 * (parameters == "gathered_per_round")
        assert summed_bytes(model, 1, True, True, parameters, 2) == 320 + max(320, copied) + 4 * 80 // 2

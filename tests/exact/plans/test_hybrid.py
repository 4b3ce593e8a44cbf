"""Hybrid groups (Ulysses inside blocks, a ring across them) are exact, also next to other methods in one micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.ranks.rank_steps import check_layout_step, run_step, step_on_rank

from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import GroupShape, MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.attention import sequence_parallel

HYBRIDS = {name: LAYOUTS[name] for name in ("<4>", "<4>,<2,2>,<1,1,1,1>", "<4> of two tokens", "one long, many short")}


@pytest.mark.daily("<4> of two tokens-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_matches_one_plain_process(ranks, name: str, family: str) -> None:
    num_ranks, layout, lengths = HYBRIDS[name]
    check_layout_step(ranks(num_ranks), ModelCase(family), layout, lengths, ulysses=2)


# blocks of two: each rank reads whole KV heads, shares one with its neighbour, or reads parts of several
@pytest.mark.daily("6-2")
@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 1), (4, 4), (6, 2), (6, 3), (3, 3), (5, 1)])
def test_hybrid_asks_of_the_heads_only_one_per_rank_of_a_block(ranks, num_heads: int, num_kv_heads: int) -> None:
    num_ranks, layout, lengths = HYBRIDS["<4>"]
    check_layout_step(ranks(num_ranks), ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads), layout, lengths, ulysses=2)


def reshaped(plan: StepPlan, shapes: list[GroupShape]) -> StepPlan:
    """`plan`, with these shapes for the first groups of every micro-batch."""
    micro_batches = []
    for micro_batch in plan.micro_batches:
        groups = list(micro_batch.groups)
        for place, shape in enumerate(shapes):
            assert groups[place].degree == shape.degree
            old = groups[place]
            groups[place] = SequenceGroup.of(shape, old.positions, old.chunks, old.stages)
        micro_batches.append(MicroBatch(tuple(groups)))
    return validate_plan(replace(plan, micro_batches=tuple(micro_batches)))


# name -> (ranks, layout, lengths, shapes of the groups)
MIXTURES = {
    "<3r,1>": (4, [[(3, (0, 1)), (1, (2,))]], [43, 7, 11], [GroupShape(3), GroupShape(1)]),
    "<2u,2r>": (4, [[(2, (0, 1)), (2, (2, 3))]], [21, 6, 17, 9], [GroupShape(2, 2), GroupShape(2)]),
    "<4h,2u> of six": (6, [[(4, (0, 1)), (2, (2, 3))]], [61, 9, 31, 4], [GroupShape(4, 2), GroupShape(2, 2)]),
    "<2r,3r,1> of six": (6, [[(3, (0,)), (2, (1, 2)), (1, (3,))]], [53, 31, 4, 11], [GroupShape(2), GroupShape(3)]),
    "<6h>": (6, [[(6, (0, 1, 2))]], [83, 14, 5], [GroupShape(6, 2)]),
}


@pytest.mark.daily("<2u,2r>")
@pytest.mark.parametrize("name", MIXTURES)
def test_methods_stand_beside_each_other(ranks, name: str) -> None:
    num_ranks, layout, lengths, shapes = MIXTURES[name]
    plan = reshaped(plan_of(layout, lengths, num_ranks, ulysses=1), shapes)
    rows = random_rows(lengths)
    expected_loss, expected = reference_step(build_model(ModelCase()), rows)
    for loss, gradients in run_step(ranks(num_ranks), ModelCase(), plan, rows):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert max(relative_error(gradients[key], expected[key]) for key in expected) <= TOLERANCE


def step_with_wrong_heads(plan: StepPlan, rows: Any) -> Any:
    """Runs one step in which every rank takes its query heads in reverse order."""
    original = sequence_parallel.join_tokens

    def join(*args: Any) -> Any:
        q, k, v = original(*args)
        return q.flip(0), k, v

    with patch.object(sequence_parallel, "join_tokens", join):
        return step_on_rank(ModelCase(), plan_to_json(plan), rows)[1]


def test_planted_bug_is_noticed(ranks) -> None:
    rows = random_rows([32])
    _, expected = reference_step(build_model(ModelCase()), rows)
    plan = plan_of([[(4, (0,))]], [32], 4, ulysses=2)
    for gradients in ranks(4).run(step_with_wrong_heads, plan, rows):
        assert max(relative_error(gradients[key], expected[key]) for key in expected) > 1e-3

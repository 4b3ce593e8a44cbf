"""Dropout of attention weights drops the same weights in every plan: losses and gradients are those of one document at a time.

The reference is plain transformers with masks from numpy (`helpers.models.dropout_truth`), in fp64 to 1e-12.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import offloading, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.lent_steps import lent_plan, lent_step_on_rank
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_layout_step, check_step

from hf_longctx.plan.core.serialize import plan_to_json

CASE = ModelCase(promoted=True, dropout=0.3)
SLICES = [*([span] for span in cut(0, [15, 11, 9, 5])), [(1, 0, 9), (2, 0, 7)]]
LENGTHS = [40, 9, 7]


@pytest.mark.daily("<2>,<1,1>,<2>")
@pytest.mark.parametrize("name", ["one rank, several micro-batches", "<2>,<1,1>,<2>"])
def test_packs_and_groups_match(ranks, name: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_layout_step(ranks(num_ranks), CASE, layout, lengths)


# heads of two ranks: two and one, of which both read one KV head
@pytest.mark.daily("heads1")
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (6, 2)])
def test_groups_with_any_number_of_heads_match(ranks, heads: tuple[int, int]) -> None:
    case = replace(CASE, num_heads=heads[0], num_kv_heads=heads[1])
    check_layout_step(ranks(2), case, [[(2, (0, 1, 2))]], LENGTHS)


@pytest.mark.daily("qwen3_window")
@pytest.mark.parametrize("family", ["llama", "qwen3_window"])
def test_rings_match(ranks, family: str) -> None:
    case = replace(CASE, family=family)
    check_layout_step(ranks(2), case, [[(2, (0, 1, 2))]], LENGTHS, ulysses=1)
    check_step(ranks(2), case, sliced_plan(LENGTHS, SLICES, num_ranks=2, ulysses=1), LENGTHS)


def test_hybrids_match(ranks) -> None:
    check_layout_step(ranks(4), CASE, [[(4, (0, 1, 2))]], LENGTHS, ulysses=2)


def test_shards_match(ranks) -> None:
    check_layout_step(ranks(2), CASE, [[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [*LENGTHS, 3], parameters="sharded")


# policies under which outputs of attention are recomputed, kept, and partly kept
POLICIES = {"recomputed": offloading(), "mixed": offloading(host=0.5, recompute=0.25, mlp=0.5, qkv=0.25)}


@pytest.mark.daily("llama-recomputed")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_slices_that_are_replayed_match(ranks, name: str, family: str) -> None:
    plan = same_policy(sliced_plan(LENGTHS, SLICES, num_ranks=2), *[POLICIES[name]] * 2, tile_tokens=4)
    check_step(ranks(2), replace(CASE, family=family), plan, LENGTHS)


def test_stages_match(ranks) -> None:
    check_pipeline(ranks(2), replace(CASE, num_layers=4), pipeline_plan(LENGTHS, [[(1, SLICES)]], 2))


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_lent_slices_match(ranks, family: str) -> None:
    case, rows = replace(CASE, family=family, num_layers=4), random_rows([40])
    plan = lent_plan(pipeline_plan([40], [[(1, [[span] for span in cut(0, [15, 11, 9, 5])])]], 2))
    expected_loss, expected = reference_step(build_model(case), rows)
    for losses, gradients, *_ in ranks(2).run(lent_step_on_rank, case, plan_to_json(plan), rows, False):
        assert losses == pytest.approx([expected_loss] * 2, rel=TOLERANCE)
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE


def test_adapters_match(ranks) -> None:
    lora = (("r", 2), ("lora_dropout", 0.1), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
    check_layout_step(ranks(2), replace(CASE, lora=lora), [[(2, (0, 1, 2))]], LENGTHS)


# wrong keys -> number of ranks; the plan is in slices if it is 1, else one group
BUGS = {
    "weights dropped by the rank's own head": 2,
    "weights dropped by place in the slice": 1,
    "weights dropped by document of the chunk": 1,
    "weights dropped in another step": 1,
}


@pytest.mark.daily("weights dropped by place in the slice", "weights dropped by document of the chunk")
@pytest.mark.parametrize("bug", BUGS)
def test_wrong_keys_are_noticed(ranks, bug: str) -> None:
    plan = sliced_plan(LENGTHS, SLICES) if BUGS[bug] == 1 else plan_of([[(2, (0, 1, 2))]], LENGTHS, 2)
    with pytest.raises(AssertionError):
        check_step(ranks(BUGS[bug]), CASE, plan, LENGTHS, bug=bug)

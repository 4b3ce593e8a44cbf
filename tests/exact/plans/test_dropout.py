"""Dropout drops the same values in every plan: losses and gradients are those of one document at a time, in fp64 to 1e-12."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.measures import class_sweep
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import offloading, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.lent_steps import lent_plan, lent_step_on_rank
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_layout_step, check_step
from helpers.trainers.trainer_runs import problems_at_start

from hf_longctx.families.registry import FAMILIES, family_of
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASE = ModelCase(promoted=True, lora=(("r", 2), ("lora_dropout", 0.1), ("target_modules", [*LINEARS, "lm_head"])))
DORA = (("r", 2), ("lora_dropout", 0.3), ("use_dora", True), ("target_modules", ["q_proj", "down_proj"]))
SLICES = [*([span] for span in cut(0, [15, 11, 9, 5])), [(1, 0, 9), (2, 0, 7)]]
LENGTHS = [40, 9, 7]


@pytest.mark.daily("one rank, several micro-batches")
@pytest.mark.parametrize("name", ["one rank, several micro-batches", "<2>,<1,1>,<2>"])
def test_packs_and_groups_match(ranks, name: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_layout_step(ranks(num_ranks), CASE, layout, lengths)


def test_rings_match(ranks) -> None:
    check_layout_step(ranks(2), replace(CASE, lora=DORA), [[(2, (0, 1, 2))]], LENGTHS, ulysses=1)


def test_shards_match(ranks) -> None:
    check_layout_step(ranks(2), CASE, [[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [*LENGTHS, 3], parameters="sharded")


# tiles of an MLP whose inner tensors are recomputed, partly kept, and partly on the host, with tiles of the head
POLICIES = {"recomputed": offloading(), "mixed": offloading(host=0.5, recompute=0.25, mlp=0.5, qkv=0.25)}


@pytest.mark.daily("0-recomputed")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tile_tokens", [0, 4])
def test_slices_that_are_replayed_in_tiles_match(ranks, name: str, tile_tokens: int) -> None:
    plan = same_policy(sliced_plan(LENGTHS, SLICES, num_ranks=2), *[POLICIES[name]] * 2, tile_tokens=tile_tokens)
    check_step(ranks(2), CASE, plan, LENGTHS)


def test_stages_match(ranks) -> None:
    case = replace(CASE, num_layers=4)
    check_pipeline(ranks(2), case, pipeline_plan(LENGTHS, [[(1, SLICES)]], 2))


def test_lent_slices_match(ranks) -> None:
    case, rows = replace(CASE, num_layers=4), random_rows([40])
    plan = lent_plan(pipeline_plan([40], [[(1, [[span] for span in cut(0, [15, 11, 9, 5])])]], 2))
    expected_loss, expected = reference_step(build_model(case), rows)
    for losses, gradients, *_ in ranks(2).run(lent_step_on_rank, case, plan_to_json(plan), rows, False):
        assert losses == pytest.approx([expected_loss] * 2, rel=TOLERANCE)
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE


# wrong keys -> the plan that shows them
BUGS = {
    "dropout by place in the row": (1, [[(1, (0, 1))]]),
    "dropout by place in the tile": (1, [[(1, (0, 1))]]),
    "dropout by sequence of the rank": (2, [[(1, (0,)), (1, (1,))]]),
    "dropout of replays at random": (1, [[(1, (0, 1))]]),
}


@pytest.mark.daily("dropout by place in the row")
@pytest.mark.parametrize("bug", BUGS)
def test_wrong_keys_are_noticed(ranks, bug: str) -> None:
    num_ranks, layout = BUGS[bug]
    plan = same_policy(plan_of(layout, [13, 11], num_ranks), *[offloading()] * 2, tile_tokens=4)
    with pytest.raises(AssertionError):
        check_step(ranks(num_ranks), CASE, plan, [13, 11], bug=bug)


@pytest.mark.daily("CTRLLMHeadModel")
@pytest.mark.parametrize("name", [family.causal for family in FAMILIES if family.dropout_fields])
def test_dropout_of_residuals_and_embeddings_matches(name: str) -> None:
    rates = dict.fromkeys(family_of(name).dropout_fields, 0.2)

    def step(plan: StepPlan, recomputes: bool = False) -> class_sweep.Step:
        model = build_any(name, **rates)
        assert not problems_at_start(model)
        patch_model(model)
        return class_sweep.lone_step(model, plan, ActivationEngine(layer_modules(model)) if recomputes else None)

    with wide_floats():
        expected = reference_step(build_any(name, **rates), class_sweep.rows())
        assert expected[0] != reference_step(build_any(name), class_sweep.rows())[0]
        found = [step(sliced_plan(class_sweep.LENGTHS, class_sweep.SLICES))]
        if not activation_problem(model := build_any(name, is_random=False)):
            found.append(step(class_sweep.recomputing_plan(layer_modules(model)), recomputes=True))
        assert max(class_sweep.worst(each, expected) for each in found) <= TOLERANCE

"""Models that change their logits after the head match plain Hugging Face with their loss in tiles, under any plan."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.pipeline_plans import LENGTHS, SLICED, pipeline_plan
from helpers.plans.policies import num_policies, replayed, same_policy, with_policies
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_step

from hf_longctx.hf.models.logits import logit_change
from hf_longctx.plan.core.types import ActivationPolicy, StepPlan

# scaled, capped
CHANGES = {"granite": "div 2.0", "gemma2": "div 3.0, tanh, mul 3.0", "cohere2": "mul 0.5"}


def case(family: str, **settings: Any) -> ModelCase:
    # norms of Gemma and Cohere sum their gradients in fp32
    return ModelCase(family, promoted=True, **settings)


def tiled(plan: StepPlan, first: float = 0.5) -> StepPlan:
    """The plan with layers that are replayed, the first with this share of its attention, and the loss in tiles."""
    return same_policy(plan, replayed(first), replayed(1.0, mlp=0.5), tile_tokens=5)


def test_the_families_change_their_logits() -> None:
    assert {family: str(logit_change(build_model(case(family)))) for family in CHANGES} == CHANGES


@pytest.mark.daily("granite-smoothed", "cohere2-")
@pytest.mark.parametrize("loss", ["", "focal", "smoothed"])
@pytest.mark.parametrize("family", CHANGES)
def test_slices_match(ranks, family: str, loss: str) -> None:
    lengths = [31, 13, 2]
    chunks = [*([span] for span in cut(0, (9, 12))), [(0, 21, 31), (1, 0, 13)], [(2, 0, 2)]]
    check_step(ranks(1), case(family, loss=loss), tiled(sliced_plan(lengths, chunks)), lengths)


PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "groups": ("<2>,<1,1>,<2>", {}, {}),
    "rings": ("<2>", {"ulysses": 1}, {}),
    "shards": ("<2>,<1,1>,<2>", {"parameters": "sharded"}, {}),
    "shards of tied weights": ("<2>", {"parameters": "gathered_per_round"}, {"tied": True}),
    "adapters on the head": ("<2>", {}, {"lora": (("r", 2), ("target_modules", ["q_proj", "lm_head"]))}),
    "frozen head in shards": ("<2>", {"parameters": "sharded"}, {"lora": (("r", 2), ("target_modules", ["q_proj"]))}),
}


@pytest.mark.daily("granite-shards of tied weights")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", CHANGES)
def test_groups_and_shards_match(ranks, family: str, name: str) -> None:
    layout_name, settings, changes = PLANS[name]
    num_ranks, layout, lengths = LAYOUTS[layout_name]
    # a ring replays all of its attention or none
    plan = tiled(plan_of(layout, lengths, num_ranks, **settings), 1.0 if name == "rings" else 0.5)
    check_step(ranks(num_ranks), case(family, **changes), plan, lengths, masked=(1,))


# Granite scales its embeddings, which a later stage would do once more
@pytest.mark.daily("gemma2-2-1f1b-1")
@pytest.mark.parametrize("family,num_layers,schedule,num_ranges", [("gemma2", 2, "1f1b", 1), ("cohere", 4, "interleaved", 2)])
def test_stages_match(ranks, family: str, num_layers: int, schedule: str, num_ranges: int) -> None:
    plan = pipeline_plan(LENGTHS, [[(1, SLICED)]], 2, schedule, num_layers, num_ranges=num_ranges)
    policies = [ActivationPolicy(0, 0, (replayed(0.5),), tile_tokens=5)] * num_policies(plan)
    check_pipeline(ranks(2), case(family, num_layers=num_layers), with_policies(plan, policies))


@pytest.mark.daily("granite")
@pytest.mark.parametrize("family", CHANGES)
def test_a_tile_whose_logits_stay_as_they_are_is_noticed(ranks, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>"]
    plan = tiled(plan_of(layout, lengths, num_ranks))
    with pytest.raises(AssertionError):
        check_step(ranks(num_ranks), case(family), plan, lengths, bug="logits of tiles left alone")

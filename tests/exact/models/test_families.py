"""Model classes with other patterns, norms and blocks match plain Hugging Face: packed, in slices and recomputed."""

from __future__ import annotations

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import OTHER_FAMILIES, ModelCase, build_model
from helpers.plans.layouts import LAYOUTS
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.lone_steps import check_lone_step
from helpers.ranks.rank_steps import check_layout_step, rank_inputs

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

LENGTHS = [30, 7, 17, 1]
WHOLE = [[(number, 0, length) for number, length in enumerate(LENGTHS)]]
SLICES = [[(0, 0, 9)], [(0, 9, 13)], [(0, 13, 30), (1, 0, 7), (3, 0, 1)], [(2, 0, 17)]]


# norms are promoted, because those of Gemma and Cohere sum their gradients in fp32
@pytest.mark.parametrize("chunks", [WHOLE, SLICES], ids=["packed", "slices"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_every_class_matches_on_one_rank(family: str, chunks: list) -> None:
    check_lone_step(ModelCase(family, promoted=True), sliced_plan(LENGTHS, chunks), random_rows(LENGTHS))


@pytest.mark.wide(
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "granite",
    "glm4",
    "starcoder2",
    "minicpm3",
    "gemma2",
)
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_every_class_matches_where_layers_are_recomputed(family: str) -> None:
    case, rows = ModelCase(family, promoted=True), random_rows(LENGTHS)
    model = build_model(case)
    patch_model(model)
    engine = ActivationEngine(layer_modules(model))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), torch.device("cpu"))
    plan = same_policy(sliced_plan(LENGTHS, SLICES), replayed(0.5, mlp=0.5), replayed(), tile_tokens=16)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert worst_error((float(result.loss), gradients), reference_step(build_model(case), rows)) <= TOLERANCE


@pytest.mark.daily("mistral_window-1")
@pytest.mark.parametrize("ulysses", [0, 1])
@pytest.mark.parametrize("family", ["mistral_window", "gemma2", "gemma3", "cohere2", "olmo3"])
def test_windows_match_on_groups_and_rings(ranks, family: str, ulysses: int) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>"]
    check_layout_step(ranks(num_ranks), ModelCase(family, promoted=True), layout, lengths, ulysses=ulysses)


# values with a smaller and with a larger head size than keys; heads divided unevenly among ranks
@pytest.mark.daily("<3>-0-deepseek_v3")
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("name,ulysses", [("<3>", 0), ("<3>", 1)])
def test_latent_attention_matches_on_groups_and_rings(ranks, name: str, ulysses: int, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_layout_step(ranks(num_ranks), ModelCase(family, promoted=True), layout, lengths, ulysses=ulysses)


@pytest.mark.daily("deepseek_v3")
@pytest.mark.parametrize("family", ["mistral_window", "deepseek_v3", "gemma2"])
def test_patterns_match_on_a_hybrid(ranks, family: str) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>"]
    check_layout_step(ranks(num_ranks), ModelCase(family, promoted=True), layout, lengths, ulysses=2)

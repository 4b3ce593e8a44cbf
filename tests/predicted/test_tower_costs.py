"""Parameters, operations and bytes of graphs of towers, by formula and counted, in every class whose rows may have images."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.models.media_rows import CASES, MediaCase, num_features
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_longctx.hf.models.media import around_text, counted_graph, feature_tables
from hf_longctx.hf.models.spec import model_spec, trained_tower
from hf_longctx.hf.models.towers import tower_names, tower_parameters
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.types import TowerWork
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.stage import part_state_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.model.towers import TowerSpec
from hf_longctx.runtime.core.chunk_inputs import TowerInputs

NUM_LAYERS = 8
# pooling heads that images do not use, and tables of positions
NOT_MATRICES = ("head.", "pos", "class_embedding")
# norms of heads keep numbers that count beside narrow hidden states alone, and no pooling head runs
CHANGES: dict[str, dict[str, Any]] = {
    "Gemma4ForConditionalGeneration": {"hidden_size": 128, "head_dim": 32},
    "LlavaOnevisionForConditionalGeneration": {"vision_use_head": False},
}


@cache
def built(name: str) -> tuple[Any, TowerInputs, TowerWork, TowerSpec]:
    """A tiny model in fp32 with more layers in its tower, an image, the same in numbers, and the tower in numbers."""
    settings, make = CASES[name]
    deep = "depth" if name.startswith(("Qwen", "Glm", "Ernie")) else "num_hidden_layers"
    model = MediaCase(name, vision={**settings["vision_config"], deep: NUM_LAYERS, **CHANGES.get(name, {})}).build().float()
    tensors = {key: each.float() if each.is_floating_point() else each for key, each in make(model, torch.Generator(), 0).items()}
    count = num_features(model, "image", tensors)
    # read from JSON, as a file has it
    spec = TowerSpec.from_config(json.loads(json.dumps(model.config.to_dict())))
    shape = tensors["pixel_values"].shape
    num_parts = 1 if "image_grid_thw" in tensors else shape[:-3].numel() if len(shape) > 3 else 1
    patches = shape.numel() // spec.patch_elements // num_parts
    return model, TowerInputs("image", tensors, count), TowerWork(0, count, num_parts, patches, count), spec


@pytest.mark.wide("SmolVLMForConditionalGeneration", "Gemma4ForConditionalGeneration")
@pytest.mark.parametrize("name", CASES)
def test_operations_and_parameters_are_those_counted(name: str) -> None:
    model, medium, given, spec = built(name)
    # torch counts the plain operators of attention alone on a CPU
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        feature_tables(around_text(model), medium)
    assert spec.operations(given) == pytest.approx(counter.get_total_flops(), rel=0.05)
    named = [pair for tower in tower_names(model) for pair in model.get_submodule(tower).named_parameters()]
    held = sum(each.numel() for path, each in named if each.dim() > 1 and not any(word in path for word in NOT_MATRICES))
    assert spec.num_parameters == pytest.approx(held, rel=0.05)


# the resized table of positions of LFM2-VL takes as much as all layers for an image of 24 patches
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("Lfm2")])
def test_bytes_of_a_graph_are_those_saved(name: str, dtype: torch.dtype) -> None:
    model, medium, given, spec = built(name)
    spec = trained_tower(model, spec)
    tensors = {key: each.to(dtype) if each.is_floating_point() else each for key, each in medium.tensors.items()}
    try:
        counted, _ = counted_graph(around_text(model.to(dtype)), replace(medium, tensors=tensors))
    finally:
        model.float()
    assert spec.graph_bytes(given, dtype.itemsize) == pytest.approx(counted, rel=0.05)


def test_what_is_trained_decides_on_backward_passes_and_states() -> None:
    model, _, given, spec = built("Qwen3VLForConditionalGeneration")
    assert model_spec(model).tower == spec
    assert (spec.backward_passes, spec.graph_bytes(given, 4)) == (0.0, 0)
    whole = trained_tower(model, spec)
    weights = list(tower_parameters(model))
    assert whole.trained_parameters == sum(weight.numel() for weight in weights)
    assert (whole.graph_layers, whole.backward_passes) == (NUM_LAYERS, 2.0)
    states = [part_state_bytes(replace(model_spec(model), tower=each), 1, True, False, "replicated", 1) for each in (spec, whole)]
    # a gradient and two moments
    assert states[1] - states[0] == 3 * 4 * whole.trained_parameters
    try:
        for name, weight in model.named_parameters():
            weight.requires_grad_("visual" not in name or "blocks.6" in name or "merger" in name)
        part = trained_tower(model, spec)
    finally:
        model.requires_grad_(True)
    assert part.graph_layers == 2 and 2 / NUM_LAYERS < part.backward_passes < 1.0
    assert part.graph_bytes(given, 4) < whole.graph_bytes(given, 4) / 2


def test_a_config_without_sizes_of_a_tower_has_none() -> None:
    config = built("LlavaForConditionalGeneration")[0].config.to_dict()
    assert ModelSpec.from_config(config).tower_parameters > 0
    assert TowerSpec.from_config(config | {"vision_config": {"model_type": "clip_vision_model"}}).is_empty
    assert TowerSpec.from_config(config["text_config"]).is_empty
    for wrong in ({"num_hidden_layers": -1}, {"patch_size": "?"}, {"patch_size": 0}, {"hidden_size": None}, {"patch_size": [1]}):
        assert TowerSpec.from_config(config | {"vision_config": config["vision_config"] | wrong}).is_empty


def test_seconds_are_those_of_operations_at_the_rates_of_the_text_model() -> None:
    model, _, given, spec = built("Qwen3VLForConditionalGeneration")
    hardware = replace(GENERIC_GPU, matmul_flops_per_s=1e9, attention_flops_per_s=5e8, elementwise_bytes_per_s=0.0)
    cluster = ClusterSpec(num_ranks=1, ranks_per_node=1, hardware=hardware)
    text = model_spec(model)
    costs = CostModel(text, cluster, default_coefficients(text, cluster))
    expected = 2 * (2 * spec.products(given) / 1e9 + spec.pair_operations(given) / 5e8)
    assert costs.tower_s([given, given], is_backward=False) == pytest.approx(expected)
    assert costs.tower_s([given, given], is_backward=True, again=True) == 0
    trained = replace(costs, model=replace(text, tower=trained_tower(model, spec)))
    assert trained.tower_s([given, given], is_backward=True) == pytest.approx(2 * expected)
    assert trained.tower_s([given, given], is_backward=True, again=True) == pytest.approx(3 * expected)

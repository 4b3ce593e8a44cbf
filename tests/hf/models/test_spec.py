"""The planner's view of a loaded model and of this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from helpers.measures.class_sweep import patched
from helpers.models.any_model import build_any
from helpers.models.tiny_models import FAMILIES, ModelCase, adapted, build_model
from helpers.models.versions import newest
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_longctx.families.registry import family_of_type
from hf_longctx.hf.models import attention
from hf_longctx.hf.models.adapters import largest_adapters
from hf_longctx.hf.models.spec import cluster_spec, model_spec, tokens_that_fit
from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import part_state_bytes, summed_bytes
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec
from hf_longctx.runtime.process_groups import GroupPool


def matrix_parameters(model: torch.nn.Module) -> int:
    """Parameters of two dimensions, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_spec_counts_the_parameters_of_the_real_model(family: str, tied: bool) -> None:
    model = build_model(ModelCase(family, num_heads=6, num_kv_heads=2, tied=tied))
    spec = model_spec(model)
    assert spec.num_parameters == matrix_parameters(model)
    assert spec.tied_embeddings is tied


def test_parameters_that_a_config_does_not_tell_are_counted_in_the_model() -> None:
    config = transformers.JetMoeConfig()
    with torch.device("meta"):
        model = transformers.JetMoeForCausalLM(config)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held > 1.1 * ModelSpec.from_config(config.to_dict()).num_parameters
    assert model_spec(model).num_parameters == pytest.approx(held, rel=1e-6)


# model types whose default config its own class cannot run or build, or leaves sizes of experts open
UNBUILT = {
    *("cohere_compass_text", "dbrx", "deepseek_v2", "dots1", "dots3_note", "emu3", "gemma3n", "gemma4_assistant"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "llama4", "ministral", "nemotron", "openai-gpt", "qwen3_5"),
    *("qwen3_5_moe", "qwen4_exp", "qwen4_exp_text"),
}


# causal language models that run, by the model types of their configs
DEFAULTS = {
    model_type: name
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if not isinstance(name, tuple) and family_of_type(model_type).causal == name and model_type not in UNBUILT
}


def test_most_classes_that_run_have_a_default_config_that_can_be_built() -> None:
    assert len(set(DEFAULTS.values())) > 100


# each config by itself: building all of them takes minutes
@pytest.mark.wide("apertus", "deepseek_v4")
@newest
@pytest.mark.slow
@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_config_tells_the_parameters_of_its_class_or_plans_say_what_is_missing(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, DEFAULTS[model_type])(config)
    model.tie_weights()
    held = sum(parameter.numel() for parameter in model.parameters())
    counted = ModelSpec.from_config(config.to_dict()).num_parameters
    assert (abs(counted - held) > 0.05 * held) == bool(family_of_type(model_type).traits.miscounted), counted / held - 1


def test_towers_weigh_their_weights_alone_on_the_first_stage() -> None:
    model = build_any("Gemma3ForConditionalGeneration")
    spec = model_spec(model)
    towers = sum(p.numel() for name, p in model.named_parameters() if "vision_tower" in name or "projector" in name)
    assert spec.tower_parameters == towers > 0.3 * spec.num_parameters
    text = sum(p.numel() for p in model.parameters()) - towers
    assert spec.num_parameters == pytest.approx(text, rel=0.05)
    # weights, gradients and two fp32 moments of what is trained; weights of the rest
    assert ByteModel(spec).states("replicated", 1) == 24 * spec.num_parameters + 8 * towers
    bare = replace(spec, tower_parameters=0)
    added = [part_state_bytes(each, 1, is_first, False, "replicated", 1) for each in (spec, bare) for is_first in (True, False)]
    assert (added[0] - added[2], added[1] - added[3]) == (8 * towers, 0)
    # adapters stand beside frozen weights of text and towers
    lora = model_spec(adapted(build_any("Gemma3ForConditionalGeneration"), target_modules=["q_proj"]))
    assert lora.tower_parameters == towers and lora.num_parameters == spec.num_parameters


@pytest.mark.parametrize("name,part", [("Qwen3MoeForCausalLM", ".experts."), ("BambaForCausalLM", ".mamba.")])
def test_frozen_experts_and_mixers_have_no_gradients_and_no_moments(name: str, part: str) -> None:
    model = build_any(name)
    trained = model_spec(model)
    parts = [weight for path, weight in model.named_parameters() if part in path]
    for weight in parts:
        weight.requires_grad_(False)
    spec, count = model_spec(model), sum(weight.numel() for weight in parts)
    assert spec.frozen_parameters == count // spec.num_layers > 0
    # a gradient and two moments in fp64, but the weights themselves
    frozen = spec.frozen_parameters * spec.num_layers
    saved = part_state_bytes(trained, spec.num_layers, True, True, "replicated", 1)
    assert saved - part_state_bytes(spec, spec.num_layers, True, True, "replicated", 1) == frozen * (8 + 2 * 4)
    # gradients of two layers are in flight under shards
    both = [part_state_bytes(each, spec.num_layers, True, True, "sharded", 2) for each in (trained, spec)]
    in_flight = [summed_bytes(each, 1, True, True, "sharded", 2) for each in (trained, spec)]
    assert both[0] - both[1] == frozen * (8 + 2 * 4) // 2 + in_flight[0] - in_flight[1]
    assert in_flight[0] - in_flight[1] >= 2 * 8 * spec.frozen_parameters


# queries of a latent of their own and without one; values smaller and larger than keys
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3", "youtu"])
def test_low_rank_projections_are_counted_and_read_from_the_config_too(family: str) -> None:
    model = build_model(ModelCase(family))
    spec = model_spec(model)
    assert spec.num_parameters == matrix_parameters(model)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.can_keep_qkv) == (4, 4, 10, False)
    assert spec == replace(ModelSpec.from_config(model.config.to_dict(), 8), can_keep_qkv=False)


def test_experts_that_every_token_runs_through_are_counted_as_passed() -> None:
    model = build_any("Llama4ForCausalLM")
    spec = ModelSpec.from_config(model.config.to_dict(), 8)
    # two of four layers have 4 experts and a shared one of 16, the others an MLP of 48
    assert (spec.intermediate_size, spec.idle_parameters, spec.routed_elements) == (64, 2 * 32, 4 * 32)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert model_spec(model) == replace(spec, bytes_per_element=8)


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified", "JetMoe", "MiMoV2Flash", "Qwen3"])
def test_keys_and_values_are_counted_as_of_the_layer_with_the_most(monkeypatch, name: str) -> None:
    model = patched(build_any(f"{name}ForCausalLM"))
    seen: list[int] = []

    def spy(query: Any, key: Any, value: Any, *args: Any) -> Any:
        seen.append(key.shape[1] * (key.shape[3] + value.shape[3]))
        return torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype).transpose(1, 2)

    monkeypatch.setattr(attention, "sequence_parallel_attention", spy)
    context = GroupPool((1,), timeout_s=1.0).context(SequenceGroup((0,), "local", (), ()), Chunk(0, (Span(0, 0, 9),)))
    ids = torch.arange(2, 11).unsqueeze(0)
    model(input_ids=ids, attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool), use_cache=False, longctx=context)
    spec = model_spec(model)
    # values of MiMo are smaller than keys, as which they are counted
    assert (spec.kv_size == max(seen) or name == "MiMoV2Flash") and max(seen) <= spec.kv_size <= 8 / 7 * max(seen)
    assert spec.num_heads % spec.num_kv_heads == 0 and (len(set(seen)) == 1) == (name in ("JetMoe", "Qwen3"))


def test_spec_by_hand() -> None:
    model = build_model(ModelCase("qwen3", num_heads=6, num_kv_heads=3, dtype=torch.float32))
    assert model_spec(model) == ModelSpec(
        num_layers=2,
        hidden_size=48,
        intermediate_size=48,
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        vocab_size=64,
        max_positions=512,
        tied_embeddings=False,
        bytes_per_element=4,
        qk_norms=True,
        cuts_heads=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_queries_and_keys_are_read_from_the_config_too(family: str) -> None:
    model = build_model(ModelCase(family))
    assert ModelSpec.from_config(model.config.to_dict()).qk_norms == model_spec(model).qk_norms == (family == "qwen3")


def test_a_projection_of_another_make_is_told_to_the_planner() -> None:
    class Other(torch.nn.Linear):
        pass

    model = build_model(ModelCase())
    assert model_spec(model).can_keep_qkv
    model.model.layers[1].self_attn.v_proj.__class__ = Other
    assert not model_spec(model).can_keep_qkv


def test_head_size_is_the_configs_not_a_quotient() -> None:
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.Qwen3ForCausalLM(config)
    spec = model_spec(model)
    assert spec.head_dim == 16
    assert spec.layer_parameters == matrix_parameters(model.model.layers[0])


@pytest.mark.parametrize("dtype,num_bytes", [(torch.float64, 8), (torch.float32, 4)])
def test_bytes_are_those_of_the_weights(dtype: torch.dtype, num_bytes: int) -> None:
    assert model_spec(build_model(ModelCase(dtype=dtype))).bytes_per_element == num_bytes


def test_adapters_are_counted_with_their_own_bytes() -> None:
    case = ModelCase(dtype=torch.bfloat16)
    assert model_spec(build_model(case)).adapters == AdapterSpec()
    settings: Any = {"r": 2, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    found = model_spec(adapted(build_model(case), autocast=True, **settings)).adapters
    # 32 to 32 and 48 to 32 in fp32, and a copy of 64 * 32 in bf16
    trained, head = 2 * (32 + 32) + 2 * (48 + 32), 64 * 32
    # inputs once more in fp32, and two numbers each
    parts = {"attention_saved_bytes": 4 * (32 + 2), "mlp_saved_bytes": 4 * (48 + 2)}
    # in pieces of heads two numbers three times, in tiles two outputs more
    parts |= {"cut_bytes": 3 * 4 * 2, "tile_bytes": 4 * (48 + 2) + 2 * 4 * 32}
    assert found == AdapterSpec(trained, 4 * trained, last_parameters=head, last_bytes=2 * head, **parts)
    above = model_spec(adapted(build_model(case), layers_to_transform=[1], **settings)).adapters
    # sizes of the layer with the most, in its own dtype
    saved_bytes = above.attention_saved_bytes + above.mlp_saved_bytes
    assert (above.layer_parameters, above.layer_bytes, saved_bytes) == (trained, 2 * trained, 2 * 2 * 2)
    # which reads without copies
    assert (above.reads_first_norm, above.reads_attention, above.reads_second_norm, above.reads_product) == (1, 0, 0, 1)
    both = largest_adapters([replace(found, last_bytes=0), AdapterSpec(last_bytes=7, reads_attention=True)])
    assert both == replace(found, last_bytes=7, reads_attention=True)


def test_ranks_of_one_cpu_node_share_its_memory() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    spec = cluster_spec(torch.device("cpu"), num_ranks=8, ranks_per_node=4)
    assert (spec.num_ranks, spec.ranks_per_node, spec.hardware.device_bytes) == (8, 4, total // 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_is_the_devices() -> None:
    spec = cluster_spec(torch.device("cuda"), num_ranks=1, ranks_per_node=1)
    assert spec.hardware.device_bytes == torch.cuda.get_device_properties(0).total_memory


def hardware(device_bytes: int) -> ClusterSpec:
    return ClusterSpec(1, 1, HardwareSpec("test", 1e12, 1e12, device_bytes, 1e9, 1.0, 0.0))


@pytest.mark.parametrize("device_bytes", [1 << 20, 1 << 24, 1 << 30])
def test_tokens_that_fit_are_the_most_that_the_usable_share_holds_beside_the_states(device_bytes: int) -> None:
    spec = model_spec(build_model(ModelCase()))
    tokens = tokens_that_fit(spec, hardware(device_bytes))
    # four fifths of the device, workspace included
    held, more = (ByteModel(spec).states() + ByteModel(spec).kept_bytes(count) for count in (tokens, tokens + 1))
    assert held <= 0.8 * device_bytes < more


def test_a_model_larger_than_the_device_fits_no_token() -> None:
    spec = model_spec(build_model(ModelCase()))
    assert tokens_that_fit(spec, hardware(spec.num_parameters)) < 1

"""Model types whose norms, gated MLPs or rotary embeddings run as single kernels where layers are compiled.

A run finds this out from the model itself (`hf/models/fused/bind.py`); a forecast has only a config, or the name of a shape, and
reads this table. `tests/plan/core/configs/test_kernel_types.py` compares both for every class that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_longctx.plan.core.configs.fields import decoder_config

# types of decoders all of whose layers' norms, MLPs or rotary embeddings have kernels: those of a type with all three are first
_ALL = (
    *("cwm", "emu3_text_model", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "granite4_vision_text"),
    *("granite_docling_text", "granite_swa", "hunyuan_v1_dense", "hyperclovax", "llama", "minicpm3", "ministral", "ministral3"),
    *("mistral", "paddleocr_vl_text", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text", "smollm3"),
    *("vaultgemma", "youtu"),
)
_NORMS_AND_ROTARY = (
    *("apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "bitnet", "cosmos3_edge_text", "deepseek_ocr2_text"),
    *("deepseek_v3", "dots1", "exaone_moe", "falcon_h1", "glm4_moe_lite", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("hunyuan_v1_moe", "hy_v3", "jetmoe", "kolibri1", "mellum", "mistral4", "mixtral", "olmoe", "qwen2_5_omni_text"),
    *("qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "seed_oss", "solar_open"),
)
_NORMS_AND_GATES = ("ernie4_5", "hunyuan_vl_text")
_GATES_AND_ROTARY = ("cohere_compass_text", "muse_glimmer_text", "stablelm")
_NORMS_ALONE = (
    *("deepseek_v2", "ernie4_5_moe", "ernie4_5_vl_moe_text", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text"),
    *("glm_ocr_text", "jamba", "laguna", "lfm2", "lfm2_moe", "lfm3", "longcat_flash", "mamba", "mimo_v2_flash", "minimax"),
    *("minimax_m2", "minimax_m3_vl_text", "phi3", "recurrent_gemma", "step3p5", "zamba"),
)
_GATES_ALONE = (
    *("bamba", "cohere", "cohere2", "gemma4_unified_text", "helium", "olmo", "olmo2", "olmo3", "olmo_hybrid", "qwen3_5_text"),
)
_ROTARY_ALONE = (
    *("afmoe", "dbrx", "flint", "jais2", "moshi", "muse_spark_text", "persimmon", "phi", "phimoe"),
    *("starcoder2",),
)
# field of `ModelSpec` -> model types
KERNELS: Mapping[str, frozenset[str]] = {
    "fuses_norms": frozenset((*_ALL, *_NORMS_AND_ROTARY, *_NORMS_AND_GATES, *_NORMS_ALONE)),
    "fuses_gates": frozenset((*_ALL, *_NORMS_AND_GATES, *_GATES_AND_ROTARY, *_GATES_ALONE)),
    "fuses_rotary": frozenset((*_ALL, *_NORMS_AND_ROTARY, *_GATES_AND_ROTARY, *_ROTARY_ALONE)),
}


# activations of gated MLPs that have kernels, by their names in a config
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")


def kernel_fields(model_type: str) -> dict[str, Any]:
    """Fields of `ModelSpec` that say which functions of all layers of a decoder of this type have kernels."""
    return {field: model_type in types for field, types in KERNELS.items()}


def kernels_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `kernel_fields` of a model with this config."""
    text = decoder_config(config)
    model_type = str(text.get("model_type"))
    # configs of multimodal models may have the fields of their decoder, without its type
    is_known = any(model_type in types for types in KERNELS.values())
    fields = kernel_fields(model_type if is_known else f"{model_type}_text")
    activation = text.get("hidden_activation") or text.get("hidden_act")
    fields["fuses_gates"] &= activation is None or activation in _ACTIVATIONS
    return fields

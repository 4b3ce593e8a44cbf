"""A tiny fp64 model of any causal language model class of transformers, with every kind of layer that its defaults have.

Sizes are set by the names of the config's fields, wherever the class has them; a table holds what a few classes need besides.
Windows, chunks and scales by position are so small that every document of more than a few tokens reaches them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from typing import Any

import torch
import transformers
from helpers.models.model_table import OLDER
from helpers.models.tiny_models import widen_decays
from helpers.models.tiny_towers import OF_WRAPPER, TOWER
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 64
WINDOW, CHUNK = 6, 8
HEAD_DIM = 8

# name of a config's field -> its value in a tiny model; some of the names are aliases of other fields
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "dim_model_base"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size", "n_inner"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("num_query_groups",), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "attention_head_dim", "global_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_head_dim", "rotary_dim", "query_pre_attn_scalar"), HEAD_DIM),
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim"), 6),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), HEAD_DIM // 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "gated_norm_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "n_ctx"), 128),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("zero_expert_num", "mlp_only_layers_count"), 2),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "attention_window_size", "window_size"), WINDOW),
    "attention_chunk_size": CHUNK,
    **{"index_topk": WINDOW, "index_head_dim": HEAD_DIM, "index_n_heads": 2},
    **dict.fromkeys(("floor_scale", "log_scaling_n_floor"), 4),
    **dict.fromkeys(("lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    # changes of logits after the head, which would hardly show at the default values
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 2.0),
    **{"logits_scaling": 3.0, "logit_scale": 0.4, "lm_head_multiplier": 0.7},
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
    "use_sliding_window": True,
    "is_decoder": True,
    "use_cache": False,
}
# settings that a class needs in addition to or instead of `_SIZES`; None leaves the class's default
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
# rows have no padding token
_FROM_PADDING = {"vocab_size": VOCAB_SIZE + 1, "pad_token_id": VOCAB_SIZE}
_OF_CLASS: dict[str, dict[str, Any]] = {
    **OF_WRAPPER,
    **dict.fromkeys(("CamembertForCausalLM", "Data2VecTextForCausalLM", "RobertaForCausalLM"), _FROM_PADDING),
    **dict.fromkeys(("RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM"), _FROM_PADDING),
    "BambaForCausalLM": _MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "CohereCompassForCausalLM": {
        "logit_scale": 0.0625,
        "rope_parameters": {
            layer_type: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for layer_type in ("sliding_attention", "full_attention")
        },
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 0.3},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    # layers with a window alone, with blocks that an index chooses, and with all blocks
    "DeepseekV4ForCausalLM": {
        **{
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        },
        **{"mlp_layer_types": ["hash_moe", "moe", "moe"], "num_key_value_heads": 1, "o_groups": 2, "index_topk": 4},
        **{"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}, "partial_rotary_factor": 0.5},
    },
    # an index for all earlier tokens, and windows of another head size
    "Dots3NoteForCausalLM": {
        **{"head_dim": HEAD_DIM, "num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
        **{"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": HEAD_DIM, "swa_qk_nope_head_dim": HEAD_DIM // 2},
        **{"swa_v_head_dim": 6, "shared_experts_intermediate_size": 16},
    },
    "FalconH1ForCausalLM": _MAMBA | {"mamba_d_ssm": 64},
    "FlintForCausalLM": {"mlp_only_layers": [0]},
    "FuyuForCausalLM": {
        "text_config": {
            **{"model_type": "persimmon", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "vocab_size": VOCAB_SIZE, "pad_token_id": 0},
        },
        "patch_size": 4,
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {
        **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
        **{"intermediate_size": 48, "hidden_size_per_layer_input": 8},
        **{"vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 4},
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4ForCausalLM": {
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "global_head_dim": 16},
        **{"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    "Gemma4UnifiedForCausalLM": {"use_bidirectional_attention": None},
    "GitForCausalLM": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    },
    "GraniteMoeHybridForCausalLM": _MAMBA | {"layer_types": ["mamba", "attention"]},
    # layers with a mixer and an MLP, with a mixer and experts, with attention and an MLP
    "JambaForCausalLM": {
        **{"num_hidden_layers": 3, "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "KimiLinearForCausalLM": {"linear_head_dim": 8, "linear_num_heads": 4},
    "LagunaForCausalLM": {"num_attention_heads_per_layer": [4, 4, 4]},
    "Lfm2ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "NemotronHForCausalLM": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "Qwen4ExpForCausalLM": {
        **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 4},
        **{"indexer_compress_ratio": 2, "ple_layer_ids": [1]},
        **{"ngram_vocab_size_base": 16, "make_ngram_vocab_size_divisible_by": 4, "heads_per_ngram": 2, "split_ngram_parts": 4},
        **{"hc_count": 2, "eos_token_id": 7},
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "RoCBertForCausalLM": {
        "pronunciation_vocab_size": 64,
        "shape_vocab_size": 64,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "Phi4MultimodalForCausalLM": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4, "ext_pw_out_channel": 32},
            **{"depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
        },
    },
    # layers with chunks and rotary embedding, with chunks alone, and with neither; two of the layers have experts
    "Llama4ForCausalLM": {
        **{"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 2 + ["full_attention", "chunked_attention"]},
        **{"no_rope_layers": [1, 1, 0, 0], "moe_layers": [0, 2], "intermediate_size": 16},
    },
    "MiniMaxForCausalLM": {"block_size": 8},
    "MllamaForCausalLM": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    # blocks with attention that share their weights, with adapters of their own in Zamba 2
    "ZambaForCausalLM": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64},
        **{"attention_head_dim": 16, "num_key_value_heads": 4, "mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "Zamba2ForCausalLM": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
        **{"n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 2, "chunk_size": 8, "adapter_rank": 4},
        **{"use_shared_attention_adapter": True, "use_mem_rope": True},
    },
    "XmodForCausalLM": _FROM_PADDING | {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    # documents have whole blocks, and a rest that the class runs token by token
    "xLSTMForCausalLM": {"chunk_size": 8, "num_heads": 4},
}
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers", "encoder_layers")
_NOISE = ("dropout", "pdrop", "jitter", "layerdrop")
_MOST_LAYERS = 6
_MOST_PARAMETERS = 5_000_000
# names and changes of models that were found to have no more, since counting takes as long as building
_TINY: set[str] = set()


@functools.cache
def class_names() -> tuple[str, ...]:
    """Every class that transformers exports under a name that ends in ForCausalLM, and older causal language models."""
    named = {name for name in dir(transformers) if name.endswith("ForCausalLM") and not name.startswith("Auto")}
    older = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if name.endswith(OLDER)}
    return tuple(sorted(named | older))


def tiny_config(model_class: type[PreTrainedModel], **changes: Any) -> PretrainedConfig:
    """The class's default config in small sizes, with each kind of layer that its lists of one entry per layer contain."""
    special = (
        _OF_CLASS.get(re.sub(r"(Text)?For(Sequence|Token)Classification$", "ForCausalLM", model_class.__name__), {}) | changes
    )
    config_class: Any = model_class.config_class
    if "text_config" not in config_class.sub_configs or model_class.__name__.endswith(
        ("ForCausalLM", "TextForSequenceClassification")
    ):
        return _small(config_class, special)
    default = config_class()
    parts = {name: getattr(default, name, None) for name in config_class.sub_configs}
    small: dict[str, Any] = {}
    others: dict[str, PretrainedConfig] = {}
    for name, part in parts.items():
        if part is not None:
            settings = {field: value for field, value in TOWER.items() if hasattr(part, field)}
            if name == "text_config":
                settings = _positions_of(part) | _OF_CLASS.get(_causal_class(type(part)), {})
            if "model_type" in (own := special.get(name, {})):
                others[name] = CONFIG_MAPPING[own["model_type"]](**own)
            else:
                small[name] = _small(type(part), settings | own).to_dict()
    config = config_class(**small, **{name: value for name, value in special.items() if name not in (*small, *others)})
    # configs of classes check the kinds of their towers when they are made
    vars(config).update(others)
    return config


def _positions_of(text: Any) -> dict[str, Any]:
    """Divides the frequencies of small heads among the three kinds of positions that some rotary embeddings have."""
    parameters = dict(getattr(text, "rope_parameters", None) or {})
    if "mrope_section" not in (*parameters, *getattr(text, "ignore_keys_at_rope_validation", ())):
        return {}
    total = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
    return {"rope_parameters": parameters | {"mrope_section": [total - 2 * (total // 3), total // 3, total // 3]}}


def _causal_class(config_class: type[PretrainedConfig]) -> str:
    """Name of the causal language model with this config, in whose folder it is; empty if there is none."""
    # to ask classes of all folders would import them, which takes every process ten seconds
    package: Any = transformers
    folder = config_class.__module__.removeprefix("transformers.").rpartition(".")[0]
    near = (name for name in class_names() if package._class_to_module[name].rpartition(".")[0] == folder)
    return next((name for name in near if getattr(transformers, name).config_class is config_class), "")


def _small(config_class: Any, special: dict[str, Any]) -> PretrainedConfig:
    """A config in small sizes."""
    fields = {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    default = vars(config_class())
    settings = {name: value for name, value in _SIZES.items() if name in fields}
    settings |= _by_layer(default, fields)
    settings |= {name: 0.0 for name in fields if any(word in name for word in _NOISE) and isinstance(default.get(name), float)}
    if "qk_rope_head_dim" in fields:
        # with latent attention a config's head size is that of the rotary part, and there are as many KV heads as query heads
        settings |= {name: value for name, value in (("head_dim", HEAD_DIM // 2), ("num_key_value_heads", 4)) if name in fields}
    settings |= special
    return config_class(**copy.deepcopy(settings))


def _by_layer(default: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    """Number of layers, and the lists with one entry per layer, chosen so that every combination of entries occurs once."""
    count = next((default[name] for name in _NUM_LAYERS if isinstance(default.get(name), int)), 0)
    lists = {
        name: list(default[name])
        for name in sorted(fields)
        if isinstance(default.get(name), list | tuple) and count > 1 and len(default[name]) == count
    }
    if set(lists.get("layer_types", ())) in ({"full_attention"}, {"sliding_attention"}) and "sliding_window" in fields:
        # give the model both kinds, since configs of the class may ask for either
        half = ["sliding_attention", "full_attention"] * count
        lists["layer_types"] = half[:count]
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:_MOST_LAYERS] if lists else []
    number = max(2, len(kinds))
    chosen = [kinds[place % len(kinds)] for place in range(number)] if kinds else []
    found = {name: [kind[place] for kind in chosen] for place, name in enumerate(lists)}
    return found | {name: number for name in _NUM_LAYERS if name in fields}


def kinds_of(name: str) -> set[str]:
    """Names of the classes of all modules in a model with the class's default config."""
    model_class = getattr(transformers, name)
    config = model_class.config_class()
    with torch.device("meta"):
        return {type(module).__name__ for module in model_class(config).modules()}


def build_any(name: str, attention: str = "eager", seed: int = 0, is_random: bool = True, **changes: Any) -> PreTrainedModel:
    """A model of the class in training mode and fp64, with all weights random, including biases, norms and sinks."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class, **changes)
    config._attn_implementation = attention
    if not is_random:
        return model_class(config)
    if (kind := f"{name} {changes}") not in _TINY:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > _MOST_PARAMETERS:
            raise ValueError(f"{name} has {size} parameters, which is not tiny; give its sizes in _OF_CLASS")
        _TINY.add(kind)
    torch.manual_seed(seed)
    model = model_class(config).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if hasattr(module, "tid2eid"):
            # experts by token, which come with a checkpoint
            module.tid2eid.random_(module.num_experts)
    widen_decays(model)
    model.tie_weights()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()


class wide_floats(TorchFunctionMode):
    """Context that turns every cast to fp32 into one to fp64, so that norms, rotary embeddings, routers and softmax are fp64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.backward:
            gradient = kwargs.get("gradient", args[1] if args[1:] else None)
            gradients = (torch.ones_like(args[0]) if gradient is None else gradient,)
            # backward recomputes layers, which must run in this mode too; torch's public functions would leave it
            with self:
                return _engine_run_backward(args[:1], gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if function is Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if function in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return function(*args, **kwargs)

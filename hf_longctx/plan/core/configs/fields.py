"""The fields of a model's config under the names that most classes use, read from a `config.json` without transformers.

Classes of transformers translate names of their own when their config is loaded; here a table does. A test compares both for the
configs of all tested classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# positions of a model that needs none, or of one without attention, whose documents may have any length
NO_POSITIONS = 2**30
# model types whose embeddings count positions from the padding token
FROM_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
# model types without rotary embeddings whose positions are limited: a table has a row for each, or attention's bias is made for
# so many. Nothing extends them, so runs refuse longer documents
_POSITION_TABLES = (
    *("bert", "bert-generation", "biogpt", "codegen", "electra", "ernie", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"),
    *("megatron-bert", "mpt", "opt", "rembert", "roc_bert", "roformer", *FROM_PADDING),
)
# nested configs: of the decoder of a multimodal model, and of the sizes of layers
_TEXTS = ("text_config", "decoder", "generator", "text_encoder")
_NESTED = ("attn_config", "ffn_config")
# name of a field -> its names in other classes
_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("kv_n_heads",),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
    "n_shared_experts": ("num_shared_experts",),
    "layer_types": ("layers_block_type",),
    "sliding_window": ("attention_window_size",),
}
# model types whose MLP is four times as wide as hidden states; so it is where `n_inner` is there without a value
_FOUR_TIMES = ("bloom", "codegen", "falcon", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt")


# whole numbers of a config that plans read: those that must be at least 1, and those that may be 0
_SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("conv_L_cache", "conv_kernel", "expand", "mamba_expand", "mamba_d_state", "state_size", "ssm_state_size", "n_mamba_heads"),
    *("mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "mamba_d_ssm", "mamba_n_groups", "mamba_ngroups", "n_groups"),
    *("mamba_chunk_size", "chunk_size", "mamba_d_conv", "conv1d_width", "block_size", "lru_width", "cca_time0", "cca_time1"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"),
    *("linear_head_dim", "linear_conv_kernel_dim", "short_conv_kernel_size", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"),
    *("q_lora_rank", "intermediate_size_mlp", "router_hidden_size", "attention_hidden_size", "global_head_dim"),
    *("num_global_key_value_heads", "full_attention_interval", "decoder_sparse_step", "sliding_window_pattern", "index_topk"),
    *("index_head_dim", "index_n_heads", "no_rope_layer_interval", "layer_group_size", "ffn_round_up_to_multiple_of"),
    *("block_multiple_of", "num_mem_blocks", "time_step_rank", "mamba_dt_rank", "adapter_rank"),
)
_COUNTS = (
    *("intermediate_size", "max_position_embeddings", "pad_token_id", "sliding_window", "attention_chunk_size"),
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "top_k_experts"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "n_shared_experts", "first_k_dense_replace", "attn_layer_period", "attn_layer_offset"),
    *("expert_layer_period", "expert_layer_offset", "max_window_layers", "num_kv_shared_layers", "qk_nope_head_dim"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
_FACTORS = ("block_ffn_dim_multiplier", "qk_dim_factor", "v_dim_factor", "ffn_proj_factor")
# fields that may be 0, or a list with a number for every layer, or the word "auto"
_MAY_BE_0 = (
    "kv_lora_rank",
    "q_lora_rank",
    "adapter_rank",
    "index_topk",
    "index_head_dim",
    "num_mem_blocks",
    "sliding_window_pattern",
)
_MAY_BE_LISTS = ("intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "head_dim")
_MAY_BE_AUTO = ("time_step_rank", "mamba_dt_rank")
# lists of a config: of words, or of numbers of layers
_WORDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "block_types")
_LAYERS = (
    "moe_layers",
    "mlp_only_layers",
    "full_attn_idxs",
    "attn_layer_indices",
    "kda_layers",
    "full_attn_layers",
    "no_rope_layers",
)
_OBJECTS = ("linear_attn_config", "per_layer_config", *_TEXTS, *_NESTED)
# largest numbers: of layers, of positions, and of anything else
_MOST_LAYERS, _MOST_POSITIONS, _MOST_SIZE = 10_000, 2**40, 2**31


def check_fields(config: Mapping[str, Any], path: str = "") -> None:
    """Raises ValueError for the first field of a config.json whose value no model can have, with the field and the value."""
    rules = {name: (1, _whole) for name in _SIZES} | {name: (0, _whole) for name in (*_COUNTS, *_MAY_BE_0)}
    rules |= {other: rules[name] for name, others in _NAMES.items() for other in others if name in rules}
    for name, value in config.items():
        if value is None:
            continue
        if name in rules:
            least, check = rules[name]
            is_layers = name in ("num_hidden_layers", *_NAMES["num_hidden_layers"])
            is_positions = name in ("max_position_embeddings", *_NAMES["max_position_embeddings"])
            most = _MOST_LAYERS if is_layers else _MOST_POSITIONS if is_positions else _MOST_SIZE
            values = value if isinstance(value, list | tuple) and value and name in _MAY_BE_LISTS else [value]
            if not all(check(each, least, most) or (each == "auto" and name in _MAY_BE_AUTO) for each in values):
                raise ValueError(f"{path}{name} is {_shown(value)}; a whole number from {least} to {most:,} is needed")
        elif name in _FACTORS and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_SIZE):
            raise ValueError(f"{path}{name} is {_shown(value)}; a number above 0 and below {_MOST_SIZE:,} is needed")
        elif name in _WORDS or name in _LAYERS:
            is_layer = name in _LAYERS
            if not isinstance(value, list | tuple) or not all(
                _whole(each, 0, _MOST_LAYERS) if is_layer else isinstance(each, str) for each in value
            ):
                raise ValueError(f"{path}{name} is {_shown(value)}; a list of {'layers' if is_layer else 'words'} is needed")
        elif name in ("model_type", "hybrid_override_pattern") and not isinstance(value, str):
            raise ValueError(f"{path}{name} is {_shown(value)}; a word is needed")
        elif name in _OBJECTS:
            if not isinstance(value, Mapping):
                raise ValueError(f"{path}{name} is {_shown(value)}; an object of fields is needed")
            if name != "per_layer_config":
                check_fields(value, f"{path}{name}.")


def _whole(value: Any, least: int, most: int) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most and value == int(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the decoder inside that of a multimodal model; any other config itself."""
    return next((config[name] for name in _TEXTS if isinstance(config.get(name), Mapping)), config)


def has_position_table(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config has positions for a number of tokens beyond which nothing extends them."""
    return decoder_config(config).get("model_type") in _POSITION_TABLES


def config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config, or of the decoder's config inside one; fields that are not there stay away."""
    text = decoder_config(config)
    parts = [text[name] for name in _NESTED if isinstance(text.get(name), Mapping)]
    fields: dict[str, Any] = {name: value for part in (*parts, text) for name, value in part.items()}
    for name, others in _NAMES.items():
        if fields.get(name) is None:
            found = next((fields[other] for other in others if fields.get(other) is not None), None)
            fields.update({} if found is None else {name: found})
    if isinstance(experts := fields.get("moe_intermediate_size"), list | tuple):
        # Ernie 4.5 VL has experts for text, and others for images
        fields["moe_intermediate_size"] = experts[0]
    return {**fields, **_layers(fields), **_width(fields), **_positions(fields), **_most_kv(fields)}


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers, where a class derives it from another field."""
    kind, kinds = fields.get("model_type"), fields.get("layer_types") or fields.get("hybrid_override_pattern")
    if kind == "nemotron_h" and kinds:
        return {"num_hidden_layers": len(kinds)}
    # each of its layers calls attention twice, as two layers of other classes do
    if kind == "longcat_flash" and fields.get("num_layers"):
        return {"num_hidden_layers": 2 * int(fields["num_layers"])}
    return {}


def _width(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The width of the MLP: the largest, if layers differ."""
    width, hidden_size = fields.get("intermediate_size"), fields.get("hidden_size")
    if isinstance(width, list | tuple):
        return {"intermediate_size": max(width)}
    if width is not None and fields.get("block_auto_adjust_ff_dim"):
        # a Lfm2 has two thirds of it, rounded up to a multiple
        multiple = int(fields.get("block_multiple_of") or 1)
        width = int(float(fields.get("block_ffn_dim_multiplier") or 1) * int(2 * int(width) / 3))
        return {"intermediate_size": -(-width // multiple) * multiple}
    is_default = "n_inner" in fields or fields.get("model_type") in _FOUR_TIMES
    return {"intermediate_size": 4 * int(hidden_size)} if width is None and hidden_size and is_default else {}


def _positions(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The most tokens of a document; a class that names no limit has none."""
    limit = int(fields.get("max_position_embeddings") or 0)
    first = int(fields.get("pad_token_id") or 0) + 1 if fields.get("model_type") in FROM_PADDING else 0
    return {"max_position_embeddings": limit - first if limit else NO_POSITIONS}


def _most_kv(fields: Mapping[str, Any]) -> dict[str, Any]:
    """KV heads of the layer with the most, if the config states too few.

    MiMo has twice as many KV heads in layers with a window. JetMoe copies keys and values for every expert of a token.
    """
    kind, heads = fields.get("model_type"), fields.get("num_key_value_heads")
    if kind == "jetmoe":
        return {"num_key_value_heads": fields.get("num_attention_heads")}
    if kind == "mimo_v2_flash" and heads and "sliding_attention" in (fields.get("layer_types") or ()):
        return {"num_key_value_heads": 2 * int(heads)}
    return {}

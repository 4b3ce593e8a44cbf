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

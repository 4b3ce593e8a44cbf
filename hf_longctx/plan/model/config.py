"""Reads the fields of a model's config under the names that most classes use, from a `config.json` and without transformers.

Classes of transformers translate their own names when a config is loaded; here a table does it. A test compares both for the
configs of all tested classes. Also reads the sizes of a mixture of experts and the heads of every layer, and says why a run keeps
everything and which functions of its layers have kernels. A run finds the last two from the model itself (`hf/models`); tests
compare the records in `families` with every class that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_longctx.families.family import SCANS_WITH_KERNELS
from hf_longctx.families.registry import family_of_type, traits_of

# positions of a model that needs none, or of one without attention, whose documents may have any length
NO_POSITIONS = 2**30
# nested configs: of the decoder of a multimodal model, and of the sizes of layers
_TEXTS = ("text_config", "decoder", "generator", "text_encoder")
_NESTED = ("attn_config", "ffn_config")
# name of a field -> its names in other classes
_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "layers"),
    "hidden_size": ("n_embd", "d_model", "embed_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("kv_n_heads",),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length", "max_target_positions"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "dff", "ffn_hidden_size", "moe_intermediate_size"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
    "n_shared_experts": ("num_shared_experts",),
    "first_k_dense_replace": ("num_dense_layers",),
    "layer_types": ("layers_block_type",),
    "sliding_window": ("attention_window_size",),
}
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
    *("block_multiple_of", "num_mem_blocks", "time_step_rank", "mamba_dt_rank", "adapter_rank", "interleave_moe_layer_step"),
    "cross_layer_interval",
)
_COUNTS = (
    *("intermediate_size", "max_position_embeddings", "pad_token_id", "sliding_window", "attention_chunk_size"),
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "top_k_experts"),
    *("moe_intermediate_size", "moe_latent_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "n_shared_experts", "first_k_dense_replace", "attn_layer_period", "attn_layer_offset"),
    *("expert_layer_period", "expert_layer_offset", "max_window_layers", "num_kv_shared_layers", "qk_nope_head_dim"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "additional_vocab_size"),
)
_FACTORS = ("block_ffn_dim_multiplier", "qk_dim_factor", "v_dim_factor", "ffn_proj_factor")
# fields that may be 0, or a list with a number for every layer, or the word "auto"
_MAY_BE_0 = (
    "head_dim",
    "qk_rope_head_dim",
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
    "compress_ratios",
    "cross_attention_layers",
)
_OBJECTS = ("linear_attn_config", "per_layer_config", *_TEXTS, *_NESTED)
# largest numbers: of layers, of positions, and of anything else
_MOST_LAYERS, _MOST_POSITIONS, _MOST_SIZE = 10_000, 2**40, 2**31


def check_fields(config: Mapping[str, Any], path: str = "") -> None:
    """Raises ValueError for the first field of a config.json with an impossible value, naming both."""
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
    return bool(traits_of(decoder_config(config)).positions)


class Fields(dict[str, Any]):
    """Fields of a config by name; raises ValueError for one that is read as `fields[name]` and is missing."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"the model config has no {name}; the config of a decoder-only model is needed")


def config_fields(config: Mapping[str, Any]) -> Fields:
    """The fields of a config, or of the decoder's config inside one; missing fields are left out."""
    text = decoder_config(config)
    parts = [text[name] for name in _NESTED if isinstance(text.get(name), Mapping)]
    fields: dict[str, Any] = {name: value for part in (*parts, text) for name, value in part.items()}
    for name, others in _NAMES.items():
        # beside sizes of a decoder, the plain name has those of an encoder
        decoder = [other for other in others if other.startswith("decoder_")]
        found = next((fields[each] for each in (*decoder, name, *others) if fields.get(each) is not None), None)
        fields.update({} if found is None else {name: found})
    if isinstance(experts := fields.get("moe_intermediate_size"), list | tuple):
        # Ernie 4.5 VL has experts for text, and others for images
        fields["moe_intermediate_size"] = experts[0]
    return Fields(
        fields | _layers(fields) | _compression(fields) | _width(fields) | _positions(fields) | _most_kv(fields) | _tokens(fields)
    )


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers, if a class derives it from another field."""
    derived, kinds = traits_of(fields).layers, fields.get("layer_types") or fields.get("hybrid_override_pattern")
    if derived == "of_types" and kinds:
        return {"num_hidden_layers": len(kinds)}
    # each layer calls attention twice, as two layers of other classes do
    if derived == "doubled" and fields.get("num_layers"):
        return {"num_hidden_layers": 2 * int(fields["num_layers"])}
    if derived == "without_cross" and fields.get("num_hidden_layers"):
        return {"num_hidden_layers": int(fields["num_hidden_layers"]) - len(fields.get("cross_attention_layers") or ())}
    return {}


# tokens of an entry -> type of a layer with such entries
_COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _compression(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Layer types of a DeepSeek V4, whose files list tokens of an entry, also for layers that predict further tokens."""
    if not (rates := fields.get("compress_ratios")) or fields.get("layer_types"):
        return {}
    if unknown := sorted(set(rates) - set(_COMPRESSED)):
        raise ValueError(f"compress_ratios has {unknown[0]}; known are {', '.join(map(str, _COMPRESSED))}")
    kinds = [_COMPRESSED[rate] for rate in rates][: int(fields["num_hidden_layers"])]
    return {"layer_types": kinds, "compress_rates": {kind: rate for rate, kind in _COMPRESSED.items() if rate}}


def _tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The number of tokens, if a class has some beside those of `vocab_size`."""
    more = int(fields.get(traits_of(fields).more_tokens_field) or 0)
    return {"vocab_size": int(fields["vocab_size"]) + more} if more and fields.get("vocab_size") else {}


def _width(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The width of the MLP: the largest, if layers differ."""
    width, hidden_size = fields.get("intermediate_size"), fields.get("hidden_size")
    if isinstance(width, list | tuple):
        return {"intermediate_size": max(width)}
    if width is not None and fields.get("block_auto_adjust_ff_dim"):
        # Lfm2 uses two thirds of it, rounded up to a multiple
        multiple = int(fields.get("block_multiple_of") or 1)
        width = int(float(fields.get("block_ffn_dim_multiplier") or 1) * int(2 * int(width) / 3))
        return {"intermediate_size": -(-width // multiple) * multiple}
    # without a value, `n_inner` means four times
    times = traits_of(fields).mlp_times_hidden or (4 if "n_inner" in fields else 0)
    return {"intermediate_size": times * int(hidden_size)} if width is None and hidden_size and times else {}


def _positions(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The most tokens of a document; a class that names no limit has none."""
    limit = int(fields.get("max_position_embeddings") or 0)
    first = int(fields.get("pad_token_id") or 0) + 1 if traits_of(fields).positions == "from_padding" else 0
    return {"max_position_embeddings": limit - first if limit else NO_POSITIONS}


def _most_kv(fields: Mapping[str, Any]) -> dict[str, Any]:
    """KV heads of the layer with the most, if the config states others.

    MiMo has twice as many KV heads in layers with a window. JetMoe copies keys and values for every expert of a token. Falcon and
    GPT BigCode have one, unless a newer layout of Falcon says otherwise.
    """
    stated, heads = traits_of(fields).kv_heads, fields.get("num_key_value_heads")
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return {"num_key_value_heads": 1}
    if stated == "all":
        return {"num_key_value_heads": fields.get("num_attention_heads")}
    if stated == "doubled_in_windows" and heads and "sliding_attention" in (fields.get("layer_types") or ()):
        return {"num_key_value_heads": 2 * int(heads)}
    return {}


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Sizes of the routed experts of a mixture, and the number of ranks over which they are spread; empty without experts."""

    # matrix parameters of all experts of a layer, the mean over layers
    parameters: int = 0
    # copies of a token's hidden state that go to experts in all layers together, one for each chosen expert
    token_rows: int = 0
    # layers with experts, and experts of such a layer
    num_layers: int = 0
    num_experts: int = 0
    # ranks of a block, which share out whole experts and send them tokens; 1 if experts lie with the other weights
    num_ranks: int = 1
    # gathered weights travel in two bytes
    are_rounded: bool = False
    # inputs and outputs of one expert, and its inner features
    row_size: int = 0
    inner_size: int = 0

    @property
    def row_elements(self) -> int:
        """Elements of a token's rows and of their outputs, in all layers together."""
        return 2 * self.token_rows * self.row_size

    @property
    def spread_parameters(self) -> int:
        """Matrix parameters of a layer that are never gathered, since they are spread over ranks."""
        return self.parameters if self.num_ranks > 1 else 0

    @property
    def travelling_rows(self) -> int:
        """Copies of a token's hidden state that travel between ranks in all layers, including those that stay."""
        return self.token_rows if self.num_ranks > 1 else 0

    @property
    def are_spread(self) -> bool:
        """Whether tokens travel to experts, so that a layer's MLP runs whole, and a replay runs all of it."""
        return self.num_ranks > 1


NO_EXPERTS = ExpertSpec()
# type of layers with a dense MLP, by `Traits.mlp`
_DENSE_NAMES = {"by_layer_name": "mlp", "with_attention": "hybrid"}
# kinds of layers in `mlp_layer_types`
_EXPERT_KINDS, _DENSE_KINDS = frozenset({"sparse", "moe", "hash_moe"}), frozenset({"dense"})
# config fields for the number of experts in a layer
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# config fields for the number of experts that every token passes
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def expert_sizes(
    config: Mapping[str, Any], num_layers: int, hidden_size: int, dense_size: int, names: Sequence[str]
) -> tuple[int, int, int, ExpertSpec]:
    """Returns `intermediate_size`, `idle_parameters`, `routed_elements`, `experts`; `dense_size` and nothing without experts.

    Granite without experts has only the MLP that otherwise all tokens share. Each chosen expert gets a copy of the token and
    returns one. Experts of GPT-OSS clamp gate and up, which saves three more inner tensors. Gemma 4 has experts beside an MLP for
    every token. In Llama 4 every token runs through all experts, multiplied by zero if it did not choose them. In large Nemotrons
    experts read and write a latent. In LongCat each layer, which counts as two, has experts beside one of its two MLPs.
    """
    num_experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    if is_beside := bool(config.get("enable_moe_block")):
        chosen = int(config.get("top_k_experts") or 0)
    traits, no_work = traits_of(config), int(config.get("zero_expert_num") or 0)
    if dense_name := _DENSE_NAMES.get(traits.mlp):
        dense_size = round(dense_size * names.count(dense_name) / num_layers)
    if not num_experts and traits.dense_field:
        dense_size = int(config.get(traits.dense_field) or dense_size)
    is_named = traits.mlp == "by_layer_name"
    if num_experts < 2 or not chosen or (is_named and "moe" not in names):
        return dense_size, 0, 0, NO_EXPERTS
    size = int(config.get("moe_intermediate_size") or dense_size)
    if traits.runs_all_experts:
        chosen, dense_size = num_experts, int(config["intermediate_size_mlp"])
    dense, every = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    starts = (config.get(name) for name in ("first_k_dense_replace", "moe_layer_start_index"))
    first = next((int(start) for start in starts if start and not isinstance(start, list | tuple)), 0)
    has_experts = [layer >= first and layer not in dense and not (layer + 1) % every for layer in range(num_layers)]
    if types := config.get("mlp_layer_types"):
        if unknown := sorted(set(types) - _EXPERT_KINDS - _DENSE_KINDS):
            raise ValueError(
                f"mlp_layer_types has {unknown[0]!r}; known are {', '.join(sorted(_EXPERT_KINDS | _DENSE_KINDS))}, of which "
                f"{', '.join(sorted(_EXPERT_KINDS))} have experts"
            )
        has_experts = [kind in _EXPERT_KINDS for kind in types]
    if (layers := config.get("moe_layers")) is not None:
        has_experts = [layer in layers for layer in range(num_layers)]
    elif every := int(config.get("interleave_moe_layer_step") or 0):
        has_experts = [not (layer + 1) % every for layer in range(num_layers)]
    if period := int(config.get("expert_layer_period") or 0):
        has_experts = [layer % period == int(config.get("expert_layer_offset") or 0) for layer in range(num_layers)]
    if is_named:
        has_experts = [name == "moe" for name in names]
    if traits.layers == "doubled":
        # one of two MLPs has experts beside it
        is_beside, has_experts = True, [layer % 2 == 0 for layer in range(num_layers)]
    share = sum(has_experts) / max(1, num_layers)
    shared_sizes = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    shared = next((int(config[name]) for name in shared_sizes if config.get(name)), 0)
    count = next((int(config[name]) for name in _SHARED_EXPERTS if config.get(name)), int(traits.runs_all_experts))
    shared = shared or size * count + dense_size * is_beside
    matrices, latent = 3 if traits.gated_mlp else 2, int(config.get("moe_latent_size") or hidden_size)
    passed = chosen * size * latent / hidden_size + shared
    # LongCat's class allocates gate and up of experts that return their input, too
    unused = 2 * no_work * latent * size
    idle = matrices * (num_experts - chosen) * latent * size + unused + (num_experts + no_work) * hidden_size
    routed = 2 * chosen * latent + traits.expert_clamps * chosen * size
    if latent != hidden_size:
        # one matrix before the experts and one after them; inner tensors are wider than `passed`, which counts parameters, says
        passed += 2 * latent / matrices
        routed += latent + 2 * chosen * round(size * (1 - latent / hidden_size))
    parameters = round(share * (matrices * num_experts * latent * size + unused))
    experts = ExpertSpec(parameters, chosen * sum(has_experts), sum(has_experts), num_experts, row_size=latent, inner_size=size)
    dense_share = 1 if is_named else 1 - share
    return round(share * passed + dense_share * dense_size), round(share * idle), round(share * routed), experts


# size of these heads in a config that does not say it
_GLOBAL_HEAD_DIM = 512
# fields of a layer's own config that change its heads alone
_HEAD_FIELDS = {"head_dim", "num_key_value_heads"}


class HeadSizes(NamedTuple):
    """Heads of one layer.

    num_kv: KV heads. head_dim: elements of each head. num_made: how many of keys and values the layer makes with its own matrix:
    2, or 1 if values are made of the same product as keys, or 0 if it reads those of an earlier layer.
    """

    num_kv: int
    head_dim: int
    num_made: int = 2

    @property
    def kv_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_kv * self.head_dim


def config_heads(config: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[HeadSizes, ...]:
    """Heads of every layer; () if all layers have the same. windows: of every layer, or () if all see everything."""
    num_layers = int(config.get("num_hidden_layers") or 0)
    own = {name: int(config[name]) for name in sorted(_HEAD_FIELDS) if config.get(name)}
    if len(own) < len(_HEAD_FIELDS) or config.get("kv_lora_rank"):
        return ()
    is_full = [window is None for window in windows] or [True] * num_layers
    has_global = traits_of(config).global_heads
    num_shared = int(config.get("num_kv_shared_layers") or 0) if has_global else 0
    is_once = bool(config.get("attention_k_eq_v")) and has_global
    changes = _changes(config, is_full, is_once)
    found = []
    for layer in range(num_layers):
        sizes = {**own, **changes.get(layer, {})}
        made = 0 if layer >= num_layers - num_shared else 1 if is_once and is_full[layer] else 2
        found.append(HeadSizes(sizes["num_key_value_heads"], sizes["head_dim"], made))
    return tuple(found) if len(set(found)) > 1 else ()


def largest_heads(heads: Sequence[HeadSizes]) -> HeadSizes:
    """The heads of the layer with the most keys and values."""
    return max(heads, key=lambda each: each.kv_size)


def _changes(config: Mapping[str, Any], is_full: Sequence[bool], is_once: bool) -> dict[int, dict[str, int]]:
    """Fields of layers whose heads differ from the config's, by layer. is_once: values are made of the same product as keys."""
    if listed := config.get("per_layer_config"):
        if any(set(each) - _HEAD_FIELDS for each in listed.values()):
            return {}
        return {int(layer): {name: int(size) for name, size in each.items()} for layer, each in listed.items()}
    if not traits_of(config).global_heads:
        return {}
    change = {"head_dim": int(config.get("global_head_dim") or _GLOBAL_HEAD_DIM)}
    if is_once and config.get("num_global_key_value_heads"):
        change["num_key_value_heads"] = int(config["num_global_key_value_heads"])
    return {layer: change for layer, each in enumerate(is_full) if each}


def kept_reason(config: Mapping[str, Any]) -> str:
    """Returns why a run of a model with this config keeps everything; empty if plans may recompute layers and tile the loss."""
    return traits_of(decoder_config(config)).keeps_all


def miscounted_reason(config: Mapping[str, Any]) -> str:
    """Returns what parameters counted from this config leave out or count too often, if that is more than 5 %; else empty."""
    return traits_of(decoder_config(config)).miscounted


# activations of gated MLPs that have kernels, by their names in a config
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")


def kernel_fields(model_type: str) -> dict[str, Any]:
    """Fields of `ModelSpec` that say which functions of all layers of a decoder of this type have kernels.

    Those of scans are packages', as if they were installed.
    """
    family = family_of_type(model_type)
    kernels = family.traits.kernels
    fields = {f"fuses_{name}": name in kernels for name in ("norms", "gated_norms", "gates", "rotary")}
    functions = [mixer.functions for mixer in family.mixers]
    fields["fuses_convolutions"] = bool(functions) and all("causal_conv1d_fn" in each for each in functions)
    fields["fuses_scans"] = any(SCANS_WITH_KERNELS & {*each} for each in functions)
    return fields


def kernels_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `kernel_fields` of a model with this config."""
    text = decoder_config(config)
    fields = kernel_fields(str(text.get("model_type")))
    activation = text.get("hidden_activation") or text.get("hidden_act")
    fields["fuses_gates"] &= activation is None or activation in _ACTIVATIONS
    return fields

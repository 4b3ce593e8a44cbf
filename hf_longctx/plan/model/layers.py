"""Reads from a model's `config.json` how each layer mixes tokens: with full attention, a sliding window, or a state.

Called for plans from a `config.json` (`plan/model/model_spec.py`) and from a loaded config (`hf/models/spec.py`). Windows follow
the rules of transformers. Layers with a state along the sequence follow `STATES`, whose rows families name. A layer may have
attention, a state, both, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hf_longctx.families.registry import family_of_type, traits_of
from hf_longctx.plan.model.config import HeadSizes
from hf_longctx.plan.model.mixers import (
    NO_STATES,
    StateSpec,
    gated_delta_net,
    gated_lru,
    is_bailing,
    kimi_delta,
    lightning,
    mamba1,
    mamba2,
    mixed_projections,
    rwkv,
    short_convolution,
    xlstm,
)

# window in tokens of each layer, None for full attention, 0 for a layer without attention; empty if all have full attention
Windows = tuple[int | None, ...]

# name of a layer type in a config -> field with the most tokens that attention of such a layer sees
_FIELDS = {
    **{"sliding_attention": "sliding_window", "hybrid_sliding": "sliding_window", "chunked_attention": "attention_chunk_size"},
    "attention": "attention_window_size",
}


def config_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Most tokens that attention of each layer sees, a token itself included.

    If neither `layer_types` nor the model type says which layers have the window, none is taken to have it.
    """
    kinds = config.get("layer_types") or _kinds(config, num_layers)
    sizes = {kind: config.get(field) for kind, field in _FIELDS.items()}
    if not config.get("use_sliding_window", not traits_of(config).window_switch):
        del sizes["sliding_attention"]
    return plain_windows([int(sizes.get(kind) or 0) or None for kind in kinds]) if len(kinds) == num_layers else ()


def plain_windows(windows: list[int | None]) -> Windows:
    """The windows as a tuple, empty if no layer has one."""
    return tuple(windows) if any(windows) else ()


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types that transformers derives from a config without `layer_types`."""
    traits, layers = traits_of(config), range(num_layers)
    if traits.windows == "all":
        is_sliding = [True for _ in layers]
    elif traits.windows == "blocks":
        return _block_kinds(config, num_layers)
    elif traits.full_every:
        every = int(config.get("sliding_window_pattern") or traits.full_every)
        is_sliding = [bool((layer + 1) % every) for layer in layers]
    elif traits.windows == "from_max_window_layers":
        is_sliding = [layer >= int(config.get("max_window_layers") or 0) for layer in layers]
    elif traits.windows in ("without_rope", "chunks_with_rope"):
        every = int(config.get("no_rope_layer_interval") or 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        if traits.windows == "chunks_with_rope":
            return ["chunked_attention" if each else "full_attention" for each in rotated]
        is_sliding = [not each for each in rotated]
    else:
        is_sliding = [False for _ in layers]
    return ["sliding_attention" if each else "full_attention" for each in is_sliding]


class LayerKind(NamedTuple):
    """A kind of layer.

    window: as in `Windows`; 0 without attention. has_state: it carries a state. heads: its own, where layers have several sizes.
    """

    window: int | None = None
    has_state: bool = False
    heads: HeadSizes | None = None

    @property
    def attends(self) -> bool:
        return self.window != 0


# a layer with full attention and no state
ATTENTION = LayerKind()


def layer_kinds(windows: Windows, states: StateSpec, heads: tuple[HeadSizes, ...] = ()) -> tuple[LayerKind, ...]:
    """Kind of every layer; empty if all layers have full attention, the same heads and no state."""
    num_layers = len(windows) or len(states.layers) or len(heads)
    columns = windows or (None,) * num_layers, states.layers or (False,) * num_layers, heads or (None,) * num_layers
    return tuple(LayerKind(*each) for each in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An index that chooses the keys of a token from all earlier ones; empty if head_dim is 0.

    An index of compressed keys counts as empty, but for the numbers of its choice.
    """

    # keys that a token sees; of compressed keys the mean over layers
    most_keys: int = 0
    # heads of the index, which share one key of a token, and their size
    num_heads: int = 0
    head_dim: int = 0
    # layers with chosen keys, and layers with their own index
    num_chosen: int = 0
    num_indexes: int = 0
    # every layer passes its choice to the next one
    passes_on: bool = False
    # ranks of the run's largest group, whose chosen keys every rank gathers; 0: those of each plan count
    most_ranks: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes per token and layer of the chosen keys, in int32."""
        return 0 if self.is_empty else 4 * self.most_keys

    @property
    def passed_bytes(self) -> int:
        """Bytes per token and layer of choices that are passed on; they wait for the next replay, and layers share some."""
        return self.token_bytes * self.num_indexes // self.num_chosen if self.passes_on else 0

    @property
    def pair_operations(self) -> int:
        """Operations of the index per query-key pair, the mean over the layers with chosen keys."""
        return 0 if self.is_empty else round(2 * self.num_heads * self.head_dim * self.num_indexes / self.num_chosen)


NO_INDEX = IndexSpec()


def config_index(config: Mapping[str, Any], num_layers: int) -> IndexSpec:
    """The index of DeepSeek sparse attention, or one of pooled keys, read from a config."""
    most, num_heads, head_dim = (int(config.get(name) or 0) for name in ("index_topk", "index_n_heads", "index_head_dim"))
    if pooled := int(config.get("indexer_budget") or 0):
        # whole blocks of tokens, and those after the last one
        most = pooled + int(config["indexer_compress_ratio"]) - 1
        num_heads, head_dim = int(config["indexer_n_heads"]), int(config["indexer_head_dim"])
    kinds = config.get("layer_types") or ()
    if config.get("compress_rates"):
        # it chooses far fewer of them; such layers count as if they saw everything
        return IndexSpec(round(most * list(kinds).count("compressed_sparse_attention") / num_layers))
    if not most or not head_dim:
        return NO_INDEX
    # without such types all layers have an index
    num_chosen = sum(kind == "indexed_attention" for kind in kinds) or (0 if "indexed_attention" in kinds else num_layers)
    owners = config.get("indexer_types") or ()
    passes_on = bool(owners or family_of_type(config.get("model_type")).modules.passed_on)
    num_indexes = sum(kind == "full" for kind in owners) or num_chosen
    return IndexSpec(most, num_heads or 1, head_dim, num_chosen, num_indexes, passes_on)


def with_states(windows: Windows, states: StateSpec) -> Windows:
    """The windows, with 0 for every layer without attention."""
    if states.is_empty:
        return windows
    own = windows or (None,) * len(states.layers)
    found = tuple(window if attends else 0 for window, attends in zip(own, states.attending, strict=True))
    return () if found == (None,) * len(found) else found


def config_states(config: Mapping[str, Any], num_layers: int) -> StateSpec:
    """The layers of a config that carry a state along the sequence, by a row of `STATES`; empty for other configs."""
    if (row := _row(config)) is None:
        return NO_STATES
    kinds = type_names(config, num_layers)
    layers = tuple(kind in row.kinds or kind in row.beside for kind in kinds)
    if len(layers) != num_layers or not any(layers):
        return NO_STATES
    attends = tuple(kind not in row.kinds and kind not in row.without for kind in kinds)
    # most families have either attention or a state in a layer
    is_plain = all(one != other for one, other in zip(layers, attends, strict=True))
    return replace(row.sizes(config), layers=layers, attends=() if is_plain else attends)


def type_names(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Type of every layer of a config with states, by its list or else as transformers derives them; empty for other configs."""
    if (row := _row(config)) is None:
        return []
    return list(config.get("layer_types") or config.get("layers_block_type") or row.default_kinds(config, num_layers))


def _row(config: Mapping[str, Any]) -> _StateRow | None:
    """The row that the config's family names, or the first whose fields an unknown config has."""
    if state := traits_of(config).state:
        return STATES[state]
    return next((row for row in STATES.values() if any(config.get(field) is not None for field in row.fields)), None)


def _kimi_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`; a checkpoint of Kimi Linear numbers its layers from 1."""
    if is_bailing(config):
        every = int(config.get("layer_group_size") or 6)
        return ["" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)]
    named = (config.get("linear_attn_config") or {}).get("kda_layers")
    if named is not None:
        return ["linear_attention" if layer + 1 in named else "" for layer in range(num_layers)]
    return ["" if layer and layer % 4 == 0 else "linear_attention" for layer in range(num_layers)]


def _convolution_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`."""
    attending = config.get("full_attn_idxs")
    return ["" if attending is None or layer in attending else "conv" for layer in range(num_layers)]


def _lfm3_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of an LFM3 without `layer_types`."""
    return ["" if layer % 4 == 2 or (layer and layer % 4 == 0) else "conv" for layer in range(num_layers)]


def _mamba2_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`."""
    attending = config.get("attn_layer_indices") or ()
    return ["" if layer in attending else "mamba" for layer in range(num_layers)]


def _every_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`: every n-th layer has attention."""
    every = int(config.get("full_attention_interval") or 4)
    return ["linear_attention" if (layer + 1) % every else "" for layer in range(num_layers)]


def _period_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of Mamba, Jamba, RWKV and xLSTM; without a period, no layer has attention."""
    period, offset = int(config.get("attn_layer_period") or 0), int(config.get("attn_layer_offset") or 0)
    return ["mamba" if not period or layer % period != offset else "" for layer in range(num_layers)]


def _hybrid_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of FalconH1 and Zaya: both in every layer."""
    return ["hybrid"] * num_layers


def _zamba_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a Zamba: the third layer has attention too, and then one in a period."""
    period, offset = int(config.get("attn_layer_period") or 6), int(config.get("attn_layer_offset") or 4)
    later = ["hybrid" if layer % period == offset else "mamba" for layer in range(num_layers - 3)]
    return ["mamba", "mamba", "hybrid", *later][:num_layers]


def _pattern_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a Nemotron-H from its pattern, or those that transformers takes."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = config.get("hybrid_override_pattern") or "ME*-"
    return [letters.get(letter, "") for letter in pattern]


def _other_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a MiniMax: every second layer has attention, the first one included."""
    return ["linear_attention" if layer % 2 else "" for layer in range(num_layers)]


def _block_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a RecurrentGemma, whose blocks repeat."""
    blocks = config.get("block_types") or ("recurrent", "recurrent", "attention")
    return [blocks[layer % len(blocks)] for layer in range(num_layers)]


@dataclass(frozen=True, slots=True)
class _StateRow:
    """Layers with a state in families of model classes."""

    # sizes of their mixer
    sizes: Callable[[Mapping[str, Any]], StateSpec]
    # layer types of a config that does not list them, given the number of layers
    default_kinds: Callable[[Mapping[str, Any], int], list[str]]
    # names in `layer_types` of layers with a state in place of attention, with both, and with neither
    kinds: tuple[str, ...] = ("linear_attention", "mamba")
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    # fields of which only configs of these families have one
    fields: tuple[str, ...] = ()


# `Traits.state` -> row; an unknown model type gets the first row with a field that its config has
STATES: dict[str, _StateRow] = {
    "mamba1": _StateRow(mamba1, _period_kinds),
    "zamba": _StateRow(mamba1, _zamba_kinds, beside=("hybrid",)),
    "mamba2": _StateRow(mamba2, _period_kinds),
    "zamba2": _StateRow(mamba2, _zamba_kinds, beside=("hybrid",)),
    "nemotron_h": _StateRow(mamba2, _pattern_kinds, without=("mlp", "moe")),
    "rwkv": _StateRow(rwkv, _period_kinds),
    "xlstm": _StateRow(xlstm, _period_kinds),
    "lightning": _StateRow(lightning, _other_kinds),
    "gated_lru": _StateRow(gated_lru, _block_kinds, kinds=("linear_attention", "recurrent")),
    "zaya": _StateRow(mixed_projections, _hybrid_kinds, beside=("hybrid", "hybrid_sliding")),
    "lfm3": _StateRow(short_convolution, _lfm3_kinds, kinds=("conv",)),
    "gated_delta": _StateRow(gated_delta_net, _every_kinds, fields=("linear_num_value_heads",)),
    "kimi_delta": _StateRow(kimi_delta, _kimi_kinds, fields=("linear_attn_config", "linear_num_heads", "kda_safe_gate")),
    "short_conv": _StateRow(short_convolution, _convolution_kinds, kinds=("conv",), fields=("conv_L_cache",)),
    # mixers of FalconH1 run beside attention, whatever its config calls them
    "falcon_h1": _StateRow(
        mamba2, _hybrid_kinds, kinds=(), beside=("hybrid", "attention", "linear_attention"), fields=("mamba_d_ssm",)
    ),
    "bamba": _StateRow(mamba2, _mamba2_kinds, fields=("mamba_n_heads",)),
}

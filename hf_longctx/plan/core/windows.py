"""Which layers of a model let a token see the last few tokens only, by its `config.json` as transformers understands it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# one entry for each layer, None where all tokens before are seen; empty where that holds for every layer
Windows = tuple[int | None, ...]

# by what a config calls a layer, the field with the tokens that it sees at most
_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# types of config.json whose `sliding_window` is switched on by `use_sliding_window`
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
# in which every so many-th layer sees everything where `layer_types` is not given; `sliding_window_pattern` says another number
_EVERY = {
    **{"gemma2": 2, "gpt_oss": 2, "vaultgemma": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4},
    **{"gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6},
}
# in which all layers from `max_window_layers` on have a window, or all layers
_FROM_A_LAYER_ON = ("dots1", "qwen2", "qwen3")
_ALL_LAYERS = ("minimax", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")


def config_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """The tokens that attention of each layer sees at most, its own included.

    Where neither the layers nor the type of the model say which of them have the window, none is taken to have it.
    """
    kinds = config.get("layer_types") or _kinds(config, num_layers)
    sizes = {kind: config.get(field) for kind, field in _FIELDS.items()}
    if not config.get("use_sliding_window", config.get("model_type") not in _SWITCHED):
        del sizes["sliding_attention"]
    return plain_windows([int(sizes.get(kind) or 0) or None for kind in kinds]) if len(kinds) == num_layers else ()


def plain_windows(windows: list[int | None]) -> Windows:
    """The same with no entries where no layer has a window."""
    return tuple(windows) if any(windows) else ()


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """What transformers makes of a config without `layer_types`."""
    kind, layers = config.get("model_type"), range(num_layers)
    if kind in _ALL_LAYERS:
        is_sliding = [True for _ in layers]
    elif kind in _EVERY:
        every = int(config.get("sliding_window_pattern") or _EVERY[kind])
        is_sliding = [bool((layer + 1) % every) for layer in layers]
    elif kind in _FROM_A_LAYER_ON:
        is_sliding = [layer >= int(config.get("max_window_layers") or 0) for layer in layers]
    elif kind == "smollm3":
        every = int(config.get("no_rope_layer_interval") or 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        is_sliding = [not each for each in rotated]
    else:
        is_sliding = [False for _ in layers]
    return ["sliding_attention" if each else "full_attention" for each in is_sliding]

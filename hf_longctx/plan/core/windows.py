"""Read from a model's `config.json` which layers have sliding-window attention, following the rules of transformers.

Called for plans from a `config.json` (`plan/core/model_spec.py`) and from a loaded config (`hf/models/windows.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# window in tokens of each layer, None for full attention; empty if no layer has a window
Windows = tuple[int | None, ...]

# name of a layer type in a config -> field with the most tokens that attention of such a layer sees
_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# model types whose `sliding_window` counts only if `use_sliding_window` is set
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
# model types without `layer_types` -> n: every n-th layer has full attention, unless `sliding_window_pattern` gives another n
_EVERY = {
    **{"gemma2": 2, "gpt_oss": 2, "vaultgemma": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4},
    **{"gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6},
}
# model types whose layers have a window from layer `max_window_layers` on
_FROM_A_LAYER_ON = ("dots1", "qwen2", "qwen3")
# model types in which every layer has a window
_ALL_LAYERS = ("minimax", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")


def config_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Most tokens that attention of each layer sees, a token itself included.

    If neither `layer_types` nor the model type says which layers have the window, none is taken to have it.
    """
    kinds = config.get("layer_types") or _kinds(config, num_layers)
    sizes = {kind: config.get(field) for kind, field in _FIELDS.items()}
    if not config.get("use_sliding_window", config.get("model_type") not in _SWITCHED):
        del sizes["sliding_attention"]
    return plain_windows([int(sizes.get(kind) or 0) or None for kind in kinds]) if len(kinds) == num_layers else ()


def plain_windows(windows: list[int | None]) -> Windows:
    """The windows as a tuple, empty if no layer has one."""
    return tuple(windows) if any(windows) else ()


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types that transformers derives from a config without `layer_types`."""
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

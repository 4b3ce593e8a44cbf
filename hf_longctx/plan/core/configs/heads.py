"""Heads of every layer, as a model's config gives them, for models whose layers have heads of several sizes.

Gemma 4 names the size and number of KV heads of its layers with full attention by fields of their own. A config that transformers
loaded lists them layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# model types whose layers without a window have heads of their own size
_GLOBAL = ("gemma4_text", "gemma4_unified_text")
# size of these heads in a config that does not say it
_GLOBAL_HEAD_DIM = 512
# fields of a layer's own config that change its heads alone
_HEAD_FIELDS = {"head_dim", "num_key_value_heads"}


class HeadSizes(NamedTuple):
    """Heads of one layer.

    num_kv: KV heads. head_dim: elements of each head. num_made: of keys and values, how many the layer makes by a matrix of its
    own: 2, or 1 if values are made of the same product as keys, or 0 if it reads those of an earlier layer.
    """

    num_kv: int
    head_dim: int
    num_made: int = 2

    @property
    def kv_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_kv * self.head_dim


def config_heads(config: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[HeadSizes, ...]:
    """Heads of every layer; () where all layers have the same. windows: of every layer, or () if all see everything."""
    num_layers = int(config.get("num_hidden_layers") or 0)
    own = {name: int(config[name]) for name in sorted(_HEAD_FIELDS) if config.get(name)}
    if len(own) < len(_HEAD_FIELDS) or config.get("kv_lora_rank"):
        return ()
    is_full = [window is None for window in windows] or [True] * num_layers
    num_shared = int(config.get("num_kv_shared_layers") or 0) if config.get("model_type") in _GLOBAL else 0
    is_once = bool(config.get("attention_k_eq_v")) and config.get("model_type") in _GLOBAL
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
    if config.get("model_type") not in _GLOBAL:
        return {}
    change = {"head_dim": int(config.get("global_head_dim") or _GLOBAL_HEAD_DIM)}
    if is_once and config.get("num_global_key_value_heads"):
        change["num_key_value_heads"] = int(config["num_global_key_value_heads"])
    return {layer: change for layer, each in enumerate(is_full) if each}

"""Runs attention to compressed keys (DeepSeek V4) within documents under plans, over all ranks of a group and all slices.

An attention layer of these classes has a compressor, which closes every few tokens into one entry, and some compressors have an
index that chooses entries. `CompressedPatch` gives attention and compressor new forwards. With a plan's context, the class's own
forward of the compressor runs without tokens and takes what they give to entries from a stand-in for its cache: once to make it
for this rank's tokens, then to close entries of whole documents (`runtime.states.compressed_keys`). Without a context both run as
before. The index runs without gradients, as its choice has none, so its weights get none, with and without a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.forwards import carried, carrying, inner_dropout, is_replaced
from hf_longctx.hf.models.towers import ForwardsPatch
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import HOOKS, class_name
from hf_longctx.runtime.states.compressed_keys import Compression, Entries, attend_compressed, choose_entries, close_entries

# names of layers with compressed keys in `layer_types`
COMPRESSED_LAYERS = ("compressed_sparse_attention", "heavily_compressed_attention")
# attribute of a compressor: its entries in the forward that is running
_MADE = "_longctx_entries"


def compressing_attention(model: nn.Module) -> list[Any]:
    """Attention layers of `model` whose class may compress keys."""
    return [module for module in model.modules() if class_name(module) in MODULES.compressing]


class CompressedPatch(ForwardsPatch):
    """Gives attention layers and their compressors forwards that run plans; refuses as `compressed_problems` says."""

    def forwards(self, text: nn.Module) -> list[tuple[Any, Any]]:
        """Attention layers and compressors, with their forwards."""
        return _forwards(text)

    def problems(self, text: nn.Module) -> list[str]:
        """Returns what `compressed_problems` finds."""
        return compressed_problems(text)


def compressed_problems(model: nn.Module, rope_types: Iterable[str] = ()) -> list[str]:
    """Returns why plans would attend to other entries than the class of `model`, naming the first module; empty if they do not.

    rope_types: those of the model's config whose frequencies depend on the length of a document.
    """
    if (found := sorted(rope_types)) and compressing_attention(model):
        return [
            f"rope type {found[0]!r} depends on the length of a document, which does not reach the compressors of "
            f"{type(model).__name__}; use another rope type"
        ]
    names = {module: name for name, module in model.named_modules()}
    for module, forward in _forwards(model):
        where = f"{names[module]} ({type(module).__name__})"
        if is_replaced(module, forward):
            return [
                f"the forward of {where} was replaced, so plans would not reach the keys that it compresses; remove it (del "
                f"module.forward)"
            ]
        inside = list(module.modules()) if forward is _compressor_forward else []
        if any(getattr(each, kind) for each in inside for kind in HOOKS):
            return [
                f"{where} or a module inside it has a hook, which gets other tokens under plans than without one; remove it, or "
                f"hook the whole attention layer"
            ]
        if inside and (problem := inner_dropout(module, where)):
            return [problem]
    return []


def _forwards(model: nn.Module) -> list[tuple[Any, Any]]:
    """Every module that gets a forward of its own, with the function."""
    found: list[tuple[Any, Any]] = []
    for layer in compressing_attention(model):
        found += [(layer, _attention_forward), *([] if layer.compressor is None else [(layer.compressor, _compressor_forward)])]
    return found


def _attention_forward(layer: Any, *args: Any, longctx: GroupContext | None = None, **keywords: Any) -> Any:
    """The forward of an attention class, whose compressor finds the plan's context; masks of plans are single numbers."""
    if longctx is None:
        return type(layer).forward(layer, *args, **keywords)
    keywords["attention_mask"] = None
    with carrying([] if layer.compressor is None else [layer.compressor], longctx):
        try:
            return type(layer).forward(layer, *args, longctx=longctx, **keywords)
        finally:
            if layer.compressor is not None:
                vars(layer.compressor).pop(_MADE, None)


def _compressor_forward(
    compressor: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    """Returns no entries under a plan, as attention gets them from `_MADE`; those of the class without one."""
    if (context := carried(compressor)) is None:
        found: tuple[Tensor, Tensor | None] = type(compressor).forward(
            compressor, hidden_states, q_residual, position_ids, cache, layer_idx
        )
        return found
    if cache is not None:
        raise ValueError(
            f"{type(compressor).__name__} got a cache under a plan, which has none; run it through the plan's executor"
        )
    entries = _entries_of(compressor, hidden_states, "compressor", context)
    if (indexer := getattr(compressor, "indexer", None)) is not None:
        with torch.no_grad():
            keys = _entries_of(indexer, hidden_states, "indexer", context)
            # nothing has a gradient, so this only leaves the states
            keys.leave(hidden_states.new_zeros(1))

        def choose(rows: slice, keys_1ME: Tensor) -> Tensor:
            some = hidden_states[:, rows], q_residual[:, rows], position_ids[:, rows]
            chosen: Tensor = type(indexer).forward(indexer, *some, _Caches(_Known(keys_1ME)), 0)
            return chosen

        entries = replace(entries, chosen=choose_entries(choose, keys, indexer.num_heads, context))
    vars(compressor)[_MADE] = entries
    return hidden_states.new_zeros(1, 1, 0, compressor.head_dim), None


def _entries_of(owner: Any, hidden_1TC: Tensor, name: str, context: GroupContext) -> Entries:
    """Entries that a compressor or an index makes of this rank's tokens; name: what it calls them in its cache."""
    given_1TC = _run(owner, hidden_1TC, _Giving())
    # kv and gate have one size
    size = given_1TC.shape[-1] // 2
    # classes with two series in one tensor read one of them from the block before
    num_back = 1 if size == 2 * owner.head_dim else 0
    return close_entries(
        given_1TC, Compression(owner.compress_rate, num_back, partial(_close, owner, hidden_1TC)), name, owner, context
    )


def _close(owner: Any, hidden_1TC: Tensor, given_1NC: Tensor, first: int) -> Tensor:
    return _run(owner, hidden_1TC[:, :0], _Closing(given_1NC, first))


def _run(owner: Any, hidden_1TC: Tensor, layer: Any) -> Tensor:
    """Returns what the forward of a compressor or an index gives to the layer of its cache."""
    none_1T = hidden_1TC.new_zeros(hidden_1TC.shape[:2], dtype=torch.int64)
    try:
        type(owner).forward(owner, hidden_1TC, hidden_1TC, none_1T, _Caches(layer), 0)
    except _Given as given:
        return given.tensor
    raise RuntimeError(
        f"{type(owner).__name__} closed entries without asking its cache; use the newest version of transformers that "
        f"docs/models.md names"
    )


class _Given(Exception):
    """Ends a forward of a compressor as soon as it has made the tensor that is asked for."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class _Caches:
    """Stands in for a cache of transformers with one layer."""

    def __init__(self, layer: Any) -> None:
        self.layers = (layer,)


class _Giving:
    """Takes what tokens give to entries."""

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> NoReturn:
        """Ends the forward."""
        raise _Given(torch.cat([kv, gate], dim=-1))


class _Closing:
    """Lets a forward close the entries of given tokens, whose first one is at position `first`."""

    def __init__(self, given_1NC: Tensor, first: int) -> None:
        self._given, self._first = given_1NC, first

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Returns the tokens of whole blocks."""
        given_kv, given_gate = self._given.chunk(2, dim=-1)
        return given_kv, given_gate, self._first

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Returns no tokens, since those of the block before are among the given ones."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> NoReturn:
        """Ends the forward."""
        raise _Given(compressed)


class _Known:
    """Lets an index choose among known entries."""

    def __init__(self, entries_1ME: Tensor) -> None:
        self._entries = entries_1ME

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Returns no tokens, so that nothing is closed."""
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Returns all entries."""
        return self._entries


def compressed_attention(
    module: Any, query: Tensor, keys: Tensor, scale: float, window: int, sinks: Tensor | None, context: GroupContext
) -> Tensor | None:
    """Attention [1, T, H, D] of a layer whose compressor has made entries; None for any other layer.

    query: [1, H, T, D]. keys: [1, 1, T, D], values too.
    """
    entries: Entries | None = vars(getattr(module, "compressor", None) or nn.Identity()).get(_MADE)
    if entries is None:
        return None
    assert sinks is not None
    return attend_compressed(query, keys[:, 0], entries, context, window=window, scale=scale, sinks_H=sinks, layer=module)

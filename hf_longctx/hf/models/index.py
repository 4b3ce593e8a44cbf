"""Makes indexers of a model choose keys within documents under plans, over all ranks of a group and all slices.

An indexer of an attention layer scores the earlier tokens of the row, and the layer attends to the best of them. The code of the
class does so for whole rows of one document. `IndexPatch` gives indexers and their attention layers new forwards. With a plan's
context, the class's own forward of the indexer runs for some tokens of one document at a time. It gets the index keys of all
tokens of the document from a cache, for which `runtime.states.chosen_keys` gathers them. Without a context both run as before.

The indexer runs without gradients in all these classes, so its weights get none, with and without a plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.forwards import cache_parameter, carried, carrying, has, inner_dropout, is_replaced
from hf_longctx.hf.models.towers import ForwardsPatch
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import HOOKS, class_name
from hf_longctx.runtime.states.chosen_keys import choose_keys

# name of layers with an index in `layer_types`
INDEXED_LAYERS = "indexed_attention"
# keyword of attention with keys and values that it shares with other layers
_SHARED = "shared_kv_states"
# parameters of an indexer's forward with an entry for every token
_BY_TOKEN = ("hidden_states", "q_resid", "position_ids")
# method of attention layers that makes a mask of chosen keys
_MASK_METHOD = "build_attention_mask_from_topk"
# attribute of an indexer of pooled keys, or of such a layer: what was chosen, until attention takes it
_POOLED = "_longctx_chosen_keys"


def indexed_attention(model: nn.Module) -> list[tuple[Any, Any]]:
    """Attention layers of `model` with chosen keys, each with its indexer, or None if it uses the choice of another layer."""
    layers: list[Any] = [module for module in model.modules() if class_name(module) in MODULES.indexed]
    # some layers of these classes may have windows instead
    return [(layer, layer.indexer) for layer in layers if layer.indexer is not None or getattr(layer, "skip_topk", False)]


class IndexPatch(ForwardsPatch):
    """Gives indexers, and attention layers that have one, forwards that run plans; refuses as `index_problems` says."""

    def forwards(self, text: nn.Module) -> list[tuple[Any, Any]]:
        """Indexers and attention layers, with their forwards."""
        return _forwards(text)

    def problems(self, text: nn.Module) -> list[str]:
        """Returns what `index_problems` finds."""
        return index_problems(text)


def index_problems(model: nn.Module) -> list[str]:
    """Returns why plans would choose other keys than the class of `model`, naming the first module; empty if they do not."""
    names = {module: name for name, module in model.named_modules()}
    for module, forward in _forwards(model):
        where = f"{names[module]} ({type(module).__name__})"
        if is_replaced(module, forward):
            return [
                f"the forward of {where} was replaced, so plans would not reach the keys that its index chooses; remove it (del "
                f"module.forward)"
            ]
        if forward is not _attention_forward and any(getattr(module, kind) for kind in HOOKS):
            return [
                f"{where} has a hook, which gets positions in documents under plans and positions in rows without one; remove "
                f"it, or hook the whole attention layer"
            ]
        if forward is not _attention_forward and (problem := inner_dropout(module, where)):
            return [problem]
    return []


def chooses_by_plan(module: nn.Module) -> bool:
    """Whether the keys that are chosen for this attention layer come from `choose_keys`."""
    return has(module, _attention_forward)


def _forwards(model: nn.Module) -> list[tuple[Any, Any]]:
    """Every module that gets a forward of its own, with the function."""
    found = []
    for layer, indexer in indexed_attention(model):
        forward = _pooling_forward if class_name(indexer) in MODULES.pooling else _indexer_forward
        found += [(layer, _attention_forward), *([(indexer, forward)] if indexer is not None else [])]
    return found


def _attention_forward(layer: Any, *args: Any, longctx: GroupContext | None = None, **keywords: Any) -> Any:
    """The forward of an attention class, whose indexer finds the plan's context."""
    if longctx is None:
        return type(layer).forward(layer, *args, **keywords)
    if (shared := keywords.get(_SHARED)) is not None:
        keywords[_SHARED] = _OfLayer(shared, layer.config.kv_source_layers[layer.layer_idx])
    makes_mask = hasattr(layer, _MASK_METHOD)
    if makes_mask:
        vars(layer)[_MASK_METHOD] = partial(_keep_choice, layer)
    try:
        with carrying([] if layer.indexer is None else [layer.indexer], longctx):
            return type(layer).forward(layer, *args, longctx=longctx, **keywords)
    finally:
        if makes_mask:
            del vars(layer)[_MASK_METHOD]


def _keep_choice(layer: Any, topk_indices: Tensor, **_: Any) -> None:
    """Keeps chosen keys for attention, in place of a mask of all tokens by all tokens."""
    vars(layer)[_POOLED] = topk_indices


@dataclass(frozen=True, slots=True)
class _OfLayer:
    """Keys and values that layers share by their kind, kept apart by the layer that made them.

    A layer that runs again for its backward finds those that it had, even if a later layer has left others of the same kind.
    """

    shared: Any
    layer: int

    def __getitem__(self, kind: str) -> Any:
        return self.shared[kind, self.layer]

    def __setitem__(self, kind: str, made: Any) -> None:
        self.shared[kind, self.layer] = made


def _indexer_forward(indexer: Any, *args: Any, **keywords: Any) -> Tensor:
    """Positions in its document of the keys that each token sees, [1, T, K]; see `choose_keys`.

    The class takes hidden states, perhaps what its queries are made of, rotary embeddings and positions, a mask and a cache. If
    the mask only says which tokens are no padding, the class pools keys in order, and gives whole pools and the tokens since.
    """
    own_class, context = type(indexer), carried(indexer)
    if context is None:
        whole: Tensor = own_class.forward(indexer, *args, **keywords)
        return whole
    given = inspect.signature(inspect.unwrap(own_class.forward)).bind(indexer, *args, **keywords).arguments
    keyword = cache_parameter(own_class.forward)
    if given.get(keyword) is not None:
        raise ValueError(f"{own_class.__name__} got a cache under a plan, which has none; run it through the plan's executor")
    pools = (mask := given.pop("attention_mask")).dim() == 2
    by_token = [name for name in _BY_TOKEN if name in given]
    every = slice(0, given["hidden_states"].shape[1])

    def scored(rows: slice, cache: _IndexCache, seen: Tensor) -> Tensor:
        own = {name: None if given[name] is None else given[name][:, rows] for name in by_token}
        if "position_embeddings" in given:
            own["position_embeddings"] = tuple(x[:, rows] for x in given["position_embeddings"])
        chosen: Tensor = own_class.forward(indexer, **own, attention_mask=seen, **{keyword: cache})
        return chosen

    made = _made_keys(indexer, lambda cache: scored(every, cache, mask))

    def choose(rows: slice, keys_1ND: Tensor, seen_1RN: Tensor) -> Tensor:
        cache = _IndexCache(keys_1ND, seen_1RN)
        # pools that a token does not see are -1, between those that it sees
        return scored(rows, cache, mask[:, rows]).sort(dim=-1, descending=True).values if pools else scored(rows, cache, seen_1RN)

    most = indexer.index_topk + (indexer.index_kpool - 1 if pools else 0)
    return choose_keys(made, most, indexer.n_heads, choose, indexer, context)


def _made_keys(indexer: Any, run: Callable[[_IndexCache], Any]) -> Tensor:
    """Returns the index keys that a run of the class's forward makes of this rank's tokens. run: calls it with a cache."""
    own = _IndexCache(None)
    try:
        run(own)
    except _KeysMade:
        assert own.keys is not None
        return own.keys
    raise RuntimeError(
        f"{type(indexer).__name__} chose keys without asking the cache for those of earlier tokens; use the newest version of "
        f"transformers that docs/models.md names"
    )


def _pooling_forward(
    indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, cache: Any = None
) -> Tensor:
    """The mask of tokens that each token sees, for an index that pools keys of several tokens.

    Under a plan it hides nothing, and attention gets the tokens by `pooled_choice`; see `choose_keys`. The class turns pooled
    keys by the rotary embeddings of their first tokens, which travel with the index keys.
    """
    context = carried(indexer)
    own_class = type(indexer)
    if context is None:
        whole: Tensor = own_class.forward(indexer, hidden_states, position_embeddings, attention_mask, cache)
        return whole
    if cache is not None:
        raise ValueError(f"{own_class.__name__} got a cache under a plan, which has none; run it through the plan's executor")
    keys = _made_keys(
        indexer, lambda cache: own_class.forward(indexer, hidden_states, position_embeddings, attention_mask, cache)
    )
    made = (keys, *position_embeddings)
    most = indexer.token_budget + indexer.compress_ratio - 1

    def choose(rows: slice, given_1NX: Tensor, seen_1RN: Tensor) -> Tensor:
        parts = zip(given_1NX.split([x.shape[-1] for x in made], dim=-1), made, strict=True)
        keys_1ND, *turns = (part.to(each.dtype) for part, each in parts)
        # the class takes the last ones for those of the queries
        turns = [torch.cat([each, x[:, rows]], dim=1) for each, x in zip(turns, position_embeddings, strict=True)]
        mask = own_class.forward(indexer, hidden_states[:, rows], tuple(turns), seen_1RN.unsqueeze(1), _IndexCache(keys_1ND))
        seen_1RN = mask.squeeze(1)
        chosen_1RK = seen_1RN.int().topk(min(most, seen_1RN.shape[2]), dim=-1).indices
        return chosen_1RK.masked_fill(~seen_1RN.gather(-1, chosen_1RK), -1)

    vars(indexer)[_POOLED] = choose_keys(torch.cat(made, dim=-1), most, indexer.index_n_heads, choose, indexer, context)
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden_states.device)


def pooled_choice(layer: Any) -> Tensor | None:
    """Hands over the keys that an index of pooled keys has chosen for this attention layer; None for other layers."""
    owner = layer if layer.indexer is None or _POOLED in vars(layer) else layer.indexer
    found: Tensor | None = vars(owner).pop(_POOLED, None)
    return found


class _KeysMade(Exception):
    """Ends a forward of an indexer as soon as it has made the index keys of its tokens."""


class _IndexCache:
    """Stands in for a cache of transformers in one forward of an indexer.

    whole_1ND: index keys of the whole document, which `update_indexer` returns; None: it takes the keys of the forward's tokens.
    seen_1RN: whether each token of the forward sees each of them.
    """

    def __init__(self, whole_1ND: Tensor | None, seen_1RN: Tensor | None = None) -> None:
        self._whole_1ND, self._seen_1RN = whole_1ND, seen_1RN
        self.keys = whole_1ND

    def update_indexer(self, keys_1RD: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the index keys for the forward to score."""
        if self._whole_1ND is None:
            self.keys = keys_1RD
            raise _KeysMade
        return self._whole_1ND

    @property
    def layers(self) -> _IndexCache:
        """Itself, in place of the caches of all layers."""
        return self

    def __getitem__(self, _: int) -> _IndexCache:
        return self

    def get_seq_length(self) -> Tensor:
        """Number of the document's tokens up to the forward's last one, as a scalar on its device."""
        assert self._seen_1RN is not None
        return self._seen_1RN[0, -1].sum()

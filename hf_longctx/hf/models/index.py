"""Makes indexers of a model choose keys within documents under plans, over all ranks of a group and all slices.

An indexer of an attention layer scores the earlier tokens of the row, and the layer attends to the best of them. The code of the
class does so for whole rows of one document. `IndexPatch` gives indexers and their attention layers new forwards. With a plan's
context, the class's own forward of the indexer runs for some tokens of one document at a time. It gets the index keys of all
tokens of the document from a cache, for which `runtime.states.chosen_keys` gathers them. Without a context both run as before.

The indexer runs without gradients in all these classes, so its weights get none, with and without a plan.
"""

from __future__ import annotations

from collections.abc import Callable
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
# attribute of an indexer of pooled keys: what it has chosen, until attention takes it
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
    with carrying([] if layer.indexer is None else [layer.indexer], longctx):
        return type(layer).forward(layer, *args, longctx=longctx, **keywords)


def _indexer_forward(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    **caches: Any,
) -> Tensor:
    """Positions in its document of the keys that each token sees, [1, T, K]; see `choose_keys`."""
    context = carried(indexer)
    if context is None:
        whole: Tensor = type(indexer).forward(
            indexer, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, **caches
        )
        return whole
    if any(each is not None for each in caches.values()):
        raise ValueError(f"{type(indexer).__name__} got a cache under a plan, which has none; run it through the plan's executor")

    keyword = cache_parameter(type(indexer).forward)

    def scored(rows: slice, cache: _IndexCache, mask_1RN: Tensor) -> Tensor:
        some = (x[:, rows] for x in (hidden_states, q_resid))
        turns = tuple(x[:, rows] for x in position_embeddings)
        chosen: Tensor = type(indexer).forward(indexer, *some, turns, mask_1RN, None, **{keyword: cache})
        return chosen

    every = slice(0, hidden_states.shape[1])
    made = _made_keys(indexer, lambda cache: scored(every, cache, attention_mask))

    def choose(rows: slice, keys_1ND: Tensor, seen_1RN: Tensor) -> Tensor:
        return scored(rows, _IndexCache(keys_1ND), seen_1RN)

    return choose_keys(made, indexer.index_topk, indexer.n_heads, choose, indexer, context)


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
    return vars(layer.indexer).pop(_POOLED, None) if layer.indexer is not None else None


class _KeysMade(Exception):
    """Ends a forward of an indexer as soon as it has made the index keys of its tokens."""


class _IndexCache:
    """Stands in for a cache of transformers in one forward of an indexer.

    whole_1ND: index keys of the whole document, which `update_indexer` returns; None: it takes the keys of the forward's tokens.
    """

    def __init__(self, whole_1ND: Tensor | None) -> None:
        self._whole_1ND = whole_1ND
        self.keys: Tensor | None = None

    def update_indexer(self, keys_1RD: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the index keys for the forward to score."""
        if self._whole_1ND is None:
            self.keys = keys_1RD
            raise _KeysMade
        return self._whole_1ND

"""Rotary embeddings whose frequencies depend on how long a document is ("dynamic", "longrope"), under plans.

transformers takes the length from the largest position of a forward: of a packed row that of the longest document, of a slice or
a shard that of the part which lies there; and "dynamic" goes on with the longest forward so far. Under a plan every token gets
the frequencies of its own document's whole length, as a new model gives them to the document alone. They are made by the
functions of transformers, and the class's own forward runs with them, on a copy of the embedding: what the embedding itself
remembers of earlier forwards neither comes in nor is changed.

An embedding learns the lengths from its parent, whose forward gets the chunk's context as attention does. Without a context it
runs as its class does. An embedding for which this does not give what its class gives a lone document is refused.

Sources: dynamic NTK scaling as in `transformers.modeling_rope_utils`; LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_longctx.runtime.attention.context import GroupContext

DOCUMENT_ROPE_TYPES = ("dynamic", "longrope")

# attributes of an embedding, and of its parent
_DOCUMENTS, _KNOWN, _HANDLES = "_longctx_documents", "_longctx_known_frequencies", "_longctx_rope_handles"
# frequencies that an embedding keeps: asking for new ones waits for the device
_MOST_KNOWN = 4096


def follow_documents(model: nn.Module) -> None:
    """Lets the model's rotary embeddings take frequencies by document wherever their parent gets a context. Idempotent."""
    for parent, embeddings in _by_parent(model):
        for embedding in embeddings:
            # bound to whatever module has it, so that a copy of the model follows documents too
            embedding.forward = MethodType(_forward, embedding)
        if _HANDLES not in vars(parent):
            handles = (
                parent.register_forward_pre_hook(_lend_documents, with_kwargs=True),
                parent.register_forward_hook(_take_back, always_call=True),
            )
            setattr(parent, _HANDLES, handles)


def ignore_documents(model: nn.Module) -> None:
    """Undoes `follow_documents`. Idempotent."""
    for parent, embeddings in _by_parent(model):
        for embedding in embeddings:
            for name in ("forward", _DOCUMENTS, _KNOWN):
                vars(embedding).pop(name, None)
        for handle in vars(parent).pop(_HANDLES, ()):
            handle.remove()


def document_rope_problems(model: nn.Module, rope_types: Iterable[str]) -> list[str]:
    """Why documents of `model`, whose config has `rope_types` of `DOCUMENT_ROPE_TYPES`, would get wrong frequencies, by name."""
    named = [(name, module, *each) for name, module in model.named_modules() for each in document_rope_types(module).items()]
    problems = [
        f"rope type {kind!r} depends on the length of a document, which no rotary embedding of {type(model).__name__} can be "
        f"told; use another rope type"
        for kind in sorted(set(rope_types) - {kind for *_, kind in named})
    ]
    problems += [
        f"rope type {kind!r} depends on the length of a document, which does not reach {name} ({type(module).__name__}) in a "
        f"container that runs nothing itself; use another rope type"
        for name, module, _, kind in named
        if type(model.get_submodule(name.rpartition(".")[0])).forward is nn.Module.forward
    ]
    return problems + [
        f"rope type {kind!r} depends on the length of a document, and {name} ({type(module).__name__}) does not follow it as "
        f"transformers' rotary embeddings do; use another rope type"
        for name, module, layer_type, kind in named
        if not _is_standard(module, kind, layer_type)
    ]


def document_rope_types(module: nn.Module) -> dict[str, str]:
    """Layer type (empty: all) to rope type, of a rotary embedding whose frequencies depend on a document's length."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        kinds = {"": kinds}
    if not isinstance(kinds, Mapping) or not hasattr(module, "compute_default_rope_parameters"):
        return {}
    return {layer_type: kind for layer_type, kind in kinds.items() if kind in DOCUMENT_ROPE_TYPES}


def forget_documents(model: nn.Module) -> None:
    """Gives the model's rotary embeddings what a new model's have, whatever lengths ran before."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        for layer_type in document_rope_types(module):
            prefix = f"{layer_type}_" if layer_type else ""
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def shorten_limits(model: nn.Module, limit: int) -> int:
    """Lets frequencies that depend on a document's length be scaled beyond `limit` tokens at the latest.

    The longest document whose are not, from then on; 0 where frequencies are the same for all. Changes the config too: for
    copies only.
    """
    longest = 0
    modules: list[Any] = list(model.modules())
    for module in modules:
        for layer_type, kind in document_rope_types(module).items():
            config, own = module.config, min(limit, _limit(module, kind, layer_type))
            longest = max(longest, own)
            if kind == "dynamic":
                config.max_position_embeddings = module.original_max_seq_len = own
            else:
                _parameters(module, layer_type)["original_max_position_embeddings"] = own
                # where a config has it, transformers writes it over the other one
                if hasattr(config, "original_max_position_embeddings"):
                    config.original_max_position_embeddings = own
            for known in (_KNOWN, f"{layer_type}_long_inv_freq" if layer_type else "long_inv_freq"):
                vars(module).pop(known, None)
    forget_documents(model)
    return longest


@dataclass(slots=True)
class _Lent:
    """A context's documents, for one forward of an embedding's parent."""

    documents: tuple[tuple[int, int], ...]
    was_used: bool = False


def _by_parent(model: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    for parent in list(model.modules()):
        if embeddings := [child for child in parent.children() if document_rope_types(child)]:
            yield parent, embeddings


def _lend_documents(parent: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    context: GroupContext | None = keywords.get("longctx")
    for embedding in parent.children():
        if context is not None and document_rope_types(embedding):
            setattr(embedding, _DOCUMENTS, _Lent(context.documents))


def _take_back(parent: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    taken: list[_Lent] = [vars(child).pop(_DOCUMENTS) for child in parent.children() if _DOCUMENTS in vars(child)]
    if not all(lent.was_used for lent in taken):
        raise RuntimeError(
            f"{type(parent).__name__} does not run its rotary embeddings itself, so that the lengths of documents do not reach "
            f"them; the model cannot be run"
        )


def _forward(embedding: Any, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any) -> Any:
    """The class's own forward, on the tokens of every document with the frequencies of its whole length."""
    lent: _Lent | None = vars(embedding).get(_DOCUMENTS)
    layer_type = keywords.get("layer_type", args[0] if args else None) or ""
    kind = document_rope_types(embedding).get(layer_type)
    if lent is None or kind is None:
        return type(embedding).forward(embedding, x, position_ids, *args, **keywords)
    documents, lent.was_used = lent.documents, True
    if (num_tokens := sum(count for count, _ in documents)) != position_ids.shape[-1]:
        raise RuntimeError(
            f"{type(embedding).__name__} got {position_ids.shape[-1]} positions of a chunk of {num_tokens} tokens; the model "
            f"cuts or repeats them, so it cannot be run"
        )
    limit = _limit(embedding, kind, layer_type)
    runs = [
        (length, sum(count for count, _ in run))
        for length, run in groupby(documents, key=lambda document: _length_class(kind, document[1], limit))
    ]
    bounds = pairwise(accumulate((count for _, count in runs), initial=0))
    return _joined(
        [
            type(embedding).forward(
                _at_length(embedding, kind, layer_type, length, x.device), x, position_ids[..., start:stop], *args, **keywords
            )
            for (length, _), (start, stop) in zip(runs, bounds, strict=True)
        ]
    )


def _parameters(embedding: Any, layer_type: str) -> dict[str, Any]:
    parameters: dict[str, Any] = embedding.config.rope_parameters
    return parameters[layer_type] if layer_type else parameters


def _limit(embedding: Any, kind: str, layer_type: str) -> int:
    """The longest document whose frequencies are those of a new embedding."""
    if kind == "dynamic":
        return int(embedding.original_max_seq_len)
    return int(_parameters(embedding, layer_type)["original_max_position_embeddings"])


def _length_class(kind: str, length: int, limit: int) -> int:
    """A length with the same frequencies: all up to the limit have the same, and beyond it those of longrope."""
    return max(limit, length) if kind == "dynamic" else limit + (length > limit)


def _at_length(embedding: Any, kind: str, layer_type: str, length: int, device: torch.device) -> Any:
    """`embedding` with the frequencies of a document of `length` tokens, which stay so."""
    known: dict[tuple[str, int, torch.device], Tensor] = vars(embedding).setdefault(_KNOWN, {})
    if (key := (layer_type, length, device)) not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = _frequencies(embedding, kind, layer_type, length, device)
    fixed = copy.copy(embedding)
    # not the dictionary of the embedding itself
    vars(fixed)["_buffers"] = dict(vars(embedding)["_buffers"])
    setattr(fixed, f"{layer_type}_inv_freq" if layer_type else "inv_freq", known[key])
    fixed.rope_type = {**embedding.rope_type, layer_type: "default"} if layer_type else "default"
    return fixed


def _frequencies(embedding: Any, kind: str, layer_type: str, length: int, device: torch.device) -> Tensor:
    """As a new embedding makes them in a forward up to position `length` - 1."""
    if length <= _limit(embedding, kind, layer_type):
        original: Tensor = getattr(embedding, f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq")
        return original.to(device)
    # the length is a tensor where it takes part in the numbers, so that they are rounded alike
    tokens = torch.tensor(length, device=device) if kind == "dynamic" else length
    frequencies: Tensor
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](embedding.config, device, seq_len=tokens, layer_type=layer_type or None)
    return frequencies


def _joined(parts: list[Any]) -> Any:
    """By tokens, the last but one dimension: cosines and sines, or complex numbers."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=-2)
    return tuple(torch.cat(column, dim=-2) for column in zip(*parts, strict=True))


def _is_standard(embedding: Any, kind: str, layer_type: str) -> bool:
    """Whether `_forward` gives a slice of a document what the class's own forward gives it in the lone document.

    On both sides of the limit.
    """
    if getattr(embedding, f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq", None) is None:
        return False
    fresh = copy.deepcopy(embedding, {id(embedding.config): embedding.config})
    for name in ("forward", _DOCUMENTS, _KNOWN):
        vars(fresh).pop(name, None)
    original = getattr(fresh, f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq")
    if original.is_meta:
        return True
    limit, device = _limit(fresh, kind, layer_type), original.device
    keywords = {"layer_type": layer_type} if layer_type else {}
    for length in (limit, limit + 1, 2 * limit):
        forget_documents(fresh)
        x, positions = torch.zeros(1, device=device), torch.tensor([[0, 1, length - 1]], device=device)
        plain = _columns(type(fresh).forward(fresh, x, positions, **keywords))
        fixed = _at_length(fresh, kind, layer_type, _length_class(kind, length, limit), device)
        # without the last position
        ours = _columns(type(fresh).forward(fixed, x, positions[..., :2], **keywords))
        if not all(torch.equal(alone[..., :2, :], sliced) for alone, sliced in zip(plain, ours, strict=True)):
            return False
    return True


def _columns(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)

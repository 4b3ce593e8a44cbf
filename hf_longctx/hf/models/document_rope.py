"""Makes rotary embeddings whose frequencies depend on a document's length ("dynamic", "longrope") correct under plans.

transformers takes the length from the largest position in a forward. In a packed row, that gives the length of the longest
document; in a slice or a shard, it gives the largest position present there; and "dynamic" also remembers the longest forward so
far. Under a plan, every token gets the frequencies for the whole length of its own document: those that a new model would use if
it ran that document alone. transformers' own functions compute these frequencies. The class's own forward then runs on a copy of
the embedding that holds them, so that the embedding's memory of earlier forwards is neither used nor changed.

An embedding gets the lengths from its parent module, whose forward receives the chunk's context just as attention does. Without
a context the embedding runs unchanged. An embedding is refused if its outputs under a plan would differ from those of its own
class for a document alone.

Sources: dynamic NTK scaling as in `transformers.modeling_rope_utils`; LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_longctx.hf.models.forwards import give, take
from hf_longctx.hf.models.towers import text_part
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import is_ours, own_forward

DOCUMENT_ROPE_TYPES = ("dynamic", "longrope")

# attributes that are set on an embedding (_DOCUMENTS, _KNOWN) and on its parent (_HANDLES)
_DOCUMENTS, _KNOWN, _HANDLES = "_longctx_documents", "_longctx_known_frequencies", "_longctx_rope_handles"
# most frequency tensors that an embedding caches: making new ones waits for the device
_MOST_KNOWN = 4096


class DocumentRopePatch:
    """Lets rotary embeddings use each document's own frequencies whenever their parent gets a context."""

    def needed(self, model: nn.Module) -> bool:
        """Whether the text model has such embeddings."""
        return any(True for _ in _by_parent(text_part(model)))

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for a forward of others."""
        for parent, embeddings in _by_parent(text_part(model)):
            for embedding in embeddings:
                give(embedding, _forward)
            if _HANDLES not in vars(parent):
                handles = (
                    parent.register_forward_pre_hook(_lend_documents, with_kwargs=True),
                    parent.register_forward_hook(_take_back, always_call=True),
                )
                setattr(parent, _HANDLES, handles)

    def undo(self, model: nn.Module) -> None:
        """Forgets known frequencies, too."""
        for parent, embeddings in _by_parent(model):
            for embedding in embeddings:
                take(embedding, _forward)
                for name in (_DOCUMENTS, _KNOWN):
                    vars(embedding).pop(name, None)
            for handle in vars(parent).pop(_HANDLES, ()):
                handle.remove()


def document_rope_problems(model: nn.Module, rope_types: Iterable[str]) -> list[str]:
    """Returns why documents would get wrong frequencies, naming the embedding; empty if all get the right ones.

    rope_types: those of the model's config that are in `DOCUMENT_ROPE_TYPES`.
    """
    named = [(name, module, *each) for name, module in model.named_modules() for each in document_rope_types(module).items()]
    problems = [
        f"rope type {kind!r} depends on the length of a document, but no rotary embedding of {type(model).__name__} accepts "
        f"lengths; use another rope type"
        for kind in sorted(set(rope_types) - {kind for *_, kind in named})
    ]
    problems += [
        f"rope type {kind!r} depends on the length of a document, but {name} ({type(module).__name__}) has a forward that is not "
        f"its class's, which plans would leave out; remove it (del module.forward)"
        for name, module, _, kind in named
        if (forward := own_forward(module)) is not None and not is_ours(forward)
    ]
    problems += [
        f"rope type {kind!r} depends on the length of a document, which does not reach {name} ({type(module).__name__}), since "
        f"its parent has no forward; use another rope type"
        for name, module, _, kind in named
        if type(model.get_submodule(name.rpartition(".")[0])).forward is nn.Module.forward
    ]
    return problems + [
        f"rope type {kind!r} depends on the length of a document, and {name} ({type(module).__name__}) does not compute its "
        f"frequencies like transformers' rotary embeddings; use another rope type"
        for name, module, layer_type, kind in named
        if not _is_standard(module, kind, layer_type)
    ]


def document_rope_types(module: nn.Module) -> dict[str, str]:
    """Layer type ("": all layers) -> rope type, for rope types whose frequencies depend on a document's length."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        kinds = {"": kinds}
    if not isinstance(kinds, Mapping) or not hasattr(module, "compute_default_rope_parameters"):
        return {}
    return {layer_type: kind for layer_type, kind in kinds.items() if kind in DOCUMENT_ROPE_TYPES}


def forget_documents(model: nn.Module) -> None:
    """Resets the model's rotary embeddings to their state in a new model, whatever lengths ran before."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        for layer_type in document_rope_types(module):
            prefix = f"{layer_type}_" if layer_type else ""
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def shorten_limits(model: nn.Module, limit: int) -> int:
    """Lowers to at most `limit` tokens the document length above which frequencies are scaled.

    Returns the length of the longest document that is then not scaled; 0 if no frequencies depend on length. Use this on copies
    of a model only, since it changes the config too.
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
                # transformers overwrites the parameter with this field of the config, if the config has it
                if hasattr(config, "original_max_position_embeddings"):
                    config.original_max_position_embeddings = own
            for known in (_KNOWN, f"{layer_type}_long_inv_freq" if layer_type else "long_inv_freq"):
                vars(module).pop(known, None)
    forget_documents(model)
    return longest


@dataclass(slots=True)
class _Lent:
    """Documents of a context that an embedding has during one forward of its parent. was_used: whether it has read them."""

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
            f"{type(parent).__name__} does not run its rotary embeddings itself, so document lengths do not reach them and plans "
            f"cannot run this model; use another rope type"
        )


def _forward(embedding: Any, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any) -> Any:
    """Runs the class's own forward on the tokens of each document, with the frequencies for the document's whole length."""
    lent: _Lent | None = vars(embedding).get(_DOCUMENTS)
    layer_type = keywords.get("layer_type", args[0] if args else None) or ""
    kind = document_rope_types(embedding).get(layer_type)
    if lent is None or kind is None:
        return type(embedding).forward(embedding, x, position_ids, *args, **keywords)
    documents, lent.was_used = lent.documents, True
    if (num_tokens := sum(count for count, _ in documents)) != position_ids.shape[-1]:
        raise RuntimeError(
            f"{type(embedding).__name__} got {position_ids.shape[-1]} positions for a chunk of {num_tokens} tokens, since the "
            f"model cuts or repeats positions, so plans cannot run it; use another rope type"
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
    """Length of the longest document whose frequencies are not scaled, so that a new embedding has them."""
    if kind == "dynamic":
        return int(embedding.original_max_seq_len)
    return int(_parameters(embedding, layer_type)["original_max_position_embeddings"])


def _length_class(kind: str, length: int, limit: int) -> int:
    """A length that stands for all lengths with equal frequencies.

    All lengths up to the limit have equal frequencies; with longrope, all lengths above the limit have equal ones too.
    """
    return max(limit, length) if kind == "dynamic" else limit + (length > limit)


def _at_length(embedding: Any, kind: str, layer_type: str, length: int, device: torch.device) -> Any:
    """Copy of `embedding` with fixed frequencies for a document of `length` tokens."""
    known: dict[tuple[str, int, torch.device], Tensor] = vars(embedding).setdefault(_KNOWN, {})
    if (key := (layer_type, length, device)) not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = _frequencies(embedding, kind, layer_type, length, device)
    fixed = copy.copy(embedding)
    # the copy needs its own dictionary of buffers
    vars(fixed)["_buffers"] = dict(vars(embedding)["_buffers"])
    setattr(fixed, f"{layer_type}_inv_freq" if layer_type else "inv_freq", known[key])
    fixed.rope_type = {**embedding.rope_type, layer_type: "default"} if layer_type else "default"
    return fixed


def _frequencies(embedding: Any, kind: str, layer_type: str, length: int, device: torch.device) -> Tensor:
    """Frequencies that a new embedding computes in a forward whose last position is `length` - 1."""
    if length <= _limit(embedding, kind, layer_type):
        original: Tensor = getattr(embedding, f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq")
        return original.to(device)
    # if it enters the formula, it is a tensor, so that results are rounded as in transformers' forward
    tokens = torch.tensor(length, device=device) if kind == "dynamic" else length
    frequencies: Tensor
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](embedding.config, device, seq_len=tokens, layer_type=layer_type or None)
    return frequencies


def _joined(parts: list[Any]) -> Any:
    """Concatenates outputs (cosines and sines, or complex numbers) along tokens, the last but one dimension."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=-2)
    return tuple(torch.cat(column, dim=-2) for column in zip(*parts, strict=True))


def _is_standard(embedding: Any, kind: str, layer_type: str) -> bool:
    """Whether `_forward` on a slice of a document gives the values of the class's own forward on the whole document alone.

    Both are compared for documents at the limit and above it.
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
        # a slice without the document's last position
        ours = _columns(type(fresh).forward(fixed, x, positions[..., :2], **keywords))
        if not all(torch.equal(alone[..., :2, :], sliced) for alone, sliced in zip(plain, ours, strict=True)):
            return False
    return True


def _columns(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)

"""Runs attention that a class writes out in its own file, without transformers' common interface, over a sequence group.

Such classes drop the plan's context on the way to their attention. So `models.attention.patch_model` gives the model, its
decoder, its layers and its attention a forward of their own, each of which runs that of its class. The first two take the
context and hand it to the layers; a layer passes it on as a keyword, so that a replay of the layer has it too. Attention then
runs in one of two ways: its method that computes outputs from queries, keys and values is replaced by ours, or it gets a cache
of ours (`scores`).

Biases that grow with a token's index (ALiBi) count from the start of the row in these classes. Under a plan they are made anew
from positions in documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.hf.models.context.forwards import cache_parameter, holds, is_made_by, without_renames
from hf_longctx.hf.models.older.scores import GroupCache, OwnCall, StandIn
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import is_ours, is_written_by, with_globals
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern

# attribute of a module: the context of the forward that is running
_CONTEXT = "_longctx_context"
# name of transformers' common interface, as forwards that call it know it
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# attribute of a model whose forwards are ours
_SERVED = "_longctx_own_attention"


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """A model class that writes its attention out itself.

    attention, layer: names of its attention class and its decoder layer class. takes_cache: attention gets a cache of ours;
    otherwise its method `_attn` is replaced. divisor: attribute by which that method divides scores; empty if it does not.
    dropout: attribute of the module by which that method drops weights. keeps_mask: attention cannot go without a mask; that of
    plans is a single number.
    """

    attention: str
    layer: str
    takes_cache: bool = False
    divisor: str = ""
    dropout: str = ""
    keeps_mask: bool = False


OWN_ATTENTION = {
    "BloomForCausalLM": OwnAttention("BloomAttention", "BloomBlock", takes_cache=True, keeps_mask=True),
    "CodeGenForCausalLM": OwnAttention("CodeGenAttention", "CodeGenBlock", divisor="scale_attn", dropout="attn_dropout"),
    "FalconForCausalLM": OwnAttention("FalconAttention", "FalconDecoderLayer", takes_cache=True, keeps_mask=True),
    "GPTJForCausalLM": OwnAttention("GPTJAttention", "GPTJBlock", divisor="scale_attn", dropout="attn_dropout"),
    "GPTNeoForCausalLM": OwnAttention("GPTNeoSelfAttention", "GPTNeoBlock", dropout="attn_dropout"),
    "GPTNeoXJapaneseForCausalLM": OwnAttention(
        "GPTNeoXJapaneseAttention", "GPTNeoXJapaneseLayer", divisor="norm_factor", dropout="attention_dropout"
    ),
    "MegatronBertForCausalLM": OwnAttention("MegatronBertSelfAttention", "MegatronBertLayer", takes_cache=True),
    "MptForCausalLM": OwnAttention("MptAttention", "MptBlock", takes_cache=True),
    "RemBertForCausalLM": OwnAttention("RemBertSelfAttention", "RemBertLayer", takes_cache=True),
    "RoFormerForCausalLM": OwnAttention("RoFormerSelfAttention", "RoFormerLayer", takes_cache=True),
}
_LAYERS = tuple(own.layer for own in OWN_ATTENTION.values())
_ATTENTIONS = {own.attention: own for own in OWN_ATTENTION.values()}
# embeddings of positions that are counted from the start of the row
_ROW_POSITIONS = ("RoFormerSinusoidalPositionalEmbedding",)
# methods of decoders, and functions in their modules, that make biases [H, 1, keys] for a mask, or for a number of keys
_BIASES_OF_MASK, _BIASES_OF_LENGTH = "build_alibi_tensor", "build_mpt_alibi_tensor"


def own_attention(model: nn.Module) -> OwnAttention | None:
    """Facts about the attention of a model's class, if that writes it out itself; None for other classes.

    Newer versions of transformers moved some of these classes to its common interface.
    """
    own = OWN_ATTENTION.get(_class_name(model))
    if own is None:
        return None
    attention = next((module for module in model.modules() if _class_name(module) == own.attention), None)
    return None if attention is not None and _uses_interface(attention) else own


def _uses_interface(attention: nn.Module) -> bool:
    """Whether an attention class calls the function that is registered under the name in the model's config."""
    return _INTERFACE in without_renames(type(attention).forward).__code__.co_names


def _class_name(module: nn.Module) -> str:
    # sharding puts a class of torch in front of the module's own
    return type(module).__name__.removeprefix("FSDP")


def is_served(model: Any) -> bool:
    """Whether the forwards of `model` are ours."""
    return isinstance(model, nn.Module) and _SERVED in vars(model)


def serve_attention(model: Any) -> None:
    """Lets the attention of a model in `OWN_ATTENTION` run under plans; leaves other models as they are. Idempotent.

    Raises ValueError if the model has a forward that is not its class's.
    """
    if own_attention(model) is None or is_served(model):
        return
    own = vars(model).get("forward")
    # accelerate has wrapped ours in an earlier run
    is_kept = holds(_with_own_signature, own)
    if own is not None and not is_kept:
        raise ValueError(
            f"the forward of {type(model).__name__} was replaced, so that plans would not reach its attention; remove it (del "
            f"model.forward), and if mixed precision of accelerate has done it, use LongContextTrainer or `attach`"
        )
    for module, name, function in _methods(model):
        if module is model and is_kept:
            continue
        # plain methods, so that they work on a copy of the model too
        vars(module)[name] = MethodType(function, module)
    vars(model)[_SERVED] = True


def own_attention_problems(model: Any) -> list[str]:
    """Problem with a method of a user in place of which plans would run their own; empty if there is none."""
    if own_attention(model) is None:
        return []
    names = {module: name for name, module in model.named_modules()}
    for module, name, _ in _methods(model):
        own = vars(module).get(name)
        is_changed = module is not model and own is not None and not is_ours(own)
        if is_changed or not is_written_by(getattr(type(module), name), "transformers", "torch"):
            return [
                f"the {name} of {names[module] or 'the model'} ({type(module).__name__}) was replaced, and plans run their own "
                f"there; remove it, or hook the module (register_forward_hook)"
            ]
    return []


def restore_own_attention(model: Any) -> None:
    """Undoes `serve_attention`. Idempotent; leaves the model's forward where accelerate has wrapped it in the meantime."""
    if is_served(model):
        for module, name, _ in _methods(model):
            if module is not model or is_made_by(_with_own_signature, vars(model).get(name)):
                vars(module).pop(name, None)
        del vars(model)[_SERVED]


def _methods(model: Any) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Every method that a model gets: its module, its name and the function."""
    decoder = model.base_model
    yield model, "forward", _with_own_signature(model, _model_forward)
    yield decoder, "forward", _with_own_signature(decoder, _decoder_forward)
    for name, function in ((_BIASES_OF_MASK, _biases_of_mask), (_BIASES_OF_LENGTH, _biases_of_length)):
        if hasattr(type(decoder), name):
            yield decoder, name, function
    for module in decoder.modules():
        kind = _class_name(module)
        if kind in _LAYERS:
            yield module, "forward", _layer_forward
        elif kind in _ATTENTIONS:
            yield (module, "forward", _attention_forward) if _ATTENTIONS[kind].takes_cache else (module, "_attn", _attn)
        elif kind in _ROW_POSITIONS:
            yield module, "forward", _positions_forward


def _with_own_signature(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with name and signature of the forward of the module's class, which trainers read."""

    @wraps(type(module).forward)
    def forward(this: Any, *args: Any, **keywords: Any) -> Any:
        return function(this, *args, **keywords)

    return forward


@contextmanager
def _carrying(modules: Iterable[nn.Module], context: GroupContext) -> Iterator[None]:
    """Context in which these modules find a plan's context."""
    carriers = list(modules)
    for module in carriers:
        vars(module)[_CONTEXT] = context
    try:
        yield
    finally:
        for module in carriers:
            vars(module).pop(_CONTEXT, None)


def _context_of(module: nn.Module) -> GroupContext | None:
    return vars(module).get(_CONTEXT)


def _model_forward(model: Any, *args: Any, longctx: GroupContext | None = None, **keywords: Any) -> Any:
    if longctx is None:
        return type(model).forward(model, *args, **keywords)
    # these classes do not pass it on
    with _carrying([model.base_model], longctx):
        return type(model).forward(model, *args, **keywords)


def _decoder_forward(decoder: Any, *args: Any, longctx: GroupContext | None = None, **keywords: Any) -> Any:
    # a pipeline stage without the head calls the decoder itself
    context = _context_of(decoder) or longctx
    if context is None:
        return type(decoder).forward(decoder, *args, **keywords)
    carriers = [module for module in decoder.modules() if _class_name(module) in (*_LAYERS, *_ROW_POSITIONS)]
    forward = type(decoder).forward
    if _BIASES_OF_MASK in (names := inspect.unwrap(forward).__globals__) and not hasattr(type(decoder), _BIASES_OF_MASK):
        biases = partial(_biases, context, names[_BIASES_OF_MASK])
        forward = with_globals(inspect.unwrap(forward), {_BIASES_OF_MASK: biases})
    with _carrying([decoder, *carriers], context):
        return forward(decoder, *args, **keywords)


def _layer_forward(layer: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of a decoder layer's class, checkpointed where that is, whose attention finds the context."""
    context = _context_of(layer)
    if context is None:
        return type(layer).forward(layer, *args, **keywords)
    forward = partial(_class_forward, layer, longctx=context, **keywords)
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        return layer._gradient_checkpointing_func(forward, *args)
    return forward(*args)


def _class_forward(layer: nn.Module, *args: Any, longctx: GroupContext, **keywords: Any) -> Any:
    with _carrying((module for module in layer.modules() if _class_name(module) in _ATTENTIONS), longctx):
        # without the wrapper of transformers that checkpoints a forward: that is done by now
        return inspect.unwrap(type(layer).forward)(layer, *args, **keywords)


def _attention_forward(attention: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of an attention class, with a cache that hands its keys, values and queries to plans."""
    context = _context_of(attention)
    if context is None:
        return type(attention).forward(attention, *args, **keywords)
    own, call = _ATTENTIONS[_class_name(attention)], OwnCall(attention, context)
    parameter = cache_parameter(type(attention).forward)
    given = keywords | {parameter: GroupCache(call)} | ({} if own.keeps_mask else {"attention_mask": None})
    output = type(attention).forward(attention, *args, **given)
    call.check()
    # weights are no tensors here
    return tuple(None if isinstance(part, StandIn) else part for part in output)


def _attn(attention: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
    """Outputs [1, H, T, D] of an attention class's own method, and no weights."""
    context = _context_of(attention)
    if context is None:
        return type(attention)._attn(attention, query, key, value, attention_mask)
    own = _ATTENTIONS[_class_name(attention)]
    is_local = getattr(attention, "attention_type", "") == "local"
    pattern = AttentionPattern(window=attention.config.window_size) if is_local else CAUSAL
    scale = 1 / getattr(attention, own.divisor) if own.divisor else 1.0
    rate = getattr(attention, own.dropout).p if attention.training else 0.0
    return OwnCall(attention, context, pattern, key, value).attend(query, scale, dropout=rate), None


def _positions_forward(embedding: Any, *args: Any, **keywords: Any) -> Tensor:
    """Embeddings of positions in documents, where the class counts from the start of the row."""
    context = _context_of(embedding)
    if context is None:
        own: Tensor = type(embedding).forward(embedding, *args, **keywords)
        return own
    assert context.position_ids is not None
    found: Tensor = type(embedding).forward(embedding, *args, position_ids=context.position_ids.view(-1))
    return found


def _biases_of_mask(decoder: Any, mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Biases [H, 1, T] of the class's own method, by position in a document."""
    own = partial(getattr(type(decoder), _BIASES_OF_MASK), decoder)
    context = _context_of(decoder)
    if mask.numel() == 1 and context is None:
        # the mask of plans, on a decoder without layers
        mask = mask.view(1, 1).long()
    found: Tensor = own(mask, num_heads, dtype) if context is None else _biases(context, own, mask, num_heads, dtype)
    return found


def _biases_of_length(decoder: Any, num_heads: int, length: int, *args: Any, **keywords: Any) -> Tensor:
    """Biases [H, 1, T] of the class's own method, by position in a document."""
    context, own = _context_of(decoder), partial(getattr(type(decoder), _BIASES_OF_LENGTH), decoder)
    if context is None:
        found: Tensor = own(num_heads, length, *args, **keywords)
        return found
    if (longest := _longest(context)) > length:
        raise ValueError(f"a document has {longest} tokens, but {type(decoder).__name__} makes biases for {length}; shorten it")
    # they count from the end of `length` keys, a number that is the same in every slice and on every rank
    return _by_position(own(num_heads, length, *args, **keywords), context)


def _biases(context: GroupContext, own: Callable[..., Tensor], mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    ones_1N = torch.ones(1, _longest(context), dtype=torch.int64, device=mask.device)
    return _by_position(own(ones_1N, num_heads, dtype=dtype), context)


def _longest(context: GroupContext) -> int:
    return max(whole for _, whole in context.documents)


def _by_position(bias_H1N: Tensor, context: GroupContext) -> Tensor:
    """Entries of biases by position, for this rank's tokens; a softmax does not notice that they count on from elsewhere."""
    assert context.position_ids is not None
    return bias_H1N.index_select(-1, context.position_ids.view(-1))

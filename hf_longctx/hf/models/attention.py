"""Registers an attention function with transformers, so that layers attend over their sequence group under a plan.

The start of a run applies `AttentionSwitch`. From then on every attention layer of the model calls `longctx_attention`. With a
plan's context this function attends over the sequence group; without one it calls the model's former implementation. The
registered name says which one ("longctx": sdpa, "longctx_eager": eager). The names do not contain "flash", because transformers
would take such a name for a kernel and try to download it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.compressed import compressed_attention
from hf_longctx.hf.models.dropout import tokens_of
from hf_longctx.hf.models.forwards import give, take
from hf_longctx.hf.models.index import chooses_by_plan, pooled_choice
from hf_longctx.hf.models.own_attention import own_attention
from hf_longctx.hf.models.states import mixers_of, num_calls
from hf_longctx.hf.models.towers import num_text_layers, text_part
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import LayerCall, sequence_parallel_attention
from hf_longctx.runtime.core.binding import is_written_by
from hf_longctx.runtime.core.dropout import SITE, DropoutSite
from hf_longctx.runtime.tiles.patterns import AttentionPattern

NAMES = {"sdpa": "longctx", "eager": "longctx_eager"}
# owner of the kernels that transformers itself loads
_KERNELS = "kernels-community/"
# name for models that write out their attention themselves or have none, and so choose no function
OWN_NAME = "longctx_own"
# attributes of a switched text model: its former implementation, and whether it is one that chooses no function
_FORMER, _IS_OWN = "_longctx_former_attention", "_longctx_switched"

# method of decoders that make a mask of all tokens by all tokens
_MASK_METHOD = "_prepare_decoder_attention_mask"

# keywords that do not affect attention: with any value (_INERT), or with the value given here (_HARMLESS)
_INERT = ("input_ids", "position_ids", "use_cache", "cache_position", "return_dict", "shift_labels", "num_items_in_batch")
_HARMLESS = {"is_causal": True, "output_attentions": False, "output_hidden_states": False, "output_router_logits": False}
_WINDOW, _SINKS, _SOFTCAP, _CHOSEN = "sliding_window", "s_aux", "softcap", "indices"
_SUPPORTED = f"windows ({_WINDOW}), chunks (attention_chunk_size of the config), sinks ({_SINKS}) and caps of scores ({_SOFTCAP})"


class AttentionSwitch:
    """Switches a model to the registered attention function that falls back to its present implementation."""

    def needed(self, model: nn.Module) -> bool:
        """Whether the text model cannot run plans yet."""
        return not runs_plans(model)

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for a model that ignores the switch."""
        if not self.needed(model):
            return
        text: PreTrainedModel = text_part(model)
        vars(text)[_FORMER] = text.config._attn_implementation
        if own_attention(text) is not None or ((mixers := mixers_of(text)) and num_calls(text) == len(mixers)):
            # no attention of the model asks for a registered function
            vars(text)[_IS_OWN] = True
            return
        for fallback, name in NAMES.items():
            AttentionInterface.register(name, partial(longctx_attention, fallback=fallback))
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[fallback])
        own = NAMES[_fallback_of(text)]
        text.set_attn_implementation(own)
        for module in text.modules():
            if hasattr(type(module), _MASK_METHOD):
                give(module, _own_mask, _MASK_METHOD)
        if text.config._attn_implementation != own:
            raise ValueError(
                f"{type(model).__name__} ignores set_attn_implementation, so plans cannot run it; use another model class"
            )

    def undo(self, model: nn.Module) -> None:
        """Restores the implementation in the config, since `set_attn_implementation` would look for a kernel again."""
        text = text_part(model)
        vars(text).pop(_IS_OWN, None)
        if (name := vars(text).pop(_FORMER, None)) is None:
            return
        for each in (module for module in text.modules() if isinstance(module, PreTrainedModel)):
            if each.config._attn_implementation in NAMES.values():
                each.config._attn_implementation = name
            take(each, _own_mask, _MASK_METHOD)


def _own_mask(decoder: Any, mask: Tensor | None, shape: Any, hidden: Tensor, *args: Any) -> Tensor | None:
    """The mask of a decoder that makes one itself; one with four dimensions stays as it is, as in other classes.

    Made in fp32 for wider hidden states, since the class cannot fill a mask with the least number of fp64.
    """
    if mask is not None and mask.dim() == 4:
        return mask
    hidden = hidden if hidden.dtype.itemsize < 4 else hidden.float()
    made: Tensor | None = getattr(type(decoder), _MASK_METHOD)(decoder, mask, shape, hidden, *args)
    return made


def _fallback_of(text: PreTrainedModel) -> str:
    """The implementation for forwards outside of plans: the model's own if it runs with any dtype on any device."""
    current: str = text.config._attn_implementation
    # transformers' sdpa leaves out sinks and caps of scores; classes say so, but some with caps only in later versions than 5.17
    is_plain = text._supports_sdpa and not getattr(text.config, "attn_logit_softcapping", None)
    return current if current in NAMES else "sdpa" if is_plain else "eager"


def attention_problems(model: nn.Module) -> list[str]:
    """Problem with an attention function of other code, which may compute something else than attention; empty if none."""
    text = text_part(model)
    name = getattr(getattr(text, "config", None), "_attn_implementation", None)
    if name is None or name in NAMES.values():
        return []
    remedy = "load the model with attn_implementation='sdpa'; if the function computes something else, plans cannot run it"
    # transformers still accepts names of its functions for paged caches
    name = name.removeprefix("paged|")
    if "/" in name:
        if name.startswith(_KERNELS):
            return []
        return [f"attention implementation {name!r} is a kernel of others, in whose place plans would run their own; {remedy}"]
    if name == "eager":
        functions = {
            module.eager_attention_forward
            for module in (sys.modules[name] for name in {type(each).__module__ for each in text.modules()} & sys.modules.keys())
            if hasattr(module, "eager_attention_forward")
        }
    else:
        functions = {ALL_ATTENTION_FUNCTIONS.get(name)} - {None}
        if not functions:
            return [f"attention implementation {name!r} is not registered with transformers; {remedy}"]
    if other := next((function for function in functions if not is_written_by(function, "transformers", "torch")), None):
        words = getattr(other, "__qualname__", type(other).__name__)
        return [
            f"attention implementation {name!r} is a function of your own ({words}), "
            f"in whose place plans would run their own attention; {remedy}"
        ]
    return []


def attention_line(model: Any) -> str:
    """Says what replaces the attention implementation that a user chose; empty if that runs in all forwards without a plan."""
    text: Any = text_part(model)
    if (name := attention_name(model)) in (None, *NAMES, *NAMES.values(), OWN_NAME):
        return ""
    return (
        f"attn_implementation={name!r}: plans run their own attention in its place, which is exact, and forwards outside of "
        f"plans {_fallback_of(text)!r}; the model has {name!r} again when the run ends"
    )


def attention_name(model: Any) -> str | None:
    """Name of the attention implementation that `model` uses now; None if it is not a transformers model."""
    part = text_part(model) if isinstance(model, nn.Module) else model
    name: str | None = getattr(getattr(part, "config", None), "_attn_implementation", None)
    return OWN_NAME if hasattr(part, _IS_OWN) else name


def runs_plans(model: Any) -> bool:
    """Whether `patch_model` has switched `model`, or part of it."""
    return attention_name(model) in (*NAMES.values(), OWN_NAME)


def num_attention_layers(model: PreTrainedModel) -> int:
    """Number of calls in one forward that get the plan: of attention, and of mixers with a state."""
    text = text_part(model)
    if mixers_of(text):
        return num_calls(text)
    return num_text_layers(model)


def longctx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    longctx: GroupContext | None = None,
    fallback: str = "sdpa",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with transformers' interface: query [B, H, T, D], key and value [B, G, T, D]; returns [B, T, H, D].

    `longctx` is the chunk's context; a call without it goes to `fallback` unchanged. Nothing is ignored silently: raises
    ValueError for any keyword that would change attention and is not implemented.
    """
    # some classes pass their rate in evaluation, too
    dropout = dropout if module.training else 0.0
    site: DropoutSite | None = vars(module).get(SITE)
    if longctx is None:
        if (chosen := kwargs.pop(_CHOSEN, None)) is not None:
            attention_mask = _only_chosen(attention_mask, chosen, query, key)
        if dropout and site is not None and (tokens := tokens_of(site)) is not None:
            rule = partial(tokens.drop_weights, rate=dropout, name=site.name)
            return _dropped_attention(module, query, key, value, attention_mask, rule, scaling=scaling, **kwargs), None
        function = _fallback_function(module, fallback)
        output: tuple[Tensor, Tensor | None] = function(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return output
    name = type(module).__name__
    if dropout and site is None:
        raise ValueError(
            f"{name} drops attention weights at a rate of {dropout}, but its config did not say so when the run started; set the "
            f"rate in the config before the trainer is made"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"{name} lets tokens see later ones (is_causal=False), but only causal attention is supported; use a causal model"
        )
    if attention_mask is not None and attention_mask.numel() > 1:
        raise ValueError(
            f"{name} makes an attention mask of its own, of shape {tuple(attention_mask.shape)}, which would be ignored; use a "
            f"model without one"
        )
    # positions chosen by the forward of another class would be positions in rows, and are refused below
    chosen = kwargs.pop(_CHOSEN, None) if (is_chosen := "forward" in vars(module) and chooses_by_plan(module)) else None
    if is_chosen and chosen is None and (chosen := pooled_choice(module)) is None:
        raise RuntimeError(
            f"{name} passes no chosen keys to attention; use the newest version of transformers that docs/models.md names"
        )
    for keyword, setting in kwargs.items():
        harmless = setting is None or keyword in _INERT or (keyword in _HARMLESS and setting is _HARMLESS[keyword])
        if not harmless and keyword not in (_WINDOW, _SINKS, _SOFTCAP):
            raise ValueError(
                f"{name} passes {keyword}={setting!r} to attention, which is not supported yet and would change the result; use "
                f"a model without it. Causal attention, with or without grouped heads and scaling, and {_SUPPORTED} are supported"
            )
    if name in MODULES.tempered and module.attn_temperature_tuning and not module.use_rope:
        query = _tempered_by_document(module, query, longctx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pattern = layer_pattern(module, **{keyword: setting for keyword, setting in kwargs.items() if keyword == _WINDOW})
    sinks, softcap = kwargs.get(_SINKS), float(kwargs.get(_SOFTCAP) or 0.0)
    if softcap < 0 or (softcap and sinks is not None):
        raise ValueError(
            f"{name} passes {_SOFTCAP}={softcap} to attention{'' if sinks is None else ' together with sinks'}; a cap must be "
            f"positive, and is not supported together with sinks"
        )
    if (compressed := compressed_attention(module, query, key, scale, pattern.window, sinks, longctx)) is not None:
        return compressed, None
    of_weights = (dropout, site.name) if dropout and site is not None else (0.0, "")
    both_ways = sees_both_ways(module)
    call = LayerCall(scale, module, pattern, sinks, softcap, None if chosen is None else chosen[0], *of_weights, both_ways)
    output_BTHD = sequence_parallel_attention(query, key, value, call, longctx)
    # contiguous like the result of transformers' own functions: some classes take views of it, others would copy it themselves
    return output_BTHD.contiguous(), None


def _dropped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Callable[[Tensor], Tensor],
    **kwargs: Any,
) -> Tensor:
    """Attention [1, T, H, E] of one document without a plan, with dropout of its weights [1, H, T, T] by `drop`.

    Runs the class's eager function, which returns its weights; without dropout they are those of the softmax.
    """
    if mask is None or mask.dtype == torch.bool:
        # torch's own attention is causal without a mask
        seen_TT = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril() if mask is None else mask
        mask = torch.zeros(seen_TT.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill(~seen_TT, torch.finfo(query.dtype).min).expand(1, 1, -1, -1)
    _, weights_1HTT = _fallback_function(module, "eager")(module, query, key, value, mask, dropout=0.0, **kwargs)
    assert weights_1HTT is not None
    value_1HTE = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (drop(weights_1HTT) @ value_1HTE).transpose(1, 2).contiguous()


def _only_chosen(mask: Tensor | None, chosen_BTK: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask of a forward without a plan [B, 1, T, keys], in which every query sees only its chosen keys.

    The classes leave this out for unknown implementations.
    """
    if mask is None:
        raise ValueError("attention to chosen keys got no mask; pass the attention mask that the model makes")
    shape = (*chosen_BTK.shape[:2], key.shape[2])
    hidden_BTN = torch.ones(shape, dtype=torch.bool, device=query.device).scatter(-1, chosen_BTK.long(), False)
    if mask.dtype == torch.bool:
        return mask & ~hidden_BTN.unsqueeze(1)
    return mask.masked_fill(hidden_BTN.unsqueeze(1), torch.finfo(query.dtype).min)


def sees_both_ways(module: nn.Module) -> bool:
    """Whether tokens of an image see each other both ways in an attention layer."""
    # a user's class may come from it
    known = (MODULES.both_ways[each.__name__] for each in type(module).__mro__ if each.__name__ in MODULES.both_ways)
    kind, config = next(known, None), getattr(module, "config", None)
    if kind == "vision_windows":
        return getattr(config, "use_bidirectional_attention", None) == "vision" and bool(getattr(module, _WINDOW, None))
    return kind == "all"


def layer_pattern(module: nn.Module, **passed: int | None) -> AttentionPattern:
    """The window or chunk that limits an attention layer.

    The window is the one that the layer passes as a keyword, or else the setting from which transformers builds its masks.
    """
    config: Any = getattr(module, "config", None)
    layer, layer_types = getattr(module, "layer_idx", None), getattr(config, "layer_types", None) or ()
    layer_type = layer_types[layer] if layer is not None and layer < len(layer_types) else ""
    if type(module).__name__ in MODULES.window_of_config:
        window = config.sliding_window
    elif _WINDOW in passed:
        window = passed[_WINDOW]
    else:
        window = getattr(module, _WINDOW, None) if layer_type != "full_attention" else None
    # attention chunks are never passed as a keyword
    chunk = config.attention_chunk_size if layer_type == "chunked_attention" else 0
    return AttentionPattern(window=window or 0, chunk=chunk)


def _tempered_by_document(module: Any, q_1HTD: Tensor, context: GroupContext) -> Tensor:
    """Rescales queries by their position in the document, since the layer scaled them by their index in this rank's row.

    The layer counts from 0 in every row. So each query is multiplied by the right factor divided by the factor already applied;
    for a row that is one whole document this quotient is exactly 1.
    """
    if context.position_ids is None:
        raise RuntimeError(f"{type(module).__name__} scales queries by position, but the context has no position_ids; set them")
    positions = context.position_ids.view(-1), torch.arange(q_1HTD.shape[2], device=q_1HTD.device)
    # the layer's own formula, in fp32
    steps = (torch.floor((position.float() + 1.0) / module.floor_scale) for position in positions)
    wanted_T, done_T = (torch.log1p(step) * module.attn_scale + 1.0 for step in steps)
    wide = torch.promote_types(q_1HTD.dtype, torch.float32)
    return (q_1HTD * (wanted_T.to(wide) / done_T.to(wide)).unsqueeze(1)).to(q_1HTD.dtype)


def _fallback_function(module: nn.Module, fallback: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The implementation that the model had before; for eager attention, the function in the model's own source file."""
    if fallback == "eager":
        function: Callable[..., tuple[Tensor, Tensor | None]] = sys.modules[type(module).__module__].eager_attention_forward
        return function
    registered: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS[fallback]
    return registered

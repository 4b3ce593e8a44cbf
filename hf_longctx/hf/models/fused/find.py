"""Finds the modules of a model whose elementwise functions can run as single kernels, by the code of their forward.

Many classes of transformers have RMSNorm, gated MLP and rotary embedding letter by letter in common. A module is found if its
class is one of transformers, the code of its forward is that of Llama's (or Gemma's norm), and no forward was put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

from torch import nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.context.forwards import without_renames
from hf_longctx.hf.models.wrapped.text import text_part
from hf_longctx.runtime.core.binding import HOOKS, is_written_by, own_forward

ROTARY = "apply_rotary_pos_emb"
# forwards of attention that run any number of heads
_FORWARDS = tuple(
    without_renames(each.forward)
    for each in (
        modeling_llama.LlamaAttention,
        modeling_mistral.MistralAttention,
        modeling_qwen2.Qwen2Attention,
        modeling_qwen3.Qwen3Attention,
    )
)
# norms that run as kernels now
KERNEL_NORMS: WeakSet[nn.Module] = WeakSet()
_ACTIVATIONS = {SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh", GELUActivation: "gelu"}


@dataclass(frozen=True, slots=True)
class FusableModule:
    """A module, with what it computes token by token: a norm (its eps), a gated MLP (its activation) or a rotary embedding.

    is_centred: a norm's weights count from 1, as Gemma's do.
    """

    module: Any
    kind: Literal["norm", "gated", "rotary"]
    eps: float = 0.0
    is_centred: bool = False
    activation: str = ""


def fusable_modules(model: nn.Module) -> Iterator[FusableModule]:
    """Every norm, gated MLP and attention with a rotary embedding in the text part of `model` that can run as single kernels."""
    for module in text_part(base_of(model)).modules():
        own: Any = without_renames(getattr(type(module), "forward", None))
        if own_forward(module) is not None or not _is_of_transformers(own):
            continue
        if _is_same(own, modeling_llama.LlamaRMSNorm.forward):
            yield FusableModule(module, "norm", float(module.variance_epsilon))
        elif _is_same(own, modeling_gemma.GemmaRMSNorm.forward):
            if _is_same(type(module)._norm, modeling_gemma.GemmaRMSNorm._norm):
                yield FusableModule(module, "norm", float(module.eps), is_centred=True)
        elif _is_same(own, modeling_llama.LlamaMLP.forward):
            if (activation := _ACTIVATIONS.get(type(module.act_fn), "")) and runs_as_written(module.act_fn):
                yield FusableModule(module, "gated", activation=activation)
        elif ROTARY in getattr(getattr(own, "__code__", None), "co_names", ()):
            rotary, half = own.__globals__.get(ROTARY), own.__globals__.get("rotate_half")
            is_known = _is_same(rotary, modeling_llama.apply_rotary_pos_emb) and _is_same(half, modeling_llama.rotate_half)
            if is_known and own.__closure__ is None:
                yield FusableModule(module, "rotary")


def runs_as_written(module: nn.Module) -> bool:
    """Whether a module runs the forward that its library has given its class."""
    return own_forward(module) is None and is_written_by(type(module).forward, "torch", "transformers", "peft")


def is_hooked(module: Any) -> bool:
    """Whether a hook would see what `module`, or a module inside it, gets or returns."""
    return any(getattr(each, name, None) for each in module.modules() for name in HOOKS)


def runs_heads_alike(module: nn.Module) -> bool:
    """Whether the forward of an attention module is one of those that run any number of heads, each like the others.

    That is code which takes heads from the features of its projections, and rotates each head alike.
    """
    own: Any = without_renames(type(module).forward)
    if not _is_of_transformers(own) or own.__closure__ is not None:
        return False
    rotary, half = own.__globals__.get(ROTARY), own.__globals__.get("rotate_half")
    is_known = _is_same(rotary, modeling_llama.apply_rotary_pos_emb) and _is_same(half, modeling_llama.rotate_half)
    return is_known and any(_is_same(own, known) for known in _FORWARDS)


def _is_of_transformers(function: Any) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("transformers.")


def _is_same(function: Any, known: Any) -> bool:
    """Whether two functions have the same code, but for documentation and annotations."""
    codes = [getattr(each, "__code__", None) for each in (function, known)]
    if None in codes:
        return False
    first, second = ((code.co_code, _values(code), code.co_names, code.co_varnames) for code in codes)  # type: ignore[union-attr]
    return first == second


def _values(code: Any) -> tuple[Any, ...]:
    """The constants of a function, without its documentation."""
    return tuple(value for value in code.co_consts if not (isinstance(value, str) and "\n" in value))

"""Finds the modules of a model whose elementwise functions can run as single kernels, by the code of their forward.

Many classes of transformers have literally the same RMSNorm, gated MLP and rotary embedding. A module is found if its class is
one of transformers, its forward has the code of Llama's (or of Gemma's norm), and no other forward replaces it. Settings about
kernels are checked here too, and kernels that a user put into a model are found, which would not be exact under plans.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal
from weakref import WeakSet

import torch.nn.functional as F
from torch import nn
from transformers import TrainingArguments
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.mamba import modeling_mamba
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from hf_longctx.families.registry import MIXERS
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.forwards import without_renames
from hf_longctx.hf.models.towers import text_part
from hf_longctx.runtime.core.binding import HOOKS, is_written_by, own_forward, wrapped
from hf_longctx.runtime.states.convolution import ACTIVATIONS

ROTARY = "apply_rotary_pos_emb"
_CONVOLUTION = "causal_conv1d_fn"
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
    """A module that computes token by token: a norm (with its eps), a gated MLP (its activation) or a rotary embedding.

    Or a mixer with a short convolution, and the activation behind it ("" if there is none).

    is_centred: a norm's weights count from 1, as Gemma's do. A gated norm multiplies its result, or its input if `gates_first`,
    by the activation of a gate; it may norm `groups` of features each by itself, and multiply by its weight in fp32 (`is_wide`).
    """

    module: Any
    kind: Literal["norm", "gated_norm", "gated", "rotary", "convolution"]
    eps: float = 0.0
    is_centred: bool = False
    activation: str = ""
    gates_first: bool = False
    groups: int = 1
    is_wide: bool = False


def fusable_modules(model: nn.Module) -> Iterator[FusableModule]:
    """Every norm, gated MLP, rotary embedding of attention and short convolution of a mixer in the text part of `model` that
    can be single kernels.
    """
    for module in text_part(base_of(model)).modules():
        own: Any = without_renames(getattr(type(module), "forward", None))
        if (activation := _convolution(module, own)) is not None:
            # plans have replaced its forward
            yield FusableModule(module, "convolution", activation=activation)
        if own_forward(module) is not None or not _is_of_transformers(own):
            continue
        if _is_same(own, modeling_llama.LlamaRMSNorm.forward):
            yield FusableModule(module, "norm", float(module.variance_epsilon))
        elif _is_same(own, modeling_gemma.GemmaRMSNorm.forward):
            if _is_same(type(module)._norm, modeling_gemma.GemmaRMSNorm._norm):
                yield FusableModule(module, "norm", float(module.eps), is_centred=True)
        elif (gated_norm := _gated_norm(module, own)) is not None:
            yield gated_norm
        elif _is_same(own, modeling_llama.LlamaMLP.forward):
            if (activation := _ACTIVATIONS.get(type(module.act_fn), "")) and runs_as_written(module.act_fn):
                yield FusableModule(module, "gated", activation=activation)
        elif ROTARY in getattr(getattr(own, "__code__", None), "co_names", ()):
            rotary, half = own.__globals__.get(ROTARY), own.__globals__.get("rotate_half")
            is_known = _is_same(rotary, modeling_llama.apply_rotary_pos_emb) and _is_same(half, modeling_llama.rotate_half)
            if is_known and own.__closure__ is None:
                yield FusableModule(module, "rotary")


def _gated_norm(module: Any, own: Any) -> FusableModule | None:
    """The gated norm that a forward of one of the known codes computes; None for other code."""
    if "Gated" not in type(module).__name__:
        return None
    known = next((name for name in _GATED_NORMS if _is_same(own, _forward_of(name))), "")
    eps, activation = getattr(module, "variance_epsilon", 0.0), getattr(module, "activation", "silu")
    if not known or activation not in ("silu", "sigmoid"):
        return None
    found = FusableModule(module, "gated_norm", float(eps), activation=activation)
    match known:
        case "falcon_h1.FalconH1RMSNormGated":
            return replace(found, gates_first=not module.norm_before_gate, groups=module.n_groups, is_wide=True)
        case "bamba.BambaRMSNormGated":
            return replace(found, gates_first=True, groups=module.weight.numel() // module.group_size)
        case "kimi_linear.KimiLinearRMSNormGated":
            return replace(found, is_wide=True)
    return found


def _convolution(module: Any, own: Any) -> str | None:
    """The activation behind the convolution of a mixer; None for other modules, code and activations."""
    known = MIXERS.get(type(module).__name__)
    if known is None or _CONVOLUTION not in known.functions or not _is_of_transformers(inspect.unwrap(own)):
        return None
    function = convolution_function(module)
    theirs = getattr(modeling_mamba, _CONVOLUTION, None)
    if theirs is None or not _is_same(function, inspect.unwrap(theirs)):
        return None
    if len(convolutions_in(module)) != 1:
        return None
    return ACTIVATIONS.get(getattr(module, "activation", ""))


def convolution_function(mixer: Any) -> Any:
    """The torch function with which the class of a mixer convolves; None if its module has none of that name."""
    function = inspect.unwrap(type(mixer).forward).__globals__.get(_CONVOLUTION)
    return None if function is None else inspect.unwrap(function)


def convolutions_in(mixer: Any) -> list[nn.Conv1d]:
    """The convolutions of a mixer, whose weights its forward reads."""
    return [each for each in mixer.children() if type(each) is nn.Conv1d]


# one class for each code, in a folder that some versions of transformers do not have
_GATED_NORMS = (
    *("qwen3_next.Qwen3NextRMSNormGated", "kimi_linear.KimiLinearRMSNormGated"),
    *("bamba.BambaRMSNormGated", "falcon_h1.FalconH1RMSNormGated"),
)


@cache
def _forward_of(name: str) -> Any:
    """The forward of a class of transformers, given its folder and name; None without it."""
    folder, kind = name.split(".")
    module = f"transformers.models.{folder}.modeling_{folder}"
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        return None
    return without_renames(getattr(getattr(importlib.import_module(module), kind, None), "forward", None))


def runs_as_written(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class, from its library."""
    return own_forward(module) is None and is_written_by(type(module).forward, "torch", "transformers", "peft")


def is_hooked(module: Any) -> bool:
    """Whether a hook would see inputs or outputs of `module` or of a module inside it."""
    return any(getattr(each, name, None) for each in module.modules() for name in HOOKS)


def runs_heads_alike(module: nn.Module) -> bool:
    """Whether the forward of an attention module runs any number of heads, each like the others.

    Such code takes heads from the features of its projections and rotates every head in the same way.
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
    """Whether two functions have the same code apart from documentation and annotations."""
    codes = [getattr(each, "__code__", None) for each in (function, known)]
    if None in codes:
        return False
    first, second = ((code.co_code, _values(code), code.co_names, code.co_varnames) for code in codes)  # type: ignore[union-attr]
    return first == second


def _values(code: Any) -> tuple[Any, ...]:
    """The constants of a function, without its documentation."""
    return tuple(value for value in code.co_consts if not (isinstance(value, str) and "\n" in value))


_INSTEAD = "leave it out, and set use_liger_kernel=True (TrainingArguments) or LongContextConfig(compile_layers=True)"


@contextmanager
def without_liger(args: TrainingArguments) -> Iterator[None]:
    """Context of a training in which `Trainer` does not apply Liger, since plans have already bound its exact kernels."""
    before, args.use_liger_kernel = args.use_liger_kernel, False
    try:
        yield
    finally:
        args.use_liger_kernel = before


def kernel_problems(facts: ModelFacts) -> list[str]:
    """Problems with kernels that a user put into the model, or into all models of its class, before the run."""
    if getattr(facts.base, "use_kernels", False):
        return [
            f"the model was loaded with use_kernels=True, whose kernels come from the hub in versions that are not tested under "
            f"plans; {_INSTEAD}"
        ]
    if _is_of_liger(F.cross_entropy):
        return [f"Liger replaced torch's cross_entropy, which plans call (cross_entropy=True); {_INSTEAD}"]
    for name, module in facts.model.named_modules():
        own = vars(module).get("forward")
        if _is_of_hub(module, own) and not _is_of_liger(own):
            return [
                f"the forward of {name or type(module).__name__} ({type(module).__name__}) is that of "
                f"{own.__func__.__qualname__}, a kernel of the hub, which stays there when use_kernels is set to False again; "
                f"load the model anew, without kernels; {_INSTEAD}"
            ]
        if any(hasattr(each, "_torchdynamo_orig_callable") for each in wrapped(getattr(own, "__func__", own))):
            return [
                f"the forward of {name or type(module).__name__} was compiled by torch.compile, which would freeze what plans "
                f"change in it; pass a model that is not compiled, and set LongContextConfig(compile_layers=True)"
            ]
        rotary = getattr(without_renames(type(module).forward), "__globals__", {}).get(ROTARY)
        if type(module).__module__.startswith("liger_kernel.") or any(map(_is_of_liger, (own, rotary))):
            return [
                f"Liger was applied to {name or type(module).__name__} ({type(module).__name__}) before the run, also where it "
                f"writes over tensors that plans keep; {_INSTEAD}"
            ]
    return []


def _is_of_hub(module: nn.Module, own: Any) -> bool:
    """Whether the package `kernels` replaced the forward of a module by that of another class."""
    function = getattr(own, "__func__", None)
    is_method = getattr(function, "__qualname__", "").endswith(".forward")
    return hasattr(type(module), "kernel_layer_name") and is_method and function is not type(module).forward


def _is_of_liger(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("liger_kernel.")

"""The functions that stand in for those of mixers with a state along the sequence, and the mixers that are tested with them.

A mixer of transformers (linear attention, SSM, short convolution) mixes tokens in two functions of its module alone: a causal
convolution and a scan. A row of `MIXERS` names those that the forward of a mixer class calls; `STAND_INS` has ours for each
name. Ours split the chunk into documents, take and leave states, and run transformers' own function on each document. A further
class is one more row, and one more function if its scan has another signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.states.convolution import convolve_documents
from hf_longctx.runtime.states.recurrence import scan_documents

# keywords of the rule that are passed on or checked
_OF_RULE = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
# keywords of packed rows, which would divide documents a second time
_BOUNDARIES = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, slots=True)
class MixerCall:
    """One forward of a mixer under a plan, and the names of the functions that it called so far."""

    mixer: nn.Module
    context: GroupContext
    called: list[str] = field(default_factory=list)


def causal_convolution(
    call: MixerCall,
    convolve: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> Tensor:
    """Convolution [1, C, T] of each document by `convolve`; weight: [C, width]."""
    _refuse_boundaries(call, keywords)

    def alone(x_1CN: Tensor) -> Tensor:
        return convolve(x_1CN, weight, bias, activation=activation)

    return convolve_documents(hidden_states, weight.shape[-1], alone, call.mixer, call.context)


def gated_delta_rule(
    call: MixerCall,
    rule: Callable[..., tuple[Tensor, Tensor]],
    *qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Outputs [1, T, value heads, E] of `rule` over each document.

    qkv: queries, keys and values; values may have more heads. g, beta: for each value head, logarithm of the decay, and strength.
    """
    _refuse_boundaries(call, keywords)
    if keywords.get("initial_state") is not None or keywords.get("output_final_state"):
        raise ValueError(f"{type(call.mixer).__name__} runs with a cache; plans keep states themselves, so set use_cache=False")
    if unknown := [name for name in keywords if name not in _OF_RULE and name in inspect.signature(rule).parameters]:
        raise ValueError(
            f"{type(call.mixer).__name__} gives its scan {', '.join(unknown)}, which plans do not pass on; use the newest "
            f"version of transformers that docs/models.md names"
        )

    def scan(inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, strength = inputs
        return rule(
            *(q, k, v),
            g=decay,
            beta=strength,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=keywords.get("use_qk_l2norm_in_kernel", False),
        )

    query, key, value = qkv
    return scan_documents((query, key), (value, g, beta), scan, call.mixer, call.context), None


def _refuse_boundaries(call: MixerCall, keywords: dict[str, Any]) -> None:
    """Raises ValueError for document boundaries; transformers' own functions ignore all other keywords that models pass on."""
    if given := [name for name in _BOUNDARIES if keywords.get(name) is not None]:
        raise ValueError(
            f"{type(call.mixer).__name__} got document boundaries ({', '.join(given)}) under a plan, which has its own; do not "
            f"pass them to the model"
        )


@dataclass(frozen=True, slots=True)
class StateFamily:
    """Model classes whose mixers call functions of equal names and signatures.

    names: beginnings of the names of the classes. mixer: what follows them in the name of the mixer class. functions: names of
    the functions that the mixer's forward calls, once each. layer_type: its name in the config's `layer_types`. heads: field of
    the config with the number of heads that have a state of their own.
    """

    names: tuple[str, ...]
    mixer: str
    functions: tuple[str, ...]
    layer_type: str
    heads: str

    @property
    def mixers(self) -> tuple[str, ...]:
        """Names of the mixer classes."""
        return tuple(f"{name}{self.mixer}" for name in self.names)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model classes."""
        return tuple(f"{name}ForCausalLM" for name in self.names)


# name of the function in the mixer's module -> the function that stands in for it
STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
}
FAMILIES = (
    StateFamily(
        names=("OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
        mixer="GatedDeltaNet",
        functions=("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
        layer_type="linear_attention",
        heads="linear_num_value_heads",
    ),
)
# class of a mixer -> its family
MIXERS: dict[str, StateFamily] = {mixer: family for family in FAMILIES for mixer in family.mixers}


def family_of(model: nn.Module) -> StateFamily | None:
    """The family of a model's class; None for classes without a state along the sequence."""
    return next((family for family in FAMILIES if type(model).__name__ in family.models), None)

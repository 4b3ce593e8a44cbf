"""The functions that stand in for those of mixers with a state along the sequence, and the mixers that are tested with them.

A mixer of transformers (linear attention, SSM, short convolution) mixes tokens in two functions of its module alone: a causal
convolution and, unless that is all, a scan. A row of `MIXERS` names those that the forward of a mixer class calls; `STAND_INS`
has ours for each name. Ours split the chunk into documents, take and leave states, and run transformers' own function on each
document. A further class is one more row, and one more function if its scan has another signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_longctx.hf.models.wrapped.text import text_class
from hf_longctx.plan.model.mixers import MEANS_SCAN, StateSpec, channel_scan, delta_scan, kimi_scan, mamba_scan
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.states.book import LayerScan, scan_name
from hf_longctx.runtime.states.convolution import convolve_documents
from hf_longctx.runtime.states.kernels import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    MAMBA2_SCAN,
    HeadSizes,
    KernelScan,
    ScanKernel,
)
from hf_longctx.runtime.states.passing import ChannelDecay, Decay, DeltaRule
from hf_longctx.runtime.states.recurrence import MixerScan, scan_documents
from hf_longctx.runtime.states.scans import MeansMap, weighted_means, wide

# keywords of scans that are passed on
_OF_RULE = ("use_qk_l2norm_in_kernel",)
_OF_SCAN = ("D", "dt_bias", "dt_softplus", "dt_limit")
_OF_CHANNELS = ("delta_softplus", "use_mambapy", "use_associative_scan")
# limits of steps that limit nothing
_NO_LIMITS = (0.0, float("inf"))
# keywords by which a scan reads and returns states of a cache
_OF_CACHE = ("initial_state", "output_final_state", "initial_states", "return_final_states", "return_last_state")
# keywords of packed rows, which would divide documents a second time
_BOUNDARIES = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, slots=True)
class MixerCall:
    """One forward of a mixer under a plan, and the names of the functions that it called so far.

    kept: tensors that one stand-in leaves for another.
    """

    mixer: nn.Module
    context: GroupContext
    called: list[str] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


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

    qkv: queries, keys and values; values may have more heads. g, beta: for each value head, logarithm of the decay (one number,
    or one per channel of the keys), and strength.
    """
    _refuse_keywords(call, rule, keywords, _OF_RULE)

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
    # decays of Kimi delta attention have one number per channel
    by_channel = g.dim() == 4
    size = (kimi_scan if by_channel else delta_scan)(key.shape[-1], value.shape[-1])
    kernel = KIMI_DELTA_ATTENTION if by_channel else GATED_DELTA_RULE
    settings = (bool(keywords.get("use_qk_l2norm_in_kernel", False)),)
    mixer_scan = MixerScan(scan, size, DeltaRule(), KernelScan(kernel, settings))
    return scan_documents((query, key), (value, g, beta), (), mixer_scan, LayerScan(call.mixer), call.context), None


def mamba2_scan(
    call: MixerCall,
    scan: Callable[..., tuple[Tensor, Tensor]],
    *inputs: Tensor,
    chunk_size: int,
    **keywords: Any,
) -> Tensor:
    """Outputs [1, T, H, E] of `scan` over each document.

    inputs: tokens and their steps for each head; decay of each head; for each group of heads, what takes tokens into the state
    and out of it. keywords: dt_bias, added to the steps, and D, how much of a token passes by the state, both for each head.
    """
    _refuse_keywords(call, scan, keywords, _OF_SCAN)
    x, dt, A, B, C = inputs
    settings = {name: keywords[name] for name in ("dt_softplus", "dt_limit") if name in keywords}

    def scanned(mine: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        into, out, tokens, step, decay, bias, past = mine
        return scan(
            *(tokens, step, decay, into, out, chunk_size),
            D=past,
            dt_bias=bias,
            initial_states=state,
            return_final_states=True,
            **settings,
        )

    def log_decays(mine: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        # the steps that the scan makes of them
        step = mine[3] + weights[1].to(mine[3].dtype)
        step = F.softplus(step) if keywords.get("dt_softplus") else step
        least, most = keywords.get("dt_limit") or _NO_LIMITS
        return weights[0].float() * torch.clamp(step, least, most).float()

    weights, size = (A, keywords["dt_bias"], keywords["D"]), mamba_scan(x.shape[-1], B.shape[-1], chunk_size)
    state_map = Decay(log_decays, reads=lambda mine: mine[1])
    limits: Any = keywords.get("dt_limit") or _NO_LIMITS
    kernel = KernelScan(MAMBA2_SCAN, (chunk_size, bool(keywords.get("dt_softplus")), tuple(limits)))
    mixer_scan = MixerScan(scanned, size, state_map, kernel)
    return scan_documents((B, C), (x, dt), weights, mixer_scan, LayerScan(call.mixer), call.context)


def mamba1_scan(
    call: MixerCall,
    scan: Callable[..., tuple[Tensor, Tensor]],
    *inputs: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **keywords: Any,
) -> Tensor:
    """Outputs [1, C, T] of `scan` over each document, times the activated gate `z`.

    Each of the C channels has a state of its own. inputs: tokens and their steps for each channel [1, C, T]; decays of each
    channel [C, N]; what takes tokens into the state and out of it, [1, N, T], for all channels. D: how much of a token passes by
    the state. delta_bias: added to the steps. keywords: delta_softplus, whether steps are activated, and how to scan.

    `scan` starts from zeros, so what the state of an earlier slice adds is added to its outputs, and to the state that it leaves.
    """
    _refuse_keywords(call, scan, keywords, _OF_CHANNELS)
    x, dt, A, B, C = inputs
    settings = {name: keywords[name] for name in _OF_CHANNELS if name in keywords}

    def steps(mine: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        # those that the scan makes of them
        step = mine[3] + weights[2].to(mine[3].dtype)
        return F.softplus(step) if settings.get("delta_softplus") else step

    state_map = ChannelDecay(steps, decays=lambda weights: weights[0], reads=lambda mine: mine[1].squeeze(2))

    def scanned(mine: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        into, out = (each.squeeze(2).transpose(1, 2) for each in mine[:2])
        tokens, step = (each.transpose(1, 2) for each in mine[2:4])
        decay, past, bias = mine[4:]
        output, after = scan(tokens, step, decay, into, out, D=past, delta_bias=bias, return_last_state=True, **settings)
        output = output.transpose(1, 2).unsqueeze(-1)
        if state is None:
            return output, after
        effect = state_map.effect(mine[:4], mine[4:], output, after)
        return effect.output(state), state_map.joined(effect.carry, state, after)

    # a mixer may scan several times, each time with other channels
    function = scan_name(call.called.count(call.called[-1]))
    read = [each.transpose(1, 2).unsqueeze(2) for each in (B, C)]
    own = [each.transpose(1, 2) for each in (x, dt)]
    mixer_scan = MixerScan(scanned, channel_scan(A.shape[-1]), state_map)
    output = scan_documents(read, own, (A, D, delta_bias), mixer_scan, LayerScan(call.mixer, function), call.context)
    return output.squeeze(-1).transpose(1, 2) * F.silu(z)


def rwkv_attention(
    call: MixerCall,
    attend: Callable[..., Any],
    *inputs: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, None]:
    """Outputs [1, T, H] of RWKV's attention over each document; each of the H channels has a state of its own.

    inputs: logarithm of what the logarithm of a weight loses with every token, and bonus of a token for itself, for each channel;
    keys and values [1, T, H].
    """
    time_decay, time_first, key, value = inputs
    if state is not None or return_state:
        raise ValueError(f"{type(call.mixer).__name__} runs with a state; plans keep states themselves, so set use_cache=False")

    def scanned(mine: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v, decay, bonus = mine
        return weighted_means(k, v, decay, bonus, before)

    weights, mixer_scan = (-torch.exp(wide(time_decay)), time_first), MixerScan(scanned, MEANS_SCAN, MeansMap())
    output = scan_documents((), (key, value.unsqueeze(-1)), weights, mixer_scan, LayerScan(call.mixer), call.context)
    return output.squeeze(-1), None


def _refuse_keywords(call: MixerCall, scan: Callable[..., Any], keywords: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raises ValueError for keywords of document boundaries or of a cache, and for those of `scan` that are not `known`."""
    _refuse_boundaries(call, keywords)
    name = type(call.mixer).__name__
    if any(keywords.get(each) is not None and keywords[each] is not False for each in _OF_CACHE):
        raise ValueError(f"{name} runs with a cache; plans keep states themselves, so set use_cache=False")
    if unknown := [each for each in keywords if each not in (*known, *_OF_CACHE) and each in inspect.signature(scan).parameters]:
        raise ValueError(
            f"{name} gives its scan {', '.join(unknown)}, which plans do not pass on; use the newest version of transformers "
            f"that docs/models.md names"
        )


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
    the config with the number of heads that have a state of their own; empty if there are as many as channels, or if the mixer
    has a convolution alone. fused: function that may do everything at once, which plans leave out; empty if there is none.
    other_types: types of layers that mix no tokens, or that have attention beside a mixer. scans: attribute of the mixer with the
    number of calls of the last function, if there may be several. methods: paths of methods from the mixer that its forward
    calls, once each, in place of functions (`methods.METHODS`); one that it calls twice stands there twice. parent: class of the
    module around a mixer that gets the plan's context and does not pass it on; empty if mixers get it. fills_cache: the model
    leaves its states in a cache of transformers.
    """

    names: tuple[str, ...]
    mixer: str
    functions: tuple[str, ...]
    layer_type: str
    heads: str
    fused: str = ""
    other_types: tuple[str, ...] = ()
    scans: str = ""
    methods: tuple[str, ...] = ()
    parent: str = ""
    fills_cache: bool = True

    def num_scans(self, mixer: nn.Module) -> int:
        """Number of calls of the last function in a forward of `mixer`."""
        return int(getattr(mixer, self.scans)) if self.scans else 1

    @property
    def mixers(self) -> tuple[str, ...]:
        """Names of the mixer classes."""
        return tuple(f"{name}{self.mixer}" for name in self.names)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model classes."""
        return tuple(f"{name}ForCausalLM" for name in self.names)


def _mamba2(name: str, mixer: str, heads: str, layer_type: str = "linear_attention", **others: Any) -> StateFamily:
    functions, fused = ("causal_conv1d_fn", "mamba2_chunk_scan"), "mamba2_split_conv1d_scan_combined"
    return StateFamily((name,), mixer, functions, layer_type, heads, fused, **others)


def _mamba1(names: tuple[str, ...], mixer: str, fused: str = "", **others: Any) -> StateFamily:
    functions = ("causal_conv1d_fn", "mamba_selective_scan")
    return StateFamily(names, mixer, functions, "linear_attention", "", fused, **others)


# name of the function in the mixer's module -> the function that stands in for it
STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba1_scan,
    "rwkv_linear_attention": rwkv_attention,
}
# name of the function in the mixer's module -> the kernel that runs in its place, and the settings with which a mixer calls it
KERNELS: dict[str, tuple[ScanKernel, Callable[[Any], tuple[Any, ...]]]] = {
    "torch_chunk_gated_delta_rule": (GATED_DELTA_RULE, lambda mixer: (True,)),
    "chunk_kimi_delta_attention": (KIMI_DELTA_ATTENTION, lambda mixer: (True,)),
    "mamba2_chunk_scan": (MAMBA2_SCAN, lambda mixer: (mixer.chunk_size, True, tuple(mixer.time_step_limit))),
}
FAMILIES = (
    StateFamily(
        names=("LaraMini", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
        mixer="GatedDeltaNet",
        functions=("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
        layer_type="linear_attention",
        heads="linear_num_value_heads",
    ),
    StateFamily(
        names=("BailingHybrid", "KimiLinear"),
        mixer="DeltaAttention",
        functions=("causal_conv1d_fn", "chunk_kimi_delta_attention"),
        layer_type="linear_attention",
        heads="linear_num_heads",
    ),
    StateFamily(
        names=("Lfm2", "Lfm2Moe", "Lfm3"), mixer="ShortConv", functions=("causal_conv1d_fn",), layer_type="conv", heads=""
    ),
    StateFamily(
        names=("MiniMax",),
        mixer="LightningAttention",
        functions=(),
        layer_type="linear_attention",
        heads="num_attention_heads",
        methods=("act_fn.forward", "norm.forward"),
        fills_cache=False,
    ),
    StateFamily(
        names=("RecurrentGemma",),
        mixer="RecurrentBlock",
        functions=(),
        layer_type="linear_attention",
        heads="lru_width",
        methods=("conv_1d.forward", "rg_lru._rnn_scan"),
        fills_cache=False,
    ),
    # two mixers in each layer
    StateFamily(
        names=("Rwkv",),
        mixer="SelfAttention",
        functions=("rwkv_linear_attention",),
        layer_type="linear_attention",
        heads="attention_hidden_size",
        methods=("time_shift.forward",),
        fills_cache=False,
    ),
    StateFamily(
        names=("Rwkv",),
        mixer="FeedForward",
        functions=(),
        layer_type="linear_attention",
        heads="attention_hidden_size",
        methods=("time_shift.forward",),
        fills_cache=False,
    ),
    StateFamily(
        names=("xLSTM",),
        mixer="Layer",
        functions=(),
        layer_type="linear_attention",
        heads="num_heads",
        methods=("mlstm_backend.forward",),
        fills_cache=False,
    ),
    StateFamily(
        names=("Zaya",),
        mixer="CCAProjection",
        functions=(),
        layer_type="hybrid",
        heads="",
        other_types=("hybrid_sliding",),
        methods=("conv_qk_depthwise.forward", "conv_qk_grouped.forward", *["v_proj_delayed.forward"] * 2),
        parent="ZayaAttention",
    ),
    _mamba2("Bamba", "Mixer", "mamba_n_heads"),
    _mamba2("GraniteMoeHybrid", "MambaLayer", "mamba_n_heads"),
    _mamba2("FalconH1", "Mixer", "mamba_n_heads", layer_type="hybrid"),
    _mamba2("NemotronH", "Mamba2Mixer", "mamba_num_heads", other_types=("moe", "mlp")),
    _mamba2("Mamba2", "Mixer", "num_heads"),
    _mamba2("Zamba2", "MambaMixer", "n_mamba_heads", other_types=("hybrid",)),
    _mamba1(("Zamba",), "MambaMixer", other_types=("hybrid",), scans="n_mamba_heads"),
    _mamba1(("Mamba", "FalconMamba"), "Mixer", "mamba_inner_fn"),
    _mamba1(("Jamba",), "MambaMixer"),
)
# class of a mixer -> its family
MIXERS: dict[str, StateFamily] = {mixer: family for family in FAMILIES for mixer in family.mixers}


def family_of(model: nn.Module) -> StateFamily | None:
    """The family of a model's class; None for classes without a state along the sequence."""
    name = text_class(model)
    return next((family for family in FAMILIES if name in family.models), None)


def scan_line(model: nn.Module, states: StateSpec, device: torch.device, dtype: torch.dtype) -> str:
    """The text that says what runs the scans of a model in a run; empty for a model without them.

    states: the sizes of its layers. dtype: that of the tensors between layers. Checks the kernel if there is one for the model.
    """
    family = family_of(model)
    mixer = None if family is None else next((x for x in model.modules() if type(x).__name__ in family.mixers), None)
    if family is None or mixer is None or family.functions == ("causal_conv1d_fn",):
        return ""
    kernel, settings_of = next((KERNELS[name] for name in family.functions if name in KERNELS), (None, None))
    if kernel is None or settings_of is None or device.type != kernel.device_type or not kernel.is_installed:
        return "scans: torch code, for each document"
    if states.is_empty:
        return f"scans: {kernel.label}, if its first use finds it right"
    key = states.read_size // 2
    sizes = HeadSizes(key, states.head_elements // key, states.heads // states.read_heads, states.tile_tokens)
    if problem := kernel.problem(device, dtype, sizes, settings_of(mixer)):
        return f"scans: torch code, for each document; not {kernel.label}, because {problem}"
    return f"scans: {kernel.label} for whole rows; torch code where ranks pass states on"

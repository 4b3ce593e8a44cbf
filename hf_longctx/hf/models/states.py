"""Runs mixers with a state along the sequence (linear attention, SSM, short convolution) under plans.

A mixer of transformers mixes tokens in only two functions of its module: a causal convolution and, in most classes, a scan. A
`Mixer` of the registry names the functions that the forward calls; `STAND_INS` has our function for each name. Ours split the
chunk into documents, take and leave states, and run transformers' own function on each document. A further class needs one more
record, and one more function if its scan has another signature.

Some mixers write their recurrence inside their forward and call no function that could be replaced. They call their own modules,
whose methods are replaced while the forward runs (`METHODS`): a convolution, a scan, or the modules before and after a loop over
blocks. These modules get and return other tensors than under the forward of the class, so hooks on them are refused.

`MixerPatch` gives every mixer a new forward. With a plan's context it runs the code of its class's forward with other globals, in
which the names of convolution and scan lead to our functions. Without a context it runs the class's own forward. So a mixer runs
without a cache, and slices of one token take the same path as others.

Our functions call transformers' torch functions even if a package with kernels (fla, causal_conv1d) is installed, and run a
kernel in their place only after its numbers have been compared (`runtime.states.kernels`). Kernels that transformers itself calls
take no fp32 or fp64, so copies in these dtypes run without them (`leave_kernels_out`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_longctx.families.family import Mixer
from hf_longctx.families.refused import STATE_WORDS
from hf_longctx.families.registry import MIXERS
from hf_longctx.hf.models.forwards import CACHES, carried, carrying, give, is_replaced, take
from hf_longctx.hf.models.towers import text_family, text_part
from hf_longctx.plan.model.mixers import (
    MEANS_SCAN,
    ScanSize,
    StateSpec,
    channel_scan,
    delta_scan,
    kimi_scan,
    mamba_scan,
    mlstm_scan,
)
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import HOOKS, class_name, is_ours, is_written_by, own_forward, with_globals
from hf_longctx.runtime.states.book import LayerScan, scan_name
from hf_longctx.runtime.states.convolution import ChoosesConvolution, convolve_documents
from hf_longctx.runtime.states.kernels import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    MAMBA2_SCAN,
    QWEN_DELTA_RULE,
    HeadSizes,
    KernelScan,
    ScanKernel,
)
from hf_longctx.runtime.states.passing import ChannelDecay, Decay, DeltaRule
from hf_longctx.runtime.states.recurrence import MixerScan, scan_documents
from hf_longctx.runtime.states.scans import Decays, MatrixMemory, MeansMap, diagonal_scan, lightning_blocks, weighted_means, wide

# keywords of scans that are passed on
_OF_RULE = ("use_qk_l2norm_in_kernel",)
_OF_SCAN = ("D", "dt_bias", "dt_softplus", "dt_limit")
_OF_CHANNELS = ("delta_softplus", "use_mambapy", "use_associative_scan")
# limits of steps that have no effect
_NO_LIMITS = (0.0, float("inf"))
# keywords by which a scan reads and returns states of a cache
_OF_CACHE = ("initial_state", "output_final_state", "initial_states", "return_final_states", "return_last_state")
# keywords of packed rows, which would divide documents a second time
_BOUNDARIES = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, slots=True)
class MixerCall:
    """One forward of a mixer under a plan, and the names of the functions that it has called so far.

    kept: tensors that one stand-in keeps for another.
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
    """Convolution [1, C, T] of each document, by a kernel if `FusedLayers` gave the mixer one; weight: [C, width]."""
    _refuse_boundaries(call, keywords)
    choose: ChoosesConvolution | None = vars(call.mixer).get(CONVOLUTIONS)
    kernel = None if choose is None else choose(hidden_states, weight, bias, activation)

    def alone(x_1CN: Tensor) -> Tensor:
        return convolve(x_1CN, weight, bias, activation=activation)

    in_row = None if kernel is None else lambda x_1CN, lengths: kernel(x_1CN, weight, bias, lengths)
    return convolve_documents(hidden_states, weight.shape[-1], alone, call.mixer, call.context, in_row=in_row)


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
    kernels = (KIMI_DELTA_ATTENTION,) if by_channel else (QWEN_DELTA_RULE, GATED_DELTA_RULE)
    settings = (bool(keywords.get("use_qk_l2norm_in_kernel", False)),)
    mixer_scan = MixerScan(scan, size, DeltaRule(), KernelScan(kernels, settings))
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
    kernel = KernelScan((MAMBA2_SCAN,), (chunk_size, bool(keywords.get("dt_softplus")), tuple(limits)))
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


# name of the function in the mixer's module -> the function that stands in for it
STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba1_scan,
    "rwkv_linear_attention": rwkv_attention,
}
# name of the function in the mixer's module -> kernels for its place, the fastest first, and settings with which a mixer calls it
KERNELS: dict[str, tuple[tuple[ScanKernel, ...], Callable[[Any], tuple[Any, ...]]]] = {
    "torch_chunk_gated_delta_rule": ((QWEN_DELTA_RULE, GATED_DELTA_RULE), lambda mixer: (True,)),
    "chunk_kimi_delta_attention": ((KIMI_DELTA_ATTENTION,), lambda mixer: (True,)),
    "mamba2_chunk_scan": ((MAMBA2_SCAN,), lambda mixer: (mixer.chunk_size, True, tuple(mixer.time_step_limit))),
}


def mixer_of(model: nn.Module) -> Mixer | None:
    """Record of the mixers of a model's class, those first in its layers; None for classes without a state."""
    return next(iter(text_family(model).mixers), None)


def scan_line(
    known: Mixer | None,
    model: nn.Module,
    states: StateSpec,
    device: torch.device,
    dtype: torch.dtype,
    passes_states: bool = False,
) -> str:
    """Says which code runs the scans of a model in a run; empty for a model without scans.

    known: what `mixer_of` returns for it. states: the sizes of its layers. dtype: that of the tensors between layers.
    passes_states: whether ranks may pass states on. Checks the kernels if there are any for the model.
    """
    mixer = None if known is None else next((x for x in model.modules() if type(x).__name__ == known.name), None)
    if known is None or mixer is None or known.functions == ("causal_conv1d_fn",):
        return ""
    kernels, settings_of = _kernels_for(known, device, dtype)
    if not kernels:
        return "scans: torch code, for each document"
    if states.is_empty:
        return f"scans: {' or '.join(each.label for each in kernels)}, if its first use finds it right"
    sizes, settings = _head_sizes(states), settings_of(mixer)

    def chosen(is_passing: bool) -> tuple[str, str]:
        """The first kernel that is right, or torch code, and why the kernels before it are not used."""
        refused = []
        for kernel in kernels:
            problem = kernel.problem(device, dtype, kernel.passing_sizes(sizes) if is_passing else sizes, settings)
            if not problem:
                return kernel.label, ""
            refused.append(f"; not {kernel.label}, because {problem}")
        return "torch code", "".join(refused)

    first, why = chosen(is_passing=False)
    line = f"scans: {first}, for {'each document' if why else 'whole rows'}{why}"
    if not passes_states:
        return line
    passing, why = chosen(is_passing=True)
    return f"{line}; where ranks pass states on: {'the same' if passing == first else passing}{why}"


def scan_kernels(model: nn.Module, states: StateSpec, device: torch.device, dtype: torch.dtype) -> dict[str, bool]:
    """The field of `ModelSpec` for scans: whether a package's kernel is installed and right. The first call checks it.

    Arguments: see `scan_line`.
    """
    known = mixer_of(model)
    mixer = None if known is None else next((x for x in model.modules() if type(x).__name__ == known.name), None)
    if known is None or mixer is None or states.is_empty:
        return {"fuses_scans": False}
    kernels, settings_of = _kernels_for(known, device, dtype)
    settings = settings_of(mixer) if kernels else ()
    return {"fuses_scans": any(not kernel.problem(device, dtype, _head_sizes(states), settings) for kernel in kernels)}


def _kernels_for(
    known: Mixer, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[ScanKernel, ...], Callable[[Any], tuple[Any, ...]]]:
    """The installed kernels for scans of a mixer, and what gives its settings."""
    kernels, settings_of = next((KERNELS[name] for name in known.functions if name in KERNELS), ((), lambda mixer: ()))
    fit = (each for each in kernels if device.type == each.device_type and dtype in each.dtypes and each.is_installed)
    return tuple(fit), settings_of


def _head_sizes(states: StateSpec) -> HeadSizes:
    key = states.read_size // 2
    return HeadSizes(key, states.head_elements // key, states.heads // states.read_heads, states.tile_tokens)


# keywords of an mLSTM that have tokens
_OF_MLSTM = ("query", "key", "value", "igate", "fgate")


def own_convolution(call: MixerCall, convolve: Callable[[Tensor], Tensor], x_1CT: Tensor) -> Tensor:
    """Convolution [1, C, T] of each document by a module that pads on both sides."""
    mixer: Any = call.mixer
    width = mixer.conv_1d.weight.shape[-1]
    return convolve_documents(x_1CT, width, lambda x: convolve(x)[..., : x.shape[-1]], mixer, call.context)


def gated_linear_scan(
    call: MixerCall,
    scan: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
) -> tuple[Tensor, None]:
    """Outputs [1, T, W] of a gated linear recurrence over each document; each of W channels has its own state.

    Runs in blocks in place of `scan`, which runs token by token and whose backward takes time in the square of the tokens.
    """

    def scanned(inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        # the class computes in fp32
        x_NW, gate_NW = (x.squeeze(0).to(torch.promote_types(x.dtype, torch.float32)) for x in inputs)
        # a document starts without a state, so nothing is left to reset
        states_NW = diagonal_scan(gate_NW, x_NW, None if state is None else state.flatten())
        return states_NW.to(inputs[0].dtype).view(1, *states_NW.shape, 1), states_NW[-1].view(1, -1, 1, 1)

    def log_decays(mine: Sequence[Tensor], _: Sequence[Tensor]) -> Tensor:
        gate = mine[1].to(torch.promote_types(mine[1].dtype, torch.float32))
        return gate.clamp_min(torch.finfo(gate.dtype).tiny).log()

    state_map = Decay(log_decays, reads=lambda mine: torch.ones_like(mine[1]).unsqueeze(-1))
    scan_of = MixerScan(scanned, ScanSize(0, 1), state_map)
    output_1TW1 = scan_documents((), (hidden_states, recurrent_gate), (), scan_of, LayerScan(call.mixer), call.context)
    return output_1TW1.squeeze(-1), None


def lightning_inputs(call: MixerCall, activate: Callable[[Tensor], Tensor], x_1TC: Tensor) -> Tensor:
    """Keeps queries, keys and values of lightning attention; returns zeros, so the result of the class's loop is not used."""
    call.kept.append(activate(x_1TC))
    return torch.zeros_like(x_1TC)


def lightning_attention(call: MixerCall, norm: Callable[[Tensor], Tensor], unused_1TC: Tensor) -> Tensor:
    """Normalized outputs [1, T, C] of lightning attention over each document."""
    mixer: Any = call.mixer
    q, k, v = call.kept.pop().unflatten(-1, (mixer.num_attention_heads, 3 * mixer.head_dim)).split(mixer.head_dim, dim=-1)
    weights = (mixer.slope_rate, mixer.query_decay, mixer.key_decay, mixer.diagonal_decay.squeeze(0))

    def scanned(inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, *decays = inputs
        return lightning_blocks(q, k, v, Decays(*decays), state)

    def log_decays(mine: Sequence[Tensor], rates: Sequence[Tensor]) -> Tensor:
        return -rates[0].view(1, 1, -1).expand(1, mine[0].shape[1], -1)

    state_map = Decay(log_decays, reads=lambda mine: mine[0])
    scan_of = MixerScan(scanned, ScanSize(0, 1), state_map)
    return norm(scan_documents((), (q, k, v), weights, scan_of, LayerScan(mixer), call.context).flatten(2))


def stacked_convolutions(call: MixerCall, convolve: Callable[[Tensor], Tensor], padded_1CS: Tensor) -> Tensor:
    """Outputs [1, C, T] of two convolutions in a row over each document, without the zeros that the class put in front."""
    mixer: Any = call.mixer
    # the module with the forward `done_before`
    second = mixer.conv_qk_grouped.forward.args[1]
    num_read = mixer.conv_kernel_size

    def both(x_1CN: Tensor) -> Tensor:
        return second(convolve(F.pad(x_1CN, (num_read, 0))))

    return convolve_documents(padded_1CS[..., num_read:], num_read + 1, both, mixer, call.context)


def done_before(call: MixerCall, convolve: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns what `stacked_convolutions` has computed."""
    return x


def delayed_values(call: MixerCall, project: Callable[[Tensor], Tensor], hidden_1TC: Tensor) -> Tensor:
    """Values of the token before each token of a document, in place of the class's own delay by one token.

    The class calls it for all tokens, and then for the one before the first.
    """
    if call.kept:
        return call.kept.pop()
    first_11C = project(torch.zeros_like(hidden_1TC[:, :1]))

    def delayed(x_1CN: Tensor) -> Tensor:
        return torch.cat([first_11C.transpose(1, 2), x_1CN[..., :-1]], dim=-1)

    values_1CT = project(hidden_1TC).transpose(1, 2)
    found_1TC = convolve_documents(values_1CT, 2, delayed, call.mixer, call.context, "delayed values").transpose(1, 2)
    call.kept.append(found_1TC[:, :1])
    return torch.cat([found_1TC[:, 1:], found_1TC[:, :1]], dim=1)


def shifted_tokens(call: MixerCall, shift: Callable[[Tensor], Tensor], x_1TC: Tensor) -> Tensor:
    """The token before each token of a document [1, T, C], and zeros before the first."""
    found_1CT = convolve_documents(x_1TC.transpose(1, 2), 2, lambda x: F.pad(x, (1, -1)), call.mixer, call.context)
    return found_1CT.transpose(1, 2)


def matrix_memory(call: MixerCall, run: Callable[..., Any], **given: Tensor | None) -> tuple[Tensor, None]:
    """Outputs [1, H, T, E] of an mLSTM over each document, in any mode of the config.

    given: query, key and value [1, H, T, ...], igate and fgate [1, H, T].
    """
    mixer: Any = call.mixer
    inputs = [x.transpose(1, 2) for name in _OF_MLSTM if (x := given.pop(name)) is not None]
    if any(state is not None for state in given.values()):
        raise ValueError(f"{type(mixer).__name__} runs with a state; plans keep states themselves, so set use_cache=False")
    sizes = inputs[1].shape[-1], inputs[2].shape[-1], mixer.config.chunk_size
    memory = MatrixMemory(*sizes[1:], mixer.config.eps)
    mixer_scan = MixerScan(memory.scan, mlstm_scan(*sizes), memory)
    return scan_documents((), inputs, (), mixer_scan, LayerScan(mixer), call.context).transpose(1, 2), None


def hashed_ngrams(call: MixerCall, embed: Callable[..., Tensor], ids_1T: Tensor, cache: None) -> Tensor:
    """Embeddings [1, T, E] of each token and those before it in its document, which a hash chooses."""
    module: Any = call.mixer.get_submodule("ple_embedding")

    # tokens before a document are ends of sequences; zeros in the convolution
    def alone(x_1CN: Tensor) -> Tensor:
        return embed(x_1CN[:, 0] + module.eos_token_id, None).transpose(1, 2)

    x_1CT = ids_1T.view(1, 1, -1) - module.eos_token_id
    return convolve_documents(x_1CT, module.ngram_size, alone, call.mixer, call.context, "n-grams").transpose(1, 2)


def dilated_convolution(call: MixerCall, convolve: Callable[..., Tensor], hidden_1TC: Tensor, cache: None) -> Tensor:
    """Convolution [1, T, C] of each document that skips tokens."""
    mixer: Any = call.mixer

    def alone(x_1CN: Tensor) -> Tensor:
        return convolve(x_1CN.transpose(1, 2), None).transpose(1, 2)

    width = mixer.short_conv_state_len + 1
    return convolve_documents(hidden_1TC.transpose(1, 2), width, alone, mixer, call.context, "dilated").transpose(1, 2)


# path of a method from its mixer -> the function that stands in for it
METHODS: dict[str, Callable[..., Any]] = {
    "act_fn.forward": lightning_inputs,
    "norm.forward": lightning_attention,
    "conv_1d.forward": own_convolution,
    "rg_lru._rnn_scan": gated_linear_scan,
    "conv_qk_depthwise.forward": stacked_convolutions,
    "conv_qk_grouped.forward": done_before,
    "v_proj_delayed.forward": delayed_values,
    "time_shift.forward": shifted_tokens,
    "mlstm_backend.forward": matrix_memory,
    "ple_embedding.forward": hashed_ngrams,
    "_short_conv": dilated_convolution,
}


# function that chooses between a kernel and transformers' own torch code by itself -> name of the latter
_TORCH_CODE = {"rwkv_linear_attention": "rwkv_linear_attention_cpu"}
# attribute of a mixer: what chooses the kernel of its convolution
CONVOLUTIONS = "_longctx_convolutions"
# mark of a mixer that runs without kernels
_NO_KERNELS = "_longctx_without_kernels"
# method of a decoder that divides weights for evaluation and multiplies them back; attribute that says which came last
_DIVIDE, _DIVIDED = "_rescale_layers", "layers_are_rescaled"


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The mixers of a model that run under plans, by name."""
    return {name: module for name, module in model.named_modules() if class_name(module) in MIXERS}


def num_scans(mixer: nn.Module) -> int:
    """Number of calls of the last function in a forward of `mixer`."""
    scans = MIXERS[class_name(mixer)].scans
    return int(getattr(mixer, scans)) if scans else 1


def num_calls(module: nn.Module) -> int:
    """Number of mixers and of attention layers in `module`, each of which gets the plan once in a forward."""
    mixers = mixers_of(module).values()
    others = (each for each in module.modules() if each not in mixers)
    return len(mixers) + sum(type(each).__name__.endswith("Attention") for each in others)


class MixerPatch:
    """Gives every mixer of a model a forward that runs plans."""

    def needed(self, model: nn.Module) -> bool:
        """Whether the text model has mixers."""
        return bool(mixers_of(text_part(model)))

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for a forward of others."""
        for module, function, name in _methods(text_part(model)):
            give(module, function, name)

    def undo(self, model: nn.Module) -> None:
        """Leaves a forward that accelerate has wrapped in the meantime."""
        for module, function, name in _methods(model):
            take(module, function, name)


def _methods(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any], str]]:
    """Every method that a model gets: its module, the function and its name."""
    yield from ((mixer, _forward, "forward") for mixer in mixers_of(model).values())
    yield from ((parent, _parent_forward, "forward") for parent in _parents(model))
    yield from ((decoder, _keep_weights, _DIVIDE) for decoder in _dividing(model))


def _dividing(model: nn.Module) -> list[nn.Module]:
    """Decoders that divide weights, and hidden states to match, when they first run in evaluation mode."""
    return [module for module in model.modules() if hasattr(type(module), _DIVIDE)]


def _keep_weights(decoder: nn.Module) -> None:
    """Keeps weights undivided in evaluation too, since checkpoints may be written then; only fp16 would overflow."""


def _parents(model: nn.Module) -> list[nn.Module]:
    """Modules around mixers that get the plan's context and do not pass it on."""
    names = {known.parent for known in MIXERS.values() if known.parent}
    return [module for module in model.modules() if type(module).__name__ in names]


def _parent_forward(parent: nn.Module, *args: Any, longctx: Any = None, **keywords: Any) -> Any:
    """The forward of the parent's class, whose mixers find the plan's context."""
    if longctx is None:
        return type(parent).forward(parent, *args, **keywords)
    with carrying((child for child in parent.children() if type(child).__name__ in MIXERS), longctx):
        return type(parent).forward(parent, *args, **keywords, longctx=longctx)


def leave_kernels_out(model: nn.Module) -> None:
    """Makes patched mixers of `model` run transformers' own torch functions without a plan too."""
    for mixer in mixers_of(model).values():
        vars(mixer)[_NO_KERNELS] = True


def state_problems(model: nn.Module) -> list[str]:
    """Returns why states would not pass through the layers of a model with mixers, by layer and class; empty if they do."""
    mixers = mixers_of(model)
    if not mixers and mixer_of(model) is None:
        return []
    known = tuple(f"{name}." for name in mixers)
    others = [
        f"{name} ({type(module).__name__}) carries a state along the sequence, and only {', '.join(sorted(MIXERS))} are "
        f"supported; use one of these"
        for name, module in model.named_modules()
        if name not in mixers
        and not name.startswith(known)
        # the model and the layer around a mixer may be named after it, and so may norms
        and name
        and not any(mixer.startswith(f"{name}.") for mixer in mixers)
        and not type(module).__name__.endswith("Norm")
        and re.search(STATE_WORDS, type(module).__name__)
    ]
    divided = [
        f"{name} ({type(module).__name__}) has divided its weights in a forward in evaluation mode, and plans would train these; "
        f"load the model anew, or run it once in training mode"
        for name, module in model.named_modules()
        if getattr(module, _DIVIDED, False)
    ]
    parents = [
        f"{name} ({type(parent).__name__}) has a forward that is not its class's, in whose place plans run theirs; remove it"
        for name, parent in model.named_modules()
        if parent in _parents(model) and (own := own_forward(parent)) is not None and not is_ours(own)
    ]
    return (
        others[:1] + divided + parents[:1] + [problem for name, mixer in mixers.items() if (problem := _problem(name, mixer))][:1]
    )


def _problem(name: str, mixer: nn.Module) -> str:
    function = inspect.unwrap(type(mixer).forward)
    where = f"{name} ({type(mixer).__name__})"
    if is_replaced(mixer, _forward):
        return f"{where} has a forward that is not its class's, so its states cannot be passed on; remove it from the module"
    known = MIXERS[class_name(mixer)]
    modules = [path.partition(".")[0] for path in known.methods]
    missing = [each for each in (*known.functions, *modules) if each not in _names_in(type(mixer), function)]
    if missing:
        return (
            f"the forward of {where} does not call {' and '.join(missing)} in this version of transformers, so its states cannot "
            f"be passed on; use the newest version that docs/models.md names"
        )
    if not is_written_by(type(mixer).forward, "transformers", "torch"):
        return (
            f"the forward of the class of {where} was replaced by a function that wraps it, and plans would leave that out; hook "
            f"the module (register_forward_hook) in its place"
        )
    if foreign := [each for each in known.functions if isinstance(inspect.unwrap(function.__globals__[each]), nn.Module)]:
        return (
            f"{where} calls {foreign[0]} through the package kernels, whose numbers are not tested under plans; set "
            f"USE_HUB_KERNELS=0 in the environment before transformers is imported"
        )
    for path in known.methods:
        owner = mixer.get_submodule(path.rpartition(".")[0])
        method = getattr(owner, path.rpartition(".")[2])
        if not is_written_by(method, "transformers", "torch", "peft"):
            return f"{where} has another {path} than that of its class, which plans would leave out; remove it"
    return _hook_problem(where, mixer)


def _names_in(kind: type[nn.Module], function: Any) -> set[str]:
    """Names in the code of a mixer's forward, and in that of methods of its class that the forward calls."""
    own = function.__code__.co_names
    methods = [vars(kind)[name] for name in own if isinstance(vars(kind).get(name), FunctionType)]
    return {*own, *(name for method in methods for name in method.__code__.co_names)}


def _hook_problem(where: str, mixer: nn.Module) -> str:
    """Problem with hooks on modules whose forward plans replace; our own hooks, which only read, are allowed."""
    for path in dict.fromkeys(MIXERS[class_name(mixer)].methods):
        owner, _, method = path.rpartition(".")
        if method != "forward":
            continue
        inside = mixer.get_submodule(owner).modules()
        hooks = [hook for module in inside for kind in HOOKS for hook in getattr(module, kind).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("hf_longctx.") for hook in hooks):
            return (
                f"{where} has a hook on its module {owner}, which gets and returns other tensors under plans than under the "
                f"forward of the class; remove it, or hook the whole {type(mixer).__name__}"
            )
    return ""


def _forward(mixer: nn.Module, *args: Any, longctx: Any = None, **keywords: Any) -> Any:
    """The forward of a mixer: that of its class, with our functions under a plan."""
    longctx = longctx or carried(mixer)
    if longctx is None and _NO_KERNELS not in vars(mixer):
        return type(mixer).forward(mixer, *args, **keywords)
    own, name = inspect.unwrap(type(mixer).forward), class_name(mixer)
    known = MIXERS[name]
    functions = {each: inspect.unwrap(own.__globals__[_TORCH_CODE.get(each, each)]) for each in known.functions}
    left_out = {known.fused: _nothing} if known.fused else {}
    if longctx is None:
        return with_globals(own, functions | left_out)(mixer, *args, **keywords)
    if (mask := keywords.get("attention_mask")) is not None and (mask.numel() == 1 or known.makes_mask):
        # every forward under a plan gets such a mask, which masks nothing
        keywords["attention_mask"] = None
    for unwanted in ("attention_mask", *CACHES):
        given = keywords.get(unwanted)
        # the mask of plans is a single number
        if given is not None and not (isinstance(given, Tensor) and given.numel() == 1):
            raise ValueError(
                f"{name} got {unwanted} under a plan, which has none; run the model through the plan's executor only"
            )
    # hooks may have been added after the start
    if problem := _hook_problem(name, mixer):
        raise ValueError(problem)
    call = MixerCall(mixer, longctx)
    ours = {each: partial(_stand_in, each, function, call) for each, function in functions.items()}
    with _with_methods(mixer, known.methods, call):
        output = with_globals(own, ours | left_out)(mixer, *args, **keywords)
    expected = [*known.functions, *known.functions[-1:] * (num_scans(mixer) - 1), *known.methods]
    if sorted(call.called) != sorted(expected):
        raise RuntimeError(
            f"{name} called {', '.join(call.called) or 'nothing'} in place of {', '.join(expected)}, so its states may be "
            f"wrong; use the newest version of transformers that docs/models.md names"
        )
    longctx.calls.count += 1
    return output


def _nothing(*args: Any, **keywords: Any) -> None:
    """Stands in for a kernel for a whole mixer; transformers does not use the kernel if it returns None."""


@contextmanager
def _with_methods(mixer: nn.Module, paths: Iterable[str], call: MixerCall) -> Iterator[None]:
    """Context in which our methods replace those of a mixer's modules."""
    owners = [(mixer.get_submodule(path.rpartition(".")[0]), path) for path in dict.fromkeys(paths)]
    before = [dict(vars(owner)) for owner, _ in owners]
    for owner, path in owners:
        name = path.rpartition(".")[2]
        vars(owner)[name] = partial(_stand_in, path, getattr(owner, name), call)
    try:
        yield
    finally:
        for (owner, path), own in zip(owners, before, strict=True):
            name = path.rpartition(".")[2]
            vars(owner).pop(name)
            if name in own:
                vars(owner)[name] = own[name]


def _stand_in(name: str, function: Any, call: MixerCall, *args: Any, **keywords: Any) -> Any:
    call.called.append(name)
    return (STAND_INS | METHODS)[name](call, function, *args, **keywords)

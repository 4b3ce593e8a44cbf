"""Stand-ins for methods of mixers that write their recurrence out inside their forward, for `functions.FAMILIES`.

Where a mixer calls no function that could be replaced, it calls modules of its own, whose methods are replaced while its forward
runs: a convolution, a scan, or those before and after its loop over blocks. These modules get and return other tensors than under
the forward of the class, so `patching` refuses hooks on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.hf.models.states.functions import MixerCall
from hf_longctx.plan.model.mixers import ScanSize, mlstm_scan
from hf_longctx.runtime.states.book import LayerScan
from hf_longctx.runtime.states.convolution import convolve_documents
from hf_longctx.runtime.states.passing import Decay
from hf_longctx.runtime.states.recurrence import MixerScan, scan_documents
from hf_longctx.runtime.states.scans import Decays, MatrixMemory, diagonal_scan, lightning_blocks

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
    """Outputs [1, T, W] of a gated linear recurrence over each document; every one of W channels has a state of its own.

    It runs in blocks in place of `scan`, which runs token by token and whose backward takes time in the square of the tokens.
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
    """Keeps queries, keys and values of lightning attention; returns zeros, on which the loop of the class runs in vain."""
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
    # behind `done_before`
    second = mixer.conv_qk_grouped.forward.args[1]
    num_read = mixer.conv_kernel_size

    def both(x_1CN: Tensor) -> Tensor:
        return second(convolve(F.pad(x_1CN, (num_read, 0))))

    return convolve_documents(padded_1CS[..., num_read:], num_read + 1, both, mixer, call.context)


def done_before(call: MixerCall, convolve: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns what `stacked_convolutions` has computed."""
    return x


def delayed_values(call: MixerCall, project: Callable[[Tensor], Tensor], hidden_1TC: Tensor) -> Tensor:
    """Values of the token before each token of a document, so that the class, which delays them by one token, gets them right.

    The class calls it for all tokens, and then for what stands before the first one.
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
    """Outputs [1, H, T, E] of an mLSTM over each document, whatever the mode in the config.

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
}

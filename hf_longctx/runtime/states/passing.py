"""Runs a recurrence over documents that ranks share: every rank scans its own tokens, then adds the effect of earlier ones.

A rank with tokens from the middle of a document scans them without the state S before them. Besides outputs and state for S = 0
it computes the effect of S on both. Most scans are linear in S: `state after = carry * S + after`.

In one exchange each rank gets `carry` and `after` of all earlier tokens of its documents. It combines them into its own S and
adds the effect of S to its outputs. No rank waits in line. Backward is one exchange too, in which a rank gets the summed
gradients of its `carry` and `after`. All of this is in at least fp32.

A slice's first tokens start from the state in the book. Every rank computes the state after the slice and leaves it in its book;
only the rank with the next slice's first tokens reads it, and the gradients of the copies are summed by the exchange.

Exchanges are differentiable: backward sends gradients back along the same paths. A block of ranks runs one all-to-all on its own
process group. The ranks of a ring have none, so they send messages on the group of all ranks, as in ring attention, and only if
the receiver needs something. State maps (`DeltaRule`, `Decay`, ...) describe the effect of S for known kinds of scans.

Shapes: H heads with their own state, G heads that several of them read, T tokens of this rank, N tokens of one run, K and E sizes
of a head's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.layout import Chains, GroupLayout
from hf_longctx.runtime.states.book import LayerScan, leave_state, slices_by_document, state_before


def exchange(sends: Sequence[Tensor], receive_sizes: Sequence[int], inputs: Sequence[Tensor], layout: GroupLayout) -> Tensor:
    """Returns the elements that all ranks send to this rank, in rank order.

    sends: a flat tensor for each rank, of one dtype. receive_sizes: elements from each rank. inputs: tensors from which the sent
    ones may be computed; if any has a gradient, this rank takes part in the backward, even if it sends nothing.
    """
    anchor = next((x for x in inputs if x.requires_grad), inputs[0])
    sizes = [send.numel() for send in sends], list(receive_sizes)
    received: Tensor = _Exchange.apply(torch.cat(tuple(sends)), anchor, *sizes, layout)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, send: Tensor, anchor: Tensor, send_sizes: list[int], receive_sizes: list[int], layout: GroupLayout
    ) -> Tensor:
        ctx.settings = send_sizes, receive_sizes, layout
        return _swap(send, send_sizes, receive_sizes, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        send_sizes, receive_sizes, layout = ctx.settings
        return _swap(gradient, receive_sizes, send_sizes, layout), None, None, None, None


def _swap(send: Tensor, send_sizes: list[int], receive_sizes: list[int], layout: GroupLayout) -> Tensor:
    """Sends each rank its part of `send`; returns what this rank receives."""
    received = send.new_empty(sum(receive_sizes))
    if layout.is_block:
        dist.all_to_all_single(received, send.contiguous(), receive_sizes, send_sizes, group=layout.process_group)
        return received
    parts = zip(layout.ranks, send.split(send_sizes), received.split(receive_sizes), strict=True)
    operations = []
    for index, (rank, outgoing, arriving) in enumerate(parts):
        if index == layout.index:
            arriving.copy_(outgoing)
            continue
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), rank, group=layout.process_group))
        if arriving.numel():
            operations.append(dist.P2POp(dist.irecv, arriving, rank, group=layout.process_group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    return received


def with_backward_of(output: Tensor, *others: Tensor) -> Tensor:
    """Returns `output`, whose backward also runs that of `others`, with zero gradients from here.

    For tensors whose backward must run even if this rank does not use them: states and results of collectives.
    """
    waiting = [other for other in others if other.requires_grad]
    if not waiting:
        return output
    returned: Tensor = _WithBackward.apply(output, *waiting)
    return returned


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype) for other in others]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        zeros = (torch.zeros(shape, dtype=dtype, device=gradient.device) for shape, dtype in ctx.shapes)
        return gradient, *zeros


def fetch_tokens(
    x_1CT: Tensor, num_read: int, going_on: tuple[int, ...], layout: GroupLayout
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Returns up to `num_read` tokens before each run of this rank, and the last ones of documents `going_on`, each [1, C, N].

    Also returns the received tensors. Collective over the group.
    """
    channels = x_1CT.shape[1]
    fetch = layout.fetch_before(num_read, going_on)
    if layout.num_ranks == 1:
        parts = [x_1CT[..., tokens] for tokens in fetch.outgoing[0]]
        received: tuple[Tensor, ...] = ()
    else:
        nothing = x_1CT[0, :, :0].reshape(-1)
        sends = [torch.cat([nothing, *(x_1CT[0, :, each].reshape(-1) for each in tokens)]) for tokens in fetch.outgoing]
        sizes = [channels * num_tokens for arriving in fetch.arriving for num_tokens in arriving]
        receive_sizes = [channels * sum(arriving) for arriving in fetch.arriving]
        flat = exchange(sends, receive_sizes, (x_1CT,), layout)
        parts, received = [part.view(1, channels, -1) for part in flat.split(sizes)], (flat,)
    nothing_1CN = x_1CT[..., :0]
    return [torch.cat([parts[place] for place in places], dim=-1) if places else nothing_1CN for places in fetch.order], received


# (tokens of one document or slice, with weights of its heads; state before them, None: zeros) -> outputs, state after them
Scan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of tokens on a state S before them that is still unknown."""

    # the state after the tokens if S is zero
    after: Tensor
    # effect of the tokens on S, see `StateMap.joined`
    carry: Tensor
    # S to outputs of the tokens [1, N, H, E]
    output: Callable[[Tensor], Tensor]


class StateMap(Protocol):
    """Effect of the state before the tokens, for one kind of scan."""

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Returns inputs and first state with which the scan also computes the effect of a state before the tokens."""

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """Returns the effect of tokens. output, after: the scan's results for the widened inputs."""

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Returns the shape of the carry for states of this shape."""

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """Returns the state after the tokens of `carry` and `after`, if it was `state` before them."""


# effect of a run on states: (carry, state after it); no carry at the start of a document
Step = tuple[Tensor | None, Tensor]


def scan_runs(
    inputs_1THX: Sequence[Tensor],
    weights_H: Sequence[Tensor],
    scan: Scan,
    state_map: StateMap,
    of: LayerScan,
    context: GroupContext,
) -> Tensor:
    """Returns outputs [1, T, H, E] of `scan` over each document of a chunk, for this rank's tokens and all heads.

    Every rank of the context's group must call it for layers in the same order; backward repeats the exchange in reverse.
    """
    layout, slices = context.layout, slices_by_document(context)
    going_on = tuple(slice_.document for slice_ in slices.values() if slice_.stop < slice_.end)
    earlier = {document: state_before(slice_, of.function, of.layer, context) for document, slice_ in slices.items()}
    outputs: dict[int, Tensor] = {}
    effects: dict[int, Effect] = {}
    steps: list[Step] = []
    for place, run in enumerate(layout.own):
        mine = [x[:, run.tokens] for x in inputs_1THX]
        if run.start == 0:
            outputs[place], after = scan([*mine, *weights_H], earlier.get(run.document))
            steps.append((None, _wide(after)))
        else:
            wide, first = state_map.widened(mine)
            effects[place] = effect = state_map.effect(mine, weights_H, *scan([*wide, *weights_H], first))
            steps.append((_wide(effect.carry), _wide(effect.after)))
    chains = layout.chains(going_on)
    # autocast must not round products of states
    with torch.autocast(inputs_1THX[0].device.type, enabled=False):
        known, received = _exchanged(steps, (*inputs_1THX, *weights_H), chains, state_map, layout)
        ends: dict[int, Tensor] = {}
        for document, chain in chains.runs.items():
            state: Tensor | None = None
            for rank, place in chain:
                if rank == layout.index and state is not None:
                    outputs[place] = effects[place].output(state)
                # runs after this rank's last one
                if (rank, place) not in known:
                    break
                carry, after = known[rank, place]
                state = after if carry is None or state is None else state_map.joined(carry, state, after)
            if document in going_on and state is not None:
                ends[document] = state
    output = outputs[0] if len(outputs) == 1 else torch.cat([outputs[place] for place in range(len(outputs))], dim=1)
    for document in going_on:
        output = leave_state(slices[document], of.function, of.layer, context, ends[document], output)
    # this rank may use neither the received steps nor the states
    return with_backward_of(output, received, *(state for state in earlier.values() if state is not None))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _exchanged(
    steps: Sequence[Step], inputs: Sequence[Tensor], chains: Chains, state_map: StateMap, layout: GroupLayout
) -> tuple[dict[tuple[int, int], Step], Tensor]:
    """Returns steps of own and received runs by (rank, index of the run), and the received tensor.

    steps: steps of own runs. inputs: tensors from which they may be computed.
    """
    state = steps[0][1]
    carry_shape = state_map.carry_shape(state.shape)
    numbers = math.prod(carry_shape)
    sends = []
    for rank in range(layout.num_ranks):
        told = [step for step, readers in zip(steps, chains.readers[layout.index], strict=True) if rank in readers]
        flats = [x.reshape(-1) for step in told for x in step if x is not None]
        sends.append(torch.cat(flats) if flats else state.new_empty(0))
    arriving = [
        (rank, place, bool(run.start))
        for rank, runs in enumerate(layout.runs)
        for place, (run, readers) in enumerate(zip(runs, chains.readers[rank], strict=True))
        if layout.index in readers
    ]
    sizes = [numbers * has_carry + state.numel() for _, _, has_carry in arriving]
    receive_sizes = [0] * layout.num_ranks
    for (rank, _, _), size in zip(arriving, sizes, strict=True):
        receive_sizes[rank] += size
    received = exchange(sends, receive_sizes, inputs, layout)
    found: dict[tuple[int, int], Step] = {(layout.index, place): step for place, step in enumerate(steps)}
    for (rank, place, has_carry), flat in zip(arriving, received.split(sizes), strict=True):
        carry, after = flat.split([numbers * has_carry, state.numel()])
        found[rank, place] = carry.view(carry_shape) if has_carry else None, after.view(state.shape)
    return found, received


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """State map of delta rules, with states [1, H, K, E], a row per element of a key; inputs: queries, keys, values, others.

    Columns of the state do not read each other. So K more columns, with values of zero and a first state of one, give the
    matrices by which a token's output and the last state multiply a state before the tokens.
    """

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Returns inputs with K more columns of values, and their first state."""
        q, k, v, *others = inputs_1NHX
        key_size, value_size, num_heads = k.shape[-1], v.shape[-1], v.shape[2]
        wide = torch.promote_types(v.dtype, torch.float32)
        one = torch.eye(key_size, dtype=wide, device=v.device).expand(1, num_heads, key_size, key_size)
        # outputs have the dtype of queries; the terms of an output are rounded once, after their sum
        return (q.to(wide), k, F.pad(v, (0, key_size)), *others), F.pad(one, (value_size, 0))

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """Returns the effect of tokens, from the added columns."""
        value_size, dtype = inputs_1NHX[2].shape[-1], inputs_1NHX[0].dtype
        own_1NHE, reads_1NHK = output[..., :value_size], output[..., value_size:]

        def output_for(state_1HKE: Tensor) -> Tensor:
            added = reads_1NHK.transpose(1, 2) @ state_1HKE.to(reads_1NHK.dtype)
            return (own_1NHE + added.transpose(1, 2)).to(dtype)

        return Effect(after[..., :value_size], after[..., value_size:], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Returns the shape of a K x K matrix for each head."""
        return (*state[:-1], state[-2])

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """Returns the matrix times the state, plus what the tokens added."""
        return carry @ state + after


@dataclass(frozen=True, slots=True)
class Decay:
    """State map of Mamba 2, with states [1, H, E, K] that decay by one number per token and head.

    log_decays: inputs and weights of the scan to the logarithms of these numbers [1, N, H]. reads: inputs to the factors from a
    state to the output, for each token and group of heads [1, N, G, K].
    """

    log_decays: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    reads: Callable[[Sequence[Tensor]], Tensor]

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """The inputs themselves: what a state adds is computed from its decay alone."""
        return inputs_1NHX, None

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """Returns the effect of tokens."""
        decays_1NH = self.log_decays(inputs_1NHX, weights_H)
        # in 16 bits, the sum would stop growing after some hundred tokens
        left_1NH = decays_1NH.to(torch.promote_types(decays_1NH.dtype, torch.float32)).cumsum(dim=1).exp()
        reads_1NGK = self.reads(inputs_1NHX).to(left_1NH.dtype)

        def output_for(state_1HEK: Tensor) -> Tensor:
            num_tokens, num_groups, size = reads_1NGK.shape[1:]
            by_group = state_1HEK.to(left_1NH.dtype).reshape(num_groups, -1, size)
            added_GNE = reads_1NGK[0].transpose(0, 1) @ by_group.transpose(1, 2)
            added = added_GNE.transpose(0, 1).reshape(1, num_tokens, *state_1HEK.shape[1:3])
            return (output + added * left_1NH.unsqueeze(-1)).to(output.dtype)

        return Effect(after, left_1NH[:, -1, :, None, None], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Returns the shape of one number for each head."""
        return (*state[:2], 1, 1)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The state times its decay, and what the tokens added."""
        return carry * state + after


@dataclass(frozen=True, slots=True)
class ChannelDecay:
    """State map of Mamba 1, with states [1, H, K] whose elements each have their own decay; every channel is a head."""

    # inputs and weights of the scan to the decay of each head by each token [1, N, H]
    steps: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    # weights to the logarithm of what a step of one leaves of each element, [H, K]
    decays: Callable[[Sequence[Tensor]], Tensor]
    # inputs to the factors from a state to the outputs of all heads [1, N, K]
    reads: Callable[[Sequence[Tensor]], Tensor]

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """The inputs themselves: what a state adds is computed from its decay alone."""
        return inputs_1NHX, None

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """Returns the effect of tokens; outputs are [1, N, H, 1]."""
        decays_HK, reads_1NK = self.decays(weights_H), self.reads(inputs_1NHX)
        passed_1NH = self.steps(inputs_1NHX, weights_H).to(decays_HK.dtype).cumsum(dim=1)

        def output_for(state_1HK: Tensor) -> Tensor:
            left_1NHK = torch.exp(decays_HK * passed_1NH.unsqueeze(-1)) * state_1HK.unsqueeze(1)
            added_1NH1 = left_1NHK @ reads_1NK.to(left_1NHK.dtype).unsqueeze(-1)
            return (output + added_1NH1).to(output.dtype)

        return Effect(after, torch.exp(decays_HK * passed_1NH[:, -1].unsqueeze(-1)), output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Returns the shape of one number for each element of the state."""
        return tuple(state)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The state times its decay, and what the tokens added."""
        return carry * state + after

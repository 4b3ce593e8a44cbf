"""A recurrence over documents that ranks share: every rank scans its own tokens at once, and then learns the states before them.

A rank that holds tokens from the middle of a document scans them without knowing the state S before them, and finds besides
outputs and state for S = 0 what S changes in both. Most scans are linear in S: `state after = carry * S + after`.
One exchange tells each rank `carry` and `after` of all earlier tokens of its documents. It folds them into its own S, and adds
what S adds to its outputs. No rank waits in line, and backward is one exchange too, in which a rank gets the sum of what others
made of its `carry` and `after`. All of this is in at least fp32.

A slice's first tokens start from the state in the book. Every rank finds the state after the slice and leaves it in its book;
only the rank with the next slice's first tokens reads it there, and the gradients of the copies are summed by the exchange.

Shapes: H heads with a state of their own, T tokens of this rank, N tokens of one run, E size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.layout import Chains, GroupLayout
from hf_longctx.runtime.states.book import LayerScan, leave_state, slices_by_document, state_before
from hf_longctx.runtime.states.messages import exchange, with_backward_of

# takes the tokens of one document or slice and the weights of its heads, and the state before the tokens (None: zeros); returns
# outputs and the state after them
Scan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of tokens on a state S before them that is not known yet.

    after: the state after the tokens if S is zero. carry: what S becomes, see `StateMap.joined`. output: their outputs
    [1, N, H, E], for S.
    """

    after: Tensor
    carry: Tensor
    output: Callable[[Tensor], Tensor]


class StateMap(Protocol):
    """How a kind of scan depends on the state before its tokens."""

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Inputs and first state with which the scan also finds what a state before the tokens would add."""

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """The effect of tokens. output, after: what the scan made of the widened inputs."""

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Shape of the carry that belongs to states of this shape."""

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The state after the tokens of `carry` and `after`, if it was `state` before them."""


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
    """Outputs [1, T, H, E] of `scan` over each document of a chunk, for this rank's tokens, with all heads on every rank.

    Every rank of the context's group must call it for the layers in the same order; backward repeats the exchange in reverse.
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
    # products of states are not rounded by autocast
    with torch.autocast(inputs_1THX[0].device.type, enabled=False):
        known, received = _exchanged(steps, (*inputs_1THX, *weights_H), chains, state_map, layout)
        ends: dict[int, Tensor] = {}
        for document, chain in chains.runs.items():
            state: Tensor | None = None
            for rank, place in chain:
                if rank == layout.index and state is not None:
                    outputs[place] = effects[place].output(state)
                # runs behind this rank's last one
                if (rank, place) not in known:
                    break
                carry, after = known[rank, place]
                state = after if carry is None or state is None else state_map.joined(carry, state, after)
            if document in going_on and state is not None:
                ends[document] = state
    output = outputs[0] if len(outputs) == 1 else torch.cat([outputs[place] for place in range(len(outputs))], dim=1)
    for document in going_on:
        output = leave_state(slices[document], of.function, of.layer, context, ends[document], output)
    # this rank may use neither what it received nor the states
    return with_backward_of(output, received, *(state for state in earlier.values() if state is not None))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _exchanged(
    steps: Sequence[Step], inputs: Sequence[Tensor], chains: Chains, state_map: StateMap, layout: GroupLayout
) -> tuple[dict[tuple[int, int], Step], Tensor]:
    """Steps of own runs and of those that others told of, by (rank, index of the run); and all that was received.

    steps: those of own runs. inputs: tensors of which these may be made.
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

"""Records hidden states after the embedding and the layers, and their gradients, for each token on whichever rank it runs.

Also records the states that layers with a state along the sequence leave at the end of a slice, for the heads of this rank.

`self_test.specimen` records the planned and the plain run, and compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_longctx.plan.core.sharding import head_shares
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.states.book import CONVOLUTION

# the two recorded quantities
Kind = Literal["values", "gradients"]
# (sequence, start, stop, first): tokens [start, stop) of a sequence, which begin at index `first` of the row in a forward
Part = tuple[int, int, int, int]
# (site, function, sequence, position): where a state was left
Left = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class LeftState:
    """A state, of all channels or heads, or of the heads of one rank: rank `index` of `num_ranks` that share the heads."""

    state: Tensor
    index: int = 0
    num_ranks: int = 1


class HiddenTrace:
    """Records the outputs of `modules`, and the gradients of these outputs, while `recording` says which tokens run.

    `modules` is keyed by site. Forwards outside of `recording`, such as replays, are not recorded. Neither are outputs that do
    not have one vector for every token of one row, [1, T, ...].
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.records: dict[tuple[Kind, int], dict[tuple[int, int, int], Tensor]] = {}
        self.states: dict[Left, LeftState] = {}
        self._parts: Sequence[Part] | None = None
        self._modules = modules

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the modules have hooks."""
        with ExitStack() as undo:
            for site, module in self._modules.items():
                undo.callback(module.register_forward_hook(self._hook(site)).remove)
            yield

    @contextmanager
    def recording(self, parts: Sequence[Part]) -> Iterator[None]:
        """Context in which forwards run the tokens of `parts`."""
        self._parts = parts
        try:
            yield
        finally:
            self._parts = None

    def keep_states(self, context: GroupContext) -> None:
        """Records the states that are in the context's book."""
        sites = {id(inner): site for site, module in self._modules.items() for inner in module.modules()}
        for place, state in context.state_book.held().items():
            block = context.block
            shared = (0, 1) if place.function == CONVOLUTION else (block.index, block.num_ranks)
            left = (sites[id(place.layer)], place.function, place.sequence, place.position)
            self.states[left] = LeftState(state.detach().to(torch.float64, copy=True), *shared)

    def whole(self, kind: Kind, site: int, sequence: int) -> Tensor | None:
        """The record of a sequence that ran in one piece, [tokens, hidden size]; None if the sequence has no record."""
        pieces = [tensor for key, tensor in self.records.get((kind, site), {}).items() if key[0] == sequence]
        return pieces[0] if pieces else None

    def _hook(self, site: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if (parts := self._parts) is None:
                return
            hidden_1TC: Tensor = output if isinstance(output, Tensor) else output[0]
            num_tokens = max((first + stop - start for _, start, stop, first in parts), default=0)
            if hidden_1TC.ndim < 3 or hidden_1TC.shape[0] != 1 or hidden_1TC.shape[1] < num_tokens:
                return
            self._keep("values", site, parts, hidden_1TC)
            if not torch.is_grad_enabled():
                return
            if not hidden_1TC.requires_grad:
                # the output of a frozen embedding needs no gradient by itself
                hidden_1TC.requires_grad_()
            hidden_1TC.register_hook(lambda gradient: self._keep("gradients", site, parts, gradient))

        return hook

    def _keep(self, kind: Kind, site: int, parts: Sequence[Part], tensor_1TC: Tensor) -> None:
        record = self.records.setdefault((kind, site), {})
        for sequence, start, stop, first in parts:
            record[sequence, start, stop] = tensor_1TC.detach()[0, first : first + stop - start].to(torch.float64, copy=True)


def difference(found: HiddenTrace, plain: HiddenTrace, kind: Kind, site: int, stop: int | None = None) -> float:
    """Largest distance of a token's vector in `found` from its vector in `plain`, relative to the longest vector in `plain`.

    Only tokens before `stop` that `found` has are compared; the vector of a token without a record in `plain` counts as zero.
    """
    reference = plain.records.get((kind, site), {})
    scale = max((float(tensor.norm(dim=-1).max()) for tensor in reference.values()), default=0.0)
    worst = 0.0
    for (sequence, start, end), tensor in found.records.get((kind, site), {}).items():
        num_tokens = (end if stop is None else min(stop, end)) - start
        if num_tokens <= 0:
            continue
        expected = plain.whole(kind, site, sequence)
        gap = tensor if expected is None else tensor - expected[start:end]
        distance = float(gap[:num_tokens].norm(dim=-1).max())
        # NaN counts as the largest distance
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst / scale if scale else worst


def state_differences(found: HiddenTrace, plain: HiddenTrace) -> dict[int, float]:
    """For each site, the largest distance of a state in `found` from that in `plain`, relative to the norm of the latter.

    Leaves out states that `plain` lacks.
    """
    worst: dict[int, float] = {}
    for left, own in found.states.items():
        if left not in plain.states:
            # the class keeps its states itself
            continue
        # a cache of transformers may keep a token more than the convolution reads
        expected = plain.states[left].state[..., -own.state.shape[-1] :]
        num_heads = expected.shape[1]
        # ranks that pass states on have all heads
        if own.state.shape[1] < num_heads:
            share = head_shares(num_heads, num_heads, own.num_ranks)[own.index]
            expected = expected[:, share.q_start : share.q_stop]
        scale, gap = float(expected.norm()), float((own.state - expected).norm())
        # NaN counts as the largest distance
        distance = gap / scale if scale else gap
        worst[left[0]] = max(worst.get(left[0], 0.0), distance if distance == distance else float("inf"))
    return worst


def largest(trace: HiddenTrace, kind: Kind, site: int, sequences: Sequence[int], stop: int | None = None) -> float:
    """The largest absolute element recorded for those tokens of `sequences` that come before `stop`."""
    tensors = [
        tensor[: None if stop is None else max(0, stop - start)]
        for (sequence, start, _), tensor in trace.records.get((kind, site), {}).items()
        if sequence in sequences
    ]
    values = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return max((value if value == value else float("inf") for value in values), default=0.0)

"""Records hidden states after the embedding and the layers, and their gradients, for each token on whichever rank it runs.

`self_test.specimen` records the planned and the plain run, and compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

# the two recorded quantities
Kind = Literal["values", "gradients"]
# (sequence, start, stop, first): tokens [start, stop) of a sequence, which begin at index `first` of the row in a forward
Part = tuple[int, int, int, int]


class HiddenTrace:
    """Records the outputs of `modules`, and the gradients of these outputs, while `recording` says which tokens run.

    `modules` is keyed by site. Forwards outside of `recording`, such as replays, are not recorded. Neither are outputs that do
    not have one vector for every token of one row, [1, T, ...].
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.records: dict[tuple[Kind, int], dict[tuple[int, int, int], Tensor]] = {}
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


def largest(trace: HiddenTrace, kind: Kind, site: int, sequences: Sequence[int], stop: int | None = None) -> float:
    """The largest absolute element recorded for those tokens of `sequences` that come before `stop`."""
    tensors = [
        tensor[: None if stop is None else max(0, stop - start)]
        for (sequence, start, _), tensor in trace.records.get((kind, site), {}).items()
        if sequence in sequences
    ]
    values = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return max((value if value == value else float("inf") for value in values), default=0.0)

"""The state book: states of mixers at the ends of slices, kept for the next slice, and the gradients that come back for them.

Layers such as linear attention carry a state from token to token. A slice starts from the state after the slice before, so there
is one book per micro-batch, made with the K/V book. States are stored by position in the sequence, so that recomputing a slice
finds what its first run wrote.

A stored state is a leaf of autograd, so no graph reaches from one chunk into another. Slices run backward in reverse order: the
next slice leaves its gradient at the leaf, and the slice that made the state takes it from there, through a node on the mixer's
output. So autograd needs no further roots.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Key of a state: the layer and its function that made the state, the sequence, and the number of tokens before the state."""

    layer: Hashable
    function: str
    sequence: int
    position: int


class StateBook:
    """States of the sliced sequences of one micro-batch, and the gradients left for them.

    A state is held from the forward of the slice that makes it to that slice's backward. has_backward: false if only forwards
    run; a state is then freed when the next slice takes it.
    """

    def __init__(self, has_backward: bool = True) -> None:
        self.has_backward = has_backward
        self._states: dict[StatePlace, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of states and gradients currently held."""
        return sum(state.nbytes * (1 if state.grad is None else 2) for state in self._states.values())

    def held(self) -> dict[StatePlace, Tensor]:
        """Returns the states currently held."""
        return dict(self._states)

    def put(self, place: StatePlace, state: Tensor, output: Tensor) -> Tensor:
        """Stores the state after a slice; returns `output`, whose backward gives the state its gradient.

        output: a result of the same layer for the same slice that the loss uses.
        """
        if place not in self._states:
            # a copy, since a state may be a view of something larger
            self._states[place] = state.detach().clone().requires_grad_(state.requires_grad)
        if not state.requires_grad:
            return output
        returned: Tensor = _HandBack.apply(output, state, self, place)
        return returned

    def take(self, place: StatePlace) -> Tensor:
        """Returns the state after the slice before; its gradient will be given to that slice.

        Raises RuntimeError if there is none.
        """
        state = self._states.get(place) if self.has_backward else self._states.pop(place, None)
        if state is None:
            raise RuntimeError(
                f"a slice from token {place.position} of sequence {place.sequence} ran forward without the state of the tokens "
                f"before it; slices must run forward in order, and none again after its backward"
            )
        return state

    def gradient(self, place: StatePlace) -> Tensor:
        """Returns the gradient that the next slice left for a state, and frees both.

        Raises RuntimeError if the next slice has not run backward.
        """
        gradient = self._states[place].grad if place in self._states else None
        if gradient is None:
            raise RuntimeError(
                f"a slice up to token {place.position} of sequence {place.sequence} ran backward before the slice after it; "
                f"slices must run backward once each, the last slice first"
            )
        del self._states[place]
        return gradient

    def close(self, sequence: int) -> None:
        """Frees the rest of a sequence, because layers below the first trainable weight never run backward."""
        for place in [place for place in self._states if place.sequence == sequence]:
            del self._states[place]


class _HandBack(torch.autograd.Function):
    """Returns `output` unchanged; its backward gives `state` its gradient from the book."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, state: Tensor, book: StateBook, place: StatePlace) -> Tensor:
        ctx.book, ctx.place = book, place
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient, ctx.book.gradient(ctx.place), None, None

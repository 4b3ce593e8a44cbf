"""Reads states of a chunk's slices from the state book and writes them there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.kv_book import Slice
from hf_longctx.runtime.attention.state_book import StatePlace

# name of a layer's function that leaves states
CONVOLUTION = "convolution"
RECURRENCE = "recurrence"


def scan_name(number: int) -> str:
    """Returns the name of a layer's scan, counted from 1; most layers have one."""
    return RECURRENCE if number == 1 else f"{RECURRENCE} {number}"


@dataclass(frozen=True, slots=True)
class LayerScan:
    """A scan of a layer: the layer, and the scan's name in the state book; most layers have one."""

    layer: Hashable
    function: str = RECURRENCE


def check_not_lent(context: GroupContext) -> None:
    """Raises ValueError for a slice that ranks of several stages run, since states are not passed between them."""
    if context.lent_slice is not None:
        raise ValueError(
            "the slice is lent ranks of other stages, but layers with a state along the sequence do not run there; set "
            "lend_stages=False"
        )


def slices_by_document(context: GroupContext) -> dict[int, Slice]:
    """Returns the slices of a chunk by index of their documents."""
    return {slice_.document: slice_ for slice_ in context.slices}


def state_before(slice_: Slice | None, function: str, layer: Hashable, context: GroupContext) -> Tensor | None:
    """Returns the state from which a slice starts; None at the start of a sequence and for whole documents."""
    if slice_ is None or not slice_.start:
        return None
    return context.state_book.take(StatePlace(layer, function, slice_.sequence, slice_.start))


def leave_state(
    slice_: Slice | None, function: str, layer: Hashable, context: GroupContext, state: Tensor, output: Tensor
) -> Tensor:
    """Stores the state after a slice in the book if the sequence continues; returns `output` (`StateBook.put`)."""
    if slice_ is None or slice_.stop == slice_.end:
        return output
    return context.state_book.put(StatePlace(layer, function, slice_.sequence, slice_.stop), state, output)

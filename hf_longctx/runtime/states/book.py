"""States that the slices of a chunk find in the state book and leave there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.kv_book import Slice
from hf_longctx.runtime.attention.state_book import StatePlace

# functions of a layer that leave states
CONVOLUTION = "convolution"
RECURRENCE = "recurrence"


def scan_name(number: int) -> str:
    """Name of a layer's scan, counted from 1; most layers have one."""
    return RECURRENCE if number == 1 else f"{RECURRENCE} {number}"


@dataclass(frozen=True, slots=True)
class LayerScan:
    """A scan of a layer, and its name in the state book; most layers have one."""

    layer: Hashable
    function: str = RECURRENCE


def check_not_lent(context: GroupContext) -> None:
    """Raises ValueError for a slice that ranks of several stages run, between which states do not pass."""
    if context.lent_slice is not None:
        raise ValueError(
            "the slice is lent ranks of other stages, but layers with a state along the sequence do not run there; set "
            "lend_stages=False"
        )


def slices_by_document(context: GroupContext) -> dict[int, Slice]:
    """The slices of a chunk by the numbers of their documents."""
    return {slice_.document: slice_ for slice_ in context.slices}


def state_before(slice_: Slice | None, function: str, layer: Hashable, context: GroupContext) -> Tensor | None:
    """The state from which a slice starts; None at the start of a sequence and for whole documents."""
    if slice_ is None or not slice_.start:
        return None
    return context.state_book.take(StatePlace(layer, function, slice_.sequence, slice_.start))


def leave_state(
    slice_: Slice | None, function: str, layer: Hashable, context: GroupContext, state: Tensor, output: Tensor
) -> Tensor:
    """Leaves the state after a slice in the book, if the sequence goes on; returns `output` (`StateBook.put`)."""
    if slice_ is None or slice_.stop == slice_.end:
        return output
    return context.state_book.put(StatePlace(layer, function, slice_.sequence, slice_.stop), state, output)

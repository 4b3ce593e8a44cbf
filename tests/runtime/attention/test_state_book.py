"""The state book: states pass forward and their gradients backward once each, and what comes in another order is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_longctx.runtime.attention.state_book import StateBook, StatePlace
from hf_longctx.runtime.states.passing import with_backward_of

FIRST, SECOND = StatePlace("layer", "recurrence", 0, 3), StatePlace("layer", "recurrence", 0, 5)


def slices(book: StateBook, weight: Tensor) -> list[Tensor]:
    """Outputs of three slices; each multiplies its state by `weight` and adds one."""
    outputs, state = [], torch.ones(2, dtype=torch.float64)
    for place, following in ((None, FIRST), (FIRST, SECOND), (SECOND, None)):
        state = book.take(place) if place is not None else state
        after = state * weight + 1
        output = after.square()
        outputs.append(book.put(following, after, output) if following is not None else output)
    return outputs


def test_slices_that_run_backward_in_reverse_give_the_gradient_of_the_whole() -> None:
    weight, whole = (torch.tensor(1.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    book = StateBook()
    for output in reversed(slices(book, weight)):
        output.sum().backward()
    state, total = torch.ones(2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for _ in range(3):
        state = state * whole + 1
        total = total + state.square().sum()
    total.backward()
    assert torch.allclose(weight.grad, whole.grad, rtol=1e-14) and not book.num_bytes


def test_a_replay_neither_doubles_nor_loses_a_state_or_gradient() -> None:
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    book = StateBook()
    outputs = slices(book, weight)
    held = book.held()
    slices(book, weight)
    assert all(book.held()[place] is state for place, state in held.items()) and len(held) == 2
    for output in reversed(outputs):
        output.sum().backward()
    assert not book.num_bytes


def test_other_orders_are_refused() -> None:
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    book = StateBook()
    with pytest.raises(
        RuntimeError, match="a slice from token 3 of sequence 0 ran forward without the state of the tokens before"
    ):
        book.take(FIRST)
    first, *_ = slices(book, weight)
    with pytest.raises(RuntimeError, match="a slice up to token 3 of sequence 0 ran backward before the slice after it"):
        first.sum().backward()


def test_without_a_backward_states_are_freed_at_once_and_frozen_layers_leave_none() -> None:
    weight = torch.tensor(1.5, dtype=torch.float64)
    book = StateBook(has_backward=False)
    slices(book, weight)
    assert not book.num_bytes
    book = StateBook()
    assert not any(output.requires_grad for output in slices(book, weight))
    assert book.num_bytes == 2 * 2 * 8
    book.close(1)
    assert book.num_bytes
    book.close(0)
    assert not book.num_bytes


def test_tensors_beside_an_output_get_a_gradient_of_zero() -> None:
    output, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert with_backward_of(output, output.detach()) is output
    with_backward_of(output, other).sum().backward()
    assert torch.equal(other.grad, torch.zeros(2)) and torch.equal(output.grad, torch.ones(2))

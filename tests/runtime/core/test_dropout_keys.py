"""Values are dropped by token: the same whatever else runs beside it, forward and backward, on tiles and in blocks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from hf_longctx.runtime.core import dropout as module
from hf_longctx.runtime.core.dropout import DropoutKeys

CHANNELS = 10
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 7, 8]])
PIECES = [(4, 0), (2, 1), (2, 2)]


def test_the_backward_drops_the_same_values_and_saves_nothing() -> None:
    tokens = DropoutKeys().of_pieces(PIECES, POSITIONS)
    x = torch.randn(1, 8, CHANNELS, dtype=torch.float64, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = tokens.drop(x, 0.5, "a")
    y.backward(torch.ones_like(y))
    assert not saved
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(y, x * x.grad)


def test_other_tokens_blocks_and_plans_change_nothing() -> None:
    keys, x = DropoutKeys(seed=3), torch.ones(8, CHANNELS)
    whole = keys.of_pieces(PIECES, POSITIONS).drop(x, 0.3, "a")
    alone = keys.of_pieces([(2, 1)], POSITIONS[:, 4:6]).drop(x[:2], 0.3, "a")
    assert torch.equal(whole[4:6], alone)
    assert torch.equal(whole[2:7], keys.of_pieces(PIECES, POSITIONS).part(slice(2, 7)).drop(x[:5], 0.3, "a"))
    with patch.object(module, "_VALUES_ON_CPU", 25):
        assert torch.equal(whole, keys.of_pieces(PIECES, POSITIONS).drop(x, 0.3, "a"))
    # the second plan of a step numbers its sequences after those of the first one
    keys.begin_step(0, {7: 0, 8: 1})
    keys.begin_plan(8)
    assert torch.equal(alone, keys.of_pieces([(2, 0)], POSITIONS[:, 4:6]).drop(x[:2], 0.3, "a"))
    keys.begin_step(1, {7: 0, 8: 1})
    assert not torch.equal(alone, keys.of_pieces([(2, 0)], POSITIONS[:, 4:6]).drop(x[:2], 0.3, "a"))


def test_forwards_of_one_step_number_their_documents_on() -> None:
    keys, positions = DropoutKeys(), torch.zeros(1, 1, dtype=torch.int64)
    found = []
    for step, number in ((4, 10), (4, 11), (5, 12)):
        keys.begin_forward(step, number, 3)
        tokens = keys.of_pieces([(1, 2)], positions)
        found.append((tokens.step, int(tokens.documents_T)))
    assert found == [(4, 2), (4, 5), (5, 2)]


def test_everything_may_be_dropped() -> None:
    assert not DropoutKeys().of_pieces(PIECES, POSITIONS).drop(torch.ones(8, 3), 1.0, "a").any()


@pytest.mark.parametrize("shape", [(7, CHANNELS), (2, 8, CHANNELS), (8,), (1, 8, 2, CHANNELS)])
def test_tensors_of_other_tokens_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"dropout layers.3.mlp got a tensor of shape .* for 8 tokens"):
        DropoutKeys().of_pieces(PIECES, POSITIONS).drop(torch.ones(shape), 0.5, "layers.3.mlp")

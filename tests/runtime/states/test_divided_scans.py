"""Scans of RWKV and xLSTM give transformers' outputs, states and gradients, from any state and in any pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models.any_model import wide_floats
from helpers.models.reference import TOLERANCE, relative_error
from helpers.models.versions import newest
from torch import Tensor
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu
from transformers.models.xlstm import modeling_xlstm

from hf_longctx.runtime.states.scans import MatrixMemory, MeansMap, weighted_means

pytestmark = newest
# pieces: shorter than a block, one token, several blocks
PIECES = (5, 1, 40, 16, 3)
LENGTH = sum(PIECES)
HEADS, KEY, VALUE = 3, 4, 6


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def same(found: list[Tensor], expected: list[Tensor], inputs: list[Tensor]) -> None:
    """Asserts that outputs are equal, and gradients of the inputs by a random sum of them."""
    counts = [torch.randn_like(each) for each in expected]
    gradients = []
    for outputs in (found, expected):
        total = sum((x * y).sum() for x, y in zip(outputs, counts, strict=True))
        gradients.append(torch.autograd.grad(total, inputs, retain_graph=True))
    for mine, own in zip([*found, *gradients[0]], [*expected, *gradients[1]], strict=True):
        assert relative_error(mine, own) <= TOLERANCE


def means_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    # keys so far apart that their exponentials fit no format
    k = (400 * torch.randn(1, LENGTH, HEADS, dtype=torch.float64)).requires_grad_()
    return [k, random(1, LENGTH, HEADS), random(HEADS), random(HEADS)]


def in_pieces(scan: Any, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    state, outputs = None, []
    for piece in zip(*(x.split(PIECES, dim=1) for x in inputs), strict=True):
        output, state = scan(list(piece), state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def test_weighted_means_are_those_of_transformers() -> None:
    k, v, decay, bonus = inputs = means_inputs()
    with wide_floats():
        expected, (numerator, denominator, most) = rwkv_linear_attention_cpu(decay, bonus, k, v, return_state=True)
    after = torch.stack([numerator / denominator, denominator.log() + most], dim=-1)
    found, state = in_pieces(lambda mine, before: weighted_means(*mine, -decay.exp(), bonus, before), [k, v.unsqueeze(-1)])
    same([found.squeeze(-1), state], [expected, after], inputs)


def memory_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    gates = [(5 * torch.randn(1, LENGTH, HEADS, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    return [random(1, LENGTH, HEADS, KEY), random(1, LENGTH, HEADS, KEY), random(1, LENGTH, HEADS, VALUE), *gates]


def test_matrix_memories_are_those_of_transformers() -> None:
    inputs, memory = memory_inputs(), MatrixMemory(VALUE, 8, 1e-6)
    names = ("query", "key", "value", "igate", "fgate")
    with wide_floats():
        given = {name: x.transpose(1, 2) for name, x in zip(names, inputs, strict=True)}
        expected, (c, n, m) = modeling_xlstm.mlstm_recurrent_sequence_native(
            **given, return_last_states=True, eps=1e-6, dtype_state=torch.float64
        )
    found, state = in_pieces(memory.scan, inputs)
    same([found, state[..., :-1, :-1], state[..., :-1, -1], state[..., -1, :1]], [expected.transpose(1, 2), c, n, m], inputs)


@pytest.mark.parametrize("is_memory", [False, True], ids=["means", "memory"])
def test_what_a_state_changes_is_found_without_it(is_memory: bool) -> None:
    if is_memory:
        inputs, weights = memory_inputs(), []
        state_map: Any = MatrixMemory(VALUE, 8, 1e-6)
        scan: Any = state_map.scan
    else:
        k, v, decay, bonus = means_inputs()
        inputs, weights, state_map = [k, v.unsqueeze(-1)], [-decay.exp(), bonus], MeansMap()

        def scan(mine: Any, before: Any) -> Any:
            return weighted_means(*mine[:2], *weights, before)

    first, rest = ([x[:, part] for x in inputs] for part in (slice(0, 13), slice(13, None)))
    before = scan(first, None)[1]
    wide, none = state_map.widened(rest)
    effect = state_map.effect(rest, weights, *scan([*wide, *weights], none))
    assert effect.carry.shape == torch.Size(state_map.carry_shape(before.shape))
    found = [effect.output(before), state_map.joined(effect.carry, before, effect.after)]
    same(found, list(scan(rest, before)), inputs)

"""Masks of attention weights: rates, independence of heads and steps, parts of a mask, and a kernel that compiles for Hopper."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.measures.triton_runs import compile_only, needs_triton
from helpers.models.dropout_truth import kept_weights

from hf_longctx.kernels import weight_mask as op
from hf_longctx.kernels.weight_mask import dropped_weights
from hf_longctx.runtime.core.dropout import DropoutKeys

pytestmark = pytest.mark.quick

POSITIONS = torch.arange(128).unsqueeze(0)
KEY = DropoutKeys(seed=3).site_key("layer weights")


def masks(step: int = 0, document: int = 0, name: str = "layer weights", rate: float = 0.3) -> torch.Tensor:
    return dropped_weights(POSITIONS, POSITIONS, (0, 5), document, step, DropoutKeys(seed=3).site_key(name), rate)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.7, 1.0])
def test_the_mask_is_that_of_plain_integers_and_has_the_rate(rate: float) -> None:
    found = masks(step=5, document=2, rate=rate)
    assert torch.equal(~found, kept_weights("layer", 2, 128, 5, rate, 5, 3))
    # five standard deviations of a share of 5 * 128 * 128 draws
    assert float(found.double().mean()) == pytest.approx(rate, abs=5 * (rate * (1 - rate) / found.numel()) ** 0.5 + 1e-12)


def test_heads_layers_steps_and_documents_have_masks_of_their_own() -> None:
    every = [*masks(), *masks(step=1), *masks(document=1), *masks(name="other weights"), masks()[0].T]
    for first, second in itertools.combinations(every, 2):
        both = float((first & second).double().mean())
        # the share that both drop lies within five standard deviations; a weight on the diagonal is its own mirror
        assert both == pytest.approx(0.3**2, abs=5 * (0.09 * 0.91) ** 0.5 / 128 + 0.3 / 128)


def test_any_part_of_a_mask_is_drawn_alone() -> None:
    whole = dropped_weights(POSITIONS, POSITIONS, (0, 9), 1, 2, KEY, 0.5)
    rows, keys = torch.tensor([[7, 3], [100, 90]]), torch.tensor([[5, 4, 120], [0, 99, 98]])
    part = dropped_weights(rows, keys, (3, 4), 1, 2, KEY, 0.5).view(2, 4, 2, 3)
    for block in range(2):
        assert torch.equal(part[block], whole[3:7][:, rows[block]][:, :, keys[block]])


@needs_triton
def test_the_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = compile_only(op, monkeypatch)
    op.launch_dropped_weights(POSITIONS, POSITIONS.clone(), [3, 9], 4, 1, [5, 2**32 - 1], 2**31 + 5)
    (found,) = ptx
    # high words of products; no counter is read from memory
    assert "mul.hi.u32" in found

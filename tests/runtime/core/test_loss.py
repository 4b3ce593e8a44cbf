"""The loss: token sums in at least fp32, nothing from masked tokens, and equal weight for every label token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import (
    IGNORE_INDEX,
    LabelSmoothing,
    Targets,
    step_loss,
    summed_cross_entropy,
    summed_loss,
)

pytestmark = pytest.mark.quick


def logits_and_labels(num_tokens: int, dtype: torch.dtype, masked: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, num_tokens, 11, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (1, num_tokens), generator=generator)
    labels[0, list(masked)] = IGNORE_INDEX
    return logits, labels


def by_definition(logits: Tensor, labels: Tensor) -> float:
    """- sum of log softmax at the labels, in Python floats."""
    total = 0.0
    for row, label in zip(logits[0].detach().double(), labels[0].tolist(), strict=True):
        if label != IGNORE_INDEX:
            total -= float(row[label] - row.exp().sum().log())
    return total


def test_sum_over_label_tokens_is_the_definition_in_fp64() -> None:
    logits, labels = logits_and_labels(7, torch.float64, masked=(0, 4))
    loss = summed_cross_entropy(logits, labels)
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert float(loss.detach()) == pytest.approx(by_definition(logits, labels), rel=1e-14)


def test_the_index_of_no_label_is_the_one_of_transformers() -> None:
    assert IGNORE_INDEX == -100


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_masked_is_exactly_zero_with_zero_gradients(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(5, dtype, masked=tuple(range(5)))
    loss = step_loss(summed_cross_entropy(logits, labels), 0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    # 4096 equal tokens: a half-precision sum would stop growing (bf16) or overflow (fp16: above 65504 with ten such rows)
    num_tokens = 4096
    logits = torch.zeros(1, num_tokens, 8, dtype=dtype)
    logits[..., 0] = 3.0
    labels = torch.full((1, num_tokens), 1)
    loss = summed_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(by_definition(logits, labels), rel=1e-5)


def test_gradients_of_masked_tokens_are_exactly_zero() -> None:
    logits, labels = logits_and_labels(6, torch.float64, masked=(1, 5))
    summed_cross_entropy(logits, labels).backward()
    silent = logits.grad[0].abs().sum(dim=1) == 0
    assert silent.tolist() == [False, True, False, False, False, True]


def test_parts_of_a_step_add_up_to_the_mean_over_its_label_tokens() -> None:
    logits, labels = logits_and_labels(9, torch.float64, masked=(2, 3, 8))
    parts = [slice(0, 2), slice(2, 4), slice(4, 9)]
    shares = [step_loss(summed_cross_entropy(logits[:, part], labels[:, part]), 6) for part in parts]
    assert float(sum(shares).detach()) == pytest.approx(by_definition(logits, labels) / 6, rel=1e-14)


def test_a_step_without_any_label_is_not_divided_by_zero() -> None:
    logits, labels = logits_and_labels(3, torch.float32, masked=(0, 1, 2))
    assert torch.isfinite(step_loss(summed_cross_entropy(logits, labels), 0))


def test_smoothed_labels_are_those_of_transformers() -> None:
    logits, labels = logits_and_labels(9, torch.float64, masked=(0, 3))
    smoother = LabelSmoother(epsilon=0.1)
    expected = smoother({"logits": logits.detach()}, labels, num_items_in_batch=5)
    loss = step_loss(summed_loss(logits, Targets(labels, token_loss=LabelSmoothing(0.1))), 5)
    # transformers adds the log-probabilities of the vocabulary in fp32
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)
    loss.backward()
    assert not logits.grad[0, [0, 3]].any() and logits.grad[0, 1].any()


def test_weights_multiply_losses_and_zero_weights_take_labels_away() -> None:
    logits, labels = logits_and_labels(4, torch.float64, masked=(1,))
    weights = torch.tensor([[0.5, 9.0, 0.0, 2.0]], dtype=torch.float64)
    targets = Targets.of(ChunkInputs(labels, labels, labels, weights))
    each = [by_definition(logits[:, [t]], labels[:, [t]]) for t in range(4)]
    assert targets.total_weight() == 2.5 and Targets(labels).total_weight() == 3
    assert float(summed_loss(logits, targets).detach()) == pytest.approx(0.5 * each[0] + 2 * each[3], rel=1e-14)
    with torch.no_grad():
        # an infinite loss of weight zero adds nothing
        logits[0, 2] = -torch.inf
        logits[0, 2, (int(labels[0, 2]) + 1) % 11] = 0.0
    loss = summed_loss(logits, targets)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def test_a_loss_of_another_shape_is_refused() -> None:
    logits, labels = logits_and_labels(4, torch.float64)
    with pytest.raises(ValueError, match=r"token_loss returned shape \(\) for 4 tokens; return one loss per token"):
        summed_loss(logits, Targets(labels, token_loss=lambda logits, labels: logits.sum()))

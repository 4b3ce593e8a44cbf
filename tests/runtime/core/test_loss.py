"""The loss: token sums in at least fp32, nothing from masked tokens, and equal weight for every label token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_longctx.runtime.core.loss import IGNORE_INDEX, step_loss, summed_cross_entropy


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

"""A user's own class of classifier is refused if it has a forward of its own."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification
from transformers.utils.generic import can_return_tuple

from hf_longctx.hf.rules.classes import class_problem


class NamedLlamaForSequenceClassification(LlamaForSequenceClassification):
    """Trains as its parent does."""


class MeanLlamaForSequenceClassification(LlamaForSequenceClassification):
    """Reads the mean of all tokens."""

    @can_return_tuple
    def forward(self, input_ids: Any = None, **keywords: Any) -> Any:
        return self.score(self.model(input_ids, **keywords).last_hidden_state.mean(1))


class WeightedLlamaForTokenClassification(LlamaForTokenClassification):
    """Weighs classes, behind a wrapper that passes for its parent's forward."""

    @wraps(LlamaForTokenClassification.forward)
    def forward(self, *args: Any, **keywords: Any) -> Any:
        return super().forward(*args, **keywords)


class FSDPMeanLlamaForSequenceClassification(MeanLlamaForSequenceClassification):
    """Has the parents of a class that sharding makes."""


@pytest.mark.parametrize(
    "kind,is_refused",
    [
        (LlamaForSequenceClassification, False),
        (NamedLlamaForSequenceClassification, False),
        (MeanLlamaForSequenceClassification, True),
        (WeightedLlamaForTokenClassification, True),
        (FSDPMeanLlamaForSequenceClassification, True),
    ],
)
def test_a_class_with_a_forward_of_its_own_is_refused(kind: Any, is_refused: bool) -> None:
    with torch.device("meta"):
        model = kind(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
    problem = class_problem(model)
    assert bool(problem) == is_refused
    if is_refused:
        assert problem.startswith(f"model class {kind.__name__} is not supported: it has a forward of its own")

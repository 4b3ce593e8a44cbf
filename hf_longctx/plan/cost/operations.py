"""Counts the operations of training a set of documents, for model FLOP/s and their share of the device's peak (MFU)."""

from __future__ import annotations

from collections.abc import Iterable

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.cost.cost_model import backward_share

# operations that `training_operations` counts, in words
OPERATIONS_FORMULA = (
    "model operations = tokens x 2 x multiplications of a token x (1 forward + 1 for gradients of inputs + 1 for gradients of "
    "weights, if those are trained) + query-key pairs within documents x operations of a pair x 3; what is recomputed does not "
    "count, nor do dummy tokens"
)


def training_operations(lengths: Iterable[int], model: ModelSpec) -> float:
    """Operations of one forward and backward over documents of these lengths, by `OPERATIONS_FORMULA`.

    A product counts as a multiplication and an addition. Of causal attention, only pairs that are not masked count.
    """
    pairs = model.attention_pairs()
    num_tokens, num_pairs = 0, 0.0
    for length in lengths:
        num_tokens += length
        num_pairs += pairs.of_span(0, length)
    passes = 1 + 2 * backward_share(model)
    return passes * 2.0 * model.token_products * num_tokens + 3.0 * model.num_layers * model.pair_operations * num_pairs

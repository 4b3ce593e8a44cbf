"""Clipping on several stages against one process: the norm of the whole model, clipped steps, weights held by two stages."""

from __future__ import annotations

import pytest
import torch
from helpers.models.reference import relative_error
from helpers.trainers.stage_training import new_optimizer, rank_stage, train_stage, whole_training
from torch import Tensor

MAX_NORM = 50.0


def train(num_stages: int, tied: bool, is_sharded: bool) -> tuple[list[float], dict[str, Tensor]]:
    own = rank_stage(num_stages, tied, is_sharded)
    norms = train_stage(own, new_optimizer(own.parameters), range(3), MAX_NORM)
    return norms, own.weights()


@pytest.mark.daily("2-2-False-True", "2-4-True-False")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("num_stages", "num_ranks", "is_sharded"), [(2, 2, False), (2, 4, True), (4, 4, False), (2, 4, False)])
def test_clipped_steps_of_stages_are_those_of_the_whole_model(
    ranks, num_stages: int, num_ranks: int, is_sharded: bool, tied: bool
) -> None:
    whole, expected_norms = whole_training(range(3), tied, MAX_NORM)
    assert min(expected_norms) > MAX_NORM
    expected = dict(whole.named_parameters(remove_duplicate=False))
    results = ranks(num_ranks).run(train, num_stages, tied, is_sharded)
    assert set().union(*(weights for _, weights in results)) == set(expected)
    for norms, weights in results:
        assert norms == results[0][0]
        assert norms == pytest.approx(expected_norms, rel=1e-14)
        assert max(relative_error(weight, expected[name].detach()) for name, weight in weights.items()) <= 1e-12
    if tied:
        # equal bit by bit, or the copies would drift apart
        assert torch.equal(results[0][1]["model.embed_tokens.weight"], results[-1][1]["lm_head.weight"])

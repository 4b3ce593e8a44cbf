"""Documents of one length of plans share a call as heads: the bits of a call for each, and only where the device gains by it."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hf_longctx.plan.core import sharding
from hf_longctx.runtime.tiles import stacks
from hf_longctx.runtime.tiles.plain import Scores
from hf_longctx.runtime.tiles.stacks import HeadShape, StackChecks, stack_backward, stack_forward, stackable

pytestmark = pytest.mark.quick

CUDA, SCORES = torch.device("cuda"), Scores(0.3)
SHAPE = HeadShape((9, 0), torch.bfloat16, 32, 8, 128, 128)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv", [4, 2, 1])
def test_every_document_has_the_bits_of_its_own_call(dtype: torch.dtype, num_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "LEAST_LENGTH_STEP", 8)
    lengths, generator = [40, 37, 33, 40], torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(sum(lengths), heads, 16, generator=generator).to(dtype).transpose(0, 1)

    q, k, v, gradient = drawn(4), drawn(num_kv), drawn(num_kv), drawn(4)
    out, lse = stack_forward(q, k, v, lengths, SCORES)
    found = out, lse, *stack_backward(gradient, q, k, v, out, lse, lengths=lengths, scores=SCORES)
    for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        own = [x[:, start:stop] for x in (q, k, v)]
        alone = stack_forward(*own, [stop - start], SCORES)
        alone += stack_backward(gradient[:, start:stop], *own, *alone, lengths=[stop - start], scores=SCORES)
        for one, other in zip(found, alone, strict=True):
            assert torch.equal(one[:, start:stop], other)
    # a document must not see its neighbour's keys
    changed = stack_forward(q, k, torch.cat([v[:, :40] + 1, v[:, 40:]], 1), lengths, SCORES)[0]
    assert torch.equal(changed[:, 40:], out[:, 40:]) and not torch.equal(changed[:, :40], out[:, :40])


def test_neighbours_of_one_length_share_calls_within_the_rows_that_plans_count() -> None:
    lengths = [4096, 4090, 4033, 4096, 4096, 3000, 2990, 2060, 2050, 2055, 9000, 9000, 100, 100]
    # lengths are filled up to multiples of 128; 9,000 twice are more rows than a call may have, and short ones are packed
    assert stackable(lengths, lambda num_tokens: 4) == [4, 1, 2, 2, 1, 1, 1, 1, 1]
    assert stackable(lengths, lambda num_tokens: 1) == [1] * len(lengths)
    asked: list[int] = []
    stackable(lengths, lambda num_tokens: asked.append(num_tokens) or 1)
    assert set(asked) == {4096, 3072, 2176}


def test_the_device_decides_once_for_each_octave_of_lengths() -> None:
    checks, tried = StackChecks(), []

    def pays(device: torch.device, shape: HeadShape, scores: Scores, num_tokens: int, count: int) -> bool:
        tried.append((num_tokens, count))
        return count == 2

    with patch.object(stacks, "_pays", pays), patch.object(stacks, "choose_backend", lambda *_: stacks_backend()):
        assert [checks.most(CUDA, SHAPE, SCORES, num_tokens) for num_tokens in (4096, 3072, 2176, 2304, 8192)] == [2] * 5
    assert tried == [(4096, 4), (4096, 2), (3072, 4), (3072, 2), (8192, 2)]


class stacks_backend:
    plans = True


def test_nothing_is_stacked_where_no_gain_is_known() -> None:
    with patch.object(stacks, "_pays", lambda *_: pytest.fail("must not be tried")):
        assert StackChecks().most(torch.device("cpu"), SHAPE, SCORES, 4096) == 1
        assert StackChecks().most(CUDA, SHAPE, Scores(0.3, softcap=30.0), 4096) == 1

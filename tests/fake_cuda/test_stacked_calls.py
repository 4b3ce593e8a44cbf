"""Documents of one length in one call of cuDNN, on the fake device: the device's verdict, and the bits of a call for each."""

from __future__ import annotations

import pytest
import torch

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from hf_longctx.plan.core import sharding
from hf_longctx.runtime.attention import chunk
from hf_longctx.runtime.attention.chunk import ChunkAttention, documents_of
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.tiles import cuda, stacks
from hf_longctx.runtime.tiles.packs import PackBounds
from hf_longctx.runtime.tiles.plain import Scores
from hf_longctx.runtime.tiles.stacks import StackChecks

BOUNDS = (0, 300, 590, 880, 1180, 1200)


@pytest.mark.parametrize("gain", [0.1, 0.0])
def test_documents_of_one_length(gain: float, device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk, stacks):
        monkeypatch.setattr(module, "PACKED_TOKENS", 64)
    monkeypatch.setattr(sharding, "LEAST_LENGTH_STEP", 64)
    monkeypatch.setattr(cuda, "_LEAST_CAUSAL", 64**2)
    # a verdict runs four documents together, then alone; the fake device knows no seconds
    seconds, calls = iter([1.0 - gain, 1.0] * 9), []
    monkeypatch.setattr(stacks, "_seconds", lambda device, run: (run(), next(seconds))[1])
    checks = StackChecks()
    forward = chunk.stack_forward
    monkeypatch.setattr(chunk, "stack_forward", lambda *inputs: (calls.append(inputs[3]), forward(*inputs))[1])

    def results() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v, gradient = (
            torch.randn(BOUNDS[-1], heads, 16, generator=generator).to("cuda", torch.bfloat16) for heads in (4, 2, 2, 4)
        )
        leaves = [x.transpose(0, 1).requires_grad_() for x in (q, k, v)]
        rule = AttentionRule(KVReaders(2, 2, torch.tensor([0, 0, 1, 1])), Scores(0.25), bounds=PackBounds(), stacks=checks)
        output = ChunkAttention(rule, documents_of(BOUNDS, ()), None, KVBook(), "layer")(*leaves)
        return [output, *torch.autograd.grad(output, leaves, gradient)]

    found = results()
    assert calls == ([[300, 290, 290, 300]] if gain else [])
    monkeypatch.setattr(chunk, "stack_counts", lambda q, k, v, lengths, scores, checks: [1] * len(lengths))
    for one, other in zip(found, results(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_other_bits_are_refused(device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_seconds", lambda device, run: pytest.fail("must not be timed"))
    forward = stacks.stack_forward
    monkeypatch.setattr(stacks, "stack_forward", lambda *inputs: (forward(*inputs)[0] * 1.01, forward(*inputs)[1]))
    shape = stacks.HeadShape(cuda.device_capability(torch.device("cuda")), torch.bfloat16, 4, 2, 16, 16)
    assert StackChecks().most(torch.device("cuda"), shape, Scores(0.25), 2048) == 1

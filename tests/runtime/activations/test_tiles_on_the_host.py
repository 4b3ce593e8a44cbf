"""MLP tiles that wait on the host leave the device: nothing keeps the tensors that were copied."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.token_tiles import TileRecord, tokenwise
from hf_longctx.runtime.core.host_copies import PlainCopies


class MLP(nn.Module):
    """Two matrices with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Storing(HostTier):
    """A tier that notes what it stored without keeping it."""

    def __init__(self) -> None:
        super().__init__(2**20, PlainCopies())
        self.sources: list[weakref.ref[Tensor]] = []

    def store(self, tensor: Tensor) -> object:  # type: ignore[override]
        self.sources.append(weakref.ref(tensor))
        return super().store(tensor)


def run(share: TensorShare, tier: HostTier | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(1, 12, 8, requires_grad=True)
    output = tokenwise(model, model.forward, x, 4, TileRecord(share, tier))
    return x, output


def test_tensors_on_the_host_are_gone_from_the_device_and_give_the_same_gradients() -> None:
    tier = Storing()
    gradients = []
    for share, own in ((TensorShare("mlp", host=1.0, device=0.0), tier), (TensorShare("mlp", device=1.0), None)):
        x, output = run(share, own)
        # the graph still waits for its backward
        assert all(source() is None for source in tier.sources)
        output.square().sum().backward()
        gradients.append(x.grad)
    assert len(tier.sources) == 3 * 3 and tier.stored_bytes == 0
    assert torch.equal(*gradients)

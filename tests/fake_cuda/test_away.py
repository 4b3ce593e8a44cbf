"""Tensors that leave the device free its memory, and come back as they were."""

from __future__ import annotations

import torch

from hf_longctx.runtime.parameters.away import Away

CUDA = torch.device("cuda", 0)


def test_what_leaves_frees_the_device_and_comes_back() -> None:
    weight, state, on_host = torch.arange(4096.0, device=CUDA), torch.full((2048,), 3.0, device=CUDA), torch.ones(8)
    view, before, away = weight[:64].view(8, 8), torch.cuda.memory_allocated(), Away(CUDA)
    for _ in range(2):
        away.move("weights", [weight, view, on_host])
        away.move("states", [state, 7])
        assert torch.cuda.memory_allocated() == before - 4 * (4096 + 2048)
        assert away.holds("weights") and bool(on_host.all())
        away.restore("states")
        assert bool((state.cpu() == 3).all())
        # other tensors take the memory that was free
        others = [torch.zeros(4096, device=CUDA) for _ in range(4)]
        away.restore("weights")
        del others
        assert torch.equal(weight.cpu(), torch.arange(4096.0)) and torch.equal(view.cpu(), weight.cpu()[:64].view(8, 8))
    assert torch.cuda.memory_allocated() == before

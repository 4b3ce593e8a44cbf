"""Kernels of short convolutions on the fake device: the package's, and the row of documents that stays there."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from hf_longctx.runtime.states.convolution import ConvolutionPackage, drawn_convolution, plain_convolution


def test_the_package_runs_on_the_device_after_its_check(
    device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        assert seq_idx is not None and x.is_cuda and seq_idx.is_cuda
        calls.append(x.shape[-1])
        numbers = seq_idx[0].long()
        first = torch.searchsorted(numbers, numbers)
        place = torch.arange(len(numbers), device=x.device) - first
        return plain_convolution(x[0].transpose(0, 1), weight, bias, place, activation or "").transpose(0, 1).unsqueeze(0)

    module = ModuleType("causal_conv1d")
    vars(module)["causal_conv1d_fn"] = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    x, weight, bias = drawn_convolution(16, 4, True, torch.bfloat16, torch.device("cuda"))
    package = ConvolutionPackage()
    convolution = package.convolution(x, weight, bias, "silu")
    assert convolution is not None and calls == [77]
    found = convolution(x, weight, bias, (70, 7))
    place = torch.cat([torch.arange(70), torch.arange(7)])
    own = [each.cpu() for each in (x, weight, bias) if each is not None]
    expected = plain_convolution(own[0][0].transpose(0, 1), own[1], own[2], place, "silu")
    assert torch.equal(found.cpu()[0].transpose(0, 1), expected)
    # the second call for such tensors checks nothing, and the same row is not sent to the device again
    assert package.convolution(x, weight, bias, "silu") is convolution and calls == [77, 77]
    assert convolution.places((70, 7), x.device) is convolution.places((70, 7), x.device)

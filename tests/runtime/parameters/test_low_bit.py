"""Steps of torchao's optimizers on shards give the bits of those on whole weights, with fp32 copies of bf16 weights, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers.ranks.rank_steps import whole
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from hf_longctx.runtime.parameters.gradients import local_shard
from hf_longctx.runtime.parameters.low_bit import PackedMoment, is_low_bit, moment_bytes, own_moment
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT, keep_master_weights
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

Steps = tuple[dict[str, Tensor], set[str]]


def layers_of(dtype: torch.dtype) -> dict[str, nn.Linear]:
    return {"wide": nn.Linear(128, 128, dtype=dtype), "odd": nn.Linear(50, 83, dtype=dtype)}


def one_weight(dtype: torch.dtype) -> dict[str, nn.Linear]:
    """A layer whose only parameter is a weight with moments of few bits, since every shape is compiled for half a minute."""
    return {"wide": nn.Linear(128, 128, bias=False, dtype=dtype)}


def stepped(
    bits: int, dtype: torch.dtype, is_sharded: bool, stance: str = "force_eager", make: Callable[..., Any] = layers_of
) -> Steps:
    """Weights, copies and moments after three steps with the same gradients; names of moments of few bits."""
    import torchao.optim

    kind: Any = {8: torchao.optim.AdamW8bit, 4: torchao.optim.AdamW4bit}[bits]
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(make(dtype)))
    if is_sharded:
        shard_model(model, ("Linear",), shard_mesh("cpu", torch.distributed.get_world_size(), 60.0))
    optimizer = kind(model.parameters(), lr=1e-2, block_size=256)
    keep_master_weights(optimizer)
    with torch.compiler.set_stance(stance):
        for _ in range(3):
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape).to(dtype)
                if is_sharded:
                    placed: Any = parameter
                    gradient = distribute_tensor(gradient, placed.device_mesh, placed.placements, src_data_rank=None)
                parameter.grad = gradient
            optimizer.step()
    values, few = {}, set()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        values[name] = whole(parameter.detach()).clone()
        for key in ("exp_avg", "exp_avg_sq", MASTER_WEIGHT):
            if key in state:
                value: Any = local_shard(state[key])
                few |= {f"{name} {key}"} if is_low_bit(value) else set()
                plain = value.dequantize() if is_low_bit(value) else value
                if is_sharded:
                    like = state[key]
                    plain = torch.distributed.tensor.DTensor.from_local(
                        plain, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
                    ).full_tensor()
                values[f"{name} {key}"] = plain.clone()
    return values, few


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_on_shards_is_the_step_on_whole_weights(ranks, bits: int, dtype: torch.dtype) -> None:
    ((whole_values, few),) = ranks(1).run(stepped, bits, dtype, False)
    assert few == {"wide.weight exp_avg", "wide.weight exp_avg_sq"}
    for values, own_few in ranks(2).run(stepped, bits, dtype, True):
        assert own_few == few and values.keys() == whole_values.keys()
        assert all(torch.equal(value, whole_values[name]) for name, value in values.items())
    assert any(MASTER_WEIGHT in name for name in whole_values) == (dtype == torch.bfloat16)


def test_a_compiled_step_does_nearly_the_same(ranks) -> None:
    ((written, _),) = ranks(1).run(stepped, 8, torch.bfloat16, False, "force_eager", one_weight)
    ((compiled, _),) = ranks(1).run(stepped, 8, torch.bfloat16, True, "default", one_weight, timeout_s=550.0)
    name = f"wide.weight {MASTER_WEIGHT}"
    # fused products round once; a few moments get the next code
    assert ((written[name] - compiled[name]).abs() > 1e-6).float().mean() < 0.01
    assert (written[name] - compiled[name]).abs().max() < 1e-2


def moved_to_shards(bits: int) -> list[tuple[Tensor, Tensor, bool]]:
    """A whole moment, this rank's shard of it in an optimizer of few bits, both plain, and whether that has few bits."""
    import torchao.optim

    kind: Any = {8: torchao.optim.AdamW8bit, 4: torchao.optim.AdamW4bit}[bits]
    found = []
    for shape in ((64, 256), (128, 200), (192, 48)):
        model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
        shard_model(model, ("Linear",), shard_mesh("cpu", torch.distributed.get_world_size(), 60.0))
        optimizer = kind(model.parameters(), block_size=256)
        torch.manual_seed(0)
        stored: Any = optimizer._new_buffer(torch.empty(shape), True)
        stored.copy_(torch.randn(shape))
        rows = -(-shape[0] // torch.distributed.get_world_size())
        first = torch.distributed.get_rank() * rows
        parts = [(0, PackedMoment.of(stored))]
        own: Any = local_shard(own_moment(optimizer, "exp_avg", parts, next(model.parameters()), first))
        is_few, own = is_low_bit(own), own.dequantize() if is_low_bit(own) else own
        found.append((stored.dequantize()[first : first + rows], own, is_few))
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_whole_moment_is_dealt_to_shards_with_its_codes(ranks, bits: int, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(moved_to_shards, bits):
        for expected, own, _ in found:
            assert torch.equal(own, expected)
        if num_ranks == 2:
            assert [is_few for _, _, is_few in found] == [True, True, True]


def test_bytes_are_those_of_codes_and_scales() -> None:
    # 64 blocks of 256: a byte per element, 4 bytes per block, and a table of 256 numbers, for both moments
    assert moment_bytes([(64, 256)], 8) == 2 * (64 * 256 + 4 * 64 + 4 * 256) / (64 * 256)
    assert moment_bytes([(64, 256)], 4) == 2 * (64 * 128 + 4 * 64 + 4 * 16) / (64 * 256)
    # the last of 3 ranks has 20 rows of 128, or 10 blocks, which are fewer than 4096 elements
    assert moment_bytes([(64, 128)], 8, 3) == 8 * 22 * 3 / 64
    assert moment_bytes([], 8) == 0.0
    assert moment_bytes([()], 8) == 8.0

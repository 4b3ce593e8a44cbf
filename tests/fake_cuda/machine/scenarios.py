"""Uses of the package's waits that go wrong without them, each as a function that returns how much was wrong.

Functions of one process take the fake device. Functions of two ranks run on both of them, which `mail.begin` has prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_cuda.machine.device import FakeDevice
from fake_cuda.machine.removals import Removal, removed
from fake_cuda.machine.steps import group_pool, unwaited
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_longctx.hf.checkpoints.weights import to_host
from hf_longctx.hf.models.activations import slab_rate
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, SequenceGroup, Span
from hf_longctx.runtime import measure
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.parameters import gathers, sums
from hf_longctx.runtime.parameters.sharded import ShardedParameters, free_gathered, shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool, Links, StageMessages
from hf_longctx.runtime.states.passing import exchange

CUDA = torch.device("cuda", 0)
# values of one tensor, and of the smallest memory that torch's allocator gives
SIZE = 1 << 14


def full(value: float, size: int = SIZE) -> Tensor:
    return torch.full((size,), float(value), device=CUDA)


def stored_while_it_comes(device: FakeDevice) -> int:
    """A tensor is stored while the current stream still copies its values from the host."""
    tier, source, values = HostTier.on(CUDA, SIZE * 4), full(0.0), torch.ones(SIZE).pin_memory()
    source.copy_(values, non_blocking=True)
    home = tier.store(source)
    home._parts[-1].arrival.synchronize()
    wrong = int((home._parts[0].home != 1.0).sum())
    torch.cuda.synchronize()
    return wrong


def unpinned_under_copies(device: FakeDevice) -> int:
    """An error inside a step leaves copies under way when the tier is given up."""
    name = "cudaHostUnregister under copies"
    before, tier = device.count(name), HostTier.on(CUDA, SIZE * 4)
    home = tier.store(full(1.0))
    del home, tier
    return device.count(name) - before


def timed_before_it_passed(device: FakeDevice) -> int:
    """An interval is read while its last event has not passed."""
    clock, values = StepClock(CUDA), torch.ones(SIZE).pin_memory()
    with clock.measure(0, "F", "0F0"):
        target = values.to(CUDA, non_blocking=True)
    found = clock.intervals()
    return int(len(found) != 1 or not bool((target == 1.0).all()))


def copies_timed(device: FakeDevice) -> int:
    """Rates of copies whose time ends before they do."""
    with device.waits() as waits:
        measure.copy_rate(GroupPool((1,), 60.0), CUDA)
    return int(not any("measure.py" in wait.place for wait in waits))


def slab_timed(device: FakeDevice) -> int:
    """The rate of a slab whose copies are timed."""
    tier = HostTier.on(CUDA, 2**20)
    with device.waits() as waits:
        slab_rate(tier, CUDA)
    return int(not any(wait.function == "cudaDeviceSynchronize" for wait in waits))


def runs_ahead_of_a_gathered_weight(device: FakeDevice) -> int:
    """A rank that keeps no weight goes on before the weight is there."""
    weight = torch.zeros(SIZE, device=CUDA)
    weight.copy_(torch.ones(SIZE).pin_memory(), non_blocking=True)
    with device.waits() as waits:
        to_host(weight, is_kept=False)
    return int(not waits)


# ---- on two ranks


def on_rank(scenario: Callable[[GroupPool], int], num_stages: int, removals: tuple[Removal, ...]) -> int:
    """Runs a function of two ranks without some lines of the package; returns how much was wrong on this one."""
    with removed(*removals):
        wrong = scenario(group_pool(num_stages))
        torch.cuda.synchronize()
    return wrong


def sent_and_dropped(pool: GroupPool) -> int:
    """A message leaves late, and its memory has other values by then."""
    assert pool.links is not None
    messages = StageMessages(pool.links, torch.float32, CUDA)
    wrong = 0
    if pool.stage == 0:
        messages.send(Action("SF", 0, 0), full(1.0))
        messages.finish()
        del messages
        others = [full(-1.0) for _ in range(4)]
        dist.barrier(pool.control)
        del others
    else:
        # a message leaves at once when somebody waits for it
        dist.barrier(pool.control)
        wrong = int((messages.receive(Action("RF", 0, 0), (SIZE,)) != 1.0).sum())
    dist.barrier(pool.control)
    return wrong


def received_and_read(pool: GroupPool) -> int:
    """A message is read as soon as the package gives it to its caller."""
    assert pool.links is not None
    messages = StageMessages(pool.links, torch.float32, CUDA)
    if pool.stage == 0:
        messages.send(Action("SF", 0, 0), full(1.0))
        messages.finish()
        return 0
    return int((messages.receive(Action("RF", 0, 0), (SIZE,)) != 1.0).sum())


def connected_and_dropped(pool: GroupPool) -> int:
    """The first messages of links come late, into memory that has other values by then."""
    assert pool.links is not None
    links = Links.create(pool.links.place, timedelta(seconds=60), CUDA)
    value = 2.0 + pool.rank
    others = [full(value, 1) for _ in range(64)]
    torch.cuda.synchronize()
    wrong = sum(float(other) != value for other in others)
    dist.barrier(pool.control)
    for group in links.groups:
        dist.destroy_process_group(group)
    return wrong


def states_exchanged(pool: GroupPool) -> int:
    """Ranks of a ring send each other states, and read them and their gradients at once."""
    group = SequenceGroup.of(GroupShape(2, 1), range(2), (Chunk(0, (Span(0, 0, 16),)),))
    layout = pool.context(group, group.chunks[0]).layout
    assert not layout.is_block
    sent = full(1.0 + pool.rank).requires_grad_()
    nothing, other = sent[:0], 1 - pool.rank
    sends, sizes = [nothing, nothing], [0, 0]
    sends[other], sizes[other] = sent, SIZE
    received = exchange(sends, sizes, (sent,), layout)
    wrong = int((received.detach() != 1.0 + other).sum())
    (received * (5.0 + pool.rank)).sum().backward()
    assert sent.grad is not None
    return wrong + int((sent.grad != 5.0 + other).sum())


def gathered_after_a_change(pool: GroupPool) -> int:
    """A layer is gathered while the current stream still copies new values into its shards."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device=CUDA) for _ in range(2)))
    shard_model(model, ("Linear",), shard_mesh("cuda", pool.num_ranks, 60.0))
    # FSDP2 makes its streams in the first pass
    model(full(0.0, 64))
    free_gathered(model)
    layer, value = model[0], 1.0 + pool.rank
    assert isinstance(layer, FSDPModule)
    shard = layer.weight.detach().to_local()
    shard.copy_(torch.full(shard.shape, value).pin_memory(), non_blocking=True)
    gather = layer.unshard(async_op=True)
    assert gather is not None
    # a gather may end before the current stream has come to it
    layer._get_fsdp_state()._fsdp_param_group.comm_ctx.all_gather_stream.synchronize()
    gather.wait()
    wrong = _wrong_weights(layer, pool)
    free_gathered(model)
    return wrong


def _with_copies(pool: GroupPool) -> tuple[Any, ShardedParameters]:
    """A sharded model whose nodes, of one rank each, may keep copies, after a pass in which FSDP2 makes its streams."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False, device=CUDA) for _ in range(2)))
    shard_model(model, ("Linear",), shard_mesh("cuda", pool.num_ranks, 60.0, node_ranks=1), node_ranks=1)
    parameters = ShardedParameters(model, True)
    model(full(0.0, 64))
    free_gathered(model)
    return model, parameters


def _wrong_weights(layer: Any, pool: GroupPool) -> int:
    """Elements of a gathered layer that are not 1 in the shard of the first rank, and 2 in that of the second."""
    expected = torch.tensor([1.0, 2.0]).repeat_interleave(32)[:, None]
    return int((layer.weight.cpu() != expected).sum())


def held_after_a_change(pool: GroupPool) -> int:
    """A node gathers its copy while the current stream still copies new values into the shards."""
    model, parameters = _with_copies(pool)
    shard = model[0].weight.detach().to_local()
    shard.copy_(torch.full(shard.shape, 1.0 + pool.rank).pin_memory(), non_blocking=True)
    parameters.enter_round("gathered_per_node")
    parameters._across.synchronize()
    model[0].unshard()
    wrong = _wrong_weights(model[0], pool)
    free_gathered(model)
    return wrong


def gathered_before_it_is_held(pool: GroupPool) -> int:
    """A layer is gathered while its part of the copy of a node still arrives."""
    model, parameters = _with_copies(pool)
    # each of two nodes of one rank has the whole weight
    copy = torch.tensor([1.0, 2.0]).repeat_interleave(32 * 64).pin_memory()

    def arriving(*shards: Any) -> Tensor:
        return torch.empty(64 * 64, device=CUDA).copy_(copy, non_blocking=True)

    with patch.object(gathers, "gather_part", arriving):
        parameters.enter_round("gathered_per_node")
    gather = model[0].unshard(async_op=True)
    model[0]._get_fsdp_state()._fsdp_param_group.comm_ctx.all_gather_stream.synchronize()
    gather.wait()
    wrong = _wrong_weights(model[0], pool)
    free_gathered(model)
    return wrong


def parts_taken_while_they_cross(pool: GroupPool) -> int:
    """New tensors that have the memory of sums which still cross nodes, since nobody has waited for them."""
    model, parameters = _with_copies(pool)
    made: list[int] = []
    init = sums._SumPart.__init__

    def noted(part: Any, *args: Any) -> None:
        init(part, *args)
        made.append(part.sums_NK.data_ptr())

    with patch.object(sums._SumPart, "__init__", noted), parameters.in_step(is_end=True):
        parameters.enter_round("gathered_per_node")
        loss = model(full(1.0, 64)[None]).sum()
        parameters.before_backward(True, True)
        loss.backward()
        # tensors of the size of a part
        taken = [torch.empty(64 * 64 + 2, device=CUDA) for _ in range(4)]
        wrong = sum(each.data_ptr() in made for each in taken)
    parameters.free()
    parameters.reduce(None)
    return wrong


class _Copied(torch.autograd.Function):
    """Makes the gradient of a weight by a copy, of which the stream that computes has not come to the end."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: float) -> Tensor:
        ctx.shape, ctx.value = weight.shape, value
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        copied = torch.full(ctx.shape, ctx.value).pin_memory()
        return torch.empty(ctx.shape, device=CUDA).copy_(copied, non_blocking=True), None


class _Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * _Copied.apply(self.weight, float(x.mean()))


def _after_a_backward(pool: GroupPool, add: Any = None, has_nodes: bool = False) -> tuple[Any, ShardedParameters]:
    """A sharded model after a last backward, whose gradients are 1 on the first rank and 2 on the second.

    add: gets their sums. has_nodes: nodes, of one rank each, keep copies of the weights.
    """
    model: Any = nn.Sequential(_Layer(64, 64, bias=False, device=CUDA))
    shard_model(
        model, ("_Layer",), shard_mesh("cuda", pool.num_ranks, 60.0, node_ranks=int(has_nodes)), node_ranks=int(has_nodes)
    )
    parameters = ShardedParameters(model, True)
    parameters.enter_round("gathered_per_node" if has_nodes else "sharded")
    output = model(full(1.0 + pool.rank, 64))
    parameters.before_backward(True, True)
    if add is not None:
        parameters.sums.add = add
    # nothing but messages reads the gradient
    with patch.object(sums, "APART_BYTES", 0):
        output.sum().backward()
    return model, parameters


def crossing_before_it_is_added(pool: GroupPool) -> int:
    """Sums of a node cross as early as the order of streams allows, while the last of them is still added."""
    ones = torch.ones(2, 64 * 64 // 2 + 1).pin_memory()
    own = sums._SumPart.add

    def late(part: Any, weights: Any, sums_NK: Tensor) -> None:
        own(part, weights, sums_NK)
        part.sums_NK.copy_(ones, non_blocking=True)

    with patch.object(sums._SumPart, "add", late):
        model, parameters = _after_a_backward(pool, has_nodes=True)
    parameters.sums._across.synchronize()
    parameters.free()
    parameters.reduce(None)
    # one from each of two nodes
    return int((model[0].weight.grad.to_local().cpu() != 2.0).sum())


def read_before_it_has_crossed(pool: GroupPool) -> int:
    """The stream of crossing sums still copies one when the current stream comes to read it."""
    return read_before_it_is_summed(pool, has_nodes=True)


def summed_before_it_is_there(pool: GroupPool) -> int:
    """Gradients are added up over ranks as early as the order of their sums allows."""
    model, parameters = _after_a_backward(pool)
    model._get_fsdp_state()._comm_ctx.reduce_scatter_stream.synchronize()
    parameters.reduce(None)
    wrong = int((model[0].weight.grad.to_local().cpu() != 3.0).sum())
    free_gathered(model)
    return wrong


def read_before_it_is_summed(pool: GroupPool, has_nodes: bool = False) -> int:
    """The stream of sums still copies what it has added up when the current stream comes to read it."""
    on_host, found = torch.zeros(32, 64).pin_memory(), torch.empty(32, 64, device=CUDA)
    model, parameters = _after_a_backward(pool, lambda _, total: on_host.copy_(total.to_local(), non_blocking=True), has_nodes)
    parameters.sums.settle()
    found.copy_(on_host, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    wrong = int((found.cpu() != 3.0).sum())
    torch.cuda.synchronize()
    free_gathered(model)
    return wrong


def messages_timed(pool: GroupPool) -> int:
    """The rate of messages to neighbours, each of which somebody waits for."""
    before = unwaited()
    measure.neighbour_rate(pool, CUDA)
    return unwaited() - before

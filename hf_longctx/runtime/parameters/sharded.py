"""Sharded parameters (FSDP2): wrapping, and when a round gathers weights and reduces gradients.

Shards lie over all ranks of a stage, or over blocks of consecutive ranks with copies across blocks (HSDP), never over a
sequence group, so a plan moves tokens and never weights. Gradients of a round add up unsharded on each rank and are
reduce-scattered as a sum in the round's last backward; with HSDP the blocks' sums are added once, behind the step's last
round. Not inside it, as FSDP2 would: blocks may run different numbers of rounds, and one that is done would wait for another
that still waits for it in a group of both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_longctx.plan.core.types import Parameters
from hf_longctx.runtime.parameters.gradients import HALF_DTYPES, GradientSum, ReplicatedParameters, TiedWeight

# how torch's logs call the groups of the mesh
MESH_GROUP = "parameter shards"
# the attribute of a sharded model that holds the ranks with the same shards
_COPIES = "longctx_copies"


def shard_mesh(device_type: str, shard_ranks: int, timeout_s: float, num_stages: int = 1) -> DeviceMesh:
    """The mesh over which parameters are sharded: blocks of `shard_ranks` consecutive ranks, copies across blocks of a stage.

    Collective over all ranks: every rank creates every group in one order; call it before the sequence groups are made.
    The groups are the mesh's own, so that a rank that waits longer than `timeout_s` fails. One mesh of a kind serves the whole
    process, since torch takes equal meshes for the same. Raises ValueError unless `shard_ranks` divides the number of ranks of
    a stage.
    """
    num_ranks = dist.get_world_size()
    ranks_per_stage = num_ranks // num_stages
    if shard_ranks < 1 or ranks_per_stage % shard_ranks:
        raise ValueError(
            f"shard_ranks is {shard_ranks}, which does not divide the {ranks_per_stage} ranks of the run or of a stage; choose "
            f"a divisor"
        )
    return _new_mesh(dist.group.WORLD, device_type, shard_ranks, timeout_s, num_stages)


@functools.cache
def _new_mesh(world: dist.ProcessGroup, device_type: str, shard_ranks: int, timeout_s: float, num_stages: int) -> DeviceMesh:
    num_ranks, rank = world.size(), world.rank()
    # of all stages, since every rank creates every group
    stages = torch.arange(num_ranks).view(num_stages, -1, shard_ranks)
    shards = _own_group(stages.flatten(0, 1).tolist(), rank, timeout_s)
    blocks = stages[rank // (num_ranks // num_stages)]
    if len(blocks) == 1:
        return DeviceMesh.from_group(shards, device_type, mesh_dim_names=("shard",))
    copies = _own_group(stages.transpose(1, 2).flatten(0, 1).tolist(), rank, timeout_s)
    return DeviceMesh.from_group([copies, shards], device_type, mesh=blocks, mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, layer_classes: Sequence[str], mesh: DeviceMesh, fp32_gradients: bool = True) -> None:
    """Shards `model` in place over `mesh`: every module of a class in `layer_classes`, then the rest as one unit.

    Tied embeddings belong to the rest, so they stay one parameter. `fp32_gradients`: gradients of weights in half
    precision add up and are summed over ranks in fp32. Every rank's backward must reach the same parameters, else FSDP2
    adds up the gradients of different ones in silence; plans send a chunk of every rank through the whole model. Raises
    ValueError if no module has one of the classes.
    """
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers of class {', '.join(layer_classes) or '(none named)'} to shard")
    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half and fp32_gradients else None)
    shards = mesh if mesh.ndim == 1 else mesh["shard"]
    for module in [*layers, model]:
        fully_shard(module, mesh=shards, mp_policy=policy)
    # for `ShardedParameters`, which sums over copies itself; FSDP2 does not know of them
    setattr(model, _COPIES, mesh.get_group("replicate") if mesh.ndim > 1 else None)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        # else fp32 sums would be scaled by 1 inside the collective, which gloo cannot
        unit.set_force_sum_reduction_for_comms(True)


class ShardedParameters:
    """Parameters of a model after `shard_model`, in steps of plans that are "sharded" or "gathered_per_round".

    sharded: every forward and backward gathers a layer and frees it (the rest stays from forward to backward).
    gathered_per_round: the round's first forward gathers each layer, its last backward frees it; the order of actions
    in between is free.
    """

    def __init__(self, model: FSDPModule, fp32_gradients: bool) -> None:
        assert isinstance(model, nn.Module)
        self.model = model
        self.layers = [module for module in _units(model) if module is not model]
        self.copies: dist.ProcessGroup | None = getattr(model, _COPIES)
        free_gathered(self.model)
        self.gradients = GradientSum(list(model.parameters()), fp32_gradients)
        self._is_gathered = False

    def check(self, parameters: Parameters) -> None:
        """Raises ValueError unless these parameters can take the steps of such a plan."""
        if parameters == "replicated":
            raise ValueError("the plan expects replicated parameters, but the model is sharded; plan with parameters='sharded'")

    def in_step(self) -> AbstractContextManager[None]:
        """Around all forwards and backwards of a step."""
        return nullcontext()

    def enter_round(self, parameters: Parameters) -> None:
        """Before the first action of a round."""
        self._is_gathered = parameters == "gathered_per_round"
        for layer in self.layers:
            layer.set_reshard_after_forward(not self._is_gathered, recurse=False)

    def before_backward(self, is_last: bool) -> None:
        """Before every backward; the last one of a round reduces. Collective: every rank has the same last backward."""
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_reshard_after_backward(is_last or not self._is_gathered)

    def after_backward(self) -> None:
        """After every backward: rounds in half precision add up in fp32."""
        self.gradients.absorb()

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves the step's sum of each shard in its `.grad`: a block's ranks have been summed round by round.

        Collective over the ranks with the same shards, and for `tied` over its ends, which hold the same shards too.
        """
        self.gradients.reduce(self.copies, tied)

    def free(self) -> None:
        """After forwards without a backward, which leave weights gathered."""
        free_gathered(self.model)


def is_sharded(model: object) -> bool:
    """Whether `shard_model` was applied to `model`."""
    return isinstance(model, FSDPModule)


def free_gathered(model: object) -> None:
    """Drops gathered weights, so that the model's parameters are its shards; nothing to do for other models."""
    for unit in _units(model):
        unit.reshard()


def parameters_of(model: nn.Module, fp32_gradients: bool) -> ReplicatedParameters | ShardedParameters:
    """How the parameters of `model` live: sharded if `shard_model` was applied to it."""
    if isinstance(model, FSDPModule):
        return ShardedParameters(model, fp32_gradients)
    return ReplicatedParameters(model, fp32_gradients)


def _units(model: object) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _own_group(groups: list[list[int]], rank: int, timeout_s: float) -> dist.ProcessGroup:
    """Creates every group, on every rank in one order; returns the one that `rank` is in."""
    timeout = timedelta(seconds=timeout_s)
    handles = {tuple(ranks): dist.new_group(ranks, timeout=timeout, group_desc=MESH_GROUP) for ranks in groups}
    return next(handle for ranks, handle in handles.items() if rank in ranks)

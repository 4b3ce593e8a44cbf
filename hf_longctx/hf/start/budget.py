"""Bytes that a run may use for activations, on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.ranks.launch import host_bytes as bytes_of_host
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec
from hf_longctx.plan.core.types import Ranges
from hf_longctx.plan.cost.cost_model import CostModel, block_sizes
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.communicators import COMMUNICATOR_BYTES, num_communicators, usable_bytes
from hf_longctx.plan.model.model_spec import ModelSpec

# share of a machine's host memory that its ranks may fill with saved tensors, and most of a rank, unless `host_gib` is set: what
# plans need of it is pinned, at some tenths of a second per GiB
_HOST_SHARE, _MOST_HOST_BYTES = 0.5, 64 * 2**30


@dataclass(frozen=True)
class Beside:
    """Parts of a run beside its model.

    reference_bytes: bytes of a reference model. kernels: fields of `ModelSpec` that say of what its layers have kernels.
    """

    reference_bytes: int = 0
    kernels: Mapping[str, bool] = field(default_factory=dict)


def describe_states(spec: ModelSpec) -> str:
    total = f"of {spec.num_parameters / 1e9:.2f} billion parameters{'' if spec.packed.is_empty else ' in four bits'}"
    if spec.adapters.is_empty:
        return f"weights, gradients and Adam states {total}"
    trained, _ = spec.adapters.sizes(spec.num_layers, True, True)
    return f"weights {total}, and gradients and Adam states of {trained / 1e6:.2f} million trained ones"


def activation_budget(
    config: LongContextConfig,
    costs: CostModel,
    ranges: Ranges,
    degrees: tuple[int, ...],
    device: torch.device,
    control: dist.ProcessGroup | None,
    reference_bytes: int = 0,
) -> ActivationBudget:
    """Bytes that every rank has left for activations beside the model's states; collective.

    With stages, these are the states of the stage that has most of them. degrees: of sequence groups. reference_bytes:
    bytes of the weights of a reference model, which is divided among ranks as the model is. Raises ValueError if `host_gib`, or
    optimizer states on the host, ask for more host memory than is available.
    """
    cluster = costs.cluster
    usable_bytes, available_bytes, total_bytes = rank_memory(config, costs, ranges, degrees, device, control)
    byte_model = ByteModel(costs.model)
    states = byte_model.most_states(ranges, costs.parameters, costs.shard_ranks)
    # a reference model stays on the device
    kept = ByteModel(replace(costs.model, layers_on_host=False)).most_states(ranges, costs.parameters, costs.shard_ranks)
    reference = reference_bytes * kept // max(1, byte_model.states())
    left_bytes = max(0, usable_bytes - states - reference)
    host_states = byte_model.most_states(ranges, costs.parameters, costs.shard_ranks, on_host=True)
    if (resting := byte_model.resting(costs.parameters, costs.shard_ranks)) + reference > usable_bytes:
        raise ValueError(
            f"layer_weights='host': between steps, weights of layers come back, and states then take {resting / 2**30:.1f} GiB, "
            f"of which a rank has {usable_bytes / 2**30:.1f} GiB; use more ranks"
        )
    if host_states > available_bytes:
        raise ValueError(
            f"{_named_places(costs.model)} {host_states / 2**30:.1f} GiB of host memory on every rank, and a node has "
            f"{available_bytes / 2**30:.1f} GiB available for each of its {cluster.ranks_per_node} ranks; use more ranks with "
            f"parameters='sharded', or leave it out"
        )
    available_bytes -= host_states
    if config.host_gib is None:
        # a share of all memory, not of what is free, so that a resumed run gets the same budget
        most_bytes = min(int(total_bytes * _HOST_SHARE), _MOST_HOST_BYTES)
        host_bytes = min(most_bytes, available_bytes) if device.type == "cuda" else 0
    else:
        host_bytes = int(config.host_gib * 2**30)
    if host_bytes > available_bytes:
        raise ValueError(
            f"host_gib is {config.host_gib} for each of {cluster.ranks_per_node} ranks of a node, which has "
            f"{available_bytes / 2**30:.1f} GiB available for each of them; lower it, or leave it out"
        )
    return byte_model.budget(left_bytes, host_bytes, config.tile_tokens, is_shared=degrees[-1] > 1)


def _named_places(spec: ModelSpec) -> str:
    """Settings that need host memory, with their verb."""
    states = ["optimizer_states='host'"] * spec.updates_on_host + ["layer_weights='host'"] * spec.layers_on_host
    return f"{' and '.join(states)} {'need' if len(states) > 1 else 'needs'}"


def rank_memory(
    config: LongContextConfig,
    costs: CostModel,
    ranges: Ranges,
    degrees: tuple[int, ...],
    device: torch.device,
    control: dist.ProcessGroup | None,
) -> tuple[int, int, int]:
    """Bytes of a rank: of its device for states and activations, of the host now, and of the host in all; collective.

    The smallest numbers of all ranks.
    """
    cluster = costs.cluster
    lends = config.lend_stages and len(ranges) > 1
    groups = num_communicators(cluster.num_ranks, block_sizes(degrees, costs), costs.shard_ranks, len(ranges), lends)
    own_bytes = _own_device_bytes(config, cluster, groups if has_communicators(device) else 0)
    own_host_bytes = tuple(num_bytes // cluster.ranks_per_node for num_bytes in bytes_of_host())
    everyone = gather_objects((own_bytes, *own_host_bytes), control)
    device_bytes, available_bytes, total_bytes = (min(column) for column in zip(*everyone, strict=True))
    return device_bytes, available_bytes, total_bytes


def has_communicators(device: torch.device) -> bool:
    """Whether process groups take memory of the device."""
    return device.type == "cuda" and dist.is_initialized() and dist.get_backend() != "gloo"


def _own_device_bytes(config: LongContextConfig, cluster: ClusterSpec, num_communicators: int) -> int:
    """Bytes of this rank's device for the model's states and for activations."""
    if config.device_gib:
        return max(0, int(config.device_gib * 2**30) - num_communicators * COMMUNICATOR_BYTES)
    return usable_bytes(cluster.hardware.device_bytes, num_communicators)

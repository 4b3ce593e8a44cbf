"""Sums the gradients of a step: over chunks in at least fp32, then once over ranks, in flat buckets.

`ReplicatedParameters` and `sharded.ShardedParameters` use it; the executor calls those.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_longctx.plan.core.types import Parameters

HALF_DTYPES = (torch.bfloat16, torch.float16)
_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A parameter held by both the first and the last stage, and the group of the two ranks that hold equal copies or shards."""

    parameter: nn.Parameter
    ends: dist.ProcessGroup


class GradientSum:
    """Accumulates the gradients of a model's trainable parameters over one step.

    Each half-precision weight gets an fp32 buffer (4 bytes per parameter, kept between steps), because adding the gradients
    of many chunks in bf16 loses those of small chunks. `in_fp32=False` saves these buffers and adds in the weights' dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], in_fp32: bool = True) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._wide: dict[nn.Parameter, Tensor] = {}
        self._in_fp32 = in_fp32

    def absorb(self) -> None:
        """Adds half-precision gradients to their fp32 buffers; other gradients stay in `.grad`. Call it after every backward."""
        if not self._in_fp32:
            return
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or gradient.dtype not in HALF_DTYPES:
                continue
            if parameter not in self._wide:
                self._wide[parameter] = torch.zeros_like(gradient, dtype=torch.float32)
            self._wide[parameter].add_(gradient)
            parameter.grad = None

    def complete(self) -> None:
        """Gives parameters without a gradient zeros, so that ranks that ran different layers can be summed. Before `reduce`."""
        for parameter in self.parameters:
            if parameter.grad is None and parameter not in self._wide:
                parameter.grad = torch.zeros_like(parameter)
        self.absorb()

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves in `.grad` the sum over the ranks of `group` (None: this rank alone), in the parameter's dtype.

        The gradient of `tied` is also summed over the two stages that hold it. Every rank of a group must call it with equal
        parameters in equal order and with gradients for equal ones; this holds because every rank runs at least one chunk
        through all its layers. Only the local shard of a sharded gradient is summed, so the ranks of the group must hold equal
        shards. Runs on the current stream.
        """
        sums = [self._wide.get(parameter, parameter.grad) for parameter in self.parameters]
        if group is not None:
            for bucket in _buckets([local_shard(gradient) for gradient in sums if gradient is not None]):
                _sum_bucket(bucket, group)
        if tied is not None and tied.parameter.requires_grad:
            _sum_bucket([local_shard(self._sum_of(tied.parameter))], tied.ends)
        for parameter, wide in self._wide.items():
            parameter.grad = wide.to(parameter.dtype)
            wide.zero_()

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        gradient = self._wide.get(parameter, parameter.grad)
        assert gradient is not None, "a tied weight has no gradient"
        return gradient


class ReplicatedParameters:
    """Parameters of a plain or DDP-wrapped model: whole on every rank, gradients summed once at the end of a step."""

    def __init__(self, model: nn.Module, fp32_gradients: bool) -> None:
        self.model = model
        self.gradients = GradientSum(list(model.parameters()), fp32_gradients)

    def check(self, parameters: Parameters) -> None:
        """Raises ValueError if a plan made for `parameters` of another kind cannot run on these."""
        if parameters != "replicated":
            raise ValueError(f"the plan expects {parameters} parameters, but this model is not sharded; apply shard_model to it")

    def in_step(self) -> AbstractContextManager[None]:
        """Context around all forwards and backwards of a step.

        It switches DDP's own reducer off, which expects one forward per backward; plans do not promise that.
        """
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def enter_round(self, parameters: Parameters) -> None:
        """Nothing to gather."""

    def before_backward(self, is_last: bool) -> None:
        """Nothing to announce."""

    def after_backward(self) -> None:
        """Collects the gradients of a backward; call it after each one."""
        self.gradients.absorb()

    def complete(self) -> None:
        """Adds zero gradients for layers that did not run. Call it before `reduce` if ranks of the group ran different layers."""
        self.gradients.complete()

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves the sum over `group` in every `.grad`, for `tied` also over its two stages. Collective over these ranks."""
        self.gradients.reduce(group, tied)

    def free(self) -> None:
        """Nothing to free."""


def local_shard(gradient: Tensor) -> Tensor:
    """This rank's shard of a sharded gradient; any other gradient as it is."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Consecutive gradients of one dtype, at most 64 MiB per bucket unless one gradient is larger."""
    buckets: list[list[Tensor]] = []
    for gradient in gradients:
        last = buckets[-1] if buckets else []
        if not last or last[0].dtype != gradient.dtype or _num_bytes(last) + _num_bytes([gradient]) > _BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient)
    return buckets


def _sum_bucket(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in bucket])
    for gradient, total in zip(bucket, sums, strict=True):
        gradient.copy_(total.view_as(gradient))


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

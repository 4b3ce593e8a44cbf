"""Sums the gradients of a step: over chunks in at least fp32, then once over ranks, in flat buckets.

`ReplicatedParameters` and `sharded.ShardedParameters` use it; the executor calls those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
    """Accumulates over one step the gradients of those parameters of a model that require a gradient in this step.

    Parameters may be frozen and unfrozen between steps, alike on all ranks (`check_weights`). As in plain training, a
    weight that is frozen, or that no forward of the step used on any rank, ends without a gradient, so no optimizer moves it.

    Each half-precision weight gets an fp32 buffer (4 bytes per parameter, until the step's sum is known), because adding the
    gradients of many chunks in bf16 loses those of small chunks. `in_fp32=False` saves these buffers and adds in the weights'
    dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], in_fp32: bool = True) -> None:
        self.parameters = list(parameters)
        self._in_fp32 = in_fp32
        # fp32 sums of the gradients of this step
        self._wide: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def absorbing(self) -> Iterator[None]:
        """Context in which backward adds each half-precision gradient to its fp32 buffer at once, so that few lie beside them."""
        with ExitStack() as hooks:
            for parameter in self.parameters:
                if self._in_fp32 and parameter.requires_grad and parameter.dtype in HALF_DTYPES:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(self._absorb).remove)
            yield

    def absorb(self) -> None:
        """Adds half-precision gradients to their fp32 buffers and leaves others in `.grad`. Call it after every backward."""
        if self._in_fp32:
            for parameter in self.parameters:
                self._absorb(parameter)

    @torch.no_grad()
    def _absorb(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad or gradient.dtype not in HALF_DTYPES:
            return
        if parameter in self._wide:
            self._wide[parameter].add_(gradient)
        else:
            self._wide[parameter] = gradient.float()
        parameter.grad = None

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves in `.grad` the sum over the ranks of `group` (None: this rank alone), in the parameter's dtype.

        A rank without a gradient for a parameter adds zeros if another rank has one. The gradient of `tied` is also summed over
        the two stages that hold it. Every rank of a group must call it with equal parameters in equal order. Only the local
        shard of a sharded gradient is summed, so the ranks of the group must hold equal shards. Runs on the current stream, and
        waits once for the device if there is a group.
        """
        for parameter in [parameter for parameter in self._wide if not parameter.requires_grad]:
            del self._wide[parameter]
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if group is not None:
            used = _any_rank([self._has_gradient(parameter) for parameter in trained], trained, group)
            sums = [local_shard(self._sum_of(parameter)) for parameter, is_used in zip(trained, used, strict=True) if is_used]
            for bucket in _buckets(sums):
                _sum_bucket(bucket, group)
        if tied is not None and tied.parameter.requires_grad:
            (is_used,) = _any_rank([self._has_gradient(tied.parameter)], [tied.parameter], tied.ends)
            if is_used:
                _sum_bucket([local_shard(self._sum_of(tied.parameter))], tied.ends)
        for parameter in list(self._wide):
            parameter.grad = self._wide.pop(parameter).to(parameter.dtype)

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        return parameter in self._wide or parameter.grad is not None

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor in which this rank's gradient of the step adds up; it is made of zeros if the rank has no gradient yet."""
        if parameter not in self._wide:
            if parameter.grad is not None:
                return parameter.grad
            if not (self._in_fp32 and parameter.dtype in HALF_DTYPES):
                parameter.grad = torch.zeros_like(parameter)
                return parameter.grad
            self._wide[parameter] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        return self._wide[parameter]


def _any_rank(flags: Sequence[bool], parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[bool]:
    """For every parameter, whether its flag is set on some rank of `group`. Collective; waits for the device."""
    if not flags:
        return []
    found = torch.tensor(flags, dtype=torch.uint8, device=local_shard(parameters[0]).device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]


class ReplicatedParameters:
    """Parameters of a plain or DDP-wrapped model: whole on every rank, gradients summed once at the end of a step."""

    def __init__(self, model: nn.Module, fp32_gradients: bool) -> None:
        self.model = model
        self.gradients = GradientSum(list(model.parameters()), fp32_gradients)

    def check(self, parameters: Parameters) -> None:
        """Raises ValueError if a plan made for parameters of kind `parameters` cannot run on this model."""
        if parameters != "replicated":
            raise ValueError(f"the plan expects {parameters} parameters, but this model is not sharded; apply shard_model to it")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context around all forwards and backwards of a step.

        It switches off DDP's own reducer, which expects one forward per backward; plans do not promise that.
        """
        no_sync = self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()
        with no_sync, self.gradients.absorbing():
            yield

    def enter_round(self, parameters: Parameters) -> None:
        """Nothing to gather."""

    def before_backward(self, is_last: bool) -> None:
        """Nothing to announce."""

    def after_backward(self) -> None:
        """Collects the gradients of a backward; call it after each one."""
        self.gradients.absorb()

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

"""Sums the gradients of a step: over chunks in at least fp32, then once over ranks, in buckets, some of them early.

`ReplicatedParameters` and `sharded.ShardedParameters` use it; the executor calls those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_longctx.plan.core.types import Parameters
from hf_longctx.runtime.parameters.early_copies import EarlyCopies, Send
from hf_longctx.runtime.parameters.early_sums import EarlyGroup, EarlySums
from hf_longctx.runtime.parameters.layer_order import LayerOrder

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
        # gradients that were settled in this step's last backward, all for which that was asked, and those that were not final
        self._settled: dict[nn.Parameter, Tensor] = {}
        self._asked: set[nn.Parameter] = set()
        self._late: set[nn.Parameter] = set()

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
        if parameter in self._asked:
            self._late.add(parameter)
        if parameter in self._wide:
            self._wide[parameter].add_(gradient)
        else:
            self._wide[parameter] = gradient.float()
        parameter.grad = None

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None, early: EarlySums | None = None) -> None:
        """Leaves in `.grad` the sum over the ranks of `group` (None: this rank alone), in the parameter's dtype.

        A rank without a gradient for a parameter adds zeros if another rank has one. The gradient of `tied` is also summed over
        the two stages that hold it. `early` has summed gradients over `group` already. Every rank of a group must call it with
        equal parameters in equal order. Only the local shard of a sharded gradient is summed, so the ranks of the group must hold
        equal shards. Runs on the current stream, and waits once for the device if there is a group.
        """
        for parameter in [parameter for parameter in self._wide if not parameter.requires_grad]:
            del self._wide[parameter]
        self.unsettle()
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if group is not None:
            self._reduce_over(group, trained, early)
        if tied is not None and tied.parameter.requires_grad:
            (is_used,) = _most_over_ranks([self._has_gradient(tied.parameter)], tied.parameter, tied.ends)
            if is_used:
                _sum_bucket([local_shard(self._sum_of(tied.parameter))], tied.ends)
        for parameter in list(self._wide):
            parameter.grad = self._wide.pop(parameter).to(parameter.dtype)

    def _reduce_over(self, group: dist.ProcessGroup, trained: list[nn.Parameter], early: EarlySums | None) -> None:
        """Leaves sums over `group` where this rank's gradients add up, and nothing for parameters that no rank used."""
        had = {} if early is None else early.start_all()
        has = [self._has_gradient(parameter) for parameter in trained]
        used = [now or had.get(parameter, False) for parameter, now in zip(trained, has, strict=True)]
        late = [now and parameter in had for parameter, now in zip(trained, has, strict=True)]
        backward_s = 0.0 if early is None else early.backward_s
        *flags, longest_s = _most_over_ranks([*used, *late, backward_s], trained[0], group) if trained else [0.0]
        is_used = dict(zip(trained, flags, strict=False))
        is_late = dict(zip(trained, flags[len(trained) :], strict=True))
        found = {} if early is None else early.finish(longest_s, [parameter for parameter in trained if is_late[parameter]])
        left = [each for each in trained if is_used[each] and (each not in found or is_late[each])]
        for bucket in _buckets([local_shard(self._sum_of(parameter)) for parameter in left]):
            _sum_bucket(bucket, group)
        for parameter, total in found.items():
            if is_late[parameter]:
                total += self.take(parameter)[0]
            if is_used[parameter]:
                self._keep(parameter, total)

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Dtype in which a parameter's gradients add up."""
        return torch.float32 if self._in_fp32 and parameter.dtype in HALF_DTYPES else parameter.dtype

    def take(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Gives up this rank's gradient of a parameter; zeros, and False, if there is none."""
        has_gradient = self._has_gradient(parameter)
        if self._in_fp32:
            self._absorb(parameter)
        total = self._sum_of(parameter)
        self._wide.pop(parameter, None)
        parameter.grad = None
        return total, has_gradient

    def settle(self, parameter: nn.Parameter, is_trial: bool) -> Tensor | None:
        """A gradient as `reduce` will leave it on a rank alone, if nothing is added to it any more; None if there is none.

        is_trial: only find out whether something will be. Of a parameter for which that happened, in any step, no gradient is
        settled. A later gradient of a half-precision weight would be added to one that is rounded already.
        """
        self._asked.add(parameter)
        is_settled = parameter in self._settled or parameter in self._late
        if is_trial or is_settled or not parameter.requires_grad or not self._has_gradient(parameter):
            return None
        total = self._wide.pop(parameter).to(parameter.dtype) if parameter in self._wide else parameter.grad
        assert total is not None
        # so that a later gradient is seen
        parameter.grad = None
        self._settled[parameter] = total
        return total

    @torch.no_grad()
    def unsettle(self) -> None:
        """Puts settled gradients where others are, and adds what came later."""
        for parameter, total in self._settled.items():
            if parameter in self._wide:
                self._wide[parameter].add_(total)
                continue
            if parameter.grad is not None:
                total.add_(parameter.grad)
            parameter.grad = total
        self._settled.clear()
        self._asked.clear()

    def _keep(self, parameter: nn.Parameter, total: Tensor) -> None:
        if total.dtype == parameter.dtype:
            parameter.grad = total
        else:
            self._wide[parameter] = total

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        return parameter in self._wide or parameter.grad is not None

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor in which this rank's gradient of the step adds up; it is made of zeros if the rank has no gradient yet."""
        if parameter not in self._wide:
            if parameter.grad is not None:
                return parameter.grad
            if (dtype := self.dtype_of(parameter)) == parameter.dtype:
                parameter.grad = torch.zeros_like(parameter)
                return parameter.grad
            self._wide[parameter] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return self._wide[parameter]


def _most_over_ranks(values: Sequence[float], parameter: nn.Parameter, group: dist.ProcessGroup) -> list[float]:
    """The largest of every value over the ranks of `group`, exchanged where `parameter` is. Collective; waits for the device."""
    found = torch.tensor(values, dtype=torch.float64, device=local_shard(parameter).device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    most: list[float] = found.tolist()
    return most


class ReplicatedParameters:
    """Parameters of a plain or DDP-wrapped model: whole on every rank, gradients summed over ranks once per step."""

    def __init__(self, model: nn.Module, fp32_gradients: bool) -> None:
        self.model = model
        self.gradients = GradientSum(list(model.parameters()), fp32_gradients)
        order = LayerOrder(model)
        self.early = EarlySums(order, self.gradients.take, self.gradients.dtype_of)
        self.copies = EarlyCopies(order, self.gradients.settle)

    def check(self, parameters: Parameters) -> None:
        """Raises ValueError if a plan made for parameters of kind `parameters` cannot run on this model."""
        if parameters != "replicated":
            raise ValueError(f"the plan expects {parameters} parameters, but this model is not sharded; apply shard_model to it")

    def computing(self) -> AbstractContextManager[None]:
        """Context around all forwards and backwards of a plan; whole weights stay where they are."""
        return nullcontext()

    @contextmanager
    def in_step(self, early_group: EarlyGroup | None = None, send: Send | None = None) -> Iterator[None]:
        """Context around all forwards and backwards of a plan.

        It switches off DDP's own reducer, which expects one forward per backward; plans do not promise that. early_group: for
        gradients that are summed in the last backward of the plan, which must be the last one of the step. send: gets the
        gradients that are final in that backward, on a rank that sums with no other.
        """
        no_sync = self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()
        with no_sync, self.gradients.absorbing(), self.early.in_step(early_group), self.copies.in_step(send):
            try:
                yield
            except BaseException:
                # where `zero_grad` finds them
                self.gradients.unsettle()
                raise

    def enter_round(self, parameters: Parameters) -> None:
        """Nothing to gather."""

    def before_backward(self, is_last: bool, is_last_of_plan: bool = False) -> None:
        """Announces a backward: the last one of a micro-batch (`is_last`), or of this rank's plan."""
        if is_last_of_plan:
            self.early.begin_last()
            self.copies.begin_last()

    def after_backward(self) -> None:
        """Collects the gradients of a backward; call it after each one."""
        self.gradients.absorb()
        self.early.end_backward()
        self.copies.end_backward()

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves the sum over `group` in every `.grad`, for `tied` also over its two stages. Collective over these ranks."""
        self.gradients.reduce(group, tied, self.early)

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

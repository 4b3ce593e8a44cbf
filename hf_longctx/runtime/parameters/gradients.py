"""Sums the gradients of a step: over chunks in at least fp32, then once over ranks, in buckets, some of them early.

`ReplicatedParameters` and `sharded.ShardedParameters` do so for the executor. This file also clips gradients by the norm over all
pipeline stages, in place of `clip_grad_norm_`, and finds gradients and weights that are not finite. Finite gradients with an
infinite norm count as well, since clipping would divide them by it and silently lose the step.

Early: during the last backward of a step, gradients of a weight are final once the backward has passed all its layers
(`LayerOrder`). A layer is passed when the gradient of its input is known; a weight's own gradient does not show it, since an
expert without tokens never gets one. Final gradients leave for the host (`EarlyCopies`) or are summed over ranks (`EarlySums`).
The executor passes on which backward is the last and where the step ends.

A weight that is also used outside of its layers may get a gradient later. If its gradient has left for the host, the late one
adds up beside it, and the sum leaves once more (`host_steps.py`); the first step sends nothing and finds such weights, which are
then sent at the end. If its sum over ranks has started, the late gradient adds up beside it; the ranks exchange this at the end,
sum the rest, and from then on sum such weights at the end.

Buckets of early sums follow the layers from last to first. All ranks start all of them, in the same order, on a process group
that nothing else uses. So no rank waits for another inside its backward, under any groups, orders and micro-batches: a rank with
a later last backward, or none, starts its buckets later, at the latest at the end of the step. Ranks of one sequence group start
a bucket at the same place of their programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_longctx.plan.core.types import Action, Parameters

# level of weights before the first layer, to which the last layers of a backward may add
AT_END = -1


class LayerOrder:
    """Layers of a model in order: modules of classes with `gradient_checkpointing`.

    levels: for each weight, the first layer that holds it; weights after all layers count as the last layer's, others as
    `AT_END`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if hasattr(type(module), "gradient_checkpointing")]
        self.levels = _levels(list(model.parameters()), self.layers)

    @contextmanager
    def watching(self, passed: Callable[[int], None]) -> Iterator[None]:
        """Context in which `passed` is called with a layer's index whenever a backward has passed the layer."""
        with ExitStack() as hooks:
            for level, layer in enumerate(self.layers):
                hooks.callback(layer.register_forward_pre_hook(partial(_watch, passed, level), with_kwargs=True).remove)
            yield


def _watch(passed: Callable[[int], None], level: int, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Hooks a layer's input, so that `passed` is called once its gradient is known."""
    hidden_1TC = next((each for each in (*args, *keywords.values()) if _carries_gradient(each)), None)
    if hidden_1TC is not None:
        hidden_1TC.register_hook(lambda gradient: passed(level))


def _carries_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.dim() == 3


def _levels(weights: Sequence[nn.Parameter], layers: Sequence[nn.Module]) -> dict[nn.Parameter, int]:
    found: dict[nn.Parameter, int] = {}
    for level, layer in enumerate(layers):
        for weight in layer.parameters():
            found.setdefault(weight, level)
    is_after = bool(layers)
    for weight in reversed(weights):
        is_after = is_after and weight not in found
        if is_after:
            found[weight] = len(layers) - 1
    return {weight: found.get(weight, AT_END) for weight in weights}


# gets a weight and its gradient
Send = Callable[[nn.Parameter, Tensor], None]


class EarlyCopies:
    """Sends the gradients of layers that the last backward has passed.

    settle: returns the gradient of a weight, rounded as the optimizer gets it, or None; in a trial it is not rounded.
    """

    def __init__(self, order: LayerOrder, settle: Callable[[nn.Parameter, bool], Tensor | None]) -> None:
        self._order, self._settle = order, settle
        # from the last layer to the first
        self._weights = sorted(
            (weight for weight, level in order.levels.items() if level > AT_END), key=lambda weight: -order.levels[weight]
        )
        self._send: Send | None = None
        self._is_last, self._is_trial, self._num_passed = False, True, 0

    @contextmanager
    def in_step(self, send: Send | None) -> Iterator[None]:
        """Context around the forwards and backwards of the plan that ends a step; None: this plan sends nothing."""
        self._send, self._is_last, self._num_passed = send, False, 0
        watching: AbstractContextManager[None] = nullcontext() if send is None else self._order.watching(self._passed)
        with watching:
            yield
        self._send = None

    def begin_last(self) -> None:
        """Call it before this rank's last backward of the step."""
        self._is_last = self._send is not None

    def end_backward(self) -> None:
        """Call it after every backward."""
        if self._is_last:
            self._is_last = self._is_trial = False

    @torch.no_grad()
    def _passed(self, level: int) -> None:
        """Sends the gradients of the next weights to which layers before `level` add nothing."""
        if not self._is_last or self._send is None:
            return
        while self._num_passed < len(self._weights) and self._order.levels[self._weights[self._num_passed]] >= level:
            weight = self._weights[self._num_passed]
            self._num_passed += 1
            if (gradient := self._settle(weight, self._is_trial)) is not None:
                self._send(weight, gradient)


# gradients of at least this many bytes are summed in place; smaller ones are copied into buckets of at most as many
_EARLY_BUCKET_BYTES = 16 * 2**20
# most bytes of such copies, as for one bucket at the end of a step; the rest is summed at the end
_MOST_COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class EarlyGroup:
    """Process group of all ranks with equal weights, used for early sums alone.

    longest_s: longest last backward with which sums start early. A rank waits for ranks whose last backward begins later; with
    longer ones it could wait longer than the group's time-out.
    """

    ranks: dist.ProcessGroup
    longest_s: float


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Weights that are summed in one message, once the gradient of the input of layer `level` is known."""

    level: int
    weights: tuple[nn.Parameter, ...]


class EarlySums:
    """Starts sums in the last backward of a step, and collects them at its end.

    take: hands over this rank's gradient of a weight, and whether there was one; zeros otherwise. dtype_of: dtype in which a
    weight's gradients add up. A model without layers sums at the end. So does the first step, whose last backward is timed for
    the decision in later ones; its buckets are the same.
    """

    def __init__(
        self,
        order: LayerOrder,
        take: Callable[[nn.Parameter], tuple[Tensor, bool]],
        dtype_of: Callable[[nn.Parameter], torch.dtype],
    ) -> None:
        self._take, self._dtype_of = take, dtype_of
        self._order, self._levels = order, order.levels
        self._group: EarlyGroup | None = None
        # weights with a gradient that came too late, in any step and on any rank
        self._late: set[nn.Parameter] = set()
        # seconds of the longest last backward of the steps so far, over all ranks; None before the first
        self._longest_s: float | None = None
        self._buckets: list[_Bucket] = []
        self._started: list[_Started] = []
        self._is_last = False
        # seconds of this rank's last backward
        self._began_s = self.backward_s = 0.0

    @contextmanager
    def in_step(self, group: EarlyGroup | None) -> Iterator[None]:
        """Context around the forwards and backwards of the plan that ends a step; None: this plan sums nothing early."""
        self._group, self._buckets, self._started, self._is_last, self.backward_s = group, [], [], False, 0.0
        # buckets are the same if all of them start at the end, so that no bit of a gradient depends on seconds
        if group is not None:
            trained = [weight for weight in self._levels if weight.requires_grad and weight not in self._late]
            self._buckets = _early_buckets(trained, self._levels, self._dtype_of)
        with ExitStack() as hooks:
            is_early = group is not None and self._longest_s is not None and self._longest_s <= group.longest_s
            if is_early and self._buckets:
                hooks.enter_context(self._order.watching(self._passed))
            yield

    def begin_last(self) -> None:
        """Call it before this rank's last backward of the step."""
        self._is_last, self._began_s = self._group is not None, time.monotonic()

    def end_backward(self) -> None:
        """Call it after every backward."""
        if self._is_last:
            self._is_last, self.backward_s = False, time.monotonic() - self._began_s

    def start_all(self) -> dict[nn.Parameter, bool]:
        """Starts all remaining sums; returns for every weight summed early whether this rank had a gradient by then."""
        self._start(AT_END)
        return {weight: had for started in self._started for weight, had in started.had_gradient.items()}

    def finish(self, longest_s: float, late: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Waits for all sums and returns them.

        longest_s: seconds of the longest last backward of all ranks. late: weights that got a gradient on some rank after their
        sum had started. Both must be equal on all ranks.
        """
        found = {weight: total for started in self._started for weight, total in started.finish().items()}
        if self._group is not None:
            self._longest_s = max(self._longest_s or 0.0, longest_s)
        self._late.update(late)
        self._group, self._buckets, self._started = None, [], []
        return found

    def _passed(self, level: int) -> None:
        if self._is_last:
            self._start(level)

    @torch.no_grad()
    def _start(self, level: int) -> None:
        """Starts the next buckets to which layers before `level` add nothing."""
        while len(self._started) < len(self._buckets) and self._buckets[len(self._started)].level >= level:
            assert self._group is not None
            weights = self._buckets[len(self._started)].weights
            self._started.append(_Started(weights, [self._take(weight) for weight in weights], self._group.ranks))


class _Started:
    """One running sum over ranks. gradients: (gradient, whether this rank had one) of every weight."""

    def __init__(self, weights: Sequence[nn.Parameter], gradients: list[tuple[Tensor, bool]], group: dist.ProcessGroup) -> None:
        self.had_gradient = {weight: had for weight, (_, had) in zip(weights, gradients, strict=True)}
        self._gradients = tensors = [gradient for gradient, _ in gradients]
        self._is_in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0] if self._is_in_place else torch.cat([gradient.reshape(-1) for gradient in tensors])
        work = dist.all_reduce(self._flat, group=group, async_op=True)
        assert work is not None
        self._work = work

    def finish(self) -> dict[nn.Parameter, Tensor]:
        """Waits for the sum, on CUDA without blocking the host; returns each weight's sum in the tensor of its gradient."""
        self._work.wait()
        if not self._is_in_place:
            parts = self._flat.split([gradient.numel() for gradient in self._gradients])
            for gradient, total in zip(self._gradients, parts, strict=True):
                gradient.copy_(total.view_as(gradient))
        return dict(zip(self.had_gradient, self._gradients, strict=True))


def _early_buckets(
    weights: Sequence[nn.Parameter], levels: Mapping[nn.Parameter, int], dtype_of: Callable[[nn.Parameter], torch.dtype]
) -> list[_Bucket]:
    """Returns buckets of the layers' weights, from the last layer to the first; equal on all ranks with equal weights."""
    buckets: list[_Bucket] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    copied_bytes = 0
    for weight in sorted((weight for weight in weights if levels[weight] > AT_END), key=lambda weight: -levels[weight]):
        dtype = dtype_of(weight)
        num_bytes = weight.numel() * dtype.itemsize
        if num_bytes >= _EARLY_BUCKET_BYTES:
            buckets.append(_Bucket(levels[weight], (weight,)))
            continue
        if copied_bytes + num_bytes > _MOST_COPIED_BYTES:
            continue
        copied_bytes += num_bytes
        held, held_bytes = filling.pop(dtype, ([], 0))
        if held and held_bytes + num_bytes > _EARLY_BUCKET_BYTES:
            buckets.append(_Bucket(levels[held[-1]], tuple(held)))
            held, held_bytes = [], 0
        filling[dtype] = [*held, weight], held_bytes + num_bytes
    buckets += [_Bucket(levels[held[-1]], tuple(held)) for held, _ in filling.values()]
    return sorted(buckets, key=lambda bucket: -bucket.level)


HALF_DTYPES = (torch.bfloat16, torch.float16)
_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A parameter on several stages, and the group of their ranks with equal copies or shards."""

    parameter: nn.Parameter
    ranks: dist.ProcessGroup


class GradientSum:
    """Accumulates over one step the gradients of a model's parameters that require one.

    Parameters may be frozen and unfrozen between steps, in the same way on all ranks (`check_weights`). As in plain training, a
    weight that is frozen, or not used by any forward of the step on any rank, gets no gradient, so no optimizer moves it.

    Each half-precision weight gets an fp32 buffer (4 bytes per parameter, until the step's sum is known), because adding the
    gradients of many chunks in bf16 loses those of small chunks. in_fp32: False saves the buffers and adds in the weights' dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], in_fp32: bool = True) -> None:
        self.parameters = list(parameters)
        self._in_fp32 = in_fp32
        # fp32 sums of the gradients of this step
        self._wide: dict[nn.Parameter, Tensor] = {}
        # gradients settled in this step's last backward, weights for which that was requested, and those that were not final
        self._settled: dict[nn.Parameter, Tensor] = {}
        self._asked: set[nn.Parameter] = set()
        self._late: set[nn.Parameter] = set()

    @contextmanager
    def absorbing(self) -> Iterator[None]:
        """Context in which backward adds each half-precision gradient to its fp32 buffer at once, to save memory."""
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
        parameter.grad = None
        self.add(parameter, gradient)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds a gradient of `parameter`, in its dtype or a wider one, to those of this step."""
        dtype = self.dtype_of(parameter)
        held = parameter.grad if dtype == parameter.dtype else self._wide.get(parameter)
        if held is None:
            self._keep(parameter, gradient.to(dtype))
        else:
            local_shard(held).add_(local_shard(gradient))

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None, early: EarlySums | None = None) -> None:
        """Leaves in `.grad` the sum over the ranks of `group` (None: this rank alone), in the parameter's dtype.

        A rank without a gradient for a parameter adds zeros if another rank has one. The gradient of `tied` is also summed over
        the stages that hold it. early: has already summed some gradients over `group`. Every rank of a group must call it
        with equal parameters in equal order. Only the local shard of a sharded gradient is summed, so the ranks of the group must
        hold equal shards. Runs on the current stream, and waits once for the device if there is a group.
        """
        for parameter in [parameter for parameter in self._wide if not parameter.requires_grad]:
            del self._wide[parameter]
        self.unsettle()
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if group is not None:
            self._reduce_over(group, trained, early)
        if tied is not None and tied.parameter.requires_grad:
            (is_used,) = _most_over_ranks([self._has_gradient(tied.parameter)], tied.parameter, tied.ranks)
            if is_used:
                _sum_bucket([local_shard(self._sum_of(tied.parameter))], tied.ranks)
        for parameter in list(self._wide):
            parameter.grad = self._wide.pop(parameter).to(parameter.dtype)

    def _reduce_over(self, group: dist.ProcessGroup, trained: list[nn.Parameter], early: EarlySums | None) -> None:
        """Leaves sums over `group` in this rank's accumulated gradients, and none for parameters that no rank used."""
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
        """Returns the dtype in which a parameter's gradients add up."""
        return torch.float32 if self._in_fp32 and parameter.dtype in HALF_DTYPES else parameter.dtype

    def take(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Hands over this rank's gradient of a parameter and True; zeros and False if there is none."""
        has_gradient = self._has_gradient(parameter)
        if self._in_fp32:
            self._absorb(parameter)
        total = self._sum_of(parameter)
        self._wide.pop(parameter, None)
        parameter.grad = None
        return total, has_gradient

    def settle(self, parameter: nn.Parameter, is_trial: bool) -> Tensor | None:
        """Returns a gradient as `reduce` will leave it on a single rank, if nothing more is added; None if there is none.

        is_trial: only detect whether something more is added. A parameter for which that happened in any step is not settled,
        since a later gradient of a half-precision weight would be added to a rounded one.
        """
        self._asked.add(parameter)
        is_settled = parameter in self._settled or parameter in self._late
        if is_trial or is_settled or not parameter.requires_grad or not self._has_gradient(parameter):
            return None
        total = self._wide.pop(parameter).to(parameter.dtype) if parameter in self._wide else parameter.grad
        assert total is not None
        # so that a later gradient is noticed
        parameter.grad = None
        self._settled[parameter] = total
        return total

    @torch.no_grad()
    def unsettle(self) -> None:
        """Puts settled gradients back among the others, and adds what came later."""
        for parameter, total in self._settled.items():
            if parameter in self._wide:
                self._wide[parameter].add_(total)
                continue
            if parameter.grad is not None:
                total.add_(parameter.grad)
            parameter.grad = total
        self._settled.clear()
        self._asked.clear()

    def forget(self) -> None:
        """Drops the fp32 sums of a step that raised, and leaves other gradients where `zero_grad` finds them."""
        self.unsettle()
        self._wide.clear()

    def _keep(self, parameter: nn.Parameter, total: Tensor) -> None:
        if total.dtype == parameter.dtype:
            parameter.grad = total
        else:
            self._wide[parameter] = total

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        return parameter in self._wide or parameter.grad is not None

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Returns the tensor in which this rank's gradient of the step adds up; zeros if there is no gradient yet."""
        if parameter not in self._wide:
            if parameter.grad is not None:
                return parameter.grad
            if (dtype := self.dtype_of(parameter)) == parameter.dtype:
                parameter.grad = torch.zeros_like(parameter)
                return parameter.grad
            self._wide[parameter] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return self._wide[parameter]


def _most_over_ranks(values: Sequence[float], parameter: nn.Parameter, group: dist.ProcessGroup) -> list[float]:
    """Returns each value's maximum over `group`, exchanged on the device of `parameter`. Collective; waits for the device."""
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
    def in_step(self, is_end: bool, early_group: EarlyGroup | None = None, send: Send | None = None) -> Iterator[None]:
        """Context around all forwards and backwards of a plan.

        Switches off DDP's own reducer, which expects one forward per backward, unlike plans. is_end: the plan is the last of its
        step. early_group: for gradients to sum in its last backward; only with `is_end`. send: takes gradients that are final in
        that backward, on a rank that sums with no other.
        """
        no_sync = self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()
        with no_sync, self.gradients.absorbing(), self.early.in_step(early_group), self.copies.in_step(send):
            yield

    def enter_round(self, parameters: Parameters) -> None:
        """Does nothing, since whole weights need no gather."""

    def begin_pass(self, action: Action, following: Action | None) -> None:
        """Does nothing, since whole weights need no gather."""

    def before_backward(self, is_last: bool, is_last_of_plan: bool = False) -> None:
        """Announces a backward: the last one of a micro-batch (`is_last`), or of this rank's plan."""
        if is_last_of_plan:
            self.early.begin_last()
            self.copies.begin_last()

    def skip_backward(self) -> None:
        """Does nothing, since sums over ranks do not wait for backwards."""

    def after_backward(self) -> None:
        """Collects the gradients of a backward; call it after each one."""
        self.gradients.absorb()
        self.early.end_backward()
        self.copies.end_backward()

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves the sum over `group` in every `.grad`, for `tied` also over its stages. Collective over these ranks."""
        self.gradients.reduce(group, tied, self.early)

    def free(self, keeps_ends: bool = False) -> None:
        """Does nothing, since there are no gathered weights to free."""

    def end_passes(self) -> None:
        """Does nothing, since nothing is recorded of passes that run."""

    def forget(self) -> None:
        """Drops sums of a step that raised."""
        self.gradients.forget()


def local_shard(gradient: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded gradient; any other gradient unchanged."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def first_row(value: Tensor) -> int:
    """The row of the whole tensor at which this rank's shard begins; rows are dealt out as by torch.chunk."""
    if not isinstance(value, DTensor) or not value.placements[0].is_shard(0):
        return 0
    mesh = value.device_mesh
    return min(mesh.get_local_rank() * -(-value.shape[0] // mesh.size()), value.shape[0])


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Groups consecutive gradients of one dtype into buckets of at most 64 MiB, unless one gradient is larger."""
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


@torch.no_grad()
def clip_stage_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, pipe: dist.ProcessGroup, twin: nn.Parameter | None = None
) -> Tensor:
    """Returns the norm of the whole model's gradient, equal on every rank (fp64 scalar); clips gradients to `max_norm`.

    parameters: all parameters of this stage, with gradients already summed over the stage's ranks. pipe: group of the ranks at
    this position of all stages. twin: a tied parameter that an earlier stage holds too; only that stage counts its gradient.
    Squares are summed in fp64. Collective over all ranks.
    """
    gradients = [(parameter, local_shard(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter, gradient in gradients:
        if parameter is not twin:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    if isinstance(parameters[0], DTensor):
        # any parameter's mesh will do, since all parameters of a stage are sharded over the same ranks
        dist.all_reduce(square, group=parameters[0].device_mesh.get_group())
    dist.all_reduce(square, group=pipe)
    norm = square.sqrt()
    # the formula of torch's clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


@torch.no_grad()
def has_nonfinite_gradient(parameters: Iterable[nn.Parameter], device: torch.device, num_ranks: int = 1) -> Tensor:
    """Returns 1 if gradients on this rank have a NaN or infinite element or too large a norm, else 0 (fp64 scalar).

    A norm is too large if its square, summed over `num_ranks` ranks like this one, is infinite in fp32, or in the gradients'
    dtype if that is wider. Does not wait for the device.
    """
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # NaN if an element is NaN
    norm = torch.nn.utils.get_total_norm(gradients)
    square = norm.to(torch.promote_types(norm.dtype, torch.float32)).square() * num_ranks
    return (~torch.isfinite(square)).double()


@torch.no_grad()
def nonfinite_names(model: nn.Module, of_gradients: bool = False) -> list[str]:
    """Returns the names of parameters with a NaN or infinite element on this rank; with `of_gradients`, in their gradients."""
    names = []
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if of_gradients else parameter
        if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(local_shard(tensor)).all()):
            names.append(name)
    return names

"""Updates weights through fp32 copies, so that small updates are not rounded away; states may be on the host.

A bf16 number has 8 significant bits, so an update below 1/512 of a weight rounds to nothing, as most do at a learning rate of
1e-5. The optimizer therefore updates an fp32 copy of every weight, the master weight, and the model gets it rounded. The
optimizer's moments are then fp32 too. See Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740, section 3.1).

Copies and moments may be in host memory, where the CPU then runs the optimizer, as in ZeRO-Offload (Ren et al., arXiv
2101.06840). Each step copies gradients to the host and weights both ways, since weights may have been changed elsewhere; copies
and updates overlap (`host_steps.py`) for optimizers of torch that update each weight independently.

`keep_master_weights` works for any optimizer of `torch.optim` and any subclass that keeps its states in `state`. Outside `step`
the optimizer's groups and states belong to the model's own parameters, with the master weight as one more state. So checkpoints
hold it under the weight's name, whether weights are whole, in shards, or in pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_longctx.runtime.core.host_copies import CopyEngine, has_strides
from hf_longctx.runtime.parameters.gradients import HALF_DTYPES, local_shard
from hf_longctx.runtime.parameters.host_steps import HomeOf, HostSteps, updates_weight_by_weight

# name of the state that is a weight's fp32 copy
MASTER_WEIGHT = "master_weight"
# attribute of an optimizer: its master weights
_KEPT = "longctx_master_weights"


def why_no_master_weights(optimizer: Optimizer) -> str:
    """Describes why the weights of `optimizer` cannot be updated in fp32 copies; empty if they can."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        return f"{name} is not a torch.optim.Optimizer"
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return f"{name} reads states from checkpoints in its own way, which would round fp32 copies"
    if callable(getattr(optimizer, "train", None)):
        return f"{name} changes weights outside its step"
    return ""


def keep_master_weights(
    optimizer: Optimizer, on_host: bool = False, copies: CopyEngine | None = None, home_of: HomeOf | None = None
) -> None:
    """Makes `optimizer` update fp32 copies of its half-precision weights, and round them into the weights; does so once.

    The copies are made in the first step: 4 bytes per parameter, and as many again for each moment. A weight that was changed
    elsewhere since the last step continues from its new value. on_host: keep copies of all weights, also those in fp32, their
    gradients and all states in host memory, some of it pinned now. copies: engine for copies between device and host (default:
    that of the weights' device). home_of: see `HostSteps`. Raises ValueError if `why_no_master_weights` gives a reason.
    """
    if reason := why_no_master_weights(optimizer):
        raise ValueError(f"no fp32 copies of weights can be kept: {reason}; use another optimizer such as torch.optim.AdamW")
    if not has_master_weights(optimizer):
        host = None
        if on_host and updates_weight_by_weight(optimizer):
            host = HostSteps((parameter for group in optimizer.param_groups for parameter in group["params"]), copies, home_of)
        vars(optimizer)[_KEPT] = _MasterWeights(optimizer, on_host, host)


def has_master_weights(optimizer: Any) -> bool:
    """Whether `keep_master_weights` was called on `optimizer`."""
    return _KEPT in vars(optimizer)


def copied_dtypes(in_fp32: bool, on_host: bool) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of weights with fp32 copies: half precision (`in_fp32`), or all if states are on the host."""
    return (*HALF_DTYPES, torch.float32) if on_host else HALF_DTYPES if in_fp32 else ()


def has_half_weights(optimizer: Optimizer) -> bool:
    """Whether the optimizer updates weights in bf16 or fp16."""
    return any(parameter.dtype in HALF_DTYPES for group in optimizer.param_groups for parameter in group["params"])


def drop_master_weights(optimizer: Optimizer) -> None:
    """Removes fp32 copies from a checkpoint's states if the optimizer keeps none."""
    if not has_master_weights(optimizer):
        for state in optimizer.state.values():
            state.pop(MASTER_WEIGHT, None)


def host_state(optimizer: Optimizer, value: Tensor) -> Tensor:
    """Returns the tensor, or a copy of it in host memory if the optimizer's states are there."""
    kept = vars(optimizer).get(_KEPT)
    return kept.wide(value) if kept is not None and kept.on_host else value


def host_steps_of(optimizer: Any) -> HostSteps | None:
    """Returns the `HostSteps` of an optimizer whose steps run in parts on the host; None for others."""
    return vars(optimizer)[_KEPT].host if has_master_weights(optimizer) else None


def has_host_states(optimizer: Any) -> bool:
    """Whether the optimizer's states are in host memory."""
    return has_master_weights(optimizer) and bool(vars(optimizer)[_KEPT].on_host)


def _step_with(kept: _MasterWeights, optimizer: Optimizer) -> MethodType:
    """Makes a step that runs on master weights and takes them out even if it fails; a method, as schedulers expect."""
    run, name = optimizer.step, type(optimizer).__name__

    def step(optimizer: Optimizer, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError(
                f"{name} got a closure, whose gradients its fp32 copies of weights would not get; call step() without one"
            )
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise ValueError(
                f"{name} has a step hook (register_step_pre_hook, register_step_post_hook), which would see fp32 copies in place "
                f"of weights; remove it and use on_pre_optimizer_step and on_optimizer_step of a TrainerCallback, or set "
                f"fp32_master_weights=False and optimizer_states='device'"
            )
        if kept.host is not None and kept.host.fits(optimizer):
            kept.step_in_parts(optimizer, kept.host, run)
            return None
        if kept.host is not None:
            kept.host.forget_early()
        try:
            kept.put_in(optimizer)
            result = run()
            kept.round(optimizer)
        finally:
            kept.take_out(optimizer)
        return result

    return MethodType(step, optimizer)


class _MasterWeights:
    """Replaces an optimizer's parameters by master weights during `step` and `load_state_dict`."""

    def __init__(self, optimizer: Optimizer, on_host: bool, host: HostSteps | None) -> None:
        self.on_host, self.host = on_host, host
        # master weight in use -> the parameter that it replaces
        self._replaced: dict[Tensor, nn.Parameter] = {}
        # torch's version counter of each such parameter when it was replaced
        self._versions: dict[nn.Parameter, int] = {}
        # set on the instance, since torch calls hooks twice if a subclass's step calls its parent's
        optimizer.step = _step_with(self, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        if optimizer.state:
            # existing states, such as Adagrad's, get the dtype of master weights
            self._put_in(optimizer, lambda parameter: True)
            self._take_out(optimizer)

    @torch.no_grad()
    def put_in(self, optimizer: Optimizer) -> None:
        """Replaces parameters with a gradient by their master weights, with that gradient."""
        self._put_in(optimizer, lambda parameter: parameter.grad is not None)
        for master, parameter in self._replaced.items():
            assert parameter.grad is not None
            master.grad = _laid_out_like(master, self.wide(parameter.grad))
        self._versions = {parameter: local_shard(parameter)._version for parameter in self._replaced.values()}

    @torch.no_grad()
    def step_in_parts(self, optimizer: Optimizer, host: HostSteps, run: Callable[[], Any]) -> None:
        """Updates part after part of the weights with `run` while others are copied; the optimizer then has only that part."""
        groups = list(optimizer.param_groups)
        held = [group["params"] for group in groups]
        group_of = {parameter: place for place, parameters in enumerate(held) for parameter in parameters}
        try:
            for part in host.send(optimizer):
                for group in groups:
                    group["params"] = []
                for parameter in part.arrived:
                    groups[group_of[parameter]]["params"].append(parameter)
                optimizer.param_groups[:] = [group for group in groups if group["params"]]
                self._put_in(optimizer, lambda parameter: True, part.arrived)
                for master, parameter in self._replaced.items():
                    master.grad = placed_like(parameter, _in_fp32(part.gradient(parameter)))
                run()
                for master, parameter in self._replaced.items():
                    part.give_back(parameter, local_shard(master))
                self.take_out(optimizer)
        finally:
            self.take_out(optimizer)
            optimizer.param_groups[:] = groups
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def round(self, optimizer: Optimizer) -> None:
        """Rounds master weights into their parameters."""
        for master, parameter in self._replaced.items():
            if local_shard(parameter)._version != self._versions[parameter]:
                raise RuntimeError(
                    f"{type(optimizer).__name__} changed a weight that its step did not find in param_groups, so its fp32 copy "
                    f"was passed over; set fp32_master_weights=False and optimizer_states='device', or use another optimizer"
                )
            local_shard(parameter.detach()).copy_(local_shard(master))

    def take_out(self, optimizer: Optimizer) -> None:
        """Puts the parameters back in place of master weights."""
        for master in self._replaced:
            master.grad = None
        self._take_out(optimizer)

    def _before_load(self, optimizer: Optimizer, state_dict: Any) -> None:
        # states get the dtype of the master weight that replaces the parameter
        self._put_in(optimizer, lambda parameter: True)

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        for master in self._replaced:
            # the first step makes master weights that were not loaded
            if master in optimizer.state and (loaded := optimizer.state[master].pop(MASTER_WEIGHT, None)) is not None:
                master.copy_(loaded)
        self._take_out(optimizer, is_loaded=True)
        for parameter, state in optimizer.state.items():
            if not self._has_master(parameter):
                state.pop(MASTER_WEIGHT, None)

    @torch.no_grad()
    def _put_in(
        self,
        optimizer: Optimizer,
        is_wanted: Callable[[nn.Parameter], bool],
        arrived: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Replaces wanted parameters by master weights. arrived: weights of this rank that are already on the host."""
        wanted = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._has_master(parameter) and is_wanted(parameter)
        ]
        # allocate before anything is replaced, since memory may run out
        masters = {parameter: self._master_of(optimizer, parameter, (arrived or {}).get(parameter)) for parameter in wanted}
        for group in optimizer.param_groups:
            group["params"] = [masters.get(parameter, parameter) for parameter in group["params"]]
        for parameter, master in masters.items():
            self._replaced[master] = parameter
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                if held := {name: self._wide_state(value) for name, value in state.items() if name != MASTER_WEIGHT}:
                    optimizer.state[master] = held

    def _take_out(self, optimizer: Optimizer, is_loaded: bool = False) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]
        for master, parameter in self._replaced.items():
            # after a step, even an optimizer without states, such as plain SGD, has master weights
            if master in optimizer.state or not is_loaded:
                optimizer.state[parameter] = {**optimizer.state.pop(master, {}), MASTER_WEIGHT: master}
        self._replaced.clear()

    def _has_master(self, parameter: Tensor) -> bool:
        return self.on_host or parameter.dtype in HALF_DTYPES

    def _master_of(self, optimizer: Optimizer, parameter: nn.Parameter, arrived: Tensor | None) -> Tensor:
        """Returns the parameter in fp32: its master weight, unless the parameter was changed elsewhere."""
        master: Tensor | None = optimizer.state.get(parameter, {}).get(MASTER_WEIGHT)
        if master is None:
            return self.wide(parameter.detach() if arrived is None else placed_like(parameter, arrived))
        kept = local_shard(master)
        own = local_shard(parameter.detach()).to(kept.device) if arrived is None else arrived
        is_kept = kept.to(own.dtype) == own
        # on the CPU, comparing is cheaper than writing; on a device, the host would have to wait for the result
        if kept.device.type != "cpu" or not bool(is_kept.all()):
            kept.copy_(torch.where(is_kept, kept, own.to(kept.dtype)))
        return master

    def wide(self, value: Tensor) -> Tensor:
        """Copies a tensor in at least fp32, to the host if master weights are there; a shard stays a shard."""
        if not self.on_host:
            return _in_fp32(value, copy=True)
        return placed_like(value, _in_fp32(local_shard(value).to("cpu", copy=True)))

    def _wide_state(self, value: Any) -> Any:
        is_narrow = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
        is_elsewhere = self.on_host and isinstance(value, Tensor) and value.device.type != "cpu"
        return self.wide(value) if is_narrow or is_elsewhere else value


def _in_fp32(value: Tensor, copy: bool = False) -> Tensor:
    """Returns the tensor in at least fp32."""
    return value.to(torch.float32 if value.dtype in HALF_DTYPES else value.dtype, copy=copy)


def placed_like(value: Tensor, own: Tensor) -> Tensor:
    """Returns `own` as this rank's part of a tensor with the placement of `value`; `own` itself if `value` is whole."""
    if not isinstance(value, DTensor):
        return own
    spec = replace(value._spec, tensor_meta=value._spec.tensor_meta._replace(dtype=own.dtype))  # type: ignore[union-attr]
    return DTensor(own, spec, requires_grad=False)


def _laid_out_like(master: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient in the memory layout of its weight, since fused optimizers read both in memory order."""
    if gradient.layout != torch.strided or has_strides(local_shard(gradient), local_shard(master).stride()):
        return gradient
    return torch.empty_like(master).copy_(gradient)

"""Updates weights on the host in parts: the CPU updates one part while others are copied.

`master_weights.py` runs the optimizer on one part after the other, each some consecutive weights of its groups. When a step
begins, all copies to the host are queued. The CPU waits for those of one part, updates it, and queues its rounded weights for the
way back; the device waits for these before it computes anything else. So a step takes about as long as the slowest of copies out,
updates and copies back, not as long as all three.

Each weight has two buffers ("homes") in pinned memory for the whole run, for its gradient and for itself, both in its dtype. So
nothing is pinned inside a step, and no home is used twice in one. The weight's home serves both directions: the CPU reads what
arrived before it writes what leaves.

No update runs during the backward, although gradients of the last layers are known early: clipping needs the norm of all, and a
step with one gradient that is not finite must change no weight. Only copies start early (`EarlyCopies`), if nothing but clipping
changes gradients and weights between backward and step. Weights that arrived early are updated first. Clipped gradients are
copied again while earlier parts are updated, since the CPU would take longer to scale them. A step saves the first part's copies
and the link's time. This matters if the CPU reads its memory much faster than the link: an update reads and writes about ten
times the bytes of a weight's copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from hf_longctx.plan.model.model_spec import UPDATE_PART_BYTES
from hf_longctx.runtime.core.host_copies import CopyEngine, HostMemory, Ticket, block_bytes, copies_of, dense_strides
from hf_longctx.runtime.parameters.gradients import local_shard

# weight -> its host memory, if it is on the host while a step computes
HomeOf = Callable[[nn.Parameter], Tensor | None]
# optimizers whose update of a weight depends only on that weight, its gradient and its states
_WEIGHT_BY_WEIGHT = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def updates_weight_by_weight(optimizer: Optimizer) -> bool:
    """Whether `optimizer` can update its weights part by part: a class of torch with torch's own step.

    Call it before `step` of the instance is replaced. A subclass or a wrapped step might do something once per step.
    """
    has_own_step = "step" not in vars(optimizer) and type(optimizer).step.__module__.startswith("torch.optim.")
    return type(optimizer) in _WEIGHT_BY_WEIGHT and has_own_step


class HostSteps:
    """Homes of weights and gradients in host memory, and the copies between them and the device.

    parameters: weights to update; others get homes when they are first sent. copies: copy engine (default: their device's).
    home_of: returns a weight's existing host memory, if any, which must be unused outside of forwards and backwards.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], copies: CopyEngine | None = None, home_of: HomeOf | None = None
    ) -> None:
        self._home_of: HomeOf = (lambda parameter: None) if home_of is None else home_of
        self._homes: dict[nn.Parameter, _Homes] = {}
        # page-locked memory, which must outlive its views
        self._memory: list[HostMemory] = []
        self._copies = copies
        # copies that started early in this step, and factors by which gradients were scaled since
        self._early: dict[nn.Parameter, _Early] = {}
        self._factors: list[Tensor] = []
        self._make_homes([parameter for parameter in parameters if parameter.requires_grad])

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's step with the current gradients can run in parts."""
        is_seen = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        # a gradient scaler reads all gradients
        is_scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        return not (is_seen or is_scaled) and all(_is_plain(parameter) for parameter in _trained(optimizer))

    def forget_early(self) -> None:
        """Drops early copies: before the last backward of a step, and if a step is skipped."""
        self._early, self._factors = {}, []

    def send_early(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Starts the copies of a weight and its gradient, which are used if both tensors are unchanged at the step.

        Writes through `.data` are not detected. The tensors must not be freed before the step, unless it is skipped.
        """
        if not self._has_homes(parameter) or not _is_like(parameter, gradient):
            return
        homes, copies = self._homes[parameter], self._engine(parameter)
        own = local_shard(parameter.detach())
        weight = copies.to_host(own, homes.weight, (), is_kept=True)
        found = _Early(gradient, gradient._version, own.data_ptr(), own._version, weight)
        found.gradient_ticket = copies.to_host(local_shard(gradient), homes.gradient, (), is_kept=True)
        self._early[parameter] = found

    def clipped(self, clip: Callable[[], Tensor], max_norm: float) -> Tensor:
        """Runs `clip`, which scales all gradients down to `max_norm` by torch's formula; returns the norm before."""
        self._early = {parameter: found for parameter, found in self._early.items() if found.has_gradient_of(parameter)}
        norm = clip()
        # nothing leaves early if weights are shards, so the norm is that of whole gradients
        if self._early:
            self._factors.append((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for found in self._early.values():
            found.gradient_version = found.gradient._version
        return norm

    def send(self, optimizer: Optimizer) -> Iterator[Part]:
        """Starts all copies to the host, then yields parts as they arrive, to be updated and sent back.

        After the last part, or when the caller stops, the device waits for all copies back.
        """
        trained = list(_trained(optimizer))
        self._make_homes([parameter for parameter in trained if not self._has_homes(parameter)])
        early = {parameter: found for parameter, found in self._early.items() if found.has_weight_of(parameter)}
        # early ones first, in the order in which they left
        places = {parameter: place for place, parameter in enumerate(early)}
        trained.sort(key=lambda parameter: places.get(parameter, len(places)))
        is_scaled = bool(early) and any(float(factor) != 1.0 for factor in self._factors)
        parts = [self._sent(part, early, is_scaled) for part in _parts(trained)]
        self.forget_early()
        try:
            for part in parts:
                part.wait()
                yield part
        finally:
            for part in parts:
                part.end()

    def _sent(self, parameters: Sequence[nn.Parameter], early: Mapping[nn.Parameter, _Early], is_scaled: bool) -> Part:
        """Starts the copies of some weights and their gradients to the host, except those that have left.

        is_scaled: clipping has changed all gradients since then.
        """
        part = Part({parameter: self._homes[parameter] for parameter in parameters}, self._engine(parameters[0]))
        for parameter in parameters:
            assert parameter.grad is not None
            homes, found = self._homes[parameter], early.get(parameter)
            if found is None:
                part.tickets.append(part.copies.to_host(local_shard(parameter.detach()), homes.weight, ()))
            else:
                part.tickets.append(found.weight_ticket)
            if found is None or is_scaled or not found.has_gradient_of(parameter):
                part.tickets.append(part.copies.to_host(local_shard(parameter.grad), homes.gradient, ()))
            else:
                part.tickets.append(found.gradient_ticket)
        return part

    def _engine(self, parameter: nn.Parameter) -> CopyEngine:
        if self._copies is None:
            self._copies = copies_of(local_shard(parameter.detach()).device)
        return self._copies

    def _has_homes(self, parameter: nn.Parameter) -> bool:
        own = local_shard(parameter.detach())
        homes = self._homes.get(parameter)
        return homes is not None and (homes.weight.shape, homes.weight.dtype) == (own.shape, own.dtype)

    def _make_homes(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes homes for all these weights in one allocation."""
        owns = [local_shard(parameter.detach()) for parameter in parameters]
        if not owns:
            return
        given = [self._home_of(parameter) for parameter in parameters]
        sizes = [block_bytes(own.numel() * own.element_size()) for own in owns]
        num_bytes = sum(size * (1 if home is not None else 2) for size, home in zip(sizes, given, strict=True))
        # a rank's shards may all be empty, and zero bytes cannot be pinned
        is_pinned = owns[0].device.type == "cuda" and num_bytes > 0
        memory = HostMemory(num_bytes, is_pinned, "optimizer_states='host'")
        self._memory.append(memory)
        left = memory.memory
        for parameter, own, size, home in zip(parameters, owns, sizes, given, strict=True):
            gradient, left = left.split([size, len(left) - size])
            if home is None:
                home, left = left.split([size, len(left) - size])
                home = _home(home, own)
            self._homes[parameter] = _Homes(_home(gradient, own), home)


@dataclass(slots=True)
class _Early:
    """A gradient and its weight as they were when they left early."""

    gradient: Tensor
    gradient_version: int
    weight_address: int
    weight_version: int
    weight_ticket: Ticket
    gradient_ticket: Ticket = None

    def has_gradient_of(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient is still the one that left."""
        return parameter.grad is self.gradient and self.gradient._version == self.gradient_version

    def has_weight_of(self, parameter: nn.Parameter) -> bool:
        """Whether the weight is still the one that left."""
        own = local_shard(parameter.detach())
        return (own.data_ptr(), own._version) == (self.weight_address, self.weight_version)


@dataclass(frozen=True, slots=True)
class _Homes:
    """Host memory of one weight: for its gradient, and for itself."""

    gradient: Tensor
    weight: Tensor


class Part:
    """Weights that are updated together.

    tickets: copies to the host. arrived: the weights in host memory, as the device has them.
    """

    def __init__(self, homes: dict[nn.Parameter, _Homes], copies: CopyEngine) -> None:
        self.copies, self.tickets = copies, list[Ticket]()
        self._homes, self._returning = homes, list[Ticket]()
        self.arrived = {parameter: each.weight for parameter, each in homes.items()}

    def wait(self) -> None:
        """Blocks the CPU until all copies have arrived."""
        for ticket in self.tickets:
            self.copies.wait_on_host(ticket)

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Returns the gradient in host memory, valid during this step."""
        return self._homes[parameter].gradient

    def give_back(self, parameter: nn.Parameter, updated: Tensor) -> None:
        """Rounds the updated weight into its home, and starts the copy from there to the device."""
        home = self._homes[parameter].weight
        home.copy_(updated)
        self._returning.append(self.copies.to_device(home, local_shard(parameter.detach()), ()))

    def end(self) -> None:
        """Makes everything computed from now on wait for the updated weights."""
        for ticket in self._returning:
            self.copies.wait(ticket)


def _trained(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None)


def _is_plain(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and _is_like(parameter, parameter.grad)


def _is_like(parameter: nn.Parameter, gradient: Tensor) -> bool:
    """Whether the gradient fits the home made for its weight's dtype and shape."""
    own, gradient = local_shard(parameter.detach()), local_shard(gradient)
    return (gradient.layout, gradient.dtype, gradient.shape) == (torch.strided, own.dtype, own.shape)


def _parts(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups consecutive weights into parts of at most `UPDATE_PART_BYTES` bytes, unless one weight has more."""
    parts: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        own = local_shard(parameter.detach())
        num_bytes = own.numel() * own.element_size()
        if not parts or filled + num_bytes > UPDATE_PART_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += num_bytes
    return parts


def _home(memory: Tensor, own: Tensor) -> Tensor:
    """Returns memory as a tensor like `own` with the same order of dimensions, so that copies keep the layout."""
    home = memory[: own.numel() * own.element_size()].view(own.dtype)
    return home.as_strided(own.shape, dense_strides(own))

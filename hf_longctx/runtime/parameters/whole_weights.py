"""Runs an optimizer on whole weights although every rank holds a shard of each: each weight has one rank that updates it.

Many optimizers cannot run on shards. Adafactor takes means over rows and columns, Muon multiplies whole matrices, 8-bit moments
share a scale in blocks, and custom kernels do not support shards. Each would fail or be silently wrong. So in a step every rank
gets, by all-to-all, the shards of the weights that it owns and of their gradients; the optimizer updates these whole weights; and
their shards go back. States of a weight are whole, and only on the rank that owns it. Steps are those of one process, bit by bit.

This is correct if the update of a weight depends on that weight alone. An optimizer that looks across weights is refused by name,
or by `Settings`: Prodigy and D-Adaptation take sums over all weights, so that each rank would get another step size; GrokAdamW
counts weights with gradients. Optimizers keep such results in groups, attributes, or states that belong to no weight, which
`Settings` compares over ranks after every step. If an optimizer keeps no such result, this is not detected.

A step sends gradients once and weights twice; during it, a rank holds the weights that it owns, whole, with gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from hf_longctx.runtime.parameters.gradients import local_shard

# prefixes of classes that look across weights, some of which keep nothing that shows it
_LOOK_ACROSS = ("Prodigy", "DAdapt", "GrokAdamW")
_REMEDY = (
    "use optim='adamw_torch' or another optimizer whose update of a weight depends on that weight alone, or whole weights "
    "(parameters='replicated')"
)


def looks_across_weights(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class or a base class is known to update a weight depending on others."""
    return any(kind.__name__.startswith(_LOOK_ACROSS) for kind in type(optimizer).__mro__)


def across_weights_problem(optimizer: Optimizer) -> str:
    """Returns the error message for an optimizer that `looks_across_weights`."""
    return f"{type(optimizer).__name__} looks across weights, of which each rank updates only some under shards; {_REMEDY}"


class Settings:
    """Settings and numbers that an optimizer keeps besides states of weights; must be equal on the ranks of `group`."""

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        # settings with tensors from the start are given, not learnt
        self.given = {name for name, value in _settings_of(optimizer).items() if _is_of_weights(value)}

    def check(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError on all ranks if settings differ or contain values of weights. Collective over the group."""
        settings = _settings_of(optimizer)
        learnt = {name for name, value in settings.items() if _is_of_weights(value)} - self.given
        learnt |= {_state_name(key) for key in optimizer.state if not isinstance(key, Tensor)}
        described = {name: _described(value) for name, value in settings.items()}
        digest = int.from_bytes(hashlib.sha256(repr(sorted(described.items())).encode()).digest()[:7])
        # greatest and smallest digest, and whether any rank has learnt something
        extremes = torch.tensor([digest, -digest, len(learnt)], dtype=torch.int64, device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, self.group)
        most, least_negated, num_learnt = extremes.tolist()
        if most == -least_negated and not num_learnt:
            return
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, (described, sorted(learnt)), group=self.group)
        raise RuntimeError(f"{type(optimizer).__name__} keeps {_difference(found)}; {_REMEDY}")


def _difference(found: list[tuple[dict[str, str], list[str]]]) -> str:
    """Describes the difference in the settings of all ranks, in the same words on each."""
    if learnt := sorted({name for _, names in found for name in names}):
        return f"{learnt[0]}, which is no number and no state of one weight, but under shards each rank updates only some weights"
    for name in sorted({name for described, _ in found for name in described}):
        values = [described.get(name, "nothing") for described, _ in found]
        if other := next((value for value in values if value != values[0]), ""):
            return (
                f"{name}, which became {values[0]} on one rank and {other} on another in this step, since under shards each rank "
                f"updates only some of the weights"
            )
    return "settings that differ over ranks"


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns settings of all groups and numeric attributes, by a name for errors."""
    found = {
        f"{name!r} in its groups (number {place})": value
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    found.update((f"the attribute {name!r}", value) for name, value in vars(optimizer).items() if isinstance(value, int | float))
    return found


def _state_name(key: Any) -> str:
    return f"a state under the key {key!r}"


def _is_of_weights(value: Any) -> bool:
    """Whether the value contains tensors of several elements, or anything per weight."""
    if isinstance(value, dict):
        return any(isinstance(key, Tensor) for key in value) or any(map(_is_of_weights, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_is_of_weights, value))
    return isinstance(value, Tensor) and value.numel() != 1


def _described(value: Any) -> str:
    """Describes a value by its numbers and words, also inside lists and mappings, and anything else by its class."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_described(key)}: {_described(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__


# attribute of an optimizer: its `_WholeSteps`
_KEPT = "longctx_whole_steps"
# optimizers of torch that need whole matrices; the others update element by element
_OF_MATRICES = ("Muon", "Adafactor")
# packages whose optimizers update shards like whole weights
_ELEMENTWISE = ("torch", "torchao")


def needs_whole_weights(optimizer: Optimizer) -> bool:
    """Whether an optimizer may be wrong on shards: those of other packages than torch and torchao, and of whole matrices."""
    kind = type(optimizer)
    return kind.__module__.split(".", 1)[0] not in _ELEMENTWISE or kind.__name__ in _OF_MATRICES


def step_on_whole_weights(optimizer: Optimizer) -> None:
    """Makes `optimizer` update whole weights, each on the rank that owns it; does so once.

    From then on `step`, and `train` and `eval` of schedule-free optimizers, are collective over the ranks that share a copy of
    the weights; `step` raises RuntimeError on all of them, before it changes weights, if `Settings` differ over ranks. Raises
    ValueError for weights that are not sharded by rows, and for an optimizer that is known to look across weights.
    """
    if not has_whole_steps(optimizer):
        vars(optimizer)[_KEPT] = _WholeSteps(optimizer)


def has_whole_steps(optimizer: Any) -> bool:
    """Whether `step_on_whole_weights` was called on `optimizer`."""
    return _KEPT in vars(optimizer)


def owns_weight(optimizer: Optimizer, place: int) -> bool:
    """Whether this rank updates the weight at this index over all groups; all ranks update a weight that is no shard."""
    kept: _WholeSteps = vars(optimizer)[_KEPT]
    return kept.owner(place) in (None, kept.rank)


class _WholeSteps:
    """Replaces shards by whole weights while an optimizer's own methods run."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = _parameters_of(optimizer)
        self.sharded = [place for place, parameter in enumerate(parameters) if _is_sharded(parameter)]
        first: Any = parameters[self.sharded[0]] if self.sharded else None
        self.group: dist.ProcessGroup | None = None if first is None else first.device_mesh.get_group(first.device_mesh.ndim - 1)
        self.rank = 0 if self.group is None else self.group.rank()
        self.num_ranks = 1 if self.group is None else self.group.size()
        self.owners = self._dealt(parameters)
        self.settings: Settings | None = None
        if self.group is not None:
            if looks_across_weights(optimizer):
                raise ValueError(across_weights_problem(optimizer))
            self.settings = Settings(optimizer, self.group, local_shard(first).device)
        for name in ("step", "train", "eval"):
            if callable(own := getattr(optimizer, name, None)):
                setattr(optimizer, name, MethodType(_on_whole(self, own, name), optimizer))

    def owner(self, place: int) -> int | None:
        """Returns the rank of the group that updates the weight at this index; None if it is whole on all ranks."""
        return self.owners.get(place)

    def _dealt(self, parameters: list[Tensor]) -> dict[int, int]:
        """Chooses an owner for every shard, largest first: the rank that owns the fewest elements so far."""
        loads = [0] * self.num_ranks
        owners = {}
        for place in sorted(self.sharded, key=lambda place: (-parameters[place].numel(), place)):
            owners[place] = loads.index(min(loads))
            loads[owners[place]] += parameters[place].numel()
        return owners

    @contextmanager
    def whole(self, optimizer: Optimizer, with_gradients: bool) -> Iterator[None]:
        """Context in which the optimizer's groups contain the whole weights that this rank owns, and no others."""
        parameters = _parameters_of(optimizer)
        moved = [place for place in self.sharded if not with_gradients or parameters[place].grad is not None]
        weights = {place: local_shard(parameters[place].detach()) for place in moved}
        gathered = self._exchange(parameters, weights)
        gradients: dict[int, Tensor] = {}
        if with_gradients:
            gradients = self._exchange(parameters, {place: local_shard(_gradient(parameters[place])) for place in moved})
        stand_ins: dict[int, nn.Parameter] = {}
        for place in self.sharded:
            value = gathered.get(place)
            # empty weights without gradients keep the indices of the others, which some optimizers count
            stand_ins[place] = nn.Parameter(parameters[place].new_empty(0).detach() if value is None else value)
            if place in gradients:
                stand_ins[place].grad = gradients[place]
        self._swap(optimizer, parameters, stand_ins)
        try:
            yield
            self._give_back(parameters, moved, {place: stand_ins[place].detach() for place in gathered})
        finally:
            self._swap_back(optimizer, parameters, stand_ins)

    def _swap(self, optimizer: Optimizer, parameters: list[Tensor], stand_ins: dict[int, nn.Parameter]) -> None:
        for place, stand_in in stand_ins.items():
            if parameters[place] in optimizer.state:
                optimizer.state[stand_in] = optimizer.state.pop(parameters[place])
        _set_parameters(optimizer, [stand_ins.get(place, parameter) for place, parameter in enumerate(parameters)])

    def _swap_back(self, optimizer: Optimizer, parameters: list[Tensor], stand_ins: dict[int, nn.Parameter]) -> None:
        for place, stand_in in stand_ins.items():
            # reading the state of a weight that is not owned creates an empty one
            if state := optimizer.state.pop(stand_in, None):
                optimizer.state[parameters[place]] = state
        _set_parameters(optimizer, parameters)

    def _exchange(self, parameters: list[Tensor], shards: dict[int, Tensor]) -> dict[int, Tensor]:
        """Sends every shard to its weight's owner; returns the whole tensors that this rank owns. Collective over the group."""
        found = {}
        for turn in self._turns(shards):
            sent = [shards[turn[rank]].flatten() if rank in turn else _nothing(shards) for rank in range(self.num_ranks)]
            own = turn.get(self.rank)
            sizes = [0] * self.num_ranks if own is None else self._shard_sizes(parameters[own])
            received = sent[0].new_empty(sum(sizes))
            dist.all_to_all_single(received, torch.cat(sent), sizes, [part.numel() for part in sent], group=self.group)
            if own is not None:
                found[own] = received.view(parameters[own].shape)
        return found

    def _give_back(self, parameters: list[Tensor], moved: list[int], whole: dict[int, Tensor]) -> None:
        """Sends the shards of whole weights back to their ranks. Collective over the group."""
        shards = {place: local_shard(parameters[place].detach()) for place in moved}
        for turn in self._turns(shards):
            own = turn.get(self.rank)
            sizes = [0] * self.num_ranks if own is None else self._shard_sizes(parameters[own])
            sent = _nothing(shards) if own is None else whole[own].flatten()
            takes = [shards[turn[rank]].numel() if rank in turn else 0 for rank in range(self.num_ranks)]
            received = sent.new_empty(sum(takes))
            dist.all_to_all_single(received, sent, takes, sizes, group=self.group)
            for rank, part in enumerate(received.split(takes)):
                if rank in turn:
                    shards[turn[rank]].copy_(part.view_as(shards[turn[rank]]))

    def _turns(self, shards: dict[int, Tensor]) -> Iterator[dict[int, int]]:
        """Deals weights into exchanges {rank: index of its weight}, in which a rank owns at most one weight.

        Tensors of one exchange have one dtype.
        """
        kinds = sorted({str(shard.dtype) for shard in shards.values()})
        for kind in kinds:
            queues: list[list[int]] = [[] for _ in range(self.num_ranks)]
            for place, shard in shards.items():
                if str(shard.dtype) == kind:
                    queues[self.owners[place]].append(place)
            for number in range(max(map(len, queues))):
                yield {rank: queue[number] for rank, queue in enumerate(queues) if number < len(queue)}

    def _shard_sizes(self, parameter: Tensor) -> list[int]:
        """Returns the elements of the weight on each rank; rows are divided as by torch.chunk."""
        num_rows = parameter.shape[0]
        most, width = -(-num_rows // self.num_ranks), parameter.numel() // max(1, num_rows)
        return [max(0, min(most, num_rows - rank * most)) * width for rank in range(self.num_ranks)]


def _on_whole(kept: _WholeSteps, own: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Makes a method of an optimizer run on whole weights; "train" and "eval" do nothing if groups are in that mode."""

    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if name != "step" and all(group.get("train_mode") == (name == "train") for group in optimizer.param_groups):
            return None
        if name == "step" and callable(begin := getattr(optimizer, "check_overrides", None)):
            # bitsandbytes finds weights with their own settings by identity
            begin()
        with kept.whole(optimizer, name == "step"):
            result = own(*args, **kwargs)
            if name == "step" and kept.settings is not None:
                kept.settings.check(optimizer)
            return result

    return run


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _set_parameters(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    left = iter(parameters)
    for group in optimizer.param_groups:
        group["params"] = [next(left) for _ in group["params"]]


def _is_sharded(parameter: Any) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    *others, last = parameter.placements
    if last != Shard(0) or any(each != Replicate() for each in others):
        raise ValueError(
            f"a weight of shape {tuple(parameter.shape)} is sharded as {parameter.placements}, which only optimizers that update "
            f"element by element support; use optim='adamw_torch'"
        )
    return True


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _nothing(shards: dict[int, Tensor]) -> Tensor:
    return next(iter(shards.values())).new_empty(0)

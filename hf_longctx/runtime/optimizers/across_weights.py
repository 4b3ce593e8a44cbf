"""Ends a run whose optimizer looks across weights, where every rank updates some of them and knows nothing of the others.

Prodigy and D-Adaptation take sums over all weights, so that each rank would get another step size; GrokAdamW counts weights with
gradients. What optimizers learn of that kind they keep in groups, attributes, or states that belong to no weight: `Settings`
compares these over ranks after every step. An optimizer that looks across weights and keeps nothing of it goes unseen.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

# beginnings of the names of classes that look across weights, of which some keep nothing that tells
_LOOK_ACROSS = ("Prodigy", "DAdapt", "GrokAdamW")
_REMEDY = (
    "use optim='adamw_torch' or another optimizer whose update of a weight depends on that weight alone, or whole weights "
    "(parameters='replicated')"
)


def looks_across_weights(optimizer: Optimizer) -> bool:
    """Whether the class of the optimizer, or one that it derives from, is known to update a weight by what others are."""
    return any(kind.__name__.startswith(_LOOK_ACROSS) for kind in type(optimizer).__mro__)


def across_weights_problem(optimizer: Optimizer) -> str:
    """The error about an optimizer that `looks_across_weights`."""
    return f"{type(optimizer).__name__} looks across weights, of which each rank updates only some under shards; {_REMEDY}"


class Settings:
    """Settings and numbers that an optimizer keeps beside states of weights: equal on the ranks of `group` after every step."""

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        # settings that hold tensors from the start are not learnt
        self.given = {name for name, value in _settings_of(optimizer).items() if _is_of_weights(value)}

    def check(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError on all ranks if settings differ, or hold what belongs to weights. Collective over the group."""
        settings = _settings_of(optimizer)
        learnt = {name for name, value in settings.items() if _is_of_weights(value)} - self.given
        learnt |= {_state_name(key) for key in optimizer.state if not isinstance(key, Tensor)}
        described = {name: _described(value) for name, value in settings.items()}
        digest = int.from_bytes(hashlib.sha256(repr(sorted(described.items())).encode()).digest()[:7])
        # the greatest and the smallest digest, and whether any rank has learnt something
        extremes = torch.tensor([digest, -digest, len(learnt)], dtype=torch.int64, device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, self.group)
        most, least_negated, num_learnt = extremes.tolist()
        if most == -least_negated and not num_learnt:
            return
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, (described, sorted(learnt)), group=self.group)
        raise RuntimeError(f"{type(optimizer).__name__} keeps {_difference(found)}; {_REMEDY}")


def _difference(found: list[tuple[dict[str, str], list[str]]]) -> str:
    """The fault in the settings of all ranks, in the same words on each of them."""
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
    """Settings of all groups, and attributes that are numbers, by a name for errors."""
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
    """Whether the value holds tensors of several numbers, or anything by weight."""
    if isinstance(value, dict):
        return any(isinstance(key, Tensor) for key in value) or any(map(_is_of_weights, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_is_of_weights, value))
    return isinstance(value, Tensor) and value.numel() != 1


def _described(value: Any) -> str:
    """Numbers and words in the value, and in a list or a mapping; of anything else only the class."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_described(key)}: {_described(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__

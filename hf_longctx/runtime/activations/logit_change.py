"""The change that a model makes to its logits after its output head: a scale, a cap by tanh, a wider dtype.

A loss in tiles must make the same change to the logits of each tile, with the same operations in the same order and dtype:
`LogitChange` holds them, and autograd gives their derivative. The model's own forward then makes its change once more, to what
the head returns in place of logits. So the head returns a `StandIn`, which leaves the loss as it is and writes down each step;
`OutputHead` compares these steps with those of the tiles in every forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

# name of an operation, and its number or dtype
Step = tuple[str, float | torch.dtype | None]

_APPLY: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda x, factor: x * factor,
    "div": lambda x, divisor: x / divisor,
    "tanh": lambda x, _: torch.tanh(x),
    "cast": lambda x, dtype: x.to(dtype),
}
# torch's names of operations -> ours
_NAMES = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "div"),
    "tanh": "tanh",
}
_IN_PLACE = {"mul_": "mul", "__imul__": "mul", "div_": "div", "__itruediv__": "div", "__idiv__": "div", "tanh_": "tanh"}
_CASTS = {"float": torch.float32, "double": torch.float64}
# operations that cast to the dtype among their arguments
_CASTS_TO = ("to", "type")
_WIDE = (torch.float32, torch.float64)
# the reader of the tensor of which another one is a view
_BASE = cast(Any, Tensor)._base.__get__


@dataclass(frozen=True, slots=True)
class LogitChange:
    """Operations on every single logit, in order; none for a model that leaves the logits of its head as they are."""

    steps: tuple[Step, ...] = ()

    def __call__(self, logits: Tensor) -> Tensor:
        """The changed logits."""
        for name, operand in self.steps:
            # many configs have a scale of 1
            if operand != 1:
                logits = _APPLY[name](logits, operand)
        return logits

    def __str__(self) -> str:
        words = [name if operand is None else f"{name} {operand}" for name, operand in self.steps]
        return ", ".join(words).replace("torch.", "") or "no change"

    @property
    def is_cap(self) -> bool:
        """Whether logits are capped, so that one more tensor of their size waits for backward."""
        return any(name == "tanh" for name, _ in self.steps)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the logits are cast to; None if they keep that of the head."""
        found = [operand for _, operand in self.steps if isinstance(operand, torch.dtype)]
        return found[-1] if found else None

    def agrees_with(self, other: LogitChange) -> bool:
        """Whether both make the same change, but for the dtype of the result: losses are computed in a wide one anyway."""
        return _without_last_casts(self.steps) == _without_last_casts(other.steps)


def _without_last_casts(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    while steps and steps[-1][0] == "cast":
        steps = steps[:-1]
    return steps


class StandIn(Tensor):
    """A tensor [1, 1, 1] that a model takes for its logits: holds a value that no step changes, and the steps so far.

    Raises ValueError for operations that are no steps. newest: the change of whichever stand-in was made last.
    """

    change: LogitChange
    newest: list[LogitChange]

    @classmethod
    def of(cls, value: Tensor) -> StandIn:
        """The stand-in with a scalar as its value."""
        return cls._made(value.view(1, 1, 1), LogitChange(), [LogitChange()])

    @classmethod
    def _made(cls, value_111: Tensor, change: LogitChange, newest: list[LogitChange]) -> StandIn:
        made = value_111.as_subclass(cls)
        made.change, made.newest = change, newest
        newest[0] = change
        return made

    @property
    def value(self) -> Tensor:
        """The value, a plain scalar."""
        return self._plain().view(())

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keywords = getattr(function, "__name__", str(function)), kwargs or {}
        own = next((each for each in args if isinstance(each, StandIn)), None)
        if own is not None and (step := _step(name, [each for each in args if each is not own], keywords)) is not None:
            change = LogitChange((*own.change.steps, step))
            if name in _IN_PLACE:
                own.change = own.newest[0] = change
                return own
            return cls._made(own._plain(), change, own.newest)
        if name == "detach" and own is not None:
            # a hook looks at what the head returned: the loss, as in models that leave their logits as they are
            return own._plain().detach()
        if function == _BASE:
            # shards ask whether a change in place would change another tensor; here none changes any
            return None
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **keywords)
        if isinstance(found, Tensor | tuple | list) and not isinstance(found, torch.Size):
            raise ValueError(
                f"the model changes its logits after the output head by {name!r}, which a loss in tiles cannot follow; set "
                f"tile_tokens=0 to keep whole logits for this model"
            )
        return found


def _step(name: str, others: list[Any], keywords: dict[str, Any]) -> Step | None:
    """The step that an operation makes, given its arguments beside the logits; None if it is none."""
    if name in _CASTS and not others and not keywords:
        return "cast", _CASTS[name]
    if name in _CASTS_TO:
        operands = [*others, *keywords.values()]
        is_wide = len(operands) == 1 and isinstance(operands[0], torch.dtype) and operands[0] in _WIDE
        return ("cast", operands[0]) if is_wide else None
    known = _NAMES.get(name) or _IN_PLACE.get(name)
    if known is None or keywords:
        return None
    if known == "tanh":
        return None if others else ("tanh", None)
    is_number = len(others) == 1 and isinstance(others[0], int | float) and not isinstance(others[0], bool)
    return (known, others[0]) if is_number else None

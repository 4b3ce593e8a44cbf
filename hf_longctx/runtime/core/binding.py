"""Replaces methods, or functions that they call, for one instance of a module; the activation engine and `hf.models` use it.

Whatever replaces a method for the time of a run does so by `put`, which remembers on the module what was there before. So one
place can say whose forward lies below ours (`own_forward`), and whether somebody has taken ours away (`lost_method`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

_MARK = "_longctx_bound"
# libraries that wrap methods without changing what they do to tokens
_WRAPPING = ("accelerate", "torch", "transformers", "hf_longctx")
# attribute of a function that refuses calls for a while: what it calls otherwise, or None for the method of the class
HIDDEN = "_longctx_hidden"
# attribute of a module: the methods that `put` has put there, the topmost last
PUT = "_longctx_put"
# attributes of a module that hold hooks
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def global_hooks() -> list[tuple[str, Any]]:
    """Hooks of all modules of the process, with the kind of each."""
    # read from the module each time, since torch gives some of them new dictionaries
    own = vars(torch_modules)
    return [(kind[1:-1], hook) for kind in HOOKS for hook in dict(own.get(f"_global{kind}", {})).values()]


def bound(module: nn.Module, function: Callable[..., Any]) -> MethodType:
    """Makes `function` a method of `module` alone.

    A deep copy of the module carries the method along; there it falls back to the forward of the class.
    """

    def method(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if this is not module:
            return type(this).forward(this, *args, **keywords)
        return function(*args, **keywords)

    vars(method)[_MARK] = True
    return MethodType(method, module)


def is_bound(function: Any) -> bool:
    """Whether `bound` or `replace_forward` made this function or method."""
    return hasattr(function, _MARK)


class _Put:
    """A method that was put on a module. before: the instance's own one until then; empty if it used that of its class."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        own = vars(module)
        self.name, self.value = name, value
        self.before: tuple[Any, ...] = (own[name],) if name in own else ()
        self.of_class = getattr(type(module), name, None)

    def __deepcopy__(self, memo: Any) -> _Put:
        return self


def put(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Puts a method on one module, until the returned function puts back what was there. Undoing it twice changes nothing.

    A method that somebody has put on top in the meantime stays.
    """
    own = vars(module)
    entry = _Put(module, name, value)
    own.setdefault(PUT, []).append(entry)
    own[name] = value

    def undo() -> None:
        entries = own.get(PUT, [])
        if entry not in entries:
            return
        entries.remove(entry)
        if not entries:
            del own[PUT]
        above = next((each for each in entries if each.name == name and each.before and each.before[0] is value), None)
        if above is not None:
            above.before = entry.before
        elif own.get(name) is value:
            del own[name]
            own.update((name, before) for before in entry.before)

    return undo


def wrapped(function: Any) -> Iterator[Any]:
    """A function and those that it wraps, outermost first, each as the function of a method; none for None."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, HIDDEN, None) or getattr(function, "__wrapped__", None)


def is_written_by(function: Any, *packages: str) -> bool:
    """Whether a function, and all that it wraps, was written in one of these packages."""
    return all(_package(each) in packages for each in wrapped(function))


def is_ours(function: Any) -> bool:
    """Whether a function or method was written in this package, whatever it wraps."""
    return any(_package(each) == "hf_longctx" for each in itertools.islice(wrapped(function), 1))


def _package(function: Any) -> str:
    # by its globals, since a wrapper may have taken the name of the module that it wraps
    known = getattr(function, "__globals__", None)
    # an object that is called, such as accelerate's that casts outputs, has the package of its class
    name = type(function).__module__ if known is None else known.get("__name__", "")
    return str(name).split(".")[0]


def own_forward(module: nn.Module) -> Any:
    """The forward on a module that is not its class's, below those that were put there for a run; None if there is none."""
    forward = vars(module).get("forward")
    for entry in reversed(vars(module).get(PUT, ())):
        # by the function, since a deep copy of the module has a method of its own
        if getattr(entry.value, "__func__", entry.value) is getattr(forward, "__func__", forward):
            forward = entry.before[0] if entry.before else None
    return forward


def lost_method(module: nn.Module) -> str:
    """Name of a method that was put on a module for a run but does not run any more; empty if all of them do.

    Somebody has put another in its place or taken it away, or has changed the class, whose method it may call.
    """
    own, top = vars(module), dict[str, Any]()
    for entry in own.get(PUT, ()):
        if getattr(type(module), entry.name, None) is not entry.of_class:
            return entry.name
        top[entry.name] = entry.value
    return next((name for name, value in top.items() if not runs_inside(own.get(name), value)), "")


def runs_inside(method: Any, value: Any) -> bool:
    """Whether `method` is the method `value`, perhaps inside wrappers of libraries such as accelerate's for mixed precision."""
    if method is value:
        return True
    ours = getattr(value, "__func__", value)
    for function in wrapped(method):
        if function is ours:
            return True
        if _package(function) not in _WRAPPING:
            return False
    return False


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Lets calls of `module` run `function`, until the returned function puts the forward back that is there now.

    The new forward has the signature of the present one, which trainers and `generate` read. A deep copy of the module falls
    back to the forward of its class.
    """
    before = module.forward

    @functools.wraps(getattr(before, "__func__", before))
    def forward(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if this is not module:
            return type(this).forward(this, *args, **keywords)
        return function(*args, **keywords)

    vars(forward)[_MARK] = True
    return put(module, "forward", MethodType(forward, module))


def with_globals(function: Any, functions: dict[str, Any]) -> FunctionType:
    """The code of `function` with other functions under these names of its module, which stays as it is."""
    names = {**function.__globals__, **functions}
    renamed = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed

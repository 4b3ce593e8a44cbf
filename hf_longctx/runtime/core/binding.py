"""Replaces methods, or functions that they call, for one instance of a module; used by the activation engine and `hf.models`.

Methods are replaced for the time of a run by `put`, which stores on the module what was there before. So `own_forward` can find
the user's forward below ours, and `lost_method` a replacement that was removed.
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
# libraries whose wrappers do not change what a method does to tokens
_WRAPPING = ("accelerate", "torch", "transformers", "hf_longctx")
# attribute of a function that refuses calls for a while: the function it hides, or None for the class's method
HIDDEN = "_longctx_hidden"
# attribute of a module: methods set by `put`, the topmost last
PUT = "_longctx_put"
# attributes of a module that hold hooks
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class, without the class of torch that sharding or a parametrization puts in front of it."""
    return type(module).__name__.removeprefix("FSDP").removeprefix("Parametrized")


def global_hooks() -> list[tuple[str, Any]]:
    """Returns the global hooks for all modules of the process, with the kind of each."""
    # read anew each time, since torch replaces some of the dictionaries
    own = vars(torch_modules)
    return [(kind[1:-1], hook) for kind in HOOKS for hook in dict(own.get(f"_global{kind}", {})).values()]


def bound(module: nn.Module, function: Callable[..., Any]) -> MethodType:
    """Makes `function` a method of this one `module`.

    A deep copy of the module has the method too, but runs the forward of the class instead.
    """

    def method(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if this is not module:
            return type(this).forward(this, *args, **keywords)
        return function(*args, **keywords)

    vars(method)[_MARK] = module, function
    return MethodType(method, module)


def bound_function(module: nn.Module) -> Any:
    """Returns the function that `bound` made this module's forward of; None if its forward is another one."""
    mark = getattr(vars(module).get("forward"), _MARK, None)
    return mark[1] if isinstance(mark, tuple) and mark[0] is module else None


def is_bound(function: Any) -> bool:
    """Whether this function or method comes from `bound` or `replace_forward`."""
    return hasattr(function, _MARK)


class _Put:
    """A method set on a module. before: the instance's own method before that; empty if it used its class's."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        own = vars(module)
        self.name, self.value = name, value
        self.before: tuple[Any, ...] = (own[name],) if name in own else ()
        self.of_class = getattr(type(module), name, None)

    def __deepcopy__(self, memo: Any) -> _Put:
        return self


def put(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Sets a method on one module until the returned function restores what was there. Undoing it twice changes nothing.

    A method that was set on top in the meantime stays.
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
    """Yields a function and those that it wraps, outermost first, methods as plain functions; nothing for None."""
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
    # a callable object, such as accelerate's for casting outputs, has the package of its class
    name = type(function).__module__ if known is None else known.get("__name__", "")
    return str(name).split(".")[0]


def own_forward(module: nn.Module) -> Any:
    """Returns the module's forward below those set for a run if it is not its class's; else None."""
    forward = vars(module).get("forward")
    for entry in reversed(vars(module).get(PUT, ())):
        # compare functions, since a deep copy of the module has another method object
        if getattr(entry.value, "__func__", entry.value) is getattr(forward, "__func__", forward):
            forward = entry.before[0] if entry.before else None
    return forward


def lost_method(module: nn.Module) -> str:
    """Returns the name of a method that was set for a run but no longer runs; empty if all of them do.

    It was replaced or removed, or the method of the class, which it may call, was changed.
    """
    own, top = vars(module), dict[str, Any]()
    for entry in own.get(PUT, ()):
        if getattr(type(module), entry.name, None) is not entry.of_class:
            return entry.name
        top[entry.name] = entry.value
    return next((name for name, value in top.items() if not runs_inside(own.get(name), value)), "")


def runs_inside(method: Any, value: Any) -> bool:
    """Whether `method` is `value`, possibly inside wrappers of libraries such as accelerate's for mixed precision."""
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
    """Makes calls of `module` run `function` until the returned function restores the forward.

    The new forward has the old one's signature, which trainers and `generate` read. A deep copy of the module runs the forward
    of its class.
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
    """Returns a copy of `function` that finds these functions under names of its module; the module is not changed."""
    names = {**function.__globals__, **functions}
    renamed = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed

"""Copies a model whose own functions refer to the model: wrapped forwards, hooks, partials and methods of wrapper objects.

`copy.deepcopy` does not copy functions. A `forward` such as that of TRL's trainers, which keeps the model's original forward in a
closure, would run the original from within the copy. Here the functions of the copy refer to the copy. What cannot be moved
(state inside C code, slots, weak references) is detected when it is called: `original_left_alone` refuses it by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import nn

from hf_longctx.runtime.core.binding import is_bound

# most steps and values to follow from a function, since it may refer to a trainer or a dataset
_MOST_DEPTH, _MOST_VALUES = 12, 20_000
# packages whose functions do not refer to a user's model by a global name
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "hf_longctx", "functools", "contextlib")
_REMEDY = (
    "take the module as an argument (module.forward = types.MethodType(function, module)), use a forward hook, or remove it "
    "before training (del vars(module)['forward'])"
)
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, ModuleType, CodeType, type)


def independent_copy(model: Any, memo: dict[int, Any] | None = None) -> Any:
    """Makes a deep copy of `model` whose functions run the copy. memo: replacements by id, as for `copy.deepcopy`.

    Raises ValueError that names what cannot be copied.
    """
    memo = {} if memo is None else memo
    # do not copy wrapper objects, since they may hold a trainer; below, only what refers to the model is moved
    memo |= {id(own): own for module in model.modules() for name, own in vars(module).items() if _is_moved(name, own)}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        where, reason = _uncopyable(model) or (type(model).__name__, error)
        raise ValueError(
            f"the self-test works on a copy of the model, but {where} cannot be copied ({type(reason).__name__}: {reason}); "
            f"remove it from the model before training"
        ) from error
    _remove_autocast(copied)
    moves = _Moves(memo, copied)
    for module in copied.modules():
        own = vars(module)
        for name, value in own.items():
            if _is_moved(name, value):
                own[name] = moves.moved(value)
            elif name.endswith("_hooks") and isinstance(value, dict):
                value.update({number: moves.moved(hook) for number, hook in value.items()})
    return copied


def _is_moved(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a function, which must be moved to run the copy."""
    return value is not None and (name == "forward" or isinstance(value, FunctionType | MethodType | partial))


@contextmanager
def original_left_alone(model: nn.Module) -> Iterator[None]:
    """Context that raises ValueError if a module of `model` runs, since a function of the copy then refers to the original."""
    names = {id(module): name for name, module in model.named_modules()}

    def refuse(module: nn.Module, *_: Any) -> None:
        raise ValueError(
            f"the self-test runs a copy of the model, but something in the copy ran the module "
            f"{names[id(module)] or type(module).__name__!r} of the model itself; {functions_added(model)}"
        )

    handles = [module.register_forward_pre_hook(refuse, prepend=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def functions_added(model: nn.Module) -> str:
    """Names the replaced forwards of `model`, with a remedy, for messages."""
    found = [
        f"forward of {name or type(module).__name__} is {_words(own)}"
        for name, module in model.named_modules()
        if (own := vars(module).get("forward")) is not None and not is_bound(own)
    ]
    what = "; ".join(found[:3]) if found else "no forward was replaced, so a hook or a function of the class refers to it"
    return f"{what}. Let such a function {_REMEDY}"


def _words(function: Any) -> str:
    """Returns name and place of a function, or the class of a callable object."""
    function = function.func if isinstance(function, partial) else function
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"an object of {type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_qualname} ({code.co_filename}, line {code.co_firstlineno})"


def _uncopyable(model: nn.Module) -> tuple[str, Exception] | None:
    """Returns the name of the first module attribute in `model` that cannot be copied, and why."""
    known: dict[int, Any] = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(known))
            except Exception as error:
                return f"{name}.{key}".lstrip("."), error
    return None


def _remove_autocast(model: Any) -> None:
    """Removes the autocast wrappers that accelerate has left on the forward of a model that was trained before."""
    own = vars(model)
    if own.pop("_original_forward", None) is None or "forward" not in own:
        return
    forward = own["forward"]
    function = getattr(forward, "__func__", forward)
    while _is_of_accelerate(function):
        function = function.__wrapped__
    if function is type(model).forward:
        del own["forward"]
    else:
        own["forward"] = MethodType(function, model) if isinstance(forward, MethodType) else function


def _is_of_accelerate(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    made = ("autocast_decorator.<locals>.decorate_autocast", "convert_outputs_to_fp32.<locals>.forward")
    return isinstance(function, ConvertOutputsToFp32) or (code is not None and code.co_qualname in made)


class _Moves:
    """Moves functions from a model to its copy.

    copies: copy of every object, by id of the original. copied: the copy of the model, whose modules already exist.
    """

    def __init__(self, copies: dict[int, Any], copied: nn.Module) -> None:
        self._copies = copies
        self._in_place = {id(module) for module in copied.modules()}
        # originals with their moved versions, by id; holding an original prevents reuse of its id
        self._done: dict[int, tuple[Any, Any]] = {}

    def moved(self, value: Any) -> Any:
        """Replaces every reference to the model in `value` by one to the copy; returns `value` itself if it has none."""
        return self._moved(value) if self._refers(value, set(), _MOST_DEPTH) else value

    def _copied(self, value: Any) -> bool:
        return self._copies.get(id(value), value) is not value

    def _refers(self, value: Any, seen: set[int], depth: int) -> bool:
        if isinstance(value, _ATOMS) or id(value) in self._in_place:
            return False
        if self._copied(value):
            return True
        if id(value) in seen or len(seen) > _MOST_VALUES or not depth:
            return False
        seen.add(id(value))
        return any(self._refers(each, seen, depth - 1) for each in _parts(value))

    def _moved(self, value: Any) -> Any:
        if self._copied(value):
            return self._copies[id(value)]
        if id(value) in self._done:
            return self._done[id(value)][1]
        if not self._refers(value, set(), _MOST_DEPTH):
            return value
        if isinstance(value, FunctionType):
            return self._moved_function(value)
        if isinstance(value, MethodType):
            return MethodType(self._moved(value.__func__), self._moved(value.__self__))
        if isinstance(value, partial):
            arguments = [self._moved(each) for each in value.args]
            return partial(
                self._moved(value.func), *arguments, **{key: self._moved(each) for key, each in value.keywords.items()}
            )
        if type(value) in (list, tuple, set):
            return type(value)(self._moved(each) for each in value)
        try:
            moved = copy.copy(value)
        except Exception:
            # keep the original, which then refuses to run
            return value
        self._done[id(value)] = value, moved
        own = moved if isinstance(moved, dict) else vars(moved)
        for key, each in list(own.items()):
            own[key] = self._moved(each)
        return moved

    def _moved_function(self, function: FunctionType) -> FunctionType:
        cells = None if function.__closure__ is None else tuple(CellType() for _ in function.__closure__)
        names = {name: each for name, each in _global_values(function) if self._refers(each, set(), _MOST_DEPTH)}
        known = dict(function.__globals__) if names else function.__globals__
        moved = FunctionType(function.__code__, known, function.__name__, function.__defaults__, cells)
        # store it first, since a function may refer to itself
        self._done[id(function)] = function, moved
        moved.__dict__.update(function.__dict__)
        moved.__qualname__, moved.__module__ = function.__qualname__, function.__module__
        known.update({name: self._moved(each) for name, each in names.items()})
        moved.__defaults__ = self._moved(function.__defaults__)
        moved.__kwdefaults__ = self._moved(function.__kwdefaults__)
        for old, new in zip(function.__closure__ or (), cells or (), strict=True):
            if (content := _content(old)) is not _EMPTY:
                new.cell_contents = self._moved(content)
        return moved


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _parts(value: Any) -> Iterator[Any]:
    """Yields everything that `value` refers to and that `_Moves` can replace."""
    if isinstance(value, FunctionType):
        if is_bound(value):
            # in a copy, such a method runs that of the class
            return
        yield from (_content(cell) for cell in value.__closure__ or ())
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (each for _, each in _global_values(value))
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, dict):
        yield from list(value.values())
    elif hasattr(value, "__dict__"):
        yield from list(vars(value).values())


def _global_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Returns names and values of the globals that a user's function reads."""
    known = function.__globals__
    if str(known.get("__name__", "")).split(".")[0] in _LIBRARIES:
        return
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield from ((name, known[name]) for name in code.co_names if name in known)

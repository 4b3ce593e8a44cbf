"""Lines of the package that tests take out while a function runs, and a list of all its waits, found in the source."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[3]
# calls that order work on a device or between ranks, and the folders in which each of them is one
_WAITS = {
    "wait_stream": ("hf_longctx", "kernels"),
    "wait_event": ("hf_longctx", "kernels"),
    "synchronize": ("hf_longctx", "kernels"),
    "record_stream": ("hf_longctx", "kernels"),
    # elsewhere: threads, child processes and ranks that meet around a checkpoint
    "wait": ("hf_longctx/runtime", "kernels"),
    "wait_on_host": ("hf_longctx/runtime", "kernels"),
}


@dataclass(frozen=True, slots=True)
class Removal:
    """A line of a module of the package, as a part of its text that stands there once, and what stands there instead."""

    module: str
    line: str
    instead: str = "pass"


@contextmanager
def removed(*removals: Removal) -> Iterator[None]:
    """Context in which functions of the package run without these lines, whoever calls them."""
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for removal in removals:
            before += _without(removal)
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


def _without(removal: Removal) -> list[tuple[FunctionType, CodeType]]:
    """Takes a line out; returns the functions that changed, with their code of before."""
    module = importlib.import_module(f"hf_longctx.{removal.module}")
    file = inspect.getsourcefile(module)
    assert file is not None
    source = Path(file).read_text()
    assert source.count(removal.line) == 1, f"{removal.line!r} stands {source.count(removal.line)} times in {removal.module}"
    old, new = (dict(_codes(compile(text, file, "exec"))) for text in (source, source.replace(removal.line, removal.instead)))
    # dataclasses make functions that are not in the source
    functions = [function for function in _functions(module) if function.__code__.co_qualname in old]
    changed = [each for each in functions if old[each.__code__.co_qualname] != new[each.__code__.co_qualname]]
    assert changed, f"{removal.line!r} is in no function of {removal.module}"
    before = [(function, function.__code__) for function in changed]
    for function, code in before:
        function.__code__ = new[code.co_qualname]
    return before


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)


def _functions(owner: ModuleType | type) -> Iterator[FunctionType]:
    """Functions and methods that a module defines."""
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for value in vars(owner).values():
        found: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(found, type) and found.__module__ == name:
            yield from _functions(found)
        elif callable(found) and isinstance(found := inspect.unwrap(found), FunctionType) and found.__module__ == name:
            yield found


def waits() -> Iterator[tuple[str, str]]:
    """(module, text of the call) of every wait of the package for a device or another rank."""
    for top in ("hf_longctx", "kernels"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = file.relative_to(ROOT)
            for text in waits_in(file.read_text(), path.as_posix()):
                yield ".".join(path.with_suffix("").parts[1:]), text


def waits_in(source: str, path: str) -> Iterator[str]:
    """Texts of the waits in a file's source."""
    # most files have none, and reading all of them takes seconds
    if not any(f".{name}" in source for name in _WAITS):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            folders = _WAITS.get(node.func.attr, ())
            if any(path.startswith(f"{folder}/") for folder in folders):
                yield ast.unparse(node)

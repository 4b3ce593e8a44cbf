"""Names that tests replace in a module of the package are read by this module, or nobody would call the replacement."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
# functions whose first two arguments are an owner and the name of what is replaced
REPLACERS = ("object", "setattr", "replaced")


@cache
def names_read(module: str) -> frozenset[str]:
    """Names that the source of a module reads; what it only imports or defines for others is not among them."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text())
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def imported_modules(tree: ast.AST) -> dict[str, str]:
    """Modules of the package by the names under which a test has them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hf_longctx":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                parent = importlib.util.find_spec(node.module)
                is_package = parent is not None and parent.submodule_search_locations is not None
                if is_package and importlib.util.find_spec(name) is not None:
                    found[alias.asname or alias.name] = name
    return found


def replacements(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every name of a module of the package that a test replaces."""
    tree = ast.parse(source)
    modules = imported_modules(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner, name = node.args[:2]
            is_known = function in REPLACERS and isinstance(owner, ast.Name) and owner.id in modules
            if is_known and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield modules[owner.id], name.value


def test_modules_read_what_tests_replace_in_them() -> None:
    # here, since every process that collects tests would look for them otherwise
    cases = {found for file in TESTS.rglob("*.py") for found in replacements(file.read_text())}
    assert len(cases) > 30
    unread = [f"{module} does not read {name} any more" for module, name in sorted(cases) if name not in names_read(module)]
    assert unread == [], "replace them where they are called"


def test_replacements_are_found_and_a_moved_function_is_noticed() -> None:
    source = """
from hf_longctx.runtime.execution import executor, round as round_module
with patch.object(executor, "step_loss", None), replaced(round_module, "step_loss", None):
    monkeypatch.setattr(round_module, "layers_of", None)
"""
    found = list(replacements(source))
    execution = "hf_longctx.runtime.execution"
    assert sorted(found) == [
        (f"{execution}.executor", "step_loss"),
        (f"{execution}.round", "layers_of"),
        (f"{execution}.round", "step_loss"),
    ]
    assert [name in names_read(module) for module, name in sorted(found)] == [False, True, True]

"""No function of the package takes more than seven arguments by position: further ones have their names at every call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
MOST_POSITIONAL = 7
# functions whose arguments another library chooses
GIVEN = {"hf_longctx/hf/models/attention.py: longctx_attention"}


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    """Functions with too many positional arguments, and how many; `self`, `cls` and autograd's `forward` do not count."""

    def functions(node: ast.AST, owner: ast.ClassDef | None, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                count = _num_arguments(child, owner)
                is_autograd = owner is not None and any(ast.unparse(base).endswith("autograd.Function") for base in owner.bases)
                if count > MOST_POSITIONAL and not (is_autograd and child.name == "forward"):
                    yield prefix + child.name, count
                yield from functions(child, None, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from functions(child, child, f"{prefix}{child.name}.")
            else:
                yield from functions(child, owner, prefix)

    return functions(ast.parse(source), None, "")


def _num_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    return len(names) - (owner is not None and names[:1] in (["self"], ["cls"]))


def test_no_function_takes_more_than_seven_positional_arguments() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}": count
        for path in sorted((ROOT / "hf_longctx").rglob("*.py"))
        for name, count in long_functions(path.read_text())
    }
    assert set(found) == GIVEN, found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a, b, c, d, e, f, g): ...", []),
        ("def f(a, b, c, d, e, f, g, *, h): ...", []),
        ("def f(a, b, c, d, e, f, g, h=1, **i): ...", [("f", 8)]),
        ("class C:\n    def f(self, a, b, c, d, e, f, g): ...", []),
        ("class C:\n    async def f(self, a, b, c, d, e, f, g, h): ...", [("C.f", 8)]),
        ("class C(torch.autograd.Function):\n    def forward(ctx, a, b, c, d, e, f, g, h): ...", []),
        ("def f():\n    if f:\n        def g(a, b, c, d, e, f, g, h): ...", [("f.g", 8)]),
    ],
)
def test_arguments_are_counted(source: str, found: list[tuple[str, int]]) -> None:
    assert list(long_functions(source)) == found

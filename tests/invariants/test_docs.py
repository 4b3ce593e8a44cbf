"""Links of the documents: every file is there, and a link on a name of the code goes to the file that defines it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")])
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def broken_links(text: str, folder: Path) -> list[str]:
    """Links of a Markdown text in `folder` whose file is missing, or does not define the name that stands in backquotes."""
    broken = []
    for label, target in _LINK.findall(text):
        path = folder / target.split("#")[0]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        if not path.exists():
            broken.append(f"{target}: no such file")
            continue
        name = re.fullmatch(r"`([\w.]+)`", label)
        if name and path.suffix == ".py" and not name[1].endswith(".py") and name[1] not in _names(path):
            broken.append(f"{target}: defines no {name[1]}")
    return broken


@cache
def _names(path: Path) -> set[str]:
    """Names that a file defines, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names |= _defined(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _defined(inner)}
    return names


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document.read_text(), document.parent) == []


def test_broken_links_are_found() -> None:
    good = "[`plan_step`](hf_longctx/plan/planner.py) and [`Chunk.prefix_tokens`](hf_longctx/plan/core/types.py)"
    assert broken_links(good, ROOT) == []
    assert broken_links("[`plan_steps`](hf_longctx/plan/planner.py)", ROOT) == [
        "hf_longctx/plan/planner.py: defines no plan_steps"
    ]
    assert broken_links("[here](docs/nowhere.md)", ROOT) == ["docs/nowhere.md: no such file"]

"""Docstrings begin with a verb or a noun, and comments do not begin with a bare "of", "as", "the same" or "what".

Such openings make a reader decode a sentence before its subject appears. The rule is checked in all files of the package, the
kernels, the recipes and the tests. In `PLAIN` folders docstrings also begin with no question word, code does nothing that only
people do, and a field of a dataclass has its comment where it is defined.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hf_longctx", "kernels", "recipes", "tests")

PLAIN = ("hf_longctx", "kernels")

_DOCSTRING = re.compile(r"(Of|The same|What|As|Whether of)\b")
_COMMENT = re.compile(r"#\s*(of|as|the same|what)\s")
_QUESTION = re.compile(r"(Why|How|Where|Which|When|Who|Nobody|Nothing|None|Whatever|These|Those|Tells|Knows|Learns|Asks|Meets)\b")
_PEOPLE = re.compile(r"\b(nobody|hearts?|thaws?|tells|learns of)\b")
# fields that the docstring of a class may describe; with more, each has a comment
_MOST_FIELDS = 2


def bad_openings(source: str) -> list[str]:
    """Docstrings and comments of a file with a forbidden opening, each as "line: text"."""
    found = [(line, text) for line, text in _docstrings(source) if _DOCSTRING.match(text.lstrip())]
    found += [(line, text) for line, text in _comments(source) if _COMMENT.match(text)]
    return [f"{line}: {text.strip().splitlines()[0]}" for line, text in sorted(found)]


def unplain(source: str) -> list[str]:
    """Openings, words and crowded docstrings of a file that `PLAIN` folders do not have, each as "line: text"."""
    docstrings = list(_docstrings(source))
    found = [(line, text) for line, text in docstrings if _QUESTION.match(text.lstrip())]
    found += [(line, text) for line, text in (*docstrings, *_comments(source)) if _PEOPLE.search(text)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            fields = [
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            text = ast.get_docstring(node) or ""
            described = [name for name in fields if re.search(rf"(^|[\s,`]){name}(`?, `?\w+)*`?: ", text)]
            if len(described) > _MOST_FIELDS:
                found.append((node.lineno, f"comments above {', '.join(described)} in place of the docstring of {node.name}"))
    return [f"{line}: {text.strip().splitlines()[0]}" for line, text in sorted(found)]


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """First lines of comments; a comment line that continues the one above it may begin with any word."""
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_own_line = token.line.lstrip().startswith("#")
            if not (is_own_line and last_line == token.start[0] - 1):
                yield token.start[0], token.string
            if is_own_line:
                last_line = token.start[0]


def source_files() -> list[str]:
    files = [str(file.relative_to(ROOT)) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    return sorted(files)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_begin_with_their_subject(folder: str) -> None:
    files = [file for file in source_files() if file.startswith(f"{folder}/")]
    assert files
    found = [f"{file}:{line}" for file in files for line in bad_openings((ROOT / file).read_text(encoding="utf-8"))]
    assert found == [], "\n".join(["rewrite these so that they begin with a verb or a noun:", *found])


def test_rewritten_folders_stay_plain() -> None:
    files = [file for file in source_files() if file.startswith(tuple(f"{folder}/" for folder in PLAIN))]
    assert len(files) > 100
    found = [f"{file}:{line}" for file in files for line in unplain((ROOT / file).read_text(encoding="utf-8"))]
    assert found == [], "\n".join(["rewrite these in plain English:", *found])


@pytest.mark.parametrize(
    "source",
    [
        '"""Why it fails."""',
        'def f():\n    """Tells others of it."""',
        'def f():\n    """Sends it; nobody waits."""',
        "# a rank that tells the others\nx = 1",
        '@dataclass\nclass A:\n    """Sizes. a: one. b, c: two."""\n    a: int\n    b: int\n    c: int',
    ],
)
def test_the_checker_catches_what_is_not_plain(source: str) -> None:
    assert len(unplain(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Sums of ranks."""',
        '@dataclass\nclass A:\n    """Sizes. a: one."""\n    a: int\n    b: int\n    c: int',
        "# whose hearing\nx = 1",
    ],
)
def test_the_checker_lets_plain_files_pass(source: str) -> None:
    assert unplain(source) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a layer: its bytes."""',
        '"""What a rank holds."""',
        'def f():\n    """As `g`, backward."""',
        'async def f():\n    """The same for many."""',
        'class A:\n    """Whether of a group."""',
        "# of one rank\nx = 1",
        "x = 1  # as above",
        "def f():\n    # the same again\n    return 1",
        "# what is left\nx = 1",
    ],
)
def test_the_checker_catches_a_planted_opening(source: str) -> None:
    assert len(bad_openings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of a layer."""',
        '"""Asserts that it holds."""',
        'def f():\n    """Whether ranks agree."""',
        'def f():\n    return "Of course"',
        "# most tokens\n# of one rank\nx = 1",
        "# whatever comes\nx = 1  # offset",
    ],
)
def test_the_checker_lets_other_openings_pass(source: str) -> None:
    assert bad_openings(source) == []

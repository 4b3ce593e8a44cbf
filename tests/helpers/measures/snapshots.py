"""Compares values with the short hashes of a file in `tests/snapshots`, and prints those that have changed.

A value is a mapping of named parts. Its line in the file has one hash per part; `=` stands for the hash of the first part, and
`!` begins the hash of an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Values = Mapping[str, Mapping[str, Any]]
# values that a failing test prints in full
_MOST_SHOWN = 3
_RAISED = "raised"


def result_of(function: Callable[[], Any]) -> Any:
    """Calls `function` and returns its result, or its error in a form that `line_of` marks with `!`.

    Only a ValueError has its text in it, since the texts of other errors are Python's own.
    """
    try:
        return function()
    except ValueError as error:
        return {_RAISED: f"ValueError: {error}"}
    except Exception as error:
        return {_RAISED: type(error).__name__}


def check(path: Path, group: str, found: Values) -> None:
    """Fails unless each value has the pinned hashes and no key is new or gone."""
    pinned: dict[str, str] = json.loads(path.read_text())[group]
    now = {key: line_of(value) for key, value in found.items()}
    lost, new = sorted(pinned.keys() - now.keys()), sorted(now.keys() - pinned.keys())
    changed = [key for key, line in now.items() if line != pinned.get(key, line)]
    if not (lost or new or changed):
        return
    values = [f"{key}: {json.dumps(_changed_parts(found[key], pinned[key]), sort_keys=True)}" for key in changed[:_MOST_SHOWN]]
    pytest.fail(
        "\n".join(
            (
                f"{len(changed)} of {len(found)} in {group!r} changed, {len(lost)} are gone, {len(new)} are new",
                *(f"gone: {', '.join(lost)}" for _ in lost[:1]),
                *(f"new: {', '.join(new)}" for _ in new[:1]),
                *(f"changed: {', '.join(changed)}" for _ in changed[:1]),
                "changed parts, as they are now:",
                *values,
                "see the docstring of this test's file for how to print the old values and how to pin the new ones",
            )
        ),
        pytrace=False,
    )


def line_of(value: Mapping[str, Any]) -> str:
    """The hashes of a value's parts, in their order."""
    hashes = [_hash(part) for part in value.values()]
    return " ".join("=" if place and own == hashes[0] else own for place, own in enumerate(hashes))


def write(path: Path, groups: Mapping[str, Values], **facts: str) -> None:
    """Pins values, one line for each, and facts about the file that belong to no group."""
    lines = {group: {key: line_of(value) for key, value in values.items()} for group, values in groups.items()}
    path.write_text(json.dumps({**facts, **lines}, indent=1) + "\n")


def show(groups: Mapping[str, Values], keys: list[str]) -> None:
    """Prints the values of these keys, or of all if there are none."""
    for group, values in groups.items():
        for key, value in values.items():
            if not keys or key in keys:
                print(f"{group}: {key}: {json.dumps(value, sort_keys=True)}")


def _changed_parts(value: Mapping[str, Any], line: str) -> dict[str, Any]:
    """The parts of a value whose hashes are not those of its line; all parts if their number has changed."""
    before = line.split(" ")
    before = [before[0] if own == "=" else own for own in before]
    if len(before) != len(value):
        return dict(value)
    return {name: part for (name, part), own in zip(value.items(), before, strict=True) if _hash(part) != own}


def _hash(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    mark = "!" if isinstance(part, dict) and part.keys() == {_RAISED} else ""
    return mark + hashlib.sha256(text.encode()).hexdigest()[:8]

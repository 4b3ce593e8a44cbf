"""The quick tests touch every sub-package, and the cells that they name are there."""

from __future__ import annotations

import configparser
import inspect
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]


def test_every_sub_package_has_a_quick_test_in_its_own_folder() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = ["/".join(name.split(".")[1:]) for name in config["options"]["packages"].split() if "." in name]
    quick = {path.parent for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.quick" in path.read_text()}
    # a package may hold files of settings alone
    folders = [each for each in folders if len([*(ROOT / "hf_longctx" / each).glob("*.py")]) != 1]
    assert len(folders) > 40
    assert [folder for folder in folders if ROOT / "tests" / folder not in quick] == []


def test_named_cells_are_there(collected: list[pytest.Item], pytestconfig: pytest.Config) -> None:
    if any("::" in each for each in pytestconfig.args):
        pytest.skip("single tests were asked for")
    found: dict[Any, set[str]] = {}
    for item in collected:
        if hasattr(item, "callspec"):
            found.setdefault(item.function, set()).add(item.callspec.id)
    naming = ("quick", "wide", "daily")
    named = [(each, mark.args) for each in found for mark in getattr(each, "pytestmark", []) if mark.name in naming]
    lacking = [f"{inspect.getfile(each)}: {each.__name__}[{cell}]" for each, cells in named for cell in {*cells} - found[each]]
    assert lacking == []

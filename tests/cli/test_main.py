"""The command line: output and errors of `show`, the version, and a start without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longctx import __version__
from hf_longctx.cli.main import build_parser, main
from hf_longctx.plan.core.serialize import plan_from_json

FIXTURES = Path(__file__).parents[1] / "plan" / "fixtures"
# files with other suffixes are not plans
PLANS = sorted(path.stem for path in FIXTURES.glob("*.json"))


@pytest.mark.parametrize("name", PLANS)
def test_show_prints_every_hand_written_plan(name: str, capsys) -> None:
    assert main(["show", str(FIXTURES / f"{name}.json")]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "micro-batch 0" in printed.out and "digest" in printed.out


@pytest.mark.quick
def test_show_prints_groups_chunks_and_schedule(capsys) -> None:
    main(["show", str(FIXTURES / "nested.json")])
    out = capsys.readouterr().out
    assert "layout <4>,<2>,<2,1,1>" in out or "layout <4>,<2>,<1,1,2>" in out
    assert "group (0, 1) ulysses: 0: 1[0:8000]; 1: 2[0:6000]" in out
    assert "stage 0: 0F0 0F1 0B0 0B1" in out


def test_show_writes_the_checked_plan_as_json(capsys) -> None:
    text = (FIXTURES / "nested.json").read_text()
    assert main(["show", "--json", str(FIXTURES / "nested.json")]) == 0
    assert plan_from_json(capsys.readouterr().out) == plan_from_json(text)


# name -> (edit of a good plan's text, text of the error)
BROKEN_TEXTS: dict[str, tuple[tuple[str, str], str]] = {
    "another schema": (('"schema": 1', '"schema": 7'), "plan schema 7 cannot be read"),
    "an unknown field": (('"step": 12', '"step": 12, "colour": 3'), "colour"),
    "tokens never planned": (("[1, 0, 8000]", "[1, 0, 7000]"), "tokens 7000 to 8000 are never planned"),
    "backward before forward": (("0F0 0F1 0B0 0B1", "0B0 0F0 0F1 0B1"), "0B0"),
}
# name -> (bytes of the file, text of the error)
BROKEN_BYTES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "Expecting"),
    "a list": (b"[]", "plan schema 'list' cannot be read"),
    "no text": (b"\xff\xfe\x00", "decode"),
}


def check_refused(path: Path, message: str, capsys) -> None:
    """Assert that `show` ends with status 1 and a message that names the file."""
    assert main(["show", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"hf-longctx show: {path}: ") and message in printed.err
    assert printed.err.count(str(path)) == 1 and "Errno" not in printed.err


@pytest.mark.daily("words2")
@pytest.mark.parametrize("words", [("plan", "--list", "models"), ("plan", "--list", "hardware"), ("plan", "--help")])
def test_a_reader_that_closes_the_pipe_gets_no_traceback(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hf_longctx.cli.main", *words]
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(write)
    # argparse itself takes no notice of a help that nobody reads
    assert (found.returncode, found.stderr) == (int("--list" in words), "")


@pytest.mark.quick
@pytest.mark.parametrize("name", BROKEN_TEXTS)
def test_a_plan_that_breaks_a_rule_is_refused(name: str, tmp_path: Path, capsys) -> None:
    (old, new), message = BROKEN_TEXTS[name]
    text = (FIXTURES / "nested.json").read_text()
    assert old in text
    path = tmp_path / "plan.json"
    path.write_text(text.replace(old, new))
    check_refused(path, message, capsys)


@pytest.mark.parametrize("name", BROKEN_BYTES)
def test_a_file_that_is_no_plan_is_refused(name: str, tmp_path: Path, capsys) -> None:
    content, message = BROKEN_BYTES[name]
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    check_refused(path, message, capsys)


def test_a_missing_file_is_refused(tmp_path: Path, capsys) -> None:
    check_refused(tmp_path / "missing.json", "No such file", capsys)


def test_a_folder_is_refused(tmp_path: Path, capsys) -> None:
    check_refused(tmp_path, "directory", capsys)


@pytest.mark.quick
def test_version_is_the_package_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"hf-longctx {__version__}"


def test_no_command_prints_the_help(capsys) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "show" in out and "accelerate launch" in out


def test_an_unknown_command_ends_with_status_two(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["frobnicate"])
    assert ended.value.code == 2
    assert "frobnicate" in capsys.readouterr().err


def test_help_names_every_command() -> None:
    assert "show" in build_parser().format_help()


def test_show_runs_without_torch_or_transformers() -> None:
    code = (
        "import sys; from hf_longctx.cli.main import main; status = main(['show', sys.argv[1]]); "
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'peft'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(FIXTURES / "flexsp.json")], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.quick
def test_the_module_can_be_run() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "hf_longctx.cli.main", "show", "/nonexistent.json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1 and "/nonexistent.json: " in ended.stderr

"""The command `calibrate`: options it refuses before it starts anything, and a short run of two ranks from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longctx.cli.calibrate import _environments
from hf_longctx.cli.main import main
from hf_longctx.plan.cost.profiles import read_profile

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip

# name -> (arguments of `calibrate`, text of the error)
REFUSED = {
    "no time": (["--seconds", "0"], "--seconds is 0; give a positive number"),
    "fewer than no repeats": (["--repeats", "-1"], "--repeats is -1; give at least 1"),
    "time that is no number": (["--seconds", "nan"], "--seconds is nan; give a positive number"),
    "no ranks": (["--ranks", "0"], "--ranks is 0; at least 1 is needed"),
    "no folder to write to": (["--output", "missing/hardware.json"], "the folder missing does not exist; create it first"),
    "no such model": (["--model", "no-such-model"], "model 'no-such-model' is neither a config.json, nor a folder with one"),
    "a folder to write": (["--output", "."], "--output . is a folder; give a file name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_any_rank_starts(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    words, message = REFUSED[name]
    assert main(["calibrate", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("hf-longctx calibrate: ") and message in printed.err


def test_a_launcher_decides_how_many_ranks_there_are(monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["calibrate", "--ranks", "2"]) == 1
    assert "--ranks is 2, but the launcher started 4; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--seconds", "soon"], ["--precision", "fp8"], ["--ranks", "1.5"]])
def test_words_of_the_wrong_kind_are_refused_by_the_parser(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", *words])
    assert words[0] in capsys.readouterr().err


# variables that a launcher sets
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def calibrate(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    command = [sys.executable, "-m", "hf_longctx.cli.main", "calibrate", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_two_ranks_write_a_profile_that_is_read_again(tmp_path: Path) -> None:
    config, output = tmp_path / "config.json", tmp_path / "hardware.json"
    config.write_text(json.dumps(CONFIG))
    run = calibrate("--model", str(config), "--ranks", "2", "--seconds", "1", "--output", str(output))
    assert run.returncode == 0, run.stderr
    profile = read_profile(output)
    (calibration,) = profile.models
    assert calibration.model == "2 layers of 32 and 48, 4/2 heads of 8, vocabulary 64, 4 bytes"
    assert [ranks for ranks, _ in profile.spec.exchange_bytes_per_s] == [2]
    assert "on 2 ranks" in calibration.coefficients.source
    # printed once, not once per rank
    assert run.stdout.count("held-out chunks: mean absolute error") == 1
    assert run.stdout.rstrip().endswith(f"written: {output}")


def test_a_model_that_no_rank_can_build_is_said_once_and_fails(tmp_path: Path, quick_starts, monkeypatch, capfd) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", quick_starts["PYTHON_EXEC"])
    assert main(["calibrate", "--model", "gpt-7b", "--ranks", "2", "--output", str(tmp_path / "hardware.json")]) == 1
    said = capfd.readouterr().err
    assert said.count("hf-longctx calibrate: model 'gpt-7b' does not have the layers of a Llama") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_said_once_under_a_launcher_and_every_rank_fails(quick_starts) -> None:
    command = [quick_starts["PYTHON_EXEC"], "-m", "hf_longctx.cli.main", "calibrate", "--model", "no-such-model"]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for environment in _environments(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "".join(errors).count("model 'no-such-model' is neither a config.json, nor a folder with one") == 1, errors

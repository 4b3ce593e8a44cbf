"""`hf-longctx replay` of a run: numbers of a hand-written journal, and the same sequences planned for another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.cli.main import main
from hf_longctx.journal import append_lines

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
}
LENGTHS = ([30_000, 400, 400], [900] * 8, [50_000])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three plans, of which the last two were predicted."""
    line: dict[str, Any] = {"training": "a", "step": 0}
    start = {**line, "kind": "start", "machine": {"ranks": 2, "device": "CPU x"}, "model": {"precision": "bf16 autocast"}}
    steps = [
        {**line, "kind": "step", "step": number + 1, "sequences": lengths, "layout": f"<{number}>", "measured_s": seconds}
        | {"predicted_s": predicted}
        for number, (lengths, seconds, predicted) in enumerate(
            zip(LENGTHS, (100.0, 20.0, 180.0), (None, 22.0, 178.0), strict=True)
        )
    ]
    append_lines(tmp_path, [start, *steps])
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def record_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["replay", "--json", *words]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_a_run_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(capsys, str(folder))
    assert record["measured_s"] == 300.0 and record["num_tokens"] == sum(map(sum, LENGTHS))
    assert [plan["predicted_then_s"] for plan in record["plans"]] == [None, 22.0, 178.0]
    assert main(["replay", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 of 3 plans" in lines[0] and lines[0].endswith("on 2 x CPU x")
    assert lines[2].split() == ["1", "3", "30,800", "30,000", "1", "min", "40", "s", "<0>"]
    # both together were exact
    assert "measured 5 min (predicted then: +0.0% over 2 plans)" in lines


def test_the_same_sequences_for_another_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--gpus", "8", "--hardware", "h100"]
    record = record_of(capsys, str(folder), *machine)
    assert [plan["lengths"] for plan in record["plans"]] == list(LENGTHS) and record["gpus"] == 8
    seconds = [plan["predicted_now_s"] for plan in record["plans"]]
    assert sum(seconds) == pytest.approx(record["predicted_s"]) and 0 < record["predicted_s"] < 3.0
    # one sequence of 50,000 tokens takes longer than 7,200 tokens in short ones
    assert seconds[2] > seconds[1]
    forced = record_of(capsys, str(folder), *machine, "--degrees", "8")
    assert {plan["layout_now"] for plan in forced["plans"]} == {"<8>"}
    assert forced["plans"][1]["predicted_now_s"] > seconds[1]
    assert record_of(capsys, str(folder), *machine, "--plans", "1")["plans"][0]["step"] == 2
    assert main(["replay", str(folder), *machine]) == 0
    text = capsys.readouterr().out
    assert "now on 8 x " in text and "measured then 5 min" in text and "times as fast" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8"], "give both --gpus and --hardware"),
        (["--degrees", "2"], "--degrees: no effect on a run as it was"),
        (["--no-compile-layers"], "--no-compile-layers: no effect on a run as it was"),
        (["--plans", "0"], "--plans is 0"),
        (["--gpus", "1", "--hardware", "h100", "--tokens-per-rank", "1000"], "the longest sequence of the run has 50,000 tokens"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["replay", str(folder), *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("hf-longctx replay: ") and message in printed.err


def test_folders_without_lengths_or_a_model_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "checkpoint-3" / "config.json").unlink()
    assert main(["replay", str(folder), "--gpus", "8", "--hardware", "h100"]) == 1
    assert "say --model NAME" in capsys.readouterr().err
    append_lines(folder, [{"kind": "step", "training": "a", "step": 4, "layout": "", "measured_s": 1.0, "predicted_s": None}])
    assert main(["replay", str(folder)]) == 1
    assert "written by an earlier version" in capsys.readouterr().err
    assert main(["replay", str(folder / "checkpoint-3")]) == 1
    assert "has neither journal.jsonl" in capsys.readouterr().err

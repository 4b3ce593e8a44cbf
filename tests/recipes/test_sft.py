"""The recipe as a user starts it: `accelerate launch`, two gloo ranks, real files, then a plain process on the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = json.dumps(
    {
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
)
SMALL = [
    "--model_config", TINY, "--max_documents", "24", "--eval_documents", "2", "--max_length", "512", "--tokens_per_rank", "384",
    "--tokens_per_step", "3072", "--max_steps", "8", "--calibration_steps", "3", "--max_document_chars", "1500",
]  # fmt: skip


def launch(folder: Path, *arguments: str, accelerate_config: str = "cpu.yaml") -> subprocess.CompletedProcess[str]:
    """Runs the recipe with `folder` as output folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "recipes" / "accelerate" / accelerate_config)]
    command += [str(ROOT / "recipes" / "sft.py"), *arguments, "--output_dir", str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo's own configuration with a smaller model and fewer steps."""
    folder = tmp_path_factory.mktemp("demo")
    return launch(folder, str(ROOT / "recipes" / "configs" / "demo.yaml"), *SMALL), folder / "out"


def test_demo_prints_one_line_per_step_and_its_world(demo) -> None:
    run, _ = demo
    assert run.returncode == 0, run.stderr[-3000:]
    assert "2 rank(s) on cpu, gloo" in run.stdout
    lines = re.findall(r"step +\d+ \| loss .*", run.stdout)
    assert len(lines) == 8
    assert all(re.search(r"tokens/s \| padding .*% \| \d+ micro-batch", line) for line in lines)
    assert "predicted     - s" in lines[0] and "predicted     - s" not in lines[-1]
    assert any("<2>" in line and "<1,1>" in line for line in lines)
    before, after = re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", run.stdout).groups()
    assert float(after) < float(before)


def test_demo_draws_its_timeline(demo) -> None:
    _, folder = demo
    root = ElementTree.parse(folder / "timeline.svg").getroot()
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("predicted") for text in texts) and any(text.startswith("measured") for text in texts)
    assert texts.count("rank 1") == 2
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]


def test_plain_process_gets_the_same_held_out_loss(demo) -> None:
    _, folder = demo
    command = [sys.executable, str(ROOT / "recipes" / "evaluate.py"), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "hf_longctx" not in (ROOT / "recipes" / "evaluate.py").read_text()


def test_checkpoint_and_json_lines_continue(demo, tmp_path: Path) -> None:
    _, checkpoint = demo
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"body": "word " * (5 + 20 * i)}) + "\n" for i in range(8)) + '{"body": ""}\n')
    run = launch(
        tmp_path,
        *("--model_name_or_path", str(checkpoint), "--dataset", str(documents), "--text_column", "body"),
        *(
            "--long_sequences",
            "truncate",
            "--max_steps",
            "2",
            "--use_cpu",
            "true",
            "--report_to",
            "none",
            "--save_strategy",
            "no",
        ),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "8 sequences of" in run.stdout


def test_wrong_world_size_stops_at_once(tmp_path: Path) -> None:
    run = launch(tmp_path, str(ROOT / "recipes" / "configs" / "demo.yaml"), "--expected_world_size", "3")
    assert run.returncode != 0
    assert "2 rank(s) started, 3 expected" in run.stderr


def test_missing_text_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"content": "a"}\n')
    run = launch(
        tmp_path, "--model_config", TINY, "--tokenizer", "bytes", "--dataset", str(tmp_path / "d.jsonl"), "--use_cpu", "true"
    )
    assert run.returncode != 0
    assert "has no column 'text'; it has content (set text_column)" in run.stderr

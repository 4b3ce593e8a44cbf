"""The demo with a smaller model and fewer steps, and what its runs leave behind."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = "recipes/sft.py"
NUM_STEPS = 12
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
    "--tokens_per_step", "3072", "--calibration_steps", "3", "--max_document_chars", "1500",
]  # fmt: skip
SMALL_DEMO = [
    "recipes/configs/demo.yaml", *SMALL, "--max_steps", str(NUM_STEPS), "--save_strategy", "steps", "--save_steps", "4",
    "--self_test", "false",
]  # fmt: skip


def environment(folder: Path, *first: Path) -> dict[str, str]:
    """Variables of a launcher on this machine; programs in `first` come before all others."""
    paths = [str(path) for path in first] + [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "ACCELERATE_MIXED_PRECISION": "no",
        "OMP_NUM_THREADS": "1",
    }


def steps_of(text: str) -> list[int]:
    """Steps in the order in which a run, or several into one file, reported them."""
    return [int(step) for step in re.findall(r"step +(\d+) \| loss", text)]


def held_out_loss(folder: Path) -> float:
    """The loss on held-out documents after training."""
    return float(json.loads((folder / "held_out.json").read_text())["loss"])


def wait_for(holds: Callable[[], bool], timeout_s: float = 600.0) -> None:
    """Waits until `holds()`; raises TimeoutError."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.02)

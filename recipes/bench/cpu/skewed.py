"""Tokens per second on one skewed batch, against `transformers.Trainer` with padding and with flattening.

    python recipes/bench/cpu/skewed.py [--steps 3] [--json FILE]

The batch has one document of 2048 tokens and 15 short ones (log-normal; 4,616 tokens in all). All three methods run one after
the other, in one process with two threads: the same small Llama, forward + backward + optimizer step. A first step, on the first
32 tokens of every document and with a learning rate of zero, does not count. The losses of this step and of the next one, which
all methods run with the initial weights, must agree to 1e-5. `Trainer` with padding runs 16 rows of 2048 tokens;
`DataCollatorWithFlattening` packs the documents into one row, for which sdpa builds a dense mask.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_longctx import LongContextConfig, LongContextTrainer

THREADS = 2
TOLERANCE = 1e-5
# tokens of every document in the first step, which does not count
FIRST_TOKENS = 32


class StepTimes(TrainerCallback):
    """Records the seconds of every step, from the start of its first forward to the end of the optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def skewed_rows(seed: int = 1) -> list[list[int]]:
    """Draws one document of 2048 tokens and 15 of 32 to 512 tokens."""
    generator = np.random.default_rng(seed)
    lengths = [2048, *np.clip(generator.lognormal(5.0, 0.7, 15).astype(int), 32, 512).tolist()]
    return [generator.integers(5, 4096, length).tolist() for length in lengths]


def pad(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads a batch and makes its attention mask; padding has no label."""
    longest = max(len(row["input_ids"]) for row in features)
    batch = {
        "input_ids": torch.zeros(len(features), longest, dtype=torch.int64),
        "attention_mask": torch.zeros(len(features), longest, dtype=torch.int64),
        "labels": torch.full((len(features), longest), -100),
    }
    for i, row in enumerate(features):
        tokens = torch.tensor(row["input_ids"])
        batch["input_ids"][i, : len(tokens)] = tokens
        batch["labels"][i, : len(tokens)] = tokens
        batch["attention_mask"][i, : len(tokens)] = 1
    return batch


def measure(method: str, rows: list[list[int]], num_steps: int) -> tuple[float, list[float]]:
    """Trains with one method, from the same weights; returns (median seconds of a step, losses with the initial weights)."""
    set_seed(0)
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=32768,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    # repeat the rows, so that every step that counts trains the whole batch
    dataset = datasets.Dataset.from_dict({"input_ids": [row[:FIRST_TOKENS] for row in rows] + rows * num_steps})
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=len(rows),
            max_steps=num_steps + 1,
            train_sampling_strategy="sequential",
            learning_rate=1e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        shared = {"model": model, "args": args, "train_dataset": dataset, "callbacks": [times]}
        if method == "hf_longctx":
            quiet = LongContextConfig(report_steps=False, timeline_steps=0)
            trainer: Trainer = LongContextTrainer(longctx_config=quiet, **shared)
        else:
            trainer = Trainer(data_collator=pad if method == "padding" else DataCollatorWithFlattening(), **shared)
        trainer.log = lambda logs, start_time=None: trainer.state.log_history.append(dict(logs))
        trainer.train()
    return median(times.seconds[1:]), [logs["loss"] for logs in trainer.state.log_history[:2]]


def main() -> None:
    """Prints the table; fails if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each method (default: 3)")
    parser.add_argument("--require", nargs=2, type=float, default=(0.0, 0.0), metavar=("PADDING", "FLATTENING"),
                        help="fail unless ours is this many times as fast as padding and flattening")  # fmt: skip
    parser.add_argument("--json", type=Path, default=None, help="also write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rows = skewed_rows()
    num_tokens = sum(map(len, rows))
    print(
        f"{len(rows)} documents, {num_tokens} tokens, longest {max(map(len, rows))}; {THREADS} threads, torch {torch.__version__}"
    )
    results = []
    for method in ("padding", "flattening", "hf_longctx"):
        step_s, losses = measure(method, rows, options.steps)
        results.append({"method": method, "step_s": step_s, "tokens_per_s": num_tokens / step_s, "losses": losses})
    ours = results[-1]
    print(f"{'method':12s} {'step s':>8s} {'tokens/s':>10s} {'ours is':>9s} {'loss':>11s}")
    for row in results:
        ratio = row["step_s"] / ours["step_s"]
        row["ours_is_faster_by"] = ratio
        print(f"{row['method']:12s} {row['step_s']:8.2f} {row['tokens_per_s']:10.0f} {ratio:8.2f}x {row['losses'][1]:11.6f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    spread = max(max(step) - min(step) for step in zip(*(row["losses"] for row in results), strict=True))
    if spread > TOLERANCE:
        raise SystemExit(f"the losses differ by {spread:.1e}, more than {TOLERANCE}: the methods do not compute the same thing")
    for row, factor in zip(results, options.require, strict=False):
        if row["ours_is_faster_by"] < factor:
            raise SystemExit(f"ours is {row['ours_is_faster_by']:.2f} times as fast as {row['method']}, required {factor}")


if __name__ == "__main__":
    main()

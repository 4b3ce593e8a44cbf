"""Seconds that training stands still for a checkpoint, written while it waits and written behind it (`async_save`).

    python recipes/bench/cpu/saving.py [--folder DIR] [--layers 8] [--rounds 3] [--json FILE]

The model is a Llama in fp32 with random weights (hidden size 512, 20M to 100M weights), trained by AdamW in one process. Every
round trains it once in each way, and saves every third step. `stands still` is the time between the end of a step that saves and
the begin of the next step, less that of steps that save nothing; `in view` is the time until the checkpoint has its name;
`step meanwhile` is the time of the step after a save, divided by that of other steps. Medians over all saves but the last of each
training, for which there is no next step. `--folder` chooses the disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from hf_longctx import LongContextConfig, LongContextTrainer

SAVE_STEPS, NUM_STEPS = 3, 15
NUM_TOKENS = 256


@dataclass
class Times(TrainerCallback):
    """Times of one training, by step: when steps began and ended, and when checkpoints came into view."""

    folder: Path
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began[state.global_step + 1] = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended[state.global_step] = time.time()

    def still_s(self) -> list[float]:
        """Seconds that each save but the last took from training."""
        gaps = {step: self.began[step + 1] - self.ended[step] for step in range(1, NUM_STEPS)}
        plain = median(gap for step, gap in gaps.items() if step % SAVE_STEPS)
        return [gap - plain for step, gap in gaps.items() if step % SAVE_STEPS == 0]

    def view_s(self) -> list[float]:
        """Seconds until each checkpoint but the last was in view: its folder then has all its names."""
        steps = range(SAVE_STEPS, NUM_STEPS, SAVE_STEPS)
        return [(self.folder / f"checkpoint-{step}").stat().st_ctime - self.ended[step] for step in steps]

    def slowed(self) -> float:
        """The time of steps after a save, divided by that of others; the first step warms up."""
        took = {step: self.ended[step] - self.began[step] for step in range(2, NUM_STEPS + 1)}
        after = [seconds for step, seconds in took.items() if step % SAVE_STEPS == 1]
        return median(after) / median(seconds for step, seconds in took.items() if step % SAVE_STEPS != 1)


@dataclass(frozen=True)
class Result:
    """Medians of one way to save."""

    way: str
    stands_still_s: float
    in_view_s: float
    step_meanwhile: float


def train(num_layers: int, folder: Path, is_behind: bool) -> Times:
    """Trains a new model into `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=num_layers, num_attention_heads=8, vocab_size=8192
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"input_ids": torch.randint(8192, (NUM_TOKENS,)).tolist()} for _ in range(64)]
    settings = LongContextConfig(async_save=is_behind, self_test=False, report_steps=False, timeline_steps=0)
    times = Times(folder)
    trainer = LongContextTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[times],
        longctx_config=settings,
    )
    trainer.train()
    trainer.longctx_run.close()
    return times


def main() -> None:
    """Trains in both ways by turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: the system's temporary folder")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[bool, list[Times]] = {False: [], True: []}
    results: dict[bool, Result] = {}
    num_bytes = 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(args.rounds):
            for is_behind in (False, True) if number % 2 == 0 else (True, False):
                out = Path(folder, f"{number}-{is_behind}")
                found[is_behind].append(train(args.layers, out, is_behind))
        for is_behind, way in ((False, "standing still"), (True, "behind training")):
            runs = found[is_behind]
            results[is_behind] = Result(
                way,
                median(seconds for times in runs for seconds in times.still_s()),
                median(seconds for times in runs for seconds in times.view_s()),
                median(times.slowed() for times in runs),
            )
        num_bytes = sum(path.stat().st_size for path in (out / f"checkpoint-{NUM_STEPS}").iterdir())
    print(f"checkpoints of {num_bytes / 2**20:.0f} MiB, {args.rounds} rounds")
    print(f"{'written':16}{'stands still s':>16}{'in view s':>12}{'step meanwhile':>16}")
    for each in results.values():
        print(f"{each.way:16}{each.stands_still_s:16.3f}{each.in_view_s:12.3f}{each.step_meanwhile:16.2f}")
    ratio = results[False].stands_still_s / results[True].stands_still_s
    print(f"training stands still {ratio:.1f} times as long without async_save")
    if args.json is not None:
        ways = [asdict(each) for each in results.values()]
        args.json.write_text(json.dumps({"bytes": num_bytes, "ratio": ratio, "ways": ways}))


if __name__ == "__main__":
    main()

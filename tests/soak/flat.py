"""Long runs and many runs in one process: memory, threads and open files stay where they were.

python tests/soak/flat.py --steps 1500 --trainings 50
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import dataclass

import datasets
import psutil
import torch
import transformers

from hf_longctx import LongContextConfig, LongContextTrainer

# growth after the warm-up that counts as flat; allocators round, and logs grow by a line per step
MOST_MIB, MOST_HANDLES = 24.0, 2


@dataclass(frozen=True)
class Held:
    """Memory, threads and open files of this process."""

    mib: float
    threads: int
    files: int

    @classmethod
    def now(cls) -> Held:
        """Counts after a collection."""
        gc.collect()
        process = psutil.Process()
        return cls(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())

    def growth(self, after: Held) -> str:
        """Growth from here to `after`, in words; empty if it is flat."""
        grown = [f"{after.mib - self.mib:.1f} MiB"] if after.mib - self.mib > MOST_MIB else []
        grown += [f"{after.threads - self.threads} threads"] if after.threads - self.threads > MOST_HANDLES else []
        grown += [f"{after.files - self.files} open files"] if after.files - self.files > MOST_HANDLES else []
        return ", ".join(grown)


class Watch(transformers.TrainerCallback):
    """Counts at two steps of a run."""

    def __init__(self, first: int, last: int) -> None:
        self.at = {first: "first", last: "last"}
        self.held: dict[str, Held] = {}

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: object,
    ) -> None:
        if state.global_step in self.at:
            self.held[self.at[state.global_step]] = Held.now()


def train(num_steps: int, callbacks: list[transformers.TrainerCallback]) -> None:
    """A small training with recomputation, splitting and logging, the self-test on."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    lengths = torch.randint(3, 90, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": [(3 * i + n) % 64 for n in range(length)]} for i, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = LongContextTrainer(
            model=transformers.LlamaForCausalLM(config),
            args=transformers.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=num_steps,
                per_device_train_batch_size=4,
                logging_steps=50,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            longctx_config=LongContextConfig(max_length=64, long_sequences="split", tokens_per_rank=128, report_steps=False),
            callbacks=callbacks,
        )
        trainer.train()


def long_run(num_steps: int) -> tuple[Held, Held]:
    """Counts at a fifth of a long run, and at its end."""
    watch = Watch(max(1, num_steps // 5), num_steps)
    train(num_steps, [watch])
    return watch.held["first"], watch.held["last"]


def many_runs(count: int) -> tuple[Held, Held]:
    """Counts after a fifth of `count` short trainings, and after all."""
    for number in range(count):
        train(3, [])
        if number + 1 == max(1, count // 5):
            first = Held.now()
    return first, Held.now()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--trainings", type=int, default=50)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for name, (before, after) in (
        (f"{options.steps} steps", long_run(options.steps)),
        (f"{options.trainings} trainings", many_runs(options.trainings)),
    ):
        print(f"{name}: {before} -> {after}; {before.growth(after) or 'flat'}", flush=True)
        assert not before.growth(after)

"""Tokens per second of whole trainings with LoRA on one GPU, documents of mixed lengths: `Trainer` against `LongContextTrainer`.

    python recipes/bench/gpu/trainings.py [--layers 16] [--limit 32768] [--tokens 196608] [--methods WORD ...] [--json FILE]

The model is a Llama with random weights in the named model's shapes, in bf16, with LoRA of rank 16 on all projections. A step
trains documents of random tokens whose lengths are log-normal (median 4,900), the longest of `--limit` tokens. `Trainer` takes
one document after the other (`gradient_accumulation_steps`), so that it has no padding and no mask. Methods:

    HF checkpointing              transformers' gradient checkpointing
    HF checkpointing, Liger       the same with Liger's fused norms, MLP and loss
    TRL selective, Liger          keeps attention, as TRL's `selective` does, and recomputes all else
    hf_longctx                    our trainer with its defaults: norms, MLP and rotary embedding by torch.compile
    hf_longctx, not compiled      the same with `compile_layers=False`
    hf_longctx, Liger             the same with Liger's norms and MLP

Every method runs in a process of its own. The first step does not count; losses of the first step, with the same weights, must
agree to 1 %, since bf16 rounds in other places. Columns: median seconds of a step with its optimizer step, tokens per second,
peak memory of the device, and the loss of the first step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, DefaultDataCollator, Trainer, TrainingArguments, set_seed

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.calibration.calibrate import shaped_config
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.recipes.bench.cpu.skewed import StepTimes
from hf_longctx.recipes.bench.gpu.cases import TOY
from hf_longctx.recipes.bench.gpu.rows import append_row, end_with_children, is_wanted

METHODS = (
    *("HF checkpointing", "HF checkpointing, Liger", "TRL selective, Liger"),
    *("hf_longctx", "hf_longctx, not compiled", "hf_longctx, Liger"),
)
MARK = "ROW "
TOLERANCE = 0.01


class DeviceTimes(StepTimes):
    """Seconds of every step, at whose start and end the device has done all its work."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wait()
        super().on_step_begin(*args, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._wait()
        super().on_step_end(*args, **kwargs)

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Job:
    """Shapes, lengths and number of steps that every method trains."""

    model: str = "llama-3.1-8b"
    layers: int = 16
    limit: int = 32768
    tokens: int = 196608
    steps: int = 2
    is_toy: bool = False

    def lengths(self) -> list[int]:
        """Tokens of the documents of a step, the longest of which has `limit`."""
        generator, lengths = np.random.default_rng(1), [self.limit]
        while sum(lengths) < self.tokens:
            lengths.append(int(np.clip(generator.lognormal(8.5, 1.2) * self.limit / 32768, 16, self.limit)))
        return lengths


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    state: str
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_gib: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        if self.state != "ok":
            return f"{self.method:26s} {self.state}"
        return f"{self.method:26s} {self.step_s:8.2f} {self.tokens_per_s:10.0f} {self.peak_gib:9.1f} {self.loss:9.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_job_arguments(parser)
    parser.add_argument("--steps", type=int, default=Job.steps, help="steps that count (default: 2)")
    parser.add_argument("--methods", nargs="+", default=[], metavar="WORD", help="methods whose names have one of these words")
    parser.add_argument("--json", type=Path, default=None, help="also append each row to this file, as soon as it is there")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (job := job_of(options, options.steps)) is None:
        return 0
    if options.run:
        print(MARK + json.dumps(asdict(train(job, options.run))))
        return 0
    lengths = sorted(job.lengths())
    print(
        f"{len(lengths)} documents of {lengths[0]:,} to {lengths[-1]:,} tokens, {sum(lengths):,} in all, {job.layers} layers\n"
        f"{'method':26s} {'step s':>8s} {'tokens/s':>10s} {'peak GiB':>9s} {'loss':>9s}",
        flush=True,
    )
    rows = []
    for method in METHODS:
        if is_wanted(method, options.methods):
            rows.append(train(job, method) if job.is_toy else in_process(method, arguments or sys.argv[1:]))
            print(rows[-1], flush=True)
            if options.json is not None:
                append_row(options.json, {**asdict(job), **asdict(rows[-1])})
    losses = [row.loss for row in rows if row.state == "ok"]
    if losses and max(losses) - min(losses) > TOLERANCE * max(losses):
        print(f"losses differ by more than {TOLERANCE:.0%}: the methods do not compute the same thing")
        return 1
    return 0


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a job, which `job_of` reads."""
    parser.add_argument("--model", default=Job.model, help="a named shape of the catalogue (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=Job.layers, help="layers of the model (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=Job.limit, help="tokens of the longest document (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=Job.tokens, help="tokens of a step, at least (default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU if there is no GPU")


def job_of(options: argparse.Namespace, steps: int) -> Job | None:
    """The job that was asked for; None, and a line that says so, where no GPU can run it."""
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: torch sees no CUDA device (--toy runs small sizes on the CPU)")
        return None
    job = Job(options.model, options.layers, options.limit, options.tokens, steps, options.toy)
    return replace(job, layers=2, limit=256, tokens=1024) if options.toy else job


def in_process(method: str, arguments: Sequence[str]) -> Row:
    """Runs one method in a new process, so that none inherits another's memory pools or patches."""
    done = subprocess.run([sys.executable, __file__, *arguments, "--run", method], capture_output=True, text=True)
    printed = done.stdout.splitlines()
    # lines in which our trainer describes itself and its plans
    for line in printed:
        if line.startswith(("attention:", "self-test", "step ")):
            print(f"    {line}")
    line = next((line for line in printed if line.startswith(MARK)), None)
    if line is None:
        return Row(method, f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return Row(**json.loads(line.removeprefix(MARK)))


def train(job: Job, method: str, times: DeviceTimes | None = None) -> Row:
    """Trains with one method, from the same weights. times: watches the steps."""
    if missing := [p for p in ("liger_kernel", "trl") if p[:3] in method.lower() and not importlib.util.find_spec(p)]:
        return Row(method, f"skipped: {missing[0]} is not installed")
    try:
        return _train(job, method, times or DeviceTimes())
    except torch.OutOfMemoryError:
        return Row(method, "out of memory")


def _train(job: Job, method: str, times: DeviceTimes) -> Row:
    is_cuda, is_ours = torch.cuda.is_available(), method.startswith("hf_longctx")
    lengths = job.lengths()
    generator = np.random.default_rng(2)
    rows = [generator.integers(0, 250, length).tolist() for length in lengths]
    # every step trains the same documents
    data = datasets.Dataset.from_dict({"input_ids": rows * (job.steps + 1), "labels": rows * (job.steps + 1)})
    model = build(job)
    checkpointing: dict[str, Any] = {}
    if "TRL" in method:
        importlib.import_module("trl.models").enable_selective_activation_checkpointing(model.get_base_model())
        checkpointing["gradient_checkpointing_kwargs"] = {"selective": True}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(rows) if is_ours else 1,
            gradient_accumulation_steps=1 if is_ours else len(rows),
            gradient_checkpointing=not is_ours,
            use_liger_kernel="Liger" in method,
            max_steps=job.steps + 1,
            train_sampling_strategy="sequential",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            logging_nan_inf_filter=False,
            bf16=is_cuda,
            use_cpu=not is_cuda,
            optim="adamw_torch_fused" if is_cuda else "adamw_torch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **checkpointing,
        )
        shared = {"model": model, "args": args, "train_dataset": data, "callbacks": [times]}
        if is_ours:
            config = LongContextConfig(timeline_steps=0, compile_layers=False if "not compiled" in method else None)
            trainer: Trainer = LongContextTrainer(longctx_config=config, **shared)
        else:
            trainer = Trainer(data_collator=DefaultDataCollator(), **shared)
        trainer.log = lambda logs, start_time=None: trainer.state.log_history.append(dict(logs))
        trainer.train()
        if is_ours:
            print_steps(Path(folder) / "journal.jsonl")
    step_s = median(times.seconds[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
    return Row(method, "ok", step_s, sum(lengths) / step_s, peak, trainer.state.log_history[0]["loss"])


def print_steps(journal: Path) -> None:
    """Prints what was predicted for each step of our training, and what happened."""
    steps = [each for each in map(json.loads, journal.read_text().splitlines()) if each["kind"] == "step"]
    for each in steps:
        seconds = "nothing" if each["predicted_s"] is None else f"{each['predicted_s']:.2f}"
        measured, predicted = each["bytes"], each["predicted_bytes"]
        sizes = (
            f"{name} {measured[kind] / 2**30:.1f} GiB, predicted {predicted[kind] / 2**30:.1f}"
            for kind, name in (("device_peak", "peak"), ("host", "host"))
        )
        print(
            f"step {each['step']}: {each['layout']}, {each['measured_s']:.2f} s, predicted {seconds}; {'; '.join(sizes)}",
            flush=True,
        )


def build(job: Job) -> Any:
    """The model with its adapters, with the same weights in every process."""
    spec = TOY if job.is_toy else named_model(job.model, 2)
    spec = replace(spec, num_layers=min(job.layers, spec.num_layers), tied_embeddings=False, qk_norms=False)
    set_seed(0)
    is_cuda = torch.cuda.is_available()
    with torch.device("cuda" if is_cuda else "cpu"):
        dtype = torch.bfloat16 if is_cuda else torch.float32
        model = AutoModelForCausalLM.from_config(shaped_config(spec), dtype=dtype, attn_implementation="sdpa")
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    model.enable_input_require_grads()
    return model


if __name__ == "__main__":
    end_with_children()
    sys.exit(main())

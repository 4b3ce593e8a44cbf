"""Tokens per second of whole trainings with LoRA on one GPU, documents of mixed lengths: `Trainer` against `LongContextTrainer`.

    python recipes/bench/gpu/trainings.py [--layers 16] [--limit 32768] [--tokens 196608] [--methods WORD ...] [--json FILE]

The model has random weights in the named model's shapes, in bf16, with LoRA of rank 16 on all projections: a Llama, or for names
such as `qwen3.5-9b`, whose layers carry states, the class itself. A step trains documents of random tokens whose lengths are
log-normal (median 4,900), the longest of `--limit` tokens; `--limit` and `--tokens` of 131072 make one document. `Trainer` takes
one document after the other (`gradient_accumulation_steps`), so that it has no padding and no mask. Methods:

    HF checkpointing              transformers' gradient checkpointing
    HF checkpointing, Liger       the same with Liger's fused norms, MLP and loss
    TRL selective, Liger          keeps attention, as TRL's `selective` does, and recomputes all else
    HF checkpointing, fla         a model with states and flash-linear-attention, which transformers uses where it is installed
    DeepSpeed offload, Liger      checkpoints in pinned host memory, by DeepSpeed's copies on a stream of their own
    DeepSpeed ALST, Liger         the same with tiled MLPs: what ALST is on one GPU, for long documents
    unsloth                       16-bit LoRA, one document after the other, its checkpoints in host memory
    unsloth, packed               its own packing: documents share rows of `--limit` tokens
    unsloth, packed, on device    the same with checkpoints on the device, which is faster where they fit
    hf_longctx                    our trainer with its defaults: norms, MLP and rotary embedding by torch.compile
    hf_longctx, not compiled      the same with `compile_layers=False`
    hf_longctx, Liger             the same with Liger's norms and MLP
    hf_longctx, fp8               the same with frozen matrices in fp8, which rounds weights and what they multiply

Every method runs in a process of its own, and says with which settings and packages; what is not installed, or needs a GPU, is
skipped. The first step does not count; losses of the first step, with the same weights, must
agree to 1 %, since bf16 rounds in other places. Columns: median seconds of a step with its optimizer step, tokens per second,
peak memory of the device, and the loss of the first step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import peft
import tokenizers
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DefaultDataCollator,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.calibration.calibrate import set_layers, shaped_config
from hf_longctx.plan.cost.catalog import named_config, named_model
from hf_longctx.recipes.bench.cpu.skewed import StepTimes
from hf_longctx.recipes.bench.gpu.cases import TOY
from hf_longctx.recipes.bench.gpu.rows import append_row, end_with_children, is_wanted

METHODS = {
    "HF checkpointing": "gradient_checkpointing, a document at a time",
    "HF checkpointing, Liger": "gradient_checkpointing, use_liger_kernel, a document at a time",
    "TRL selective, Liger": "selective activation checkpointing, use_liger_kernel, a document at a time",
    "HF checkpointing, fla": "gradient_checkpointing, kernels of flash-linear-attention, a document at a time",
    "DeepSpeed offload, Liger": "get_checkpoint_hidden_states_offloading_ctx_manager, use_liger_kernel, a document at a time",
    "DeepSpeed ALST, Liger": "the same, TiledMLP with ceil(tokens / hidden size) tiles",
    "unsloth": "load_in_16bit, use_gradient_checkpointing='unsloth', a document at a time",
    "unsloth, packed": "load_in_16bit, use_gradient_checkpointing='unsloth', SFTConfig(packing=True, max_length=limit)",
    "unsloth, packed, on device": "load_in_16bit, use_gradient_checkpointing=True, SFTConfig(packing=True, max_length=limit)",
    "hf_longctx": "defaults",
    "hf_longctx, not compiled": "compile_layers=False",
    "hf_longctx, Liger": "use_liger_kernel",
    "hf_longctx, fp8": "frozen_weights='fp8'",
}
# module that a method needs, by a word of its name; those that need a GPU
NEEDS = {"liger": "liger_kernel", "trl": "trl", "fla": "fla", "deepspeed": "deepspeed", "unsloth": "unsloth"}
ON_GPUS = ("deepspeed", "unsloth", "fla")
# distributions whose versions a comparison depends on
PACKAGES = (
    *(
        "torch",
        "triton",
        "transformers",
        "peft",
        "trl",
        "liger-kernel",
        "unsloth",
        "unsloth-zoo",
        "xformers",
        "flash-attn",
        "deepspeed",
    ),
    *("flash-linear-attention", "fla-core", "flash-qla", "causal-conv1d", "mamba-ssm"),
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
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

    @property
    def has_states(self) -> bool:
        """Whether layers of the model carry a state along the sequence."""
        return not self.is_toy and not named_model(self.model, 2).states.is_empty

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
    parser.add_argument("--steps", type=int, default=Job.steps, help="steps that count (default: 2); 0: the first step counts")
    parser.add_argument(
        "--methods", nargs="+", default=[], metavar="WORD", help="methods of this name, or with such a word in it"
    )
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
        f"{len(lengths)} documents of {lengths[0]:,} to {lengths[-1]:,} tokens, {sum(lengths):,} in all, {job.layers} layers of "
        f"{job.model}, LoRA of rank 16\npackages: {versions()}\n"
        f"{'method':26s} {'step s':>8s} {'tokens/s':>10s} {'peak GiB':>9s} {'loss':>9s}",
        flush=True,
    )
    rows = []
    for method in METHODS:
        if is_chosen(method, options.methods):
            rows.append(train(job, method) if job.is_toy else in_process(method, arguments or sys.argv[1:]))
            print(f"{rows[-1]}\n    {METHODS[method]}", flush=True)
            if options.json is not None:
                append_row(options.json, {**asdict(job), **asdict(rows[-1]), "settings": METHODS[method], "packages": versions()})
    losses = [row.loss for row in rows if row.state == "ok"]
    if losses and max(losses) - min(losses) > TOLERANCE * max(losses):
        print(f"losses differ by more than {TOLERANCE:.0%}: the methods do not compute the same thing")
        return 1
    return 0


def is_chosen(method: str, words: Sequence[str]) -> bool:
    """Whether a word is the method's name, or a part of it and no other method's name."""
    parts = [word for word in words if word not in METHODS]
    return method in words or ((not words or bool(parts)) and is_wanted(method, parts))


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
    words = [__file__, *arguments, "--run", method]
    # it must be imported before transformers and trl, which it changes
    first = ["-c", f"import unsloth, runpy, sys; sys.argv = {words!r}; runpy.run_path({__file__!r}, run_name='__main__')"]
    is_patched = method.startswith("unsloth") and importlib.util.find_spec("unsloth") is not None
    environment = {**os.environ, "UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, *(first if is_patched else words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    printed = done.stdout.splitlines()
    # lines in which our trainer describes itself and its plans, and those of settings that a rival may have changed
    for line in printed:
        if line.startswith(("attention:", "self-test", "step ", "unsloth:")):
            print(f"    {line}")
    line = next((line for line in printed if line.startswith(MARK)), None)
    if line is None:
        return Row(method, f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return Row(**json.loads(line.removeprefix(MARK)))


def train(job: Job, method: str, times: DeviceTimes | None = None) -> Row:
    """Trains with one method, from the same weights. times: watches the steps."""
    words = [word for word in NEEDS if word in method.lower()]
    if missing := [NEEDS[word] for word in words if not importlib.util.find_spec(NEEDS[word])]:
        return Row(method, f"skipped: {missing[0]} is not installed")
    if not torch.cuda.is_available() and any(word in words for word in ON_GPUS):
        return Row(method, "skipped: it needs a GPU")
    if "fla" in words and not job.has_states:
        return Row(method, "skipped: no layer of the model carries states")
    try:
        if method.startswith("unsloth"):
            return _train_unsloth(job, method, times or DeviceTimes())
        return _train(job, method, times or DeviceTimes())
    except torch.OutOfMemoryError:
        return Row(method, "out of memory")


def versions() -> str:
    """Versions of the installed packages that decide how fast a method is."""
    found = {name: next((each.version for each in importlib.metadata.distributions(name=name)), "") for name in PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def token_rows(job: Job) -> list[list[int]]:
    """The documents of a step, as tokens."""
    generator = np.random.default_rng(2)
    return [generator.integers(0, 250, length).tolist() for length in job.lengths()]


class TiledMLPs:
    """MLPs of a model in DeepSpeed's tiles, as many as ALST makes of a document."""

    def __init__(self, model: Any) -> None:
        tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
        for module in model.modules():
            if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                run = type(module).forward
                module.forward = partial(self._forward, tiled, run, module)

    @staticmethod
    def _forward(tiled: Any, run: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
        # parameters are only named for ZeRO, which is not used
        result: torch.Tensor = tiled.apply(run, module, x, math.ceil(x.shape[1] / x.shape[2]), [])
        return result


def offloading(kind: type[Trainer]) -> type[Trainer]:
    """A trainer whose checkpoints DeepSpeed moves to the host; forward and backward run in one context of its manager."""
    module = importlib.import_module("deepspeed.runtime.activation_checkpointing.offload_activations")
    manager = module.get_checkpoint_hidden_states_offloading_ctx_manager()

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with manager:
            return kind.training_step(self, *args, **kwargs)

    return type(f"Offloading{kind.__name__}", (kind,), {"training_step": training_step})


def _train_unsloth(job: Job, method: str, times: DeviceTimes) -> Row:
    """Trains with unsloth's own loader, adapters, checkpointing and packing, from the same base weights."""
    trl, kind = importlib.import_module("trl"), importlib.import_module("unsloth").FastLanguageModel
    rows, checkpointing = token_rows(job), True if "on device" in method else "unsloth"
    data = datasets.Dataset.from_dict({"input_ids": rows})
    is_packed = "packed" in method
    # rows of a step, which is one epoch
    num_rows = len(trl.pack_dataset(data, job.limit)) if is_packed else len(rows)
    with tempfile.TemporaryDirectory() as folder:
        save_base(job, folder)
        model, tokenizer = kind.from_pretrained(
            folder,
            max_seq_length=job.limit,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            load_in_16bit=True,
            use_gradient_checkpointing=checkpointing,
            fix_tokenizer=False,
        )
        model = kind.get_peft_model(
            model,
            r=16,
            lora_alpha=32,
            lora_dropout=0.0,
            bias="none",
            target_modules=PROJECTIONS,
            use_gradient_checkpointing=checkpointing,
            random_state=0,
        )
        args = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=num_rows,
            num_train_epochs=job.steps + 1,
            max_length=job.limit,
            packing=is_packed,
            train_sampling_strategy="sequential",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = trl.SFTTrainer(model=model, processing_class=tokenizer, args=args, train_dataset=data, callbacks=[times])
        # it leaves packing out, with a warning, where it does not support it
        packing, found_rows = trainer.args.packing, len(trainer.train_dataset)
        print(f"unsloth: packing={packing}, padding_free={trainer.args.padding_free}, {found_rows} rows of {len(rows)} documents")
        if (packing, found_rows) != (is_packed, num_rows):
            return Row(method, f"failed: packing={packing} with {found_rows} rows, but {is_packed} with {num_rows} was asked for")
        trainer.train()
    step_s = median(times.seconds[1:] or times.seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Row(method, "ok", step_s, sum(map(len, rows)) / step_s, peak, trainer.state.log_history[0]["loss"])


def save_base(job: Job, folder: str) -> None:
    """Writes the base model, and a tokenizer that no text is given to, to a folder; frees the model."""
    model = build(job).unload()
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    ).save_pretrained(folder)


def _train(job: Job, method: str, times: DeviceTimes) -> Row:
    is_cuda, is_ours, is_fp8 = torch.cuda.is_available(), method.startswith("hf_longctx"), method.endswith("fp8")
    rows = token_rows(job)
    # every step trains the same documents
    data = datasets.Dataset.from_dict({"input_ids": rows * (job.steps + 1), "labels": rows * (job.steps + 1)})
    model = build(job)
    checkpointing: dict[str, Any] = {}
    if "ALST" in method:
        TiledMLPs(model)
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
            # products in fp8 are made in bf16 on the CPU, too
            bf16=is_cuda or is_fp8,
            use_cpu=not is_cuda,
            optim="adamw_torch_fused" if is_cuda else "adamw_torch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **checkpointing,
        )
        shared = {"model": model, "args": args, "train_dataset": data, "callbacks": [times]}
        if is_ours:
            config = LongContextConfig(
                timeline_steps=0,
                compile_layers=False if "not compiled" in method else None,
                frozen_weights="fp8" if is_fp8 else "unchanged",
            )
            trainer: Trainer = LongContextTrainer(longctx_config=config, **shared)
        else:
            kind = offloading(Trainer) if "DeepSpeed" in method else Trainer
            trainer = kind(data_collator=DefaultDataCollator(), **shared)
        trainer.log = lambda logs, start_time=None: trainer.state.log_history.append(dict(logs))
        trainer.train()
        if is_ours:
            print_steps(Path(folder) / "journal.jsonl")
    step_s = median(times.seconds[1:] or times.seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
    return Row(method, "ok", step_s, sum(map(len, rows)) / step_s, peak, trainer.state.log_history[0]["loss"])


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


def config_of(job: Job) -> PretrainedConfig:
    """The config of the named model, with the job's number of layers; of a Llama with its shapes if no layer carries states."""
    spec = TOY if job.is_toy else named_model(job.model, 2)
    num_layers = min(job.layers, spec.num_layers)
    if not job.has_states:
        return shaped_config(replace(spec, num_layers=num_layers, tied_embeddings=False, qk_norms=False))
    config = AutoConfig.for_model(**(named_config(job.model) or {}))
    set_layers(config, num_layers)
    return config


def build(job: Job) -> Any:
    """The model with its adapters, with the same weights in every process."""
    config = config_of(job)
    set_seed(0)
    is_cuda = torch.cuda.is_available()
    with torch.device("cuda" if is_cuda else "cpu"):
        dtype = torch.bfloat16 if is_cuda else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    model.enable_input_require_grads()
    return model


if __name__ == "__main__":
    end_with_children()
    sys.exit(main())

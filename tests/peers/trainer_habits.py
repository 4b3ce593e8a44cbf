"""Runs what people habitually do with transformers' `Trainer`, once with it and once with `LongContextTrainer`, and compares.

    python tests/peers/trainer_habits.py                      # all habits on one rank, then those on two
    python tests/peers/trainer_habits.py --only resume -v     # those whose names have this word, with what differs
    python tests/peers/trainer_habits.py --page docs/reference/peers-suites.md      # the table of the last outcomes

A habit is one function: it trains, evaluates, saves or asks on a tiny Llama (CPU, fp32, no network) with defaults of
`LongContextConfig`, and returns what its user would look at: the log, weights, files, metrics, events. Everything that stock
returns must be there with ours, with equal numbers; seconds are left out, and ours may add keys, files and lines. The outcome is
"passed", "refused" (ours raised `ValueError` before any work; the message stands in the table), "differs" or "error". A habit on
which stock itself fails is no habit. `--page` writes the table into the documentation. transformers' own tests were read for what
they check; none of them is here.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.models.chats import word_tokenizer
from helpers.trainers.stock_runs import quiet_config

from hf_longctx import LongContextTrainer

_WORLD = int(os.environ.get("WORLD_SIZE", 1))
PAGE_MARKS = ("<!-- habits: begin -->", "<!-- habits: end -->")
# numbers of a log that are seconds, or follow from them
_SECONDS = ("_runtime", "_per_second", "step_time", "_preparation_time", "_mem_", "total_flos")
_EVENTS = (
    "init_end", "train_begin", "epoch_begin", "step_begin", "pre_optimizer_step", "optimizer_step", "substep_end", "step_end",
    "epoch_end", "evaluate", "predict", "save", "log", "train_end",
)  # fmt: skip
Habit = Callable[["Bench"], Any]
# name -> (group, habit, on how many ranks it runs)
HABITS: dict[str, tuple[str, Habit, tuple[int, ...]]] = {}


def habit(group: str, ranks: tuple[int, ...] = (1,)) -> Callable[[Habit], Habit]:
    def add(function: Habit) -> Habit:
        HABITS[function.__name__] = (group, function, ranks)
        return function

    return add


class Bench:
    """Makes trainers of one class, in a folder of its own."""

    def __init__(self, is_ours: bool, folder: Path) -> None:
        self.is_ours, self.folder = is_ours, folder
        self.stock = Trainer

    def arguments(self, **changes: Any) -> TrainingArguments:
        settings: dict[str, Any] = {
            "output_dir": str(self.folder / "out"), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
            "report_to": "none", "disable_tqdm": True, "seed": 7,
        }  # fmt: skip
        if _WORLD > 1 and "per_device_train_batch_size" not in changes:
            changes["per_device_train_batch_size"] = 2
        return TrainingArguments(**(settings | changes))

    def trainer(self, args: Any = None, base: Any = None, model: Any = "tiny", **given: Any) -> Any:
        """A trainer; `args`: arguments, or their changes. base: a class of the user made from a trainer's class."""
        if not isinstance(args, TrainingArguments):
            args = self.arguments(**(args or {}))
        cls: Any = LongContextTrainer if self.is_ours else self.stock
        cls = cls if base is None else base(cls)
        if isinstance(model, str):
            model = tiny()
        ours = {"longctx_config": quiet_config()} if self.is_ours else {}
        given.setdefault("train_dataset", rows())
        return cls(model=model, args=args, **given, **ours)

    def trained(self, args: Any = None, resume: Any = None, **given: Any) -> dict[str, Any]:
        """State that a whole training leaves behind."""
        trainer = self.trainer(args, **given)
        output = trainer.train(resume_from_checkpoint=resume)
        return self.record(trainer) | {"output": (output.global_step, output.training_loss)}

    def record(self, trainer: Any) -> dict[str, Any]:
        state = trainer.state
        return {
            "log": state.log_history,
            "weights": {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()},
            "state": {
                name: getattr(state, name) for name in ("global_step", "epoch", "max_steps", "best_metric", "best_global_step")
            },
            "files": self.files(),
        }

    def files(self, folder: str = "out") -> set[str]:
        root = self.folder / folder
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "runs" not in path.parts}


def tiny(kind: Any = LlamaForCausalLM, **changes: Any) -> Any:
    shape = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
        "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "sdpa",
    }  # fmt: skip
    # the order of rows depends on the seed of the process
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(LlamaConfig(**(shape | changes)))


def rows(count: int = 12, length: int = 12, seed: int = 0, **columns: Any) -> datasets.Dataset:
    """Rows of one length, which the default collator can stack."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 64, (length,), generator=generator).tolist() for _ in range(count)]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids} | {name: make(ids) for name, make in columns.items()})


def ragged(count: int = 12, seed: int = 1, labels: bool = True) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 64, (4 + 3 * (i % 5),), generator=generator).tolist() for i in range(count)]
    return datasets.Dataset.from_dict({"input_ids": ids} | ({"labels": ids} if labels else {}))


def documents(count: int = 12, num_labels: int = 2) -> datasets.Dataset:
    made = rows(count)
    return made.remove_columns("labels").add_column("label", [sum(ids) % num_labels for ids in made["input_ids"]])


def classifier(**changes: Any) -> Any:
    return tiny(LlamaForSequenceClassification, num_labels=2, **changes)


# --- arguments alone: a training with each of them

_EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
_SAVED = {"save_strategy": "steps", "save_steps": 2}
_EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
_BEST = {**_EVALUATED, **_SAVED, "load_best_model_at_end": True}
_LARGEST = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
_BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
_NOT_REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
_RESTARTS = {"lr_scheduler_kwargs": {"num_cycles": 2}}
_LEAST = {"lr_scheduler_kwargs": {"min_lr": 1e-3}}
_DECAY = {"lr_scheduler_kwargs": {"num_decay_steps": 2}}
# name -> (group, arguments, ranks)
ARGUMENTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "defaults": ("log", {}, (1, 2)),
    "log_every_3_steps": ("log", {"logging_steps": 3}, (1, 2)),
    "log_by_ratio": ("log", {"logging_steps": 0.5}, (1,)),
    "log_by_epoch": ("log", {"logging_strategy": "epoch", **_EPOCHS}, (1, 2)),
    "log_nothing": ("log", {"logging_strategy": "no"}, (1,)),
    "log_first_step": ("log", {"logging_first_step": True, "logging_steps": 4}, (1,)),
    "log_nan_filter_off": ("log", {"logging_nan_inf_filter": False}, (1,)),
    "log_level": ("log", {"log_level": "error", "log_level_replica": "error"}, (1,)),
    "log_on_each_node": ("log", {"log_on_each_node": False}, (1, 2)),
    "run_name": ("log", {"run_name": "mine"}, (1,)),
    "memory_metrics": ("log", {"skip_memory_metrics": False}, (1,)),
    "tokens_seen": ("log", {"include_num_input_tokens_seen": True}, (1, 2)),
    "tokens_seen_all": ("log", {"include_num_input_tokens_seen": "all"}, (1,)),
    "tokens_seen_non_padding": ("log", {"include_num_input_tokens_seen": "non_padding"}, (1,)),
    "progress_bar": ("log", {"disable_tqdm": False}, (1,)),
    "epochs": ("steps", {**_EPOCHS}, (1, 2)),
    "epochs_and_a_half": ("steps", {"num_train_epochs": 1.5, "max_steps": -1}, (1, 2)),
    "max_steps_before_epochs": ("steps", {"num_train_epochs": 9, "max_steps": 4}, (1,)),
    "another_seed": ("steps", {"seed": 11}, (1, 2)),
    "data_seed": ("steps", {"data_seed": 5}, (1, 2)),
    "accumulate": ("steps", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, (1, 2)),
    "accumulate_remainder": ("steps", {"gradient_accumulation_steps": 5, "per_device_train_batch_size": 1, **_EPOCHS}, (1,)),
    "batch_larger_than_set": ("steps", {"per_device_train_batch_size": 64, "max_steps": 2}, (1,)),
    "batch_not_dividing_set": ("steps", {"per_device_train_batch_size": 5, **_EPOCHS}, (1,)),
    "drop_last": ("steps", {"per_device_train_batch_size": 5, "dataloader_drop_last": True, **_EPOCHS}, (1,)),
    "sequential_rows": ("steps", {"train_sampling_strategy": "sequential"}, (1, 2)),
    "empty_cache_steps": ("steps", {"torch_empty_cache_steps": 2}, (1,)),
    "loss_per_rank_tokens": ("steps", {"average_tokens_across_devices": False}, (1,)),
    "full_determinism": ("steps", {"full_determinism": True}, (1,)),
    "find_batch_size": ("steps", {"auto_find_batch_size": True}, (1,)),
    "ddp_flags": ("steps", {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": False}, (1, 2)),
    "do_train_flags": ("steps", {"do_train": True, "do_eval": True}, (1,)),
    "gradient_checkpointing": ("memory", {"gradient_checkpointing": True}, (1, 2)),
    "checkpointing_reentrant": ("memory", {"gradient_checkpointing": True, **_NOT_REENTRANT}, (1,)),
    "compile_eager": ("memory", {"torch_compile": True, "torch_compile_backend": "eager"}, (1,)),
    "bf16": ("memory", {"bf16": True}, (1,)),
    "tf32_off": ("memory", {"tf32": None}, (1,)),
    "label_smoothing": ("loss", {"label_smoothing_factor": 0.1}, (1, 2)),
    "two_workers": ("loader", {"dataloader_num_workers": 2}, (1,)),
    "persistent_workers": ("loader", {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, **_EPOCHS}, (1,)),
    "prefetch": ("loader", {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3}, (1,)),
    "pin_memory_off": ("loader", {"dataloader_pin_memory": False}, (1,)),
    "split_batches": ("loader", {"accelerator_config": {"split_batches": True}}, (1,)),
    "dispatch_batches": ("loader", {"accelerator_config": {"dispatch_batches": False, "even_batches": True}}, (1,)),
    "seedable_sampler": ("loader", {"accelerator_config": {"use_seedable_sampler": True}}, (1,)),
    "non_blocking": ("loader", {"accelerator_config": {"non_blocking": True}}, (1,)),
    "keep_unused_columns": ("loader", {"remove_unused_columns": False}, (1,)),
    "label_names": ("loader", {"label_names": ["labels"]}, (1,)),
    "eval_by_steps": ("evaluation", _EVALUATED, (1, 2)),
    "eval_by_epoch": ("evaluation", {"eval_strategy": "epoch", **_EPOCHS}, (1, 2)),
    "eval_by_ratio": ("evaluation", {"eval_strategy": "steps", "eval_steps": 0.34}, (1,)),
    "eval_on_start": ("evaluation", {**_EVALUATED, "eval_on_start": True}, (1, 2)),
    "eval_delay": ("evaluation", {**_EVALUATED, "eval_delay": 3}, (1,)),
    "eval_follows_logging": ("evaluation", {"eval_strategy": "steps", "logging_steps": 3}, (1,)),
    "eval_batch_not_dividing": ("evaluation", {**_EVALUATED, "per_device_eval_batch_size": 5}, (1,)),
    "eval_accumulation": ("evaluation", {**_EVALUATED, "eval_accumulation_steps": 1}, (1,)),
    "eval_loss_only": ("evaluation", {**_EVALUATED, "prediction_loss_only": True}, (1,)),
    "eval_gather_object": ("evaluation", {**_EVALUATED, "eval_use_gather_object": True}, (1,)),
    "eval_no_concat": ("evaluation", {**_EVALUATED, "eval_do_concat_batches": False}, (1,)),
    "bf16_full_eval": ("evaluation", {"bf16_full_eval": True}, (1,)),
    "best_model_by_loss": ("evaluation", _BEST, (1, 2)),
    "best_model_by_name": ("evaluation", {**_BEST, **_LARGEST}, (1,)),
    "best_model_by_epoch": ("evaluation", {**_BY_EPOCH, **_EPOCHS}, (1,)),
    "save_best": ("saving", {**_EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss"}, (1,)),
    "save_by_steps": ("saving", _SAVED, (1, 2)),
    "save_by_ratio": ("saving", {"save_strategy": "steps", "save_steps": 0.5}, (1,)),
    "save_by_epoch": ("saving", {"save_strategy": "epoch", **_EPOCHS}, (1, 2)),
    "save_limit": ("saving", {**_SAVED, "save_total_limit": 1}, (1, 2)),
    "save_limit_with_best": ("saving", {**_BEST, **_LARGEST, "save_total_limit": 1}, (1,)),
    "save_only_model": ("saving", {**_SAVED, "save_only_model": True}, (1, 2)),
    "save_on_each_node": ("saving", {**_SAVED, "save_on_each_node": True}, (1,)),
    "save_in_the_middle_of_epochs": ("saving", {**_SAVED, **_EPOCHS}, (1,)),
    "hub_id_alone": ("saving", {"hub_model_id": "me/mine", "hub_private_repo": True, "hub_strategy": "end"}, (1,)),
    "adafactor": ("optimizer", {"optim": "adafactor"}, (1,)),
    "sgd": ("optimizer", {"optim": "sgd"}, (1, 2)),
    "adagrad": ("optimizer", {"optim": "adagrad"}, (1,)),
    "rmsprop": ("optimizer", {"optim": "rmsprop"}, (1,)),
    "fused_adamw": ("optimizer", {"optim": "adamw_torch_fused"}, (1,)),
    "optimizer_arguments": ("optimizer", {"optim": "sgd", "optim_args": "momentum=0.5"}, (1,)),
    "betas_and_epsilon": ("optimizer", {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}, (1,)),
    "weight_decay": ("optimizer", {"weight_decay": 0.3}, (1, 2)),
    "clipping": ("optimizer", {"max_grad_norm": 0.1}, (1, 2)),
    "no_clipping": ("optimizer", {"max_grad_norm": 0.0}, (1,)),
    "warmup_steps": ("schedule", {"warmup_steps": 3}, (1, 2)),
    "warmup_by_ratio": ("schedule", {"warmup_steps": 0.5}, (1,)),
    "cosine": ("schedule", {"lr_scheduler_type": "cosine", "warmup_steps": 1}, (1, 2)),
    "cosine_restarts": ("schedule", {"lr_scheduler_type": "cosine_with_restarts", **_RESTARTS}, (1,)),
    "cosine_with_least": ("schedule", {"lr_scheduler_type": "cosine_with_min_lr", **_LEAST}, (1,)),
    "polynomial": ("schedule", {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}, (1,)),
    "constant": ("schedule", {"lr_scheduler_type": "constant"}, (1,)),
    "constant_with_warmup": ("schedule", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, (1,)),
    "inverse_sqrt": ("schedule", {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2}, (1,)),
    "warmup_stable_decay": ("schedule", {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 1, **_DECAY}, (1,)),
    "on_a_plateau": ("schedule", {"lr_scheduler_type": "reduce_lr_on_plateau", **_EVALUATED, **_LARGEST}, (1,)),
}  # fmt: skip


def _add_arguments() -> None:
    for name, (group, changes, ranks) in ARGUMENTS.items():

        def run(bench: Bench, changes: dict[str, Any] = changes) -> Any:
            needs_eval = any(key.startswith("eval") or key == "bf16_full_eval" for key in changes)
            sets = {"eval_dataset": rows(8, seed=3)} if needs_eval else {}
            made = rows(13) if "epochs" in str(changes) and "per_device_train_batch_size" in changes else rows()
            trainer = bench.trainer(dict(changes), train_dataset=made, **sets)
            output = trainer.train()
            found = bench.record(trainer) | {"output": (output.global_step, output.training_loss)}
            if sets:
                found["evaluation"] = trainer.evaluate()
            if name_of(changes) == "include_num_input_tokens_seen":
                found["tokens"] = trainer.state.num_input_tokens_seen
            return found

        HABITS[name] = (group, run, ranks)


def name_of(changes: dict[str, Any]) -> str:
    return next(iter(changes), "")


_add_arguments()


# --- log


@habit("log")
def metrics_are_written(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 2}, eval_dataset=rows(4))
    metrics = trainer.train().metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    return {"metrics": metrics, "files": bench.files()}


@habit("log")
def own_entries_of_the_log(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 2})
    trainer.train()
    trainer.log({"mine": 3.0})
    return trainer.state.log_history


@habit("log")
def log_override(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
                super().log({**logs, "mine": 1.0}, start_time)

        return Mine

    return bench.trained({"max_steps": 2}, base=base)


@habit("log", ranks=(1, 2))
def numbers_of_a_trainer(bench: Bench) -> Any:
    trainer = bench.trainer()
    trainer.train()
    return {
        "parameters": trainer.get_num_trainable_parameters(),
        "rates": trainer.get_learning_rates(),
        "first": trainer.is_world_process_zero(),
        "local": trainer.is_local_process_zero(),
    }


@habit("log")
def table_of_callbacks(bench: Bench) -> Any:
    bars = bench.trainer({"disable_tqdm": False}).callback_handler.callbacks
    plain = bench.trainer({"disable_tqdm": True}).callback_handler.callbacks
    return [any(isinstance(each, kind) for each in bars) for kind in (ProgressCallback,)], [
        any(isinstance(each, kind) for each in plain) for kind in (PrinterCallback,)
    ]


# --- rows and loaders


def _set_habit(name: str, make: Callable[[], Any], ranks: tuple[int, ...] = (1,), **arguments: Any) -> None:
    HABITS[name] = ("rows", lambda bench: bench.trained(dict(arguments), train_dataset=make()), ranks)


class Listed(torch.utils.data.Dataset):
    """A user's own dataset."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: torch.tensor(value) for name, value in self.made[number].items()}


class Flowing(torch.utils.data.IterableDataset):
    """A user's own stream."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from rows()


_set_habit("rows_of_a_torch_dataset", lambda: Listed(rows()), (1, 2))
_set_habit("rows_of_a_list", lambda: list(rows()))
_set_habit("rows_as_tensors", lambda: rows().with_format("torch"), (1, 2))
_set_habit("rows_as_arrays", lambda: rows().with_format("numpy"))
_set_habit("rows_with_a_mask", lambda: rows(attention_mask=lambda ids: [[1] * len(each) for each in ids]))
_set_habit("rows_with_positions", lambda: rows(position_ids=lambda ids: [list(range(len(each))) for each in ids]))
_set_habit("rows_with_a_text", lambda: rows(text=lambda ids: ["words"] * len(ids)))
_set_habit("rows_of_a_shuffled_set", lambda: rows().shuffle(seed=3), (1, 2))
_set_habit("rows_of_a_selection", lambda: rows(20).select(range(3, 15)))
_set_habit("rows_of_a_split", lambda: rows(20).train_test_split(8, seed=0)["train"])
_set_habit("rows_of_joined_sets", lambda: datasets.concatenate_datasets([rows(6), rows(6, seed=4)]))
_set_habit("rows_of_a_torch_subset", lambda: torch.utils.data.Subset(Listed(rows(20)), range(12)))
_set_habit("rows_of_joined_torch_sets", lambda: torch.utils.data.ConcatDataset([Listed(rows(6)), Listed(rows(6, seed=4))]))
_set_habit("one_row", lambda: rows(1), max_steps=2)
_set_habit("rows_of_a_stream", lambda: rows().to_iterable_dataset(), (1,))
_set_habit("rows_of_a_torch_stream", lambda: Flowing(), (1,))


@habit("rows", ranks=(1, 2))
def prompts_without_labels(bench: Bench) -> Any:
    masked = rows().map(lambda row: {"labels": [-100] * 5 + row["labels"][5:]})
    return bench.trained(train_dataset=masked)


@habit("rows")
def rows_changed_on_the_fly(bench: Bench) -> Any:
    made = rows()
    made.set_transform(lambda batch: {name: [each[:10] for each in batch[name]] for name in ("input_ids", "labels")})
    return bench.trained(train_dataset=made)


@habit("rows")
def rows_grouped_by_length(bench: Bench) -> Any:
    """Plans balance lengths themselves, and say so: what counts is how long the training is."""
    given = {} if bench.is_ours else {"data_collator": _own_collator}
    found = bench.trained({"train_sampling_strategy": "group_by_length"}, train_dataset=ragged(), **given)
    return found["state"], len(found["log"])


@habit("rows")
def no_rows(bench: Bench) -> Any:
    trainer = bench.trainer(train_dataset=None, eval_dataset=rows(4))
    return trainer.evaluate()


@habit("rows")
def no_train_rows_is_an_error(bench: Bench) -> Any:
    return _raises(lambda: bench.trainer(train_dataset=None).train())


def _raises(run: Callable[[], Any]) -> bool:
    try:
        run()
    except Exception:
        return True
    return False


@habit("loader", ranks=(1, 2))
def default_collator(bench: Bench) -> Any:
    return bench.trained(data_collator=default_data_collator)


@habit("loader", ranks=(1, 2))
def collator_of_language_models(bench: Bench) -> Any:
    collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
    return bench.trained(train_dataset=ragged(labels=False), data_collator=collator)


@habit("loader")
def collator_of_pairs(bench: Bench) -> Any:
    return bench.trained(train_dataset=ragged(), data_collator=DataCollatorForSeq2Seq(word_tokenizer(), padding=True))


@habit("loader", ranks=(1, 2))
def collator_that_flattens(bench: Bench) -> Any:
    return bench.trained(train_dataset=ragged(), data_collator=DataCollatorWithFlattening())


def _own_collator(made: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in made)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([list(row[name]) + [value] * (longest - len(row[name])) for row in made])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in made])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


@habit("loader", ranks=(1, 2))
def own_collator(bench: Bench) -> Any:
    return bench.trained(train_dataset=ragged(), data_collator=_own_collator)


@habit("loader")
def own_train_loader(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def get_train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=default_data_collator)

        return Mine

    return bench.trained(base=base)


@habit("loader")
def own_eval_loader(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
                return torch.utils.data.DataLoader(self.eval_dataset, batch_size=2, collate_fn=default_data_collator)

        return Mine

    trainer = bench.trainer(eval_dataset=rows(4), base=base)
    return trainer.evaluate()


@habit("loader")
def own_sampler(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

        return Mine

    return bench.trained(base=base)


@habit("loader", ranks=(1, 2))
def lengths_of_loaders(bench: Bench) -> Any:
    trainer = bench.trainer(eval_dataset=rows(8))
    return len(trainer.get_train_dataloader()), trainer.num_examples(trainer.get_train_dataloader())


@habit("loader")
def loader_of_another_set(bench: Bench) -> Any:
    trainer = bench.trainer(eval_dataset=rows(8))
    loader = trainer.get_eval_dataloader(rows(6))
    return len(loader.dataset)


@habit("loader")
def loader_of_a_test_set(bench: Bench) -> Any:
    return len(bench.trainer().get_test_dataloader(rows(6)).dataset)


# --- evaluation


# on two ranks accelerate prepares a model that was evaluated first without DDP, and stock then trains each rank alone
@habit("evaluation")
def evaluate_first(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 3}, eval_dataset=rows(8, seed=3))
    before = trainer.evaluate()
    trainer.train()
    return {"before": before, "after": trainer.evaluate(), **bench.record(trainer)}


@habit("evaluation")
def evaluate_another_set(bench: Bench) -> Any:
    trainer = bench.trainer(eval_dataset=rows(8, seed=3))
    return trainer.evaluate(rows(6, seed=5), metric_key_prefix="other")


@habit("evaluation", ranks=(1, 2))
def evaluate_several_sets(bench: Bench) -> Any:
    # stock counts rows twice where they do not fill the batches of all ranks
    sets = {"a": rows(8, seed=3), "b": rows(16, seed=5)}
    trainer = bench.trainer(dict(_EVALUATED), eval_dataset=sets)
    trainer.train()
    return {**bench.record(trainer), "all": trainer.evaluate(), "b": trainer.evaluate("b")}


@habit("evaluation")
def best_of_several_sets(bench: Bench) -> Any:
    sets = {"a": rows(4, seed=3), "b": rows(6, seed=5)}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_b_loss"}
    return bench.trained({**_EVALUATED, **_SAVED, **best}, eval_dataset=sets)


@habit("evaluation")
def evaluate_given_sets(bench: Bench) -> Any:
    return bench.trainer(eval_dataset=rows(4)).evaluate({"x": rows(4, seed=3), "y": rows(6, seed=5)})


@habit("evaluation")
def evaluate_ragged(bench: Bench) -> Any:
    # one batch, since stock takes the mean over batches of their means
    given: dict[str, Any] = {} if bench.is_ours else {"data_collator": _own_collator}
    sets = {"train_dataset": ragged(), "eval_dataset": ragged(7, seed=2)}
    return bench.trainer({"per_device_eval_batch_size": 8}, **sets, **given).evaluate()


@habit("evaluation")
def accuracy_of_logits(bench: Bench) -> Any:
    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        likeliest = prediction.predictions.argmax(-1)[:, :-1]
        return {"accuracy": float((likeliest == prediction.label_ids[:, 1:]).mean())}

    return bench.trainer(eval_dataset=rows(8), compute_metrics=accuracy).evaluate()


@habit("evaluation")
def logits_made_small(bench: Bench) -> Any:
    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    def small(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(-1)

    return bench.trainer(eval_dataset=rows(8), compute_metrics=accuracy, preprocess_logits_for_metrics=small).evaluate()


def _of_documents(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


# on two ranks stock doubles the loss of a classifier
@habit("evaluation")
def accuracy_of_documents(bench: Bench) -> Any:
    sets = {"train_dataset": documents(), "eval_dataset": documents(7)}
    trainer = bench.trainer(dict(_EVALUATED), model=classifier(), compute_metrics=_of_documents, **sets)
    trainer.train()
    return bench.record(trainer) | {"evaluation": trainer.evaluate()}


@habit("evaluation", ranks=(1, 2))
def predicted_documents(bench: Bench) -> Any:
    output = bench.trainer(model=classifier(), train_dataset=documents()).predict(documents(7))
    is_alone = _WORLD == 1
    return output.predictions, output.label_ids, output.metrics if is_alone else {}


@habit("evaluation")
def documents_with_small_logits(bench: Bench) -> Any:
    sets = {"train_dataset": documents(), "eval_dataset": documents(7)}
    more = {"compute_metrics": lambda found: {"mean": float(np.mean(found.predictions))}}
    return bench.trainer(model=classifier(), preprocess_logits_for_metrics=lambda x, _: x.softmax(-1), **more, **sets).evaluate()


@habit("evaluation")
def documents_batch_by_batch(bench: Bench) -> Any:
    found: list[float] = []

    def accuracy(prediction: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        found.append(float(torch.as_tensor(prediction.predictions).argmax(-1).eq(torch.as_tensor(prediction.label_ids)).sum()))
        return {"accuracy": sum(found) / 7} if compute_result else {}

    sets = {"train_dataset": documents(), "eval_dataset": documents(7)}
    return bench.trainer({"batch_eval_metrics": True}, model=classifier(), compute_metrics=accuracy, **sets).evaluate()


@habit("evaluation")
def best_model_by_accuracy(bench: Bench) -> Any:
    sets = {"train_dataset": documents(), "eval_dataset": documents(7)}
    best = {**_EVALUATED, **_SAVED, "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_total_limit": 2}
    return bench.trained(best, model=classifier(), compute_metrics=_of_documents, **sets)


@habit("evaluation")
def predict_metrics(bench: Bench) -> Any:
    trainer = bench.trainer({"prediction_loss_only": True})
    return trainer.predict(rows(6)).metrics, trainer.predict(rows(6), metric_key_prefix="held").metrics


@habit("evaluation")
def metrics_with_inputs(bench: Bench) -> Any:
    def count(prediction: EvalPrediction) -> dict[str, float]:
        return {"tokens": float(np.asarray(prediction.inputs).size)}

    return bench.trainer({"include_for_metrics": ["inputs"]}, eval_dataset=rows(8), compute_metrics=count).evaluate()


@habit("evaluation")
def own_evaluate(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                return {**super().evaluate(*args, **kwargs), "eval_mine": 1.0}

        return Mine

    return bench.trained(dict(_EVALUATED), eval_dataset=rows(8), base=base)


@habit("evaluation")
def own_prediction_step(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
                return super().prediction_step(*args, **kwargs)

        return Mine

    return bench.trainer(eval_dataset=rows(8), base=base).evaluate()


# --- saving and resuming


def _again(bench: Bench, first: dict[str, Any], then: dict[str, Any], place: str = "checkpoint-3", **given: Any) -> Any:
    """A training that stopped, and another that goes on from one of its checkpoints."""
    before = bench.trained({**_SAVED, "save_steps": 3, **first}, **given)
    after = bench.trained({**_SAVED, "save_steps": 3, **first, **then}, str(bench.folder / "out" / place), **given)
    return before, after


def _resume_habit(name: str, ranks: tuple[int, ...] = (1,), place: str = "checkpoint-3", first: Any = None, **then: Any) -> None:
    HABITS[name] = ("resume", lambda bench: _again(bench, first or {}, then, place), ranks)


_resume_habit("resume", (1, 2))
_resume_habit("resume_further", (1,), max_steps=9)
_resume_habit("resume_in_the_second_epoch", (1, 2), "checkpoint-6", {"max_steps": -1, "num_train_epochs": 3})
_resume_habit("resume_with_accumulation", (1, 2), first={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1})
_resume_habit("resume_without_skipping", (1,), ignore_data_skip=True)
_resume_habit("resume_with_another_batch", (1,), per_device_train_batch_size=6)
_resume_habit("resume_at_the_end", (1,), "checkpoint-6")
_resume_habit("resume_with_cosine", (1,), first={"lr_scheduler_type": "cosine", "warmup_steps": 2})
_resume_habit("resume_sgd", (1,), first={"optim": "sgd", "optim_args": "momentum=0.9"})
_resume_habit("resume_adafactor", (1,), first={"optim": "adafactor"})
_resume_habit("resume_plateau", (1,), first={"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4})


@habit("resume", ranks=(1, 2))
def resume_newest(bench: Bench) -> Any:
    bench.trained({**_SAVED, "max_steps": 4})
    return bench.trained({**_SAVED, "max_steps": 6}, True)


@habit("resume")
def resume_by_helper(bench: Bench) -> Any:
    bench.trained({**_SAVED, "max_steps": 4})
    place = get_last_checkpoint(str(bench.folder / "out"))
    return Path(str(place)).name, bench.trained({**_SAVED, "max_steps": 6}, place)


@habit("resume")
def resume_from_nowhere_is_an_error(bench: Bench) -> Any:
    return _raises(lambda: bench.trained(resume=str(bench.folder / "nowhere")))


@habit("resume")
def resume_with_frozen_weights(bench: Bench) -> Any:
    def frozen() -> Any:
        model = tiny()
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    bench.trained({**_SAVED, "save_steps": 3}, model=frozen())
    return bench.trained({**_SAVED, "save_steps": 3}, str(bench.folder / "out" / "checkpoint-3"), model=frozen())


@habit("resume")
def resume_from_the_other_trainer(bench: Bench) -> Any:
    """Stock goes on from ours, and ours from stock."""
    other = Bench(not bench.is_ours, bench.folder)
    other.trained({**_SAVED, "save_steps": 3})
    return bench.trained({**_SAVED, "save_steps": 3}, str(bench.folder / "out" / "checkpoint-3"))["weights"]


@habit("resume")
def resume_from_weights_alone(bench: Bench) -> Any:
    bench.trained({**_SAVED, "save_only_model": True, "save_steps": 3})
    loaded = LlamaForCausalLM.from_pretrained(bench.folder / "out" / "checkpoint-3")
    return bench.trained(model=loaded)


@habit("resume")
def stop_early_and_resume(bench: Bench) -> Any:
    stopping = {**_EVALUATED, **_SAVED, "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5}
    sets = {"eval_dataset": rows(8, seed=3)}
    first = bench.trained({**stopping, "max_steps": 20}, callbacks=[EarlyStoppingCallback(2)], **sets)
    return first


@habit("saving", ranks=(1, 2))
def saved_model_loads(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 3})
    trainer.train()
    trainer.save_model()
    # one rank writes
    trainer.accelerator.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(bench.folder / "out")
    return {name: weight.detach() for name, weight in loaded.named_parameters()}, bench.files()


@habit("saving")
def saved_elsewhere(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 1})
    trainer.train()
    trainer.save_model(str(bench.folder / "elsewhere"))
    return bench.files("elsewhere")


@habit("saving")
def saved_tokenizer(bench: Bench) -> Any:
    bench.trained({"max_steps": 2, **_SAVED}, processing_class=word_tokenizer())
    return bench.files()


@habit("saving")
def saved_state(bench: Bench) -> Any:
    bench.trained(dict(_SAVED))
    state = json.loads((bench.folder / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    return {name: value for name, value in state.items() if name not in ("stateful_callbacks", "total_flos")}


@habit("saving")
def saved_arguments(bench: Bench) -> Any:
    bench.trained({**_SAVED, "weight_decay": 0.25})
    saved = torch.load(bench.folder / "out" / "checkpoint-2" / "training_args.bin", weights_only=False)
    return {name: value for name, value in saved.to_dict().items() if name not in ("output_dir", "logging_dir")}


@habit("saving")
def saved_by_a_method_of_mine(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
                super().save_model(output_dir, _internal_call)
                Path(output_dir or self.args.output_dir).joinpath("mine.txt").write_text("saved")

        return Mine

    bench.trained(dict(_SAVED), base=base)
    return bench.files()


@habit("saving")
def push_without_a_network_is_an_error(bench: Bench) -> Any:
    return _raises(lambda: bench.trained({"push_to_hub": True, "hub_token": "none", "max_steps": 1}))


@habit("saving")
def model_card(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 1})
    trainer.train()
    trainer.create_model_card(model_name="mine", language="en")
    return "README.md" in bench.files()


@habit("saving")
def best_checkpoint_is_named(bench: Bench) -> Any:
    trainer = bench.trainer({**_EVALUATED, **_SAVED, "load_best_model_at_end": True}, eval_dataset=rows(8, seed=3))
    trainer.train()
    return Path(trainer.state.best_model_checkpoint).name


# --- optimizers


@habit("optimizer", ranks=(1, 2))
def own_optimizer(bench: Bench) -> Any:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return bench.trained(model=model, optimizers=(optimizer, None))


@habit("optimizer")
def own_optimizer_and_schedule(bench: Bench) -> Any:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return bench.trained(model=model, optimizers=(optimizer, schedule))


@habit("optimizer")
def optimizer_by_class(bench: Bench) -> Any:
    return bench.trained(optimizer_cls_and_kwargs=(torch.optim.NAdam, {"lr": 0.02}))


@habit("optimizer")
def optimizer_of_a_subclass(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def create_optimizer(self, *args: Any) -> Any:
                groups = [{"params": [p for n, p in self.model.named_parameters() if "embed" in n], "lr": 1e-3}]
                groups += [{"params": [p for n, p in self.model.named_parameters() if "embed" not in n], "lr": 1e-2}]
                self.optimizer = torch.optim.AdamW(groups)
                return self.optimizer

        return Mine

    return bench.trained(base=base)


@habit("schedule")
def schedule_of_a_subclass(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer or self.optimizer, 0.8)
                self._created_lr_scheduler = True
                return self.lr_scheduler

        return Mine

    return bench.trained(base=base)


@habit("optimizer")
def decay_of_named_weights(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def get_decay_parameter_names(self, model: Any) -> list[str]:
                return [name for name in super().get_decay_parameter_names(model) if "mlp" in name]

        return Mine

    return bench.trained({"weight_decay": 0.5}, base=base)


@habit("optimizer")
def groups_of_the_optimizer(bench: Bench) -> Any:
    trainer = bench.trainer({"weight_decay": 0.1})
    trainer.create_optimizer_and_scheduler(10)
    return [(len(group["params"]), group["weight_decay"], group["lr"]) for group in trainer.optimizer.param_groups]


@habit("optimizer")
def frozen_layers(bench: Bench) -> Any:
    model = tiny()
    model.model.layers[0].requires_grad_(False)
    return bench.trained(model=model)


@habit("optimizer")
def optimizer_made_by_hand(bench: Bench) -> Any:
    trainer = bench.trainer()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
    trainer.train()
    return bench.record(trainer)


# --- losses and models


@habit("loss")
def loss_function_of_mine(bench: Bench) -> Any:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits, targets = outputs["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        return 2 * total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())

    return bench.trained(compute_loss_func=loss)


@habit("loss")
def loss_of_a_subclass(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        return Mine

    return bench.trained(base=base)


@habit("loss")
def step_of_a_subclass(bench: Bench) -> Any:
    def base(cls: Any) -> Any:
        class Mine(cls):
            count = 0

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                self.count += 1
                return super().training_step(*args, **kwargs)

        return Mine

    trainer = bench.trainer(base=base)
    trainer.train()
    return trainer.count, bench.record(trainer)


@habit("loss")
def noise_on_embeddings(bench: Bench) -> Any:
    """Ours draws noise by token, so it is another draw: the training is compared by its length, and the model after it."""
    found = bench.trained({"neftune_noise_alpha": 0.1})
    return found["state"], len(found["log"]), sorted(found["weights"])


@habit("loss")
def documents_train(bench: Bench) -> Any:
    return bench.trained(model=classifier(), train_dataset=documents())


@habit("loss")
def documents_with_several_labels(bench: Bench) -> Any:
    model = tiny(LlamaForSequenceClassification, num_labels=3, problem_type="multi_label_classification")
    made = documents().map(lambda row: {"label": [float(sum(row["input_ids"]) % each == 0) for each in (2, 3, 5)]})
    return bench.trained(model=model, train_dataset=made.cast_column("label", datasets.List(datasets.Value("float32"))))


@habit("loss")
def documents_with_a_number(bench: Bench) -> Any:
    model = tiny(LlamaForSequenceClassification, num_labels=1)
    made = documents().map(lambda row: {"label": sum(row["input_ids"]) / 400}, features=None)
    return bench.trained(model=model, train_dataset=made.cast_column("label", datasets.Value("float32")))


@habit("loss")
def tokens_are_classified(bench: Bench) -> Any:
    model = tiny(LlamaForTokenClassification, num_labels=2, classifier_dropout=0.0)
    made = rows().map(lambda row: {"labels": [token % 2 for token in row["input_ids"]]})
    return bench.trained(model=model, train_dataset=made)


@habit("models", ranks=(1, 2))
def model_by_function(bench: Bench) -> Any:
    return bench.trained(model=None, model_init=lambda: tiny())


@habit("models")
def searched_settings(bench: Bench) -> Any:
    trainer = bench.trainer({**_EVALUATED, "max_steps": 3}, model=None, model_init=lambda: tiny(), eval_dataset=rows(8, seed=3))
    import optuna

    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)},
        direction="minimize",
        n_trials=2,
        sampler=optuna.samplers.RandomSampler(seed=3),
    )
    return best.objective, best.hyperparameters


@habit("models")
def searched_batches(bench: Bench) -> Any:
    # no seed: in a trial of ours it orders the rows too, as in a new trainer
    trainer = bench.trainer({**_EVALUATED, "max_steps": 2}, model=None, model_init=lambda trial: tiny(), eval_dataset=rows(4))
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"per_device_train_batch_size": trial.suggest_int("batch", 3, 3)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=1,
    )
    return best.objective


@habit("models", ranks=(1, 2))
def adapters(bench: Bench) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(tiny(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    return bench.trained({**_SAVED}, model=model)


@habit("models")
def adapters_resumed(bench: Bench) -> Any:
    from peft import LoraConfig, get_peft_model

    def made() -> Any:
        torch.manual_seed(1)
        return get_peft_model(tiny(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))

    bench.trained({**_SAVED, "save_steps": 3}, model=made())
    return bench.trained({**_SAVED, "save_steps": 3}, str(bench.folder / "out" / "checkpoint-3"), model=made())


@habit("models")
def tied_embeddings(bench: Bench) -> Any:
    return bench.trained(dict(_SAVED), model=tiny(tie_word_embeddings=True))


@habit("models")
def larger_vocabulary(bench: Bench) -> Any:
    model = tiny()
    torch.manual_seed(2)
    model.resize_token_embeddings(80)
    return bench.trained(model=model)


@habit("models")
def eager_attention(bench: Bench) -> Any:
    return bench.trained(model=tiny(attn_implementation="eager"))


@habit("models")
def weights_in_bf16(bench: Bench) -> Any:
    tiny().save_pretrained(bench.folder / "whole")
    loaded = LlamaForCausalLM.from_pretrained(bench.folder / "whole", dtype=torch.bfloat16)
    found = bench.trained({"max_steps": 1, "learning_rate": 0.0}, model=loaded)
    return {"loss": round(found["log"][0]["loss"], 1)}


@habit("models")
def model_with_a_cache(bench: Bench) -> Any:
    return bench.trained(model=tiny(use_cache=True))


@habit("models")
def model_after_training(bench: Bench) -> Any:
    trainer = bench.trainer()
    trainer.train()
    model = trainer.model.eval()
    ids = torch.tensor([rows(1)["input_ids"][0]])
    return model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)


@habit("models")
def hooks_on_a_layer(bench: Bench) -> Any:
    model = tiny()
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 0.5)
    return bench.trained(model=model)


@habit("models", ranks=(1, 2))
def train_twice(bench: Bench) -> Any:
    trainer = bench.trainer({"max_steps": 3})
    trainer.train()
    trainer.train()
    return bench.record(trainer)


@habit("models")
def another_trainer_on_the_model(bench: Bench) -> Any:
    model = tiny()
    bench.trained({"max_steps": 3}, model=model)
    return bench.trained({"max_steps": 3}, model=model, train_dataset=rows(seed=9))


@habit("models")
def default_arguments(bench: Bench) -> Any:
    with chdir(bench.folder):
        cls: Any = LongContextTrainer if bench.is_ours else Trainer
        return cls(model=tiny(), train_dataset=rows()).args.output_dir


@habit("models")
def no_model_is_an_error(bench: Bench) -> Any:
    return _raises(lambda: bench.trainer(model=None))


@habit("models")
def two_models_are_an_error(bench: Bench) -> Any:
    return _raises(lambda: bench.trainer(model_init=lambda: tiny()))


# --- callbacks


class Events(TrainerCallback):
    """Writes down every event, as a user's callback sees it."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _event(name: str) -> Any:
    def on_event(self: Events, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"{name} {state.global_step}")

    return on_event


for _name in _EVENTS:
    setattr(Events, f"on_{_name}", _event(_name))


def _events_habit(name: str, ranks: tuple[int, ...] = (1,), **arguments: Any) -> None:
    def run(bench: Bench) -> Any:
        seen = Events()
        trainer = bench.trainer(dict(arguments), eval_dataset=rows(8, seed=3), callbacks=[seen])
        trainer.train()
        trainer.evaluate()
        return seen.events

    HABITS[name] = ("callbacks", run, ranks)


_events_habit("events", (1, 2))
_events_habit("events_of_epochs", (1, 2), max_steps=-1, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch")
_events_habit("events_of_steps", (1,), logging_steps=3, **_EVALUATED, **_SAVED)
_events_habit("events_of_accumulation", (1, 2), gradient_accumulation_steps=2, per_device_train_batch_size=1)


class Flags(TrainerCallback):
    """Sets flags of `control` at events."""

    def __init__(self, **flags: tuple[str, int]) -> None:
        self.flags = flags

    def _at(self, event: str, state: Any, control: Any) -> Any:
        for flag, (where, step) in self.flags.items():
            if where == event and state.global_step == step:
                setattr(control, f"should_{flag}", True)
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self._at("step_end", state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self._at("epoch_end", state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self._at("evaluate", state, control)


def _flags_habit(name: str, flags: dict[str, tuple[str, int]], ranks: tuple[int, ...] = (1,), **arguments: Any) -> None:
    def run(bench: Bench) -> Any:
        seen = Events()
        sets = {"eval_dataset": rows(8, seed=3)}
        return bench.trained(dict(arguments), callbacks=[Flags(**flags), seen], **sets), seen.events

    HABITS[name] = ("callbacks", run, ranks)


_flags_habit("callback_stops", {"training_stop": ("step_end", 3)}, (1, 2))
_flags_habit("callback_stops_after_an_epoch", {"training_stop": ("epoch_end", 3)}, (1,), max_steps=-1, num_train_epochs=3)
_flags_habit("callback_stops_at_an_evaluation", {"training_stop": ("evaluate", 4)}, (1, 2), **_EVALUATED)
_flags_habit("callback_ends_an_epoch", {"epoch_stop": ("step_end", 2)}, (1,))
_flags_habit("callback_saves", {"save": ("step_end", 2)}, (1, 2))
_flags_habit("callback_evaluates", {"evaluate": ("step_end", 3)}, (1, 2))
_flags_habit("callback_logs", {"log": ("step_end", 2)}, (1,), logging_steps=100)
_flags_habit("callback_saves_and_stops", {"save": ("step_end", 3), "training_stop": ("step_end", 3)}, (1, 2))


@habit("callbacks")
def callbacks_come_and_go(bench: Bench) -> Any:
    trainer = bench.trainer()
    trainer.add_callback(Events)
    seen = Events()
    trainer.add_callback(seen)
    trainer.remove_callback(seen)
    popped = trainer.pop_callback(Events)
    return isinstance(popped, Events), any(isinstance(each, Events) for each in trainer.callback_handler.callbacks)


@habit("callbacks")
def what_callbacks_get(bench: Bench) -> Any:
    found: dict[str, Any] = {}

    class Keywords(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.update({name: type(value).__name__ for name, value in kwargs.items() if name in ("model", "processing_class")})
            found["there"] = sorted(name for name, value in kwargs.items() if value is not None)
            found["rate"] = kwargs["optimizer"].param_groups[0]["lr"]

    bench.trained(callbacks=[Keywords], processing_class=word_tokenizer(), eval_dataset=rows(4), args={"max_steps": 2})
    return found


@habit("callbacks")
def logs_that_callbacks_get(bench: Bench) -> Any:
    found: list[Any] = []

    class Logs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            found.append(dict(logs))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            found.append(dict(metrics))

    bench.trained(dict(_EVALUATED), callbacks=[Logs()], eval_dataset=rows(8))
    return found


@habit("callbacks")
def gradients_that_callbacks_see(bench: Bench) -> Any:
    found: list[Any] = []

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found.append({name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None})

    bench.trained({"max_steps": 2, "max_grad_norm": 0.0}, callbacks=[Gradients()])
    return found


class Counting(TrainerCallback, ExportableState):
    """A callback whose state is saved."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}


@habit("callbacks")
def state_of_a_callback(bench: Bench) -> Any:
    args = {**_SAVED, "save_steps": 3, "restore_callback_states_from_checkpoint": True}
    bench.trained(args, callbacks=[Counting()])
    trainer = bench.trainer(args, callbacks=[Counting()])
    trainer.train(resume_from_checkpoint=str(bench.folder / "out" / "checkpoint-3"))
    return [each.count for each in trainer.callback_handler.callbacks if isinstance(each, Counting)]


@habit("callbacks")
def early_stopping_by_threshold(bench: Bench) -> Any:
    args = {**_EVALUATED, **_SAVED, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 12}
    return bench.trained(args, callbacks=[EarlyStoppingCallback(1, 10.0)], eval_dataset=rows(8, seed=3))


@habit("callbacks")
def early_stopping_without_metric_is_an_error(bench: Bench) -> Any:
    return _raises(lambda: bench.trained(callbacks=[EarlyStoppingCallback()]))


@habit("callbacks")
def weights_changed_by_a_callback(bench: Bench) -> Any:
    class Halving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            with torch.no_grad():
                model.lm_head.weight.mul_(0.5)

    return bench.trained(callbacks=[Halving()])


@habit("callbacks")
def rate_changed_by_a_callback(bench: Bench) -> Any:
    class Rate(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            optimizer.param_groups[0]["lr"] = 1e-3

    return bench.trained(callbacks=[Rate()])


@habit("callbacks")
def model_that_a_callback_uses(bench: Bench) -> Any:
    found: list[Any] = []

    class Sampling(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            was_training = model.training
            with torch.no_grad():
                model.eval()
                found.append(model(torch.tensor([rows(1)["input_ids"][0]])).logits[0, -1])
            model.train(was_training)

    return bench.trained({"max_steps": 3}, callbacks=[Sampling()]), found


# --- comparing and reporting


def difference(stock: Any, ours: Any, where: str = "") -> str:
    """The first place in which ours lacks something of stock's, or has another value; empty if there is none."""
    if isinstance(stock, Tensor | np.ndarray):
        left, right = (torch.as_tensor(each).detach().double() for each in (stock, ours))
        if left.shape != right.shape:
            return f"{where}: shape {tuple(left.shape)} became {tuple(right.shape)}"
        error = float((left - right).abs().max()) if left.numel() else 0.0
        return f"{where}: off by {error:.1e}" if error > 2e-4 or error != error else ""
    if isinstance(stock, dict):
        for name, value in stock.items():
            if any(part in str(name) for part in _SECONDS):
                continue
            if not isinstance(ours, dict) or name not in ours:
                return f"{where}: {name!r} is missing"
            if found := difference(value, ours[name], f"{where}.{name}"):
                return found
        return ""
    if isinstance(stock, set):
        missing = sorted(stock - ours)
        return f"{where}: lacks {missing[:4]}" if missing else ""
    if isinstance(stock, list | tuple):
        if len(stock) != len(ours):
            return f"{where}: {len(stock)} entries became {len(ours)}: {_brief(stock)} became {_brief(ours)}"
        return next(
            filter(None, (difference(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(stock, ours, strict=True)))), ""
        )
    if isinstance(stock, float) and isinstance(ours, float | int):
        is_near = abs(stock - ours) <= 2e-5 * max(1.0, abs(stock)) or (stock != stock and ours != ours)
        return "" if is_near else f"{where}: {stock!r} became {ours!r}"
    return "" if stock == ours else f"{where}: {_brief(stock)} became {_brief(ours)}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."


def outcome(name: str, folder: Path) -> dict[str, str]:
    """Runs a habit with both trainers."""
    group, run, _ = HABITS[name]
    found: dict[str, str] = {"name": name, "group": group}
    results = []
    for is_ours in (False, True):
        own = folder / name / ("ours" if is_ours else "stock")
        own.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        np.random.seed(0)
        try:
            # trainers print their logs
            with redirect_stdout(io.StringIO()):
                results.append(run(Bench(is_ours, own)))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            is_refused = is_ours and isinstance(error, ValueError) and ";" in text
            kind = "refused" if is_refused else "error" if is_ours else "no habit"
            return found | {"outcome": kind, "message": text, "trace": "" if is_refused else traceback.format_exc()}
    differs = difference(*results)
    return found | {"outcome": "differs" if differs else "passed", "message": differs}


def run_all(names: list[str], out: Path, is_loud: bool) -> None:
    """Runs habits in this process, one after another, and writes a line for each."""
    is_first = int(os.environ.get("RANK", 0)) == 0
    with tempfile.TemporaryDirectory() as own:
        folder = Path(os.environ.get("HABITS_FOLDER", own))
        for name in names:
            begun = time.perf_counter()
            found = outcome(name, folder)
            if is_first:
                with out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                seconds = time.perf_counter() - begun
                print(f"{found['outcome']:9}{name} ({seconds:.1f} s) {found['message'][:400]}", flush=True)
                if is_loud and found.get("trace"):
                    print(found["trace"], flush=True)


def chosen(num_ranks: int, words: list[str]) -> list[str]:
    return [name for name, (_, _, ranks) in HABITS.items() if num_ranks in ranks and any(word in name for word in words)]


def table(found: list[dict[str, str]], found_on_two: list[dict[str, str]]) -> str:
    """The section of the documentation about the habits."""
    groups = list(dict.fromkeys(each["group"] for each in found))
    lines = ["| what | passed | refused by name | of |", "|---|---|---|---|"]
    parts = [(group, [each for each in found if each["group"] == group]) for group in groups]
    for title, rows_of in [*parts, ("all, on one rank", found), ("on two ranks", found_on_two)]:
        counts = Counter(each["outcome"] for each in rows_of)
        lines.append(f"| {title} | {counts['passed']} | {counts['refused']} | {len(rows_of)} |")
    lines += ["", "Refused:", ""]
    for each in found + [e for e in found_on_two if e["name"] not in {f["name"] for f in found if f["outcome"] == "refused"}]:
        if each["outcome"] == "refused":
            lines.append(f"- `{each['name']}`: {reason(each['message'])}")
    others = [each for each in found + found_on_two if each["outcome"] not in ("passed", "refused")]
    lines += ["", "Nothing else." if not others else f"Neither: {', '.join(sorted({each['name'] for each in others}))}."]
    ran = {each["name"] for each in found}
    if waiting := [name for name in chosen(1, [""]) if name not in ran]:
        lines += ["", f"Not run for this table: {', '.join(f'`{name}`' for name in waiting)}."]
    return "\n".join(lines)


def reason(message: str) -> str:
    """A refusal's own words, with a link to the page of errors that lists it."""
    lines = [line.strip(" -") for line in message.removeprefix("ValueError: ").splitlines() if line.strip()]
    text = next((line for line in lines if ";" in line), lines[0])
    sys.path.append(str(Path(__file__).parents[2] / "docs" / "scripts"))
    from error_pages import SUBJECTS, error_page

    words = text.partition(";")[0].split()
    best = max(SUBJECTS, key=lambda subject: max(_shared(words, line) for line in error_page(subject).splitlines()))
    return f"{text.replace('|', ',')} ([{best}](../errors/index.md#{best}))"


def _shared(words: list[str], line: str) -> int:
    return sum(word in line for word in words) if line.startswith("####") else 0


def read(path: Path) -> list[dict[str, str]]:
    latest = {line["name"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    return [latest[name] for name in HABITS if name in latest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/peers"), help="folder for outcomes")
    parser.add_argument("--only", nargs="+", default=[""], help="run only habits whose names have one of these words")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="run only those on one rank, or on two")
    parser.add_argument("--page", type=Path, help="write the table to this page, from all outcomes in the folder")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    one, two = (options.out / f"habits-{num}.jsonl" for num in (1, 2))
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if "RANK" in os.environ:
        run_all(chosen(2, options.only), two, options.verbose)
        return 0
    if options.page is None or options.only != [""]:
        if options.ranks != 2:
            run_all(chosen(1, options.only), one, options.verbose)
        if options.ranks != 1 and chosen(2, options.only):
            with tempfile.TemporaryDirectory() as folder:
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *sys.argv]
                subprocess.run(launch, env=os.environ | {"HABITS_FOLDER": folder}, check=True)
    found, found_on_two = read(one), read(two)
    print(table(found, found_on_two))
    if options.page is not None:
        text = options.page.read_text()
        begin, end = (text.index(mark) for mark in PAGE_MARKS)
        options.page.write_text(f"{text[: begin + len(PAGE_MARKS[0])]}\n{table(found, found_on_two)}\n{text[end:]}")
    return int(any(each["outcome"] not in ("passed", "refused") for each in found + found_on_two))


if __name__ == "__main__":
    sys.exit(main())

"""Odd arguments of trainers: each draw trains, or is refused in words before any work; Python's own errors are listed.

python tests/soak/constructors.py --count 5000 --seed 0

A draw has a door (trainer, subclass, callback alone or attached, TRL's trainers if TRL is installed), a tiny model, an adapter, a
training and an evaluation set, `TrainingArguments`, a `LongContextConfig` and other arguments of the constructor, of which up to
three are odd. It builds the trainer and trains one step. `--only N` runs draw N alone and prints its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import io
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import numpy as np
import peft
import torch
import transformers
from helpers.models.chats import conversation, word_tokenizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainerMemoryTracker

from hf_longctx import LongContextCallback, LongContextConfig, LongContextMixin, LongContextTrainer

LONGEST_S = 120
# packages whose refusals are stock
_STOCK = ("transformers", "trl", "peft", "accelerate")
VOCAB_SIZE = 64
_LLAMA = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
ROWS = [
    {"input_ids": [(7 * row + n) % VOCAB_SIZE for n in range(length)]} for row, length in enumerate((3, 9, 40, 17, 5, 2, 31, 8))
]


class Rejected(Exception):
    """Raised if a draw cannot be built without this package: stock classes refuse its parts."""


def _model(name: str, **changes: Any) -> Any:
    """A tiny model; `name` is the beginning of its classes."""
    config_class = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**{**_LLAMA, **changes}))


def llama(**changes: Any) -> Any:
    return _model("Llama", **changes)


def _changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    """A function that makes a Llama and changes it in place."""

    def make() -> Any:
        model = llama()
        change(model)
        return model

    return make


def _own_forward(model: nn.Module, path: str) -> None:
    module = model.get_submodule(path)
    own = type(module).forward
    module.forward = MethodType(lambda self, *args, **kwargs: own(self, *args, **kwargs), module)


def _saved(model: Any) -> str:
    folder = tempfile.mkdtemp(prefix="longctx-model-")
    model.save_pretrained(folder)
    return folder


class _Plain(nn.Module):
    """A language model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, 8), nn.Linear(8, VOCAB_SIZE)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": logits.float().mean(), "logits": logits}


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen3": lambda: _model("Qwen3", head_dim=4),
    "gemma2": lambda: _model("Gemma2", head_dim=4, query_pre_attn_scalar=4),
    "tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=4)),
    "gpt_neox": lambda: _model("GPTNeoX", rotary_pct=1.0),
    "gpt_neox without rotary": lambda: _model("GPTNeoX", rotary_pct=0.0),
    "mixtral": lambda: _model("Mixtral", num_local_experts=4, **_EXPERTS),
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(64, 16, 4, 32, 2, num_heads=4)),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
    ),
    "classifier": lambda: transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**_LLAMA, num_labels=3, pad_token_id=0)
    ),
    "token classifier": lambda: transformers.LlamaForTokenClassification(transformers.LlamaConfig(**_LLAMA, num_labels=3)),
    "base": lambda: transformers.LlamaModel(transformers.LlamaConfig(**_LLAMA)),
    "plain": _Plain,
    "linear": lambda: nn.Linear(4, 4),
    "none": lambda: None,
    "name": lambda: "no-such/model",
    "empty name": lambda: "",
    "path": lambda: _saved(llama()),
    "path object": lambda: Path(_saved(llama())),
    "class": lambda: transformers.LlamaForCausalLM,
    "config": lambda: transformers.LlamaConfig(**_LLAMA),
    "number": lambda: 7,
    "dict": lambda: llama().state_dict(),
    "frozen": _changed(lambda model: model.requires_grad_(False)),
    "partly frozen": _changed(lambda model: model.model.embed_tokens.requires_grad_(False)),
    "bf16": lambda: llama().to(torch.bfloat16),
    "fp16": lambda: llama().to(torch.float16),
    "fp64": lambda: llama().to(torch.float64),
    "mixed": _changed(lambda model: model.model.layers[0].to(torch.bfloat16)),
    "meta": lambda: llama().to("meta"),
    "compiled": lambda: torch.compile(llama()),
    "parallel": lambda: nn.DataParallel(llama()),
    "eager": lambda: llama(attn_implementation="eager"),
    "flash": _changed(lambda model: setattr(model.config, "_attn_implementation_internal", "flash_attention_2")),
    "own attention": _changed(lambda model: setattr(model.config, "_attn_implementation_internal", "mine")),
    "caches": _changed(lambda model: setattr(model.config, "use_cache", True)),
    "checkpointed": _changed(lambda model: model.gradient_checkpointing_enable()),
    "own forward": _changed(lambda model: _own_forward(model, "")),
    "own layer": _changed(lambda model: _own_forward(model, "model.layers.0")),
    "own mlp": _changed(lambda model: _own_forward(model, "model.layers.1.mlp")),
    "own norm": _changed(lambda model: _own_forward(model, "model.norm")),
    "own head": _changed(lambda model: _own_forward(model, "lm_head")),
    "hooked": _changed(lambda model: model.model.layers[0].register_forward_hook(lambda *_: None)),
    "hooked weight": _changed(lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient)),
    "shared layers": _changed(lambda model: model.model.layers.__setitem__(1, model.model.layers[0])),
    "no layers": lambda: llama(num_hidden_layers=0),
    "one head": lambda: llama(num_attention_heads=1, num_key_value_heads=1),
    "dropout": lambda: llama(attention_dropout=0.5),
    "extra parameter": _changed(lambda model: model.register_parameter("extra", nn.Parameter(torch.zeros(3)))),
    "scalar parameter": _changed(lambda model: model.register_parameter("extra", nn.Parameter(torch.tensor(1.0)))),
    "resized": _changed(lambda model: model.resize_token_embeddings(70)),
    "nan": _changed(lambda model: model.lm_head.weight.data.fill_(float("nan"))),
    "inference": _changed(lambda model: model.eval()),
}


def _adapted(config: Callable[[], Any], **settings: Any) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(model, config(), **settings)


def _lora(**changes: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def _two_adapters(model: Any) -> Any:
    adapted = peft.get_peft_model(model, _lora()(), adapter_name="first")
    adapted.add_adapter("second", _lora(r=3)())
    return adapted


def _loaded_adapter(model: Any) -> Any:
    return peft.PeftModel.from_pretrained(model, _saved(peft.get_peft_model(llama(), _lora()())))


def _merged(model: Any) -> Any:
    adapted = peft.get_peft_model(model, _lora()())
    adapted.merge_adapter()
    return adapted


def _added(model: Any) -> Any:
    model.add_adapter(_lora()())
    return model


def _mixed_adapters(model: Any) -> Any:
    return peft.get_peft_model(model, _lora()(), mixed=True)


def _own_adapter_forward(model: Any) -> Any:
    adapted = peft.get_peft_model(model, _lora()())
    _own_forward(adapted, "base_model.model.model.layers.0.self_attn.q_proj")
    return adapted


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "lora": _adapted(_lora()),
    "named": _adapted(_lora(), adapter_name="mine"),
    "all linear": _adapted(_lora(target_modules="all-linear")),
    "dora": _adapted(_lora(use_dora=True)),
    "rslora": _adapted(_lora(use_rslora=True)),
    "saved head": _adapted(_lora(modules_to_save=["lm_head"])),
    "saved embeddings": _adapted(_lora(modules_to_save=["embed_tokens"])),
    "tied embeddings": _adapted(_lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "token indices": _adapted(_lora(trainable_token_indices=[1, 5])),
    "embeddings": _adapted(_lora(target_modules=["embed_tokens", "q_proj"])),
    "bias": _adapted(_lora(bias="all")),
    "lora dropout": _adapted(_lora(lora_dropout=0.3)),
    "parameters": _adapted(_lora(target_parameters=["q_proj.weight"], target_modules=None)),
    "two": _two_adapters,
    "loaded": _loaded_adapter,
    "merged": _merged,
    "added": _added,
    "mixed": _mixed_adapters,
    "own forward": _own_adapter_forward,
    "ia3": _adapted(lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": _adapted(lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"])),
    "oft": _adapted(lambda: peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj"])),
    "vera": _adapted(lambda: peft.VeraConfig(r=2, target_modules=["q_proj"])),
    "prompt": _adapted(lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
    "prefix": _adapted(lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
    "layer norms": _adapted(lambda: peft.LNTuningConfig(target_modules=["norm"])),
}


def _each(**columns: Callable[[list[int]], Any]) -> list[dict[str, Any]]:
    """The ordinary rows with other columns, made from their tokens."""
    return [{**row, **{name: make(row["input_ids"]) for name, make in columns.items()}} for row in ROWS]


def _with(value: Any, place: int = 2) -> list[Any]:
    """The ordinary rows with another one in a place."""
    return [*ROWS[:place], value, *ROWS[place + 1 :]]


class _Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, place: int) -> Any:
        return ROWS[place]


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


class _NoLength:
    def __getitem__(self, place: int) -> Any:
        return ROWS[place]


SETS: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "dataset": lambda: datasets.Dataset.from_list(ROWS),
    "torch": _Items,
    "stream": _Stream,
    "streamed": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "splits": lambda: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
    "dict of sets": lambda: {"a": ROWS, "b": ROWS[:3]},
    "list of sets": lambda: [datasets.Dataset.from_list(ROWS)] * 2,
    "concatenated": lambda: torch.utils.data.ConcatDataset([_Items(), _Items()]),
    "subset": lambda: torch.utils.data.Subset(_Items(), [1, 3, 5]),
    "loader": lambda: DataLoader(_Items()),
    "none": lambda: None,
    "empty": list,
    "empty set": lambda: datasets.Dataset.from_list([]),
    "empty stream": lambda: datasets.Dataset.from_list(ROWS).select([]).to_iterable_dataset(),
    "generator": lambda: (row for row in ROWS),
    "number": lambda: 5,
    "word": lambda: "no-such-set",
    "array": lambda: np.zeros((4, 5), dtype=np.int64),
    "tensor": lambda: torch.zeros((4, 5), dtype=torch.int64),
    "no length": _NoLength,
    "class": lambda: _Items,
    "tensors": lambda: [{"input_ids": torch.tensor(row["input_ids"])} for row in ROWS],
    "arrays": lambda: [{"input_ids": np.array(row["input_ids"])} for row in ROWS],
    "int32": lambda: [{"input_ids": np.array(row["input_ids"], dtype=np.int32)} for row in ROWS],
    "numpy format": lambda: datasets.Dataset.from_list(ROWS).with_format("numpy"),
    "torch format": lambda: datasets.Dataset.from_list(ROWS).with_format("torch"),
    "two dimensions": lambda: [{"input_ids": torch.tensor([row["input_ids"]])} for row in ROWS],
    "tuples": lambda: [{"input_ids": tuple(row["input_ids"])} for row in ROWS],
    "encodings": lambda: [transformers.BatchEncoding(row) for row in ROWS],
    "bare lists": lambda: [row["input_ids"] for row in ROWS],
    "texts": lambda: ["the cat", "sat"],
    "text": lambda: [{"text": "the cat sat"}] * 8,
    "messages": lambda: [{"messages": conversation("hello", "to you")}] * 8,
    "prompts": lambda: [{"prompt": "the cat", "completion": " sat"}] * 8,
    "preferences": lambda: [{"prompt": "the cat", "chosen": " sat", "rejected": " on"}] * 8,
    "row of none": lambda: _with(None),
    "row of number": lambda: _with(3),
    "row of list": lambda: _with([1, 2]),
    "empty row": lambda: _with({}),
    "empty ids": lambda: _with({"input_ids": []}),
    "all empty ids": lambda: [{"input_ids": []}] * 4,
    "one token": lambda: [{"input_ids": [1]}] * 4,
    "ids of none": lambda: _with({"input_ids": None}),
    "a none in ids": lambda: _with({"input_ids": [1, None, 2]}),
    "ids of text": lambda: _with({"input_ids": "the cat"}),
    "ids of texts": lambda: _with({"input_ids": ["the", "cat"]}),
    "ids of number": lambda: _with({"input_ids": 3}),
    "ids of dict": lambda: _with({"input_ids": {"a": 1}}),
    "ids of flags": lambda: _with({"input_ids": [True, False]}),
    "ids of floats": lambda: _with({"input_ids": [1.5, 2.5]}),
    "whole floats": lambda: _with({"input_ids": [1.0, 2.0]}),
    "ragged": lambda: _with({"input_ids": [[1, 2], [3]]}),
    "nested": lambda: _with({"input_ids": [[1, 2], [3, 4]]}),
    "negative": lambda: _with({"input_ids": [1, -1, 2]}),
    "too large": lambda: _with({"input_ids": [1, VOCAB_SIZE, 2]}),
    "huge": lambda: _with({"input_ids": [1, 2**70]}),
    "too long": lambda: _with({"input_ids": [1] * 100}),
    "other columns": lambda: _with({"tokens": [1, 2, 3]}),
    "labels": lambda: _each(labels=list),
    "masked labels": lambda: _each(labels=lambda ids: [-100] * len(ids)),
    "short labels": lambda: _each(labels=lambda ids: ids[1:]),
    "labels of none": lambda: _each(labels=lambda ids: None),
    "labels of text": lambda: _each(labels=lambda ids: "a"),
    "labels of floats": lambda: _each(labels=lambda ids: [0.5] * len(ids)),
    "classes": lambda: _each(labels=lambda ids: len(ids) % 3),
    "classes as label": lambda: _each(label=lambda ids: len(ids) % 3),
    "classes beyond": lambda: _each(labels=lambda ids: 9),
    "negative labels": lambda: _each(labels=lambda ids: [-5] * len(ids)),
    "large labels": lambda: _each(labels=lambda ids: [VOCAB_SIZE] * len(ids)),
    "masks": lambda: _each(attention_mask=lambda ids: [1] * len(ids)),
    "padded": lambda: [
        {"input_ids": row["input_ids"] + [0] * 3, "attention_mask": [1] * len(row["input_ids"]) + [0] * 3} for row in ROWS
    ],
    "holes": lambda: _each(attention_mask=lambda ids: [n % 2 for n in range(len(ids))]),
    "zero masks": lambda: _each(attention_mask=lambda ids: [0] * len(ids)),
    "short masks": lambda: _each(attention_mask=lambda ids: [1]),
    "masks of none": lambda: _each(attention_mask=lambda ids: None),
    "square masks": lambda: _each(attention_mask=lambda ids: [[1] * len(ids)] * len(ids)),
    "odd masks": lambda: _each(attention_mask=lambda ids: [2] * len(ids)),
    "positions": lambda: _each(position_ids=lambda ids: list(range(len(ids)))),
    "packed": lambda: _each(position_ids=lambda ids: [n % 2 for n in range(len(ids))]),
    "odd positions": lambda: _each(position_ids=lambda ids: [5] * len(ids)),
    "short positions": lambda: _each(position_ids=lambda ids: [0]),
    "text positions": lambda: _each(position_ids=lambda ids: "a"),
    "seq_lengths": lambda: _each(seq_lengths=lambda ids: [len(ids)]),
    "wrong seq_lengths": lambda: _each(seq_lengths=lambda ids: [1]),
    "negative seq_lengths": lambda: _each(seq_lengths=lambda ids: [-1, len(ids) + 1]),
    "completion_mask": lambda: _each(completion_mask=lambda ids: [0] + [1] * (len(ids) - 1)),
    "assistant_masks": lambda: _each(assistant_masks=lambda ids: [0] + [1] * (len(ids) - 1)),
    "weights": lambda: _each(token_weights=lambda ids: [0.5] * len(ids), loss_weights=lambda ids: [0.5] * len(ids)),
    "token types": lambda: _each(token_type_ids=lambda ids: [1] * len(ids)),
    "metadata": lambda: _each(id=len, source=lambda ids: "a", extra=lambda ids: {"a": [1]}),
    "pictures": lambda: _each(pixel_values=lambda ids: [[0.0]]),
    "numbered columns": lambda: _with({0: [1, 2], "input_ids": [1, 2]}),
}


@dataclass
class Draw:
    """Names of the parts that are given to a door."""

    door: str = "trainer"
    model: str = "llama"
    adapter: str = "none"
    train: str = "list"
    evaluation: str = "none"
    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    0.5,
    1e300,
    float("nan"),
    "",
    "x",
    "no",
    [],
    ["a"],
    {},
    {"a": 1},
    (1,),
    len,
    object(),
]
# arguments of `TrainingArguments`, with values that people write
ARGUMENTS: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 100],
    "gradient_accumulation_steps": [2, 3],
    "max_steps": [0, 2],
    "num_train_epochs": [0, 0.5, 2, -1],
    "learning_rate": [0.0, 1e30, -1.0, float("nan")],
    "warmup_steps": [1, 0.5, -3],
    "lr_scheduler_type": ["cosine", "linear", "cosine_with_min_lr", "reduce_lr_on_plateau", "polynomial"],
    "optim": [
        "sgd",
        "adafactor",
        "adamw_torch_fused",
        "adamw_8bit",
        "lomo",
        "galore_adamw",
        "rmsprop",
        "adagrad",
        "paged_adamw_8bit",
    ],
    "max_grad_norm": [0, 1e-9, -1.0, None],
    "weight_decay": [0.1, -1.0],
    "adam_beta1": [1.0, -1.0],
    "label_smoothing_factor": [0.1, 1.0, 2.0],
    "save_strategy": ["steps", "epoch", "best"],
    "eval_strategy": ["steps", "epoch"],
    "save_steps": [1, 0.5, 0],
    "eval_steps": [1, 0.5, 0],
    "logging_steps": [1, 0.5, 0],
    "logging_strategy": ["no", "epoch"],
    "save_total_limit": [0, 1],
    "save_only_model": [True],
    "load_best_model_at_end": [True],
    "metric_for_best_model": ["loss", "eval_a_loss", "accuracy"],
    "bf16": [True],
    "fp16": [True],
    "bf16_full_eval": [True],
    "fp16_full_eval": [True],
    "gradient_checkpointing": [True],
    "gradient_checkpointing_kwargs": [{"use_reentrant": True}, {"a": 1}],
    "dataloader_num_workers": [1],
    "dataloader_drop_last": [True],
    "dataloader_pin_memory": [False],
    "dataloader_persistent_workers": [True],
    "group_by_length": [True],
    "train_sampling_strategy": ["group_by_length", "sequential", "batch_rebalance", "random"],
    "length_column_name": ["n"],
    "remove_unused_columns": [False],
    "label_names": [["labels"], ["a"], []],
    "include_num_input_tokens_seen": ["all", "non_padding", True],
    "include_for_metrics": [["inputs"], ["loss"], ["a"]],
    "full_determinism": [True],
    "seed": [0, 2**32],
    "data_seed": [3],
    "neftune_noise_alpha": [5.0, -1.0],
    "torch_compile": [True],
    "auto_find_batch_size": [True],
    "prediction_loss_only": [True],
    "batch_eval_metrics": [True],
    "eval_on_start": [True],
    "eval_accumulation_steps": [1],
    "average_tokens_across_devices": [False],
    "use_liger_kernel": [True],
    "accelerator_config": [{"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}, {"a": 1}],
    "deepspeed": [{}, {"zero_optimization": {"stage": 3}}],
    "fsdp": [True, "full_shard"],
    "fsdp_config": [{}, {"a": 1}],
    "parallelism_config": [None],
    "ignore_data_skip": [True],
    "resume_from_checkpoint": ["nowhere"],
    "disable_tqdm": [False],
    "log_level": ["debug"],
    "logging_nan_inf_filter": [False],
    "report_to": [["tensorboard"], "all"],
    "run_name": ["a"],
    "torch_empty_cache_steps": [1],
    "skip_memory_metrics": [False],
    "lr_scheduler_kwargs": [{"a": 1}, {"num_cycles": 2}],
    "optim_args": ["a=1", "x"],
    "optim_target_modules": [["a"], "all-linear"],
    "liger_kernel_config": [{"a": True}],
    "restore_callback_states_from_checkpoint": [True],
    "use_cache": [True],
    "jit_mode_eval": [True],
    "ddp_timeout": [1, 0],
    "ddp_find_unused_parameters": [True],
    "enable_jit_checkpoint": [True],
}
CONFIG: dict[str, list[Any]] = {
    "max_length": [8, 10**6],
    "long_sequences": ["truncate", "split"],
    "tokens_per_rank": [1, 16, 10**9],
    "activations": ["keep"],
    "device_gib": [1e-4, 1e-3, 0.01, 1e6],
    "host_gib": [0.1, 1e9],
    "tile_tokens": [0, 1],
    "tokens_per_step": [1, 10**6],
    "lookahead_batches": [1, 3],
    "stream_readers": [2],
    "degrees": [[1], "all", [2]],
    "method": ["ring", "ulysses", "hybrid"],
    "stages": [2, "auto"],
    "interleave": [2],
    "lend_stages": [False],
    "compile_layers": [False],
    "parameters": ["sharded", "gathered_per_round", "gathered_per_step", "gathered_per_node"],
    "shard_ranks": [1, 2],
    "expert_ranks": [2],
    "solver": ["greedy", "lp", "milp", "static"],
    "static_degree": [1, 3],
    "calibration_steps": [0, 3],
    "async_save": [True],
    "fp32_gradients": [False],
    "fp32_master_weights": [True],
    "optimizer_states": ["host", "auto"],
    "layer_weights": ["host", "auto"],
    "self_test": [True],
    "on_nonfinite": ["skip"],
    "replica_check_steps": [0, 1],
    "token_metrics": ["on"],
    "hardware": ["nowhere.json", "h100"],
}


def _collate_alone(rows: Any) -> Any:
    return {"input_ids": torch.tensor([list(row["input_ids"])[:2] for row in rows])}


def _random_collator(rows: Any) -> Any:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": padded, "labels": torch.where(torch.rand(padded.shape) < 0.5, padded, -100)}


def _metrics(prediction: Any) -> dict[str, float]:
    return {"accuracy": 0.5}


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs["logits"].float().mean()


class _Stops(transformers.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = True
        return control


# other arguments of a constructor, made from the tokenizer
OTHERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "data_collator": {
        "language": lambda tok: transformers.DataCollatorForLanguageModeling(tok, mlm=False),
        "masked language": lambda tok: transformers.DataCollatorForLanguageModeling(tok, mlm=True, mlm_probability=0.1),
        "seq2seq": transformers.DataCollatorForSeq2Seq,
        "default": lambda tok: transformers.default_data_collator,
        "padding": transformers.DataCollatorWithPadding,
        "flattening": lambda tok: transformers.DataCollatorWithFlattening(),
        "cutting": lambda tok: _collate_alone,
        "random": lambda tok: _random_collator,
        "identity": lambda tok: lambda rows: rows,
        "number": lambda tok: 3,
        "nothing": lambda tok: lambda rows: None,
    },
    "processing_class": {
        "tokenizer": lambda tok: tok,
        "number": lambda tok: 3,
        "word": lambda tok: "gpt2",
        "no template": lambda tok: word_tokenizer(None),
    },
    "compute_metrics": {"metrics": lambda tok: _metrics, "number": lambda tok: 3, "no argument": lambda tok: lambda: {}},
    "compute_loss_func": {"mean": lambda tok: _own_loss, "number": lambda tok: 3},
    "preprocess_logits_for_metrics": {"first": lambda tok: lambda logits, labels: logits[..., 0]},
    "callbacks": {
        "early": lambda tok: [transformers.EarlyStoppingCallback(1)],
        "stops": lambda tok: [_Stops()],
        "class": lambda tok: [_Stops],
        "number": lambda tok: [3],
        "one": lambda tok: _Stops(),
    },
    "optimizers": {
        "number": lambda tok: 3,
        "none": lambda tok: (None, None),
        "one": lambda tok: (None,),
        "foreign": lambda tok: (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), None),
    },
    "optimizer_cls_and_kwargs": {
        "sgd": lambda tok: (torch.optim.SGD, {"lr": 0.1}),
        "lbfgs": lambda tok: (torch.optim.LBFGS, {"lr": 0.1}),
        "odd": lambda tok: (torch.optim.SGD, {"a": 1}),
        "number": lambda tok: 3,
    },
    "model_init": {"llama": lambda tok: llama, "number": lambda tok: 3, "nothing": lambda tok: lambda: None},
    "token_loss": {"number": lambda tok: 3, "function": lambda tok: lambda logits, labels: logits.mean(-1)},
    "longctx_config": {"number": lambda tok: 3, "dict": lambda tok: {"max_length": 8}, "class": lambda tok: LongContextConfig},
    "args": {"number": lambda tok: 3, "dict": lambda tok: {"output_dir": "x"}},
    "unknown_name": {"number": lambda tok: 3},
}
TRL_SETS = {
    "SFT": ["text", "messages", "prompts", "list", "labels"],
    "DPO": ["preferences"],
    "Reward": ["preferences"],
}


def doors() -> list[str]:
    """Names of the doors that can be tried here."""
    found = ["trainer"] * 3 + ["subclass", "alone", "attached", "attached"]
    return found + [name for name in TRL_SETS if importlib.util.find_spec("trl")]


def drawn(generator: random.Random) -> Draw:
    """A draw with up to three odd parts."""
    draw = Draw(door=generator.choice(doors()))
    if draw.door in TRL_SETS:
        draw.train = generator.choice(TRL_SETS[draw.door])
    for _ in range(generator.choice([0, 1, 1, 2, 2, 3])):
        match generator.choice(
            ["model", "adapter", "train", "train", "evaluation", "arguments", "arguments", "config", "others"]
        ):
            case "model":
                draw.model = generator.choice(list(MODELS))
            case "adapter":
                draw.adapter = generator.choice(list(ADAPTERS))
            case "train":
                draw.train = generator.choice(list(SETS))
            case "evaluation":
                draw.evaluation = generator.choice(list(SETS))
            case "arguments":
                name = generator.choice(list(ARGUMENTS))
                draw.arguments[name] = generator.choice(ARGUMENTS[name] * 3 + [generator.choice(STRANGE)])
            case "config":
                name = generator.choice(list(CONFIG))
                draw.config[name] = generator.choice(CONFIG[name] * 3 + [generator.choice(STRANGE)])
            case "others":
                name = generator.choice(list(OTHERS))
                draw.others[name] = generator.choice(list(OTHERS[name]))
    return draw


@contextlib.contextmanager
def _stock() -> Iterator[None]:
    """Context for what is made before this package is asked: its errors reject the draw."""
    try:
        yield
    except Exception as error:
        raise Rejected(repr(error)) from error


@functools.cache
def _tokenizer() -> Any:
    return word_tokenizer()


def built(draw: Draw, folder: Path) -> Any:
    """The trainer of a draw. Raises Rejected if a part of it cannot be made without this package."""
    with _stock():
        model = MODELS[draw.model]()
        model = ADAPTERS[draw.adapter](model)
        given = {name: OTHERS[name][value](_tokenizer()) for name, value in draw.others.items()}
        sets = {"train_dataset": SETS[draw.train](), "eval_dataset": SETS[draw.evaluation]()}
        plain = {"output_dir": str(folder), "use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 4}
        plain |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, **draw.arguments}
        if draw.door in TRL_SETS:
            import trl

            given.setdefault("processing_class", _tokenizer())
            # TRL refuses lists by name
            sets = {name: datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows for name, rows in sets.items()}
            base = getattr(trl, f"{draw.door}Trainer")
            args = getattr(trl, f"{draw.door}Config")(**plain)
        else:
            base, args = Trainer, transformers.TrainingArguments(**plain)
    args = given.pop("args", args)
    # most draws spare the self-test, which takes longer than all the rest
    config = given.pop("longctx_config", None)
    if config is None:
        config = LongContextConfig(**{"self_test": False, "report_steps": False, "timeline_steps": 0, **draw.config})
    given |= {name: value for name, value in sets.items() if value is not None or name == "train_dataset"}
    if draw.door in ("stock", "alone", "attached"):
        token_loss = given.pop("token_loss", None)
        callback = LongContextCallback(config)
        if draw.door != "attached":
            # the loader of a stock trainer pads no rows by default
            given.setdefault("data_collator", transformers.DataCollatorWithFlattening())
            own = [callback] if draw.door == "alone" else []
            given["callbacks"] = [*own, *(given["callbacks"] if isinstance(given.get("callbacks"), list) else [])]
        with _stock():
            trainer = Trainer(model=model, args=args, **given)
        if draw.door == "attached":
            callback.attach(trainer, token_loss)
        return trainer
    trainer_class = LongContextTrainer if draw.door == "trainer" else type("Mine", (LongContextMixin, base), {})
    return trainer_class(model=model, args=args, longctx_config=config, **given)


def outcome(draw: Draw, folder: Path) -> str:
    """Builds a draw and trains it; returns "trained", "refused" or "rejected". Raises what is neither a run nor a refusal."""
    try:
        trainer = built(draw, folder)
        trainer.train()
    except Rejected:
        return "rejected"
    except Exception as error:
        if is_refusal(error):
            return "refused"
        if draw.door == "alone" and fails_alike(draw, folder, error):
            return "rejected"
        raise
    return "trained"


def fails_alike(draw: Draw, folder: Path, error: Exception) -> bool:
    """Whether the loop of the stock trainer, which the callback leaves as it is, ends in this error without the callback too."""
    try:
        built(replace(draw, door="stock"), folder).train()
    except Exception as other:
        return (type(other), str(other)) == (type(error), str(error))
    return False


def is_refusal(error: Exception) -> bool:
    """Whether an error says in words what is wrong, raised on purpose by this package or by those that it extends.

    Of Python's own errors only that of a wrong name of an argument counts. This package refuses by ValueError alone.
    """
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    packages = [name for name in ("hf_longctx", *_STOCK) if f"{os.sep}{name}{os.sep}" in last.filename]
    is_ours = packages[:1] == ["hf_longctx"]
    is_meant = isinstance(error, (ValueError, FloatingPointError)) if is_ours else "raise" in (last.line or "")
    # TRL's own may be as short as "`train_dataset` is required"
    return bool(packages) and is_meant and len(str(error).split()) >= (6 if is_ours else 3)


def soak(count: int, seed: int, first: int = 0, chosen: int | None = None) -> tuple[Counter[str], dict[str, list[str]]]:
    """Outcomes of `count` draws, and the draws that ended in something else by the place of their error."""
    found: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    signal.signal(signal.SIGALRM, _too_long)
    for number in range(first, first + count) if chosen is None else [chosen]:
        draw = drawn(random.Random(f"{seed} {number}"))
        signal.alarm(LONGEST_S)
        try:
            with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
                found[outcome(draw, Path(name))] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if chosen is not None:
                traceback.print_exc()
            ours = [each for each in traceback.extract_tb(error.__traceback__) if "hf_longctx" in each.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
            key = f"{type(error).__name__} at {place}: {str(error)[:160]!r}"
            wrong.setdefault(key, []).append(f"{number}: {draw}")
            found["wrong"] += 1
        finally:
            signal.alarm(0)
            _end_memory_trackers()
    return found, wrong


def _end_memory_trackers() -> None:
    """Ends transformers' threads that look for the peak of memory: one whose trainer was refused keeps a core busy for good."""
    if any(TrainerMemoryTracker.peak_monitor_func.__name__ in thread.name for thread in threading.enumerate()):
        for tracker in gc.get_objects():
            if type(tracker) is TrainerMemoryTracker:
                tracker.peak_monitoring = False


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {LONGEST_S} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--only", type=int, help="number of the only draw")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes, wrong_draws = soak(options.count, options.seed, options.first, options.only)
    for what, draws in sorted(wrong_draws.items(), key=lambda item: -len(item[1])):
        print(f"{len(draws)} x {what}\n    " + "\n    ".join(draws[:3]))
    print(dict(outcomes))
    sys.exit(1 if outcomes["wrong"] else 0)

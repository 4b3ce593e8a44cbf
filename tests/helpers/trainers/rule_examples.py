"""The facts to which the code of a rule's example leads."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from helpers.models.tiny_models import ModelCase, build_model, tiny_llama
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.fsdp import FSDPModule

from hf_longctx import LongContextConfig, LongContextMixin, LongContextTrainer
from hf_longctx.hf.data.labels import HeadTask
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.rule import Facts


def facts_of(code: str, folder: Path) -> Facts:
    """The facts of a plain run on four ranks, changed by `code`."""
    args = partial(transformers.TrainingArguments, output_dir=str(folder), use_cpu=True, report_to="none")
    launch = replace(LaunchEnvironment.read(), num_ranks=4)
    plain = Facts(
        args=args(),
        model=tiny_llama(),
        trainer=LongContextTrainer,
        degrees=(1, 2, 4),
        num_ranks=4,
        launch=launch,
        task=HeadTask("document", 2),
        versions={"transformers": transformers.__version__, "trl": "1.16.0"},
    )
    names: dict[str, Any] = {
        "__name__": "example",
        "os": os,
        "sys": sys,
        "torch": torch,
        "transformers": transformers,
        "replace": replace,
        "tiny": lambda family, **changes: build_model(ModelCase(family, **changes)),
        "tiny_llama": tiny_llama,
        "lora": _lora,
        "in_four_bits": _in_four_bits,
        "sharded": _sharded,
        "known_of": ModelFacts.of,
        "tokenizer": _tokenizer,
        "beside_tokenizer": partial(_beside_tokenizer, folder),
        "HeadTask": HeadTask,
        "stream": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
        "of_trl": lambda name: type(name, (), {"__module__": "trl.trainer"}),
        "patch_model": patch_model,
        "Trainer": transformers.Trainer,
        "TrainerCallback": transformers.TrainerCallback,
        "EarlyStoppingCallback": transformers.EarlyStoppingCallback,
        "TrainingArguments": args,
        "LongContextConfig": LongContextConfig,
        "LongContextMixin": LongContextMixin,
        "LongContextTrainer": LongContextTrainer,
    }
    names |= {field.name: getattr(plain, field.name) for field in fields(plain)} | {"mixin": LongContextMixin}
    names["given"] = {"train_dataset": [], "args": plain.args, "values": {"seed": 42}, "batch_size": 8}
    names["given"] |= {"datasets": {}, "token_loss": None, "taught_by": ModelFacts.of(tiny_llama().eval())}
    exec(code, names)
    names["known"] = ModelFacts.of(names["model"])
    names["model_config"] = names["model_config"] or getattr(names["model"], "config", None)
    return Facts(**{field.name: names[field.name] for field in fields(plain)})


def _lora(model: Any, **settings: Any) -> Any:
    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}))


def _in_four_bits(model: Any) -> Any:
    """The model with a head that has the class, but not the weights, of a four-bit one."""
    kind = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn"})
    model.lm_head = kind(model.config.hidden_size, model.config.vocab_size, bias=False)
    return model


def _sharded(model: Any) -> Any:
    """The model with the class that `fully_shard` gives it, but whole weights."""
    model.__class__ = type("FSDPLlama", (FSDPModule, type(model)), {})
    return model


def _tokenizer(words: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that numbers these words."""
    numbers = {word: number for number, word in enumerate(words.split())}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(numbers, unk_token=words.split()[0])))


def _beside_tokenizer(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    """A model that was loaded from a folder with this tokenizer."""
    tokenizer.save_pretrained(folder)
    model = tiny_llama().eval()
    model.config.name_or_path = str(folder)
    return model

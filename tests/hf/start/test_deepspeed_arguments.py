"""Runs whose arguments ask for DeepSpeed, with DeepSpeed installed: from the field `deepspeed`, and from accelerate's launcher.

DeepSpeed is not a dependency of the package or of its tests: CI installs it for this file; elsewhere the file is skipped.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_pool import RankPool
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import training_arguments
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

from hf_longctx import LongContextTrainer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed (pip install deepspeed)")

CASE = ModelCase(dtype=torch.float32)
ROWS = random_rows([40, 22, 9, 31, 5, 12, 17, 8])
SETTINGS: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 4, "warmup_steps": 0, "optim": "adamw_torch_fused"}
ZERO = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")},
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
}


def trained(
    folder: str, config: dict[str, Any], arguments: dict[str, Any], variables: dict[str, str]
) -> tuple[dict[str, Tensor], list[bool]]:
    """Whole weights after a training, and whether from_pretrained would partition: before the trainer, in training, after."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        model = build_model(CASE)
        args = training_arguments(folder, **{**SETTINGS, **arguments})
        partitions = [is_deepspeed_zero3_enabled()]
        rows = datasets.Dataset.from_list(ROWS)
        trainer = LongContextTrainer(model, args, train_dataset=rows, longctx_config=quiet_config(**config))
        assert not trainer.is_deepspeed_enabled
        trainer.train()
        partitions.append(is_deepspeed_zero3_enabled())
        assert trainer.evaluate(rows)["eval_loss"] > 0
    finally:
        os.environ.clear()
        os.environ.update(before)
        unset_hf_deepspeed_config()
    return {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}, partitions


@pytest.mark.parametrize("door", ["field", "launcher"])
def test_arguments_that_ask_for_deepspeed_train_as_our_own_settings(ranks, tmp_path: Path, door: str) -> None:
    pool = ranks(2)
    schedule = "constant_with_warmup" if door == "field" else "linear"
    ours = {"parameters": "sharded", "optimizer_states": "host"}
    own = pool.run(trained, str(tmp_path / "own"), ours, {"lr_scheduler_type": schedule}, {})
    arguments = {"deepspeed": ZERO} if door == "field" else {}
    found = pool.run(trained, str(tmp_path / door), {}, arguments, {} if door == "field" else LAUNCHED)
    for (expected, none), (weights, partitions) in zip(own, found, strict=True):
        assert none == [False, False] and partitions == [True, True]
        assert expected.keys() == weights.keys() and all(torch.equal(expected[name], weights[name]) for name in expected)


def refusal(folder: str) -> str:
    """Error of a trainer whose model was made after arguments with stage 3."""
    import deepspeed

    # without a compiler, use gloo in place of DeepSpeed's own collectives in shared memory
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed("gloo", verbose=False)
    args = training_arguments(folder, **SETTINGS, deepspeed={**ZERO, "train_micro_batch_size_per_gpu": 4})
    try:
        config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        model = AutoModelForCausalLM.from_config(config)
        LongContextTrainer(model, args, train_dataset=datasets.Dataset.from_list(ROWS), longctx_config=quiet_config())
    except ValueError as error:
        return str(error)
    finally:
        unset_hf_deepspeed_config()
    return ""


def test_weights_that_deepspeed_has_partitioned_are_refused_by_name(tmp_path: Path) -> None:
    # a pool of its own, since DeepSpeed changes its processes
    pool = RankPool(2)
    try:
        found = pool.run(refusal, str(tmp_path))
    finally:
        pool.close()
    for message in found:
        assert "DeepSpeed has partitioned" in message and "load the model before these are made" in message

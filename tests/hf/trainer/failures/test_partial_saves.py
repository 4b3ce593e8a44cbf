"""A model whose weights lie on several ranks refuses to save itself; its trainer saves all of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer
from transformers import AutoModelForCausalLM

from hf_longctx.hf.models.adapters import base_of

LORA = (("r", 2), ("target_modules", ["q_proj"]))


def save_both_ways(case: ModelCase, config: dict[str, Any], folder: str) -> tuple[list[str], list[str]]:
    """Messages with which a trained model and the one inside it refuse to be saved; files that the trainer writes."""
    messages = []
    with tempfile.TemporaryDirectory() as own:
        trainer = make_trainer(case, random_rows([13, 5, 8, 21] * 2), own, config, {"max_steps": 1})
        trainer.train()
        for model in (trainer.model, base_of(trainer.model)):
            try:
                model.save_pretrained(f"{own}/model")
            except (ValueError, RuntimeError) as error:
                messages.append(str(error))
        assert not Path(f"{own}/model").exists()
        dist.barrier()
        trainer.save_model(folder)
    dist.barrier()
    return messages, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.daily("config1-None-holds only stage")
@pytest.mark.parametrize(
    "config,lora,why",
    [
        ({"parameters": "sharded"}, None, "every rank holds a shard of them"),
        ({"stages": 2}, None, "holds only stage"),
        ({"stages": 2}, LORA, "holds only stage"),
    ],
)
def test_a_model_in_parts_refuses_to_save_itself(ranks, tmp_path: Path, config: dict[str, Any], lora: Any, why: str) -> None:
    case = ModelCase(lora=lora) if lora else ModelCase()
    for messages, files in ranks(2).run(save_both_ways, case, config, str(tmp_path)):
        assert len(messages) == 2 and all(why in each and "save_model(" in each for each in messages)
        assert any(name.startswith("adapter_model" if lora else "model") for name in files)
    if lora is None:
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
        assert not info["missing_keys"]

"""The made-up documents of the extension demo, and its base model, which looks up values at its own length and not beyond."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import NeedleTask, extend_positions
from hf_longctx.recipes.key_values import BASE_TOKENS, EXTENDED_TOKENS, key_value_document, key_value_needle
from hf_longctx.recipes.sft import RecipeArguments

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_answer_stands_earlier_behind_its_key() -> None:
    for length in (20, 128, 512):
        row = key_value_document(length, random.Random(length))
        ids, labels = row["input_ids"], row["labels"]
        answers = [place for place, label in enumerate(labels) if label != -100]
        assert len(ids) == len(labels) == length and len(answers) == min(26, length // 10)
        for place in answers:
            first = ids.index(ids[place - 1])
            assert first < place - 1 and ids[first + 1] == labels[place] == ids[place]


def test_a_needle_is_at_its_depth_and_alone() -> None:
    task = NeedleTask((128, 512), (0.0, 0.5, 1.0), key_value_needle, num_documents=3)
    for (length, depth), row in zip([cell for cell in task.cells for _ in range(3)], task.rows(), strict=True):
        key, value = row["input_ids"][-2:]
        assert row["input_ids"].count(key) == 2 and row["input_ids"][row["input_ids"].index(key) + 1] == value
        assert abs(row["input_ids"].index(key) / length - depth) <= 4 / length
        assert row["labels"] == [-100] * (length - 1) + [value]


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"needle_task": "key-values", "needle_lengths": [128]}, "tokenizer is None; set tokenizer: bytes"),
        ({"dataset": "key-values"}, "tokenizer is None; set tokenizer: bytes"),
        ({"dataset": "key-values", "tokenizer": "bytes", "messages_column": "m"}, "leave its column settings out"),
        ({"eval_dataset": "key-values"}, "tokenizer is None; set tokenizer: bytes"),
        ({"needle_depths": [0.5]}, "no effect without needle_lengths"),
        ({"needle_documents": 3}, "no effect without needle_lengths"),
        ({"needle_base": True, "needle_lengths": [128]}, "set rope_scaling"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecipeArguments(**{"model_name_or_path": "base", "dataset": "rows.jsonl", **settings})


@torch.no_grad()
def test_the_base_looks_up_at_its_own_length_and_needs_extension_beyond() -> None:
    folder = RECIPES / "copy_base"
    assert (folder / "model.safetensors").stat().st_size < 1_000_000
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == BASE_TOKENS
    settings = yaml.safe_load((RECIPES / "configs" / "extend_demo.yaml").read_text())
    assert settings["max_length"] == EXTENDED_TOKENS == max(settings["needle_lengths"]) == 4 * BASE_TOKENS
    plain = AutoModelForCausalLM.from_pretrained(folder)
    extended = AutoModelForCausalLM.from_pretrained(folder, config=extend_positions(config, EXTENDED_TOKENS))

    def share_right(model: torch.nn.Module, length: int) -> float:
        rows = NeedleTask((length,), (0.0, 0.3, 0.6, 0.9), key_value_needle, num_documents=8).rows()
        ids = torch.tensor([row["input_ids"] for row in rows])
        return float((model(input_ids=ids).logits[:, -2].argmax(-1) == ids[:, -1]).double().mean())

    assert share_right(plain, BASE_TOKENS) > 0.9
    assert share_right(plain, EXTENDED_TOKENS) < 0.5 < share_right(extended, EXTENDED_TOKENS)

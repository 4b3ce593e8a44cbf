"""A column with types of tokens is refused where the model would compute something else by it, and ignored elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.any_model import build_any
from helpers.trainers.trainer_runs import training_arguments

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.models.facts import ModelFacts

IDS = [5, 6, 7, 8, 9, 10]
PALIGEMMA = "PaliGemmaForConditionalGeneration"


def trainer_of(model: Any, rows: Any, folder: Path) -> LongContextTrainer:
    args = training_arguments(str(folder), max_steps=1, per_device_train_batch_size=1)
    return LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=LongContextConfig(tokens_per_rank=64))


@pytest.mark.parametrize("name", [PALIGEMMA, "GPT2LMHeadModel", "BertLMHeadModel"])
def test_types_change_what_plain_transformers_computes(name: str) -> None:
    model = build_any(name, "sdpa").train()
    ids = torch.tensor([IDS])
    types = torch.tensor([[0, 0, 0, 1, 1, 1] if name != "BertLMHeadModel" else [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        found, plain = (model(input_ids=ids, **given).logits for given in ({"token_type_ids": types}, {}))
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("name", "types", "said"),
    [
        (PALIGEMMA, [0] * 6, "train_dataset row 0 has 'token_type_ids', by which the model's class computes something else"),
        ("GPT2LMHeadModel", [0] * 6, "train_dataset row 0 has 'token_type_ids', by which"),
        ("BertLMHeadModel", [0, 0, 1, 1, 1, 1], "train_dataset row 1 has 'token_type_ids', which are not all 0, by which"),
    ],
)
def test_rows_with_such_types_are_refused(name: str, types: list[int], said: str, listed: bool, tmp_path: Path) -> None:
    rows = [{"input_ids": IDS, "token_type_ids": [0] * 6}, {"input_ids": IDS, "token_type_ids": types}]
    with pytest.raises(ValueError, match=said):
        trainer_of(build_any(name, "sdpa"), rows if listed else datasets.Dataset.from_list(rows), tmp_path)


def test_streams_refuse_them_by_their_row(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"input_ids": IDS, "token_type_ids": [0] * 6}]).to_iterable_dataset()
    with pytest.raises(ValueError, match="has 'token_type_ids', by which the model's class computes something else"):
        trainer_of(build_any("GPT2LMHeadModel", "sdpa"), rows, tmp_path).train()


@pytest.mark.daily("BertLMHeadModel")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertLMHeadModel", "Gemma3ForConditionalGeneration"])
def test_other_types_change_nothing_and_are_ignored(name: str, tmp_path: Path) -> None:
    model = build_any(name, "sdpa")
    assert ModelFacts.of(model).token_types == ("if all are 0" if name.startswith("Bert") else "always")
    trainer_of(model, datasets.Dataset.from_list([{"input_ids": IDS, "token_type_ids": [0] * 6}]), tmp_path)

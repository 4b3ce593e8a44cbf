"""The page about settings that go together says what the code does, row by row."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx import LongContextConfig
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.rules.arguments import stage_setting_problems

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
ROWS = re.findall(r"^\| `([^`]+)`(, with LoRA)? \| (🟢|🔴) \|", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def models() -> dict[bool, Any]:
    """A tiny model, without adapters and with them."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2)
    plain, adapted = LlamaForCausalLM(config), LlamaForCausalLM(config)
    return {False: plain, True: get_peft_model(adapted, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))}


def problems_of(text: str, model: Any) -> list[str]:
    """Refusals of the code for settings that are written as arguments."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    settings = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    try:
        config = LongContextConfig(max_length=64, **settings)
    except ValueError as error:
        return [str(error)]
    return stage_setting_problems(ModelFacts.of(model), config, num_ranks=4)


def test_each_row_of_the_page_is_what_the_code_does(models: dict[bool, Any]) -> None:
    assert len(ROWS) == PAGE.read_text().count("| `") > 20
    found = [(text, "🔴" if problems_of(text, models[bool(lora)]) else "🟢") for text, lora, _ in ROWS]
    assert found == [(text, mark) for text, _, mark in ROWS]

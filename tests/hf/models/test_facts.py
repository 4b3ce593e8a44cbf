"""Facts of a model: read once in a start, and the same for wrapped, adapted and unknown models."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model, tiny_llama
from helpers.ranks.rank_pool import RankPool
from helpers.trainers.trainer_runs import training_arguments

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import head_kind, inner_model
from hf_longctx.hf.models.towers import text_class

# most calls in one start: those of the facts, and those for models that the facts do not describe, which are the copies of the
# self-test and the model whose attention is switched
MOST_CALLS = {base_of: 40, head_kind: 28, inner_model: 68, text_class: 4}


def calls_of_a_start(folder: str) -> dict[str, int]:
    """How often one start calls each of these functions."""
    codes = {function.__code__: function.__name__ for function in MOST_CALLS}
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and (name := codes.get(frame.f_code)) is not None:
            calls[name] += 1

    model, args = tiny_llama(), training_arguments(folder)
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    sys.setprofile(count)
    try:
        trainer = LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=LongContextConfig(max_length=8))
    finally:
        sys.setprofile(None)
    trainer.longctx_run.close()
    return dict(calls)


@pytest.mark.wide
def test_a_start_does_not_ask_the_model_what_its_facts_say(tmp_path: Path) -> None:
    # a new process, which is ended if it does not answer: in one that had run thousands of tests, a profiled call never returned
    pool = RankPool(1)
    try:
        (calls,) = pool.run(calls_of_a_start, str(tmp_path))
    finally:
        pool.close()
    most = {function.__name__: number for function, number in MOST_CALLS.items()}
    assert {name: number for name, number in calls.items() if number > most[name]} == {}
    assert calls.keys() == most.keys()


@pytest.mark.quick
@pytest.mark.parametrize(
    "case,text_class_name",
    [
        (ModelCase(), "LlamaForCausalLM"),
        (ModelCase(lora=(("r", 2),)), "LlamaForCausalLM"),
        (ModelCase(head=(("num_labels", 3),)), "LlamaForCausalLM"),
        (ModelCase("qwen3_5", num_layers=4), "Qwen3_5ForCausalLM"),
    ],
    ids=["causal", "adapted", "classifier", "states"],
)
def test_facts_name_the_text_model(case: ModelCase, text_class_name: str) -> None:
    model = build_model(case)
    facts = ModelFacts.of(model)
    assert facts.base is facts.text is base_of(model)
    assert (facts.text_class, facts.family.causal) == (text_class_name, text_class_name)
    assert (facts.mixer is None) == (case.family != "qwen3_5")
    assert facts.head_kind == ("document" if case.head else "next_token")


@pytest.mark.parametrize("model", [None, "a name", torch.nn.Linear(2, 2)], ids=["none", "text", "module"])
def test_an_object_that_is_no_model_has_facts(model: Any) -> None:
    facts = ModelFacts.of(model)
    assert facts.base is facts.text is model
    assert (facts.head_kind, facts.num_outputs, facts.family.causal, facts.loaded_ranges) == ("next_token", 0, "", None)

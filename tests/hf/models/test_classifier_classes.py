"""Every class for documents or tokens whose text model is that of an exact class is exact too, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.measures.class_sweep import LENGTHS, SLICES, WHOLE, worst
from helpers.models.any_model import build_any, wide_floats
from helpers.models.classifiers import HEADS, classifier_rows, plain_step
from helpers.models.reference import TOLERANCE
from helpers.plans.sliced_plans import sliced_plan

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.labels import task_of
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import CLASSIFIERS
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.rules.classes import class_problem
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

# a class with learned positions that writes its forward out, likewise for tokens, a config of its own, states along the sequence
FAST = (
    *("OPTForSequenceClassification", "GPTNeoXForTokenClassification", "Gemma3TextForSequenceClassification"),
    *("Qwen3NextForTokenClassification",),
)
AT_LEAST_EXACT = 70


def names() -> list[str]:
    """Every class of transformers that classifies documents or tokens."""
    return sorted(name for name in dir(transformers) if name.endswith(tuple(CLASSIFIERS)) and not name.startswith(("Auto", "TF")))


def head_of_class(name: str) -> str:
    return "tokens" if name.endswith("ForTokenClassification") else "classes"


def build(name: str, **settings: Any) -> Any:
    return build_any(name, **{**HEADS[head_of_class(name)], **settings})


def planned_step(model: Any, rows: list[dict[str, Any]], plan: Any) -> tuple[float, dict[str, Any]]:
    patch_model(model)
    lengths = np.array([len(row["input_ids"]) for row in rows])
    dataset = PlannedDataset(
        rows, SequenceIndex.build(lengths, int(lengths.max()), "error"), task=task_of(ModelFacts.of(model), rows)
    )
    batch = LongContextCollator()([dataset[PlannedStep(plan, tuple(range(len(rows))), 0)]])
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), torch.device("cpu"))
    result = executor.run(plan.for_rank(0), batch["chunks"], batch["num_label_tokens"])
    return float(result.loss), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@functools.cache
def is_supported(name: str) -> bool:
    with torch.device("meta"):
        try:
            return not class_problem(build(name, is_random=False))
        except Exception:
            # encoders whose tiny configs nobody needs here
            return False


@pytest.mark.daily("GPTNeoXForTokenClassification", "OPTForSequenceClassification")
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.sweep) for name in names()])
def test_a_supported_class_is_exact(name: str) -> None:
    if not is_supported(name):
        assert name not in FAST
        pytest.skip("refused")
    head, rows = head_of_class(name), classifier_rows(head_of_class(name), LENGTHS)
    with wide_floats():
        expected = plain_step(build(name), head, rows)[:2]
        for chunks in (WHOLE, SLICES):
            assert worst(planned_step(build(name), rows, sliced_plan(LENGTHS, chunks)), expected) <= TOLERANCE


@pytest.mark.sweep
def test_so_many_classes_are_supported() -> None:
    assert sum(map(is_supported, names())) >= AT_LEAST_EXACT


@pytest.mark.parametrize(
    "name,why",
    [
        ("BertForSequenceClassification", "its head is not known to be one linear module"),
        ("ModernBertDecoderForSequenceClassification", "its head is not known to be one linear module"),
        ("Gemma3ForSequenceClassification", "it has towers for images or sound"),
        ("DogeForSequenceClassification", "makes a mask of"),
        ("DiffLlamaForTokenClassification", "calls attention several times"),
    ],
)
def test_other_classes_are_refused_by_name(name: str, why: str) -> None:
    with torch.device("meta"):
        model = build(name, is_random=False)
    assert class_problem(model).startswith(f"model class {name} is not supported: ") and why in class_problem(model)

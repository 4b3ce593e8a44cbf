"""Labels of documents and tokens are found under the names of stock collators, and wrong ones are named."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import transformers
from helpers.models.tiny_models import LLAMA_SHAPE, PAD

from hf_longctx.hf.data.labels import HeadTask, task_of
from hf_longctx.hf.data.scan import scan_dataset
from hf_longctx.hf.models.facts import ModelFacts

CLASSES = HeadTask("document", 3)
NUMBER = HeadTask("document", 1, "regression")
SEVERAL = HeadTask("document", 2, "multi_label_classification")
TOKENS = HeadTask("token", 3)
IDS = [[1, 2, 3], [4, 5]]


def problems(task: HeadTask, is_arrow: bool, **columns: Any) -> list[str]:
    rows = {"input_ids": IDS, **columns}
    listed = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    return scan_dataset(datasets.Dataset.from_dict(rows) if is_arrow else listed, "d", 64, task=task).problems


@pytest.mark.parametrize("is_arrow", [True, False])
@pytest.mark.parametrize(
    "task,columns,why",
    [
        (CLASSES, {"label": [0, 2]}, ""),
        (CLASSES, {"labels": [0, -100]}, ""),
        (NUMBER, {"label_ids": [0.5, -3.0]}, ""),
        (NUMBER, {"label": [1, 2]}, ""),
        (SEVERAL, {"labels": [[0.0, 1.0], [1.0, 0.5]]}, ""),
        (TOKENS, {"labels": [[0, 1, 2], [-100, 2]]}, ""),
        (CLASSES, {}, "no column 'label' or 'labels'"),
        (TOKENS, {"label": [0, 1]}, "no column 'labels'"),
        (CLASSES, {"label": [0, 1], "labels": [0, 1]}, "which both hold labels"),
        (CLASSES, {"label": [0, 3]}, "holds label 3, but the model has 3 labels"),
        (CLASSES, {"label": [-100, -100]}, "no row with a label"),
        (CLASSES, {"label": [0, 1], "seq_lengths": [[1, 2], [2]]}, "divides rows into documents"),
        (CLASSES, {"label": [0, 1], "loss_weights": [[1.0] * 3, [1.0] * 2]}, "weighs tokens"),
        (CLASSES, {"label": [0.5, 1.5]}, "expected"),
        (NUMBER, {"label": [0.5, float("nan")]}, "missing or not finite"),
        (SEVERAL, {"label": [[0.0], [1.0]]}, "row 0 has 1 labels, expected a list of 2 numbers"),
        (SEVERAL, {"label": [[0.0, 2.0], [1.0, 0.0]]}, "has the label 2"),
        (TOKENS, {"labels": [[0, 1], [2, 2]]}, "3 tokens but 2 labels"),
        (TOKENS, {"labels": [[0, 1, 3], [2, 2]]}, "holds label 3"),
    ],
)
def test_labels_are_read_or_named(task: HeadTask, columns: dict[str, Any], why: str, is_arrow: bool) -> None:
    found = problems(task, is_arrow, **columns)
    assert (found == []) if not why else why in " ".join(found), found


def test_another_label_of_a_document_changes_the_digest() -> None:
    digests = {scan_dataset([{"input_ids": [1, 2], "label": label}], "d", 64, task=NUMBER).digest for label in (0.5, 0.25, 0.5)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "ids,place",
    [([1, 2, 3], 2), ([1, 2, PAD], 1), ([1, *[PAD] * 200], 0), ([PAD, PAD], 0), ([PAD, 1, PAD, PAD], 1), ([5] * 130, 129)],
)
def test_the_token_of_a_document_is_that_of_transformers(ids: list[int], place: int) -> None:
    # transformers takes the largest index whose token is no padding
    expected = max((number for number, token in enumerate(ids) if token != PAD), default=0)
    assert HeadTask("document", 2, pad_token_id=PAD).label_place(ids, 0, len(ids)) == expected == place
    assert HeadTask("document", 2).label_place(ids, 0, len(ids)) == len(ids) - 1
    # a document that was cut ends elsewhere
    assert HeadTask("document", 2, pad_token_id=PAD).label_place([*ids, 1], 0, len(ids)) == place


@pytest.mark.parametrize(
    "settings,label,problem",
    [
        ({"num_labels": 1}, 1, "regression"),
        ({"num_labels": 3}, 2, "single_label_classification"),
        ({"num_labels": 3}, [0.0, 1.0, 1.0], "multi_label_classification"),
        ({"num_labels": 3, "problem_type": "regression"}, [0.0, 1.0, 1.0], "regression"),
    ],
)
def test_the_problem_is_that_which_transformers_would_infer(settings: dict[str, Any], label: Any, problem: str) -> None:
    config = transformers.LlamaConfig(**{**LLAMA_SHAPE, **settings})
    model = transformers.LlamaForSequenceClassification(config)
    assert task_of(ModelFacts.of(model), [{"input_ids": [1], "label": label}]).problem == problem

"""Decides whether a stock trainer's data collator can be replaced by plans without changing what is learnt.

Called when the callback attaches to a stock trainer. A plan packs whole sequences and learns the next token at every position
of each. A padding collator learns the same tokens, as long as neither padding nor the first token of a sequence has a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import transformers
from transformers import default_data_collator

from hf_longctx.hf.data.scan import PACKED
from hf_longctx.hf.models.heads.kinds import HeadKind
from hf_longctx.runtime.core.loss import IGNORE_INDEX

_BATCH_ROWS = 1000
_PADDING = (transformers.DataCollatorWithPadding, transformers.DefaultDataCollator)
# TRL's collator: takes labels from the row's column `labels`, or else the token ids, just as plans do
_TRL = ("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")
_KNOWN = "default_data_collator, DataCollatorWithPadding, DataCollatorForSeq2Seq, DataCollatorWithFlattening and \
DataCollatorForLanguageModeling(mlm=False)"


def collator_problems(collator: Any, dataset: Any, kind_of_head: HeadKind = "next_token") -> list[str]:
    """Why plans would learn other tokens than batches of `collator` over `dataset`; empty if they would learn the same ones.

    Subclasses of known collators are refused, because they may do anything. kind_of_head: what the model's head predicts.
    """
    kind, name = type(collator), getattr(collator, "__name__", type(collator).__name__)
    if kind_of_head != "next_token":
        return _classifier_problems(collator, kind, name, kind_of_head)
    if kind is transformers.DataCollatorWithFlattening:
        return _flattening_problems(collator) + _packing_problems(name, dataset)
    if kind is transformers.DataCollatorForSeq2Seq:
        return _label_problems(name, dataset) + _seq2seq_problems(collator) + _packing_problems(name, dataset)
    if kind is transformers.DataCollatorForLanguageModeling:
        return _language_modeling_problems(collator, dataset) + _packing_problems(name, dataset)
    if (kind.__module__, kind.__name__) == _TRL:
        # this collator pads on the right without labels, or flattens documents and masks the first label of each
        return []
    if kind in _PADDING or collator is default_data_collator:
        return _label_problems(name, dataset) + _packing_problems(name, dataset)
    return [
        f"data_collator is {name}, which is not tested, so plans might learn other tokens; use one of {_KNOWN} and do the rest "
        f"in the dataset (dataset.map), or use the callback without `attach`"
    ]


def _classifier_problems(collator: Any, kind: type, name: str, kind_of_head: HeadKind) -> list[str]:
    """Why plans would learn other labels of documents or tokens than batches of `collator`."""
    known = _PADDING if kind_of_head == "document" else (transformers.DataCollatorForTokenClassification,)
    if kind not in known and collator is not default_data_collator:
        names = ", ".join(each.__name__ for each in known)
        return [
            f"data_collator is {name}, which is not tested with a model that classifies {kind_of_head}s; use {names} or "
            f"default_data_collator, or LongContextTrainer without a collator"
        ]
    if kind is transformers.DataCollatorForTokenClassification and collator.label_pad_token_id != IGNORE_INDEX:
        return [f"{name} has label_pad_token_id={collator.label_pad_token_id}, which would be learnt; set it to {IGNORE_INDEX}"]
    return _padding_side_problems(collator) if hasattr(collator, "tokenizer") else []


def _label_problems(name: str, dataset: Any) -> list[str]:
    if _is_readable(dataset) and not _has_labels(dataset):
        return [
            f"{name} makes no labels and train_dataset has no column 'labels', so the stock trainer would have no loss; add "
            f"labels, or use DataCollatorWithFlattening or DataCollatorForLanguageModeling(mlm=False)"
        ]
    return []


def _packing_problems(name: str, dataset: Any) -> list[str]:
    columns = getattr(dataset, "column_names", None) or ()
    return [
        f"train_dataset has a column {column!r}, by which plans would divide rows into documents, but {name} does not; remove "
        f"the column, or use LongContextTrainer"
        for column in PACKED
        if column in columns
    ][:1]


def _seq2seq_problems(collator: Any) -> list[str]:
    problems = _padding_side_problems(collator)
    if collator.label_pad_token_id != IGNORE_INDEX:
        problems.append(
            f"DataCollatorForSeq2Seq has label_pad_token_id={collator.label_pad_token_id}, which would be learnt; set it to "
            f"{IGNORE_INDEX}"
        )
    return problems


def _flattening_problems(collator: Any) -> list[str]:
    problems = []
    if collator.separator_id != IGNORE_INDEX:
        problems.append(
            f"DataCollatorWithFlattening has separator_id={collator.separator_id}, which would be learnt across documents; set "
            f"it to {IGNORE_INDEX}"
        )
    if not collator.return_position_ids or collator.position_ids_start:
        problems.append(
            f"DataCollatorWithFlattening has return_position_ids={collator.return_position_ids} and position_ids_start="
            f"{collator.position_ids_start}, but plans count the positions of every document from 0; set them to True and 0"
        )
    return problems


def _language_modeling_problems(collator: Any, dataset: Any) -> list[str]:
    name = "DataCollatorForLanguageModeling"
    if collator.mlm:
        return [f"{name} has mlm=True (masked language modelling), but plans train the next token; set mlm=False"]
    problems = _padding_side_problems(collator)
    if not _is_readable(dataset):
        return problems
    if _has_labels(dataset):
        problems.append(
            f"{name} overwrites the column 'labels' of train_dataset, but plans would use it; remove the column, or use "
            f"DataCollatorForSeq2Seq, which keeps it"
        )
    pad = collator.tokenizer.pad_token_id
    if pad is not None and _has_token(dataset, pad):
        problems.append(
            f"{name} gives token {pad} (pad_token_id) no label anywhere, but plans would, and train_dataset contains it, for "
            f"example as end of text; give the tokenizer a pad token of its own, or write a column 'labels' with "
            f"{IGNORE_INDEX} there and use DataCollatorForSeq2Seq"
        )
    return problems


def _padding_side_problems(collator: Any) -> list[str]:
    if collator.tokenizer.padding_side == "right":
        return []
    return [
        f"the tokenizer of {type(collator).__name__} pads on the {collator.tokenizer.padding_side}, so a sequence's first token "
        f"is predicted from padding, which plans do not have; set tokenizer.padding_side='right' for training"
    ]


def _is_readable(dataset: Any) -> bool:
    """Whether rows can be looked up by number; other datasets are refused later, when row lengths are read."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, dict) and len(dataset) > 0


def _has_labels(dataset: Any) -> bool:
    if isinstance(dataset, datasets.Dataset):
        return "labels" in dataset.column_names
    row = dataset[0]
    return isinstance(row, Mapping) and "labels" in row


def _has_token(dataset: Any, token: int) -> bool:
    if isinstance(dataset, datasets.Dataset):
        if "input_ids" not in dataset.column_names:
            return False
        tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(_BATCH_ROWS)
        return any(pc.any(pc.equal(pc.list_flatten(table["input_ids"]), token)).as_py() for table in tables)
    rows = (dataset[i] for i in range(len(dataset)))
    return any(isinstance(row, Mapping) and bool(np.isin(token, np.asarray(row["input_ids"]))) for row in rows)

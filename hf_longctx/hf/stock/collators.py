"""Which collators of transformers a plan replaces without changing what is learnt, and why it cannot replace the others.

A plan packs whole sequences and learns the next token of each. A padding collator means the same as long as its padding has
no label and the first token of a sequence none either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import transformers
from transformers import default_data_collator

from hf_longctx.runtime.core.loss import IGNORE_INDEX

_BATCH_ROWS = 1000
_PADDING = (transformers.DataCollatorWithPadding, transformers.DefaultDataCollator)
# of its labels a row's own column or the ids, as plans
_TRL = ("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")
_KNOWN = "default_data_collator, DataCollatorWithPadding, DataCollatorForSeq2Seq, DataCollatorWithFlattening and \
DataCollatorForLanguageModeling(mlm=False)"


def collator_problems(collator: Any, dataset: Any) -> list[str]:
    """Why plans would teach something else than batches of `collator` over the rows of `dataset`; empty if they would not.

    Subclasses of known collators may do anything and are refused.
    """
    kind, name = type(collator), getattr(collator, "__name__", type(collator).__name__)
    if kind is transformers.DataCollatorWithFlattening:
        return _flattening_problems(collator)
    if kind is transformers.DataCollatorForSeq2Seq:
        return _label_problems(name, dataset) + _seq2seq_problems(collator)
    if kind is transformers.DataCollatorForLanguageModeling:
        return _language_modeling_problems(collator, dataset)
    if (kind.__module__, kind.__name__) == _TRL:
        # pads on the right, without labels, or flattens and masks every document's first label
        return []
    if kind in _PADDING or collator is default_data_collator:
        return _label_problems(name, dataset)
    return [
        f"data_collator is {name}, and whether plans mean the same is not known; known are {_KNOWN}: use one of these and "
        f"put what it does into the dataset (dataset.map), or leave `attach` out and use the callback alone"
    ]


def _label_problems(name: str, dataset: Any) -> list[str]:
    if _is_readable(dataset) and not _has_labels(dataset):
        return [
            f"{name} makes no labels and train_dataset has no column 'labels', so the stock trainer would have no loss; add "
            f"labels, or use DataCollatorWithFlattening or DataCollatorForLanguageModeling(mlm=False)"
        ]
    return []


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
            f"{collator.position_ids_start}, plans count every document from 0; set them to True and 0"
        )
    return problems


def _language_modeling_problems(collator: Any, dataset: Any) -> list[str]:
    name = "DataCollatorForLanguageModeling"
    if collator.mlm:
        return [f"{name} has mlm=True, masked language modelling; plans train the next token: set mlm=False"]
    problems = _padding_side_problems(collator)
    if not _is_readable(dataset):
        return problems
    if _has_labels(dataset):
        problems.append(
            f"{name} overwrites the column 'labels' of train_dataset, plans would use it; remove the column, or use "
            f"DataCollatorForSeq2Seq, which keeps it"
        )
    pad = collator.tokenizer.pad_token_id
    if pad is not None and _has_token(dataset, pad):
        problems.append(
            f"{name} gives no label to the token {pad} (pad_token_id) wherever it stands, and train_dataset contains it, for "
            f"example as end of text; plans would learn it. Give the tokenizer a pad token of its own, or write a column "
            f"'labels' with {IGNORE_INDEX} there and use DataCollatorForSeq2Seq"
        )
    return problems


def _padding_side_problems(collator: Any) -> list[str]:
    if collator.tokenizer.padding_side == "right":
        return []
    return [
        f"the tokenizer of {type(collator).__name__} pads on the {collator.tokenizer.padding_side}, so a sequence's first token "
        f"is learnt from padding, which plans do not have; set tokenizer.padding_side='right' for training"
    ]


def _is_readable(dataset: Any) -> bool:
    """Whether rows can be looked up; other sets are refused by the scan."""
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

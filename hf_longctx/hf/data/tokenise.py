"""Tokenises documents: texts, prompts with completions, and conversations become rows of `input_ids` and `labels`.

These functions are public, and the recipes call them too. The label of a token is the token itself if it counts in the loss, and
-100 otherwise. In rows of plain text every token counts, so they have no column `labels`. `datasets` caches results under a
fingerprint of the data, the tokenizer and the settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from hf_longctx.hf.data.chat import (
    DataError,
    RenderedText,
    chat_tokenizer,
    check_offsets,
    read_messages,
    read_tools,
    render_chat,
)
from hf_longctx.hf.data.labels.counted import LOSS_WEIGHTS
from hf_longctx.hf.data.scan import PACKED, WEIGHTS, column_problem, mask_problems
from hf_longctx.hf.ranks.launch import on_first_rank
from hf_longctx.runtime.core.loss import IGNORE_INDEX

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)


class NothingToLearn(DataError):
    """Raised where no row has anything that training learns."""


Batch = dict[str, list[Any]]
Rows = dict[str, list[list[int]]]

_BATCH_ROWS = 64
# part of the cache's fingerprint; raise it when a row gives other tokens or labels than before
_RULES = 1
_TOKENS = Features({"input_ids": List(Value("int32"))})
_TOKENS_AND_LABELS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of a tokenised dataset: rows, tokens, and tokens that are learnt (the first token of a row never is)."""

    num_rows: int
    num_tokens: int
    num_label_tokens: int


def tokenise_text(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str] = ("text",), separator: str = "\n\n"
) -> Dataset:
    """Tokenises every document and ends it with the tokenizer's end-of-sequence token; leaves out rows without text.

    Several columns make one document: those that are not empty, in the given order, with `separator` between them.
    """
    return _mapped(dataset, _TextEncoder(tokenizer, tuple(columns), separator), _TOKENS, f"text in {', '.join(columns)}")


def tokenise_completions(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
) -> Dataset:
    """Tokenises prompt + completion + end-of-sequence token, with labels on the completion and the end token only.

    Prompt and completion are tokenised as one text; a token that spans the border belongs to the completion. Rows without a
    completion are left out. Raises DataError for a tokenizer that cannot say which characters a token covers.
    """
    check_offsets(tokenizer, "where the completion begins")
    encoder = _CompletionEncoder(tokenizer, prompt_column, completion_column)
    return _mapped(dataset, encoder, _TOKENS_AND_LABELS, f"text in {completion_column}")


def tokenise_chat(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    messages_column: str = "messages",
    *,
    row_numbers: Sequence[int] | None = None,
) -> Dataset:
    """Tokenises every conversation with the tokenizer's chat template, with labels on the assistant's tokens only.

    The template gets the column `tools` if there is one. The assistant's tokens are those with a character between the
    template's `{% generation %}` and `{% endgeneration %}`. A stock template without these markers is replaced by TRL's training
    template for it, if TRL is installed and has one; else the assistant's turns are found in the rendered text, and proven row
    by row. Conversations without any are left out, and a warning says how many. `row_numbers` are the row numbers for error
    messages, if `dataset` is a selection of another one.

    Raises DataError for a template or a row whose turns cannot be proven, for a tokenizer that cannot say which characters a
    token covers, and for malformed messages.
    """
    has_tools = "tools" in dataset.column_names
    tokenizer = chat_tokenizer(tokenizer, has_tools)
    encoder = _ChatEncoder(tokenizer, messages_column, has_tools, None if row_numbers is None else tuple(row_numbers))
    return _mapped(dataset, encoder, _TOKENS_AND_LABELS, "message of the assistant")


def joined(texts: Sequence[str | None], separator: str) -> str:
    """Joins the texts of a row's columns into one document."""
    return separator.join(text for text in texts if text)


def uniform(dataset: Dataset, has_labels: bool) -> Dataset:
    """Converts a tokenised dataset to int32 columns `input_ids` and, if `has_labels`, `labels` (the tokens, if it had none)."""
    if dropped := [column for column in (LOSS_WEIGHTS, *WEIGHTS, *PACKED) if column in dataset.column_names]:
        raise DataError(
            f"a dataset has a column {dropped[0]!r}, which mixing would drop; mix datasets without weights and with one document "
            f"per row, or remove the column"
        )
    if problem := column_problem(dataset.column_names, "a dataset"):
        raise DataError(problem)
    if "attention_mask" in dataset.column_names:
        for table in dataset.select_columns(["attention_mask"]).with_format("arrow").iter(1000):
            if problems := mask_problems("a dataset", table["attention_mask"]):
                raise DataError(problems[0])
    features = _TOKENS_AND_LABELS if has_labels else _TOKENS
    if has_labels and "labels" not in dataset.column_names:
        tokens = dataset.select_columns(["input_ids"])
        return tokens.map(lambda batch: {"labels": batch["input_ids"]}, batched=True, features=features, desc="add labels")
    return dataset.select_columns(list(features)).cast(features) if dataset.features != features else dataset


def count_tokens(dataset: Dataset) -> TokenCounts:
    """Counts the rows and tokens of a tokenised dataset in one pass."""
    num_tokens = num_label_tokens = 0
    for table in dataset.with_format("arrow").iter(1000):
        ids = pc.list_flatten(table["input_ids"])
        num_tokens += len(ids)
        if "labels" in table.column_names:
            tails = pc.list_flatten(pc.list_slice(table["labels"], 1))
            num_label_tokens += pc.sum(pc.not_equal(tails, IGNORE_INDEX)).as_py() or 0
        else:
            num_label_tokens += len(ids) - len(table)
    return TokenCounts(len(dataset), num_tokens, num_label_tokens)


# encoders are dataclasses, so that `datasets` finds the cached result of an encoder with equal fields


@dataclass(frozen=True)
class _TextEncoder:
    tokenizer: PreTrainedTokenizerBase
    columns: tuple[str, ...]
    separator: str
    rules: int = _RULES

    def __call__(self, batch: Batch, indices: list[int]) -> Rows:
        end = self.tokenizer.eos_token_id
        texts = [joined(texts, self.separator) for texts in zip(*(batch[column] for column in self.columns), strict=True)]
        texts = [text for text in texts if text]
        # documents above the tokenizer's own limit are what this package is for: ask for no warning
        ids = self.tokenizer(texts, verbose=False)["input_ids"] if texts else []
        return {"input_ids": [row if end is None or row[-1:] == [end] else [*row, end] for row in ids]}


@dataclass(frozen=True)
class _CompletionEncoder:
    tokenizer: PreTrainedTokenizerBase
    prompt_column: str
    completion_column: str
    rules: int = _RULES

    def __call__(self, batch: Batch, indices: list[int]) -> Rows:
        pairs = zip(batch[self.prompt_column], batch[self.completion_column], strict=True)
        texts = [
            RenderedText((prompt or "") + completion, ((len(prompt or ""), len(prompt or "") + len(completion)),))
            for prompt, completion in pairs
            if completion
        ]
        rows = _encode(self.tokenizer, texts, add_special_tokens=True)
        end = self.tokenizer.eos_token_id
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
            if end is not None:
                if ids[-1:] != [end]:
                    ids.append(end)
                    labels.append(end)
                labels[-1] = end
        return rows


@dataclass(frozen=True)
class _ChatEncoder:
    tokenizer: PreTrainedTokenizerBase
    messages_column: str
    has_tools: bool
    row_numbers: tuple[int, ...] | None
    rules: int = _RULES

    def __call__(self, batch: Batch, indices: list[int]) -> Rows:
        texts = []
        for place, index in enumerate(indices):
            row = f"row {index if self.row_numbers is None else self.row_numbers[index]} column {self.messages_column!r}"
            messages = read_messages(batch[self.messages_column][place], row)
            tools = read_tools(batch["tools"][place], row) if self.has_tools else None
            rendered = render_chat(self.tokenizer, messages, tools, row)
            if rendered.spans:
                texts.append(rendered)
        return _encode(self.tokenizer, texts, add_special_tokens=False)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[RenderedText], add_special_tokens: bool) -> Rows:
    """Tokenises texts, with labels on their spans only."""
    if not texts:
        return {"input_ids": [], "labels": []}
    encoded = tokenizer(
        [rendered.text for rendered in texts],
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        verbose=False,
    )
    labels = [
        _span_labels(ids, offsets, rendered)
        for ids, offsets, rendered in zip(encoded["input_ids"], encoded["offset_mapping"], texts, strict=True)
    ]
    return {"input_ids": encoded["input_ids"], "labels": labels}


def _span_labels(ids: list[int], offsets: list[tuple[int, int]], rendered: RenderedText) -> list[int]:
    """Labels of one text: in each span, the ids of the first to the last token with a character there; else IGNORE_INDEX."""
    starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    labels = [IGNORE_INDEX] * len(ids)
    for start, stop in rendered.spans:
        inside = np.flatnonzero((starts < stop) & (stops > start))
        if len(inside):
            first, last = int(inside[0]), int(inside[-1]) + 1
            labels[first:last] = ids[first:last]
        elif rendered.text[start:stop].strip():
            raise DataError(
                f"the tokenizer gives no token for {rendered.text[start:stop]!r:.60}, which should be learnt: its offsets do "
                f"not cover this text; use another version of the tokenizer"
            )
    return labels


def _mapped(dataset: Dataset, encoder: Callable[[Batch, list[int]], Rows], features: Features, needed: str) -> Dataset:
    """Encodes all rows of a dataset; logs how many the encoder left out, and raises DataError if it left out all of them."""
    tokens = dataset.map(
        encoder,
        batched=True,
        batch_size=_BATCH_ROWS,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=features,
        desc="tokenise",
    )
    if not len(tokens):
        raise NothingToLearn(f"none of the {len(dataset)} rows has any {needed}, so there is nothing to learn; check the column")
    if num_left_out := len(dataset) - len(tokens):
        logger.warning("%d of %d rows are left out, because they have no %s", num_left_out, len(dataset), needed)
    return tokens

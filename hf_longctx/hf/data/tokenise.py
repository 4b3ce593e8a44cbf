"""Tokenises documents: texts, prompts with completions, and conversations become rows of `input_ids` and `labels`.

These functions are public. The label of a token is the token itself if it counts in the loss, else -100. In rows of plain text
every token counts, so they have no column `labels`. `datasets` caches results by a fingerprint of data, tokenizer and settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Image, List, Value, Video
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_longctx.hf.data.chat import (
    DataError,
    RenderedText,
    RenderLimit,
    as_written,
    chat_tokenizer,
    check_offsets,
    keeps_nulls,
    read_messages,
    read_template_kwargs,
    read_tools,
    render_chat,
)
from hf_longctx.hf.data.fields import (
    CHAT_COLUMNS,
    IMAGE_COLUMNS,
    MEDIA,
    MEDIA_FILES,
    VIDEO_COLUMNS,
    WEIGHTS,
    chat_columns,
    filled_column_problem,
    listed_column_problem,
    media_problem,
    named_column_problem,
    text_columns,
)
from hf_longctx.hf.data.labels import LOSS_WEIGHTS, list_lengths
from hf_longctx.hf.data.media.images import MediaFile
from hf_longctx.hf.data.media.messages import file_of, media_of_row, place_media
from hf_longctx.hf.data.media.processors import MediaTokens, expanded, tokenizer_of
from hf_longctx.hf.data.media.rows import FILES_FEATURE, MEDIA_FEATURE
from hf_longctx.hf.data.padding import MASK, Padding, padding_of, unpadded
from hf_longctx.hf.data.scan import PACKED, column_problem, mask_problems
from hf_longctx.hf.ranks.launch import on_first_rank
from hf_longctx.runtime.core.loss import IGNORE_INDEX

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)


class NothingToLearn(DataError):
    """Raised if no row has anything to learn."""


Batch = dict[str, list[Any]]
Rows = dict[str, list[list[int]]]

_BATCH_ROWS = 64
# part of the cache's fingerprint; raise it if rows give other tokens or labels than before
_RULES = 2
# words in names of columns that classify texts, and do not select tokens to learn
_CLASSES = ("label", "labels")
_TOKENS = Features({"input_ids": List(Value("int32"))})
_TOKENS_AND_LABELS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of a tokenised dataset: rows, tokens, and learnt tokens (the first token of a row never is)."""

    num_rows: int
    num_tokens: int
    num_label_tokens: int


def tokenise_text(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str] = ("text",),
    separator: str = "\n\n",
    *,
    row_numbers: Sequence[int] | None = None,
) -> Dataset:
    """Tokenises every document and ends it with the tokenizer's end-of-sequence token; skips rows without text.

    Several columns form one document: those that are not empty, in the given order, with `separator` between them.
    row_numbers: row numbers for error messages, if `dataset` is a selection of another one. Raises DataError for a row with an
    image, video or sound in another column, and for columns that would be ignored although they may change what is learnt.
    """
    _check_columns(dataset, columns, allowed=_CLASSES)
    _check_media(dataset, columns, row_numbers)
    encoder = _TextEncoder(tokenizer, tuple(columns), separator, _as_tuple(row_numbers))
    return _mapped(dataset, encoder, _TOKENS, f"text in {', '.join(columns)}")


def tokenise_completions(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    *,
    row_numbers: Sequence[int] | None = None,
) -> Dataset:
    """Tokenises prompt + completion + end-of-sequence token, with labels on the completion and the end token only.

    Prompt and completion are tokenised as one text; a token across the border belongs to the completion. Rows without a
    completion are skipped. row_numbers: row numbers for error messages, if `dataset` is a selection of another one. With a
    model's processor in place of its tokenizer, texts have a placeholder for each image of the column `images` (or `image`).
    Raises DataError for a row without text, for a row with an image, video or sound that is not read, and for a tokenizer that
    does not give the characters of each token.
    """
    images = None
    if isinstance(tokenizer, ProcessorMixin):
        images, tokenizer = MediaTokens(tokenizer), tokenizer_of(tokenizer)
        dataset = _undecoded(dataset)
    check_offsets(tokenizer, "where the completion begins")
    _check_columns(dataset, (prompt_column, completion_column))
    _check_media(dataset, (prompt_column, completion_column, *_columns_of(images)), row_numbers)
    encoder = _CompletionEncoder(tokenizer, prompt_column, completion_column, _as_tuple(row_numbers), images)
    return _mapped(dataset, encoder, _features_of(images), f"text in {completion_column}")


def tokenise_chat(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    messages_column: str = "messages",
    *,
    row_numbers: Sequence[int] | None = None,
) -> Dataset:
    """Tokenises every conversation with the tokenizer's chat template, with labels on the assistant's tokens only.

    The template gets the columns `tools` and `chat_template_kwargs`, if present. The assistant's tokens are those with a
    character between the template's `{% generation %}` and `{% endgeneration %}`. A stock template without these markers is
    replaced by TRL's training template for it, if TRL is installed and has one; otherwise the assistant's turns are found in the
    rendered text, and proven row by row. Turns with flags against learning (`weight`, `loss`, `train`, ...) are not learnt.
    Conversations without any turn to learn are skipped, with a warning that counts them. row_numbers: row numbers for error
    messages, if `dataset` is a selection of another one.

    With a model's processor in place of its tokenizer, conversations may have images: parts `{type: image}` with a path, or with
    the next image of the column `images` (or `image`). Without such parts, the images of that column stand before the first text
    of a user. Videos are given likewise: parts `{type: video}`, and the column `videos` (or `video`), as files or as frames with
    their times. Only headers of files are read, since the size of an image decides how many tokens it takes. No token of an image
    or a video is learnt. The result has columns `media`, with their places, and `media_files`.

    Raises DataError for a template or a row whose turns cannot be proven, for a tokenizer that does not give the characters of
    each token, for malformed messages, for a row with an image, video or sound that is not read, and for columns and message
    fields that would be ignored although they may change what is learnt.
    """
    images = None
    if isinstance(tokenizer, ProcessorMixin):
        images, tokenizer = MediaTokens(tokenizer), tokenizer_of(tokenizer)
        dataset = _undecoded(dataset)
    tokenizer = chat_tokenizer(tokenizer, "tools" in dataset.column_names)
    read = _check_chat_columns(dataset, messages_column, tokenizer)
    _check_media(dataset, (messages_column, *_columns_of(images)), row_numbers)
    features = None if keeps_nulls(dataset) else Features({name: dataset.features[name] for name in read})
    encoder = _ChatEncoder(tokenizer, messages_column, read, features, _as_tuple(row_numbers), images)
    return _mapped(dataset, encoder, _features_of(images), "message of the assistant that is learnt")


def _features_of(images: MediaTokens | None) -> Features:
    """Returns the columns of tokenised rows, those with images too; says once what is not learnt of these."""
    if images is None:
        return _TOKENS_AND_LABELS
    logger.warning("no token of an image or a video is learnt: their labels are %d", IGNORE_INDEX)
    return Features({**_TOKENS_AND_LABELS, MEDIA: MEDIA_FEATURE, MEDIA_FILES: FILES_FEATURE})


def _columns_of(images: MediaTokens | None) -> tuple[str, ...]:
    """The columns with images, and with videos if the processor reads them; none for rows of text."""
    return () if images is None else (*IMAGE_COLUMNS, *(VIDEO_COLUMNS if "video" in images.kinds else ()))


def _undecoded(dataset: Dataset) -> Dataset:
    """Returns the dataset with images and videos as files, whose pixels nothing decodes."""
    for name in (*IMAGE_COLUMNS, *VIDEO_COLUMNS):
        feature = dataset.features.get(name)
        own = feature.feature if isinstance(feature, List) else feature
        if isinstance(own, Image | Video) and own.decode:
            file = type(own)(decode=False)
            dataset = dataset.cast_column(name, List(file) if isinstance(feature, List) else file)
    return dataset


def _as_tuple(row_numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if row_numbers is None else tuple(row_numbers)


def _check_columns(dataset: Dataset, read: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Raises DataError for a column that would be ignored although it masks or weighs what is learnt."""
    _check_present(dataset, read)
    columns = {name: is_text for name, is_text in text_columns(dataset).items() if name not in read}
    if problem := named_column_problem(columns, "the dataset", allowed):
        raise DataError(problem)


def _check_media(dataset: Dataset, read: Sequence[str], row_numbers: Sequence[int] | None) -> None:
    """Raises DataError for the first row with an image, video or sound that would be ignored."""
    if problem := media_problem(dataset, read, lambda place: _row(place, _as_tuple(row_numbers))):
        raise DataError(problem)


def _check_present(dataset: Dataset, read: Sequence[str]) -> None:
    """Raises DataError for a required column that is missing."""
    if missing := [name for name in read if name not in dataset.column_names]:
        raise DataError(
            f"the dataset has no column {missing[0]!r} (it has {', '.join(dataset.column_names)}); give the name of the column "
            f"that holds it"
        )


def _check_chat_columns(dataset: Dataset, messages_column: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Returns the columns of conversations to read. Raises DataError for others that may change text or learning."""
    _check_present(dataset, [messages_column])
    read = tuple(name for name in dataset.column_names if name == messages_column or name in CHAT_COLUMNS)
    columns = text_columns(dataset)
    template = tokenizer.get_chat_template(None, [] if "tools" in columns else None)
    problem, others = chat_columns(columns, read, template, "the dataset")
    if problem is None:
        first = dataset.select(range(min(len(dataset), _BATCH_ROWS)))[:]
        lengths = [len(value) if isinstance(value, list) else 0 for value in first[messages_column]]
        lists = {name: [_num_numbers(value) for value in first[name]] for name in others}
        problem = listed_column_problem("the dataset", lengths, lists, "message")
    if problem is not None:
        raise DataError(problem)
    if others:
        logger.warning("columns not read: %s", ", ".join(others))
    # `apply_chat_template` also drops null keys of messages
    names = [] if keeps_nulls(dataset) else [key for name in read for key in _null_keys(dataset, name, name == messages_column)]
    if names:
        logger.warning(
            "nulls of %s are taken for keys that Arrow added to rows, and left out; if they are meant as nulls, read "
            "the data from JSON files",
            ", ".join(names),
        )
    return read


def _null_keys(dataset: Dataset, column: str, is_messages: bool) -> list[str]:
    """Returns keys inside a column's structs that are null in some rows and not in others."""
    found: dict[str, None] = {}

    def look(array: pa.Array, path: str, is_left_out: bool) -> None:
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            look(array.flatten(), path, is_left_out)
        elif pa.types.is_struct(array.type):
            for name, child in zip(array.type.names, (array.field(i) for i in range(array.type.num_fields)), strict=True):
                is_null = pc.and_(array.is_valid(), child.is_null())
                if not is_left_out and not pa.types.is_null(child.type) and pc.any(is_null).as_py():
                    found[f"{path}.{name}"] = None
                look(child, f"{path}.{name}", False)

    for chunk in dataset.data.column(column).chunks:
        look(chunk, column, is_messages)
    return list(found)


def _num_numbers(value: Any) -> int | None:
    """Counts the numbers in a list; None for another value."""
    is_list = isinstance(value, list) and all(isinstance(item, bool | int | float) for item in value)
    return len(value) if is_list else None


def joined(texts: Sequence[str | None], separator: str) -> str:
    """Joins the texts of a row's columns into one document."""
    return separator.join(text for text in texts if text)


def uniform(dataset: Dataset, has_labels: bool) -> Dataset:
    """Converts a tokenised dataset to int32 columns `input_ids` and, if `has_labels`, `labels` (the tokens, if it had none)."""
    if dropped := [column for column in (LOSS_WEIGHTS, *WEIGHTS, *PACKED, MEDIA) if column in dataset.column_names]:
        raise DataError(
            f"a dataset has a column {dropped[0]!r}, which mixing would drop; mix datasets without weights and images, with one "
            f"document per row, or remove the column"
        )
    if problem := column_problem(text_columns(dataset), "a dataset"):
        raise DataError(problem)
    if MASK in dataset.column_names:
        dataset = _unpadded(dataset)
    features = _TOKENS_AND_LABELS if has_labels else _TOKENS
    if has_labels and "labels" not in dataset.column_names:
        tokens = dataset.select_columns(["input_ids"])
        return tokens.map(lambda batch: {"labels": batch["input_ids"]}, batched=True, features=features, desc="add labels")
    return dataset.select_columns(list(features)).cast(features) if dataset.features != features else dataset


def _unpadded(dataset: Dataset) -> Dataset:
    """Removes the padding at the ends of rows."""
    names = [name for name in ("input_ids", "labels", MASK) if name in dataset.column_names]
    padding, num_rows = Padding(), 0
    for table in dataset.select_columns(names).with_format("arrow").iter(1000):
        padding += padding_of(table)
        kept = unpadded(table)
        if problems := mask_problems("a dataset", kept[MASK], list_lengths(kept["input_ids"]), num_rows):
            raise DataError(problems[0])
        num_rows += len(table)
    if not padding.num_tokens:
        return dataset
    logger.warning("%s tokens of padding in %s rows are left out", f"{padding.num_tokens:,}", f"{padding.num_rows:,}")
    rows = dataset.select_columns(names).with_format("arrow")
    return rows.map(unpadded, batched=True, desc="leave padding out").with_format(None)


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


# encoders are dataclasses, so that `datasets` reuses the cached result of an encoder with equal fields


@dataclass(frozen=True)
class _TextEncoder:
    tokenizer: PreTrainedTokenizerBase
    columns: tuple[str, ...]
    separator: str
    row_numbers: tuple[int, ...] | None
    rules: int = _RULES

    def __call__(self, batch: Batch, indices: list[int]) -> Rows:
        end = self.tokenizer.eos_token_id
        for column in self.columns:
            _check_texts(batch[column], column, indices, self.row_numbers)
        texts = [joined(texts, self.separator) for texts in zip(*(batch[column] for column in self.columns), strict=True)]
        texts = [text for text in texts if text]
        # no warning for documents above the tokenizer's own limit, which are what this package is for
        ids = self.tokenizer(texts, verbose=False)["input_ids"] if texts else []
        return {"input_ids": [row if end is None or row[-1:] == [end] else [*row, end] for row in ids]}


@dataclass(frozen=True)
class _CompletionEncoder:
    tokenizer: PreTrainedTokenizerBase
    prompt_column: str
    completion_column: str
    row_numbers: tuple[int, ...] | None
    # the tokens of images; None for rows of text
    images: MediaTokens | None = None
    rules: int = _RULES

    def __call__(self, batch: Batch, indices: list[int]) -> Batch:
        for column in (self.prompt_column, self.completion_column):
            _check_texts(batch[column], column, indices, self.row_numbers)
        pairs = zip(batch[self.prompt_column], batch[self.completion_column], strict=True)
        texts = [
            RenderedText((prompt or "") + completion, ((len(prompt or ""), len(prompt or "") + len(completion)),))
            for prompt, completion in pairs
            if completion
        ]
        if self.images is not None:
            texts = [self.images.framed(each) for each in texts]
        rows = _encode(self.tokenizer, texts, add_special_tokens=True)
        end = self.tokenizer.eos_token_id
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
            if end is not None:
                if ids[-1:] != [end]:
                    ids.append(end)
                    labels.append(end)
                labels[-1] = end
        if self.images is None:
            return rows
        found = []
        for place, index in enumerate(indices):
            if batch[self.completion_column][place]:
                where = _row(index, self.row_numbers)
                columns = {name: batch[name][place] for name in _columns_of(self.images) if name in batch}
                given = media_of_row(columns, where).items()
                found.append((where, [file_of(k, each, f"{where} {k} {i}") for k, own in given for i, each in enumerate(own)]))
        return _with_images(rows, found, self.images)


@dataclass(frozen=True)
class _ChatEncoder:
    """Encodes conversations. columns: columns to read. features: their features, unless all nulls come from a file."""

    tokenizer: PreTrainedTokenizerBase
    messages_column: str
    columns: tuple[str, ...]
    features: Features | None
    row_numbers: tuple[int, ...] | None
    # the tokens of images; None for rows of text
    images: MediaTokens | None = None
    rules: int = _RULES

    def __call__(self, batch: Batch, indices: list[int]) -> Batch:
        texts: list[RenderedText] = []
        # the name of every row with text to learn, and its images
        found: list[tuple[str, list[MediaFile]]] = []
        with RenderLimit() as limit:
            for place, index in enumerate(indices):
                where = _row(index, self.row_numbers)
                row = {name: batch[name][place] for name in self.columns}
                if self.features is not None:
                    row = {name: as_written(value, self.features[name]) for name, value in row.items()}
                own = f"{where} column {self.messages_column!r}"
                messages = read_messages(row.pop(self.messages_column), own, self.images is not None)
                files: list[MediaFile] = []
                if self.images is not None:
                    messages, files = place_media(messages, media_of_row(row, where), self.images.kinds, own)
                tools = read_tools(row.pop("tools", None), own)
                variables = read_template_kwargs(row.pop("chat_template_kwargs", None), where)
                if problem := filled_column_problem(row, messages, where):
                    raise DataError(problem)
                rendered = render_chat(self.tokenizer, messages, tools, own, variables, limit)
                if rendered.spans:
                    texts.append(rendered if self.images is None else self.images.framed(rendered))
                    found.append((where, files))
        rows = _encode(self.tokenizer, texts, add_special_tokens=False)
        return rows if self.images is None else _with_images(rows, found, self.images)


def _with_images(rows: Rows, found: list[tuple[str, list[MediaFile]]], images: MediaTokens) -> Batch:
    """Puts the tokens of images and videos into rows. found: name and files of every row."""
    made: Batch = {"input_ids": [], "labels": [], MEDIA: [], MEDIA_FILES: []}
    for ids, labels, (where, given) in zip(rows["input_ids"], rows["labels"], found, strict=True):
        new_ids, new_labels, media, files = expanded(ids, labels, given, images, where, IGNORE_INDEX)
        made["input_ids"].append(new_ids)
        made["labels"].append(new_labels)
        made[MEDIA].append([each.as_item() for each in media])
        made[MEDIA_FILES].append([file.as_item() for file in files])
    return made


def _row(index: int, row_numbers: tuple[int, ...] | None) -> str:
    """Returns the name of a row in messages."""
    return f"row {index if row_numbers is None else row_numbers[index]}"


def _check_texts(values: list[Any], column: str, indices: list[int], row_numbers: tuple[int, ...] | None) -> None:
    """Raises DataError for a value that is neither text nor None."""
    for index, value in zip(indices, values, strict=True):
        if value is not None and not isinstance(value, str):
            remedy = (
                "; write prompt and completion into one column of messages and use tokenise_chat"
                if value and (isinstance(value, list) and isinstance(value[0], dict))
                else "; correct the row, or remove it"
            )
            raise DataError(f"{_row(index, row_numbers)} column {column!r} holds {value!r:.60}, expected text{remedy}")


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
    """Returns labels of one text: in each span, the ids from the first to the last token in it; else IGNORE_INDEX."""
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


def _mapped(dataset: Dataset, encoder: Callable[[Batch, list[int]], Any], features: Features, needed: str) -> Dataset:
    """Encodes all rows of a dataset; logs how many the encoder skipped, and raises DataError if it skipped all."""
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

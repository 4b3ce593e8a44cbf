"""Turns the dataset settings of `sft.py` into training and held-out rows of tokens.

Runs before the model is loaded, so that errors in settings or data show at once.
"""

from __future__ import annotations

import difflib
import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.mixture import Stopping, concatenated, held_out_counts, mix_datasets, without_copies
from hf_longctx.hf.data.tokenise import NothingToLearn, count_tokens, joined, tokenise_chat, tokenise_completions, tokenise_text
from hf_longctx.recipes.key_values import key_value_rows

# documents in the made-up dataset `key-values`, unless max_documents says otherwise
_NUM_KEY_VALUES = 512
_FILE_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_HINTS = {"messages": "messages_column", "conversations": "messages_column", "prompt": "prompt_column and completion_column"}

_SEPARATOR = "\n\n"
STANDARD_LIBRARY = "python-stdlib"
KEY_VALUES = "key-values"


@dataclass(frozen=True, slots=True)
class Source:
    """One dataset of the settings, and which of its columns are trained on: text, messages, or a prompt and its completion."""

    path: str
    config: str | None = None
    split: str = "train"
    text_column: tuple[str, ...] = ()
    column_separator: str = _SEPARATOR
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    weight: float | None = None
    max_documents: int | None = None

    def __post_init__(self) -> None:
        kinds = {
            "text_column": self.text_column,
            "messages_column": self.messages_column,
            "prompt_column and completion_column": self.prompt_column or self.completion_column,
        }
        given = [name for name, value in kinds.items() if value]
        if len(given) > 1:
            raise ValueError(f"dataset {self.path} has {' and '.join(given)}; give only one, which says what is trained on")
        if bool(self.prompt_column) != bool(self.completion_column):
            raise ValueError(f"dataset {self.path} needs both prompt_column and completion_column, or neither")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ValueError(f"dataset {self.path} has weight {self.weight}; give a positive number, or leave the dataset out")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"dataset {self.path} has max_documents {self.max_documents}; give a positive number")
        if not given:
            object.__setattr__(self, "text_column", ("text",))
        if self.column_separator != _SEPARATOR and len(self.text_column) < 2:
            raise ValueError(
                f"dataset {self.path} has a column_separator but only one text_column; name several columns, or leave it out"
            )
        if self.path == STANDARD_LIBRARY and len(self.text_column) != 1:
            raise ValueError(f"dataset {STANDARD_LIBRARY} has one column of text; leave its column settings out")
        if self.path == KEY_VALUES and self.text_column != ("text",):
            raise ValueError(f"dataset {KEY_VALUES} consists of tokens, not columns; leave its column settings out")

    @classmethod
    def from_mapping(cls, mapping: Any, setting: str) -> Source:
        """Makes a source from a settings entry like {path: chats.jsonl, messages_column: messages, weight: 2}."""
        if not isinstance(mapping, dict) or not isinstance(mapping.get("path"), str):
            raise ValueError(f"{setting}: an entry is {mapping!r:.80}, expected a mapping with a path and its columns")
        known = {field.name for field in fields(cls)}
        for name, value in mapping.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
                raise ValueError(f"{setting}: unknown key {name!r} of dataset {mapping['path']}; {hint}")
            _check_type(name, value, f"{setting}: {name} of dataset {mapping['path']}")
        columns = mapping.get("text_column", ())
        return cls(**{**mapping, "text_column": (columns,) if isinstance(columns, str) else tuple(columns)})

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the dataset must have."""
        named = (*self.text_column, self.messages_column, self.prompt_column, self.completion_column)
        return tuple(name for name in named if name)

    @property
    def column_setting(self) -> str:
        """The setting that names these columns."""
        if self.messages_column:
            return "messages_column"
        return "prompt_column and completion_column" if self.prompt_column else "text_column"


@dataclass(frozen=True, slots=True)
class Documents:
    """Tokenised rows for training and evaluation, and lines that describe them."""

    train: datasets.Dataset
    held_out: datasets.Dataset | None
    lines: tuple[str, ...]


def check_sources(sources: Sequence[Source], held_out: Source | None) -> None:
    """Raises ValueError if only some datasets have weights, or if the held-out dataset is also trained on."""
    if len({source.weight is None for source in sources}) > 1:
        without = next(source.path for source in sources if source.weight is None)
        raise ValueError(f"dataset {without} has no weight, but others have one; give all of them a weight, or none")
    if held_out and held_out.weight is not None:
        raise ValueError(f"eval_dataset {held_out.path} has a weight, which has no effect; leave it out")
    for source in sources:
        if held_out and (source.path, source.config, source.split) == (held_out.path, held_out.config, held_out.split):
            raise ValueError(
                f"eval_dataset {held_out.path} is also trained on; give another file or split, or use eval_documents to hold out "
                f"some of its documents"
            )


def load_tokens(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    held_out: int | Source = 0,
    max_document_chars: int | None = None,
    mix_until: Stopping = "first_exhausted",
    most_tokens: int | None = None,
) -> Documents:
    """Loads, tokenises and mixes the sources.

    Holds out `held_out` of their documents, drawn by seed, or all documents of another source. No held-out document stays in
    the training set, not even as a copy in another row. Raises DataError, before anything long begins, for files, columns and
    templates that cannot be used in any source, and for a document of more than `most_tokens`.
    """
    every = [*sources, held_out] if isinstance(held_out, Source) else list(sources)
    opened = [_opened(source, seed, max_document_chars) for source in every]
    for rows in opened:
        rows.try_out(tokenizer, most_tokens)
    sets = [rows.tokenised(tokenizer) for rows in opened[: len(sources)]]
    weights = [source.weight for source in sources if source.weight is not None] or None
    others: datasets.Dataset | None = None
    if isinstance(held_out, Source):
        others = opened[-1].tokenised(tokenizer)
    elif held_out:
        counts = held_out_counts(held_out, [len(tokens) for tokens in sets], weights)
        others = concatenated([tokens.select(range(count)) for tokens, count in zip(sets, counts, strict=True)])
        sets = [tokens.select(range(count, len(tokens))) for tokens, count in zip(sets, counts, strict=True)]
    lines = [_line(source.path, tokens) for source, tokens in zip(sources, sets, strict=True)]
    if others is not None:
        lines.append(_line("held out", others))
        unique = [without_copies(tokens, others) for tokens in sets]
        if num_copies := sum(map(len, sets)) - sum(map(len, unique)):
            lines.append(f"{num_copies} training documents are left out, because they are copies of held-out ones")
        sets = unique
    train = sets[0]
    if len(sources) > 1:
        train = mix_datasets(sets, weights, stopping=mix_until, seed=seed)
        how = "all documents" if weights is None else f"weights {', '.join(f'{weight:g}' for weight in weights)}, {mix_until}"
        lines.append(_line(f"mix ({how})", train))
    return Documents(train, others, tuple(lines))


@dataclass(frozen=True, slots=True)
class _Opened:
    """The rows of a source that are used (None: made-up ones), in an order drawn by seed; `order`: their numbers in the file."""

    source: Source
    seed: int
    documents: datasets.Dataset | None = None
    order: tuple[int, ...] = ()

    def try_out(self, tokenizer: PreTrainedTokenizerBase, most_tokens: int | None) -> None:
        """Tokenises the longest row alone. Raises DataError if that cannot be, or if it has more than `most_tokens`."""
        if self.documents is None:
            return
        place = _longest_row(self.documents, self.source)
        # apart from the file, so that no result goes to its cache
        row = datasets.Dataset(self.documents.select([place]).with_format("arrow")[:])
        shows = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            tokens = self._encoded(row, tokenizer, self.order[place : place + 1])
        except NothingToLearn:
            # other rows may have something
            return
        finally:
            if shows:
                datasets.enable_progress_bars()
        if most_tokens is not None and (count := len(tokens[0]["input_ids"])) > most_tokens:
            raise DataError(
                f"dataset {self.source.path}: row {self.order[place]} has {count:,} tokens, above max_length {most_tokens:,}; "
                f"set long_sequences to truncate to drop the tail, or to split to cut it into independent documents, or raise "
                f"max_length"
            )

    def tokenised(self, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
        """All rows as tokens; raises DataError if none is left."""
        if self.documents is None:
            return key_value_rows(self.source.max_documents or _NUM_KEY_VALUES, random.Random(self.seed))
        return self._encoded(self.documents, tokenizer, self.order)

    def _encoded(self, documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, order: Sequence[int]) -> datasets.Dataset:
        source = self.source
        try:
            if source.messages_column:
                return tokenise_chat(documents, tokenizer, source.messages_column, row_numbers=order)
            if source.prompt_column and source.completion_column:
                return tokenise_completions(
                    documents, tokenizer, source.prompt_column, source.completion_column, row_numbers=order
                )
            return tokenise_text(documents, tokenizer, source.text_column, source.column_separator, row_numbers=order)
        except DataError as error:
            raise type(error)(f"dataset {source.path}: {error}") from error


def _opened(source: Source, seed: int, max_document_chars: int | None) -> _Opened:
    """Opens the source's documents in an order drawn by seed, at most `max_documents` of them."""
    if source.path == KEY_VALUES:
        if max_document_chars is not None:
            raise DataError(
                f"max_document_chars is for text, but dataset {KEY_VALUES} consists of tokens; use max_length instead"
            )
        return _Opened(source, seed)
    documents = _load(source)
    _check_columns(documents, source)
    if source.text_column:
        longest, separator = max_document_chars or sys.maxsize, source.column_separator
        documents = documents.filter(
            lambda *texts: 0 < len(joined(texts, separator)) <= longest, input_columns=list(source.text_column)
        )
    elif max_document_chars is not None:
        raise DataError(f"max_document_chars is for text, but dataset {source.path} has other columns; use max_length instead")
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    order = order[: source.max_documents]
    if not order:
        raise DataError(f"dataset {source.path} has no documents left; check its columns and max_document_chars")
    return _Opened(source, seed, documents.select(order), tuple(order))


def _longest_row(documents: datasets.Dataset, source: Source) -> int:
    """The row with the most bytes in the columns that are used."""
    most, longest, first = -1, 0, 0
    for batch in documents.select_columns(list(source.columns)).iter(1000):
        for place, values in enumerate(zip(*(batch[name] for name in source.columns), strict=True)):
            if (size := sum(_size(value) for value in values)) > most:
                most, longest = size, first + place
        first += len(batch[source.columns[0]])
    return longest


def _size(value: Any) -> int:
    """Number of characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0


def _load(source: Source) -> datasets.Dataset:
    path = Path(source.path)
    if source.path == STANDARD_LIBRARY:
        return datasets.Dataset.from_dict({source.text_column[0]: standard_library_sources()})
    if (path / "dataset_dict.json").exists():
        splits = datasets.load_from_disk(source.path)
        if source.split not in splits:
            raise DataError(f"dataset {source.path} has no split {source.split!r}; it has {', '.join(map(str, splits))}")
        return splits[source.split]
    is_saved = (path / "dataset_info.json").exists()
    if (is_saved or path.suffix in _FILE_KINDS) and source.split != "train":
        raise DataError(f"dataset {source.path} has no splits, but split is {source.split!r}; leave the split out")
    if is_saved:
        return datasets.load_from_disk(source.path)
    if path.suffix not in _FILE_KINDS:
        try:
            return datasets.load_dataset(source.path, source.config, split=source.split)
        except (OSError, ValueError) as error:
            raise DataError(f"dataset {source.path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not path.is_file() or not path.stat().st_size:
        raise DataError(f"dataset {source.path} {'is empty' if path.is_file() else 'does not exist'}; check the path")
    kind = _FILE_KINDS[path.suffix]
    try:
        return datasets.load_dataset(kind, data_files=str(path), split="train")
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DataError(f"dataset {source.path} cannot be read as {kind}: {reason:.200}; correct the file") from error


def _check_columns(documents: datasets.Dataset, source: Source) -> None:
    for column in source.columns:
        if column not in documents.column_names:
            found = [_HINTS[name] for name in documents.column_names if name in _HINTS] if source.text_column else []
            raise DataError(
                f"dataset {source.path} has no column {column!r}; it has {', '.join(documents.column_names)} "
                f"(set {(found or [source.column_setting])[0]})"
            )
        kind = documents.features[column]
        if column != source.messages_column and getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise DataError(
                f"column {column!r} of {source.path} holds {kind}, expected text; name another column, or name a column of "
                f"messages in messages_column (join a prompt and a completion that are messages into one such column)"
            )


def _check_type(name: str, value: Any, where: str) -> None:
    """Raises ValueError unless a settings value has the type of its key."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "weight":
        good, expected = value is None or is_number, "a number"
    elif name == "max_documents":
        good, expected = value is None or (is_number and isinstance(value, int)), "a whole number"
    elif name == "text_column":
        names = [value] if isinstance(value, str) else value
        good, expected = isinstance(names, list) and bool(names) and all(isinstance(n, str) for n in names), "one or more names"
    else:
        good, expected = isinstance(value, str) or (value is None and name not in ("split", "column_separator")), "text"
    if not good:
        raise ValueError(f"{where} is {value!r}, expected {expected}")


def standard_library_sources() -> list[str]:
    """Returns the text of every module in this Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = [file for file in sorted(root.rglob("*.py")) if not skipped & set(file.relative_to(root).parts)]
    return [text for file in files if (text := file.read_text(encoding="utf-8", errors="replace")).strip()]


def _line(name: str, tokens: datasets.Dataset) -> str:
    counts = count_tokens(tokens)
    share = counts.num_label_tokens / max(counts.num_tokens, 1)
    return f"{name}: {counts.num_rows:,} documents, {counts.num_tokens:,} tokens, {share:.1%} with loss"

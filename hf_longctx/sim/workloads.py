"""Reads sequence lengths from files, dataset columns or distributions, and draws the steps of a forecast from them.

Called by `hf-longctx plan --lengths` and by benchmarks. Text files, also gzipped ones, are read line by line, within limits,
since a small file may unpack to more than memory holds.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from zlib import error as ZlibError

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.messages import shown
from hf_longctx.plan.core.serialize import parse_json
from hf_longctx.plan.core.types import Media

# bytes to which any gzipped file may unpack; larger ones must have at most this ratio, as text, numbers and JSON have
_MOST_UNPACKED_BYTES, _MOST_RATIO = 2**26, 50
_BLOCK_BYTES = 2**20


def text_lines(path: Path, most_chars: int = sys.maxsize) -> Iterator[str]:
    """Yields lines of a text file with their ends.

    Raises ValueError for a file that is no text or unpacks to far more than its size, and for a line above `most_chars`.
    """
    try:
        if path.suffix == ".gz":
            _check_unpacked(path)
        with _opened(path) as file:
            number = 0
            # one character more, for the end of the line
            while line := file.readline(min(most_chars, sys.maxsize - 1) + 1):
                number += 1
                if len(line.rstrip("\n")) > most_chars:
                    raise ValueError(
                        f"{path}, line {number} has more than {most_chars:,} characters; give a file of shorter lines"
                    )
                yield line
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, ZlibError) as error:
        raise ValueError(f"{path} is not a text file ({error}); give one in UTF-8, or packed by gzip as .gz") from None


def _check_unpacked(path: Path) -> None:
    left = max(_MOST_UNPACKED_BYTES, _MOST_RATIO * path.stat().st_size)
    with gzip.open(path) as file:
        while block := file.read(_BLOCK_BYTES):
            left -= len(block)
            if left < 0:
                raise ValueError(f"{path} unpacks to more than {_MOST_RATIO} times its size; if it is meant to, unpack it first")


def _opened(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig")


IntArray = NDArray[np.int64]

# largest length; larger numbers are mistakes, for example ids, byte offsets or hashes
MAX_LENGTH = 1 << 31

_COLUMN_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
# files that may be a table, if a column is named, or a histogram
_TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_FORMS = (
    "one length per line (.gz too), a histogram file ('length count' lines), a column (FILE.jsonl:COLUMN, .json, .csv, "
    ".parquet), or lognormal:MU,SIGMA"
)
# columns with the images and videos of a conversation
_IMAGES = ("images", "image", "videos", "video")
_NEEDED = "a list of token ids (integers) or an integer is needed, or text or messages with --tokenizer"
_EXAMPLE = "lognormal:6.963,1.6 for a median of exp(6.963) = 1057 tokens"
# most sequences drawn without replacement; with more, replacement makes no difference
_MAX_EXPANDED = 20_000_000
# most draws from a distribution until enough lengths are within the limit
_MAX_DRAWS = 50
# characters of the longest line of lengths, and of the longest row with a text or token ids
_MAX_LINE_CHARS, _MAX_ROW_CHARS = 2**10, 2**28
# lines of lengths that are parsed at once
_BATCH_LINES = 2**16
# most sequences of one length in a histogram, and most tokens of a workload, which fit into 64 bits
_MAX_COUNT, _MAX_TOKENS = 2**40, 2**62


@dataclass(frozen=True, slots=True)
class UncountedRow:
    """A text, or messages of a conversation with tools, whose tokens a tokenizer must count. place: file and line."""

    place: str
    value: Any
    tools: Any = None
    # values of the columns with images and videos, by their names
    images: Mapping[str, Any] = field(default_factory=dict)


# returns the number of tokens of every row; 0 for rows to skip
CountTokens = Callable[[Sequence[UncountedRow]], list[int]]


@dataclass(frozen=True)
class Workload:
    """Numbers of sequences (`counts`) with each of the ascending `lengths`. num_dropped: sequences longer than `limit`.

    media: for a length, the images of every sequence that has it; empty without images.
    """

    source: str
    lengths: IntArray
    counts: IntArray
    limit: int
    num_dropped: int = 0
    media: Mapping[int, Sequence[Media]] = field(default_factory=dict)

    def media_of(self, lengths: Sequence[int]) -> tuple[Media, ...]:
        """Returns the images of sequences of these lengths, those of equal length one after the other; () without any."""
        taken = {length: itertools.cycle(same) for length, same in self.media.items()}
        found = tuple(next(taken[length], ()) if length in taken else () for length in lengths)
        return found if any(found) else ()

    @property
    def num_sequences(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.lengths @ self.counts)

    @property
    def longest(self) -> int:
        return int(self.lengths[-1])

    def quantile(self, share: float) -> int:
        """Returns the length that this share of the sequences does not exceed."""
        index = int(np.searchsorted(np.cumsum(self.counts), share * self.num_sequences))
        return int(self.lengths[min(index, len(self.lengths) - 1)])

    def draw_steps(self, num_steps: int, global_batch: int, seed: int) -> tuple[tuple[int, ...], ...]:
        """Draws the lengths of up to `num_steps` steps of `global_batch` sequences, no sequence twice, shuffled by `seed`.

        There are fewer steps if the workload has too few sequences. Raises ValueError if it does not fill one step.
        """
        if num_steps < 1 or global_batch < 1:
            raise ValueError(f"{num_steps} steps of {global_batch} sequences were asked for; both must be at least 1")
        if global_batch > self.num_sequences:
            raise ValueError(
                f"a step of {global_batch} sequences was asked for, but {self.source} holds {self.num_sequences}; lower "
                f"--global-batch to that or less"
            )
        num_steps = min(num_steps, self.num_sequences // global_batch)
        count = num_steps * global_batch
        random = np.random.default_rng(seed)
        if self.num_sequences > _MAX_EXPANDED:
            drawn = random.choice(self.lengths, count, p=self.counts / self.num_sequences)
        else:
            drawn = random.permutation(np.repeat(self.lengths, self.counts))[:count]
        return tuple(tuple(step) for step in drawn.reshape(num_steps, global_batch).tolist())


def read_workload(
    text: str, limit: int | None = None, num_sampled: int = 0, seed: int = 0, count_tokens: CountTokens | None = None
) -> Workload:
    """Reads a workload from a file, a column of a file, or `lognormal:mu,sigma`, from which `num_sampled` are drawn.

    Sequences longer than `limit` are dropped and counted. count_tokens: counts columns of text and conversations. Raises
    ValueError with file and line for a value that is no length.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit is {limit} tokens; it must be at least 1")
    if text.startswith("lognormal:"):
        lengths = _sample_lognormal(text, max(1, num_sampled), seed, limit or MAX_LENGTH)
        return _collect(text, lengths, np.ones(len(lengths), dtype=np.int64), limit)
    path, column = _split_column(text)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"lengths are read from {str(path)!r}, which {problem}; give {_FORMS}")
    if column:
        lengths = _column_lengths(path, column, count_tokens)
        return _collect(text, lengths, np.ones(len(lengths), dtype=np.int64), limit)
    if str(path).endswith(_COLUMN_SUFFIXES):
        raise ValueError(f"{path} has columns; name the one with the tokens or their number, for example {path}:input_ids")
    return _collect(text, *_read_text(path), limit)


def _split_column(text: str) -> tuple[Path, str]:
    """Splits FILE:COLUMN into path and column; the column is empty if the whole text names a file."""
    name, colon, column = text.rpartition(":")
    if not colon or Path(text).exists() or not name.endswith(_COLUMN_SUFFIXES + _TABLE_SUFFIXES):
        return Path(text), ""
    return Path(name), column


def _collect(source: str, lengths: IntArray, counts: IntArray, limit: int | None) -> Workload:
    if not len(lengths) or not counts.sum():
        raise ValueError(f"{source} holds no lengths; give {_FORMS}")
    values, indices = np.unique(lengths, return_inverse=True)
    sums = np.zeros(len(values), dtype=np.int64)
    np.add.at(sums, indices.reshape(-1), counts)
    values, sums = values[sums > 0], sums[sums > 0]
    limit = int(values[-1]) if limit is None else limit
    kept = values <= limit
    if not kept.any():
        raise ValueError(
            f"every sequence of {source} is longer than the limit of {limit} tokens (the shortest has {values[0]}); raise --limit"
        )
    if values[kept].astype(float) @ sums[kept] > _MAX_TOKENS:
        raise ValueError(f"{source} holds more than {_MAX_TOKENS} tokens; check its counts")
    return Workload(source, values[kept], sums[kept], limit, int(sums[~kept].sum()))


def _sample_lognormal(text: str, count: int, seed: int, limit: int) -> IntArray:
    """Draws lengths until `count` of them are within `limit`; returns longer ones too."""
    words = text.removeprefix("lognormal:").split(",")
    try:
        mean, sigma = (float(word) for word in words)
    except ValueError:
        raise ValueError(f"{text!r} is not a distribution; write lognormal:MU,SIGMA, for example {_EXAMPLE}") from None
    if not (0 <= mean <= 20 and 0 <= sigma <= 5):
        raise ValueError(f"{text!r}: mu is not in 0..20 or sigma not in 0..5; write, for example, {_EXAMPLE}")
    random = np.random.default_rng(seed)
    lengths = np.zeros(0, dtype=np.int64)
    for _ in range(_MAX_DRAWS):
        drawn = np.rint(random.lognormal(mean, sigma, count))
        lengths = np.concatenate([lengths, np.clip(drawn, 1, MAX_LENGTH).astype(np.int64)])
        kept = np.flatnonzero(lengths <= limit)
        if len(kept) >= count:
            return lengths[: kept[count - 1] + 1]
    raise ValueError(f"{text}: fewer than one in {_MAX_DRAWS} sequences is within the limit of {limit} tokens; raise --limit")


def _read_text(path: Path) -> tuple[IntArray, IntArray]:
    """Reads lengths and counts of a file with one length per line, or with a length and a count per line."""
    numbered = enumerate(_lines(path, _MAX_LINE_CHARS), 1)
    lines: Iterator[tuple[int, str]] = ((number, line) for number, line in numbered if line.strip())
    first = list(itertools.islice(lines, 1))
    lines = itertools.chain(first, lines)
    if first and len(_fields(first[0][1])) == 2:
        return _read_histogram(path, lines)
    batches = [np.zeros(0, dtype=np.int64)]
    while batch := list(itertools.islice(lines, _BATCH_LINES)):
        batches.append(_lengths_of_lines(path, batch))
    lengths = np.concatenate(batches)
    return lengths, np.ones(len(lengths), dtype=np.int64)


def _lengths_of_lines(path: Path, lines: Sequence[tuple[int, str]]) -> IntArray:
    try:
        # one fast call if all lines are numbers, since files with millions of lines are common
        lengths = np.array([line.strip() for _, line in lines], dtype=np.int64)
        if lengths.min() >= 1 and lengths.max() <= MAX_LENGTH:
            return lengths
    except (ValueError, OverflowError):
        pass
    return np.array([_length(line.strip(), f"{path}, line {number}") for number, line in lines], dtype=np.int64)


def _read_histogram(path: Path, lines: Iterable[tuple[int, str]]) -> tuple[IntArray, IntArray]:
    rows: Iterator[tuple[int, list[str]]] = ((number, _fields(line)) for number, line in lines)
    first = next(rows)
    if any(word.lstrip("-").isdigit() for word in first[1]):
        rows = itertools.chain([first], rows)
    lengths, counts = [], []
    for number, fields in rows:
        if len(fields) != 2:
            raise ValueError(
                f"{path}, line {number}: {shown(' '.join(fields))} is not 'length count' like the lines before it; write both"
            )
        lengths.append(_length(fields[0], f"{path}, line {number}"))
        counts.append(_integer(fields[1], f"{path}, line {number}"))
        if not 0 <= counts[-1] <= _MAX_COUNT:
            raise ValueError(f"{path}, line {number}: the count is {shown(counts[-1])}; it must be from 0 to {_MAX_COUNT}")
    return np.array(lengths, dtype=np.int64), np.array(counts, dtype=np.int64)


def _fields(line: str) -> list[str]:
    return line.replace(",", " ").replace(";", " ").split()


def _lines(path: Path, most_chars: int) -> Iterator[str]:
    try:
        yield from text_lines(path, most_chars)
    except ValueError as error:
        raise ValueError(f"{error}; give {_FORMS}") from None


def _column_lengths(path: Path, column: str, count_tokens: CountTokens | None) -> IntArray:
    if path.suffix == ".parquet":
        return _parquet_lengths(path, column, count_tokens)
    if str(path).endswith(_TABLE_SUFFIXES):
        return _table_lengths(path, column, count_tokens)
    return _lengths_of(_json_rows(path, column), column, count_tokens)


def _table_lengths(path: Path, column: str, count_tokens: CountTokens | None) -> IntArray:
    """Reads numbers (or, with a tokenizer, texts) from one column of a CSV or TSV file with a header line."""
    csv.field_size_limit(_MAX_ROW_CHARS)
    reader = csv.DictReader(_lines(path, _MAX_ROW_CHARS), delimiter="\t" if ".tsv" in path.suffixes else ",")
    try:
        if column not in (reader.fieldnames or ()):
            raise ValueError(f"{path}: no column {column!r}; found {', '.join(reader.fieldnames or ()):.500}")
        rows = [UncountedRow(f"{path}, line {reader.line_num}", row[column] or "") for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if count_tokens is not None and not all(row.value.strip().lstrip("-").isdigit() for row in rows):
        return _lengths_of(rows, column, count_tokens)
    return np.array([_length(row.value, row.place) for row in rows], dtype=np.int64)


def _json_rows(path: Path, column: str) -> Iterator[UncountedRow]:
    """Yields every row of a JSON Lines file or a JSON file with rows, with the value of the column."""
    rows: Iterable[tuple[str, Any]]
    if ".jsonl" in path.suffixes:
        texts = ((f"line {i}", line) for i, line in enumerate(_lines(path, _MAX_ROW_CHARS), 1) if line.strip())
        rows = ((where, parse_json(text, f"{path}, {where}")) for where, text in texts)
    else:
        data = parse_json("".join(_lines(path, sys.maxsize)), str(path))
        if isinstance(data, dict) and isinstance(data.get(column), list):
            data = [{column: value} for value in data[column]]
        if not isinstance(data, list):
            raise ValueError(f"{path} holds {type(data).__name__}; a list of rows or an object of columns is needed")
        rows = ((f"row {i}", row) for i, row in enumerate(data))
    for where, row in rows:
        if not isinstance(row, dict) or column not in row:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path}, {where}: no column {column!r}; found {found:.500}")
        images = {name: row[name] for name in _IMAGES if name in row}
        yield UncountedRow(f"{path}, {where}", row[column], row.get("tools"), images)


def _parquet_lengths(path: Path, column: str, count_tokens: CountTokens | None) -> IntArray:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} needs pyarrow, which is not installed; pip install pyarrow") from None
    try:
        names = pyarrow.parquet.read_schema(path).names
        if column not in names:
            raise ValueError(f"{path}: no column {column!r}; found {', '.join(names)}")
        beside = [name for name in ("tools", *_IMAGES) if name in names and name != column]
        read = pyarrow.parquet.read_table(path, columns=[column, *beside])
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ValueError(
            f"{path} is not a Parquet file ({error}); give one, or name a file of another kind by its ending"
        ) from None
    types, values = pyarrow.types, read[column]
    kind = values.type
    if values.null_count:
        raise ValueError(f"{path}: column {column!r} has {values.null_count} empty rows; remove them")
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and types.is_integer(kind.value_type):
        values = pyarrow.compute.list_value_length(values)
    elif is_list or types.is_string(kind) or types.is_large_string(kind):
        others = read.select(beside).to_pylist() if beside else [{}] * len(values)
        rows = [
            UncountedRow(f"{path}, row {i}", value, other.get("tools"), {name: other[name] for name in _IMAGES if name in other})
            for i, (value, other) in enumerate(zip(values.to_pylist(), others, strict=True))
        ]
        return _lengths_of(rows, column, count_tokens)
    elif not types.is_integer(kind):
        raise ValueError(f"{path}: column {column!r} holds {kind}; {_NEEDED}")
    lengths = np.asarray(values.to_numpy(), dtype=np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths > MAX_LENGTH))
    if len(wrong):
        _length(str(lengths[wrong[0]]), f"{path}, row {wrong[0]}")
    return lengths


def _lengths_of(rows: Iterable[UncountedRow], column: str, count_tokens: CountTokens | None) -> IntArray:
    """Returns lengths of rows with lengths or token ids or, with a tokenizer, with texts and conversations."""
    lengths, uncounted = [], []
    for row in rows:
        kind = "text" if isinstance(row.value, str) else "conversations" if _is_conversation(row.value) else ""
        if not kind:
            lengths.append(_value_length(row.value, row.place, column))
        elif count_tokens is None:
            raise ValueError(
                f"{row.place}: column {column!r} holds {kind}, whose tokens cannot be counted without a tokenizer; add "
                f"--tokenizer with the model's folder or name, or name a column of token ids (input_ids)"
            )
        else:
            uncounted.append(row)
    if uncounted and count_tokens is not None:
        counts = zip(uncounted, count_tokens(uncounted), strict=True)
        lengths += [_length(str(count), row.place) for row, count in counts if count]
    return np.array(lengths, dtype=np.int64)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _value_length(value: Any, where: str, column: str) -> int:
    if isinstance(value, list):
        if (other := next((each for each in value if type(each) is not int), None)) is not None:
            raise ValueError(f"{where}: column {column!r} holds a list with {shown(other)} in it; {_NEEDED}")
        return _length(str(len(value)), where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: column {column!r} holds {shown(value)}; {_NEEDED}")
    return _length(str(value), where)


def _length(word: str, where: str) -> int:
    length = _integer(word, where)
    if length < 1:
        raise ValueError(f"{where}: {shown(length)} tokens; every sequence needs at least one")
    if length > MAX_LENGTH:
        raise ValueError(f"{where}: {shown(length)} tokens, but at most {MAX_LENGTH} are possible; give a list of lengths")
    return length


def _integer(word: str, where: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{where}: {shown(word)} is not an integer; whole numbers of tokens are needed") from None

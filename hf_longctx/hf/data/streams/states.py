"""States of a reader's dataset: taken while it is read, so that a resumed run need not read all rows before again.

Only states from which exactly the next row follows are used. A dataset without such a state is read from the beginning of its
epoch, and the rows before the cursor are dropped.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
from collections.abc import Iterator
from typing import Any

import datasets
import torch

# steps of a dataset of `datasets` after whose state exactly the next row follows; a shuffle buffer loses its rows, for example
_EXACT = (
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "TypedExamplesIterable",
)


def keeps_state(stream: Any) -> bool:
    """Whether `take_state` and `load_state` lead to exactly the next row of this dataset or loader."""
    inner = getattr(stream, "dataset", stream)
    if isinstance(inner, datasets.IterableDataset) and not all(type(step).__name__ in _EXACT for step in steps_of(inner)):
        return False
    has_both = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_both and not counts_samples(stream)


def counts_samples(stream: Any) -> bool:
    """Whether `state_dict` must be told a number of samples over all ranks, as mosaicml-streaming's.

    No reader knows that number, so of such states the epoch alone is used.
    """
    found = getattr(stream, "state_dict", None)
    return callable(found) and "num_samples" in inspect.signature(found).parameters


def take_state(stream: Any) -> str | None:
    """The dataset's state after the row that it gave last, as a text; None for one that holds other things than plain values."""
    state = stream.state_dict()
    try:
        text = json.dumps(state)
        if _is_same(json.loads(text), state):
            return text
    except (TypeError, ValueError):
        pass
    try:
        file = io.BytesIO()
        torch.save(state, file)
        text = _MARK + base64.b64encode(file.getvalue()).decode()
        _loaded(text)
    except Exception:
        return None
    return text


def load_state(stream: Any, text: str) -> None:
    """Gives a dataset the state that `take_state` took, where its next iteration begins; raises ValueError if it cannot."""
    try:
        stream.load_state_dict(_loaded(text))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ValueError(f"the stream cannot take its state in the checkpoint ({found}); resume with the same stream") from error


def steps_of(stream: datasets.IterableDataset) -> Iterator[Any]:
    """Every step of a dataset of `datasets`, from the last one down to its sources."""
    waiting = [stream._ex_iterable]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += getattr(step, "ex_iterables", None) or [each for each in (getattr(step, "ex_iterable", None),) if each]


_MARK = "torch:"


def _loaded(text: str) -> Any:
    if not text.startswith(_MARK):
        return json.loads(text)
    # without code that a file could name
    return torch.load(io.BytesIO(base64.b64decode(text[len(_MARK) :])), weights_only=True)


def _is_same(found: Any, expected: Any) -> bool:
    """Whether two values are equal and of equal types all the way down."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(_is_same(found[name], expected[name]) for name in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    return bool(found == expected)

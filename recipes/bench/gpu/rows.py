"""Rows of the scripts of this folder: which are wanted, a file that has each as soon as it is done, and processes that end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Appends a row to the file, as one line of JSON that is there even if the script is killed after it."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file that `append_row` has written."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def is_wanted(name: str, words: Sequence[str]) -> bool:
    """Whether a name contains one of the words, in upper or lower case; no words want every name."""
    return not words or any(word.lower() in name.lower() for word in words)


def end_with_children() -> None:
    """Lets a request to terminate end the script as an exception does, so that a process which it waits for is killed, too.

    Such a process would keep the GPU's memory, and slow down what is measured next.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

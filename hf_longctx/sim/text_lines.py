"""Reads text files line by line, also gzipped ones, within limits: a small file may unpack to more than memory holds."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from zlib import error as ZlibError

# bytes that any gzipped file may unpack to; more must be no more than so many times its size, as text, numbers and JSON are
_MOST_UNPACKED_BYTES, _MOST_RATIO = 2**26, 50
_BLOCK_BYTES = 2**20


def text_lines(path: Path, most_chars: int = sys.maxsize) -> Iterator[str]:
    """Lines of a text file with their ends.

    Raises ValueError for a file that is no text or unpacks to far more than its size, and for a line above `most_chars`.
    """
    try:
        if path.suffix == ".gz":
            _check_unpacked(path)
        with _opened(path) as file:
            number = 0
            # one character more than allowed, for the end of the line
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

"""Short forms of values, names, texts and times in messages, and their lines on a terminal."""

from __future__ import annotations

import reprlib
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

_MOST_CHARACTERS = 1000
_MOST_NAMES = 8

# bits of an integer whose digits Python still counts in no time; it refuses those of larger ones
_MOST_BITS = 10_000


class _Short(reprlib.Repr):
    def repr_int(self, number: int, level: int) -> str:
        if number.bit_length() > _MOST_BITS:
            return f"{'-' if number < 0 else ''}(an integer of {number.bit_length()} bits)"
        return str(super().repr_int(number, level))


_repr = _Short()
_repr.maxstring = _repr.maxother = 80
_repr.maxlong = 40


def shown(value: object) -> str:
    """A value as messages show it: a long one loses its middle."""
    return _repr.repr(value)


def shortened(message: str) -> str:
    """A message of at most about a thousand characters; a longer one loses its middle."""
    if len(message) <= _MOST_CHARACTERS:
        return message
    half = _MOST_CHARACTERS // 2
    return f"{message[:half]} ... ({len(message)} characters) ... {message[-half:]}"


def duration(seconds: float) -> str:
    """Seconds as people say them: "85 ms", "12.3 s", "3 min 20 s", "2 h 5 min", "7.8 days"."""
    if seconds < 1e-7:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0995 else f"{seconds * 1e3:.3g} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    if seconds < 48 * 3600:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{seconds / 86400:,.1f} days"


def counted(number: int, noun: str) -> str:
    """A number of things in words: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def wrapped(text: str, columns: int, indent: str | None = None) -> str:
    """A text whose lines break between words, and rather at " | " than inside the parts that it divides.

    indent: what the lines that go on begin with; by default two columns more than the line itself.
    """
    return "\n".join(_wrapped_line(line, columns, indent) for line in text.split("\n"))


def on_screen(text: str, stream: TextIO, indent: str | None = None) -> str:
    """The text as `stream` gets it: wrapped on a terminal, which would break lines inside words; unchanged elsewhere."""
    return wrapped(text, shutil.get_terminal_size().columns, indent) if stream.isatty() else text


def _wrapped_line(line: str, columns: int, indent: str | None) -> str:
    if len(line) <= columns:
        return line
    own = line[: len(line) - len(line.lstrip(" "))]
    parts = line[len(own) :].split(" | ")
    # `textwrap` takes this space for a letter; the first columns are a table's
    if len(parts) > 1:
        body = "\xa0| ".join(part.replace(" ", "\xa0") for part in parts)
    else:
        body = line[len(own) :].replace("  ", "\xa0\xa0")
    lines = textwrap.wrap(
        body,
        columns,
        initial_indent=own,
        subsequent_indent=f"{own}  " if indent is None else indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\xa0", " ")

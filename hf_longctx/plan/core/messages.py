"""Formats values, names, texts and times for messages, and wraps lines for a terminal."""

from __future__ import annotations

import reprlib
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

_MOST_CHARACTERS = 1000
_MOST_NAMES = 8

# most bits of an integer that is printed in digits, which takes long for larger ones, or is refused by Python
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
    """Formats a value for messages; a long one loses its middle."""
    return _repr.repr(value)


def shortened(message: str) -> str:
    """Shortens a message to about a thousand characters, by removing its middle."""
    if len(message) <= _MOST_CHARACTERS:
        return message
    half = _MOST_CHARACTERS // 2
    return f"{message[:half]} ... ({len(message)} characters) ... {message[-half:]}"


def duration(seconds: float) -> str:
    """Formats seconds: "85 ms", "12.3 s", "3 min 20 s", "2 h 5 min", "7.8 days"."""
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
    """Formats a number of things: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Sequence[str]) -> str:
    """Lists the first eight names, and the number of others."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def wrapped(text: str, columns: int, indent: str | None = None) -> str:
    """Wraps a text between words, preferably at " | ".

    indent: beginning of continued lines; by default two columns more than that of the line itself.
    """
    return "\n".join(_wrapped_line(line, columns, indent) for line in text.split("\n"))


def on_screen(text: str, stream: TextIO, indent: str | None = None) -> str:
    """Wraps the text if `stream` is a terminal, which would break lines inside words; returns it unchanged otherwise."""
    return wrapped(text, shutil.get_terminal_size().columns, indent) if stream.isatty() else text


def _wrapped_line(line: str, columns: int, indent: str | None) -> str:
    if len(line) <= columns:
        return line
    own = line[: len(line) - len(line.lstrip(" "))]
    parts = line[len(own) :].split(" | ")
    # `textwrap` treats this space as a letter; the first columns belong to a table
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

"""Short forms of values, names, texts and times in messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

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


def listed(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more

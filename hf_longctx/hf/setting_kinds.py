"""Kinds of settings: what type and range a field of `LongContextConfig` has, and the error that names a value outside of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from hf_longctx.plan.core.messages import shown

# more tokens, ranks or steps than any run has; beyond it, arithmetic in 64 bits would overflow somewhere
_MOST = 2**40
# a thousand years of seconds, an exabyte of GiB
_MOST_NUMBER = 1e10


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`. remedy: what to do about one that is too small."""

    least: int
    remedy: str
    is_optional: bool = False
    most: int = _MOST

    def checked(self, name: str, value: object) -> int | None:
        """The value as an int; raises ValueError naming the setting."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give a whole number{_or_nothing(self)}")
        number = int(value)
        if number < self.least:
            raise ValueError(f"{name} is {shown(number)}; {self.remedy}")
        if number > self.most:
            raise ValueError(f"{name} is {shown(number)}; give at most {self.most}")
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number above zero, or from zero on. remedy: what to do about one that is too small."""

    remedy: str
    may_be_zero: bool = False
    is_optional: bool = False
    most: float = _MOST_NUMBER

    def checked(self, name: str, value: object) -> float | None:
        """The value as a float; raises ValueError naming the setting."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give a number{_or_nothing(self)}")
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"{name} is {shown(value)}; give at most {self.most:g}") from None
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}; give a finite number{_or_nothing(self)}")
        if number < 0 or (number == 0 and not self.may_be_zero):
            raise ValueError(f"{name} is {number}; {self.remedy}")
        if number > self.most:
            raise ValueError(f"{name} is {number}; give at most {self.most:g}")
        return number


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    choices: Sequence[str]

    def checked(self, name: str, value: object) -> str:
        """The value; raises ValueError naming the setting and the choices."""
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"{name} is {shown(value)}; choose one of {', '.join(self.choices)}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or False, and nothing that merely counts as one of them."""

    is_optional: bool = False

    def checked(self, name: str, value: object) -> bool | None:
        """The value; raises ValueError naming the setting."""
        if value is None and self.is_optional:
            return None
        if not isinstance(value, bool):
            more = ", or leave it out" if self.is_optional else ""
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give True or False{more}")
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A name or a path; empty where there is none."""

    def checked(self, name: str, value: object) -> str:
        """The value; raises ValueError naming the setting."""
        if not isinstance(value, str):
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give a name or a path as text")
        return value


@dataclass(frozen=True, slots=True)
class Sizes:
    """Group sizes, or "all": numbers, or the words of a command line."""

    def checked(self, name: str, value: Any) -> Any:
        """None, "all" or a list of ints; raises ValueError naming the setting."""
        words = [value] if isinstance(value, str) else value
        if words is None:
            return None
        found = value if isinstance(value, str) and len(value) < 80 and value.isprintable() else shown(value)
        refused = f"{name} is {found}; give positive group sizes, for example [1, 2, 4], or 'all' alone"
        if not isinstance(words, list | tuple) or len(words) > _MOST_SIZES:
            raise ValueError(refused)
        if list(words) == ["all"]:
            return "all"
        sizes = [_size(word) for word in words]
        if not sizes or any(size is None or not 1 <= size <= _MOST_SIZE for size in sizes):
            raise ValueError(refused)
        return sizes


@dataclass(frozen=True, slots=True)
class Stages:
    """A number of pipeline stages, or "auto": also the words of a command line."""

    def checked(self, name: str, value: Any) -> Any:
        """The word "auto" or an int; raises ValueError naming the setting."""
        number = value if isinstance(value, str) and value == "auto" else _size(value)
        if number == "auto" or (isinstance(number, int) and 1 <= number <= _MOST_SIZE):
            return number
        raise ValueError(f"{name} is {shown(value)}; give a number of pipeline stages, 1 for none, or 'auto'")


# ranks of the largest group or pipeline, and sizes in a list of them
_MOST_SIZE, _MOST_SIZES = 2**20, 2**12

Kind = Whole | Number | Word | Flag | Text | Sizes | Stages


def _size(word: object) -> int | None:
    """A number that is whole, also one written as a word; None for anything else."""
    if isinstance(word, str):
        return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None
    return int(word) if isinstance(word, Integral) and not isinstance(word, bool) else None


def _or_nothing(kind: Whole | Number) -> str:
    return ", or leave it out" if kind.is_optional else ""

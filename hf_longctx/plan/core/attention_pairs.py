"""How many query-key pairs attention computes, in layers that see everything before a token and in layers with windows.

Token x of a sequence, counted from 0 and taken as a continuum, sees x tokens before it, or w under a window of w. So the tokens
[a, b) have this many pairs, with (x)+ for what of x is above zero:

    full:    (b^2 - a^2) / 2            window w:    (b^2 - a^2) / 2  -  ((b - w)+^2 - (a - w)+^2) / 2

which for whole tokens is sum of min(i, w) over i in (a, b] but for half a pair of every token that the window does not cut. Both
are convex and grow with b: a longer sequence takes more seconds, and more of them for every token.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import Chunk
from hf_longctx.plan.core.windows import Windows

FloatArray = NDArray[np.float64]
Tokens = TypeVar("Tokens", float, FloatArray)


@dataclass(frozen=True, slots=True)
class AttentionPairs:
    """Query-key pairs of a layer, on average over some layers.

    windows: (window, share of the layers) of those with windows, ascending; the other layers see everything.
    """

    windows: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, windows: Windows) -> AttentionPairs:
        """Those of layers with these windows."""
        counts = Counter(window for window in windows if window is not None)
        return cls(tuple((window, count / len(windows)) for window, count in sorted(counts.items())))

    def seen(self, start: Tokens, stop: Tokens) -> Tokens:
        """How many tokens each of the tokens [start, stop) of a sequence sees, on average over these, of which there are some."""
        tokens = (start + stop) / 2
        for window, share in self.windows:
            first, last = _above_zero(start - window), _above_zero(stop - window)
            tokens = tokens - share * (last - first) * (first + last) / 2 / (stop - start)
        return tokens

    def of_span(self, start: float, stop: float) -> float:
        """Pairs of the tokens [start, stop) of a sequence."""
        return (stop - start) * self.seen(start, stop) if stop > start else 0.0

    def of_chunk(self, chunk: Chunk) -> float:
        """Pairs of all spans of a chunk."""
        return sum(self.of_span(span.start, span.stop) for span in chunk.spans)


def _above_zero(value: Tokens) -> Tokens:
    return np.maximum(value, 0.0) if isinstance(value, np.ndarray) else max(value, 0.0)


FULL = AttentionPairs()


@dataclass(frozen=True, slots=True)
class SpanRates:
    """Seconds of tokens of one sequence: of a query-key pair, of a token, and how many pairs there are."""

    pair_s: float
    token_s: float
    pairs: AttentionPairs = FULL

    def of_span(self, start: int, stop: int) -> float:
        """Seconds of the tokens [start, stop)."""
        return (stop - start) * (self.pair_s * self.pairs.seen(start, stop) + self.token_s)

    def tokens_in(self, seconds: float) -> float:
        """How many tokens of the front of a sequence take so many seconds, more than none; some rate must be above zero."""
        # between windows seconds are a quadratic of the tokens: full_s of them squared, and slope_s of each at its start
        start, full_s, slope_s = 0, self.pair_s, self.token_s
        for window, share in self.pairs.windows:
            width = window - start
            until_s = width * (slope_s + full_s * width / 2)
            if seconds <= until_s:
                break
            seconds -= until_s
            start, slope_s, full_s = window, slope_s + full_s * width, max(0.0, full_s - share * self.pair_s)
        # the root in the form that holds without a square too
        return start + 2 * seconds / (slope_s + math.sqrt(slope_s * slope_s + 2 * full_s * seconds))

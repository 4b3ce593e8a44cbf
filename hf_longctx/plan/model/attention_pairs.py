"""Counts the query-key pairs that attention computes, in layers with full causal attention and with sliding windows.

The cost model prices attention by these pairs. Tokens are treated as a continuum: the token at position x of a sequence sees x
tokens, or at most w under a window of w. The tokens [a, b) then have this many pairs, where (x)+ = max(x, 0):

    full:    (b^2 - a^2) / 2            window w:    (b^2 - a^2) / 2  -  ((b - w)+^2 - (a - w)+^2) / 2

The exact count over whole tokens, sum of min(i, w) over i in (a, b], is larger by half a pair for every token that the window
does not cut. Both formulas are convex and increasing in b: a longer sequence takes more seconds, and more seconds per token.

A device computes attention for `tile_keys` keys at once, and masks those that a query does not see. A band of a window has a
masked square on either side (`runtime/tiles/patterns.py`). Every layer has the one on the diagonal, so its masked pairs are
seconds per token for any window. Those of the square on the far side are counted here: each token beyond the window adds
`masked_keys` pairs to its w. The formula stays convex.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import Chunk
from hf_longctx.plan.model.layers import Windows

FloatArray = NDArray[np.float64]
Tokens = TypeVar("Tokens", float, FloatArray)


@dataclass(frozen=True, slots=True)
class AttentionPairs:
    """Query-key pairs of one layer, averaged over a set of layers."""

    # (window in tokens, share of the layers that have it), ascending; other layers have full attention, and a window of 0
    # stands for layers without attention
    windows: tuple[tuple[int, float], ...] = ()
    # keys that attention computes at once (0: only pairs that are seen count)
    tile_keys: int = 0
    # mean weight of a pair in a layer; shares are multiplied by it
    weight: float = 1.0

    @classmethod
    def of(cls, windows: Windows, tile_keys: int = 0, weights: Sequence[float] = ()) -> AttentionPairs:
        """Pairs of a set of layers, given the window of each, and the weight of one of its pairs (1 without `weights`)."""
        # if no window cuts any pairs, tiles have no effect
        tile_keys = tile_keys if any(windows) else 0
        if weights:
            summed: dict[int, float] = {}
            for window, weight in zip(windows, weights, strict=True):
                if window is not None:
                    summed[window] = summed.get(window, 0.0) + weight / len(windows)
            return cls(tuple(sorted(summed.items())), tile_keys, sum(weights) / len(windows))
        counts = Counter(window for window in windows if window is not None)
        return cls(tuple((window, count / len(windows)) for window, count in sorted(counts.items())), tile_keys)

    def seen(self, start: Tokens, stop: Tokens) -> Tokens:
        """Number of tokens that a token in [start, stop) of a sequence sees, averaged over that range; `stop` > `start`."""
        tokens = self.weight * (start + stop) / 2
        for window, share in self.windows:
            if not window:
                tokens = (1 - share / self.weight) * tokens
                continue
            first, last = _above_zero(start - window), _above_zero(stop - window)
            unseen = (first + last) / 2 - masked_keys(window, self.tile_keys)
            tokens = tokens - share * (last - first) * unseen / (stop - start)
        return tokens

    def of_span(self, start: float, stop: float) -> float:
        """Number of pairs whose query is one of the tokens [start, stop) of a sequence."""
        return (stop - start) * self.seen(start, stop) if stop > start else 0.0

    def of_chunk(self, chunk: Chunk) -> float:
        """Number of pairs of all spans of a chunk."""
        return sum(self.of_span(span.start, span.stop) for span in chunk.spans)


def masked_keys(window: int, tile_keys: int) -> float:
    """Keys that attention computes and masks for each query of a masked square of `window` tokens, on average.

    A query's keys are filled up to a multiple of `tile_keys`, or to the end of the square.
    """
    if not tile_keys:
        return 0.0
    whole, rest = divmod(window, tile_keys)
    return (whole * tile_keys**2 + rest**2) / (2 * window)


def _above_zero(value: Tokens) -> Tokens:
    return np.maximum(value, 0.0) if isinstance(value, np.ndarray) else max(value, 0.0)


FULL = AttentionPairs()


@dataclass(frozen=True, slots=True)
class SpanRates:
    """Seconds per query-key pair and per token of one sequence, with the rule that counts its pairs."""

    pair_s: float
    token_s: float
    pairs: AttentionPairs = FULL

    def of_span(self, start: int, stop: int) -> float:
        """Seconds of the tokens [start, stop)."""
        return (stop - start) * (self.pair_s * self.pairs.seen(start, stop) + self.token_s)

    def tokens_in(self, seconds: float) -> float:
        """Number of tokens at the front of a sequence that take `seconds` > 0, as a fraction; some rate must be above zero."""
        # between two window lengths, t more tokens take slope_s * t + full_s * t^2 / 2
        start, full_s, slope_s = 0, self.pairs.weight * self.pair_s, self.token_s
        for window, share in self.pairs.windows:
            width = window - start
            until_s = width * (slope_s + full_s * width / 2)
            if seconds <= until_s:
                break
            seconds -= until_s
            masked_s = share * self.pair_s * masked_keys(window, self.pairs.tile_keys) if window else 0.0
            start, slope_s, full_s = window, slope_s + full_s * width + masked_s, max(0.0, full_s - share * self.pair_s)
        # the root of the quadratic in the form that also holds for full_s = 0
        return start + 2 * seconds / (slope_s + math.sqrt(slope_s * slope_s + 2 * full_s * seconds))

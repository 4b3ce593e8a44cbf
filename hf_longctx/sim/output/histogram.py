"""Histogram of the planned sequences: each bin spans a factor of two in length and lists the degrees that its sequences run on.

Used by the report, the JSON record and the picture of a forecast.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hf_longctx.sim.forecast import Forecast


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Sequences of `low` to `high` - 1 tokens. by_degree: (ranks of the group, sequences, tokens), smallest groups first."""

    low: int
    high: int
    by_degree: tuple[tuple[int, int, int], ...]

    @property
    def num_sequences(self) -> int:
        return sum(count for _, count, _ in self.by_degree)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.by_degree)


def length_bins(forecast: Forecast) -> tuple[LengthBin, ...]:
    """All bins from the shortest to the longest planned sequence, including empty ones; none without steps."""
    counts, tokens = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for length, group in forecast.placed_lengths():
        key = (length.bit_length() - 1, group.degree)
        counts[key] += 1
        tokens[key] += length
    if not counts:
        return ()
    bits = [bit for bit, _ in counts]
    keys = sorted(counts)
    return tuple(
        LengthBin(1 << bit, 2 << bit, tuple((key[1], counts[key], tokens[key]) for key in keys if key[0] == bit))
        for bit in range(min(bits), max(bits) + 1)
    )

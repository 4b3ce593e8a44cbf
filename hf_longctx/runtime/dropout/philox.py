"""Philox4x32-10: four random 32-bit words for each counter of four words, under a key of 64 bits; in torch, on any device.

A counter-based generator has no state, so any rank can draw the words of any token at any time. Unsigned 32-bit words are held in
int64 tensors: the product of two words keeps its low 64 bits when it wraps around, and its high word is the upper half of these.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, which reports that ten rounds pass all
of TestU01's BigCrush. The constants are those of the paper; `tests/runtime/dropout` checks the answers that its authors publish.
"""

from __future__ import annotations

from torch import Tensor

NUM_ROUNDS = 10
WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: int) -> Words:
    """The four words of every counter; tensors of words are int64 and broadcast with each other. `key`: 64 bits."""
    first, second = key & WORD, key >> 32 & WORD
    for _ in range(NUM_ROUNDS):
        product, other = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = (
            (other >> 32 & WORD) ^ counter[1] ^ first,
            other & WORD,
            (product >> 32 & WORD) ^ counter[3] ^ second,
            product & WORD,
        )
        first, second = first + _KEY_STEPS[0] & WORD, second + _KEY_STEPS[1] & WORD
    return counter

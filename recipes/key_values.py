"""Documents of keys and values in noise, which a tiny model learns to look up in minutes: made up, one token a character.

A capital letter and the small letter behind it are a key and its value; every key stands twice with the same value, and the
second value is the answer. Token ids are those of UTF-8 bytes (`tokenizer: bytes`).
"""

from __future__ import annotations

import random
import string
from typing import Any

import datasets

# before the bytes come padding, end and unknown
_FIRST_BYTE = 3
_KEYS, _VALUES, _NOISE = (
    [ord(letter) + _FIRST_BYTE for letter in letters]
    for letters in (string.ascii_uppercase, string.ascii_lowercase, "0123456789 .,;:-+")
)
_NO_LABEL = -100
# the length that the committed base was trained for, and four times it
BASE_TOKENS, EXTENDED_TOKENS = 128, 512


def key_value_document(length: int, chance: random.Random) -> dict[str, list[int]]:
    """Up to 26 keys, each twice anywhere in noise; labels on the second values only."""
    ids, labels = [chance.choice(_NOISE) for _ in range(length)], [_NO_LABEL] * length
    keys = chance.sample(_KEYS, min(len(_KEYS), length // 10))
    places = chance.sample(range(length // 2 - 1), 2 * len(keys))
    for number, key in enumerate(keys):
        value = chance.choice(_VALUES)
        first, second = sorted(places[2 * number : 2 * number + 2])
        for place in (first, second):
            ids[2 * place : 2 * place + 2] = key, value
        labels[2 * second + 1] = value
    return {"input_ids": ids, "labels": labels}


def copy_document(length: int, chance: random.Random) -> dict[str, list[int]]:
    """Random letters and noise that repeat themselves; labels on the repetitions. From it a model learns to look back."""
    period = [chance.choice(_KEYS + _VALUES + _NOISE) for _ in range(chance.randrange(4, length // 2 + 1))]
    ids = (period * (length // len(period) + 1))[:length]
    unknown = len(period) + 1
    return {"input_ids": ids, "labels": [_NO_LABEL] * unknown + ids[unknown:]}


def key_value_rows(num_documents: int, chance: random.Random) -> datasets.Dataset:
    """Documents of the base's length up to four times it, more short ones than long ones."""
    ratio = EXTENDED_TOKENS / BASE_TOKENS
    lengths = [round(BASE_TOKENS * ratio ** chance.random()) for _ in range(num_documents)]
    return datasets.Dataset.from_list([key_value_document(length, chance) for length in lengths])


def key_value_needle(length: int, depth: float, chance: random.Random) -> tuple[list[int], int]:
    """A needle document: one key's value at the depth among up to 25 others, asked for at the end (see `NeedleTask`)."""
    ids = [chance.choice(_NOISE) for _ in range(length)]
    num_places = length // 2 - 1
    keys = chance.sample(_KEYS, min(len(_KEYS), length // 10))
    place = min(num_places - 1, round(depth * (num_places - 1)))
    others = [other for other in chance.sample(range(num_places), len(keys)) if other != place]
    for key, other in zip(keys[1:], others, strict=False):
        ids[2 * other : 2 * other + 2] = key, chance.choice(_VALUES)
    pair: list[Any] = [keys[0], chance.choice(_VALUES)]
    ids[2 * place : 2 * place + 2] = pair
    ids[-2:] = pair
    return ids, 1

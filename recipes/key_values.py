"""Made-up documents of keys and values hidden in noise; a tiny model learns to look the values up in minutes.

`sft.py` uses them as the dataset and needle task `key-values`; `pretrain_copy.py` uses them to train the base of the demo. A
capital letter is a key, and the small letter after it is its value. Every key occurs twice with the same value, and the second
value is the answer. One token is one character, with the ids of UTF-8 bytes (`tokenizer: bytes`).
"""

from __future__ import annotations

import random
import string
from typing import Any

import datasets

# token ids 0, 1 and 2 are padding, end and unknown
_FIRST_BYTE = 3
_KEYS, _VALUES, _NOISE = (
    [ord(letter) + _FIRST_BYTE for letter in letters]
    for letters in (string.ascii_uppercase, string.ascii_lowercase, "0123456789 .,;:-+")
)
_NO_LABEL = -100
# length that the base in `recipes/copy_base` was trained for, and the length to which the demo extends it
BASE_TOKENS, EXTENDED_TOKENS = 128, 512


def key_value_document(length: int, chance: random.Random) -> dict[str, list[int]]:
    """Makes a document of noise with up to 26 keys, each at two random places; only the second values have labels."""
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
    """Makes a document that repeats a random text, with labels on the repetitions; it teaches a model to look back."""
    period = [chance.choice(_KEYS + _VALUES + _NOISE) for _ in range(chance.randrange(4, length // 2 + 1))]
    ids = (period * (length // len(period) + 1))[:length]
    unknown = len(period) + 1
    return {"input_ids": ids, "labels": [_NO_LABEL] * unknown + ids[unknown:]}


def key_value_rows(num_documents: int, chance: random.Random) -> datasets.Dataset:
    """Makes documents with one to four times the base's length, more of them short than long."""
    ratio = EXTENDED_TOKENS / BASE_TOKENS
    lengths = [round(BASE_TOKENS * ratio ** chance.random()) for _ in range(num_documents)]
    return datasets.Dataset.from_list([key_value_document(length, chance) for length in lengths])


def key_value_needle(length: int, depth: float, chance: random.Random) -> tuple[list[int], int]:
    """Makes a needle document for `NeedleTask`: a key with its value at the given depth, and its value asked for at the end.

    Up to 25 other keys stand elsewhere.
    """
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

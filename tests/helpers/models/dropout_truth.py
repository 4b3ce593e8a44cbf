"""Dropout by token as plain code: numpy's integers, one module and one document at a time, without the package's code."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import peft
import torch

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_words(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of counters [..., 4], as in the paper of Salmon et al."""
    a, b, c, d = (counter[..., place].astype(np.uint64) for place in range(4))
    for number in range(10):
        first, second = ((start + number * step) % 2**32 for start, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> _HALF) ^ b ^ np.uint64(first), q & _WORD, (p >> _HALF) ^ d ^ np.uint64(second), p & _WORD
    return np.stack([a, b, c, d], axis=-1)


@lru_cache(maxsize=4096)
def kept(name: str, document: int, num_tokens: int, num_channels: int, rate: float, step: int, seed: int) -> torch.Tensor:
    """Which values of a document a module keeps, [tokens, channels]."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
    counter = np.zeros((num_tokens, -(-num_channels // 4), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1] = np.arange(num_tokens)[:, None]
    counter[..., 2], counter[..., 3] = document, step
    words = philox_words(counter, (key % 2**32, key >> 32)).reshape(num_tokens, -1)[:, :num_channels]
    return torch.from_numpy(words >= np.uint64(round(rate * 2**32)))


@contextmanager
def dropping(model: Any, document: int, step: int = 0, seed: int = 0) -> Iterator[None]:
    """Context in which the dropout modules of a plain model in training drop values of `document`, which runs alone."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    modules = {name: each for name, each in base.named_modules() if type(each) is torch.nn.Dropout and each.p and each.training}

    calls = Counter[str]()

    def drop(name: str, x: torch.Tensor) -> torch.Tensor:
        rate = modules[name].p
        calls[name] += 1
        site = name if calls[name] == 1 else f"{name}:{calls[name]}"
        return x * kept(site, document, x.shape[-2], x.shape[-1], rate, step, seed) / (1 - rate)

    for name, module in modules.items():
        module.forward = lambda x, name=name: drop(name, x)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward

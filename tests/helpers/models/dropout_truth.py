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
from torch.overrides import TorchFunctionMode

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


@lru_cache(maxsize=4096)
def kept_weights(name: str, document: int, num_tokens: int, num_heads: int, rate: float, step: int, seed: int) -> torch.Tensor:
    """Which attention weights of a document the layer `name` keeps, [heads, queries, keys]."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {name} weights".encode(), digest_size=8).digest(), "little")
    counter = np.zeros((num_tokens, num_tokens, 4), np.uint64)
    counter[..., 0], counter[..., 1] = np.arange(num_tokens)[None, :], np.arange(num_tokens)[:, None]
    counter[..., 2], counter[..., 3] = document, step
    words = [philox_words(counter, (key % 2**32, ((key >> 32) + head // 4) % 2**32))[..., head % 4] for head in range(num_heads)]
    return torch.from_numpy(np.stack(words) >= np.uint64(round(rate * 2**32)))


class _WeightsDropped(TorchFunctionMode):
    """Lets functional dropout of attention weights [1, heads, tokens, tokens] drop by document; other tensors drop as ever.

    Attention of torch with dropout makes such weights.

    layers: names of the attention layers that run now, the innermost last.
    """

    def __init__(self, layers: list[str], document: int, step: int, seed: int) -> None:
        super().__init__()
        self.layers, self.calls, self.settings = layers, Counter[str](), (document, step, seed)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self._attention(*args, **kwargs)
        if function is not torch.nn.functional.dropout or args[0].dim() != 4:
            return function(*args, **kwargs)
        names = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
        return self.drop(args[0], names["p"]) if names["p"] and names["training"] else args[0]

    def _attention(
        self, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **settings: Any
    ) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (settings.get("scale") or q.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            is_seen = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_seen else scores + attn_mask
        return self.drop(scores.softmax(-1), dropout_p) @ v

    def drop(self, weights: torch.Tensor, rate: float) -> torch.Tensor:
        """Attention weights of the innermost layer, dropped and scaled."""
        document, step, seed = self.settings
        self.calls[name := self.layers[-1]] += 1
        assert self.calls[name] == 1
        _, num_heads, num_tokens, _ = weights.shape
        return weights * kept_weights(name, document, num_tokens, num_heads, rate, step, seed) / (1 - rate)


@contextmanager
def dropping(model: Any, document: int, step: int = 0, seed: int = 0) -> Iterator[None]:
    """Context in which a plain model in training drops values and attention weights of `document`, which runs alone."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    modules = {name: each for name, each in base.named_modules() if type(each) is torch.nn.Dropout and each.p and each.training}

    calls = Counter[str]()
    layers: list[str] = []
    weights = _WeightsDropped(layers, document, step, seed)
    handles = []
    for name, module in base.named_modules():
        if any(word in type(module).__name__ for word in ("Attention", "MLA")):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: layers.append(name)))
            handles.append(module.register_forward_hook(lambda *_: layers.pop() and None))

    def drop(name: str, x: torch.Tensor) -> torch.Tensor:
        rate = modules[name].p
        if x.dim() == 4:
            return weights.drop(x, rate)
        calls[name] += 1
        site = name if calls[name] == 1 else f"{name}:{calls[name]}"
        return x * kept(site, document, x.shape[-2], x.shape[-1], rate, step, seed) / (1 - rate)

    for name, module in modules.items():
        module.forward = lambda x, name=name: drop(name, x)
    try:
        with weights:
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules.values():
            del module.forward

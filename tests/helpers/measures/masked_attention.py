"""Attention of one document as a single masked softmax, straight from the definition, to compare tiles with."""

from __future__ import annotations

import torch
from helpers.models.reference import relative_error
from torch import Tensor

from hf_longctx.plan.core.sharding import HeadShare
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.tiles.patterns import AttentionPattern

SCALE, HEAD_DIM = 0.4, 4


def visible(pattern: AttentionPattern, queries: range, keys: range) -> Tensor:
    """Mask [queries, keys] of the keys that each query sees, straight from the definition."""
    i, j = torch.tensor(queries).unsqueeze(1), torch.tensor(keys).unsqueeze(0)
    seen = j <= i
    if pattern.window:
        seen &= j > i - pattern.window
    if pattern.chunk:
        seen &= j // pattern.chunk == i // pattern.chunk
    return seen


def masked_softmax(
    q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, pattern: AttentionPattern, sinks_H: Tensor | None, softcap: float = 0.0
) -> Tensor:
    """Attention of one document by the definition, [T, H, E]; a sink is one more column of scores, whose weights are dropped."""
    k, v = (x.repeat_interleave(len(q_HTD) // len(x), 0) for x in (k_GTD, v_GTE))
    tokens = range(q_HTD.shape[1])
    scores = q_HTD @ k.transpose(1, 2) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(pattern, tokens, tokens), float("-inf"))
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.view(-1, 1, 1).expand(-1, len(tokens), 1)], dim=2)
    return (scores.softmax(-1)[:, :, : len(tokens)] @ v).transpose(0, 1)


def readers_of(num_heads: int, num_kv: int, dropped: int) -> KVReaders:
    """`KVReaders` of a rank that has all query heads except the first few."""
    per_kv = num_heads // num_kv
    return KVReaders.of(HeadShare(dropped, num_heads, dropped // per_kv, num_kv), per_kv, torch.device("cpu"))


def error_of(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(ours.detach(), theirs.detach()) for ours, theirs in zip(found, expected, strict=True))

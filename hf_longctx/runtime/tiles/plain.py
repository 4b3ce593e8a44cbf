"""A tile by matrices in at least fp32 (fp64 for fp64) over blocks of queries: what is correct for every size and every score.

A block has so many rows that its matrix of scores over all heads has no more than 2^25 elements, or one row. At most three
such matrices are there at once: 384 MiB of fp32.

Shapes: H query heads, G KV heads (H is a multiple of G, neighbours read the same one), T query tokens, U key tokens, D head size
of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# of one matrix of a block of queries
_BLOCK_VALUES = 2**25


@dataclass(frozen=True, slots=True)
class Scores:
    """How queries and keys are scored: their product times `scale`; with a softcap c (0: none), c tanh(that / c)."""

    scale: float
    softcap: float = 0.0


def plain_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [H, T, E] and LSE [H, T] of a tile."""
    outs, lses = [], []
    for rows, keys in _blocks(q, k, causal):
        raw, _ = _scored(q[:, rows], k[:, keys], scores, rows if causal else None)
        lse = raw.logsumexp(-1)
        out = raw.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype) @ v[:, keys]
        per_kv = q.shape[0] // k.shape[0]
        outs.append(as_heads(out, per_kv))
        lses.append(as_heads(lse, per_kv))
        # before the next block's are made
        del raw
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in at least fp32, from merged output and LSE."""
    per_kv, wide = q.shape[0] // k.shape[0], torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, dtype=wide)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, keys in _blocks(q, k, causal):
        raw, slope = _scored(q[:, rows], k[:, keys], scores, rows if causal else None)
        of_rows = (gradient, q, out, lse.unsqueeze(-1))
        wide_gradient, queries, wide_out, lse_GR1 = (as_queries(x[:, rows], per_kv).to(wide) for x in of_rows)
        weights = raw.sub_(lse_GR1).exp_()
        dv[:, keys] += weights.transpose(1, 2) @ wide_gradient
        delta = (wide_gradient * wide_out).sum(-1, keepdim=True)
        ds = (wide_gradient @ v[:, keys].to(wide).transpose(1, 2)).sub_(delta).mul_(weights).mul_(scores.scale)
        if slope is not None:
            ds.mul_(slope)
        dq[:, rows] = as_heads(ds @ k[:, keys].to(wide), per_kv)
        dk[:, keys] += ds.transpose(1, 2) @ queries
        # before the next block's are made
        del raw, slope, weights, ds
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that some of their rows see."""
    num_rows = max(1, _BLOCK_VALUES // max(1, q.shape[0] * k.shape[1]))
    for start in range(0, q.shape[1], num_rows):
        stop = min(start + num_rows, q.shape[1])
        yield slice(start, stop), slice(0, stop if causal else k.shape[1])


def _scored(q: Tensor, k: Tensor, scores: Scores, rows: slice | None) -> tuple[Tensor, Tensor | None]:
    """Scores of a block of queries and the keys, [G, H/G * rows, U], and what a cap's derivative makes of their gradients.

    rows: of a causal tile, which these queries are in it.
    """
    per_kv, wide = q.shape[0] // k.shape[0], torch.promote_types(q.dtype, torch.float32)
    found = (as_queries(q, per_kv).to(wide) @ k.to(wide).transpose(1, 2)).mul_(scores.scale)
    slope = None
    if scores.softcap:
        share = found.div_(scores.softcap).tanh_()
        slope = share.square().neg_().add_(1)
        found = share.mul_(scores.softcap)
    if rows is not None:
        seen = torch.arange(k.shape[1], device=k.device) <= torch.arange(rows.start, rows.stop, device=k.device).unsqueeze(1)
        found.masked_fill_(~seen.repeat(per_kv, 1), float("-inf"))
    return found, slope


def as_queries(x_HTX: Tensor, per_kv: int) -> Tensor:
    """Query heads of one KV head behind each other as its queries: [H, T, ...] to [G, H/G * T, ...]. Only without a mask."""
    return x_HTX.unflatten(0, (-1, per_kv)).flatten(1, 2)


def as_heads(x_GRX: Tensor, per_kv: int) -> Tensor:
    """The inverse of `as_queries`."""
    return x_GRX.unflatten(1, (per_kv, -1)).flatten(0, 1)

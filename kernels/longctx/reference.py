"""Implements every kernel in plain torch, as the reference in its tests and its replacement on the CPU.

Shapes: H query heads, G KV heads, N heads of any kind, T tokens of this rank, S tokens of the whole chunk, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def accumulate_attention_(out_HTD: Tensor, lse_HT: Tensor, other_out_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """Merges another partial result into (output, LSE) in place; an output is ignored where its LSE is -inf."""
    total_HT = torch.logaddexp(lse_HT, other_lse_HT.to(lse_HT.dtype))
    _weigh_(out_HTD, lse_HT, total_HT)
    out_HTD += _weigh_(other_out_HTD.to(out_HTD.dtype, copy=True), other_lse_HT, total_HT)
    lse_HT.copy_(total_HT)


def _weigh_(out_HTD: Tensor, own_lse_HT: Tensor, lse_HT: Tensor) -> Tensor:
    """Multiplies a partial output by exp(its own LSE - merged LSE), in place; zero where it saw no key."""
    is_empty_HT1 = (own_lse_HT == float("-inf")).unsqueeze(-1)
    out_HTD *= (own_lse_HT - lse_HT).exp().unsqueeze(-1)
    # takes one more pass over all values, but few calls need it
    return out_HTD.masked_fill_(is_empty_HT1, 0.0) if is_empty_HT1.any() else out_HTD


def flat_blocks(q_bounds: Sequence[int], kv_ranges: Sequence[int], part: Sequence[int] = ()) -> list[tuple[slice, slice]]:
    """Returns the query heads and KV heads of every block of the flat buffer, in order.

    Each rank has one block. With `part` (query heads of a part, KV heads that they read, and parts that read the same), the first
    parts of all ranks come first, and so on; KV heads are with the first part that reads them.
    """
    ranks = [
        (slice(start, stop), slice(kv_ranges[2 * rank], kv_ranges[2 * rank + 1]))
        for rank, (start, stop) in enumerate(pairwise(q_bounds))
    ]
    if not part:
        return ranks
    num_q, num_kv, per_kv = part
    blocks = []
    for index in range(q_bounds[1] // num_q):
        for queries, keys in ranks:
            first, first_kv = queries.start + index * num_q, keys.start + index // per_kv * num_kv
            blocks.append((slice(first, first + num_q), slice(first_kv, first_kv + num_kv * (index % per_kv == 0))))
    return blocks


def scatter_heads(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, q_bounds: Sequence[int], kv_ranges: Sequence[int], part: Sequence[int] = ()
) -> Tensor:
    """Makes the `flat_blocks` [heads, T, D]: query heads, then keys and then values of their KV heads.

    Rank r has query heads [q_bounds[r], q_bounds[r + 1]) and KV heads [kv_ranges[2 r], kv_ranges[2 r + 1]).
    """
    blocks = flat_blocks(q_bounds, kv_ranges, part)
    return torch.cat([x for heads, kv in blocks for x in (q_HTD[heads], k_GTD[kv], v_GTD[kv])]).reshape(-1)


def sum_heads(
    flat: Tensor,
    q_bounds: Sequence[int],
    kv_ranges: Sequence[int],
    part: Sequence[int],
    num_kv: int,
    num_tokens: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums the copies of every head of q, k and v in at least fp32: the adjoint of `scatter_heads`."""
    wide = wide_dtype(flat.dtype)
    q_HTD = flat.new_zeros((q_bounds[-1], num_tokens, head_dim), dtype=wide)
    k_GTD, v_GTD = (flat.new_zeros((num_kv, num_tokens, head_dim), dtype=wide) for _ in range(2))
    offset = 0
    for heads, kv in flat_blocks(q_bounds, kv_ranges, part):
        for total_NTD, own in ((q_HTD, heads), (k_GTD, kv), (v_GTD, kv)):
            count = own.stop - own.start
            num_values = count * num_tokens * head_dim
            total_NTD[own] += flat[offset : offset + num_values].view(count, num_tokens, head_dim)
            offset += num_values
    return q_HTD.to(flat.dtype), k_GTD.to(flat.dtype), v_GTD.to(flat.dtype)


def join_blocks(flat: Tensor, sizes: Sequence[int], rows: Sequence[int], head_dim: int) -> list[Tensor]:
    """Makes tensors [rows[i], sum(sizes), D] from flat blocks [sum(rows), size, D], one block per entry of `sizes`."""
    num_rows = sum(rows)
    blocks = flat.split([num_rows * size * head_dim for size in sizes])
    shaped = [block.view(num_rows, size, head_dim).split(rows) for block, size in zip(blocks, sizes, strict=True)]
    return [torch.cat(pieces, dim=1) for pieces in zip(*shaped, strict=True)]


def split_blocks(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Cuts tensors [rows, sum(sizes), D] along the middle dimension into flat blocks: the inverse of `join_blocks`."""
    num_rows, head_dim = sum(part.shape[0] for part in parts), parts[0].shape[2]
    flat = parts[0].new_empty(num_rows * sum(sizes) * head_dim)
    start = 0
    for size, block in zip(sizes, flat.split([num_rows * size * head_dim for size in sizes]), strict=True):
        pieces = block.view(num_rows, size, head_dim).split([part.shape[0] for part in parts])
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part[:, start : start + size])
        start += size
    return flat


FP8 = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(FP8).max
# least largest element of a row, below which its scale would be no normal number
FP8_LEAST = FP8_LARGEST * torch.finfo(torch.float32).tiny
# elements that are rounded at once, which takes copies of them
FP8_ROUNDED = 2**24


def row_blocks(num_rows: int, size: int, elements: int) -> Iterator[slice]:
    """Yields ranges of rows with at most so many elements, in multiples of 256 rows if that many have fewer."""
    count = max(1, elements // max(1, size))
    count -= count % 256 if count > 256 else 0
    return (slice(start, min(start + count, num_rows)) for start in range(0, num_rows, count))


def round_rows_(parts: Sequence[Tensor], factors: Sequence[Tensor], values_TN: Tensor, scale_T1: Tensor) -> None:
    """Writes rows in fp8, parts side by side, and their scales; columns are first multiplied by factors, in the parts' dtype."""
    sizes = [part.shape[1] for part in parts]
    for rows in row_blocks(len(values_TN), sum(sizes), FP8_ROUNDED):
        x_TN = parts[0][rows] if len(parts) == 1 and not factors else parts[0].new_empty(values_TN[rows].shape)
        for place, (part_Tn, x_Tn) in enumerate(zip(parts, x_TN.split(sizes, 1), strict=True)):
            if factors:
                torch.mul(part_Tn[rows], factors[place].T, out=x_Tn)
            elif len(parts) > 1:
                x_Tn.copy_(part_Tn[rows])
        largest_T1 = torch.linalg.vector_norm(x_TN, math.inf, dim=1, keepdim=True, dtype=wide_dtype(x_TN.dtype))
        scale_T1[rows] = (largest_T1.clamp(min=FP8_LEAST) / FP8_LARGEST).to(scale_T1.dtype)
        torch.div(x_TN, scale_T1[rows], out=values_TN[rows])

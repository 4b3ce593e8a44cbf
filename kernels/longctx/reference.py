"""The obvious truth beside every operation, in plain torch; on the CPU it is what runs.

Shapes: H query heads, G KV heads, N heads of any kind, T tokens of this rank, S tokens of the whole chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def packed_causal_attention(q_HSD: Tensor, k_GSD: Tensor, v_GSD: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Softmax attention of packed documents, shape [H, S, D]: a token sees itself and earlier tokens of its document.

    H query heads read G KV heads in consecutive equal shares. cu_seqlens: document boundaries [num_documents + 1].
    """
    num_tokens, per_kv = q_HSD.shape[1], q_HSD.shape[0] // k_GSD.shape[0]
    place_S = torch.arange(num_tokens, device=q_HSD.device)
    document_S = torch.searchsorted(cu_seqlens[1:], place_S, right=True)
    visible_SS = (document_S[:, None] == document_S[None, :]) & (place_S[:, None] >= place_S[None, :])
    k_HSD, v_HSD = k_GSD.repeat_interleave(per_kv, 0), v_GSD.repeat_interleave(per_kv, 0)
    scores_HSS = (q_HSD @ k_HSD.transpose(1, 2)) * scale
    return scores_HSS.masked_fill(~visible_SS, float("-inf")).softmax(-1) @ v_HSD


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: fp64 stays fp64, everything else is fp32."""
    return torch.promote_types(dtype, torch.float32)


def merge_attention(outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(output [H, T, D], LSE [H, T]) of attention over all keys, from parts that each saw some of the keys.

    An LSE of -inf says that the part saw no key: its output is ignored, whatever it holds.
    """
    wide = wide_dtype(outputs_HTD[0].dtype)
    lse_HT = torch.stack([lse.to(wide) for lse in lses_HT]).logsumexp(0)
    total_HTD = torch.zeros(outputs_HTD[0].shape, dtype=wide, device=lse_HT.device)
    for part_HTD, part_lse_HT in zip(outputs_HTD, lses_HT, strict=True):
        total_HTD += _weigh_(part_HTD.to(wide, copy=True), part_lse_HT, lse_HT)
    return total_HTD.to(outputs_HTD[0].dtype), lse_HT


def merge_attention_backward(
    out_gradient_HTD: Tensor, lse_gradient_HT: Tensor, outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor], lse_HT: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of every part's output and LSE, given the merged LSE.

    With p = exp(part LSE - LSE), g the gradient of the output and l that of the LSE, per part:
    dO = p g and dLSE = p (g . O - sum over parts of p (g . O) + l).
    """
    wide = lse_HT.dtype
    gradient_HTD = out_gradient_HTD.to(wide)
    products_HT = [
        _weigh_((gradient_HTD * out.to(wide)).sum(-1), lse, lse_HT) for out, lse in zip(outputs_HTD, lses_HT, strict=True)
    ]
    total_HT = torch.stack(products_HT).sum(0)
    output_gradients, lse_gradients = [], []
    for out_HTD, part_lse_HT, product_HT in zip(outputs_HTD, lses_HT, products_HT, strict=True):
        output_gradients.append(_weigh_(gradient_HTD.clone(), part_lse_HT, lse_HT).to(out_HTD.dtype))
        lse_gradients.append(product_HT + _weigh_(lse_gradient_HT - total_HT, part_lse_HT, lse_HT))
    return output_gradients, lse_gradients


def accumulate_attention_(out_HTD: Tensor, lse_HT: Tensor, other_out_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """Merges another part into (output, LSE) in place; where the LSE is -inf, what the output holds is ignored."""
    total_HT = torch.logaddexp(lse_HT, other_lse_HT.to(lse_HT.dtype))
    _weigh_(out_HTD, lse_HT, total_HT)
    out_HTD += _weigh_(other_out_HTD.to(out_HTD.dtype, copy=True), other_lse_HT, total_HT)
    lse_HT.copy_(total_HT)


def _weigh_(values: Tensor, part_lse_HT: Tensor, lse_HT: Tensor) -> Tensor:
    """`values` [H, T] or [H, T, D] times exp(part LSE - LSE), in place, and zero where the part saw no key."""
    is_empty, weight = part_lse_HT == float("-inf"), (part_lse_HT - lse_HT).exp()
    if values.dim() == 3:
        is_empty, weight = is_empty.unsqueeze(-1), weight.unsqueeze(-1)
    values *= weight
    # a pass over all values that few calls need
    return values.masked_fill_(is_empty, 0.0) if is_empty.any() else values


def scatter_heads(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, q_bounds: Sequence[int], kv_ranges: Sequence[int]) -> Tensor:
    """Flat blocks [heads, T, D], one per rank: its query heads, the KV heads that they read, their values.

    Rank r has query heads [q_bounds[r], q_bounds[r + 1]) and KV heads [kv_ranges[2 r], kv_ranges[2 r + 1]).
    """
    heads = []
    for rank, (start, stop) in enumerate(pairwise(q_bounds)):
        kv = slice(kv_ranges[2 * rank], kv_ranges[2 * rank + 1])
        heads += [q_HTD[start:stop], k_GTD[kv], v_GTD[kv]]
    return torch.cat(heads).reshape(-1)


def sum_heads(
    flat: Tensor, q_bounds: Sequence[int], kv_ranges: Sequence[int], num_kv: int, num_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of `scatter_heads`: every head of q, k and v as the sum of its copies, added in at least fp32."""
    wide = wide_dtype(flat.dtype)
    q_HTD = flat.new_zeros((q_bounds[-1], num_tokens, head_dim), dtype=wide)
    k_GTD, v_GTD = (flat.new_zeros((num_kv, num_tokens, head_dim), dtype=wide) for _ in range(2))
    place = 0
    for rank, (start, stop) in enumerate(pairwise(q_bounds)):
        kv_start, kv_stop = kv_ranges[2 * rank], kv_ranges[2 * rank + 1]
        for part_NTD, first, last in ((q_HTD, start, stop), (k_GTD, kv_start, kv_stop), (v_GTD, kv_start, kv_stop)):
            num_values = (last - first) * num_tokens * head_dim
            part_NTD[first:last] += flat[place : place + num_values].view(last - first, num_tokens, head_dim)
            place += num_values
    return q_HTD.to(flat.dtype), k_GTD.to(flat.dtype), v_GTD.to(flat.dtype)


def join_blocks(flat: Tensor, sizes: Sequence[int], rows: Sequence[int], head_dim: int) -> list[Tensor]:
    """Tensors [rows[p], sum(sizes), D] from flat blocks [sum(rows), size, D], one block per entry of `sizes`."""
    num_rows = sum(rows)
    blocks = flat.split([num_rows * size * head_dim for size in sizes])
    shaped = [block.view(num_rows, size, head_dim).split(rows) for block, size in zip(blocks, sizes, strict=True)]
    return [torch.cat(pieces, dim=1) for pieces in zip(*shaped, strict=True)]


def split_blocks(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The inverse of `join_blocks`: tensors [rows, sum(sizes), D] cut along the middle into flat blocks."""
    num_rows, head_dim = sum(part.shape[0] for part in parts), parts[0].shape[2]
    flat = parts[0].new_empty(num_rows * sum(sizes) * head_dim)
    start = 0
    for size, block in zip(sizes, flat.split([num_rows * size * head_dim for size in sizes]), strict=True):
        pieces = block.view(num_rows, size, head_dim).split([part.shape[0] for part in parts])
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part[:, start : start + size])
        start += size
    return flat

"""Attention of packed documents by one softmax over all keys: the reference of the GPU smoke test and of attention's tests."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_causal_attention(q_HSD: Tensor, k_GSD: Tensor, v_GSD: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Softmax attention of packed documents, shape [H, S, D]: a token sees itself and earlier tokens of its document.

    H query heads read G KV heads in consecutive equal shares. cu_seqlens: document boundaries [num_documents + 1].
    """
    num_tokens, per_kv = q_HSD.shape[1], q_HSD.shape[0] // k_GSD.shape[0]
    position_S = torch.arange(num_tokens, device=q_HSD.device)
    document_S = torch.searchsorted(cu_seqlens[1:].to(q_HSD.device), position_S, right=True)
    visible_SS = (document_S[:, None] == document_S[None, :]) & (position_S[:, None] >= position_S[None, :])
    k_HSD, v_HSD = k_GSD.repeat_interleave(per_kv, 0), v_GSD.repeat_interleave(per_kv, 0)
    scores_HSS = (q_HSD @ k_HSD.transpose(1, 2)) * scale
    return scores_HSS.masked_fill(~visible_SS, float("-inf")).softmax(-1) @ v_HSD

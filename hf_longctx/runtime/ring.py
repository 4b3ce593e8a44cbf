"""Ring attention: keys and values pass from rank to rank, every rank keeps its own queries. Any degree, any head count.

Documents are cut in zigzag pieces (`plan.sharding`), so every rank has about the same number of query-key pairs. A block
of one query piece and one key piece is seen wholly, causally (the same piece) or not at all; masked blocks are never
computed. Partial outputs merge by their log-sum-exp (LSE) in at least fp32. Backward passes keys, values and their
gradients around once more and uses the merged output and LSE.

Shapes: H query heads, G KV heads, T tokens of this rank, D head size, U tokens of the rank whose keys are at hand.

Source: Ring Attention (arXiv 2310.01889) with the zigzag layout of Striped/zigzag variants, per document.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.sharding import Piece
from hf_longctx.runtime.context import GroupContext


def ring_attention(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, scale: float, context: GroupContext) -> Tensor:
    """Causal attention within documents for this rank's tokens, shape [1, T, H, D].

    Every rank of the context's ring must call it in the same order of layers; backward runs one more ring.
    """
    output: Tensor = _RingAttention.apply(q_1HTD[0], k_1GTD[0], v_1GTD[0], scale, context)
    return output.transpose(0, 1).unsqueeze(0)


def visible_blocks(queries: tuple[Piece, ...], keys: tuple[Piece, ...]) -> list[tuple[slice, slice, bool]]:
    """(query tokens, key tokens, causal) of every block that is not fully masked, as slices of the two ranks' tokens."""
    blocks = []
    for query in queries:
        for key in keys:
            if query.document == key.document and key.start <= query.start:
                blocks.append((query.tokens, key.tokens, key.start == query.start))
    return blocks


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float, context: GroupContext) -> Tensor:
        wide = torch.promote_types(q_HTD.dtype, torch.float32)
        out_HTD = torch.zeros_like(q_HTD, dtype=wide)
        lse_HT = torch.full(q_HTD.shape[:2], float("-inf"), dtype=wide, device=q_HTD.device)
        own_kv = torch.stack([k_GTD, v_GTD])
        for source, kv in _around(own_kv, context):
            for rows, columns, causal in visible_blocks(context.pieces[context.index], context.pieces[source]):
                k, v = _expand(kv[:, :, columns], q_HTD.shape[0])
                out, lse = _block_forward(q_HTD[:, rows], k, v, scale, causal)
                _merge(out_HTD[:, rows], lse_HT[:, rows], out.to(wide), lse.to(wide))
        output = out_HTD.to(q_HTD.dtype)
        ctx.save_for_backward(q_HTD, own_kv, output, lse_HT)
        ctx.scale, ctx.context = scale, context
        return output

    @staticmethod
    def backward(ctx: Any, gradient_HTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q_HTD, own_kv, out_HTD, lse_HT = ctx.saved_tensors
        context: GroupContext = ctx.context
        wide = lse_HT.dtype
        dq_HTD = torch.zeros_like(q_HTD, dtype=wide)
        # gradients travel behind their keys and values and are home again after the last hop
        travelling = torch.zeros_like(own_kv, dtype=wide)
        for source, kv in _around(own_kv, context):
            for rows, columns, causal in visible_blocks(context.pieces[context.index], context.pieces[source]):
                k, v = _expand(kv[:, :, columns], q_HTD.shape[0])
                dq, dk, dv = _block_backward(
                    gradient_HTD[:, rows], q_HTD[:, rows], k, v, out_HTD[:, rows], lse_HT[:, rows], ctx.scale, causal
                )
                dq_HTD[:, rows] += dq
                travelling[0, :, columns] += _fold(dk.to(wide), own_kv.shape[1])
                travelling[1, :, columns] += _fold(dv.to(wide), own_kv.shape[1])
            travelling = _pass_on(travelling, context, source)
        dk_GTD, dv_GTD = travelling.to(q_HTD.dtype)
        return dq_HTD.to(q_HTD.dtype), dk_GTD, dv_GTD, None, None


def _around(own_kv: Tensor, context: GroupContext) -> Any:
    """(rank of the group, its keys and values) for every rank of the ring, starting with this one."""
    kv = own_kv
    for hop in range(context.degree):
        source = (context.index - hop) % context.degree
        yield source, kv
        if hop < context.degree - 1:
            kv = _pass_on(kv, context, source)


def _pass_on(tensor: Tensor, context: GroupContext, source: int) -> Tensor:
    """Sends what came from rank `source` of the group to the next rank; returns what the previous rank passes on."""
    shape = list(tensor.shape)
    shape[2] = context.shard_tokens[(source - 1) % context.degree]
    received = tensor.new_empty(shape)
    following = context.ranks[(context.index + 1) % context.degree]
    previous = context.ranks[(context.index - 1) % context.degree]
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), following, group=context.process_group),
        dist.P2POp(dist.irecv, received, previous, group=context.process_group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def _expand(kv_2GUD: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values once per query head; only here, so that each KV head travels once."""
    k_HUD, v_HUD = kv_2GUD.repeat_interleave(num_heads // kv_2GUD.shape[1], dim=1)
    return k_HUD, v_HUD


def _fold(gradient_HUD: Tensor, num_kv_heads: int) -> Tensor:
    """The sum over the query heads that read each KV head."""
    return gradient_HUD.unflatten(0, (num_kv_heads, -1)).sum(1)


def _merge(out_HTD: Tensor, lse_HT: Tensor, other_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """Adds a partial attention result to another one, in place: weights are exp(LSE) of the parts."""
    total_HT = torch.logaddexp(lse_HT, other_lse_HT)
    out_HTD.mul_((lse_HT - total_HT).exp().unsqueeze(-1)).add_(other_HTD * (other_lse_HT - total_HT).exp().unsqueeze(-1))
    lse_HT.copy_(total_HT)


def _has_cpu_operator(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _block_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and LSE [H, T] of one block; on the CPU by its flash operator, elsewhere by plain matrices."""
    if _has_cpu_operator(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale
        )
        return out[0], lse[0]
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


def _block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one block, given the merged output and LSE of all blocks."""
    if _has_cpu_operator(q):
        inputs = [x.contiguous().unsqueeze(0) for x in (gradient, q, k, v, out, lse)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, causal, scale=scale)
        return found[0][0], found[1][0], found[2][0]
    weights = (_scores(q, k, scale, causal) - lse.unsqueeze(-1)).exp()
    wide_gradient = gradient.to(weights.dtype)
    delta = (wide_gradient * out).sum(-1, keepdim=True)
    ds = weights * (wide_gradient @ v.to(weights.dtype).transpose(1, 2) - delta) * scale
    return ds @ k.to(ds.dtype), ds.transpose(1, 2) @ q.to(ds.dtype), weights.transpose(1, 2) @ wide_gradient


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(1, 2) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores

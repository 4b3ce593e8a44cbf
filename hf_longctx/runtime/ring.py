"""Ring attention: keys and values pass from rank to rank, every rank keeps its own queries. Any degree, any head count.

Documents are cut in zigzag pieces (`plan.sharding`), so every rank has about the same number of query-key pairs. A tile of
one query piece and one key piece is seen wholly, causally (the same piece) or not at all; masked tiles are never
computed, and keys that no other block sees are never sent. Partial outputs merge by their log-sum-exp (LSE) in at least
fp32. Backward passes keys, values and their gradients around once more and uses the merged output and LSE.

Shapes: H query heads, G KV heads, T tokens of this rank's block, D head size, U tokens of the block whose keys are at hand.

Source: Ring Attention (arXiv 2310.01889) with the zigzag layout of Striped/zigzag variants, per document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.kernels.merge_attention import accumulate_attention_
from hf_longctx.runtime.context import Ring
from hf_longctx.runtime.heads import KVReaders
from hf_longctx.runtime.kept_attention import AttentionRecord
from hf_longctx.runtime.tiles import tile_backward, tile_forward


def ring_attention(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    readers: KVReaders,
    scale: float,
    ring: Ring,
    record: AttentionRecord | None = None,
) -> Tensor:
    """Causal attention within documents for the tokens of this rank's block, shape [1, T, H, D].

    Each KV head travels once a hop, however many query heads read it. Every rank of the ring must call it in the same
    order of layers; backward runs one more ring. A replay that finds output and LSE in `record` runs none. Raises ValueError
    for a record of some of the tokens.
    """
    if record is not None and not record.is_all_or_nothing:
        raise ValueError(
            f"attention_output is recomputed for a share of {record.share.recompute:g} of the tokens, which a ring of "
            f"{ring.num_blocks} blocks cannot do; plan a share of 0 or 1, or a Ulysses group"
        )
    output: Tensor = _RingAttention.apply(q_1HTD[0], k_1GTD[0], v_1GTD[0], readers, scale, ring, record)
    return output.transpose(0, 1).unsqueeze(0)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        readers: KVReaders,
        scale: float,
        ring: Ring,
        record: AttentionRecord | None,
    ) -> Tensor:
        own_kv = torch.stack([k_GTD, v_GTD])
        kept = record.take() if record is not None else None
        if kept is None:
            output, lse_HT = _around_the_ring(q_HTD, own_kv, readers, scale, ring)
            if record is not None:
                record.put(output.transpose(0, 1), lse_HT)
        else:
            output, lse_HT = kept.out_ShD.transpose(0, 1), kept.lse_hS
        ctx.save_for_backward(q_HTD, own_kv, output, lse_HT)
        ctx.settings = readers, scale, ring
        return output

    @staticmethod
    def backward(ctx: Any, gradient_HTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:  # type: ignore[override]
        q_HTD, own_kv, out_HTD, lse_HT = ctx.saved_tensors
        readers, scale, ring = ctx.settings
        wide = lse_HT.dtype
        dq_HTD = torch.zeros_like(q_HTD, dtype=wide)
        own_sum = torch.zeros_like(own_kv, dtype=wide)
        travelling = own_sum
        for hop, (source, kv) in enumerate(_around(own_kv, ring)):
            # the gradients of another block travel behind its keys and values, from the first rank that sees these
            total = own_sum if hop == 0 else torch.zeros_like(kv, dtype=wide) if hop == 1 else travelling
            for rows, columns, causal in ring.tiles(source):
                k, v = map(readers.gather, kv[:, :, columns])
                dq, dk, dv = tile_backward(
                    gradient_HTD[:, rows], q_HTD[:, rows], k, v, out_HTD[:, rows], lse_HT[:, rows], scale, causal
                )
                dq_HTD[:, rows] += dq
                readers.fold_into(total[0, :, columns], dk)
                readers.fold_into(total[1, :, columns], dv)
            if hop:
                travelling = _pass_on(total, ring, source)
        # home again after the last hop
        for tokens, arrived in zip(ring.departing, ring.travelling[ring.index], strict=True):
            own_sum[:, :, tokens] += travelling[:, :, arrived.tokens]
        dk_GTD, dv_GTD = own_sum.to(q_HTD.dtype)
        return dq_HTD.to(q_HTD.dtype), dk_GTD, dv_GTD, None, None, None, None


def _around_the_ring(q_HTD: Tensor, own_kv: Tensor, readers: KVReaders, scale: float, ring: Ring) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and LSE [H, T] of this rank's queries over all blocks' keys."""
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    # unfilled: where the LSE is -inf the merge does not look at it
    out_HTD = torch.empty_like(q_HTD, dtype=wide)
    lse_HT = torch.full(q_HTD.shape[:2], float("-inf"), dtype=wide, device=q_HTD.device)
    for source, kv in _around(own_kv, ring):
        for rows, columns, causal in ring.tiles(source):
            k, v = map(readers.gather, kv[:, :, columns])
            out, lse = tile_forward(q_HTD[:, rows], k, v, scale, causal)
            accumulate_attention_(out_HTD[:, rows], lse_HT[:, rows], out, lse)
    return out_HTD.to(q_HTD.dtype), lse_HT


def _around(own_kv: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """(block, its keys and values) for every block of the ring: this rank's whole, of the others what travels."""
    yield ring.index, own_kv
    kv = torch.cat([own_kv[:, :, tokens] for tokens in ring.departing], dim=2) if ring.departing else own_kv[:, :, :0]
    for hop in range(1, ring.num_blocks):
        kv = _pass_on(kv, ring, (ring.index - hop + 1) % ring.num_blocks)
        yield (ring.index - hop) % ring.num_blocks, kv


def _pass_on(tensor: Tensor, ring: Ring, source: int) -> Tensor:
    """Sends what belongs to block `source` to the next block; returns what the previous block passes on."""
    shape = list(tensor.shape)
    shape[2] = ring.num_travelling((source - 1) % ring.num_blocks)
    received = tensor.new_empty(shape)
    following = ring.ranks[(ring.index + 1) % ring.num_blocks]
    previous = ring.ranks[(ring.index - 1) % ring.num_blocks]
    operations = []
    # both ends know from the layout where there is nothing to send
    if tensor.shape[2]:
        operations.append(dist.P2POp(dist.isend, tensor.contiguous(), following, group=ring.process_group))
    if shape[2]:
        operations.append(dist.P2POp(dist.irecv, received, previous, group=ring.process_group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    return received

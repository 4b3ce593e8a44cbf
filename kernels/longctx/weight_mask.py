"""Draws dropout masks of attention weights by the generator of `dropout_mask`: one word per head, query and key of a document.

A counter is (position of the key, position of the query, document, step); its four words are for four neighbouring heads. The key
of 64 bits encodes the seed and the layer, and the number of these four heads is added to its high word. Heads are counted over
the whole layer, so a rank can draw the mask of any head and tile.

Shapes: N blocks, R rows (queries) and U keys of a block, H heads.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from hf_longctx.kernels.dropout_mask import NUM_ROUNDS, WORD, philox
from hf_longctx.kernels.jit import device_of, jit, launches_directly, tl

# heads that share a counter
_LANES = 4
# words that plain torch draws at a time, so that they fit into the cache
_VALUES = 1 << 17
# rows and keys per program
_BLOCK_R, _BLOCK_U = 16, 64


@jit("num_groups", "num_heads", "first_head", "num_rows", "num_keys", "document", "step", "low", "high", "threshold")
def _dropped_kernel(
    dropped, rows, keys, num_groups, num_heads, first_head, num_rows, num_keys, document, step, low, high, threshold,
    LANES: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Draws words of BLOCK_R rows, BLOCK_U keys and LANES heads per program."""
    row_blocks = tl.cdiv(num_rows, BLOCK_R)
    place = tl.program_id(0)
    block, group = (place // row_blocks // num_groups).to(tl.int64), place // row_blocks % num_groups
    r = (place % row_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    u = tl.program_id(1).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    group += first_head // LANES
    zero = tl.zeros((BLOCK_R, BLOCK_U), dtype=tl.uint32)
    query = zero + tl.load(rows + block * num_rows + r, mask=r < num_rows, other=0).to(tl.uint32)[:, None]
    key = zero + tl.load(keys + block * num_keys + u, mask=u < num_keys, other=0).to(tl.uint32)[None, :]
    words = tl.philox_impl(
        key, query, zero + document.to(tl.uint32), zero + step.to(tl.uint32),
        zero + low.to(tl.uint32), zero + (high + group).to(tl.uint32), ROUNDS,
    )  # fmt: skip
    within = (r < num_rows)[:, None] & (u < num_keys)[None, :]
    for lane in tl.static_range(LANES):
        head = group * LANES + lane - first_head
        targets = dropped + ((block * num_heads + head) * num_rows + r[:, None]) * num_keys + u[None, :]
        # a tensor of heads, because masks are combined as tensors
        heads = tl.zeros((BLOCK_R, BLOCK_U), dtype=tl.int32) + head
        is_own = within & (heads >= 0) & (heads < num_heads)
        tl.store(targets, (words[lane].to(tl.int64) < threshold).to(tl.uint8), mask=is_own)


def launch_dropped_weights(
    rows_NR: Tensor, keys_NU: Tensor, heads: list[int], document: int, step: int, key: list[int], threshold: int
) -> Tensor:
    """Computes `_dropped_weights` with the Triton kernel."""
    (num_blocks, num_rows), num_keys, (first, num_heads) = rows_NR.shape, keys_NU.shape[1], heads
    dropped = torch.empty(num_blocks * num_heads, num_rows, num_keys, dtype=torch.uint8, device=rows_NR.device)
    if dropped.numel():
        num_groups = (first + num_heads - 1) // _LANES - first // _LANES + 1
        grid = num_blocks * num_groups * -(-num_rows // _BLOCK_R), -(-num_keys // _BLOCK_U)
        with device_of(dropped):
            _dropped_kernel[grid](
                dropped, rows_NR.contiguous(), keys_NU.contiguous(), num_groups, num_heads, first, num_rows, num_keys,
                document & WORD, step, *key, threshold,
                LANES=_LANES, ROUNDS=NUM_ROUNDS, BLOCK_R=_BLOCK_R, BLOCK_U=_BLOCK_U,
            )  # fmt: skip
    return dropped.view(torch.bool)


@torch.library.custom_op("hf_longctx::dropped_weights", mutates_args=(), device_types="cpu")
def _dropped_weights(
    rows_NR: Tensor, keys_NU: Tensor, heads: list[int], document: int, step: int, key: list[int], threshold: int
) -> Tensor:
    (num_blocks, num_rows), num_keys, (first, num_heads) = rows_NR.shape, keys_NU.shape[1], heads
    groups = torch.arange(first // _LANES, (first + num_heads - 1) // _LANES + 1, device=rows_NR.device).view(-1, 1, 1)
    dropped = torch.empty(num_blocks, num_heads, num_rows, num_keys, dtype=torch.bool, device=rows_NR.device)
    size = max(1, _VALUES // max(1, num_keys * len(groups) * _LANES))
    for block in range(num_blocks):
        keys_11U = keys_NU[block].view(1, 1, -1)
        for start in range(0, num_rows, size):
            rows_1R1 = rows_NR[block, start : start + size].view(1, -1, 1)
            counter = keys_11U, rows_1R1, torch.full_like(rows_1R1, document & WORD), torch.full_like(rows_1R1, step)
            words = torch.stack(torch.broadcast_tensors(*philox(counter, key[1] << 32 | key[0], groups)), dim=1)
            of_heads = words.flatten(0, 1)[first % _LANES :][:num_heads]
            dropped[block, :, start : start + size] = of_heads < threshold
    return dropped.flatten(0, 1)


_dropped_weights.register_kernel("cuda")(launch_dropped_weights)


def dropped_weights(
    rows_NR: Tensor, keys_NU: Tensor, heads: tuple[int, int], document: int, step: int, key: int, rate: float
) -> Tensor:
    """Returns the mask [N * H, R, U] of attention weights to drop at `rate`.

    rows, keys: positions of queries and keys in the document, int64. heads: first head and number of heads. key: 64 bits.
    """
    draw = launch_dropped_weights if launches_directly(rows_NR) else _dropped_weights
    mask: Tensor = draw(
        rows_NR, keys_NU, list(heads), document, step & WORD, [key & WORD, key >> 32 & WORD], round(rate * (WORD + 1))
    )
    return mask

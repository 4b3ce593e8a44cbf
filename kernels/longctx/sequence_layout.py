"""Rearranges data before and after the two Ulysses exchanges; every value is read once and written once.

`runtime.attention.sequence_parallel` calls it for every layer of a group of several ranks.

Forward, on each rank of a group:  scatter_heads -> all-to-all -> join_tokens -> attention -> scatter_tokens -> all-to-all
-> join_heads. Backward runs the adjoints in reverse order. A flat buffer holds one block per rank of the group:

    scatter_heads  to rank r    [query heads of r, then keys of r's KV heads, then their values; T own tokens; D]; if heads are
                                exchanged in parts, first the first part of every rank, and so on
    join_tokens    from rank r  [own query heads, then keys of own KV heads, then their values; tokens of r; D]
    scatter_tokens to rank r    [tokens of r, own heads, D]
    join_heads     from rank r  [T own tokens, heads of r, D]

The last three only cut or join along one dimension. So both joins are one operation, which makes tensors [rows, sum of sizes, D]
from flat blocks [all rows, size, D]; its gradient is its inverse. The gradient of scatter_heads sums the copies of a KV head in
rank order, in at least fp32, and rounds once.

Shapes: H query heads, G KV heads, N heads of any kind, T tokens of this rank, S tokens of the chunk, D head size. Tensors
may have any strides, flat buffers are contiguous, all offsets are int64.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.kernels.jit import device_of, jit, launches_directly, next_power_of_2, pack, tl, unpack, wide_type

# values per program
_TILE_VALUES = 4096


@jit()
def _place(program, num_rows, num_blocks, ROWS_FIRST: tl.constexpr):
    """Returns (row, block of the middle dimension) of a program, so that concurrent programs use neighbouring memory."""
    if ROWS_FIRST:
        row, block = program % num_rows, program // num_rows
    else:
        row, block = program // num_blocks, program % num_blocks
    return row.to(tl.int64), block.to(tl.int64)


@jit("num_blocks", "num_q", "num_kv", "num_tokens")
def _heads_kernel(
    q, k, v, flat, strides, table, num_blocks, num_q, num_kv, num_tokens,
    DEGREE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr, IS_SUM: tl.constexpr, ROWS_FIRST: tl.constexpr,
    PART_Q: tl.constexpr, PART_KV: tl.constexpr, PER_KV: tl.constexpr,
):  # fmt: skip
    """Copies BLOCK_T tokens of one head of q, k or v per program to all its places in `flat`, or (IS_SUM) sums these.

    table, for each of q, k, v and each rank: (first head, one past the last, offset of the first in `flat`, counted in heads).
    PART_Q, PART_KV, PER_KV: `part` of `reference.flat_blocks`; 0 if ranks have one block each, whose offset is in the table.
    """
    head, block = _place(tl.program_id(0), num_q + 2 * num_kv, num_blocks, ROWS_FIRST)
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    if head < num_q:
        _copy_head(q, flat, strides, table, head, tokens, num_tokens, 0, DEGREE, HEAD_DIM, BLOCK_T, BLOCK_D, WIDE, IS_SUM,
                   PART_Q, PART_KV, PER_KV)  # fmt: skip
    elif head < num_q + num_kv:
        head -= num_q
        _copy_head(k, flat, strides, table, head, tokens, num_tokens, 1, DEGREE, HEAD_DIM, BLOCK_T, BLOCK_D, WIDE, IS_SUM,
                   PART_Q, PART_KV, PER_KV)  # fmt: skip
    else:
        head -= num_q + num_kv
        _copy_head(v, flat, strides, table, head, tokens, num_tokens, 2, DEGREE, HEAD_DIM, BLOCK_T, BLOCK_D, WIDE, IS_SUM,
                   PART_Q, PART_KV, PER_KV)  # fmt: skip


@jit()
def _copy_head(
    x, flat, strides, table, head, tokens, num_tokens,
    PART: tl.constexpr, DEGREE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr, IS_SUM: tl.constexpr, PART_Q: tl.constexpr, PART_KV: tl.constexpr, PER_KV: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    tile = (tokens < num_tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    offsets = head * strides[3 * PART] + tokens[:, None] * strides[3 * PART + 1] + columns[None, :] * strides[3 * PART + 2]
    if IS_SUM:
        total = tl.zeros([BLOCK_T, BLOCK_D], WIDE)
    else:
        values = tl.load(x + offsets, mask=tile, other=0.0)
    for rank in tl.static_range(DEGREE):
        first = unpack(table[3 * (PART * DEGREE + rank)])
        if (head >= first) & (head < unpack(table[3 * (PART * DEGREE + rank) + 1])):
            if PART_Q == 0:
                place = unpack(table[3 * (PART * DEGREE + rank) + 2]) + head - first
            elif PART == 0:
                part = (head - first) // PART_Q
                # the heads of all ranks in earlier parts; of earlier ranks in this one; and of this rank
                place = DEGREE * (part * PART_Q + 2 * PART_KV * ((part + PER_KV - 1) // PER_KV))
                place += rank * (PART_Q + 2 * PART_KV * (part % PER_KV == 0)) + (head - first) % PART_Q
            else:
                # keys travel with the first part of their readers, behind its queries
                index = (head - first) // PART_KV
                place = DEGREE * index * (PER_KV * PART_Q + 2 * PART_KV) + rank * (PART_Q + 2 * PART_KV)
                place += PART_Q + (PART - 1) * PART_KV + (head - first) % PART_KV
            row = place * num_tokens + tokens
            there = flat + row[:, None] * HEAD_DIM + columns[None, :]
            if IS_SUM:
                total += tl.load(there, mask=tile, other=0.0).to(WIDE)
            else:
                tl.store(there, values, mask=tile)
    if IS_SUM:
        tl.store(x + offsets, total.to(x.dtype.element_ty), mask=tile)


@jit("num_blocks", "num_rows", "num_middle")
def _blocks_kernel(
    parts, flat, strides, row_bounds, bounds, num_blocks, num_rows, num_middle,
    NUM_PARTS: tl.constexpr, NUM_BOUNDS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """Copies BLOCK_M middle indices of one row per program from the flat blocks, or (IS_SPLIT) to them.

    row_bounds: bounds of the tensors (`parts`) along the rows of a block. bounds: bounds of the blocks along the middle.
    """
    row, block = _place(tl.program_id(0), num_rows, num_blocks, ROWS_FIRST)
    middle = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    tile = (middle < num_middle)[:, None] & (columns < HEAD_DIM)[None, :]
    flat_row = tl.zeros([BLOCK_M], tl.int64)
    for i in tl.static_range(NUM_BOUNDS):
        first, stop = unpack(bounds[i]), unpack(bounds[i + 1])
        place = num_rows * first + row * (stop - first) + middle - first
        flat_row = tl.where((middle >= first) & (middle < stop), place, flat_row)
    there = flat + flat_row[:, None] * HEAD_DIM + columns[None, :]
    for i in tl.static_range(NUM_PARTS):
        first_row = unpack(row_bounds[i])
        if (row >= first_row) & (row < unpack(row_bounds[i + 1])):
            offsets = (
                (row - first_row) * strides[3 * i] + middle[:, None] * strides[3 * i + 1] + columns[None, :] * strides[3 * i + 2]
            )
            if IS_SPLIT:
                tl.store(there, tl.load(parts[i] + offsets, mask=tile, other=0.0), mask=tile)
            else:
                tl.store(parts[i] + offsets, tl.load(there, mask=tile, other=0.0), mask=tile)


def _rows_first(x_NMD: Tensor) -> bool:
    """Whether rows are closer in memory than indices of the middle dimension, like heads of a token."""
    return x_NMD.stride(0) < x_NMD.stride(1)


def _bounds(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


def _tiling(num_indices: int, head_dim: int) -> tuple[int, int, int]:
    """Returns (blocks along a dimension of `num_indices`, indices per block, values per index as a power of two)."""
    block_d = next_power_of_2(head_dim)
    block = max(1, min(_TILE_VALUES // block_d, next_power_of_2(num_indices)))
    return -(-num_indices // block), block, block_d


def _head_table(q_bounds: Sequence[int], kv_ranges: Sequence[int]) -> list[int]:
    """Returns (first head, one past the last, offset of the first in the flat buffer) of every rank, for q, k and v."""
    tables: list[list[int]] = [[], [], []]
    offset = 0
    for queries, keys in reference.flat_blocks(q_bounds, kv_ranges):
        for table, heads in zip(tables, (queries, keys, keys), strict=True):
            table += [heads.start, heads.stop, offset]
            offset += heads.stop - heads.start
    return tables[0] + tables[1] + tables[2]


def _launch_heads(
    parts_NTD: Sequence[Tensor],
    flat: Tensor,
    q_bounds: Sequence[int],
    kv_ranges: Sequence[int],
    part: Sequence[int],
    is_sum: bool,
) -> None:
    q_HTD, k_GTD, v_GTD = parts_NTD
    num_q, num_tokens, head_dim = q_HTD.shape
    num_blocks, block_t, block_d = _tiling(num_tokens, head_dim)
    grid = ((num_q + 2 * k_GTD.shape[0]) * num_blocks,)
    part_q, part_kv, per_kv = part or (0, 0, 0)
    if num_tokens == 0 or head_dim == 0:
        return
    with device_of(flat):
        _heads_kernel[grid](
            q_HTD, k_GTD, v_GTD, flat, tuple(stride for part in parts_NTD for stride in part.stride()),
            pack(_head_table(q_bounds, kv_ranges)), num_blocks, num_q, k_GTD.shape[0], num_tokens,
            DEGREE=len(q_bounds) - 1, HEAD_DIM=head_dim, BLOCK_T=block_t, BLOCK_D=block_d,
            WIDE=wide_type(flat.dtype), IS_SUM=is_sum, ROWS_FIRST=_rows_first(q_HTD),
            PART_Q=part_q, PART_KV=part_kv, PER_KV=per_kv,
        )  # fmt: skip


def launch_scatter_heads(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, q_bounds: Sequence[int], kv_ranges: Sequence[int], part: Sequence[int] = ()
) -> Tensor:
    """Computes `reference.scatter_heads` with the Triton kernel."""
    num_heads = _num_scattered(q_bounds, kv_ranges)
    flat = torch.empty(num_heads * q_HTD.shape[1] * q_HTD.shape[2], dtype=q_HTD.dtype, device=q_HTD.device)
    _launch_heads((q_HTD, k_GTD, v_GTD), flat, q_bounds, kv_ranges, part, is_sum=False)
    return flat


def launch_sum_heads(
    flat: Tensor,
    q_bounds: Sequence[int],
    kv_ranges: Sequence[int],
    part: Sequence[int],
    num_kv: int,
    num_tokens: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.sum_heads` with the Triton kernel."""
    heads = (q_bounds[-1], num_kv, num_kv)
    q, k, v = (torch.empty((num, num_tokens, head_dim), dtype=flat.dtype, device=flat.device) for num in heads)
    _launch_heads((q, k, v), flat.contiguous(), q_bounds, kv_ranges, part, is_sum=True)
    return q, k, v


def _launch_blocks(parts: Sequence[Tensor], flat: Tensor, sizes: Sequence[int], is_split: bool) -> None:
    rows = [part.shape[0] for part in parts]
    num_middle, head_dim = parts[0].shape[1:]
    if flat.numel() == 0:
        return
    num_blocks, block_m, block_d = _tiling(num_middle, head_dim)
    with device_of(flat):
        _blocks_kernel[(sum(rows) * num_blocks,)](
            tuple(parts), flat, tuple(stride for part in parts for stride in part.stride()),
            pack(_bounds(rows)), pack(_bounds(sizes)), num_blocks, sum(rows), num_middle,
            NUM_PARTS=len(parts), NUM_BOUNDS=len(sizes), HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_D=block_d,
            IS_SPLIT=is_split, ROWS_FIRST=_rows_first(parts[0]),
        )  # fmt: skip


def launch_join_blocks(flat: Tensor, sizes: Sequence[int], rows: Sequence[int], head_dim: int) -> list[Tensor]:
    """Computes `reference.join_blocks` with the Triton kernel."""
    parts = [torch.empty((num, sum(sizes), head_dim), dtype=flat.dtype, device=flat.device) for num in rows]
    _launch_blocks(parts, flat.contiguous(), sizes, is_split=False)
    return parts


def launch_split_blocks(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Computes `reference.split_blocks` with the Triton kernel."""
    num_values = sum(part.shape[0] for part in parts) * sum(sizes) * parts[0].shape[2]
    flat = torch.empty(num_values, dtype=parts[0].dtype, device=parts[0].device)
    _launch_blocks(parts, flat, sizes, is_split=True)
    return flat


def _num_scattered(q_bounds: Sequence[int], kv_ranges: Sequence[int]) -> int:
    """Counts the heads in the flat buffer of `scatter_heads`, with every copy."""
    return q_bounds[-1] + 2 * (sum(kv_ranges[1::2]) - sum(kv_ranges[::2]))


@torch.library.custom_op("hf_longctx::scatter_heads", mutates_args=(), device_types="cpu")
def _scatter_heads(q: Tensor, k: Tensor, v: Tensor, q_bounds: list[int], kv_ranges: list[int], part: list[int]) -> Tensor:
    return reference.scatter_heads(q, k, v, q_bounds, kv_ranges, part)


@torch.library.custom_op("hf_longctx::sum_heads", mutates_args=(), device_types="cpu")
def _sum_heads(
    flat: Tensor, q_bounds: list[int], kv_ranges: list[int], part: list[int], num_kv: int, num_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.sum_heads(flat, q_bounds, kv_ranges, part, num_kv, num_tokens, head_dim)


@torch.library.custom_op("hf_longctx::join_blocks", mutates_args=(), device_types="cpu")
def _join_blocks(flat: Tensor, sizes: list[int], rows: list[int], head_dim: int) -> list[Tensor]:
    return reference.join_blocks(flat, sizes, rows, head_dim)


@torch.library.custom_op("hf_longctx::split_blocks", mutates_args=(), device_types="cpu")
def _split_blocks(parts: list[Tensor], sizes: list[int]) -> Tensor:
    return reference.split_blocks(parts, sizes)


_scatter_heads.register_kernel("cuda")(launch_scatter_heads)
_sum_heads.register_kernel("cuda")(launch_sum_heads)
_join_blocks.register_kernel("cuda")(launch_join_blocks)
_split_blocks.register_kernel("cuda")(launch_split_blocks)


@_scatter_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_bounds: list[int], kv_ranges: list[int], part: list[int]) -> Tensor:
    return q.new_empty(_num_scattered(q_bounds, kv_ranges) * q.shape[1] * q.shape[2])


@_sum_heads.register_fake
def _(
    flat: Tensor, q_bounds: list[int], kv_ranges: list[int], part: list[int], num_kv: int, num_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (flat.new_empty((num, num_tokens, head_dim)) for num in (q_bounds[-1], num_kv, num_kv))
    return q, k, v


@_join_blocks.register_fake
def _(flat: Tensor, sizes: list[int], rows: list[int], head_dim: int) -> list[Tensor]:
    return [flat.new_empty((num, sum(sizes), head_dim)) for num in rows]


@_split_blocks.register_fake
def _(parts: list[Tensor], sizes: list[int]) -> Tensor:
    return parts[0].new_empty(sum(part.shape[0] for part in parts) * sum(sizes) * parts[0].shape[2])


def _remember_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, _, *ctx.blocks = inputs
    ctx.sizes = (k.shape[0], q.shape[1], q.shape[2])


def _remember_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, *ctx.blocks = inputs[:4]


def _remember_join(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.sizes = inputs[1]


def _remember_split(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, ctx.sizes = inputs
    ctx.rows, ctx.head_dim = [part.shape[0] for part in parts], parts[0].shape[2]


_scatter_heads.register_autograd(
    lambda ctx, gradient: (*_sum_heads(gradient, *ctx.blocks, *ctx.sizes), None, None, None),
    setup_context=_remember_scatter,
)
_sum_heads.register_autograd(
    lambda ctx, *gradients: (_scatter_heads(*gradients, *ctx.blocks), *[None] * 6),
    setup_context=_remember_sum,
)
_join_blocks.register_autograd(
    lambda ctx, gradients: (_split_blocks(gradients, ctx.sizes), None, None, None), setup_context=_remember_join
)
_split_blocks.register_autograd(
    lambda ctx, gradient: (_join_blocks(gradient, ctx.sizes, ctx.rows, ctx.head_dim), None), setup_context=_remember_split
)


class _DirectScatter(torch.autograd.Function):
    """`launch_scatter_heads` with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _remember_scatter(ctx, inputs, inputs[0])
        return launch_scatter_heads(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return *_launched(launch_sum_heads, _sum_heads, gradient, *ctx.blocks, *ctx.sizes), None, None, None


class _DirectJoin(torch.autograd.Function):
    """`launch_join_blocks` with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.sizes = inputs[1]
        return tuple(launch_join_blocks(*inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return _launched(launch_split_blocks, _split_blocks, list(gradients), ctx.sizes), None, None, None


def _launched(launch: Callable[..., Any], operator: Callable[..., Any], values: Any, *settings: Any) -> Any:
    """Runs `launch`, or `operator`, which has a gradient, in a backward that is differentiated again."""
    first = values if isinstance(values, Tensor) else values[0]
    return (operator if torch.is_grad_enabled() or not launches_directly(first) else launch)(values, *settings)


def _scatter(q: Tensor, k: Tensor, v: Tensor, q_bounds: list[int], kv_ranges: list[int], part: Sequence[int] = ()) -> Tensor:
    if not all(map(launches_directly, (q, k, v))):
        return _scatter_heads(q, k, v, q_bounds, kv_ranges, list(part))
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    scatter: Callable[..., Tensor] = _DirectScatter.apply if needs_gradient else launch_scatter_heads
    return scatter(q, k, v, q_bounds, kv_ranges, part)


def _join(flat: Tensor, sizes: list[int], rows: list[int], head_dim: int) -> Sequence[Tensor]:
    if not launches_directly(flat):
        return _join_blocks(flat, sizes, rows, head_dim)
    needs_gradient = torch.is_grad_enabled() and flat.requires_grad
    join: Callable[..., Sequence[Tensor]] = _DirectJoin.apply if needs_gradient else launch_join_blocks
    return join(flat, sizes, rows, head_dim)


def scatter_heads(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, q_bounds: Sequence[int], kv_ranges: Sequence[int], part: Sequence[int] = ()
) -> Tensor:
    """Makes the flat send buffer: per rank its query heads, then keys and values of its KV heads, each [heads, T, D].

    Differentiable. Rank r gets query heads [q_bounds[r], q_bounds[r + 1]) and KV heads [kv_ranges[2 r], kv_ranges[2 r + 1]). A KV
    head may go to several ranks; its gradient is the sum over them. Raises ValueError if the ranges do not fit the tensors.

    part: query heads of each of equal parts of every rank's heads, KV heads that they read, and parts that read the same. In the
    buffer come the first parts of all ranks, then the second ones, and so on; KV heads are with the first part that reads them.
    """
    num_q, num_kv = q_HTD.shape[0], k_GTD.shape[0]
    if q_HTD.shape[1:] != k_GTD.shape[1:] or k_GTD.shape != v_GTD.shape or not q_HTD.dtype == k_GTD.dtype == v_GTD.dtype:
        found = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (q_HTD, k_GTD, v_GTD))
        raise ValueError(f"q, k and v are {found}; they must agree in dtype, tokens and head size, and k and v in heads too")
    if q_bounds[0] != 0 or q_bounds[-1] != num_q or any(start > stop for start, stop in pairwise(q_bounds)):
        raise ValueError(f"q_bounds {list(q_bounds)} must rise from 0 to the {num_q} query heads")
    ranges = list(zip(kv_ranges[::2], kv_ranges[1::2], strict=False))
    if len(kv_ranges) != 2 * (len(q_bounds) - 1) or not all(0 <= start <= stop <= num_kv for start, stop in ranges):
        raise ValueError(
            f"kv_ranges {list(kv_ranges)} must hold, for each of the {len(q_bounds) - 1} ranks, a start and a stop within the "
            f"{num_kv} KV heads"
        )
    if part:
        sizes = {(q_bounds[rank + 1] - q_bounds[rank], stop - start) for rank, (start, stop) in enumerate(ranges)}
        count = q_bounds[1] // part[0]
        if sizes != {(count * part[0], -(-count // part[2]) * part[1])}:
            raise ValueError(f"ranks have {sorted(sizes)} query and KV heads, which are not equal parts of {list(part)}")
    return _scatter(q_HTD, k_GTD, v_GTD, list(q_bounds), list(kv_ranges), part)


def join_tokens(received: Tensor, tokens: Sequence[int], num_q: int, num_kv: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Makes q [num_q, S, D], k and v [num_kv, S, D] of all tokens from one flat block per rank; contiguous. Differentiable.

    Rank r sent [num_q + 2 num_kv, tokens[r], D]. Raises ValueError if the buffer has another size.
    """
    _check_flat(received, (num_q + 2 * num_kv) * sum(tokens) * head_dim, f"{num_q + 2 * num_kv} heads x {list(tokens)} tokens")
    q_hSD, k_gSD, v_gSD = _join(received, list(tokens), [num_q, num_kv, num_kv], head_dim)
    return q_hSD, k_gSD, v_gSD


def scatter_tokens(out_ShD: Tensor, tokens: Sequence[int]) -> Tensor:
    """Makes the flat send buffer: per rank r a block [tokens[r], h, D] of this rank's heads. Differentiable.

    The tokens of a rank are consecutive rows, so a contiguous input is returned unchanged, and any other is copied once. Raises
    ValueError if the tokens do not add up to those of the input.
    """
    if sum(tokens) != out_ShD.shape[0]:
        raise ValueError(f"ranks hold {list(tokens)} tokens, {sum(tokens)} in total, but attention returned {out_ShD.shape[0]}")
    return out_ShD.reshape(-1)


def join_heads(received: Tensor, heads: Sequence[int], num_tokens: int, head_dim: int) -> Tensor:
    """Makes all heads of this rank's tokens [T, sum(heads), D] from one flat block [T, heads[r], D] per rank. Differentiable.

    Raises ValueError if the buffer has another size.
    """
    _check_flat(received, num_tokens * sum(heads) * head_dim, f"{num_tokens} tokens x {list(heads)} heads")
    return _join(received, list(heads), [num_tokens], head_dim)[0]


def _check_flat(flat: Tensor, num_values: int, layout: str) -> None:
    if flat.dim() != 1 or flat.numel() != num_values:
        raise ValueError(f"the buffer has shape {list(flat.shape)}; {layout} need a flat buffer of {num_values} values")

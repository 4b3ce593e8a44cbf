"""Merge partial attention results by their log-sum-exp (LSE): n parts at once with gradients, or one more part in place.

A part saw some of the keys: O_i = softmax(scores_i) V_i and L_i = log sum exp(scores_i). Over all keys

    L = log sum_i exp(L_i),   O = sum_i p_i O_i,   p_i = exp(L_i - L)

and with the gradient g of O and l of L:  dO_i = p_i g,  dL_i = p_i (g . O_i - sum_j p_j (g . O_j) + l).

Sums are in fp32 (fp64 for fp64); only the stored output is rounded. An LSE of -inf says that a part saw no key: it gets no
weight and no gradient, and its output is never looked at. Where no part saw a key the output is 0 and the LSE -inf. A LSE
that is NaN or +inf shows as NaN in the result.

Shapes: H heads, T tokens, D head size, n parts. Any strides; all offsets are int64.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.kernels.jit import device_of, jit, next_power_of_2, tl, wide_type

_TILE_VALUES = 2048


@jit("num_tokens")
def _merge_kernel(
    outs, lses, merged, merged_lse, strides, merged_strides, num_tokens,
    NUM_PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of one head. strides: (output h, t, d, LSE h, t) of every part, and of the result.

    The result may be one of the parts: a program reads all of its rows before it writes them.
    """
    rows, columns, head, inside, tile = _tile(num_tokens, HEAD_DIM, BLOCK_T, BLOCK_D)
    lse = _log_sum_exp(lses, strides, head, rows, inside, NUM_PARTS, BLOCK_T, WIDE)
    total = tl.zeros([BLOCK_T, BLOCK_D], WIDE)
    for i in tl.static_range(NUM_PARTS):
        part_lse = _load_lse(lses, strides, head, rows, inside, i, WIDE)
        part = _load_out(outs, strides, head, rows, columns, tile, i, WIDE)
        total += tl.where((part_lse == float("-inf"))[:, None], 0.0, tl.exp(part_lse - lse)[:, None] * part)
    offsets = head * merged_strides[0] + rows[:, None] * merged_strides[1] + columns[None, :] * merged_strides[2]
    tl.store(merged + offsets, total.to(merged.dtype.element_ty), mask=tile)
    tl.store(merged_lse + head * merged_strides[3] + rows * merged_strides[4], lse, mask=inside)


@jit("num_tokens")
def _merge_backward_kernel(
    gradient, lse_gradient, outs, lses, lse, out_gradients, lse_gradients, own_strides, strides, num_tokens,
    NUM_PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of one head. own_strides: (gradient h, t, d, LSE gradient h, t, LSE h, t)."""
    rows, columns, head, inside, tile = _tile(num_tokens, HEAD_DIM, BLOCK_T, BLOCK_D)
    offsets = head * own_strides[0] + rows[:, None] * own_strides[1] + columns[None, :] * own_strides[2]
    g = tl.load(gradient + offsets, mask=tile, other=0.0).to(WIDE)
    g_lse = tl.load(lse_gradient + head * own_strides[3] + rows * own_strides[4], mask=inside, other=0.0)
    merged_lse = tl.load(lse + head * own_strides[5] + rows * own_strides[6], mask=inside, other=0.0)
    # the merged output was rounded when it was stored, so g . O is summed over the parts again
    mean = tl.zeros([BLOCK_T], WIDE)
    for i in tl.static_range(NUM_PARTS):
        part_lse = _load_lse(lses, strides, head, rows, inside, i, WIDE)
        product = tl.sum(g * _load_out(outs, strides, head, rows, columns, tile, i, WIDE), 1)
        mean += tl.where(part_lse == float("-inf"), 0.0, tl.exp(part_lse - merged_lse) * product)
    first = head * num_tokens + rows
    for i in tl.static_range(NUM_PARTS):
        part_lse = _load_lse(lses, strides, head, rows, inside, i, WIDE)
        is_empty = part_lse == float("-inf")
        weight = tl.where(is_empty, 0.0, tl.exp(part_lse - merged_lse))
        product = tl.sum(g * _load_out(outs, strides, head, rows, columns, tile, i, WIDE), 1)
        to_out = (weight[:, None] * g).to(out_gradients[i].dtype.element_ty)
        tl.store(out_gradients[i] + first[:, None] * HEAD_DIM + columns[None, :], to_out, mask=tile)
        tl.store(lse_gradients[i] + first, tl.where(is_empty, 0.0, weight * (product - mean + g_lse)), mask=inside)


@jit()
def _tile(num_tokens, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """(tokens, places in the head, head, tokens that exist, values that exist) of this program."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_tokens
    return rows, columns, tl.program_id(1).to(tl.int64), inside, inside[:, None] & (columns < HEAD_DIM)[None, :]


@jit()
def _load_lse(lses, strides, head, rows, inside, PART: tl.constexpr, WIDE: tl.constexpr):
    place = lses[PART] + head * strides[5 * PART + 3] + rows * strides[5 * PART + 4]
    return tl.load(place, mask=inside, other=0.0).to(WIDE)


@jit()
def _load_out(outs, strides, head, rows, columns, tile, PART: tl.constexpr, WIDE: tl.constexpr):
    offsets = head * strides[5 * PART] + rows[:, None] * strides[5 * PART + 1] + columns[None, :] * strides[5 * PART + 2]
    return tl.load(outs[PART] + offsets, mask=tile, other=0.0).to(WIDE)


@jit()
def _log_sum_exp(lses, strides, head, rows, inside, NUM_PARTS: tl.constexpr, BLOCK_T: tl.constexpr, WIDE: tl.constexpr):
    """log sum exp of the parts' LSE, -inf where all are."""
    largest = tl.full([BLOCK_T], float("-inf"), WIDE)
    for i in tl.static_range(NUM_PARTS):
        largest = tl.maximum(largest, _load_lse(lses, strides, head, rows, inside, i, WIDE))
    # -inf - -inf is NaN, so rows without any key are shifted by 0
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([BLOCK_T], WIDE)
    for i in tl.static_range(NUM_PARTS):
        total += tl.exp(_load_lse(lses, strides, head, rows, inside, i, WIDE) - shift)
    return tl.where(total == 0.0, float("-inf"), shift + tl.log(tl.where(total == 0.0, 1.0, total)))


def _tiling(out_HTD: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """(grid, compile-time arguments) of a kernel with one program per head and block of tokens."""
    num_heads, num_tokens, head_dim = out_HTD.shape
    block_d = next_power_of_2(head_dim)
    block_t = max(1, _TILE_VALUES // block_d)
    grid = (-(-num_tokens // block_t), num_heads)
    return grid, {"HEAD_DIM": head_dim, "BLOCK_T": block_t, "BLOCK_D": block_d}


def _part_strides(outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(s for out, lse in zip(outputs_HTD, lses_HT, strict=True) for s in (*out.stride(), *lse.stride()))


def launch_merge(outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`reference.merge_attention` by the Triton kernel."""
    out = outputs_HTD[0]
    merged_HTD = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    merged_lse_HT = torch.empty(out.shape[:2], dtype=reference.wide_dtype(out.dtype), device=out.device)
    _launch_into(merged_HTD, merged_lse_HT, outputs_HTD, lses_HT)
    return merged_HTD, merged_lse_HT


def launch_accumulate(out_HTD: Tensor, lse_HT: Tensor, other_out_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """`reference.accumulate_attention_` by the Triton kernel."""
    _launch_into(out_HTD, lse_HT, [out_HTD, other_out_HTD], [lse_HT, other_lse_HT])


def _launch_into(out_HTD: Tensor, lse_HT: Tensor, outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor]) -> None:
    if out_HTD.numel() == 0:
        return
    grid, tiling = _tiling(out_HTD)
    with device_of(out_HTD):
        _merge_kernel[grid](
            tuple(outputs_HTD), tuple(lses_HT), out_HTD, lse_HT,
            _part_strides(outputs_HTD, lses_HT), _part_strides([out_HTD], [lse_HT]), out_HTD.shape[1],
            NUM_PARTS=len(outputs_HTD), WIDE=wide_type(out_HTD.dtype), **tiling,
        )  # fmt: skip


def launch_merge_backward(
    out_gradient_HTD: Tensor, lse_gradient_HT: Tensor, outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor], lse_HT: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """`reference.merge_attention_backward` by the Triton kernel."""
    out = outputs_HTD[0]
    out_gradients = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in outputs_HTD]
    lse_gradients = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in lses_HT]
    if out.numel():
        grid, tiling = _tiling(out)
        own_strides = (*out_gradient_HTD.stride(), *lse_gradient_HT.stride(), *lse_HT.stride())
        with device_of(out):
            _merge_backward_kernel[grid](
                out_gradient_HTD, lse_gradient_HT, tuple(outputs_HTD), tuple(lses_HT), lse_HT,
                tuple(out_gradients), tuple(lse_gradients), own_strides, _part_strides(outputs_HTD, lses_HT), out.shape[1],
                NUM_PARTS=len(outputs_HTD), WIDE=wide_type(out.dtype), **tiling,
            )  # fmt: skip
    return out_gradients, lse_gradients


@torch.library.custom_op("hf_longctx::merge_attention", mutates_args=(), device_types="cpu")
def _merge(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return reference.merge_attention(outputs, lses)


@torch.library.custom_op("hf_longctx::merge_attention_backward", mutates_args=(), device_types="cpu")
def _merge_backward(
    out_gradient: Tensor, lse_gradient: Tensor, outputs: list[Tensor], lses: list[Tensor], lse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    return reference.merge_attention_backward(out_gradient, lse_gradient, outputs, lses, lse)


@torch.library.custom_op("hf_longctx::accumulate_attention_", mutates_args=("out", "lse"), device_types="cpu")
def _accumulate(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    reference.accumulate_attention_(out, lse, other_out, other_lse)


_merge.register_kernel("cuda")(launch_merge)
_merge_backward.register_kernel("cuda")(launch_merge_backward)
_accumulate.register_kernel("cuda")(launch_accumulate)


@_merge.register_fake
def _(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out = outputs[0]
    return out.new_empty(out.shape), out.new_empty(out.shape[:2], dtype=reference.wide_dtype(out.dtype))


@_merge_backward.register_fake
def _(
    out_gradient: Tensor, lse_gradient: Tensor, outputs: list[Tensor], lses: list[Tensor], lse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    return [out.new_empty(out.shape) for out in outputs], [part.new_empty(part.shape) for part in lses]


@_accumulate.register_fake
def _(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    return None


def _save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: tuple[Tensor, Tensor]) -> None:
    outputs, lses = inputs
    ctx.num_parts = len(outputs)
    ctx.save_for_backward(*outputs, *lses, output[1])


def _differentiate(ctx: Any, out_gradient: Tensor, lse_gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    *parts, lse = ctx.saved_tensors
    return _merge_backward(out_gradient, lse_gradient, parts[: ctx.num_parts], parts[ctx.num_parts :], lse)


_merge.register_autograd(_differentiate, setup_context=_save)


def merge_attention(outputs_HTD: Sequence[Tensor], lses_HT: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(output [H, T, D], LSE [H, T]) of attention over all keys, from n parts that each saw some of them. Differentiable.

    The output has the dtype of the parts' outputs; every LSE is fp32, or fp64 when the outputs are. A LSE of -inf marks
    tokens for which a part saw no key. Raises ValueError for parts of different shape or dtype.
    """
    if not outputs_HTD or len(outputs_HTD) != len(lses_HT):
        raise ValueError(f"merge_attention got {len(outputs_HTD)} outputs and {len(lses_HT)} LSEs; it needs one LSE per output")
    first = outputs_HTD[0]
    wide = reference.wide_dtype(first.dtype)
    for out, lse in zip(outputs_HTD, lses_HT, strict=True):
        _check_part(out, lse, first.shape)
        if out.dtype != first.dtype or lse.dtype != wide:
            raise ValueError(
                f"a part has an output of {out.dtype} and a LSE of {lse.dtype}; all outputs must be {first.dtype} as the first "
                f"is, and LSEs {wide}"
            )
    return _merge(list(outputs_HTD), list(lses_HT))


def accumulate_attention_(out_HTD: Tensor, lse_HT: Tensor, other_out_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """Merges one more part into `out` [H, T, D] and `lse` [H, T] (fp32 or fp64), in place and without autograd.

    All four may be views, such as slices along T. `out` may be uninitialised where `lse` is -inf. The other part is of any
    float dtype. Raises ValueError for other shapes or an output in half precision, which would round after every part.
    """
    _check_part(out_HTD, lse_HT, out_HTD.shape)
    _check_part(other_out_HTD, other_lse_HT, out_HTD.shape)
    if out_HTD.dtype not in (torch.float32, torch.float64) or lse_HT.dtype != out_HTD.dtype:
        raise ValueError(f"the sum is of {out_HTD.dtype} with a LSE of {lse_HT.dtype}; both must be float32, or both float64")
    _accumulate(out_HTD, lse_HT, other_out_HTD, other_lse_HT)


def _check_part(out_HTD: Tensor, lse_HT: Tensor, shape: torch.Size) -> None:
    if out_HTD.dim() != 3 or out_HTD.shape != shape or lse_HT.shape != shape[:2]:
        raise ValueError(
            f"a part has an output {list(out_HTD.shape)} and a LSE {list(lse_HT.shape)}; this needs {list(shape)} [H, T, D] and "
            f"{list(shape[:2])} [H, T]"
        )

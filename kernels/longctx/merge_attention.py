"""Merges one more partial attention result into another, in place, by their log-sum-exp (LSE).

`runtime.attention.rows` calls `accumulate_attention_` for every tile after the first, in rings, slices and windows.

Partial result i saw some of the keys: O_i = softmax(scores_i) V_i and L_i = log sum exp(scores_i). Over all keys

    L = log sum_i exp(L_i),   O = sum_i p_i O_i,   p_i = exp(L_i - L)

Sums are computed in the dtype of the accumulated output, fp32 or fp64. An LSE of -inf means that a result saw no key: its output
is ignored and may be uninitialised. If neither saw a key, the output is 0 and the LSE -inf. An LSE of NaN or +inf gives NaN.

Shapes: H heads, T tokens, D head size. Any strides; all offsets are int64.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.kernels.jit import device_of, jit, launches_directly, next_power_of_2, tl

# output values per program
_TILE_VALUES = 2048


@jit("num_tokens")
def _accumulate_kernel(
    out, lse, other_out, other_lse, strides, other_strides, num_tokens,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges BLOCK_T tokens of one head in each program. Strides: (output h, t, d, LSE h, t)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_tokens
    tile = inside[:, None] & (columns < HEAD_DIM)[None, :]
    out += head * strides[0] + rows[:, None] * strides[1] + columns[None, :] * strides[2]
    lse += head * strides[3] + rows * strides[4]
    other_out += head * other_strides[0] + rows[:, None] * other_strides[1] + columns[None, :] * other_strides[2]
    other_lse += head * other_strides[3] + rows * other_strides[4]
    own_lse = tl.load(lse, mask=inside, other=0.0)
    new_lse = tl.load(other_lse, mask=inside, other=0.0).to(own_lse.dtype)
    largest = tl.maximum(own_lse, new_lse)
    # -inf - -inf is NaN, so rows without any key are shifted by 0
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.exp(own_lse - shift) + tl.exp(new_lse - shift)
    merged_lse = tl.where(total == 0.0, float("-inf"), shift + tl.log(tl.where(total == 0.0, 1.0, total)))
    own = tl.load(out, mask=tile, other=0.0)
    new = tl.load(other_out, mask=tile, other=0.0).to(own.dtype)
    merged = tl.where((own_lse == float("-inf"))[:, None], 0.0, tl.exp(own_lse - merged_lse)[:, None] * own)
    merged += tl.where((new_lse == float("-inf"))[:, None], 0.0, tl.exp(new_lse - merged_lse)[:, None] * new)
    tl.store(out, merged, mask=tile)
    tl.store(lse, merged_lse, mask=inside)


def launch_accumulate(out_HTD: Tensor, lse_HT: Tensor, other_out_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """Computes `reference.accumulate_attention_` with the Triton kernel."""
    if out_HTD.numel() == 0:
        return
    num_heads, num_tokens, head_dim = out_HTD.shape
    block_d = next_power_of_2(head_dim)
    block_t = max(1, _TILE_VALUES // block_d)
    with device_of(out_HTD):
        _accumulate_kernel[(-(-num_tokens // block_t), num_heads)](
            out_HTD, lse_HT, other_out_HTD, other_lse_HT,
            (*out_HTD.stride(), *lse_HT.stride()), (*other_out_HTD.stride(), *other_lse_HT.stride()), num_tokens,
            HEAD_DIM=head_dim, BLOCK_T=block_t, BLOCK_D=block_d,
        )  # fmt: skip


@torch.library.custom_op("hf_longctx::accumulate_attention_", mutates_args=("out", "lse"), device_types="cpu")
def _accumulate(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    reference.accumulate_attention_(out, lse, other_out, other_lse)


_accumulate.register_kernel("cuda")(launch_accumulate)


@_accumulate.register_fake
def _(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    return None


def accumulate_attention_(out_HTD: Tensor, lse_HT: Tensor, other_out_HTD: Tensor, other_lse_HT: Tensor) -> None:
    """Merges one more partial result into `out` [H, T, D] and `lse` [H, T] (fp32 or fp64), in place and without autograd.

    All four may be views, such as slices along T. `out` may be uninitialised where `lse` is -inf. The other result may have any
    float dtype. Raises ValueError for shapes that do not match, and for an `out` in half precision, which would be rounded after
    every merge.
    """
    _check_shapes(out_HTD, lse_HT, out_HTD.shape)
    _check_shapes(other_out_HTD, other_lse_HT, out_HTD.shape)
    if out_HTD.dtype not in (torch.float32, torch.float64) or lse_HT.dtype != out_HTD.dtype:
        raise ValueError(
            f"results are accumulated in an output of {out_HTD.dtype} with an LSE of {lse_HT.dtype}; make both float32, or both "
            f"float64"
        )
    if not launches_directly(out_HTD):
        return _accumulate(out_HTD, lse_HT, other_out_HTD, other_lse_HT)
    launch_accumulate(out_HTD, lse_HT, other_out_HTD, other_lse_HT)
    # autograd then refuses a backward that needs the old values, as after torch's own operators
    torch.autograd.graph.increment_version((out_HTD, lse_HT))


def _check_shapes(out_HTD: Tensor, lse_HT: Tensor, shape: torch.Size) -> None:
    if out_HTD.dim() != 3 or out_HTD.shape != shape or lse_HT.shape != shape[:2]:
        raise ValueError(
            f"a partial result has an output of shape {list(out_HTD.shape)} and an LSE of shape {list(lse_HT.shape)}; make them "
            f"{list(shape)} [H, T, D] and {list(shape[:2])} [H, T]"
        )

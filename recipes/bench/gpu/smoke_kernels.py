"""Rows of `smoke.py` about kernels: our own against their references, and those of packages against scans token by token.

Every check returns its error and a note. All of them also run on the CPU, by the references, in the tests.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.kernels.dropout_mask import keep_mask
from hf_longctx.kernels.fp8_rows import round_rows
from hf_longctx.kernels.merge_attention import accumulate_attention_
from hf_longctx.kernels.sequence_layout import join_heads, join_tokens, scatter_heads, scatter_tokens
from hf_longctx.kernels.weight_mask import dropped_weights
from hf_longctx.recipes.bench.gpu.smoke_memory import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Check
from hf_longctx.recipes.bench.one_document import largest_error
from hf_longctx.runtime.states.kernels import GATED_DELTA_RULE, KIMI_DELTA_ATTENTION, HeadSizes, ScanKernel, worst_error

# a key of 64 bits and a step, as training draws them
KEY, STEP = 0xFEDCBA9876543210, 123456


def kernel_checks(tokens: int, device: torch.device, tolerance: float) -> dict[str, Check]:
    """Rows about kernels: name -> (function that returns the error and a note, largest error allowed)."""
    return {
        "kernel accumulate_attention_": (partial(check_merge, tokens, device), tolerance),
        "kernel sequence_layout, there and back": (partial(check_layout, tokens, device), 0.0),
        "kernel dropout_mask": (partial(check_dropout_mask, tokens, device), 0.0),
        "kernel weight_mask": (partial(check_weight_mask, tokens // 4, device), 0.0),
        "kernel fp8_rows": (partial(check_fp8_rows, tokens, device), 0.0),
        **{
            f"scan {kernel.name}": (partial(check_scan, kernel, device), tolerance)
            for kernel in (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION)
        },
    }


def random_heads(tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random gradient and q [H, T, D], k and v [G, T, D], on the device, with values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(0)
    sizes = (NUM_HEADS, NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    gradient, q, k, v = (
        torch.randn(heads, tokens, HEAD_DIM, generator=generator).bfloat16().to(device, dtype) for heads in sizes
    )
    return gradient, q, k, v


def check_fp8_rows(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks rows rounded to fp8 against plain torch on the CPU, bit for bit: an input, and gradients of three outputs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0, "it needs compute capability 8.9"
    generator = torch.Generator().manual_seed(0)
    sizes = (4096, 1024, 1024)
    parts = [torch.randn(tokens, size, generator=generator).bfloat16() for size in sizes]
    factors = [torch.rand(size, 1, generator=generator) for size in sizes]
    error = 0.0
    for own, own_factors in ((parts[:1], []), (parts, factors)):
        found = round_rows([each.to(device) for each in own], [each.to(device) for each in own_factors])
        expected = round_rows(own, own_factors)
        pairs = ((a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))
        error += sum(float((a != b).sum()) for a, b in pairs)
    return error, "values that differ"


def check_merge(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks the merge of three partial results against the reference in fp32; one of them saw no key."""
    outputs = [random_heads(tokens, device)[1] * scale for scale in (1.0, 0.5, 2.0)]
    lses = [output.float().sum(-1) for output in outputs]
    lses[2] = torch.full_like(lses[2], float("-inf"))
    found = [outputs[0].float(), lses[0].clone()]
    expected = [x.clone().cpu() for x in found]
    for other, other_lse in zip(outputs[1:], lses[1:], strict=True):
        accumulate_attention_(*found, other, other_lse)
        reference.accumulate_attention_(*expected, other.cpu(), other_lse.cpu())
    return largest_error([x.cpu() for x in found], expected), ""


def check_layout(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks the four layout kernels against their references, bit for bit, for three ranks with uneven heads and tokens."""
    _, q, k, v = random_heads(tokens, device)
    q_bounds, kv_ranges = [0, 3, 6, 8], [0, 1, 0, 2, 1, 2]
    sizes = [tokens // 2, tokens // 3, tokens - tokens // 2 - tokens // 3]
    flat = scatter_heads(q, k, v, q_bounds, kv_ranges)
    expected = reference.scatter_heads(q.cpu(), k.cpu(), v.cpu(), q_bounds, kv_ranges)
    error = float((flat.cpu() != expected).sum())
    block = torch.cat([q[:3].reshape(3, -1), k[:1].reshape(1, -1), v[:1].reshape(1, -1)]).reshape(-1)
    joined = join_tokens(block, sizes, 3, 1, HEAD_DIM)
    on_host = join_tokens(block.cpu(), sizes, 3, 1, HEAD_DIM)
    error += sum(float((a.cpu() != b).sum()) for a, b in zip(joined, on_host, strict=True))
    out = q.transpose(0, 1).contiguous()
    error += float((scatter_tokens(out, sizes).cpu() != scatter_tokens(out.cpu(), sizes)).sum())
    error += float(
        (
            join_heads(out.reshape(-1), [3, 3, 2], tokens, HEAD_DIM).cpu()
            != join_heads(out.cpu().reshape(-1), [3, 3, 2], tokens, HEAD_DIM)
        ).sum()
    )
    return error, "values that differ"


def check_dropout_mask(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks masks of LoRA's dropout, bit for bit: those of a model's hidden states and of an odd number of channels."""
    positions, wrong = torch.arange(tokens), 0.0
    for num_channels in (512, 1030):
        found, expected = (keep_mask(x % 3, x, STEP, KEY, 0.05, num_channels).cpu() for x in (positions.to(device), positions))
        wrong += float((found != expected).sum())
    return wrong, "values that differ"


def check_weight_mask(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks masks of attention weights, bit for bit, for heads that begin within a group of four."""
    rows, keys = (torch.arange(start, start + tokens).unsqueeze(0) for start in (tokens, 0))
    found, expected = (
        dropped_weights(rows.to(at), keys.to(at), (3, 2), -1, STEP, KEY, 0.1).cpu() for at in (device, torch.device("cpu"))
    )
    return float((found != expected).sum()), "values that differ"


def check_scan(kernel: ScanKernel, device: torch.device) -> tuple[float, str]:
    """Checks a package's scan in bf16 as a training does before it uses it; without the package there is nothing to check."""
    if not kernel.is_installed:
        return 0.0, f"{kernel.package} is not installed"
    if device.type != kernel.device_type:
        return 0.0, f"it runs on {kernel.device_type}"
    # heads of Kimi delta attention have queries of their own
    sizes = HeadSizes(HEAD_DIM, HEAD_DIM, 1 if kernel is KIMI_DELTA_ATTENTION else NUM_HEADS // NUM_KV_HEADS)
    worst, error = worst_error(kernel, device, torch.bfloat16, sizes, (True,))
    return error, f"{kernel.label}: {worst}"

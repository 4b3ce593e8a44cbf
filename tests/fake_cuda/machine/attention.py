"""Attention operators that torch has on CUDA only, computed by plain matrices on the CPU.

cuDNN's are `CudnnPlans`, which reads outputs and gradients as they lay at the first call with inputs of one layout. Outputs lie
in memory as the real operators leave them: cuDNN's as the queries, the others' tokens first.

Shapes: [B, H, T, D], with H query heads, G KV heads, T query tokens and D the head size.
"""

from __future__ import annotations

from typing import Any

import torch
from helpers.measures.cudnn_plans import CudnnPlans
from helpers.measures.flash_packs import FlashPacks
from torch import Tensor

from hf_longctx.runtime.tiles.plain import Scores, TileInputs, plain_backward, plain_forward

_PREFIX, _PACKED = "aten::_scaled_dot_product_", "aten::_flash_attention_"
# arguments of the packed operators that have no name here: of dropout, of decoding and of debugging
_UNUSED = ("seqused_k", "alibi_slopes", "block_table", "num_splits")
_KEYWORDS = ("scale", "window_size_left", "window_size_right")


def is_attention(name: str) -> bool:
    """Whether the operator of this schema name is computed here."""
    return name.startswith((_PREFIX, _PACKED)) and not name.endswith(("_for_cpu", "_for_cpu_backward", "_math"))


def attend(plans: CudnnPlans, name: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Results of an attention operator, given its arguments by name, with tensors on the CPU."""
    if name.startswith(_PACKED):
        return _packed(arguments, name.endswith("_backward"))
    kind, is_backward = name.removeprefix(_PREFIX).split("_attention")[0], name.endswith("_backward")
    assert arguments.get("attn_bias") is None and not arguments.get("dropout_p"), f"{name}: only what plans and self-tests call"
    scale = arguments.get("scale")
    scale = arguments["query"].shape[-1] ** -0.5 if scale is None else scale
    if kind == "cudnn":
        return _cudnn(plans, arguments, scale, is_backward)
    return (_backward if is_backward else _forward)(kind, arguments, Scores(scale))


def _cudnn(plans: CudnnPlans, arguments: dict[str, Any], scale: float, is_backward: bool) -> tuple[Any, ...]:
    q, k, v, is_causal = (arguments[name] for name in ("query", "key", "value", "is_causal"))
    assert q.shape[0] == 1, "plans have one row"
    if not is_backward:
        return plans.forward(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return plans.backward(arguments["grad_out"], q, k, v, arguments["out"], arguments["logsumexp"], is_causal, scale=scale)


def _packed(arguments: dict[str, Any], is_backward: bool) -> tuple[Any, ...]:
    assert not any(arguments.pop(name, None) for name in _UNUSED)
    positional = [value for name, value in arguments.items() if name not in _KEYWORDS]
    keywords = {name: arguments[name] for name in _KEYWORDS if arguments[name] is not None}
    packs = FlashPacks()
    return (packs.backward if is_backward else packs.forward)(*positional, **keywords)


def _forward(kind: str, arguments: dict[str, Any], scores: Scores) -> tuple[Any, ...]:
    q, k = arguments["query"], arguments["key"]
    rows = [plain_forward(tile) for tile in _tiles(arguments, scores)]
    out = torch.stack([out.transpose(0, 1) for out, _ in rows]).transpose(1, 2)
    lse_BHT = torch.stack([lse.float() for _, lse in rows])
    seed, offset = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    if kind == "efficient":
        return out, lse_BHT, seed, offset
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse_BHT, None, None, q.shape[2], k.shape[2], state, offset, None


def _backward(kind: str, arguments: dict[str, Any], scores: Scores) -> tuple[Any, ...]:
    gradients = arguments["grad_out_" if kind == "efficient" else "grad_out"]
    rows = [
        plain_backward(gradient, tile, out, lse[:, : tile.q.shape[1]])
        for gradient, tile, out, lse in zip(
            gradients, _tiles(arguments, scores), arguments["out"], arguments["logsumexp"], strict=True
        )
    ]
    found = tuple(torch.stack(each).to(gradients.dtype) for each in zip(*rows, strict=True))
    return (*found, None) if kind == "efficient" else found


def _tiles(arguments: dict[str, Any], scores: Scores) -> list[TileInputs]:
    tensors: tuple[Tensor, ...] = tuple(arguments[name] for name in ("query", "key", "value"))
    return [TileInputs(*row, scores, arguments["is_causal"]) for row in zip(*tensors, strict=True)]

"""Runs a projection with a low-rank adapter of PEFT in as few passes over memory as there must be, with PEFT's result.

Under autocast PEFT casts hidden states to the adapter's fp32, and autocast casts them back to bf16, bit for bit what they were,
for each projection, forward and backward. Here the adapter reads them as they are, so that queries, keys and values share one
saved input. Its output is added by one matrix product, which rounds once where PEFT rounds three times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_longctx.hf.models.adapters import plain_adapter
from hf_longctx.hf.models.fused.find import is_hooked, runs_as_written
from hf_longctx.runtime.core.binding import global_hooks
from hf_longctx.runtime.core.kernels import add_low_rank


def adapted(layer: Any, own: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Result of `own`, the forward of PEFT's `layer`; calls it where dtypes, hooks or adapters are not the usual ones."""
    if len(args) != 1 or keywords or (adapter := plain_adapter(layer)) is None:
        return own(*args, **keywords)
    x: Tensor = args[0]
    base, first, second = layer.base_layer, adapter.first, adapter.second
    device = x.device.type
    is_autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_autocast else first.weight.dtype
    # without autocast the output has the dtype of the frozen weight
    is_one_dtype = x.dtype == dtype and (is_autocast or base.weight.dtype == dtype)
    if not is_one_dtype or isinstance(second.weight, DTensor) or x.dim() < 2 or not x.numel() or global_hooks():
        return own(x)
    y: Tensor = base(x)
    low = first(adapter.dropout(x))
    if y.dtype != low.dtype:
        return (y + second(low) * adapter.scaling).to(y.dtype)
    # a hook may have kept y, and so may another forward of the module below
    is_new = type(base) is nn.Linear and runs_as_written(base) and not is_hooked(base)
    # with a bias, torch returns a view, whose gradient would be copied
    in_place = is_new and y.is_contiguous() and not y._is_view()
    return add_low_rank(y, low, second.weight.to(low.dtype), adapter.scaling, in_place)

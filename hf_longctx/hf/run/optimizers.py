"""Makes an optimizer fit the weights of a run: whole weights where it needs them, and fp32 copies of half-precision ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_longctx.hf.run.run import Run
from hf_longctx.runtime.parameters.master_weights import has_half_weights, keep_master_weights, why_no_master_weights
from hf_longctx.runtime.parameters.sharded import layer_shards
from hf_longctx.runtime.parameters.whole_weights import needs_whole_weights, step_on_whole_weights


def fit_optimizer(run: Run, model: nn.Module, optimizer: Any) -> None:
    """Makes a plain optimizer of placed weights right for them. Raises ValueError for one that cannot be.

    One that may be wrong on shards updates whole weights. Half-precision weights are updated in fp32 copies, which lie on the
    host if the run keeps its optimizer states there.
    """
    on_host = run.setup.costs.model.updates_on_host
    _step_on_whole_weights(run, optimizer, on_host)
    if not on_host and not (run.config.fp32_master_weights and has_half_weights(optimizer)):
        return
    if reason := why_no_master_weights(optimizer):
        instead = (
            f"leave optimizer_states={run.config.optimizer_states!r} out"
            if on_host
            else "load the model in fp32, or set fp32_master_weights=False, which rounds every update to bf16"
        )
        raise ValueError(
            f"no fp32 copies of weights can be kept: {reason}; use another optimizer such as adamw_torch, or {instead}"
        )
    shards = layer_shards(model)
    keep_master_weights(optimizer, on_host, home_of=None if shards is None else shards.home_of)


def _step_on_whole_weights(run: Run, optimizer: torch.optim.Optimizer, on_host: bool) -> None:
    """Makes an optimizer that may be wrong on shards update whole weights; raises ValueError if it cannot."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    if not any(isinstance(weight, DTensor) for weight in weights) or not needs_whole_weights(optimizer):
        return
    if on_host or run.placement.num_stages > 1:
        setting = f"optimizer_states={run.config.optimizer_states!r}" if on_host else "pipeline stages"
        raise ValueError(
            f"{type(optimizer).__name__} needs whole weights, which sharded parameters with {setting} do not give it; leave one "
            f"of them out, or use optim='adamw_torch'"
        )
    step_on_whole_weights(optimizer)

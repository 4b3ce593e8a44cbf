"""The activation engine of a run: bound to the model when the first plan needs it, taken away when the run ends."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hf_longctx.hf.layers import head_problem, layer_modules, output_head
from hf_longctx.plan.types import RankPlan
from hf_longctx.runtime.checkpointing import ActivationEngine
from hf_longctx.runtime.offload import HostTier
from hf_longctx.runtime.output_head import OutputHead

logger = logging.getLogger(__name__)


class ActivationRuntime:
    """Executes activation policies on the layers and the output head of one model at a time.

    host_bytes: what saved tensors may take of the host, in one slab that is allocated (and pinned on CUDA) for the first plan
    that offloads. A model whose plans keep everything is never touched.
    """

    def __init__(self, device: torch.device, host_bytes: int) -> None:
        self.device, self.host_bytes = device, host_bytes
        self._engine: ActivationEngine | None = None
        self._model: nn.Module | None = None

    def engine(self, model: nn.Module, plan: RankPlan) -> ActivationEngine | None:
        """The engine for `plan` on `model`; None while no plan has needed one."""
        shares = [
            share for _, stage in plan.rounds for policy in stage.activations for layer in policy.layers for share in layer.shares
        ]
        is_needed = any(policy.layers or policy.tile_tokens for _, stage in plan.rounds for policy in stage.activations)
        if is_needed and self._model is not model:
            self.close()
            self._engine, self._model = ActivationEngine(layer_modules(model), head=OutputHead(output_head(model))), model
        if self._engine is not None and self._engine.tier is None and any(share.host for share in shares):
            self._engine.tier = HostTier.on(self.device, self.host_bytes)
        return self._engine

    @property
    def tier(self) -> HostTier | None:
        """The host memory in use, if a plan has needed any."""
        return None if self._engine is None else self._engine.tier

    def close(self) -> None:
        """Gives the model its own layers back. Idempotent."""
        if self._engine is not None:
            self._engine.unbind()
        self._engine = self._model = None


def activation_problem(model: nn.Module) -> str:
    """Why this model cannot run activation policies; empty if it can."""
    try:
        layer_modules(model)
    except ValueError as error:
        return str(error)
    return head_problem(model)

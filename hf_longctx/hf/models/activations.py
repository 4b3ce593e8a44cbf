"""Creates a run's activation engine when the first plan needs it, and unbinds the engine when the run ends.

The trainer, the callback and the self-test ask `ActivationRuntime` for the engine of every plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_longctx.hf.models.cutting import StageLayers
from hf_longctx.hf.models.layers import final_norm, layer_modules, output_head
from hf_longctx.hf.models.logits import head_problem, logit_change
from hf_longctx.hf.models.towers import num_text_layers
from hf_longctx.plan.core.types import LayerRange, RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.experts import spread_group

# room in a slab for gaps between blocks, as a share of the bytes that a plan stores
_GAPS_SHARE = 1 / 8
# most bytes copied each way to measure how fast a slab is
_PROBE_BYTES = 2**26


class ActivationRuntime:
    """Executes activation policies on the layers and the output head of one model at a time.

    A model whose plans keep everything is never changed. host_bytes: most host memory for saved tensors; `reserve` makes a slab
    as large as plans need, pinned on CUDA. on_pageable: called with the measured bytes per second if the system refuses to pin
    the slab, so that later plans expect slower copies. has_head: false for a pipeline stage before the last. layers: the layers
    of this rank's own stage, for a model that has the layers of all stages; None: all layers. replays_experts: whether ranks may
    share experts while plans of any rank may have policies.
    """

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        on_pageable: Callable[[float], None],
        has_head: bool = True,
        layers: LayerRange | None = None,
        replays_experts: bool = True,
    ) -> None:
        self.device, self.host_bytes, self._on_pageable, self._has_head = device, host_bytes, on_pageable, has_head
        self._replays_experts = replays_experts
        self._own = slice(None) if layers is None else slice(layers.first_layer, layers.first_layer + layers.num_layers)
        self._engine: ActivationEngine | None = None
        self._model: nn.Module | None = None
        self._tier: HostTier | None = None
        # most bytes of a plan so far
        self._needed_bytes = 0
        # bytes of pieces beside the slab, as all ranks last agreed
        self._agreed_bytes = 0

    @property
    def beside_bytes(self) -> int:
        """Bytes of the pieces that this rank's slab got when it was full; they differ between ranks."""
        return 0 if self._tier is None else self._tier.slab.beside_bytes

    def agree(self, beside_bytes: int) -> None:
        """Sets the bytes of pieces beside a slab, equal on all ranks, for which the next `reserve` makes room.

        Otherwise a rank that alone got pieces would replace its slab while the others wait for it in their next collective.
        """
        self._agreed_bytes = beside_bytes

    def reserve(self, needed_bytes: int) -> str:
        """Makes the slab large enough for plans that store `needed_bytes` on a rank's host; returns a line if it took time.

        Call it between steps, on all ranks with the same number: pinning takes some tenths of a second per GiB, and within a step
        other ranks would wait for it. A slab is replaced by one of at least twice its size, so that few are made.
        """
        held_bytes, beside_bytes = 0 if self._tier is None else self._tier.slab.capacity_bytes, self._agreed_bytes
        # blocks of a plan that is larger than those before it leave gaps
        if int(needed_bytes * (1 + _GAPS_SHARE)) <= held_bytes and not beside_bytes:
            return ""
        # a second training needs as many bytes as the first one did
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        wanted = max(int(self._needed_bytes * (1 + _GAPS_SHARE)), 2 * held_bytes, held_bytes + beside_bytes)
        if (num_bytes := min(wanted, self.host_bytes)) <= held_bytes:
            return ""
        # the old one is unpinned first
        self._tier, self._agreed_bytes = None, 0
        if self._engine is not None:
            self._engine.tier = None
        start_s = time.perf_counter()
        self._tier = HostTier.on(self.device, num_bytes, self.host_bytes)
        seconds = time.perf_counter() - start_s
        if self.device.type != "cuda":
            return ""
        if not self._tier.slab.is_pinned:
            self._on_pageable(slab_rate(self._tier, self.device))
        kind = "pinned" if self._tier.slab.is_pinned else "allocated"
        return f"{num_bytes / 2**30:.2f} GiB of host memory {kind} in {seconds:.1f} s, for plans that offload activations"

    def engine(self, model: nn.Module, plan: RankPlan) -> ActivationEngine | None:
        """The engine for `plan` on `model`; None as long as no plan has needed an engine."""
        shares = [
            share for _, stage in plan.rounds for policy in stage.activations for layer in policy.layers for share in layer.shares
        ]
        # ranks that keep everything take part in the replays of ranks that share experts with them
        partners = spread_group(model) if self._replays_experts else None
        is_needed = partners is not None or any(
            policy.layers or policy.tile_tokens for _, stage in plan.rounds for policy in stage.activations
        )
        # heads of chunks of other stages run in tiles
        is_needed |= any(action.kind == "H" for _, stage in plan.rounds for action in stage.actions)
        if is_needed and self._model is not model:
            self._unbind()
            head = OutputHead(output_head(model), final_norm(model), logit_change(model)) if self._has_head else None
            layers = layer_modules(model)[self._own]
            self._engine, self._model = ActivationEngine(layers, head=head, partners=partners), model
        if self._engine is not None and self._engine.tier is None and any(share.host for share in shares):
            if self._tier is None:
                # `reserve` was not called for this plan
                self.reserve(self.host_bytes)
            self._engine.tier = self._tier
        return self._engine

    @property
    def tier(self) -> HostTier | None:
        """The host tier in use; None as long as no plan has offloaded."""
        return None if self._engine is None else self._engine.tier

    def close(self) -> None:
        """Restores the model's own layers and frees the slab. Idempotent."""
        self._unbind()
        self._tier, self._agreed_bytes = None, 0

    def _unbind(self) -> None:
        if self._engine is not None:
            self._engine.unbind()
        self._engine = self._model = None


def slab_rate(tier: HostTier, device: torch.device) -> float:
    """Measured bytes per second between the tier's slab and the device, in the slower direction."""
    home = tier.slab.memory[:_PROBE_BYTES]
    away = torch.zeros(home.numel(), dtype=torch.uint8, device=device)
    slowest_s = 1e-9
    for target, source in ((home, away), (away, home)):
        start_s = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
    return home.numel() / slowest_s


def activation_problem(model: PreTrainedModel) -> str:
    """Returns why this model cannot run activation policies; empty if it can."""
    try:
        layers = layer_modules(model)
    except ValueError as error:
        return str(error)
    is_cut = any(isinstance(module, StageLayers) for module in model.modules())
    if len(layers) != (num_layers := num_text_layers(model)) and not is_cut:
        return f"{type(model).__name__} has {len(layers)} layers, but calls attention {num_layers} times"
    return head_problem(model)

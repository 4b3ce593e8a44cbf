"""One rank's tiny model under an activation engine, step by step, with counts of the work that is really done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy
from hf_longctx.runtime.activations.engine import ActivationEngine, ChunkActivations
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.attention import rows
from hf_longctx.runtime.core import products
from hf_longctx.runtime.execution.executor import no_mask
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.plain import TileInputs

CPU = torch.device("cpu")


@dataclass
class Work:
    """Work done: squared rows of attention tiles, tokens that projections multiplied under the engine, tokens in MLPs."""

    pairs: int = 0
    projected: int = 0
    mlp_tokens: int = 0


@contextmanager
def counted(model: Any) -> Iterator[Work]:
    """Counts the work of everything that runs inside."""
    work = Work()
    tile_forward, multiply = rows.tile_forward, products._multiply

    def counted_tile(tile: TileInputs) -> Any:
        # counted once for all heads
        work.pairs += tile.q.shape[1] ** 2
        return tile_forward(tile)

    def counted_product(x: Tensor, *rest: Any) -> Tensor:
        work.projected += x.shape[0]
        return multiply(x, *rest)

    def count_mlp(module: Any, inputs: Any, output: Tensor) -> None:
        work.mlp_tokens += output.shape[1]

    gates = [module for name, module in model.named_modules() if name.endswith("gate_proj")]
    handles = [gate.register_forward_hook(count_mlp) for gate in gates]
    with patch.object(products, "_multiply", counted_product), patch.object(rows, "tile_forward", counted_tile):
        yield work
    for handle in handles:
        handle.remove()


class EngineStep:
    """One rank's model under an engine with a host tier, compared with plain HF; `build` makes equal models at every call.

    fused: adapters run as in trainings, not by PEFT's own code.
    """

    def __init__(self, tier: HostTier | None, lengths: list[int], build: Any = None, fused: bool = False) -> None:
        build = build or (lambda: build_model(ModelCase(promoted=True)))
        self.rows = random_rows(lengths)
        self.expected_loss, self.expected = reference_step(build(), self.rows)
        self.model = build()
        patch_model(self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model)
        if fused:
            FusedLayers("").bind(self.model)
        self.engine = ActivationEngine(layer_modules(self.model), tier)
        layers = num_attention_layers(self.model)
        self.pool, self.whole = GroupPool((1,), timeout_s=1.0), whole_model(self.model, layers)
        self.plan = plan_of([[(1, tuple(range(len(lengths))))]], lengths, 1)
        self.num_labels = sum(label != -100 for row in self.rows for label in row["labels"][1:])
        self.documents = [span.num_tokens for span in self.plan.micro_batches[0].groups[0].chunks[0].spans]

    def forward(
        self, layers: tuple[LayerPolicy, ...], tile_tokens: int = 8, leaving_layers: int = 1
    ) -> tuple[Tensor, ChunkActivations]:
        """A loss whose backward gives the gradients of the step, and the activations that wait for this backward."""
        (chunk,) = rank_inputs(self.plan, self.rows, 0)["chunks"][0]
        (group,) = self.plan.micro_batches[0].groups
        activations = self.engine.begin(ActivationPolicy(0, 0, layers, tile_tokens, leaving_layers))
        context = replace(self.pool.context(group, group.chunks[0]), activations=activations)
        with activations.running():
            logits = self.whole.forward(0, chunk, None, no_mask(CPU), context)
        loss = torch.nn.functional.cross_entropy(logits[0], chunk.shift_labels[0], ignore_index=-100, reduction="sum")
        return loss / self.num_labels, activations

    def error(self, num_backwards: int = 1) -> float:
        """The worst relative error of all gradients after some backwards; the gradients are cleared."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        assert found.keys() == self.expected.keys()
        errors = [relative_error(gradient / num_backwards, self.expected[name]) for name, gradient in found.items()]
        self.model.zero_grad()
        return float("nan") if any(error != error for error in errors) else max(errors)

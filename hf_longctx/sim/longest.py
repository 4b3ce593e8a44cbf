"""The longest sequence that one group of ranks can train, switch by switch of the activation engine, and seconds of its step.

Lengths come from the moments of `plan/layer_memory.py`, seconds from the cost model, with what the choice of shares adds: what
runs again, and copies that computation does not hide. Other than for planned steps, workspace is counted and not guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.activation import MemoryLimits, outcome_of
from hf_longctx.plan.activation_memory import layer_slots
from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.layer_memory import Load
from hf_longctx.plan.memory import chunk_bytes, lean_policy
from hf_longctx.plan.types import ActivationPolicy, Chunk, GroupShape, LayerPolicy, Span

# of the device, beside workspace: for fragmentation, buffers of communication and the process itself
ENGINE_SHARE = 0.9
TILE_TOKENS = 2048
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class LongestRow:
    """What fits with these switches, and the predicted seconds of a step with one such sequence alone; 0 tokens: nothing."""

    switches: str
    tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """One group of `degree` ranks: bytes that states leave of a device, bytes of the host for each rank (0: none is counted).

    trains_weights: false for LoRA, whose frozen weights have no gradients.
    """

    degree: int
    device_bytes: int
    host_bytes: int
    trains_weights: bool = True


@dataclass(frozen=True, slots=True)
class _Switches:
    """tile, loss_tile: tokens of a tile of MLP and norms and of the loss, 0 for none. host_bytes, keeps_attention: of policies.

    keeps_everything: as Hugging Face without checkpointing.
    """

    name: str
    tile: int = 0
    loss_tile: int = 0
    host_bytes: int = 0
    keeps_attention: bool = False
    keeps_everything: bool = False

    def policy(self, costs: CostModel, num_tokens: int) -> ActivationPolicy:
        if self.keeps_everything:
            return ActivationPolicy(0)
        return lean_policy(costs.model, num_tokens, self.host_bytes, self.tile, keeps_attention=self.keeps_attention)


def longest_rows(costs: CostModel, budget: Budget) -> tuple[LongestRow, ...]:
    """A row for every switch, each with those before it but for whether attention is kept."""
    tile, host = TILE_TOKENS, budget.host_bytes
    rows = [
        _Switches("everything kept, as Hugging Face does", keeps_everything=True),
        _Switches(f"+ loss in tiles of {tile:,} tokens", loss_tile=tile, keeps_everything=True),
        _Switches("+ layer inputs kept, the rest recomputed", loss_tile=tile),
        _Switches("+ MLP and norms in tiles", tile, tile),
        _Switches("  the same, attention kept", tile, tile, keeps_attention=True),
    ]
    if host:
        rows += [
            _Switches(f"+ {host / _GIB:.0f} GiB of host memory a rank", tile, tile, host),
            _Switches("  the same, attention kept", tile, tile, host, keeps_attention=True),
        ]
    return tuple(_row(costs, budget, switches) for switches in rows)


def _row(costs: CostModel, budget: Budget, switches: _Switches) -> LongestRow:
    num_layers, degree = costs.model.num_layers, budget.degree

    def fits(num_tokens: int) -> bool:
        load = replace(Load.document(num_tokens, num_layers, budget.trains_weights), is_shared=degree > 1)
        found = chunk_bytes(costs.model, load, switches.policy(costs, num_tokens), switches.loss_tile)
        return found.device + found.workspace <= budget.device_bytes and found.host <= budget.host_bytes

    tokens = _most(fits)
    if not tokens:
        return LongestRow(switches.name, 0, 0.0)
    return LongestRow(switches.name, tokens * degree, _step_s(costs, budget, switches.policy(costs, tokens), tokens * degree))


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, by doubling and bisection; fitting must not come back once it is gone."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _step_s(costs: CostModel, budget: Budget, policy: ActivationPolicy, num_tokens: int) -> float:
    """Seconds of a step with one sequence: both passes, what runs again, exposed copies, and what a step adds once."""
    if not budget.trains_weights:
        # the half of a matrix's backward that makes the gradient of its weights
        backward = replace(costs.coefficients.backward, token_s=costs.coefficients.backward.token_s / 2)
        costs = replace(costs, coefficients=replace(costs.coefficients, backward=backward))
    shape = costs.best_shape(budget.degree, num_tokens)
    chunk, num_layers = Chunk(0, (Span(0, 0, num_tokens),)), costs.model.num_layers
    seconds = costs.forward_s(chunk, shape, num_layers) + costs.backward_s(chunk, shape, num_layers)
    return seconds + _again_s(costs, budget, policy, chunk, shape) + costs.coefficients.step_s


def _again_s(costs: CostModel, budget: Budget, policy: ActivationPolicy, chunk: Chunk, shape: GroupShape) -> float:
    slots = layer_slots(costs, chunk, shape)
    layers = [*policy.layers, *[LayerPolicy()] * (len(slots) - len(policy.layers))]
    chosen = [layer.share(item.tensor_class) for layer, slot in zip(layers, slots, strict=True) for item in slot.saved]
    shares = np.array([(share.recompute, share.host) for share in chosen])
    limits = MemoryLimits(budget.device_bytes, budget.host_bytes, costs.cluster.hardware.copy_bytes_per_s)
    return outcome_of(slots, shares, limits).cost_s

"""Finds the longest sequence of one group of ranks with each switch of the activation engine, and its step time.

Lengths come from the byte counts of `plan/memory/layer.py`, seconds from the cost model plus the time that policies add. The
device has the usable bytes of planned steps, and loads are counted as for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_longctx.plan.core.types import (
    LEAST_TILE_TOKENS,
    Action,
    ActivationPolicy,
    Chunk,
    GroupShape,
    LayerRange,
    SequenceGroup,
    Span,
    StagePlan,
)
from hf_longctx.plan.cost.catalog import has_kernels
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import in_pieces, least_memory_policy
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.predict.pipeline_run import run_alone

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class LongestRow:
    """Most tokens that fit with these switches (0: none), and predicted seconds of a step with one such sequence."""

    switches: str
    tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one group of `degree` ranks: device bytes besides states, host bytes of each rank (0: not counted).

    reruns: layers may run once more to make the next layer's input, see `may_rerun`. block_ranks: ranks that split heads, in
    blocks that form a ring (0: all ranks).
    """

    degree: int
    device_bytes: int
    host_bytes: int
    reruns: bool = False
    block_ranks: int = 0

    @property
    def shape(self) -> GroupShape:
        return GroupShape(self.degree, self.block_ranks or self.degree)


@dataclass(frozen=True, slots=True)
class _Switches:
    """Switches of the activation engine for one row."""

    name: str
    # tokens per tile of MLP and norms
    tile: int = 0
    # tokens per tile of the loss (0: no tiles)
    loss_tile: int = 0
    # see `least_memory_policy`
    host_bytes: int = 0
    keeps_attention: bool = False
    reruns: bool = False
    # nothing is recomputed, like Hugging Face without checkpointing
    keeps_everything: bool = False
    # see `LayerPolicy`
    head_pieces: int = 1

    def policy(self, costs: CostModel, num_tokens: int) -> ActivationPolicy:
        if self.keeps_everything:
            return ActivationPolicy(0)
        ways: dict[str, Any] = {"keeps_attention": self.keeps_attention, "reruns": self.reruns}
        return in_pieces(least_memory_policy(costs.model, num_tokens, self.host_bytes, self.tile, **ways), self.head_pieces)


def longest_rows(costs: CostModel, budget: Budget) -> tuple[LongestRow, ...]:
    """Makes a row for every switch, each in addition to earlier switches, except for keeping attention.

    A switch that would hold fewer tokens stays off, so no row has fewer tokens than the row before it.
    """
    tile, host, how = LEAST_TILE_TOKENS, budget.host_bytes, "with kernels" if has_kernels(costs.model) else "as Hugging Face does"
    rows = [
        _Switches(f"everything kept, {how}", keeps_everything=True),
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
    pieces = costs.model.head_pieces(budget.shape.ulysses)
    if pieces > 1:
        rows.append(_Switches(f"+ attention in {pieces} pieces of its heads", tile, tile, host, head_pieces=pieces))
    if budget.reruns:
        rows.append(_Switches("+ inputs of every second layer alone", tile, tile, host, reruns=True, head_pieces=pieces))
    found: list[LongestRow] = []
    best = LongestRow("", 0, 0.0)
    for row in (_row(costs, budget, switches) for switches in rows):
        is_beside = row.switches.startswith(" ")
        if not is_beside:
            best = max(replace(best, switches=row.switches), row, key=lambda one: one.tokens)
        found.append(row if is_beside else best)
    return tuple(found)


def _row(costs: CostModel, budget: Budget, switches: _Switches) -> LongestRow:
    degree, load = budget.degree, Load.document(1, costs.model.num_layers)
    load = replace(load, is_shared=degree > 1, num_blocks=budget.shape.num_blocks, block_ranks=budget.shape.ulysses)
    tokens = ByteModel(costs.model).longest(
        budget.device_bytes, budget.host_bytes, lambda count: (switches.policy(costs, count),), load, switches.loss_tile
    )
    if not tokens:
        return LongestRow(switches.name, 0, 0.0)
    return LongestRow(switches.name, tokens * degree, _step_s(costs, budget, switches.policy(costs, tokens), tokens * degree))


def _step_s(costs: CostModel, budget: Budget, policy: ActivationPolicy, num_tokens: int) -> float:
    """Predicts seconds of a step with one sequence: forward, backward, recomputation, exposed copies, and fixed time."""
    shape = costs.best_shape(budget.degree, num_tokens)
    stage = StagePlan(0, (LayerRange(0, costs.model.num_layers),), (Action("F", 0, 0), Action("B", 0, 0)), (policy,))
    chunk = Chunk(0, (Span(0, 0, num_tokens),))
    group = SequenceGroup.of(shape, range(budget.degree), (chunk,), (stage,))
    return run_alone(group, costs).times[-1][1] + costs.coefficients.step_s

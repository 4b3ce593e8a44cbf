"""Simulates the gain of lending idle stages to a sequence's first and last slices (SPPO's multiplexed partitioning).

    python recipes/bench/papers/lending.py [--model gpt-7b] [--tokens 131072 524288] [--slices 8 32] [--stages 4]
        [--ranks-per-stage 8] [--bytes-per-s 2.5e10] [--json FILE]

The workload is one sequence in slices of equal forward time, first all forwards, then all backwards. Times are operation counts
at the rates of a generic GPU. The ranks of all stages that take part in a slice share its work equally. Messages between
stages take no time, except those that lending adds. Columns are the time saved, as shares of the plain pipeline's time:

    free     lending costs nothing
    kv       every lent slice sends its hidden states to the lent ranks and back, and the keys and values that these ranks lack
             (in backward their gradients too); for the last slices, these are once the keys and values of the whole sequence
    weights  like kv; besides, the stage's weights are copied to every lent rank, once before its first and once before its last
             slices in each pass, and in backward their gradients are sent back
    idle     an upper bound on any gain

No copy overlaps with computation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from hf_longctx.plan.chunks import slice_bounds
from hf_longctx.plan.core.lending import lent_order, running_stages
from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup, Span
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict.lending import lent_group, run_lent
from hf_longctx.recipes.bench.papers.command_line import print_gains

Seconds = Callable[[Action, int], float]


def lent_makespan(order: Sequence[Sequence[Action]], seconds: Seconds) -> float:
    """Seconds until all stages have finished. `seconds` takes an action and the number of stages that run it."""
    times = run_lent(order, lambda action: seconds(action, len(running_stages(action))), lambda action: 0.0)
    return max(stop_s for row in times for _, stop_s in row)


@dataclass(frozen=True, slots=True)
class Lending:
    """Seconds of a group's actions, including the transfers that lending needs."""

    costs: CostModel
    group: SequenceGroup
    bytes_per_s: float
    moves_kv: bool = False
    moves_weights: bool = False

    def seconds(self, action: Action, num_running: int) -> float:
        """Seconds of an action that `num_running` stages run."""
        chunk, num_layers = self.group.chunks[action.chunk], self.group.stages[action.stage].num_layers
        alone_s = self.costs.part_s(chunk, self.group.shape, action.kind == "B", num_layers, has_head=False)
        return alone_s / num_running + (self.moved_bytes(action, num_running) / self.bytes_per_s if action.lenders else 0.0)

    def moved_bytes(self, action: Action, num_running: int) -> float:
        """Bytes that a rank of the stage exchanges with lent ranks for one action."""
        model, chunk = self.costs.model, self.group.chunks[action.chunk]
        num_layers = self.group.stages[action.stage].num_layers
        is_last = action.lenders[0][0] < action.stage
        # first action of its phase (first or last slices) in this pass: the phase's lowest slice in forward, highest in backward
        edge = len(self.group.chunks) - action.stage if is_last else 0
        other_edge = len(self.group.chunks) - 1 if is_last else len(self.group.stages) - 2 - action.stage
        is_first_of_phase = action.chunk == (edge if action.kind == "F" else other_edge)
        passes = 1 if action.kind == "F" else 2
        moved = 0.0
        if self.moves_kv:
            lent_share = (num_running - 1) / num_running
            prefix = chunk.prefix_tokens if is_last and is_first_of_phase else 0
            kv_values = 2 * model.num_kv_heads * model.head_dim * num_layers * passes * (chunk.num_tokens + prefix)
            moved += lent_share * (kv_values + 2 * model.hidden_size * chunk.num_tokens) / self.group.degree
        if self.moves_weights and is_first_of_phase:
            moved += passes * model.layer_parameters * num_layers
        return moved * model.bytes_per_element


def gains(
    model: ModelSpec, num_tokens: int, num_slices: int, num_stages: int, ranks_per_stage: int, bytes_per_s: float
) -> dict[str, float]:
    """Time that lending saves, as shares of the plain pipeline's time; negative where it costs more than it saves."""
    cluster = ClusterSpec(num_stages * ranks_per_stage, ranks_per_stage, GENERIC_GPU)
    costs = CostModel(replace(model, exchange_parts=1), cluster, default_coefficients(model, cluster))
    forward = costs.coefficients.forward
    bounds = slice_bounds(num_tokens, num_slices, SpanRates(forward.pair_s, forward.token_s))
    chunks = tuple(Chunk(index, (Span(0, a, b),)) for index, (a, b) in enumerate(pairwise(bounds)))
    method = "ulysses" if ranks_per_stage > 1 else "local"
    group = SequenceGroup(tuple(range(ranks_per_stage)), method, chunks, ())
    group = pipelined(group, layer_ranges(model.num_layers, num_stages))
    plain_s = lent_makespan(lent_order(group), Lending(costs, group, bytes_per_s).seconds)
    lent = lent_group(group)
    order = lent_order(lent)
    free, kv, weights = (Lending(costs, lent, bytes_per_s, *moves) for moves in ((False, False), (True, False), (True, True)))
    busy_s = sum(free.seconds(action, len(order)) for stage in group.stages for action in stage.actions if action.kind in "FB")
    return {
        "free": 1 - lent_makespan(order, free.seconds) / plain_s,
        "kv": 1 - lent_makespan(order, kv.seconds) / plain_s,
        "weights": 1 - lent_makespan(order, weights.seconds) / plain_s,
        "idle": 1 - busy_s / plain_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-7b", help="a model of the catalogue (default: gpt-7b)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 524288], help="lengths of the sequence")
    parser.add_argument("--slices", type=int, nargs="+", default=[8, 32], help="numbers of slices")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (default: 4)")
    parser.add_argument("--ranks-per-stage", type=int, default=8, help="default: 8")
    parser.add_argument("--bytes-per-s", type=float, default=GENERIC_GPU.network_bytes_per_s,
                        help="bandwidth of a rank to another stage")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    settings = parser.parse_args(arguments)
    model = named_model(settings.model)
    others = (settings.stages, settings.ranks_per_stage, settings.bytes_per_s)
    columns = ("free", "kv", "weights", "idle")
    return print_gains(settings, columns, lambda tokens, slices: gains(model, tokens, slices, *others))


if __name__ == "__main__":
    sys.exit(main())

"""InfiniPipe's experiment (arXiv 2509.21275): a 13B model on 8 x 4 GPUs, skewed lengths, less and less memory, all predicted.

    python recipes/bench/papers/infinipipe.py [--cases 96K/50 96K/35 192K/50] [--seeds 6] [--batch 0]
        [--slices 8 12 ...] [--json [FILE]]

The model runs on four pipeline stages of eight GPUs each, which share sequences by heads (Ulysses) and parameters by ZeRO-3. A
case is the length of the longest sequence and the usable memory of a GPU in GB, including weights and optimizer states. A
batch has 256 sequences for 96K and 128 above: one has the longest length, the others are log-normal with mean 3800 and sigma
1.6, as in the CommonCrawl fit of `flexsp.py`. Every method uses the number of slices of the longest sequence that is best for
it and this batch.

Rows. no limit: chunks of about equal time, the faster of both schedules, unlimited memory; other rows are relative to it.
paper: the paper's plan, as far as the paper tells it: chunks of about equal time; sequences grouped by their number of chunks
into consecutive pipelines, by dynamic programming; 1F1B with a window for the longest family of a pipeline; whole layers
recomputed, equally many along each anti-diagonal. Where the paper estimates a pipeline's seconds, our prediction is used.
elastic + recompute: the same chunks and recomputation in a single pipeline with the elastic window. elastic + joint: layers keep
the attention output, and tensors go to the host as long as the copies are hidden. fixed chunks: chunks of equal tokens under
Seq1F1B; every chunk recomputes the fewest layers with which everything fits. All seconds include the gathers that plans count.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from hf_longctx.plan.chunks import elastic_chunks, fixed_chunks, slice_bounds
from hf_longctx.plan.core.orders import Schedule, families, pipelined
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import Chunk, MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.policies.fit import with_layers
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.room.cells import recomputed_layer
from hf_longctx.plan.room.room import PipelineRoom
from hf_longctx.recipes.bench.papers.command_line import run_reproduction
from hf_longctx.recipes.bench.papers.our_plans import counted_s

NUM_STAGES, RANKS_PER_STAGE = 4, 8
SLICES = (8, 12, 16, 20, 24, 32, 48)
SIGMA, MEAN_TOKENS, LEAST_TOKENS = 1.6, 3800.0, 32
CASES = ("96K/50", "96K/35", "192K/50")
METHODS = ("paper", "elastic + recompute", "elastic + joint", "fixed chunks")

MODEL = ModelSpec(40, 5120, 20480, 40, 40, 128, 50304, 1 << 18, bytes_per_element=2, gated_mlp=False, exchange_parts=1)
# an A800 that reaches 0.5 of its peak in matrix products and 0.6 in attention; copies over PCIe are as fast as while all GPUs of
# a node copy, and half of a node's 2 TB of memory may hold activations
HARDWARE = HardwareSpec(
    "a800",
    0.5 * 312e12,
    0.6 * 312e12,
    device_bytes=80 * 10**9,
    link_bytes_per_s=2e11,
    network_bytes_per_s=2.5e10,
    message_s=3e-5,
    kernel_s=2e-5,
    copy_bytes_per_s=1.3e10,
    host_bytes=128 * 10**9,
)


@dataclass(slots=True)
class Setting:
    """One batch under one memory limit. planning_s: seconds that planning took, per method, one for each number of slices."""

    lengths: tuple[int, ...]
    usable_bytes: float
    costs: CostModel
    num_stages: int = NUM_STAGES
    planning_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ranks_per_stage(self) -> int:
        return self.costs.cluster.num_ranks // self.num_stages

    @property
    def sequences(self) -> dict[int, int]:
        return dict(enumerate(self.lengths))

    def budget(self, host_bytes: int = 0) -> ActivationBudget:
        """Memory that is left for activations on the stage with the most parameter states."""
        plan = self.plan([self.group((Chunk(0),), "elastic")])
        states = [ByteModel(self.costs.model).stage_states(stage, plan) for stage in plan.micro_batches[0].groups[0].stages]
        return ActivationBudget(0, int(self.usable_bytes) - max(states), host_bytes)

    def group(self, chunks: Sequence[Chunk], schedule: Schedule) -> SequenceGroup:
        """The chunks as one pipeline over all GPUs."""
        num_layers, share = self.costs.model.num_layers, self.costs.model.head_share
        group = SequenceGroup(tuple(range(self.ranks_per_stage)), "ulysses", tuple(chunks), ())
        return pipelined(group, layer_ranges(num_layers, self.num_stages, 1, share / (1 - share) * num_layers), schedule)

    def plan(self, groups: Sequence[SequenceGroup]) -> StepPlan:
        """Plans these groups as consecutive pipelines."""
        rounds = tuple(MicroBatch((group,)) for group in groups)
        ranks = self.ranks_per_stage
        return StepPlan(0, self.lengths, self.num_stages, ranks, "sharded", rounds, shard_ranks=ranks)

    def step_s(self, groups: Sequence[SequenceGroup]) -> float:
        """Seconds of consecutive pipelines with the gathers that count; infinite if they do not fit into a GPU."""
        plan = self.plan(groups)
        run = evaluate_plan(plan, self.costs, with_events=False)
        return counted_s(plan, self.costs) if max(run.peak_bytes) <= self.usable_bytes else math.inf

    def chunks(self, num_slices: int) -> tuple[Chunk, ...]:
        """Makes chunks of about equal time; none has more tokens than the first slice of the longest sequence."""
        forward, backward = self.costs.coefficients.forward, self.costs.coefficients.backward
        rates = SpanRates(forward.pair_s + backward.pair_s, forward.token_s + backward.token_s)
        first = slice_bounds(max(self.lengths), num_slices, rates)[1]
        return elastic_chunks(self.sequences, num_slices, rates, first + 1)

    def least_s(self, chunks: Sequence[Chunk]) -> float:
        """Lower bound on the seconds of any pipeline of these chunks.

        It is the work of the last stage, plus the time in which the first chunk reaches that stage and the last one returns.
        """
        group = self.group(chunks[:1], "elastic")
        stages = [(stage.num_layers, stage.stage == self.num_stages - 1) for stage in group.stages]
        part_s = self.costs.part_s
        return sum(
            sum(part_s(chunk, group.shape, is_backward, *stages[-1]) for chunk in chunks)
            + sum(min(part_s(chunk, group.shape, is_backward, *stage) for chunk in chunks) for stage in stages[:-1])
            for is_backward in (False, True)
        )


def draw_lengths(longest: int, count: int, seed: int) -> tuple[int, ...]:
    """Draws `count` lengths: first `longest`, then log-normal ones that are not above it."""
    draw = random.Random(seed)
    lengths = [longest]
    while len(lengths) < count:
        tokens = int(draw.lognormvariate(math.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA))
        if LEAST_TOKENS <= tokens <= longest:
            lengths.append(tokens)
    return tuple(lengths)


def unlimited_s(setting: Setting, num_slices: int) -> float:
    """Seconds with unlimited memory, under the faster schedule."""
    chunks = setting.chunks(num_slices)
    free = replace(setting, usable_bytes=math.inf)
    return min(free.step_s([free.group(chunks, schedule)]) for schedule in ("elastic", "1f1b"))


def joint_groups(setting: Setting, num_slices: int, limit_s: float) -> list[SequenceGroup]:
    return _with_room(setting, num_slices, setting.costs.cluster.hardware.host_bytes, keeps_attention=True)


def recomputing_groups(setting: Setting, num_slices: int, limit_s: float) -> list[SequenceGroup]:
    return _with_room(setting, num_slices, 0, keeps_attention=False)


def _with_room(setting: Setting, num_slices: int, host_bytes: int, keeps_attention: bool) -> list[SequenceGroup]:
    group = setting.group(setting.chunks(num_slices), "elastic")
    room = PipelineRoom(setting.plan([group]), setting.costs, setting.budget(host_bytes), keeps_attention)
    try:
        return [room.for_group(group)]
    except ValueError:
        return []


def paper_groups(setting: Setting, num_slices: int, limit_s: float) -> list[SequenceGroup]:
    """The best consecutive pipelines, by dynamic programming over families sorted by their number of chunks.

    A pipeline's seconds are only a lower bound until a best solution uses that pipeline. Empty if nothing is below `limit_s`.
    """
    chunks = setting.chunks(num_slices)
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for family in families(chunks):
        by_size.setdefault(len(family), []).append(family)
    sizes = sorted(by_size, reverse=True)
    room = PipelineRoom(setting.plan([setting.group(chunks, "1f1b")]), setting.costs, setting.budget(), keeps_attention=False)
    members = {
        (start, stop): [chunks[place] for size in sizes[start:stop] for family in by_size[size] for place in family]
        for start in range(len(sizes))
        for stop in range(start + 1, len(sizes) + 1)
    }
    seconds = {key: setting.least_s(inside) for key, inside in members.items()}
    exact: dict[tuple[int, int], SequenceGroup | None] = {}
    while True:
        best_s, row = _shortest(seconds, len(sizes))
        if not best_s < limit_s:
            return []
        unknown = [key for key in row if key not in exact]
        if not unknown:
            return [group for key in row if (group := exact[key]) is not None]
        for key in unknown:
            exact[key], seconds[key] = _fitted(setting, room, members[key])


def _fitted(setting: Setting, room: PipelineRoom, chunks: Sequence[Chunk]) -> tuple[SequenceGroup | None, float]:
    numbered = [Chunk(index, chunk.spans) for index, chunk in enumerate(chunks)]
    try:
        group = room.for_group(setting.group(numbered, "1f1b"))
    except ValueError:
        return None, math.inf
    return group, setting.step_s([group])


def _shortest(seconds: Mapping[tuple[int, int], float], count: int) -> tuple[float, list[tuple[int, int]]]:
    """Divides 0 to `count` into consecutive ranges with the fewest seconds in total; returns these seconds and the ranges."""
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for stop in range(1, count + 1):
        rows = ((best[start][0] + seconds[start, stop], [*best[start][1], (start, stop)]) for start in range(stop))
        best.append(min(rows))
    return best[count]


def fixed_groups(setting: Setting, num_slices: int, limit_s: float) -> list[SequenceGroup]:
    """Chunks of equal tokens that all recompute the same number of layers, the fewest with which they fit."""
    chunks = fixed_chunks(setting.sequences, -(-max(setting.lengths) // num_slices))
    group = setting.group(chunks, "1f1b")

    def recomputing(num_layers: int) -> SequenceGroup:
        layers = {
            (stage.stage, chunk.index, 0): (recomputed_layer(False),) * min(num_layers, stage.num_layers)
            for stage in group.stages
            for chunk in chunks
        }
        return with_layers(group, layers, setting.budget().tile_tokens)

    def fits(num_layers: int) -> bool:
        return math.isfinite(setting.step_s([recomputing(num_layers)]))

    low, high = 0, max(stage.num_layers for stage in group.stages)
    if replace(setting, usable_bytes=math.inf).step_s([group]) >= limit_s or not fits(high):
        return []
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return [recomputing(low)]


# (setting, slices of the longest sequence, seconds) -> consecutive pipelines; empty if none fits or is faster than that
Maker = Callable[[Setting, int, float], list[SequenceGroup]]
MAKERS: dict[str, Maker] = {
    "paper": paper_groups,
    "elastic + recompute": recomputing_groups,
    "elastic + joint": joint_groups,
    "fixed chunks": fixed_groups,
}


def fastest(setting: Setting, name: str, free_s: Mapping[int, float]) -> tuple[float, list[SequenceGroup]]:
    """Seconds and pipelines of a method with its best number of slices; infinite if nothing fits.

    free_s: seconds of elastic chunks with unlimited memory, for every number of slices.
    """
    best: tuple[float, list[SequenceGroup]] = (math.inf, [])
    # unlimited memory is a lower bound for all methods with the same chunks
    for num_slices in sorted(free_s, key=free_s.__getitem__):
        if name != "fixed chunks" and free_s[num_slices] > best[0]:
            break
        started_s = time.perf_counter()
        groups = MAKERS[name](setting, num_slices, best[0])
        setting.planning_s.setdefault(name, []).append(time.perf_counter() - started_s)
        if groups and (step_s := setting.step_s(groups)) < best[0]:
            best = step_s, groups
    return best


def compare(setting: Setting, slices: Sequence[int]) -> dict[str, float]:
    """Seconds of every method with its best number of slices, and seconds without a memory limit."""
    free_s = {num_slices: unlimited_s(setting, num_slices) for num_slices in slices}
    return {"no limit": min(free_s.values())} | {name: fastest(setting, name, free_s)[0] for name in MAKERS}


def read_case(text: str) -> tuple[int, float]:
    """Parses a case such as "96K/35" into tokens of the longest sequence and bytes of a GPU."""
    longest, _, gigabytes = text.partition("K/")
    if not (longest.isdecimal() and gigabytes.isdecimal() and int(longest) and int(gigabytes)):
        raise ValueError(f"--cases: {text!r} is not a case; give thousands of tokens and GB of a GPU, for example 96K/35")
    return int(longest) * 1024, int(gigabytes) * 1e9


def settings_of(case: str, seeds: Sequence[int], batch: int) -> Iterator[Setting]:
    longest, usable_bytes = read_case(case)
    cluster = ClusterSpec(NUM_STAGES * RANKS_PER_STAGE, RANKS_PER_STAGE, HARDWARE)
    coefficients = default_coefficients(MODEL, cluster)
    costs = CostModel(MODEL, cluster, coefficients, "ulysses", parameters="sharded", shard_ranks=RANKS_PER_STAGE)
    count = batch or (256 if longest <= 96 * 1024 else 128)
    for seed in seeds:
        yield Setting(draw_lengths(longest, count, seed), usable_bytes, costs)


def rows_of(case: str, seeds: Sequence[int], batch: int, slices: Sequence[int]) -> list[dict[str, Any]]:
    """One row per method: mean seconds over batches, and the mean ratios to "no limit" and to the joint plan."""
    settings = list(settings_of(case, seeds, batch))
    found = [compare(setting, slices) for setting in settings]
    rows = []
    for method in ("no limit", *METHODS):
        planning = [seconds for setting in settings for seconds in setting.planning_s.get(method, [])]
        rows.append(
            {
                "case": case,
                "method": method,
                "step_s": mean(of_seed[method] for of_seed in found),
                "to_no_limit": mean(of_seed[method] / of_seed["no limit"] for of_seed in found),
                "to_joint": mean(of_seed[method] / of_seed["elastic + joint"] for of_seed in found),
                "planning_s": mean(planning) if planning else 0.0,
            }
        )
    return rows


def reproduce(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the rows of all cases; raises ValueError for options that do not allow a comparison."""
    if options.seeds < 1:
        raise ValueError(f"--seeds is {options.seeds}; give at least 1")
    if min(options.slices) < 1:
        raise ValueError(f"--slices has {min(options.slices)}; give numbers of 1 or more")
    rows = [row for case in options.cases for row in rows_of(case, range(options.seeds), options.batch, options.slices)]
    return {"seeds": options.seeds, "rows": rows}


def report(_: argparse.Namespace, result: Mapping[str, Any]) -> str:
    lines = [f"{'case':9s} {'method':22s} {'step s':>8s} {'to no limit':>12s} {'to joint':>9s} {'planning s':>11s}"]
    lines += [
        f"{row['case']:9s} {row['method']:22s} {row['step_s']:8.2f} {row['to_no_limit']:12.3f} {row['to_joint']:9.3f} "
        f"{row['planning_s']:11.2f}"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table or JSON; returns 2 if the options do not allow a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES, help=f"thousands of tokens and GB (default: {' '.join(CASES)})")
    parser.add_argument("--seeds", type=int, default=6, help="batches of each case (default: 6)")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a batch (default: 256 up to 96K, else 128)")
    parser.add_argument("--slices", nargs="+", type=int, default=SLICES, help="numbers of slices of the longest sequence to try")
    return run_reproduction(parser, reproduce, report, arguments)


if __name__ == "__main__":
    sys.exit(main())

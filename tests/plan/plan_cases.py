"""Cases shared by the tests of `plan`: the hand-written plans, four cost models, and an independent brute force."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hf_longctx.plan.cost import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.grouping import Layout
from hf_longctx.plan.serialize import plan_from_json
from hf_longctx.plan.specs import ClusterSpec, HardwareSpec, ModelSpec
from hf_longctx.plan.types import GroupShape, StepPlan

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = tuple(sorted(path.stem for path in FIXTURES.glob("*.json")))

MODEL = ModelSpec(
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    max_positions=1 << 20,
)
HARDWARE = HardwareSpec("test", 1e12, 5e11, 1 << 30, 1e9, 2.5e8, 1e-4)

# what dominates a step of sequences of some hundred tokens on a few ranks
_FORWARD = {
    "attention": PassCoefficients(1e-6, 1e-5, 1e-3, 1e-4, 1e-10, 1e-10),
    "exchange": PassCoefficients(1e-9, 1e-5, 1e-3, 6e-4, 8e-9, 2.5e-8),
    "fixed": PassCoefficients(1e-8, 1e-5, 1e-1, 6e-3, 1e-10, 1e-10),
    "linear": PassCoefficients(0.0, 1e-5, 0.0),
}
COST_KINDS = tuple(_FORWARD)


def fixture_text(name: str) -> str:
    return (FIXTURES / f"{name}.json").read_text()


def fixture(name: str) -> StepPlan:
    return plan_from_json(fixture_text(name))


def edited(name: str, **changes: Any) -> StepPlan:
    """A hand-written plan with JSON values replaced; `micro_batches__0__groups` is the path micro_batches[0].groups."""
    data = json.loads(fixture_text(name))
    for path, value in changes.items():
        *parents, last = [int(word) if word.isdigit() else word for word in path.split("__")]
        node = data
        for word in parents:
            node = node[word]
        node[last] = value
    return plan_from_json(json.dumps(data))


def cost_model(kind: str, num_ranks: int) -> CostModel:
    """A cost model in which `kind` dominates; backward is not just a multiple of forward."""
    forward = _FORWARD[kind]
    backward = replace(forward, pair_s=2.5 * forward.pair_s, token_s=2 * forward.token_s, chunk_s=1.5 * forward.chunk_s)
    coefficients = CostCoefficients(forward, backward, step_s=0.25, source="test")
    # nodes of two ranks where exchanges count, so that larger groups have dearer ones
    cluster = ClusterSpec(num_ranks, 2 if kind == "exchange" else num_ranks, HARDWARE)
    return CostModel(MODEL, cluster, coefficients, method="ulysses")


def lognormal_lengths(seed: int, count: int, longest: int, median: float = 300.0, sigma: float = 1.2) -> tuple[int, ...]:
    """Skewed lengths between 8 and `longest` tokens."""
    draw = random.Random(seed)
    return tuple(min(longest, max(8, round(draw.lognormvariate(math.log(median), sigma)))) for _ in range(count))


def set_partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every partition of `items` into non-empty parts."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(item for item in rest if item not in others)
            for parts in set_partitions(left):
                yield [(first, *others), *parts]


def least_seconds(lengths: Sequence[int], costs: CostModel, degrees: Sequence[int], num_ranks: int, capacity: int) -> float:
    """Least seconds of a step by plain enumeration, straight from the definition and sharing no code with the planner.

    All partitions into micro-batches, in each all partitions into groups, for each all degrees that fit the ranks.
    """
    added_s = {degree: costs.sequences_s(list(lengths), GroupShape(degree, degree)) for degree in degrees}
    # degrees that fit the ranks, for every number of groups
    fitting = [
        [chosen for chosen in itertools.product(degrees, repeat=count) if sum(chosen) <= num_ranks]
        for count in range(min(num_ranks, len(lengths)) + 1)
    ]

    @cache
    def group_seconds(part: tuple[int, ...], degree: int) -> float:
        if sum(lengths[i] for i in part) > degree * capacity:
            return math.inf
        return costs.group_s(GroupShape(degree, degree)) + sum(float(added_s[degree][i]) for i in part)

    @cache
    def micro_batch_seconds(members: tuple[int, ...]) -> float:
        return min(
            max(group_seconds(part, degree) for part, degree in zip(parts, chosen, strict=True))
            for parts in set_partitions(members)
            if len(parts) < len(fitting)
            for chosen in fitting[len(parts)]
        )

    everything = tuple(range(len(lengths)))
    return min(sum(micro_batch_seconds(part) for part in parts) for parts in set_partitions(everything))


def layout_seconds(layout: Layout, lengths: Sequence[int], costs: CostModel) -> float:
    """Seconds of a layout from the definition: its slowest group per micro-batch, groups without sequences left out."""
    return sum(
        max(
            costs.group_s(GroupShape(degree, degree))
            + sum(float(costs.sequences_s([lengths[i]], GroupShape(degree, degree))[0]) for i in members)
            for degree, members in groups
            if members
        )
        for groups in layout
    )


def plan_layout(plan: StepPlan) -> Layout:
    """The layout of a plan of one stage, groups on the dummy chunk left out."""
    return [
        [
            (group.degree, tuple(span.sequence for chunk in group.chunks for span in chunk.spans))
            for group in micro_batch.groups
            if group.num_tokens
        ]
        for micro_batch in plan.micro_batches
    ]


def check_layout(layout: Layout, lengths: Sequence[int], degrees: Sequence[int], num_ranks: int, capacity: int) -> None:
    """Asserts that a layout holds every sequence once, in groups that fit the ranks and their memory."""
    placed = sorted(i for groups in layout for _, members in groups for i in members)
    assert placed == list(range(len(lengths)))
    for groups in layout:
        assert sum(degree for degree, _ in groups) <= num_ranks
        assert any(members for _, members in groups)
        for degree, members in groups:
            assert degree in degrees
            assert sum(lengths[i] for i in members) <= degree * capacity

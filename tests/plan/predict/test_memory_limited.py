"""The bound that counts memory is above no plan, gathers included, and above the bound that does not count it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.plans.cost_models import HARDWARE, MODEL
from helpers.plans.grouping_problems import set_partitions
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.predict.bounds import MemoryLimitedStep
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import make_room


def costs_of(num_ranks: int, parameters: Parameters, copy_bytes_per_s: float = 1e9) -> CostModel:
    hardware = replace(HARDWARE, kernel_s=1e-7, message_s=1e-6, copy_bytes_per_s=copy_bytes_per_s)
    cluster = ClusterSpec(num_ranks, num_ranks, hardware)
    return CostModel(
        MODEL, cluster, default_coefficients(MODEL, cluster), "ulysses", parameters=parameters, shard_ranks=num_ranks
    )


def config_of(num_ranks: int, kept: int, host_bytes: int, capacity: int = 4000) -> PlannerConfig:
    """Room for what `kept` tokens of one document need with everything kept."""
    budget = ByteModel(MODEL).budget(ByteModel(MODEL).kept_bytes(kept), host_bytes, 64)
    return PlannerConfig(capacity, tuple(d for d in (1, 2, 4) if d <= num_ranks), activations=budget)


def all_layouts(problem: GroupingProblem) -> Iterator[Layout]:
    """Every layout of the problem's sequences."""

    def micro_batches(members: tuple[int, ...]) -> list[list[tuple[int, tuple[int, ...]]]]:
        return [
            list(zip(degrees, parts, strict=True))
            for parts in set_partitions(members)
            for degrees in itertools.product(problem.degrees, repeat=len(parts))
            if sum(degrees) <= problem.num_ranks
        ]

    for parts in set_partitions(tuple(range(len(problem.lengths)))):
        yield from map(list, itertools.product(*(micro_batches(part) for part in parts)))


def least_counted_s(lengths: tuple[int, ...], costs: CostModel, config: PlannerConfig) -> float:
    """Fewest counted seconds of any layout under the policies, and slices, that make room for it; infinite if none fits."""
    problem, planning = GroupingProblem.build(lengths, costs, config), Planning(costs, config)
    best_s = math.inf
    for layout in all_layouts(problem):
        placed = place_layout(layout, problem.num_ranks, problem.num_ranks, node_aligned=True)
        plan = build_plan(0, lengths, placed, problem.shapes, costs, problem.block_ranks)
        try:
            best_s = min(best_s, planning.counted_s(make_room(plan, planning)))
        except ValueError:
            continue
    return best_s


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.lists(st.integers(30, 1500), min_size=1, max_size=3).map(tuple),
    st.sampled_from([1, 2]),
    st.sampled_from(["sharded", "gathered_per_round", "replicated"]),
    st.integers(300, 1200),
    st.sampled_from([0, 100_000, 10_000_000]),
    st.sampled_from([1e8, 1e9, 1e10]),
)
def test_no_plan_of_a_small_step_is_faster_than_the_bound(
    lengths: tuple[int, ...], num_ranks: int, parameters: Parameters, kept: int, host_bytes: int, copy_bytes_per_s: float
) -> None:
    costs, config = costs_of(num_ranks, parameters, copy_bytes_per_s), config_of(num_ranks, kept, host_bytes)
    best_s = least_counted_s(lengths, costs, config)
    if best_s < math.inf:
        assert config.activations is not None
        memory = MemoryLimitedStep(GroupingProblem.build(lengths, costs, config), costs, config.activations)
        assert memory.lower_bound_s() <= best_s * (1 + 1e-9)
        assert memory.lower_bound_s(best_s) <= best_s
        # a plan that is known only makes the bound tighter
        assert memory.lower_bound_s() <= memory.lower_bound_s(best_s) * (1 + 1e-9)
        found = plan_step(0, lengths, costs, config).estimate
        assert found.lower_bound_s <= min(best_s, found.counted_s) * (1 + 1e-9)


def test_the_bound_counts_what_memory_costs() -> None:
    """With a third of the room, no host and free gathers, nearly all MLPs are recomputed, and the bound knows it."""
    costs, lengths = costs_of(1, "replicated"), (2000,)
    config = config_of(1, 700, 0)
    assert config.activations is not None
    problem = GroupingProblem.build(lengths, costs, config)
    memory = MemoryLimitedStep(problem, costs, config.activations)
    found = plan_step(0, lengths, costs, config).estimate
    added_s = found.step_s - problem.lower_bound_s()
    assert added_s > 0.02 * problem.lower_bound_s()
    assert memory.lower_bound_s() - problem.lower_bound_s() > 0.6 * added_s


def test_copies_that_hide_make_memory_free() -> None:
    costs, lengths, config = costs_of(1, "replicated", 1e10), (2000, 900), config_of(1, 700, 1 << 30)
    assert config.activations is not None
    memory = MemoryLimitedStep(GroupingProblem.build(lengths, costs, config), costs, config.activations)
    assert memory.lower_bound_s() <= least_counted_s(lengths, costs, config)
    slow = costs_of(1, "replicated", 1e8)
    assert memory.lower_bound_s() < MemoryLimitedStep(memory.problem, slow, config.activations).lower_bound_s()


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_dearer_gathers_make_fewer_and_fuller_micro_batches(parameters: Parameters) -> None:
    lengths = tuple(range(300, 700, 12))
    numbers, seconds = [], []
    for link in (1e12, 1e7):
        costs = costs_of(2, parameters)
        hardware = replace(costs.cluster.hardware, link_bytes_per_s=link, kernel_s=1e-8)
        cluster = replace(costs.cluster, hardware=hardware)
        costs = replace(costs, cluster=cluster, coefficients=default_coefficients(MODEL, cluster))
        # groups of one rank exchange nothing, so that the link's speed matters to gathers alone
        config = replace(config_of(2, 800, 0), degrees=(1,))
        found = plan_step(0, lengths, costs, config)
        numbers.append(len(found.micro_batches))
        seconds.append(found.estimate.gathers_s / found.estimate.step_s)
    assert numbers[1] < 0.7 * numbers[0]
    assert seconds[0] < 0.1 * seconds[1]


def test_fewer_micro_batches_follow_from_more_host_memory() -> None:
    costs, lengths = costs_of(2, "sharded", 1e12), (600,) * 40
    numbers = []
    for host_bytes in (0, 1 << 40):
        config = config_of(2, 800, host_bytes)
        assert config.activations is not None
        memory = MemoryLimitedStep(GroupingProblem.build(lengths, costs, config), costs, config.activations)
        numbers.append(memory.fullness())
    assert numbers[1] <= numbers[0]
    assert min(numbers) >= 1


def test_replicated_weights_add_no_seconds_to_a_micro_batch() -> None:
    costs = costs_of(2, "replicated")
    config = PlannerConfig(1000, (1, 2), activations=ActivationBudget(100, 1 << 20))
    assert GroupingProblem.build((100, 200), costs, config).micro_batch_s == 0
    assert GroupingProblem.build((100, 200), costs_of(2, "sharded"), config).micro_batch_s > 0
    # measured coefficients contain what their measurement had
    measured = replace(costs_of(2, "sharded"), coefficients=replace(costs.coefficients, step_s=0.5, source="measured"))
    assert GroupingProblem.build((100, 200), measured, config).micro_batch_s == 0


def test_micro_batches_are_no_fuller_than_what_needs_no_replay() -> None:
    model = replace(named_model("llama-3.1-8b", 2), num_layers=8)
    hardware, lengths, byte_model = read_profile("h200").spec, (2000,) * 16, ByteModel(model)
    # the host has room for everything, and copies would hide
    config = PlannerConfig(32000, (1,), activations=byte_model.budget(byte_model.kept_bytes(8200), 2**40))
    numbers = []
    for rate in (hardware.elementwise_bytes_per_s, 0.0):
        cluster = ClusterSpec(1, 1, replace(hardware, elementwise_bytes_per_s=rate))
        costs = CostModel(model, cluster, default_coefficients(model, cluster))
        assert config.activations is not None
        step = MemoryLimitedStep(GroupingProblem.build(lengths, costs, config), costs, config.activations)
        numbers.append(step.fullness())
    assert numbers == [4, 2]

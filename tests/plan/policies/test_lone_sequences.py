"""Every sequence up to the length that is found is planned, whatever is beside it and whatever is measured later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import GroupShape, Parameters, StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.cost.traffic import plainest_shape
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import may_rerun, most_tokens
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.policies.fit import WAYS, _LoneSequences, longest_alone
from hf_longctx.plan.setup import lora_adapters

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model with LoRA on some ranks, and the memory beside it."""

    model: str
    device_gib: float
    host_gib: float
    num_ranks: int = 1
    parameters: Parameters = "replicated"
    degrees: tuple[int, ...] = (1,)
    shard_ranks: int = 1


CASES = {
    "one rank, with the host": Case("gemma-4-26b-a4b", 20, 64),
    "one rank, without it": Case("gemma-4-26b-a4b", 20, 0),
    "shards": Case("gpt-oss-20b", 8, 64, 4, "sharded", (1, 2, 4), 4),
    "shards of two blocks": Case("gpt-oss-20b", 8, 64, 4, "sharded", (1, 2), 2),
    "groups smaller than their block": Case("gpt-oss-20b", 8, 64, 4, "sharded", (1, 2), 4),
    "replicated, side by side": Case("gpt-oss-20b", 8, 64, 4, "replicated", (1, 2)),
    "gathered per round": Case("gemma-4-26b-a4b", 14, 4, 4, "gathered_per_round", (1, 2, 4), 4),
}


@cache
def setup(case: Case) -> tuple[CostModel, PlannerConfig]:
    """Costs and limits as in a run that sets none."""
    model = named_model(case.model)
    model = replace(model, adapters=lora_adapters(model, 16))
    cluster = ClusterSpec(case.num_ranks, case.num_ranks, read_profile("h100").spec)
    coefficients = default_coefficients(model, cluster)
    costs = CostModel(model, cluster, coefficients, parameters=case.parameters, shard_ranks=case.shard_ranks)
    is_shared, shape = case.degrees[-1] > 1, plainest_shape(case.degrees[-1], "auto", model, cluster)
    budget = ByteModel(model).budget(int(case.device_gib * GIB), int(case.host_gib * GIB), is_shared=is_shared)
    ways: dict[str, Any] = {"reruns": may_rerun(model, case.parameters), "head_pieces": model.head_pieces(shape.ulysses)}
    ways |= {"is_shared": is_shared, "block_ranks": shape.ulysses}
    most = max(budget.kept_tokens, most_tokens(model, budget.device_bytes, budget.host_bytes, budget.tile_tokens, **ways))
    room = most * case.degrees[-1]
    longest = longest_alone(model, budget, shape, case.parameters, case.shard_ranks, known=room, most=4 * room)
    return costs, PlannerConfig(most, case.degrees, activations=budget, longest_tokens=longest)


def check_plan(plan: StepPlan, costs: CostModel, config: PlannerConfig) -> None:
    """Checks bytes of every group, and that no group has more tokens than a rank may hold beside others."""
    budget = config.activations
    assert budget is not None
    counted = ByteModel(costs.model)
    waiting = counted.accumulated(costs.parameters, costs.shard_ranks)
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
        found = counted.moments(group, group.stages[0]).most
        assert found.peak + waiting * (len(group.chunks) > 1) <= budget.device_bytes
        assert found.host <= budget.host_bytes
        sequences = {span.sequence for chunk in group.chunks for span in chunk.spans}
        is_lone = len(sequences) == 1 and group.degree == config.degrees[-1]
        assert group.num_tokens <= config.tokens_per_rank * group.degree or is_lone
    assert plan.estimate.lower_bound_s <= plan.estimate.counted_s * (1 + 1e-9)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_every_mixed_step_is_planned(name: str, data: st.DataObject) -> None:
    costs, config = setup(CASES[name])
    chunk, longest = config.tokens_per_rank * config.degrees[-1], config.room_tokens
    assert longest > 1.05 * chunk
    long = data.draw(st.lists(st.integers(chunk + 1, longest) | st.sampled_from([chunk + 1, longest]), min_size=1, max_size=3))
    others = data.draw(st.lists(st.integers(1, chunk) | st.integers(1, 4000), max_size=8))
    lengths = data.draw(st.permutations(long + others))
    # links and kernels, which a run measures after it has chosen its limits, may be much slower or faster
    rate, again = data.draw(st.sampled_from([1.0, 0.03, 5.0])), data.draw(st.sampled_from([1.0, 8.0]))
    hardware = replace(costs.cluster.hardware, copy_bytes_per_s=rate * costs.cluster.hardware.copy_bytes_per_s)
    found = costs.coefficients
    slower = [replace(each, pair_s=again * each.pair_s) for each in (found.forward, found.backward)]
    coefficients = replace(found, forward=slower[0], backward=slower[1])
    measured = replace(costs, cluster=replace(costs.cluster, hardware=hardware), coefficients=coefficients)
    plan = plan_step(0, lengths, measured, config)
    check_plan(plan, measured, config)
    # groups that take part in one block's gathers never cut two sequences that need different numbers of slices
    for micro_batch in plan.micro_batches:
        for places in plan.in_step(micro_batch):
            own = [group for group in (micro_batch.groups[place] for place in places) if group.num_tokens]
            assert len(own) == 1 or all(group.num_tokens <= config.tokens_per_rank * group.degree for group in own)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["one rank, with the host", "shards"])
def test_more_tokens_need_more_bytes_within_a_piece(name: str) -> None:
    costs, config = setup(CASES[name])
    budget, shape = config.activations, plainest_shape(config.degrees[-1], "auto", costs.model, costs.cluster)
    assert budget is not None
    lone = _LoneSequences(costs.model, budget, shape, costs.parameters, costs.shard_ranks)
    for num_slices in WAYS:
        length = config.tokens_per_rank * config.degrees[-1]
        for _ in range(6):
            end = lone._piece_end(length, num_slices)
            parts = [length + 1 + (end - length - 1) * part // 5 for part in range(6)]
            # where the operator of attention's backward takes fewer heads at once
            steps = [keys + more for keys in lone._most_keys for more in (-8, 0, 1, 8)]
            inside = [each for each in sorted({*parts, *steps, end - 1}) if length < each <= end]
            peaks = [lone._counted(each, num_slices).peak for each in inside]
            assert peaks == sorted(peaks), (num_slices, inside, peaks)
            length = end


def test_rings_and_models_without_gain_get_no_more_than_a_chunk() -> None:
    model, budget = named_model("gpt-oss-20b"), ActivationBudget(1000, 8 * GIB, 64 * GIB)
    assert longest_alone(model, budget, GroupShape(4, 2), "sharded", 4, known=200_000, most=400_000) == 200_000
    assert longest_alone(model, budget, GroupShape(4, 4), "sharded", 4, known=200_000, most=150_000) == 150_000
    # keys and values of all layers need more than a layer of all tokens
    costs, config = setup(Case("qwen3-8b", 20, 0, 4, "sharded", (4,), 4))
    assert config.longest_tokens == config.room_tokens == 4 * config.tokens_per_rank
    with pytest.raises(ValueError, match="but the largest group of 4 ranks holds"):
        plan_step(0, [config.room_tokens + 1], costs, config)


def test_packs_that_need_more_than_one_sequence_are_planned_apart() -> None:
    costs, config = setup(Case("gpt-oss-20b", 10.89, 64))
    # one chunk of 74,704 tokens needs as much as one of 90,000, whose attention takes fewer heads at once
    lengths = [13549, 6807, config.tokens_per_rank, 2525, 74704, 21707, 2268, 60007]
    check_plan(plan_step(0, lengths, costs, config), costs, config)

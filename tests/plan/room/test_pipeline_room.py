"""Room in pipelines: whatever comes out fits by the judge or raises, what fits stays as it is, and copies come before layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.plans.pipeline_plans import run_trial
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.chunks import elastic_chunks
from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.settings import GENERIC_GPU, ActivationBudget, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import ActivationPolicy, MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.policies.fit import in_tiles
from hf_longctx.plan.policies.levels import Moments
from hf_longctx.plan.predict.evaluate import Evaluation, evaluate_plan
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.cells import GroupCells
from hf_longctx.plan.room.room import PipelineRoom, RoomConstants, make_room

MODEL = ModelSpec(8, 256, 704, 8, 2, 32, 4096, 1 << 20, bytes_per_element=2)
LARGE = ModelSpec(16, 4096, 14336, 32, 8, 128, 32000, 1 << 20, bytes_per_element=2)
GIB = 1 << 30
# stages, ranks of each, schedule, parts of each
SHAPES = [(2, 1, "elastic", 1), (2, 2, "1f1b", 1), (4, 1, "elastic", 1), (3, 1, "gpipe", 1), (2, 1, "interleaved", 2)]


def costs_of(model: ModelSpec, num_stages: int, degree: int, copy_bytes_per_s: float = 2e10, num_ranges: int = 1) -> CostModel:
    hardware = replace(GENERIC_GPU, copy_bytes_per_s=copy_bytes_per_s)
    cluster = ClusterSpec(num_stages * degree, degree, hardware)
    coefficients = default_coefficients(model, cluster)
    if num_ranges > 1:
        # shards are gathered for whole stages
        return CostModel(model, cluster, coefficients, parameters="replicated")
    return CostModel(model, cluster, coefficients, parameters="sharded", shard_ranks=degree)


def plan_of(
    costs: CostModel, lengths: list[int], num_slices: int, num_stages: int, schedule: Schedule = "elastic", num_ranges: int = 1
) -> StepPlan:
    """All sequences in one pipeline over all ranks."""
    coefficients = costs.coefficients
    pair_s = coefficients.forward.pair_s + coefficients.backward.pair_s
    token_s = coefficients.forward.token_s + coefficients.backward.token_s
    chunks = elastic_chunks(dict(enumerate(lengths)), num_slices, SpanRates(pair_s, token_s), max(lengths))
    degree = costs.cluster.num_ranks // num_stages
    group = SequenceGroup(tuple(range(degree)), "local" if degree == 1 else "ulysses", chunks, ())
    group = pipelined(group, layer_ranges(costs.model.num_layers, num_stages, num_ranges), schedule)
    shard_ranks = 0 if costs.parameters == "replicated" else degree
    return StepPlan(0, tuple(lengths), num_stages, degree, costs.parameters, (MicroBatch((group,)),), shard_ranks=shard_ranks)


def limit_of(plan: StepPlan, costs: CostModel, budget: ActivationBudget) -> int:
    """Bytes of a rank: the budget beside the stage with the most states."""
    stages = plan.micro_batches[0].groups[0].stages
    return max(ByteModel(costs.model).stage_states(stage, plan) for stage in stages) + budget.device_bytes


def made_to_fit(plan: StepPlan, costs: CostModel, budget: ActivationBudget) -> StepPlan:
    return make_room(plan, Planning(costs, PlannerConfig(1, (1,), activations=budget)))


def judged(plan: StepPlan, costs: CostModel) -> Evaluation:
    return evaluate_plan(plan, costs, with_events=False)


def policies_of(plan: StepPlan) -> list[ActivationPolicy]:
    return [policy for mb in plan.micro_batches for group in mb.groups for stage in group.stages for policy in stage.activations]


def recomputed(policy: ActivationPolicy) -> float:
    return sum(layer.share("mlp").recompute for layer in policy.layers)


def host_share(plan: StepPlan) -> float:
    return sum(layer.share("mlp").host for policy in policies_of(plan) for layer in policy.layers)


@pytest.mark.wide
@given(
    st.lists(st.integers(1, 6_000), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from(
        [(2, 1, "elastic", 1), (2, 2, "1f1b", 1), (4, 1, "elastic", 1), (3, 1, "gpipe", 1), (2, 1, "interleaved", 2)]
    ),
    st.integers(18, 29).map(lambda bits: 1 << bits),
    st.sampled_from([0, 1 << 22, 1 << 30]),
    st.sampled_from([0, 256]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_plans_fit_by_the_judge_or_raise(
    lengths: list[int],
    num_slices: int,
    shape: tuple[int, int, Schedule, int],
    device_bytes: int,
    host_bytes: int,
    tile_tokens: int,
    can_keep_qkv: bool,
    tiles_mlps: bool,
) -> None:
    num_stages, degree, schedule, num_ranges = shape
    costs = costs_of(replace(MODEL, can_keep_qkv=can_keep_qkv, tiles_mlps=tiles_mlps), num_stages, degree, num_ranges=num_ranges)
    plan = plan_of(costs, lengths, num_slices, num_stages, schedule, num_ranges)
    budget = ActivationBudget(0, device_bytes, host_bytes, tile_tokens)
    limit, before = limit_of(plan, costs, budget), judged(plan, costs)
    try:
        made = made_to_fit(plan, costs, budget)
    except ValueError as error:
        assert max(before.peak_bytes) > limit
        assert "GiB are usable" in str(error)
        return
    validate_plan(made)
    after = judged(made, costs)
    assert max(after.peak_bytes) <= limit and max(after.host_bytes) <= host_bytes
    assert (made == plan) == (max(before.peak_bytes) <= limit)
    assert made_to_fit(plan, costs, budget) == made
    for policy in policies_of(made):
        for layer in policy.layers:
            # a layer is replayed from its input, and attention of slices runs again wholly or not at all
            assert layer.share("layer_input").recompute == 0
            assert layer.share("attention_output").recompute in (0, 1)
            assert layer.keeps_everything or can_keep_qkv or layer.share("qkv").recompute == 1
            assert layer.keeps_everything or tiles_mlps or layer.share("mlp").recompute == 1


@pytest.fixture(scope="module")
def long_case() -> tuple[StepPlan, CostModel, int]:
    """A pipeline of four stages with one long sequence and short ones, and its bytes where everything is kept."""
    costs = costs_of(LARGE, 4, 2)
    plan = plan_of(costs, [40_000, 30_000, *range(2_000, 12_000, 500)], 6, 4)
    return plan, costs, max(judged(plan, costs).peak_bytes) - limit_of(plan, costs, ActivationBudget(0, 0))


def test_less_memory_is_never_faster_and_copies_come_before_layers(long_case: tuple[StepPlan, CostModel, int]) -> None:
    plan, costs, whole_bytes = long_case
    free_s = judged(plan, costs).step_s
    before_s = 0.0
    for share in (1.0, 0.9, 0.7, 0.5):
        without = made_to_fit(plan, costs, ActivationBudget(0, int(share * whole_bytes)))
        both = made_to_fit(plan, costs, ActivationBudget(0, int(share * whole_bytes), 64 * GIB))
        without_s, both_s = judged(without, costs).step_s, judged(both, costs).step_s
        assert before_s <= without_s * (1 + 1e-3)
        assert free_s <= both_s * (1 + 1e-9) and both_s <= without_s * (1 + 1e-9)
        before_s = without_s
        if share == 0.9:
            # copies that hide, back ones too
            assert host_share(both) > 0 and both_s < 1.001 * free_s
        for layers in (policy.layers for policy in policies_of(both) if any(one.share("mlp").host for one in policy.layers)):
            # the last of four layers moves nothing, so that it hides the copies of the one before
            assert len(layers) == 3 or not layers[3].share("mlp").host
        if share < 0.9:
            assert sum(map(recomputed, policies_of(both))) < sum(map(recomputed, policies_of(without)))
            assert host_share(both) > 0 == host_share(without)


def test_a_slow_link_moves_less_and_recomputes_more(long_case: tuple[StepPlan, CostModel, int]) -> None:
    plan, _, whole_bytes = long_case
    layers, moved = [], []
    for copy_bytes_per_s in (1e11, 1e10, 1e9):
        costs = costs_of(LARGE, 4, 2, copy_bytes_per_s)
        made = made_to_fit(plan, costs, ActivationBudget(0, int(0.4 * whole_bytes), 64 * GIB))
        layers.append(sum(map(recomputed, policies_of(made))))
        moved.append(max(judged(made, costs).host_bytes))
    assert layers[0] <= layers[1] < layers[2]
    assert moved[1] > moved[2]


def test_stages_recompute_side_by_side(long_case: tuple[StepPlan, CostModel, int]) -> None:
    plan, costs, whole_bytes = long_case
    made = made_to_fit(plan, costs, ActivationBudget(0, int(0.6 * whole_bytes)))
    (group,) = made.micro_batches[0].groups
    # seconds that each stage's recomputation adds if the others have room for everything
    free_s = judged(plan, costs).step_s
    alone_s = []
    for place in range(4):
        stages = tuple(stage if stage.stage == place else replace(stage, activations=()) for stage in group.stages)
        alone = replace(made, micro_batches=(MicroBatch((replace(group, stages=stages),)),))
        alone_s.append(judged(alone, costs).step_s - free_s)
    assert sum(seconds > 0 for seconds in alone_s) > 1
    assert judged(made, costs).step_s - free_s < 0.9 * sum(alone_s)


def test_a_program_that_counts_too_few_bytes_is_asked_again(
    long_case: tuple[StepPlan, CostModel, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, costs, whole_bytes = long_case
    budget = ActivationBudget(0, int(0.6 * whole_bytes), 64 * GIB)
    moments, asked = GroupCells.moments, []

    def optimistic(cells: GroupCells, room_bytes: Sequence[float]) -> Moments:
        asked.append(list(room_bytes))
        return moments(cells, [num_bytes + 0.3 * whole_bytes for num_bytes in room_bytes])

    monkeypatch.setattr(GroupCells, "moments", optimistic)
    made = made_to_fit(plan, costs, budget)
    assert len(asked) > 1 and sum(asked[1]) < sum(asked[0])
    assert max(judged(made, costs).peak_bytes) <= limit_of(plan, costs, budget)
    assert any(not recomputed(policy) for policy in policies_of(made))


def test_groups_alike_are_solved_once(long_case: tuple[StepPlan, CostModel, int]) -> None:
    plan, costs, whole_bytes = long_case
    room = PipelineRoom(plan, costs, ActivationBudget(0, int(0.6 * whole_bytes)))
    (group,) = plan.micro_batches[0].groups
    renumbered = replace(
        group,
        chunks=tuple(
            replace(chunk, spans=tuple(replace(span, sequence=span.sequence + 100) for span in chunk.spans))
            for chunk in group.chunks
        ),
    )
    first, second = room.for_group(group), room.for_group(renumbered)
    assert second.stages is first.stages and second.chunks == renumbered.chunks


def test_plans_of_one_step_share_what_was_solved(
    long_case: tuple[StepPlan, CostModel, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, costs, whole_bytes = long_case
    budget = ActivationBudget(0, int(0.6 * whole_bytes))
    planning = Planning(costs, PlannerConfig(1, (1,), activations=budget))
    first = make_room(plan, planning)

    def never(*_: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr("hf_longctx.plan.room.room.choose_levels", never)
    again = make_room(plan, planning)
    assert again == first and any(map(recomputed, policies_of(again)))
    with pytest.raises(AssertionError, match="solved again"):
        made_to_fit(plan, costs, budget)


def test_too_little_memory_says_how_much_is_needed(long_case: tuple[StepPlan, CostModel, int]) -> None:
    plan, costs, _ = long_case
    with pytest.raises(ValueError, match=r"stage \d of 4 needs [\d.]+ GiB .* use smaller chunks, more ranks"):
        made_to_fit(plan, costs, ActivationBudget(0, GIB // 8))


def test_a_last_stage_that_fits_only_as_it_is_stays_so_while_others_recompute() -> None:
    costs = costs_of(LARGE, 4, 1)
    plan = plan_of(costs, [400] * 8, 1, 4)
    (group,) = plan.micro_batches[0].groups
    budget = ActivationBudget(0, 1100 << 20, 0, 1024)
    room = PipelineRoom(plan, costs, budget)
    whole, tiled = room.over_bytes(group), room.over_bytes(in_tiles(group, budget.tile_tokens))
    # tiles of the loss take more than they save here
    assert whole[0] > 0 and whole[-1] <= 0 < tiled[-1]
    made = room.for_group(group)
    assert max(room.over_bytes(made)) <= 0
    assert made.stages[-1] == group.stages[-1] and made.stages[0] != group.stages[0]
    validate_plan(replace(plan, micro_batches=(MicroBatch((made,)),)))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(64, 20000), min_size=1, max_size=5),
    st.sampled_from([1, 4]),
    st.sampled_from(SHAPES),
    st.sampled_from([0, GIB]),
    st.floats(0.9, 1.1),
)
def test_no_policy_fits_a_group_that_is_called_hopeless(
    lengths: list[int], num_slices: int, shape: tuple[int, int, Schedule, int], host_bytes: int, share: float
) -> None:
    num_stages, degree, schedule, num_ranges = shape
    costs = costs_of(LARGE, num_stages, degree, num_ranges=num_ranges)
    plan = plan_of(costs, lengths, num_slices, num_stages, schedule, num_ranges)
    (group,) = plan.micro_batches[0].groups
    # the budget at which every layer recomputed just fits, or does not
    needed = max(PipelineRoom(plan, costs, ActivationBudget(0, 0, host_bytes, 1024)).least_over_bytes(group))
    budget = ActivationBudget(0, max(1, int(share * needed)), host_bytes, 1024)
    room = PipelineRoom(plan, costs, budget)
    is_hopeless = room.is_hopeless(group)
    # all stages are counted here, in every way
    assert is_hopeless == (max(room.least_over_bytes(group)) > RoomConstants().hopeless * room.limit_bytes)
    with pytest.MonkeyPatch.context() as patch:
        # and every run is predicted
        patch.setattr(PipelineRoom, "trial", run_trial)
        patch.setattr(PipelineRoom, "is_hopeless", lambda *_: False)
        try:
            slow = PipelineRoom(plan, costs, budget).for_group(group)
        except ValueError:
            with pytest.raises(ValueError, match=r"needs .* GiB on a rank"):
                room.for_group(group)
            return
    assert not is_hopeless
    assert room.for_group(group) == slow

"""Plans of several stages: valid, as predicted, no slower than what others would do, and with room or several in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.measures.calls import counted_calls
from helpers.plans.cost_models import COST_KINDS, MODEL, cost_model
from helpers.plans.grouping_problems import lognormal_lengths, plan_stages
from helpers.plans.pipeline_plans import run_trial, stage_ranges
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.chunks import fixed_chunks
from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, HardwareSpec, NoRoom, PlannerConfig
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, MicroBatch, Parameters, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.pipeline import search as pipeline_planner
from hf_longctx.plan.pipeline.candidates import Candidate
from hf_longctx.plan.pipeline.search import PipelineSearch, SearchConstants, _Row
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import PipelineRoom

GPU = HardwareSpec("gpu", 2e14, 1.5e14, 80 << 30, 2e11, 2.5e10, 3e-5)
MIXTURE = lognormal_lengths(1, 40, 6000, median=300.0)


def config(tokens_per_rank: int = 5000, degrees: tuple[int, ...] = (1, 2, 4), **changes: object) -> PlannerConfig:
    return replace(PlannerConfig(tokens_per_rank, degrees), **changes)  # type: ignore[arg-type]


def kinds(group: SequenceGroup) -> list[list[str]]:
    return [[action.kind for action in stage.actions if action.kind in "FB"] for stage in group.stages]


@pytest.mark.wide
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 2500), max_size=12),
    st.sampled_from(COST_KINDS),
    st.sampled_from([(4, 2), (4, 4), (8, 2), (6, 2), (6, 3)]),
    st.sampled_from(["replicated", "gathered_per_round", "sharded"]),
    st.sampled_from([(1,), (1, 2), (2,), (1, 2, 3, 4)]),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_every_plan_is_valid_and_its_estimate_the_judges(
    lengths: list[int],
    kind: str,
    ranks: tuple[int, int],
    parameters: Parameters,
    degrees: tuple[int, ...],
    shards: int,
    spreads_head: bool,
) -> None:
    num_ranks, num_stages = ranks
    costs = replace(cost_model(kind, num_ranks), parameters=parameters, shard_ranks=shards or 1, method="auto")
    per_stage = num_ranks // num_stages
    if min(degrees) > per_stage or (shards and per_stage % shards):
        return
    try:
        settings = config(2000, degrees)
        if spreads_head:
            costs = replace(costs, model=replace(costs.model, num_head_stages=num_stages))
            output_shares = (0.5, *(num_stages - 1) * (1.0,))
            settings = replace(settings, stages=stage_ranges(costs.model, num_stages), output_shares=output_shares)
        plan = plan_stages(3, lengths, costs, num_stages, settings)
    except ValueError as error:
        # with sharded parameters groups side by side cannot have slices
        assert parameters == "sharded" and max(degrees) < per_stage and "fits no pipeline" in str(error)
        return
    # all tokens once, slices in order, groups side by side in one order where they have to be
    validate_plan(plan)
    assert (plan.num_stages, plan.ranks_per_stage, plan.step) == (num_stages, per_stage, 3)
    run = evaluate_plan(plan, costs)
    assert plan.estimate.step_s == pytest.approx(run.step_s, rel=1e-12)
    assert plan.estimate.peak_bytes == max(run.peak_bytes)
    assert plan.estimate.lower_bound_s <= plan.estimate.counted_s * (1 + 1e-9)
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
        # no stage gets a second head before every other one has its first
        assert bool(group.head_stages) == (spreads_head and len(group.chunks) > 1)
        assert group.degree in degrees or not group.num_tokens
        assert all(chunk.num_tokens <= 2000 * group.degree for chunk in group.chunks)


@pytest.mark.parametrize("budget", [None, ActivationBudget(2000, 1 << 30, 0, 64)])
@pytest.mark.parametrize("parameters", ["replicated", "gathered_per_round", "sharded"])
def test_a_step_without_sequences_runs_dummies(parameters: Parameters, budget: ActivationBudget | None) -> None:
    settings = replace(config(), activations=budget)
    plan = plan_stages(0, [], replace(cost_model("linear", 4), parameters=parameters), 2, settings)
    assert plan.layout == "<1,1>" and not any(group.num_tokens for group in validate_plan(plan).micro_batches[0].groups)


def test_the_lower_bound_is_one() -> None:
    for kind in COST_KINDS:
        plan = plan_stages(0, MIXTURE, cost_model(kind, 8), 2, config())
        assert 0 < plan.estimate.lower_bound_s <= plan.estimate.step_s


def pipeline_plan(
    groups: Sequence[Sequence[Chunk]], lengths: Sequence[int], costs: CostModel, num_stages: int, schedule: Schedule
) -> StepPlan:
    """Equal groups side by side with these chunks."""
    per_stage = costs.cluster.num_ranks // num_stages
    degree = per_stage // len(groups)
    shape = GroupShape(degree, degree)
    made = [
        SequenceGroup.of(shape, range(place * degree, (place + 1) * degree), tuple(chunks)) for place, chunks in enumerate(groups)
    ]
    micro_batch = MicroBatch(tuple(pipelined(group, stage_ranges(costs.model, num_stages), schedule) for group in made))
    return StepPlan(0, tuple(lengths), num_stages, per_stage, costs.parameters, (micro_batch,))


@pytest.mark.daily("4-fixed")
@pytest.mark.parametrize("kind", ["attention", "fixed", "linear"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_plan_is_slower_than_batches_or_chunks_of_equal_tokens(kind: str, num_stages: int) -> None:
    costs = cost_model(kind, 8)
    plan = plan_stages(0, MIXTURE, costs, num_stages, config(100_000))
    others = []
    for num_groups in (count for count in (1, 2, 4) if count <= 8 // num_stages):
        # sequences dealt out in turn, longest first
        order = sorted(range(len(MIXTURE)), key=lambda i: -MIXTURE[i])
        parts = [{i: MIXTURE[i] for i in order[place::num_groups]} for place in range(num_groups)]
        for chunk_tokens in (500, 1000, 2000, 4000):
            chunks = [fixed_chunks(part, chunk_tokens) for part in parts]
            others.append(pipeline_plan(chunks, MIXTURE, costs, num_stages, "1f1b"))
        whole = [[Chunk(place, (Span(i, 0, n),)) for place, (i, n) in enumerate(part.items())] for part in parts]
        others.append(pipeline_plan(whole, MIXTURE, costs, num_stages, "1f1b"))
    best_s = min(evaluate_plan(validate_plan(other), costs).step_s for other in others)
    assert plan.estimate.step_s <= best_s * (1 + 1e-9)
    # and clearly better where attention makes chunks of equal tokens unequal
    if kind == "attention":
        assert plan.estimate.step_s < 0.95 * best_s


def test_one_long_sequence_gets_slices_and_many_short_ones_get_replicas() -> None:
    costs = cost_model("exchange", 8)
    (micro_batch,) = plan_stages(0, [8000, 100, 100], costs, 2, config(100_000)).micro_batches
    assert max(len(group.chunks) for group in micro_batch.groups) >= 4
    plan = plan_stages(0, [100] * 64, costs, 2, config(100_000))
    assert plan.layout == "<1,1,1,1>"
    assert all(chunk.prefix_tokens == 0 for group in plan.micro_batches[0].groups for chunk in group.chunks)


def test_rings_run_slices_where_the_method_asks_for_them() -> None:
    seconds = {}
    for method in ("ring", "auto"):
        costs = replace(cost_model("exchange", 4), method=method)
        plan = plan_stages(0, [8000], costs, 2, config(100_000, (2,)))
        ((group,),) = (micro_batch.groups for micro_batch in plan.micro_batches)
        assert group.method == ("ring" if method == "ring" else "ulysses") and len(group.chunks) >= 4
        seconds[method] = plan.estimate.step_s
    # every slice sends earlier ones again
    assert seconds["ring"] > seconds["auto"]


def test_a_long_sequence_among_short_ones_gets_a_larger_group_beside_small_ones() -> None:
    plan = plan_stages(0, [6000, *[400] * 30], cost_model("exchange", 6), 2, config(2000, (1, 2, 3)))
    assert plan.layout == "<2,1>"
    long, short = sorted(plan.micro_batches[0].groups, key=lambda group: -group.degree)
    assert {span.sequence for chunk in long.chunks for span in chunk.spans} >= {0}
    assert short.num_tokens


def test_sharded_parameters_keep_groups_side_by_side_in_one_order() -> None:
    costs = replace(cost_model("exchange", 8), parameters="sharded")
    plan = plan_stages(0, [100] * 63 + [30], costs, 2, config(4000))
    (micro_batch,) = plan.micro_batches
    assert plan.layout == "<1,1,1,1>"
    assert all(kinds(group) == kinds(micro_batch.groups[0]) for group in micro_batch.groups)
    # groups with unlike sequences need unlike numbers of chunks, which dummies make equal
    plan = plan_stages(0, [3000, 300, 200, 100], costs, 2, config(8000, (1,)))
    first, *others = plan.micro_batches[0].groups
    assert others and all(kinds(group) == kinds(first) for group in others)
    assert any(not chunk.spans for group in (first, *others) for chunk in group.chunks)
    # slices lie in the same slots of all groups, so that they need no group alone
    plan = plan_stages(0, [3500, 3000, *[100] * 20], costs, 2, config(2000, (2,)))
    first, other = plan.micro_batches[0].groups
    assert kinds(first) == kinds(other) and all(any(chunk.prefix_tokens for chunk in group.chunks) for group in (first, other))
    # where copies are shared by half of a stage, its halves are free
    halves = replace(cost_model("attention", 8), parameters="sharded", shard_ranks=2)
    plan = plan_stages(0, [4000, 3000, *[50] * 20], halves, 2, config(2000, (2,)))
    one, other = plan.micro_batches[0].groups
    assert plan.layout == "<2,2>" and kinds(one) != kinds(other) and plan.shard_ranks == 2


def test_equal_arguments_give_equal_plans_and_the_order_of_sequences_does_not_matter() -> None:
    costs = cost_model("attention", 8)
    plan = plan_stages(0, MIXTURE, costs, 4, config())
    assert plan_digest(plan) == plan_digest(plan_stages(0, MIXTURE, costs, 4, config()))
    turned = plan_stages(0, MIXTURE[::-1], costs, 4, config())
    assert turned.estimate.step_s == pytest.approx(plan.estimate.step_s, rel=1e-9)


def test_layers_of_stages_can_be_given_and_plan_step_plans_stages() -> None:
    costs = cost_model("linear", 4)
    ranges = ((LayerRange(0, 1),), (LayerRange(1, 3),))
    plan = plan_stages(0, [50, 60], costs, 2, config(stages=ranges))
    assert tuple(stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages) == ranges
    assert plan_digest(plan_step(0, [50, 60], costs, config(stages=ranges))) == plan_digest(plan)
    # one stage is no pipeline
    whole = config(stages=((LayerRange(0, 4),),))
    assert plan_digest(plan_step(0, [50, 60], costs, whole)) == plan_digest(plan_step(0, [50, 60], costs, config()))


def test_layers_depend_on_the_model_alone_and_the_head_counts() -> None:
    # a head of 100 x 64 numbers beside layers of 26,624: a quarter of a layer
    assert stage_ranges(MODEL, 2) == layer_ranges(4, 2, head_layers=0.24)
    wide = replace(MODEL, vocab_size=2000)
    assert [layer_range.num_layers for (layer_range,) in stage_ranges(wide, 2)] == [4 - 1, 1] or stage_ranges(wide, 2)[0][
        0
    ].num_layers > 2


def budgeted(device_bytes: int) -> PlannerConfig:
    return config(4000, (1, 2), activations=ActivationBudget(0, device_bytes, 0, 128))


def peak_beside_states(plan: StepPlan, costs: CostModel) -> int:
    stages = plan.micro_batches[0].groups[0].stages
    return plan.estimate.peak_bytes - max(ByteModel(costs.model).stage_states(stage, plan) for stage in stages)


def test_what_does_not_fit_gets_room_and_what_fits_stays() -> None:
    costs = cost_model("attention", 4)
    lengths = lognormal_lengths(3, 20, 3000)
    free = plan_stages(0, lengths, costs, 2, budgeted(1 << 40))
    assert not any(stage.activations for group in free.micro_batches[0].groups for stage in group.stages)
    needed = peak_beside_states(free, costs)
    tight = plan_stages(0, lengths, costs, 2, budgeted(needed // 3))
    assert peak_beside_states(tight, costs) <= needed // 3
    assert tight.estimate.step_s >= free.estimate.step_s
    validate_plan(tight)
    with pytest.raises(ValueError, match=r"sequence \d+ has \d+ tokens and fits no pipeline of 2 stages of 2 rank"):
        plan_stages(0, lengths, costs, 2, budgeted(1000))


@pytest.mark.wide
def test_room_is_asked_for_and_several_pipelines_come_in_a_row_where_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = cost_model("attention", 4)
    lengths = [3000, 2900, *[300] * 12]
    needed = peak_beside_states(plan_stages(0, lengths, costs, 2, budgeted(1 << 40)), costs)
    asked: list[StepPlan] = []

    def refuse(plan: StepPlan, _: Planning) -> StepPlan:
        asked.append(plan)
        raise NoRoom("nothing fits")

    monkeypatch.setattr("hf_longctx.plan.pipeline.search.make_room", refuse)
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        try:
            limits = replace(budgeted(int(share * needed)), stages=stage_ranges(costs.model, 2))
            plan = PipelineSearch(0, lengths, Planning(costs, limits)).plan()
        except ValueError:
            break
        validate_plan(plan)
        assert peak_beside_states(plan, costs) <= share * needed
        if len(plan.micro_batches) > 1:
            break
    else:
        raise AssertionError("no budget needed several pipelines")
    assert asked and len(plan.micro_batches) > 1
    first = {span.sequence for group in plan.micro_batches[0].groups for chunk in group.chunks for span in chunk.spans}
    assert 0 in first and not first >= set(range(14))


@pytest.mark.daily("windows-replicated")
@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
@pytest.mark.parametrize("kind", ["attention", "windows"])
def test_micro_batches_in_a_row_overlap_as_far_as_they_fit(kind: str, parameters: Parameters) -> None:
    costs = replace(cost_model(kind, 4), parameters=parameters, shard_ranks=2)
    plan = validate_plan(plan_stages(0, [3000, 2900, *[300] * 12], costs, 2, config(1000)))
    assert len(plan.micro_batches) == 3 and plan.turns
    in_turns, after = (evaluate_plan(each, costs, with_events=False) for each in (plan, replace(plan, turns=())))
    assert plan.estimate.step_s == pytest.approx(in_turns.step_s)
    assert in_turns.step_s < after.step_s
    stages = plan.micro_batches[0].groups[0].stages
    assert all(rank.peak_tokens * stages[rank.rank // 2].num_layers <= 1000 * MODEL.num_layers for rank in in_turns.ranks)


@pytest.mark.wide
@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(64, 20000), min_size=2, max_size=24),
    st.sampled_from([(4, 2), (8, 4), (4, 4)]),
    st.sampled_from(["replicated", "gathered_per_round"]),
    st.floats(1.5, 12.0),
    st.sampled_from([0, 8]),
)
def test_what_a_bound_refuses_makes_no_difference_to_plans(
    lengths: list[int], ranks: tuple[int, int], parameters: Parameters, device_gib: float, host_gib: int
) -> None:
    num_ranks, num_stages = ranks
    model, cluster = replace(named_model("llama-3.1-8b"), num_layers=8), ClusterSpec(num_ranks, 8, GPU)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters=parameters)
    room = ByteModel(model).budget(int(device_gib * 2**30), host_gib << 30, 1024)
    limits = config(16_000, (1, 2), activations=room)

    def planned() -> str:
        try:
            return plan_digest(plan_stages(0, lengths, costs, num_stages, limits))
        except ValueError as error:
            return str(error).split(" tokens")[0]

    quick = planned()
    with pytest.MonkeyPatch.context() as patch:
        # all bytes of all stages are counted
        patch.setattr(ByteModel, "least_peak", lambda self, *of: self.moments(*of[:2], waiting=of[2]).most.peak)
        patch.setattr(PipelineRoom, "_least_over", lambda self, group, ways: self._over_bytes(group, ways))
        assert planned() == quick
        # and nothing is refused before its run is predicted
        patch.setattr(PipelineRoom, "_is_over", lambda *_: False)
        patch.setattr(PipelineRoom, "trial", run_trial)
        assert planned() == quick


@pytest.mark.wide
def test_stages_take_turns_for_sequences_of_which_pipelines_would_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lognormal_lengths(3, 64, 65_536, median=1200.0, sigma=1.3)
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(16, 8, GPU)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters="gathered_per_round")
    limits = config(32_768, (1, 2, 4, 8), activations=ByteModel(model).budget(26 << 29, 32 << 30, 1024))
    plan = plan_stages(0, lengths, costs, 2, limits)
    assert {len(group.chunks) for each in plan.micro_batches for group in each.groups} == {1}
    monkeypatch.setattr(pipeline_planner, "_CHOICE", SearchConstants(in_turn=float("inf")))
    split = plan_stages(0, lengths, costs, 2, limits)
    assert max(len(group.chunks) for each in split.micro_batches for group in each.groups) > 1
    assert plan.estimate.step_s < 0.95 * split.estimate.step_s


def test_without_a_budget_a_rank_holds_no_more_than_its_tokens_over_all_layers() -> None:
    costs = cost_model("attention", 8)
    limits = config(600, (1, 2, 4))
    plan = plan_stages(0, [4000, 1500, *[200] * 30], costs, 2, limits)
    stages = plan.micro_batches[0].groups[0].stages
    for rank in evaluate_plan(plan, costs).ranks:
        assert rank.peak_tokens * stages[rank.rank // 4].num_layers <= 600 * costs.model.num_layers


def test_wrong_stages_and_lengths_are_named() -> None:
    costs = cost_model("linear", 6)
    with pytest.raises(ValueError, match=r"6 ranks cannot form 4 stages of equal size; use one of \[1, 2, 3\]"):
        plan_stages(0, [5], costs, 4, config())
    with pytest.raises(ValueError, match=r"no degree of \(4,\) fits into a stage of 3 rank"):
        plan_stages(0, [5], costs, 2, config(degrees=(4,)))
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        plan_stages(0, [5, 0], costs, 2, config())
    with pytest.raises(ValueError, match="sequence 0 has 90000 tokens"):
        plan_stages(0, [90_000], costs, 2, config(1000, (1,)))


# everything kept, and room to be made
@pytest.mark.wide
@pytest.mark.parametrize(("device_gib", "most_calls"), [(0, 1_700_000), (12, 4_500_000)])
def test_a_step_of_512_sequences_on_32_gpus_is_planned_in_time(device_gib: int, most_calls: int) -> None:
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(32, 8, GPU)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters="gathered_per_round")
    lengths = lognormal_lengths(1, 512, 65536, median=1500.0, sigma=1.3)
    device_bytes = device_gib << 30
    budget = ByteModel(model).budget(device_bytes, 0, 1024) if device_gib else None
    limits = replace(config(32768, (1, 2, 4, 8)), activations=budget)
    plan, num_calls = counted_calls(lambda: plan_stages(0, lengths, costs, 4, limits))
    # the bound does not know the room that gradients take which wait whole
    assert plan.estimate.step_s < (1.4 if budget else 1.2) * plan.estimate.lower_bound_s
    # four to five millions take a second of one core alone
    assert num_calls < most_calls


def test_room_is_made_only_for_candidates_that_may_win_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one exceeds its estimate by 10 s, so that others are expected to exceed theirs by 5 s; nan: no estimate."""
    search = PipelineSearch(0, [100] * 4, Planning(cost_model("linear", 4), config(degrees=(1,), stages=layer_ranges(4, 2))))
    plan = search._plan_of([search.candidates.fastest(range(4))[0].micro_batch])
    run = search.planning.predict(plan)
    tried: list[float] = []

    def made(candidate: Candidate) -> _Row:
        tried.append(candidate.seconds)
        # 100 s becomes 110 s, and others need no room
        seconds = 110.0 if candidate.seconds == 100.0 else candidate.seconds
        return _Row(plan, replace(run, step_s=seconds + run.once_s))

    monkeypatch.setattr(search, "_as_it_is", lambda _: None)
    monkeypatch.setattr(search, "_made_to_fit", made)
    monkeypatch.setattr(search, "_takes", lambda *_: False)
    found = [Candidate(seconds, lambda: plan.micro_batches[0]) for seconds in (100.0, 105.5, math.nan, 104.5)]
    best = search._made_fastest(found)
    assert [tried[0], *tried[2:]] == [100.0, 104.5] and math.isnan(tried[1])
    assert best is not None and best.run.step_s == pytest.approx(104.5 + run.once_s)

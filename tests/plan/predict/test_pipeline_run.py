"""Promises of the predicted run of several stages and layer ranges, against plans worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from helpers.measures.calls import counted_calls
from helpers.plans.cost_models import HARDWARE, MODEL
from helpers.plans.fixture_plans import fixture
from helpers.plans.stage_orders import Stages, interleaved, one_forward_one_backward, with_messages

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    Parameters,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.memory.stage import ChunkBytes, message_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.pipeline_run import StageSeconds, run_alone

# seconds per token and rank: one forward, two backward; messages take none, and the model has no head
HEADLESS = dataclasses.replace(MODEL, vocab_size=0)
UNIT = CostCoefficients(PassCoefficients(0.0, 1.0, 0.0), PassCoefficients(0.0, 2.0, 0.0), 0.0, "test")


def chunks_of(lengths: tuple[int, ...], num_slices: int = 1) -> tuple[Chunk, ...]:
    """Even slices of all sequences, in order."""
    spans = [
        Span(s, length * i // num_slices, length * (i + 1) // num_slices)
        for s, length in enumerate(lengths)
        for i in range(num_slices)
    ]
    return tuple(Chunk(index, (span,)) for index, span in enumerate(spans))


def group_of(
    chunks: tuple[Chunk, ...],
    actions: Stages,
    ranges: tuple[tuple[LayerRange, ...], ...],
    positions: tuple[int, ...] = (0,),
    activations: tuple[tuple[ActivationPolicy, ...], ...] = (),
) -> SequenceGroup:
    policies = activations or ((),) * len(ranges)
    stages = tuple(StagePlan(p, ranges[p], actions[p], policies[p]) for p in range(len(ranges)))
    return SequenceGroup(positions, "local" if len(positions) == 1 else "ulysses", chunks, stages)


def even_ranges(num_layers: int, num_stages: int, num_ranges: int = 1) -> tuple[tuple[LayerRange, ...], ...]:
    """Layer ranges along the chain: range 0 of every stage, then range 1 of every stage."""
    size = num_layers // (num_stages * num_ranges)
    return tuple(tuple(LayerRange((v * num_stages + p) * size, size) for v in range(num_ranges)) for p in range(num_stages))


def plan_of(
    lengths: tuple[int, ...],
    rounds: list[list[SequenceGroup]],
    per_stage: int = 1,
    parameters: Parameters = "replicated",
) -> StepPlan:
    num_stages = len(rounds[0][0].stages)
    return validate_plan(
        StepPlan(0, lengths, num_stages, per_stage, parameters, tuple(MicroBatch(tuple(groups)) for groups in rounds))
    )


def costs_of(model: ModelSpec, num_ranks: int, coefficients: CostCoefficients = UNIT, per_node: int = 0) -> CostModel:
    return CostModel(model, ClusterSpec(num_ranks, per_node or num_ranks, HARDWARE), coefficients, method="ulysses")


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_slices", [1, 4])
def test_idle_seconds_are_a_pipeline_filling_of_slices(num_stages: int, num_slices: int) -> None:
    lengths = (40,) * 8
    actions = with_messages(one_forward_one_backward(num_stages, 8 * num_slices, num_slices))
    group = group_of(chunks_of(lengths, num_slices), actions, even_ranges(4, num_stages))
    run = evaluate_plan(plan_of(lengths, [[group]]), costs_of(HEADLESS, num_stages))
    # a slice takes (1 + 2) * 40 / k / P seconds on a stage
    slice_s = 3 * 40 / num_slices / num_stages
    assert run.step_s == pytest.approx((8 * num_slices + num_stages - 1) * slice_s, rel=1e-12)
    assert [use.idle_s for use in run.ranks] == pytest.approx([(num_stages - 1) * slice_s] * num_stages)
    assert run.in_flight == tuple(min(num_stages - p - 1 + num_slices, 8 * num_slices) for p in range(num_stages))


def test_layer_ranges_run_in_rounds() -> None:
    lengths = (40,) * 4
    actions = with_messages(interleaved(2, 4, 2), 2)
    run = evaluate_plan(plan_of(lengths, [[group_of(chunks_of(lengths), actions, even_ranges(4, 2, 2))]]), costs_of(HEADLESS, 2))
    # a range is a quarter of the model: (V M + P - 1) * 3 * 40 / 4
    assert run.step_s == pytest.approx((8 + 1) * 30)
    # (V - 1) P + 2 (P - 1 - p) + 1 units, and never more tokens than four sequences
    assert run.in_flight == (5, 3)
    assert [use.peak_tokens for use in run.ranks] == [4 * 40, 3 * 40]


def test_one_chunk_passes_two_stages_with_the_head_on_the_last_and_a_hop_between() -> None:
    forward = PassCoefficients(0.0, 1.0, 10.0, 12.5, 1e-3, 1e-1)
    backward = PassCoefficients(0.0, 2.0, 20.0, 25.0, 2e-3, 2e-1)
    ranges = ((LayerRange(0, 1),), (LayerRange(1, 3),))
    group = group_of(chunks_of((50,)), with_messages(one_forward_one_backward(2, 1)), ranges)
    head = MODEL.head_share
    for per_node, byte_s in ((2, 1e-3), (1, 1e-1)):
        costs = costs_of(MODEL, 2, CostCoefficients(forward, backward, 1000.0, "test"), per_node)
        run = evaluate_plan(plan_of((50,), [[group]]), costs)
        first_s, last_s = (50 * (1 - head) + 10) / 4, (50 * (1 - head) + 10) * 3 / 4 + 50 * head
        # hidden states of 64 elements of four bytes, both ways
        hop_s = 12.5 + byte_s * 50 * 64 * 4
        assert run.step_s == pytest.approx(3 * (first_s + last_s) + 2 * hop_s + 1000)
        assert run.busy_s == pytest.approx((3 * first_s, 3 * last_s))
        assert run.ranks[0].idle_s == pytest.approx(2 * hop_s + 3 * last_s)


def test_only_hops_between_nodes_take_the_network() -> None:
    forward = PassCoefficients(0.0, 1.0, 0.0, 0.0, 0.0, 1.0 / 256)
    ranges = tuple((LayerRange(layer, 1),) for layer in range(3))
    group = group_of(chunks_of((40,)), with_messages(one_forward_one_backward(3, 1)), ranges)
    run = evaluate_plan(plan_of((40,), [[group]]), costs_of(HEADLESS, 3, dataclasses.replace(UNIT, forward=forward), 2))
    # a layer takes 10 and 20 seconds; ranks 0 and 1 share a node, a token between 1 and 2 takes one second each way
    starts = {event.name: event.start_s for event in run.events}
    assert starts == {"0F0": 0, "1F0": 10, "2F0": 60, "2B0": 70, "1B0": 130, "0B0": 150}


def side_by_side(parameters: Parameters) -> tuple[StepPlan, CostModel]:
    """Two stages of three ranks: a micro-batch of groups of degree 2 and 1, then one of three groups of degree 1."""
    lengths = (60, 40, 80, 20, 10)
    actions, ranges = with_messages(one_forward_one_backward(2, 1)), even_ranges(4, 2)

    def alone(sequence: int, positions: tuple[int, ...]) -> SequenceGroup:
        return group_of((Chunk(0, (Span(sequence, 0, lengths[sequence]),)),), actions, ranges, positions)

    rounds = [[alone(0, (0, 1)), alone(1, (2,))], [alone(2, (0,)), alone(3, (1,)), alone(4, (2,))]]
    return plan_of(lengths, rounds, 3, parameters), costs_of(HEADLESS, 6)


def test_groups_are_pipelines_of_their_own_where_parameters_are_replicated() -> None:
    run = evaluate_plan(*side_by_side("replicated"))
    # positions 0 and 1: 30 tokens each; two stages halve seconds and run one after the other
    starts = {(e.rank, e.name): e.start_s for e in run.events[::-1]}
    # first round
    assert [starts[rank, "0F0"] for rank in range(3)] == [0, 0, 0]
    assert [starts[rank, "1F0"] for rank in (3, 4, 5)] == [15, 15, 20]
    # second: 90 seconds of <2> and 80 + 40 of <1> have passed
    second = {(e.rank, e.name): e.start_s for e in run.events}
    assert [second[rank, "0F0"] for rank in range(3)] == [90, 90, 120]
    assert run.step_s == 90 + 240
    assert run.busy_s == (45 + 120, 45 + 30, 60 + 15) * 2


@pytest.mark.parametrize(("parameters", "is_together"), [("gathered_per_round", True), ("replicated", False)])
def test_ranks_of_a_stage_that_share_parameters_leave_together(parameters: Parameters, is_together: bool) -> None:
    plan, costs = side_by_side(parameters)
    run = evaluate_plan(plan, costs)
    second = {(e.rank, e.name): e.start_s for e in run.events}
    # stage 0 leaves at 120, with its last backward; stage 1 at 80, when its last backward is done
    assert [second[rank, "0F0"] for rank in range(3)] == ([120] * 3 if is_together else [90, 90, 120])
    assert run.step_s == (360 if is_together else 330)


def two_stages(lengths: tuple[int, ...], num_slices: int = 1, parameters: Parameters = "replicated") -> StepPlan:
    """A plan on two stages, of three layers and of one."""
    actions = with_messages(one_forward_one_backward(2, len(lengths) * num_slices, num_slices))
    ranges = ((LayerRange(0, 3),), (LayerRange(3, 1),))
    return plan_of(lengths, [[group_of(chunks_of(lengths, num_slices), actions, ranges)]], 1, parameters)


@pytest.mark.parametrize("is_tied", [False, True])
def test_states_of_all_stages_are_those_of_the_model(is_tied: bool) -> None:
    model = dataclasses.replace(MODEL, tied_embeddings=is_tied, learned_positions=True)
    plan = two_stages((40,))
    first, last = (ByteModel(model).stage_states(stage, plan) for stage in plan.micro_batches[0].groups[0].stages)
    # 16 bytes of weight, gradient and moments in fp32; a tied table is on both stages
    table = MODEL.vocab_size * MODEL.hidden_size * 16
    assert first + last == ByteModel(model).states() + (table if is_tied else 0)
    assert first == 16 * 3 * model.layer_parameters + table + 16 * model.max_positions * model.hidden_size


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_in_the_middle_have_no_table(is_tied: bool) -> None:
    model = dataclasses.replace(MODEL, tied_embeddings=is_tied)
    ranges = tuple((LayerRange(layer, 1),) for layer in range(3))
    plan = plan_of((40,), [[group_of(chunks_of((40,)), with_messages(one_forward_one_backward(3, 1)), ranges)]])
    states = [ByteModel(model).stage_states(stage, plan) for stage in plan.micro_batches[0].groups[0].stages]
    table = MODEL.vocab_size * MODEL.hidden_size * 16
    assert states == [layers * 16 * model.layer_parameters + table * tables for layers, tables in ((1, 1), (1, 0), (1, 1))]


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_a_single_stage_has_the_states_of_the_model(parameters: Parameters) -> None:
    for name, shard_ranks in (("flexsp", 4), ("nested", 4)):
        plan = dataclasses.replace(fixture(name), parameters=parameters)
        stage = dataclasses.replace(plan.micro_batches[0].groups[0].stages[0], layer_ranges=(LayerRange(0, MODEL.num_layers),))
        assert ByteModel(MODEL).stage_states(stage, plan) == ByteModel(MODEL).states(parameters, shard_ranks)


def test_the_peak_of_a_stage_is_what_is_in_flight_and_what_works() -> None:
    lengths = (64, 32, 16)
    plan = two_stages(lengths)
    run = evaluate_plan(plan, costs_of(MODEL, 2))
    stages = plan.micro_batches[0].groups[0].stages

    def whole(tokens: int, num_layers: int, is_last: bool) -> ChunkBytes:
        load = Load(tokens, (tokens,), num_layers, has_head=is_last, keeps_gradients=is_last, receives=is_last)
        return ByteModel(MODEL).chunk(load)

    # stage 0 runs F0 F1 B0 F2 B1 B2: the first two are in flight together
    held = [whole(tokens, 3, False) for tokens in lengths]
    moments = [
        held[0].device + held[0].forward_workspace,
        held[0].device + held[1].device + held[1].forward_workspace,
        held[0].device + held[1].device + held[0].backward_workspace,
        held[1].device + held[0].ending,
        held[1].device + held[2].device + held[2].forward_workspace,
        held[1].device + held[2].device + held[1].backward_workspace,
        held[2].device + held[1].ending,
        held[2].device + held[2].backward_workspace,
        held[2].ending,
    ]
    # room for a message that comes and a gradient that came: 64 tokens of 64 elements each
    messages = 2 * 64 * 64 * 4
    assert run.peak_bytes[0] == ByteModel(MODEL).stage_states(stages[0], plan) + max(moments) + messages
    # stage 1 has one at a time, with the head
    last = [whole(tokens, 1, True) for tokens in lengths]
    most = max(max(one.device + one.workspace, one.ending) for one in last)
    assert run.peak_bytes[1] == ByteModel(MODEL).stage_states(stages[1], plan) + most + messages


def test_hidden_states_wait_with_the_chunk_for_their_gradient() -> None:
    inputs = LayerPolicy((TensorShare("layer_input", host=1.0), TensorShare("mlp", recompute=1.0)))
    hidden = 64 * MODEL.hidden_size * 4
    load = Load(64, (64,), 1, has_head=False)
    first, middle = (
        ByteModel(MODEL).chunk(dataclasses.replace(load, receives=receives), ActivationPolicy(0, 0, (inputs,)))
        for receives in (False, True)
    )
    # received tensors stay on the device although the layer's input is on the host; sent ones are held on every stage
    assert middle.device - first.device == hidden and middle.host == first.host == hidden
    last = ByteModel(MODEL).chunk(dataclasses.replace(load, num_layers=2), ActivationPolicy(0, 0, (inputs, inputs)))
    assert last.device - first.device == first.device - hidden - 64 * (2 * 4 * MODEL.head_dim + 16)


def test_keys_and_values_of_slices_wait_for_the_first_slice_and_gradients_come_with_the_last() -> None:
    plan = two_stages((64,), 4)
    group = plan.micro_batches[0].groups[0]
    for stage, num_layers in zip(group.stages, (3, 1), strict=True):
        token_bytes = 2 * num_layers * MODEL.num_kv_heads * MODEL.head_dim * 4
        # keys and values of all 64 tokens, gradients of the 48 before the last slice
        assert ByteModel(MODEL).moments(group, stage).most.book == token_bytes * (64 + 48)


def test_layer_ranges_hold_their_own_chunks_and_books() -> None:
    lengths = (64,)
    actions = with_messages(interleaved(2, 2, 2, 2), 2)
    group = group_of(chunks_of(lengths, 2), actions, even_ranges(4, 2, 2))
    for stage in group.stages:
        # both ranges are in flight at once: keys and values of two layers, and gradients of one layer at a time at least
        found = ByteModel(MODEL).moments(group, stage).most
        token_bytes = 2 * MODEL.num_kv_heads * MODEL.head_dim * 4
        assert token_bytes * (2 * 64 + 32) <= found.book <= token_bytes * 2 * (64 + 32)


def test_only_the_last_layer_range_holds_logits() -> None:
    lengths = (64, 64)
    actions = with_messages(interleaved(2, 2, 2), 2)
    first, last = group_of(chunks_of(lengths), actions, even_ranges(4, 2, 2)).stages
    group = group_of(chunks_of(lengths), actions, even_ranges(4, 2, 2))
    # both stages hold two chunks on two ranges, of one layer each; logits of one chunk after the other
    load = Load(64, (64,), 1, has_head=False, keeps_gradients=False)
    without, logits = (ByteModel(MODEL).chunk(dataclasses.replace(load, has_head=has)).device for has in (False, True))
    assert ByteModel(MODEL).moments(group, first).most.saved == 4 * without
    assert [str(a) for a in last.actions if a.kind in "FB"][:5] == ["1F0", "1F1", "1.1F0", "1.1B0", "1.1F1"]
    assert ByteModel(MODEL).moments(group, last).most.saved == 2 * without + logits


KEPT = LayerPolicy()
HOST = LayerPolicy((TensorShare("mlp", host=0.5, device=0.5), TensorShare("layer_input", host=1.0)))


def offloading(link_bytes_per_s: float, lengths: tuple[int, ...] = (64, 64, 64)) -> tuple[StepPlan, CostModel]:
    actions = with_messages(one_forward_one_backward(2, len(lengths)))
    policies = tuple(ActivationPolicy(chunk, 0, (HOST, HOST)) for chunk in range(len(lengths)))
    plan = plan_of(lengths, [[group_of(chunks_of(lengths), actions, even_ranges(4, 2), activations=(policies, ()))]])
    return plan, costs_with_link(costs_of(HEADLESS, 2), link_bytes_per_s)


def costs_with_link(costs: CostModel, bytes_per_s: float) -> CostModel:
    hardware = dataclasses.replace(HARDWARE, copy_bytes_per_s=bytes_per_s)
    return dataclasses.replace(costs, cluster=dataclasses.replace(costs.cluster, hardware=hardware))


def test_copies_that_nothing_hides_are_seconds_of_the_timeline() -> None:
    num_bytes = 64 * (class_bytes(HEADLESS, "layer_input") + class_bytes(HEADLESS, "mlp") // 2)
    # a layer's forward takes 16 seconds, its backward 32, and its copy 8: the top layer's copies are hidden by nothing
    plan, costs = offloading(num_bytes / 8)
    run = evaluate_plan(plan, costs)
    lengths = {e.name: e.stop_s - e.start_s for e in run.events}
    assert lengths["0F0"] == 32 + 8
    assert lengths["0B0"] == lengths["0B1"] == lengths["0B2"] == pytest.approx(64 + 8)
    assert lengths["1B0"] == 64
    # two chunks are in flight on the first stage
    assert run.host_bytes == (2 * 2 * num_bytes, 0)


def test_on_one_stage_the_layer_above_hides_the_copies_of_a_layer() -> None:
    num_bytes = 64 * (class_bytes(HEADLESS, "layer_input") + class_bytes(HEADLESS, "mlp") // 2)
    costs = offloading(num_bytes / 8)[1]
    order = tuple(Action(kind, 0, chunk) for kind, chunk in (("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)))

    def pass_seconds(costs: CostModel, *layers: LayerPolicy) -> list[float]:
        policies = tuple(ActivationPolicy(chunk, 0, layers) for chunk in (0, 1))
        run = run_alone(group_of(chunks_of((192,), 3), (order,), even_ranges(4, 1), activations=(policies,)), costs)
        assert run.host_bytes == 2 * num_bytes * layers.count(HOST)
        return [stop_s - start_s for start_s, stop_s in run.times]

    # each of four layers takes 16 seconds forward and 32 backward, and its copy 8; those of the top layer are hidden by nothing
    assert pass_seconds(costs, *(HOST,) * 4) == pytest.approx([64 + 8, 64 + 8, 64, 128, 128 + 8, 128 + 8])
    assert pass_seconds(costs, *(HOST,) * 3) == pytest.approx([64, 64, 64, 128, 128, 128])
    assert pass_seconds(costs, KEPT, HOST, HOST) == pytest.approx([64, 64, 64, 128, 128, 128])
    # at a fourth of the speed each layer above a copy takes as long forward as the copy, 32 seconds, and others 16
    slow = costs_with_link(costs, num_bytes / 32)
    assert pass_seconds(slow, *(HOST,) * 4) == pytest.approx([16 + 4 * 32, 16 + 4 * 32, 64, 128, 128 + 32, 128 + 32])
    assert pass_seconds(slow, *(HOST,) * 3) == pytest.approx([16 + 3 * 32, 16 + 3 * 32, 64, 128, 128, 128])
    assert pass_seconds(slow, HOST, KEPT, HOST) == pytest.approx([2 * (16 + 32)] * 2 + [64] + [128] * 3)
    assert pass_seconds(slow, HOST, KEPT, KEPT, HOST) == pytest.approx([16 + 32 + 16 + 16 + 32] * 2 + [64, 128] + [128 + 32] * 2)
    assert pass_seconds(slow, HOST) == pytest.approx([16 + 32 + 16 + 16] * 2 + [64] + [128] * 3)


def test_copies_hide_behind_layers_of_their_own_kind() -> None:
    windowed = dataclasses.replace(HEADLESS, windows=(4, None, 4, None))
    coefficients = CostCoefficients(PassCoefficients(1.0, 1.0, 0.0), PassCoefficients(2.0, 2.0, 0.0), 0.0, "test")
    costs = costs_of(windowed, 1, coefficients)
    order = (Action("F", 0, 0), Action("B", 0, 0))
    policies = ((ActivationPolicy(0, 0, (HOST,) * 3),),)
    plan = plan_of((64,), [[group_of(chunks_of((64,)), (order,), even_ranges(4, 1), activations=policies)]])
    seconds = StageSeconds(plan, plan.micro_batches[0].groups[0], costs)
    # seconds of a fourth of the model for 64 tokens and all pairs, or those of a window of 4 tokens
    window_s, full_s = (64 + 4 * 64 - 4**2 / 2) / 4, (64 + 64**2 / 2) / 4
    assert [step.compute_s for step in seconds.copies(order[0])] == pytest.approx([window_s, full_s, window_s, full_s])
    assert [step.compute_s for step in seconds.copies(order[1])] == pytest.approx(
        [2 * full_s, 2 * window_s, 2 * full_s, 2 * window_s]
    )
    assert seconds.table.ravel() == pytest.approx([2 * (window_s + full_s), 4 * (window_s + full_s)])


def test_a_slow_link_takes_no_more_memory() -> None:
    (fast, fast_costs), (slow, slow_costs) = offloading(1e30), offloading(1e-3)
    group = fast.micro_batches[0].groups[0]
    stage = group.stages[0]
    quick, stuck = evaluate_plan(fast, fast_costs), evaluate_plan(slow, slow_costs)
    state = ByteModel(HEADLESS).stage_states(stage, fast) + message_bytes(HEADLESS, stage, 2, 64)
    # the device waits for what leaves a chunk's layers, for which they have room
    assert quick.peak_bytes[0] - state == ByteModel(HEADLESS).moments(group, stage).most.peak
    assert stuck.peak_bytes == quick.peak_bytes


def test_layers_that_run_again_take_their_seconds_and_no_part_of_the_head() -> None:
    lengths = (64, 64)
    again = LayerPolicy((TensorShare("mlp", recompute=1.0), TensorShare("qkv", recompute=1.0)))
    actions = with_messages(one_forward_one_backward(2, 2))
    policies = ((ActivationPolicy(0, 0, (again, again)),), (ActivationPolicy(1, 0, (again,)),))
    plan = plan_of(lengths, [[group_of(chunks_of(lengths), actions, even_ranges(4, 2), activations=policies)]])
    run = evaluate_plan(plan, costs_of(MODEL, 2))
    layer_s = 64 * (1 - MODEL.head_share) / 4
    found = {e.name: e.stop_s - e.start_s for e in run.events}
    assert found["0B0"] == pytest.approx(2 * 3 * layer_s)
    assert found["0B1"] == pytest.approx(2 * 2 * layer_s)
    assert found["1B1"] == pytest.approx(2 * 2 * layer_s + layer_s + 2 * 64 * MODEL.head_share)


@pytest.mark.parametrize("name", ["seq1f1b", "infinipipe", "interleaved", "pp_sp_replicas"])
def test_hand_written_plans_run(name: str) -> None:
    plan = fixture(name)
    run = evaluate_plan(plan, costs_of(MODEL, plan.num_ranks))
    for rank, use in enumerate(run.ranks):
        events = [event for event in run.events if event.rank == rank]
        assert all(first.stop_s <= second.start_s for first, second in itertools.pairwise(events))
        assert sum(event.stop_s - event.start_s for event in events) == pytest.approx(use.busy_s)
        assert use.busy_s + use.idle_s == pytest.approx(run.step_s)
        stage = plan.micro_batches[0].groups[0].stages[rank // plan.ranks_per_stage]
        assert run.peak_bytes[rank] > ByteModel(MODEL).stage_states(stage, plan)


def test_five_hundred_sequences_on_four_stages_are_judged_at_once() -> None:
    lengths = tuple(range(500, 1012))
    group = group_of(chunks_of(lengths), with_messages(one_forward_one_backward(4, len(lengths))), even_ranges(4, 4))
    plan, costs = plan_of(lengths, [[group]]), costs_of(MODEL, 4)
    assert counted_calls(lambda: evaluate_plan(plan, costs, with_events=False))[1] < 500_000

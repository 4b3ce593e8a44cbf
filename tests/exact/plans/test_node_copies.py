"""Weights of which each node keeps a copy for a step: losses, gradients and clipped steps of one process, in fp64 on gloo ranks.

Nodes have two ranks, which meet in every pass ("gathered_per_node"); groups of other nodes run chunks and orders of their own.

What proves what, for 2 stages of 4 ranks where nothing else is named:

    slices, packs, hybrids of them, recomputing, offloading    `test_slices_packs_and_policies_match`
    groups that span nodes (Ulysses, hybrids, rings), whole or in part    `test_groups_across_nodes_match`
    one stage of 4 ranks, several chunks and micro-batches    `test_one_stage_matches`, `test_layouts_of_one_stage_match`
    one schedule through several micro-batches, layer ranges, spread heads, tied weights    the tests after these
    copies of shards, each over two nodes (1 x 8)    `test_copies_of_shards_match`
    adapters, frozen layers, experts, windows    `test_models_match`
    10 clipped steps of AdamW, each of two plans (accumulation)    `test_ten_clipped_steps_of_two_plans_each_follow_one_process`
    evaluations between steps and inside them read the weights of the moment    the two tests after it
    a step that raised leaves nothing to the next one (1 x 4)    `test_a_step_that_raised_leaves_nothing_to_the_next_one`
    weights and sums cross nodes once per step    `test_weights_and_sums_cross_nodes_once`
    random plans, none of which hangs (2 x 4, 1 x 4)    `test_random_plans_match`
    bf16 as close to fp64 as "sharded" (1 x 4)    `test_half_precision_is_as_close_as_sharded`
    weights that some nodes use, refusals of meshes    `runtime/parameters/test_gathers_in_nodes.py`
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from exact.plans.test_sharded_stages import (
    LEARNING_RATE,
    LONG,
    LORA,
    MAX_NORM,
    MIXED,
    NUM_STEPS,
    POLICIES,
    kept_layers,
    num_ranks,
    train_on_rank,
)
from exact.plans.test_spread_heads import train_on_rank as train_between_evaluations
from helpers.models.reference import BF16_BAND, TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import total_weight
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.pipeline_plans import LENGTHS, RANDOM_PIPELINES, pipeline_plan, random_chunks
from helpers.plans.policies import layer_policies, num_policies, with_policies
from helpers.plans.sliced_plans import Rows
from helpers.ranks.pipeline_steps import check_pipeline, stage_executor
from helpers.ranks.rank_steps import check_step, rank_inputs, run_step, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_longctx.plan.core.orders import in_turns
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, MicroBatch, Parameters, StepPlan
from hf_longctx.plan.core.validate import PlanError, validate_plan
from hf_longctx.runtime.core.torch_versions import weight_groups
from hf_longctx.runtime.parameters import gathers, sums

CASE = ModelCase(num_layers=4)
MODE: Parameters = "gathered_per_node"
NODE_RANKS = 2
# (degree, chunks) of every group of a micro-batch
Groups = list[tuple[int, Any]]
SHORT = [[(5, 0, 17)], [(5, 17, 30)]]
# one node has a group of its two ranks, the other one two groups of other lengths, of which one gets dummy chunks
APART: Groups = [(2, LONG), (1, MIXED), (1, SHORT)]
APART_SHORT: Groups = [(1, SHORT), (1, [[]]), (2, [[]])]
# lengths and groups of another plan, in which all four ranks share their sequences
OTHER_LENGTHS = [24, 6]
OTHER: Groups = [(4, [[(0, 0, 14)], [(0, 14, 24), (1, 0, 6)]])]


def node_plan(
    micro_batches: Sequence[Groups],
    num_stages: int = 2,
    schedule: Any = "elastic",
    num_layers: int = 4,
    num_ranges: int = 1,
    lengths: Sequence[int] = LENGTHS,
    output_shares: Sequence[float] = (),
    shard_ranks: int = 0,
    has_turns: bool = False,
    **shape: Any,
) -> StepPlan:
    """The plan of (degree, chunks) at consecutive positions, in which only groups that share nodes run in one order."""
    if has_turns:
        ways = {"output_shares": output_shares, "shard_ranks": shard_ranks, "has_turns": True, "node_ranks": NODE_RANKS}
        return pipeline_plan(lengths, micro_batches, num_stages, schedule, num_layers, num_ranges, MODE, **ways, **shape)
    plain = pipeline_plan(lengths, micro_batches, num_stages, schedule, num_layers, num_ranges, **shape)
    plan = replace(plain, parameters=MODE, node_ranks=NODE_RANKS, shard_ranks=shard_ranks)
    ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
    made = []
    for batch in plan.micro_batches:
        groups = list(batch.groups)
        for places in plan.in_step(batch):
            most = max(len(groups[place].chunks) for place in places)
            padded = [
                replace(
                    groups[place],
                    chunks=(*groups[place].chunks, *(Chunk(at, ()) for at in range(len(groups[place].chunks), most))),
                )
                for place in places
            ]
            (one,), _ = in_turns([MicroBatch(tuple(padded))], ranges, schedule, output_shares=output_shares)
            for place, group in zip(places, one.groups, strict=True):
                groups[place] = group
        made.append(MicroBatch(tuple(groups)))
    return validate_plan(replace(plan, micro_batches=tuple(made)))


def with_some_policies(plan: StepPlan) -> StepPlan:
    """The plan with some layers of some chunks recomputed or offloaded."""
    policies = [
        ActivationPolicy(0, 0, tuple(POLICIES[: place % 3]), tile_tokens=4 * (place % 2)) for place in range(num_policies(plan))
    ]
    return with_policies(plan, policies)


def test_slices_packs_and_policies_match(ranks) -> None:
    plan = node_plan([[(2, LONG), (2, [*MIXED, *SHORT])]])
    first, second = plan.micro_batches[0].groups
    assert len(first.chunks) != len(second.chunks)
    results = check_pipeline(ranks(8), CASE, with_some_policies(plan))
    assert any(memory.host for *_, memory in results)


# name -> (micro-batches, how groups of several ranks share attention)
ACROSS: dict[str, tuple[list[Groups], dict[str, Any]]] = {
    "ulysses": ([[(4, [*LONG, *MIXED])], APART_SHORT], {}),
    "hybrid": ([[(1, SHORT), *[(1, [[]])] * 3], [(4, [*LONG, *MIXED])]], {"method": "hybrid", "ulysses": 2}),
    "ring": ([[(4, [*LONG, *MIXED])], APART_SHORT], {"method": "ring"}),
    "in part": ([[(3, LONG), (1, [*MIXED, *SHORT])]], {}),
}


@pytest.mark.daily("ulysses", "in part")
@pytest.mark.parametrize("name", ACROSS)
def test_groups_across_nodes_match(ranks, name: str) -> None:
    micro_batches, shape = ACROSS[name]
    check_pipeline(ranks(8), CASE, with_some_policies(node_plan(micro_batches, **shape)))


@pytest.mark.daily("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_orders_match(ranks, schedule: str) -> None:
    check_pipeline(ranks(8), CASE, with_some_policies(node_plan([APART], schedule=schedule)))


def test_one_stage_matches(ranks) -> None:
    plan = node_plan([[(1, LONG[:4]), (1, [[]]), (2, MIXED)], [(4, SHORT)]], num_stages=1)
    assert {len(group.chunks) for group in plan.micro_batches[0].groups} == {3, 4}
    check_pipeline(ranks(4), CASE, with_some_policies(plan))


def layout_plan(name: str, parameters: Parameters = MODE) -> StepPlan:
    """The plan of a layout of one stage of four ranks."""
    _, layout, lengths = LAYOUTS[name]
    plan = plan_of(layout, lengths, 4, parameters="sharded")
    return validate_plan(replace(plan, parameters=parameters, node_ranks=NODE_RANKS * (parameters == MODE)))


@pytest.mark.daily("<4>,<2,2>,<1,1,1,1>-False", "<2,1,1>-True")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["<2,1,1>", "<4>,<2,2>,<1,1,1,1>", "one long, many short", "<4> of two tokens"])
def test_layouts_of_one_stage_match(ranks, name: str, tied: bool) -> None:
    check_step(ranks(4), ModelCase(promoted=True, tied=tied), layout_plan(name), LAYOUTS[name][2])


def test_rounds_in_turns_match(ranks) -> None:
    plan = node_plan([[(2, LONG), (2, MIXED)], [(4, SHORT)]], has_turns=True)
    assert any(list(turns) != sorted(turns) for turns in plan.turns)
    check_pipeline(ranks(8), CASE, with_some_policies(plan))


@pytest.mark.daily("False")
@pytest.mark.parametrize("has_turns", [False, True])
def test_interleaved_ranges_match(ranks, has_turns: bool) -> None:
    plan = node_plan([APART_SHORT, [(2, LONG), (2, MIXED)]], 2, "interleaved", 8, 2, has_turns=has_turns)
    check_pipeline(ranks(8), ModelCase(num_layers=8), with_some_policies(plan))


@pytest.mark.daily("True-False")
@pytest.mark.parametrize("has_turns", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_spread_heads_and_tied_weights_match(ranks, tied: bool, has_turns: bool) -> None:
    plan = node_plan([APART], output_shares=(1.0, 1.0), has_turns=has_turns)
    assert any(group.head_stages for group in plan.micro_batches[0].groups)
    check_pipeline(ranks(8), ModelCase(num_layers=4, tied=tied), with_some_policies(plan))


@pytest.mark.wide
@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_match(ranks, tied: bool) -> None:
    check_pipeline(ranks(8), ModelCase(num_layers=4, tied=tied), with_some_policies(node_plan([APART])))


@pytest.mark.daily("False")
@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_shards_match(ranks, tied: bool) -> None:
    """Two blocks of two nodes each, which hold copies of the shards."""
    first: Groups = [(2, LONG), (1, MIXED), (1, [[]]), (4, SHORT)]
    plan = node_plan([first], num_stages=1, shard_ranks=4)
    assert (plan.block_ranks, plan.node_ranks, plan.ranks_per_stage) == (4, 2, 8)
    check_pipeline(ranks(8), ModelCase(num_layers=4, tied=tied), with_some_policies(plan))


EXPERTS = ModelCase("qwen3_moe_dense", promoted=True, num_layers=4, balance=2.0)
MODELS: dict[str, ModelCase] = {
    "adapters": ModelCase(num_layers=4, lora=LORA),
    # stage 0 begins with a layer that no backward reaches, stage 1 with one that trains nothing
    "frozen layers": ModelCase(num_layers=4, lora=(*LORA, ("layers_to_transform", [1, 3]))),
    "adapters on embedding and head": ModelCase(num_layers=4, lora=(("r", 2), ("target_modules", ["embed_tokens", "lm_head"]))),
    "experts": replace(EXPERTS, balance=None),
    "balanced experts": EXPERTS,
    "windows": ModelCase("mistral_window", num_layers=4),
    "a teacher": ModelCase(num_layers=4, loss="jsd", teacher="qwen3"),
}


@pytest.mark.daily("frozen layers", "balanced experts")
@pytest.mark.parametrize("name", MODELS)
def test_models_match(ranks, name: str) -> None:
    check_pipeline(ranks(8), MODELS[name], with_some_policies(node_plan([APART])))


@pytest.mark.wide
def test_fused_adapters_match(ranks) -> None:
    check_pipeline(ranks(8), CASE, with_some_policies(node_plan([APART])), lora=True)


def steps_of_one_process(case: ModelCase, rows: Rows, num_steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and final weights of clipped steps on these rows."""
    model = build_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for _ in range(num_steps):
        losses.append(reference_step(model, rows)[0])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    assert min(norms) > MAX_NORM
    return losses, norms, {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}


def check_steps(found: Any, expected: tuple[list[float], list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10) and found[1] == pytest.approx(expected[1], rel=1e-10)
    assert max(relative_error(weight, expected[2][name]) for name, weight in found[2].items()) <= 1e-10


def test_ten_clipped_steps_of_two_plans_each_follow_one_process(ranks) -> None:
    plans = [with_some_policies(node_plan([APART])), node_plan([OTHER], lengths=OTHER_LENGTHS)]
    rows = [random_rows(LENGTHS), random_rows(OTHER_LENGTHS, seed=1)]
    expected = steps_of_one_process(CASE, [row for each in rows for row in each], NUM_STEPS)
    for found in ranks(8).run(train_on_rank, [plan_to_json(plan) for plan in plans], rows):
        check_steps(found, expected)


@pytest.mark.wide
def test_evaluations_between_steps_read_the_new_weights(ranks) -> None:
    plan, rows = with_some_policies(node_plan([APART])), random_rows(LENGTHS)
    expected = steps_of_one_process(CASE, rows, 5)
    for found in ranks(num_ranks(plan)).run(train_between_evaluations, CASE, plan_to_json(plan), rows):
        check_steps(found, expected)


def scale(weights: Sequence[nn.Parameter]) -> None:
    """Changes weights, in place of an optimizer, whatever their gradients are."""
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.9)


def steps_with_forwards_inside(plans_json: list[str], rows: list[Rows]) -> list[tuple[list[float], float, dict[str, Tensor]]]:
    """Losses of evaluations, and losses and gradients, of steps of all plans; there are forwards between these plans."""
    plans = [plan_from_json(text) for text in plans_json]
    executor, engine = stage_executor(CASE, plans[0])
    rank, weights = executor.pool.rank, list(executor.model.parameters())
    paths = [(plan.for_rank(rank), rank_inputs(plan, each, rank)["chunks"]) for plan, each in zip(plans, rows, strict=True)]
    count = sum(map(total_weight, rows))
    found = []
    for _ in range(3):
        executor.model.zero_grad()
        before = [float(executor.evaluate(*path, engine=engine)) / count for path in paths]
        total = 0.0
        for place, path in enumerate(paths):
            is_last = place == len(paths) - 1
            total += float(executor.run(*path, count, reduce=is_last, engine=engine).loss)
            if not is_last:
                # the first one gathers copies for itself, and the second one leaves them to the next plan
                executor.evaluate(*path, engine=engine)
                executor.read_inputs(*path, None)
        # weights outside of the layers, and copies, stay until they are freed
        executor.read_inputs(*paths[0], None)
        executor.parameters.free()
        gradients = {name: whole(each.grad) for name, each in executor.model.named_parameters()}
        found.append((before, total, gradients))
        scale(weights)
    return found


def test_forwards_inside_steps_leave_gradients_and_read_the_weights_of_the_moment(ranks) -> None:
    plans = [node_plan([APART], 1), node_plan([OTHER], 1, lengths=OTHER_LENGTHS)]
    rows, model, expected = [random_rows(LENGTHS), random_rows(OTHER_LENGTHS, seed=1)], build_model(CASE), []
    for _ in range(3):
        expected.append(reference_step(model, [row for each in rows for row in each]))
        scale(list(model.parameters()))
    for steps in ranks(4).run(steps_with_forwards_inside, [plan_to_json(plan) for plan in plans], rows):
        for (evaluated, loss, gradients), (expected_loss, expected_gradients) in zip(steps, expected, strict=True):
            assert sum(evaluated) == pytest.approx(expected_loss, rel=TOLERANCE) and loss == pytest.approx(
                expected_loss, rel=TOLERANCE
            )
            assert gradients.keys() == expected_gradients.keys()
            assert max(relative_error(gradients[name], each) for name, each in expected_gradients.items()) <= TOLERANCE


def step_after_one_that_raised(plan_json: str, rows: Rows, place: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step with changed weights, after a step that raised in a layer: at `place`."""
    plan = plan_from_json(plan_json)
    executor, _ = stage_executor(CASE, plan)
    path, chunks = plan.for_rank(executor.pool.rank), rank_inputs(plan, rows, executor.pool.rank)["chunks"]
    count = total_weight(rows)
    num_chunks = sum(len(group.chunks) for group, _ in path.rounds)
    fails_at = {"first forward": 1, "second backward": 2, "last backward": num_chunks}[place]
    num_passes = 0

    def fail(*unused: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == fails_at:
            raise ArithmeticError

    def watch(module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    product = executor.model.model.layers[0].mlp.up_proj
    for is_broken in (False, True, False):
        executor.model.zero_grad()
        # sums of all layers but the first have begun by then, and have crossed nodes in the last backward
        hook = product.register_forward_pre_hook(fail) if "forward" in place else product.register_forward_hook(watch)
        if not is_broken:
            hook.remove()
        with pytest.raises(ArithmeticError) if is_broken else nullcontext():
            loss = float(executor.run(path, chunks, count).loss)
        hook.remove()
        gradients = {name: whole(each.grad) for name, each in executor.model.named_parameters() if each.grad is not None}
        scale(list(executor.model.parameters()))
    return loss, gradients


@pytest.mark.daily("last backward")
@pytest.mark.parametrize("place", ["first forward", "second backward", "last backward"])
def test_a_step_that_raised_leaves_nothing_to_the_next_one(ranks, place: str) -> None:
    plan, rows, model = node_plan([APART], 1), random_rows(LENGTHS), build_model(CASE)
    scale(list(model.parameters()))
    scale(list(model.parameters()))
    expected_loss, expected = reference_step(model, rows)
    for loss, gradients in ranks(4).run(step_after_one_that_raised, plan_to_json(plan), rows, place):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert gradients.keys() == expected.keys()
        assert max(relative_error(gradients[name], each) for name, each in expected.items()) <= TOLERANCE


def meetings_on_rank(plan_json: str, rows: Rows) -> tuple[dict[str, Counter[str]], Counter[tuple[str, int]], Counter[str], Any]:
    """Work of a step of two equal plans on each unit; exchanges and gathers by their ranks; elements that cross nodes.

    The last result are the sizes of the shards of every record, of the outer unit and of layers.
    """
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(ModelCase(num_layers=8), plan)
    path, chunks = plan.for_rank(executor.pool.rank), rank_inputs(plan, rows, executor.pool.rank)["chunks"]
    exchange, gather, gather_part = sums._exchange, gathers.gather_tensors, gathers.gather_part
    record = torch.profiler.record_function
    done: dict[str, Counter[str]] = defaultdict(Counter)
    met: Counter[tuple[str, int]] = Counter()
    crossed: Counter[str] = Counter()
    kind = "gradients"

    def recording(words: str, *others: Any) -> Any:
        label, _, unit = words.partition(" ")
        done[label][unit.strip("()")] += 1
        return record(words, *others)

    def exchanging(rows_NK: Tensor, receivers: range, senders: range, group: Any) -> Tensor:
        met[kind, group.size()] += 1
        if group.size() > NODE_RANKS:
            crossed[kind] += rows_NK[0].numel()
        return exchange(rows_NK, receivers, senders, group)

    def gathering(wholes: list[Tensor], shards: list[Tensor], group: Any) -> None:
        met["gathers", group.size()] += 1
        gather(wholes, shards, group)

    def parting(*arguments: Any) -> Tensor:
        nonlocal kind
        kind = "weights"
        part = gather_part(*arguments)
        kind = "gradients"
        return part

    with (
        patch.object(sums, "_exchange", exchanging),
        patch.object(gathers, "gather_tensors", gathering),
        patch.object(gathers, "gather_part", parting),
        patch.object(torch.profiler, "record_function", recording),
    ):
        for is_last in (False, True):
            executor.run(path, chunks, 1, reduce=is_last, engine=engine)
    groups = [group for unit in (executor.model, *executor.parameters.layers) for group in weight_groups(unit)]
    sizes = [[weight.padded_sharded_param_size.numel() for weight in group.fsdp_params] for group in groups]
    return dict(done), met, crossed, sizes


@pytest.mark.daily("1")
@pytest.mark.parametrize("num_ranges", [1, 2])
def test_weights_and_sums_cross_nodes_once(ranks, num_ranges: int) -> None:
    schedule = "interleaved" if num_ranges > 1 else "elastic"
    plan = node_plan([APART, [(2, [[]]), (2, [[]])]], 2, schedule, 8, num_ranges)
    counts = [sum(len(group.chunks) for group, _ in plan.for_rank(rank).rounds) for rank in range(8)]
    assert len(set(counts)) > 1
    results = ranks(8).run(meetings_on_rank, plan_to_json(plan), random_rows(LENGTHS))
    for rank, (done, met, crossed, (outer, *of_layers)) in enumerate(results):
        path, num_passes = plan.for_rank(rank), 2 * counts[rank]
        ranges = [range(each.first_layer, each.first_layer + each.num_layers) for each in path.rounds[0][1].layer_ranges]
        layers, kept = [f"model.layers.{layer}" for own in ranges for layer in own], kept_layers(path, ranges)
        # gathered as often as sharded weights on one node
        gathered = {layer: 2 * num_passes - 2 * kept[layer] for layer in layers}
        assert done["FSDP::all_gather"] == {**gathered, "": 1}
        assert done["FSDP::sum_gradients"] == dict.fromkeys([*layers, ""], num_passes)
        assert done["FSDP::hold_part"] == dict.fromkeys(layers, 1)
        assert done["FSDP::sum_nodes"] == dict.fromkeys([*layers, ""], 1)
        num_weights, num_units = sum(map(len, of_layers)), 1 + len(layers)
        assert met == {
            ("gathers", NODE_RANKS): sum(gathered.values()),
            ("gathers", 4): 1,
            ("weights", 4): num_weights,
            ("gradients", NODE_RANKS): num_passes * num_units,
            ("gradients", 4): num_units,
        }
        # a count of each weight goes with the sums
        elements = sum(map(sum, of_layers))
        assert crossed == {"weights": elements, "gradients": elements + sum(outer) + num_weights + len(outer)}


@st.composite
def node_pipelines(draw: st.DrawFn, num_stages: int) -> StepPlan:
    """Random chunks, orders, policies, heads and micro-batches on stages of four ranks, of which nodes run their own chunks."""
    lengths = [draw(st.integers(8, 24)), *draw(st.lists(st.integers(1, 24), max_size=6))]
    num_ranges = draw(st.integers(1, 2)) if num_stages > 1 else 1
    # gradients of heads would come too early under "gpipe" in turns
    schedule = "interleaved" if num_ranges > 1 else draw(st.sampled_from(["1f1b", "elastic", "gpipe"]))
    homes = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    micro_batches: list[Groups] = []
    for home in sorted({*homes}):
        degrees = draw(st.sampled_from([(2, 2), (2, 1, 1), (1, 1, 2), (1, 1, 1, 1), (4,), (3, 1)]))
        dealt: list[list[int]] = [[] for _ in degrees]
        for sequence in (each for each, own in enumerate(homes) if own == home):
            dealt[draw(st.integers(0, len(degrees) - 1))].append(sequence)
        micro_batches.append([(d, draw(random_chunks(own, lengths)) or [[]]) for d, own in zip(degrees, dealt, strict=True)])
    some = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=num_stages, max_size=num_stages).filter(any)
    plan = node_plan(
        micro_batches,
        num_stages,
        schedule,
        2 * num_stages,
        num_ranges,
        lengths,
        output_shares=draw(some) if num_stages > 1 and num_ranges == 1 and schedule != "gpipe" and draw(st.booleans()) else (),
        has_turns=num_stages > 1 and draw(st.integers(0, 2)) == 0,
    )
    layers = st.lists(layer_policies(), max_size=2).map(tuple)
    policy = st.builds(ActivationPolicy, st.just(0), st.just(0), layers, st.sampled_from([0, 1, 5, 64]), st.integers(1, 3))
    count = num_policies(plan)
    return with_policies(plan, draw(st.lists(policy, min_size=count, max_size=count)))


@pytest.mark.daily("2-4", "1-6")
@pytest.mark.parametrize("num_stages,examples", [(2, 4), (1, 6), (2, 40), (1, 30)])
def test_random_plans_match(ranks, num_stages: int, examples: int) -> None:
    """Runs 10 random plans, and 70 wide ones; none may hang."""
    pool = ranks(4 * num_stages)

    @settings(RANDOM_PIPELINES, max_examples=examples)
    @given(node_pipelines(num_stages), st.booleans())
    def matches(plan: StepPlan, tied: bool) -> None:
        check_pipeline(pool, ModelCase("qwen3", num_layers=2 * num_stages, tied=tied), plan)

    matches()


HALVES: dict[str, ModelCase] = {
    "weights": ModelCase(dtype=torch.bfloat16),
    "autocast": ModelCase(dtype=torch.float32, autocast=True),
    "tied autocast": ModelCase(dtype=torch.float32, autocast=True, tied=True),
    "adapters": ModelCase(dtype=torch.float32, autocast=True, lora=LORA),
    "experts": ModelCase("qwen3_moe", dtype=torch.float32, autocast=True, fp32_gradients=False),
}


@pytest.mark.daily("weights", "autocast")
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_as_close_as_sharded(ranks, name: str) -> None:
    """Weights that autocast rounds are gathered in bf16, across nodes and inside."""
    layout, case = "<4>,<2,2>,<1,1,1,1>", HALVES[name]
    rows = random_rows(LAYOUTS[layout][2])
    exact_loss, exact = reference_step(build_model(replace(case, dtype=torch.float64, autocast=False)), rows)
    errors = []
    for parameters in ("sharded", MODE):
        (loss, found), *_ = run_step(ranks(4), case, layout_plan(layout, parameters), rows)
        assert loss == pytest.approx(exact_loss, rel=5e-3)
        assert found.keys() == exact.keys() and {gradient.dtype for gradient in found.values()} == {case.dtype}
        errors.append(max(relative_error(found[key].double(), gradient) for key, gradient in exact.items()))
    assert errors[1] <= min(BF16_BAND, 1.1 * errors[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_ranks": 0}, "node_ranks is 0 with parameters 'gathered_per_node'"),
        ({"parameters": "sharded"}, "node_ranks is 2 with parameters 'sharded'"),
        ({"parameters": "replicated"}, "node_ranks is 2 with parameters 'replicated'"),
        ({"node_ranks": 1}, "node_ranks 1 does not divide the 4 ranks"),
        ({"node_ranks": 3}, "node_ranks 3 does not divide the 4 ranks"),
        ({"node_ranks": 4}, "node_ranks 4 does not divide the 4 ranks"),
        ({"shard_ranks": 2}, "node_ranks 2 does not divide the 2 ranks"),
    ],
    ids=str,
)
def test_nodes_that_are_none_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate_plan(replace(node_plan([APART]), **changes))


def test_groups_of_one_node_need_one_order() -> None:
    """Groups of different nodes need none, unless a group spans these."""
    plain = pipeline_plan(LENGTHS, [[(2, MIXED), (1, LONG), (1, SHORT)]], 2)
    with pytest.raises(PlanError, match="all groups must run passes in the same order"):
        validate_plan(replace(plain, parameters=MODE, node_ranks=2))
    plain = pipeline_plan(LENGTHS, [[(2, LONG), (2, [*MIXED, *SHORT])]], 2)
    validate_plan(replace(plain, parameters=MODE, node_ranks=2))
    plain = pipeline_plan(LENGTHS, [[(3, LONG), (1, [*MIXED, *SHORT])]], 2)
    with pytest.raises(PlanError, match="all groups must run passes in the same order"):
        validate_plan(replace(plain, parameters=MODE, node_ranks=2))


def refusal_on_rank(plan_json: str, rows: Rows) -> tuple[str, float]:
    """Why a plan of node copies does not run without nodes; and the loss of a sharded plan on a model that has nodes."""
    plan = plan_from_json(plan_json)
    plain = validate_plan(replace(plan, parameters="sharded", node_ranks=0))
    chunks = rank_inputs(plan, rows, dist.get_rank())["chunks"]
    executor, _ = stage_executor(CASE, plain)
    with pytest.raises(ValueError) as refused:
        executor.run(plan.for_rank(dist.get_rank()), chunks, 1)
    executor, _ = stage_executor(CASE, plan)
    return str(refused.value), float(executor.run(plain.for_rank(dist.get_rank()), chunks, total_weight(rows)).loss)


def test_models_without_nodes_are_refused_by_name(ranks) -> None:
    plan, rows = node_plan([OTHER], 1, lengths=OTHER_LENGTHS), random_rows(OTHER_LENGTHS)
    expected, _ = reference_step(build_model(CASE), rows)
    for refusal, loss in ranks(4).run(refusal_on_rank, plan_to_json(plan), rows):
        assert "this model was sharded without groups of the ranks of a node; shard it over" in refusal
        assert loss == pytest.approx(expected, rel=TOLERANCE)

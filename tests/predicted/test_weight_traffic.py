"""Ranks send exactly the bytes of weights and gradients that the formula counts, gathered and summed over gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.measures.round_traffic import round_traffic
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import group_pool, mesh, note_case, rank_inputs

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.experts import spread_experts_of
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.orders import joined_stages
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.types import (
    Action,
    Chunk,
    GroupShape,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.weight_traffic import StageWeights, copies_traffic, ends_s
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.pipeline_run import PredictionCache, plan_gathers
from hf_longctx.plan.predict.planning import WeightSeconds, weight_seconds
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.experts import spread_experts, spread_group
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import gathers, sums
from hf_longctx.runtime.parameters.sharded import block_mesh, shard_model


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what this rank sends while the body runs: bytes of gathers, of gradients to sum, and of sums over copies."""
    total: Counter[str] = Counter()
    real_sum, real_gather, real_exchange = dist.all_reduce, gathers.gather_tensors, sums._exchange

    def exchanged(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        # a rank does not send its own row
        total["scatter"] += rows.nbytes // len(rows) * (len(rows) - 1)
        return real_exchange(rows, *args)

    def gathered(whole: list[torch.Tensor], shards: list[torch.Tensor], group: Any) -> None:
        total["gather"] += sum(shard.nbytes for shard in shards) * (group.size() - 1)
        real_gather(whole, shards, group)

    def summed(tensor: torch.Tensor, *args: Any, **others: Any) -> Any:
        num_ranks = dist.get_world_size(others["group"])
        # all ranks together sum the loss; maxima tell which weights have gradients
        is_sum = others.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        if tensor.is_floating_point() and is_sum and num_ranks < dist.get_world_size():
            total["sum"] += 2 * tensor.numel() * tensor.element_size() * (num_ranks - 1) // num_ranks
        return real_sum(tensor, *args, **others)

    with ExitStack() as patches:
        patches.enter_context(patch.object(sums, "_exchange", exchanged))
        patches.enter_context(patch.object(gathers, "gather_tensors", gathered))
        patches.enter_context(patch.object(dist, "all_reduce", summed))
        yield total


def sent_on_rank(case: ModelCase, plan: StepPlan, rows: list[dict[str, list[int]]]) -> dict[str, int]:
    """Bytes that this rank sends in one step, by kind."""
    pool, model = group_pool(), build_model(case)
    note_case(model, case)
    patch_model(model)
    if case.spread:
        spread_experts(spread_experts_of(model), block_mesh(mesh(plan.block_ranks)), torch.device("cpu"))
    shards, node_ranks = mesh(plan.block_ranks, plan.node_ranks), plan.node_ranks
    shard_model(model, model._no_split_modules, shards, case.fp32_gradients, node_ranks=node_ranks)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    has_policies = any(stage.activations for each in plan.micro_batches for group in each.groups for stage in group.stages)
    tier, head = HostTier.on(torch.device("cpu"), 2**24), OutputHead(output_head(model))
    engine = ActivationEngine(layer_modules(model), tier, head, spread_group(model)) if has_policies else None
    with counted() as total:
        executor.run(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"], 10, engine=engine)
    return dict(total)


def stage_weights(case: ModelCase, num_ranks: int) -> StageWeights:
    """Weights of the formula, and the norms that it leaves out."""
    model = build_model(case)
    note_case(model, case)
    spec = model_spec(model)
    if case.spread:
        spec = replace(spec, experts=replace(spec.experts, num_ranks=num_ranks))
    found = StageWeights.of(spec, spec.num_layers, True, True)
    norms = {in_layers: 0 for in_layers in (True, False)}
    for name, parameter in model.named_parameters():
        norms[".layers." in name] += parameter.numel() * (parameter.ndim == 1)
    element, gradient = case.dtype.itemsize, max(4, case.dtype.itemsize)
    return replace(
        found,
        layers=found.layers + norms[True] * element,
        outside=found.outside + norms[False] * element,
        gradients=found.gradients + sum(norms.values()) * gradient,
        own_gradients=found.own_gradients + sum(norms.values()) * element,
    )


def step_bytes(
    case: ModelCase, parameters: Any, num_ranks: int, chunks: Sequence[int] = (1,), turns: int = 1, per_block: int = 2
) -> int:
    """Bytes of the formula in micro-batches of so many chunks each, of which so many layers in all stay gathered at `turns`."""
    weights = stage_weights(case, per_block)
    cluster = ClusterSpec(num_ranks, num_ranks, GENERIC_CPU)
    rounds = [
        round_traffic(weights, cluster, parameters, per_block, count, is_first=not place, turns=0 if place else turns).num_bytes
        for place, count in enumerate(chunks)
    ]
    return int(sum(rounds))


CASES = {
    "fp64": ModelCase(),
    "bf16": ModelCase(dtype=torch.bfloat16),
    "tied": ModelCase(dtype=torch.bfloat16, tied=True),
    "experts": ModelCase("qwen3_moe", dtype=torch.bfloat16),
    "spread experts": ModelCase("qwen3_moe", dtype=torch.bfloat16, spread=True),
    "autocast": ModelCase(dtype=torch.float32, autocast=True),
    "autocast, tied": ModelCase(dtype=torch.float32, autocast=True, tied=True),
    "autocast, experts": ModelCase("qwen3_moe", dtype=torch.float32, autocast=True),
    "autocast, spread experts": ModelCase("qwen3_moe", dtype=torch.float32, autocast=True, spread=True),
}


@pytest.mark.daily("fp64-sharded", "fp64-gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_weights_are_those_of_the_formula(ranks, name: str, parameters: Any) -> None:
    case, lengths = CASES[name], [8, 8, 6, 5]
    if case.spread and parameters != "sharded":
        pytest.skip("spread experts need sharded parameters")
    plan = plan_of([[(1, (0,)), (1, (1,))], [(2, (2, 3))]], lengths, 2, parameters=parameters)
    expected = step_bytes(case, parameters, 2, (1, 1), turns=3)
    for found in ranks(2).run(sent_on_rank, case, plan, random_rows(lengths)):
        assert found["gather"] + found["scatter"] == expected


def test_autocast_halves_gathers_of_all_but_norms_and_embedding() -> None:
    model = build_model(CASES["autocast"])
    whole = StageWeights.of(model_spec(model), 2, True, True)
    note_case(model, CASES["autocast"])
    spec = model_spec(model)
    rounded = StageWeights.of(spec, 2, True, True)
    assert rounded.layers == whole.layers / 2 == 2 * 2 * spec.layer_weights
    # the head in two bytes, the embedding in four
    assert rounded.outside == 6 * spec.vocab_size * spec.hidden_size
    # so are gradients, until they add up
    assert rounded.gradients == whole.gradients == whole.own_gradients
    assert rounded.own_gradients == rounded.layers + rounded.outside


@pytest.mark.daily("0F0 0F1 0F2 0B2 0B1 0B0-gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
@pytest.mark.parametrize("words", ["0F0 0F1 0F2 0B2 0B1 0B0", "0F0 0B0 0F1 0B1 0F2 0B2"])
def test_every_chunk_gathers_again_unless_weights_stay(ranks, words: str, parameters: Any) -> None:
    lengths, chunks = [12, 9, 7], [cut(sequence, [length])[:1] for sequence, length in enumerate([12, 9, 7])]
    plan, case = sliced_plan(lengths, chunks, words, num_ranks=2, parameters=parameters), CASES["bf16"]
    turns = 1 if words.startswith("0F0 0F1") else 5
    expected = step_bytes(case, parameters, 2, (3,), turns)
    for found in ranks(2).run(sent_on_rank, case, plan, random_rows(lengths)):
        assert found["gather"] + found["scatter"] == expected


@pytest.mark.parametrize("name", ["bf16", "spread experts"])
def test_a_replay_gathers_nothing_more(ranks, name: str) -> None:
    case, lengths = CASES[name], [12, 9]
    plan = same_policy(
        plan_of([[(2, (0, 1))]], lengths, 2, parameters="sharded"), replayed(recompute=1.0), replayed(recompute=1.0)
    )
    expected = step_bytes(case, "sharded", 2)
    for found in ranks(2).run(sent_on_rank, case, plan, random_rows(lengths)):
        assert found["gather"] + found["scatter"] == expected


@pytest.mark.wide
@pytest.mark.parametrize("name", ["bf16", "spread experts"])
def test_copies_sum_their_gradients_once(ranks, name: str) -> None:
    case, lengths = CASES[name], [8, 8, 6, 5, 8]
    layout = [[(1, (0,)), (1, (1,)), (2, (2,))], [(2, (3,)), (2, (4,))]]
    plan = replace(plan_of(layout, lengths, 4, parameters="sharded"), shard_ranks=2)
    weights, cluster = stage_weights(case, 2), ClusterSpec(4, 4, GENERIC_CPU)
    expected = step_bytes(case, "sharded", 4, (1, 1), turns=3)
    for found in ranks(4).run(sent_on_rank, case, plan, random_rows(lengths)):
        assert found["gather"] + found["scatter"] == expected
        assert found["sum"] == int(copies_traffic(weights, cluster, 2, 2).num_bytes)


@pytest.mark.daily("bf16")
@pytest.mark.parametrize("name", ["fp64", "bf16", "autocast"])
def test_copies_of_nodes_enter_and_their_sums_leave_once(ranks, name: str) -> None:
    """Four passes gather two layers each inside nodes of two ranks, of which the one at each of three turns stays."""
    case, lengths = CASES[name], [8, 8, 6, 5, 8]
    layout = [[(1, (0,)), (1, (1,)), (2, (2,))], [(2, (3,)), (2, (4,))]]
    plan = validate_plan(replace(plan_of(layout, lengths, 4), parameters="gathered_per_node", node_ranks=2))
    weights, counts = stage_weights(case, 4), len(list(build_model(case).parameters())) * max(4, case.dtype.itemsize)
    # inside a node a rank sends half of a layer to the other; across nodes its half of what the other node lacks
    gathered = 5 / 2 * weights.layers / 2 + 3 / 4 * weights.outside
    across = (1 / 2 - 1 / 4) * (weights.layers + weights.gradients)
    for found in ranks(4).run(sent_on_rank, case, plan, random_rows(lengths)):
        assert found["gather"] == gathered
        assert found["scatter"] == 2 * weights.own_gradients / 2 + across + counts
    # the plan counts as much, but for counts of backwards, small messages and norms
    costs = hand_costs(4, 2, "gathered_per_node")
    costs = replace(costs, model=replace(costs.model, node_ranks=2))
    seconds, rates = weight_seconds(plan, costs), costs.cluster.hardware
    assert seconds.gather_s > across / rates.network_bytes_per_s


def hand_costs(num_ranks: int, ranks_per_node: int, parameters: Any = "sharded", shard_ranks: int = 0) -> CostModel:
    model, cluster = model_spec(build_model(CASES["bf16"])), ClusterSpec(num_ranks, ranks_per_node, GENERIC_CPU)
    shards = shard_ranks or num_ranks
    return CostModel(model, cluster, default_coefficients(model, cluster), parameters=parameters, shard_ranks=shards)


def test_seconds_are_those_of_the_bytes_and_a_step_with_them_lies_between_two_ends() -> None:
    lengths, costs = [8, 8, 6, 5], hand_costs(2, 2)
    plan = plan_of([[(1, (0,)), (1, (1,))], [(2, (2, 3))]], lengths, 2, parameters="sharded")
    model, hardware = costs.model, costs.cluster.hardware
    layers, outside = 2 * model.layer_weights, 2 * model.vocab_size * model.hidden_size
    # in each of two micro-batches bf16 weights of a layer twice and gradients, and once embedding and head; a rank sends half of
    # each. The backward begins with the layer with which the forward ended
    sent = 2 * ((2 - 1 / 2) * layers * 2 / 2 + (layers + outside) * 2 / 2) + outside * 2 / 2
    # one of two layers is gathered twice; gradients of layers are sent in six messages, those of embedding and head in three
    seconds = sent / hardware.link_bytes_per_s + (2 * (2 + 1 + 2 * 6 + 3) + 1) * hardware.message_s
    found, run = weight_seconds(plan, costs), evaluate_plan(plan, costs)
    assert found.gathers_s == pytest.approx((seconds, seconds)) and found.sum_s == 0.0
    least, most = found.step_bounds_s(run.step_s, run.once_s, run.ranks)
    exchange_s = max(rank.exchange_s for rank in run.ranks)
    assert most == pytest.approx(run.step_s + seconds)
    assert least == pytest.approx(max(run.step_s, exchange_s + seconds)) and exchange_s > 0


@pytest.mark.parametrize("link_bytes_per_s", [1e3, 1e5, 1e7, 1e9])
def test_no_step_counts_a_collective_twice(link_bytes_per_s: float) -> None:
    costs = hand_costs(2, 2)
    hardware = replace(costs.cluster.hardware, link_bytes_per_s=link_bytes_per_s)
    cluster = replace(costs.cluster, hardware=hardware)
    costs = replace(costs, cluster=cluster, coefficients=default_coefficients(costs.model, cluster))
    for layout in ([[(2, (0, 1, 2, 3))]], [[(1, (0,)), (1, (1,))], [(2, (2, 3))]]):
        plan = plan_of(layout, [8, 8, 6, 5], 2, parameters="sharded")
        found, alone = evaluate_plan(plan, costs).gathers_s, weight_seconds(plan, costs)
        assert found <= alone.gather_s + alone.copies_s + 1e-12
        if link_bytes_per_s == 1e3:
            # computing hides next to nothing
            assert found == pytest.approx(alone.gather_s + alone.copies_s, rel=1e-2)


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_step", "gathered_per_round"])
@pytest.mark.parametrize("has_turns", [False, True])
def test_a_step_on_stages_counts_what_passes_hide_from_its_ends(parameters: Any, has_turns: bool) -> None:
    costs = hand_costs(4, 4, parameters, 2)
    has_turns &= parameters != "gathered_per_round"
    layouts = [[(2, [[span] for span in cut(0, [5, 3])])], [(2, [[span] for span in cut(1, [4, 4])])]]
    plan = pipeline_plan([8, 8], layouts, 2, num_layers=2, parameters=parameters, has_turns=has_turns)
    passes, counted = evaluate_plan(plan, costs), evaluate_plan(plan, costs, known=PredictionCache(counts_gathers=True))
    assert passes.gathers_s == 0
    stages = [plan_gathers(plan, costs, 1, stage == 0, stage == 1) for stage in range(2)]
    # by hand: embedding, head and layers that stay are gathered before anything computes; hidden ends count at most whole
    least, most = (sum(each.once.links_s for each in stages), [ends_s([each]) for each in stages])
    assert 0 < least <= counted.gathers_s <= sum(first for first, _ in most) + max(last for _, last in most) + 1e-12
    # the stage that works longest is always busy
    for stage, each in enumerate(stages):
        alone_s = 2 * each.least_s(2) + sum(ends_s([each]))
        assert counted.step_s + counted.gathers_s >= passes.ranks[2 * stage].busy_s + alone_s - 1e-12


@pytest.mark.parametrize("num_ranges", [1, 2])
def test_turns_count_the_gathers_of_the_same_passes_in_one_micro_batch(num_ranges: int) -> None:
    costs, lengths = hand_costs(4, 4, "sharded", 2), [8] * 8
    chunks = [[(i, 0, 8)] for i in range(8)]
    how = {"num_layers": 2 * num_ranges, "num_ranges": num_ranges, "parameters": "sharded"}
    schedule = "interleaved" if num_ranges > 1 else "1f1b"
    together = pipeline_plan(lengths, [[(2, chunks)]], 2, schedule, **how)
    turned = pipeline_plan(lengths, [[(2, chunks[:4])], [(2, chunks[4:])]], 2, schedule, has_turns=True, **how)
    order = joined_stages(turned.micro_batches, turned.turns)
    assert [[a.kind for a in stage.actions] for stage in order] == [
        [a.kind for a in stage.actions] for stage in together.micro_batches[0].groups[0].stages
    ]
    one, two = (evaluate_plan(plan, costs, known=PredictionCache(counts_gathers=True)) for plan in (together, turned))
    assert two.step_s + two.gathers_s == pytest.approx(one.step_s + one.gathers_s)
    alone = [weight_seconds(plan, costs).gather_s for plan in (together, turned)]
    assert alone[0] == pytest.approx(alone[1])


def test_slices_gather_more_than_passes_that_take_turns() -> None:
    costs, lengths = hand_costs(2, 2), [24]
    slices, turns = (
        replace(plan_of([[(2, (0,))]], lengths, 2, parameters="sharded"), micro_batches=(MicroBatch((group,)),))
        for group in (ordered("0F0 0F1 0F2 0B2 0B1 0B0"), ordered("0F0 0B0 0F1 0B1 0F2 0B2"))
    )
    layer_s = plan_gathers(slices, costs, costs.model.num_layers, True, True).of_pass(False, False).gather_s
    assert weight_seconds(slices, costs).gather_s == pytest.approx(weight_seconds(turns, costs).gather_s + 4 * layer_s)


def ordered(words: str) -> SequenceGroup:
    """A sequence of 24 tokens in three slices on two ranks, whose passes run in this order."""
    chunks = tuple(Chunk(place, (Span(0, 8 * place, 8 * place + 8),)) for place in range(3))
    group = SequenceGroup.of(GroupShape(2), range(2), chunks)
    stage = StagePlan(0, (LayerRange(0, 2),), tuple(map(Action.parse, words.split())))
    return replace(group, stages=(stage,))


def test_shards_on_the_host_are_copied_before_gathers_and_leave_once() -> None:
    costs = hand_costs(2, 2)
    plan = plan_of([[(1, (0,)), (1, (1,))], [(2, (2, 3))]], [8, 8, 6, 5], 2, parameters="sharded")
    away = replace(costs, model=replace(costs.model, layers_on_host=True))
    found, plain = weight_seconds(plan, away), weight_seconds(plan, costs)
    # by hand: half of two bf16 layers, for a forward and a backward of two micro-batches, the last layer once for both
    copy_s = 2 * costs.model.layer_weights * 2 / 2 / costs.cluster.hardware.copy_bytes_per_s
    assert found.gather_s - plain.gather_s == pytest.approx(2 * 1.5 * copy_s) and found.away_s == pytest.approx(2 * copy_s)
    run = evaluate_plan(plan, costs)
    ends = [each.step_bounds_s(run.step_s, run.once_s, run.ranks) for each in (found, plain)]
    assert ends[0][1] - ends[1][1] == pytest.approx(5 * copy_s) and ends[0][0] - ends[1][0] >= 2 * copy_s
    # weights that are whole, or gathered once, have nothing there
    whole = replace(hand_costs(2, 2, "replicated", 1), model=away.model)
    assert weight_seconds(replace(plan, parameters="replicated"), whole).away_s == 0


def test_only_hops_between_nodes_use_the_network() -> None:
    weights = StageWeights(1, 800, 0, 1600, 1600, 800)
    one_node, two = (round_traffic(weights, ClusterSpec(8, near, GENERIC_CPU), "gathered_per_round", 8, 1) for near in (8, 4))
    assert (one_node.link_bytes, one_node.network_bytes) == (2400 * 7 / 8, 0)
    # two of the eight hops of a ring leave a node; gradients are added up inside a node, and half of a quarter leaves it; an
    # eighth stays in the node, a quarter of it on its rank
    expected = 800 * 7 / 8 * 3 / 4 + (1600 + 1600 / 8) * 3 / 4, 800 * 7 / 8 / 4 + 1600 / 4 / 2
    assert (two.link_bytes, two.network_bytes) == pytest.approx(expected)
    # copies of shards that fill a node lie on different nodes
    copies = copies_traffic(weights, ClusterSpec(8, 4, GENERIC_CPU), 4, 2)
    assert (copies.link_bytes, copies.network_bytes) == pytest.approx((0, 2 * 2400 / 4 / 2))


def test_measured_seconds_contain_the_gathers_that_were_measured() -> None:
    costs = hand_costs(2, 2)
    measured = replace(costs, coefficients=replace(costs.coefficients, step_s=1e-3, source="this run"))
    plan = plan_of([[(2, (0,))]], [9], 2, parameters="sharded")
    run = evaluate_plan(plan, measured)
    assert weight_seconds(plan, measured) == WeightSeconds()
    assert WeightSeconds().step_bounds_s(run.step_s, run.once_s, run.ranks) == (run.step_s, run.step_s)


def test_replicated_weights_are_summed_and_never_gathered() -> None:
    costs = hand_costs(2, 2, "replicated", 1)
    found, model = weight_seconds(plan_of([[(2, (0,))]], [9], 2), costs), costs.model
    assert found.gather_s == 0.0
    sent = 4 * model.num_parameters
    assert found.sum_s == pytest.approx(sent / costs.cluster.hardware.link_bytes_per_s + 2 * costs.cluster.hardware.message_s)

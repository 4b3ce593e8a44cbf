"""Ranks send exactly the bytes that the formula counts, for every method, forward and backward; the planner's mean agrees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.measures.sent_bytes import sent_bytes
from helpers.models.reference import random_rows
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.rank_steps import group_pool, mesh, rank_inputs
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.experts import spread_experts_of
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.sharding import head_shares
from hf_longctx.plan.core.types import Chunk, GroupShape, Span, StepPlan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.cost.traffic import HeadCounts, mean_traffic
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.experts import spread_experts
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import sums
from hf_longctx.runtime.parameters.sharded import shard_model


def spec_of(case: ModelCase) -> ModelSpec:
    if case.family != "llama":
        return model_spec(build_model(case))
    heads = (8 * case.num_heads, 48, case.num_heads, case.num_kv_heads, 8)
    return ModelSpec(2, *heads, VOCAB_SIZE, 512, bytes_per_element=case.dtype.itemsize, bytes_sent_per_element=2 * case.autocast)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes that this rank sends to others for tokens while the body runs, in a list of one number."""
    total = [0]
    all_to_all, batch, sum_blocks = dist.all_to_all_single, dist.batch_isend_irecv, sums.sum_blocks

    def exchange(received: Any, sent: torch.Tensor, receive_sizes: Any, send_sizes: list[int], group: Any) -> Any:
        own = send_sizes[dist.get_rank(group)]
        total[0] += (sum(send_sizes) - own) * sent.element_size()
        return all_to_all(received, sent, receive_sizes, send_sizes, group=group)

    def pass_on(operations: list[dist.P2POp]) -> Any:
        total[0] += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return batch(operations)

    def without_gradients(*args: Any) -> torch.Tensor:
        before = total[0]
        found = sum_blocks(*args)
        total[0] = before
        return found

    with (
        patch.object(sums, "sum_blocks", without_gradients),
        patch.object(dist, "all_to_all_single", exchange),
        patch.object(dist, "batch_isend_irecv", pass_on),
    ):
        yield total


def sent_on_rank(case: ModelCase, plan: StepPlan, rows: list[dict[str, list[int]]]) -> tuple[int, int]:
    """Bytes that this rank sends in a forward alone, and in a whole step."""
    pool, model = group_pool(), build_model(case)
    patch_model(model)
    return sent_by(model, pool, plan, rows)


def sent_by(model: Any, pool: Any, plan: StepPlan, rows: list[dict[str, list[int]]]) -> tuple[int, int]:
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    chunks, rank_plan = rank_inputs(plan, rows, pool.rank)["chunks"], plan.for_rank(pool.rank)
    with counted_bytes() as forward:
        executor.evaluate(rank_plan, chunks)
    with counted_bytes() as both:
        executor.run(rank_plan, chunks, 10)
    return forward[0], both[0]


# half precision too, where gradients travel in fp32
PRECISIONS = {"fp64": (torch.float64, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}


@pytest.mark.daily("ulysses-6-1-fp64", "ulysses-5-5-fp64")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 2), (6, 1), (6, 3), (5, 5)])
@pytest.mark.parametrize("ulysses", [4, 2, 1], ids=["ulysses", "hybrid", "ring"])
def test_bytes_sent_are_those_of_the_formula(ranks, ulysses: int, num_heads: int, num_kv_heads: int, precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    check_sent(ranks, ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, autocast=autocast), ulysses)


@pytest.mark.daily("ulysses")
@pytest.mark.parametrize("ulysses", [4, 2, 1], ids=["ulysses", "hybrid", "ring"])
def test_values_of_another_size_are_counted(ranks, ulysses: int) -> None:
    check_sent(ranks, ModelCase("deepseek_v3", num_heads=6, dtype=torch.bfloat16), ulysses)


# three layers, two of them with a window that is shorter than a piece, as long as several pieces, longer than all documents
# but the longest, or longer than all
@pytest.mark.daily("ring-1")
@pytest.mark.parametrize("window", [1, 3, 16, 36, 37])
@pytest.mark.parametrize("ulysses", [2, 1], ids=["hybrid", "ring"])
def test_layers_with_windows_send_what_is_seen(ranks, ulysses: int, window: int) -> None:
    check_sent(ranks, ModelCase("qwen3_window", dtype=torch.bfloat16, num_layers=3, window=window), ulysses)


def check_sent(ranks: Any, case: ModelCase, ulysses: int) -> None:
    """Asserts the formula's bytes for every rank of a group of four."""
    lengths = [37, 14, 3]
    plan = plan_of([[(4, (0, 1, 2))]], lengths, 4, ulysses)
    (group,) = plan.micro_batches[0].groups
    expected = sent_bytes(spec_of(case), GroupShape(4, ulysses), group.chunks[0])
    found = ranks(4).run(sent_on_rank, case, plan, random_rows(lengths))
    assert found == [(forward, forward + backward) for forward, backward in expected]


SLICED = [40, 9, 5]
CHUNKS = [[(0, 0, 15)], [(0, 15, 16)], [(0, 16, 40), (1, 0, 9)], [(2, 0, 5)]]


def sliced_on_rank(case: ModelCase, plan: StepPlan, rows: list[dict[str, list[int]]]) -> tuple[int, int, int, int]:
    """Bytes that this rank sends in forwards alone, and in a whole step; bytes of its K/V book, and those that are predicted."""
    pool, model = group_pool(), build_model(case)
    patch_model(model)
    sent = sent_by(model, pool, plan, rows)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    book = executor.run(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"], 10).memory.kv_book
    ((group, stage),) = plan.for_rank(pool.rank).rounds
    counted = ByteModel(spec_of(case)).moments(group, stage, group.positions.index(pool.position)).most.book
    return *sent, book, counted


# keys of all earlier slices, and of those in a window; blocks of several ranks hold some of the heads
@pytest.mark.daily("ring-all")
@pytest.mark.parametrize("case", [ModelCase(), ModelCase("qwen3_window", window=11)], ids=["all", "window"])
@pytest.mark.parametrize("num_ranks,ulysses", [(4, 2), (3, 1)], ids=["hybrid", "ring"])
def test_slices_send_and_hold_what_is_counted(ranks, num_ranks: int, ulysses: int, case: ModelCase) -> None:
    plan = sliced_plan(SLICED, CHUNKS, num_ranks=num_ranks, ulysses=ulysses)
    (group,) = plan.micro_batches[0].groups
    counted = [sent_bytes(spec_of(case), group.shape, chunk, group.chunks) for chunk in group.chunks]
    expected = [tuple(map(sum, zip(*of_rank, strict=True))) for of_rank in zip(*counted, strict=True)]
    found = ranks(num_ranks).run(sliced_on_rank, case, plan, random_rows(SLICED))
    assert [sent for *sent, _, _ in found] == [[forward, forward + backward] for forward, backward in expected]
    assert all(held == predicted > 0 for *_, held, predicted in found)


def sent_to_experts(case: ModelCase, plan: StepPlan, rows: list[dict[str, list[int]]]) -> tuple[int, int]:
    """Bytes that this rank sends in a forward alone, and in a whole step, if routers choose all experts equally often."""
    pool, model = group_pool(), build_model(case)
    patch_model(model)
    for router in (module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"):
        router.forward = partial(choose_evenly, router.forward)
    spread_experts(spread_experts_of(model), mesh(2), torch.device("cpu"))
    shard_model(model, model._no_split_modules, mesh(2))
    return sent_by(model, pool, plan, rows)


def choose_evenly(route: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits, scores, indices = route(hidden)
    return logits, scores, torch.arange(indices.numel()).view_as(indices) % logits.shape[-1]


@pytest.mark.daily("a group")
@pytest.mark.parametrize("degree", [1, 2], ids=["ranks alone", "a group"])
def test_tokens_that_travel_to_experts_are_counted(ranks, degree: int) -> None:
    case, lengths = ModelCase("qwen3_moe_dense", dtype=torch.bfloat16), [8, 8]
    layout = [[(1, (0,)), (1, (1,))]] if degree == 1 else [[(2, (0, 1))]]
    plan, spec = plan_of(layout, lengths, 2, parameters="sharded"), spec_of(case)
    spec, cluster = replace(spec, experts=replace(spec.experts, num_ranks=2)), ClusterSpec(2, 2, GENERIC_CPU)
    shape = plan.micro_batches[0].groups[0].shape
    forward, backward = (int(mean_traffic(spec, cluster, shape, 8 * degree, way).num_bytes) for way in (False, True))
    assert ranks(2).run(sent_to_experts, case, plan, random_rows(lengths)) == [(forward, forward + backward)] * 2


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_heads_are_counted_as_the_runtime_deals_them_out(num_kv_heads: int, per_kv: int, num_ranks: int) -> None:
    num_heads = num_kv_heads * per_kv
    if num_ranks <= num_heads:
        shares = head_shares(num_heads, num_kv_heads, num_ranks)
        expected = HeadCounts(tuple(s.num_q for s in shares), tuple(s.num_kv for s in shares))
        assert HeadCounts.of(num_heads, num_kv_heads, num_ranks) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [GroupShape(4, 4), GroupShape(4, 2), GroupShape(4), GroupShape(3), GroupShape(8, 2)], ids=str)
@pytest.mark.parametrize("num_heads,num_kv_heads", [(8, 2), (8, 8), (24, 6)])
def test_the_planners_mean_is_the_exact_count_where_everything_is_even(
    shape: GroupShape, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    model = spec_of(ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype))
    check_mean(model, shape)


@pytest.mark.parametrize("shape", [GroupShape(4, 4), GroupShape(4, 2), GroupShape(4)], ids=str)
def test_the_mean_of_values_of_another_size_is_exact_too(shape: GroupShape) -> None:
    check_mean(spec_of(ModelCase("deepseek_v3", num_heads=8)), shape)


def check_mean(model: ModelSpec, shape: GroupShape) -> None:
    """Asserts that the planner's mean is the exact count of an even chunk."""
    num_tokens = 2 * shape.num_blocks * shape.degree
    exact = sent_bytes(model, shape, Chunk(0, (Span(0, 0, num_tokens),)))
    cluster = ClusterSpec(8, 8, GENERIC_CPU)
    for is_backward in (False, True):
        mean = mean_traffic(model, cluster, shape, num_tokens, is_backward)
        # ranks differ, since the last piece of the document stays with one block
        assert sum(one[is_backward] for one in exact) / shape.degree == pytest.approx(mean.num_bytes)
        assert mean.network_bytes == 0


# windows shorter than a piece, as long as several, as all but the whole document, and longer; a layer without a window beside
@pytest.mark.parametrize("window", [1, 5, 16, 40, 63, 64, 200])
@pytest.mark.parametrize("shape", [GroupShape(4, 2), GroupShape(4), GroupShape(3), GroupShape(8)], ids=str)
def test_bytes_that_windows_save_are_subtracted(shape: GroupShape, window: int) -> None:
    model = replace(spec_of(ModelCase(num_heads=8, num_kv_heads=4)), num_layers=3, windows=(window, None, window))
    num_tokens = 8 * shape.num_blocks
    exact = sent_bytes(model, shape, Chunk(0, (Span(0, 0, num_tokens),)))
    for is_backward in (False, True):
        sent = counted_mean(model, shape, Chunk(0, (Span(0, 0, num_tokens),)), is_backward)
        assert sent == pytest.approx(sum(one[is_backward] for one in exact) / shape.degree)


def counted_mean(model: ModelSpec, shape: GroupShape, chunk: Chunk, is_backward: bool) -> float:
    """Bytes that a rank sends in a pass, as the cost model counts them."""
    cluster = ClusterSpec(8, 8, GENERIC_CPU)
    # a second per byte, and no tiles that could hide one
    passes = PassCoefficients(0.0, 0.0, 0.0, link_byte_s=1.0)
    costs = CostModel(model, cluster, CostCoefficients(passes, passes, 0.0, "by hand"))
    mean = mean_traffic(model, cluster, shape, chunk.num_tokens, is_backward).num_bytes
    return mean - costs.chunk_hidden_s(chunk, shape, is_backward)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 64, 200, 1000])
@pytest.mark.parametrize("shape", [GroupShape(4, 2), GroupShape(4), GroupShape(3), GroupShape(8)], ids=str)
def test_bytes_of_earlier_slices_are_added(shape: GroupShape, window: int | None) -> None:
    model = replace(spec_of(ModelCase(num_heads=8, num_kv_heads=4)), num_layers=3, windows=(window, None, window))
    size = 16 * shape.num_blocks
    chunks = tuple(Chunk(index, (Span(0, index * size, (index + 1) * size),)) for index in range(4))
    for chunk, is_backward in itertools.product(chunks[1:], (False, True)):
        exact = sum(one[is_backward] for one in sent_bytes(model, shape, chunk, chunks)) / shape.degree
        # blocks do not have equally many of the earlier tokens that a window shows
        assert counted_mean(model, shape, chunk, is_backward) == pytest.approx(exact, rel=1e-9 if window is None else 0.05)

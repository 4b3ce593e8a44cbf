"""Measuring: a grid that tells tokens from token pairs and holds some sizes out, on ranks that never wait for each other."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase, build_model
from helpers.ranks.rank_steps import group_pool

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.model.attention_pairs import FULL
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.measure import (
    ChunkBench,
    Probe,
    Timing,
    _longest_timed,
    copy_rate,
    exchange_rates,
    neighbour_rate,
    probe_grid,
    ring_rates,
    target_seconds,
)
from hf_longctx.runtime.process_groups import GroupPool

SHAPES = (GroupShape(2, 2), GroupShape(2), GroupShape(4, 4), GroupShape(4, 2), GroupShape(4))
CPU = torch.device("cpu")


@pytest.mark.parametrize("max_tokens,max_length", [(16, 16), (64, 4096), (512, 512), (4096, 1000), (1 << 20, 1 << 17)])
def test_no_chunk_is_larger_than_a_group_may_hold(max_tokens: int, max_length: int) -> None:
    grid = probe_grid(max_tokens, max_length, SHAPES)
    assert len(set(grid)) == len(grid)
    assert grid[0].shape == GroupShape(1)
    for probe in grid:
        assert sum(probe.lengths) <= max_tokens * probe.shape.degree
        assert 0 < min(probe.lengths) <= max(probe.lengths) <= max_length


def test_every_shape_has_long_documents_packs_and_sizes_held_out() -> None:
    grid = probe_grid(512, 4096, SHAPES)
    for shape in (GroupShape(1), *SHAPES):
        fitted = [probe for probe in grid if probe.shape == shape and not probe.is_held_out]
        held_out = [probe for probe in grid if probe.shape == shape and probe.is_held_out]
        # pairs per token range from those of one long document to those of short ones, at several sizes
        density = [FULL.of_chunk(probe.chunk) / probe.chunk.num_tokens for probe in fitted]
        assert max(density) > 8 * min(density)
        sizes = {probe.chunk.num_tokens for probe in fitted}
        assert len(sizes) >= 3
        # a held-out size is never fitted, but lies between sizes that are
        for probe in held_out:
            assert probe.chunk.num_tokens not in sizes and min(sizes) < probe.chunk.num_tokens < max(sizes)
        assert len(held_out) >= 2


def test_the_largest_chunk_is_chosen_so_that_all_fit_into_the_time() -> None:
    grid = probe_grid(512, 4096, (GroupShape(2, 2), GroupShape(2)))
    budget_s = 30.0
    target_s = target_seconds(len(grid), budget_s, num_repeats=8)
    # under the most optimistic law, time proportional to tokens: eight runs, and a first one, of every chunk
    seconds = sum(sum(probe.lengths) / probe.shape.degree / 512 * target_s for probe in grid)
    assert 0.5 * budget_s < 9 * seconds <= 1.2 * budget_s


def test_fewer_repeats_leave_time_for_longer_chunks() -> None:
    pool = GroupPool((1,), timeout_s=1.0)
    assert tiny_bench(pool, 1.0).num_repeats == 8 and tiny_bench(pool, 1.0, repeats=2).num_repeats == 2
    assert target_seconds(30, 60.0, num_repeats=2) == pytest.approx(3 * target_seconds(30, 60.0, num_repeats=8))


@pytest.mark.parametrize("bytes_per_s,expected", [(1e5, 2**18), (4e6, 2_000_000), (1e12, 8 * 2**20)])
def test_slow_links_are_timed_with_fewer_bytes(bytes_per_s: float, expected: int) -> None:
    timed: list[int] = []
    num_bytes, seconds = _longest_timed(lambda size: timed.append(size) or size / bytes_per_s)
    assert num_bytes == pytest.approx(expected, rel=1e-5) and num_bytes / seconds == pytest.approx(bytes_per_s)
    # nothing is timed that takes longer than half a second, but the first bytes, which nobody knows yet
    assert all(size == 2**18 or size <= 0.5 * bytes_per_s for size in timed)


def tiny_bench(pool: GroupPool, seconds: float, repeats: int = 0) -> ChunkBench:
    model = build_model(ModelCase(dtype=torch.float32))
    patch_model(model)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, CPU)
    return ChunkBench(executor, 2, VOCAB_SIZE, time.monotonic() + seconds, repeats)


def measured_on_rank(seconds: float) -> tuple[int, tuple[Timing, ...], float]:
    pool = group_pool()
    # the pools of tests have no control group; any CPU group will do
    pool.control = pool.everyone
    # rank 1's clock is far ahead, which must not matter: rank 0 decides
    bench = tiny_bench(pool, seconds if pool.rank == 0 else -1e6)
    tokens = bench.largest_tokens(128, 1e3)
    timings = bench.measure(probe_grid(64, 512, (GroupShape(2, 2), GroupShape(2))))
    return tokens, timings, bench.reduction_s()


@pytest.mark.wide
def test_two_ranks_measure_every_chunk_and_agree(ranks) -> None:
    first, second = ranks(2).run(measured_on_rank, 2.0)
    assert first == second
    tokens, timings, reduction_s = first
    assert tokens == 128 and 0 < reduction_s < 10
    assert tuple(timing.probe for timing in timings) == probe_grid(64, 512, (GroupShape(2, 2), GroupShape(2)))
    assert all(0 < timing.forward_s < 10 and 0 < timing.backward_s < 10 for timing in timings)
    # all have about equally many runs, or more if they are cheap
    assert min(timing.num_repeats for timing in timings) >= 1


def test_time_that_is_up_already_still_gives_one_run_of_everything() -> None:
    bench = tiny_bench(GroupPool((1,), timeout_s=1.0), -1.0)
    assert bench.largest_tokens(4096, 1e3) == 16
    (timing,) = bench.measure([Probe((16,))])
    assert timing.num_repeats == 1 and timing.forward_s > 0


def rates_on_rank() -> list[float]:
    pool = group_pool()
    pool.control = pool.everyone
    # groups of 2 leave the third rank out; it waits for nobody
    pairs, everyone = exchange_rates(pool, (2, 3), CPU)
    assert (pairs.num_ranks, everyone.num_ranks) == (2, 3)
    return [pairs.bytes_per_s, everyone.bytes_per_s, everyone.message_s, neighbour_rate(pool, CPU), copy_rate(pool, CPU)]


def ring_rates_on_rank(counts: tuple[int, ...]) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
    pool = group_pool()
    pool.control = pool.everyone
    return ring_rates(pool, counts, CPU)


@pytest.mark.wide
def test_gathers_and_reduce_scatters_are_measured_for_every_number_of_ranks(ranks) -> None:
    first, *others = ranks(3).run(ring_rates_on_rank, (2, 3))
    assert all(other == first for other in others)
    for rates in first:
        assert [count for count, _ in rates] == [2, 3]
        assert all(1e3 < rate < 1e12 for _, rate in rates)


@pytest.mark.wide
def test_rates_are_positive_and_the_same_on_all_ranks_even_where_groups_leave_one_out(ranks) -> None:
    first, *others = ranks(3).run(rates_on_rank)
    assert all(other == first for other in others)
    assert all(1e-7 < value < 1e12 for value in first)


def test_one_rank_measures_alone_and_stops_growing_at_the_limit() -> None:
    bench = tiny_bench(GroupPool((1,), timeout_s=1.0), 30.0)
    assert bench.largest_tokens(100, 1e3) == 64
    # no machine is this fast
    assert bench.largest_tokens(4096, 1e-9) == 16
    assert copy_rate(bench.pool, CPU) > 0


def test_ranks_that_fill_no_group_run_a_dummy() -> None:
    bench = tiny_bench(GroupPool((1,), timeout_s=1.0), 30.0)
    bench.pool.num_ranks, bench.pool.rank = 3, 2
    group, inputs = bench._prepare(Probe((40, 8), GroupShape(2, 2)))
    assert (group.positions, group.method, group.num_tokens) == ((2,), "local", 0)
    assert inputs.input_ids.shape == (1, 1)
    bench.pool.rank = 1
    group, inputs = bench._prepare(Probe((40, 9), GroupShape(2, 2)))
    assert (group.positions, group.method) == ((0, 1), "ulysses")
    # the second shard of 49 tokens: 15 of the first document and all of the other
    assert inputs.position_ids.tolist() == [[*range(25, 40), *range(9)]]

"""Heads that are exchanged in parts beside attention: losses, gradients and what is kept are those of one plain process.

Pools of stages exchange in parts in all tests; here groups of one stage do.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.policies import offloading, policies_for, replayed, same_policy
from helpers.plans.sliced_plans import few, random_slicings, sliced_plan
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import group_pool, rank_inputs, step_on_rank
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.attention import exchanges, sequence_parallel
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model

# slices of a long sequence, packed with whole ones
SLICED = [[(0, 0, 12)], [(0, 12, 23)], [(0, 23, 30), (1, 0, 7), (2, 0, 5)]]
# per rank of two: parts with a KV head each; two parts that share one; four parts, of which two share one
HEADS = {"own keys": (4, 4), "shared keys": (4, 2), "both": (8, 4)}


def sent_on_rank(case: ModelCase, plan_json: str, rows: Any) -> list[int]:
    """Bytes that this rank sends in exchanges of a step with heads at once, and with heads in parts."""
    found, exchange = [0, 0], dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, receives: list[int], sends: list[int], **how: Any) -> Any:
        here = dist.get_group_rank(how["group"], dist.get_rank())
        found[-1] += (sum(sends) - sends[here]) * sent.element_size()
        return exchange(received, sent, receives, sends, **how)

    with patch.object(dist, "all_to_all_single", counted):
        step_on_rank(case, plan_json, rows)
        found.reverse()
        parted_step_on_rank(case, plan_json, rows)
    return found[::-1]


def parted_step_on_rank(
    case: ModelCase, plan_json: str, rows: Any, bug: str = "", part_bytes: int = 1
) -> tuple[float, dict[str, Tensor], set[int]]:
    """Runs `step_on_rank` with heads in parts; also returns the numbers of parts in which attention ran."""
    pool, in_parts, counts = group_pool(), sequence_parallel._in_parts, set()

    def counted(*arguments: Any) -> Tensor:
        counts.add(arguments[3].count)
        return in_parts(*arguments)

    with pool.small_parts(part_bytes), patch.object(sequence_parallel, "_in_parts", counted), BUGS[bug]():
        return *step_on_rank(case, plan_json, rows), counts


def check(ranks: Any, case: ModelCase, plan: StepPlan, bug: str = "", part_bytes: int = 1) -> set[int]:
    """Asserts the loss and gradients of one plain process; returns the numbers of parts."""
    rows = random_rows(list(plan.lengths))
    expected = reference_step(build_model(case), rows, case.loss)
    found = ranks(plan.num_ranks).run(parted_step_on_rank, case, plan_to_json(plan), rows, bug, part_bytes)
    for loss, gradients, counts in found:
        assert counts == found[0][2] != set()
        assert worst_error((loss, gradients), expected) <= TOLERANCE
    return found[0][2]


@pytest.mark.daily("both-sharded")
@pytest.mark.parametrize("parameters", ["replicated", "sharded", "gathered_per_round"])
@pytest.mark.parametrize("heads", HEADS)
def test_slices_and_packs_under_policies_match(ranks, heads: str, parameters: Any) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    plan = sliced_plan([30, 7, 5], SLICED, num_ranks=2, parameters=parameters)
    plan = same_policy(plan, replayed(0.5, 0.25, 0.5, 0.5), offloading())
    check(ranks, ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads, promoted=True), plan)


@pytest.mark.parametrize("heads", HEADS)
def test_parts_send_the_bytes_that_all_heads_take(ranks, heads: str) -> None:
    case = ModelCase(num_heads=HEADS[heads][0], num_kv_heads=HEADS[heads][1])
    plan = same_policy(sliced_plan([30, 7, 5], SLICED, num_ranks=2), replayed(0.5))
    for whole, in_parts in ranks(2).run(sent_on_rank, case, plan_to_json(plan), random_rows([30, 7, 5])):
        assert whole == in_parts > 0


@pytest.mark.wide
@few(10)
@given(slicing=random_slicings(), heads=st.sampled_from(sorted(HEADS)), data=st.data())
def test_any_slices_and_policies_match(ranks, slicing: Any, heads: str, data: st.DataObject) -> None:
    lengths, chunks, words = slicing
    case = ModelCase(num_heads=HEADS[heads][0], num_kv_heads=HEADS[heads][1], promoted=True)
    check(ranks, case, data.draw(policies_for(sliced_plan(lengths, chunks, words, num_ranks=2))))


def test_slices_of_any_size_have_equal_parts(ranks) -> None:
    case = ModelCase(num_heads=8, num_kv_heads=4)
    plan = sliced_plan([30], [[(0, 0, 18)], [(0, 18, 26)], [(0, 26, 30)]], num_ranks=2)
    token_bytes = 2 * (8 + 4) * build_model(case).config.head_dim * case.dtype.itemsize
    # alone, the slices would have 4, 2 and 1 parts; 5 tokens of a rank on average have 2
    assert [min(4, tokens * token_bytes // (2 * token_bytes)) for tokens in (9, 4, 2, 5)] == [4, 2, 1, 2]
    assert check(ranks, case, plan, part_bytes=2 * token_bytes) == {2}
    assert check(ranks, case, plan, part_bytes=token_bytes) == {4}


def scores_on_rank(case: ModelCase, plan_json: str, rows: Any, part_bytes: int) -> float:
    """Loss of forwards alone, whose K/V book drops what no later token sees."""
    pool, plan = group_pool(), plan_from_json(plan_json)
    patch_model(model := build_model(case))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    with pool.small_parts(part_bytes):
        return float(executor.evaluate(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]))


@pytest.mark.parametrize("heads", ["own keys", "both"])
def test_scores_of_slices_under_windows_match(ranks, heads: str) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    case = ModelCase("mistral", num_heads=num_heads, num_kv_heads=num_kv_heads, window=6)
    plan, rows = sliced_plan([30, 7], [[(0, 0, 18)], [(0, 18, 26)], [(0, 26, 30), (1, 0, 7)]], num_ranks=2), random_rows([30, 7])
    whole, *found = (ranks(2).run(scores_on_rank, case, plan_to_json(plan), rows, part_bytes) for part_bytes in (10**9, 1500, 1))
    assert all(each == pytest.approx(whole, rel=TOLERANCE) for each in found)


@pytest.mark.daily("gpt_oss", "gemma3")
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3", "qwen3"])
def test_sinks_windows_and_softcaps_match(ranks, family: str) -> None:
    plan = sliced_plan([30, 7, 5], SLICED, num_ranks=2)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    case = ModelCase(family, num_heads=8, num_kv_heads=4, promoted=True, attention=attention)
    check(ranks, case, same_policy(plan, replayed(0.5)))


def test_groups_of_two_and_of_four_match(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    check(ranks, ModelCase(num_heads=8, num_kv_heads=4), plan_of(layout, lengths, num_ranks))


# planted bugs that the checks must notice
def _swapped_parts() -> Any:
    """Parts of the output arrive in another order."""
    original = exchanges._AllArrived.forward

    def forward(ctx: Any, exchange: Any, *parts: Tensor) -> Tensor:
        found = original(ctx, exchange, *parts)
        return torch.cat(list(reversed(found.split(len(found) // len(parts)))))

    return patch.object(exchanges._AllArrived, "forward", staticmethod(forward))


def _lost_front() -> Any:
    """Later parts leave no gradients for keys of earlier slices."""
    original = sequence_parallel.SharedKeys.open

    def opened(shared: Any, slice_: Any, is_first: bool, opens: Any) -> Any:
        read, sums = original(shared, slice_, is_first, opens)
        return read, sums if is_first else tuple(map(torch.clone, sums))

    return patch.object(sequence_parallel.SharedKeys, "open", opened)


BUGS: dict[str, Any] = {
    "": nullcontext,
    "swapped parts": _swapped_parts,
    "lost front": _lost_front,
}


@pytest.mark.daily("lost front", "swapped parts")
@pytest.mark.parametrize("bug", [name for name in BUGS if name])
def test_planted_bugs_are_noticed(ranks, bug: str) -> None:
    plan = same_policy(sliced_plan([30, 7, 5], SLICED, num_ranks=2), replayed(0.5))
    with pytest.raises((AssertionError, RankFailure)):
        check(ranks, ModelCase(promoted=True), plan, bug)

"""Slices under activation policies: any cuts and shares match one plain process, and attention runs no row more than it must.

The tests count the query-key pairs that really run: all pairs once, and those of the rows that a policy recomputes once more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.planted import plant
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import NUM_LAYERS, ModelCase, build_model, with_lora
from helpers.plans.policies import policies_for, replayed, same_policy
from helpers.plans.sliced_plans import CUTS, PACKINGS, Chunks, cut, few, random_slicings, sliced_plan
from helpers.ranks.lone_steps import counted_pairs, policy_step
from helpers.ranks.rank_steps import step_on_rank
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import Chunk, LayerPolicy, StepPlan
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention import chunk as chunk_module
from hf_longctx.runtime.attention import rows as rows_module
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.runtime.tiles.plain import TileInputs

CPU = torch.device("cpu")
PROMOTED = ModelCase(promoted=True)


def pairs_of_rows(chunk: Chunk, num_ranks: int) -> list[int]:
    """Number of tokens that each row of a chunk sees; a rank without tokens adds a dummy that sees itself."""
    rows = [token + 1 for span in chunk.spans for token in range(span.start, span.stop)]
    return [*rows, *[1] * (num_ranks - len(rows))]


def expected_pairs(plan: StepPlan) -> int:
    """Pairs that attention must run: those of every row once, and those of rows that a replayed layer recomputes once more."""
    (group,) = plan.micro_batches[0].groups
    policies = {policy.chunk: policy for policy in group.stages[0].activations}
    total = 0
    for chunk in group.chunks:
        rows = pairs_of_rows(chunk, plan.num_ranks)
        # in layers that keep everything, whole documents run torch's own attention, which is not counted
        slices = [s for s in chunk.spans if s.start or s.stop < plan.lengths[s.sequence]]
        of_slices = sum(token + 1 for s in slices for token in range(s.start, s.stop))
        layers = policies[chunk.index].layers
        for layer in [*layers, *[LayerPolicy()] * (NUM_LAYERS - len(layers))]:
            if not layer.keeps_everything:
                front, _ = layer.share("attention_output").cuts(len(rows))
                total += sum(rows) + sum(rows[:front])
            else:
                total += of_slices
    return total


def check(case: ModelCase, plan: StepPlan, seed: int = 0) -> StepResult:
    """Asserts the loss and gradients of one plain process, and that attention ran the pairs that it must and no more."""
    rows = random_rows(list(plan.lengths), seed)
    model = build_model(case)
    patch_model(model)
    result, gradients, num_pairs = policy_step(model, plan, rows)
    assert worst_error((float(result.loss), gradients), reference_step(build_model(case), rows)) <= TOLERANCE
    assert num_pairs == expected_pairs(plan)
    return result


@pytest.mark.daily("whole-qwen3")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", CUTS)
@few(4)
@given(data=st.data())
def test_slices_of_one_sequence_match(name: str, family: str, data: st.DataObject) -> None:
    plan = sliced_plan([96], [[span] for span in cut(0, CUTS[name])])
    check(ModelCase(family, promoted=True), data.draw(policies_for(plan)))


@pytest.mark.daily("a whole sequence in front-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PACKINGS)
@few(8)
@given(data=st.data())
def test_slices_among_other_sequences_match(name: str, family: str, data: st.DataObject) -> None:
    lengths, chunks, words, validated = PACKINGS[name]
    plan = sliced_plan(lengths, chunks, words, validated=validated)
    check(ModelCase(family, promoted=True), data.draw(policies_for(plan)))


@pytest.mark.wide
@few(60)
@given(random_slicings(), st.data())
def test_random_cuts_chunks_orders_and_policies_match(
    slicing: tuple[list[int], list[list[tuple[int, int, int]]], str], data: st.DataObject
) -> None:
    lengths, chunks, words = slicing
    check(PROMOTED, data.draw(policies_for(sliced_plan(lengths, chunks, words))))


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_stock_norms_match_too(family: str) -> None:
    lengths, chunks, words, _ = PACKINGS["slices, hybrids and packs"]
    policy = (replayed(0.4, 0.3, 0.5, 0.5), replayed(1.0, mlp=0.0))
    check(ModelCase(family), same_policy(sliced_plan(lengths, chunks, words), *policy, tile_tokens=8))


HYBRID: Chunks = [*([span] for span in cut(0, [12, 11])), [(0, 23, 30), (1, 0, 7), (2, 0, 5)]]


def test_recomputed_rows_are_the_front_of_the_chunk() -> None:
    plan = same_policy(sliced_plan([30, 7, 5], HYBRID), replayed(0.0), replayed(0.5))
    # every row sees its sequence up to itself
    once = 30 * 31 // 2 + 7 * 8 // 2 + 5 * 6 // 2
    # half of 12 tokens; half of 11 (six after the first twelve); half of 19: the slice of seven after 23 tokens, and three of the
    # next sequence
    front = (6 * 7 // 2) + (6 * 12 + 6 * 7 // 2) + (7 * 23 + 7 * 8 // 2 + 3 * 4 // 2)
    assert expected_pairs(plan) == 2 * once + front
    check(PROMOTED, plan)


@pytest.mark.wide("4-1")
@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 1), (4, 4), (6, 3)])
def test_grouped_query_heads_match(num_heads: int, num_kv_heads: int) -> None:
    case = ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads, promoted=True)
    check(case, same_policy(sliced_plan([30, 7, 5], HYBRID), replayed(0.3, 0.3), replayed(0.6)))


def test_the_book_takes_no_more_than_without_a_policy() -> None:
    plan = sliced_plan([30, 7, 5], HYBRID)
    plain = check(PROMOTED, same_policy(plan))
    assert check(PROMOTED, same_policy(plan, replayed(0.5), replayed(0.0))).memory.kv_book == plain.memory.kv_book > 0


def test_lora_matches() -> None:
    rows = random_rows([30, 7, 5])
    patch_model(model := build_model(ModelCase()))
    plan = same_policy(sliced_plan([30, 7, 5], HYBRID), replayed(0.4), replayed(0.0, 0.5), tile_tokens=4)
    result, gradients, _ = policy_step(with_lora(model), plan, rows)
    assert worst_error((float(result.loss), gradients), reference_step(with_lora(build_model(ModelCase())), rows)) <= TOLERANCE


def counted_step_on_rank(case: ModelCase, plan_json: str, rows: Any) -> tuple[float, dict[str, Tensor], int]:
    """Runs `step_on_rank`; also returns the number of pairs that ran."""
    with counted_pairs() as pairs:
        loss, gradients = step_on_rank(case, plan_json, rows)
    assert plan_from_json(plan_json).num_ranks > 1
    return loss, gradients, sum(pairs)


def check_groups(ranks: Any, num_ranks: int, case: ModelCase, plan: StepPlan) -> None:
    rows = random_rows(list(plan.lengths))
    expected = reference_step(build_model(case), rows)
    for loss, gradients, num_pairs in ranks(num_ranks).run(counted_step_on_rank, case, plan_to_json(plan), rows):
        assert worst_error((loss, gradients), expected) <= TOLERANCE
        # every rank computes some heads, but for all rows
        assert num_pairs == expected_pairs(plan)


@pytest.mark.wide
@few(10)
@given(slicing=random_slicings(), data=st.data())
def test_ulysses_groups_match(
    ranks, slicing: tuple[list[int], list[list[tuple[int, int, int]]], str], data: st.DataObject
) -> None:
    lengths, chunks, words = slicing
    check_groups(ranks, 2, PROMOTED, data.draw(policies_for(sliced_plan(lengths, chunks, words, num_ranks=2))))


def test_uneven_heads_match(ranks) -> None:
    # 3 ranks share 4 query heads and 2 KV heads unevenly; a slice of one token leaves ranks with dummy tokens
    chunks = [[(0, 0, 12)], [(0, 12, 13)], [(0, 13, 30), (1, 0, 7), (2, 0, 5)]]
    plan = same_policy(sliced_plan([30, 7, 5], chunks, num_ranks=3), replayed(0.5, 0.25), replayed(0.0))
    check_groups(ranks, 3, PROMOTED, plan)


@pytest.mark.daily("gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_parameters_match(ranks, parameters: Any) -> None:
    plan = sliced_plan([30, 7, 5], HYBRID, num_ranks=2, parameters=parameters)
    check_groups(ranks, 2, PROMOTED, same_policy(plan, replayed(0.5, 0.25, 0.5, 0.5), replayed(0.2)))


# planted bugs that the check must notice
def _keys_of_another_sequence() -> Any:
    original = KVBook.write

    def write(book: KVBook, layer: Any, part: Slice, k: Tensor, v: Tensor, **how: Any) -> Any:
        found = original(book, layer, part, k, v, **how)
        others = [entry for (of, sequence), entry in book._entries.items() if of is layer and sequence != part.sequence]
        for entry in others:
            own = book._entries[layer, part.sequence].tokens.kv_SGW[part.start : part.stop]
            entry.tokens.kv_SGW[: part.stop - part.start] = own
        return found

    return patch.object(KVBook, "write", write)


def _output_of_another_document() -> Any:
    original = AttentionRecord.take

    def take(record: AttentionRecord) -> Any:
        kept = original(record)
        return kept and replace(kept, out_ShE=kept.out_ShE.roll(7, 0), lse_hS=kept.lse_hS.roll(7, 1))

    return patch.object(AttentionRecord, "take", take)


def _output_of_the_slice_before() -> Any:
    original, last = AttentionRecord.put, {}

    def put(record: AttentionRecord, out: Tensor, lse: Tensor) -> None:
        before = last.get(out.shape, (out, lse))
        last[out.shape] = (out.clone(), lse.clone())
        original(record, *before)

    return patch.object(AttentionRecord, "put", put)


def _lse_of_the_slice_alone() -> Any:
    original = rows_module.tile_backward

    def tile_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> Any:
        alone = rows_module.tile_forward(tile)[1] if tile.causal else lse
        return original(gradient, tile, out, alone)

    return patch.object(rows_module, "tile_backward", tile_backward)


def _front_left_out_of_recomputed_rows() -> Any:
    original = chunk_module.rows_forward

    def rows_forward(q: Tensor, k: Tensor, v: Tensor, front: Any, *how: Any) -> Any:
        is_partial = front and q.shape[1] < k.shape[1]
        return original(q, k, v, () if is_partial else front, *how)

    return patch.object(chunk_module, "rows_forward", rows_forward)


BUGS = {
    **{bug: partial(plant, bug, 0, 1) for bug in ("gradients of keys and values dropped", "stale book entry")},
    "keys of another sequence": _keys_of_another_sequence,
    "kept output of another document": _output_of_another_document,
    "kept output of the slice before": _output_of_the_slice_before,
    "merged LSE dropped in backward": _lse_of_the_slice_alone,
    "recomputed rows do not see the front": _front_left_out_of_recomputed_rows,
}


@pytest.mark.wide("", "stale book entry")
@pytest.mark.parametrize("bug", ["", *BUGS])
def test_planted_bug_is_noticed(bug: str) -> None:
    # two sequences with slices of equal sizes, and whole sequences
    chunks = [[(0, 0, 10)], [(0, 10, 20)], [(1, 0, 10)], [(1, 10, 17), (2, 0, 7)], [(0, 20, 30), (3, 0, 9)]]
    policies = (replayed(0.3), replayed(0.0, 0.5))

    def steps() -> None:
        for seed in (0, 1):
            check(PROMOTED, same_policy(sliced_plan([30, 17, 7, 9], chunks), *policies), seed)

    if not bug:
        steps()
        return
    # the assertion about gradients must fail, not the one about counts
    with BUGS[bug](), pytest.raises(AssertionError, match=r"<= 1e-12"):
        steps()

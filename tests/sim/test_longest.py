"""The longest sequence of every row fits with the row's policy, one token more does not, and seconds add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.plans.layouts import tiny_costs

from hf_longctx.plan.core.types import LEAST_TILE_TOKENS, Chunk, GroupShape, Span
from hf_longctx.plan.cost.cost_model import with_adapters
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import least_memory_policy, most_tokens
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec
from hf_longctx.sim.longest import Budget, _step_s, longest_rows

MODEL = ModelSpec(16, 256, 1024, 8, 4, 32, 4096, 8192, bytes_per_element=2)
COSTS = tiny_costs(1, MODEL)
BUDGET = Budget(1, 2**30, 2**28)


def test_rows_fit_and_hold_no_token_more() -> None:
    rows = longest_rows(COSTS, BUDGET)
    assert len(rows) == 7 and all(row.tokens > 0 and row.step_s > 0 for row in rows)
    for row, host, keeps in ((rows[3], 0, False), (rows[4], 0, True), (rows[5], 2**28, False), (rows[6], 2**28, True)):
        for tokens, fits in ((row.tokens, True), (row.tokens + 1, False)):
            policy = least_memory_policy(MODEL, tokens, host, LEAST_TILE_TOKENS, keeps_attention=keeps)
            found = ByteModel(MODEL).chunk(Load.document(tokens, 16), policy)
            assert found.host <= host
            assert (found.device + found.workspace <= BUDGET.device_bytes) == fits


@pytest.mark.parametrize("host_bytes", [0, 2**28])
def test_inputs_of_every_second_layer_cost_half_a_forward_more(host_bytes: int) -> None:
    budget = replace(BUDGET, host_bytes=host_bytes, reruns=True)
    *before, last = longest_rows(COSTS, budget)
    assert len(before) == (7 if host_bytes else 5) and last.tokens > 1.2 * max(row.tokens for row in before)
    assert last.tokens == most_tokens(MODEL, BUDGET.device_bytes, host_bytes, LEAST_TILE_TOKENS, reruns=True)
    # copies are hidden behind computing, so the same tokens with all inputs kept differ by the forwards of eight layers
    policies = [least_memory_policy(MODEL, last.tokens, host_bytes, LEAST_TILE_TOKENS, reruns=again) for again in (True, False)]
    reruns_s, plain_s = (_step_s(COSTS, budget, policy, last.tokens) for policy in policies)
    forward = COSTS.coefficients.forward
    layers_s = forward.token_s * 15 / 16 * last.tokens + forward.pair_s * last.tokens**2 / 2
    assert reruns_s - plain_s == pytest.approx(layers_s / 2, rel=1e-3)
    assert policies[0].layers[1].share("layer_input").recompute == 1


def test_the_row_with_host_memory_is_that_of_most_tokens() -> None:
    rows = longest_rows(COSTS, BUDGET)
    assert rows[5].tokens == most_tokens(MODEL, BUDGET.device_bytes, BUDGET.host_bytes, LEAST_TILE_TOKENS)


def test_keeping_attention_saves_its_seconds() -> None:
    recomputed, kept = longest_rows(COSTS, replace(BUDGET, host_bytes=0))[3:5]
    assert kept.tokens < recomputed.tokens
    forward, backward = COSTS.coefficients.forward, COSTS.coefficients.backward

    def passes_s(tokens: int) -> float:
        pairs = tokens * tokens / 2
        both = (forward.pair_s + backward.pair_s) * pairs + (forward.token_s + backward.token_s) * tokens
        return both + forward.chunk_s + backward.chunk_s

    # the matrix products of 16 layers of 983,040 weights run again; those of the head, 4,096 x 256 or one in 16, do not
    layers_token_s = forward.token_s * 15 / 16
    assert kept.step_s == pytest.approx(passes_s(kept.tokens) + layers_token_s * kept.tokens)
    again = layers_token_s * recomputed.tokens + forward.pair_s * recomputed.tokens**2 / 2
    assert recomputed.step_s == pytest.approx(passes_s(recomputed.tokens) + again)


def test_frozen_weights_spare_half_of_the_backward_s_matrices() -> None:
    # adapters of one weight, which cost nothing
    model = replace(COSTS.model, adapters=AdapterSpec(1, 4))
    costs = replace(COSTS, model=model, coefficients=with_adapters(COSTS.coefficients, model))
    trained, frozen = (longest_rows(each, BUDGET)[0] for each in (COSTS, costs))
    assert frozen.tokens > trained.tokens
    spared = COSTS.coefficients.backward.token_s / 2 * frozen.tokens
    whole = COSTS.forward_s, COSTS.backward_s
    chunk = Chunk(0, (Span(0, 0, frozen.tokens),))
    assert frozen.step_s == pytest.approx(sum(one(chunk, GroupShape(1), 16) for one in whole) - spared, rel=1e-5)


def test_no_row_has_fewer_tokens_than_the_one_it_builds_on() -> None:
    # tiles of the loss cost workspace, so where little is kept they hold fewer tokens and are left off
    for device_bytes in (2**24, 2**26, 2**28, 2**30):
        rows = [row for row in longest_rows(COSTS, replace(BUDGET, device_bytes=device_bytes)) if row.switches[0] != " "]
        tokens = [row.tokens for row in rows]
        assert tokens == sorted(tokens)
        assert all(row.step_s == before.step_s for before, row in pairwise(rows) if row.tokens == before.tokens)


def test_without_room_nothing_fits() -> None:
    assert all(row.tokens == 0 and row.step_s == 0 for row in longest_rows(COSTS, replace(BUDGET, device_bytes=0)))

"""Extrapolated fits: hardware rates give the coefficients back, and few layers plus a head make the whole model by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import HARDWARE, MODEL

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients, default_coefficients
from hf_longctx.plan.cost.fitting import hardware_rates, whole_model_costs

MEASURED = replace(HARDWARE, exchange_bytes_per_s=((2, 3e8), (4, 2e8)))
CLUSTER = ClusterSpec(4, 2, MEASURED)
FORWARD = PassCoefficients(2e-7, 1.5e-4, 4e-3, 2e-4, 3e-8, 9e-8, 1e-3)
BACKWARD = PassCoefficients(5e-7, 3e-4, 9e-3, 1e-4, 5e-8, 2e-7, 2e-3)
COSTS = CostCoefficients(FORWARD, BACKWARD, 0.5, "fit")


def test_rates_give_back_what_the_passes_cost() -> None:
    again = default_coefficients(MODEL, ClusterSpec(4, 2, hardware_rates(MODEL, CLUSTER, COSTS)))
    for found, truth in ((again.forward, FORWARD), (again.backward, BACKWARD)):
        assert (found.pair_s, found.token_s) == (pytest.approx(truth.pair_s), pytest.approx(truth.token_s))
    assert again.forward.chunk_s == pytest.approx(FORWARD.chunk_s)
    # hardware has one rate for both passes, their mean
    assert again.forward.link_byte_s == pytest.approx(4e-8)
    assert again.forward.network_byte_s == pytest.approx(14.5e-8)
    assert again.forward.message_s == pytest.approx(1.5e-4)


def test_predictions_of_the_fit_stay_when_its_rates_replace_the_measured_ones() -> None:
    chunk = Chunk(0, (Span(0, 0, 700), Span(1, 0, 30)))
    before = CostModel(MODEL, CLUSTER, COSTS)
    rated = hardware_rates(MODEL, CLUSTER, COSTS)
    assert rated.link_bytes_per_s != MEASURED.link_bytes_per_s
    after = CostModel(MODEL, ClusterSpec(4, 2, rated), COSTS)
    for shape in (GroupShape(1), GroupShape(2, 2), GroupShape(4, 4), GroupShape(4, 2), GroupShape(3)):
        assert after.forward_s(chunk, shape, 2) == pytest.approx(before.forward_s(chunk, shape, 2))
        assert after.backward_s(chunk, shape, 2) == pytest.approx(before.backward_s(chunk, shape, 2))


def test_a_term_that_came_out_as_zero_keeps_its_rate() -> None:
    nothing = PassCoefficients(*[0.0] * 7)
    found = hardware_rates(MODEL, CLUSTER, CostCoefficients(nothing, nothing, 0.0, "fit"))
    assert replace(found, message_s=MEASURED.message_s, kernel_s=MEASURED.kernel_s) == MEASURED


def test_a_model_of_more_layers_is_its_head_and_so_many_times_the_layers() -> None:
    head = CostCoefficients(PassCoefficients(0.0, 5e-5, 1e-3), PassCoefficients(0.0, 1e-4, 10e-3), 0.0, "head")
    few, whole = replace(MODEL, num_layers=2), replace(MODEL, num_layers=10)
    found = whole_model_costs(COSTS, head, few, whole)
    # seconds per token: 5e-5 in the head and 1e-4 in two layers; seconds per chunk: 1 ms and 3 ms
    assert found.forward.rates == pytest.approx((1e-6, 5.5e-4, 16e-3, 2e-4, 3e-8, 9e-8, 5e-3))
    # in a pipeline the head takes as long as it did alone
    assert found.forward.token_s * found.forward.head_factor * whole.head_share == pytest.approx(5e-5)
    # the backward of the head alone had more fixed seconds than with its layers, so none are left for the layers
    assert found.backward.chunk_s == pytest.approx(9e-3)
    assert found.step_s == pytest.approx(0.5 * whole.num_parameters / few.num_parameters)
    assert whole_model_costs(COSTS, None, few, few) is COSTS

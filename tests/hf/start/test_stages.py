"""Which layers every stage gets: balanced by seconds with the head, whatever a fit found."""

from __future__ import annotations

from dataclasses import replace

from helpers.plans.layouts import tiny_costs

from hf_longctx.hf.start.stages import balanced_ranges
from hf_longctx.plan.core.types import LayerRange
from hf_longctx.plan.cost.cost_model import PassCoefficients


def test_a_dear_head_takes_layers_from_the_last_stage() -> None:
    costs = tiny_costs(2)
    costs = replace(costs, model=replace(costs.model, num_layers=8))
    cheap = replace(costs, model=replace(costs.model, vocab_size=2))
    dear = replace(costs, model=replace(costs.model, vocab_size=2_000))
    assert balanced_ranges(cheap, 2, [50])[1][0].num_layers == 4
    assert balanced_ranges(dear, 2, [50])[1][0].num_layers < 4
    assert balanced_ranges(dear, 1, [50]) == ((LayerRange(0, 8),),)


def test_costs_that_are_nothing_but_constants_split_layers_evenly() -> None:
    costs = tiny_costs(2)
    constant = PassCoefficients(0.0, 0.0, 1.0)
    costs = replace(
        costs,
        model=replace(costs.model, num_layers=8),
        coefficients=replace(costs.coefficients, forward=constant, backward=constant),
    )
    assert [own[0].num_layers for own in balanced_ranges(costs, 2, [50])] == [4, 4]

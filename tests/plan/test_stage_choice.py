"""The number of stages is within 3 % of what a loop over all stages, layouts and numbers of slices finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from plan_cases import cost_model, lognormal_lengths

from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.elastic_chunks import elastic_chunks
from hf_longctx.plan.pipeline_planner import stage_parts
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.specs import ActivationBudget, PlannerConfig
from hf_longctx.plan.stage_choice import choose_stages, stage_options
from hf_longctx.plan.stage_costs import pipeline_s
from hf_longctx.plan.types import GroupShape

DEGREES = (1, 2, 4, 8)
PLENTY = PlannerConfig(1_000_000, DEGREES)
CASES = {
    "one document": [6000],
    "a long one among short ones": [5000, *lognormal_lengths(4, 30, 600, median=150.0)],
    "mixture": list(lognormal_lengths(5, 24, 4000)),
    "short ones": list(lognormal_lengths(6, 48, 200, median=80.0, sigma=0.5)),
}


def partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Degrees, descending, that sum up to `total`."""
    if not total:
        yield ()
    for degree in (d for d in DEGREES if d <= min(largest, total)):
        for rest in partitions(total - degree, degree):
            yield (degree, *rest)


def deal(lengths: Sequence[int], layout: Sequence[int], costs: CostModel) -> list[list[int]]:
    """Longest first, each to the group that is done first with it; seconds from the cost model for whole models."""
    done = [0.0] * len(layout)
    parts: list[list[int]] = [[] for _ in layout]
    added = {d: costs.sequences_s(list(lengths), GroupShape(d, d)).tolist() for d in set(layout)}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        group = min(range(len(layout)), key=lambda g: done[g] + added[layout[g]][i])
        done[group] += added[layout[group]][i]
        parts[group].append(i)
    return parts


def least_group_s(lengths: Sequence[int], part: tuple[int, ...], degree: int, costs: CostModel, stages: int) -> float:
    """Seconds of one group's pipeline with the best of all numbers of slices and sizes of packs."""
    own = {i: lengths[i] for i in part}
    forward, backward = costs.coefficients.forward, costs.coefficients.backward
    pair_s, token_s = forward.pair_s + backward.pair_s, forward.token_s + backward.token_s
    work_s = sum(pair_s * n * n / 2 + token_s * n for n in own.values())
    ways = [(count, 0.0) for count in range(1, 25)] + [(1, work_s / count) for count in range(1, 33)]
    chunks = {elastic_chunks(own, count, pair_s, token_s, 1 << 40, target_s) for count, target_s in ways}
    per_stage, per_node = costs.cluster.num_ranks // stages, costs.cluster.ranks_per_node
    leaves = [(stage + 1) % stages * per_stage // per_node != stage * per_stage // per_node for stage in range(stages)]
    parts = stage_parts(costs.model, stages)
    # equal to the judge's seconds, see test_stage_costs.py
    return min(pipeline_s(made, GroupShape(degree, degree), costs, parts, "elastic", leaves)[0] for made in chunks)


def exhaustive_s(lengths: Sequence[int], costs: CostModel) -> dict[int, float]:
    """The least seconds of a step for every number of stages."""
    num_ranks, once_s = costs.cluster.num_ranks, costs.coefficients.step_s
    found = {
        1: plan_step(0, lengths, costs, replace(PLENTY, degrees=tuple(d for d in DEGREES if d <= num_ranks))).estimate.step_s
    }
    least = cache(lambda part, degree, stages: least_group_s(lengths, part, degree, costs, stages))
    for stages in (count for count in (2, 4) if num_ranks % count == 0):
        seconds = []
        for layout in partitions(num_ranks // stages, num_ranks):
            parts = zip(deal(lengths, layout, costs), layout, strict=True)
            seconds.append(max(least(tuple(part), degree, stages) for part, degree in parts if part))
        found[stages] = min(seconds) + once_s
    return found


@pytest.mark.parametrize(
    "num_ranks, kind, case",
    [
        *((4, kind, case) for kind in ("attention", "exchange") for case in CASES),
        (8, "attention", "one document"),
        (8, "attention", "mixture"),
        (8, "exchange", "a long one among short ones"),
        (8, "exchange", "short ones"),
    ],
)
def test_the_choice_is_within_3_percent_of_everything(num_ranks: int, kind: str, case: str) -> None:
    costs, lengths = cost_model(kind, num_ranks), CASES[case]
    config = replace(PLENTY, degrees=tuple(d for d in DEGREES if d <= num_ranks))
    best = exhaustive_s(lengths, costs)
    options = stage_options(lengths, costs, config)
    assert {option.num_stages for option in options} == set(best)
    for option in options:
        assert option.plan.estimate.step_s <= 1.03 * best[option.num_stages]
    chosen, degrees = choose_stages(lengths, costs, config)
    assert best[chosen] <= 1.03 * min(best.values())
    assert degrees == tuple(d for d in DEGREES if d <= num_ranks // chosen)


def test_a_model_that_one_rank_cannot_hold_gets_stages() -> None:
    costs = cost_model("attention", 4)
    lengths = [300, 200, 100]
    # the states of the whole model leave nothing; stages have what its other parts took
    config = PlannerConfig(1000, (1, 2, 4), activations=ActivationBudget(0, 0, 0))
    with pytest.raises(ValueError, match="do not fit beside the model"):
        plan_step(0, lengths, costs, config)
    options = stage_options(lengths, costs, config)
    assert options and 1 not in {option.num_stages for option in options}


def test_what_fits_nowhere_is_named() -> None:
    config = PlannerConfig(10, (1, 2))
    with pytest.raises(ValueError, match="sequence 0 has 5000 tokens"):
        choose_stages([5000], cost_model("linear", 2), config)

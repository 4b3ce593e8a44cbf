"""`plan_step`: sequence lengths to a validated `StepPlan`, one pass after the other. Read this file first.

    lengths -> grouping problem -> layout (exact, greedy or static) -> plan tree -> validate -> evaluate -> estimate

Every pass is a function from plain data to plain data. The planner runs on rank 0, one step ahead; all ranks obey its plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.evaluate import evaluate_plan
from hf_longctx.plan.greedy import plan_greedy, plan_one_micro_batch, plan_static
from hf_longctx.plan.grouping import Group, GroupingProblem, Layout, can_solve_exactly, solve_exactly
from hf_longctx.plan.specs import PlannerConfig, check_degrees
from hf_longctx.plan.types import (
    Action,
    Chunk,
    Estimate,
    GroupShape,
    LayerRange,
    MicroBatch,
    Parameters,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.validate import validate_plan


def plan_step(step: int, lengths: Sequence[int], costs: CostModel, config: PlannerConfig) -> StepPlan:
    """The plan of optimizer step `step` for sequences of `lengths` tokens: what every rank will do, and its estimate.

    Deterministic: equal arguments give an equal digest. Raises ValueError for a sequence that fits no allowed group, and
    PlanError if a pass broke an invariant.
    """
    started_s = time.perf_counter()
    check_degrees(config.degrees, costs.cluster.num_ranks, costs.model.num_heads, costs.method)
    problem = GroupingProblem.build(lengths, costs, config)
    layout, solver = choose_layout(problem, config)
    plan = validate_plan(build_plan(step, lengths, layout, problem.shapes, costs, costs.parameters))
    run = evaluate_plan(plan, costs)
    estimate = Estimate(
        step_s=run.step_s,
        lower_bound_s=problem.lower_bound_s() + costs.coefficients.step_s,
        peak_bytes=max(run.peak_bytes),
        solve_s=time.perf_counter() - started_s,
        solver=solver,
        cost_source=costs.coefficients.source,
    )
    return replace(plan, estimate=estimate)


def choose_layout(problem: GroupingProblem, config: PlannerConfig) -> tuple[Layout, str]:
    """The layout that the configured solver finds, and the solver's name. "auto" is exact for few sequences."""
    if not problem.lengths:
        return [[]], "empty"
    if config.one_micro_batch:
        return plan_one_micro_batch(problem, one_degree=config.solver == "static"), "one micro-batch"
    if config.solver == "static":
        return plan_static(problem, config.micro_batch_trials, config.static_degree), "static"
    if config.solver == "auto" and can_solve_exactly(problem):
        return solve_exactly(problem), "exact"
    return plan_greedy(problem, config.micro_batch_trials), "greedy"


def build_plan(
    step: int,
    lengths: Sequence[int],
    layout: Layout,
    shapes: Mapping[int, GroupShape],
    costs: CostModel,
    parameters: Parameters,
) -> StepPlan:
    """The plan tree of a layout: one packed chunk per group, forward then backward, ranks without work on the dummy chunk.

    `shapes`: how groups of each degree of the layout share attention.
    """
    num_ranks = costs.cluster.num_ranks
    micro_batches = [
        _place_groups(groups, lengths, shapes, num_ranks, costs.model.num_layers)
        # the most tokens on a rank first, so that a run that does not fit fails at once
        for groups in sorted(layout, key=lambda groups: -max((sum(lengths[i] for i in g[1]) / g[0] for g in groups), default=0))
    ]
    return StepPlan(
        step=step,
        lengths=tuple(int(length) for length in lengths),
        num_stages=1,
        ranks_per_stage=num_ranks,
        parameters=parameters,
        micro_batches=tuple(micro_batches),
    )


def _place_groups(
    groups: Sequence[Group], lengths: Sequence[int], shapes: Mapping[int, GroupShape], num_ranks: int, num_layers: int
) -> MicroBatch:
    """Groups on consecutive positions, ranks to spare behind them.

    A group starts at a multiple of the largest power of two in its degree, which its blocks divide: so blocks find their
    process groups, and a group of a power of two that fits into a node does not cross nodes.
    """
    busy = [(shapes[degree], members) for degree, members in groups if members]
    busy.sort(key=lambda item: (-(item[0].degree & -item[0].degree), -item[0].degree, item[1]))
    spare = num_ranks - sum(shape.degree for shape, _ in busy)
    placed, position = [], 0
    for shape, members in [*busy, *[(GroupShape(1), ())] * spare]:
        placed.append(
            SequenceGroup(
                positions=tuple(range(position, position + shape.degree)),
                method=shape.method,
                chunks=(Chunk(0, _longest_first(members, lengths)),),
                stages=(StagePlan(0, (LayerRange(0, num_layers),), (Action("F", 0, 0), Action("B", 0, 0))),),
                ulysses_degree=shape.ulysses if shape.method == "hybrid" else 0,
            )
        )
        position += shape.degree
    return MicroBatch(tuple(placed))


def _longest_first(members: Sequence[int], lengths: Sequence[int]) -> tuple[Span, ...]:
    return tuple(Span(i, 0, int(lengths[i])) for i in sorted(members, key=lambda i: (-lengths[i], i)))

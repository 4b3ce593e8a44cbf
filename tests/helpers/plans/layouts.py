"""Hand-written and random layouts of a step, as validated plans of one stage."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, MicroBatch, Parameters, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.groups.exact import rank_layouts
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import Layout
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import build_plan

# heads are exchanged at once, so that fits of coefficients to made-up seconds are exact
TINY = ModelSpec(2, 32, 48, 4, 2, 8, 64, 512, exchange_parts=1)


def tiny_costs(num_ranks: int, spec: ModelSpec = TINY) -> CostModel:
    """The built-in cost model of a tiny model on `num_ranks` CPU ranks."""
    cluster = ClusterSpec(num_ranks, num_ranks, GENERIC_CPU)
    return CostModel(spec, cluster, default_coefficients(spec, cluster))


def plan_of(
    layout: Layout,
    lengths: list[int],
    num_ranks: int,
    ulysses: int = 0,
    rings: str = "none",
    parameters: Parameters = "replicated",
) -> StepPlan:
    """The validated plan of a hand-written layout: micro-batches of (degree, sequences); idle ranks get the dummy chunk.

    ulysses: number of ranks of a block, which share heads; 0 means the whole group, 1 a ring. A group whose degree it does not
    divide is a ring. rings: "second" makes the second group of every micro-batch a ring.
    """
    degrees = {degree for groups in layout for degree, _ in groups}
    shapes = {d: GroupShape(d, d if not ulysses else min(ulysses, d) if d % min(ulysses, d) == 0 else 1) for d in degrees}
    placed = place_layout(layout, num_ranks, num_ranks, node_aligned=False)
    plan = build_plan(0, lengths, placed, shapes, replace(tiny_costs(num_ranks), parameters=parameters))
    micro_batches = tuple(
        MicroBatch(
            tuple(
                replace(group, method="ring") if group.degree > 1 and rings == "second" and place else group
                for place, group in enumerate(micro_batch.groups)
            )
        )
        for micro_batch in plan.micro_batches
    )
    return validate_plan(replace(plan, micro_batches=micro_batches))


# name -> (ranks, micro-batches of (degree, sequences), lengths)
LAYOUTS = {
    "one rank": (1, [[(1, (0, 1, 2, 3))]], [13, 1, 31, 7]),
    "one rank, several micro-batches": (1, [[(1, (0, 2))], [(1, (1,))], [(1, (3,))]], [13, 1, 31, 7]),
    "<1,1>": (2, [[(1, (0, 1)), (1, (2,))]], [13, 11, 17]),
    "<2>": (2, [[(2, (0, 1, 2))]], [13, 11, 5]),
    "<2>,<1,1>,<2>": (2, [[(2, (0,))], [(1, (1, 2)), (1, (3,))], [(2, (4, 5))]], [41, 3, 19, 7, 2, 1]),
    "<2>,<1,1> with an idle rank": (2, [[(2, (0,))], [(1, (1,))]], [29, 5]),
    "fewer tokens than ranks": (2, [[(2, (0,))], [(2, (1,))]], [1, 23]),
    "<2,1,1>": (4, [[(2, (0, 1)), (1, (2,)), (1, (3, 4))]], [23, 14, 9, 8, 17]),
    "<4>": (4, [[(4, (0, 1, 2))]], [37, 14, 3]),
    "<4>,<2,2>,<1,1,1,1>": (
        4,
        [[(4, (0,))], [(2, (1,)), (2, (2, 3))], [(1, (4,)), (1, (5,)), (1, (6,)), (1, (7,))]],
        [61, 23, 13, 11, 7, 5, 3, 2],
    ),
    "one long, many short": (4, [[(4, (0,))], [(1, tuple(range(1, 12)))]], [97, *range(2, 13)]),
    "<4> of two tokens": (4, [[(4, (0,))], [(4, (1,))]], [2, 19]),
    "<3>": (3, [[(3, (0, 1))], [(2, (2,)), (1, (3,))]], [29, 5, 11, 7]),
}


@st.composite
def random_steps(draw: st.DrawFn, num_ranks: int) -> tuple[list, list[int]]:
    """Random lengths (many tiny, some prime, one long) in random layouts, also with groups that have no sequences."""
    # one sequence is longer: if every token with a label saw only itself, queries and keys would have no gradient but noise
    longer, others = draw(st.integers(8, 53)), draw(st.lists(st.integers(1, 12) | st.sampled_from([17, 31, 53]), max_size=6))
    lengths = draw(st.permutations([longer, *others]))
    degrees = tuple(d for d in (1, 2, 4) if d <= num_ranks)
    homes = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    layout = []
    for home in sorted(set(homes)):
        degrees_here = draw(st.sampled_from(rank_layouts(num_ranks, degrees)))
        members: list[list[int]] = [[] for _ in degrees_here]
        for sequence in (i for i, h in enumerate(homes) if h == home):
            members[draw(st.integers(0, len(degrees_here) - 1))].append(sequence)
        layout.append([(degree, tuple(part)) for degree, part in zip(degrees_here, members, strict=True)])
    return layout, lengths


CHUNK_LENGTHS = [13, 7, 5, 17, 3, 2, 19]


FFFBBB, FBFBFB, FFBFBB = "0F0 0F1 0F2 0B2 0B1 0B0", "0F0 0B0 0F1 0B1 0F2 0B2", "0F0 0F1 0B1 0F2 0B2 0B0"


def chunks_plan(orders: tuple[str, str], parameters: Parameters) -> StepPlan:
    """Two ranks, each with three chunks of one sequence in the first micro-batch and one chunk in the second.

    `orders`: the order of the actions of each rank.
    """
    plan = plan_of([[(1, (0, 1, 2)), (1, (3, 4, 5))], [(2, (6,))]], CHUNK_LENGTHS, 2)
    groups = []
    for group, order in zip(plan.micro_batches[0].groups, orders, strict=True):
        chunks = tuple(Chunk(i, (Span(s.sequence, 0, s.stop),)) for i, s in enumerate(group.chunks[0].spans))
        stage = replace(group.stages[0], actions=tuple(Action.parse(word) for word in order.split()))
        groups.append(replace(group, chunks=chunks, stages=(stage,)))
    return validate_plan(replace(plan, parameters=parameters, micro_batches=(MicroBatch(tuple(groups)), plan.micro_batches[1])))

"""Plans of pipeline stages, hand-written and random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from helpers.plans.sliced_plans import Chunks, cut
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.orders import Schedule, in_turns, pipelined, running_order
from hf_longctx.plan.core.types import (
    Chunk,
    Method,
    MicroBatch,
    Parameters,
    Ranges,
    SequenceGroup,
    Span,
    StepPlan,
    meets_in_every_pass,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.policies.fit import Trial
from hf_longctx.plan.predict.pipeline_run import run_pipeline
from hf_longctx.plan.room.room import PipelineRoom


def stage_ranges(model: ModelSpec, num_stages: int, num_ranges: int = 1) -> Ranges:
    """Layers of every stage, balanced by products of matrices alone."""
    head_layers = model.num_layers * model.head_share / (1 - model.head_share)
    return layer_ranges(model.num_layers, num_stages, num_ranges, head_layers)


def pipeline_plan(
    lengths: Sequence[int],
    micro_batches: Sequence[Sequence[tuple[int, Chunks]]],
    num_stages: int,
    schedule: Schedule = "elastic",
    num_layers: int = 4,
    num_ranges: int = 1,
    parameters: Parameters = "replicated",
    method: Method = "ulysses",
    shard_ranks: int = 0,
    has_turns: bool = False,
    reach: int | None = None,
    ulysses: int = 0,
    output_shares: Sequence[float] = (),
    node_ranks: int = 0,
) -> StepPlan:
    """The validated plan of micro-batches of (degree, chunks) at consecutive positions.

    Each is a pipeline of its own, or all of a micro-batch run in one order if their ranks meet in every pass. method: how groups
    of several ranks share attention, with blocks of `ulysses` ranks if it is "hybrid". has_turns: all micro-batches follow one
    schedule. reach: see `in_turns`. output_shares: share of the output head's work of each stage. node_ranks: those of the plan,
    whose groups may then have different chunks on different nodes.
    """
    ranges = layer_ranges(num_layers, num_stages, num_ranges)
    in_one_order = has_turns or (meets_in_every_pass(parameters) and not node_ranks)
    bare = []
    for groups in micro_batches:
        first, found = 0, []
        most = max(len(chunks) for _, chunks in groups)
        for degree, own in groups:
            chunks = [*own, *[[]] * (most - len(own) if in_one_order else 0)]
            found.append(
                SequenceGroup(
                    positions=tuple(range(first, first + degree)),
                    method="local" if degree == 1 else method,
                    chunks=tuple(Chunk(index, tuple(Span(*span) for span in spans)) for index, spans in enumerate(chunks)),
                    stages=(),
                    ulysses_degree=ulysses if degree > 1 else 0,
                )
            )
            first += degree
        bare.append(MicroBatch(tuple(found)))
    turns: tuple[tuple[int, ...], ...] = ()
    if has_turns:
        rounds, turns = in_turns(bare, ranges, schedule, reach=reach, output_shares=output_shares)
    elif in_one_order:
        rounds = tuple(made for batch in bare for made in in_turns([batch], ranges, schedule, output_shares=output_shares)[0])
    else:
        rounds = tuple(
            MicroBatch(tuple(pipelined(group, ranges, schedule, output_shares=output_shares) for group in batch.groups))
            for batch in bare
        )
    num_positions = sum(degree for degree, _ in micro_batches[0])
    shared = {"shard_ranks": shard_ranks, "node_ranks": node_ranks, "turns": turns}
    plan = StepPlan(0, tuple(lengths), num_stages, num_positions, parameters, rounds, **shared)
    return validate_plan(plan)


@st.composite
def random_chunks(draw: st.DrawFn, sequences: Sequence[int], lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Random chunks of these sequences: slices, hybrids and packs, one family of chunks after the other."""
    chunks: list[list[tuple[int, int, int]]] = []
    for sequence in sequences:
        bounds = sorted({0, lengths[sequence], *draw(st.lists(st.integers(1, lengths[sequence]), max_size=4))})
        spans = [(sequence, start, stop) for start, stop in pairwise(bounds)]
        if len(spans) == 1 and chunks and draw(st.booleans()):
            # packed after the last slice of a sequence (a hybrid), or after another whole sequence
            chunks[-1].append(spans[0])
        else:
            chunks += [[span] for span in spans]
    return chunks


@st.composite
def random_schedules(
    draw: st.DrawFn,
    most_stages: int = 4,
    most_ranks: int = 4,
    most_tokens: int = 60,
    parameters: Parameters | None = None,
    fixed: bool = False,
    has_reach: bool = True,
    spreads: bool = False,
) -> StepPlan:
    """Random micro-batches in one schedule: layouts of powers of two on a stage, each with random chunks of some sequences.

    fixed: as many stages and ranks as there may be. has_reach: some schedules reach only so far into later micro-batches.
    spreads: stages share output heads, if they have one layer range each.
    """
    num_stages = most_stages if fixed else draw(st.integers(2, most_stages))
    per_stage = most_ranks if fixed else draw(st.sampled_from([count for count in (1, 2, 4) if count <= most_ranks]))
    num_ranges = draw(st.sampled_from([1, 1, 2]))
    layouts = {1: [(1,)], 2: [(2,), (1, 1)], 4: [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1), (1, 1, 2)]}[per_stage]
    lengths: list[int] = []
    micro_batches: list[list[tuple[int, Chunks]]] = []
    for layout in draw(st.lists(st.sampled_from(layouts), min_size=1 + fixed, max_size=3)):
        groups: list[tuple[int, Chunks]] = []
        for degree in layout:
            # a step has labels
            own = draw(st.lists(st.integers(1, most_tokens), max_size=3)) if lengths else [draw(st.integers(8, most_tokens))]
            sequences = range(len(lengths), len(lengths) + len(own))
            lengths += own
            groups.append((degree, draw(random_chunks(sequences, lengths)) or [[]]))
        micro_batches.append(groups)
    kinds: list[Parameters] = ["replicated", "sharded", "gathered_per_step"]
    some = st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0]), min_size=num_stages, max_size=num_stages).filter(sum)
    # backwards of "gpipe" mix micro-batches, of which gradients of heads would come too early
    schedules: list[Schedule] = ["elastic", "1f1b", *([] if spreads else ["gpipe"])]
    return pipeline_plan(
        lengths,
        micro_batches,
        num_stages,
        "interleaved" if num_ranges > 1 else draw(st.sampled_from(schedules)),
        num_layers=max(4, num_stages * num_ranges),
        num_ranges=num_ranges,
        parameters=draw(st.sampled_from(kinds)) if parameters is None else parameters,
        has_turns=True,
        reach=draw(st.none() | st.integers(1, 4)) if has_reach else None,
        output_shares=draw(some) if spreads and num_ranges == 1 else (),
    )


def planned_words(plan: StepPlan, rank: int) -> list[str]:
    """The actions of a rank in the order of the plan."""
    own = plan.for_rank(rank)
    return [str(action) for _, action in running_order([stage.actions for _, stage in own.rounds], own.turns)]


# plans that real processes run: few, equal on every machine, and never shrunk, since a plan that hangs ends the pool
RANDOM_PIPELINES = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LENGTHS = [40, 23, 9, 7, 5, 30]


SLICED = [
    *([span] for span in cut(0, [15, 11, 9, 5])[:-1]),
    [cut(0, [15, 11, 9, 5])[-1], (2, 0, 9)],
    *([span] for span in cut(1, [12, 11])),
    [(3, 0, 7), (4, 0, 5)],
    [(5, 0, 30)],
]


WHOLE = [[(0, 0, 40)], [(1, 0, 23)], [(2, 0, 9), (3, 0, 7), (4, 0, 5)], [(5, 0, 30)]]


def run_trial(room: PipelineRoom, group: SequenceGroup, **counted: Any) -> Trial:
    """`Room.trial` of a pipeline from its predicted run alone, which is predicted even where it does not fit."""
    runs = run_pipeline(room.plan, group, room.costs, [0.0] * len(group.stages))
    over_bytes = tuple(float(run.peak_bytes - room.limit_bytes) for run in runs)
    over_host_bytes = float(max(run.host_bytes for run in runs) - room.budget.host_bytes)
    return Trial(group, max(run.times[-1][1] for run in runs), over_bytes, over_host_bytes, **counted)

"""Plans of pipeline stages, hand-written and random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from helpers.plans.sliced_plans import Chunks, cut
from hypothesis import strategies as st

from hf_longctx.plan.core.orders import Schedule, families, pipelined
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


def in_one_order(groups: Sequence[SequenceGroup], ranges: Ranges, schedule: Schedule) -> list[SequenceGroup]:
    """Pipelines that meet in every pass: dummy chunks pad all groups, and families of chunks of any group hold for all."""
    most = max(len(group.chunks) for group in groups)
    padded = [replace(each, chunks=(*each.chunks, *map(Chunk, range(len(each.chunks), most)))) for each in groups]
    # places whose chunk is in one family with the next one
    joined = {place for each in padded for family in families(each.chunks) for place in family[:-1]}
    sequences = list(accumulate(int(place - 1 not in joined) for place in range(most)))
    chunks = tuple(Chunk(place, (Span(sequence, place, place + 1),)) for place, sequence in enumerate(sequences))
    stages = pipelined(SequenceGroup((0,), "local", chunks, ()), ranges, schedule).stages
    return [replace(each, stages=stages) for each in padded]


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
) -> StepPlan:
    """The validated plan of micro-batches of (degree, chunks) at consecutive positions.

    Each is a pipeline of its own, or all of a micro-batch run in one order if their ranks meet in every pass. method: how groups
    of several ranks share attention.
    """
    ranges = layer_ranges(num_layers, num_stages, num_ranges)
    rounds = []
    for groups in micro_batches:
        first, found = 0, []
        for degree, chunks in groups:
            bare = SequenceGroup(
                positions=tuple(range(first, first + degree)),
                method="local" if degree == 1 else method,
                chunks=tuple(Chunk(index, tuple(Span(*span) for span in spans)) for index, spans in enumerate(chunks)),
                stages=(),
            )
            found.append(bare)
            first += degree
        if meets_in_every_pass(parameters):
            found = in_one_order(found, ranges, schedule)
        else:
            found = [pipelined(each, ranges, schedule) for each in found]
        rounds.append(MicroBatch(tuple(found)))
    num_positions = sum(degree for degree, _ in micro_batches[0])
    plan = StepPlan(0, tuple(lengths), num_stages, num_positions, parameters, tuple(rounds), shard_ranks=shard_ranks)
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


def planned_words(plan: StepPlan, rank: int) -> list[str]:
    """The actions of a rank in the order of the plan."""
    return [str(action) for _, stage in plan.for_rank(rank).rounds for action in stage.actions]


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

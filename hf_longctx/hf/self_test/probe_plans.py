"""Makes small plans that cover what a run's plans may use: the largest groups in every shape, slices and recomputation.

These plans are slow, and no planner would choose them. Each runs a pack of documents on one group, and lone documents on single
ranks with different label counts, so that errors between documents, inside a group and between ranks become visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hf_longctx.plan.chunks import outside_blocks
from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import (
    ActivationPolicy,
    Blocks,
    Chunk,
    GroupShape,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
    StepSequences,
    TensorShare,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.traffic import group_shapes
from hf_longctx.plan.predict.lending import lent_group

# numbers of documents in `probe_lengths`: packed on one group, the long one (the last of these), and the lone ones
PACKED, LONG, LONE = (0, 1, 2), 2, (3, 4)
_NUM_SLICES = 3
_TILE_TOKENS = 16
# recompute all tensors that may be recomputed
_REPLAYED = (TensorShare("qkv", recompute=1.0), TensorShare("mlp", recompute=1.0))


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """A plan and the name of the case that it covers, such as "ring of 4" or "slices, ulysses of 2, recomputed"."""

    name: str
    plan: StepPlan
    # heads are exchanged in parts, however short the documents are
    in_parts: bool = False


def probe_lengths(long_tokens: int) -> tuple[int, ...]:
    """Returns the number of tokens of each document of a probe; document `LONG` has `long_tokens` (at least 8)."""
    return (max(2, long_tokens // 3), max(2, long_tokens // 8), long_tokens, 7, 4)


def least_lent_tokens(num_stages: int, degree: int) -> int:
    """Returns the fewest tokens of a document with which idle stages can be lent to slices: one per slice and rank."""
    return max(_NUM_SLICES, num_stages) * num_stages * degree


def probe_plans(
    lengths: Sequence[int],
    costs: CostModel,
    config: PlannerConfig,
    num_layers: Sequence[Sequence[int]],
    has_policies: bool,
    blocks: tuple[Blocks, ...] = (),
) -> tuple[ProbePlan, ...]:
    """Makes the plans for documents of `probe_lengths`, for a run with these costs and limits.

    num_layers: number of layers in every layer range of every stage, for the model that runs the plans. has_policies: whether the
    run may plan activation policies. Plans have slices if a run may have them, with policies and in pipelines; and lent stages,
    if the run may lend them and the long document has enough tokens for all ranks. blocks: those of every document, which no
    slice cuts and no ring runs; (): none.
    """
    ranks_per_stage = costs.cluster.num_ranks // len(num_layers)
    cluster = replace(costs.cluster, num_ranks=ranks_per_stage)
    degree = max(degree for degree in config.degrees if degree <= ranks_per_stage)
    shapes = group_shapes(degree, costs.method, costs.model, cluster) or (GroupShape(1),)
    if blocks:
        shapes = tuple(shape for shape in shapes if shape.num_blocks == 1)
    sequences = StepSequences(tuple(lengths), blocks)
    ranges = _layer_ranges(num_layers)
    whole = (Chunk(0, tuple(Span(i, 0, lengths[i]) for i in PACKED)),)
    groups = [SequenceGroup.of(shape, range(shape.degree), whole) for shape in shapes]
    how = sequences, ranks_per_stage, ranges, costs
    probes = [
        ProbePlan(_name(shape), _plan([group], *how, config.output_shares)) for shape, group in zip(shapes, groups, strict=True)
    ]
    in_one_block = next((shape for shape in shapes if shape.num_blocks == 1), GroupShape(1))
    has_slices = has_policies or len(num_layers) > 1
    if costs.model.head_parts(in_one_block.ulysses, math.inf) is not None:
        chunks = _slices(sequences) if has_slices else whole
        group = SequenceGroup.of(in_one_block, range(in_one_block.degree), chunks)
        name = ("slices, " if has_slices else "") + f"{_name(in_one_block)}, heads in parts"
        plan = _plan([group], *how, config.output_shares)
        probes.append(ProbePlan(name, plan, in_parts=True))
    for stage in (stage for stage, share in enumerate(config.output_shares[:-1]) if share):
        group = SequenceGroup.of(in_one_block, range(in_one_block.degree), whole)
        shares = [float(other == stage) for other in range(len(ranges))]
        plan = _plan([group], *how, shares)
        probes.append(ProbePlan(f"{_name(in_one_block)}, output head on stage {stage}", plan))
    if has_slices:
        # slices of a hybrid use everything that those of a ring use
        in_several = next((shape for shape in shapes if shape.num_blocks > 1), in_one_block)
        for shape in dict.fromkeys((in_one_block, in_several)):
            sliced = SequenceGroup.of(shape, range(shape.degree), _slices(sequences))
            plan = _plan([sliced], *how, config.output_shares)
            name = f"slices, {_name(shape)}" + (", interleaved" if len(ranges[0]) > 1 else "")
            probes.append(ProbePlan(f"{name}, recomputed", _recomputed(plan)) if has_policies else ProbePlan(name, plan))
        shape = in_one_block
        if has_policies and len(num_layers) == 1 and (pieces := costs.model.head_pieces(shape.ulysses)) > 1:
            group = SequenceGroup.of(shape, range(shape.degree), whole)
            plan = _recomputed(_plan([group], *how, config.output_shares), pieces)
            probes.append(ProbePlan(f"{_name(shape)}, attention in {pieces} pieces of heads", plan))
        if config.lend_stages and lengths[LONG] >= least_lent_tokens(len(num_layers), shape.degree):
            alone = [SequenceGroup.of(shape, range(shape.degree), chunks) for chunks in _long_alone(sequences, len(num_layers))]
            plan = _lent(_plan(alone, *how, config.output_shares))
            probes.append(ProbePlan(f"slices, {_name(shape)}, lent stages", plan))
    return tuple(probes)


def _layer_ranges(num_layers: Sequence[Sequence[int]]) -> list[tuple[LayerRange, ...]]:
    """Makes layer ranges of every stage with these numbers of layers: first range 0 of every stage, then range 1, and so on."""
    counts = [stage_layers[layer_range] for layer_range in range(len(num_layers[0])) for stage_layers in num_layers]
    ranges = [LayerRange(first, count) for first, count in zip([0, *accumulate(counts)], counts, strict=False)]
    return [tuple(ranges[stage :: len(num_layers)]) for stage in range(len(num_layers))]


def _name(shape: GroupShape) -> str:
    if shape.degree == 1:
        return "one rank"
    inner = f" in blocks of {shape.ulysses}" if shape.method == "hybrid" else ""
    return f"{shape.method} of {shape.degree}{inner}"


def _slices(sequences: StepSequences) -> tuple[Chunk, ...]:
    """Makes chunks of the packed documents: slices of the long one, the last with document 0; then document 1 alone."""
    lengths, spans = sequences.lengths, [[span] for span in _cut(sequences, _NUM_SLICES)]
    spans[-1].append(Span(0, 0, lengths[0]))
    spans.append([Span(1, 0, lengths[1])])
    return tuple(Chunk(index, tuple(each)) for index, each in enumerate(spans))


def _long_alone(sequences: StepSequences, num_stages: int) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Makes chunks of two groups: slices of the long document, at least one per stage; the other packed documents."""
    lengths = sequences.lengths
    slices = tuple(Chunk(index, (span,)) for index, span in enumerate(_cut(sequences, max(_NUM_SLICES, num_stages))))
    return slices, (Chunk(0, tuple(Span(i, 0, lengths[i]) for i in PACKED if i != LONG)),)


def _cut(sequences: StepSequences, num_slices: int) -> list[Span]:
    """Cuts the long document into slices of equal lengths up to one token, but outside of blocks."""
    cuts = [sequences.lengths[LONG] * place // num_slices for place in range(num_slices + 1)]
    cuts = [*outside_blocks(cuts, sequences.blocks[LONG] if sequences.blocks else ())]
    return [Span(LONG, start, stop) for start, stop in pairwise(cuts)]


def _plan(
    groups: Sequence[SequenceGroup],
    sequences: StepSequences,
    num_ranks: int,
    ranges: Sequence[tuple[LayerRange, ...]],
    costs: CostModel,
    output_shares: Sequence[float],
) -> StepPlan:
    """Makes a plan with a micro-batch for each group, then one for the lone documents on the first and the last rank.

    Ranks without documents run dummy chunks, in the same order of actions.
    """
    lengths = sequences.lengths
    schedule: Schedule = "interleaved" if len(ranges[0]) > 1 else "elastic"
    micro_batches = []
    for group in (pipelined(each, ranges, schedule, output_shares=output_shares) for each in groups):
        # under sharded parameters all ranks must run the same order of action kinds
        dummies = tuple(Chunk(chunk.index) for chunk in group.chunks)
        idle = [SequenceGroup((place,), "local", dummies, group.stages) for place in range(group.degree, num_ranks)]
        micro_batches.append(MicroBatch((group, *idle)))
    members: dict[int, list[int]] = {position: [] for position in range(num_ranks)}
    for place, sequence in enumerate(LONE):
        members[(num_ranks - 1) * place].append(sequence)
    lone = [
        pipelined(
            SequenceGroup((position,), "local", (Chunk(0, tuple(Span(i, 0, lengths[i]) for i in each)),), ()),
            ranges,
            schedule,
            output_shares=output_shares,
        )
        for position, each in members.items()
    ]
    return validate_plan(
        StepPlan(
            step=0,
            lengths=lengths,
            blocks=sequences.blocks,
            num_stages=len(ranges),
            ranks_per_stage=num_ranks,
            parameters=costs.parameters,
            micro_batches=(*micro_batches, MicroBatch(tuple(lone))),
            shard_ranks=costs.shards,
            node_ranks=costs.node_ranks,
        )
    )


def _lent(plan: StepPlan) -> StepPlan:
    """Returns the plan with idle stages lent to the first and last slices of its first group."""
    first, *others = plan.micro_batches
    lent = MicroBatch((lent_group(first.groups[0]), *first.groups[1:]))
    return validate_plan(replace(plan, micro_batches=(lent, *others)))


def _recomputed(plan: StepPlan, head_pieces: int = 1) -> StepPlan:
    """Returns the plan with a policy for every chunk: recompute all but half of attention's output, and tile the loss.

    Rings keep all of attention's output, or none. head_pieces: see `LayerPolicy`.
    """

    def with_policies(group: SequenceGroup, stage: StagePlan) -> StagePlan:
        is_ring = group.shape.num_blocks > 1
        shares = _REPLAYED if is_ring else (*_REPLAYED, TensorShare("attention_output", recompute=0.5, device=0.5))
        policies = (
            ActivationPolicy(chunk.index, layer_range, (LayerPolicy(shares, head_pieces),) * layers.num_layers, _TILE_TOKENS)
            for layer_range, layers in enumerate(stage.layer_ranges)
            for chunk in group.chunks
        )
        return replace(stage, activations=tuple(policies))

    micro_batches = tuple(
        MicroBatch(
            tuple(
                replace(group, stages=tuple(with_policies(group, stage) for stage in group.stages))
                for group in micro_batch.groups
            )
        )
        for micro_batch in plan.micro_batches
    )
    return validate_plan(replace(plan, micro_batches=micro_batches))

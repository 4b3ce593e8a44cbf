"""Check every invariant of a plan before any rank executes it. An error prints the schedule grid with the action marked.

The planner validates every plan it makes, and the command line every plan it reads. The invariants:

- spans cover every token of every sequence once
- groups of a micro-batch are disjoint; every rank takes part in the step
- groups of a micro-batch cover every rank of the stage, but with replicated parameters they may leave ranks out, and with
  parameters sharded in blocks of ranks they may leave whole blocks out
- slices of a sequence are in order within one group, and their backwards run in reverse order
- every forward precedes its backward
- sends and receives between two stages come in the same order
- model parts and policies fit the layers of the stage
- with sharded parameters all groups of a micro-batch run the same order of action kinds
- where a limit is given, the predicted peak of every rank is within it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hf_longctx.plan.core.schedule import PlanError, check_schedule, schedule_grid
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.types import METHODS, PARAMETERS, TENSOR_CLASSES, MicroBatch, SequenceGroup, StagePlan, StepPlan

__all__ = ["PlanError", "describe_plan", "schedule_grid", "validate_plan"]

_SHARE_TOLERANCE = 1e-6
# most ranks of a plan; more would be a damaged file
_MOST_RANKS = 2**20


def validate_plan(plan: StepPlan, limit_bytes: int = 0, host_limit_bytes: int | None = None) -> StepPlan:
    """Return `plan` if every invariant holds, else raise PlanError.

    limit_bytes: most bytes that a rank is predicted to need on its device (0: no limit). host_limit_bytes: most bytes of saved
    tensors on a rank's host (None: no limit).
    """
    _check_shape(plan)
    _check_cover(plan)
    for index, micro_batch in enumerate(plan.micro_batches):
        _check_positions(plan, index, micro_batch)
        for group in micro_batch.groups:
            _check_group(plan, f"micro-batch {index}, group {group.positions}", group)
        if plan.parameters == "sharded":
            for block in range(plan.ranks_per_stage // plan.block_ranks):
                _check_same_order(index, micro_batch, block, plan.block_ranks)
    _check_every_rank(plan)
    _check_same_layers(plan)
    _check_interleaving(plan)
    if limit_bytes and plan.estimate.peak_bytes > limit_bytes:
        raise PlanError(
            f"the plan of step {plan.step} is predicted to need {plan.estimate.peak_bytes / 2**30:.2f} GiB on a rank, but the "
            f"limit is {limit_bytes / 2**30:.2f} GiB; lower tokens_per_rank or allow larger degrees"
        )
    if host_limit_bytes is not None and plan.estimate.host_bytes > host_limit_bytes:
        raise PlanError(
            f"the plan of step {plan.step} is predicted to put {plan.estimate.host_bytes / 2**30:.2f} GiB on the host of a rank, "
            f"but the limit is {host_limit_bytes / 2**30:.2f} GiB; allow more host memory (host_gib) or larger degrees"
        )
    return plan


def _check_interleaving(plan: StepPlan) -> None:
    """Shards are freed and gathered with the whole of a stage, so they go with one layer range per stage."""
    stages = (stage for micro_batch in plan.micro_batches for group in micro_batch.groups for stage in group.stages)
    num_parts = max((len(stage.parts) for stage in stages), default=1)
    if num_parts > 1 and plan.parameters != "replicated":
        raise PlanError(
            f"the plan interleaves {num_parts} layer ranges per stage with parameters {plan.parameters!r}; interleaving needs "
            f"parameters 'replicated'"
        )


def describe_plan(plan: StepPlan) -> str:
    """The whole plan as text: a line for every micro-batch and group, with chunks and schedule."""
    lines = [
        f"step {plan.step}: {len(plan.lengths)} sequences, {sum(plan.lengths)} tokens, {plan.num_stages} stage(s) x "
        f"{plan.ranks_per_stage} rank(s), parameters {plan.parameters}, layout {plan.layout}, digest {plan_digest(plan)}"
    ]
    for index, micro_batch in enumerate(plan.micro_batches):
        lines.append(f"micro-batch {index} {micro_batch.layout}, {micro_batch.num_tokens} tokens")
        for group in micro_batch.groups:
            chunks = "; ".join(
                f"{chunk.index}: "
                + (", ".join(f"{s.sequence}[{s.start}:{s.stop}]" for s in chunk.spans) if chunk.spans else "dummy")
                for chunk in group.chunks
            )
            lines.append(f" group {group.positions} {group.method}: {chunks}")
            lines.append(schedule_grid(group))
    return "\n".join(lines)


def _check_shape(plan: StepPlan) -> None:
    if plan.num_stages < 1 or plan.ranks_per_stage < 1:
        raise PlanError(
            f"the plan has {plan.num_stages} stage(s) of {plan.ranks_per_stage} rank(s); it needs at least one stage and one rank"
        )
    if plan.num_stages * plan.ranks_per_stage > _MOST_RANKS:
        raise PlanError(f"the plan is for {plan.num_stages} x {plan.ranks_per_stage} ranks; at most {_MOST_RANKS} can be checked")
    if plan.parameters not in PARAMETERS:
        raise PlanError(f"parameters {plan.parameters!r} is not one of {', '.join(PARAMETERS)}")
    if plan.shard_ranks < 0 or (plan.shard_ranks and plan.ranks_per_stage % plan.shard_ranks):
        raise PlanError(f"shard_ranks {plan.shard_ranks} does not divide the {plan.ranks_per_stage} ranks of a stage")
    if plan.shard_ranks and plan.parameters == "replicated":
        raise PlanError(f"shard_ranks {plan.shard_ranks} is for sharded parameters, but these are replicated; set it to 0")
    if not plan.micro_batches:
        raise PlanError("a plan needs at least one micro-batch")
    for sequence, length in enumerate(plan.lengths):
        if length < 1:
            raise PlanError(f"sequence {sequence} has {length} tokens; every sequence needs at least one")


def _check_cover(plan: StepPlan) -> None:
    covered: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            for chunk in group.chunks:
                for span in chunk.spans:
                    if not 0 <= span.sequence < len(plan.lengths):
                        raise PlanError(f"{span} names sequence {span.sequence}, but the plan has {len(plan.lengths)} sequences")
                    if not 0 <= span.start < span.stop <= plan.lengths[span.sequence]:
                        raise PlanError(
                            f"{span} is empty or outside its sequence, which has {plan.lengths[span.sequence]} tokens"
                        )
                    covered[span.sequence].append((span.start, span.stop))
    for sequence, length in enumerate(plan.lengths):
        reached = 0
        for start, stop in sorted(covered[sequence]):
            if start != reached:
                fault = "planned twice" if start < reached else "never planned"
                raise PlanError(f"sequence {sequence}: tokens {min(start, reached)} to {max(start, reached)} are {fault}")
            reached = stop
        if reached != length:
            raise PlanError(f"sequence {sequence}: tokens {reached} to {length} are never planned")


def _check_positions(plan: StepPlan, index: int, micro_batch: MicroBatch) -> None:
    taken: set[int] = set()
    for group in micro_batch.groups:
        positions = group.positions
        if not positions or list(positions) != sorted(set(positions)):
            raise PlanError(f"micro-batch {index}: positions {positions} are empty, repeated or not ascending")
        if not 0 <= positions[0] <= positions[-1] < plan.ranks_per_stage:
            raise PlanError(
                f"micro-batch {index}: positions {positions} are not all within 0..{plan.ranks_per_stage - 1}, the stage's ranks"
            )
        if shared := taken & set(positions):
            raise PlanError(f"micro-batch {index}: position {min(shared)} is in two groups")
        taken |= set(positions)
    block = plan.block_ranks
    blocks = {position // block for position in taken}
    if idle := sorted({position for b in blocks for position in range(b * block, (b + 1) * block)} - taken):
        raise PlanError(
            f"micro-batch {index}: positions {idle} have no group; with {plan.parameters} parameters every rank must take part "
            f"in every micro-batch of its block of {block} ranks; give it a group with the dummy chunk"
        )


def _check_every_rank(plan: StepPlan) -> None:
    busy = {position for mb in plan.micro_batches for group in mb.groups for position in group.positions}
    if idle := sorted(set(range(plan.ranks_per_stage)) - busy):
        raise PlanError(f"positions {idle} take part in no micro-batch of the step; give them a group with the dummy chunk")


def _check_group(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    if group.method not in METHODS:
        raise PlanError(f"{name}: method {group.method!r} is not one of {', '.join(METHODS)}")
    if (group.method == "local") != (group.degree == 1):
        raise PlanError(f"{name}: method {group.method!r} does not fit {group.degree} rank(s); 'local' means exactly one rank")
    block = group.ulysses_degree
    if group.method != "hybrid" and block:
        raise PlanError(f"{name}: ulysses_degree {block} is for method 'hybrid', not {group.method!r}; set it to 0")
    if group.method == "hybrid" and not (1 < block < group.degree and group.degree % block == 0):
        raise PlanError(
            f"{name}: ulysses_degree {block} of a hybrid group must divide its {group.degree} ranks, be more than 1 and less "
            f"than {group.degree}"
        )
    if [chunk.index for chunk in group.chunks] != list(range(len(group.chunks))) or not group.chunks:
        raise PlanError(f"{name}: chunk indices must be 0, 1, ... in order, with at least one chunk")
    if [stage.stage for stage in group.stages] != list(range(plan.num_stages)):
        raise PlanError(f"{name}: needs one stage plan for each of the {plan.num_stages} stages, in order")
    _check_slices(plan, name, group)
    _check_layers(name, group)
    for stage in group.stages:
        _check_policies(name, group, stage)
    check_schedule(plan, name, group)


def _check_slices(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    """Check that slices of a sequence are in order, all in this group, and each the first span of its chunk."""
    reached: dict[int, int] = {}
    for chunk in group.chunks:
        for index, span in enumerate(chunk.spans):
            is_slice = span.start > 0 or span.stop < plan.lengths[span.sequence]
            if is_slice and index > 0:
                raise PlanError(
                    f"{name}: chunk {chunk.index} holds a slice of sequence {span.sequence} after another span; a slice must "
                    f"come first in its chunk"
                )
            if span.start != reached.get(span.sequence, 0):
                raise PlanError(
                    f"{name}: chunk {chunk.index} starts sequence {span.sequence} at token {span.start}, but its earlier "
                    f"slices in this group end at {reached.get(span.sequence, 0)}"
                )
            reached[span.sequence] = span.stop


def _check_layers(name: str, group: SequenceGroup) -> None:
    """Check that part 0 of every stage, then part 1 of every stage, and so on, hold the model's layers without a gap."""
    num_parts = {len(stage.parts) for stage in group.stages}
    if len(num_parts) != 1 or 0 in num_parts:
        raise PlanError(f"{name}: every stage needs the same number of parts, at least one; found {sorted(num_parts)}")
    next_layer = 0
    for part in range(num_parts.pop()):
        for stage in group.stages:
            layers = stage.parts[part]
            if layers.num_layers < 1 or layers.first_layer != next_layer:
                raise PlanError(
                    f"{name}: part {part} of stage {stage.stage} holds layers {layers.first_layer} to "
                    f"{layers.first_layer + layers.num_layers}, expected at least one layer from {next_layer} on"
                )
            next_layer += layers.num_layers


def _check_policies(name: str, group: SequenceGroup, stage: StagePlan) -> None:
    seen: set[tuple[int, int]] = set()
    # equal layer policies are often one object for many chunks; check it once
    checked: set[int] = set()
    for policy in stage.activations:
        where = f"{name}: policy of chunk {policy.chunk}, part {policy.part} on stage {stage.stage}"
        is_known = 0 <= policy.chunk < len(group.chunks) and 0 <= policy.part < len(stage.parts)
        if not is_known or (policy.chunk, policy.part) in seen:
            raise PlanError(f"{where} names an unknown chunk or part, or is given twice")
        seen.add((policy.chunk, policy.part))
        if len(policy.layers) > stage.parts[policy.part].num_layers:
            raise PlanError(f"{where} has {len(policy.layers)} layers, but the part has {stage.parts[policy.part].num_layers}")
        if policy.tile_tokens < 0:
            raise PlanError(f"{where} has tile_tokens {policy.tile_tokens}; it must be 0 (untiled) or more")
        fresh = [layer for layer in policy.layers if id(layer) not in checked]
        checked.update(map(id, fresh))
        for layer in fresh:
            if layer.head_pieces < 1 or (layer.head_pieces > 1 and layer.share("qkv").recompute < 1):
                raise PlanError(
                    f"{where}: attention in {layer.head_pieces} pieces of heads; there must be at least 1, and of more than 1 "
                    f"the queries, keys and values are recomputed"
                )
        for share in (share for layer in fresh for share in layer.shares):
            if share.tensor_class not in TENSOR_CLASSES:
                raise PlanError(f"{where}: tensor class {share.tensor_class!r} is not one of {', '.join(TENSOR_CLASSES)}")
            shares = (share.recompute, share.host, share.device)
            # written so that NaN fails too
            if not (min(shares) >= 0 and abs(share.total - 1) <= _SHARE_TOLERANCE):
                raise PlanError(f"{where}: shares {shares} of {share.tensor_class} must be >= 0 and sum to 1")


def _check_same_layers(plan: StepPlan) -> None:
    """Check that a stage holds the same layers in every group and micro-batch: a plan moves tokens, never weights."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    expected = [stage.parts for stage in groups[0].stages]
    for group in groups:
        for stage, parts in zip(group.stages, expected, strict=True):
            if stage.parts != parts:
                raise PlanError(f"stage {stage.stage} holds {stage.parts} in group {group.positions}, but {parts} elsewhere")


def _check_same_order(index: int, micro_batch: MicroBatch, block: int, block_ranks: int) -> None:
    groups = [group for group in micro_batch.groups if any(position // block_ranks == block for position in group.positions)]
    orders: set[tuple[Sequence[tuple[str, int]], ...]] = {
        tuple(tuple((a.kind, a.part) for a in stage.actions if a.kind in ("F", "B")) for stage in group.stages)
        for group in groups
    }
    if len(orders) > 1:
        grids = "\n".join(f" group {group.positions}\n{schedule_grid(group)}" for group in groups)
        raise PlanError(
            f"micro-batch {index}: with sharded parameters all groups must run F and B in the same order, because every "
            f"forward and backward gathers parameters over all ranks that share them\n{grids}"
        )

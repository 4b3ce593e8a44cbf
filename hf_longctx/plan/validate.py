"""Every invariant of a plan, proved before anyone acts. A violation prints the schedule grid with the action marked.

What is checked: spans cover every planned token once; groups of a micro-batch are disjoint and cover every rank of the
stage (with replicated parameters they may leave ranks out, but every rank takes part in the step); slices of a sequence
are in order inside one group and their backward runs in reverse; every forward precedes its backward; sends and receives
match in order on every link; parts and policies fit the stage's layers; under sharded parameters all groups of a
micro-batch run the same order of action kinds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hf_longctx.plan.types import (
    ACTION_KINDS,
    METHODS,
    PARAMETERS,
    TENSOR_CLASSES,
    Action,
    MicroBatch,
    SequenceGroup,
    StagePlan,
    StepPlan,
)

_SHARE_TOLERANCE = 1e-6


class PlanError(ValueError):
    """A plan that breaks an invariant; the message ends with the schedule grid where one action is at fault."""


def validate_plan(plan: StepPlan, limit_bytes: int = 0) -> StepPlan:
    """`plan` itself when every invariant holds, else PlanError. `limit_bytes` > 0 also bounds the predicted peak."""
    _check_shape(plan)
    _check_cover(plan)
    for index, micro_batch in enumerate(plan.micro_batches):
        _check_positions(plan, index, micro_batch)
        for group in micro_batch.groups:
            _check_group(plan, f"micro-batch {index}, group {group.positions}", group)
        if plan.parameters == "sharded":
            _check_same_order(index, micro_batch)
    _check_every_rank(plan)
    if limit_bytes and plan.estimate.peak_bytes > limit_bytes:
        raise PlanError(
            f"the plan of step {plan.step} is predicted to need {plan.estimate.peak_bytes / 2**30:.2f} GiB on a rank, the "
            f"limit is {limit_bytes / 2**30:.2f} GiB; lower tokens_per_rank or allow larger degrees"
        )
    return plan


def schedule_grid(group: SequenceGroup, marked: tuple[int, int] | None = None) -> str:
    """One line per stage with its actions in order; `marked` = (stage, action index) stands between > and <."""
    lines = []
    for stage in group.stages:
        words = [f">{action}<" if marked == (stage.stage, place) else str(action) for place, action in enumerate(stage.actions)]
        lines.append(f"  stage {stage.stage}: " + " ".join(words))
    return "\n".join(lines)


def describe_plan(plan: StepPlan) -> str:
    """The whole plan as text: a line per micro-batch and group, with its chunks and schedule."""
    lines = [
        f"step {plan.step}: {len(plan.lengths)} sequences, {sum(plan.lengths)} tokens, {plan.num_stages} stage(s) x "
        f"{plan.ranks_per_stage} rank(s), parameters {plan.parameters}, layout {plan.layout}, digest {plan.digest}"
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
        raise PlanError(f"a plan needs at least one stage and one rank, not {plan.num_stages} x {plan.ranks_per_stage}")
    if plan.parameters not in PARAMETERS:
        raise PlanError(f"parameters {plan.parameters!r} is not one of {', '.join(PARAMETERS)}")
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
                        raise PlanError(f"{span} names sequence {span.sequence} of {len(plan.lengths)}")
                    if not 0 <= span.start < span.stop <= plan.lengths[span.sequence]:
                        raise PlanError(f"{span} is empty or outside its {plan.lengths[span.sequence]} tokens")
                    covered[span.sequence].append((span.start, span.stop))
    for sequence, length in enumerate(plan.lengths):
        place = 0
        for start, stop in sorted(covered[sequence]):
            if start != place:
                fault = "planned twice" if start < place else "never planned"
                raise PlanError(f"sequence {sequence}: tokens {min(start, place)} to {max(start, place)} are {fault}")
            place = stop
        if place != length:
            raise PlanError(f"sequence {sequence}: tokens {place} to {length} are never planned")


def _check_positions(plan: StepPlan, index: int, micro_batch: MicroBatch) -> None:
    taken: set[int] = set()
    for group in micro_batch.groups:
        positions = group.positions
        if not positions or list(positions) != sorted(set(positions)):
            raise PlanError(f"micro-batch {index}: positions {positions} are empty, repeated or not ascending")
        if not 0 <= positions[0] <= positions[-1] < plan.ranks_per_stage:
            raise PlanError(f"micro-batch {index}: positions {positions} leave 0..{plan.ranks_per_stage - 1}")
        if shared := taken & set(positions):
            raise PlanError(f"micro-batch {index}: position {min(shared)} is in two groups")
        taken |= set(positions)
    if plan.parameters != "replicated" and len(taken) != plan.ranks_per_stage:
        idle = sorted(set(range(plan.ranks_per_stage)) - taken)
        raise PlanError(
            f"micro-batch {index}: positions {idle} have no group; with {plan.parameters} parameters every rank takes part "
            f"in every micro-batch (give it a group with the dummy chunk)"
        )


def _check_every_rank(plan: StepPlan) -> None:
    busy = {position for mb in plan.micro_batches for group in mb.groups for position in group.positions}
    if idle := sorted(set(range(plan.ranks_per_stage)) - busy):
        raise PlanError(f"positions {idle} take part in no micro-batch of the step; give them the dummy chunk")


def _check_group(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    if group.method not in METHODS:
        raise PlanError(f"{name}: method {group.method!r} is not one of {', '.join(METHODS)}")
    if (group.method == "local") != (group.degree == 1):
        raise PlanError(f"{name}: method {group.method!r} does not fit {group.degree} rank(s); one rank is 'local'")
    if [chunk.index for chunk in group.chunks] != list(range(len(group.chunks))) or not group.chunks:
        raise PlanError(f"{name}: chunk indices must be 0, 1, ... in order, at least one")
    if [stage.stage for stage in group.stages] != list(range(plan.num_stages)):
        raise PlanError(f"{name}: needs one stage plan for each of the {plan.num_stages} stages, in order")
    _check_slices(plan, name, group)
    for stage in group.stages:
        _check_parts(name, stage)
        _check_compute(plan, name, group, stage)
        _check_policies(name, group, stage)
    if plan.num_stages > 1 or any(len(stage.parts) > 1 for stage in group.stages):
        _check_links(name, group)


def _check_slices(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    """Slices are in order, in one group, alone or at the head of their chunk."""
    reached: dict[int, int] = {}
    for chunk in group.chunks:
        for place, span in enumerate(chunk.spans):
            partial = span.start > 0 or span.stop < plan.lengths[span.sequence]
            if partial and place > 0:
                raise PlanError(f"{name}: chunk {chunk.index} holds a slice of sequence {span.sequence} behind another span")
            if span.start != reached.get(span.sequence, 0):
                raise PlanError(
                    f"{name}: chunk {chunk.index} starts sequence {span.sequence} at token {span.start}, but its earlier "
                    f"slices in this group end at {reached.get(span.sequence, 0)}"
                )
            reached[span.sequence] = span.stop


def _check_parts(name: str, stage: StagePlan) -> None:
    place = -1
    for part in stage.parts:
        if part.num_layers < 1 or part.first_layer < max(place, 0):
            raise PlanError(f"{name}: stage {stage.stage} has empty, overlapping or unordered parts {stage.parts}")
        place = part.first_layer + part.num_layers
    if not stage.parts:
        raise PlanError(f"{name}: stage {stage.stage} has no layers")


def _fault(name: str, group: SequenceGroup, stage: StagePlan, place: int, text: str) -> PlanError:
    grid = schedule_grid(group, (stage.stage, place))
    return PlanError(f"{name}: {stage.actions[place]} {text}\n{grid}")


def _check_compute(plan: StepPlan, name: str, group: SequenceGroup, stage: StagePlan) -> None:
    """Every chunk runs F then B once per part; slices of a sequence forward in order and backward in reverse."""
    done: dict[tuple[str, int, int], int] = {}
    for place, action in enumerate(stage.actions):
        if action.kind not in ACTION_KINDS or action.stage != stage.stage:
            raise _fault(name, group, stage, place, f"does not belong to stage {stage.stage}")
        if action.chunk >= len(group.chunks) or action.part >= len(stage.parts):
            raise _fault(name, group, stage, place, "names a chunk or part that does not exist")
        _check_helpers(plan, name, group, stage, place)
        key = (action.kind, action.part, action.chunk)
        if action.kind in ("F", "B") and key in done:
            raise _fault(name, group, stage, place, "runs twice")
        if action.kind == "B" and ("F", action.part, action.chunk) not in done:
            raise _fault(name, group, stage, place, "runs before its forward")
        for other in _slice_neighbours(group, action):
            if (action.kind, action.part, other) not in done:
                order = "before the slice in front of it" if action.kind == "F" else "before the slice behind it"
                raise _fault(name, group, stage, place, f"runs {order} (chunk {other})")
        done[key] = place
    for part in range(len(stage.parts)):
        for chunk in group.chunks:
            for kind in ("F", "B"):
                if (kind, part, chunk.index) not in done:
                    missing = Action(kind=kind, stage=stage.stage, chunk=chunk.index, part=part)
                    raise PlanError(f"{name}: {missing} is missing\n{schedule_grid(group)}")


def _slice_neighbours(group: SequenceGroup, action: Action) -> Iterator[int]:
    """Chunks that must have run the same kind before: the previous slice for F, the next slice for B."""
    if action.kind not in ("F", "B"):
        return
    sequences = {span.sequence for span in group.chunks[action.chunk].spans}
    step = -1 if action.kind == "F" else 1
    neighbours = range(action.chunk + step, -1 if step < 0 else len(group.chunks), step)
    for sequence in sequences:
        for other in neighbours:
            if any(span.sequence == sequence for span in group.chunks[other].spans):
                yield other
                break


def _check_helpers(plan: StepPlan, name: str, group: SequenceGroup, stage: StagePlan, place: int) -> None:
    action = stage.actions[place]
    if action.helpers and action.kind not in ("F", "B"):
        raise _fault(name, group, stage, place, "has helpers, but only F and B can be shared")
    if len(set(action.helpers)) != len(action.helpers):
        raise _fault(name, group, stage, place, "names a helper twice")
    for helper_stage, position in action.helpers:
        if helper_stage == stage.stage or not 0 <= helper_stage < plan.num_stages:
            raise _fault(name, group, stage, place, f"names helper stage {helper_stage}, which must be another stage")
        if not 0 <= position < plan.ranks_per_stage:
            raise _fault(name, group, stage, place, f"names helper position {position} of {plan.ranks_per_stage}")


def _check_policies(name: str, group: SequenceGroup, stage: StagePlan) -> None:
    seen: set[tuple[int, int]] = set()
    for policy in stage.activations:
        where = f"{name}: policy of chunk {policy.chunk}, part {policy.part} on stage {stage.stage}"
        if policy.chunk >= len(group.chunks) or policy.part >= len(stage.parts) or (policy.chunk, policy.part) in seen:
            raise PlanError(f"{where} names an unknown chunk or part, or stands twice")
        seen.add((policy.chunk, policy.part))
        if len(policy.layers) > stage.parts[policy.part].num_layers:
            raise PlanError(f"{where} has {len(policy.layers)} layers, the part has {stage.parts[policy.part].num_layers}")
        if policy.tile_tokens < 0:
            raise PlanError(f"{where} has tile_tokens {policy.tile_tokens}; 0 means untiled")
        for share in (share for layer in policy.layers for share in layer.shares):
            if share.tensor_class not in TENSOR_CLASSES:
                raise PlanError(f"{where}: tensor class {share.tensor_class!r} is not one of {', '.join(TENSOR_CLASSES)}")
            parts = (share.recompute, share.nvme, share.host, share.device)
            if min(parts) < 0 or abs(share.total - 1) > _SHARE_TOLERANCE:
                raise PlanError(f"{where}: shares {parts} of {share.tensor_class} must be >= 0 and sum to 1")


def _check_links(name: str, group: SequenceGroup) -> None:
    """What one end of a link sends in order, the other end receives in order; sends follow and receives precede compute."""
    num_parts = {len(stage.parts) for stage in group.stages}
    if len(num_parts) != 1:
        raise PlanError(f"{name}: stages have different numbers of parts, {sorted(num_parts)}")
    virtual = [(stage, part) for part in range(num_parts.pop()) for stage in range(len(group.stages))]
    for (stage, part), (next_stage, next_part) in itertools.pairwise(virtual):
        pairs = (
            ("SF", (stage, part), "RF", (next_stage, next_part)),
            ("SB", (next_stage, next_part), "RB", (stage, part)),
        )
        for send, sender, receive, receiver in pairs:
            sent, received = _chunks_of(group, sender, send), _chunks_of(group, receiver, receive)
            if stage != next_stage and sent != received:
                raise PlanError(
                    f"{name}: stage {sender[0]} part {sender[1]} sends {send} of chunks {sent}, but stage {receiver[0]} part "
                    f"{receiver[1]} receives {receive} of chunks {received}\n{schedule_grid(group)}"
                )
            if stage != next_stage and sorted(sent) != list(range(len(group.chunks))):
                raise PlanError(f"{name}: {send} of stage {sender[0]} must move every chunk once\n{schedule_grid(group)}")
    for stage_plan in group.stages:
        _check_transfer_order(name, group, stage_plan)
    _check_progress(name, group, virtual)


def _chunks_of(group: SequenceGroup, end: tuple[int, int], kind: str) -> list[int]:
    stage, part = end
    return [action.chunk for action in group.stages[stage].actions if (action.kind, action.part) == (kind, part)]


def _check_transfer_order(name: str, group: SequenceGroup, stage: StagePlan) -> None:
    first: dict[tuple[str, int, int], int] = {}
    for place, action in enumerate(stage.actions):
        first.setdefault((action.kind, action.part, action.chunk), place)
    before = (("RF", "F"), ("F", "SF"), ("RB", "B"), ("B", "SB"))
    for (kind, part, chunk), place in first.items():
        for earlier, later in before:
            other = first.get((earlier, part, chunk))
            if kind == later and other is not None and other > place:
                raise _fault(name, group, stage, place, f"runs before its {earlier}")


def _check_progress(name: str, group: SequenceGroup, virtual: list[tuple[int, int]]) -> None:
    """Runs all stages with buffered sends; a stage that waits for ever names the receive it waits at."""
    follows = dict(itertools.pairwise(virtual))
    precedes = {later: earlier for earlier, later in follows.items()}
    sent: set[tuple[str, tuple[int, int] | None, int]] = set()
    places = [0] * len(group.stages)
    moved = True
    while moved:
        moved = False
        for index, stage in enumerate(group.stages):
            while places[index] < len(stage.actions):
                action = stage.actions[places[index]]
                end = (action.stage, action.part)
                source = precedes.get(end) if action.kind == "RF" else follows.get(end)
                if action.kind in ("RF", "RB") and ("S" + action.kind[1], source, action.chunk) not in sent:
                    break
                if action.kind in ("SF", "SB"):
                    sent.add((action.kind, end, action.chunk))
                places[index] += 1
                moved = True
    for index, stage in enumerate(group.stages):
        if places[index] < len(stage.actions):
            raise _fault(name, group, stage, places[index], "waits for ever: deadlock")


def _check_same_order(index: int, micro_batch: MicroBatch) -> None:
    orders: set[tuple[Sequence[str], ...]] = {
        tuple(tuple(a.kind for a in stage.actions if a.kind in ("F", "B")) for stage in group.stages)
        for group in micro_batch.groups
    }
    if len(orders) > 1:
        grids = "\n".join(f" group {group.positions}\n{schedule_grid(group)}" for group in micro_batch.groups)
        raise PlanError(
            f"micro-batch {index}: with sharded parameters all groups must run F and B in the same order, because every "
            f"forward gathers parameters over the whole stage\n{grids}"
        )

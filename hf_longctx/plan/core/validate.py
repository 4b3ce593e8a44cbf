"""Checks every invariant of a plan before any rank executes it. An error prints the schedule grid with the action marked.

The planner validates every plan it makes, and the command line every plan it reads. The invariants:

- spans cover every token of every sequence once
- groups of a micro-batch are disjoint; every rank takes part in the step
- groups of a micro-batch cover every rank of the stage, but with replicated parameters they may leave ranks out, and with
  parameters sharded in blocks of ranks they may leave whole blocks out
- slices of a sequence are in order within one group, and their backwards run in reverse order
- every forward precedes its backward
- output heads on other stages than the last one have their messages; the last stage computes those of all other chunks
- sends and receives between two stages come in the same order, except for gradients of output heads
- layer ranges and policies fit the layers of the stage
- if ranks meet in every pass (`meets_in_every_pass`), all groups of a micro-batch run the same order of action kinds
- with turns, all groups of a micro-batch run one order of passes with messages beside them, turns name every pass once, and the
  stages can run them
- the predicted peak of every rank is within the limit, if one is given
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hf_longctx.plan.core.lending import lender_fault
from hf_longctx.plan.core.messages import shortened
from hf_longctx.plan.core.orders import ACTION_CODES, MessagedPasses, joined_stages
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.sharding import images_of
from hf_longctx.plan.core.types import (
    ACTION_KINDS,
    METHODS,
    PARAMETERS,
    PASSES,
    TENSOR_CLASSES,
    Action,
    ActionKind,
    MicroBatch,
    SequenceGroup,
    StagePlan,
    StepPlan,
    frees_every_round,
    keeps_node_copies,
    meets_in_every_pass,
)

# (stage, layer range): one link in the chain of layer ranges that a chunk passes through
_Link = tuple[int, int]

# kind of action -> kinds that must precede it for the same chunk and layer range
_BEFORE: dict[str, tuple[ActionKind, ...]] = {
    "F": ("RF",),
    "SF": ("F",),
    "B": ("RB",),
    "SB": ("B", "H"),
    "H": ("RF",),
}


class PlanError(ValueError):
    """Raised if a plan breaks an invariant; if one action is at fault, the message ends with the grid that marks it."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def schedule_grid(group: SequenceGroup, marked: tuple[int, int] | None = None) -> str:
    """Prints one line per stage with its actions in order; the action `marked` = (stage, index) is between > and <."""
    lines = []
    for stage in group.stages:
        words = [f">{action}<" if marked == (stage.stage, index) else str(action) for index, action in enumerate(stage.actions)]
        lines.append(f"  stage {stage.stage}: " + " ".join(words))
    return "\n".join(lines)


def check_schedule(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    """Raises PlanError unless the stages of the group can run their actions. name: the group in messages."""
    num_ranges = len(group.stages[0].layer_ranges)
    chain = [(stage, layer_range) for layer_range in range(num_ranges) for stage in range(len(group.stages))]
    neighbours, heads = _slice_neighbours(group), group.head_stages
    for stage in group.stages:
        _check_compute(plan, name, group, stage, neighbours, heads)
        _check_order(name, group, stage)
    _check_layer_ranges_in_order(name, group, chain)
    _check_messages(name, group, chain)
    _check_progress(name, group, chain)


def _check_compute(
    plan: StepPlan,
    name: str,
    group: SequenceGroup,
    stage: StagePlan,
    neighbours: dict[tuple[str, int], list[int]],
    heads: dict[int, int],
) -> None:
    """Checks that every chunk runs F, then B, once per layer range, and slices of a sequence F in order and B in reverse.

    heads: `SequenceGroup.head_stages`, since finding them takes as long as checking a stage.
    """
    done: set[tuple[str, int, int]] = set()
    num_chunks, num_ranges, num_computed = len(group.chunks), len(stage.layer_ranges), 0
    is_inner = num_ranges == 1 and stage.stage < len(group.stages) - 1
    for index, action in enumerate(stage.actions):
        if action.kind not in ACTION_KINDS or action.stage != stage.stage:
            raise _fault(name, group, stage, index, f"does not belong to stage {stage.stage}")
        # an output head comes after all layer ranges
        is_head = action.kind == "H" or (action.kind in ("RF", "SB") and action.layer_range == num_ranges)
        fitting = range(num_ranges, num_ranges + 1) if is_head else range(num_ranges)
        if not 0 <= action.chunk < num_chunks or action.layer_range not in fitting:
            raise _fault(name, group, stage, index, "names a chunk or layer range that does not exist")
        if is_head and (not is_inner or heads.get(action.chunk) != stage.stage):
            raise _fault(
                name,
                group,
                stage,
                index,
                "belongs to an output head, which runs once, on a stage of one layer range before the last stage",
            )
        if action.lenders and (fault := lender_fault(plan, action)):
            raise _fault(name, group, stage, index, fault)
        key = (action.kind, action.layer_range, action.chunk)
        if key in done:
            raise _fault(name, group, stage, index, "runs twice")
        if action.kind == "B" and ("F", action.layer_range, action.chunk) not in done:
            raise _fault(name, group, stage, index, "runs before its forward")
        for other in neighbours.get((action.kind, action.chunk), ()):
            if (action.kind, action.layer_range, other) not in done:
                order = "previous" if action.kind == "F" else "next"
                raise _fault(name, group, stage, index, f"runs before the {order} slice of its sequence (chunk {other})")
        done.add(key)
        num_computed += action.kind in ("F", "B")
    # none runs twice, so this many are all
    if num_computed == 2 * num_chunks * num_ranges:
        return
    for layer_range in range(num_ranges):
        for chunk in group.chunks:
            for kind in ("F", "B"):
                if (kind, layer_range, chunk.index) not in done:
                    missing = Action(kind=kind, stage=stage.stage, chunk=chunk.index, layer_range=layer_range)
                    raise PlanError(f"{name}: {missing} is missing\n{schedule_grid(group)}")


def _slice_neighbours(group: SequenceGroup) -> dict[tuple[str, int], list[int]]:
    """Maps (kind, chunk) to chunks that must run this kind first: those of previous slices for F, of next slices for B."""
    holders: dict[int, list[int]] = defaultdict(list)
    for index, chunk in enumerate(group.chunks):
        for sequence in {span.sequence for span in chunk.spans}:
            holders[sequence].append(index)
    neighbours: dict[tuple[str, int], list[int]] = defaultdict(list)
    for chunks in holders.values():
        for earlier, later in itertools.pairwise(chunks):
            neighbours["F", later].append(earlier)
            neighbours["B", earlier].append(later)
    return neighbours


def _fault(name: str, group: SequenceGroup, stage: StagePlan, index: int, text: str) -> PlanError:
    grid = schedule_grid(group, (stage.stage, index))
    return PlanError(f"{name}: {stage.actions[index]} {text}\n{grid}")


def _check_order(name: str, group: SequenceGroup, stage: StagePlan) -> None:
    """Checks that a chunk is received, computed and sent in this order on every layer range."""
    first: dict[tuple[str, int, int], int] = {}
    for index, action in enumerate(stage.actions):
        first.setdefault((action.kind, action.layer_range, action.chunk), index)
    for (kind, layer_range, chunk), index in first.items():
        for earlier in _BEFORE.get(kind, ()):
            if first.get((earlier, layer_range, chunk), -1) > index:
                raise _fault(name, group, stage, index, f"runs before its {earlier}")


def _check_layer_ranges_in_order(name: str, group: SequenceGroup, chain: list[_Link]) -> None:
    """Checks the order of consecutive layer ranges on the same stage, which pass chunks without a message."""
    for (stage, layer_range), (next_stage, next_range) in itertools.pairwise(chain):
        if stage != next_stage:
            continue
        plan = group.stages[stage]
        when = {(action.kind, action.layer_range, action.chunk): index for index, action in enumerate(plan.actions)}
        for chunk in range(len(group.chunks)):
            if when["F", next_range, chunk] < when["F", layer_range, chunk]:
                raise _fault(name, group, plan, when["F", next_range, chunk], f"runs before layer range {layer_range}'s forward")
            if when["B", layer_range, chunk] < when["B", next_range, chunk]:
                raise _fault(name, group, plan, when["B", layer_range, chunk], f"runs before layer range {next_range}'s backward")


def _check_messages(name: str, group: SequenceGroup, chain: list[_Link]) -> None:
    """Checks that messages are received in the order of sending, and each chunk crosses each stage boundary once each way."""
    follows = dict(itertools.pairwise(chain))
    precedes = {later: earlier for earlier, later in follows.items()}
    heads, last, num_ranges = group.head_stages, chain[-1], len(group.stages[0].layer_ranges)
    precedes |= {(stage, num_ranges): last for stage in heads.values()}
    # (direction, source stage, target stage, whether an output head is at one end) -> (link that produced it, chunk) of every
    # message
    sent: dict[tuple[str, int, int, bool], list[tuple[_Link, int]]] = defaultdict(list)
    received: dict[tuple[str, int, int, bool], list[tuple[_Link, int]]] = defaultdict(list)
    for stage in group.stages:
        for index, action in enumerate(stage.actions):
            if action.kind not in ("SF", "RF", "SB", "RB"):
                continue
            link = (action.stage, action.layer_range)
            goes_on = action.kind in ("SF", "RB")
            to_head = link == last and goes_on and action.chunk in heads
            partner = (heads[action.chunk], num_ranges) if to_head else (follows if goes_on else precedes).get(link)
            if partner is None or partner[0] == stage.stage:
                raise _fault(name, group, stage, index, "has no partner on another stage")
            is_head = num_ranges in (link[1], partner[1])
            if action.kind[0] == "S":
                sent[action.kind[1], stage.stage, partner[0], is_head].append((link, action.chunk))
            else:
                received[action.kind[1], partner[0], stage.stage, is_head].append((partner, action.chunk))
    for key in sorted({*sent, *received}):
        direction, source, target, is_head = key
        # the last stage takes gradients of heads in the order of its backwards
        in_order = sorted if is_head and direction == "B" else list
        if in_order(sent[key]) != in_order(received[key]):
            raise PlanError(
                f"{name}: stage {source} sends S{direction} of (layer range, chunk) {_ranges_and_chunks(sent[key])} to stage "
                f"{target}, which receives {_ranges_and_chunks(received[key])}; both orders must be equal\n{schedule_grid(group)}"
            )
    for earlier, later in itertools.pairwise(chain):
        if earlier[0] != later[0]:
            for direction, sender, receiver in (("F", earlier, later), ("B", later, earlier)):
                moved = sorted(chunk for link, chunk in sent[direction, sender[0], receiver[0], False] if link == sender)
                if moved != list(range(len(group.chunks))):
                    raise PlanError(
                        f"{name}: S{direction} of stage {sender[0]} layer range {sender[1]} must move every chunk once\n"
                        f"{schedule_grid(group)}"
                    )
    for chunk, place in heads.items():
        ways = ((last, sent["F", last[0], place, True]), ((place, num_ranges), sent["B", place, last[0], True]))
        if any((link, chunk) not in messages for link, messages in ways):
            raise PlanError(f"{name}: the output head of chunk {chunk} lacks a message\n{schedule_grid(group)}")


def _ranges_and_chunks(messages: list[tuple[_Link, int]]) -> list[tuple[int, int]]:
    return [(link[1], chunk) for link, chunk in messages]


def _check_progress(name: str, group: SequenceGroup, chain: list[_Link]) -> None:
    """Runs all stages with sends that never block; PlanError names the receive at which a stage waits forever."""
    follows = dict(itertools.pairwise(chain))
    precedes = {later: earlier for earlier, later in follows.items()}
    heads, last, num_ranges = group.head_stages, chain[-1], len(group.stages[0].layer_ranges)
    precedes |= {(stage, num_ranges): last for stage in heads.values()}
    sent: set[tuple[str, _Link | None, int]] = set()
    num_done = [0] * len(group.stages)
    has_moved = True
    while has_moved:
        has_moved = False
        for index, stage in enumerate(group.stages):
            while num_done[index] < len(stage.actions):
                action = stage.actions[num_done[index]]
                link = (action.stage, action.layer_range)
                source = precedes.get(link) if action.kind == "RF" else follows.get(link)
                if link == last and action.kind == "RB":
                    source = heads[action.chunk], num_ranges
                if action.kind in ("RF", "RB") and ("S" + action.kind[1], source, action.chunk) not in sent:
                    break
                if action.kind in ("SF", "SB"):
                    sent.add((action.kind, link, action.chunk))
                num_done[index] += 1
                has_moved = True
    for index, stage in enumerate(group.stages):
        if num_done[index] < len(stage.actions):
            raise _fault(name, group, stage, num_done[index], "waits for ever: deadlock")


__all__ = ["PlanError", "describe_plan", "schedule_grid", "validate_plan"]

_SHARE_TOLERANCE = 1e-6
# most ranks of a plan; more would be a damaged file
_MOST_RANKS = 2**20


def validate_plan(plan: StepPlan, limit_bytes: int = 0, host_limit_bytes: int | None = None) -> StepPlan:
    """Returns `plan` if every invariant holds, else raises PlanError.

    limit_bytes: largest predicted bytes of a rank's device (0: no limit). host_limit_bytes: largest bytes of saved tensors on a
    rank's host (None: no limit).
    """
    _check_shape(plan)
    _check_cover(plan)
    _check_blocks(plan)
    _check_media(plan)
    _check_towers(plan)
    for index, micro_batch in enumerate(plan.micro_batches):
        _check_positions(plan, index, micro_batch)
        for group in micro_batch.groups:
            _check_group(plan, f"micro-batch {index}, group {group.positions}", group)
        if meets_in_every_pass(plan.parameters):
            for block in range(plan.ranks_per_stage // plan.meeting_ranks):
                _check_same_order(index, micro_batch, block, plan.meeting_ranks)
    _check_every_rank(plan)
    _check_same_layers(plan)
    _check_interleaving(plan)
    if plan.turns:
        _check_turns(plan)
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
    """Checks that stages with several layer ranges do not free all weights with the last backward of a micro-batch."""
    stages = (stage for micro_batch in plan.micro_batches for group in micro_batch.groups for stage in group.stages)
    num_ranges = max((len(stage.layer_ranges) for stage in stages), default=1)
    if num_ranges > 1 and frees_every_round(plan.parameters):
        raise PlanError(
            f"the plan interleaves {num_ranges} layer ranges per stage with parameters {plan.parameters!r}, which are "
            f"freed with the last backward of a whole stage; use 'sharded', 'gathered_per_step' or 'replicated'"
        )


def _check_turns(plan: StepPlan) -> None:
    """Checks that every stage can run its micro-batches in the order of the plan's turns, at every position.

    A position that is in some of the micro-batches runs a part of its stage's order. Nothing waits for what comes later in that
    order, so that it suffices to run the whole order.
    """
    if frees_every_round(plan.parameters):
        raise PlanError(
            "the plan has turns with parameters 'gathered_per_round', which hold the gathered weights of one micro-batch at a "
            "time; use 'gathered_per_step', 'sharded' or 'replicated', or leave turns out"
        )
    if plan.num_stages == 1:
        raise PlanError("the plan has turns on one stage, where nothing drains between micro-batches; leave turns out")
    if len(plan.turns) != plan.num_stages:
        raise PlanError(
            f"the plan has turns of {len(plan.turns)} stages, but {plan.num_stages} stages; give turns for each stage"
        )
    for index, micro_batch in enumerate(plan.micro_batches):
        _check_one_order(index, micro_batch)
    groups = [micro_batch.groups[0] for micro_batch in plan.micro_batches]
    for stage, turns in enumerate(plan.turns):
        for index, group in enumerate(groups):
            num_passes = sum(action.kind in PASSES for action in group.stages[stage].actions)
            if turns.count(index) != num_passes:
                raise PlanError(
                    f"turns of stage {stage} name micro-batch {index} {turns.count(index)} times, but it has {num_passes} "
                    f"passes there; name it once for each"
                )
        if unknown := set(turns) - set(range(len(groups))):
            raise PlanError(
                f"turns of stage {stage} name micro-batch {min(unknown)}; the plan has micro-batches 0 to {len(groups) - 1}"
            )
    chunks = itertools.chain.from_iterable(group.chunks for group in groups)
    slots = tuple(replace(chunk, index=index) for index, chunk in enumerate(chunks))
    joined = replace(groups[0], chunks=slots, stages=joined_stages(plan.micro_batches, plan.turns))
    chain = [
        (stage, layer_range) for layer_range in range(len(joined.stages[0].layer_ranges)) for stage in range(plan.num_stages)
    ]
    name = "the schedule of all micro-batches, whose chunks are numbered one after the other"
    _check_layer_ranges_in_order(name, joined, chain)
    _check_messages(name, joined, chain)
    _check_progress(name, joined, chain)
    owners = [index for index, group in enumerate(groups) for _ in group.chunks]
    _check_heads_in_rounds(name, joined, owners)


def _check_heads_in_rounds(name: str, group: SequenceGroup, owners: Sequence[int]) -> None:
    """Checks that gradients of heads that come before one that the last stage waits for are of the same micro-batch.

    The last stage keeps them for later backwards of that micro-batch. owners: the micro-batch of every chunk.
    """
    heads, last = group.head_stages, group.stages[-1]
    left = {stage: [action.chunk for action in group.stages[stage].actions if action.kind == "H"] for stage in heads.values()}
    for index, action in enumerate(last.actions):
        if action.kind != "RB" or action.chunk not in heads:
            continue
        waiting = left[heads[action.chunk]]
        while action.chunk in waiting:
            if owners[(chunk := waiting.pop(0))] != owners[action.chunk]:
                raise _fault(name, group, last, index, f"comes after the head of chunk {chunk} of another micro-batch")


def _check_one_order(index: int, micro_batch: MicroBatch) -> None:
    """Checks that all groups of a micro-batch with turns run equal actions, and that messages stand beside their passes."""
    first, *others = micro_batch.groups
    for group in others:
        if len(group.chunks) != len(first.chunks):
            raise PlanError(
                f"micro-batch {index}: with turns all groups need equally many chunks, but group {first.positions} has "
                f"{len(first.chunks)} and group {group.positions} has {len(group.chunks)}; pad groups with dummy chunks"
            )
        if any(stage.actions != of_first.actions for stage, of_first in zip(group.stages, first.stages, strict=True)):
            grids = "\n".join(f" group {each.positions}\n{schedule_grid(each)}" for each in (first, group))
            raise PlanError(
                f"micro-batch {index}: with turns all groups must run the same actions; give them one order, or leave turns out\n"
                f"{grids}"
            )
    known, heads = MessagedPasses(), first.head_stages
    for stage in first.stages:
        passes = [action for action in stage.actions if action.kind in PASSES]
        if any(action.lenders for action in passes):
            raise PlanError(f"micro-batch {index}: stage {stage.stage} is lent ranks, but the plan has turns; leave one out")
        units = ((ACTION_CODES[each.kind], each.chunk, each.layer_range, each.chunk in heads) for each in passes)
        if known.actions(stage.stage, len(first.stages), len(stage.layer_ranges), units) != stage.actions:
            raise PlanError(
                f"micro-batch {index}: with turns every receive must come right before its pass, and every send right after "
                f"it\n{schedule_grid(first)}"
            )


def describe_plan(plan: StepPlan) -> str:
    """Prints the whole plan: a line for every micro-batch and group, with chunks and schedule."""
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
    if plan.turns:
        lines.append("one schedule through the step, by the micro-batch of each pass")
        lines += [f"  stage {stage}: " + " ".join(map(str, turns)) for stage, turns in enumerate(plan.turns)]
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
    if keeps_node_copies(plan.parameters) != bool(plan.node_ranks):
        raise PlanError(
            f"node_ranks is {plan.node_ranks} with parameters {plan.parameters!r}; give the ranks of a node with "
            f"'gathered_per_node', and 0 with others"
        )
    if plan.node_ranks and (plan.node_ranks < 2 or plan.block_ranks % plan.node_ranks or plan.block_ranks == plan.node_ranks):
        raise PlanError(
            f"node_ranks {plan.node_ranks} does not divide the {plan.block_ranks} ranks that share parameters into several nodes "
            f"of at least two ranks; use 'sharded'"
        )
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


def _check_media(plan: StepPlan) -> None:
    """Checks that images are ranges of their sequences, in order, and have patches and features."""
    if plan.media and len(plan.media) != len(plan.lengths):
        raise PlanError(f"images are given for {len(plan.media)} sequences, but the plan has {len(plan.lengths)}")
    for sequence, (media, length) in enumerate(zip(plan.media, plan.lengths, strict=False)):
        ends = [0, *(each.stop for each in media)]
        for before, each in zip(ends, media, strict=False):
            if not before <= each.start < each.stop <= length or min(each[2:]) < 1:
                raise PlanError(
                    f"sequence {sequence}: image {tuple(each)} is empty, overlaps the one before, or lies outside its {length} "
                    f"tokens"
                )


def _check_towers(plan: StepPlan) -> None:
    """Checks that groups whose plan says how towers run name every image of every chunk once."""
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups if group.towers):
        found = Counter((run.chunk, run.sequence, run.number) for run in group.towers)
        expected = {(chunk.index, *key) for chunk in group.chunks for key in images_of(chunk, plan.media)}
        wrong = [*(expected - found.keys()), *(key for key, count in found.items() if count > 1 or key not in expected)]
        if wrong:
            index, sequence, number = wrong[0]
            raise PlanError(
                f"chunk {index}: the towers run image {number} of sequence {sequence} {found[wrong[0]]} times, but the chunk has "
                f"{'a token' if wrong[0] in expected else 'no token'} of it"
            )
        for chunk in group.chunks:
            ranks = {run.rank for run in group.towers if run.chunk == chunk.index}
            if ranks and ranks != {-1} and not ranks <= set(range(group.degree)):
                raise PlanError(
                    f"chunk {chunk.index}: images are dealt to ranks {sorted(ranks)} of a group of {group.degree}; give all of "
                    f"them a rank of the group, or -1"
                )


def _check_blocks(plan: StepPlan) -> None:
    """Checks that blocks are ranges of their sequences, that no slice ends inside one, and that no ring runs one."""
    if not plan.blocks:
        return
    if len(plan.blocks) != len(plan.lengths):
        raise PlanError(f"blocks are given for {len(plan.blocks)} sequences, but the plan has {len(plan.lengths)}")
    for sequence, (blocks, length) in enumerate(zip(plan.blocks, plan.lengths, strict=True)):
        ends = [0, *(end for _, end in blocks)]
        wrong = [block for before, block in zip(ends, blocks, strict=False) if not before <= block[0] < block[1] <= length]
        if wrong:
            raise PlanError(
                f"sequence {sequence}: block {wrong[0]} is empty, overlaps the one before, or lies outside its {length} tokens"
            )
    for index, micro_batch in enumerate(plan.micro_batches):
        for group in micro_batch.groups:
            spans = [span for chunk in group.chunks for span in chunk.spans if plan.blocks[span.sequence]]
            if spans and group.shape.num_blocks > 1:
                raise PlanError(
                    f"micro-batch {index}, group {group.positions}: sequence {spans[0].sequence} has tokens that see each other "
                    f"both ways, which rings do not compute; let groups divide heads (method 'ulysses')"
                )
            for span in spans:
                for begin, end in plan.blocks[span.sequence]:
                    if begin < span.stop < end:
                        raise PlanError(
                            f"{span} ends inside the block ({begin}, {end}), whose tokens see each other both ways; cut the "
                            f"sequence at one of its ends"
                        )


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
    # equal layer policies are often one object for many chunks, which is checked once
    checked: set[int] = set()
    for stage in group.stages:
        _check_policies(name, group, stage, checked)
    check_schedule(plan, name, group)


def _check_slices(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    """Checks that slices of a sequence are in order, all in this group, and each the first span of its chunk."""
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
    """Checks that layer range 0 of every stage, then range 1 of every stage, and so on, have the model's layers without a gap."""
    num_ranges = {len(stage.layer_ranges) for stage in group.stages}
    if len(num_ranges) != 1 or 0 in num_ranges:
        raise PlanError(f"{name}: every stage needs the same number of layer ranges, at least one; found {sorted(num_ranges)}")
    next_layer = 0
    for layer_range in range(num_ranges.pop()):
        for stage in group.stages:
            layers = stage.layer_ranges[layer_range]
            if layers.num_layers < 1 or layers.first_layer != next_layer:
                raise PlanError(
                    f"{name}: layer range {layer_range} of stage {stage.stage} holds layers {layers.first_layer} to "
                    f"{layers.first_layer + layers.num_layers}, expected at least one layer from {next_layer} on"
                )
            next_layer += layers.num_layers


def _check_policies(name: str, group: SequenceGroup, stage: StagePlan, checked: set[int]) -> None:
    """Checks the policies of a stage. checked: ids of layer policies that were checked before."""
    seen: set[tuple[int, int]] = set()
    for policy in stage.activations:
        where = f"{name}: policy of chunk {policy.chunk}, layer range {policy.layer_range} on stage {stage.stage}"
        is_known = 0 <= policy.chunk < len(group.chunks) and 0 <= policy.layer_range < len(stage.layer_ranges)
        if not is_known or (policy.chunk, policy.layer_range) in seen:
            raise PlanError(f"{where} names an unknown chunk or layer range, or is given twice")
        seen.add((policy.chunk, policy.layer_range))
        if len(policy.layers) > stage.layer_ranges[policy.layer_range].num_layers:
            num_layers = stage.layer_ranges[policy.layer_range].num_layers
            raise PlanError(f"{where} has {len(policy.layers)} layers, but the range has {num_layers}")
        if policy.tile_tokens < 0:
            raise PlanError(f"{where} has tile_tokens {policy.tile_tokens}; it must be 0 (untiled) or more")
        if policy.leaving_layers < 1:
            raise PlanError(f"{where} has leaving_layers {policy.leaving_layers}; it must be at least 1")
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
    """Checks that a stage has the same layers in every group and micro-batch: a plan moves tokens, never weights."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    expected = [stage.layer_ranges for stage in groups[0].stages]
    for group in groups:
        for stage, layer_ranges in zip(group.stages, expected, strict=True):
            if stage.layer_ranges != layer_ranges:
                raise PlanError(
                    f"stage {stage.stage} holds {stage.layer_ranges} in group {group.positions}, but {layer_ranges} elsewhere"
                )


def _check_same_order(index: int, micro_batch: MicroBatch, block: int, block_ranks: int) -> None:
    groups = [group for group in micro_batch.groups if any(position // block_ranks == block for position in group.positions)]
    # on the last stage, passes of a chunk whose head another stage runs do not sum the gradient of the head
    orders: set[tuple[Sequence[tuple[str, int, bool]], ...]] = {
        tuple(
            tuple((a.kind, a.layer_range, a.chunk in away) for a in stage.actions if a.kind in PASSES) for stage in group.stages
        )
        for group, away in ((group, group.head_stages) for group in groups)
    }
    if len(orders) > 1:
        grids = "\n".join(f" group {group.positions}\n{schedule_grid(group)}" for group in groups)
        raise PlanError(
            f"micro-batch {index}: with these parameters all groups must run passes in the same order, because ranks that "
            f"share weights meet in every backward; give groups one order, with dummy chunks where some have fewer\n{grids}"
        )

"""Check a sequence group's schedule, the actions of each stage alone and against each other, and print it as a grid.

Called by `validate_plan` for every group of a plan; error messages end with the grid.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from hf_longctx.plan.core.messages import shortened
from hf_longctx.plan.core.types import ACTION_KINDS, Action, ActionKind, SequenceGroup, StagePlan, StepPlan

# (stage, model part): one link in the chain of layer ranges that a chunk passes through
_Link = tuple[int, int]

# kind of action -> kinds that must come before it for the same chunk and model part
_BEFORE: dict[str, tuple[ActionKind, ...]] = {
    "F": ("RF",),
    "SF": ("F",),
    "B": ("RB",),
    "SB": ("B",),
}


class PlanError(ValueError):
    """A plan breaks an invariant; if one action is at fault, the message ends with the schedule grid that marks it."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def schedule_grid(group: SequenceGroup, marked: tuple[int, int] | None = None) -> str:
    """One line per stage with its actions in order; the action `marked` = (stage, index) is printed between > and <."""
    lines = []
    for stage in group.stages:
        words = [f">{action}<" if marked == (stage.stage, index) else str(action) for index, action in enumerate(stage.actions)]
        lines.append(f"  stage {stage.stage}: " + " ".join(words))
    return "\n".join(lines)


def check_schedule(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    """Raise PlanError unless the stages of the group can run their actions; `name` is the group in the message."""
    num_parts = len(group.stages[0].parts)
    chain = [(stage, part) for part in range(num_parts) for stage in range(len(group.stages))]
    neighbours = _slice_neighbours(group)
    for stage in group.stages:
        _check_compute(plan, name, group, stage, neighbours)
        _check_order(name, group, stage)
    _check_parts_in_order(name, group, chain)
    _check_messages(name, group, chain)
    _check_progress(name, group, chain)


def _check_compute(
    plan: StepPlan, name: str, group: SequenceGroup, stage: StagePlan, neighbours: dict[tuple[str, int], list[int]]
) -> None:
    """Check that every chunk runs F, then B, once per part, and slices of a sequence F in order and B in reverse."""
    done: set[tuple[str, int, int]] = set()
    num_chunks, num_parts, num_computed = len(group.chunks), len(stage.parts), 0
    for index, action in enumerate(stage.actions):
        if action.kind not in ACTION_KINDS or action.stage != stage.stage:
            raise _fault(name, group, stage, index, f"does not belong to stage {stage.stage}")
        if not 0 <= action.chunk < num_chunks or not 0 <= action.part < num_parts:
            raise _fault(name, group, stage, index, "names a chunk or part that does not exist")
        if action.lenders:
            _check_lenders(plan, name, group, stage, index)
        key = (action.kind, action.part, action.chunk)
        if key in done:
            raise _fault(name, group, stage, index, "runs twice")
        if action.kind == "B" and ("F", action.part, action.chunk) not in done:
            raise _fault(name, group, stage, index, "runs before its forward")
        for other in neighbours.get((action.kind, action.chunk), ()):
            if (action.kind, action.part, other) not in done:
                order = "previous" if action.kind == "F" else "next"
                raise _fault(name, group, stage, index, f"runs before the {order} slice of its sequence (chunk {other})")
        done.add(key)
        num_computed += action.kind in ("F", "B")
    # none runs twice, so that this many are all
    if num_computed == 2 * num_chunks * num_parts:
        return
    for part in range(num_parts):
        for chunk in group.chunks:
            for kind in ("F", "B"):
                if (kind, part, chunk.index) not in done:
                    missing = Action(kind=kind, stage=stage.stage, chunk=chunk.index, part=part)
                    raise PlanError(f"{name}: {missing} is missing\n{schedule_grid(group)}")


def _slice_neighbours(group: SequenceGroup) -> dict[tuple[str, int], list[int]]:
    """(kind, chunk) -> chunks that must run this kind first: those of the previous slices for F, of the next slices for B."""
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


def _check_lenders(plan: StepPlan, name: str, group: SequenceGroup, stage: StagePlan, index: int) -> None:
    action = stage.actions[index]
    if action.kind not in ("F", "B"):
        raise _fault(name, group, stage, index, "has lenders, but only F and B can be lent ranks")
    if len(set(action.lenders)) != len(action.lenders):
        raise _fault(name, group, stage, index, "names a lender twice")
    for lender_stage, position in action.lenders:
        if lender_stage == stage.stage or not 0 <= lender_stage < plan.num_stages:
            raise _fault(name, group, stage, index, f"names lender stage {lender_stage}, which must be another stage of the plan")
        if not 0 <= position < plan.ranks_per_stage:
            raise _fault(name, group, stage, index, f"names lender position {position}, but a stage has {plan.ranks_per_stage}")


def _fault(name: str, group: SequenceGroup, stage: StagePlan, index: int, text: str) -> PlanError:
    grid = schedule_grid(group, (stage.stage, index))
    return PlanError(f"{name}: {stage.actions[index]} {text}\n{grid}")


def _check_order(name: str, group: SequenceGroup, stage: StagePlan) -> None:
    """Check that a chunk is received, computed and sent in this order on every part."""
    first: dict[tuple[str, int, int], int] = {}
    for index, action in enumerate(stage.actions):
        first.setdefault((action.kind, action.part, action.chunk), index)
    for (kind, part, chunk), index in first.items():
        for earlier in _BEFORE.get(kind, ()):
            if first.get((earlier, part, chunk), -1) > index:
                raise _fault(name, group, stage, index, f"runs before its {earlier}")


def _check_parts_in_order(name: str, group: SequenceGroup, chain: list[_Link]) -> None:
    """Check the order of consecutive parts on the same stage, which hand chunks over without a message."""
    for (stage, part), (next_stage, next_part) in itertools.pairwise(chain):
        if stage != next_stage:
            continue
        plan = group.stages[stage]
        when = {(action.kind, action.part, action.chunk): index for index, action in enumerate(plan.actions)}
        for chunk in range(len(group.chunks)):
            if when["F", next_part, chunk] < when["F", part, chunk]:
                raise _fault(name, group, plan, when["F", next_part, chunk], f"runs before part {part}'s forward")
            if when["B", part, chunk] < when["B", next_part, chunk]:
                raise _fault(name, group, plan, when["B", part, chunk], f"runs before part {next_part}'s backward")


def _check_messages(name: str, group: SequenceGroup, chain: list[_Link]) -> None:
    """Check that messages are received in the order they are sent, and every chunk crosses every stage boundary once each way."""
    follows = dict(itertools.pairwise(chain))
    precedes = {later: earlier for earlier, later in follows.items()}
    # (direction, source stage, target stage) -> (link that produced it, chunk) of every message
    sent: dict[tuple[str, int, int], list[tuple[_Link, int]]] = defaultdict(list)
    received: dict[tuple[str, int, int], list[tuple[_Link, int]]] = defaultdict(list)
    for stage in group.stages:
        for index, action in enumerate(stage.actions):
            if action.kind not in ("SF", "RF", "SB", "RB"):
                continue
            link = (action.stage, action.part)
            partner = (follows if action.kind in ("SF", "RB") else precedes).get(link)
            if partner is None or partner[0] == stage.stage:
                raise _fault(name, group, stage, index, "has no partner on another stage")
            if action.kind[0] == "S":
                sent[action.kind[1], stage.stage, partner[0]].append((link, action.chunk))
            else:
                received[action.kind[1], partner[0], stage.stage].append((partner, action.chunk))
    for direction, source, target in sorted({*sent, *received}):
        key = (direction, source, target)
        if sent[key] != received[key]:
            raise PlanError(
                f"{name}: stage {source} sends S{direction} of (part, chunk) {_parts_and_chunks(sent[key])} to stage {target}, "
                f"which receives {_parts_and_chunks(received[key])}; both orders must be equal\n{schedule_grid(group)}"
            )
    for earlier, later in itertools.pairwise(chain):
        if earlier[0] != later[0]:
            for direction, sender, receiver in (("F", earlier, later), ("B", later, earlier)):
                moved = sorted(chunk for link, chunk in sent[direction, sender[0], receiver[0]] if link == sender)
                if moved != list(range(len(group.chunks))):
                    raise PlanError(
                        f"{name}: S{direction} of stage {sender[0]} part {sender[1]} must move every chunk once\n"
                        f"{schedule_grid(group)}"
                    )


def _parts_and_chunks(messages: list[tuple[_Link, int]]) -> list[tuple[int, int]]:
    return [(link[1], chunk) for link, chunk in messages]


def _check_progress(name: str, group: SequenceGroup, chain: list[_Link]) -> None:
    """Run all stages with sends that never block; PlanError names the receive at which a stage waits for ever."""
    follows = dict(itertools.pairwise(chain))
    precedes = {later: earlier for earlier, later in follows.items()}
    sent: set[tuple[str, _Link | None, int]] = set()
    num_done = [0] * len(group.stages)
    has_moved = True
    while has_moved:
        has_moved = False
        for index, stage in enumerate(group.stages):
            while num_done[index] < len(stage.actions):
                action = stage.actions[num_done[index]]
                link = (action.stage, action.part)
                source = precedes.get(link) if action.kind == "RF" else follows.get(link)
                if action.kind in ("RF", "RB") and ("S" + action.kind[1], source, action.chunk) not in sent:
                    break
                if action.kind in ("SF", "SB"):
                    sent.add((action.kind, link, action.chunk))
                num_done[index] += 1
                has_moved = True
    for index, stage in enumerate(group.stages):
        if num_done[index] < len(stage.actions):
            raise _fault(name, group, stage, num_done[index], "waits for ever: deadlock")

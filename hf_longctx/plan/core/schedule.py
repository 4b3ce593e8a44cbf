"""Checks of a group's schedule: the actions of its stages, alone and against each other; and how a schedule is printed."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict

from hf_longctx.plan.core.types import ACTION_KINDS, Action, ActionKind, SequenceGroup, StagePlan, StepPlan

# (stage, part): one place in the chain of layer ranges that a chunk passes
End = tuple[int, int]

# what of a chunk on a part has to come before an action
_BEFORE: dict[str, tuple[ActionKind, ...]] = {
    "F": ("RF",),
    "SF": ("F",),
    "D2H": ("F",),
    "H2D": ("D2H",),
    "B": ("RB", "H2D"),
    "SB": ("B",),
    "FREE": ("B",),
}

_GRID_LINE = re.compile(r"\s*stage (\d+):(.*)")


class PlanError(ValueError):
    """A plan that breaks an invariant; the message ends with the schedule grid where one action is at fault."""


def schedule_grid(group: SequenceGroup, marked: tuple[int, int] | None = None) -> str:
    """One line per stage with its actions in order; `marked` = (stage, action index) stands between > and <."""
    lines = []
    for stage in group.stages:
        words = [f">{action}<" if marked == (stage.stage, place) else str(action) for place, action in enumerate(stage.actions)]
        lines.append(f"  stage {stage.stage}: " + " ".join(words))
    return "\n".join(lines)


def parse_grid(text: str) -> tuple[tuple[Action, ...], ...]:
    """The actions of every stage of a grid that `schedule_grid` wrote, marked or not."""
    stages: list[tuple[Action, ...]] = []
    for line in filter(str.strip, text.splitlines()):
        match = _GRID_LINE.fullmatch(line)
        if match is None or int(match[1]) != len(stages):
            raise ValueError(f"{line!r} is not line {len(stages)} of a schedule grid; write 'stage {len(stages)}: ACTION ...'")
        words = (word[1:-1] if word[0] + word[-1] == "><" else word for word in match[2].split())
        stages.append(tuple(map(Action.parse, words)))
    return tuple(stages)


def in_flight(stage: StagePlan) -> int:
    """The most chunks, or parts of chunks, whose forward is done and whose backward is not."""
    steps = ({"F": 1, "B": -1}.get(action.kind, 0) for action in stage.actions)
    return max(itertools.accumulate(steps, initial=0))


def check_schedule(plan: StepPlan, name: str, group: SequenceGroup) -> None:
    """Raises PlanError unless the group's stages can run their actions; `name` says which group it is."""
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
    """Every chunk runs F then B once per part; slices of a sequence forward in order and backward in reverse."""
    done: dict[tuple[str, int, int], int] = {}
    for place, action in enumerate(stage.actions):
        if action.kind not in ACTION_KINDS or action.stage != stage.stage:
            raise _fault(name, group, stage, place, f"does not belong to stage {stage.stage}")
        if not 0 <= action.chunk < len(group.chunks) or not 0 <= action.part < len(stage.parts):
            raise _fault(name, group, stage, place, "names a chunk or part that does not exist")
        if action.helpers:
            _check_helpers(plan, name, group, stage, place)
        key = (action.kind, action.part, action.chunk)
        if key in done:
            raise _fault(name, group, stage, place, "runs twice")
        if action.kind == "B" and ("F", action.part, action.chunk) not in done:
            raise _fault(name, group, stage, place, "runs before its forward")
        for other in neighbours.get((action.kind, action.chunk), ()):
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


def _slice_neighbours(group: SequenceGroup) -> dict[tuple[str, int], list[int]]:
    """Chunks that must run the same kind before (kind, chunk): the previous slice for F, the next slice for B."""
    holders: dict[int, list[int]] = defaultdict(list)
    for place, chunk in enumerate(group.chunks):
        for sequence in {span.sequence for span in chunk.spans}:
            holders[sequence].append(place)
    neighbours: dict[tuple[str, int], list[int]] = defaultdict(list)
    for places in holders.values():
        for earlier, later in itertools.pairwise(places):
            neighbours["F", later].append(earlier)
            neighbours["B", earlier].append(later)
    return neighbours


def _check_helpers(plan: StepPlan, name: str, group: SequenceGroup, stage: StagePlan, place: int) -> None:
    action = stage.actions[place]
    if action.kind not in ("F", "B"):
        raise _fault(name, group, stage, place, "has helpers, but only F and B can be shared")
    if len(set(action.helpers)) != len(action.helpers):
        raise _fault(name, group, stage, place, "names a helper twice")
    for helper_stage, position in action.helpers:
        if helper_stage == stage.stage or not 0 <= helper_stage < plan.num_stages:
            raise _fault(name, group, stage, place, f"names helper stage {helper_stage}, which must be another stage")
        if not 0 <= position < plan.ranks_per_stage:
            raise _fault(name, group, stage, place, f"names helper position {position} of {plan.ranks_per_stage}")


def _fault(name: str, group: SequenceGroup, stage: StagePlan, place: int, text: str) -> PlanError:
    grid = schedule_grid(group, (stage.stage, place))
    return PlanError(f"{name}: {stage.actions[place]} {text}\n{grid}")


def _check_order(name: str, group: SequenceGroup, stage: StagePlan) -> None:
    """Receives, compute, copies and sends of a chunk on one part stand in the only order that makes sense."""
    first: dict[tuple[str, int, int], int] = {}
    for place, action in enumerate(stage.actions):
        first.setdefault((action.kind, action.part, action.chunk), place)
    for (kind, part, chunk), place in first.items():
        for earlier in _BEFORE.get(kind, ()):
            if first.get((earlier, part, chunk), -1) > place:
                raise _fault(name, group, stage, place, f"runs before its {earlier}")


def _check_parts_in_order(name: str, group: SequenceGroup, chain: list[End]) -> None:
    """Neighbours in the chain that lie on one stage hand over without a message, so their order is the stage's own."""
    for (stage, part), (next_stage, next_part) in itertools.pairwise(chain):
        if stage != next_stage:
            continue
        plan = group.stages[stage]
        places = {(a.kind, a.part, a.chunk): place for place, a in enumerate(plan.actions)}
        for chunk in range(len(group.chunks)):
            if places["F", next_part, chunk] < places["F", part, chunk]:
                raise _fault(name, group, plan, places["F", next_part, chunk], f"runs before part {part}'s forward")
            if places["B", part, chunk] < places["B", next_part, chunk]:
                raise _fault(name, group, plan, places["B", part, chunk], f"runs before part {next_part}'s backward")


def _check_messages(name: str, group: SequenceGroup, chain: list[End]) -> None:
    """What one stage sends another in order, the other receives in order; every chunk passes every link once each way."""
    follows = dict(itertools.pairwise(chain))
    precedes = {later: earlier for earlier, later in follows.items()}
    sent: dict[tuple[str, int, int], list[tuple[End, int]]] = defaultdict(list)
    received: dict[tuple[str, int, int], list[tuple[End, int]]] = defaultdict(list)
    for stage in group.stages:
        for place, action in enumerate(stage.actions):
            if action.kind not in ("SF", "RF", "SB", "RB"):
                continue
            end = (action.stage, action.part)
            partner = (follows if action.kind in ("SF", "RB") else precedes).get(end)
            if partner is None or partner[0] == stage.stage:
                raise _fault(name, group, stage, place, "has no partner on another stage")
            # a message is known by the end that produced it
            if action.kind[0] == "S":
                sent[action.kind[1], stage.stage, partner[0]].append((end, action.chunk))
            else:
                received[action.kind[1], partner[0], stage.stage].append((partner, action.chunk))
    for direction, source, target in sorted({*sent, *received}):
        key = (direction, source, target)
        if sent[key] != received[key]:
            raise PlanError(
                f"{name}: stage {source} sends S{direction} of (part, chunk) {_short(sent[key])} to stage {target}, which "
                f"receives {_short(received[key])}\n{schedule_grid(group)}"
            )
    for earlier, later in itertools.pairwise(chain):
        if earlier[0] != later[0]:
            for direction, sender, receiver in (("F", earlier, later), ("B", later, earlier)):
                moved = sorted(chunk for end, chunk in sent[direction, sender[0], receiver[0]] if end == sender)
                if moved != list(range(len(group.chunks))):
                    raise PlanError(
                        f"{name}: S{direction} of stage {sender[0]} part {sender[1]} must move every chunk once\n"
                        f"{schedule_grid(group)}"
                    )


def _short(messages: list[tuple[End, int]]) -> list[tuple[int, int]]:
    return [(end[1], chunk) for end, chunk in messages]


def _check_progress(name: str, group: SequenceGroup, chain: list[End]) -> None:
    """Runs all stages with buffered sends; a stage that waits for ever names the receive it waits at."""
    follows = dict(itertools.pairwise(chain))
    precedes = {later: earlier for earlier, later in follows.items()}
    sent: set[tuple[str, End | None, int]] = set()
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

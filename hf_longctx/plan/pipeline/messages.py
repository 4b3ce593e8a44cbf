"""Inserts the messages between pipeline stages: who sends which chunk when, in an order that cannot deadlock.

A receive stands right before the action that needs the message, and a send right after the action that makes it. Sends do not
block. A stage sends over a link in the order of its own compute actions; the schedules of `orders.py` give both ends of a link
the same order of chunks, so receives find their messages in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from hf_longctx.plan.core.types import Action, ActionKind, SequenceGroup

_MESSAGES = ("SF", "RF", "SB", "RB")
# for each action, the receive before it and the send after it
_AROUND: dict[str, tuple[ActionKind, ActionKind]] = {"F": ("RF", "SF"), "B": ("RB", "SB")}


def without_messages(group: SequenceGroup) -> SequenceGroup:
    """Removes all sends and receives of a group."""
    return replace(
        group,
        stages=tuple(
            replace(stage, actions=tuple(action for action in stage.actions if action.kind not in _MESSAGES))
            for stage in group.stages
        ),
    )


def _messaged(action: Action, num_stages: int, num_places: int) -> tuple[Action, ...]:
    """An F or B between the receive before it and the send after it, where its neighbours are on other stages.

    num_places: number of layer ranges of all stages.
    """
    place = action.part * num_stages + action.stage
    has_front = num_stages > 1 and place > 0
    has_behind = num_stages > 1 and place < num_places - 1
    receives, sends = (has_front, has_behind) if action.kind == "F" else (has_behind, has_front)
    receive, send = _AROUND[action.kind]
    before = (Action(receive, action.stage, action.chunk, action.part),) if receives else ()
    after = (Action(send, action.stage, action.chunk, action.part),) if sends else ()
    return (*before, action, *after)


class MessagedPasses:
    """Forwards and backwards with their messages, made once for all groups of a step: most actions of any two are equal.

    stages: actions of all stages of groups, by what their order depends on.
    """

    def __init__(self) -> None:
        self.stages: dict[Hashable, list[tuple[Action, ...]]] = {}
        # forwards and backwards of all chunks so far, by stage, part, and numbers of stages and of layer ranges
        self._known: dict[tuple[int, int, int, int], tuple[list[tuple[Action, ...]], list[tuple[Action, ...]]]] = {}

    def actions(self, stage: int, num_stages: int, num_parts: int, passes: Iterable[tuple[bool, int, int]]) -> tuple[Action, ...]:
        """Actions of a stage that runs these passes: whether it is a backward, its chunk and its part."""
        known = [self._known.setdefault((stage, part, num_stages, num_parts), ([], [])) for part in range(num_parts)]
        found: list[Action] = []
        for is_backward, chunk, part in passes:
            made = known[part][is_backward]
            while len(made) <= chunk:
                action = Action("B" if is_backward else "F", stage, len(made), part)
                made.append(_messaged(action, num_stages, num_parts * num_stages))
            found += made[chunk]
        return tuple(found)

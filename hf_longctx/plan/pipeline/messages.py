"""Inserts the messages between pipeline stages: who sends which chunk when, in an order that cannot deadlock.

A receive stands right before the action that needs the message, and a send right after the action that makes it. Sends do not
block. A stage sends over a link in the order of its own compute actions; the schedules of `orders.py` give both ends of a link
the same order of chunks, so receives find their messages in the order in which they were sent.
"""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.types import Action, ActionKind, SequenceGroup, StagePlan

_MESSAGES = ("SF", "RF", "SB", "RB")
# for each action, the receive before it and the send after it
_AROUND: dict[str, tuple[ActionKind, ActionKind]] = {"F": ("RF", "SF"), "B": ("RB", "SB")}


def with_messages(group: SequenceGroup) -> SequenceGroup:
    """Adds a receive right before and a send right after every F and B whose neighbour is on another stage.

    Chunks go through part 0 of every stage, then through part 1 of every stage, and so on; gradients go the other way.
    """
    bare = without_messages(group)
    return replace(bare, stages=tuple(_with_messages(stage, len(bare.stages)) for stage in bare.stages))


def without_messages(group: SequenceGroup) -> SequenceGroup:
    """Removes all sends and receives of a group."""
    return replace(
        group,
        stages=tuple(
            replace(stage, actions=tuple(action for action in stage.actions if action.kind not in _MESSAGES))
            for stage in group.stages
        ),
    )


def _with_messages(stage: StagePlan, num_stages: int) -> StagePlan:
    actions: list[Action] = []
    for action in stage.actions:
        place = action.part * num_stages + stage.stage
        has_front = num_stages > 1 and place > 0
        has_behind = num_stages > 1 and place < len(stage.parts) * num_stages - 1
        receives, sends = (has_front, has_behind) if action.kind == "F" else (has_behind, has_front)
        receive, send = _AROUND[action.kind]
        if receives:
            actions.append(Action(receive, action.stage, action.chunk, action.part))
        actions.append(action)
        if sends:
            actions.append(Action(send, action.stage, action.chunk, action.part))
    return replace(stage, actions=tuple(actions))

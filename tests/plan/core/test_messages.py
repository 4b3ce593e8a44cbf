"""Messages between stages: every order of delivery brings every chunk through all layers and back, and nothing waits for ever."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

import pytest
from helpers.plans.stage_orders import chunks_of, family_shapes, plan_of, random_shapes, without_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.orders import SCHEDULES, Schedule
from hf_longctx.plan.core.types import Action, SequenceGroup

# where a chunk's activations, or their gradients, have been: (kind, stage, layer range)
Path = tuple[tuple[str, int, int], ...]
# (stage that sends, stage that receives, whether activations or gradients)
Link = tuple[int, int, str]


def group_of(plan_shapes: list[tuple[int, int]], num_stages: int, schedule: Schedule, num_ranges: int = 1) -> SequenceGroup:
    return plan_of(chunks_of(plan_shapes), num_stages, schedule, num_ranges).micro_batches[0].groups[0]


class Stages:
    """Stages that run one action at a time in any order, over links that deliver in order but as late as they like."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group, self.num_ranges = group, len(group.stages[0].layer_ranges)
        self.todo = [deque(stage.actions) for stage in group.stages]
        self.sent: dict[Link, deque[tuple[int, Path]]] = defaultdict(deque)
        self.arrived: dict[Link, deque[tuple[int, Path]]] = defaultdict(deque)
        # tensors that a stage holds of a chunk, by (stage, layer range, chunk, activations or gradients)
        self.held: dict[tuple[int, int, int, str], Path] = {}
        self.done: dict[int, Path] = {}

    def run(self, draw: random.Random) -> None:
        """Stages and deliveries take turns by chance until nothing is left; a deadlock fails."""
        while any(self.todo):
            moves = [stage for stage, todo in enumerate(self.todo) if todo and self._is_ready(todo[0])]
            links = [link for link, messages in self.sent.items() if messages]
            assert moves or links, f"deadlock: {[str(todo[0]) if todo else 'done' for todo in self.todo]}"
            place = draw.randrange(len(moves) + len(links))
            if place < len(moves):
                self._act(self.todo[moves[place]].popleft())
            else:
                link = links[place - len(moves)]
                self.arrived[link].append(self.sent[link].popleft())

    def _is_ready(self, action: Action) -> bool:
        return action.kind not in ("RF", "RB") or bool(self.arrived[self._link(action)])

    def _link(self, action: Action) -> Link:
        num_stages, direction = len(self.group.stages), action.kind[1]
        forwards = action.kind in ("SF", "RB")
        other = (action.stage + (1 if forwards else -1)) % num_stages
        return (action.stage, other, direction) if action.kind[0] == "S" else (other, action.stage, direction)

    def _act(self, action: Action) -> None:
        key = (action.stage, action.layer_range, action.chunk)
        if action.kind in ("RF", "RB"):
            chunk, path = self.arrived[self._link(action)].popleft()
            assert chunk == action.chunk
            self.held[*key, action.kind[1]] = path
        elif action.kind in ("SF", "SB"):
            self.sent[self._link(action)].append((action.chunk, self.held.pop((*key, action.kind[1] + " made"))))
        else:
            self._compute(action)

    def _compute(self, action: Action) -> None:
        num_stages, stage, layer_range, chunk = len(self.group.stages), action.stage, action.layer_range, action.chunk
        is_first, is_last = stage == layer_range == 0, (stage, layer_range) == (num_stages - 1, self.num_ranges - 1)
        if action.kind == "F":
            path = () if is_first else self.held.pop((stage, layer_range, chunk, "F"))
        else:
            path = self.held.pop((stage, layer_range, chunk, "loss" if is_last else "B"))
        path = (*path, (action.kind, stage, layer_range))
        made = "loss" if action.kind == "F" and is_last else action.kind + " made"
        if action.kind == "B" and is_first:
            self.done[chunk] = path
        elif num_stages > 1 or made == "loss":
            self.held[stage, layer_range, chunk, made] = path
        else:
            # layer ranges of a lone stage hand over without a message
            self.held[stage, layer_range + (1 if action.kind == "F" else -1), chunk, action.kind] = path


def check_run(group: SequenceGroup, draw: random.Random) -> None:
    """Every chunk passes all layer ranges of all stages in order, and its gradients come back the same way."""
    stages = Stages(group)
    stages.run(draw)
    there = [(stage, layer_range) for layer_range in range(stages.num_ranges) for stage in range(len(group.stages))]
    path = (*(("F", *end) for end in there), *(("B", *end) for end in reversed(there)))
    assert stages.done == dict.fromkeys(range(len(group.chunks)), path)
    assert not stages.held
    assert not any(stages.sent.values())
    assert not any(stages.arrived.values())


@pytest.mark.wide
def test_a_thousand_random_plans_do_not_deadlock_whatever_the_links_do() -> None:
    draw = random.Random(2027)
    for _ in range(1000):
        schedule = draw.choice(SCHEDULES)
        num_ranges = draw.randint(2, 3) if schedule == "interleaved" else 1
        check_run(group_of(random_shapes(draw, 4, 4), draw.randint(1, 6), schedule, num_ranges), draw)  # type: ignore[arg-type]


def test_the_simulated_links_find_a_deadlock() -> None:
    group = group_of([(0, 1), (0, 1)], 2, "1f1b")
    text = "0F0 0SF0 0F1 0RB0 0SF1 0B0 0RB1 0B1", "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1"
    stages = tuple(
        replace(stage, actions=tuple(map(Action.parse, words.split()))) for stage, words in zip(group.stages, text, strict=True)
    )
    with pytest.raises(AssertionError, match="deadlock"):
        check_run(replace(group, stages=stages), random.Random(0))


def with_messages(bare: SequenceGroup) -> SequenceGroup:
    """The group with a receive before and a send after every F and B whose neighbour in the chain is on another stage."""
    num_stages, last = len(bare.stages), len(bare.stages) * len(bare.stages[0].layer_ranges) - 1
    stages = []
    for stage in bare.stages:
        actions: list[Action] = []
        for action in stage.actions:
            place = action.layer_range * num_stages + action.stage
            ends = (place > 0, place < last) if action.kind == "F" else (place < last, place > 0)
            receive, send = (replace(action, kind=kind + action.kind) for kind in "RS")
            actions += [receive] * (ends[0] and num_stages > 1) + [action] + [send] * (ends[1] and num_stages > 1)
        stages.append(replace(stage, actions=tuple(actions)))
    return replace(bare, stages=tuple(stages))


@settings(max_examples=100, deadline=None)
@given(family_shapes(), st.integers(1, 5), st.integers(1, 3))
def test_messages_come_off_as_they_went_in(shapes: list[tuple[int, int]], num_stages: int, num_ranges: int) -> None:
    group = group_of(shapes, num_stages, "interleaved" if num_ranges > 1 else "elastic", num_ranges)
    bare = without_messages(group)
    assert all(action.kind in ("F", "B") for stage in bare.stages for action in stage.actions)
    assert with_messages(bare) == group
    # a link between every two neighbours of the chain, there and back, two ends each
    num_links = num_stages * num_ranges - 1 if num_stages > 1 else 0
    num_messages = sum(len(stage.actions) for stage in group.stages) - sum(len(stage.actions) for stage in bare.stages)
    assert num_messages == 4 * num_links * len(group.chunks)


def test_messages_stand_right_beside_their_action() -> None:
    group = group_of([(0, 1)], 3, "1f1b")
    assert [str(action) for action in group.stages[1].actions] == ["1RF0", "1F0", "1SF0", "1RB0", "1B0", "1SB0"]


def test_the_last_stage_sends_to_the_next_layer_range_of_the_first() -> None:
    group = group_of([(0, 1), (0, 1)], 2, "interleaved", 2)
    assert [" ".join(map(str, stage.actions)) for stage in group.stages] == [
        "0F0 0SF0 0F1 0SF1 0.1RF0 0.1F0 0.1SF0 0.1RF1 0.1F1 0.1SF1 0.1RB0 0.1B0 0.1SB0 0.1RB1 0.1B1 0.1SB1 0RB0 0B0 0RB1 0B1",
        "1RF0 1F0 1SF0 1RF1 1F1 1SF1 1.1RF0 1.1F0 1.1B0 1.1SB0 1.1RF1 1.1F1 1.1B1 1.1SB1 1RB0 1B0 1SB0 1RB1 1B1 1SB1",
    ]

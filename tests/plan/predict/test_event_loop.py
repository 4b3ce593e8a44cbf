"""Promises of the event loop: closed forms at unit costs, a brute force over the dependency graph, messages, copies by hand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.plans.stage_orders import Stages, interleaved, one_forward_one_backward, with_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import Action
from hf_longctx.plan.core.validate import PlanError
from hf_longctx.plan.predict.event_loop import CopyStep, Wiring
from hf_longctx.recipes.bench.papers.action_times import run_actions, run_copying


def all_forwards_first(num_stages: int, num_chunks: int) -> Stages:
    forwards = [[Action("F", p, i) for i in range(num_chunks)] for p in range(num_stages)]
    return tuple((*f, *(Action("B", p, i) for i in reversed(range(num_chunks)))) for p, f in enumerate(forwards))


def unit_s(action: Action) -> float:
    return 1.0 if action.kind == "F" else 2.0


def no_hop_s(action: Action) -> float:
    return 0.0


def makespan(stages: Stages, num_ranges: int = 1) -> float:
    return max(times[-1][1] for times in run_actions(stages, unit_s, no_hop_s, num_ranges))


def brute_force(
    stages: Stages,
    seconds: Callable[[Action], float],
    hop_s: Callable[[Action], float],
    num_ranges: int,
    start_s: Sequence[float],
) -> list[list[tuple[float, float]]]:
    """The longest path to every action, by recursion over what it waits for."""
    num_stages = len(stages)
    where = {
        (str(a.kind), a.layer_range * num_stages + a.stage, a.chunk): (p, i)
        for p, s in enumerate(stages)
        for i, a in enumerate(s)
    }

    @functools.cache
    def stop(p: int, i: int) -> float:
        action = stages[p][i]
        return start(p, i) + (seconds(action) if action.kind in "FB" else 0.0)

    @functools.cache
    def start(p: int, i: int) -> float:
        action = stages[p][i]
        place = action.layer_range * num_stages + action.stage
        found = [start_s[p] if i == 0 else stop(p, i - 1)]
        step = {"F": -1, "RF": -1, "B": 1, "RB": 1}.get(action.kind, 0)
        if step and 0 <= place + step < num_ranges * num_stages:
            kind = action.kind[-1]
            source = where.get((f"S{kind}", place + step, action.chunk)) or where[kind, place + step, action.chunk]
            found.append(stop(*source) + (hop_s(stages[source[0]][source[1]]) if num_stages > 1 else 0.0))
        if action.kind == "B":
            found.append(stop(*where["F", place, action.chunk]))
        return max(found)

    return [[(start(p, i), stop(p, i)) for i in range(len(actions))] for p, actions in enumerate(stages)]


SIZES = [(P, N) for P in (1, 2, 3, 4, 8) for N in (1, 2, 5, 8, 16)]


@pytest.mark.parametrize(("num_stages", "num_chunks"), SIZES)
def test_plain_schedules_take_as_many_units_as_chunks_and_a_pipeline_filling_once(num_stages: int, num_chunks: int) -> None:
    # (M + P - 1) (F + B) for 1F1B and for GPipe
    assert makespan(one_forward_one_backward(num_stages, num_chunks)) == (num_chunks + num_stages - 1) * 3
    assert makespan(all_forwards_first(num_stages, num_chunks)) == (num_chunks + num_stages - 1) * 3


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize(("num_sequences", "num_slices"), [(1, 4), (2, 4), (8, 4), (3, 2), (4, 7)])
def test_slices_divide_the_bubble(num_stages: int, num_sequences: int, num_slices: int) -> None:
    # (k M + P - 1) (F + B) / k, here in units of a slice
    num_chunks = num_sequences * num_slices
    stages = one_forward_one_backward(num_stages, num_chunks, num_slices)
    assert makespan(stages) == (num_chunks + num_stages - 1) * 3
    assert makespan(with_messages(stages)) == makespan(stages)


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 4), (4, 8), (4, 16), (8, 8)])
@pytest.mark.parametrize("num_ranges", [2, 4])
def test_interleaving_divides_the_bubble_by_the_layer_ranges(num_stages: int, num_chunks: int, num_ranges: int) -> None:
    # (V M + P - 1) (F + B) / V, in units of one layer range
    assert makespan(interleaved(num_stages, num_chunks, num_ranges), num_ranges) == (num_ranges * num_chunks + num_stages - 1) * 3
    if num_stages == 4:
        sliced = interleaved(num_stages, num_chunks, num_ranges, 4)
        assert makespan(sliced, num_ranges) == (num_ranges * num_chunks + num_stages - 1) * 3


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_times_are_the_longest_paths(data: st.DataObject) -> None:
    num_stages, num_slices = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    num_chunks = num_slices * data.draw(st.integers(1, 4))
    num_ranges = data.draw(st.sampled_from([1, 2])) if num_slices == 1 and num_stages > 1 else 1
    if num_ranges > 1:
        num_chunks = num_stages * data.draw(st.integers(1, 2))
        stages = interleaved(num_stages, num_chunks, num_ranges)
    else:
        stages = one_forward_one_backward(num_stages, num_chunks, num_slices)
    if data.draw(st.booleans()) and num_stages > 1:
        stages = with_messages(stages, num_ranges)
    # whole numbers, so that sums are exact
    drawn = data.draw(st.lists(st.integers(0, 9), min_size=101, max_size=101))
    start_s = [float(second) for second in data.draw(st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages))]

    def seconds(action: Action) -> float:
        return float(drawn[(7 * action.stage + 13 * action.layer_range + 31 * action.chunk + 50 * (action.kind == "B")) % 101])

    def hop_s(action: Action) -> float:
        return float(drawn[(5 * action.stage + 11 * action.chunk + ("B" in action.kind)) % 101])

    found = run_actions(stages, seconds, hop_s, num_ranges, start_s)
    assert [list(times) for times in found] == brute_force(stages, seconds, hop_s, num_ranges, start_s)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_passes_run_at_the_same_times_without_the_messages_beside_them(data: st.DataObject) -> None:
    num_stages, num_ranges = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2]))
    num_chunks = num_stages * data.draw(st.integers(1, 3))
    bare = (
        interleaved(num_stages, num_chunks, num_ranges)
        if num_ranges > 1 and num_stages > 1
        else one_forward_one_backward(num_stages, num_chunks)
    )
    num_ranges = num_ranges if num_stages > 1 else 1
    stages = with_messages(bare, num_ranges) if num_stages > 1 else bare
    every, passes = Wiring.of_actions(stages, num_ranges), Wiring.of_passes(stages, num_ranges)
    assert passes is not None
    shape = num_ranges, num_stages, num_chunks, 2
    drawn = data.draw(st.lists(st.integers(0, 9), min_size=50, max_size=50))
    seconds, hop_s = np.resize(np.array(drawn, dtype=float), shape), np.resize(np.array(drawn[::-1], dtype=float), shape[1:])
    found, _ = every.run(every.seconds(seconds), every.hops(hop_s))
    alone, _ = passes.run(passes.seconds(seconds), passes.hops(hop_s))
    for actions, of_all, of_passes in zip(stages, found, alone, strict=True):
        assert [when for action, when in zip(actions, of_all, strict=True) if action.kind in "FB"] == list(of_passes)
    assert passes.stop_s(passes.seconds(seconds), passes.hops(hop_s)) == max(times[-1][1] for times in found)


@pytest.mark.parametrize(
    "texts",
    [
        # the send comes later, the receive earlier, and a message is missing or stands beside another chunk
        ("0F0 0F1 0SF0 0SF1 0RB0 0B0 0RB1 0B1", "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1"),
        ("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1", "1RF0 1RF1 1F0 1F1 1B0 1SB0 1B1 1SB1"),
        ("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1", "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1"),
        ("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1", "1RF0 1F0 1RF1 1F1 1SB0 1B0 1B1 1SB1"),
    ],
)
def test_messages_that_stand_elsewhere_count(texts: tuple[str, ...]) -> None:
    assert Wiring.of_passes([[Action.parse(word) for word in text.split()] for text in texts]) is None


def test_a_result_takes_a_hop_and_a_send_does_not_block() -> None:
    stages = with_messages(one_forward_one_backward(2, 2))
    times = run_actions(stages, unit_s, lambda action: 10.0)
    words = [{str(a): when for a, when in zip(actions, of, strict=True)} for actions, of in zip(stages, times, strict=True)]
    # by hand: the second forward runs while the first one's result is on its way
    assert words[0]["0F0"] == (0, 1) and words[0]["0F1"] == (1, 2)
    assert words[1]["1RF0"] == (11, 11) and words[1]["1B0"] == (12, 14)
    assert words[0]["0B0"] == (24, 26)


def test_no_hop_where_a_chunk_stays_on_its_stage() -> None:
    actions = tuple(
        Action("F" if kind == "F" else "B", 0, 0, layer_range) for kind, layer_range in (("F", 0), ("F", 1), ("B", 1), ("B", 0))
    )
    assert run_actions((actions,), unit_s, lambda action: 10.0, 2)[0][-1] == (4, 6)


def test_a_deadlock_names_what_waits() -> None:
    stages = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 1), Action("F", 1, 0), Action("B", 1, 1), Action("B", 1, 0)),
    )
    with pytest.raises(PlanError, match="deadlock: 0B0, 1F1 wait"):
        run_actions(stages, unit_s, no_hop_s)
    with pytest.raises(PlanError, match="deadlock: 0B0 wait"):
        run_actions(((Action("B", 0, 0), Action("F", 0, 0)),), unit_s, no_hop_s)


def one_rank(words: str) -> Stages:
    return (tuple(Action.parse(word) for word in words.split()),)


def test_a_copy_that_is_back_in_time_costs_nothing() -> None:
    # forwards of two layers, backwards of two; every copy takes as long as a layer's forward
    step = {"F": CopyStep(0.5, 0.5), "B": CopyStep(1.0, 0.5)}
    stages = one_rank("0F0 0F1 0B1 0B0")
    times, copied = run_copying(stages, unit_s, no_hop_s, lambda action: (step[action.kind],) * 2 if action.chunk == 0 else ())
    # out at 0.5 to 1, under the second layer, and 1 to 1.5, for which the next chunk waits; the second layer's comes back when
    # its own backward begins, the first one's under it
    assert copied[0].stops_s == (1.0, 1.5)
    assert times == (((0, 1.5), (1.5, 2.5), (2.5, 4.5), (4.5, 7)),)


def test_a_layer_takes_at_least_as_long_as_the_copy_of_the_one_before() -> None:
    # three layers of a second each, whose copies take 4, 0 and 2 seconds, and a head of half a second
    steps = {"F": (CopyStep(1.0, 4.0), CopyStep(1.0, 0.0), CopyStep(1.0, 2.0)), "B": (CopyStep(1.0, 0.0),) * 3}
    times, copied = run_copying(one_rank("0F0 0B0"), lambda action: 3.5, no_hop_s, lambda action: steps[action.kind])
    # the second layer ends with the copy at 5, the third at 6, and the head begins when its copy is done, at 8
    assert copied[0].stops_s == (5.0, 5.0, 8.0)
    assert times[0][0] == (0, 8.5)


@pytest.mark.parametrize(
    ("leaving_layers", "expected"),
    [
        # one layer leaves at a time, and the next pass waits for it. Back: from 14 to 16, 16 to 18, and so on
        (1, ((0, 7), (7, 14), (14, 22), (22, 30))),
        # two leave at a time: the third layer ends when the first has left, at 3. The next forward waits until 7, when all have
        # left; the backward for tensors that come back from 10 to 12, beside others that leave until 14
        (2, ((0, 3), (3, 10), (10, 18), (18, 26))),
        (3, ((0, 3), (3, 10), (10, 18), (18, 26))),
    ],
)
def test_copies_of_several_layers_leave_beside_the_backward_that_follows(leaving_layers: int, expected: Any) -> None:
    # two chunks of three layers of a second, whose copies take two; a backward of a layer takes two
    layers = {kind: (CopyStep(seconds, 2.0, leaving_layers),) * 3 for kind, seconds in (("F", 1.0), ("B", 2.0))}
    stages = one_rank("0F0 0F1 0B0 0B1")
    times, copied = run_copying(stages, lambda action: 3 * layers[action.kind][0].compute_s, no_hop_s, lambda a: layers[a.kind])
    assert times[0] == expected and [each.stops_s for each in copied] == [(3, 5, 7), (10, 12, 14)]


@pytest.mark.parametrize(
    ("words", "moved", "expected"),
    [
        # the copy of F1 takes from 2 to 7; B0 would end at 3
        ("0F0 0F1 0B0 0F2 0B1 0B2", "0F1", ((0, 1), (1, 2), (2, 7), (7, 8), (8, 9), (9, 10))),
        # a forward computes when the tensors of the one before have left, at 6
        ("0F0 0F1 0B0 0B1", "0F0", ((0, 1), (1, 7), (7, 8), (8, 9))),
    ],
)
def test_a_pass_waits_for_what_the_forward_before_sends(words: str, moved: str, expected: Any) -> None:
    steps = {Action.parse(moved): (CopyStep(1.0, 5.0, 2),)}
    times, _ = run_copying(one_rank(words), lambda action: 1.0, no_hop_s, lambda action: steps.get(action, ()))
    assert times[0] == expected


def test_copies_out_that_run_ahead_queue_behind_each_other_and_copies_back_wait_for_them() -> None:
    # one step a pass, and a link of four seconds for each chunk
    stages = one_rank("0F0 0F1 0B1 0B0")
    times, copied = run_copying(stages, unit_s, no_hop_s, lambda action: (CopyStep(unit_s(action), 4.0),), runs_ahead=True)
    # out: 1 to 5, 5 to 9. Back: chunk 1 from 9 to 13, runs to 15; chunk 0 from 13 to 17
    assert [one.stops_s for one in copied] == [(5.0,), (9.0,)]
    assert times == (((0, 1), (1, 2), (2, 15), (15, 19)),)


def test_copies_that_run_ahead_hide_behind_later_forwards_and_the_backward_before() -> None:
    stages = one_rank("0F0 0F1 0B1 0B0")
    found = []
    for runs_ahead in (False, True):
        times, _ = run_copying(stages, unit_s, no_hop_s, lambda action: (CopyStep(unit_s(action), 1.0),), runs_ahead=runs_ahead)
        found.append(times[0][2:])
    # out: 1 to 2, 3 to 4, and the next pass waits. Back: chunk 1 from 4 to 5, runs to 7; chunk 0 from 7 to 8
    # ahead, out: 1 to 2, 2 to 3. Back: chunk 1 from 3 to 4, runs to 6; chunk 0 from 4 to 5
    assert found == [((4, 7), (7, 10)), ((2, 6), (6, 8))]


def test_the_head_runs_before_the_first_copy_is_sent_for() -> None:
    stages = one_rank("0F0 0B0")
    times, _ = run_copying(
        stages,
        lambda action: 3.0,
        no_hop_s,
        # a second of each pass is the head's, behind the layers of a forward and before those of a backward
        lambda action: (CopyStep(2.0, 0.5),),
    )
    # layers to 2, out from 2 to 2.5, head to 3.5; backward: head to 4.5, copy to 5, layers to 7
    assert times == (((0, 3.5), (3.5, 7)),)


@pytest.mark.parametrize(("num_stages", "num_slices"), list(itertools.product((2, 4, 8), (1, 4))))
def test_a_wider_link_is_never_slower(num_stages: int, num_slices: int) -> None:
    stages = one_forward_one_backward(num_stages, 4 * num_slices, num_slices)
    lengths = []
    for copy_s in (0.0, 0.1, 0.5, 2.0):

        def copies(action: Action, copy_s: float = copy_s) -> tuple[CopyStep, ...]:
            return (CopyStep(unit_s(action) / 2, copy_s),) * 2

        times, _ = run_copying(stages, unit_s, no_hop_s, copies)
        lengths.append(max(of[-1][1] for of in times))
    assert lengths == sorted(lengths)
    assert lengths[0] == makespan(stages) < lengths[-1]

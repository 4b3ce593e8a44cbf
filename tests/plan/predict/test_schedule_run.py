"""Micro-batches that run in turns, and groups in step: seconds and bytes against a simulation of every rank by itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.pipeline_plans import pipeline_plan, random_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.orders import running_order
from hf_longctx.plan.core.types import Action, MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import message_bytes
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.pipeline_run import StageSeconds


def one_after_the_other(plan: StepPlan) -> StepPlan:
    """Returns the plan without turns: its micro-batches and orders stay."""
    return replace(plan, turns=())


def costs_of(plan: StepPlan, kind: str) -> CostModel:
    model_layers = sum(stage.num_layers for stage in plan.micro_batches[0].groups[0].stages)
    costs = cost_model(kind, plan.num_ranks)
    spreads = any(group.head_stages for batch in plan.micro_batches for group in batch.groups)
    windows = (2 * costs.model.windows)[:model_layers]
    num_head_stages = plan.num_stages if spreads else 1
    model = replace(costs.model, num_layers=model_layers, windows=windows, num_head_stages=num_head_stages)
    return replace(costs, model=model, parameters=plan.parameters, shard_ranks=plan.ranks_per_stage)


def place_of(plan: StepPlan, index: int, position: int) -> int | None:
    """Index of the group of a micro-batch in which a position is."""
    return next((g for g, group in enumerate(plan.micro_batches[index].groups) if position in group.positions), None)


class RankByRank:
    """Simulates every rank by itself: its actions one after the other, messages by messages. Slow and obvious."""

    def __init__(self, plan: StepPlan, costs: CostModel) -> None:
        self.plan = plan
        self.seconds = [[StageSeconds(plan, group, costs) for group in batch.groups] for batch in plan.micro_batches]
        self.clocks = [0.0] * plan.num_ranks
        self.left = []
        for rank in range(plan.num_ranks):
            stage, position = plan.place(rank)
            own = [
                (m, batch.groups[place].stages[stage].actions)
                for m, batch in enumerate(plan.micro_batches)
                if (place := place_of(plan, m, position)) is not None
            ]
            order = running_order([actions for _, actions in own], plan.for_rank(rank).turns)
            self.left.append([(own[index][0], action) for index, action in order])
        self.sent_s: dict[tuple[int, int, str, int, int, int], float] = {}
        self.spans: dict[tuple[int, int, str], tuple[float, float]] = {}

    def group(self, rank: int) -> tuple[int, SequenceGroup]:
        m, _ = self.left[rank][0]
        place = place_of(self.plan, m, self.plan.place(rank)[1])
        assert place is not None
        return place, self.plan.micro_batches[m].groups[place]

    def run(self) -> float:
        while any(self.left):
            assert any([self.advance(rank) for rank in range(self.plan.num_ranks) if self.left[rank]]), "ranks wait for ever"
        return max(self.clocks)

    def advance(self, rank: int) -> bool:
        """Runs the rank's next action if it can."""
        m, action = self.left[rank][0]
        stage, position = self.plan.place(rank)
        place, _ = self.group(rank)
        num_stages = self.plan.num_stages
        num_ranges = len(self.plan.micro_batches[0].groups[0].stages[0].layer_ranges)
        # output heads come after all layer ranges
        where = min(action.layer_range * num_stages + stage, num_ranges * num_stages)
        if action.kind in ("SF", "SB"):
            there = where + (1 if action.kind == "SF" else -1)
            arrival_s = self.clocks[rank] + self.seconds[m][place].hop_s(action)
            self.sent_s[m, position, action.kind[1], there, action.chunk, 0] = arrival_s
        elif action.kind in ("RF", "RB"):
            key = (m, position, action.kind[1], where, action.chunk, 0)
            if key not in self.sent_s:
                return False
            self.clocks[rank] = max(self.clocks[rank], self.sent_s[key])
        else:
            return self.compute(rank)
        self.left[rank].pop(0)
        return True

    def compute(self, rank: int) -> bool:
        """Runs an F or B together with all ranks that wait for one another, if all of them are at it."""
        m, action = self.left[rank][0]
        stage, _ = self.plan.place(rank)
        batch = self.plan.micro_batches[m]
        mine, _ = self.group(rank)
        [together] = [places for places in self.plan.in_step(batch) if mine in places]
        is_kept = self.plan.parameters == "gathered_per_step"
        if is_kept and action.kind == "F":
            # weights that are kept for the step meet nobody in forwards
            together = (mine,)
        ranks = {
            place: [stage * self.plan.ranks_per_stage + position for position in batch.groups[place].positions]
            for place in together
        }
        everyone = [each for own in ranks.values() for each in own]
        if any(not self.left[each] or self.left[each][0] != (m, action) for each in everyone):
            return False
        for place, own in ranks.items():
            begin_s = max(self.clocks[each] for each in (own if is_kept else everyone))
            for each in own:
                self.spans[each, m, str(action)] = begin_s, begin_s + self.seconds[m][place].of(action)
                self.left[each].pop(0)
        for each in everyone:
            # sums of gradients end with the slowest
            ends = everyone if is_kept else [each]
            self.clocks[each] = max(self.spans[other, m, str(action)][1] for other in ends)
        return True


# a group waits for what any of its ranks waits for, and all messages of a group arrive at once
@pytest.mark.wide
@given(
    st.one_of(random_schedules(), random_schedules(parameters="gathered_per_step"), random_schedules(spreads=True)),
    st.sampled_from(COST_KINDS),
)
@settings(deadline=None, max_examples=150)
def test_seconds_are_those_of_every_rank_by_itself(plan: StepPlan, kind: str) -> None:
    costs = costs_of(plan, kind)
    simulated = RankByRank(plan, costs)
    run = evaluate_plan(plan, costs)
    if not plan.turns:
        # a single micro-batch
        assert len(plan.micro_batches) == 1
    assert run.step_s - run.once_s == pytest.approx(simulated.run(), rel=1e-9)
    for rank in range(plan.num_ranks):
        found = sorted((event.start_s, event.stop_s) for event in run.events if event.rank == rank)
        expected = sorted(span for (each, _, _), span in simulated.spans.items() if each == rank)
        assert found == [pytest.approx(span, rel=1e-9) for span in expected]


@pytest.mark.wide
@given(st.one_of(random_schedules(), random_schedules(spreads=True)), st.sampled_from(COST_KINDS))
@settings(deadline=None, max_examples=150)
def test_bytes_of_micro_batches_in_flight_add_up_on_every_rank(plan: StepPlan, kind: str) -> None:
    costs = costs_of(plan, kind)
    byte_model = ByteModel(costs.model)
    run = evaluate_plan(plan, costs, with_events=False)
    for rank in range(plan.num_ranks):
        stage, _ = plan.place(rank)
        rounds = plan.for_rank(rank).rounds
        moments = [byte_model.moments(group, own) for group, own in rounds]
        actions = [[action for action in own.actions if action.kind in "FBH"] for _, own in rounds]
        # the forward or backward before an output head counts its bytes
        passes = [[action for action in own if action.kind != "H"] for own in actions]
        order = [index for index, action in running_order(actions, plan.for_rank(rank).turns) if action.kind != "H"]
        done = [0] * len(rounds)
        most = most_tokens = most_chunks = 0
        waiting: dict[tuple[int, int], set[int]] = defaultdict(set)
        for index in order:
            place = done[index]
            beside = sum(
                int(each.after[0][count - 1] + each.after[2][count - 1])
                for other, (each, count) in enumerate(zip(moments, done, strict=True))
                if other != index and 0 < count < len(passes[other])
            )
            most = max(most, beside + int(moments[index].peak[place]))
            done[index] += 1
            action = passes[index][place]
            waiting[index, action.chunk] |= {action.layer_range} if action.kind == "F" else set()
            in_flight = {key for key, parts in waiting.items() if parts}
            most_chunks = max(most_chunks, sum(map(len, waiting.values())))
            most_tokens = max(most_tokens, sum(tokens_of(rounds[i][0], chunk) for i, chunk in in_flight))
            waiting[index, action.chunk] -= {action.layer_range} if action.kind == "B" else set()
        widest = max(tokens_of(group, chunk) for group, _ in rounds for chunk in range(len(group.chunks)))
        messages = message_bytes(costs.model, rounds[0][1], plan.num_stages, widest)
        assert run.peak_bytes[rank] == byte_model.stage_states(rounds[0][1], plan) + most + messages
        assert run.ranks[rank].peak_tokens == most_tokens
        assert run.in_flight[stage] >= most_chunks


def tokens_of(group: SequenceGroup, chunk: int) -> int:
    """Tokens of a chunk on the fullest rank."""
    return max(1, -(-group.chunks[chunk].num_tokens // group.degree))


LAYOUTS = [[(1, [[(0, 0, 20)], [(0, 20, 30)]])], [(1, [[(1, 0, 9)], [(2, 0, 9)]])], [(1, [[(3, 0, 50)]])]]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("kind", COST_KINDS)
def test_micro_batches_of_one_layout_are_one_micro_batch_of_all_chunks(num_stages: int, kind: str) -> None:
    """Where positions never change their group, the schedule is that of one group with the chunks of all micro-batches."""
    lengths = [30, 9, 9, 50]
    plan = pipeline_plan(lengths, LAYOUTS, num_stages, has_turns=True)
    whole = pipeline_plan(lengths, [[(1, [chunk for [(_, chunks)] in LAYOUTS for chunk in chunks])]], num_stages)
    assert len(plan.turns) == num_stages and not whole.turns
    found, expected = (evaluate_plan(each, costs_of(each, kind)) for each in (plan, whole))
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)
    assert found.peak_bytes == expected.peak_bytes
    assert found.in_flight == expected.in_flight
    assert [rank.peak_tokens for rank in found.ranks] == [rank.peak_tokens for rank in expected.ranks]


@pytest.mark.wide
@given(random_schedules(parameters="sharded", has_reach=False), st.sampled_from(COST_KINDS))
@settings(deadline=None, max_examples=150)
def test_turns_are_never_slower_than_micro_batches_one_after_the_other(plan: StepPlan, kind: str) -> None:
    costs = costs_of(plan, kind)
    in_turns, after = (evaluate_plan(each, costs, with_events=False) for each in (plan, one_after_the_other(plan)))
    assert in_turns.step_s <= after.step_s * (1 + 1e-9)
    assert max(in_turns.peak_bytes) >= max(after.peak_bytes)


def test_a_fast_group_waits_in_every_slot_for_the_slow_one_beside_it() -> None:
    groups = [(2, [[(0, 0, 40)], [(1, 0, 40)]]), (1, [[(2, 0, 4)], [(3, 0, 4)]]), (1, [[(4, 0, 4)], [(5, 0, 60)]])]
    plan = pipeline_plan([40, 40, 4, 4, 4, 60], [groups], 2, parameters="sharded", has_turns=True)
    costs = costs_of(plan, "attention")
    run = evaluate_plan(plan, costs)
    for name in ("0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1"):
        assert len({event.start_s for event in run.events if event.name == name}) == 1
    alone = [
        evaluate_plan(replace(plan, micro_batches=(MicroBatch((group,)),)), costs).step_s
        for group in plan.micro_batches[0].groups
    ]
    assert run.step_s > max(alone)


def test_a_fast_group_whose_weights_are_kept_waits_in_backwards_alone() -> None:
    groups = [(2, [[(0, 0, 40)], [(1, 0, 40)]]), (1, [[(2, 0, 4)], [(3, 0, 4)]]), (1, [[(4, 0, 4)], [(5, 0, 60)]])]
    kept, gathered = (
        pipeline_plan([40, 40, 4, 4, 4, 60], [groups], 2, parameters=each, has_turns=True)
        for each in ("gathered_per_step", "sharded")
    )
    costs = costs_of(kept, "attention")
    run = evaluate_plan(kept, costs)
    seconds = [StageSeconds(kept, group, costs) for group in kept.micro_batches[0].groups]
    starts = {(event.name, event.rank): event.start_s for event in run.events}
    # positions 0 and 1 are of the first group, position 2 of the second
    assert starts["0F1", 2] == pytest.approx(seconds[1].of(Action.parse("0F0")), rel=1e-9)
    assert starts["0F1", 0] == pytest.approx(seconds[0].of(Action.parse("0F0")), rel=1e-9) != starts["0F1", 2]
    assert run.step_s <= evaluate_plan(gathered, costs_of(gathered, "attention")).step_s

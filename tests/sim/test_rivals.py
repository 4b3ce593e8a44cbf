"""Rivals run whole steps at their best settings, within the memory and above the bound of our own plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.forecasts import COEFFICIENTS, LENGTHS, MODEL, changed, scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.planner import plan_step
from hf_longctx.sim.baselines import (
    BASELINES,
    CHECKPOINTINGS,
    FULL,
    KEPT,
    SELECTIVE,
    CheckpointedCosts,
    all_baselines,
    static_of_degree,
)
from hf_longctx.sim.rivals import Rivals, settings_of
from hf_longctx.sim.scenario import Request, Scenario, build_scenario


def engine(**changes: int) -> Scenario:
    """The toy scenario, in which everybody may recompute."""
    own = scenario()
    return changed(own, memory=replace(own.memory, keeps_everything=False, **changes))


def test_a_static_run_by_hand() -> None:
    # 200 and 100 tokens. With everything kept four ranks hold 164, too few for 200. Checkpointed they hold 300, 75 each, in one
    # micro-batch: 3 ms a token and rank, 2 * 10 ms, 250 ms once; 3 / 4 of 16 values of 16 bytes are sent in a pass; the replay
    # takes 1 ms a token but for the head's 80 of 1232 products. Attention takes no seconds, so selective, tried first, wins
    kept, selective, _ = settings_of(engine())
    assert 4 * kept.tokens_per_rank == 164 and selective.tokens_per_rank >= 75
    (choices,) = Rivals(engine(), [(200, 100)], 200).baselines()
    static = choices[0]
    exchange_s = 2 * 75 * 3 / 4 * 16 * 16 * 1e-6
    assert static.step_s == pytest.approx(0.25 + 0.02 + 75 * 3e-3 + exchange_s + 75 * 1e-3 * (1 - 80 / 1232), rel=1e-12)
    assert (static.name, static.degree, static.layout) == ("static", 4, "<4>")
    assert static.label == "static <4>, selective checkpointing" and static.most_s == static.step_s


def test_what_does_not_fit_even_fully_checkpointed_says_so() -> None:
    own = build_scenario(Request(model="llama-3.2-1b", hardware="h100", num_ranks=1, longest_tokens=400_000))
    room = settings_of(own)[-1].tokens_per_rank
    assert room < 400_000 < own.longest_tokens
    (choices,) = Rivals(own, [(400_000, 900)], 400_000).baselines()
    room_for = f"and there is room for {room:,} on 1 rank"
    reason = f"does not fit even with full checkpointing: the longest sequence has 400,000 tokens, {room_for}"
    assert [choice.detail for choice in choices[1:]] == [reason] * (len(BASELINES) - 1)
    assert choices[0].detail == reason.replace("the longest sequence has", "a run has sequences of up to")
    assert not any(choice.is_possible or choice.checkpointing for choice in choices)
    # one token less on a rank, and it fits
    (fits,) = Rivals(own, [(room,)], room).baselines()
    assert [choice.checkpointing for choice in fits] == ["full checkpointing"] * len(BASELINES)


batches = st.lists(st.lists(st.integers(1, 240), min_size=1, max_size=12), min_size=1, max_size=2)


@pytest.mark.wide
@given(batches)
@settings(max_examples=15, deadline=None)
def test_no_rival_beats_the_bound_of_our_plan(steps: list[list[int]]) -> None:
    own = engine()
    limit = max(max(lengths) for lengths in steps)
    found = Rivals(own, steps, limit).baselines()
    assert [[choice.name for choice in choices] for choice in [0] for choices in found] == [list(BASELINES)] * len(steps)
    for lengths, choices in zip(steps, found, strict=True):
        bound_s = plan_step(0, lengths, own.costs, own.planner_config).estimate.lower_bound_s
        for choice in choices:
            assert choice.is_possible == (not choice.detail)
            assert not choice.is_possible or choice.step_s >= bound_s * (1 - 1e-9), choice


@given(st.lists(st.integers(1, 160), min_size=1, max_size=12))
@settings(max_examples=15, deadline=None)
def test_where_everything_fits_checkpointing_only_costs_time(lengths: list[int]) -> None:
    """One layout, under one limit of tokens, takes ever more seconds the more of it is run again."""
    config = PlannerConfig(41, (1, 2, 4))
    problems = [GroupingProblem.build(lengths, CheckpointedCosts.of(scenario().costs, each), config) for each in CHECKPOINTINGS]
    for baseline in all_baselines(problems[0], max(lengths)):
        kept_s, selective_s, full_s = (each.step_seconds([list(groups) for groups in baseline.layout]) for each in problems)
        assert baseline.step_s == kept_s < selective_s <= full_s


@pytest.mark.wide
@given(batches)
@settings(max_examples=25, deadline=None)
def test_more_memory_makes_no_static_run_slower(steps: list[list[int]]) -> None:
    """Degrees and checkpointings that fit a device fit a larger one; the best size of micro-batches is searched, hence 5 %."""
    own = engine()
    larger = changed(own, memory=replace(own.memory, usable_bytes=2 * own.memory.usable_bytes))
    limit = max(max(lengths) for lengths in steps)
    few, more = (sum(row[0].step_s for row in Rivals(each, steps, limit).baselines()) for each in (own, larger))
    assert not few or more <= 1.05 * few


def test_a_static_run_has_one_degree_and_one_checkpointing_for_all_steps() -> None:
    # alone, the first step would keep everything on one rank each, and the second cannot
    short, long = (20,) * 8, (280,)
    (alone,) = Rivals(engine(), [short], 20).baselines()
    assert (alone[0].degree, alone[0].checkpointing) == (1, "everything kept")
    both = Rivals(engine(), [short, long], 280).baselines()
    assert {(row[0].degree, row[0].checkpointing) for row in both} == {(4, both[1][0].checkpointing)}
    assert both[0][0].checkpointing != "everything kept"
    # others choose their groups anew in every step, but not what is kept
    for place, name in enumerate(BASELINES[1:], start=1):
        assert {row[place].checkpointing for row in both} == {both[1][place].checkpointing}, name


def test_the_context_limit_binds_the_static_degree_alone() -> None:
    kept, _, full = settings_of(engine())
    assert kept.tokens_per_rank * 2 < full.tokens_per_rank * 4
    (choices,) = Rivals(engine(), [LENGTHS], full.tokens_per_rank * 4).baselines()
    assert (choices[0].degree, choices[0].checkpointing) == (4, "full checkpointing")
    assert choices[1].checkpointing == "everything kept"
    (beyond,) = Rivals(engine(), [LENGTHS], full.tokens_per_rank * 4 + 1).baselines()
    assert not beyond[0].is_possible and beyond[1].is_possible
    assert beyond[0].detail.startswith("does not fit even with full checkpointing: a run has sequences of up to ")


def test_packs_that_need_more_bytes_than_a_document_get_fewer_tokens() -> None:
    """Every plan of a rival fits its device, also where packs need more bytes than one document of as many tokens."""
    # with kernels, packs of one of the others would need more than what is taken away, and be refused
    own = build_scenario(Request("qwen3-8b", "h100", 8, longest_tokens=60_000, compile_layers=False))
    rivals = Rivals(own, [[60_000, *[9_000] * 12, *[700] * 80]], 60_000)
    for setting in rivals.settings[1:]:
        rivals.settings = (setting,)
        (roomy,) = rivals.baselines()
        # pretend that packs need four tenths more than was counted for a document
        rivals.settings = (replace(setting, left_bytes=int(0.7 * setting.left_bytes)),)
        (tight,) = rivals.baselines()
        for one, other in zip(roomy, tight, strict=True):
            assert 0 < one.used_bytes <= setting.left_bytes and 0 < other.used_bytes <= 0.7 * setting.left_bytes
        assert any(one.used_bytes > 0.7 * setting.left_bytes for one in roomy)
        # not even one sequence fits
        rivals.settings = (replace(setting, left_bytes=setting.left_bytes // 100),)
        (none,) = rivals.baselines()
        assert all(not choice.is_possible and " cannot run: " in choice.detail for choice in none)


def test_a_run_that_keeps_everything_compares_layouts() -> None:
    (only,) = settings_of(scenario())
    assert (only.checkpointing, only.label, only.tokens_per_rank) == (KEPT, "", 41)
    (choices,) = Rivals(scenario(), [LENGTHS], 120).baselines()
    assert all(choice.label in (f"{choice.name} <{choice.degree}>", choice.name) for choice in choices)
    bound = changed(engine(), placement=replace(engine().placement, max_tokens_per_rank=20))
    assert [setting.tokens_per_rank for setting in settings_of(bound)] == [20] * 3


def test_micro_batches_of_several_sizes_are_tried() -> None:
    # in one micro-batch 160 tokens wait for the longest pack; the search never loses to packs of nine tenths
    costs = CheckpointedCosts.of(replace(scenario().costs, coefficients=COEFFICIENTS), SELECTIVE)
    assert costs.model == replace(MODEL, exchange_parts=1) and FULL.replays_attention and not SELECTIVE.replays_attention
    problem, _ = GroupingProblem.build(LENGTHS, costs, PlannerConfig(41, (1, 2, 4))).longest_first()
    (static,) = all_baselines(problem, 120, ("static",))
    assert problem.step_seconds(static_of_degree(problem, 4)) == static.step_s

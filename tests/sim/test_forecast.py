"""A forecast compares plans by one prediction, and its numbers can be checked by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from helpers.plans.forecasts import LENGTHS, TOKEN_BYTES, changed, cost_model, forecast, scenario

from hf_longctx.plan.core.messages import counted
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.sim.execution import execute_plan
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.output.text import length_bins


def test_the_plan_is_that_of_the_planner_and_its_seconds_those_of_the_simulation() -> None:
    found = forecast()
    [step] = found.steps
    validate_plan(step.plan)
    assert sorted(step.plan.lengths) == sorted(LENGTHS)
    own = scenario()
    assert plan_digest(step.plan) == plan_digest(plan_step(0, step.plan.lengths, own.costs, own.planner_config))
    assert step.plan.estimate.step_s == step.execution.step_s == execute_plan(step.plan, own.costs).step_s
    assert found.step_s == step.execution.step_s >= found.lower_bound_s > 0
    assert found.tokens_per_s == pytest.approx(sum(LENGTHS) / found.step_s)


def test_the_peak_is_that_of_the_memory_model() -> None:
    found = forecast()
    held = max(rank.peak_tokens for rank in found.steps[0].execution.ranks)
    assert found.peak_tokens == held <= found.scenario.tokens_per_rank
    # states sharded over four ranks, and the parameters gathered from them, as worked out in test_remedies
    assert found.steps[0].plan.estimate.peak_bytes == 16_512 + held * TOKEN_BYTES


def test_the_peak_of_a_measured_model_is_the_measured_one() -> None:
    own = scenario()
    found = forecast(of=changed(own, memory=replace(own.memory, saved_bytes_per_token=1500, state_bytes_per_parameter=18)))
    # 1312 parameters of 18 bytes over four ranks
    assert found.steps[0].plan.estimate.peak_bytes == 5_904 + found.peak_tokens * 1500


def test_several_steps_are_averaged_and_share_no_sequence() -> None:
    found = forecast(num_steps=5, batch=7)
    assert len(found.steps) == 2
    assert Counter(n for step in found.steps for n in step.plan.lengths) == Counter(LENGTHS)
    assert found.step_s == pytest.approx(sum(step.execution.step_s for step in found.steps) / 2)
    by_name = {choice.name: choice.step_s for choice in found.baselines}
    for choice in found.steps[0].baselines:
        same = next(other for other in found.steps[1].baselines if other.name == choice.name)
        assert by_name[choice.name] == pytest.approx((choice.step_s + same.step_s) / 2)
    assert found.share("compute_s") + found.share("exchange_s") + found.share("idle_s") == pytest.approx(1 - 0.25 / found.step_s)


def test_baselines_are_named_and_none_beats_the_bound() -> None:
    found = forecast()
    assert {"static", "BatchAda", "Megatron hybrid-CP", "FCP"} <= {choice.name for choice in found.baselines}
    possible = [choice.step_s for choice in found.baselines if choice.is_possible]
    assert possible == sorted(possible) and possible[0] >= found.lower_bound_s * (1 - 1e-9)
    static = next(choice for choice in found.baselines if choice.name == "static")
    assert static.step_s >= found.step_s * (1 - 1e-9)


def test_every_static_degree_has_its_seconds_or_the_reason_against_it() -> None:
    found = forecast()
    room = found.scenario.tokens_per_rank
    by_name = {choice.name: choice for choice in found.alternatives}
    assert room == 41
    for degree in (1, 2):
        assert not by_name[f"all groups of {degree}"].is_possible
        assert by_name[f"all groups of {degree}"].detail == (
            "does not fit: the longest sequence has 120 tokens, "
            f"and there is room for {degree * room} on {counted(degree, 'rank')}"
        )
    # 333 tokens in groups of 4 * 41 need three micro-batches of one group; each token costs 3 ms on four ranks, each chunk 20 ms,
    # and a rank sends 3/4 of its tokens in both passes: in and out 4 query heads and, one on each rank, 4 heads of keys and
    # values make 16 of 16 bytes, at 1 us each
    four = by_name["all groups of 4"]
    tokens = sum(LENGTHS)
    exchange_s = 2 * tokens / 4 * 3 / 4 * 16 * 16 * 1e-6
    assert four.step_s == pytest.approx(0.25 + 3 * 0.02 + tokens * 3e-3 / 4 + exchange_s)
    assert four.layout == "<4> x3"


def test_the_same_groups_by_another_method_are_priced_as_that_method() -> None:
    own = scenario()
    free = changed(own, costs=replace(own.costs, method="auto"), placement=replace(own.placement, method="auto"))
    found = forecast(of=free)
    choices = {choice.name: choice for choice in found.alternatives if "alone" in choice.name}
    used = {group.method for mb in found.steps[0].plan.micro_batches for group in mb.groups if group.degree > 1}
    assert len(choices) >= 2 and not (len(used) == 1 and f"these groups by {used.pop()} alone" in choices)
    plan = found.steps[0].plan
    rings = tuple(
        replace(mb, groups=tuple(replace(g, method="ring" if g.degree > 1 else "local", ulysses_degree=0) for g in mb.groups))
        for mb in plan.micro_batches
    )
    expected_s = execute_plan(replace(plan, micro_batches=rings), own.costs).step_s
    assert choices["these groups by ring alone"].step_s == pytest.approx(expected_s)
    assert expected_s > found.step_s * 1.001


def test_degrees_used_count_every_sequence_once() -> None:
    found = forecast()
    uses = found.degrees_used
    assert sum(use.num_sequences for use in uses) == len(LENGTHS)
    assert sum(use.num_tokens for use in uses) == sum(LENGTHS)
    assert [use.degree for use in uses] == sorted((use.degree for use in uses), reverse=True)
    # 120 tokens need at least four ranks of 41
    assert uses[0].degree == 4 and uses[0].longest == 120


def test_bins_hold_powers_of_two_and_every_sequence_once() -> None:
    bins = length_bins(forecast())
    assert [(one.low, one.high) for one in bins] == [(1 << bit, 2 << bit) for bit in range(7)]
    assert [one.num_sequences for one in bins] == [1, 3, 1, 3, 2, 3, 1]
    assert [one.num_tokens for one in bins] == [1, 7, 4, 32, 36, 133, 120]
    assert bins[-1].by_degree == ((4, 1, 120),)


def test_without_lengths_memory_and_the_longest_sequence_are_known() -> None:
    found = make_forecast(scenario(), None, 3, 512, seed=0)
    assert found.steps == () and found.alternatives == () and length_bins(found) == ()
    assert found.scenario.longest_tokens == 4 * 41 and found.peak_tokens == 41
    assert found.longest_row.tokens == max(row.tokens for row in found.longest) > 0
    # one sequence on four ranks with everything kept: 3 / 4 of 16 elements of 16 bytes are sent for each token
    row = found.longest[0]
    exchange_s = 2 * row.tokens / 4 * 3 / 4 * 16 * 16 * 1e-6
    assert row.step_s == pytest.approx(0.25 + 0.02 + row.tokens * 3e-3 / 4 + exchange_s)


def test_a_sequence_that_fits_nowhere_is_refused_with_what_would_hold_it() -> None:
    with pytest.raises(ValueError) as error:
        forecast((500, 197, 30))
    message = str(error.value)
    assert "the longest of 3 sequences has 500 tokens" in message
    assert "(4 ranks of 41 tokens) holds 164; 2 sequence(s) are longer" in message
    assert "leave these out with --limit 164" in message
    # MODEL has four heads, so Ulysses groups have at most four ranks, and more ranks do not help
    assert "--gpus" not in message


def test_one_token_too_many_is_refused() -> None:
    assert forecast((164, 30)).step_s > 0
    with pytest.raises(ValueError, match=r"has 165 tokens, .* holds 164; 1 sequence"):
        forecast((165, 30))


def test_a_job_wide_enough_for_the_longest_sequence_is_named() -> None:
    own = scenario()
    free = changed(own, placement=replace(own.placement, method="auto"))
    # eight ranks hold 8 * ((80,000 - 2,624 - 10,496) // 1516 = 44), sixteen 16 * 44
    with pytest.raises(ValueError, match=r"or --gpus 16 \(holds 704\)"):
        forecast((500, 197, 30), of=free)


def plan_of(costs: CostModel, layout: list[list[tuple[int, tuple[int, ...]]]], lengths: tuple[int, ...]) -> str:
    shapes = {1: GroupShape(1), 2: GroupShape(2, 2), 4: GroupShape(4, 4)}
    placed = place_layout(layout, costs.cluster.num_ranks, costs.cluster.ranks_per_node, node_aligned=True)
    return build_plan(0, lengths, placed, shapes, replace(costs, parameters="sharded")).folded_layout


def test_layouts_are_folded_by_degree_and_by_repeat() -> None:
    costs = cost_model(4)
    assert plan_of(costs, [[(4, (0,))]], (9,)) == "<4>"
    assert plan_of(costs, [[(2, (0,)), (1, (1,)), (1, (2,))]], (9, 8, 7)) == "<2,1x2>"
    # ranks without sequences run the dummy chunk alone
    assert plan_of(costs, [[(2, (0,))]], (9,)) == "<2,1x2>"
    assert plan_of(costs, [[(4, (0,))], [(4, (1,))], [(2, (2,)), (2, (3,))]], (90, 80, 7, 6)) == "<4> x2 <2x2>"

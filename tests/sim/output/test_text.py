"""The report names the numbers that matter for a decision, and nothing that is not known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers.plans.forecasts import MEMORY, changed, cost_model, forecast, scenario

from hf_longctx.plan.core.messages import duration
from hf_longctx.plan.predict.planning import WeightSeconds
from hf_longctx.sim.execution import execute_plan
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.output.text import _beside, execution_text, forecast_text

pytestmark = pytest.mark.quick


def test_the_report_holds_step_bound_layout_baselines_memory_and_longest_sequence() -> None:
    found = forecast()
    text = forecast_text(found)
    assert f"STEP  {found.step_s * 1e3:.0f} ms (one step of 14 sequences)" in text
    assert f"and this memory: {found.lower_bound_s * 1e3:.0f} ms" in text
    for name in ("static", "BatchAda", "Megatron hybrid-CP", "FCP"):
        row = next(line for line in text.splitlines() if line.strip().startswith(name))
        [choice] = [choice for choice in found.baselines if choice.name == name]
        factor = choice.step_s / found.step_s
        assert not choice.is_possible or ("equal" if abs(factor - 1) < 0.004 else f"{factor:.2f}x faster") in row
    # only the largest of the degrees that are too small is shown
    assert "all groups of 2 or fewer" in text
    assert "does not fit: the longest sequence has 120 tokens, and there is room for 82 on 2 ranks" in text
    assert "room for 41 on 1 rank" not in text
    assert "LONGEST SEQUENCE  164 tokens (4 ranks of 41), all weights trained: everything kept" in text
    assert text.startswith("You can train sequences up to 164 tokens; a step with one takes ")
    assert "2 times the ranks: --gpus 8" not in text
    assert "beyond them its RoPE or position embeddings must be extended" in text


def test_a_step_beside_a_teacher_counts_its_forwards() -> None:
    costs = scenario().costs
    of = changed(scenario(), costs=replace(costs, teacher=costs), memory=replace(MEMORY, usable_bytes=1 << 20))
    found = forecast(of=of)
    [step] = found.steps
    # a teacher as large as the model, whose forwards take a third of all passes
    teacher_s = found.weights.teacher_s
    assert 0.2 < teacher_s / (step.execution.step_s - costs.coefficients.step_s) < 0.4
    total_s = step.execution.step_s + teacher_s
    text = forecast_text(found)
    assert f"STEP  {duration(total_s)} (one step of 14 sequences), {sum(step.plan.lengths) / total_s:,.0f} tokens/s" in text
    assert f"  {duration(teacher_s)} of it are forwards of the teacher, which the bound" in text
    assert f"{step.plan.num_ranks} ranks" in (alone := execution_text(step.plan, step.execution, of.costs, of.memory))
    assert f"\n  {duration(total_s)}; rank-seconds" in alone and "forwards of the teacher, which the seconds of ranks" in alone
    assert "teacher" not in forecast_text(forecast())


def test_no_line_ends_in_blanks_and_no_table_is_empty() -> None:
    for text in (forecast_text(forecast()), forecast_text(make_forecast(scenario(), None, 1, 1, 0))):
        assert not re.search(r"[ \t]+$", text, re.MULTILINE)
        assert "\n\n\n" not in text


def test_without_lengths_nothing_is_said_of_steps() -> None:
    text = forecast_text(make_forecast(scenario(), None, 1, 1, 0))
    assert "STEP" not in text and "BASELINES" not in text
    assert "MEMORY" in text and "LONGEST SEQUENCE  164 tokens" in text


def test_communicators_are_a_row_of_the_memory_of_gpus() -> None:
    # the default group, all ranks, pairs, and the ranks that share the parameters
    row = r"kept for communicators of NCCL +2\.0+ +4 of 0\.5 GiB"
    costs = scenario().costs
    for name, has_row in (("NVIDIA H100", True), ("generic cpu", False)):
        hardware = replace(costs.cluster.hardware, name=name)
        cluster = replace(costs.cluster, hardware=hardware)
        memory = replace(MEMORY, device_bytes=80 * 2**30, usable_bytes=64 * 2**30)
        of = changed(scenario(), costs=replace(costs, cluster=cluster), memory=memory)
        text = forecast_text(make_forecast(of, None, 1, 1, 0))
        assert bool(re.search(row, text)) == has_row, text


def test_gathers_are_told_beside_the_seconds_unless_they_were_measured() -> None:
    found = forecast()
    weights = WeightSeconds((0.5,) * 4, sum_s=0.25, update_s=0.125)
    steps = tuple(replace(step, execution=replace(step.execution, weights=weights)) for step in found.steps)
    text = forecast_text(replace(found, steps=steps))
    assert "gathers of sharded weights take 500 ms, sums of gradients over copies take 250 ms, the optimizer takes 125 ms" in text
    assert "beside it" not in forecast_text(found)


@pytest.mark.parametrize(
    ("seconds", "whole_s", "expected"),
    [
        (5.4, 100.0, "5 s"),
        (70.0, 100.0, "1 min 10 s"),
        (0.9996, 0.9996, "1.00 s"),
        (1.234, 12.3, "1.2 s"),
        (0.0123, 0.085, "12 ms"),
    ],
)
def test_parts_of_a_step_have_its_unit_and_digits(seconds: float, whole_s: float, expected: str) -> None:
    assert _beside(seconds, whole_s) == expected


def test_sequences_that_fit_a_rank_are_not_said_to_need_more() -> None:
    assert "every planned sequence fits on one rank (41 tokens)" in forecast_text(forecast((30, 20, 10, 9, 8, 7)))


def test_ranks_that_do_the_same_are_one_row() -> None:
    costs = cost_model(4)
    plan = forecast((120,)).steps[0].plan
    text = execution_text(plan, execute_plan(plan, costs), costs, MEMORY)
    assert "one micro-batch <4>" in text
    [row] = [line for line in text.splitlines() if line.startswith("  0 to 3")]
    # 30 tokens each: (1 + 2) ms a token and 20 ms for the chunk, nothing waits
    assert "110 ms" in row and " 0 ms " in row and " 30 " in row and "host GiB" not in text


def test_ranks_that_differ_by_less_than_the_step_shows_are_one_row() -> None:
    costs = cost_model(4)
    plan = forecast((120,)).steps[0].plan
    execution = execute_plan(plan, costs)
    # three digits of 110 ms are milliseconds
    changes = [
        {},
        {"idle_s": 4e-4, "peak_tokens": 1005},
        {"idle_s": 6e-3, "peak_tokens": 1005},
        {"idle_s": 6e-3, "peak_tokens": 1020},
    ]
    ranks = tuple(replace(rank, **{"peak_tokens": 1000, **change}) for rank, change in zip(execution.ranks, changes, strict=True))
    text = execution_text(plan, replace(execution, ranks=ranks, host_bytes=(0, 0, 0, 2**30)), costs, MEMORY)
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["rank", "0 to 1", "2", "3"]
    assert [row[4:6] for row in rows[1:]] == [["0 ms", "1,005"], ["6 ms", "1,005"], ["6 ms", "1,020"]]
    assert [row[-1] for row in rows] == ["host GiB", "0.0", "0.0", "1.0"]


def test_a_peak_above_the_memory_shows_in_the_simulation() -> None:
    plan = forecast((120,)).steps[0].plan
    small = replace(MEMORY, usable_bytes=2**30, state_bytes_per_parameter=16)
    text = execution_text(plan, execute_plan(plan, cost_model(4)), cost_model(4), replace(small, saved_bytes_per_token=2**28))
    assert "peak 7.5 GiB of 1.0 GiB usable" in text

"""The report of a run: numbers worked out by hand from hand-written intervals, and a fit that finds the truth."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from helpers.plans.layouts import plan_of, tiny_costs
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import num_policies, with_policies
from helpers.plans.sliced_plans import cut
from helpers.ranks.rank_steps import group_pool
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.planning.report import RunReport
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.planning.step_record import StepRecord, predicted_idle, predicted_memory
from hf_longctx.plan.core.planner_config import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    Estimate,
    GroupShape,
    LayerPolicy,
    Span,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.cost.fitting import ChunkSample, PassSample
from hf_longctx.plan.cost.traffic import Traffic, mean_traffic
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.prediction.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval
from hf_longctx.runtime.execution.results import NO_MEMORY, StepMemory
from hf_longctx.runtime.process_groups.pool import GroupPool

# <2> of 12 tokens, then <1,1> of 5 tokens and of a dummy
LAYOUT = [[(2, (0, 2))], [(1, (1,))]]
LENGTHS = [9, 5, 3]

# rank 1: both rounds, some waiting in between, and the reduction
INTERVALS = (
    Interval(0, "F", "0F0", 0.0, 0.1),
    Interval(0, "B", "0B0", 0.1, 0.3),
    Interval(1, "F", "0F0", 0.35, 0.4),
    Interval(1, "B", "0B0", 0.4, 0.42),
    Interval(-1, "reduce", "gradients", 0.42, 0.5),
)


def step_plan(**estimate: Any) -> StepPlan:
    return replace(plan_of(LAYOUT, LENGTHS, 2), estimate=Estimate(**estimate))


def step_record(**estimate: Any) -> StepRecord:
    return StepRecord(step_plan(**estimate), rank=1, loss=2.5, intervals=INTERVALS)


def test_seconds_of_a_step_end_with_its_last_interval() -> None:
    assert step_record().measured_s == 0.5
    assert step_record().reduce_s == pytest.approx(0.08)


def test_tokens_and_padding_are_those_of_all_ranks() -> None:
    record = step_record()
    # one dummy on the idle rank of the second micro-batch
    assert record.num_tokens == 17
    assert record.padding_share == pytest.approx(1 / 18)


def test_padding_counts_every_dummy_of_a_chunk_smaller_than_its_group() -> None:
    record = StepRecord(plan_of([[(4, (0,))]], [1], 4), 0, 0.0, INTERVALS)
    assert record.padding_share == pytest.approx(3 / 4)


def test_line_before_calibration_shows_a_dash_for_the_prediction() -> None:
    assert step_record(step_s=9.0).line(7) == (
        "step    7 | loss  2.5000 | predicted     - s, measured   0.5 s |      34 tokens/s | padding 5.6% | "
        "2 micro-batches <2> <1x2>"
    )


def test_line_after_calibration_shows_the_prediction() -> None:
    assert "| predicted  0.45 s, measured   0.5 s |" in step_record(step_s=0.45, cost_source="measured").line(1)


def test_line_shows_how_far_a_measured_plan_is_from_the_bound() -> None:
    bounded = {"step_s": 0.45, "lower_bound_s": 0.36}
    assert step_record(**bounded, cost_source="measured").line(1).endswith("<2> <1x2> | within 25.0% of optimal")
    # guessed costs say nothing, and no bound is no gap
    for estimate in (bounded, {"step_s": 0.45, "cost_source": "measured"}):
        assert step_record(**estimate).line(1).endswith("<2> <1x2>")


def test_line_of_a_plan_that_replaced_another_says_so() -> None:
    solver = "greedy in the place of a late one"
    assert step_record(solver=solver).line(1).endswith(f"<2> <1x2> | {solver}")


def test_line_of_one_micro_batch_is_in_the_singular() -> None:
    record = StepRecord(plan_of([[(2, (0,))]], [40_000], 2), 0, 0.123456, INTERVALS)
    assert record.line(1234).endswith("|  80,000 tokens/s | padding 0.0% | 1 micro-batch <2>")
    assert record.line(1234).startswith("step 1234 | loss  0.1235 |")


def test_equal_neighbours_of_a_layout_are_folded() -> None:
    layout = [[(2, (0,))], [(1, (1,)), (1, (2,))], [(1, (3,))], [(1, (4,))], [(2, (5,))]]
    plan = plan_of(layout, [60, 9, 9, 8, 7, 50], 2)
    runs = {"<2>,<2>,<1,1>,<1,1>,<1,1>": "<2> x2 <1x2> x3"}
    assert runs[plan.layout] == plan.folded_layout


def test_equal_groups_of_one_micro_batch_are_folded() -> None:
    assert plan_of([[(2, (0,)), (1, (1,))]], [9, 3], 4).folded_layout == "<2,1x2>"


def test_samples_are_this_ranks_chunks_with_whole_chunk_sizes() -> None:
    # 12 tokens in documents of 9 and 3: 81 / 2 + 9 / 2 causal pairs; rank 1 is the idle one of the second round
    costs = tiny_costs(2)
    traffic = [mean_traffic(costs.model, costs.cluster, GroupShape(2, 2), 12, is_backward) for is_backward in (False, True)]
    assert traffic[0].num_bytes > 0
    samples = step_record().samples(costs)
    assert list(samples) == [(0, (0, 1), "0F0"), (1, (1,), "0F0")]
    assert list(samples.values()) == [
        ChunkSample(
            PassSample(12, 45.0, 2, traffic[0], pytest.approx(0.1)), PassSample(12, 45.0, 2, traffic[1], pytest.approx(0.2))
        ),
        ChunkSample(PassSample(0, 0, 1, Traffic(), pytest.approx(0.05)), PassSample(0, 0, 1, Traffic(), pytest.approx(0.02))),
    ]


def test_ranks_of_a_group_call_a_chunk_the_same_where_one_of_them_was_left_out_before() -> None:
    # rank 1 works alone while rank 0 waits, then both share a sequence
    plan = plan_of([[(1, (0,)), (1, (1,))], [(2, (2,))]], [9, 8, 12], 2)
    first, second = plan.micro_batches
    alone = replace(first, groups=tuple(group for group in first.groups if group.positions == (1,)))
    plan = replace(plan, micro_batches=(alone, second))
    intervals = tuple(Interval(r, kind, f"0{kind}0", r, r + 1.0) for r in (0, 1) for kind in "FB")
    keys = [set(StepRecord(plan, rank, 0.0, intervals).samples(tiny_costs(2))) for rank in (0, 1)]
    assert keys == [{(1, (0, 1), "0F0")}, {(0, (1,), "0F0"), (1, (0, 1), "0F0")}]


def test_samples_tell_several_chunks_of_a_group_apart() -> None:
    plan = plan_of([[(1, (0, 1))]], [4, 6], 1)
    ((group, stage),) = plan.for_rank(0).rounds
    chunks = (Chunk(0, (Span(0, 0, 4),)), Chunk(1, (Span(1, 0, 6),)))
    stage = replace(stage, actions=tuple(Action.parse(word) for word in ("0F0", "0F1", "0B1", "0B0")))
    group = replace(group, chunks=chunks, stages=(stage,))
    plan = replace(plan, micro_batches=(replace(plan.micro_batches[0], groups=(group,)),))
    seconds = {"0F0": (0.0, 1.0), "0F1": (1.0, 3.0), "0B1": (3.0, 7.0), "0B0": (7.0, 15.0)}
    intervals = tuple(Interval(0, name[1], name, *times) for name, times in seconds.items())
    first, second = StepRecord(plan, 0, 0.0, intervals).samples(tiny_costs(1)).values()
    assert (first.forward.num_tokens, first.forward.seconds, first.backward.seconds) == (4, 1.0, 8.0)
    assert (second.forward.num_tokens, second.forward.seconds, second.backward.seconds) == (6, 2.0, 4.0)


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_samples_leave_out_what_policies_add(rate: float) -> None:
    """Also where the device is slower than the model says: what was added is taken off at the rate of the forward."""
    costs = tiny_costs(1)
    budget = ActivationBudget(32, 60 * saved_token_bytes(costs.model), 2**20, 16)
    plan = plan_step(0, [120], costs, PlannerConfig(240, (1,), activations=budget))
    assert any(policy.layers for policy in plan.micro_batches[0].groups[0].stages[0].activations)
    intervals = tuple(replace(i, start_s=rate * i.start_s, stop_s=rate * i.stop_s) for i in intervals_of(plan, costs, 0))
    (sample,) = StepRecord(plan, 0, 0.0, intervals).samples(costs).values()
    ((group, _),) = plan.for_rank(0).rounds
    for measured, kept_s in (
        (sample.forward, costs.forward_s(group.chunks[0], group.shape, costs.model.num_layers)),
        (sample.backward, costs.backward_s(group.chunks[0], group.shape, costs.model.num_layers)),
    ):
        assert measured.seconds == pytest.approx(rate * kept_s, rel=1e-9)


def test_events_carry_rank_times_and_what_ran() -> None:
    events = step_record().events()
    assert [(e.rank, e.kind, e.name, e.start_s, e.stop_s) for e in events] == [
        (1, i.kind, i.name, i.start_s, i.stop_s) for i in INTERVALS
    ]
    assert [e.detail for e in events] == [
        "<2> 12 tokens in 2 sequence(s)",
        "<2> 12 tokens in 2 sequence(s)",
        "<1> 0 tokens in 0 sequence(s)",
        "<1> 0 tokens in 0 sequence(s)",
        "",
    ]


@dataclass(frozen=True)
class Finished:
    """A result of the executor with hand-written intervals."""

    loss: torch.Tensor
    measured: tuple[Interval, ...]
    memory: StepMemory = NO_MEMORY
    router_loss: None = None
    router_load: None = None

    def intervals(self) -> list[Interval]:
        return list(self.measured)


def lone_report(num_ranks: int = 2, **config: Any) -> RunReport:
    source = PlanSource(GroupPool((1,), timeout_s=1.0), tiny_costs(num_ranks), PlannerConfig(64, (1,)))
    return RunReport(LongContextConfig(**config), source)


def finish_step(report: RunReport, plan: StepPlan, intervals: tuple[Interval, ...] = INTERVALS, step: int = 1) -> None:
    report.step_done(plan, Finished(torch.tensor(2.5), intervals))
    report.on_step_end(None, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl())


def intervals_of(plan: StepPlan, costs: CostModel, rank: int) -> tuple[Interval, ...]:
    """Measurements of `rank` if `costs` were the truth: it waits in the reduction for the rank that comes last."""
    events = [event for event in evaluate_plan(plan, costs).events if event.rank == rank and event.kind in ("F", "B")]
    rounds = [index for index in range(len(plan.micro_batches)) for _ in range(2)]
    intervals = [Interval(r, e.kind, e.name, e.start_s, e.stop_s) for r, e in zip(rounds, events, strict=True)]
    end_s = max(event.stop_s for event in events)
    return (*intervals, Interval(-1, "reduce", "gradients", end_s, evaluate_plan(plan, costs).step_s))


def test_metrics_are_means_over_the_steps_since_the_last_call() -> None:
    report = lone_report(report_steps=False)
    finish_step(report, step_plan(solve_s=0.2))
    short = replace(plan_of([[(1, (0,)), (1, (1,))]], [6, 7], 2), estimate=Estimate(solve_s=0.4))
    finish_step(report, short, tuple(i for i in INTERVALS if i.round == 0))
    assert report.take_metrics() == {
        "tokens_per_s": pytest.approx((17 + 13) / (0.5 + 0.3)),
        "measured_step_s": pytest.approx(0.4),
        "padding_share": pytest.approx((1 / 18 + 0) / 2),
        "micro_batches": pytest.approx(1.5),
        "planning_s": pytest.approx(0.3),
    }
    assert report.take_metrics() == {}


def test_predicted_seconds_are_logged_when_every_step_was_predicted() -> None:
    report = lone_report(report_steps=False)
    finish_step(report, step_plan(step_s=0.4, cost_source="measured"))
    finish_step(report, step_plan(step_s=0.6, cost_source="measured"))
    assert report.take_metrics()["predicted_step_s"] == pytest.approx(0.5)
    finish_step(report, step_plan(step_s=0.4, cost_source="measured"))
    finish_step(report, step_plan())
    assert "predicted_step_s" not in report.take_metrics()


def test_the_median_error_of_predictions_is_logged_and_summed_up_at_the_end(capsys, tmp_path: Path) -> None:
    report = lone_report(calibration_steps=0, timeline_steps=0)
    # all take half a second: errors of -0.1, +0.5 and -0.2; the first step has no prediction
    for predicted_s in (0.0, 0.45, 0.75, 0.4):
        finish_step(report, step_plan(step_s=predicted_s, cost_source="measured" if predicted_s else "default"))
    assert report.take_metrics()["prediction_error"] == pytest.approx(0.2)
    finish_step(report, step_plan(step_s=0.5, cost_source="measured"))
    assert report.take_metrics()["prediction_error"] == pytest.approx(0.0)
    capsys.readouterr()
    end_training(report, tmp_path, step=5)
    assert capsys.readouterr().out.strip() == (
        "predicted against measured: median error 15.0%, mean 20.0% over 4 plans; the cost model was fitted 0 time(s)"
    )


def test_a_run_without_predictions_has_no_summary(capsys, tmp_path: Path) -> None:
    report = lone_report(calibration_steps=0, timeline_steps=0)
    finish_step(report, step_plan())
    assert "prediction_error" not in report.take_metrics()
    capsys.readouterr()
    end_training(report, tmp_path, step=1)
    assert capsys.readouterr().out == ""


def test_a_fit_is_said_once_behind_its_step(capsys) -> None:
    report = lone_report(calibration_steps=3)
    truth = replace(tiny_costs(2), coefficients=TRUTH)
    finish_step(report, step_plan())
    for layout, lengths in WARM_UP:
        plan = plan_of(layout, lengths, 2)
        finish_step(report, plan, intervals_of(plan, truth, rank=0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("step ") for line in lines] == [True] * 4 + [False]
    # rank 0 alone: it took part in two, three and one chunks, each of two passes
    assert lines[-1].startswith("cost model fitted on 12 passes of 3 plans: median error 0.0%")


def test_the_gap_to_the_bound_is_logged_when_every_step_has_one() -> None:
    report = lone_report(report_steps=False)
    finish_step(report, step_plan(step_s=0.4, lower_bound_s=0.3, cost_source="measured"))
    finish_step(report, step_plan(step_s=0.6, lower_bound_s=0.5, cost_source="measured"))
    assert report.take_metrics()["plan_gap"] == pytest.approx(0.25)
    finish_step(report, step_plan(step_s=0.4, cost_source="measured"))
    assert "plan_gap" not in report.take_metrics()


def test_replaced_plans_are_logged_and_told_at_the_end(capsys, tmp_path: Path) -> None:
    report = lone_report(report_steps=False, timeline_steps=0)
    finish_step(report, step_plan())
    assert not report.take_metrics().keys() & {"late_plans", "failed_plans"}
    end_training(report, tmp_path, step=1)
    assert capsys.readouterr().out == ""
    report.source.drafts.late_plans = 3
    finish_step(report, step_plan())
    metrics = report.take_metrics()
    assert metrics["late_plans"] == 3 and "failed_plans" not in metrics
    end_training(report, tmp_path, step=2)
    assert capsys.readouterr().out == "the fast planner replaced 3 late and 0 failed plans of the solver\n"


@pytest.mark.parametrize("report_steps", [True, False])
def test_one_line_per_step_if_asked_for(capsys, report_steps: bool) -> None:
    report = lone_report(report_steps=report_steps)
    finish_step(report, step_plan(), step=12)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ([step_record().line(12)] if report_steps else [])


def test_several_plans_of_a_step_are_reported_each_and_logged_as_one_step(capsys) -> None:
    report = lone_report(calibration_steps=0)
    bounds = {"lower_bound_s": 0.25, "cost_source": "measured"}
    parts = [step_plan(step_s=0.45, solve_s=0.1, **bounds), step_plan(step_s=0.55, **bounds)]
    for loss, plan in zip((2.5, 0.5), parts, strict=True):
        report.step_done(plan, Finished(torch.tensor(loss), INTERVALS))
    # fixed seconds of a step were predicted for both plans, and are left out of the first one
    report.source.costs = replace(report.source.costs, coefficients=replace(TRUTH, source="measured"))
    report.on_step_end(None, TrainerState(global_step=4, is_world_process_zero=True), TrainerControl())
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step    4 (1/2) | loss  3.0000 | predicted   0.4 s, measured   0.5 s |")
    assert second.startswith("step    4 (2/2) | loss  3.0000 | predicted  0.55 s, measured   0.5 s |")
    metrics = report.take_metrics()
    assert metrics["measured_step_s"] == pytest.approx(1.0)
    assert metrics["micro_batches"] == 4
    assert metrics["planning_s"] == pytest.approx(0.1)
    assert metrics["predicted_step_s"] == pytest.approx(0.95)
    # 0.4 + 0.55 s over bounds of 0.2 + 0.25 s
    assert metrics["plan_gap"] == pytest.approx(0.95 / 0.45 - 1)
    assert metrics["tokens_per_s"] == pytest.approx(34)


def test_calibration_of_several_plans_per_step_counts_only_real_reductions() -> None:
    report = lone_report(report_steps=False, calibration_steps=1)
    truth = replace(tiny_costs(2), coefficients=TRUTH)
    for place in range(3):
        plan = step_plan()
        intervals = intervals_of(plan, truth, rank=0)
        if place < 2:
            # nothing is reduced behind these, so they pass the reduction at once
            intervals = (*intervals[:-1], replace(intervals[-1], stop_s=intervals[-1].start_s))
        report.step_done(plan, Finished(torch.tensor(1.0), intervals))
    report.on_step_end(None, TrainerState(global_step=1), TrainerControl())
    assert report.source.costs.coefficients.step_s == pytest.approx(TRUTH.step_s)


def test_a_step_end_without_a_finished_step_says_nothing(capsys) -> None:
    report = lone_report()
    report.on_step_end(None, TrainerState(is_world_process_zero=True), TrainerControl())
    assert capsys.readouterr().out == "" and report.take_metrics() == {}


TRUTH = CostCoefficients(
    forward=PassCoefficients(3e-6, 4e-4, 0.02, 3e-3, 4e-7),
    backward=PassCoefficients(7e-6, 9e-4, 0.03, 5e-3, 5e-7),
    step_s=0.05,
    source="truth",
)
WARM_UP = [
    ([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], [90, 31, 60, 8]),
    ([[(2, (0,))], [(2, (1, 2, 3))], [(1, (4,))]], [200, 40, 30, 20, 11]),
    ([[(1, (0,)), (1, (1, 2))]], [150, 3, 2]),
]


def test_warm_up_steps_give_the_cost_model_the_true_coefficients() -> None:
    report = lone_report(report_steps=False, calibration_steps=3)
    truth = replace(tiny_costs(2), coefficients=TRUTH)
    # the first step pays for start-up; its times would spoil the fit
    finish_step(report, step_plan())
    for layout, lengths in WARM_UP:
        assert report.source.costs.coefficients.source == "default"
        plan = plan_of(layout, lengths, 2)
        finish_step(report, plan, intervals_of(plan, truth, rank=0))
    found = report.source.costs
    assert found.coefficients.source == "measured"
    assert found.coefficients.step_s == pytest.approx(TRUTH.step_s)
    plan = plan_of([[(2, (0,))], [(1, (1, 2))]], [170, 12, 80], 2)
    assert evaluate_plan(plan, found).step_s == pytest.approx(evaluate_plan(plan, truth).step_s, rel=1e-6)


def test_calibration_happens_once() -> None:
    report = lone_report(report_steps=False, calibration_steps=1)
    finish_step(report, step_plan())
    finish_step(report, step_plan())
    fitted = report.source.costs
    assert fitted.coefficients.is_measured
    for _ in range(4):
        finish_step(report, step_plan())
    assert report.source.costs is fitted


def test_without_calibration_steps_the_built_in_guesses_stay() -> None:
    report = lone_report(report_steps=False, calibration_steps=0)
    before = report.source.costs
    for _ in range(8):
        finish_step(report, step_plan())
    assert report.source.costs is before


def calibrated_on_rank() -> CostCoefficients:
    """Ranks measure their own chunks; rank 1 has less to do and waits in every reduction for rank 0."""
    pool = group_pool()
    truth = replace(tiny_costs(2), coefficients=TRUTH)
    report = RunReport(
        LongContextConfig(report_steps=False, calibration_steps=3), PlanSource(pool, tiny_costs(2), PlannerConfig(64, (1, 2)))
    )
    finish_step(report, step_plan())
    for layout, lengths in WARM_UP:
        plan = plan_of(layout, lengths, 2)
        finish_step(report, plan, intervals_of(plan, truth, pool.rank))
    return report.source.costs.coefficients


def test_all_ranks_fit_one_cost_model_and_leave_waiting_out(ranks) -> None:
    first, second = ranks(2).run(calibrated_on_rank)
    assert first == second and first.is_measured
    assert first.step_s == pytest.approx(TRUTH.step_s)
    assert first.forward.token_s == pytest.approx(TRUTH.forward.token_s, rel=1e-3)


def end_training(report: RunReport, folder: Path, step: int) -> None:
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    report.on_train_end(args, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl())


def test_timeline_of_the_last_steps_is_written_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "at the end"
    report = lone_report(report_steps=False, timeline_steps=2, calibration_steps=0)
    for step in range(1, 6):
        finish_step(report, step_plan(), step=step)
    end_training(report, folder, step=5)
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    # the second of the two steps starts where the first ended
    assert [event["ts"] for event in events] == pytest.approx(
        [offset * 1e6 + i.start_s * 1e6 for offset in (0.0, 0.5) for i in INTERVALS]
    )
    svg = ElementTree.fromstring((folder / "timeline.svg").read_text())
    words = " ".join(element.text or "" for element in svg.iter())
    assert "steps 4 to 5" in words and "measured: 1.00 s" in words
    assert "predicted:" not in words


def test_timeline_shows_the_prediction_once_costs_were_measured(tmp_path: Path) -> None:
    report = lone_report(report_steps=False, timeline_steps=1, calibration_steps=1)
    for _ in range(2):
        finish_step(report, step_plan())
    end_training(report, tmp_path, step=2)
    text = (tmp_path / "timeline.svg").read_text()
    assert "predicted: " in text and "measured: 0.50 s" in text


def test_no_timeline_if_none_is_asked_for_or_no_step_ran(tmp_path: Path) -> None:
    unasked = lone_report(report_steps=False, timeline_steps=0)
    finish_step(unasked, step_plan())
    end_training(unasked, tmp_path, step=1)
    end_training(lone_report(timeline_steps=3), tmp_path, step=0)
    assert list(tmp_path.iterdir()) == []


# two stages, two slices: stage 0 runs forwards of 1 s and backwards of 2 s, stage 1 takes twice as long
STAGED = {
    0: "F0 0 1, SF0 1 1, F1 1 2, SF1 2 2, RB1 2 9, B1 9 11, SB1 11 11, RB0 11 13, B0 13 15",
    1: "RF0 0 1, F0 1 3, SF0 3 3, RF1 3 3, F1 3 5, B1 5 9, SB1 9 9, B0 9 13, SB0 13 13",
}


def staged_record(rank: int, **fields: Any) -> StepRecord:
    """A rank of a pipeline of two slices, with the reduction behind it: half a second, and waiting on stage 1."""
    plan = pipeline_plan([30], [[(1, [[span] for span in cut(0, [20, 10])])]], 2)
    intervals = []
    for text in STAGED[rank].split(", "):
        word, start, stop = text.split()
        intervals.append(Interval(0, word.rstrip("01"), f"{rank}{word}", float(start), float(stop)))
    intervals.append(Interval(-1, "reduce", "gradients", intervals[-1].stop_s, 15.5))
    estimate = {name: fields.pop(name) for name in ("step_s", "cost_source") if name in fields}
    return StepRecord(replace(plan, estimate=Estimate(**estimate)), rank, 2.5, tuple(intervals), **fields)


def test_a_step_of_stages_is_measured_on_every_stage() -> None:
    first, last = (staged_record(rank, step_s=12.4, cost_source="measured") for rank in (0, 1))
    assert first.measured_s == last.measured_s == 15.5 and first.error == last.error == pytest.approx(-0.2)
    assert (first.reduce_s, last.reduce_s) == (0.5, 2.5)
    # busy for 6 of 15 seconds
    assert first.idle_share == pytest.approx(0.6) and last.idle_share is None
    assert [event.name for event in last.events()][:2] == ["1RF0", "1F0"]
    costs = replace(tiny_costs(2), model=replace(tiny_costs(2).model, num_layers=4))
    assert [(key[2], s.forward.seconds, s.backward.seconds) for key, s in last.samples(costs).items()] == [
        ("1F0", 2.0, 4.0),
        ("1F1", 2.0, 4.0),
    ]


def test_line_of_a_pipeline_shows_the_idle_share_of_the_first_stage() -> None:
    assert staged_record(0).line(1).endswith("<1> | first stage idle - predicted, 60.0% measured")
    assert staged_record(0, predicted_idle=0.55).line(1).endswith("| first stage idle 55.0% predicted, 60.0% measured")
    assert "idle" not in staged_record(1).line(1) and "idle" not in step_record().line(1)


def test_predicted_idle_is_the_judges_and_asks_for_measured_costs() -> None:
    plan, costs = staged_record(0).plan, tiny_costs(2)
    truth = replace(costs, coefficients=replace(TRUTH, step_s=100.0))
    run = evaluate_plan(plan, truth)
    idle_s = run.ranks[0].idle_s
    assert predicted_idle(plan, 0, truth) == pytest.approx(idle_s / (idle_s + run.busy_s[0])) and idle_s > 0
    assert predicted_idle(plan, 1, truth) is None and predicted_idle(plan, 0, costs) is None


def test_predicted_memory_of_stages_counts_parts_and_leaves_messages_out() -> None:
    spec = replace(tiny_costs(2).model, num_layers=8)
    plan = pipeline_plan([30, 8], [[(1, [*([span] for span in cut(0, [20, 10])), [(1, 0, 8)]])]], 2, "interleaved", 8, 2)
    keep = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in ("attention_output", "qkv", "mlp")))
    plan = with_policies(plan, [ActivationPolicy(0, 0, (keep, LayerPolicy(), keep))] * num_policies(plan))
    for rank in range(2):
        ((group, stage),) = plan.for_rank(rank).rounds
        # the first of two layers per part is replayed: its input, 32 numbers of 4 bytes per token, waits
        waiting, most = [], 0
        for action in stage.actions:
            if action.kind == "F":
                waiting.append((action.part, action.chunk))
            elif action.kind == "B":
                waiting.remove((action.part, action.chunk))
            most = max(most, sum(group.chunks[chunk].num_tokens for _, chunk in waiting))
        found = predicted_memory(plan, rank, spec)
        assert found.saved == most * 32 * 4
        assert found.kv_book == ByteModel(spec).round(group, stage).book
        # keys and values of four layers and 30 tokens, gradients of the first 20: at most two parts' at once
        assert found.kv_book <= 2 * 4 * 2 * 8 * 4 * (30 + 20)
        run = evaluate_plan(plan, replace(tiny_costs(2), model=spec))
        assert found.device_peak == run.peak_bytes[rank]

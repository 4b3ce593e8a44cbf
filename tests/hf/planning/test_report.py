"""The report of a run: numbers worked out by hand from hand-written intervals, and a fit that finds the truth."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans.layouts import plan_of, tiny_costs
from helpers.plans.measured_plans import INTERVALS, TRUTH, intervals_of, step_plan
from helpers.ranks.rank_steps import group_pool
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.planning.report import RunReport
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import Estimate, StepPlan
from hf_longctx.plan.cost.cost_model import CostCoefficients
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval
from hf_longctx.runtime.execution.round import NO_MEMORY, StepMemory
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.timeline import TimelineEvent


@dataclass(frozen=True)
class Finished:
    """A result of the executor with hand-written intervals."""

    loss: torch.Tensor
    measured: tuple[Interval, ...]
    memory: StepMemory = NO_MEMORY
    aux_loss: None = None
    router_load: None = None
    tallied: tuple[torch.Tensor, ...] = ()

    def intervals(self) -> list[Interval]:
        return list(self.measured)


def lone_report(num_ranks: int = 2, **config: Any) -> RunReport:
    source = PlanSource(GroupPool((1,), timeout_s=1.0), tiny_costs(num_ranks), PlannerConfig(64, (1,)))
    return RunReport(LongContextConfig(**config), source)


def finish_step(report: RunReport, plan: StepPlan, intervals: tuple[Interval, ...] = INTERVALS, step: int = 1) -> None:
    report.step_done(plan, Finished(torch.tensor(2.5), intervals))
    report.on_step_end(None, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl())


def test_metrics_are_means_over_the_steps_since_the_last_call() -> None:
    report = lone_report(report_steps=False)
    finish_step(report, step_plan(solve_s=0.2))
    short = replace(plan_of([[(1, (0,)), (1, (1,))]], [6, 7], 2), estimate=Estimate(solve_s=0.4))
    finish_step(report, short, tuple(i for i in INTERVALS if i.round == 0))
    assert report.take_metrics() == {
        "tokens_per_s": pytest.approx((17 + 13) / (0.5 + 0.3)),
        "measured_step_s": pytest.approx(0.4),
        "padding_share": pytest.approx(1 / 31),
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
        "predicted against measured: median error 15.0%, mean 20.0% over 4 plans; the cost model was fitted 0 times"
    )


def test_a_run_without_predictions_has_no_summary(capsys, tmp_path: Path) -> None:
    report = lone_report(calibration_steps=0, timeline_steps=0)
    finish_step(report, step_plan())
    assert "prediction_error" not in report.take_metrics()
    capsys.readouterr()
    end_training(report, tmp_path, step=1)
    assert capsys.readouterr().out == ""


def test_a_fit_is_said_once(capsys) -> None:
    report = lone_report(calibration_steps=3)
    truth = replace(tiny_costs(2), coefficients=TRUTH)
    finish_step(report, step_plan())
    for layout, lengths in WARM_UP:
        plan = plan_of(layout, lengths, 2)
        finish_step(report, plan, intervals_of(plan, truth, rank=0))
    # rank 0 alone: it took part in two, three and one chunks, each of two passes
    assert capsys.readouterr().out == "cost model fitted on 12 passes of 3 plans: median error 0.0%\n"


def test_the_gap_to_the_bound_is_logged_when_every_step_has_one() -> None:
    report = lone_report(report_steps=False)
    finish_step(report, step_plan(step_s=0.4, lower_bound_s=0.3, cost_source="measured"))
    finish_step(report, step_plan(step_s=0.6, lower_bound_s=0.5, cost_source="measured"))
    assert report.take_metrics()["plan_gap"] == pytest.approx(0.25)
    finish_step(report, step_plan(step_s=0.4, cost_source="measured"))
    assert "plan_gap" not in report.take_metrics()


def log_step(report: RunReport, folder: Path, step: int, logs: dict[str, Any]) -> None:
    """Logs as the trainer does, which takes the metrics of the steps since its last log first."""
    state = TrainerState(global_step=step, is_world_process_zero=True)
    report.on_log(TrainingArguments(str(folder), use_cpu=True), state, TrainerControl(), {**logs, **report.take_metrics()})


@pytest.mark.parametrize("report_steps", [True, False])
def test_one_line_per_log_if_asked_for(capsys, tmp_path: Path, report_steps: bool) -> None:
    report = lone_report(report_steps=report_steps, calibration_steps=0)
    for step in range(1, 8):
        finish_step(report, step_plan(), step=step)
        if step % 3 == 0:
            log_step(report, tmp_path, step, {"loss": 2.25})
    line = "step    {} | loss  2.2500 |  500 ms a step |      34 tokens/s | padding 5.6% | 2 micro-batches a step"
    assert capsys.readouterr().out.splitlines() == ([line.format(3), line.format(6)] if report_steps else [])


def test_several_plans_of_a_step_are_logged_as_one_step() -> None:
    report = lone_report(calibration_steps=0)
    bounds = {"lower_bound_s": 0.25, "cost_source": "measured"}
    parts = [step_plan(step_s=0.45, solve_s=0.1, **bounds), step_plan(step_s=0.55, **bounds)]
    for loss, plan in zip((2.5, 0.5), parts, strict=True):
        report.step_done(plan, Finished(torch.tensor(loss), INTERVALS))
    # fixed seconds of a step were predicted for both plans, and are left out of the first one
    report.source.costs = replace(report.source.costs, coefficients=replace(TRUTH, source="measured"))
    report.on_step_end(None, TrainerState(global_step=4, is_world_process_zero=True), TrainerControl())
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


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, list[TimelineEvent]], str]]:
    """Panels and title of every picture that is drawn."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []

    def keep(panels: Any, title: str, path: Path) -> None:
        drawn.append((panels, title))

    monkeypatch.setattr("hf_longctx.hf.planning.report.save_png_timeline", keep)
    return drawn


def test_timeline_of_the_last_steps_is_written_at_the_end(tmp_path: Path, pictures) -> None:
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
    ((panels, title),) = pictures
    assert title.startswith("steps 4 to 5: ") and list(panels) == ["measured"]
    assert max(event.stop_s for event in panels["measured"]) == pytest.approx(1.0)


def test_timeline_shows_the_prediction_once_costs_were_measured(tmp_path: Path, pictures) -> None:
    report = lone_report(report_steps=False, timeline_steps=1, calibration_steps=1)
    for _ in range(2):
        finish_step(report, step_plan())
    end_training(report, tmp_path, step=2)
    ((panels, _),) = pictures
    assert list(panels) == ["predicted", "measured"]
    assert max(event.stop_s for event in panels["measured"]) == pytest.approx(0.5)
    assert max(event.stop_s for event in panels["predicted"]) > 0


def test_no_timeline_if_none_is_asked_for_or_no_step_ran(tmp_path: Path) -> None:
    unasked = lone_report(report_steps=False, timeline_steps=0)
    finish_step(unasked, step_plan())
    end_training(unasked, tmp_path, step=1)
    end_training(lone_report(timeline_steps=3), tmp_path, step=0)
    assert list(tmp_path.iterdir()) == []


def logged_report() -> RunReport:
    report = lone_report(calibration_steps=0, timeline_steps=0)
    report.console.tells_logs = True
    return report


def test_the_line_of_a_log_has_its_numbers_and_long_ones_follow(capsys, tmp_path: Path) -> None:
    report = logged_report()
    finish_step(report, step_plan())
    logs = {"loss": 2.25, "learning_rate": 1e-4, "grad_norm": 0.5, "mine": 7.0, "epoch": 0.1}
    log_step(report, tmp_path, 1, logs)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step    1 | loss  2.2500 |  500 ms | ") and line.endswith(
        " <2> <1x2> | lr 0.0001 | norm 0.5 | mine 7"
    )
    finish_step(report, step_plan())
    log_step(report, tmp_path, 2, {**logs, **{f"rewards/{number}": 0.5 for number in range(7)}})
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("| norm 0.5") and second.startswith("  mine 7, rewards/0 0.5, ")


def test_evaluations_and_the_end_are_sentences(capsys, tmp_path: Path) -> None:
    report = logged_report()
    state, arguments = TrainerState(global_step=4, is_world_process_zero=True), TrainingArguments(str(tmp_path), use_cpu=True)
    speeds = {"runtime": 19.5, "samples_per_second": 0.6, "steps_per_second": 0.05}
    for logs in (
        {"eval_loss": 5.515, "eval_perplexity": 248.4, **{f"eval_{name}": value for name, value in speeds.items()}, "epoch": 0},
        {"train_runtime": 75.4, "train_loss": 4.809, "total_flos": 1.0, "epoch": 0.1},
        {"own": 3},
    ):
        report.on_log(arguments, state, TrainerControl(), logs)
    assert capsys.readouterr().out.splitlines() == [
        "evaluation after step 4: loss 5.515, perplexity 248.4 (in 19.5 s)",
        "trained up to step 4 in 1 min 15 s, mean loss 4.8090",
        "own 3",
    ]

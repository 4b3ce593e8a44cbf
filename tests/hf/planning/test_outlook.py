"""The first lines of a training: its steps, the predicted seconds of an epoch, and where it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.plans.layouts import tiny_costs
from helpers.plans.measured_plans import TRUTH
from transformers import TrainingArguments

from hf_longctx.hf.planning.report import outlook, typical_step_s
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.plan.core.messages import duration
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.planner import plan_step
from hf_longctx.runtime.process_groups import GroupPool

LENGTHS = [4, 60, 8, 30, 16, 12, 20, 6]


@dataclass
class Loader:
    """The parts of a loader of planned steps that the outlook reads."""

    dataset: SimpleNamespace
    num_steps: int

    def __len__(self) -> int:
        return self.num_steps


def loader(lengths: list[int], num_steps: int) -> Loader:
    return Loader(SimpleNamespace(index=SimpleNamespace(lengths=lengths)), num_steps)


def source(is_measured: bool = True) -> PlanSource:
    costs = tiny_costs(2)
    costs = replace(costs, coefficients=replace(TRUTH, source="measured")) if is_measured else costs
    return PlanSource(GroupPool((1,), timeout_s=1.0), costs, PlannerConfig(64, (1,)))


def test_an_epoch_takes_as_many_typical_steps_as_it_has(tmp_path: Path) -> None:
    plans = source()
    # one step has all sequences, so that it is the typical one; two steps have every second of them
    whole = plan_step(0, sorted(LENGTHS), plans.costs, plans.config).estimate.step_s
    assert typical_step_s(plans, LENGTHS, 1) == pytest.approx(whole)
    half = plan_step(0, sorted(LENGTHS)[1::2], plans.costs, plans.config).estimate.step_s
    assert typical_step_s(plans, LENGTHS, 2) == pytest.approx(half)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, num_train_epochs=2.5, save_steps=7)
    steps, files = outlook(plans, arguments, loader(LENGTHS, 2), 3)
    assert steps == f"training: 5 steps; an epoch has 2, which take about {duration(2 * half)} (predicted)"
    assert files.startswith(f"written to {tmp_path}: a checkpoint every 7 steps, the timeline") and "hf-longctx report" in files


def test_a_guess_is_called_one_and_a_stream_has_no_epoch(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=9, save_strategy="no")
    steps, files = outlook(source(is_measured=False), arguments, loader(LENGTHS, 2), 0)
    assert steps.startswith("training: 9 steps; an epoch has 2, ") and "(a guess from rated speeds" in steps
    assert ": no checkpoints before the end, journal.jsonl" in files and "timeline" not in files
    assert outlook(source(), arguments, None, 0)[0] == "training: 9 steps"
    # a sequence that no group holds is the business of its step
    assert outlook(source(), arguments, loader([900], 1), 0)[0] == "training: 9 steps; an epoch has 1"

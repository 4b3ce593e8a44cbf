"""Replays the steps of a run: plans the lengths in its journal again for another machine or with other settings.

Called by `hf-longctx replay RUN`; `sim/output/replayed.py` writes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_longctx.journal import JOURNAL, Line, read_journal
from hf_longctx.plan.planner import plan_step
from hf_longctx.sim.execution import execute_plan
from hf_longctx.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class PastPlan:
    """One plan of a run, from its journal. predicted_s: None if nothing had been measured before it."""

    step: int
    lengths: tuple[int, ...]
    layout: str
    measured_s: float
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class NewPlan:
    """Prediction for the sequences of a past plan, planned again.

    whole_s: seconds with gathers, sums of gradients and the optimizer, none hidden.
    """

    layout: str
    step_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Replay:
    """Plans of a run, and the same sequences planned again. new: empty without a scenario."""

    folder: Path
    machine: str
    num_plans: int
    past: tuple[PastPlan, ...]
    scenario: Scenario | None = None
    new: tuple[NewPlan, ...] = ()

    @property
    def measured_s(self) -> float:
        return sum(plan.measured_s for plan in self.past)

    @property
    def num_tokens(self) -> int:
        return sum(sum(plan.lengths) for plan in self.past)

    @property
    def step_s(self) -> float:
        """Predicted seconds of the new plans."""
        return sum(plan.step_s for plan in self.new)


def read_run(folder: Path, num_plans: int) -> Replay:
    """Reads up to `num_plans` plans, spread evenly over the run; raises ValueError for a journal without lengths."""
    journal = read_journal(folder)
    steps = journal.of("step")
    if not steps:
        raise ValueError(f"{folder / JOURNAL} has no step yet; replay the run when it has trained some")
    if any({"sequences", "layout", "measured_s"} - line.keys() for line in steps):
        raise ValueError(
            f"{folder / JOURNAL} was written by an earlier version, which kept no lengths of sequences; train some steps with "
            f"this version, or give the lengths to hf-longctx plan --lengths"
        )
    count = min(num_plans, len(steps))
    chosen = [steps[(2 * place + 1) * len(steps) // (2 * count)] for place in range(count)]
    return Replay(folder, _machine(journal.of("start")[-1]), len(steps), tuple(map(_past, chosen)))


def replayed(run: Replay, scenario: Scenario) -> Replay:
    """Plans the run's sequences for the scenario; raises ValueError for sequences that it cannot hold."""
    longest = max(max(plan.lengths) for plan in run.past)
    if longest > scenario.longest_tokens:
        stages = "--stages 1, " if longest <= scenario.flat.longest_tokens else ""
        raise ValueError(
            f"the longest sequence of the run has {longest:,} tokens, but {scenario.placement.num_ranks} rank(s) hold "
            f"{scenario.longest_tokens:,} here; give {stages}more --gpus, --parameters sharded or a larger --hardware"
        )
    new = [_planned(number, plan.lengths, scenario) for number, plan in enumerate(run.past)]
    return Replay(run.folder, run.machine, run.num_plans, run.past, scenario, tuple(new))


def model_of(folder: Path) -> Path | None:
    """Returns the saved model's config, in the run's folder or in its newest checkpoint."""
    checkpoints = sorted(folder.glob("checkpoint-*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in (folder / "config.json", *checkpoints) if path.is_file()), None)


def dtype_of(folder: Path) -> str:
    """Returns the dtype of the run's saved activations, as in `Request.dtype`."""
    precision = str(read_journal(folder).of("start")[-1].get("model", {}).get("precision", ""))
    return "float32" if precision == "float32" else "bfloat16"


def _planned(number: int, lengths: Sequence[int], scenario: Scenario) -> NewPlan:
    plan = plan_step(number, lengths, scenario.costs, scenario.planner_config)
    execution = execute_plan(plan, scenario.costs)
    return NewPlan(plan.folded_layout, execution.step_s, execution.step_bounds_s[1])


def _past(line: Line) -> PastPlan:
    predicted_s = line.get("predicted_s")
    return PastPlan(
        line["step"],
        tuple(int(length) for length in line["sequences"]),
        str(line["layout"]),
        float(line["measured_s"]),
        None if predicted_s is None else float(predicted_s),
    )


def _machine(start: Line) -> str:
    machine = start.get("machine", {})
    return f"{machine.get('ranks', '?')} x {machine.get('device', 'unknown device')}"

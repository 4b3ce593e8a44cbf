"""Improves the fast planner's plan of a step while the step before it runs, where its bound leaves room for that.

A process of its own runs `hf_longctx.plan.anytime`, so that training keeps the interpreter's lock. It is stopped when the step
needs its plan, which is then the best one that was found until then.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import tempfile
import threading
from dataclasses import replace
from typing import ClassVar

from hf_longctx.plan.anytime import COMMAND, Question
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel

logger = logging.getLogger(__name__)

# share of the bound above which solver "auto" asks the program
WORTH_IMPROVING = 0.02

# steps of fewer seconds end before a process has started and answered
_SHORTEST_STEP_S = 1.0

_IMPROVED = " faster than "


def is_worth_improving(plan: StepPlan, config: PlannerConfig) -> bool:
    """Whether solver "auto" should improve a plan: measured costs say that more than 2 % could be gained by other groups."""
    is_grouped = plan.num_stages == 1 and plan.num_ranks > 1 and len(plan.lengths) > 1 and not config.one_micro_batch
    estimate = plan.estimate
    is_greedy = config.solver == "auto" and "exact" not in estimate.solver
    is_known = estimate.cost_source != "default" and estimate.step_s >= _SHORTEST_STEP_S
    return is_grouped and is_greedy and is_known and estimate.gap > WORTH_IMPROVING


def is_improved(plan: StepPlan) -> bool:
    """Whether the program's plan runs in place of the fast planner's; `plan.estimate.solver` then says what it gained."""
    return _IMPROVED in plan.estimate.solver


class Improving:
    """The program at work on one plan, until `stop`, which says once if a program has failed."""

    _has_failed: ClassVar[bool] = False

    def __init__(self, plan: StepPlan, costs: CostModel, config: PlannerConfig) -> None:
        self.plan = self._best = plan
        # the step before takes about as long as this one
        limit_s = min(config.solver_time_limit_s, plan.estimate.step_s)
        question = Question(plan, costs, replace(config, solver_time_limit_s=limit_s))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # closed by `stop`
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                # one core beside training
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            # a machine that starts no further process keeps the fast plan
            logger.info("plans are not improved, since no process starts: %s", error)
            return
        threading.Thread(target=self._listen, args=(pickle.dumps(question),), name="longctx-improving", daemon=True).start()

    def _listen(self, question: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(question)
            self._process.stdin.close()
            while True:
                self._best = pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            # the process has ended, or was stopped in the middle of a plan
            return

    def stop(self) -> StepPlan:
        """Ends the process; returns the best plan, whose estimate says what it gained. Idempotent."""
        best, first = self._best, self.plan
        if self._process is not None and not self._errors.closed:
            self._tell_failure(self._process.poll())
            self._process.kill()
            self._process.wait()
            self._errors.close()
        if best is first:
            return first
        gain = first.estimate.counted_s / best.estimate.counted_s - 1
        solver = f"{best.estimate.solver}, {gain:.1%}{_IMPROVED}{first.estimate.solver}"
        return replace(best, estimate=replace(best.estimate, solver=solver))

    def _tell_failure(self, status: int | None) -> None:
        """Logs, for the first program that ended by itself with an error, its status and the last line that it wrote."""
        if not status or Improving._has_failed:
            return
        Improving._has_failed = True
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
        logger.warning("plans may not be improved: the program that does so ended with status %d: %s", status, reason)

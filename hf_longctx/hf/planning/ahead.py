"""Plans solved ahead of their step on rank 0: the fast planner's first, then that of a slow solver, if it is there in time.

A step never waits longer for a better plan than that plan could save. Whichever plan runs, loss and gradients are the same up
to rounding; only the time differs. A slow solver runs in a thread: HiGHS releases the interpreter's lock and CBC is a process
of its own, so that training goes on meanwhile. A thread cannot be stopped: a solve that was given up goes on until the
solver's own time limit, and until then the steps that follow run under the fast planner's plans.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.schedule import PlanError
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel

logger = logging.getLogger(__name__)

# what `plan_step` is
Planner = Callable[[int, list[int], CostModel, PlannerConfig], StepPlan]

# these end soon by themselves; any other solver gets a stand-in of the fast planner
FAST_SOLVERS = ("auto", "greedy", "static")

# a plan that is nearly there is waited for even if it could save less
_LEAST_PATIENCE_S = 0.05


def is_slow(config: PlannerConfig) -> bool:
    """Whether the configured solver may take its time, so that its plan needs a stand-in."""
    return config.solver not in FAST_SOLVERS and not config.one_micro_batch


@dataclass(frozen=True)
class Draft:
    """What is known of a step's plan: the fast planner's, or why it has none, and the slow solver's future, if any."""

    fast: StepPlan | Exception
    slow: Future[StepPlan] | None = None


class DraftPlanner:
    """Solves drafts in order, in threads, and chooses the plan of each; counts the plans that had to be replaced.

    `late_s`: seconds that a step waits for a slow solver's plan. Default: what that plan could save, which is what the fast
    planner's takes beyond the lower bound.
    """

    def __init__(self, planner: Planner, late_s: float | None) -> None:
        self.planner, self.late_s = planner, late_s
        self.late_plans = self.failed_plans = 0
        self._fast_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longctx-planner")
        self._slow_thread = _DaemonThread("longctx-solver")
        # what may keep that thread busy although nobody waits for it any more
        self._given_up: Future[StepPlan] | None = None

    def submit(self, draft: Callable[[], Draft]) -> Future[Draft]:
        """Runs `draft` behind those submitted before, in the thread of the fast planner."""
        return self._fast_thread.submit(draft)

    def draft(self, step: int, lengths: list[int], costs: CostModel, config: PlannerConfig) -> Draft:
        """The fast planner's plan, the slow solver's being under way; ValueError for lengths that nobody can plan."""
        fast: StepPlan | Exception
        try:
            fast = self.planner(step, lengths, costs, replace(config, solver="greedy"))
        except Exception as error:
            if isinstance(error, ValueError) and not isinstance(error, PlanError):
                raise
            fast = error
        return Draft(fast, self._slow_thread.submit(lambda: self.planner(step, lengths, costs, config)))

    def patience_s(self, draft: Draft) -> float:
        """How long the step may wait for the slow solver: not at all while that is busy with a plan that was given up."""
        if isinstance(draft.fast, Exception):
            return inf
        if self._given_up is not None and not self._given_up.done():
            return 0.0
        if self.late_s is not None:
            return self.late_s
        return max(_LEAST_PATIENCE_S, draft.fast.estimate.step_s - draft.fast.estimate.lower_bound_s)

    def chosen(self, draft: Draft) -> StepPlan:
        """The plan of a step that waited long enough; raises the fast planner's error if neither planner has one."""
        fast, slow = draft.fast, draft.slow
        # asked once: it may end at any moment
        is_late = slow is not None and not slow.done()
        error = slow.exception() if slow is not None and not is_late else None
        if slow is not None and not is_late and error is None:
            return slow.result()
        if isinstance(fast, Exception):
            raise fast from error
        if slow is None:
            return fast
        return self._late(fast, slow) if is_late else self._failed(fast, error)

    def _late(self, fast: StepPlan, slow: Future[StepPlan]) -> StepPlan:
        if not slow.cancel():
            self._given_up = slow
        self.late_plans += 1
        if self.late_plans == 1:
            logger.warning(
                "step %d: the solver's plan is late, so the fast planner's runs, now and in later steps (counted in late_plans); "
                "lower the solver's time limit or use solver 'greedy' if it happens often",
                fast.step,
            )
        return _as_stand_in(fast, "late")

    def _failed(self, fast: StepPlan, error: BaseException | None) -> StepPlan:
        self.failed_plans += 1
        if self.failed_plans == 1:
            logger.warning(
                "step %d: the solver failed, so the fast planner's plan runs, now and in later steps (counted in failed_plans); "
                "use solver 'greedy' if it happens often. %s: %s",
                *(fast.step, type(error).__name__, error),
            )
        return _as_stand_in(fast, "failed")


_STANDS_IN = " in the place of a "


def is_stand_in(plan: StepPlan) -> bool:
    """Whether the fast planner's plan replaced a slow solver's; `plan.estimate.solver` then says why."""
    return _STANDS_IN in plan.estimate.solver


def _as_stand_in(plan: StepPlan, reason: str) -> StepPlan:
    return replace(plan, estimate=replace(plan.estimate, solver=f"{plan.estimate.solver}{_STANDS_IN}{reason} one"))


class _DaemonThread:
    """Runs functions in order; lives while there are some. Unlike an executor's, it does not hold up the process's end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[StepPlan], Callable[[], StepPlan]]] = deque()
        self._is_running = False

    def submit(self, work: Callable[[], StepPlan]) -> Future[StepPlan]:
        future: Future[StepPlan] = Future()
        with self._lock:
            self._waiting.append((future, work))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

"""Solves plans ahead of their step on rank 0, for `PlanSource`: a fast plan first, and a slow solver's plan if it comes in time.

A step never waits longer for a better plan than that plan could save. Whichever plan runs, loss and gradients are the same up to
rounding; only the time differs. A slow solver runs in a thread while training continues, since HiGHS releases the interpreter
lock, and CBC is a process of its own. A thread cannot be stopped, so a solve that nobody waits for any more continues until the
solver's own time limit. Until then, later steps run under the fast planner's plans.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from hf_longctx.hf.planning.improving import Improving
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.schedule import PlanError
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel

logger = logging.getLogger(__name__)

# signature of `plan_step`
Planner = Callable[[int, list[int], CostModel, PlannerConfig], StepPlan]

# solvers that finish soon; for any other solver, the fast planner makes a stand-in plan too
FAST_SOLVERS = ("auto", "greedy", "static")

# shortest wait for a slow solver's plan, even if that plan could save less
_LEAST_PATIENCE_S = 0.05


def is_slow(config: PlannerConfig) -> bool:
    """Whether the configured solver may take long, so that its plan needs a stand-in."""
    return config.solver not in FAST_SOLVERS and not config.one_micro_batch


@dataclass(frozen=True)
class Draft:
    """The plans that a step may run: the fast planner's plan or error, and the future of the slow solver's plan, if any.

    improving: the program that improves the fast plan until the step needs it, if that is worth while.
    """

    fast: StepPlan | Exception
    slow: Future[StepPlan] | None = None
    improving: Improving | None = None


def stop_improving(done: Future[Draft]) -> None:
    """Stops the program that improves a plan which no step will run. Idempotent."""
    if done.exception() is None and (improving := done.result().improving) is not None:
        improving.stop()


class DraftPlanner:
    """Solves the drafts of steps in order, in threads, and chooses each step's plan.

    Counts the slow solver's plans that were late or failed. `late_s`: seconds that a step waits for the slow solver. None: a step
    waits as long as the slow solver's plan could save, which is the fast plan's time minus the lower bound.
    """

    def __init__(self, planner: Planner, late_s: float | None) -> None:
        self.planner, self.late_s = planner, late_s
        self.late_plans = self.failed_plans = 0
        self._fast_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longctx-planner")
        self._slow_thread = _DaemonThread("longctx-solver")
        # a solve that nobody waits for any more, but that may still keep the slow thread busy
        self._given_up: Future[StepPlan] | None = None

    def submit(self, draft: Callable[[], Draft]) -> Future[Draft]:
        """Runs `draft` in the fast planner's thread, after all drafts submitted before it."""
        return self._fast_thread.submit(draft)

    def draft(self, step: int, lengths: list[int], costs: CostModel, config: PlannerConfig) -> Draft:
        """Plans with the fast planner and starts the slow solver; raises ValueError for lengths that cannot be planned."""
        fast: StepPlan | Exception
        try:
            fast = self.planner(step, lengths, costs, replace(config, solver="greedy"))
        except Exception as error:
            if isinstance(error, ValueError) and not isinstance(error, PlanError):
                raise
            fast = error
        return Draft(fast, self._slow_thread.submit(lambda: self.planner(step, lengths, costs, config)))

    def patience_s(self, draft: Draft) -> float:
        """Seconds that the step may wait for the slow solver; 0 while the solver is still busy with an abandoned solve."""
        if isinstance(draft.fast, Exception):
            return inf
        if self._given_up is not None and not self._given_up.done():
            return 0.0
        if self.late_s is not None:
            return self.late_s
        return max(_LEAST_PATIENCE_S, draft.fast.estimate.counted_s - draft.fast.estimate.lower_bound_s)

    def chosen(self, draft: Draft) -> StepPlan:
        """Chooses the plan of a step that has waited long enough.

        Raises the fast planner's error if neither planner has a plan.
        """
        fast, slow = draft.fast, draft.slow
        # ask only once, because the solve may end at any moment
        is_late = slow is not None and not slow.done()
        error = slow.exception() if slow is not None and not is_late else None
        if slow is not None and not is_late and error is None:
            return slow.result()
        if isinstance(fast, Exception):
            raise fast from error
        if draft.improving is not None:
            return draft.improving.stop()
        if slow is None:
            return fast
        return self._late(fast, slow) if is_late else self._failed(fast, error)

    def _late(self, fast: StepPlan, slow: Future[StepPlan]) -> StepPlan:
        if not slow.cancel():
            self._given_up = slow
        self.late_plans += 1
        if self.late_plans == 1:
            logger.warning(
                "step %d: the solver's plan is late, so the fast planner's plan runs; later cases are only counted, in "
                "late_plans. If it happens often, lower the solver's time limit or use solver 'greedy'",
                fast.step,
            )
        return _as_stand_in(fast, "late")

    def _failed(self, fast: StepPlan, error: BaseException | None) -> StepPlan:
        self.failed_plans += 1
        if self.failed_plans == 1:
            logger.warning(
                "step %d: the solver failed, so the fast planner's plan runs; later cases are only counted, in failed_plans. If "
                "it happens often, use solver 'greedy'. %s: %s",
                *(fast.step, type(error).__name__, error),
            )
        return _as_stand_in(fast, "failed")


_STANDS_IN = " in place of a "


def is_stand_in(plan: StepPlan) -> bool:
    """Whether the fast planner's plan replaced a slow solver's; `plan.estimate.solver` then says why."""
    return _STANDS_IN in plan.estimate.solver


def _as_stand_in(plan: StepPlan, reason: str) -> StepPlan:
    return replace(plan, estimate=replace(plan.estimate, solver=f"{plan.estimate.solver}{_STANDS_IN}{reason} one"))


class _DaemonThread:
    """Runs functions in order, in a thread that ends when no function is left.

    Unlike the thread of a `ThreadPoolExecutor`, this thread does not keep the process alive.
    """

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

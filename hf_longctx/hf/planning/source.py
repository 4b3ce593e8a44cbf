"""Source of a run's plans: rank 0 solves them one step ahead, in a thread, and broadcasts JSON; all ranks compare digests.

Only rank 0 solves. The planner gives equal plans for equal inputs, but ranks would differ in the times at which a refitted cost
model becomes available and at which a program reaches its time limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import StepPlan, StepSequences
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.planner import plan_step
from hf_longctx.runtime.process_groups import GroupPool

logger = logging.getLogger(__name__)

# `plan_step`, given at least its first four arguments
Planner = Callable[..., StepPlan]

# solvers with programs that may take up to `solver_time_limit_s`
_SLOW_SOLVERS = ("lp", "milp")

# lengths of a step, its sequences, or a function that returns these after the next step was drawn, or None if the data ended
# before
Lengths = list[int] | StepSequences | Callable[[], list[int] | StepSequences | None]


def quick(config: PlannerConfig) -> PlannerConfig:
    """Returns the settings without programs, which gain nothing while costs are guesses, or for plans that do not run."""
    return replace(config, solver="greedy") if config.solver in _SLOW_SOLVERS else config


class PlanSource:
    """Makes plans for a stream of steps. `costs` may be replaced at any time; later plans use the new costs.

    The first `explore_steps` plans that may explore favour one degree after the other, so that every degree's cost gets samples.
    The planner may take any time: while rank 0 waits for it, it sends a message to the other ranks every `alive_s` seconds, which
    must be less than the control group's time-out.

    is_timed: plans may depend on seconds measured in this run; otherwise equal runs get equal plans.
    """

    def __init__(
        self,
        pool: GroupPool,
        costs: CostModel,
        config: PlannerConfig,
        *,
        explore_steps: int = 5,
        alive_s: float = 10.0,
        planner: Planner = plan_step,
        is_timed: bool = True,
    ) -> None:
        self.pool, self.costs, self.config, self.alive_s = pool, costs, config, alive_s
        self.planner = planner
        # settings for less memory than was assumed at the start; a step that does not fit under them is planned by `config`
        self.tighter: PlannerConfig | None = None
        # seconds that training has waited on rank 0 for plans and the data that they need
        self.waited_s = 0.0
        self.is_timed = is_timed
        self._explore_steps = explore_steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longctx-planner")

    def plans(self, steps: Iterable[tuple[int, Lengths]], explore: bool) -> Iterator[StepPlan]:
        """Yields one plan per (step number, lengths), in order. Collective over all ranks: every rank must draw equally often.

        If the planner raises an error, every rank raises it.
        """
        waiting = iter(steps)
        step: tuple[int, Lengths] | None = next(waiting, None)
        pending: Future[StepPlan] | int | None = None
        while step is not None:
            begun_s = time.perf_counter()
            following = next(waiting, None)
            if pending is None:
                number, lengths = step
                if (known := lengths() if callable(lengths) else lengths) is None:
                    return
                pending = self._submit(number, known, explore)
            current, pending = pending, None
            # nothing may block the planner's thread, which an evaluation needs too
            if following is not None and not callable(following[1]):
                pending = self._submit(following[0], following[1], explore)
            plan = self._share(current)
            step = following
            # waits of evaluations do not count
            self.waited_s += (time.perf_counter() - begun_s) * explore
            yield plan

    def solve(self, step: int, given: list[int] | StepSequences, explore: bool) -> StepPlan:
        """Plans one step on this rank only, however long that takes."""
        costs, planner = self.costs, self.planner
        sequences = StepSequences(tuple(given)) if isinstance(given, list) else given
        lengths = list(sequences.lengths)
        if sequences.blocks:
            planner = partial(planner, blocks=sequences.blocks)
        if sequences.media:
            planner, costs = partial(planner, media=sequences.media), replace(costs, deals_images=sequences.deals_images)
        explores = self._explores(explore)
        self._explore_steps -= explores

        def planned(config: PlannerConfig) -> StepPlan:
            if not explores:
                return planner(step, lengths, costs, config)
            degree = config.degrees[step % len(config.degrees)]
            config = replace(quick(config), degrees=tuple(d for d in config.degrees if d >= degree))
            return planner(step, lengths, replace(costs, favoured_degree=degree), config)

        plan: StepPlan | None = None
        if (tighter := self.tighter) is not None:
            with suppress(ValueError):
                plan = planned(tighter)
        plan = plan or planned(self.config)
        if not explores:
            return plan
        # the costs of other degrees were raised on purpose, so the estimate is meaningless
        return replace(plan, estimate=replace(plan.estimate, step_s=0.0, lower_bound_s=0.0))

    def most_host_bytes(self, steps: Iterable[list[int] | StepSequences]) -> int:
        """Returns the most bytes that plans for these steps, by lengths or sequences, put on the host of a rank. Collective.

        0 for steps that cannot be planned, whose error is raised when they run.
        """
        most = 0
        for number, lengths in enumerate(steps):
            # every rank raises rank 0's error
            with suppress(ValueError):
                most = max([most, *(plan.estimate.host_bytes for plan in self.plans([(number, lengths)], explore=False))])
        return most

    def set_copy_rate(self, bytes_per_s: float) -> None:
        """Sets the measured speed of copies between device and host for all later plans; does nothing without `is_timed`."""
        if not self.is_timed:
            return
        cluster = self.costs.cluster
        hardware = replace(cluster.hardware, copy_bytes_per_s=bytes_per_s)
        self.costs = replace(self.costs, cluster=replace(cluster, hardware=hardware))

    def _explores(self, explore: bool) -> bool:
        is_known = self.costs.coefficients.is_measured or bool(self.config.static_degree)
        return explore and self.is_timed and self._explore_steps > 0 and not is_known

    def _submit(self, number: int, known: list[int] | StepSequences, explore: bool) -> Future[StepPlan] | int:
        """Returns the future of a plan on rank 0, the step's number on other ranks."""
        return number if self.pool.rank else self._thread.submit(self.solve, number, known, explore)

    def _share(self, pending: Future[StepPlan] | int) -> StepPlan:
        if isinstance(pending, int):
            return self._receive()
        while wait([pending], timeout=self.alive_s).not_done:
            if self.pool.control is not None:
                logger.warning("a plan takes longer than %g s; all ranks wait", self.alive_s)
                self._broadcast("")
        if self.pool.control is None:
            return pending.result()
        try:
            plan = pending.result()
            message = plan_to_json(plan)
        except Exception as error:
            self._broadcast(f"!{error}")
            raise
        self._broadcast(message)
        self._compare(plan)
        return plan

    def _receive(self) -> StepPlan:
        message = ""
        while not message:
            message = self._broadcast("")
        if message.startswith("!"):
            raise ValueError(f"rank 0 could not plan: {message[1:]}")
        plan = plan_from_json(message)
        self._compare(plan)
        return plan

    def _broadcast(self, message: str) -> str:
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.pool.control, device=torch.device("cpu"))
        return box[0]

    def _compare(self, plan: StepPlan) -> None:
        digests = gather_objects(plan_digest(plan), self.pool.control)
        if len(set(digests)) > 1:
            shown = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
            raise RuntimeError(f"ranks hold different plans for step {plan.step} ({shown}); install the same version everywhere")

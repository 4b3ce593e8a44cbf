"""Keeps a run's cost model accurate: fits it to the first steps, and again whenever its predictions drift.

Trainer and callback add every finished plan. All ranks do so in the same order with the same plans, so they all gather,
decide and fit in the same way; nothing happens inside a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.fitting import ChunkSample, Fit, fit_coefficients, scaled_coefficients
from hf_longctx.plan.predict.evaluate import evaluate_plan

# plans that a refit uses: few, to follow a machine whose speed changes; costs that they do not show keep earlier coefficients
_WINDOW_PLANS = 8
_CHECK_EVERY_PLANS = 2
# last plans whose prediction errors decide whether to refit
_RECENT_PLANS = 4
# fewest predictions from which to take a median
_LEAST_PREDICTIONS = 3
# largest median of |predicted / measured - 1| that needs no refit
_TOLERATED_ERROR = 0.1
# bounds of measured / predicted step seconds; a ratio beyond them is not caused by the plan's chunks
_FACTORS = (0.7, 1.5)

# number of the micro-batch, positions of the group, and the forward's name, which says stage, layer range and chunk
ChunkKey = tuple[int, tuple[int, ...], str]
Samples = dict[ChunkKey, ChunkSample]


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """Measurements of one plan on one rank.

    measured_s: seconds of the whole plan. reduce_s: seconds of its gradient reduction, negative if it had none.
    error: predicted / measured - 1, or None without a prediction.
    """

    plan: StepPlan
    samples: Samples
    measured_s: float
    reduce_s: float
    error: float | None


class CostRefit:
    """Replaces the cost coefficients of `source`: first after `first_plans` plans, later when predictions are wrong.

    A source that starts with measured coefficients is refitted only when its predictions are wrong. `first_plans=0`: never refit.
    """

    def __init__(self, source: PlanSource, first_plans: int) -> None:
        self.source = source
        self.num_fits = 0
        self._window: deque[MeasuredPlan] = deque(maxlen=max(_WINDOW_PLANS, first_plans))
        self._num_plans = 0
        # one plan more, because the first one includes start-up costs and is left out
        self._next_look = first_plans + 1 if first_plans else 0

    def add(self, plan: MeasuredPlan, ends_step: bool) -> str:
        """Adds a finished plan; returns the line to print if it led to a fit, else "". Collective over the control group."""
        self._num_plans += 1
        if self._num_plans > 1:
            self._window.append(plan)
        # a fit needs a gradient reduction, which only the last plan of a step has
        if not self._next_look or self._num_plans < self._next_look or not ends_step or not self._window:
            return ""
        self._next_look = self._num_plans + _CHECK_EVERY_PLANS
        return self._fit() if self._is_off() else ""

    def _is_off(self) -> bool:
        """Whether the present coefficients are guesses, or predicted the last plans badly; rank 0 decides for all ranks."""
        present = self.source.costs.coefficients
        if not present.is_measured:
            return True
        recent = list(self._window)[-_RECENT_PLANS:]
        errors = [
            abs(plan.error) for plan in recent if plan.error is not None and plan.plan.estimate.cost_source == present.source
        ]
        is_off = len(errors) >= _LEAST_PREDICTIONS and median(errors) > _TOLERATED_ERROR
        return bool(gather_objects(is_off, self.source.pool.control)[0])

    def _fit(self) -> str:
        costs = self.source.costs
        mine = [(plan.samples, plan.reduce_s, plan.measured_s) for plan in self._window]
        everyone = gather_objects(mine, self.source.pool.control)
        samples = [sample for plans in zip(*everyone, strict=True) for sample in without_waiting([p[0] for p in plans])]
        # the last rank to start a reduction did not wait in it, so its seconds are those of the transfer alone
        reductions = [min(plan[1] for plan in plans) for plans in zip(*everyone, strict=True) if plans[0][1] >= 0]
        self.num_fits += 1
        name = "measured" if self.num_fits == 1 and not costs.coefficients.is_measured else f"measured, fit {self.num_fits}"
        fit = fit_coefficients(samples, median(reductions), name, costs.coefficients)
        fitted = replace(costs, coefficients=fit.coefficients)
        # take the rank that measured the least, which started last; how late it started has nothing to do with costs
        seconds = [min(plan[2] for plan in plans) for plans in zip(*everyone, strict=True)]
        factor = whole_step_factor(list(self._window), seconds, fitted)
        self.source.costs = replace(fitted, coefficients=scaled_coefficients(fit.coefficients, factor))
        return _line(fit, len(mine), self.num_fits)


def whole_step_factor(plans: Sequence[MeasuredPlan], seconds: Sequence[float], costs: CostModel) -> float:
    """Median ratio of the measured `seconds` of whole plans to their prediction from single chunks, kept within bounds.

    Whole plans take longer than typical chunks suggest: ranks wait for the slowest rank, and for the host between chunks.
    """
    ratios = []
    for plan, measured_s in zip(plans, seconds, strict=True):
        predicted_s = evaluate_plan(plan.plan, costs, with_events=False).step_s
        if plan.reduce_s < 0:
            predicted_s -= costs.coefficients.step_s
        ratios.append(measured_s / predicted_s)
    low, high = _FACTORS
    return min(max(median(ratios), low), high)


def without_waiting(ranks: Sequence[Samples]) -> list[ChunkSample]:
    """Merges all ranks' samples of a plan into one sample per chunk and stage, from the passes of the rank that waited least.

    Ranks enter a micro-batch at different times, and the early ones wait inside their first exchange.
    """
    groups: dict[ChunkKey, list[ChunkSample]] = {}
    for samples in ranks:
        for key, sample in samples.items():
            groups.setdefault(key, []).append(sample)
    return [
        ChunkSample(
            min((sample.forward for sample in group), key=lambda one_pass: one_pass.seconds),
            min((sample.backward for sample in group), key=lambda one_pass: one_pass.seconds),
        )
        for group in groups.values()
    ]


def _line(fit: Fit, num_plans: int, num_fits: int) -> str:
    residuals = fit.residuals
    again = " again" if num_fits > 1 else ""
    outliers = f", {residuals.num_outliers} left out as outliers" if residuals.num_outliers else ""
    return (
        f"cost model fitted{again} on {residuals.num_passes} passes of {num_plans} plans: median error "
        f"{residuals.median:.1%}{outliers}"
    )

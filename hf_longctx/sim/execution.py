"""Predicts a plan's run for reports: shares of computing, communicating and waiting, a timeline, and prices of GPU hours.

Called by `sim/forecast.py` for planned steps and by `hf-longctx simulate` for saved plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.profiles import normal_name
from hf_longctx.plan.predict.evaluate import RankUse, evaluate_plan
from hf_longctx.plan.predict.planning import WeightSeconds, weight_seconds
from hf_longctx.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class Execution:
    """The predicted run of a plan."""

    step_s: float
    # seconds of the optimizer and of everything else that is not part of a chunk
    once_s: float
    ranks: tuple[RankUse, ...]
    # computation of each F and B, followed by its communication as an event of kind "exchange"
    events: tuple[TimelineEvent, ...]
    # predicted memory of every rank, on its device and on the host
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    # gathers of sharded weights and sums of gradients, which `step_s` does not contain
    weights: WeightSeconds

    def share(self, seconds: str) -> float:
        """Returns the share of the step's rank-seconds spent on "compute_s", "exchange_s" or "idle_s"."""
        total = self.step_s * len(self.ranks)
        return float(sum(getattr(rank, seconds) for rank in self.ranks)) / total if total else 0.0

    @property
    def step_bounds_s(self) -> tuple[float, float]:
        """Least and most seconds of the step with gathers of weights and sums of gradients, as `WeightSeconds.step_bounds_s`."""
        return self.weights.step_bounds_s(self.step_s, self.once_s, self.ranks)


def execute_plan(plan: StepPlan, costs: CostModel) -> Execution:
    """Predicts the run of `plan`; raises ValueError if plan and cost model differ in ranks or layers."""
    if plan.num_ranks != costs.cluster.num_ranks:
        raise ValueError(
            f"the plan is for {plan.num_ranks} ranks, but the cost model is for {costs.cluster.num_ranks}; make them equal "
            f"(--gpus)"
        )
    num_layers = sum(stage.num_layers for stage in plan.micro_batches[0].groups[0].stages)
    if num_layers != costs.model.num_layers:
        raise ValueError(
            f"the plan is for a model of {num_layers} layers, but the cost model is for {costs.model.num_layers} layers; give "
            f"another model (--model)"
        )
    run = evaluate_plan(plan, costs)
    events = [piece for event, seconds in zip(run.events, run.exchange_s, strict=True) for piece in _split(event, seconds)]
    if run.once_s:
        events += [TimelineEvent(r, "step", "optimizer", run.step_s - run.once_s, run.step_s) for r in range(plan.num_ranks)]
    weights = weight_seconds(plan, costs)
    return Execution(run.step_s, run.once_s, run.ranks, tuple(events), run.peak_bytes, run.host_bytes, weights)


def _split(event: TimelineEvent, exchange_s: float) -> list[TimelineEvent]:
    """Splits an event into its computation and, after it, its communication; in reality both alternate layer by layer."""
    if exchange_s <= 0:
        return [event]
    middle_s = max(event.start_s, event.stop_s - exchange_s)
    exchange = replace(event, kind="exchange", name=f"{event.name} exchange", start_s=middle_s)
    return [replace(event, stop_s=middle_s), exchange]


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per GPU hour, who asks for them and when, and the address of the listing."""

    usd_per_hour: float
    source: str
    address: str = ""


def _prices(source: str, address: str, usd_per_hour: Mapping[str, float]) -> dict[str, Price]:
    return {name: Price(usd, source, address) for name, usd in usd_per_hour.items()}


# shipped hardware profile -> price, the middle of a range; others have none unless given by the user
PRICES = {
    **_prices(
        "specialised clouds, on demand, May 2026",
        "https://www.mercatus-ai.com/blog/cloud-gpu-pricing",
        {"a100-80g": 1.30, "h100": 3.00, "h200": 4.00},
    ),
    **_prices(
        "RunPod, March 2026",
        "https://deploybase.ai/articles/runpod-gpu-pricing",
        {"rtx-3090": 0.22, "rtx-4090": 0.34, "rtx-5090": 0.69, "rtx-pro-6000": 0.89}
        | {"l4": 0.44, "l40s": 0.79, "h100-pcie": 1.99, "b200": 5.98},
    ),
    **_prices("RunPod, 2026", "https://gpu.blog/gpus/nvidia-h100-nvl", {"h100-nvl": 3.07}),
    **_prices("specialised clouds, 2026", "https://awesomeagents.ai/hardware/amd-mi325x", {"mi325x": 2.13}),
}


def price_of(hardware: str, usd_per_hour: float | None) -> Price | None:
    """Returns the user's price, or the listed one of a shipped profile; None if there is neither.

    Raises ValueError for a negative price.
    """
    if usd_per_hour is not None:
        if usd_per_hour < 0:
            raise ValueError(f"--price-per-gpu-hour is {usd_per_hour:g}; give 0 or more US dollars, or leave it out")
        return Price(usd_per_hour, "as given")
    return next((price for name, price in PRICES.items() if normal_name(name) == normal_name(hardware)), None)

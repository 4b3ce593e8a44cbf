"""How many pipeline stages a run should have: every number that divides its ranks, planned for one step's lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.pipeline_planner import plan_pipelines, stage_parts
from hf_longctx.plan.specs import PlannerConfig
from hf_longctx.plan.stage_memory import stage_state_bytes
from hf_longctx.plan.types import StagePlan, StepPlan


@dataclass(frozen=True, slots=True)
class StageOption:
    """A number of stages with its plan of the sampled step; `degrees` are those of the configuration that fit into a stage."""

    num_stages: int
    degrees: tuple[int, ...]
    plan: StepPlan


def choose_stages(lengths: Sequence[int], costs: CostModel, config: PlannerConfig) -> tuple[int, tuple[int, ...]]:
    """The number of stages with the quickest plan for one step of such lengths, and the degrees that groups of a stage may have.

    As `stage_options`; of equals the fewest stages.
    """
    best = stage_options(lengths, costs, config)[0]
    return best.num_stages, best.degrees


def stage_options(lengths: Sequence[int], costs: CostModel, config: PlannerConfig) -> list[StageOption]:
    """All numbers of stages for which a plan exists, the quickest first.

    `config` is that of one stage: `activations.device_bytes` is what the whole model's states leave, and stages, which hold a
    part of the model, have what its other parts took beside it. Raises ValueError, that of one stage, if nothing fits.
    """
    num_ranks = costs.cluster.num_ranks
    found, unfit = [], ValueError()
    for num_stages in stage_counts(num_ranks, costs.model.num_layers, config.degrees):
        degrees = tuple(degree for degree in config.degrees if degree <= num_ranks // num_stages)
        try:
            plan = plan_pipelines(0, lengths, costs, num_stages, _config_of(num_stages, costs, config))
        except ValueError as error:
            unfit = unfit if unfit.args else error
            continue
        found.append(StageOption(num_stages, degrees, plan))
    if not found:
        raise unfit
    return sorted(found, key=lambda option: option.plan.estimate.step_s)


def stage_counts(num_ranks: int, num_layers: int, degrees: Sequence[int]) -> list[int]:
    """Numbers of pipeline stages that divide the ranks, leave room for some degree, and have a layer each."""
    counts = range(1, min(num_ranks, num_layers) + 1)
    return [count for count in counts if num_ranks % count == 0 and min(degrees) <= num_ranks // count]


def _config_of(num_stages: int, costs: CostModel, config: PlannerConfig) -> PlannerConfig:
    """The configuration for so many stages: room is what the largest stage leaves of a device."""
    config = replace(config, stages=())
    if num_stages == 1 or config.activations is None:
        return config
    num_ranks = costs.cluster.num_ranks
    shards = costs.shard_ranks if costs.parameters != "replicated" and costs.shard_ranks < num_ranks // num_stages else 0
    plan = StepPlan(0, (), num_stages, num_ranks // num_stages, costs.parameters, (), shard_ranks=shards)
    stages = [StagePlan(stage, parts, ()) for stage, parts in enumerate(stage_parts(costs.model, num_stages))]
    states = max(stage_state_bytes(costs.model, stage, plan) for stage in stages)
    device_bytes = max(0, config.activations.device_bytes + costs.state_bytes - states)
    return replace(config, activations=replace(config.activations, device_bytes=device_bytes))

"""What a run needs before its first step: the checks on every rank, then the limits and costs that planning starts from."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, TrainingArguments

from hf_longctx.hf.agreement import differing_settings, gather_objects, raise_together
from hf_longctx.hf.config import LaunchEnvironment, LongContextConfig
from hf_longctx.hf.model_spec import cluster_spec, model_spec, tokens_that_fit
from hf_longctx.hf.plan_source import PlanSource
from hf_longctx.hf.refusals import launch_problems, setup_problems
from hf_longctx.plan.cost import CostModel, block_sizes, default_coefficients
from hf_longctx.plan.specs import PlannerConfig, default_degrees
from hf_longctx.plan.types import Parameters
from hf_longctx.runtime.mesh import GroupPool


@dataclass(frozen=True)
class PlanningSetup:
    """Where planning starts: the cost model before anything is measured, the planner's limits, the longest sequence."""

    costs: CostModel
    planner: PlannerConfig
    max_length: int


def check_setup(
    config: LongContextConfig,
    model: Any,
    args: TrainingArguments,
    processing_class: Any,
    problems: list[str],
    control: dist.ProcessGroup | None,
) -> tuple[int, ...]:
    """The allowed degrees; raises ValueError on every rank if settings, model or ranks do not fit together.

    `problems` are those that the caller found. Collective over the ranks of `control`.
    """
    heads = getattr(getattr(model, "config", None), "num_attention_heads", args.world_size)
    degrees = tuple(sorted(set(config.degrees or default_degrees(args.world_size, heads, config.method))))
    problems = problems + launch_problems(LaunchEnvironment.read(), args)
    problems += setup_problems(model, processing_class, config, args.world_size, degrees)
    # settings before problems: a rank with other settings may be the only one with a problem
    problems += differing_settings({**asdict(config), **_shared_arguments(args)}, control)
    raise_together(problems, control)
    return (config.static_degree,) if config.static_degree else degrees


def planning_setup(
    config: LongContextConfig,
    model: PreTrainedModel,
    args: TrainingArguments,
    degrees: tuple[int, ...],
    control: dist.ProcessGroup | None,
) -> PlanningSetup:
    """The start of planning for `model` on the ranks of `control`; collective over them.

    Raises ValueError if the model's states leave no room for a token.
    """
    launch = LaunchEnvironment.read()
    cluster = cluster_spec(args.device, args.world_size, min(launch.ranks_per_node, args.world_size))
    # nodes may differ; blocks of a common divisor of their ranks lie inside nodes, and every rank makes the same groups
    cluster = replace(cluster, ranks_per_node=math.gcd(*gather_objects(cluster.ranks_per_node, control)))
    spec = model_spec(model, is_autocast=args.bf16)
    parameters, shard_ranks = shared_parameters(config, args.world_size)
    fitting = min(gather_objects(tokens_that_fit(spec, cluster, parameters, shard_ranks), control))
    if config.tokens_per_rank is None and fitting < 1:
        gib = cluster.hardware.device_bytes / 2**30
        raise ValueError(
            f"weights, gradients and Adam states of {spec.num_parameters / 1e9:.2f} billion parameters ({parameters}) leave "
            f"no room for a token in {gib:.1f} GiB; set parameters='sharded' with more ranks, or use a smaller model or a "
            f"larger device"
        )
    planner = PlannerConfig(
        tokens_per_rank=config.tokens_per_rank or fitting,
        degrees=degrees,
        solver=config.solver,
        static_degree=config.static_degree,
        micro_batch_trials=config.micro_batch_trials,
    )
    costs = CostModel(
        spec, cluster, default_coefficients(spec, cluster), config.method, parameters=parameters, shard_ranks=shard_ranks
    )
    return PlanningSetup(costs, planner, config.max_length or spec.max_positions)


def shared_parameters(config: LongContextConfig, num_ranks: int) -> tuple[Parameters, int]:
    """How parameters live with so many ranks, and how many ranks share one copy; one rank has nobody to share with."""
    if config.parameters == "replicated" or num_ranks == 1:
        return "replicated", 1
    return config.parameters, config.shard_ranks or num_ranks


def plan_source(config: LongContextConfig, setup: PlanningSetup, control: dist.ProcessGroup | None) -> PlanSource:
    """The group pool of the run and its plans; creates groups, so every rank calls it at the same point."""
    pool = GroupPool(block_sizes(setup.planner.degrees, setup.costs), config.collective_timeout_s, control)
    # one more than are fitted: the first step pays for start-up and is left out
    explore_steps = config.calibration_steps and config.calibration_steps + 1
    return PlanSource(pool, setup.costs, setup.planner, explore_steps, alive_s=config.collective_timeout_s / 3)


# what may differ between ranks: places, names and how much is said
_OWN_ARGUMENTS = re.compile(
    r"local_rank|.*_dir$|run_name|log_level.*|disable_tqdm|report_to|project|trackio.*|hub_.*|push_to_hub.*|debug|"
    r"resume_from_checkpoint|ddp_backend|use_cpu|dataloader_pin_memory|_n_gpu"
)


def _shared_arguments(args: TrainingArguments) -> dict[str, str]:
    """Every training argument that shapes the run, as text."""
    return {name: str(value) for name, value in args.to_dict().items() if not _OWN_ARGUMENTS.fullmatch(name)}

"""Sets up a run before its first step: checks every rank, then measures model and machine for `plan/setup.py`."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, TrainingArguments

from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels import NEXT_TOKEN, HeadTask
from hf_longctx.hf.data.scan import scan_on_every_rank
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.adapters import hidden_dtype, largest_adapters
from hf_longctx.hf.models.cutting import loaded_output_shares, spread_head_problem, stages_of_heads
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.media import sees_images_both_ways
from hf_longctx.hf.models.positions import absent_token_ids
from hf_longctx.hf.models.quantised import largest_packed
from hf_longctx.hf.models.spec import cluster_spec, frozen_parameters, model_spec, trained_tower
from hf_longctx.hf.models.states import scan_line
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.launch import LaunchEnvironment, host_bytes
from hf_longctx.hf.rules.arguments import launch_problems, low_bits, setup_problems, stage_ranks
from hf_longctx.hf.start.stages import sampled_lengths
from hf_longctx.plan.core.settings import EXPANDABLE_SHARE, ClusterSpec, PlannerConfig, all_degrees, default_degrees
from hf_longctx.plan.core.sharding import PACKED_TOKENS
from hf_longctx.plan.core.types import PARAMETERS, Ranges
from hf_longctx.plan.cost.catalog import spec_name, without_kernels
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, block_sizes, default_coefficients, teacher_costs
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.cost.traffic import may_pass_states
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.teacher import beside_teacher
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.setup import (
    SHARINGS,
    DeviceMemory,
    Lengths,
    Measured,
    Placement,
    Setup,
    Wishes,
    build_setup,
    fitting_remedies,
    shared_parameters,
)
from hf_longctx.runtime.measure import copy_rate
from hf_longctx.runtime.parameters.low_bit import moment_bytes
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.cuda import device_capability
from hf_longctx.runtime.tiles.packages import active_flash
from hf_longctx.runtime.tiles.packs import attention_problems, takes_packs
from hf_longctx.runtime.tiles.tile import attention_backend

logger = logging.getLogger(__name__)

# share of a machine's host memory that its ranks may fill with saved tensors, and the most of a rank, unless `host_gib` is set:
# pinning what plans need takes some tenths of a second per GiB
_HOST_SHARE, _MOST_HOST_BYTES = 0.5, 64 * 2**30
_GIB = 2**30


@dataclass(frozen=True)
class TrainingRows:
    """The training set, if there is one, and the labels that its rows give."""

    dataset: Any = None
    task: HeadTask = NEXT_TOKEN
    # stages and shards that are chosen must hold the longest row
    must_fit: bool = False
    # rows may have images, so that towers are trained
    may_have_media: bool = False


@dataclass(frozen=True)
class OtherResidents:
    """Parts of a run beside its model."""

    # bytes of a reference model
    reference_bytes: int = 0
    # fields of `ModelSpec` that say which functions of its layers have kernels
    kernels: Mapping[str, bool] = field(default_factory=dict)
    # a frozen model whose forwards run under the same plans
    teacher: PreTrainedModel | None = None


def checked_degrees(
    config: LongContextConfig,
    facts: ModelFacts,
    args: TrainingArguments,
    processing_class: Any,
    problems: list[str],
    control: dist.ProcessGroup | None,
    alike: Mapping[str, Any] = {},
    *,
    other_problems: Callable[[tuple[int, ...]], list[str]] = lambda degrees: [],
) -> tuple[int, ...]:
    """The degrees that sequence groups may have; raises ValueError on every rank for settings, models or ranks that do not fit.

    problems: problems that the caller has found already. alike: further values that must not differ between ranks.
    other_problems: returns those that depend on the degrees. Collective over the ranks of `control`, in one exchange.
    """
    config_of_text = facts.base.config.get_text_config() if hasattr(facts.base, "config") else None
    heads = getattr(config_of_text, "num_attention_heads", args.world_size)
    degrees = _allowed_degrees(config, stage_ranks(config, args.world_size), heads)
    problems = problems + launch_problems(LaunchEnvironment.read(), args)
    problems += _hardware_problems(config.hardware)
    problems += setup_problems(facts, processing_class, config, args.world_size, degrees) + other_problems(degrees)
    # a rank with other settings may be the only one with a problem
    raise_together(problems, control, alike={**asdict(config), **_shared_arguments(args), **alike})
    return (config.static_degree,) if config.static_degree else degrees


def _allowed_degrees(config: LongContextConfig, num_ranks: int, num_heads: int) -> tuple[int, ...]:
    if config.degrees == "all":
        return all_degrees(num_ranks, num_heads, config.method)
    return tuple(sorted(set(config.degrees or default_degrees(num_ranks, num_heads, config.method))))


def choose_setup(
    config: LongContextConfig,
    facts: ModelFacts,
    args: TrainingArguments,
    degrees: tuple[int, ...],
    control: dist.ProcessGroup | None,
    rows: TrainingRows | None = None,
    beside: OtherResidents | None = None,
) -> Setup:
    """Chooses cost model, limits, stages and place of optimizer states for a model on `control`; collective over its ranks.

    rows: their lengths decide on pipeline stages, and the longest on the place. Raises ValueError if the model's states leave no
    room for a single token.
    """
    model, launch = facts.model, LaunchEnvironment.read()
    cluster = cluster_spec(args.device, args.world_size, min(launch.ranks_per_node, args.world_size))
    # nodes may have different numbers of ranks; with a common divisor of these, blocks lie inside nodes and every rank makes
    # the same groups
    cluster = replace(cluster, ranks_per_node=math.gcd(*gather_objects(cluster.ranks_per_node, control)))
    spec = model_spec(model, is_autocast=args.bf16)
    raise_together(attention_problems(args.device, _attention_dtype(args, model), spec.largest_head_dim), control)
    spec = replace(
        spec,
        has_master_weights=config.fp32_master_weights,
        updates_on_host=config.optimizer_states == "host",
        layers_on_host=config.layer_weights == "host",
        saves_kv_once=_shares_calls(spec, args, model),
    )
    if facts.mixer is not None and spec.states.is_empty and args.process_index == 0:
        logger.warning(
            "plans count the layers with a state along the sequence of %s as full attention, and neither the states that slices "
            "leave nor the tensors of their scan as memory; where memory is short, give a lower device_gib",
            facts.name,
        )
    # a rank that loaded only its own stage does not know the adapters, four-bit and frozen weights of other stages, or their head
    frozen = frozen_parameters(model, config.may_have_stages)
    beside = beside or OtherResidents()
    # without images in rows, towers are frozen
    tower = trained_tower(model, spec.tower) if rows is not None and rows.may_have_media else spec.tower
    own = spec.adapters, spec.packed, spec.rounded_parameters, frozen, _moment_bytes(config, model, args), beside.kernels, tower
    spreads_head = may_spread_head(config, facts, beside.teacher is not None)
    gathered = zip(*gather_objects((*own, spreads_head), control), strict=True)
    adapters, packed, rounded, all_frozen, moments, kernels, towers, spreads = (list(each) for each in gathered)
    spec = replace(spec, adapters=largest_adapters(adapters), packed=largest_packed(packed))
    spec = replace(spec, rounded_parameters=min(rounded), frozen_parameters=min(all_frozen), moment_bytes=max(moments))
    # ranks of later stages hold no towers
    spec = replace(spec, tower=max(towers, key=lambda each: (each.graph_layers, each.trained_parameters)))
    agreed: dict[str, Any] = {name: all(each[name] for each in kernels) for name in beside.kernels}
    spec = replace(spec, **agreed)
    if beside.teacher is not None:
        spec = beside_teacher(spec, config.distillation_beta, config.distillation_top_k)
    cluster, coefficients = starting_costs(config.hardware, spec, cluster, control)
    # lent ranks read keys of all heads of earlier slices at once, and so do images that see both ways
    at_once = config.lend_stages or (not spec.tower.is_empty and sees_images_both_ways(model))
    spec = replace(spec, exchange_parts=1 if at_once else config.exchange_parts)
    costs = CostModel(spec, cluster, coefficients)
    if config.parameters == "auto" and not replace(costs, parameters="sharded").counts_weights:
        raise ValueError(
            f"parameters='auto' compares seconds with and without gathers of weights, but hardware={config.hardware!r} has "
            f"seconds that were measured for {spec_name(spec)} without any; measure gathers too, with `hf-longctx calibrate` "
            f"on two ranks or more, name one of {', '.join(PARAMETERS)}, or leave hardware out"
        )
    measured = _measured(config, model, args, costs, beside.reference_bytes, control)
    max_length, is_deferred = config.max_length or spec.max_positions, source_of(facts.base) is not None
    if beside.teacher is not None:
        taught_by = teacher_costs(model_spec(beside.teacher), cluster)
        measured = replace(measured, costs=replace(measured.costs, teacher=taught_by))
        max_length = min(max_length, taught_by.model.max_positions)
    heads: dict[str, Any] = {"spread_head": all(spreads), "output_shares": loaded_output_shares(model)}
    wishes = _wishes(config, degrees, facts.loaded_ranges or (), cluster, max_length, is_deferred, **heads)
    placeholders = absent_token_ids(facts.base)
    lengths = _lengths(rows or TrainingRows(), args, wishes.placement.max_length, costs.model.vocab_size, placeholders, control)
    gather = partial(gather_objects, group=control)
    setup = replace(build_setup(measured, wishes, lengths, partial(_check, config), gather), placeholders=placeholders)
    tokens = setup.planner.tokens_per_rank
    is_first = control is None or dist.get_rank() == 0
    if is_first and setup.planner.activations is not None and tokens < (config.tokens_per_rank or 0):
        logger.warning(
            "tokens_per_rank %d is more than the %d that fit into memory even if everything is recomputed; plans use %d "
            "(activations='keep' trusts the setting)",
            config.tokens_per_rank,
            tokens,
            tokens,
        )
    return setup


def _measured(
    config: LongContextConfig,
    model: PreTrainedModel,
    args: TrainingArguments,
    costs: CostModel,
    reference_bytes: int,
    control: dist.ProcessGroup | None,
) -> Measured:
    """Measure what a rank has: the least of all ranks. Collective."""
    own = [costs.cluster.hardware.device_bytes, *(num_bytes // costs.cluster.ranks_per_node for num_bytes in host_bytes())]
    device, available, total = map(min, zip(*gather_objects(own, control), strict=True))
    if config.host_gib is not None:
        most_offloaded = int(config.host_gib * _GIB)
    else:
        # a share of all memory, not of what is free, so that a resumed run gets the same budget
        most_offloaded = min(int(total * _HOST_SHARE), _MOST_HOST_BYTES) if args.device.type == "cuda" else 0
    problem = activation_problem(model) if config.activations == "auto" else ""
    if problem and (control is None or dist.get_rank() == 0):
        logger.warning("activations='auto' keeps everything: %s", problem)
    # ranks may be started with different environments
    is_expandable = all(gather_objects(has_expandable_segments(args.device.type, os.environ), control))
    memory = DeviceMemory.by_formula(costs.model, device, is_expandable)
    memory = replace(
        memory,
        usable_bytes=int(config.device_gib * _GIB) if config.device_gib else memory.usable_bytes,
        lora_rank=int(not costs.model.adapters.is_empty),
        host_bytes=available,
        keeps_everything=config.activations == "keep" or bool(problem),
        most_offloaded=most_offloaded,
    )
    return Measured(costs, memory, bool(config.device_gib), has_communicators(args.device), reference_bytes, is_expandable)


def has_communicators(device: torch.device) -> bool:
    """Whether process groups take memory of the device."""
    return device.type == "cuda" and dist.is_initialized() and dist.get_backend() != "gloo"


def _wishes(
    config: LongContextConfig,
    degrees: tuple[int, ...],
    ranges: Ranges,
    cluster: ClusterSpec,
    max_length: int,
    is_deferred: bool = False,
    *,
    spread_head: bool = False,
    output_shares: tuple[float, ...] = (),
) -> Wishes:
    """The settings that the setup follows.

    ranges, output_shares: of the stages, if this rank loaded only its own. is_deferred: weights will be read in shards, never
    whole. spread_head: whether stages may share the output head.
    """
    planner = PlannerConfig(
        tokens_per_rank=1,
        degrees=degrees,
        solver=config.solver,
        static_degree=config.static_degree,
        micro_batch_trials=config.micro_batch_trials,
        time_aware=config.time_aware,
        nested=config.nested,
        node_aligned=config.node_aligned,
        solver_time_limit_s=config.solver_time_limit_s,
    )
    placement = Placement(
        cluster.num_ranks,
        "replicated" if config.parameters == "auto" else config.parameters,
        config.shard_ranks or config.expert_ranks or 0,
        degrees,
        config.method,
        config.tokens_per_rank or 0,
        cluster.ranks_per_node,
        max_length,
        config.tile_tokens,
        trusts_limit=True,
        ranges=ranges,
        output_shares=output_shares if spread_head else (),
    )
    return Wishes(
        planner,
        placement,
        may_shard=config.parameters == "auto",
        shares_fastest=config.parameters == "auto",
        sharings=SHARINGS[:-1] if is_deferred else SHARINGS,
        expert_ranks=config.expert_ranks or 0,
        optimizer_states=config.optimizer_states,
        layer_weights=config.layer_weights,
        stages=config.asked_stages,
        interleave=config.interleave,
        lend_stages=config.lend_stages,
        spread_head=spread_head,
    )


def may_spread_head(config: LongContextConfig, facts: ModelFacts, has_teacher: bool) -> bool:
    """Whether stages before the last may run the output head, as far as this rank knows its model."""
    if not config.spread_head or not config.may_have_stages or config.lend_stages or has_teacher:
        return False
    return not spread_head_problem(facts.model) and not activation_problem(facts.model)


def _lengths(
    rows: TrainingRows,
    args: TrainingArguments,
    max_length: int,
    vocab_size: int,
    placeholders: tuple[int, ...],
    control: dist.ProcessGroup | None,
) -> Lengths:
    """Lengths of the training set on all ranks; for a stream, or without a set, the limit."""
    dataset = rows.dataset

    @cache
    def longest() -> int:
        found = max_length
        # ranks with and without a set differ, which is refused later; but scanning is collective
        if all(gather_objects(dataset is not None and not is_stream(dataset), control)):
            sets, show_progress = {"train_dataset": dataset}, not args.disable_tqdm
            scan = scan_on_every_rank(sets, vocab_size, show_progress, placeholders, rows.task)["train_dataset"]
            found = max(map(int, scan.sequence_lengths), default=found)
        return max(gather_objects(found, control))

    def step(sample: Sequence[int]) -> list[int]:
        per_step = max(1, args.per_device_train_batch_size * args.world_size)
        return list(itertools.islice(itertools.cycle(sample), per_step))

    sample = partial(sampled_lengths, dataset, max_length, control)
    return Lengths(longest, sample, step, longest() if rows.must_fit else 0)


def _check(config: LongContextConfig, setup: Setup, measured: Measured) -> None:
    """Raise ValueError if the setup leaves no room on a device or on its host."""
    memory, placement, spec = setup.memory, setup.placement, setup.costs.model
    available, host_states = measured.memory.host_bytes, memory.host_states(*placement.sharing)
    ranks_per_node = placement.ranks_per_node
    resting = memory.resting_bytes(*placement.sharing)
    if resting > memory.usable_bytes:
        raise ValueError(
            f"layer_weights='host': between steps, weights of layers come back, and states then take {resting / _GIB:.1f} GiB, "
            f"of which a rank has {memory.usable_bytes / _GIB:.1f} GiB; use more ranks"
        )
    if host_states > available:
        named = ["optimizer_states='host'"] * spec.updates_on_host + ["layer_weights='host'"] * spec.layers_on_host
        raise ValueError(
            f"{' and '.join(named)} {'need' if len(named) > 1 else 'needs'} {host_states / _GIB:.1f} GiB of host memory on every "
            f"rank, and a node has {available / _GIB:.1f} GiB available for each of its {ranks_per_node} ranks; use more ranks "
            f"with parameters='sharded', or leave it out"
        )
    if config.host_gib is not None and memory.most_offloaded > memory.host_bytes:
        raise ValueError(
            f"host_gib is {config.host_gib} for each of {ranks_per_node} ranks of a node, which has "
            f"{memory.host_bytes / _GIB:.1f} GiB available for each of them; lower it, or leave it out"
        )
    if placement.tokens_per_rank(memory) < 1:
        gib = config.device_gib or memory.device_bytes / _GIB
        held = f"take {memory.state_bytes(*placement.sharing) / _GIB:.3g} GiB on a rank"
        if placement.is_pipeline:
            held += f" of {len(placement.ranges)} stages"
        if placement.shard_ranks > 1:
            held += ", with what it gathers beside its shards,"
        missing = f"{_describe_states(spec)} ({placement.parameters}) {held} and leave no room for a token in {gib:.3g} GiB"
        # the only setting that is tried for pipelines
        sharded = replace(placement, parameters="sharded", shard_ranks=placement.ranks_per_stage)
        if placement.is_pipeline and placement.parameters != "sharded" and sharded.tokens_per_rank(memory) >= 1:
            raise ValueError(f"{missing}; use parameters='sharded'")
        found = "" if placement.is_pipeline else settings_for(config, setup, 1)
        if found:
            raise ValueError(f"{missing}; what would fit, by formula: {found}")
        raise ValueError(f"{missing}; use more ranks, a smaller model or a larger device")


def settings_for(config: LongContextConfig, setup: Setup, num_tokens: int) -> str:
    """Settings with which a run of one stage would hold a sequence of `num_tokens`, each tried; empty if there are none."""
    placement = replace(setup.placement, max_length=0, trusts_limit=False)
    found = fitting_remedies(setup.memory, placement, num_tokens, may_recompute=config.activations == "keep")
    return "; ".join(f"{one.setting} ({one.longest_tokens:,} tokens)" for one in found if one.setting)


def _describe_states(spec: ModelSpec) -> str:
    packed = (
        ""
        if spec.packed.is_empty
        else " in fp8"
        if spec.packed.fp8_parameters
        else " with packed experts"
        if spec.packed.has_experts
        else " in four bits"
    )
    total = f"of {spec.num_parameters / 1e9:.2f} billion parameters{packed}"
    if spec.adapters.is_empty:
        return f"weights, gradients and Adam states {total}"
    trained, _ = spec.adapters.sizes(spec.num_layers, True, True)
    return f"weights {total}, and gradients and Adam states of {trained / 1e6:.2f} million trained ones"


def _moment_bytes(config: LongContextConfig, model: PreTrainedModel, args: TrainingArguments) -> float:
    """Bytes of both moments of a trained parameter in an optimizer that keeps them in few bits; 0 for any other one."""
    if not (bits := low_bits(args)):
        return 0.0
    trained = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    # with stages, fewer ranks share a copy, and larger shards have fewer plain moments
    parameters = "sharded" if config.parameters == "auto" else config.parameters
    _, shard_ranks = shared_parameters(parameters, config.shard_ranks or config.expert_ranks, args.world_size)
    return moment_bytes(trained, bits, shard_ranks)


def starting_costs(
    hardware: str, spec: ModelSpec, cluster: ClusterSpec, control: dist.ProcessGroup | None
) -> tuple[ClusterSpec, CostCoefficients]:
    """The cluster and the cost coefficients of `spec` before anything is measured, from the hardware profile if one is named.

    Rank 0's profile holds for all ranks; each device keeps its own memory size. Raises ValueError for a file that cannot be read.
    """
    if not hardware:
        return cluster, default_coefficients(spec, cluster)
    profile = gather_objects(read_profile(hardware), control)[0]
    cluster = replace(cluster, hardware=replace(profile.spec, device_bytes=cluster.hardware.device_bytes))
    calibration = profile.calibration(spec_name(spec))
    if calibration is not None:
        return cluster, calibration.coefficients
    if control is None or dist.get_rank() == 0:
        known = "; ".join(model.model for model in profile.models)
        why = (
            f"it was calibrated for other models ({known}) than this one"
            if known
            else "it was calibrated for no model, so not for this one"
        )
        if profile.calibration(spec_name(without_kernels(spec))) is not None:
            why = "it was calibrated for this model without kernels, and `hf-longctx calibrate` measures it with them now"
        logger.warning("hardware %s: only its rates are used, since %s (%s)", hardware, why, spec_name(spec))
    return cluster, default_coefficients(spec, cluster)


def _hardware_problems(hardware: str) -> list[str]:
    """Reasons why the hardware profile of this name or path cannot be used."""
    try:
        if hardware:
            read_profile(hardware)
    except (OSError, ValueError) as error:
        return [f"hardware: {error}"]
    return []


def open_plan_source(
    config: LongContextConfig, setup: Setup, control: dist.ProcessGroup | None, args: TrainingArguments
) -> PlanSource:
    """Makes the group pool of a run and the source of its plans. Collective over all ranks."""
    # plans may follow seconds that are measured in the run
    is_timed = not args.full_determinism
    blocks = block_sizes(setup.planner.degrees, setup.costs)
    lends = setup.planner.lend_stages
    sums_early = setup.costs.shard_ranks == 1 and not lends
    parts = setup.costs.model.exchange_parts
    heads = stages_of_heads(setup.planner.output_shares)
    pool = GroupPool(
        blocks, args.ddp_timeout, control, setup.num_stages, lends, sums_early, exchange_parts=parts, head_stages=heads
    )
    # explore one step more than are fitted, since the first step includes start-up costs and is left out
    explore_steps = config.calibration_steps and config.calibration_steps + 1
    alive_s = config.collective_timeout_s / 3
    source = PlanSource(pool, setup.costs, setup.planner, explore_steps=explore_steps, alive_s=alive_s, is_timed=is_timed)
    budget = setup.planner.activations
    if is_timed and budget is not None and budget.host_bytes and not setup.costs.cluster.hardware.source:
        # no profile gives the speed of the link, so measure it, with all ranks copying at once as they do in a step
        source.set_copy_rate(copy_rate(pool, args.device))
    return source


def opening_line(setup: Setup, args: TrainingArguments, facts: ModelFacts) -> str:
    """The text that a run prints once: ranks, kinds of plans, memory, and operators for attention and scans."""
    dtype = _attention_dtype(args, facts.model)
    costs = setup.costs
    passes_states = may_pass_states(setup.planner.degrees, costs.method, costs.model, costs.cluster)
    scans = scan_line(facts.mixer, facts.base, costs.model.states, args.device, dtype, passes_states)
    advice = [
        slow_tiles(costs.model, args.device, dtype),
        scans,
        allocator_advice(args.device.type, dict(os.environ)),
        threads_advice(costs, args.device.type, torch.get_num_threads(), len(os.sched_getaffinity(0))),
    ]
    return "\n".join(filter(None, (_opening_line(setup, args, dtype), *setup.notes, *advice)))


def _attention_dtype(args: TrainingArguments, model: PreTrainedModel) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else hidden_dtype(model)


def _shares_calls(spec: ModelSpec, args: TrainingArguments, model: PreTrainedModel) -> bool:
    """Whether short documents share calls of attention on this rank's device."""
    is_masked = spec.drops_weights or not spec.index.is_empty
    return not is_masked and takes_packs(args.device, _attention_dtype(args, model), spec.largest_head_dim, spec.caps_scores)


def _opening_line(setup: Setup, args: TrainingArguments, dtype: torch.dtype) -> str:
    return "\n".join((_plans_line(setup, args), _memory_line(setup), _attention_line(setup, args, dtype)))


def _plans_line(setup: Setup, args: TrainingArguments) -> str:
    """Ranks, and the kinds of plans that they may get."""
    costs, planner = setup.costs, setup.planner
    if (num_ranks := costs.cluster.num_ranks) == 1:
        return f"plans for 1 rank on {args.device.type}: micro-batches within its memory, whose long sequences may be sliced"
    degrees = [f"{each:,}" for each in ([planner.static_degree] if planner.static_degree else planner.degrees)]
    line = f"plans for {num_ranks} ranks on {args.device.type}: sequence groups of {' or '.join(degrees)}"
    if setup.num_stages > 1:
        line += f" in {setup.num_stages} pipeline stages"
        if (num_ranges := len(setup.ranges[0])) > 1:
            line += f", interleaved with {num_ranges} layer ranges each"
        if planner.lend_stages:
            line += ", which lend their ranks where that is predicted to be faster"
        if heads := stages_of_heads(planner.output_shares):
            line += f", of which {len(heads) + 1} share the output head"
    shared = "" if costs.parameters == "replicated" else f" over {costs.shard_ranks} ranks"
    return f"{line}; parameters {costs.parameters.replace('_', ' ')}{shared}"


def _memory_line(setup: Setup) -> str:
    """Bytes of a rank, and the most tokens that it may hold."""
    planner = setup.planner
    most = planner.tokens_per_rank
    states = ByteModel(setup.costs.model).most_states(setup.ranges, setup.costs.parameters, setup.costs.shard_ranks)
    line = f"memory of a rank: {states / 2**30:.2f} GiB of weights, gradients and optimizer states"
    if (budget := setup.planner.activations) is None:
        return f"{line}; everything is kept, up to {most:,} tokens on a rank"
    host = f" and {budget.host_bytes / 2**30:.1f} GiB of the host" if budget.host_bytes else ""
    kept = min(budget.kept_tokens, most)
    beyond = "the most that it gets" if kept == most else f"recomputed as needed up to {most:,}"
    alone = f"; a sequence alone has up to {planner.room_tokens:,}" if planner.room_tokens > most * planner.degrees[-1] else ""
    return (
        f"{line}; everything is kept up to {kept:,} tokens on a rank, {beyond}, in {budget.device_bytes / 2**30:.1f} GiB beside "
        f"the model{host}{alone}"
    )


def _attention_line(setup: Setup, args: TrainingArguments, dtype: torch.dtype) -> str:
    spec = setup.costs.model
    is_masked = spec.drops_weights or not spec.index.is_empty
    name = attention_backend(args.device, dtype, spec.largest_head_dim, spec.caps_scores, is_masked)
    if spec.saves_kv_once:
        flash = active_flash() or "FlashAttention 2"
        line = f"attention: {flash} of torch for documents of up to {PACKED_TOKENS:,} tokens, several in one call; "
        return line + f"{name} for longer ones and for tiles of rings and slices"
    if spec.caps_scores or spec.value_head_dim or is_masked:
        return f"attention: {name} for all tiles"
    return f"attention: torch's own for whole documents, {name} for tiles of rings, slices and replayed layers"


# arguments that may differ between ranks: folders, names and verbosity
_OWN_ARGUMENTS = re.compile(
    r"local_rank|.*_dir$|run_name|log_level.*|disable_tqdm|report_to|project|trackio.*|hub_.*|push_to_hub.*|debug|"
    r"resume_from_checkpoint|ddp_backend|use_cpu|dataloader_pin_memory|_n_gpu"
)


def _shared_arguments(args: TrainingArguments) -> dict[str, str]:
    """Every training argument that shapes the run, as text."""
    return {name: str(value) for name, value in args.to_dict().items() if not _OWN_ARGUMENTS.fullmatch(name)}


def slow_tiles(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    """Says that tiles of attention run without a fast operator, and what to change; empty if they do not, or on a CPU."""
    head_dim = spec.largest_head_dim
    if device.type == "cuda" and spec.drops_weights:
        return (
            "attention: dropout of its weights makes all tiles plain matrices, many times slower than FlashAttention; set "
            "attention dropout to 0 in the model's config to go without, or measure what it costs with hf-longctx calibrate"
            f"{tf32_offer(device_capability(device), dtype, torch.backends.cuda.matmul.fp32_precision)}"
        )
    if device.type != "cuda" or attention_backend(device, dtype, head_dim, spec.caps_scores) != "plain":
        return ""
    wanted = ["bf16=True", "head sizes of at most 256 that 8 divides"]
    wanted += ["the package flash-attn or flash-attn-4"] if spec.caps_scores else []
    return (
        f"attention: its tiles are plain matrices, many times slower than FlashAttention, which needs {', '.join(wanted)}; here "
        f"heads have {head_dim} elements in {str(dtype).removeprefix('torch.')}"
        f"{tf32_offer(device_capability(device), dtype, torch.backends.cuda.matmul.fp32_precision)}"
    )


def tf32_offer(capability: tuple[int, int], dtype: torch.dtype, precision: str) -> str:
    """Says how much TF32 speeds up products of fp32 matrices and what it costs; empty if no product would change.

    precision: of such products now, as `torch.backends` names it.
    """
    if dtype != torch.float32 or capability < (8, 0) or precision == "tf32":
        return ""
    return (
        "; to keep weights and activations in fp32, TrainingArguments(tf32=True) lets tensor cores multiply, at up to eight "
        "times the rate, but rounds the factors of every product to 11 bits: results are right to about 1e-3 instead of 1e-6"
    )


# variables from which torch reads settings of its allocator
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True\b")


def has_expandable_segments(device_type: str, environment: Mapping[str, str]) -> bool:
    """Whether torch's allocator has expandable segments, by the environment; never on a CPU."""
    return device_type == "cuda" and any(_EXPANDABLE.search(environment.get(name, "")) for name in _ALLOCATOR_SETTINGS)


def allocator_advice(device_type: str, environment: Mapping[str, str]) -> str:
    """Advises a missing setting of torch's allocator; empty if none is missing, or on a CPU."""
    settings = [environment.get(name, "") for name in _ALLOCATOR_SETTINGS]
    if device_type != "cuda" or any("expandable_segments" in each for each in settings):
        return ""
    return (
        "memory: sizes of tensors change in every step, which leaves gaps between them, so plans leave a fifth of the device "
        "free; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, and they leave "
        f"{1 - EXPANDABLE_SHARE:.0%}"
    )


def threads_advice(costs: CostModel, device_type: str, num_threads: int, num_cores: int) -> str:
    """Advises more threads for updates on the host, if cores would be idle; empty on a CPU, whose threads do everything."""
    own_cores = num_cores // costs.cluster.ranks_per_node
    if device_type != "cuda" or not costs.model.updates_on_host or 2 * num_threads > own_cores:
        return ""
    return (
        f"optimizer states: the CPU updates weights with {num_threads} thread(s) a rank (torchrun sets one); set "
        f"OMP_NUM_THREADS={own_cores} in the environment for all of the {num_cores} cores"
    )

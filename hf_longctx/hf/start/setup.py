"""Sets up a run before its first step: checks on every rank, then the limits and costs with which planning starts."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels import NEXT_TOKEN, HeadTask
from hf_longctx.hf.data.scan import scan_on_every_rank
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.adapters import base_of, hidden_dtype, largest_adapters
from hf_longctx.hf.models.cutting import loaded_ranges
from hf_longctx.hf.models.positions import absent_token_ids
from hf_longctx.hf.models.quantised import largest_packed
from hf_longctx.hf.models.spec import cluster_spec, frozen_parameters, model_spec
from hf_longctx.hf.models.states import mixer_of, scan_line
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.launch import LaunchEnvironment, host_bytes
from hf_longctx.hf.rules.arguments import launch_problems, low_bits, setup_problems, stage_ranks
from hf_longctx.hf.start.budget import Beside, activation_budget, describe_states, rank_memory
from hf_longctx.hf.start.settings.advice import allocator_advice, fitting_settings, run_memory, slow_tiles, threads_advice
from hf_longctx.hf.start.stages import sampled_lengths
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, GroupMethod, PlannerConfig, all_degrees, default_degrees
from hf_longctx.plan.core.sharding import PACKED_TOKENS
from hf_longctx.plan.core.types import Parameters, Ranges
from hf_longctx.plan.cost.catalog import spec_name, without_kernels
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, block_sizes, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.cost.traffic import group_shapes, plainest_shape
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import may_rerun, most_tokens
from hf_longctx.plan.memory.states_place import LayersPlace, StatesPlace
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import balanced_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.policies.fit import longest_alone
from hf_longctx.plan.stage_count import StageSetup, stage_counts, stage_options
from hf_longctx.runtime.measure import copy_rate
from hf_longctx.runtime.parameters.low_bit import moment_bytes
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.packages import active_flash
from hf_longctx.runtime.tiles.packs import flash_problems, takes_packs
from hf_longctx.runtime.tiles.tile import attention_backend
from hf_longctx.sim.capacity import Placement

logger = logging.getLogger(__name__)

# stop bisecting for the longest sequence of a pipeline at a hundredth of its length
_ROOM_PRECISION = 100


@dataclass(frozen=True)
class TrainingRows:
    """The training set, if there is one, and the labels that its rows give."""

    dataset: Any = None
    task: HeadTask = NEXT_TOKEN


@dataclass(frozen=True)
class RunSetup:
    """Basis of a run's plans: the cost model before anything is measured, the planner's limits, the longest sequence.

    ranges: layer ranges of every pipeline stage; without a pipeline there is one stage. max_length: the most tokens of a
    sequence by the settings. room_tokens: the most tokens of a sequence that memory holds. placeholders: token ids that stand
    for padding, images, sound or video, which no row may have. states_line: where optimizer states lie and why, if the run chose.
    """

    costs: CostModel
    planner: PlannerConfig
    max_length: int
    ranges: Ranges
    room_tokens: int
    placeholders: tuple[int, ...] = ()
    states_line: str = ""

    @property
    def num_stages(self) -> int:
        return len(self.ranges)

    def in_one_micro_batch(self) -> RunSetup:
        """The setup of a run whose steps are one micro-batch, in which nothing is cut into slices."""
        planner = replace(self.planner, one_micro_batch=True)
        return replace(self, planner=planner, room_tokens=self.room_tokens if self.num_stages > 1 else planner.room_tokens)


def checked_degrees(
    config: LongContextConfig,
    model: Any,
    args: TrainingArguments,
    processing_class: Any,
    problems: list[str],
    control: dist.ProcessGroup | None,
    alike: Mapping[str, Any] = {},
) -> tuple[int, ...]:
    """The degrees that sequence groups may have; raises ValueError on every rank for settings, models or ranks that do not fit.

    problems: problems that the caller has found already. alike: further values that must not differ between ranks. Collective
    over the ranks of `control`, in one exchange.
    """
    config_of_text = model.config.get_text_config() if hasattr(model, "config") else None
    heads = getattr(config_of_text, "num_attention_heads", args.world_size)
    degrees = _allowed_degrees(config, stage_ranks(config, args.world_size), heads)
    problems = problems + launch_problems(LaunchEnvironment.read(), args)
    problems += _hardware_problems(config.hardware)
    problems += setup_problems(model, processing_class, config, args.world_size, degrees)
    # a rank with other settings may be the only one with a problem
    raise_together(problems, control, alike={**asdict(config), **_shared_arguments(args), **alike})
    return (config.static_degree,) if config.static_degree else degrees


def _allowed_degrees(config: LongContextConfig, num_ranks: int, num_heads: int) -> tuple[int, ...]:
    if config.degrees == "all":
        return all_degrees(num_ranks, num_heads, config.method)
    return tuple(sorted(set(config.degrees or default_degrees(num_ranks, num_heads, config.method))))


def choose_setup(
    config: LongContextConfig,
    model: PreTrainedModel,
    args: TrainingArguments,
    degrees: tuple[int, ...],
    control: dist.ProcessGroup | None,
    rows: TrainingRows | None = None,
    beside: Beside | None = None,
) -> RunSetup:
    """Chooses cost model, limits, stages and place of optimizer states for `model` on `control`; collective over its ranks.

    rows: their lengths decide on pipeline stages, and the longest on the place. Raises ValueError if the model's states leave no
    room for a single token.
    """
    launch = LaunchEnvironment.read()
    cluster = cluster_spec(args.device, args.world_size, min(launch.ranks_per_node, args.world_size))
    # nodes may have different numbers of ranks; with a common divisor of these, blocks lie inside nodes and every rank makes
    # the same groups
    cluster = replace(cluster, ranks_per_node=math.gcd(*gather_objects(cluster.ranks_per_node, control)))
    spec = model_spec(model, is_autocast=args.bf16)
    raise_together(flash_problems(args.device, _attention_dtype(args, model), spec.largest_head_dim), control)
    spec = replace(
        spec,
        has_master_weights=config.fp32_master_weights,
        updates_on_host=config.optimizer_states == "host",
        layers_on_host=config.layer_weights == "host",
        saves_kv_once=_shares_calls(spec, args, model),
    )
    if mixer_of(base_of(model)) and spec.states.is_empty and args.process_index == 0:
        logger.warning(
            "plans count the layers with a state along the sequence of %s as full attention, and neither the states that slices "
            "leave nor the tensors of their scan as memory; where memory is short, give a lower device_gib",
            type(base_of(model)).__name__,
        )
    # a rank that loaded only its own stage does not know the adapters, four-bit and frozen weights of other stages
    frozen = frozen_parameters(model, config.stages != 1)
    beside = beside or Beside()
    own = spec.adapters, spec.packed, spec.rounded_parameters, frozen, _moment_bytes(config, model, args), beside.kernels
    gathered = zip(*gather_objects(own, control), strict=True)
    adapters, packed, rounded, all_frozen, moments, kernels = (list(each) for each in gathered)
    index = replace(spec.index, most_ranks=degrees[-1])
    spec = replace(spec, adapters=largest_adapters(adapters), packed=largest_packed(packed), index=index)
    spec = replace(spec, rounded_parameters=min(rounded), frozen_parameters=min(all_frozen), moment_bytes=max(moments))
    agreed: dict[str, Any] = {name: all(each[name] for each in kernels) for name in beside.kernels}
    spec = replace(spec, **agreed)
    cluster, coefficients = starting_costs(config.hardware, spec, cluster, control)
    costs = CostModel(spec, cluster, coefficients)
    max_length, rows = config.max_length or spec.max_positions, rows or TrainingRows()
    basis = _SetupBasis(config, model, args, degrees, control, costs, max_length, rows, beside.reference_bytes)
    return _setup_with_states(basis) if config.layer_weights != "auto" else _setup_with_layers(basis)


def _setup_with_layers(basis: _SetupBasis) -> RunSetup:
    """The setup with shards of layers on the device, or on the host if that makes room for the longest sequence. Collective.

    Raises ValueError, with both reasons, if neither place leaves room for a token.
    """
    setups, rooms, problems = _rooms(basis, lambda free, on_host: _setup_with_states(free.with_layers(on_host)))
    if not setups:
        raise ValueError(f"layer_weights='auto' finds no room. On the device: {problems[0]}. On the host: {problems[1]}")
    place = LayersPlace(_wanted_tokens(basis, setups[0]), rooms[0], rooms[1], problems[1])
    chosen = _setup_with_states(basis.with_layers(place.on_host))
    return replace(chosen, states_line="\n".join(filter(None, (chosen.states_line, place.line()))))


def _setup_with_states(basis: _SetupBasis) -> RunSetup:
    """The setup with the optimizer's states where the settings say, or where the run chooses. Collective."""
    if basis.config.optimizer_states != "auto":
        return _staged_setup(basis)
    place = _states_place(basis)
    return replace(_staged_setup(basis.with_states(place.on_host)), states_line=place.line())


def _rooms(basis: _SetupBasis, setup_of: Callable[[_SetupBasis, bool], RunSetup]) -> tuple[list[RunSetup], list[int], list[str]]:
    """Setups with something on the device and on the host, where possible; longest sequences and problems of both. Collective."""
    # a limit that the user sets is trusted elsewhere, so look at what memory alone holds
    free = replace(basis, config=replace(basis.config, tokens_per_rank=None))
    setups: list[RunSetup] = []
    rooms: list[int] = []
    problems: list[str] = []
    for on_host in (False, True):
        room, problem = 0, ""
        try:
            setups.append(setup_of(free, on_host))
            room = setups[-1].room_tokens
        except ValueError as error:
            problem = str(error)
        rooms.append(min(gather_objects(room, basis.control)))
        problems.append(problem)
    return setups, rooms, problems


def _wanted_tokens(basis: _SetupBasis, setup: RunSetup) -> int:
    """Tokens of the longest sequence of the training set that the settings let a run train; collective."""
    wanted = min(basis.max_length, _longest_row(basis, setup.placeholders))
    if basis.config.tokens_per_rank is not None:
        wanted = min(wanted, basis.config.tokens_per_rank * setup.planner.degrees[-1] * setup.num_stages)
    return wanted


def _moment_bytes(config: LongContextConfig, model: PreTrainedModel, args: TrainingArguments) -> float:
    """Bytes of both moments of a trained parameter in an optimizer that keeps them in few bits; 0 for any other one."""
    if not (bits := low_bits(args)):
        return 0.0
    trained = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    # with stages, fewer ranks share a copy, and larger shards have fewer plain moments
    return moment_bytes(trained, bits, shared_parameters(config, args.world_size)[1])


def _states_place(basis: _SetupBasis) -> StatesPlace:
    """Rooms with the optimizer's states on the device and on the host, agreed on all ranks; collective.

    Raises ValueError, with both reasons, if neither place leaves room for a token.
    """
    setups, rooms, problems = _rooms(basis, lambda free, on_host: _staged_setup(free.with_states(on_host)))
    if not setups:
        raise ValueError(f"optimizer_states='auto' finds no room. On the device: {problems[0]}. On the host: {problems[1]}")
    setup = setups[0]
    like = replace(setup.costs, model=replace(setup.costs.model, updates_on_host=False))
    states, host_states = (
        ByteModel(replace(like.model, updates_on_host=on_host)).most_states(
            setup.ranges, like.parameters, like.shard_ranks, on_host=on_host
        )
        for on_host in (False, True)
    )
    ranks = setup.ranges, setup.planner.degrees, basis.args.device, basis.control
    usable, free_on_host, _ = rank_memory(basis.config, like, *ranks)
    wanted = _wanted_tokens(basis, setup)
    return StatesPlace(wanted, rooms[0], rooms[1], states, usable, host_states, free_on_host, problems[1])


def _longest_row(basis: _SetupBasis, placeholders: tuple[int, ...]) -> int:
    """Tokens of the longest row of the training set on any rank; for a stream, or without a set, the limit; collective."""
    longest, dataset, task = basis.max_length, basis.rows.dataset, basis.rows.task
    is_read = dataset is not None and not is_stream(dataset)
    # ranks with and without a set differ, which is refused later; but scanning is collective
    if all(gather_objects(is_read, basis.control)):
        sets, show_progress = {"train_dataset": dataset}, not basis.args.disable_tqdm
        scan = scan_on_every_rank(sets, basis.costs.model.vocab_size, show_progress, placeholders, task)["train_dataset"]
        longest = max(map(int, scan.sequence_lengths), default=longest)
    return max(gather_objects(longest, basis.control))


def _staged_setup(basis: _SetupBasis) -> RunSetup:
    """The setup with the pipeline stages that the settings ask for, or that a sample of rows decides on. Collective."""
    config, args, control, costs = basis.config, basis.args, basis.control, basis.costs
    if (loaded := loaded_ranges(basis.model)) is not None or config.stages == 1:
        return basis.with_stages(loaded or balanced_ranges(costs, 1, ()))
    lengths = sampled_lengths(basis.rows.dataset, basis.max_length, control)
    setups: dict[tuple[int, int], RunSetup] = {}

    def setup_of(num_stages: int, num_parts: int) -> StageSetup:
        # ranks may have different devices and so different costs, so rank 0's ranges hold for all
        ranges = gather_objects(balanced_ranges(costs, num_stages, lengths, num_parts), control)[0]
        setups[num_stages, num_parts] = setup = basis.with_stages(ranges)
        return StageSetup(setup.costs, setup.planner, setup.room_tokens)

    if config.stages != "auto" and config.interleave == 1:
        setup_of(int(config.stages), 1)
        return setups[int(config.stages), 1]
    per_step = max(1, args.per_device_train_batch_size * args.world_size)
    batch = list(itertools.islice(itertools.cycle(lengths), per_step))
    is_auto = config.stages == "auto"
    counts = stage_counts(args.world_size, costs.model.num_layers, basis.degrees) if is_auto else [int(config.stages)]
    best = stage_options(batch, counts, setup_of, interleave=config.interleave)[0]
    # rank 0 decides for all: planning is deterministic, but agreeing costs nothing
    return setups[gather_objects((best.num_stages, best.num_parts), control)[0]]


@dataclass(frozen=True)
class _SetupBasis:
    """The part of a run's setup that does not depend on pipeline stages; `costs` leave open how parameters live on the ranks."""

    config: LongContextConfig
    model: PreTrainedModel
    args: TrainingArguments
    degrees: tuple[int, ...]
    control: dist.ProcessGroup | None
    costs: CostModel
    max_length: int
    rows: TrainingRows
    reference_bytes: int

    def with_states(self, on_host: bool) -> _SetupBasis:
        """Basis of the same run with the optimizer's states on the host, or on the device."""
        return replace(self, costs=replace(self.costs, model=replace(self.costs.model, updates_on_host=on_host)))

    def with_layers(self, on_host: bool) -> _SetupBasis:
        """Basis of the same run with shards of layers on the host while a step computes, or on the device."""
        return replace(self, costs=replace(self.costs, model=replace(self.costs.model, layers_on_host=on_host)))

    def with_stages(self, ranges: Ranges) -> RunSetup:
        """The setup with these layer ranges on the stages. Collective."""
        config, is_pipeline = self.config, len(ranges) > 1
        ranks_per_stage = self.args.world_size // len(ranges)
        degrees = tuple(degree for degree in self.degrees if degree <= ranks_per_stage)
        parameters, shard_ranks = shared_parameters(config, ranks_per_stage)
        lend_stages = config.lend_stages and is_pipeline
        costs = replace(
            self.costs,
            model=replace(
                self.costs.model,
                keeps_all_stages=lend_stages,
                experts=replace(self.costs.model.experts, num_ranks=config.expert_ranks or 1),
            ),
            method=self._stage_method(ranks_per_stage, degrees) if is_pipeline else config.method,
            parameters=parameters,
            shard_ranks=shard_ranks,
        )
        budget = activation_budget(config, costs, ranges, degrees, self.args.device, self.control, self.reference_bytes)
        activations = budget if config.activations == "auto" and not _has_activation_problem(self.model, self.control) else None
        reruns = len(ranges) == 1 and may_rerun(costs.model, costs.parameters)
        shape = plainest_shape(degrees[-1], costs.method, costs.model, costs.cluster)
        # pipelines run slices, which are not cut
        pieces = costs.model.head_pieces(shape.ulysses) if len(ranges) == 1 else 1
        ways: dict[str, Any] = {"reruns": reruns, "head_pieces": pieces, "is_shared": shape.degree > 1}
        ways |= {"num_blocks": shape.num_blocks, "block_ranks": shape.ulysses}
        tokens_per_rank = self._tokens_per_rank(costs, budget, activations, ways)
        planner = PlannerConfig(
            tokens_per_rank=tokens_per_rank,
            activations=activations,
            degrees=degrees,
            solver=config.solver,
            static_degree=config.static_degree,
            micro_batch_trials=config.micro_batch_trials,
            time_aware=config.time_aware,
            nested=config.nested,
            node_aligned=config.node_aligned,
            solver_time_limit_s=config.solver_time_limit_s,
            stages=ranges if is_pipeline else (),
            lend_stages=lend_stages,
        )
        room_tokens = tokens_per_rank * degrees[-1]
        if is_pipeline:
            room_tokens = _longest_planned(min(self.max_length, room_tokens * len(ranges)), costs, planner)
        elif activations is not None and config.tokens_per_rank is None and room_tokens < self.max_length:
            sharing = costs.parameters, costs.shard_ranks
            room_tokens = longest_alone(costs.model, activations, shape, *sharing, known=room_tokens, most=self.max_length)
            planner = replace(planner, longest_tokens=room_tokens)
        if activations is not None and not is_pipeline:
            # formulas may count less than the plan of a shape needs
            most = min(self.max_length, room_tokens)
            planned = _longest_planned(most, costs, planner)
            room_tokens = planned if planned < most else room_tokens
        placeholders = absent_token_ids(base_of(self.model))
        return RunSetup(costs, planner, self.max_length, ranges, room_tokens, placeholders)

    def _stage_method(self, ranks_per_stage: int, degrees: Sequence[int]) -> GroupMethod:
        """How groups inside a stage share attention.

        Around a ring every slice sends earlier ones again, so "auto" means Ulysses wherever that can run groups of all degrees.
        """
        if self.config.method != "auto":
            return self.config.method
        cluster = replace(self.costs.cluster, num_ranks=ranks_per_stage)
        return "ulysses" if all(group_shapes(d, "ulysses", self.costs.model, cluster) for d in degrees) else "auto"

    def _tokens_per_rank(
        self,
        costs: CostModel,
        budget: ActivationBudget,
        activations: ActivationBudget | None,
        ways: Mapping[str, Any],
    ) -> int:
        """Most tokens of a micro-batch on a rank: the setting, or what memory holds if that is less or nothing is set.

        With activations="keep" the setting is trusted. ways: further arguments of `most_tokens`.
        """
        config, fitting = self.config, budget.kept_tokens
        if activations is not None:
            room = activations.device_bytes, activations.host_bytes, activations.tile_tokens
            fitting = max(fitting, most_tokens(costs.model, *room, **ways))
        if fitting < 1 and (config.tokens_per_rank is None or activations is not None):
            gib = config.device_gib or costs.cluster.hardware.device_bytes / 2**30
            missing = f"{describe_states(costs.model)} ({costs.parameters}) leave no room for a token in {gib:.3g} GiB"
            # settings of pipelines are not tried
            found = "" if config.stages != 1 else settings_for(config, costs, self.degrees, activations, 1)
            if found:
                raise ValueError(f"{missing}; what would fit, by formula: {found}")
            raise ValueError(f"{missing}; use more ranks, a smaller model or a larger device")
        if activations is None or not fitting < (config.tokens_per_rank or fitting):
            return config.tokens_per_rank or fitting
        if self.control is None or dist.get_rank() == 0:
            logger.warning(
                "tokens_per_rank %d is more than the %d that fit into memory even if everything is recomputed; plans use %d "
                "(activations='keep' trusts the setting)",
                config.tokens_per_rank,
                fitting,
                fitting,
            )
        return fitting


def settings_for(
    config: LongContextConfig,
    costs: CostModel,
    degrees: tuple[int, ...],
    activations: ActivationBudget | None,
    num_tokens: int,
) -> str:
    """Settings with which a run of one stage would hold a sequence of `num_tokens`, each tried; empty if there are none."""
    most_offloaded = 0 if activations is None else activations.host_bytes
    available_bytes = host_bytes()[0] // costs.cluster.ranks_per_node
    free_bytes = max(0, available_bytes - ByteModel(costs.model).host_states(costs.parameters, costs.shard_ranks))
    memory = run_memory(costs, config.device_gib or 0, free_bytes, most_offloaded, activations is None)
    placement = Placement(
        *(costs.cluster.num_ranks, costs.parameters, costs.shard_ranks, degrees, config.method, config.tokens_per_rank or 0),
        ranks_per_node=costs.cluster.ranks_per_node,
    )
    return fitting_settings(memory, placement, num_tokens, may_recompute=config.activations == "keep")


def _longest_planned(most_tokens: int, costs: CostModel, planner: PlannerConfig) -> int:
    """Tokens of the longest sequence that can be planned, at most `most_tokens`; found by planning sequences, to 1 %.

    Raises ValueError if there is no room for a single token.
    """
    fits, too_long = 0, most_tokens + 1
    tried = most_tokens
    while too_long - fits > max(1, fits // _ROOM_PRECISION):
        try:
            plan_step(0, [tried], costs, planner)
            fits = tried
        except ValueError:
            if tried == 1:
                raise
            too_long = tried
        tried = (fits + too_long) // 2
    return fits


def _has_activation_problem(model: PreTrainedModel, control: dist.ProcessGroup | None) -> bool:
    """Whether nothing in `model` can be recomputed or offloaded; if so, rank 0 logs a warning."""
    problem = activation_problem(model)
    if problem and (control is None or dist.get_rank() == 0):
        logger.warning("activations='auto' keeps everything: %s", problem)
    return bool(problem)


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


def shared_parameters(config: LongContextConfig, num_ranks: int) -> tuple[Parameters, int]:
    """How parameters live on `num_ranks` ranks, and how many ranks share one copy; a single rank has the whole model."""
    if config.parameters == "replicated" or num_ranks == 1:
        return "replicated", 1
    return config.parameters, config.shard_ranks or config.expert_ranks or num_ranks


def open_plan_source(
    config: LongContextConfig, setup: RunSetup, control: dist.ProcessGroup | None, args: TrainingArguments
) -> PlanSource:
    """Makes the group pool of a run and the source of its plans. Collective: every rank calls it at the same point."""
    # plans may follow seconds that are measured in the run
    is_timed = not args.full_determinism
    blocks = block_sizes(setup.planner.degrees, setup.costs)
    lends = setup.planner.lend_stages
    sums_early = setup.costs.shard_ranks == 1 and not lends
    pool = GroupPool(blocks, args.ddp_timeout, control, setup.num_stages, lends, sums_early)
    # explore one step more than are fitted, since the first step includes start-up costs and is left out
    explore_steps = config.calibration_steps and config.calibration_steps + 1
    alive_s = config.collective_timeout_s / 3
    source = PlanSource(pool, setup.costs, setup.planner, explore_steps=explore_steps, alive_s=alive_s, is_timed=is_timed)
    budget = setup.planner.activations
    if is_timed and budget is not None and budget.host_bytes and not setup.costs.cluster.hardware.source:
        # no profile gives the speed of the link, so measure it, with all ranks copying at once as they do in a step
        source.set_copy_rate(copy_rate(pool, args.device))
    return source


def opening_line(setup: RunSetup, args: TrainingArguments, model: Any) -> str:
    """The text that a run prints once: ranks, kinds of plans, memory, and operators for attention and scans."""
    dtype = _attention_dtype(args, model)
    scans = scan_line(base_of(model), setup.costs.model.states, args.device, dtype)
    advice = [
        slow_tiles(setup.costs.model, args.device, dtype),
        scans,
        allocator_advice(args.device.type, dict(os.environ)),
        threads_advice(setup.costs, args.device.type, torch.get_num_threads(), len(os.sched_getaffinity(0))),
    ]
    return "\n".join(filter(None, (_opening_line(setup, args, dtype), setup.states_line, *advice)))


def _attention_dtype(args: TrainingArguments, model: PreTrainedModel) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else hidden_dtype(model)


def _shares_calls(spec: ModelSpec, args: TrainingArguments, model: PreTrainedModel) -> bool:
    """Whether short documents share calls of attention on this rank's device."""
    is_masked = spec.drops_weights or not spec.index.is_empty
    return not is_masked and takes_packs(args.device, _attention_dtype(args, model), spec.largest_head_dim, spec.caps_scores)


def _opening_line(setup: RunSetup, args: TrainingArguments, dtype: torch.dtype) -> str:
    return "\n".join((_plans_line(setup, args), _memory_line(setup), _attention_line(setup, args, dtype)))


def _plans_line(setup: RunSetup, args: TrainingArguments) -> str:
    """Ranks, and the kinds of plans that they may get."""
    costs, planner = setup.costs, setup.planner
    if (num_ranks := costs.cluster.num_ranks) == 1:
        return f"plans for 1 rank on {args.device.type}: micro-batches within its memory, whose long sequences may be sliced"
    degrees = [f"{each:,}" for each in ([planner.static_degree] if planner.static_degree else planner.degrees)]
    line = f"plans for {num_ranks} ranks on {args.device.type}: sequence groups of {' or '.join(degrees)}"
    if setup.num_stages > 1:
        line += f" in {setup.num_stages} pipeline stages"
        if (num_parts := len(setup.ranges[0])) > 1:
            line += f", interleaved with {num_parts} layer ranges each"
        if planner.lend_stages:
            line += ", which lend their ranks where that is predicted to be faster"
    shared = "" if costs.parameters == "replicated" else f" over {costs.shard_ranks} ranks"
    return f"{line}; parameters {costs.parameters.replace('_', ' ')}{shared}"


def _memory_line(setup: RunSetup) -> str:
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


def _attention_line(setup: RunSetup, args: TrainingArguments, dtype: torch.dtype) -> str:
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

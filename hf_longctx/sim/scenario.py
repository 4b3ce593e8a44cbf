"""Builds the scenario of a forecast: a model by name or config.json, a hardware profile, and the use of its ranks.

Called by `hf-longctx plan` and `hf-longctx simulate`. Options that the user left out are chosen here, with notes that say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from hf_longctx.plan.core.settings import (
    ASSUMED_FP8_RATIO,
    SOLVERS,
    USABLE_SHARE,
    ActivationBudget,
    ClusterSpec,
    GroupMethod,
    PlannerConfig,
    Solver,
    check_degrees,
    default_degrees,
)
from hf_longctx.plan.core.types import Parameters, gathers_every_pass
from hf_longctx.plan.cost.catalog import with_kernels
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, default_coefficients, teacher_costs, with_adapters
from hf_longctx.plan.cost.profiles import RATE_TABLES, HardwareProfile, ModelCalibration, normal_name, read_profile
from hf_longctx.plan.memory.teacher import beside_teacher
from hf_longctx.plan.model.model_spec import ModelSpec, PackedSpec
from hf_longctx.plan.setup import (
    DeviceMemory,
    Lengths,
    Measured,
    Place,
    Placement,
    Setup,
    Wishes,
    build_setup,
    can_leave,
    fitting_remedies,
    lora_adapters,
)
from hf_longctx.sim.models import (
    experts_in,
    kept_because,
    kernels_of,
    miscounted_because,
    most_positions,
    read_model,
    short_name,
)

BYTES_PER_ELEMENT = {"bfloat16": 2, "float32": 4}
# optimizer -> bytes of both moments per parameter, with an fp32 scale for 256 elements; 0: those of the weights it updates
MOMENT_BYTES = {"adamw_torch": 0.0, "adamw_torch_8bit": 2 * (1 + 4 / 256), "adamw_torch_4bit": 2 * (1 / 2 + 4 / 256)}
_GIB = 2**30


def optimizer_of(moment_bytes: float) -> str:
    """The optimizer that keeps `moment_bytes` of moments per parameter."""
    return next((name for name, num_bytes in MOMENT_BYTES.items() if num_bytes == moment_bytes), "adamw_torch")


# the most that PCIe 5.0 x16 carries in one direction
_PCIE_BYTES_PER_S = 6.4e10
# elements of the largest heads that FlashAttention takes
_MOST_HEAD_DIM = 256


# a change is offered only if none holds this many times its tokens
_MOST_BETTER = 100


@dataclass(frozen=True, slots=True)
class Request:
    """Options of the user; empty strings, zeros and () mean that the program chooses."""

    model: str
    hardware: str
    num_ranks: int
    ranks_per_node: int = 0
    dtype: str = ""
    parameters: str = ""
    shard_ranks: int = 0
    degrees: tuple[int, ...] = ()
    method: GroupMethod = "auto"
    solver: Solver = "auto"
    tokens_per_rank: int = 0
    # tokens of the longest sequence to be planned
    longest_tokens: int = 0
    # a number of pipeline stages, or "auto": as many as are fastest for a step of `step_lengths` (0: auto on several nodes)
    stages: int | Literal["auto"] = 0
    step_lengths: tuple[int, ...] = ()
    solver_time_limit_s: float = 10.0
    # rank of the adapters (0: all weights are trained)
    lora_rank: int = 0
    # weights of experts have adapters, too
    lora_experts: bool = False
    # "nf4" freezes the weights below the adapters in four bits, of a mixture its experts alone, as "mxfp4" and "fp8" do; empty:
    # experts are as in the checkpoint, which for GPT-OSS is MXFP4; "none": in the dtype
    quantize: str = ""
    # "fp8" rounds them to fp8
    frozen_weights: str = "unchanged"
    # host memory for each rank (below 0: that of the profile)
    host_bytes: int = -1
    # "auto" recomputes and offloads if needed, "keep" never does
    activations: str = "auto"
    # ranks over which experts are spread
    expert_ranks: int = 0
    # the optimizer keeps no fp32 copies of bf16 weights
    bf16_updates: bool = False
    optim: str = "adamw_torch"
    # "host" keeps optimizer states in host memory, "auto" only if the longest sequence needs that
    optimizer_states: Place = "device"
    # "host" keeps shards of layers there while a step computes, "auto" only if the longest sequence needs that
    layer_weights: Place = "device"
    # Gbit/s of a node's network, which its ranks share
    network_gbit: float = 0.0
    # name of the model in place of `model`
    name: str = ""
    # norms, gated MLPs and rotary embeddings run as kernels (None: on GPUs, as in a run without this setting)
    compile_layers: bool | None = None
    # pipeline stages may share the work of the output head
    spread_head: bool = True
    # torch's allocator will have expandable segments, as the environment of a run decides
    expandable_segments: bool = False
    # model whose forwards run under the same plans (empty: none)
    teacher: str = ""
    # sequences have images, so that towers are trained with all other weights
    has_images: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model on a cluster, with all choices made."""

    model_name: str
    # name or path from the user
    hardware_name: str
    setup: Setup
    # sentences about the choices
    notes: tuple[str, ...] = ()
    # those of them about numbers that are known to be too large or too small
    caveats: tuple[str, ...] = ()
    # reason why runs of this class of models always keep everything; empty if they may recompute
    kept_because: str = ""
    # the setup without pipeline stages, in which other systems are predicted
    one_stage: Setup | None = None
    # which rates of a shipped profile were measured; empty if none was
    measured_rates: str = ""
    # tokens of the longest sequence over weights that are not quantized, if these hold a longer one; else 0
    unquantized_tokens: int = 0
    # how experts are packed, as `pack_experts` of a recipe; empty: they are not
    packed_experts: str = ""
    # the last stage does all work of the output head, as the user asked or since that is faster
    keeps_head: bool = False

    @property
    def flat(self) -> Scenario:
        """The scenario on one stage: itself if it has no others."""
        return self if self.one_stage is None else replace(self, setup=self.one_stage, one_stage=None)

    @property
    def costs(self) -> CostModel:
        return self.setup.costs

    @property
    def memory(self) -> DeviceMemory:
        return self.setup.memory

    @property
    def placement(self) -> Placement:
        return self.setup.placement

    @property
    def planner_config(self) -> PlannerConfig:
        """Planner settings of a run on these devices."""
        return self.setup.planner

    @property
    def budget(self) -> ActivationBudget | None:
        """Memory for activation policies besides the states; None if all activations are kept."""
        return self.setup.planner.activations

    @property
    def tokens_per_rank(self) -> int:
        """Most tokens that a plan may put on a rank; 0 if there is no room for one."""
        return self.placement.tokens_per_rank(self.memory)

    @property
    def kept_tokens(self) -> int:
        """Most tokens on a rank with all activations kept."""
        return self.placement.kept_tokens(self.memory)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that fits and has positions."""
        return min(self.setup.room_tokens, self.placement.max_length or self.setup.room_tokens)

    @property
    def held_tokens(self) -> int:
        """Tokens of the longest sequence that fits, without the model's limit of positions; pipelines are planned within it."""
        if self.placement.is_pipeline:
            return self.longest_tokens
        return replace(self.placement, max_length=0).longest_tokens(self.memory)

    @property
    def may_recompute(self) -> bool:
        """Whether everything is kept only because the user asks for it."""
        return self.memory.keeps_everything and not (self.memory.is_measured or self.kept_because)


def build_scenario(request: Request, must_fit: bool = True) -> Scenario:
    """The scenario of a request; raises ValueError for unknown names, contradictions and (`must_fit`) models that do not fit."""
    if MOMENT_BYTES[request.optim] and request.optimizer_states != "device":
        raise ValueError(
            f"{request.optim} keeps its moments on the device; leave --optimizer-states {request.optimizer_states} out, or use "
            f"--optim adamw_torch"
        )
    profile = read_profile(request.hardware)
    compiles = _is_gpu(profile.spec.name) if request.compile_layers is None else request.compile_layers
    kernels = kernels_of(request.model) if compiles else {}
    calibration = _calibration(request.model, profile, kernels)
    if calibration and request.network_gbit:
        raise ValueError(
            f"the costs of {request.model} on {request.hardware} were measured, over the network of that run; --slow-network has "
            f"no effect, leave it out"
        )
    if request.lora_rank < 0:
        raise ValueError(f"--lora-rank is {request.lora_rank}; give at least 1, or leave it out to train all weights")
    if request.lora_experts and not request.lora_rank:
        raise ValueError("--lora-experts puts adapters on the weights of experts, and needs their rank; give --lora-rank too")
    model, notes = _model(request, profile.spec.name, calibration, kernels)
    if request.expert_ranks:
        model = _spread(request, model)
        notes.append(
            "tokens travel to experts on other ranks: seconds and bytes are those of experts that are chosen equally often"
        )
    cluster = _cluster(request, profile, notes)
    if request.network_gbit:
        cluster = _with_network(request.network_gbit, cluster, notes)
    if links := slow_links(cluster):
        notes.append(links)
    if request.teacher:
        model = beside_teacher(model)
    coefficients, memory = _measured_or_assumed(model, cluster, calibration, request.expandable_segments)
    if request.activations not in ("auto", "keep"):
        raise ValueError(f"activations {request.activations!r} is not one of auto, keep; choose one of these")
    if kept := kept_because(request.model):
        notes.append(f"a run of this class keeps everything, which holds fewer tokens than recomputing would: {kept}")
    memory = replace(
        memory,
        lora_rank=request.lora_rank,
        host_bytes=_host_bytes(request, cluster, notes),
        keeps_everything=memory.is_measured or request.activations == "keep" or bool(kept),
    )
    if model.packed.fp8_parameters:
        ratio = cluster.hardware.fp8_ratio
        source = "as was measured there" if ratio else "an assumption, not measured on this hardware"
        notes.append(
            f"products in fp8 count as {ratio or ASSUMED_FP8_RATIO:g} times as fast as in bf16, {source}; rounding what they "
            f"multiply, and putting weights into the other order, count by their bytes"
        )
    caveats = []
    if miscounted := miscounted_because(request.model):
        caveats.append(
            f"parameters are counted from the config, and {miscounted}, which is more than 5%; a run counts its model's"
        )
    if not calibration:
        notes.append(
            f"{request.name or request.model} was not measured on {profile.spec.name}: seconds come from operation counts and "
            f"the rates of the hardware, memory from a formula"
        )
        if model.compresses_keys:
            caveats.append("attention to compressed keys counts as attention to all keys, so long documents take less time")
    elif request.method == "auto" and coefficients.forward.tile_s == coefficients.backward.tile_s == 0.0:
        notes.append(
            "rings were not measured there, so the cost of their extra tiles is unknown and counted as zero; --method ulysses "
            "uses measured costs only"
        )
    notes += caveats
    is_measured = memory.is_measured
    # a measured run had its communicators beside the usable bytes
    takes_memory = _is_gpu(profile.spec.name) and not is_measured
    taught_by = _teacher(request, model, cluster, notes) if request.teacher else None
    costs = CostModel(model, cluster, coefficients, teacher=taught_by)
    measured = Measured(costs, memory, is_measured, takes_memory, is_expandable=request.expandable_segments)
    lengths = Lengths(lambda: request.longest_tokens, lambda: request.step_lengths, list, request.longest_tokens)
    wishes = _wishes(request, model, cluster, _stages(request, model, cluster, is_measured and must_fit), is_measured)
    setup = build_setup(measured, wishes, lengths, partial(_check, request))
    notes += setup.notes
    if not request.spread_head and setup.num_stages == 1:
        notes.append("--no-spread-head changes nothing on one stage")
    one_stage = None
    if setup.num_stages > 1 and must_fit:
        flat = replace(request, stages=1, parameters="", shard_ranks=0)
        one_stage = build_setup(measured, _wishes(flat, model, cluster, 1, is_measured), lengths, lambda *_: None)
    scenario = Scenario(
        request.name or request.model,
        request.hardware,
        setup,
        tuple(notes),
        tuple(caveats),
        kept,
        one_stage,
        profile.measured,
        keeps_head=not request.spread_head or setup.keeps_head,
    )
    if model.packed.has_experts:
        scenario = replace(scenario, packed_experts=_kind_of_bits(request, model))
    if must_fit:
        _check_fits(scenario)
    if must_fit and not (model.packed.is_empty or model.packed.has_experts):
        option = "--quantize" if request.quantize else "--frozen-weights"
        plain = replace(request, quantize="", frozen_weights="unchanged")
        longest = build_scenario(plain, must_fit=False).longest_tokens
        if longest > scenario.longest_tokens:
            why = (
                f"{longest:,} tokens fit without {option}: over {model.packed.words} attention runs all its heads at once, and "
                f"its workspace takes more than these weights save"
            )
            scenario = replace(scenario, unquantized_tokens=longest, notes=(*scenario.notes, why))
    return scenario


def _wishes(request: Request, model: ModelSpec, cluster: ClusterSpec, stages: int | Literal["auto"], is_measured: bool) -> Wishes:
    """The options that the setup follows; raises ValueError for those that contradict each other."""
    if request.solver not in SOLVERS:
        raise ValueError(f"solver {request.solver!r} is not one of {', '.join(SOLVERS)}; choose one of these")
    if min(request.degrees, default=1) < 1:
        raise ValueError(f"degrees {request.degrees} hold a number below 1; give positive numbers of ranks, for example 1,2,4,8")
    num_ranks = request.num_ranks if stages == "auto" else request.num_ranks // stages
    degrees = request.degrees or default_degrees(num_ranks, model.num_heads, request.method)
    check_degrees(degrees, num_ranks, model.num_heads, request.method)
    if request.shard_ranks and request.parameters == "replicated":
        raise ValueError(f"--shard-ranks {request.shard_ranks} has no effect with --parameters replicated; leave one of them out")
    shard_ranks = request.shard_ranks or request.num_ranks
    if not 1 <= shard_ranks <= request.num_ranks or request.num_ranks % shard_ranks:
        raise ValueError(f"--shard-ranks {shard_ranks} does not divide the {request.num_ranks} ranks; choose a divisor")
    needs_shards = bool(request.expert_ranks) or request.layer_weights != "device"
    given = "" if request.parameters == "auto" else request.parameters
    # ways can be compared by a step's seconds only, and gathers are no part of measured ones
    shares_fastest = request.parameters == "auto" and bool(request.step_lengths) and not (needs_shards or is_measured)
    is_sharded = needs_shards or (bool(request.shard_ranks) and not shares_fastest)
    parameters = _as_parameters(given or ("sharded" if is_sharded else "replicated"))
    placement = Placement(
        request.num_ranks,
        parameters,
        request.shard_ranks or request.expert_ranks,
        degrees,
        request.method,
        request.tokens_per_rank,
        cluster.ranks_per_node,
        most_positions(request.model, model),
    )
    return Wishes(
        PlannerConfig(1, degrees, request.solver, solver_time_limit_s=request.solver_time_limit_s),
        placement,
        spread_head=request.spread_head and model.tower.is_empty and not request.teacher,
        may_shard=not (given or is_sharded),
        shares_fastest=shares_fastest,
        expert_ranks=request.expert_ranks,
        optimizer_states=request.optimizer_states,
        layer_weights=request.layer_weights,
        stages=stages,
    )


def _stages(request: Request, model: ModelSpec, cluster: ClusterSpec, is_measured: bool) -> int | Literal["auto"]:
    """The number of pipeline stages that the setup follows; raises ValueError for one that a run refuses.

    By default it is chosen if there are several nodes and lengths to choose by, unless a solver is named. is_measured: the model
    was measured without stages, and must run so.
    """
    found, num_ranks = request.stages, request.num_ranks
    has_solver = request.solver != "auto"
    if found == 0:
        is_open = bool(request.step_lengths) and num_ranks > cluster.ranks_per_node and not (has_solver or is_measured)
        return "auto" if is_open else 1
    if found == 1:
        return 1
    if has_solver:
        raise ValueError(f"--stages is {found}, and --solver {request.solver} has no effect on stages; leave one of them out")
    if is_measured:
        raise ValueError(
            f"--stages is {found}, but {request.name or request.model} was measured on {request.hardware} without stages; leave "
            f"--stages out, or name another hardware"
        )
    if found == "auto":
        if not request.step_lengths:
            raise ValueError("--stages auto chooses by the lengths of a step; give --lengths too, or a number of stages")
        return found
    if num_ranks % found:
        fitting = [count for count in range(2, num_ranks + 1) if num_ranks % count == 0 and count <= model.num_layers]
        raise ValueError(
            f"--stages {found} does not divide the {num_ranks} ranks of --gpus; choose one of "
            f"{', '.join(map(str, [1, *fitting]))}, or auto"
        )
    if found > model.num_layers:
        raise ValueError(
            f"--stages {found} is more than the {model.num_layers} layers of {request.name or request.model}; use at most one "
            f"stage per layer"
        )
    return found


def _check(request: Request, setup: Setup, measured: Measured) -> None:
    """Raise ValueError if states or layers cannot lie on the host."""
    memory, placement, free_bytes = setup.memory, setup.placement, measured.memory.host_bytes
    ranks, shared = placement.ranks_per_stage, request.shard_ranks or request.expert_ranks or 1
    if ranks % shared:
        option = "--shard-ranks" if request.shard_ranks else "--expert-ranks"
        raise ValueError(
            f"{option} {shared} does not divide the {ranks} ranks of a stage of {setup.num_stages}; choose a divisor, or other "
            f"--stages"
        )
    states_away, layers_away = memory.model.updates_on_host, memory.model.layers_on_host
    if memory.is_measured and states_away:
        raise ValueError(
            f"the memory of {request.model} on {request.hardware} was measured with the optimizer's states on the device; leave "
            f"--optimizer-states out"
        )
    if layers_away:
        _check_layers_leave(memory, placement)
    if (host_states := memory.host_states(*placement.sharing)) > free_bytes:
        named = ["--optimizer-states host"] * memory.model.updates_on_host + [
            "--layer-weights host"
        ] * memory.model.layers_on_host
        raise ValueError(
            f"{' and '.join(named)} {'need' if len(named) > 1 else 'needs'} {host_states / _GIB:.1f} GiB of host memory on each "
            f"rank, which has {free_bytes / _GIB:.1f} GiB; if it has more, give --host-gib {-(-host_states // _GIB)} or, with "
            f"{free_bytes / _GIB:.0f} GiB for activations, --host-gib {-(-(host_states + free_bytes) // _GIB)}; otherwise use "
            f"more ranks, or leave {'them' if len(named) > 1 else 'it'} out"
        )


def slow_links(cluster: ClusterSpec) -> str:
    """Says at which rate ranks of a node exchange if that is PCIe's; empty for faster links, for one rank, and for CPUs."""
    hardware = cluster.hardware
    if not _is_gpu(hardware.name) or cluster.ranks_per_node == 1 or hardware.link_bytes_per_s > _PCIE_BYTES_PER_S:
        return ""
    return f"ranks of a node exchange over PCIe, without NVLink: {hardware.link_bytes_per_s / 1e9:.0f} GB/s are counted"


def _is_gpu(hardware: str) -> bool:
    """Whether hardware of this name is a GPU."""
    return "cpu" not in hardware.lower()


def _calibration(name: str, profile: HardwareProfile, kernels: Mapping[str, bool]) -> ModelCalibration | None:
    """Measurements of the model with these kernels, or else of the model without kernels, if there are any.

    A path is never a measured model, even if its last component is the name of one.
    """
    if Path(name).exists():
        return None
    return profile.calibration(with_kernels(short_name(name), kernels)) or profile.calibration(short_name(name))


def _model(
    request: Request, hardware: str, calibration: ModelCalibration | None, kernels: dict[str, Any]
) -> tuple[ModelSpec, list[str]]:
    if request.dtype and request.dtype not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype {request.dtype!r} is not one of {', '.join(BYTES_PER_ELEMENT)}; choose one of these")
    if calibration and request.dtype:
        raise ValueError(
            f"the costs of {request.model} on {request.hardware} were measured, in the dtype of that run; --dtype has no effect, "
            f"leave it out"
        )
    if request.frozen_weights == "fp8" and calibration:
        raise ValueError(
            f"the costs of {request.model} on {request.hardware} were measured with weights in bf16; leave --frozen-weights out"
        )
    if MOMENT_BYTES[request.optim] and calibration:
        raise ValueError(
            f"the memory of {request.model} on {request.hardware} was measured with plain AdamW; leave --optim {request.optim} "
            f"out"
        )
    model = replace(
        read_model(request.model, BYTES_PER_ELEMENT[request.dtype or "bfloat16"]),
        # adapters are fp32 themselves
        has_master_weights=not (request.bf16_updates or request.lora_rank),
        moment_bytes=MOMENT_BYTES[request.optim],
    )
    is_plain = calibration is not None and normal_name(calibration.model) == normal_name(short_name(request.model))
    model = replace(model, saves_kv_once=_shares_calls(model, hardware), **({} if is_plain else kernels))
    sizes = Counter(window for window in model.windows if window)
    notes = (
        ["it was measured without kernels, and a run with compile_layers is faster"] if is_plain and any(kernels.values()) else []
    )
    notes += [
        f"{count} of {model.num_layers} layers see only the last {window:,} tokens, and are priced accordingly"
        for window, count in sorted(sizes.items())
    ]
    quantised = _quantised(request, model)
    wide = [own.head_dim for own in model.heads if own.head_dim > _MOST_HEAD_DIM]
    if wide and _is_gpu(hardware):
        notes.append(
            f"{len(wide)} of {model.num_layers} layers have heads of {max(wide)} elements, and FlashAttention takes "
            f"{_MOST_HEAD_DIM}: their attention runs as plain matrices, in many times the seconds that are counted here"
        )
    if num_states := sum(model.states.layers):
        both = num_states + model.num_attending - model.num_layers
        beside = " in place of attention" if both <= 0 else f", {both} of them beside attention"
        notes.append(
            f"{num_states} of {model.num_layers} layers carry states{beside}: seconds are those of products alone, "
            f"bytes are those of transformers' torch code, which runs them"
            + ("" if model.states.tile_tokens > 1 or not model.states.heads else " token by token, in many times these seconds")
        )
    if request.has_images and not request.lora_rank:
        tower = model.tower
        trained = replace(tower, graph_layers=tower.num_layers, trained_parameters=tower.num_parameters)
        quantised = replace(quantised, tower=trained)
    if request.lora_rank:
        if request.lora_experts and not model.experts.num_layers:
            raise ValueError(
                f"--lora-experts puts adapters on the weights of experts, and {request.model} has none; leave it out"
            )
        quantised = replace(quantised, adapters=lora_adapters(quantised, request.lora_rank, request.lora_experts))
    return quantised, notes


def _teacher(request: Request, model: ModelSpec, cluster: ClusterSpec, notes: list[str]) -> CostModel:
    """The costs of the teacher, in the dtype of the model and with its tokens."""
    teacher = read_model(request.teacher, model.bytes_per_element)
    notes.append(
        f"forwards of the teacher {short_name(request.teacher)} run before those of a plan: its weights lie beside the model's, "
        f"and its seconds come from operation counts"
    )
    if teacher.vocab_size != model.vocab_size:
        notes.append(
            f"the teacher has {teacher.vocab_size} tokens and the model {model.vocab_size}; a run needs equal numbers, for "
            f"padding of another size by teacher.resize_token_embeddings({model.vocab_size})"
        )
    return teacher_costs(replace(teacher, vocab_size=model.vocab_size), cluster)


def _shares_calls(model: ModelSpec, hardware: str) -> bool:
    """Whether short documents share calls of attention on hardware of this name, as `runtime.tiles.packs` decides on a GPU."""
    head_dim = model.largest_head_dim
    is_taken = model.bytes_per_element == 2 and head_dim % 8 == 0 and head_dim <= _MOST_HEAD_DIM
    return _is_gpu(hardware) and is_taken and not model.caps_scores and model.index.is_empty


def _kind_of_bits(request: Request, model: ModelSpec) -> str:
    """Returns how `--quantize` packs frozen weights, or those of experts; empty if it does not."""
    if request.quantize not in ("", "none", "nf4", "mxfp4", "fp8"):
        raise ValueError(f"--quantize is {request.quantize!r}; give nf4, for experts also mxfp4, fp8 or none, or leave it out")
    if request.quantize or not request.lora_rank or not model.experts.num_layers:
        return request.quantize.replace("none", "")
    is_spread = bool(request.expert_ranks) or request.layer_weights != "device"
    return "" if is_spread else experts_in(request.model)


def _quantised(request: Request, model: ModelSpec) -> ModelSpec:
    """`model`, with layer weights in four bits or in fp8 if the request asks for that."""
    if request.frozen_weights == "fp8":
        return _in_fp8(request, model)
    kind = _kind_of_bits(request, model)
    if not kind:
        return model
    if not request.lora_rank:
        raise ValueError("--quantize freezes all weights, so nothing would be trained; give --lora-rank too, or leave it out")
    if model.experts.num_layers:
        return replace(model, packed=PackedSpec.of_experts(model, kind))
    if kind != "nf4":
        raise ValueError(f"--quantize {kind} packs experts, and {request.model} has none; give nf4, or leave it out")
    return replace(model, packed=PackedSpec.nf4(model), can_keep_qkv=False, cuts_heads=False)


def _in_fp8(request: Request, model: ModelSpec) -> ModelSpec:
    if request.quantize:
        raise ValueError(f"--frozen-weights fp8 and --quantize {request.quantize} pack the same weights; leave one of them out")
    if not request.lora_rank:
        raise ValueError("--frozen-weights fp8 rounds weights that are not trained; give --lora-rank too, or leave it out")
    if not model.gated_mlp or model.kv_rank or model.query_rank or not model.states.is_empty or model.bytes_per_element != 2:
        raise ValueError(
            f"--frozen-weights fp8 is counted for models in bf16 with attention and gated MLPs like Llama's, and "
            f"{request.model} has others; leave it out"
        )
    return replace(model, packed=PackedSpec.fp8(model), cuts_heads=False)


def _spread(request: Request, model: ModelSpec) -> ModelSpec:
    """The model with experts spread over the ranks that share one copy of sharded parameters, as a run would."""
    experts, ranks = model.experts, request.expert_ranks
    if not experts.num_experts or ranks < 2 or experts.num_experts % ranks or request.num_ranks % ranks:
        raise ValueError(
            f"--expert-ranks is {ranks}; it must be at least 2 and divide the {experts.num_experts} experts of a layer of "
            f"{request.model} and the {request.num_ranks} ranks, or be left out"
        )
    if request.parameters not in ("", "auto", "sharded") or request.shard_ranks not in (0, ranks):
        raise ValueError(
            f"--expert-ranks {ranks} spreads experts over the ranks that share sharded parameters; use --parameters sharded and "
            f"--shard-ranks {ranks}, or leave both out"
        )
    return replace(model, experts=replace(experts, num_ranks=ranks))


def _cluster(request: Request, profile: HardwareProfile, notes: list[str]) -> ClusterSpec:
    if request.num_ranks < 1:
        raise ValueError(f"--gpus is {request.num_ranks}; at least one is needed")
    if request.tokens_per_rank < 0:
        raise ValueError(f"--tokens-per-rank is {request.tokens_per_rank}; give at least 1, or leave it out")
    hardware, ranks_per_node = profile.spec.name, request.ranks_per_node or min(profile.ranks_per_node, request.num_ranks)
    if not request.ranks_per_node and ranks_per_node == 1 < request.num_ranks:
        notes.append(
            f"most servers have one {hardware}, so ranks exchange over the network; give --ranks-per-node for nodes of several"
        )
    if not 1 <= ranks_per_node <= request.num_ranks or request.num_ranks % ranks_per_node:
        raise ValueError(
            f"{request.num_ranks} ranks of {hardware} cannot be divided into nodes of {ranks_per_node}; set --ranks-per-node to "
            f"a divisor of --gpus"
        )
    return ClusterSpec(request.num_ranks, ranks_per_node, profile.spec_on(ranks_per_node))


def _with_network(gbit: float, cluster: ClusterSpec, notes: list[str]) -> ClusterSpec:
    """The cluster with nodes that are linked at `gbit` Gbit/s, of which exchanges reach `USABLE_SHARE`."""
    if gbit < 0:
        raise ValueError(f"--slow-network is {gbit:g}; give the Gbit/s of a node's network, 25 for example")
    nodes = cluster.num_ranks // cluster.ranks_per_node
    notes.append(
        f"nodes are linked at {gbit:g} Gbit/s, shared by {cluster.ranks_per_node} ranks"
        if nodes > 1
        else "--slow-network has no effect on one node"
    )
    inside: dict[str, Any] = {
        name: tuple((ranks, rate) for ranks, rate in getattr(cluster.hardware, name) if ranks <= cluster.ranks_per_node)
        for name in RATE_TABLES
    }
    rate = USABLE_SHARE * gbit * 1e9 / 8 / cluster.ranks_per_node
    return replace(cluster, hardware=replace(cluster.hardware, network_bytes_per_s=rate, **inside))


def _host_bytes(request: Request, cluster: ClusterSpec, notes: list[str]) -> int:
    if request.host_bytes >= 0:
        return request.host_bytes
    if not cluster.hardware.host_bytes and _is_gpu(cluster.hardware.name):
        notes.append("host memory is unknown, so nothing is offloaded; give each rank's share with --host-gib")
    return cluster.hardware.host_bytes


def _measured_or_assumed(
    model: ModelSpec, cluster: ClusterSpec, calibration: ModelCalibration | None, is_expandable: bool
) -> tuple[CostCoefficients, DeviceMemory]:
    device_bytes = cluster.hardware.device_bytes
    if calibration is None:
        return default_coefficients(model, cluster), DeviceMemory.by_formula(model, device_bytes, is_expandable)
    memory = DeviceMemory(
        model,
        device_bytes,
        calibration.usable_bytes,
        calibration.saved_bytes_per_token,
        calibration.state_bytes_per_parameter,
    )
    return with_adapters(calibration.coefficients, model), memory


def _as_parameters(text: str) -> Parameters:
    names: tuple[Parameters, ...] = get_args(Parameters)
    for name in names:
        if name == text:
            return name
    raise ValueError(f"parameters {text!r} is not one of {', '.join(names)}; choose one of these")


def _check_layers_leave(memory: DeviceMemory, placement: Placement) -> None:
    """Raise ValueError if shards of layers cannot lie on the host while a step computes."""
    if not gathers_every_pass(placement.parameters) or placement.shard_ranks == 1:
        raise ValueError(
            f"--layer-weights host needs parameters that two or more ranks share, sharded in every forward and backward, not "
            f"{placement.parameters} ones over {placement.shard_ranks} rank(s); add --parameters sharded and ranks, or leave it "
            f"out"
        )
    if memory.is_measured:
        raise ValueError(
            "--layer-weights host: the model's memory was measured with all weights on the device; leave it out, or name another "
            "hardware"
        )
    if not can_leave(memory.model):
        raise ValueError(
            "--layer-weights host moves neither weights in four bits or fp8 nor experts that are spread; leave it out"
        )


def _check_fits(scenario: Scenario) -> None:
    """Raises ValueError with numbers and remedies if the states leave no room for a single token."""
    if scenario.tokens_per_rank >= 1:
        return
    memory, placement = scenario.memory, scenario.placement
    states = memory.state_bytes(*placement.sharing)
    over = f" over {placement.shard_ranks} ranks" if placement.shard_ranks > 1 else ""
    stages = f" of {len(placement.ranges)} stages" if placement.is_pipeline else ""
    resting = memory.resting_bytes(*placement.sharing)
    if resting > memory.usable_bytes:
        raise ValueError(
            f"{scenario.model_name} does not fit: between steps, weights of layers come back from the host, and states then "
            f"take {resting / _GIB:.1f} GiB on each rank, but only {memory.usable_bytes / _GIB:.1f} are usable; use more ranks"
        )
    found = fitting_remedies(memory, placement, 1, scenario.may_recompute)
    most = max((one.longest_tokens for one in found), default=0)
    found = tuple(one for one in found if one.longest_tokens * _MOST_BETTER >= most)
    advice = "".join(f"\n  {one.change} (up to {one.longest_tokens:,} tokens)" for one in found)
    device = scenario.costs.cluster.hardware.name
    raise ValueError(
        f"{scenario.model_name} does not fit: weights, gradients and optimizer states ({placement.parameters}{over}) take "
        f"{states / _GIB:.1f} GiB on each rank{stages}, and a token {memory.saved_bytes_per_token / 2**20:.2f} MiB, but only "
        f"{memory.usable_bytes / _GIB:.1f} of the {memory.device_bytes / _GIB:.1f} GiB of {device} are usable. Possible changes:"
        f"{advice or ' more than twice the ranks, larger devices, or a smaller model'}"
    )

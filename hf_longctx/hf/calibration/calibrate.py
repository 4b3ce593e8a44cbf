"""Calibration on one rank: builds a few layers of a model, measures them, fits the cost model, and writes a machine profile.

`hf-longctx calibrate` runs this on every rank and prints the result. Weights are random, shapes those of a named model or a
config.json, and nothing is downloaded. A few layers are enough: for a deeper model, one without decoder layers (embeddings, head
and loss) is measured too, and the whole model costs that plus the number of layers times the cost per layer.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from hf_longctx.hf.models.adapters import hidden_dtype
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.kernels import compiled_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import cluster_spec, model_spec, states_of, tokens_that_fit, windows_of
from hf_longctx.hf.models.states import scan_kernels
from hf_longctx.hf.ranks.agreement import control_group, gather_objects
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.models import model_problems
from hf_longctx.plan.core.settings import USABLE_SHARE, ClusterSpec, HardwareSpec, default_degrees
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.cost.catalog import named_model, no_model, spec_name
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, default_coefficients, num_tiles
from hf_longctx.plan.cost.fitting import (
    ChunkSample,
    Fit,
    PassSample,
    Residuals,
    fit_coefficients,
    hardware_rates,
    relative_errors,
    whole_model_costs,
)
from hf_longctx.plan.cost.profiles import HardwareProfile, ModelCalibration
from hf_longctx.plan.cost.traffic import group_shapes, mean_traffic
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.model.layers import with_states
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.measure import (
    ChunkBench,
    Probe,
    Timing,
    copy_rate,
    exchange_rates,
    neighbour_rate,
    probe_grid,
    ring_rates,
    target_seconds,
)
from hf_longctx.runtime.process_groups import GroupPool

# most layers to measure; a model with at most as many is measured as a whole
FEW_LAYERS = 6


def model_config(name: str) -> PretrainedConfig:
    """Makes the config for a catalogue name (a Llama with its shapes), a config.json, or a folder with one; "": a small Llama.

    Raises ValueError for anything else, and for a config that transformers does not support.
    """
    path = Path(name) / "config.json" if name and Path(name).is_dir() else Path(name)
    if name and path.is_file():
        try:
            return AutoConfig.for_model(**json.loads(path.read_text()))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} is not the config.json of a causal language model ({error}); give one of a class that "
                f"docs/models.md calls exact"
            ) from None
    if not name:
        return shaped_config(_SMALL)
    try:
        spec = named_model(name)
    except ValueError:
        raise ValueError(no_model(name)) from None
    if not spec.gated_mlp or spec.learned_positions or not spec.states.is_empty or spec.norms_results:
        raise ValueError(
            f"model {name!r} does not have the layers of a Llama, so it cannot be built from its shapes; give its config.json"
        )
    return shaped_config(spec)


# default model: a chunk takes a few milliseconds on one core, with enough layers to separate costs of attention and matrices
_SMALL = ModelSpec(4, 256, 704, 8, 4, 32, vocab_size=1024, max_positions=8192)


def shaped_config(spec: ModelSpec) -> PretrainedConfig:
    """Makes the config of a Llama with the shapes of `spec`, or of a Qwen3 (with its windows) if Q and K have norms."""
    sizes = {window for window in spec.windows if window is not None}
    if len(sizes) > spec.qk_norms:
        raise ValueError(f"layers with windows of {sorted(sizes)} cannot be built from these shapes; give a config.json instead")
    config_class = Qwen3Config if spec.qk_norms else LlamaConfig
    windows: dict[str, Any] = {}
    if sizes:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
        windows = {"use_sliding_window": True, "sliding_window": sizes.pop(), "layer_types": kinds}
    return config_class(
        **windows,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied_embeddings,
    )


def build_model(config: PretrainedConfig, device: torch.device, precision: str) -> PreTrainedModel:
    """Builds a model with random weights, patched to run plans.

    Raises ValueError for a model whose attention would be silently wrong.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    if getattr(config, "output_router_logits", False):
        # the experts' balance loss is not part of a chunk's cost
        config.output_router_logits = False
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if problems := model_problems(ModelFacts.of(model)):
        raise ValueError("; ".join(problems))
    patch_model(model)
    if precision == "autocast":
        plain: Any = model
        plain.forward = torch.autocast(device.type, dtype=torch.bfloat16)(plain.forward)
    return model.train()


def few_layers(config: PretrainedConfig) -> int:
    """Returns the number of layers to measure: at most `FEW_LAYERS`, with the model's share of attention layers if possible."""
    num_layers, types = config.num_hidden_layers, list(getattr(config, "layer_types", None) or ())
    counts = range(min(num_layers, FEW_LAYERS), 1, -1)
    alike = (
        n
        for n in counts
        if len(types) == num_layers and all(types[:n].count(kind) * num_layers == types.count(kind) * n for kind in set(types))
    )
    return next(alike, counts.start)


def set_layers(config: PretrainedConfig, num_layers: int) -> None:
    """Shortens `config`, in place, to its first `num_layers` decoder layers."""
    config.num_hidden_layers = num_layers
    field = config.attribute_map.get("layer_types", "layer_types")
    # some configs, such as Bamba's, derive types from the number of layers
    if not isinstance(getattr(type(config), field, None), property) and getattr(config, field, None) is not None:
        setattr(config, field, getattr(config, field)[:num_layers])


# a chunk with fewer runs has noisy timings, which the report mentions
FEW_RUNS = 4
_TIMEOUT_S = 60.0
# longest wait for a rank that compiles more slowly
_COMPILE_S = 300.0
# tokens of the chunk for compiling the kernels of every size
_COMPILED_TOKENS = 16
# longest wait of a refusing rank for the others to refuse
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Describes what to measure, and until when."""

    # a name in the catalogue, a config.json, or a folder with one; "" means a small Llama
    model: str = ""
    # "float32", "bfloat16" or "autocast"; "" means float32 on CPU, and float32 weights under bf16 autocast on CUDA
    precision: str = ""
    # wall-clock time (`time.time()`) at which to stop; ranks that start late measure less
    stop_at_s: float = 0.0
    # counted runs per chunk; fewer leave time for longer chunks (0: as many as a noisy machine needs)
    repeats: int = 0
    # run norms, gated MLPs and rotary embeddings as kernels, like the run setting of this name
    compile_layers: bool | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Timings of the few layers, the fit to them, and the resulting profile of the whole model.

    costs: cost model of the few layers, with fitted coefficients. held_out: errors on held-out timings, forward plus backward.
    """

    costs: CostModel
    timings: tuple[Timing, ...]
    fit: Fit
    held_out: Residuals
    profile: HardwareProfile


def calibrate(request: CalibrationRequest) -> Calibration:
    """Measures on this rank together with all other ranks of the launch; every rank returns the same result.

    Raises ValueError for a model that cannot be built or run.
    """
    launch = LaunchEnvironment.read()
    has_joined = dist.is_initialized()
    device = _start_rank(launch)
    try:
        return _calibrate(request, device, launch.num_ranks, launch.ranks_per_node)
    except ValueError:
        if launch.num_ranks > 1 and dist.get_backend() == "gloo":
            # a rank that ends at once looks lost to those that still join
            with suppress(RuntimeError):
                dist.monitored_barrier(timeout=datetime.timedelta(seconds=_LEAVE_S))
        raise
    finally:
        if dist.is_initialized() and not has_joined:
            dist.destroy_process_group()


def _start_rank(launch: LaunchEnvironment) -> torch.device:
    """Joins the default process group, unless already done, and returns the rank's device."""
    is_cuda = torch.cuda.is_available()
    if launch.num_ranks > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if is_cuda else "gloo", timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    if not is_cuda:
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank % launch.ranks_per_node)
    torch.cuda.set_device(device)
    return device


def _calibrate(request: CalibrationRequest, device: torch.device, num_ranks: int, ranks_per_node: int) -> Calibration:
    precision = request.precision or ("autocast" if device.type == "cuda" else "float32")
    config = model_config(request.model)
    few = copy.deepcopy(config)
    set_layers(few, few_layers(config))
    model = build_model(few, device, precision)
    control, started_s = control_group(_COMPILE_S, _COMPILE_S), time.monotonic()
    fused = compiled_layers(model, device, precision == "autocast", request.compile_layers, control)
    dtype = torch.bfloat16 if precision == "autocast" else hidden_dtype(model)
    kernels: dict[str, Any] = fused.covered(model) | scan_kernels(model, states_of(config), device, dtype)
    spec = replace(model_spec(model, precision == "autocast"), **kernels)
    cluster = cluster_spec(device, num_ranks, ranks_per_node)
    degrees = default_degrees(num_ranks, spec.num_heads)
    pool = GroupPool(degrees, _TIMEOUT_S, control)
    bench = _bench(model, spec, pool, device, math.inf, request.repeats)
    if fused.maker:
        # only the head is measured after this model, so kernels stay bound
        fused.bind(model)
        bench.run(Probe((_COMPILED_TOKENS,)))
    # time for compiling does not count
    compiled_s = max(gather_objects(time.monotonic() - started_s, control)) if fused.maker else 0.0
    stop_at_s = bench.stop_at_s = request.stop_at_s + compiled_s + time.monotonic() - time.time()
    cluster = replace(cluster, hardware=measure_rates(pool, degrees, cluster, device))
    head_costs = None
    if config.num_hidden_layers > few.num_hidden_layers:
        head_costs = _measure_head(config, device, precision, pool, cluster, stop_at_s)
    timings = _measure_chunks(bench, spec, cluster, degrees)
    source = f"calibrated {datetime.date.today()} on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    step_s = bench.reduction_s()
    fit = fit_coefficients(chunk_samples(timings, costs, False), step_s, source, costs.coefficients)
    costs = replace(costs, coefficients=fit.coefficients)
    held_out = Residuals.of(relative_errors(chunk_samples(timings, costs, True), fit.coefficients))
    states = states_of(config)
    whole_spec = replace(
        spec, num_layers=config.num_hidden_layers, windows=with_states(windows_of(config), states), states=states
    )
    whole = whole_model_costs(fit.coefficients, head_costs, spec, whole_spec)
    profile = describe(whole_spec, cluster, whole, residual_table(timings, costs), source)
    return Calibration(costs, timings, fit, held_out, profile)


def _bench(
    model: PreTrainedModel, spec: ModelSpec, pool: GroupPool, device: torch.device, stop_at_s: float, repeats: int = 0
) -> ChunkBench:
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, device)
    return ChunkBench(executor, spec.num_layers, spec.vocab_size, stop_at_s, repeats)


def measure_rates(pool: GroupPool, degrees: Sequence[int], cluster: ClusterSpec, device: torch.device) -> HardwareSpec:
    """Measures rates of plain copies and exchanges and returns the cluster with them.

    A single rank cannot measure exchanges, so their rates then stay guesses.
    """
    hardware = replace(cluster.hardware, name=_device_name(device), copy_bytes_per_s=copy_rate(pool, device))
    if device.type == "cuda":
        hardware = replace(hardware, host_bytes=_machine_bytes() // cluster.ranks_per_node)
    if pool.num_ranks == 1:
        return hardware
    exchanges = exchange_rates(pool, [degree for degree in degrees if degree > 1], device)
    neighbour = neighbour_rate(pool, device)
    # the ranks of a node, and all ranks of several nodes
    counts = dict.fromkeys(min(count, pool.num_ranks) for count in (cluster.ranks_per_node, pool.num_ranks))
    of_groups = [count for count in counts if count > 1 and count in degrees]
    gathers, scatters = ring_rates(pool, of_groups, device, cluster.ranks_per_node)
    # with several nodes, the ring over all ranks is as slow as its hop between nodes
    inside = [rate for rate in exchanges if rate.num_ranks <= cluster.ranks_per_node]
    one_node = cluster.ranks_per_node >= cluster.num_ranks
    return replace(
        hardware,
        link_bytes_per_s=neighbour if one_node else inside[-1].bytes_per_s if inside else hardware.link_bytes_per_s,
        network_bytes_per_s=min(hardware.network_bytes_per_s, neighbour) if one_node else neighbour,
        message_s=min(rate.message_s for rate in exchanges),
        exchange_bytes_per_s=tuple((rate.num_ranks, rate.bytes_per_s) for rate in exchanges),
        gather_bytes_per_s=gathers,
        scatter_bytes_per_s=scatters,
    )


def _measure_chunks(bench: ChunkBench, spec: ModelSpec, cluster: ClusterSpec, degrees: Sequence[int]) -> tuple[Timing, ...]:
    """Measures a grid of chunks, up to the largest size that time and memory allow."""
    shapes = [shape for degree in degrees if degree > 1 for shape in group_shapes(degree, "auto", spec, cluster)]
    budget_s = bench.stop_at_s - time.monotonic()
    limit = min(gather_objects(tokens_that_fit(spec, cluster), bench.pool.control))
    num_probes = len(probe_grid(2**20, 2**20, shapes))
    # count two probes more: finding the largest chunk takes time too
    target_s = min(gather_objects(target_seconds(num_probes + 2, budget_s, bench.num_repeats), bench.pool.control))
    max_tokens = bench.largest_tokens(min(limit, spec.max_positions), target_s)
    return bench.measure(probe_grid(max_tokens, spec.max_positions, shapes))


def _measure_head(
    config: PretrainedConfig, device: torch.device, precision: str, pool: GroupPool, cluster: ClusterSpec, stop_at_s: float
) -> CostCoefficients:
    """Fits coefficients of the model without decoder layers, in a fifth of the remaining time."""
    bare = copy.deepcopy(config)
    set_layers(bare, 0)
    model = build_model(bare, device, precision)
    spec = model_spec(model, precision == "autocast")
    now_s = time.monotonic()
    bench = _bench(model, spec, pool, device, now_s + (stop_at_s - now_s) / 5)
    timings = _measure_chunks(bench, spec, cluster, (1,))
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    return fit_coefficients(chunk_samples(timings, costs, None, has_attention=False), 0.0, "head").coefficients


def chunk_samples(
    timings: Sequence[Timing], costs: CostModel, is_held_out: bool | None, has_attention: bool = True
) -> list[ChunkSample]:
    """Pairs each timing with its chunk's work as counted by `costs`; held-out ones, the others, or both (None)."""

    pairs = costs.attention_pairs()

    def sample(timing: Timing, is_backward: bool) -> PassSample:
        chunk, shape = timing.probe.chunk, timing.probe.shape
        tokens, num_documents = float(max(chunk.num_tokens, shape.degree)), len(chunk.spans)
        traffic = mean_traffic(costs.model, costs.cluster, shape, tokens, is_backward, num_documents=num_documents)
        num_pairs = pairs.of_chunk(chunk) if has_attention else 0.0
        measured_s = timing.backward_s if is_backward else timing.forward_s
        seconds = costs.without_overlap(measured_s, chunk, shape, is_backward)
        return PassSample(chunk.num_tokens, num_pairs, shape.degree, traffic, seconds, num_tiles(shape, num_documents))

    chosen = [timing for timing in timings if is_held_out is None or timing.probe.is_held_out == is_held_out]
    return [ChunkSample(sample(timing, False), sample(timing, True)) for timing in chosen]


def describe(
    spec: ModelSpec,
    cluster: ClusterSpec,
    coefficients: CostCoefficients,
    residuals: tuple[tuple[str, float], ...],
    source: str,
) -> HardwareProfile:
    """Makes the profile: hardware rates derived from the model's passes, and the model's own coefficients."""
    machine = f"{cluster.hardware.name}, torch {torch.__version__}"
    hardware = replace(hardware_rates(spec, cluster, coefficients), source=f"{source}, {machine}")
    calibration = ModelCalibration(
        model=spec_name(spec),
        coefficients=coefficients,
        saved_bytes_per_token=saved_token_bytes(spec),
        usable_bytes=int(USABLE_SHARE * hardware.device_bytes),
    )
    prose = (
        f"hf-longctx calibrate, {datetime.date.today()}: {machine}, {cluster.num_ranks} ranks, {cluster.ranks_per_node} on a "
        f"node; chunks of {calibration.model}; copies {'between device and host' if hardware.host_bytes else 'inside memory'}; "
        f"device_bytes and saved_bytes_per_token are not measured"
    )
    found = HardwareProfile(hardware, (calibration,), residuals, prose)
    # ranks of one node need not be all that it has
    fewest = found.ranks_per_node if cluster.num_ranks <= cluster.ranks_per_node else 1
    return replace(found, ranks_per_node=max(fewest, cluster.ranks_per_node))


def residual_table(timings: Sequence[Timing], costs: CostModel) -> tuple[tuple[str, float], ...]:
    """Returns mean relative errors by group (one rank, or method and degree), pass, and fitted or held out."""
    table: dict[str, list[float]] = {}
    for timing, (sample,) in ((t, chunk_samples([t], costs, None)) for t in timings):
        errors = relative_errors([sample], costs.coefficients)
        for name, error in zip(("forward", "backward"), errors, strict=True):
            group = "held out" if timing.probe.is_held_out else "fitted"
            table.setdefault(f"{group}, {shape_text(timing.probe.shape)}, {name}", []).append(error)
            table.setdefault(group, []).append(error)
    return tuple((name, Residuals.of(errors).mean) for name, errors in sorted(table.items()))


def shape_text(shape: GroupShape) -> str:
    """Returns the name of a group in tables, for example "ring of 2"."""
    return "1 rank" if shape.degree == 1 else f"{shape.method} of {shape.degree}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) a rank"


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def calibration_text(calibration: Calibration) -> str:
    """Formats the table of all chunks, the mean errors, and the rates."""
    coefficients = calibration.costs.coefficients
    samples = chunk_samples(calibration.timings, calibration.costs, None)
    lines = [
        f"{'':9s}{'group':>13s}{'tokens':>8s}{'longest':>8s}{'runs':>5s}   forward ms: measured predicted error   backward ms"
    ]
    for timing, sample in zip(calibration.timings, samples, strict=True):
        probe, cells = timing.probe, []
        for one_pass, costs in ((sample.forward, coefficients.forward), (sample.backward, coefficients.backward)):
            predicted_s = one_pass.predicted_s(costs)
            error = predicted_s / one_pass.seconds - 1
            cells.append(f"{one_pass.seconds * 1e3:12.2f}{predicted_s * 1e3:11.2f}{error:+7.0%}")
        what = "held out" if probe.is_held_out else ""
        tokens = f"{sum(probe.lengths):8d}{max(probe.lengths):8d}{timing.num_repeats:5d}"
        lines.append(f"{what:9s}{shape_text(probe.shape):>13s}{tokens}{cells[0]}{cells[1]}")
    lines += [f"mean error {error:6.1%}  {name}" for name, error in calibration.profile.residuals]
    lines.append(_rates_text(calibration.profile.spec, calibration.profile.models[0]))
    held_out = calibration.held_out
    if (num_runs := min(timing.num_repeats for timing in calibration.timings)) < FEW_RUNS:
        lines.append(f"some chunks ran only {num_runs} time(s); for steadier numbers give more --seconds, or a smaller model")
    lines += _not_found(calibration.costs)
    lines.append(f"held-out chunks: mean absolute error {held_out.mean:.1%}, median {held_out.median:.1%}")
    return "\n".join(lines)


def _not_found(costs: CostModel) -> list[str]:
    """Returns one line for every coefficient that should be positive but was fitted as zero."""
    terms = ("pair_s", "token_s", *(("link_byte_s",) if costs.cluster.num_ranks > 1 else ()))
    passes = (("forward", costs.coefficients.forward), ("backward", costs.coefficients.backward))
    return [
        f"{name} {term} came out as zero: the chunks were too short or too noisy; give more --seconds, or a quieter machine"
        for name, found in passes
        for term in terms
        if not getattr(found, term)
    ]


def _rates_text(spec: HardwareSpec, model: ModelCalibration) -> str:
    tables = spec.exchange_bytes_per_s, spec.gather_bytes_per_s, spec.scatter_bytes_per_s
    exchanges, gathers, scatters = (
        ", ".join(f"{ranks} ranks {rate / 1e9:.3g}" for ranks, rate in table) or "-" for table in tables
    )
    passes = ((name, getattr(model.coefficients, name).rates) for name in ("forward", "backward"))
    coefficients = "\n".join(f"  {name:9s}" + " ".join(f"{value:9.3g}" for value in values) for name, values in passes)
    return (
        f"{model.model}: seconds per pair, token, chunk, message, link byte, network byte, tile\n{coefficients}\n"
        f"rates: matrices {spec.matmul_flops_per_s / 1e9:.4g} GFLOP/s, attention {spec.attention_flops_per_s / 1e9:.4g} GFLOP/s, "
        f"links {spec.link_bytes_per_s / 1e9:.3g} GB/s, all-to-all ({exchanges}) GB/s, "
        f"all-gather ({gathers}) GB/s, sums of gradients ({scatters}) GB/s, copies {spec.copy_bytes_per_s / 1e9:.3g} GB/s, "
        f"reduction {model.coefficients.step_s * 1e3:.3g} ms"
    )

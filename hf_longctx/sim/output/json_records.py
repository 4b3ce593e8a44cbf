"""Converts forecasts and simulations to JSON records, and reads plan and cost model back.

The command line prints the records (--json) and reads them again for `hf-longctx simulate` and `hf-longctx show`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hf_longctx._version import __version__
from hf_longctx.plan.core.serialize import parse_json, plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import GROUP_METHODS, ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import PARAMETERS, StepPlan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.cost.profiles import RATE_TABLES
from hf_longctx.plan.model.config import ExpertSpec, HeadSizes
from hf_longctx.plan.model.layers import IndexSpec
from hf_longctx.plan.model.mixers import StateSpec
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec, PackedSpec
from hf_longctx.plan.model.towers import TowerSpec
from hf_longctx.plan.setup import DeviceMemory, Remedy, rooms
from hf_longctx.sim.execution import Execution, Price
from hf_longctx.sim.forecast import Forecast, StepForecast
from hf_longctx.sim.memory_use import memory_use, peak_bytes
from hf_longctx.sim.output.text import length_bins
from hf_longctx.sim.rivals import Choice
from hf_longctx.sim.stages import stage_rows

# annotation of a field -> types that its JSON value may have
_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}

# fields of `DeviceMemory` that are those of the cost model
_OF_COSTS = ("model", "teacher")


def forecast_record(forecast: Forecast, price: Price | None = None) -> dict[str, Any]:
    """Returns the forecast as plain data; "plan", "estimate" and "baselines" are for the first step, "mean" for all steps."""
    scenario, first = forecast.scenario, forecast.steps[0] if forecast.steps else None
    return {
        "hf_longctx": __version__,
        "model": scenario.model_name,
        "hardware": scenario.hardware_name,
        "device": scenario.costs.cluster.hardware.name,
        "num_ranks": scenario.costs.cluster.num_ranks,
        "ranks_per_node": scenario.costs.cluster.ranks_per_node,
        "num_stages": scenario.setup.num_stages,
        "parameters": scenario.placement.parameters,
        "shard_ranks": scenario.placement.shard_ranks,
        "method": scenario.costs.method,
        "degrees": list(scenario.placement.degrees),
        "tokens_per_rank": scenario.tokens_per_rank,
        "kept_tokens_per_rank": scenario.kept_tokens,
        "planned_context_tokens": scenario.longest_tokens,
        "planned_context_s": forecast.at_limit_s,
        "usd_per_gpu_hour": None if price is None else price.usd_per_hour,
        "longest_context_tokens": forecast.longest_row.tokens,
        "longest_context_s": forecast.longest_row.step_s,
        "longest_context": [dataclasses.asdict(row) for row in forecast.longest],
        "host_bytes": scenario.memory.host_bytes,
        "max_positions": scenario.costs.model.max_positions,
        "longer_context": [_remedy_record(remedy) for remedy in forecast.remedies],
        "memory": _memory_record(forecast),
        "memory_use": dataclasses.asdict(first.memory_use) if first else None,
        "placements": [dataclasses.asdict(room) for room in rooms(scenario.memory, scenario.placement)],
        "notes": list(scenario.notes),
        "workload": _workload_record(forecast),
        "estimate": dataclasses.asdict(first.plan.estimate) if first else None,
        "baselines": [_choice_record(choice) for choice in first.baselines] if first else [],
        "alternatives": [_choice_record(choice) for choice in forecast.alternatives],
        "stages": [dataclasses.asdict(row) for row in stage_rows(forecast.stages, scenario.placement.num_ranks)],
        "ablation": [dataclasses.asdict(row) for row in forecast.ablation],
        "mean": _mean_record(forecast) if first else None,
        "steps": [_step_record(step) for step in forecast.steps],
        "histogram": [
            {"low": one.low, "high": one.high, "num_sequences": one.num_sequences, "num_tokens": one.num_tokens}
            | {"sequences_by_degree": {str(degree): count for degree, count, _ in one.by_degree}}
            for one in length_bins(forecast)
        ],
        "cost_model": cost_model_record(scenario.costs, scenario.memory),
        "plan": json.loads(plan_to_json(first.plan)) if first else None,
    }


def execution_record(plan: StepPlan, execution: Execution, costs: CostModel, memory: DeviceMemory) -> dict[str, Any]:
    """Returns seconds and shares of a simulated step, and seconds and peak bytes of every rank."""
    shares = {name.replace("_s", "_share"): execution.share(name) for name in ("compute_s", "exchange_s", "idle_s")}
    peaks = peak_bytes(plan, execution, costs, memory)
    ranks = [
        dataclasses.asdict(rank) | {"busy_s": rank.busy_s, "peak_bytes": on_device, "host_bytes": on_host}
        for rank, on_device, on_host in zip(execution.ranks, peaks, execution.host_bytes, strict=True)
    ]
    use = dataclasses.asdict(memory_use(plan, execution, costs, memory))
    seconds = {"step_s": execution.step_s, "once_s": execution.once_s, "weights": _weights_record(execution)}
    return {**seconds, **shares, "memory_use": use, "ranks": ranks}


def _weights_record(of: Execution | Forecast) -> dict[str, float]:
    """Returns seconds of gathers, sums of gradients and a teacher, which `step_s` excludes, and of a step with them."""
    least_s, most_s = of.step_bounds_s
    weights = of.weights
    parts = {"gather_s": weights.gather_s, "sum_s": weights.sum_s, "update_s": weights.update_s}
    parts |= {"away_s": weights.away_s, "copies_s": weights.copies_s, "teacher_s": weights.teacher_s}
    return {**parts, "least_step_s": least_s, "most_step_s": most_s}


def _memory_record(forecast: Forecast) -> dict[str, Any]:
    memory, placement = forecast.scenario.memory, forecast.scenario.placement
    states = memory.state_bytes(*placement.sharing)
    activations = forecast.activation_bytes
    return {
        "device_bytes": memory.device_bytes,
        "usable_bytes": memory.usable_bytes,
        "state_bytes": states,
        "saved_bytes_per_token": memory.saved_bytes_per_token,
        "peak_tokens": forecast.peak_tokens,
        "activation_peak_bytes": activations,
        "free_bytes": memory.usable_bytes - states - activations,
    }


def _remedy_record(remedy: Remedy) -> dict[str, Any]:
    return {"change": remedy.change, "tokens_per_rank": remedy.tokens_per_rank, "longest_tokens": remedy.longest_tokens}


def _workload_record(forecast: Forecast) -> dict[str, Any] | None:
    workload = forecast.workload
    if workload is None:
        return None
    return {
        "source": workload.source,
        "num_sequences": workload.num_sequences,
        "num_tokens": workload.num_tokens,
        "longest": workload.longest,
        "median": workload.quantile(0.5),
        "limit": workload.limit,
        "num_dropped": workload.num_dropped,
        "global_batch": len(forecast.steps[0].plan.lengths),
        "seed": forecast.seed,
    }


def _mean_record(forecast: Forecast) -> dict[str, Any]:
    return {
        "step_s": forecast.step_s,
        "lower_bound_s": forecast.lower_bound_s,
        "gap": forecast.gap,
        "weights": _weights_record(forecast),
        "tokens_per_s": forecast.tokens_per_s,
        "compute_share": forecast.share("compute_s"),
        "exchange_share": forecast.share("exchange_s"),
        "idle_share": forecast.share("idle_s"),
        "baselines": [_choice_record(choice) for choice in forecast.baselines],
        "degrees": [dataclasses.asdict(use) for use in forecast.degrees_used],
    }


def _step_record(step: StepForecast) -> dict[str, Any]:
    estimate = step.plan.estimate
    return {
        "num_sequences": len(step.plan.lengths),
        "num_tokens": sum(step.plan.lengths),
        "step_s": step.execution.step_s,
        "weights": _weights_record(step.execution),
        "lower_bound_s": estimate.lower_bound_s,
        "solve_s": estimate.solve_s,
        "layout": step.plan.folded_layout,
        "baselines": {choice.name: choice.step_s if choice.is_possible else None for choice in step.baselines},
    }


def _choice_record(choice: Choice) -> dict[str, Any]:
    return dataclasses.asdict(choice) | {"step_s": choice.step_s if choice.is_possible else None}


def cost_model_record(costs: CostModel, memory: DeviceMemory) -> dict[str, Any]:
    """Returns cost model and device memory as plain data, so that `simulate` needs only the file."""
    return {
        **_costs_record(costs),
        "memory": {name: value for name, value in dataclasses.asdict(memory).items() if name not in _OF_COSTS},
    }


def _costs_record(costs: CostModel) -> dict[str, Any]:
    record = dataclasses.asdict(dataclasses.replace(costs, teacher=None))
    # a plan has its images itself
    del record["teacher"], record["media"]
    return record if costs.teacher is None else {**record, "teacher": _costs_record(costs.teacher)}


@dataclasses.dataclass(frozen=True, slots=True)
class PlanFile:
    """A saved plan. A file of `hf-longctx plan` also has names and a cost model; for a bare plan they are empty and None."""

    plan: StepPlan
    model_name: str = ""
    hardware_name: str = ""
    costs: CostModel | None = None
    memory: DeviceMemory | None = None


def read_plan_file(text: str) -> PlanFile:
    """Reads a plan from `plan_to_json`, or a forecast with its cost model; raises ValueError naming a wrong field."""
    data = parse_json(text, "the file")
    if not isinstance(data, Mapping) or "cost_model" not in data:
        return PlanFile(plan_from_json(text))
    if data.get("plan") is None:
        raise ValueError("the file is a forecast without a plan, because it was made without --lengths; make one with --lengths")
    plan = plan_from_json(json.dumps(data["plan"]))
    record = dict(_object(data["cost_model"], "cost_model"))
    of_memory = _fields(DeviceMemory, record.pop("memory", None), "cost_model.memory", leave=_OF_COSTS)
    costs = _cost_model(record)
    memory = DeviceMemory(costs.model, **of_memory, teacher=None if costs.teacher is None else costs.teacher.model)
    return PlanFile(plan, str(data.get("model", "")), str(data.get("hardware", "")), costs, memory)


def _model(data: Any) -> ModelSpec:
    shapes = _fields(ModelSpec, data, "cost_model.model")
    adapters = AdapterSpec(**_fields(AdapterSpec, shapes["adapters"], "cost_model.model.adapters"))
    packed = PackedSpec(**_fields(PackedSpec, shapes["packed"], "cost_model.model.packed"))
    experts = ExpertSpec(**_fields(ExpertSpec, shapes["experts"], "cost_model.model.experts"))
    index = IndexSpec(**_fields(IndexSpec, shapes["index"], "cost_model.model.index"))
    of_states = _fields(StateSpec, shapes["states"], "cost_model.model.states")
    of_states |= {name: tuple(value) for name, value in of_states.items() if isinstance(value, list)}
    states = StateSpec(**of_states)
    parts = {"adapters": adapters, "packed": packed, "windows": tuple(shapes["windows"]), "states": states}
    parts |= {"tower": TowerSpec(**_fields(TowerSpec, shapes["tower"], "cost_model.model.tower"))}
    parts |= {"experts": experts, "index": index, "heads": tuple(HeadSizes(*own) for own in shapes["heads"])}
    return ModelSpec(**shapes | parts)


def _cost_model(data: Any) -> CostModel:
    record = dict(_object(data, "cost_model"))
    taught_by = record.pop("teacher", None)
    teacher = None if taught_by is None else _cost_model(taught_by)
    model = _model(record.get("model"))
    values = _fields(CostModel, record, "cost_model", leave=("teacher", "media"))
    cluster = _fields(ClusterSpec, record["cluster"], "cost_model.cluster")
    hardware = _fields(HardwareSpec, cluster["hardware"], "cost_model.cluster.hardware")
    for name in RATE_TABLES:
        hardware[name] = tuple((int(ranks), float(rate)) for ranks, rate in hardware[name])
    coefficients = _fields(CostCoefficients, record["coefficients"], "cost_model.coefficients")
    for name in ("forward", "backward"):
        coefficients[name] = PassCoefficients(**_fields(PassCoefficients, coefficients[name], f"cost_model.coefficients.{name}"))
    for name, allowed in (("method", GROUP_METHODS), ("parameters", PARAMETERS)):
        if values[name] not in allowed:
            raise ValueError(f"cost_model.{name} is {values[name]!r}; it must be one of {', '.join(allowed)}")
    cluster["hardware"] = HardwareSpec(**hardware)
    return CostModel(
        **values | {"model": model, "cluster": ClusterSpec(**cluster), "coefficients": CostCoefficients(**coefficients)},
        teacher=teacher,
    )


def _fields(kind: type, data: Any, path: str, leave: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the fields of `data` for a `kind`, except `leave`; ValueError if one is missing, unknown or of a wrong type."""
    record = dict(_object(data, path))
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind) if field.name not in leave}
    lists = {field.name for field in dataclasses.fields(kind) if isinstance(field.default, tuple)}
    for name in (*fields, *record):
        if name not in record or name not in fields:
            problem = "missing" if name not in record else "unknown"
            raise ValueError(f"{path}.{name} is {problem}; write the file again with hf-longctx plan --json")
        if (kinds := _PLAIN.get(fields[name])) is not None and type(record[name]) not in kinds:
            raise ValueError(f"{path}.{name} is {record[name]!r}; a value of type {fields[name]} is needed")
        if name in lists and not isinstance(record[name], list):
            raise ValueError(f"{path}.{name} is {record[name]!r}; a list is needed")
    return record


def _object(data: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{path} is {data!r}; an object is needed")
    return data

"""Summarises a forecast in some ten lines: the longest sequence, time and price of a step, and what to do next.

Called by `hf-longctx plan`; `text.py` writes all tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hf_longctx.plan.core.messages import counted, duration
from hf_longctx.plan.core.settings import default_degrees
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.setup import DeviceMemory, Placement
from hf_longctx.sim.execution import Price
from hf_longctx.sim.forecast import Forecast
from hf_longctx.sim.scenario import Scenario, optimizer_of, slow_links

_GIB = 2**30
_MOST_LONGER = 3
# largest relative difference of seconds that are called equal
_EQUAL = 5e-3


def answer(forecast: Forecast) -> str:
    """Makes the first sentence: the most tokens of a sequence that a run would accept, and seconds of a step with it."""
    return (
        f"You can train sequences up to {forecast.scenario.longest_tokens:,} tokens; a step with one takes "
        f"{duration(forecast.at_limit_s)}."
    )


def forecast_summary(forecast: Forecast, price: Price | None = None) -> str:
    """Makes the answer, its basis, and the next command. price: of a GPU hour, if known."""
    rows = "\n".join(f"  {name:<8} {text}" for name, text in summary_rows(forecast, price))
    return f"{answer(forecast)}\n{rows}"


def summary_rows(forecast: Forecast, price: Price | None) -> list[tuple[str, str]]:
    """Returns the facts behind the answer, as pairs of a name and a line."""
    scenario = forecast.scenario
    rows = [("model", _where(scenario)), *_links(scenario), *_steps(forecast)]
    rows += [*(("images", words) for words in towers_words(forecast)), *_money(forecast, price)]
    rows.append(("memory", _memory(forecast)))
    if scenario.kept_because:
        rows.append(("kept", f"a run of this class keeps everything, without recomputing: {scenario.kept_because}"))
    rows += [("but", caveat) for caveat in scenario.caveats]
    if forecast.workload is None:
        rows += _states(forecast)
    rows += [*_longer(forecast), *_positions(forecast), ("numbers", _source(scenario)), *_next(forecast)]
    return rows


def _where(scenario: Scenario) -> str:
    cluster, placement = scenario.costs.cluster, scenario.placement
    memory = scenario.memory
    states = states_words(placement)
    trained = "all weights trained" if not memory.lora_rank else f"LoRA of rank {memory.lora_rank}"
    trained += ", on experts too" if memory.model.adapters.on_experts else ""
    trained += "" if memory.model.packed.is_empty else f" over {memory.model.packed.words}"
    where = "one node" if cluster.num_ranks <= cluster.ranks_per_node else f"{cluster.ranks_per_node} per node"
    return f"{scenario.model_name} on {cluster.num_ranks} x {cluster.hardware.name} ({where}), {trained}, states {states}"


def _links(scenario: Scenario) -> Iterator[tuple[str, str]]:
    if words := slow_links(scenario.costs.cluster):
        yield "links", words


def states_words(placement: Placement) -> str:
    """Describes how weights and states are held: by stages, and by ranks of a stage."""
    stages = f" in {len(placement.ranges)} stages" if placement.is_pipeline else ""
    return f"{held_words(placement.parameters, placement.shard_ranks)}{stages}"


def held_words(parameters: Parameters, shard_ranks: int) -> str:
    """Describes how weights of a stage are held."""
    words = parameters.replace("_", " ")
    return words if parameters == "replicated" else f"{words} over {shard_ranks} ranks"


def towers_words(forecast: Forecast) -> list[str]:
    """Describes what images cost; empty without images."""
    media = [each for step in forecast.steps for own in step.plan.media for each in own]
    if not media:
        return []
    trained = "trained" if forecast.scenario.costs.model.tower.trained_parameters else "frozen"
    return [
        f"{len(media) / len(forecast.steps):,.0f} a step: {trained} towers add {duration(forecast.towers_s)} "
        f"({forecast.towers_s / forecast.step_s:.0%} of a step), and the largest takes up to "
        f"{forecast.tower_bytes / 2**30:.2f} GiB while they run"
    ]


def _steps(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Makes lines about the planned steps: the data, seconds of a step and an epoch, and the best other system."""
    workload = forecast.workload
    if workload is None:
        return
    left_out = f", {workload.num_dropped:,} above {workload.limit:,} left out" if workload.num_dropped else ""
    yield (
        "data",
        f"{workload.num_sequences:,} sequences: median {workload.quantile(0.5):,}, 99% up to "
        f"{workload.quantile(0.99):,}, longest {workload.longest:,} tokens{left_out}",
    )
    batch, whole_s = len(forecast.steps[0].plan.lengths), forecast.whole_step_s
    tokens = sum(sum(step.plan.lengths) for step in forecast.steps) / len(forecast.steps)
    epoch = ""
    if num_steps := epoch_steps(forecast):
        epoch = f"; an epoch of {num_steps:,} steps {duration(num_steps * whole_s)}"
    yield "step", f"{duration(whole_s)} for {batch:,} sequences ({tokens / whole_s:,.0f} tokens/s){epoch}"
    best = next((choice for choice in forecast.baselines if choice.is_possible), None)
    if best is None:
        none = "they keep all activations" if forecast.scenario.memory.keeps_everything else "not even with full checkpointing"
        yield "others", f"none of the systems compared can run these lengths: {none}"
    else:
        factor = best.counted_s / forecast.counted_s
        verdict = "equal to" if abs(factor - 1) < _EQUAL else f"{factor:.2f}x as fast as"
        static = next((choice for choice in forecast.baselines if choice.name == "static" and choice.is_possible), None)
        beside = (
            f", {static.counted_s / forecast.counted_s:.2f}x as fast as one degree for all" if static and static != best else ""
        )
        yield "others", f"{verdict} the best of the others ({best.label}){beside}"
    yield from stage_lines(forecast)
    yield "layout", f"of the first step, <ranks x groups>: {_shortened(forecast.steps[0].plan.folded_layout)}"


def stage_lines(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Makes a line that compares pipeline stages with one stage, in the first step; none if nothing else was tried."""
    chosen, ranks = forecast.scenario.setup.num_stages, forecast.scenario.placement.num_ranks
    seconds: dict[int, float] = {}
    for option in forecast.stages.fitting:
        seconds.setdefault(option.num_stages, option.counted_s)
    own_s, one_s = seconds.get(chosen), seconds.get(1)
    if own_s is None:
        return
    if chosen > 1:
        own = f"{chosen} stages of {counted(ranks // chosen, 'rank')}"
        yield "stages", f"{own}: {_as_fast(one_s / own_s)} as one" if one_s else f"{own}; one stage does not hold this step"
    elif others := {count: other_s for count, other_s in seconds.items() if count > 1}:
        count = min(others, key=lambda each: others[each])
        yield "stages", f"one; {count} stages of {counted(ranks // count, 'rank')} would be {_as_fast(own_s / others[count])}"
    elif forecast.stages.unfit:
        yield "stages", "one; no pipeline holds this step (--details says why)"


def _as_fast(factor: float) -> str:
    return "as fast" if abs(factor - 1) < _EQUAL else f"{factor:.2f}x as fast"


def epoch_steps(forecast: Forecast) -> int:
    """Returns the steps of an epoch; 0 if lengths are drawn from a distribution, which has no end, or if there are none."""
    workload = forecast.workload
    if workload is None or workload.source.startswith("lognormal"):
        return 0
    return -(-workload.num_sequences // len(forecast.steps[0].plan.lengths))


def _money(forecast: Forecast, price: Price | None) -> Iterator[tuple[str, str]]:
    if price is None:
        return
    per_second = price.usd_per_hour * forecast.scenario.costs.cluster.num_ranks / 3600
    parts = [f"{_dollars(per_second * forecast.at_limit_s)} for the longest"]
    if forecast.steps:
        parts.insert(0, f"{_dollars(per_second * forecast.whole_step_s)} a step")
        if num_steps := epoch_steps(forecast):
            parts.insert(1, f"{_dollars(per_second * num_steps * forecast.whole_step_s)} an epoch")
    yield "price", f"{', '.join(parts)}, at ${price.usd_per_hour:,.2f} per GPU hour ({price.source})"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.2g}"


def _memory(forecast: Forecast) -> str:
    memory, placement = forecast.scenario.memory, forecast.scenario.placement
    states = memory.state_bytes(*placement.sharing)
    is_used = memory.host_bytes and not memory.keeps_everything
    host = f", and {memory.host_bytes / _GIB:.0f} GiB of its host for activations" if is_used else ""
    return (
        f"{memory.device_bytes / _GIB:.1f} GiB a rank: {states / _GIB:.1f} states, "
        f"{(memory.usable_bytes - states) / _GIB:.1f} for tokens, {(memory.device_bytes - memory.usable_bytes) / _GIB:.1f} "
        f"left free{host}"
    )


def _states(forecast: Forecast) -> Iterator[tuple[str, str]]:
    if words := state_words(forecast.scenario.memory):
        yield "states", f"{words}"


def state_words(memory: DeviceMemory) -> str:
    """Describes the bytes of a trained parameter by purpose; empty for adapters, whose states are small."""
    model = memory.model
    if memory.lora_rank:
        return ""
    few_bits = [("two moments of Adam in few bits", round(model.moment_bytes, 2))] if model.moment_bytes else []
    if memory.is_measured:
        return f"{memory.state_bytes_per_parameter} bytes a parameter, as measured: weight, gradient and Adam's two moments"
    if model.bytes_per_element == 4:
        moments = few_bits or [("two moments of Adam", 8)]
        parts = [("weight", 4), ("gradient", 4), *([] if model.updates_on_host else moments)]
    else:
        parts = [("bf16 weight", 2), ("its gradient", 2)]
        if model.updates_on_host:
            parts += [("to sum gradients in fp32", 2)]
        elif model.has_master_weights:
            parts += [("fp32 copy", 4), ("fp32 sum of gradients", 4), *(few_bits or [("two moments of Adam", 8)])]
        else:
            parts += [*(few_bits or [("two bf16 moments of Adam", 4)]), ("fp32 sum of gradients", 4)]
    total = sum(count for _, count in parts)
    # an fp32 copy and two moments, and pinned memory for copies of weight and gradient
    on_host = f"; {12 + 2 * model.bytes_per_element} more on the host" if model.updates_on_host else ""
    return f"{total:g} bytes a parameter: " + " + ".join(f"{count} {name}" for name, count in parts) + on_host


def _longer(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Lists options of this command that would allow longer sequences, without larger devices.

    One of them trains all weights on these ranks, if they are trained now and there is such an option, exactly if possible. With
    lengths, which fit, only other ways of holding weights and states are named.
    """
    needed = ("--",) if forecast.workload is None else ("--parameters", "--stages")
    able = [one for one in forecast.remedies if any(name in one.change for name in needed)]
    found = able[:_MOST_LONGER]
    if not (forecast.scenario.memory.lora_rank or any(one.is_setting and one.trains_all for one in found)):
        found += sorted((one for one in able if one.is_setting and one.trains_all), key=lambda one: "--bf16" in one.change)[:1]
    changes = [f"{one.change[one.change.index('--') :]} ({one.longest_tokens:,})" for one in found]
    if longest := forecast.scenario.unquantized_tokens:
        packed = forecast.scenario.memory.model.packed
        option = "--frozen-weights" if packed.fp8_parameters else "--quantize"
        changes.append(f"no {option} ({longest:,}), since attention over {packed.words} runs all its heads at once")
    if changes:
        yield "longer", "; ".join(changes)


def _positions(forecast: Forecast) -> Iterator[tuple[str, str]]:
    positions = forecast.scenario.costs.model.max_positions
    longest = forecast.scenario.longest_tokens if forecast.workload is None else forecast.workload.longest
    if (holds := forecast.scenario.held_tokens) > forecast.scenario.longest_tokens:
        yield "limit", f"the model has {positions:,} positions, which nothing extends; memory alone would hold {holds:,} tokens"
    elif longest > positions:
        remedy = "extend its RoPE first (rope_scaling: yarn where its class takes that)"
        yield "limit", f"the model has {positions:,} positions; beyond them {remedy}"


def _source(scenario: Scenario) -> str:
    if scenario.memory.is_measured:
        return f"measured: {scenario.costs.coefficients.source.split(';')[0]}"
    hardware = scenario.costs.cluster.hardware
    if hardware.source:
        return f"predicted from rates that were measured: {hardware.source.split(';')[0]}"
    if rates := scenario.measured_rates:
        return f"predicted from the rates of {hardware.name}: {rates} were measured, others come from its data sheet"
    return f"predicted from the data sheet of {hardware.name}, not measured; `hf-longctx calibrate` measures a machine"


def _next(forecast: Forecast) -> Iterator[tuple[str, str]]:
    more = "--output DIR for pictures" if forecast.workload else "--lengths FILE:COLUMN --tokenizer NAME for steps of your data"
    settings = ", ".join(f"{name}: {value}" for name, value in run_settings(forecast.scenario).items())
    yield "next", f"{more}; --details for all tables; to train so: {settings}"
    if kind := forecast.scenario.packed_experts:
        load = "load_pipeline_stage" if forecast.scenario.placement.is_pipeline else "load_sharded"
        source = "packs experts while they are read" if kind == "nf4" else "keeps a checkpoint's own blocks"
        yield "load", f'{load}(..., packs_experts=True), then get_peft_model and pack_experts(model, "{kind}"), {source}'


def run_settings(scenario: Scenario) -> dict[str, str]:
    """Returns settings of a run as forecast, as lines of a recipe's YAML file, without those at a run's default.

    Without one of them, a run may have less room and refuse the longest sequence.
    """
    memory, placement, model = scenario.memory, scenario.placement, scenario.memory.model
    is_half, is_sharded = model.bytes_per_element == 2, placement.parameters != "replicated"
    offloads = memory.host_bytes > 0 and not memory.keeps_everything
    defaults = default_degrees(placement.ranks_per_stage, model.num_heads, placement.method)
    # groups in stages exchange heads by default
    default_method = "ulysses" if placement.is_pipeline else "auto"
    extends = scenario.longest_tokens > model.max_positions and not model.learned_positions
    lines = {
        "max_length": str(scenario.longest_tokens),
        "rope_scaling": "yarn" if extends else "",
        # recipes load weights in fp32 by default
        "dtype": "bfloat16" if is_half else "",
        "lora_rank": str(memory.lora_rank or ""),
        "lora_experts": "true" if model.adapters.on_experts else "",
        "load_in_4bit": "" if model.packed.is_empty or model.packed.fp8_parameters or model.packed.has_experts else "true",
        "frozen_weights": "fp8" if model.packed.fp8_parameters else "",
        "pack_experts": scenario.packed_experts,
        "stages": str(len(placement.ranges)) if placement.is_pipeline else "",
        "spread_head": "false" if placement.is_pipeline and scenario.keeps_head else "",
        "parameters": placement.parameters if is_sharded else "",
        "expert_ranks": str(model.experts.num_ranks) if model.experts.are_spread else "",
        "shard_ranks": str(placement.shard_ranks) if is_sharded and placement.shard_ranks < placement.ranks_per_stage else "",
        "optim": optimizer_of(model.moment_bytes) if model.moment_bytes else "",
        "optim_args": "bf16_stochastic_round=True" if is_half and model.moment_bytes and not model.has_master_weights else "",
        "optimizer_states": "host" if model.updates_on_host else "",
        "layer_weights": "host" if model.layers_on_host else "",
        # copies on the host are always in fp32
        "fp32_master_weights": "false"
        if is_half and not (model.has_master_weights or model.updates_on_host or memory.lora_rank)
        else "",
        "activations": "keep" if memory.keeps_everything and not memory.is_measured else "",
        # a run takes at most 64 GiB by default
        "host_gib": f"{math.ceil(memory.host_bytes / _GIB * 100) / 100:g}" if offloads else "",
        "method": "" if placement.method in ("auto", default_method) else placement.method,
        "degrees": "" if placement.degrees == defaults else str(list(placement.degrees)),
        "tokens_per_rank": str(placement.max_tokens_per_rank or ""),
        "solver": "" if scenario.planner_config.solver == "auto" else scenario.planner_config.solver,
    }
    return {name: line for name, line in lines.items() if line}


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 4].rstrip(" ,") + " ..."

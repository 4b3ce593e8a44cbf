"""Measures how long planning takes, how far plans are from optimal, and what each idea beyond FlexSP gains.

    python recipes/bench/cpu/planner.py [times] [policies] [thread] [stages] [slices] [problems] [ablation] [--model gpt-7b]
        [--lengths commoncrawl] [--batches 8] [--problems-file tests/plan/microbatch_problems.json] [--require] [--profile]

Prints the named tables, or all of them. Costs, lengths and memory are those of GPT-7B on A100-40GB in `papers/flexsp.py`. Times
are the shortest of several runs, in milliseconds of CPU, of everything that `plan_step` does. "reference loop" is a fixed loop
of Python and small arrays beside them: where it takes longer than another machine's, plans do too. `--profile` prints where the
time of each plan of table `policies` goes.

times: whole steps with Ulysses groups and sharded parameters. "own fluid" is how far the plan is above the fluid bounds of its
own micro-batches; "any plan" is how far it is above a bound on every plan within this memory, by linear programs that take some
ten seconds (`hf-longctx plan` prints a quick one, which is lower).

policies: whole steps of 64 agent trajectories (log-normal, median 36K tokens, at most 184K) of qwen3-8b on h100, most of which
must recompute or offload. "cold" is the first plan of a process for each row's problem, "warm" the shortest of five more.

thread: what the main thread of a training loses while another thread of its process plans the next step, as trainers do. The
main thread runs small operations of torch one after the other, each of which takes the interpreter's lock: the worst case, since
a GPU that has kernels in its queue does not notice. "lost of planning" is the time by which a plan beside it lengthens its run,
divided by the time of that plan, so that other work on the machine does not change it (the median of several runs); "lost of a
step" is this share of the plan's time on a core of its own, divided by the predicted seconds of the step.

stages: whole steps of 512 sequences on 32 GPUs (llama-3.1-8b on h100, log-normal lengths up to 64K tokens), first with
everything kept, then with less and less memory for activations on the device and on the host; with the step's predicted seconds.
With replicated weights activations have all of this memory; with gathered ones, gradients that wait whole take part of it.

slices: the longest sequence of a group of four ranks that fits beside two groups of two, with a quarter of its tokens each, where
all eight GPUs share weights (LoRA of rank 16 on mixtures of experts, whose layers need much room for all tokens at once): in one
chunk, and in slices in step; with the predicted seconds of each step.

problems: single micro-batches of 64 GPUs, compared with the configuration-LP bound, which no grouping can beat, and with what
integer programming found in a minute.

ablation: predicted seconds of a step with one idea at a time and with all, compared with FlexSP (micro-batches of equal tokens,
one after the other). Nested groups need parameters that are replicated, or sharded within blocks of ranks; their rows compare
with FlexSP on the same costs. Integer degrees need rings, which cost more than Ulysses inside a node of eight GPUs, and pay off
where the size of a node is not a power of two: see the second table.

`--require` exits with status 1 unless these limits hold where the reference loop takes 40 ms, and longer ones where it takes
longer: 100, 400 and 1000 ms; 100, 300 and 500 ms with policies; half of a step and 5 s with stages; 2 % of a step lost to
planning in a thread; 2 % above the fluid bounds at 1024 GPUs; gaps to the configuration LP of 1 % on average and 2.5 % at most.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, PlannerConfig, default_degrees
from hf_longctx.plan.core.types import GroupShape, Parameters, StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.groups.greedy import group_micro_batch
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.groups.problem import GroupingProblem, fluid_bounds_s
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.pipeline.stages import balanced_ranges
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import make_room
from hf_longctx.plan.setup import lora_adapters
from hf_longctx.recipes.bench.cpu.step_bound import step_bound_s
from hf_longctx.recipes.bench.papers.flexsp import FITS, Setup, build_setup, fitted_lengths, integer_degrees
from hf_longctx.sim.scenario import Request, build_scenario
from hf_longctx.sim.workloads import read_workload

# GPUs, sequences, milliseconds allowed
SIZES = ((64, 512, 100.0), (256, 2048, 400.0), (1024, 4096, 1000.0))
LIMIT = 384_000
REPEATS = 5
TABLES = ("times", "policies", "thread", "stages", "slices", "problems", "ablation")

# GPUs and milliseconds allowed for a step of agent trajectories
TRAJECTORIES = ((8, 100.0), (64, 300.0), (128, 500.0))
TRAJECTORY_COUNT, TRAJECTORY_LIMIT, HOST_GIB = 64, 184_000, 230
# share of a step in which the next one must be planned, and most milliseconds
STAGES_LIMIT, STAGES_LIMIT_MS = 0.5, 5000.0
# operations of the main thread in one measurement, and the share of a step that it may lose to planning
OPERATIONS, MOST_LOST = 60_000, 0.02
# milliseconds of the reference loop on the machine for which the limits are meant
REFERENCE_MS = 40.0

# GiB for activations on a GPU (None: everything fits), and on the host
ROOMS: tuple[tuple[float | None, float], ...] = ((None, 0), (40, 0), (12, 0), (6, 0), (12, 32), (6, 32))
STAGES = (2, 4, 8)
STAGE_PARAMETERS: tuple[Parameters, ...] = ("replicated", "gathered_per_round")

# mixtures of experts, and GiB for activations on a GPU and on the host
EXPERTS, SLICE_ROOMS = ("gpt-oss-20b", "gemma-4-26b-a4b"), ((8, 0), (8, 64), (30, 64))

# constants of the single micro-batches, in ms, MB and tokens: FlexSP's for GPT-7B up to 192K and 384K tokens
PAIR_MS, TOKEN_MS, GROUP_MS, MB_PER_TOKEN, MB_EXCHANGED = 5.128e-6, 0.18396, 629.3563, 4.480442, 2.0
EXCHANGE_MB_PER_MS = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
BILLION_PARAMETERS = {192: 7.1174468994, 384: 7.8498687744}


def reference_ms() -> float:
    """Milliseconds of CPU for a fixed loop of Python and small arrays, which planning is made of; the shortest of five."""
    found = []
    for _ in range(REPEATS):
        started_s = time.process_time()
        total, values = 0, np.arange(64.0)
        for index in range(300_000):
            total += index % 7
        for _ in range(20_000):
            values = np.minimum(values + 1.0, 50.0)
        found.append(1e3 * (time.process_time() - started_s))
    return min(found)


def plan_ms(lengths: Sequence[int], costs: CostModel, config: PlannerConfig, repeats: int) -> tuple[StepPlan, list[float]]:
    """The plan, and the milliseconds of CPU of every repeat; without other work on the machine they are those of the clock."""
    found = []
    for _ in range(repeats):
        started_s = time.process_time()
        plan = plan_step(0, lengths, costs, config)
        found.append(1e3 * (time.process_time() - started_s))
    return plan, found


def trajectories(num_gpus: int) -> tuple[tuple[int, ...], CostModel, PlannerConfig]:
    """Problem of one step of agent trajectories: lengths, costs and settings."""
    workload = read_workload("lognormal:10.5,0.6", TRAJECTORY_LIMIT, TRAJECTORY_COUNT)
    (lengths,) = workload.draw_steps(1, TRAJECTORY_COUNT, seed=0)
    request = Request("qwen3-8b", "h100", num_gpus, longest_tokens=workload.longest, host_bytes=HOST_GIB << 30)
    scenario = build_scenario(request)
    return lengths, scenario.costs, scenario.planner_config


def print_thread() -> list[str]:
    """Prints what planning in a thread costs the main thread; returns what is above its limit."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(16, 16)

    def operations_s() -> float:
        """Seconds for a fixed number of operations."""
        value = matrix
        started_s = time.perf_counter()
        for _ in range(OPERATIONS):
            value = torch.relu(value @ matrix) * 0.0625
        return time.perf_counter() - started_s

    def lost_share(problem: tuple[Sequence[int], CostModel, PlannerConfig]) -> float:
        """Share of a plan's time by which it lengthens the operations beside it."""
        alone_s, planned_s = operations_s(), []

        def beside() -> None:
            started_s = time.perf_counter()
            plan_step(0, *problem)
            planned_s.append(time.perf_counter() - started_s)

        thread = threading.Thread(target=beside)
        thread.start()
        beside_s = operations_s()
        thread.join()
        return (beside_s - (alone_s + operations_s()) / 2) / planned_s[0]

    setup = build_setup("gpt-7b", LIMIT, 64, read_profile("a100-40g"))
    packed = fitted_lengths("commoncrawl", LIMIT, 512, seed=0), setup.costs, PlannerConfig(setup.tokens_per_rank, setup.degrees)
    print(f"{'step':>34} {'plan ms':>8} {'lost of planning':>17} {'step s':>7} {'lost of a step':>15}")
    faults = []
    for name, problem in (("64 trajectories, 64 GPUs", trajectories(64)), ("512 sequences, 64 GPUs", packed)):
        plan, found_ms = plan_ms(*problem, REPEATS)
        share = max(0.0, median(lost_share(problem) for _ in range(REPEATS)))
        step_s = plan.estimate.step_s
        lost = share * min(found_ms) / 1e3 / step_s
        print(f"{name:>34} {min(found_ms):>8.0f} {share:>17.0%} {step_s:>7.2f} {lost:>15.2%}", flush=True)
        if lost > MOST_LOST:
            faults.append(f"{name}: planning takes {lost:.1%} of a step from the main thread, allowed {MOST_LOST:.0%}")
    return faults


def print_policies(with_profile: bool) -> list[str]:
    """Prints the table of planning times of agent trajectories; returns what is above its limit."""
    print(
        f"{'GPUs':>5} {'cold ms':>8} {'warm ms':>8} {'limit':>6} {'reference loop ms':>18} {'step s':>7} {'any plan':>9}  layout"
    )
    faults = []
    for num_gpus, limit_ms in TRAJECTORIES:
        lengths, costs, config = trajectories(num_gpus)
        plan, (cold_ms, *others_ms) = plan_ms(lengths, costs, config, 1 + REPEATS)
        loop_ms, estimate = reference_ms(), plan.estimate
        print(
            f"{num_gpus:>5} {cold_ms:>8.0f} {min(others_ms):>8.0f} {limit_ms:>6.0f} {loop_ms:>18.0f} {estimate.step_s:>7.2f} "
            f"{estimate.gap:>9.1%}  {len(plan.micro_batches)} micro-batches",
            flush=True,
        )
        if cold_ms > limit_ms * max(1.0, loop_ms / REFERENCE_MS):
            faults.append(f"{num_gpus} GPUs with policies: {cold_ms:.0f} ms, allowed {limit_ms:.0f}")
        if with_profile:
            profile = cProfile.Profile()
            profile.runcall(plan_step, 0, lengths, costs, config)
            pstats.Stats(profile).sort_stats("cumulative").print_stats("hf_longctx", 25)
    return faults


def print_times(model: str, lengths: str) -> list[str]:
    """Prints the table of planning times; returns what is above its limit."""
    loop_ms = reference_ms()
    print(f"reference loop: {loop_ms:.0f} ms")
    print(f"{'GPUs':>5} {'sequences':>9} {'plan ms':>8} {'limit':>6} {'step s':>7} {'own fluid':>9} {'any plan':>9}  layout")
    faults = []
    profile = read_profile("a100-40g")
    for num_gpus, count, limit_ms in SIZES:
        setup = build_setup(model, LIMIT, num_gpus, profile)
        config = PlannerConfig(setup.tokens_per_rank, setup.degrees)
        batch = fitted_lengths(lengths, LIMIT, count, seed=0)
        plan, found_ms = plan_ms(batch, setup.costs, config, REPEATS)
        shortest_ms, estimate = min(found_ms), plan.estimate
        own = estimate.step_s / own_fluid_s(plan, setup.costs, config) - 1
        problem, once_s = GroupingProblem.build(batch, setup.costs, config), setup.costs.coefficients.step_s
        any_plan = estimate.counted_s / (once_s + step_bound_s(problem, estimate.counted_s - once_s)) - 1
        print(
            f"{num_gpus:>5} {count:>9} {shortest_ms:>8.0f} {limit_ms:>6.0f} {estimate.step_s:>7.2f} {own:>9.1%} "
            f"{any_plan:>9.1%}  {len(plan.micro_batches)} micro-batches",
            flush=True,
        )
        if shortest_ms > limit_ms * max(1.0, loop_ms / REFERENCE_MS):
            faults.append(f"{num_gpus} GPUs, {count} sequences: {shortest_ms:.0f} ms, allowed {limit_ms:.0f}")
        if num_gpus == SIZES[-1][0] and own > 0.02:
            faults.append(f"{num_gpus} GPUs: {own:.1%} above the fluid bounds of its micro-batches, allowed 2 %")
    return faults


def own_fluid_s(plan: StepPlan, costs: CostModel, config: PlannerConfig) -> float:
    """Sum of the fluid bounds of the plan's own micro-batches, in seconds."""
    problem = GroupingProblem.build(plan.lengths, costs, config)
    total_s = costs.coefficients.step_s
    for micro_batch in plan.micro_batches:
        members = [span.sequence for group in micro_batch.groups for chunk in group.chunks for span in chunk.spans]
        part = problem.subproblem(sorted(members, key=lambda i: -plan.lengths[i]))
        total_s += float(fluid_bounds_s(part, [(0, len(members))], problem.num_ranks)[0])
    return total_s


def print_stages() -> list[str]:
    """Prints a table of planning times by stages and memory for each way the weights live; returns what is above its limit."""
    loop_ms, faults = reference_ms(), []
    print(f"reference loop: {loop_ms:.0f} ms")
    profile = read_profile("h100")
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(32, 8, profile.spec)
    drawn = np.random.default_rng(1).lognormal(np.log(1500.0), 1.3, 512)
    lengths = np.clip(drawn, 16, 65_536).astype(np.int64).tolist()
    for parameters in STAGE_PARAMETERS:
        costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters=parameters, shard_ranks=0)
        print(f"{parameters:>18} " + " ".join(f"{num_stages:>4} stages: ms, step s" for num_stages in STAGES))
        for device_gib, host_gib in ROOMS:
            room = None
            name = "everything kept"
            if device_gib is not None:
                num_bytes = int(device_gib * 2**30)
                room = ByteModel(model).budget(num_bytes, int(host_gib * 2**30), 1024)
                name = f"{device_gib:g} GiB" + (f" + {host_gib:g} host" if host_gib else "")
            cells = []
            for num_stages in STAGES:
                ranges = balanced_ranges(costs, num_stages, lengths)
                config = PlannerConfig(32_768, (1, 2, 4, 8), activations=room, stages=ranges)
                plan, found_ms = plan_ms(lengths, costs, config, 2)
                cells.append(f"{min(found_ms):>15.0f}, {plan.estimate.step_s:>6.2f}")
                limit_ms = min(1e3 * STAGES_LIMIT * plan.estimate.step_s, STAGES_LIMIT_MS)
                if min(found_ms) > limit_ms * max(1.0, loop_ms / REFERENCE_MS):
                    what = f"{num_stages} stages, {parameters}, {name}"
                    faults.append(f"{what}: {min(found_ms):.0f} ms, allowed {limit_ms:.0f}")
            print(f"{name:>18} " + " ".join(cells), flush=True)
    return faults


def print_slices() -> list[str]:
    """Prints the table of slices in step; returns nothing, because it has no limits."""
    hardware = read_profile("h100").spec
    print(f"{'model':>16} {'memory':>16} {'one chunk':>12} {'s':>6} {'slices':>12} {'s':>6} {'more tokens':>12}")
    for name in EXPERTS:
        model, cluster = named_model(name), ClusterSpec(8, 8, hardware)
        model = replace(model, adapters=lora_adapters(model, 16))
        costs = CostModel(model, cluster, default_coefficients(model, cluster), parameters="sharded", shard_ranks=8)
        for device_gib, host_gib in SLICE_ROOMS:
            budget = ByteModel(model).budget(device_gib << 30, host_gib << 30, 1024, is_shared=True)
            (whole, whole_s), (longest, longest_s) = (longest_beside(costs, budget, may_slice) for may_slice in (False, True))
            memory = f"{device_gib} GiB" + (f" + {host_gib} host" if host_gib else "")
            cells = f"{whole:>12,} {whole_s:>6.1f} {longest:>12,} {longest_s:>6.1f} {longest / whole - 1:>12.0%}"
            print(f"{name:>16} {memory:>16} {cells}", flush=True)
    return []


def longest_beside(costs: CostModel, budget: ActivationBudget, may_slice: bool) -> tuple[int, float]:
    """Most tokens, to 1 %, of a group of four ranks beside others of two that share its weights, and seconds of the step."""
    layout = [[PlacedGroup(0, 4, (0,)), PlacedGroup(4, 2, (1,)), PlacedGroup(6, 2, (2,))]]

    def made(num_tokens: int) -> StepPlan | None:
        lengths = num_tokens, num_tokens // 4, num_tokens // 4
        plan = build_plan(0, lengths, layout, {degree: GroupShape(degree, degree) for degree in (1, 2, 4)}, costs)
        try:
            return make_room(plan, Planning(costs, PlannerConfig(1, (1,), activations=budget, one_micro_batch=not may_slice)))
        except ValueError:
            return None

    fits, too_long = 1_000, 4_000_000
    while too_long - fits > fits // 100:
        tried = (fits + too_long) // 2
        fits, too_long = (tried, too_long) if made(tried) else (fits, tried)
    plan = made(fits)
    assert plan is not None
    return fits, Planning(costs, PlannerConfig(fits, (1, 2, 4), activations=budget)).counted_s(plan)


def print_problems(path: Path) -> list[str]:
    """Prints the table of single micro-batches; returns what is above its limit."""
    print(f"{'problem':>18} {'sequences':>9} {'bound s':>8} {'ours s':>7} {'gap':>6} {'best integer program':>21} {'ms':>5}")
    gaps, faults = [], []
    for row in json.loads(path.read_text()):
        problem = published_problem(row["lengths"], row["limit_ktokens"])
        started_s = time.perf_counter()
        seconds = problem.micro_batch_seconds(group_micro_batch(problem))
        grouping_ms = 1e3 * (time.perf_counter() - started_s)
        bound_s, milp_s = row["bound_ms"] / 1e3, row["best_milp_ms"] / 1e3
        gaps.append(seconds / bound_s - 1)
        print(
            f"{row['problem']:>18} {len(row['lengths']):>9} {bound_s:>8.3f} {seconds:>7.3f} {gaps[-1]:>6.2%} "
            f"{milp_s:>12.3f} {seconds / milp_s - 1:>+8.1%} {grouping_ms:>5.0f}"
        )
        if seconds > 1.01 * milp_s:
            faults.append(f"{row['problem']}: {seconds / milp_s - 1:.1%} slower than the integer program, allowed 1 %")
    print(f"gap to the configuration-LP bound: {mean(gaps):.2%} on average, {max(gaps):.2%} at most")
    if mean(gaps) > 0.01 or max(gaps) > 0.025:
        faults.append(f"gaps of {mean(gaps):.2%} on average and {max(gaps):.2%} at most, allowed 1 % and 2.5 %")
    return faults


def published_problem(lengths: Sequence[int], limit_ktokens: int, num_ranks: int = 64) -> GroupingProblem:
    """Makes one micro-batch of the problems file, with the constants of FlexSP's artefact and 30 GB per GPU."""
    states_mb = BILLION_PARAMETERS[limit_ktokens] * 16 * 1024 / num_ranks
    tokens = np.array(lengths, dtype=np.float64)
    degrees = default_degrees(num_ranks, num_ranks)
    seconds = [
        (PAIR_MS * tokens**2 + TOKEN_MS * tokens + (MB_EXCHANGED * tokens / EXCHANGE_MB_PER_MS[d] if d > 1 else 0)) / d / 1e3
        for d in degrees
    ]
    return GroupingProblem(
        lengths=tuple(lengths),
        num_ranks=num_ranks,
        capacity=int((30 * 1024 - states_mb) / MB_PER_TOKEN),
        degrees=degrees,
        shapes={degree: GroupShape(degree) for degree in degrees},
        seconds=np.stack(seconds),
        group_s=(GROUP_MS / 1e3,) * len(degrees),
    )


def print_ablation(model: str, lengths: str, num_batches: int) -> list[str]:
    """Prints the tables of what each idea saves; returns nothing, because they have no limits."""
    profile = read_profile("a100-40g")
    cluster = build_setup(model, LIMIT, 64, profile)
    # the memory per GPU of the large job, on nodes of six GPUs
    sixes = build_setup(model, LIMIT // 3, 64, profile)
    sixes = replace(sixes, costs=replace(sixes.costs, cluster=ClusterSpec(24, 6, profile.spec), shard_ranks=24))
    for title, setup, count in (("64 GPUs, 8 a node", cluster, 512), ("24 GPUs, 6 a node", sixes, 192)):
        batches = [fitted_lengths(lengths, setup.limit, count, seed) for seed in range(num_batches)]
        print(f"{title}, {num_batches} batches of {count} sequences up to {setup.limit} tokens")
        for name, seconds, base_s in ablation(setup, batches):
            print(f"  {name:<66} {seconds:>7.2f} s {seconds / base_s - 1:>+7.1%}")
    return []


def ablation(setup: Setup, batches: Sequence[Sequence[int]]) -> list[tuple[str, float, float]]:
    """Rows of the table: name, mean seconds, and FlexSP's mean seconds on the same costs."""
    num_ranks, heads = setup.num_gpus, setup.costs.model.num_heads
    flexsp = PlannerConfig(setup.tokens_per_rank, setup.degrees, time_aware=False, nested=False, node_aligned=False)
    sharded = setup.costs
    free = replace(sharded, method="auto")
    whole = replace(sharded, parameters="replicated", shard_ranks=1)
    blocks = replace(sharded, shard_ranks=setup.costs.cluster.ranks_per_node)
    powers, integers = default_degrees(num_ranks, heads), integer_degrees(num_ranks, setup.costs.cluster.ranks_per_node)
    everything = PlannerConfig(setup.tokens_per_rank, integers)
    rows = [
        ("FlexSP", sharded, flexsp, sharded),
        ("+ time-aware cuts and backfill", sharded, replace(flexsp, time_aware=True), sharded),
        ("+ ring and hybrid groups", free, replace(flexsp, degrees=powers), sharded),
        ("+ integer degrees, groups anywhere", free, replace(flexsp, degrees=integers), sharded),
        ("+ integer degrees, groups inside nodes", free, replace(flexsp, degrees=integers, node_aligned=True), sharded),
        ("all that sharded parameters allow", free, everything, sharded),
        (f"FlexSP + nested, parameters sharded in blocks of {blocks.shard_ranks}", blocks, replace(flexsp, nested=True), blocks),
        ("FlexSP + nested, parameters replicated", whole, replace(flexsp, nested=True), whole),
        (
            "everything, parameters replicated",
            replace(whole, method="auto"),
            PlannerConfig(setup.tokens_per_rank, integers),
            whole,
        ),
    ]
    base = {id(costs): mean_step_s(batches, costs, flexsp) for costs in (sharded, blocks, whole)}
    return [(name, mean_step_s(batches, costs, config), base[id(of)]) for name, costs, config, of in rows]


def mean_step_s(batches: Sequence[Sequence[int]], costs: CostModel, config: PlannerConfig) -> float:
    return mean(plan_step(0, batch, costs, config).estimate.step_s for batch in batches)


def main() -> int:
    """Prints the named tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="tables to print (default: all)")
    parser.add_argument("--model", default="gpt-7b", help="a model of the catalogue (default: gpt-7b)")
    parser.add_argument("--lengths", default="commoncrawl", choices=sorted(FITS), help="distribution of sequence lengths")
    parser.add_argument("--batches", type=int, default=8, help="batches of the ablation (default: 8)")
    parser.add_argument("--problems-file", type=Path, default=Path("tests/plan/microbatch_problems.json"))
    parser.add_argument("--profile", action="store_true", help="profile the plans of table policies")
    parser.add_argument("--require", action="store_true", help="exit with status 1 if a limit does not hold")
    options = parser.parse_args()
    faults = []
    for table in options.tables or TABLES:
        if table == "times":
            faults += print_times(options.model, options.lengths)
        elif table == "policies":
            faults += print_policies(options.profile)
        elif table == "thread":
            faults += print_thread()
        elif table == "stages":
            faults += print_stages()
        elif table == "slices":
            faults += print_slices()
        elif table == "problems":
            faults += print_problems(options.problems_file)
        else:
            faults += print_ablation(options.model, options.lengths, options.batches)
        print()
    for fault in faults if options.require else []:
        print(f"above its limit: {fault}", file=sys.stderr)
    return 1 if faults and options.require else 0


if __name__ == "__main__":
    sys.exit(main())

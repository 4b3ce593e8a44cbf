"""FlexSP's published step times (arXiv 2412.01523, 64 A100-40GB), next to our predictions of its methods and of our planner.

    python recipes/bench/papers/flexsp.py --model gpt-7b --limit 192000 --lengths commoncrawl|github|FILE
        [--gpus 64] [--global-batch 512] [--batches 16] [--seed 0] [--methods FlexSP ...] [--hardware a100-40g] [--json [FILE]]
    python recipes/bench/papers/flexsp.py --cells [--wikipedia FILE] [--batches 16] [--seed 0] [--json [FILE]]

Seconds come from a cost model, not from a GPU: forward and backward of all micro-batches, without the costs that a step has once
(embeddings, head, optimizer). These costs are about 1.2 s of the published times at 192K and 1.6 s at 384K; on real lengths
(Wikipedia's) published times exceed the predictions by this amount. The fitted lengths below absorb it, because they were fitted
to published times with this cost model. So these lengths test how methods compare; the only test of absolute seconds is that one
fit serves all methods. Coefficients are the public ones of FlexSP's artefact if the hardware profile has them for the model, else
operation counts. 30 of the 40 GB hold activations and, sharded over all GPUs, weights, gradients and optimizer states; this sets
the tokens per GPU.

Rows:

    DeepSpeed              Ulysses with one degree: the best over all batches among those that hold the limit
    BatchAda               Ulysses with the best degree for each batch
    FlexSP                 our planner restricted to what FlexSP's published solver does: Ulysses on powers of two from 2 on, and
                           micro-batches of equal tokens one after the other
    Megatron hybrid-CP     `hf_longctx/sim/baselines.py`, on degrees from 1 on
    FCP                    the same file, on degrees from 1 on
    ours                   our planner with everything on: Ulysses, rings or both, whichever is cheapest
    ours, integer degrees  ours with all degrees inside a node, and whole nodes
    ours, replicated       ours as if no parameter had to be gathered, so that ranks change groups inside a step and wait for
                           their partners only; it still has the memory of sharded weights, so it is a bound and not a plan for
                           a full fine-tune of this size

Cells. `--cells` prints the error of every published step time: three models, two limits, three data sets. The published runs ran
parts of the layers again in their backward, to save memory (`REPLAYS`, as in the artefact's `train_dist.py`). The artefact's
coefficients cannot contain that: 13B and 30B would then compute at the peak rate of an A100. So each cell is predicted without
replays and with them. Wikipedia's lengths are public (`galvatron/datasets/wikipedia.txt` on the branch `flexsp` of
PKU-DAIR/Hetu-Galvatron); `--wikipedia` takes that file.

Lengths. The other length files are not public, so commoncrawl and github are log-normal fits to published times of GPT-7B: sigma
1.6 and mean 3800, sigma 2.3 and mean 4200 tokens. The lengths of K batches are quantiles of the fit, one from each of equally
likely intervals, shuffled, so that means hardly depend on the seed. FILE has one length per line and may end in .gz. Lengths
are padded to multiples of 128. Lengths above the limit are left out; in the fits, those below 32 are too. In the artefact 192K
means 192,000 tokens (as its parameter counts show); published numbers are also shown for 196,608.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

from hf_longctx.plan.core.settings import USABLE_SHARE, ClusterSpec, PlannerConfig, default_degrees
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import HardwareProfile, ModelCalibration, read_profile
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.recipes.bench.papers.command_line import run_reproduction
from hf_longctx.sim.baselines import BASELINES, all_baselines, static_layout

PADDING = 128
RANKS_PER_NODE = 8
LEAST_TOKENS = 32

# log-normal fits: sigma of the logarithm, and mean tokens before any length is left out
FITS = {"commoncrawl": (1.6, 3800.0), "github": (2.3, 4200.0)}

# seconds of DeepSpeed, BatchAda and FlexSP, read off figure 4 of the paper (within about 0.12 s)
PUBLISHED = {
    ("gpt-7b", 192, "commoncrawl"): (23.9, 22.0, 15.9),
    ("gpt-7b", 384, "commoncrawl"): (26.7, 25.7, 18.7),
    ("gpt-7b", 192, "github"): (28.3, 26.4, 19.7),
    ("gpt-7b", 384, "github"): (32.1, 31.1, 25.5),
    ("gpt-7b", 192, "wikipedia"): (8.1, 6.0, 4.7),
    ("gpt-7b", 384, "wikipedia"): (8.2, 6.2, 5.6),
    # the axes of 13B are coarser (within 0.25 s), and those of 30B (within 0.6 s)
    ("gpt-13b", 192, "github"): (47.8, 44.2, 34.2),
    ("gpt-13b", 192, "commoncrawl"): (39.9, 37.4, 29.5),
    ("gpt-13b", 192, "wikipedia"): (14.0, 10.7, 8.9),
    ("gpt-13b", 384, "github"): (54.1, 50.8, 41.9),
    ("gpt-13b", 384, "commoncrawl"): (52.7, 50.0, 38.6),
    ("gpt-13b", 384, "wikipedia"): (14.7, 12.1, 10.3),
    ("gpt-30b", 192, "github"): (120.0, 114.2, 83.8),
    ("gpt-30b", 192, "commoncrawl"): (109.5, 100.9, 71.4),
    ("gpt-30b", 192, "wikipedia"): (29.3, 23.7, 18.1),
    ("gpt-30b", 384, "github"): (133.4, 129.8, 109.0),
    ("gpt-30b", 384, "commoncrawl"): (116.3, 111.6, 87.7),
    ("gpt-30b", 384, "wikipedia"): (32.5, 27.6, 21.4),
}
PUBLISHED_METHODS = ("DeepSpeed", "BatchAda", "FlexSP")
# shares of the layers whose MLPs, and whose attention blocks, the published runs ran again in their backward
REPLAYS = {"gpt-7b": (12 / 32, 0.0), "gpt-13b": (1.0, 0.0), "gpt-30b": (1.0, 4 / 5)}
# share of a layer's matrix products in the MLP of a GPT, which is four times as wide as the hidden size
_MLP_SHARE = 2 / 3
METHODS = ("DeepSpeed", "BatchAda", "FlexSP")
METHODS = ("DeepSpeed", "BatchAda", "Megatron hybrid-CP", "FCP", "FlexSP", "ours", "ours, integer degrees", "ours, replicated")
PUBLISHED_LIMITS = {192_000: 192, 196_608: 192, 384_000: 384, 393_216: 384}


@dataclass(frozen=True, slots=True)
class Setup:
    """Shared by all methods: costs of Ulysses with sharded parameters, tokens per GPU, and the longest sequence allowed."""

    costs: CostModel
    tokens_per_rank: int
    limit: int

    @property
    def num_gpus(self) -> int:
        return self.costs.cluster.num_ranks

    @property
    def degrees(self) -> tuple[int, ...]:
        return default_degrees(self.num_gpus, self.costs.model.num_heads, "ulysses")


def read_model(name: str, limit: int) -> ModelSpec:
    """Reads a named model or a config.json; learned position embeddings are extended to `limit`."""
    path = Path(name)
    is_file = path.suffix == ".json" and path.is_file()
    model = ModelSpec.from_config(json.loads(path.read_text()), bytes_per_element=2) if is_file else named_model(name)
    return replace(model, max_positions=limit) if model.learned_positions else model


def build_setup(name: str, limit: int, num_gpus: int, profile: HardwareProfile) -> Setup:
    """Derives costs and memory for a model; raises ValueError if no group can hold a sequence of `limit` tokens."""
    if limit < PADDING:
        raise ValueError(f"--limit is {limit}; give at least {PADDING} tokens, because lengths are padded to multiples of that")
    if num_gpus < 1:
        raise ValueError(f"--gpus is {num_gpus}; give at least 1")
    model = replace(read_model(name, limit), exchange_parts=1)
    cluster = ClusterSpec(num_gpus, min(num_gpus, RANKS_PER_NODE), profile.spec)
    usable_bytes = int(USABLE_SHARE * profile.spec.device_bytes)
    guessed = ModelCalibration(name, default_coefficients(model, cluster), saved_token_bytes(model), usable_bytes)
    calibration = profile.calibration(name) or guessed
    costs = CostModel(model, cluster, calibration.coefficients, "ulysses", parameters="sharded", shard_ranks=num_gpus)
    setup = Setup(costs, calibration.tokens_per_rank(model, num_gpus), limit)
    largest = setup.degrees[-1]
    if limit > largest * setup.tokens_per_rank:
        raise ValueError(
            f"--limit is {limit}, but the largest group, {largest} GPUs of {setup.tokens_per_rank} tokens each, holds only "
            f"{largest * setup.tokens_per_rank} tokens; lower the limit or use more GPUs"
        )
    return setup


def padded(tokens: float) -> int:
    return math.ceil(tokens / PADDING) * PADDING


def fitted_lengths(fit: str, limit: int, count: int, seed: int) -> list[int]:
    """Draws `count` padded lengths, one from each of `count` equally likely intervals of the fit, and shuffles them."""
    sigma, mean_tokens = FITS[fit]
    logarithm = NormalDist(math.log(mean_tokens) - sigma**2 / 2, sigma)
    least = logarithm.cdf(math.log(LEAST_TOKENS))
    # padding must not lift a length above the limit
    width = (logarithm.cdf(math.log(limit // PADDING * PADDING)) - least) / count
    draw = random.Random(seed)
    lengths = [padded(int(math.exp(logarithm.inv_cdf(least + (i + draw.random()) * width)))) for i in range(count)]
    draw.shuffle(lengths)
    return lengths


def read_lengths(path: Path, limit: int, count: int, seed: int) -> list[int]:
    """Draws `count` padded lengths from a file without repeats; raises ValueError for a bad line or too few lengths."""
    if not path.is_file():
        raise ValueError(f"--lengths {path} is neither {' nor '.join(FITS)} nor a file with one length per line")
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    lengths = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            if not line.strip().isdecimal() or int(line) < 1:
                raise ValueError(f"{path}:{number}: {line.strip()!r} is not a length; give a whole number, 1 or more")
            lengths.append(padded(int(line)))
    usable = [length for length in lengths if length <= limit]
    if len(usable) < count:
        raise ValueError(
            f"{path} has {len(usable)} lengths of at most {limit} tokens, but {count} are needed; lower --batches or "
            f"--global-batch"
        )
    return random.Random(seed).sample(usable, count)


def integer_degrees(num_gpus: int, ranks_per_node: int = RANKS_PER_NODE) -> tuple[int, ...]:
    """All degrees inside a node, whole nodes, and powers of two."""
    inside = range(1, min(ranks_per_node, num_gpus) + 1)
    powers = (1 << bit for bit in range(num_gpus.bit_length()))
    return tuple(sorted({*inside, *range(ranks_per_node, num_gpus + 1, ranks_per_node), *powers, num_gpus}))


def step_seconds(lengths: Sequence[int], setup: Setup, methods: Sequence[str]) -> dict[str, float]:
    """Predicted seconds of one batch with every method; static degrees that hold the limit are called "DeepSpeed 32" etc."""
    config = PlannerConfig(setup.tokens_per_rank, setup.degrees)
    problem = GroupingProblem.build(lengths, setup.costs, config)
    seconds = {
        f"DeepSpeed {degree}": problem.step_seconds(static_layout(problem, degree))
        for degree in setup.degrees
        if setup.num_gpus % degree == 0 and setup.limit <= degree * setup.tokens_per_rank
    }
    # FlexSP is planned below, with the degrees of its paper
    others = [name for name in BASELINES if name in methods and name != "FlexSP"]
    seconds |= {found.name: found.step_s for found in all_baselines(problem, setup.limit, others)}
    everything = replace(setup.costs, method="auto")
    ours = replace(config, degrees=default_degrees(setup.num_gpus, setup.costs.model.num_heads))
    planned = {
        "FlexSP": (setup.costs, replace(config, degrees=setup.degrees[1:] or (1,), time_aware=False, nested=False)),
        "ours": (everything, ours),
        "ours, integer degrees": (everything, replace(ours, degrees=integer_degrees(setup.num_gpus))),
        "ours, replicated": (replace(everything, parameters="replicated"), ours),
    }
    for name, (costs, chosen) in planned.items():
        if name in methods:
            seconds[name] = plan_step(0, lengths, costs, chosen).estimate.step_s
    return seconds


def with_replays(costs: CostModel, mlps: float, attentions: float) -> CostModel:
    """Costs whose backward runs these shares of all MLPs and of all attention blocks again, the latter with their exchanges."""
    forward, backward = costs.coefficients.forward, costs.coefficients.backward
    layers_s = forward.token_s * (1 - costs.head_share(is_backward=False))
    longer = replace(
        backward,
        token_s=backward.token_s + layers_s * (_MLP_SHARE * mlps + (1 - _MLP_SHARE) * attentions),
        pair_s=backward.pair_s + attentions * forward.pair_s,
        link_byte_s=backward.link_byte_s + attentions * forward.link_byte_s,
        network_byte_s=backward.network_byte_s + attentions * forward.network_byte_s,
    )
    return replace(costs, coefficients=replace(costs.coefficients, backward=longer))


def published_cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every published cell with lengths: seconds and relative errors of each method, without and with replays."""
    rows, count = [], options.batches * options.global_batch
    for (model, thousands, data), published in PUBLISHED.items():
        if data == "wikipedia" and options.wikipedia is None:
            continue
        limit = 1000 * thousands
        setup = build_setup(model, limit, options.gpus, read_profile(options.hardware))
        lengths = (
            fitted_lengths(data, limit, count, options.seed)
            if data in FITS
            else read_lengths(options.wikipedia, limit, count, options.seed)
        )
        row: dict[str, Any] = {"model": model, "limit": limit, "lengths": data, "published_s": list(published)}
        for name, costs in (("without", setup.costs), ("with", with_replays(setup.costs, *REPLAYS[model]))):
            own = replace(setup, costs=costs)
            starts = range(0, count, options.global_batch)
            found = [step_seconds(lengths[at : at + options.global_batch], own, PUBLISHED_METHODS) for at in starts]
            seconds = {each["method"]: each["step_s"] for each in table(found, {})}
            row[f"{name}_s"] = [seconds[method] for method in PUBLISHED_METHODS]
            row[f"{name}_error"] = [s / p - 1 for s, p in zip(row[f"{name}_s"], published, strict=True)]
        rows.append(row)
    return rows


def cells_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Errors of all cells as a table."""
    lines = [f"{'model, limit, lengths':30s} {'published s':>24s} {'without replays':>24s} {'with replays':>24s}"]
    for row in rows:
        published = " / ".join(f"{seconds:.1f}" for seconds in row["published_s"])
        errors = [" / ".join(f"{error:+.0%}" for error in row[f"{name}_error"]) for name in ("without", "with")]
        name = f"{row['model']} {row['limit'] // 1000}K {row['lengths']}"
        lines.append(f"{name:30s} {published:>24s} {errors[0]:>24s} {errors[1]:>24s}")
    return "\n".join(lines)


def table(batches: Sequence[dict[str, float]], published: dict[str, float]) -> list[dict[str, Any]]:
    """One row per method: mean seconds, standard error, speedup over DeepSpeed, and published numbers where there are any."""
    static = min((name for name in batches[0] if name.startswith("DeepSpeed")), key=lambda name: mean(b[name] for b in batches))
    names = {"DeepSpeed": static} | {name: name for name in batches[0] if not name.startswith("DeepSpeed")}
    base_s = mean(batch[static] for batch in batches)
    rows = []
    for method, name in names.items():
        seconds = [batch[name] for batch in batches]
        if not all(map(math.isfinite, seconds)):
            failed = sum(map(math.isinf, seconds))
            rows.append({"method": method, "detail": f"{name}: cannot run {failed} of {len(seconds)} batches"})
            continue
        row: dict[str, Any] = {"method": method, "detail": name, "step_s": mean(seconds), "speedup": base_s / mean(seconds)}
        row["error_s"] = stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
        if method in published:
            row |= {"published_s": published[method], "to_published": row["step_s"] / published[method]}
            row["published_speedup"] = published["DeepSpeed"] / published[method]
        rows.append(row)
    return rows


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'method':22s} {'step s':>8s} {'+-':>6s} {'speedup':>8s} {'published s':>12s} {'ratio':>6s} {'speedup':>8s}"]
    for row in rows:
        if "step_s" not in row:
            lines.append(row["detail"])
            continue
        line = f"{row['detail']:22s} {row['step_s']:8.2f} {row['error_s']:6.2f} {row['speedup']:7.2f}x"
        if "published_s" in row:
            line += f" {row['published_s']:12.1f} {row['to_published']:6.3f} {row['published_speedup']:7.2f}x"
        lines.append(line)
    return "\n".join(lines)


def reproduce(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the comparison that the options ask for, as plain data; raises ValueError for options that do not fit together."""
    for name in ("global_batch", "batches"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    if options.cells:
        return {"num_batches": options.batches, "seed": options.seed, "cells": published_cells(options)}
    setup = build_setup(options.model, options.limit, options.gpus, read_profile(options.hardware))
    count = options.batches * options.global_batch
    is_fit = options.lengths in FITS
    lengths = (
        fitted_lengths(options.lengths, options.limit, count, options.seed)
        if is_fit
        else read_lengths(Path(options.lengths), options.limit, count, options.seed)
    )
    starts = range(0, count, options.global_batch)
    batches = [step_seconds(lengths[start : start + options.global_batch], setup, options.methods) for start in starts]
    key = (options.model.lower(), PUBLISHED_LIMITS.get(options.limit, 0), options.lengths)
    # the published times are those of 64 GPUs of this kind and batches of 512
    is_published = (options.gpus, options.global_batch, options.hardware) == (64, 512, "a100-40g") and key in PUBLISHED
    published = dict(zip(PUBLISHED_METHODS, PUBLISHED[key], strict=True)) if is_published else {}
    return {
        "model": options.model,
        "limit": options.limit,
        "lengths": options.lengths,
        "num_gpus": options.gpus,
        "global_batch": options.global_batch,
        "num_batches": options.batches,
        "seed": options.seed,
        "tokens_per_rank": setup.tokens_per_rank,
        "mean_batch_tokens": sum(lengths) / options.batches,
        "cost_source": setup.costs.coefficients.source,
        "rows": table(batches, published),
    }


def report(options: argparse.Namespace, result: Mapping[str, Any]) -> str:
    if options.cells:
        return cells_text(result["cells"])
    return (
        f"{options.model} up to {options.limit} tokens, {options.lengths}, {options.gpus} GPUs, {options.batches} batches of "
        f"{options.global_batch}: {result['mean_batch_tokens'] / 1e6:.2f} M tokens each, {result['tokens_per_rank']} per GPU\n"
        f"{text_of(result['rows'])}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table or JSON; returns 2 if the options do not allow a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-7b", help="a named model or a path to config.json (default: gpt-7b)")
    parser.add_argument("--limit", type=int, default=192_000, help="longest sequence, in tokens (default: 192000)")
    parser.add_argument("--lengths", default="commoncrawl", help="commoncrawl, github, or a file with one length per line")
    parser.add_argument("--gpus", type=int, default=64, help="GPUs, in nodes of eight (default: 64)")
    parser.add_argument("--global-batch", type=int, default=512, help="sequences of a batch (default: 512)")
    parser.add_argument("--batches", type=int, default=16, help="batches to average (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths and their order (default: 0)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="methods besides DeepSpeed (default: all)")
    parser.add_argument("--hardware", default="a100-40g", help="a shipped profile or a path (default: a100-40g)")
    parser.add_argument("--cells", action="store_true", help="print the errors of all published cells instead")
    parser.add_argument("--wikipedia", type=Path, help="the artefact's file of Wikipedia's lengths, for its cells")
    return run_reproduction(parser, reproduce, report, arguments)


if __name__ == "__main__":
    sys.exit(main())

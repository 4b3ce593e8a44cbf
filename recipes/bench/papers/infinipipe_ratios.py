"""InfiniPipe's published speedups (arXiv 2509.21275, section 5) next to predictions, with gathers of weights counted.

    python recipes/bench/papers/infinipipe_ratios.py [--cells 13b/48/commoncrawl ...] [--batches 2] [--global-batch 512]
        [--network-gbit 400] [--seed 0] [--json [FILE]]

LLaMA of 7B, 13B or 30B on 4 nodes of 8 A800-80GB, batches of 512 sequences. A cell is a model, thousands of tokens of the longest
sequence, and lengths. Nothing is fitted: matrix products and attention run at the rates of the profile `a100-80g`, which has the
same chip (0.75 and 0.64 of its peak; FlexSP's public coefficients of GPT-7B have 0.7 to 0.77 for products), NVLink at 0.8 of the
A800's 200 GB/s each way, and the network at 0.8 of a rank's share of `--network-gbit`, the rate of a node. The paper says 400
Gbit; FlexSP's bandwidths on 400 Gbit show that 8 GPUs share it there.

Rows, all with 0.8 of a device's memory and kernels for norms, gates and rotary embeddings:

    InfiniPipe   stages across nodes, Ulysses and ZeRO-3 inside a stage, on 2 or 4 stages, whichever is faster: the paper's plan,
                 as `infinipipe.py` makes it, with the best number of slices
    ours         our planner with everything on, on 1, 2 and 4 stages, whichever is fastest; only this row may offload
    FlexSP       one stage, ZeRO-3 over all ranks: our planner restricted to what FlexSP's solver does
    DeepSpeed    the same, with the paper's degree: 16 for 7B, 32 for the others
    Seq1F1B      InfiniPipe's stages with chunks of a quarter of the longest sequence, as Seq1F1B's runs cut theirs, which all
                 recompute the same number of layers

As in the paper, FlexSP and DeepSpeed keep everything, but for 36 of the 60 layers of 30B. Replays repeat all-to-alls. Seconds are
those of all chunks, of sums over copies, of the optimizer, and of gathers and reduce-scatters: first as plans count them
(`plan/cost/weight_traffic.py`), which is what computing cannot hide, then as if computing hid none of those that cross nodes.
Shares of sending (all-to-alls and gathers) and of idle ranks are of steps in which nothing is hidden.

Lengths are the log-normal fits of `flexsp.py` for CommonCrawl and GitHub, since the paper's are not public; longer ones are left
out. GitHub's fit has 1.0 % above 64K, and the paper says less than 0.6 %.

Published numbers are what the paper's text says; the cells of its figures are not readable in our notes. Of a range, the least
and the most of our cells are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np

from hf_longctx.plan.core.settings import USABLE_SHARE, ClusterSpec, PlannerConfig, default_degrees
from hf_longctx.plan.core.types import ActivationPolicy, FloatArray, GroupShape, LayerPolicy, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.cost.traffic import mean_traffic
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.recipes.bench.papers import infinipipe
from hf_longctx.recipes.bench.papers.command_line import run_reproduction
from hf_longctx.recipes.bench.papers.flexsp import FITS, fitted_lengths
from hf_longctx.recipes.bench.papers.our_plans import counted_s, on_gpus, our_plan
from hf_longctx.sim.baselines import FULL, CheckpointedCosts, Checkpointing, document_load, static_of_degree

NUM_RANKS, RANKS_PER_NODE = 32, 8
K = 1024
# layers, hidden size, MLP size, heads
LLAMA = {"7b": (32, 4096, 11008, 32), "13b": (40, 5120, 13824, 40), "30b": (60, 6656, 17920, 52)}
# degree of DeepSpeed's runs, and layers that DeepSpeed and FlexSP run again
DEEPSPEED_DEGREES = {"7b": 16, "13b": 32, "30b": 32}
CHECKPOINTED = {"7b": 0, "13b": 0, "30b": 36}
# numbers of stages of InfiniPipe, and slices of the longest sequence to try
STAGES = (2, 4)
SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SEQ1F1B_SLICES = (4,)
METHODS = ("InfiniPipe", "ours", "FlexSP", "DeepSpeed", "Seq1F1B")
OTHERS = METHODS[2:]
CELLS = (
    *(f"{model}/{context}/{lengths}" for model in LLAMA for context in (48, 96) for lengths in FITS),
    *(f"13b/{context}/commoncrawl" for context in (64, 128, 192)),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A speedup over another system in some cells, from the text of the paper."""

    text: str
    models: tuple[str, ...]
    contexts: tuple[int, ...]
    lengths: tuple[str, ...]
    other: str
    least: float
    most: float
    # only the largest speedup of these cells is published
    is_largest: bool = False


_ALL, _LONGER, _ANY = tuple(LLAMA), (64, 96, 128, 192), tuple(FITS)
CLAIMS = (
    Claim("7B, 48K, CommonCrawl", ("7b",), (48,), ("commoncrawl",), "FlexSP", 1.31, 1.31),
    Claim("30B, 48K, CommonCrawl", ("30b",), (48,), ("commoncrawl",), "FlexSP", 1.69, 1.69),
    Claim("13B, 64K to 192K", ("13b",), _LONGER, ("commoncrawl",), "FlexSP", 1.30, 1.37),
    Claim("13B, 64K to 192K", ("13b",), _LONGER, ("commoncrawl",), "Seq1F1B", 1.23, 1.63),
    Claim("13B, one case, its lengths not readable", ("13b",), (48, 96), _ANY, "FlexSP", 1.52, 1.52),
    Claim("13B, one case, its lengths not readable", ("13b",), (48, 96), _ANY, "DeepSpeed", 1.71, 1.71),
    Claim("13B, 512 sequences, context not readable", ("13b",), (48, *_LONGER), _ANY, "FlexSP", 1.33, 1.33),
    Claim("13B, 512 sequences, context not readable", ("13b",), (48, *_LONGER), _ANY, "DeepSpeed", 1.49, 1.49),
    Claim("largest of 48K and 96K", _ALL, (48, 96), _ANY, "FlexSP", 1.69, 1.69, is_largest=True),
    Claim("largest of 48K and 96K", _ALL, (48, 96), _ANY, "DeepSpeed", 2.07, 2.07, is_largest=True),
    Claim("largest of 48K", _ALL, (48,), _ANY, "Seq1F1B", 1.27, 1.27, is_largest=True),
    Claim("largest of 96K", _ALL, (96,), _ANY, "Seq1F1B", 1.40, 1.40, is_largest=True),
)


@dataclass(frozen=True)
class PartlyCheckpointed(CheckpointedCosts):
    """Costs of a backward that runs a share of the layers again, with their all-to-alls."""

    share: float = 0.0

    def replay_s(self, num_tokens: float | FloatArray, num_pairs: float | FloatArray, shape: GroupShape) -> FloatArray:
        """Returns seconds of tokens and pairs in the replay, by a group of `shape`."""
        many = 1e6
        sent_s, none_s = (
            self.coefficients.forward.exchange_s(mean_traffic(self.model, self.cluster, shape, number, False))
            for number in (many, 0.0)
        )
        exchanges_s = (sent_s - none_s) / many * np.asarray(num_tokens, dtype=np.float64)
        return self.share * (super().replay_s(num_tokens, num_pairs, shape) + exchanges_s)


@dataclass(frozen=True, slots=True)
class Found:
    """One method on one batch: how it runs, its seconds, and shares of the busiest rank's step."""

    # seconds of the step with the gathers that count, and with all of those that cross nodes
    step_s: float
    shown_s: float
    # all-to-alls and gathers, hidden or not, and waiting for other ranks, over a step that hides nothing
    sent_share: float
    idle_share: float
    detail: str


@dataclass(frozen=True, slots=True)
class Job:
    """A model on the paper's cluster with a limit of tokens."""

    name: str
    limit: int
    cluster: ClusterSpec

    @property
    def model(self) -> ModelSpec:
        num_layers, hidden, mlp, heads = LLAMA[self.name]
        spec = ModelSpec(num_layers, hidden, mlp, heads, heads, 128, 32000, self.limit, bytes_per_element=2, exchange_parts=1)
        return on_gpus(spec)

    def costs(self, num_stages: int) -> CostModel:
        """Costs of Ulysses groups whose ranks share the parameters of a stage."""
        coefficients = default_coefficients(self.model, self.cluster)
        shards = self.cluster.num_ranks // num_stages
        return CostModel(self.model, self.cluster, coefficients, "ulysses", parameters="sharded", shard_ranks=shards)

    @property
    def usable_bytes(self) -> int:
        return int(USABLE_SHARE * self.cluster.hardware.device_bytes)

    def one_stage(self, degrees: tuple[int, ...]) -> tuple[CostModel, PlannerConfig]:
        """Costs and settings of FlexSP and DeepSpeed, whose ranks hold as many tokens as fit at their checkpointing."""
        costs, num_layers, again = self.costs(1), self.model.num_layers, CHECKPOINTED[self.name]
        layers = FULL.policy(again).layers + (LayerPolicy(),) * (num_layers - again)
        policy = ActivationPolicy(0, 0, layers if again else ())
        byte_model = ByteModel(self.model)
        left = self.usable_bytes - byte_model.states("sharded", NUM_RANKS)
        like = document_load(num_layers, GroupShape(degrees[-1], degrees[-1]))
        tokens = max(byte_model.longest(left, 0, lambda _: (policy,), like, tile) for tile in (0, 2048))
        checkpointed = PartlyCheckpointed.of(costs, FULL if again else Checkpointing("everything kept"))
        return replace(checkpointed, share=again / num_layers), PlannerConfig(tokens, degrees, time_aware=False, nested=False)


def found_of(plan: StepPlan, costs: CostModel, detail: str) -> Found:
    """Predicts a plan, with gathers, sums of gradients and the optimizer."""
    run, weights = evaluate_plan(plan, costs, with_events=False), weight_seconds(plan, costs)
    once_s = weights.sum_s + weights.update_s + weights.away_s - weights.hidden_s
    step_s = counted_s(plan, costs) + once_s
    _, most_s = weights.step_bounds_s(run.step_s, run.once_s, run.ranks)
    sent_s = mean(rank.exchange_s + gathers_s for rank, gathers_s in zip(run.ranks, weights.gathers_s, strict=True))
    idle_s = mean(rank.idle_s for rank in run.ranks)
    crosses_nodes = plan.block_ranks > RANKS_PER_NODE
    return Found(step_s, most_s if crosses_nodes else step_s, sent_s / most_s, idle_s / most_s, detail)


def fastest(found: Sequence[Found]) -> Found:
    """The fastest of several ways to run, and the fewest seconds of any of them with all gathers across nodes."""
    return replace(min(found, key=lambda each: each.step_s), shown_s=min(each.shown_s for each in found))


def on_stages(job: Job, lengths: Sequence[int], method: str, slices: Sequence[int]) -> Found:
    """InfiniPipe or its baseline on each number of stages and slices, whichever is fastest."""
    found = []
    for num_stages in STAGES:
        setting = infinipipe.Setting(tuple(lengths), job.usable_bytes, job.costs(num_stages), num_stages)
        free_s = {count: infinipipe.unlimited_s(setting, count) for count in slices}
        _, groups = infinipipe.fastest(setting, method, free_s)
        if groups:
            chunks = sum(len(group.chunks) for group in groups)
            detail = f"{num_stages} stages, {len(groups)} pipeline(s), {chunks} chunks"
            found.append(found_of(setting.plan(groups), setting.costs, detail))
    return fastest(found)


def with_flexsp(job: Job, lengths: Sequence[int]) -> Found:
    degrees = default_degrees(NUM_RANKS, job.model.num_heads, "ulysses")
    costs, config = job.one_stage(tuple(degree for degree in degrees if degree & (degree - 1) == 0))
    plan = plan_step(0, lengths, costs, config)
    return found_of(plan, costs, f"{len(plan.micro_batches)} micro-batches, {config.tokens_per_rank} tokens on a rank")


def with_deepspeed(job: Job, lengths: Sequence[int]) -> Found:
    degree = DEEPSPEED_DEGREES[job.name]
    costs, config = job.one_stage((degree,))
    problem = GroupingProblem.build(lengths, costs, config)
    placed = place_layout(static_of_degree(problem, degree), NUM_RANKS, RANKS_PER_NODE, node_aligned=True)
    plan = build_plan(0, lengths, placed, problem.shapes, costs, problem.block_ranks)
    return found_of(plan, costs, f"<{degree}>, {len(plan.micro_batches)} micro-batches")


def with_ours(job: Job, lengths: Sequence[int]) -> Found:
    """Our planner on each number of stages, set up as a run or `hf-longctx plan` does it."""
    found = []
    for num_stages in (1, *STAGES):
        plan, setup = our_plan(job.model, job.cluster, lengths, num_stages)
        detail = f"{num_stages} stage(s), {plan.parameters}, {len(plan.micro_batches)} micro-batch(es)"
        found.append(found_of(plan, setup.costs, detail))
    return fastest(found)


MAKERS: dict[str, Callable[[Job, Sequence[int]], Found]] = {
    "InfiniPipe": lambda job, lengths: on_stages(job, lengths, "paper", SLICES),
    "ours": with_ours,
    "FlexSP": with_flexsp,
    "DeepSpeed": with_deepspeed,
    "Seq1F1B": lambda job, lengths: on_stages(job, lengths, "fixed chunks", SEQ1F1B_SLICES),
}


def read_cell(text: str) -> tuple[str, int, str]:
    """Parses a cell such as "13b/48/commoncrawl" into model, thousands of tokens, and lengths."""
    model, context, lengths = [*text.split("/"), "", ""][:3]
    if model not in LLAMA or not context.isdecimal() or not int(context) or lengths not in FITS or text.count("/") > 2:
        raise ValueError(
            f"--cells: {text!r} is not a cell; give one of {', '.join(LLAMA)}, thousands of tokens, and one of "
            f"{', '.join(FITS)}, for example 13b/48/commoncrawl"
        )
    return model, int(context), lengths


def row_of(cell: str, options: argparse.Namespace) -> dict[str, Any]:
    """Means over batches of every method in one cell, and the speedups of InfiniPipe's plan."""
    model, context, lengths = read_cell(cell)
    spec = read_profile("a100-80g").spec
    network = USABLE_SHARE * options.network_gbit * 1e9 / 8 / RANKS_PER_NODE
    hardware = replace(spec, name="a800", link_bytes_per_s=USABLE_SHARE * 2e11, network_bytes_per_s=network)
    job = Job(model, context * K, ClusterSpec(NUM_RANKS, RANKS_PER_NODE, hardware))
    drawn = fitted_lengths(lengths, job.limit, options.batches * options.global_batch, options.seed)
    batches = [drawn[at : at + options.global_batch] for at in range(0, len(drawn), options.global_batch)]
    found = {name: [maker(job, batch) for batch in batches] for name, maker in MAKERS.items()}
    row: dict[str, Any] = {"model": model, "context": context, "lengths": lengths, "tokens": sum(drawn) / len(batches)}
    for field in ("step_s", "shown_s", "sent_share", "idle_share"):
        row[field] = {name: mean(getattr(each, field) for each in some) for name, some in found.items()}
    row["detail"] = {name: some[0].detail for name, some in found.items()}
    for field, seconds in (("counted", row["step_s"]), ("shown", row["shown_s"])):
        row[field] = {name: seconds[name] / seconds["InfiniPipe"] for name in (*OTHERS, "ours")}
    return row


def compared(claim: Claim, rows: Sequence[Mapping[str, Any]], field: str) -> dict[str, Any]:
    """Least and most of our speedups in the cells of a claim, with their relative errors; empty without such a cell."""
    found = [
        row[field][claim.other]
        for row in rows
        if row["model"] in claim.models and row["context"] in claim.contexts and row["lengths"] in claim.lengths
    ]
    if not found:
        return {}
    least, most = (max(found) if claim.is_largest else min(found)), max(found)
    return {"least": least, "most": most, "errors": [least / claim.least - 1, most / claim.most - 1]}


def reproduce(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the rows of all cells and compares them; raises ValueError for options that do not allow a comparison."""
    for name in ("batches", "global_batch", "network_gbit"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give more than 0")
    for cell in options.cells:
        read_cell(cell)
    rows = [row_of(cell, options) for cell in options.cells]
    claims = [
        {
            "text": claim.text,
            "other": claim.other,
            "published": [claim.least, claim.most],
            "counted": compared(claim, rows, "counted"),
            "shown": compared(claim, rows, "shown"),
        }
        for claim in CLAIMS
        if compared(claim, rows, "counted")
    ]
    return {"network_gbit": options.network_gbit, "batches": options.batches, "rows": rows, "claims": claims}


def report(_: argparse.Namespace, result: Mapping[str, Any]) -> str:
    lines = ["InfiniPipe's speedup over FlexSP, DeepSpeed, Seq1F1B and ours: gathers as counted, and none hidden across nodes"]
    for row in result["rows"]:
        name = f"{row['model']} {row['context']}K {row['lengths']}"
        pairs = [f"{row['counted'][other]:.2f} {row['shown'][other]:.2f}" for other in (*OTHERS, "ours")]
        lines.append(f"{name:22s} " + "  ".join(pairs))
        for method in METHODS:
            shares = f"{row['sent_share'][method]:.0%} sending, {row['idle_share'][method]:.0%} idle"
            seconds = f"{row['step_s'][method]:7.2f} s, none hidden {row['shown_s'][method]:7.2f} s"
            lines.append(f"    {method:10s} {seconds}, {shares}; {row['detail'][method]}")
    names = f"{'published':42s} {'over':10s} {'paper':>10s}"
    lines += ["", names + "".join(f" {name:>12s} {'error':>13s}" for name in ("counted", "none hidden"))]
    for claim in result["claims"]:
        paper = _between(*claim["published"])
        line = f"{claim['text']:42s} {claim['other']:10s} {paper:>10s}"
        for field in ("counted", "shown"):
            ours = claim[field]
            errors = " ".join(dict.fromkeys(f"{error:+.0%}" for error in ours["errors"]))
            line += f" {_between(ours['least'], ours['most']):>12s} {errors:>13s}"
        lines.append(line)
    return "\n".join(lines)


def _between(least: float, most: float) -> str:
    return f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f}..{most:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables or JSON; returns 2 if the options do not allow a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cells", nargs="+", default=CELLS, help="model/thousands of tokens/lengths (default: all of the paper's)"
    )
    parser.add_argument("--batches", type=int, default=2, help="batches to average (default: 2)")
    parser.add_argument("--global-batch", type=int, default=512, help="sequences of a batch (default: 512)")
    parser.add_argument("--network-gbit", type=float, default=400.0, help="Gbit/s of a node's network (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths and their order (default: 0)")
    return run_reproduction(parser, reproduce, report, arguments)


if __name__ == "__main__":
    sys.exit(main())

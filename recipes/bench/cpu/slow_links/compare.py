"""Compares planned steps with fixed degrees, DeepSpeed-Ulysses and flattening with DDP, over links slowed by the kernel.

    python recipes/bench/cpu/slow_links/compare.py [--links 100/100 25/8 10/3] [--tokens-per-rank 2048 512] [--rounds 5]
        [--require 0.98] [--require-stages 1.3] [--json FILE]

Four ranks, two on each of two "nodes", train a Llama of four layers (hidden size 128, fp32) on documents with the lengths of
agents' sessions scaled down: log-normal, median 400, 64 to 2,048 tokens. Every setting of links starts the ranks anew, measures
the cost model on these links (`hf-longctx calibrate`), and then runs every method once per round, forwards and backwards in turn,
so that other work on the machine disturbs all alike. Ratios compare times of the same round.

`predicted` is the cost model's before the run. `--tokens-per-rank` is what a rank can hold, a stand-in for memory: fixed degrees
must hold the longest document, as in a real run. Flattening does not keep this limit. DeepSpeed is measured if it is installed.
`--require` fails unless the plan is this many times as fast as the best fixed degree, in the median of rounds, in every setting.

Two stages, one on each node, share weights inside nodes alone. They are compared with plans of one stage whose weights are
sharded over all ranks, which gather them over slow links. `--require-stages` fails unless the faster kind of stages is this many
times as fast on the last links, and the number of stages that a run chooses at least 0.98 times as fast on the first ones, unless
the run chooses one stage there, with the same plan.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from hf_longctx.recipes.bench.cpu.slow_links.methods import (
    AUTO,
    DEEPSPEED,
    FIXED,
    FLATTENING,
    ONE_STAGE,
    PLANNED,
    SHARDED,
    STAGED,
    Job,
    Measurement,
    run_job,
)
from hf_longctx.recipes.bench.cpu.slow_links.network import Machine, problems_of, run_ranks

NUM_RANKS, RANKS_PER_NODE = 4, 2
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MEDIAN_TOKENS, SIGMA = 400, 0.6
LEAST_TOKENS, MOST_TOKENS = 64, 2048
# seconds in which the ranks of one setting must be done
_TIMEOUT_S = 3600.0
LOSS_TOLERANCE = 1e-4
# ratio to one stage below which a run must never choose a number of stages
LEAST_AUTO = 0.98


@dataclass(frozen=True)
class Row:
    """One method in one setting. ratios: its seconds divided by the plan's, for each round. predicted_s: 0 where unknown."""

    method: str
    links: str
    tokens_per_rank: int
    step_s: float
    predicted_s: float
    ratios: list[float]
    predicted_ratio: float
    losses: list[float]
    layouts: list[str]

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table per setting; fails if losses differ or a requirement is not met."""
    options = parse(arguments)
    machines = [Machine(NUM_RANKS, RANKS_PER_NODE, *speeds, options.core_share) for speeds in options.links]
    if problems := [problem for machine in machines for problem in problems_of(machine)]:
        raise SystemExit("\n".join(dict.fromkeys(problems)))
    lengths = draw_lengths(options.steps, options.documents)
    flat = [length for step in lengths for length in step]
    print(
        f"{options.steps} steps of {options.documents} documents, {sum(flat)} tokens, {min(flat)} to {max(flat)}; "
        f"{options.rounds} rounds; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    rows: list[Row] = []
    for machine, speeds in zip(machines, options.links, strict=True):
        found = run(machine, lengths, options)
        for tokens_per_rank in options.tokens_per_rank:
            here = summarise(found, "/".join(f"{speed:g}" for speed in speeds), tokens_per_rank)
            print_table(here, machine, tokens_per_rank)
            rows += here
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if failures := missed(rows, options.require) + missed_stages(rows, options.require_stages):
        raise SystemExit("\n".join(failures))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", nargs="+", type=two_speeds, default=[(100.0, 100.0), (25.0, 8.0), (10.0, 3.0)],
                        metavar="NODE/NETWORK", help="MB/s inside a node and between nodes; 0/0: loopback as it is")  # fmt: skip
    parser.add_argument("--tokens-per-rank", nargs="+", type=int, default=[2048, 512], help="most tokens that a rank holds")
    parser.add_argument(
        "--core-share", type=float, default=0.25, help="share of a core for each rank (default: 0.25; 0: no limit)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every method (default: 5)")
    parser.add_argument("--steps", type=int, default=2, help="steps of every method in a round (default: 2)")
    parser.add_argument("--documents", type=int, default=48, help="documents of a step, a multiple of the ranks (default: 48)")
    parser.add_argument("--calibrate-seconds", type=float, default=60.0, help="for measuring the cost model (default: 60)")
    parser.add_argument("--methods", nargs="+", default=None, help="only methods whose names begin so; the plan always runs")
    parser.add_argument("--details", action="store_true", help="print the table of the cost model's measurements, too")
    parser.add_argument("--require", type=float, default=None, metavar="RATIO",
                        help="fail unless the plan is this many times as fast as the best fixed degree")  # fmt: skip
    parser.add_argument("--require-stages", type=float, default=None, metavar="RATIO",
                        help="fail unless two stages are this many times as fast as one on the last links")  # fmt: skip
    parser.add_argument("--json", type=Path, default=None, help="also write the rows to this file")
    return parser.parse_args(arguments)


def two_speeds(text: str) -> tuple[float, float]:
    """Parses speeds such as `25/8`."""
    node, _, network = text.partition("/")
    return float(node), float(network or node)


def draw_lengths(num_steps: int, num_documents: int, seed: int = 0) -> list[list[int]]:
    """Draws the lengths of every step."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(MEDIAN_TOKENS), SIGMA, (num_steps, num_documents))
    return np.clip(drawn.astype(int), LEAST_TOKENS, MOST_TOKENS).tolist()


def fixed_degrees(tokens_per_rank: int) -> list[int]:
    """Degrees with which a group can hold the longest document, so that a run could use them for all of its steps."""
    return [degree for degree in (1, 2, 4) if degree <= NUM_RANKS and degree * tokens_per_rank >= MOST_TOKENS]


def methods_of(rooms: Sequence[int], wanted: Sequence[str] | None) -> list[tuple[str, int]]:
    """Names of methods, each with the tokens that a rank may hold; other systems run once for all of these rooms."""
    # a node of one rank keeps no copy in parts
    one_stage = ONE_STAGE if RANKS_PER_NODE > 1 else (SHARDED,)
    ours = [
        (name, room)
        for room in rooms
        for name in (PLANNED, *one_stage, *STAGED, AUTO, *(f"{FIXED} <{degree}>" for degree in fixed_degrees(room)))
    ]
    others = []
    if importlib.util.find_spec("deepspeed") is not None:
        others += [f"{DEEPSPEED} <{degree}>" for degree in fixed_degrees(max(rooms)) if degree > 1]
    others.append(FLATTENING)
    found = [*ours, *((name, 0) for name in others)]
    return [each for each in found if wanted is None or each[0] == PLANNED or each[0].startswith(tuple(wanted))]


def run(machine: Machine, lengths: list[list[int]], options: argparse.Namespace) -> list[Measurement]:
    """Starts the ranks and returns what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        methods = methods_of(options.tokens_per_rank, options.methods)
        job = Job(folder, CONFIG, lengths, methods, options.rounds, options.calibrate_seconds)
        run_ranks(machine, partial(run_job, job), Path(folder), _TIMEOUT_S)
        calibration = job.calibration.read_text()
        print("", calibration if options.details else calibration.splitlines()[-1], sep="\n", flush=True)
        return [Measurement(**json.loads(line)) for line in job.results.read_text().splitlines()]


def summarise(found: Sequence[Measurement], links: str, tokens_per_rank: int) -> list[Row]:
    """Makes one row per method that can run with so much room on a rank, in the order of the first round."""
    by_method: dict[str, list[Measurement]] = {}
    for each in sorted(found, key=lambda each: each.round):
        others = [FLATTENING, *(f"{DEEPSPEED} <{degree}>" for degree in fixed_degrees(tokens_per_rank))]
        if each.tokens_per_rank == tokens_per_rank or each.method in others:
            by_method.setdefault(each.method, []).append(each)
    planned = by_method[PLANNED]
    rows = []
    for method, runs in by_method.items():
        predicted_s, ours_s = sum(runs[0].predicted_s), sum(planned[0].predicted_s)
        rows.append(
            Row(
                method,
                links,
                tokens_per_rank,
                step_s=median(sum(each.step_s) / len(each.step_s) for each in runs),
                predicted_s=predicted_s / len(runs[0].step_s),
                ratios=[sum(each.step_s) / sum(ours.step_s) for each, ours in zip(runs, planned, strict=True)],
                predicted_ratio=predicted_s / ours_s if ours_s else 0.0,
                losses=runs[0].losses,
                layouts=runs[0].layouts,
            )
        )
    return rows


def print_table(rows: Sequence[Row], machine: Machine, tokens_per_rank: int) -> None:
    print(f"\n{machine.text()}; {tokens_per_rank:,} tokens on a rank")
    print(
        f"{'method':27s} {'predicted s':>12s} {'measured s':>11s} {'plan is faster':>15s} {'of rounds':>13s} "
        f"{'predicted':>10s} {'loss':>9s}  layout of the first step"
    )
    for row in rows:
        predicted = (f"{row.predicted_s:.2f}", f"{row.predicted_ratio:.2f}x") if row.predicted_s else ("-", "-")
        rounds = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        print(
            f"{row.method:27s} {predicted[0]:>12s} {row.step_s:11.2f} {row.ratio:14.2f}x {rounds:>13s} {predicted[1]:>10s} "
            f"{row.losses[-1]:9.5f}  {next(iter(row.layouts), '')}",
            flush=True,
        )
    for row in rows:
        if row.method in (AUTO, *STAGED, *ONE_STAGE[1:]) and (ratios := to_one_stage(row, rows)):
            (one,) = (each for each in rows if each.method == SHARDED)
            print(
                f"{row.method}: {median(ratios):.2f}x as fast as {SHARDED} ({min(ratios):.2f}..{max(ratios):.2f} of rounds, "
                f"predicted {one.predicted_s / row.predicted_s:.2f}x)",
                flush=True,
            )


def to_one_stage(row: Row, rows: Sequence[Row]) -> list[float]:
    """Seconds of one stage with sharded weights over those of `row`, for each round; empty if that was not measured."""
    one = next((each for each in rows if each.method == SHARDED), None)
    return [] if one is None else [theirs / ours for theirs, ours in zip(one.ratios, row.ratios, strict=True)]


def missed(rows: Sequence[Row], required: float | None) -> list[str]:
    """Lists differing losses and, with `required`, settings in which the plan is too slow beside the best fixed degree."""
    failures = []
    for links, tokens in dict.fromkeys((row.links, row.tokens_per_rank) for row in rows):
        here = [row for row in rows if (row.links, row.tokens_per_rank) == (links, tokens)]
        losses = here[0].losses
        failures += [
            f"{links} MB/s, {tokens} tokens on a rank: {row.method} has losses {row.losses}, but {here[0].method} has {losses}"
            for row in here
            if max(abs(a - b) for a, b in zip(row.losses, losses, strict=True)) > LOSS_TOLERANCE
        ]
        best = min((row for row in here if row.method.startswith(FIXED)), key=lambda row: row.ratio, default=None)
        if required is not None and best is not None and best.ratio < required:
            failures.append(
                f"{links} MB/s, {tokens} tokens on a rank: {best.ratio:.3f} times as fast as {best.method}, required {required}"
            )
    return failures


def missed_stages(rows: Sequence[Row], required: float | None) -> list[str]:
    """Lists settings in which stages are too slow beside one stage with sharded weights; empty without `required`.

    The first links should be the fastest, and the last ones the slowest.
    """
    failures = []
    settings = list(dict.fromkeys((row.links, row.tokens_per_rank) for row in rows))
    for links, tokens in settings if required is not None else ():
        here = [row for row in rows if (row.links, row.tokens_per_rank) == (links, tokens)]
        ratios = {row.method: median(found) for row in here if (found := to_one_stage(row, here))}
        wanted = {}
        # two runs of one plan differ by chance alone
        same = len({tuple(row.layouts) for row in here if row.method in (AUTO, SHARDED)}) == 1
        if links == settings[0][0] and not same:
            wanted[AUTO] = ratios.get(AUTO), LEAST_AUTO
        if links == settings[-1][0]:
            wanted["2 stages"] = max((ratios[name] for name in STAGED if name in ratios), default=None), required
        failures += [
            f"{links} MB/s, {tokens} tokens on a rank: {name} {ratio:.3f} times as fast as {SHARDED}, required {least}"
            for name, (ratio, least) in wanted.items()
            if ratio is not None and ratio < least
        ]
    return failures


if __name__ == "__main__":
    main()

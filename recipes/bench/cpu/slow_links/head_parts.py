"""Measures exchanges of heads in parts beside attention, over links slowed by the kernel, against exchanges of all heads at once.

    python recipes/bench/cpu/slow_links/head_parts.py [--links 100 25 6] [--tokens 2048] [--rounds 7]

Four ranks of one node share a document by Ulysses. Each round runs attention of one layer forward and backward in both ways, one
after the other. Ratios compare times of the same round, on the slowest rank. `predicted` is the ratio by the rule of the cost
model (`CostModel._hidden_parts_s`, whose ranks do not slow each other here) from the seconds of attention alone and of exchanges
alone, which are measured beside them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import head_parts, head_shares
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span
from hf_longctx.recipes.bench.cpu.slow_links.network import Machine, limit_cores, problems_of, run_ranks
from hf_longctx.runtime.attention import sequence_parallel
from hf_longctx.runtime.attention.sequence_parallel import LayerCall, sequence_parallel_attention
from hf_longctx.runtime.process_groups import GroupPool

NUM_RANKS, HEADS, HEAD_DIM = 4, 16, 64
# KV heads: parts with KV heads of their own, and parts that share one
KV_HEADS = (16, 4)
_PARTS = 4
_TIMEOUT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table with one row for each speed of links and number of KV heads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", nargs="+", type=float, default=[100.0, 25.0, 6.0], help="MB/s between ranks")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the document (default: 2048)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of both ways (default: 7)")
    parser.add_argument("--core-share", type=float, default=0.25, help="share of a core for each rank (default: 0.25)")
    options = parser.parse_args(arguments)
    machines = [Machine(NUM_RANKS, NUM_RANKS, speed, speed, options.core_share) for speed in options.links]
    if problems := [problem for machine in machines for problem in problems_of(machine)]:
        raise SystemExit("\n".join(dict.fromkeys(problems)))
    print(
        "| MB/s | KV heads | attention alone, s | exchanges alone, s | at once, s | in parts, s | ratio (worst to best) "
        "| predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for machine in machines:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(machine, partial(measure, Path(folder), options.tokens, options.rounds), Path(folder), _TIMEOUT_S)
            for num_kv, found in json.loads((Path(folder) / "found.json").read_text()).items():
                print(row(machine.node_mb_s, int(num_kv), **found), flush=True)


def row(mb_s: float, num_kv: int, whole: list[float], parts: list[float], attention: list[float], exchanges: list[float]) -> str:
    """Makes a row of the table from the seconds of every round."""
    ratios = sorted(a / b for a, b in zip(whole, parts, strict=True))
    cut = head_parts(HEADS, num_kv, NUM_RANKS, _PARTS)
    assert cut is not None
    hidden_s = min((1 - cut.exposed) * median(exchanges), (1 - 1 / cut.count) * median(attention))
    both_s = median(attention) + median(exchanges)
    return (
        f"| {mb_s:g} | {num_kv} | {median(attention):.3g} | {median(exchanges):.3g} | {median(whole):.3g} "
        f"| {median(parts):.3g} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
        f"| {both_s / (both_s - hidden_s):.2f} |"
    )


def measure(folder: Path, num_tokens: int, rounds: int) -> None:
    """Writes the seconds of every round to `found.json` in the folder; runs on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lone = GroupPool((1,), _TIMEOUT_S)
    dist.init_process_group("gloo")
    pool = GroupPool((NUM_RANKS,), _TIMEOUT_S)
    pool.part_bytes = 1
    group = SequenceGroup(tuple(range(NUM_RANKS)), "ulysses", (Chunk(0, (Span(0, 0, num_tokens),)),), ())
    found = {}
    for num_kv in KV_HEADS:
        ways = {
            "whole": partial(attend, pool, group, num_kv, 1),
            "parts": partial(attend, pool, group, num_kv, _PARTS),
            "attention": partial(attend_alone, lone, num_tokens, num_kv),
            "exchanges": partial(exchange_alone, pool, group, num_kv),
        }
        for way in ways.values():
            way()
        limit_cores(folder, True)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                seconds[name].append(slowest_s(way))
        found[num_kv] = seconds
        limit_cores(folder, False)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()


def slowest_s(way: Callable[[], None]) -> float:
    """Returns the seconds of the slowest rank; collective."""
    dist.barrier()
    start_s = time.monotonic()
    way()
    seconds = torch.tensor(time.monotonic() - start_s)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def heads(num_tokens: int, num_q: int, num_kv: int) -> list[Tensor]:
    return [torch.randn(1, num, num_tokens, HEAD_DIM, requires_grad=True) for num in (num_q, num_kv, num_kv)]


def attend(pool: GroupPool, group: SequenceGroup, num_kv: int, parts: int) -> None:
    """Runs attention of the group forward and backward."""
    pool.exchange_parts = parts
    context = pool.context(group, group.chunks[0])
    sequence_parallel_attention(*heads(context.num_tokens, HEADS, num_kv), LayerCall(HEAD_DIM**-0.5), context).sum().backward()


def attend_alone(lone: GroupPool, num_tokens: int, num_kv: int) -> None:
    """Runs attention of this rank's heads forward and backward, without exchanges."""
    chunk = Chunk(0, (Span(0, 0, num_tokens),))
    context = lone.context(SequenceGroup((0,), "local", (chunk,), ()), chunk)
    own = heads(num_tokens, HEADS // NUM_RANKS, num_kv // NUM_RANKS)
    sequence_parallel_attention(*own, LayerCall(HEAD_DIM**-0.5), context).sum().backward()


def exchange_alone(pool: GroupPool, group: SequenceGroup, num_kv: int) -> None:
    """Runs the exchanges of all heads forward and backward, without attention."""
    context = pool.context(group, group.chunks[0])
    shares = head_shares(HEADS, num_kv, NUM_RANKS)
    q_1hSD, k_1gSD, v_1gSD = sequence_parallel._scatter_heads(*heads(context.num_tokens, HEADS, num_kv), shares, context)
    out_1THD = sequence_parallel.gather_heads(q_1hSD.transpose(1, 2), shares, context)
    (out_1THD.sum() + k_1gSD.sum() + v_1gSD.sum()).backward()


if __name__ == "__main__":
    main()

"""CPU seconds of a linear attention layer on gloo ranks that share one document, against one rank's share of the work.

    python recipes/bench/cpu/state_passing.py [--tokens 32768] [--ranks 4] [--rounds 3] [--require 1.15]

Runs forward and backward of one gated delta net (projections, convolution, scan, gated norm) over a document, first on one rank
that has all tokens, then on all ranks, which pass states on (ring) or share out heads (Ulysses). The ratio is the busiest rank's
CPU seconds to those of one rank divided by the number of ranks. It takes CPU seconds and not the clock because ranks may share
cores, and a rank that waits for a message takes none. The clock is printed too; it means something with a core for each rank.

The scan of a rank that does not know its first state has more columns, so the ratio depends on how much of the layer the scan is:
`--hidden 4096 --heads 32` is the layer of Qwen3.5-9B, the default a narrow layer that needs little memory. The ratio of
multiplications, which the layer's sizes promise, is printed beside.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.models.states import MixerPatch, mixers_of
from hf_longctx.plan.core.types import Chunk, GroupShape, SequenceGroup, Span
from hf_longctx.plan.cost.traffic import added_products
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.process_groups import GroupPool

_TIMEOUT_S = 3600.0
# size of the heads of queries, keys and values
_HEAD = 128
# (CPU seconds, seconds by the clock) of one forward and backward
Times = tuple[float, float]


def main(argv: list[str] | None = None) -> None:
    """Prints a table; exits with an error if a required ratio is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the document (default: 32768)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share it (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; one more runs first (default: 3)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (default: 1024)")
    parser.add_argument("--heads", type=int, default=4, help="value heads; half as many key heads (default: 4)")
    parser.add_argument("--require", type=float, help="largest ratio of the ring that is no error")
    arguments = parser.parse_args(argv)
    if arguments.heads % 2:
        parser.error(f"--heads {arguments.heads} is odd, but two value heads share a key head; give an even number")
    # every process reads this when it starts
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (arguments, folder), nprocs=arguments.ranks)
        found: dict[str, list[list[Times]]] = torch.load(Path(folder) / "times")
    ratios = _print(found, arguments)
    if arguments.require is not None and ratios["ring"] > arguments.require:
        raise SystemExit(f"ratio of the ring {ratios['ring']:.3f}, required at most {arguments.require:g}")


def _print(found: dict[str, list[list[Times]]], arguments: argparse.Namespace) -> dict[str, float]:
    """Prints a row for each way; returns the ratios. found: for each way and round, the times of every rank that ran."""
    spec = model_spec(_model(arguments, "meta"))
    promised = 1 + added_products(spec, GroupShape(arguments.ranks)) / (spec.states.parameters + spec.states.scan_products)
    print(
        f"gated delta net of {arguments.heads} heads of {_HEAD}, hidden size {arguments.hidden}, {arguments.tokens} tokens, "
        f"fp32, forward and backward, one thread per rank; medians of {arguments.rounds} rounds"
    )
    print(f"{'':12}{'ranks':>6}{'CPU s, busiest':>16}{'ratio':>8}{'by products':>13}{'clock s':>9}")
    ratios: dict[str, float] = {}
    lone_s = median(max(cpu_s for cpu_s, _ in ranks) for ranks in found["one rank"])
    for name, rounds in found.items():
        busiest_s = median(max(cpu_s for cpu_s, _ in ranks) for ranks in rounds)
        clock_s = median(max(clock for _, clock in ranks) for ranks in rounds)
        num_ranks = len(rounds[0])
        ratios[name] = busiest_s * num_ranks / lone_s
        products = f"{promised:.3f}" if name == "ring" else "1.000"
        print(f"{name:12}{num_ranks:6}{busiest_s:16.2f}{ratios[name]:8.3f}{products:>13}{clock_s:9.2f}")
    return ratios


def _model(arguments: argparse.Namespace, device: str) -> Any:
    """A model of one layer, whose mixer is measured."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=arguments.hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        head_dim=_HEAD,
        linear_num_value_heads=arguments.heads,
        linear_num_key_heads=arguments.heads // 2,
        linear_key_head_dim=_HEAD,
        linear_value_head_dim=_HEAD,
        layer_types=["linear_attention"],
    )
    with torch.device(device):
        return transformers.Qwen3_5ForCausalLM(config)


def _measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    num_ranks, num_tokens = arguments.ranks, arguments.tokens
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timeout)
    pool = GroupPool((num_ranks,), _TIMEOUT_S)
    model = _model(arguments, "cpu")
    MixerPatch().apply(model)
    (mixer,) = mixers_of(model).values()

    def run(context: GroupContext) -> Callable[[], None]:
        hidden = torch.randn(1, context.num_tokens, arguments.hidden, requires_grad=True)

        def step() -> None:
            mixer(hidden, longctx=context).square().mean().backward()
            model.zero_grad()

        return step

    def shared(ulysses: int, positions: range) -> GroupContext:
        chunk = Chunk(0, (Span(0, 0, num_tokens),))
        return pool.context(SequenceGroup.of(GroupShape(len(positions), ulysses), positions, (chunk,)), chunk)

    everyone = range(num_ranks)
    ways = {"ring": shared(1, everyone)}
    if num_ranks <= arguments.heads:
        ways["ulysses"] = shared(num_ranks, everyone)
    found: dict[str, list[list[Times]]] = {name: [] for name in ("one rank", *ways)}
    for index in range(arguments.rounds + 1):
        for name in found:
            if name != "one rank" or rank == 0:
                times = _timed(run(ways[name] if name in ways else shared(1, range(1))))
            else:
                times = None
            by_rank: list[Any] = [None] * num_ranks
            # others wait here while one rank works alone
            dist.all_gather_object(by_rank, times)
            if index:
                found[name].append([each for each in by_rank if each is not None])
    if rank == 0:
        torch.save(found, Path(folder) / "times")
    pool.close()
    dist.destroy_process_group()


def _timed(step: Callable[[], None]) -> Times:
    cpu_s, clock_s = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu_s, time.perf_counter() - clock_s


if __name__ == "__main__":
    main()

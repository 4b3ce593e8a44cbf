"""Rows and tokens per second that a stream gives with one reader and with several, on gloo ranks of this machine.

    python recipes/bench/cpu/data/stream_readers.py [--ranks 8] [--readers 8] [--steps 12] [--rounds 3] [--json FILE]

Draws planned batches and trains nothing, so the rate is that of reading, lengths, plans and the exchange of tokens. Two sources:
`waits` gives a row after `--wait-ms`, as one that comes over a network, and `tokenises` makes tokens from text by a BPE tokenizer
(trained here on random words), which takes CPU time: readers are then as fast as the machine has free cores. Both ways take turns
in every round, on the same ranks; the first step and what was read before it do not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from hf_longctx import ShardedStream
from hf_longctx.hf.data.resume import Place
from hf_longctx.hf.data.streams.planned_stream import PlannedStream, StreamSource
from hf_longctx.hf.data.streams.rows import StreamRules
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import sums_over_ranks
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec, PlannerConfig
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.process_groups import GroupPool

VOCAB_SIZE = 4096
LONGEST = 4096
SOURCES = ("waits", "tokenises")
LOOKAHEAD = 2


@dataclass(frozen=True)
class Setting:
    """Numbers of ranks, readers, steps and rounds, the rows of a step, and the milliseconds that a row takes to come."""

    ranks: int
    readers: int
    steps: int
    rounds: int
    rows_per_step: int
    wait_ms: float


@dataclass(frozen=True)
class Rate:
    """Medians over the rounds for one source and number of readers."""

    source: str
    readers: int
    rows_per_s: float
    tokens_per_s: float


class WaitingRows:
    """Random rows, each of which takes a while to come."""

    def __init__(self, reader: int, wait_s: float) -> None:
        self.reader, self.wait_s = reader, wait_s

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = random.Random(self.reader)
        while True:
            time.sleep(self.wait_s)
            yield {"input_ids": [generator.randrange(VOCAB_SIZE)] * generator.choice([128, 256, 512, LONGEST])}


class TextRows:
    """Rows whose tokens are made from text when they are read."""

    def __init__(self, reader: int, tokenizer: Tokenizer) -> None:
        self.reader, self.tokenizer = reader, tokenizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = random.Random(self.reader)
        texts = [text(generator, 4000) for _ in range(16)]
        while True:
            ids = self.tokenizer.encode(generator.choice(texts)[generator.randrange(1000) :]).ids
            yield {"input_ids": ids[: generator.choice([128, 256, 512, LONGEST])]}


def text(generator: random.Random, num_words: int) -> str:
    """Random words of two to four syllables."""
    syllables = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "on", "us")]
    return " ".join("".join(generator.choices(syllables, k=generator.randint(2, 4))) for _ in range(num_words))


def trained_tokenizer() -> Tokenizer:
    """A BPE tokenizer, trained in some seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([text(random.Random(0), 5_000)], trainers.BpeTrainer(vocab_size=VOCAB_SIZE))
    return tokenizer


def rate(setting: Setting, source: str, readers: int, plans: PlanSource, tokenizer: Tokenizer) -> tuple[float, float]:
    """Rows and tokens per second of one round. Collective."""

    def make(reader: int, _: int) -> Any:
        return WaitingRows(reader, setting.wait_ms / 1000) if source == "waits" else TextRows(reader, tokenizer)

    limits = (LONGEST, LONGEST, LONGEST)
    rules = StreamRules("train_dataset", VOCAB_SIZE, *limits, "truncate", setting.rows_per_step, None, False)
    stream = PlannedStream(StreamSource(ShardedStream(make), rules, readers, LOOKAHEAD), Place.begin(readers), plans)
    batches = iter(stream)
    # rows that are read ahead before the clock starts would count as free
    for _ in range(LOOKAHEAD + 1):
        next(batches)
    begun_s, num_rows, num_tokens = time.perf_counter(), 0, 0
    for _ in range(setting.steps):
        lengths = next(batches)["step"].plan.lengths
        num_rows += len(lengths)
        num_tokens += sum(lengths)
    seconds = sums_over_ranks([time.perf_counter() - begun_s], plans.pool.control)[0] / setting.ranks
    batches.close()
    return num_rows / seconds, num_tokens / seconds


def measure(rank: int, setting: Setting, tokenizer: Tokenizer, store: str, out: str) -> None:
    """Measures on one rank; rank 0 writes all rates to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=setting.ranks, timeout=timedelta(seconds=300))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
    spec = ModelSpec(4, 256, 512, 8, 8, 32, VOCAB_SIZE, LONGEST)
    cluster = ClusterSpec(setting.ranks, setting.ranks, GENERIC_CPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    degrees = tuple(2**power for power in range(setting.ranks.bit_length()) if 2**power <= setting.ranks)
    plans = PlanSource(GroupPool((1,), 300.0, control), costs, PlannerConfig(2 * LONGEST, degrees), explore_steps=0)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(setting.rounds):
        for source in SOURCES:
            for readers in (1, setting.readers) if number % 2 == 0 else (setting.readers, 1):
                found.setdefault((source, readers), []).append(rate(setting, source, readers, plans, tokenizer))
    if rank == 0:
        rates = [
            Rate(source, readers, median(rows for rows, _ in each), median(tokens for _, tokens in each))
            for (source, readers), each in sorted(found.items(), reverse=True)
        ]
        Path(out).write_text(json.dumps([asdict(each) for each in rates]))
    dist.barrier()
    # threads of readers may still be in a row
    os._exit(0)


def main() -> None:
    """Starts the ranks and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-per-step", type=int, default=64)
    parser.add_argument("--wait-ms", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    setting = Setting(args.ranks, args.readers, args.steps, args.rounds, args.rows_per_step, args.wait_ms)
    context = mp.get_context("fork")
    tokenizer = trained_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        ranks = [
            context.Process(target=measure, args=(rank, setting, tokenizer, str(Path(folder, "store")), str(out)))
            for rank in range(args.ranks)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if failed := [rank for rank, each in enumerate(ranks) if each.exitcode]:
            raise SystemExit(f"ranks {failed} failed; their reasons are above")
        rates = [Rate(**each) for each in json.loads(out.read_text())]
    print(f"{args.ranks} gloo ranks, {args.rows_per_step} rows a step, median of {args.rounds} rounds of {args.steps} steps")
    print(f"{'source':12}{'readers':>8}{'rows/s':>10}{'tokens/s':>12}")
    for each in rates:
        print(f"{each.source:12}{each.readers:8}{each.rows_per_s:10.0f}{each.tokens_per_s:12.0f}")
    ratios = {}
    for source in SOURCES:
        one, several = sorted((each for each in rates if each.source == source), key=lambda each: each.readers)
        ratios[source] = several.rows_per_s / one.rows_per_s
        print(f"{source}: {ratios[source]:.1f} times as many rows per second with {several.readers} readers as with 1")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"setting": asdict(setting), "rates": [asdict(each) for each in rates], "ratios": ratios})
        )


if __name__ == "__main__":
    main()

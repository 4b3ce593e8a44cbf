"""Seconds and memory that the index of a large dataset takes: first scan, reading it from the cache, start of an epoch.

    python recipes/bench/cpu/data/index_speed.py [--rows 1000000] [--shortest 64] [--longest 128] [--labels] [--json FILE]

Writes a dataset of random token ids (int32, as tokenizers give them) into a temporary folder, about 4 bytes per token
(8 with labels), and deletes it at the end. Every measurement runs in a process of its own. Memory is the peak of that process's
anonymous pages above what it had before; Arrow files are memory-mapped and do not count. Lengths take 8 bytes per row.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from hf_longctx.hf.data.sampler import LengthAwareSampler, SequenceIndex
from hf_longctx.hf.data.scan import cached_scan

VOCAB_SIZE = 32_000
_BATCH_ROWS = 100_000


def write_dataset(folder: str, num_rows: int, shortest: int, longest: int, has_labels: bool) -> None:
    """Writes rows of `shortest` to `longest` random token ids, batch by batch."""
    generator = np.random.default_rng(0)
    file = Path(folder, "rows.arrow")
    kind = pa.list_(pa.int32())
    schema = pa.schema({"input_ids": kind, **({"labels": kind} if has_labels else {})})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for first in range(0, num_rows, _BATCH_ROWS):
            lengths = generator.integers(shortest, longest + 1, min(_BATCH_ROWS, num_rows - first))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = pa.array(generator.integers(0, VOCAB_SIZE, offsets[-1], dtype=np.int32))
            column = pa.ListArray.from_arrays(pa.array(offsets), ids)
            writer.write_table(pa.table([column] * len(schema), schema=schema), max_chunksize=1000)


def anonymous_bytes() -> int:
    """Bytes of this process's memory, without memory-mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Runs `work`; returns (seconds, peak MB above the start)."""
    before, peak, is_over = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_s = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start_s
    peak = max(peak, anonymous_bytes())
    is_over.set()
    watcher.join()
    del result
    return seconds, (peak - before) / 1e6


def scan(folder: str) -> tuple[float, float]:
    """Measures the scan, or reading its result if there is one in the cache."""
    dataset = datasets.Dataset.from_file(str(Path(folder, "rows.arrow")))
    return measured(lambda: cached_scan(dataset, "train_dataset", VOCAB_SIZE))


def start_epoch(folder: str, tokens_per_step: int | None) -> tuple[float, float]:
    """Measures making the index, the shuffle and the first step from known lengths."""
    dataset = datasets.Dataset.from_file(str(Path(folder, "rows.arrow")))
    lengths = cached_scan(dataset, "train_dataset", VOCAB_SIZE).lengths

    def work() -> object:
        index = SequenceIndex.build(lengths, 1 << 20, "split")
        steps = iter(LengthAwareSampler(index.lengths, 64, tokens_per_step))
        return next(steps), steps, index

    return measured(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the dataset (default: 1000000)")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of the shortest row (default: 64)")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest row (default: 128)")
    parser.add_argument("--labels", action="store_true", help="give the dataset a labels column too")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        write_dataset(folder, settings.rows, settings.shortest, settings.longest, settings.labels)
        results = {
            "first scan": pool.apply(scan, (folder,)),
            "from the cache": pool.apply(scan, (folder,)),
            "start of an epoch, sequences": pool.apply(start_epoch, (folder, None)),
            "start of an epoch, tokens": pool.apply(start_epoch, (folder, 8192)),
        }
    print(f"{settings.rows:,} rows of {settings.shortest} to {settings.longest} tokens, lengths {settings.rows * 8 / 1e6:.0f} MB")
    for name, (seconds, peak_mb) in results.items():
        print(f"{name:30s} {seconds:8.2f} s  {settings.rows / seconds:14,.0f} rows/s  peak {peak_mb:7.0f} MB")
    if settings.json:
        settings.json.write_text(json.dumps({**vars(settings), "json": None, "results": results}))


if __name__ == "__main__":
    main()

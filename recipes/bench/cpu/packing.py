"""Speed (sequences per second) and bin efficiency of `pack_sequences`, next to TRL's best-fit-decreasing if TRL is installed.

    python recipes/bench/cpu/packing.py [--sequences 100000] [--capacities 4096 8192 32768 131072] [--lengths FILE] [--no-peer]
        [--require 10 0.999] [--json FILE]

Only deciding which sequence goes into which bin is timed; for ours this includes sorting by length. For TRL it is the part of
`_pack_bfd` from the first search for a bin to the copying of tokens, without its sort, which comes earlier. TRL gets columns
without token data, and all sequences at once (its default is 1000 at a time, which fills bins less well). The fastest of
several runs counts. Lengths above the capacity are truncated to it, as TRL does by default. `bound` is a lower bound on the
number of bins of any packing.

`--require RATIO EFFICIENCY` exits with status 1 unless every row is RATIO times as fast as TRL, needs no more bins than TRL, and
fills the share EFFICIENCY of its bins. Some data do not allow that share, for example if many sequences are longer than half
a bin and nothing short goes beside them; then (bins of the bound) / (bins used) has to reach EFFICIENCY instead.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from hf_longctx.plan.groups.best_fit import fewest_bins, pack_sequences

try:
    from trl import data_utils as peer
except ImportError:
    peer = None

OWN_RUNS, PEER_RUNS = 5, 2


class _Decided(Exception):
    """Raised when TRL has decided where all sequences go and starts to copy tokens."""


def peer_packing(lengths: np.ndarray, capacity: int) -> tuple[float, int]:
    """Packs with TRL; returns (seconds of the decision, number of bins)."""
    started_s = 0.0

    def start(largest: int, tree: Callable[[int], Any] = peer._SegmentTree) -> Any:
        nonlocal started_s
        started_s = time.perf_counter()
        return tree(largest)

    def stop(*arguments: Any, take: Callable[..., Any] = peer.pc.take) -> Any:
        if started_s:
            raise _Decided
        return take(*arguments)

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    rows = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, pa.nulls(int(lengths.sum())))})
    # no row is empty, so skip TRL's filter, which would take 8 bytes per token
    same = patch.object(peer.pc, "filter", lambda column, is_kept: column)
    try:
        with patch.object(peer, "_SegmentTree", start), patch.object(peer.pc, "take", stop), same:
            # no length is above the capacity, so "split" splits nothing; unlike "truncate" it copies nothing either
            peer._pack_bfd(rows, capacity, "split")
    except _Decided as decided:
        seconds = time.perf_counter() - started_s
        frames = [frame for frame, _ in walk_tb(decided.__traceback__) if frame.f_code is peer._pack_bfd.__code__]
        return seconds, len(frames[0].f_locals["bins"])
    raise RuntimeError("TRL packed without copying tokens, which this benchmark does not expect; install trl 1.16")


def distributions(num_sequences: int, capacity: int, file: Path | None) -> dict[str, np.ndarray]:
    """Draws the lengths of the table's rows (and reads those of `file`), truncated to the capacity."""
    generator = np.random.default_rng(0)
    found = {
        "log-normal, mean 2.6K": generator.lognormal(7.0, 1.3, num_sequences),
        "log-normal, mean 660": generator.lognormal(6.0, 1.0, num_sequences),
        "uniform to capacity": generator.integers(1, capacity + 1, num_sequences),
    }
    if file is not None:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            found[file.name.split(".")[0]] = np.array([int(line) for line in lines])
    return {name: np.clip(lengths, 1, capacity).astype(np.int64) for name, lengths in found.items()}


def measure(lengths: np.ndarray, capacity: int, has_peer: bool) -> dict[str, float]:
    """Measures one row of the table."""
    runs_s = []
    for _ in range(OWN_RUNS):
        start_s = time.perf_counter()
        packing = pack_sequences(lengths, capacity)
        runs_s.append(time.perf_counter() - start_s)
    row = {
        "sequences": len(lengths),
        "distinct": len(np.unique(lengths)),
        "per_s": len(lengths) / min(runs_s),
        "bins": len(packing),
        "bound": fewest_bins(lengths, capacity),
        "efficiency": packing.efficiency,
    }
    if has_peer:
        seconds, num_bins = min(peer_packing(lengths, capacity) for _ in range(PEER_RUNS))
        row |= {"peer_per_s": len(lengths) / seconds, "peer_bins": num_bins}
    return row


def unmet(row: dict[str, float], ratio: float, efficiency: float) -> list[str]:
    """Lists the requirements that the row does not meet."""
    missing = []
    if row["per_s"] < ratio * row["peer_per_s"]:
        missing.append(f"{row['per_s'] / row['peer_per_s']:.1f} times TRL's speed, required {ratio:g}")
    if row["bins"] > row["peer_bins"]:
        missing.append(f"{row['bins']} bins, but TRL needs {row['peer_bins']}")
    if max(row["efficiency"], row["bound"] / row["bins"]) < efficiency:
        missing.append(f"efficiency {row['efficiency']:.5f} with {row['bins'] - row['bound']} bins above the bound")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=100_000, help="sequences per drawn distribution (default: 100000)")
    parser.add_argument("--capacities", type=int, nargs="+", default=[4096, 8192, 32768, 131072], help="tokens of a bin")
    parser.add_argument("--lengths", type=Path, help="also pack the lengths in this file (one per line, plain or .gz)")
    parser.add_argument("--no-peer", action="store_true", help="leave out TRL, which takes seconds per row")
    parser.add_argument("--require", type=float, nargs=2, metavar=("RATIO", "EFFICIENCY"),
                        help="exit with status 1 unless every row is RATIO times as fast as TRL and this efficient")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    settings = parser.parse_args()
    has_peer = peer is not None and not settings.no_peer
    if settings.require and not has_peer:
        parser.error("--require compares with TRL; install it (pip install trl) and do not give --no-peer")
    rows, problems = [], []
    print(f"{'lengths':24s}{'capacity':>9s}{'distinct':>9s}{'seq/s':>12s}{'TRL seq/s':>11s}{'ratio':>7s}", end="")
    print(f"{'bins':>8s}{'TRL bins':>9s}{'bound':>8s}{'efficiency':>11s}")
    for capacity in settings.capacities:
        for name, lengths in distributions(settings.sequences, capacity, settings.lengths).items():
            row = measure(lengths, capacity, has_peer)
            rows.append({"lengths": name, "capacity": capacity, **row})
            print(f"{name:24s}{capacity:9d}{row['distinct']:9d}{row['per_s']:12,.0f}", end="")
            shown = (f"{row['peer_per_s']:,.0f}", f"{row['per_s'] / row['peer_per_s']:.0f}x") if has_peer else ("-", "-")
            print(f"{shown[0]:>11s}{shown[1]:>7s}{row['bins']:8d}{row.get('peer_bins', '-'):>9}{row['bound']:8d}", end="")
            print(f"{row['efficiency']:11.5f}", flush=True)
            if settings.require:
                problems += [f"{name}, capacity {capacity}: {problem}" for problem in unmet(row, *settings.require)]
    if settings.json:
        settings.json.write_text(json.dumps(rows))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

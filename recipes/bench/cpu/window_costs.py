"""Time of long documents in models with sliding windows: predicted from shorter documents, and measured in the same run.

    python recipes/bench/cpu/window_costs.py [--rounds 3] [--require 0.1]

The models are Qwen3 of six layers (hidden size 64, 4 query and 2 KV heads of size 16): without windows, and with windows of 128
or 1,024 tokens in five layers or in all. They have random weights in fp32 and run in one process with one thread. All of them run
by turns in every round, and their seconds are those of this process on a CPU, so that other processes do not count. A cost model
is fitted to each on documents of 512 to 2,048 tokens, alone and in packs, and predicts documents of 4,096 and 8,192 tokens.
(`hf-longctx calibrate` measures chunks of a sixteenth of the longest or more; on shorter ones these models mostly start up.)

Rows "edges not counted" are predictions by a fit that leaves out the pairs that tiles compute at the far side of a window and
hide (`plan/model/attention_pairs.py`). Rows "the fit without" use the coefficients of the model that has no windows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Qwen3Config

from hf_longctx.hf.calibration.calibrate import build_model, chunk_samples
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.spec import cluster_spec, model_spec
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.fitting import fit_coefficients
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.round import RoundHost
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.measure import ChunkBench, Probe, Timing, undisturbed
from hf_longctx.runtime.process_groups import GroupPool

# name -> window, and the layers that have full attention
CASES = {
    "no windows": (0, range(6)),
    "128 in five of six": (128, range(5, 6)),
    "128 in all": (128, range(0)),
    "1,024 in five of six": (1024, range(5, 6)),
    "1,024 in all": (1024, range(0)),
}
FITTED = tuple(Probe(lengths) for size in (512, 1024, 2048) for lengths in ((size,), (size // 4,) * 4))
LONG = tuple(Probe((length,), is_held_out=True) for length in (4096, 8192))
# runs of each fitted chunk for one run of a long one
SHORT_RUNS = 2
ALONE = GroupShape(1)
CPU = torch.device("cpu")


class CpuSecondsExecutor(StepExecutor):
    """Executor whose intervals are seconds of this process on a CPU."""

    def _host(self, *args: Any) -> RoundHost:
        return replace(super()._host(*args), clock=StepClock(self.device, time.process_time))


@dataclass(frozen=True)
class Case:
    """One model, with the seconds of both passes of every probe, run by run."""

    spec: ModelSpec
    bench: ChunkBench
    seconds: dict[Probe, list[tuple[float, float]]]

    @classmethod
    def of(cls, window: int, full: range) -> Case:
        """Builds the model, with windows in all layers but `full`."""
        model = build_model(config_of(window, full), CPU, "float32")
        spec = model_spec(model)
        executor = CpuSecondsExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 60.0), CPU)
        return cls(spec, ChunkBench(executor, spec.num_layers, spec.vocab_size, 0.0), {probe: [] for probe in (*FITTED, *LONG)})

    def run(self, counts: bool) -> None:
        """Runs every probe. counts: the runs are measurements."""
        for probe, runs in self.seconds.items():
            for _ in range(1 if probe.is_held_out else SHORT_RUNS):
                passes = self.bench.run(probe)
                if counts:
                    runs.append((passes["F"], passes["B"]))

    @property
    def timings(self) -> list[Timing]:
        """Lower quartiles of the runs of every probe."""
        return [
            Timing(probe, *(undisturbed(seconds) for seconds in zip(*runs, strict=True)), len(runs))
            for probe, runs in self.seconds.items()
        ]

    def fitted(self, counts_edges: bool = True) -> CostModel:
        """Cost model fitted to the timings of short documents."""
        cluster = cluster_spec(CPU, 1, 1)
        if not counts_edges:
            cluster = replace(cluster, hardware=replace(cluster.hardware, tile_keys=0))
        costs = CostModel(self.spec, cluster, default_coefficients(self.spec, cluster))
        fit = fit_coefficients(chunk_samples(self.timings, costs, False), 0.0, "measured", costs.coefficients)
        return replace(costs, coefficients=fit.coefficients)

    def ratios(self, costs: CostModel) -> list[float]:
        """Predicted over measured seconds of forward plus backward, for each of the long documents."""
        measured_s = {timing.probe: timing.forward_s + timing.backward_s for timing in self.timings}
        return [(costs.sequences_s(probe.lengths, ALONE)[0] + costs.group_s(ALONE)) / measured_s[probe] for probe in LONG]


def config_of(window: int, full: range) -> Qwen3Config:
    """Config with this window in all six layers but `full`; 0 means no windows."""
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(6)]
    return Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 15, use_sliding_window=window > 0,
        sliding_window=window or None, layer_types=kinds,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one that does not (default: 3)")
    parser.add_argument("--require", type=float, default=None, metavar="SHARE",
                        help="fail if a prediction by a model's own fit is off by more than this share")  # fmt: skip
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = {name: Case.of(*case) for name, case in CASES.items()}
    for index in range(options.rounds + 1):
        for case in cases.values():
            case.run(counts=index > 0)
    print(f"{'predicted over measured':42s}" + "".join(f"{probe.lengths[0]:>8,}" for probe in LONG) + "   tokens")
    worst, without = 0.0, cases["no windows"].fitted()
    for name, case in cases.items():
        own = case.ratios(case.fitted())
        worst = max(worst, *(abs(ratio - 1) for ratio in own))
        rows = {name: own}
        if case.spec.windows:
            rows[f"{name}, edges not counted"] = case.ratios(case.fitted(counts_edges=False))
            rows[f"{name}, the fit without"] = case.ratios(replace(without, model=case.spec))
        for row, ratios in rows.items():
            print(f"{row:42s}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)
    print(f"the largest error of a model's own fit is {worst:.0%}")
    if options.require is not None and worst > options.require:
        raise SystemExit(f"a prediction is off by {worst:.0%}, more than {options.require:.0%}")


if __name__ == "__main__":
    main()

"""Time of long documents in a model with sliding windows: predicted from short documents, and measured in the same run.

    python recipes/bench/cpu/window_costs.py [--seconds 60] [--require 0.25]

The model is a Qwen3 of six layers (hidden size 64, 4 query and 2 KV heads of size 16), five of them with windows of 128 tokens;
a second one is the same without windows. Both have random weights in fp32 and run in one process with one thread. A cost
model is fitted to each on documents of 128 to 2048 tokens, alone and in packs, and predicts documents of 4096 and 8192 tokens.
The windowed model is also predicted with the other one's fit, once with its windows counted and once as if it had none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import Qwen3Config

from hf_longctx.hf.calibration.calibrate import chunk_samples
from hf_longctx.hf.calibration.shapes import build_model
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.spec import cluster_spec, model_spec
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.fitting import fit_coefficients
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.measure import ChunkBench, Probe, Timing
from hf_longctx.runtime.process_groups.pool import GroupPool

WINDOW = 128
FITTED = tuple(Probe(lengths) for size in (128, 256, 512, 1024, 2048) for lengths in ((size,), (size // 4,) * 4))
LONG = (4096, 8192)
ALONE = GroupShape(1)
CPU = torch.device("cpu")


def config_of(window: int) -> Qwen3Config:
    """Config with this window in five of six layers; 0 means no windows."""
    kinds = ["sliding_attention" if window and layer != 5 else "full_attention" for layer in range(6)]
    return Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 15, use_sliding_window=window > 0,
        sliding_window=window or None, layer_types=kinds,
    )  # fmt: skip


def measure(window: int, seconds: float) -> tuple[ModelSpec, tuple[Timing, ...]]:
    """Measures all probes on one model; the long documents are marked as held out, so no fit uses them."""
    model = build_model(config_of(window), CPU, "float32")
    spec = model_spec(model)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 60.0), CPU)
    bench = ChunkBench(executor, spec.num_layers, spec.vocab_size, time.monotonic() + seconds)
    return spec, bench.measure((*FITTED, *(Probe((length,), is_held_out=True) for length in LONG)))


def fitted(spec: ModelSpec, timings: Sequence[Timing]) -> CostModel:
    """Fits a cost model of `spec` to the timings of short documents."""
    cluster = cluster_spec(CPU, 1, 1)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    fit = fit_coefficients(chunk_samples(timings, costs, False), 0.0, "measured", costs.coefficients)
    return replace(costs, coefficients=fit.coefficients)


def predicted_s(costs: CostModel) -> list[float]:
    """Predicted seconds of forward plus backward, for each of the long documents."""
    return [float(costs.sequences_s([length], ALONE)[0]) + costs.group_s(ALONE) for length in LONG]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to measure each of the two models (default: 60)")
    parser.add_argument("--require", type=float, default=None, metavar="SHARE",
                        help="fail if predictions by the windowed model's own fit are off by more than this share")  # fmt: skip
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    spec, timings = measure(WINDOW, options.seconds)
    full_spec, full_timings = measure(0, options.seconds)
    own, full = fitted(spec, timings), fitted(full_spec, full_timings)
    measured_s, full_s = (
        [timing.forward_s + timing.backward_s for timing in each if timing.probe.is_held_out] for each in (timings, full_timings)
    )
    rows = {
        "with windows, its own fit": (predicted_s(own), measured_s),
        "no windows, its own fit": (predicted_s(full), full_s),
        "with windows, the fit without": (predicted_s(replace(full, model=spec)), measured_s),
        "the same, windows not counted": (predicted_s(full), measured_s),
    }
    print(f"{'predicted over measured':32s}" + "".join(f"{length:>12,}" for length in LONG) + "   tokens")
    ratios = {}
    for name, (found_s, taken_s) in rows.items():
        ratios[name] = [found / taken for found, taken in zip(found_s, taken_s, strict=True)]
        print(f"{name:32s}" + "".join(f"{ratio:12.2f}" for ratio in ratios[name]))
    print(
        f"{'seconds with windows, without':32s}" + "".join(f"{a:8.2f}, {b:.2f}" for a, b in zip(measured_s, full_s, strict=True))
    )
    error = max(abs(ratio - 1) for ratio in ratios["with windows, its own fit"])
    if options.require is not None and error > options.require:
        raise SystemExit(f"a prediction is off by {error:.0%}, more than {options.require:.0%}")


if __name__ == "__main__":
    main()

"""Predicted seconds and bytes of a step with LoRA of rank 16, for four models, with and without less memory left free.

    python recipes/bench/predicted_steps.py [--expandable-segments]

A step trains the documents of `gpu/trainings.py`: 132,362 tokens for each GPU, lengths log-normal, the longest of 32,768 tokens.
Nothing is measured here: seconds come from operation counts and the rates of the shipped profiles, of which `h200` has measured
ones, and bytes from the byte model. The longest sequence is what a run could train at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.sim.scenario import Request, build_scenario

# model, hardware, number of GPUs
MACHINES = (("llama-3.1-8b", "h200", 1), ("llama-3.1-70b", "h100", 8), ("qwen3.5-9b", "h200", 1), ("gpt-oss-20b", "h100", 1))
TOKENS, LIMIT = 131072, 32768


def step_lengths(num_ranks: int) -> list[int]:
    """Tokens of the documents of a step: those of `gpu/trainings.py` on one rank, and as many more on several."""
    generator, lengths = np.random.default_rng(1), [LIMIT]
    while sum(lengths) < TOKENS * num_ranks:
        lengths.append(int(np.clip(generator.lognormal(8.5, 1.2), 16, LIMIT)))
    return lengths


def line(model: str, hardware: str, num_ranks: int, expandable_segments: bool) -> str:
    """Describes the step of one model on its machine."""
    lengths = step_lengths(num_ranks)
    request = Request(
        model,
        hardware,
        num_ranks,
        lora_rank=16,
        longest_tokens=LIMIT,
        step_lengths=tuple(lengths),
        expandable_segments=expandable_segments,
    )
    scenario = build_scenario(request)
    setup = scenario.setup
    plan = plan_step(0, lengths, setup.costs, setup.planner)
    seconds = plan.estimate.step_s + weight_seconds(plan, setup.costs).left_s
    estimate = plan.estimate
    return (
        f"{model:14s} {num_ranks} {hardware:6s} {setup.placement.parameters:18s} {seconds:8.2f} "
        f"{sum(lengths) / seconds / num_ranks:12,.0f} {estimate.peak_bytes / 2**30:10.1f} {estimate.host_bytes / 2**30:10.1f} "
        f"{setup.room_tokens:12,}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--expandable-segments", action="store_true", help="8 %% of a device are left free in place of a fifth")
    options = parser.parse_args(arguments)
    columns = f"{'step s':>8s} {'tokens/s/GPU':>12s} {'device GiB':>10s} {'host GiB':>10s} {'longest':>12s}"
    print(f"{'model':14s} {'GPUs':8s} {'parameters':18s} {columns}")
    for machine in MACHINES:
        print(line(*machine, options.expandable_segments), flush=True)


if __name__ == "__main__":
    main()

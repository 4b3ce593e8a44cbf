"""Predicted step on 256 rollouts of agents: Qwen3-8B on 16 H100, beside fixed degrees and other systems.

    python recipes/bench/rollouts.py [--seed N]

Groups of 8 rollouts share a task, whose difficulty sets their typical length: a group's logarithm is normal around 20,000 tokens
(0.7), a rollout's around its group's (0.5), and rollouts end at 131,072 tokens. Nothing is measured here: seconds come from
operation counts and the rates of the shipped profile, bytes from the byte model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_longctx.cli.main import main as hf_longctx

LIMIT, GROUPS, SIZE = 131072, 32, 8
MACHINE = ("--model", "qwen3-8b", "--gpus", "16", "--hardware", "h100", "--stages", "1")


def rollouts(seed: int) -> list[int]:
    """Tokens of the rollouts of a step."""
    generator = np.random.default_rng(seed)
    typical = generator.normal(np.log(20000), 0.7, GROUPS).repeat(SIZE)
    return [int(n) for n in np.clip(generator.lognormal(typical, 0.5), 2000, LIMIT)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the forecast."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=28, help="seed of the lengths (default: %(default)s)")
    lengths = rollouts(parser.parse_args(arguments).seed)
    print(
        f"{len(lengths)} rollouts, mean {np.mean(lengths):,.0f} tokens, 99 % up to {np.quantile(lengths, 0.99):,.0f}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.txt"
        path.write_text("\n".join(map(str, lengths)))
        given = ("--lengths", str(path), "--limit", str(LIMIT), "--global-batch", str(len(lengths)), "--steps", "1", "--details")
        hf_longctx(["plan", *MACHINE, *given])


if __name__ == "__main__":
    main()

"""Measurements (a) to (h) on one GPU: one command each, with its own time limit.

    python recipes/bench/gpu/measurements.py a b [--folder outputs/measurements]
    python recipes/bench/gpu/measurements.py       # lists the steps, with their limits
    python recipes/bench/gpu/measurements.py --toy b c d e f g h    # small sizes, also without a GPU

A step that is late is ended with all its processes, and the next one begins. What a step prints is printed as it comes, and kept
in the folder, beside the rows that its script appends to a file as soon as they are measured. Exits with
status 1 if a step failed or was late.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from hf_longctx.recipes.bench.gpu.rows import end_with_children

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Step:
    """One command. limit_s: seconds after which it is ended. words: script of this folder, or module, and its arguments."""

    what: str
    limit_s: int
    words: tuple[str, ...]
    # the script appends its rows to the file that this option names
    rows: str = "--json"
    # words that make it small enough for a CPU
    toy: tuple[str, ...] = ("--toy",)


STEPS = {
    "a": Step("2 and 4 ranks on one GPU against one process", 250, ("ranks.py", "--budget-s", "230")),
    "b": Step(
        "LoRA on mixed lengths: ours, ours in fp8, TRL, unsloth",
        420,
        (
            *("trainings.py", "--layers", "32", "--tokens", "131072", "--limit", "32768", "--steps", "1"),
            *("--methods", "hf_longctx", "hf_longctx, fp8"),
            *("TRL selective, Liger", "unsloth, packed, on device", "unsloth, packed"),
        ),
    ),
    "c": Step(
        "one document of 131,072 tokens, LoRA, 32 layers: ours, TRL, ALST",
        300,
        (
            *("trainings.py", "--layers", "32", "--tokens", "131072", "--limit", "131072", "--steps", "0"),
            *("--methods", "hf_longctx", "TRL selective, Liger", "DeepSpeed ALST, Liger"),
        ),
    ),
    "d": Step(
        "Qwen3.5 9B, 8 layers, with fla: ours, transformers' best",
        300,
        (
            *("trainings.py", "--model", "qwen3.5-9b", "--layers", "8", "--tokens", "131072", "--limit", "32768", "--steps", "1"),
            *("--methods", "hf_longctx", "HF checkpointing, fla"),
        ),
    ),
    "e": Step(
        "rates of this machine, with kernels",
        200,
        ("-m", "hf_longctx.cli.main", "calibrate", "--model", "llama-3.1-8b", "--seconds", "120", "--compile-layers"),
        "--output",
        # the last of several equal options counts; without a name the model is small
        ("--model", "", "--seconds", "20", "--no-compile-layers"),
    ),
    "f": Step(
        "bytes of 4 layers of 8B at 1,048,576 tokens against the prediction",
        540,
        ("trainings.py", "--layers", "4", "--tokens", "1048576", "--limit", "1048576", "--steps", "0", "--methods", "hf_longctx"),
    ),
    "g": Step(
        "8 layers of Qwen3-30B-A3B with adapters on experts: apart, merged by PEFT",
        120,
        ("adapted_experts.py",),
        toy=("--tiny", "--layers", "2", "--tokens", "48"),
    ),
    "h": Step("rates of products, also in fp8, of copies and of attention", 240, ("ceilings.py",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps that were asked for, in their order; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], metavar="STEP", help="letters of steps; none: list them")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/measurements"), help="where results go (default: %(default)s)"
    )
    parser.add_argument("--toy", action="store_true", help="small sizes, also without a GPU, in three times the time")
    options = parser.parse_args(arguments)
    if not options.steps:
        for letter, step in STEPS.items():
            print(f"{letter}  {step.limit_s:4d} s  {step.what}\n           {' '.join(_command(step, None, options.toy)[1:])}")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    return max(run(letter, STEPS[letter], options.folder, options.toy) for letter in options.steps)


def run(letter: str, step: Step, folder: Path, is_toy: bool = False) -> int:
    """Runs one step; returns 1 if it failed or was late."""
    limit_s = 3 * step.limit_s if is_toy else step.limit_s
    print(f"({letter}) {step.what}{', in toy sizes' if is_toy else ''}: at most {limit_s} s", flush=True)
    start_s = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = _command(step, folder / f"{letter}.json", is_toy)
    # a group of its own, so that processes which it has started end with it
    done = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        _end_group(done)

    timer = Timer(limit_s, end)
    timer.start()
    try:
        with (folder / f"{letter}.txt").open("w") as kept:
            for line in done.stdout or ():
                print(f"    {line}", end="", flush=True)
                kept.write(line)
                kept.flush()
        status = done.wait()
    finally:
        timer.cancel()
        _end_group(done)
    how = "ended, since it was late," if late else "done" if status == 0 else f"failed with status {status}"
    print(f"({letter}) {how} after {time.monotonic() - start_s:.0f} s", flush=True)
    return int(bool(late) or status != 0)


def _end_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _command(step: Step, rows: Path | None, is_toy: bool) -> list[str]:
    first, *rest = (*step.words, *(step.toy if is_toy else ()))
    script = [first] if first == "-m" else [str(_HERE / first)]
    return [sys.executable, *script, *rest, *([] if rows is None else [step.rows, str(rows)])]


if __name__ == "__main__":
    end_with_children()
    sys.exit(main())

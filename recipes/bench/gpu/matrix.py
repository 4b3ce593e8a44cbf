"""Measures one CUDA GPU: what it can do at most, throughput, a whole step, the longest document, one long step.

    python recipes/bench/gpu/matrix.py --sections B [--methods ours HF] [--model llama-3.1-8b] [--json FILE] [--toy]

    A  the most that the device can do (ceilings.py)       B  forward + backward of every method, fewer layers
    C  all layers, with AdamW's step                       D  the longest document under a memory cap, predicted and tried
    E  one long step, split between device and host

The model is a Llama with random weights in the named model's shapes, in bf16, built on the device; tokens are random. Every case
runs in a process of its own (with `--toy`, all run in this one, at small sizes). Every section ends within nine minutes: it says
first how long it takes by estimate, and starts no case that would take longer than what is left; `--methods` chooses. A case that
does not fit or cannot run has a row that says so. Rows come as they are done, to `--json` as one JSON object per line.

Columns: seconds of a step, measured and predicted by the cost model at the rates of `--hardware`'s profile, without the
optimizer; tokens/s; TFLOP/s of model operations with causal attention; peak memory of the device with weights, measured and (for
ours) predicted; peak pinned host memory; bytes per token that the layers hold for backward, predicted by the plan's formulas
and measured by torch's hooks on 2048 tokens ('-' where hooks see nothing: slices, Hugging Face's offload); the loss; and the
attention kernel that the profiler saw.

Model operations of S tokens: S (6 (L P + V d) + 6 a L S), with L layers of P matrix parameters, hidden size d, vocabulary V and
a = heads x head size; recomputation never counts. With `--frozen` (only norms are trained, as if under LoRA) the first 6 is a
4. (Others count attention without the causal mask, which doubles the second term.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

from hf_longctx.recipes.bench.gpu import ceilings
from hf_longctx.recipes.bench.gpu.cases import (
    HEADER,
    METHODS,
    OURS,
    SPLIT,
    Case,
    Outcome,
    cannot_run,
    estimated_s,
    run_case,
    split_layers,
)
from hf_longctx.recipes.bench.gpu.rows import append_row, end_with_children, is_wanted

BUDGETS_S = {"A": 360, "B": 530, "C": 530, "D": 530, "E": 530}
MARK = "OUTCOME "


class Section:
    """Runs the cases of one section until its time is up, each in a process of its own unless it is a toy."""

    def __init__(self, name: str, budget_s: float, options: argparse.Namespace | None = None) -> None:
        self.name, self.deadline_s = name, time.monotonic() + budget_s
        self.file: Path | None = None if options is None else options.json
        self.peer: Path | None = None if options is None else options.peer_venv
        self.words: list[str] = [] if options is None else options.methods
        self.outcomes: list[Outcome] = []

    def run_all(self, cases: Sequence[Case]) -> None:
        """Runs the cases whose methods are wanted, after a line that says how long they take by estimate."""
        wanted = [case for case in cases if self.wants(case.method)]
        if wanted and not wanted[0].is_toy:
            minutes = sum(estimated_s(case) for case in wanted if not self.problem(case)) / 60
            print(f"{self.name}  {len(wanted)} cases, about {minutes:.0f} minutes by estimate", flush=True)
        for case in wanted:
            self.run(case)

    def wants(self, method: str) -> bool:
        return is_wanted(method, self.words)

    def problem(self, case: Case) -> str:
        """Explains why nobody can run the case; the environment of the peer runs what needs flash-attn."""
        return "" if self._is_peer_s(case) else cannot_run(case)

    def run(self, case: Case) -> Outcome:
        left_s = self.deadline_s - time.monotonic()
        if problem := self.problem(case):
            outcome = Outcome(case, problem)
        elif left_s <= 0:
            outcome = Outcome(case, "skipped: the section's time is up")
        elif case.is_toy:
            outcome = run_case(case)
        elif estimated_s(case) > left_s:
            outcome = Outcome(
                case, f"skipped: takes {estimated_s(case):.0f} s by estimate, {left_s:.0f} are left to this section"
            )
        else:
            python = str(self.peer / "bin" / "python") if self.peer is not None and self._is_peer_s(case) else sys.executable
            outcome = in_process(case, left_s, python)
        print(outcome, flush=True)
        self.outcomes.append(outcome)
        if self.file is not None:
            append_row(self.file, asdict(outcome))
        return outcome

    def _is_peer_s(self, case: Case) -> bool:
        return self.peer is not None and "flash-attn" in case.method


def in_process(case: Case, timeout_s: float, python: str = sys.executable) -> Outcome:
    """Runs the case in a new process of this Python, so that no method inherits another's memory pools or patches."""
    command = [python, str(Path(__file__).resolve()), "--case", json.dumps(asdict(case))]
    # let the allocator grow one segment as needed, instead of keeping one segment per size
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outcome(case, f"stopped: the {timeout_s:.0f} s left to this section were not enough")
    except OSError as problem:
        return Outcome(case, f"failed: {python} does not start: {problem}")
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Outcome(case, f"failed: exit status {done.returncode}: {last[0]}")
    found = json.loads(line.removeprefix(MARK))
    return Outcome(case, **{name: value for name, value in found.items() if name != "case"})


def throughput(section: Section, base: Case, lengths: Sequence[int]) -> None:
    """Section B: every method at every length."""
    section.run_all([replace(base, method=method, num_tokens=num_tokens) for num_tokens in lengths for method in METHODS])


def whole_step(section: Section, base: Case, num_tokens: int, num_layers: int) -> None:
    """Section C: all layers with the optimizer's step, Hugging Face's best methods against ours, with their losses."""
    methods = ("HF checkpointing, tiled loss", "HF offload, tiled loss", OURS, SPLIT)
    case = replace(base, num_tokens=num_tokens, num_layers=num_layers, has_optimizer=True)
    section.run_all([replace(case, method=method) for method in methods])


def longest(section: Section, base: Case, lengths: tuple[int, int], cap_gib: float) -> None:
    """Section D: predicts the longest document under the memory cap from the bytes of two lengths, and tries it.

    A document of 0.97 times that length should fit, and one of 1.03 times should not.
    """
    methods = ("HF checkpointing", "HF checkpointing, tiled loss", "HF offload, tiled loss", OURS, "ours, all on the host")
    for method in filter(section.wants, methods):
        short, long = (section.run(replace(base, method=method, num_tokens=n, steps=1)) for n in lengths)
        if not short.device_bytes or not long.device_bytes:
            continue
        token_bytes = (long.device_bytes - short.device_bytes) / (lengths[1] - lengths[0])
        fixed_bytes = short.device_bytes - token_bytes * lengths[0]
        limit = int((cap_gib * 2**30 - fixed_bytes) / token_bytes)
        print(
            f"D  {method:32s} {token_bytes:.0f} bytes/token beside {fixed_bytes / 2**30:.2f} GiB: "
            f"{limit} tokens in {cap_gib:g} GiB"
        )
        for share in (0.97, 1.03):
            case = replace(base, method=method, num_tokens=int(share * limit), steps=1, cap_gib=cap_gib)
            fits = section.run(case).state == "ok"
            print(f"D  {method:32s} at {share:g} of its limit: {'fits' if fits else 'does not fit'}, predicted to "
                  f"{'fit' if share < 1 else 'not fit'}")  # fmt: skip
    if not torch.cuda.is_available() or not section.wants(SPLIT):
        return
    num_tokens = longest_split(replace(base, method=SPLIT, cap_gib=cap_gib))
    print(f"D  {SPLIT:32s} shares exist for up to {num_tokens} tokens in {cap_gib:g} GiB and {base.host_gib:g} GiB of host")
    section.run(replace(base, method=SPLIT, num_tokens=int(0.97 * num_tokens), steps=1, cap_gib=cap_gib))


def longest_split(case: Case) -> int:
    """Most tokens, in steps of 1024, for which the linear program finds shares."""

    def has_answer(thousands: int) -> bool:
        try:
            return bool(split_layers(case, thousands * 1024))
        except ValueError:
            return False

    low, high = 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_answer(middle) else (low, middle)
    return low * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the sections' tables."""
    options = parse(arguments)
    # transformers warns about a name that is deprecated in its newest version, but the only one that all versions have
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.case:
        print(MARK + json.dumps(asdict(run_case(Case(**json.loads(options.case))))))
        return
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: torch sees no CUDA device, and all sections measure one (--toy runs small sizes on the CPU)")
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, toy sizes: these numbers say nothing about speed"
    print(f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}")
    run_sections(options)


def run_sections(options: argparse.Namespace) -> None:
    shared = {"model": options.model, "hardware": options.hardware, "host_gib": 2**-6 if options.toy else options.host_gib}
    base = Case("B", OURS, 0, num_layers=options.layers, is_frozen=options.frozen, is_toy=options.toy, **shared)
    if options.toy:
        base = replace(base, tile_tokens=32, slice_tokens=64)
    lengths = (96, 128) if options.toy else tuple(options.lengths)
    for name in options.sections:
        print(f"\nsection {name}\n{HEADER if name != 'A' else ''}", flush=True)
        section = Section(name, options.budget_s or BUDGETS_S[name], options)
        case = replace(base, section=name)
        if name == "A":
            run_ceilings(options, section)
        elif name == "B":
            throughput(section, case, lengths[:1] if options.toy else lengths)
        elif name == "C":
            whole_step(section, case, lengths[-1] if options.toy else options.step_tokens, 10**6)
        elif name == "D":
            longest(section, case, (lengths[0], lengths[-1]) if options.toy else (8192, 16384), options.cap_gib)
        else:
            num_tokens = lengths[-1] if options.toy else options.long_tokens
            section.run(replace(case, method=SPLIT, num_tokens=num_tokens, num_layers=10**6, steps=1))


def run_ceilings(options: argparse.Namespace, section: Section) -> None:
    """Section A: runs `ceilings.py`, whose rows go to a file beside that of `--json`."""
    script = Path(__file__).resolve().with_name("ceilings.py")
    command = ["--model", options.model, *(["--toy"] if options.toy else [])]
    if options.json is not None:
        command += ["--json", str(options.json.with_suffix(".ceilings.json"))]
    if options.toy:
        ceilings.main(command)
        return
    try:
        subprocess.run([sys.executable, str(script), *command], timeout=section.deadline_s - time.monotonic())
    except subprocess.TimeoutExpired:
        print("A  stopped: the section's time is up")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=list(BUDGETS_S), default=list(BUDGETS_S), help="default: all")
    parser.add_argument("--model", default="llama-3.1-8b", help="a named shape of the catalogue (default: llama-3.1-8b)")
    parser.add_argument("--hardware", default="h200", help="hardware profile for the linear program (default: h200)")
    parser.add_argument("--layers", type=int, default=8, help="layers in B and D (default: 8); C and E have all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072], help="tokens of a document in B")
    parser.add_argument("--step-tokens", type=int, default=131072, help="tokens of the document in C (default: 131072)")
    parser.add_argument("--long-tokens", type=int, default=327680, help="tokens of the document in E (default: 327680)")
    parser.add_argument("--frozen", action="store_true", help="train norms only, so that large weights are frozen as under LoRA")
    parser.add_argument("--host-gib", type=float, default=64.0, help="GiB of host memory for activations (default: 64)")
    parser.add_argument("--cap-gib", type=float, default=40.0, help="GiB of device memory in D (default: 40)")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds for every section (default: 360 to 530)")
    parser.add_argument("--methods", nargs="+", default=[], metavar="WORD", help="methods whose names have one of these words")
    parser.add_argument("--peer-venv", type=Path, default=None, help="environment with flash-attn and this package, for its row")
    parser.add_argument("--json", type=Path, default=None, help="also append each outcome to this file, as soon as it is there")
    parser.add_argument("--toy", action="store_true", help="small sizes, in one process, on the CPU if there is no GPU")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_children()
    main()

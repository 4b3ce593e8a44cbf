"""`hf-longctx calibrate`: measures this machine and writes its hardware profile. Starts its ranks unless a launcher did."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from hf_longctx.cli.launching import num_devices
from hf_longctx.cli.terminal import explain, say_refusal

_DEFAULT_SECONDS = 45.0
# seconds after the deadline at which a rank counts as hung; ranks measure beyond it only for as long as they compiled
_GRACE_S = 120.0
_COMPILE_S = 300.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the parser of all commands."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine and write its hardware profile",
    )
    explain(
        parser,
        "Measures decoder layers, exchanges of every degree and copies, fits the cost model, and prints its error on chunks that "
        "were not used for the fit. Under torchrun or accelerate launch it runs on their ranks.",
        *("hf-longctx calibrate --output hardware.json", "hf-longctx calibrate --model Qwen/Qwen3-8B --precision autocast"),
    )
    parser.add_argument(
        "--model", default="", help="a model's name, its config.json or folder; default: a small Llama (no weights are read)"
    )
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "autocast"), help="default: float32 on CPU, autocast (bf16) on CUDA"
    )
    parser.add_argument(
        "--compile-layers",
        action=argparse.BooleanOptionalAction,
        help="norms, gated MLPs and rotary embeddings run as kernels, as in runs with compile_layers (default: on GPUs)",
    )
    parser.add_argument("--ranks", type=int, help="processes to start; default: one per visible GPU, or 2 on CPU")
    parser.add_argument("--seconds", type=float, default=_DEFAULT_SECONDS, help="when to stop measuring (default: %(default)g)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=0,
        help="runs of every chunk that count (default: 8 on CPU, 3 on CUDA); fewer leave time for longer chunks",
    )
    parser.add_argument("--output", type=Path, help="the JSON file to write, for LongContextConfig(hardware=FILE)")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON and nothing else")
    # set by the process that starts the ranks, since the time limit counts from its own start
    parser.add_argument("--stop-at", type=float, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure on this rank, or start the ranks and wait for them; returns the exit status."""
    started_s = time.time()
    try:
        _check(options)
        if options.stop_at is None:
            options.stop_at = started_s + options.seconds
        if "WORLD_SIZE" in os.environ:
            return _run_rank(options)
        return _run_ranks(options, _num_ranks(options.ranks))
    except ValueError as error:
        return say_refusal("calibrate", error)


def _check(options: argparse.Namespace) -> None:
    from hf_longctx.plan.cost.catalog import is_named, no_model

    if not options.seconds > 0:
        raise ValueError(f"--seconds is {options.seconds:g}; give a positive number, 45 for example")
    if options.repeats < 0:
        raise ValueError(f"--repeats is {options.repeats}; give at least 1, or leave it out")
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks is {options.ranks}; at least 1 is needed")
    if options.ranks is not None and "WORLD_SIZE" in os.environ and options.ranks != int(os.environ["WORLD_SIZE"]):
        raise ValueError(f"--ranks is {options.ranks}, but the launcher started {os.environ['WORLD_SIZE']}; leave it out")
    is_unknown = options.model and not Path(options.model).exists() and not is_named(options.model)
    if is_unknown and "WORLD_SIZE" not in os.environ:
        # started ranks refuse together, and one of them prints it
        raise ValueError(no_model(options.model))
    if options.output is not None and not options.output.parent.is_dir():
        raise ValueError(f"--output {options.output}: the folder {options.output.parent} does not exist; create it first")
    if options.output is not None and options.output.is_dir():
        raise ValueError(f"--output {options.output} is a folder; give a file name, hardware.json for example")


def _num_ranks(asked: int | None) -> int:
    devices = num_devices()
    if devices and asked is not None and asked > devices:
        raise ValueError(f"--ranks is {asked}, but {devices} GPU(s) are visible; give at most {devices}")
    return asked or devices or 2


def _run_ranks(options: argparse.Namespace, num_ranks: int) -> int:
    """Start this command as `num_ranks` ranks of this machine; returns the status of the first one that failed, or 0."""
    words = ["--seconds", str(options.seconds), "--stop-at", str(options.stop_at), "--model", options.model]
    words += ["--repeats", str(options.repeats)]
    words += ["--precision", options.precision] if options.precision else []
    if options.compile_layers is not None:
        words.append("--compile-layers" if options.compile_layers else "--no-compile-layers")
    words += ["--output", str(options.output)] if options.output is not None else []
    words += ["--json"] if options.json else []
    command = [sys.executable, "-m", "hf_longctx.cli.main", "calibrate", *words]
    processes = [subprocess.Popen(command, env=environment) for environment in _environments(num_ranks)]
    deadline_s = options.stop_at + _GRACE_S + (0.0 if options.compile_layers is False else _COMPILE_S)
    try:
        while any(process.poll() is None for process in processes):
            failed = next((process.returncode for process in processes if process.returncode), 0)
            if failed or time.time() > deadline_s:
                # give the other ranks a moment to print their errors
                time.sleep(1.0)
                break
            time.sleep(0.05)
    finally:
        late = [process for process in processes if process.poll() is None]
        if late and time.time() > deadline_s:
            print(
                f"hf-longctx calibrate: {len(late)} rank(s) had not ended {deadline_s - options.stop_at:.0f} s after the time "
                f"that --seconds gives, and were stopped; raise --seconds, or run where the machine does nothing else",
                file=sys.stderr,
            )
        for process in late:
            process.kill()
        for process in processes:
            process.wait()
    # ignore ranks that were killed, which have a negative status: they did not fail first
    return max((process.returncode for process in processes), default=0) or int(bool(late))


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """Yields environments of all ranks as set by torchrun on one machine, with cores divided among the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(num_threads),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _run_rank(options: argparse.Namespace) -> int:
    from hf_longctx.hf.calibration.calibrate import CalibrationRequest, calibrate, calibration_text
    from hf_longctx.plan.cost.profiles import profile_to_json

    is_first = int(os.environ.get("RANK", "0")) == 0
    try:
        precision, compiles = options.precision or "", options.compile_layers
        request = CalibrationRequest(options.model, precision, options.stop_at, options.repeats, compiles)
        calibration = calibrate(request)
    except ValueError as error:
        # all ranks raise the same error, so one prints it
        if is_first:
            say_refusal("calibrate", error)
        return 1
    if is_first:
        profile = profile_to_json(calibration.profile)
        print(profile if options.json else calibration_text(calibration))
        if options.output is not None:
            options.output.write_text(profile)
            if not options.json:
                print(f"written: {options.output}")
    return 0

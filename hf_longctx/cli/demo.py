"""`hf-longctx demo`: runs the first job of the README from an installed package, in any folder."""

from __future__ import annotations

import argparse
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from hf_longctx.cli.launching import brief, launch_command, recipes_folder
from hf_longctx.cli.terminal import explain, say_error

_RANKS = 2
_NEXT = """try next:
  your machine hf-longctx doctor
  how long     hf-longctx plan --model qwen3-8b --gpus 8 --hardware h100
  your texts   hf-longctx train recipes/configs/text.yaml --dataset my.jsonl ...
               (docs/guides/data.md)"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the parser of all commands."""
    parser = commands.add_parser(
        "demo",
        help="train a small model on two CPU processes, in about two minutes, and see what a run leaves",
    )
    explain(
        parser,
        "Trains a small Llama on the sources of Python's standard library, on two CPU processes. Downloads nothing.",
        *("hf-longctx demo", "hf-longctx demo --steps 5 --output /tmp/demo"),
        one="the training failed, and said why",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("outputs/demo"), help="folder to write into (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, metavar="N", default=20, help="optimizer steps (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, then print where results are; the exit status is the training's."""
    started_s = time.monotonic()
    folder = options.output
    if folder.exists() and not folder.is_dir():
        say_error(f"hf-longctx demo: --output {folder} is a file; give a folder")
        return 1
    if options.steps < 1:
        say_error(f"hf-longctx demo: --steps is {options.steps}; at least 1 is needed")
        return 1
    settings = ["--output_dir", str(folder), "--max_steps", str(options.steps)]
    config = recipes_folder() / "configs" / "demo.yaml"
    # the first output of the processes takes seconds
    print(f"training a small Llama on {_RANKS} CPU processes, {options.steps} steps; settings: {config}", flush=True)
    status = _wait(brief(launch_command(_RANKS, [str(config), *settings])))
    if status:
        return status
    minutes, seconds = divmod(round(time.monotonic() - started_s), 60)
    print(f"\ndone in {minutes} min {seconds} s" if minutes else f"\ndone in {seconds} s")
    for name, what in _written(folder):
        print(f"  {name:12s} {what}")
    print(_NEXT)
    return 0


def _wait(command: list[str]) -> int:
    """Run the launcher, which a signal ends after its ranks have saved; returns its status."""
    process = subprocess.Popen(command)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # the terminal has sent it to all processes
        return process.wait() or 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _written(folder: Path) -> list[tuple[str, str]]:
    """Return names and paths of the training's results, or how to get them."""
    found = [("checkpoint", f"{folder}  (AutoModelForCausalLM.from_pretrained loads it)")]
    found += [("timeline", str(path)) for name in ("timeline.png", "timeline.json") if (path := folder / name).exists()][:1]
    from hf_longctx.page.page import write_page

    try:
        return [*found, ("page", str(write_page(folder)[0]))]
    except (OSError, ValueError) as error:
        return [*found, ("page", f"none: {error}")]

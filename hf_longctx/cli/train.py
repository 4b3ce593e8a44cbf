"""`hf-longctx train`: runs `accelerate launch` of the recipe with the right number of processes on this machine."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

from hf_longctx.cli.launching import brief, launch_command, num_devices, shipped
from hf_longctx.cli.terminal import explain, say_refusal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the parser of all commands."""
    parser = commands.add_parser(
        "train",
        help="train by a recipe's settings, one process per GPU of this machine, or on the CPU",
        usage="hf-longctx train [--processes N] [--dry-run] CONFIG.yaml [--setting value ...]",
    )
    explain(
        parser,
        "Starts recipes/sft.py on this machine: one process per visible GPU; without GPUs, as many as the file's "
        "expected_world_size says, or two. Several machines: see docs/guides/launching.md.",
        "hf-longctx train recipes/configs/demo.yaml --max_steps 5",
        "hf-longctx train --processes 4 --dry-run recipes/configs/text.yaml --dataset documents.jsonl",
        one="an error that you can fix, or that of the training",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="number of ranks, in place of one per GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the command and end")
    parser.add_argument("config", metavar="CONFIG.yaml", help="settings; recipes/... is also found inside the package")
    parser.add_argument(
        "settings", nargs=argparse.REMAINDER, metavar="--setting value", help="settings that override those of the file"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replace this process by the launcher, so that signals reach it; the exit status is 1 for errors that the user can fix."""
    try:
        command = command_of(options)
    except (OSError, ValueError) as error:
        return say_refusal("train", error)
    print(shlex.join(command), flush=True)
    if not options.dry_run:
        os.execv(command[0], brief(command))
    return 0


def command_of(options: argparse.Namespace) -> list[str]:
    """Make the launcher's command; raises ValueError for a missing file or an impossible number of processes."""
    path = Path(shipped(options.config))
    if not path.is_file():
        raise ValueError(f"{options.config} does not exist; give a YAML file of settings, recipes/configs/demo.yaml for example")
    if options.processes is not None and options.processes < 1:
        raise ValueError(f"--processes is {options.processes}; at least 1 is needed")
    text, settings = path.read_text(encoding="utf-8"), list(options.settings)
    on_cpu = _setting("use_cpu", text, settings).lower() == "true"
    devices = 0 if on_cpu else num_devices()
    if devices and options.processes is not None and options.processes > devices:
        raise ValueError(f"--processes is {options.processes}, but {devices} GPU(s) are visible; give at most {devices}")
    wanted = _setting("expected_world_size", text, settings)
    num_ranks = options.processes or devices or (int(wanted) if wanted.isdigit() and int(wanted) else 2)
    if not devices and not on_cpu:
        settings += ["--use_cpu", "true"]
    return launch_command(num_ranks, [str(path), *settings])


def _setting(name: str, text: str, settings: list[str]) -> str:
    """Return a one-word setting: the last on the command line, or the file's; empty if neither has it."""
    for place in range(len(settings) - 1, -1, -1):
        word = settings[place]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
        if word == f"--{name}":
            return settings[place + 1] if place + 1 < len(settings) else ""
    found = re.search(rf"^{name}:[ \t]*['\"]?([\w.-]+)", text, re.MULTILINE)
    return found[1] if found else ""

"""`hf-longctx` with its commands demo, doctor, plan, simulate, show, calibrate, train, report and replay.

Exit statuses are the same everywhere: 0 for success, 1 for an error that the user can fix, 2 for a wrong command line, 3 for an
unexpected error, 130 for Ctrl-C. `demo` and `train` end with the status of the training.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hf_longctx._version import __version__
from hf_longctx.cli import calibrate, demo, doctor, replay, report, train
from hf_longctx.cli.plan import add_plan_arguments, add_simulate_arguments, run_plan, run_simulate
from hf_longctx.cli.terminal import explain, say_error, say_refusal


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all sub-commands."""
    parser = argparse.ArgumentParser(
        prog="hf-longctx",
        description="Fine-tune Hugging Face causal language models on long, length-skewed sequences.",
        epilog="`hf-longctx train` is short for: accelerate launch --config_file recipes/accelerate/gpu.yaml recipes/sft.py "
        "CONFIG.yaml. Exit status: 0 success, 1 an error that you can fix, 2 wrong command line, 3 unexpected.",
    )
    parser.add_argument("--version", action="version", version=f"hf-longctx {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where in the program an unexpected error arose")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo.add_parser(commands)
    doctor.add_parser(commands)
    plan = commands.add_parser("plan", help="forecast a step without a GPU: its seconds, layout, memory and baselines")
    add_plan_arguments(plan)
    plan.set_defaults(run=run_plan)
    simulate = commands.add_parser("simulate", help="run a saved plan under a cost model: seconds, waiting and bytes per rank")
    add_simulate_arguments(simulate)
    simulate.set_defaults(run=run_simulate)
    show = commands.add_parser("show", help="check a plan written as JSON and print its schedule")
    explain(
        show,
        "Checks a plan and prints its schedule: groups, chunks and actions of every micro-batch.",
        *("hf-longctx show forecast/plan.json", "hf-longctx show --json plan.json"),
        one="the file is no plan, or breaks a rule",
    )
    show.add_argument("plan", type=Path, help="a plan, as written by `hf-longctx plan --json` or plan_to_json")
    show.add_argument("--json", action="store_true", help="print the checked plan as JSON and nothing else")
    show.set_defaults(run=_show)
    calibrate.add_parser(commands)
    train.add_parser(commands)
    report.add_parser(commands)
    replay.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        try:
            return _run(arguments)
        finally:
            # also after a help or a list of names, which end in SystemExit
            sys.stdout.flush()
    except BrokenPipeError:
        # the reader has closed the pipe, for example `| head`; Python would raise again when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str] | None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    if empty := next((word for word in words if word.startswith("--") and word.endswith("=--")), None):
        # argparse would drop the value and pass on an empty list
        parser.error(f"argument {empty.removesuffix('=--')}: '--' is no value")
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status: int = options.run(options)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if options.debug:
            raise
        say_error(
            f"hf-longctx {options.command}: unexpected {type(error).__name__}: {str(error)[:500]}; `hf-longctx --debug "
            f"{options.command} ...` shows where it arose: please report it"
        )
        return 3
    return status


def _show(options: argparse.Namespace) -> int:
    from hf_longctx.plan.core.serialize import plan_to_json
    from hf_longctx.plan.core.validate import describe_plan, validate_plan
    from hf_longctx.sim.output.json_records import read_plan_file

    try:
        plan = validate_plan(read_plan_file(options.plan.read_text()).plan)
    except (OSError, ValueError) as error:
        return say_refusal("show", error, options.plan)
    print(plan_to_json(plan) if options.json else describe_plan(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())

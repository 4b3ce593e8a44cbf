"""`hf-longctx`: small tools around plans. Training runs through `accelerate launch` and the scripts in recipes/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_longctx._version import __version__


def build_parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands."""
    parser = argparse.ArgumentParser(
        prog="hf-longctx",
        description="Fine-tune Hugging Face causal language models on long, length-skewed sequences.",
        epilog="Train with: accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/sft.py CONFIG.yaml",
    )
    parser.add_argument("--version", action="version", version=f"hf-longctx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    show = commands.add_parser("show", help="check a plan written as JSON and print its schedule")
    show.add_argument("plan", type=Path, help="a plan file, as written by hf_longctx.plan.serialize.plan_to_json")
    show.set_defaults(run=_show)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    status: int = options.run(options)
    return status


def _show(options: argparse.Namespace) -> int:
    from hf_longctx.plan.serialize import plan_from_json
    from hf_longctx.plan.validate import describe_plan, validate_plan

    try:
        plan = validate_plan(plan_from_json(options.plan.read_text()))
    except (OSError, ValueError) as error:
        print(f"{options.plan}: {error}", file=sys.stderr)
        return 1
    print(describe_plan(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`hf-longctx doctor`: lists devices and packages for training, what will run on them, and what to fix."""

from __future__ import annotations

import argparse
import json
import sys

from hf_longctx.cli.terminal import explain

_MARKS = {"ok": "ok  ", "note": "note", "fix": "FIX "}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the parser of all commands."""
    parser = commands.add_parser(
        "doctor",
        help="check versions, devices, links, pinned memory and kernels, and say what to fix",
    )
    explain(
        parser,
        "Checks this machine and this installation.",
        *("hf-longctx doctor", "hf-longctx doctor --json"),
        one="something must be fixed before training",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print all findings; the exit status is 1 if one of them prevents training."""
    from hf_longctx.hf.calibration.doctor import examine
    from hf_longctx.plan.core.messages import counted, on_screen

    findings = examine()
    to_fix = sum(finding.status == "fix" for finding in findings)
    if options.json:
        record = {"ok": not to_fix, "findings": [finding.record() for finding in findings]}
        print(json.dumps(record, indent=2))
        return int(bool(to_fix))
    width = max(len(finding.name) for finding in findings)
    indent = " " * (width + 8)
    for finding in findings:
        lines = [f"{_MARKS[finding.status]}  {finding.name:{width}s}  {finding.text}"]
        if finding.remedy:
            lines.append(f"{indent}-> {finding.remedy}")
        for line in lines:
            print(on_screen(line, sys.stdout, indent))
    print(f"{counted(to_fix, 'thing')} to fix" if to_fix else "nothing to fix")
    return int(bool(to_fix))

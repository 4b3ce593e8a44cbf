"""`hf-longctx report`: writes one HTML page about a run from the files in its output folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_longctx.cli.terminal import explain, say_refusal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the parser of all commands."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run: loss, speed, predicted against measured, layouts, evaluations",
    )
    explain(
        parser,
        "Writes one HTML file that needs no network, from the journal that every training keeps in its output folder. Works "
        "while the training runs, too.",
        *("hf-longctx report outputs/demo", "hf-longctx report outputs/demo --output page.html --peak-tflops 989"),
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the output_dir of a training")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page to write (default: RUN/report.html)")
    parser.add_argument(
        "--peak-tflops", type=float, metavar="N", help="peak TFLOP/s of one device, for MFU (default: known for common GPUs)"
    )
    parser.add_argument("--json", action="store_true", help="print the main numbers as JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page; the exit status is 1 for errors that the user can fix."""
    from hf_longctx.page.page import write_page

    try:
        if options.peak_tflops is not None and not options.peak_tflops > 0:
            raise ValueError(f"--peak-tflops is {options.peak_tflops:g}; give a positive number, or leave it out")
        peak = options.peak_tflops * 1e12 if options.peak_tflops is not None else None
        page, numbers = write_page(options.run_folder, options.output, peak)
    except (OSError, ValueError) as error:
        return say_refusal("report", error)
    if options.json:
        print(json.dumps({"page": str(page), **numbers}, indent=2))
    else:
        print(f"page: {page}")
    return 0

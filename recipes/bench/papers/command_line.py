"""Command lines and tables shared by the scripts that reproduce a paper."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def run_reproduction(
    parser: argparse.ArgumentParser,
    reproduce: Callable[[argparse.Namespace], Mapping[str, Any]],
    text_of: Callable[[argparse.Namespace, Mapping[str, Any]], str],
    arguments: Sequence[str] | None,
) -> int:
    """Parses the options, runs `reproduce` and prints its result as text; returns the exit status.

    `--json` prints JSON instead of the text; `--json FILE` prints the text and writes JSON to the file. If `reproduce` raises
    ValueError or OSError, the message is printed and the status is 2.
    """
    parser.add_argument(
        "--json", nargs="?", const="-", default="", metavar="FILE", help="print JSON instead of the table, or write it to FILE"
    )
    options = parser.parse_args(arguments)
    try:
        result = reproduce(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json != "-":
        print(text_of(options, result))
    if options.json:
        text = json.dumps(result, indent=2) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
    return 0


def print_gains(options: argparse.Namespace, columns: Sequence[str], gains_of: Callable[[int, int], Mapping[str, float]]) -> int:
    """Prints the shares in these columns for every number of tokens and slices, and writes them to `--json`; returns 0."""
    widths = {column: max(8, len(column) + 2) for column in columns}
    print(f"{'tokens':>8s}{'slices':>7s}" + "".join(f"{name.replace('_', ' '):>{width}s}" for name, width in widths.items()))
    rows = []
    for num_tokens in options.tokens:
        for num_slices in options.slices:
            gains = gains_of(num_tokens, num_slices)
            rows.append({"tokens": num_tokens, "slices": num_slices, **gains})
            print(f"{num_tokens:8d}{num_slices:7d}" + "".join(f"{gains[name]:{width}.1%}" for name, width in widths.items()))
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0

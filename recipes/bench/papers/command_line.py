"""The command line that scripts which reproduce a paper share: options in, a table or JSON out."""

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
    """Prints what `text_of` makes of the result; with `--json` JSON in its place, or beside it to a file. The exit status.

    2 where `reproduce` raises ValueError or OSError, whose message is printed.
    """
    parser.add_argument("--json", nargs="?", const="-", default="", metavar="FILE", help="JSON instead of the table, or to FILE")
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

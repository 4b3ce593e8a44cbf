"""Prints reports and helps: tables drawn by `rich` on a terminal, plain text elsewhere and without `rich`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_longctx.sim.output.tables import Table

# width of helps, and of texts for a screen of unknown width
_COLUMNS = 110


def explain(parser: argparse.ArgumentParser, description: str, *examples: str, one: str = "an error that you can fix") -> None:
    """Sets the text of a command's `--help` around its options. one: meaning of exit status 1."""
    from hf_longctx.plan.core.messages import wrapped

    columns = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)
    # a wrapped command can still be copied
    shown = "\n".join(wrapped(f"  {example}", columns - 2).replace("\n", " \\\n") for example in examples)
    statuses = f"exit status: 0 success; 1 {one}; 2 wrong options; 3 an error of this program; 130 Ctrl-C"
    parser.description = textwrap.fill(description, columns)
    parser.epilog = f"example{'s' * (len(examples) > 1)}:\n{shown}\n\n{textwrap.fill(statuses, columns)}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def say_error(text: str) -> None:
    """Prints a message for a person on standard error."""
    from hf_longctx.plan.core.messages import on_screen

    print(on_screen(text, sys.stderr), file=sys.stderr, flush=True)


def say_refusal(command: str, error: Exception, file: object = "") -> int:
    """Prints an error that a user can fix, with the command and a file that it does not name; returns status 1."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = f"{file}: {error}" if file else str(error)
    say_error(f"hf-longctx {command}: {text}")
    return 1


def is_rich() -> bool:
    """Whether tables are drawn: if standard output is a capable terminal and `rich` is installed."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb" and find_spec("rich") is not None


def print_sections(sections: Sequence[Sequence[str]]) -> None:
    """Prints sections of lines and tables; the first line of each is its heading."""
    from hf_longctx.sim.output.tables import Table, as_text

    if not is_rich():
        print(as_text(sections))
        return
    from rich.console import Console
    from rich.text import Text

    from hf_longctx.plan.core.messages import wrapped

    console = Console(highlight=False)
    for place, section in enumerate(sections):
        for number, item in enumerate(section):
            if not item and isinstance(section[number + 1], Table):
                # a drawn table has an empty line above and below
                continue
            if isinstance(item, Table):
                console.print(_drawn(item))
            else:
                # `Console` would continue at the left edge
                text = wrapped(item, console.width)
                console.print(Text(text, style="bold" if number == 0 else ""))
        if place < len(sections) - 1 and not isinstance(section[-1], Table) and not isinstance(sections[place + 1][0], Table):
            console.print()


def print_summary(answer: str, rows: Sequence[tuple[str, str]], text: str) -> None:
    """Prints an answer and its named lines, which wrap on a terminal; elsewhere the plain `text`."""
    if not is_rich():
        print(text)
        return
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console, grid = Console(highlight=False), Grid.grid(padding=(0, 1), pad_edge=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column()
    for name, line in rows:
        grid.add_row(name, Text(line))
    console.print(Text(answer, style="bold green"))
    console.print(grid)


def _drawn(table: Table) -> object:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(table.head))
    last = len(table.head) - 1
    for column, name in enumerate(table.head):
        is_number = column not in (0, last)
        # words of headers and numbers do not break; names and their descriptions wrap on a narrow screen
        room = max(len(part) for part in (*name.split(" "), *(row[column] for row in table.rows))) if is_number else None
        grid.add_column(Text(name), justify="right" if is_number else "left", overflow="fold", min_width=room)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid

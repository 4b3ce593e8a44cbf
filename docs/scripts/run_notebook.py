"""Executes a notebook of the recipes in an empty folder: `python docs/scripts/run_notebook.py NOTEBOOK.ipynb [--write]`.

Fails if a cell does, or if a cell that shows a picture shows none. With `--write`, the file keeps what cells printed and drew,
so that it can be read without being run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

_MOST_S = 600


def executed(path: Path) -> Any:
    """The notebook with the outputs of this run; raises the error of the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=_MOST_S, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        # times and ids of this run
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [_tidied(output) for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def num_pictures(notebook: Any) -> int:
    """Pictures that the cells show; raises ValueError for a cell that should show one and does not."""
    count = 0
    for cell in notebook.cells:
        shown = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        if cell.cell_type == "code" and cell.source.startswith("Image(") and not shown:
            raise ValueError(f"{cell.source} shows no picture")
        count += len(shown)
    return count


def _tidied(output: Any) -> Any:
    """An output without the address of an object, which differs from run to run."""
    if "text/plain" in output.get("data", {}) and "image/png" in output["data"]:
        output["data"]["text/plain"] = "a picture"
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the outputs in the file")
    options = parser.parse_args()
    started_s = time.monotonic()
    notebook = executed(options.notebook)
    print(f"{options.notebook}: {num_pictures(notebook)} pictures, {time.monotonic() - started_s:.0f} s")
    if options.write:
        nbformat.write(notebook, options.notebook)


if __name__ == "__main__":
    main()

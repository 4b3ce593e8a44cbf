"""Runs TRL's own tests of its trainers with our classes in the place of theirs, and tabulates what becomes of them.

    git clone https://github.com/huggingface/trl outputs/trl
    PYTHONPATH=FOLDER_OF_AN_INSTALLED_TRL python tests/peers/trl_suites.py outputs/trl

Tests run from the checkout, against the installed TRL, on the CPU, without a network, with defaults of `LongContextConfig`. Each
suite runs with TRL's classes first: what fails or is skipped there (images, Liger, vLLM, accelerators) says nothing about ours,
and is left out. `--page` writes the table into the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import local_hub

_SUITES = ("sft", "dpo", "reward", "kto", "grpo", "rloo")
_HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of TRL")
    parser.add_argument("--suites", nargs="+", choices=_SUITES, default=list(_SUITES))
    parser.add_argument("--out", type=Path, default=Path("outputs/peers"), help="folder for models, data and outcomes")
    parser.add_argument("--again", choices=("stock", "ours", "none"), default="ours", help="which outcomes to find anew")
    parser.add_argument("-k", dest="chosen", default="", help="run only tests of this expression, as pytest does")
    parser.add_argument("--all", action="store_true", help="also run what failed or was skipped with TRL's classes")
    parser.add_argument("--page", type=Path, help="write the table to this page")
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    local_hub.write_hub(folder)
    rows = []
    for suite in options.suites:
        stock, ours = folder / f"{suite}.stock.jsonl", folder / f"{suite}.ours.jsonl"
        if options.again == "stock" or not stock.exists():
            _run(options.checkout, suite, folder, stock, is_stock=True, chosen=options.chosen)
        runs = [name for name, each in _read(stock).items() if each["outcome"] == "passed" or options.all]
        if options.again != "none" and runs:
            _run(options.checkout, suite, folder, ours, is_stock=False, chosen=options.chosen, tests=runs)
        found = _read(ours)
        rows += [(suite, name, found[name]) for name in runs if name in found]
    print(_text(rows))
    if options.page is not None:
        options.page.write_text(_page(rows), encoding="utf-8")
    return 0


def _run(
    checkout: Path, suite: str, folder: Path, outcomes: Path, *, is_stock: bool, chosen: str, tests: list[str] | None = None
) -> None:
    if not chosen:
        outcomes.unlink(missing_ok=True)
    paths = [str(_HERE), str(_HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    added = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "LONGCTX_PEERS_HUB": str(folder),
        "LONGCTX_PEERS_OUTCOMES": str(outcomes),
        "LONGCTX_PEERS_STOCK": str(int(is_stock)),
        "PYTHONPATH": os.pathsep.join(each for each in paths if each),
        "TOKENIZERS_PARALLELISM": "false",
    }
    file = f"tests/test_{suite}_trainer.py"
    names = [file] if tests is None else [f"{file}::{name}" for name in tests]
    listed = folder / f"{suite}.tests"
    listed.write_text("\n".join(names), encoding="utf-8")
    # -P: the package of the checkout must not come before the installed one
    command = [sys.executable, "-P", "-m", "pytest", "-p", "planned_classes", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += [f"@{listed}", *(["-k", chosen] if chosen else []), "-o", "addopts=", "-o", "timeout=600"]
    with (folder / f"{suite}.{'stock' if is_stock else 'ours'}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=checkout, env={**os.environ, **added}, stdout=log, stderr=subprocess.STDOUT, check=False)


def _read(path: Path) -> dict[str, dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {each["test"]: each for each in map(json.loads, lines)}


Rows = list[tuple[str, str, dict[str, str]]]


def _text(rows: Rows) -> str:
    counts = Counter((suite, each["outcome"]) for suite, _, each in rows)
    lines = [f"{'suite':10}{'ran':>6}{'passed':>8}{'refused':>9}{'failed':>8}"]
    for suite in dict.fromkeys(suite for suite, *_ in rows):
        numbers = [counts[suite, outcome] for outcome in ("passed", "refused", "failed")]
        lines.append(f"{suite:10}{sum(numbers):6}{numbers[0]:8}{numbers[1]:9}{numbers[2]:8}")
    for suite, name, each in rows:
        if each["outcome"] != "passed":
            lines.append(f"{each['outcome']:8} {suite} {name}: {each['said'][:400]}")
    return "\n".join(lines)


def _page(rows: Rows) -> str:
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main())

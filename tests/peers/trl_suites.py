"""Runs TRL's own tests of its trainers with our classes in the place of theirs, and tabulates what becomes of them.

    git clone https://github.com/huggingface/trl outputs/trl
    PYTHONPATH=FOLDER_OF_AN_INSTALLED_TRL python tests/peers/trl_suites.py outputs/trl

Tests run from the checkout, against the installed TRL, on the CPU, without a network, with defaults of `LongContextConfig`. What
does not pass runs with TRL's classes too: tests that fail or are skipped there (images, Liger, vLLM, accelerators) say nothing
about ours, and are left out. `--page` writes the table into the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
    parser.add_argument("--again", action="store_true", help="run also what passed in an earlier call")
    parser.add_argument("-k", dest="chosen", default="", help="run only tests of this expression, as pytest does")
    parser.add_argument("--page", type=Path, help="write the table to this page")
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    local_hub.write_hub(folder)
    rows: Rows = []
    for suite in options.suites:
        ours, stock = folder / f"{suite}.ours.jsonl", folder / f"{suite}.stock.jsonl"
        before = {} if options.again else _read(ours)
        open_ones = [name for name, each in before.items() if each["outcome"] in ("failed", "refused")]
        if open_ones or not before:
            _run(options.checkout, suite, folder, ours, chosen=options.chosen, tests=open_ones)
        found = _read(ours)
        unclear = [name for name, each in found.items() if each["outcome"] in ("failed", "refused") and name not in _read(stock)]
        if unclear:
            _run(options.checkout, suite, folder, stock, is_stock=True, tests=unclear)
        is_here = {name: each["outcome"] == "passed" for name, each in _read(stock).items()}
        rows += [(suite, name, each) for name, each in found.items() if each["outcome"] != "skipped" and is_here.get(name, True)]
    print(_text(rows))
    if options.page is not None:
        options.page.write_text(_page(rows), encoding="utf-8")
    return 0


def _run(
    checkout: Path,
    suite: str,
    folder: Path,
    outcomes: Path,
    *,
    is_stock: bool = False,
    chosen: str = "",
    tests: list[str],
) -> None:
    """Runs `tests` of a suite, or all of them, and adds a line to `outcomes` for each."""
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
    names = [f"{file}::{name}" for name in tests] or [file]
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
    """The table as a page of the documentation; refusals are links to their entries on the pages of errors."""
    counts = Counter((suite, each["outcome"]) for suite, _, each in rows)
    table = ["| suite | run here | passed | refused by name | failed |", "|---|---|---|---|---|"]
    for suite in dict.fromkeys(suite for suite, *_ in rows):
        numbers = [counts[suite, outcome] for outcome in ("passed", "refused", "failed")]
        table.append(f"| `test_{suite}_trainer.py` | {sum(numbers)} | " + " | ".join(map(str, numbers)) + " |")
    reasons: dict[str, list[str]] = {}
    headings = _headings()
    for suite, name, each in rows:
        if each["outcome"] != "passed":
            for problem in _problems(each["said"]) if each["outcome"] == "refused" else ["failed otherwise"]:
                link = next((text for pattern, text in headings if pattern.match(problem)), f"`{problem[:90]}`")
                listed = reasons.setdefault(link, [])
                listed += [text for text in (f"{suite}: `{name.split('::')[-1]}`",) if text not in listed]
    entries = [f"- {link}\n" + "\n".join(f"    - {name}" for name in names) for link, names in reasons.items()]
    return f"{_HEAD}\n" + "\n".join(table) + "\n\n## What is refused\n\n" + "\n".join(entries) + "\n"


_HEAD = """\
# TRL's own tests

The suites that TRL keeps for its trainers, run with `LongContextMixin` in front of its classes, with defaults, on a CPU. Models
are tiny ones of the same classes, and data sets have the same columns, all made locally. Tests that fail or are skipped with
TRL's own classes there (images, Liger, vLLM, accelerators, names of another version of TRL) are left out.

    python tests/peers/trl_suites.py CHECKOUT_OF_TRL --page docs/reference/trl-tests.md

"""


def _problems(said: str) -> list[str]:
    """The problems that a refusal lists, or its only sentence."""
    return re.findall(r"^- (.+)$", said, flags=re.MULTILINE) or [said]


def _headings() -> list[tuple[re.Pattern[str], str]]:
    """Patterns of the messages on the pages of errors, the longest first, and links to them."""
    sys.path.append(str(_HERE.parents[1] / "docs" / "scripts"))
    from error_pages import heading, placed

    found = []
    for message in (message for messages in placed().values() for message in messages):
        text = heading(message)
        pattern = re.compile(".+?".join(map(re.escape, text.split("…"))), flags=re.DOTALL)
        found.append((len(text), pattern, f"[`{text}`](../errors/index.md#{message.anchor})"))
    return [(pattern, link) for _, pattern, link in sorted(found, key=lambda each: -each[0])]


if __name__ == "__main__":
    sys.exit(main())

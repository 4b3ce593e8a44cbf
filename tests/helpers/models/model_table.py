"""Writes `docs/models.md` from a whole sweep; run it as `python tests/helpers/models/model_table.py` from anywhere."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
FILE = TESTS.parent / "docs" / "models.md"
_EXACT = """
Exact means: a tiny fp64 model with every kind of layer of its default config, windows of 6 tokens, chunks of 8 and documents of
up to 30, gives the loss and every gradient of plain eager Hugging Face, one document at a time, to 1e-12: packed, in slices, in
a Ulysses group and in a ring of two ranks. `error` is the largest relative one, rounded up. What transformers computes in fp32
(norms, rotary embeddings, routers, softmax) is fp64 in both. The last three columns say whether the same holds where layers are
recomputed and taken in tiles, where parameters are sharded (FSDP2) and in pipeline stages; `no` is refused by name there, or,
of recomputing, said once while plans keep everything. `whole logits`: the class changes its logits behind the head, so that
plans keep everything for it too.
"""
_PLACES = {"recomputed": "recomputed", "sharded": "sharded", "stages": "stages"}


def table(outcomes: dict[str, dict[str, str]], refused: dict[str, str], version: str) -> str:
    """The page: for every tested class its cells, for every other one why it is refused."""
    total = len(outcomes) + len(refused)
    counts = {summary: list(refused.values()).count(summary) for summary in dict.fromkeys(refused.values())}
    lines = [
        "# Model classes",
        "",
        f"Of the {total} classes of transformers {version} whose names end in `ForCausalLM`, {len(outcomes)} run exactly "
        f"({len(outcomes) / total:.0%}); the others are refused at start, by class, layer and reason:",
        "",
        "| reason | classes |",
        "|---|---|",
        *(f"| {summary} | {count} |" for summary, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        "",
        " ".join(_EXACT.split()),
        "",
        "`python tests/helpers/models/model_table.py` writes this page; `pytest -m sweep "
        "tests/hf/models/test_model_sweep.py` proves it.",
        "",
        "## Exact",
        "",
        "| class | error | recomputed | sharded | stages |",
        "|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(cells.values())} |" for name, cells in sorted(outcomes.items())),
        "",
        "## Refused",
        "",
        "| class | reason |",
        "|---|---|",
        *(f"| {name} | {summary} |" for name, summary in sorted(refused.items())),
    ]
    return "\n".join(lines) + "\n"


def cells_of(outcome: object, head: str) -> dict[str, str]:
    """What a row says of a class; `head`: why its logits are whole."""
    errors, refusals = outcome.errors, outcome.refusals  # type: ignore[attr-defined]
    decade = max(-14, math.ceil(math.log10(max(*errors.values(), 1e-16))))
    cells = {road: "no" if road in refusals else "yes" for road in _PLACES}
    if head and cells["recomputed"] == "yes":
        cells["recomputed"] = "whole logits"
    return {"error": f"1e{decade}"} | cells


def read_page() -> tuple[dict[str, list[str]], dict[str, str]]:
    """The rows of the page: exact classes with their cells, refused ones with their reasons."""
    exact, refused = FILE.read_text().split("## Exact")[1].split("## Refused")
    rows = [
        {
            cells[0]: cells[1:]
            for cells in ([cell.strip() for cell in line.strip("| \n").split("|")] for line in part.splitlines())
            if cells[0].endswith("ForCausalLM")
        }
        for part in (exact, refused)
    ]
    return rows[0], {name: cells[0] for name, cells in rows[1].items()}


def main() -> None:
    os.environ.update(PYTHONPATH=str(TESTS), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(TESTS))
    import transformers
    from helpers.measures.class_sweep import sweep
    from helpers.models.any_model import build_any, class_names
    from helpers.ranks.rank_pool import RankPool

    from hf_longctx.hf.models.classes import TESTED_MODELS, refusal_of
    from hf_longctx.hf.models.layers import head_problem

    pool = RankPool(2)
    outcomes = {}
    for name in sorted(TESTED_MODELS):
        outcomes[name] = cells_of(sweep(name, pool), head_problem(build_any(name)))
        print(name, outcomes[name], flush=True)
    pool.close()
    refused = {name: refusal_of(name).summary for name in class_names() if name not in TESTED_MODELS}
    FILE.write_text(table(outcomes, refused, transformers.__version__))


if __name__ == "__main__":
    main()

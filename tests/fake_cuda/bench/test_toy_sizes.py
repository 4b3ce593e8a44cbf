"""The GPU matrix at toy size on the fake device: every row of sections A, B, C and E runs and agrees, or says what is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_longctx.recipes.bench.gpu import matrix


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_ceiling_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a kernel of torch that no operator starts, so nothing computes it for the fake device
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    file = tmp_path / "rows.json"
    matrix.main(["--toy", "--sections", "A", "--json", str(file)])
    rows = rows_of(file.with_suffix(".ceilings.json"))
    assert all(math.isfinite(row["value"]) and row["value"] > 0 for row in rows), rows
    # a group that failed is one row with the reason
    assert not [row for row in rows if row["unit"] == "failed"]
    assert "both ways at once, our slab" in {row["name"] for row in rows}


@pytest.mark.parametrize("section", ["B", "C", "E"])
def test_rows_of_a_section_agree(section: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    methods = ["--methods", "HF plain", "ours, all on the host", "ours, split"] if section == "B" else []
    matrix.main(["--toy", "--sections", section, *methods, "--json", str(file)])
    rows = [row for row in rows_of(file) if not row["state"].startswith("skipped: ")]
    assert {row["state"] for row in rows} == {"ok"} and len(rows) >= (3 if section == "B" else 1)
    losses = [row["loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * len(rows), rel=2e-3)

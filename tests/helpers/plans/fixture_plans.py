"""Hand-written plans of tests/plan/fixtures, unchanged or with values replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.plan.core.types import StepPlan

FIXTURES = Path(__file__).parents[2] / "plan" / "fixtures"


FIXTURE_NAMES = tuple(sorted(path.stem for path in FIXTURES.glob("*.json")))


def fixture_text(name: str) -> str:
    return (FIXTURES / f"{name}.json").read_text()


def fixture(name: str) -> StepPlan:
    return plan_from_json(fixture_text(name))


def edited(name: str, **changes: Any) -> StepPlan:
    """A hand-written plan with JSON values replaced; `micro_batches__0__groups` is the path micro_batches[0].groups."""
    data = json.loads(fixture_text(name))
    for path, value in changes.items():
        *parents, last = [int(word) if word.isdigit() else word for word in path.split("__")]
        node = data
        for word in parents:
            node = node[word]
        node[last] = value
    return plan_from_json(json.dumps(data))

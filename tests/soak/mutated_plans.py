"""Damaged plan files: each is read and checked, or refused in one line, within a bound on seconds and memory.

python tests/soak/mutated_plans.py --count 100000
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hf_longctx.plan.core.validate import describe_plan, validate_plan
from hf_longctx.sim.output.json_records import read_plan_file

FIXTURES = Path(__file__).resolve().parents[1] / "plan" / "fixtures"
# values that stand for what people and broken programs write
NUMBERS = [-1, 0, 1, 2, 7, 2**31, 2**53, 2**63, 10**300, -(10**30), 0.5, -0.0, 1e308, float("nan"), float("inf")]
WORDS = ["", "F", "0F0", "0B0", "x" * 5000, "0F0 " * 2000, "replicated", "ring"]
ODD = [None, True, *NUMBERS, *WORDS, [], [0], [[0, 0, 1]], [0, 0, 2**53], {}, {"a": 1}, [None], [[[]]]]
LONGEST_S, MOST_BYTES = 5.0, 2**30


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in items for each in places(item, (*path, key)))]


def mutated(plan: Any, generator: random.Random) -> str:
    """The text of a plan with one to three faults: values replaced, removed, doubled or moved, or the text itself damaged."""
    data = copy.deepcopy(plan)
    for _ in range(generator.randint(1, 3)):
        path = generator.choice(places(data)[1:] or [()])
        if not path:
            return json.dumps(generator.choice(ODD))
        owner = data
        for key in path[:-1]:
            owner = owner[key]
        what = generator.randrange(6)
        if what == 0:
            del owner[path[-1]]
        elif what == 1 and isinstance(owner, list):
            owner.insert(generator.randrange(len(owner) + 1), copy.deepcopy(owner[path[-1]]))
        elif what == 2 and isinstance(owner, dict):
            owner[generator.choice(["lenders", "nvme", "chunk", "x"])] = owner[path[-1]]
        elif what == 3 and isinstance(owner[path[-1]], int):
            owner[path[-1]] += generator.choice([-1, 1, 10, -1000, 2**40])
        else:
            owner[path[-1]] = copy.deepcopy(generator.choice(ODD))
    text = json.dumps(data)
    damage = generator.randrange(40)
    if damage == 0:
        return text[: generator.randrange(len(text))]
    if damage == 1:
        depth = generator.choice([100, 10**5])
        return "[" * depth + "]" * depth
    if damage == 2:
        place = generator.randrange(len(text))
        return text[:place] + generator.choice('{}[],:"\\0x9') + text[place + 1 :]
    return text


def outcome(text: str) -> str:
    """ "valid", or the error of a file that is refused; raises whatever else it meets."""
    try:
        describe_plan(validate_plan(read_plan_file(text).plan))
    except ValueError as error:
        message = str(error)
        assert message and len(message) < 2000, message[:3000]
        return "refused"
    return "valid"


def soak(count: int, seed: int = 0) -> Counter[str]:
    """Outcomes of `count` damaged files; raises on a traceback, or where time or memory is above its bound."""
    generator = random.Random(seed)
    plans = [json.loads(file.read_text()) for file in sorted(FIXTURES.glob("*.json"))]
    plans = [plan for plan in plans if isinstance(plan, dict) and "schema" in plan]
    found: Counter[str] = Counter()
    for number in range(count):
        text = mutated(generator.choice(plans), generator)
        start_s = time.perf_counter()
        try:
            found[outcome(text)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, file {number}: {error!r}\n{text[:2000]}") from error
        seconds = time.perf_counter() - start_s
        assert seconds < LONGEST_S, f"seed {seed}, file {number}: {seconds:.1f} s\n{text[:2000]}"
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    print(dict(soak(options.count, options.seed)), "none above", LONGEST_S, "s or", MOST_BYTES, "bytes")

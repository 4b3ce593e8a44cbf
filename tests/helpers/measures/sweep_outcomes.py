"""Reads and writes `tests/snapshots/sweep_outcomes.json`, which pins the outcome of the sweep for each class of transformers.

A class that is exact on all roads has an empty outcome; otherwise it has the reason for each road that is refused, or for the
class as a whole. Tests that sweep compare their outcomes with the file, and bound errors themselves. Where a change is meant,
`PYTHONPATH=tests python tests/helpers/measures/sweep_outcomes.py LlamaForCausalLM` writes the outcomes of the named classes anew,
or of all classes if none is named, which takes as long as a sweep.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from helpers.models.versions import is_newer, is_older

PINNED = Path(__file__).parents[2] / "snapshots" / "sweep_outcomes.json"
# key of the reason for which a class is refused as a whole
WHOLE = "class"
# groups of the file
MODELS, ADAPTED, REFUSED_CLASSES = "models", "models with adapters", "refused classes"


@cache
def pinned_outcomes() -> dict[str, dict[str, dict[str, str]]]:
    return dict(json.loads(PINNED.read_text()))


def reasons(name: str, refusals: dict[str, str]) -> dict[str, str]:
    """The reasons of an outcome by road, without the name of the class."""
    return {road: reason.replace(name, "{class}") for road, reason in sorted(refusals.items())}


def check_outcome(group: str, name: str, refusals: dict[str, str]) -> None:
    """Fails unless a class is refused on the same roads, and for the same reasons, as when the file was written.

    Does nothing with another version of transformers, whose classes may differ.
    """
    if is_older or is_newer:
        return
    found, pinned = reasons(name, refusals), pinned_outcomes()[group].get(name)
    assert found == pinned, f"{group}: the outcome of {name} is {found} and was {pinned}"


def main(names: list[str]) -> None:
    """Writes the file anew, or only the outcomes of these classes."""
    import torch
    from helpers.measures.class_sweep import attention_adapters, local_outcome, reference, sweep
    from helpers.models.any_model import build_any
    from helpers.ranks.rank_pool import RankPool

    from hf_longctx.families.registry import FAMILIES, TESTED_MODELS, WRAPPED_MODELS
    from hf_longctx.hf.rules.classes import class_problem, reason_of

    found: dict[str, dict[str, dict[str, str]]] = {MODELS: {}, ADAPTED: {}, REFUSED_CLASSES: {}}
    pool = RankPool(2)
    for name in sorted((*TESTED_MODELS, *WRAPPED_MODELS)):
        if names and name not in names:
            continue
        found[MODELS][name] = reasons(name, sweep(name, pool).refusals)
        lora = attention_adapters(name)
        if dict(lora)["target_modules"]:
            found[ADAPTED][name] = reasons(name, local_outcome(name, lora, reference(name, lora), is_brief=True).refusals)
        print(name, found[MODELS][name], found[ADAPTED].get(name), flush=True)
    pool.close()
    for name in sorted(name for family in FAMILIES for name in family.refused):
        reason = reason_of(name)
        if (names and name not in names) or reason is None or not reason.summary:
            continue
        with torch.device("meta"):
            try:
                model = build_any(name, is_random=False)
            except Exception:
                # no tiny config of the class is known
                continue
        found[REFUSED_CLASSES][name] = reasons(name, {WHOLE: class_problem(model)})
    if names:
        before = pinned_outcomes()
        found = {group: dict(sorted((before[group] | own).items())) for group, own in found.items()}
    PINNED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

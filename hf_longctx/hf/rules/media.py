"""Says why rows with images cannot be trained on, once a set has some."""

from __future__ import annotations

from typing import Any

from hf_longctx.hf.data.media.processors import processor_problem, tokens_problem
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.media import media_kinds, num_added_levels, tower_dropout
from hf_longctx.plan.setup import Setup


def media_problems(facts: ModelFacts, processor: Any, setup: Setup, is_attached: bool) -> list[str]:
    """Returns the problems of a run whose rows have images with its model, its processing class and its ways to share work.

    is_attached: whether the callback is attached to a stock trainer, whose own evaluation reads no images of tokenised rows.
    """
    model = facts.model
    if not media_kinds(model):
        return [
            f"rows have images, but {facts.name} trains rows of text alone; use a class that docs/models.md names with images, "
            f"or remove such rows"
        ]
    if is_attached:
        return [
            "rows have images, but a trainer to which the callback is attached trains rows of text alone so far; use "
            "LongContextTrainer"
        ]
    if problem := processor_problem(processor) or tokens_problem(model, processor):
        return [problem]
    problems = []
    if facts.head_kind != "next_token":
        problems.append(f"rows have images, but {facts.name} does not predict the next token; remove such rows")
    if setup.planner.lend_stages:
        problems.append("rows have images, but stages that lend their ranks have no towers for them; set lend_stages=False")
    if setup.num_stages > 1 and (num_levels := num_added_levels(model)) > (first := setup.ranges[0][0].num_layers):
        problems.append(
            f"{facts.name} adds features of images after its first {num_levels} layers, but the first stage begins with {first} "
            f"layers; use fewer stages, or fewer layer ranges in each"
        )
    if dropping := tower_dropout(model):
        problems.append(
            f"towers drop at random in training ({', '.join(dropping[:3])}), but an image between two chunks runs in both; set "
            f"the rate to 0 in the config of the tower"
        )
    return problems

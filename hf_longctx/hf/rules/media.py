"""Says why rows with images cannot be trained on, once a set has some."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from hf_longctx.hf.data.fields import MEDIA
from hf_longctx.hf.data.media.processors import processor_problem, tokens_problem
from hf_longctx.hf.data.streams.sources import WholeStream, is_stream
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.media import media_kinds, num_added_levels, sees_images_both_ways, tower_dropout
from hf_longctx.hf.rules.collators import is_readable, kept_random_states
from hf_longctx.plan.cost.traffic import group_shapes
from hf_longctx.plan.setup import Setup


def media_problems(facts: ModelFacts, processor: Any, setup: Setup) -> list[str]:
    """Returns the problems of a run whose rows have images with its model, its processing class and its ways to share work."""
    model = facts.model
    if not media_kinds(model):
        return [
            f"rows have images, but {facts.name} trains rows of text alone; use a class that docs/models.md names with images, "
            f"or remove such rows"
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
    if sees_images_both_ways(model) and (problem := _both_ways_problem(facts.name, setup)):
        problems.append(problem)
    if dropping := tower_dropout(model):
        problems.append(
            f"towers drop at random in training ({', '.join(dropping[:3])}), but an image between two chunks runs in both; set "
            f"the rate to 0 in the config of the tower"
        )
    return problems


def may_have_media(dataset: Any, model: Any, processor: Any) -> bool:
    """Whether rows of a set may have images: by its columns; for a stream of unknown ones, by model and processor."""
    columns = source_columns(dataset)
    if columns is None and (is_stream(dataset) or isinstance(dataset, WholeStream)):
        return bool(media_kinds(model)) and not processor_problem(processor)
    return MEDIA in (columns or ())


def source_columns(dataset: Any) -> Collection[str] | None:
    """Returns the columns of a set: those that it names, those of all rows of a list, or those of the first row of another set.

    None if they are unknown: for a stream that names none, and for a set whose first row cannot be read, as its scan will say.
    """
    source = dataset.stream if isinstance(dataset, WholeStream) else dataset
    columns: Collection[str] | None = getattr(source, "column_names", None)
    if columns is not None or not is_readable(source):
        return columns
    with suppress(Exception), kept_random_states():
        rows = source if isinstance(source, list | tuple) else [source[0]]
        return {name for row in rows if isinstance(row, Mapping) for name in row}
    return None


def _both_ways_problem(name: str, setup: Setup) -> str:
    """Returns why a run cannot compute images whose tokens see each other both ways; empty if it can."""
    costs, planner = setup.costs, setup.planner
    if setup.num_stages > 1:
        return (
            f"rows have images whose tokens see each other both ways in {name}, which {setup.num_stages} stages do not train so "
            f"far; set stages=1"
        )
    if costs.method not in ("auto", "ulysses"):
        what, remedy = f"method={costs.method!r}", "leave it out"
    elif rings := [degree for degree in planner.degrees if not group_shapes(degree, "ulysses", costs.model, costs.cluster)]:
        allowed = tuple(degree for degree in planner.degrees if degree not in rings)
        what = f"groups of {rings[0]} ranks cannot divide {costs.model.num_heads} heads"
        remedy = f"set degrees={allowed}"
    else:
        return ""
    return (
        f"rows have images whose tokens see each other both ways in {name}, which rings of ranks do not compute, but {what}; "
        f"{remedy}, so that ranks of a group divide heads"
    )

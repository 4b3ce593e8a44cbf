"""Every multimodal class of transformers runs rows of text, or is refused by name; images in rows are found in each that runs."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
import torch
import transformers
from helpers.models.any_model import build_any, tiny_config
from transformers.models.auto import modeling_auto

from hf_longctx.families.refused import REASONS
from hf_longctx.families.registry import FAMILIES, TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.data.fields import token_column_problem
from hf_longctx.hf.data.scan import scan_dataset
from hf_longctx.hf.models.towers import placeholder_ids
from hf_longctx.hf.rules.classes import class_problem, reason_of

# classes that the installed transformers has, by name, since `hasattr` would import them; older versions lack some
HERE = sorted({*WRAPPED_MODELS} & {*dir(transformers)})
# (why, class) of refused multimodal classes
REFUSED = [
    (REASONS[reason].text, name) for family in FAMILIES for name, reason in family.refused.items() if not REASONS[reason].summary
]
# fields with ids of tokens that a class compares with those of a row without replacing their embeddings: ends of images
MARKS = re.compile(r"(vision|image|im|video|audio|low_res_image|frame)_(start|end|newline)_(token_)?id|user_token_id")

# classes that get images, or proteins, in places that a column names, or beside the tokens: no token tells of them
IN_COLUMNS = (
    *("EvollaForProteinText2Text", "IdeficsForVisionText2Text", "Kosmos2ForConditionalGeneration"),
    "Kosmos2_5ForConditionalGeneration",
)
KINDS = re.compile(r"(image|video|audio)_(token|patch)_?(id|index)")


def built_by(mapping: dict[str, Any]) -> set[str]:
    """Names of the classes that an `Auto...` class builds."""
    return {name for found in mapping.values() for name in ([found] if isinstance(found, str) else found)}


def test_every_class_that_the_auto_classes_build_around_towers_is_listed_or_refused_by_a_reason() -> None:
    causal = built_by(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    names = built_by(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names |= {name for name in causal if name.endswith("ForConditionalGeneration")}
    unknown = {name for name in names if name not in (*WRAPPED_MODELS, *TESTED_MODELS) and reason_of(name) is None}
    assert unknown == set()


@pytest.mark.parametrize("reason,name", REFUSED)
def test_a_refused_class_is_refused_by_name_with_what_would_be_needed(reason: str, name: str) -> None:
    # the check reads the class alone, and some of these cannot be made small
    model = type(name, (torch.nn.Module,), {})()
    problem = class_problem(model)
    assert problem.startswith(
        f"model class {name} is not supported: it {reason}. Instead, use a class that docs/models.md calls exact"
    )
    assert "would" in reason


def compared_fields(model_class: Any) -> set[str]:
    """Fields of the config whose value a class compares with the tokens of a row, by its own source."""
    source = inspect.getsource(sys.modules[model_class.__module__])
    return set(re.findall(r"input_ids == self\.(?:config|vocabulary_mapping)\.(\w+)", source))


@pytest.mark.parametrize("name", [name for name in HERE if name not in IN_COLUMNS])
def test_tokens_that_stand_for_images_sound_or_video_are_found_in_the_config_of_every_class(name: str) -> None:
    model_class = getattr(transformers, name)
    config = tiny_config(model_class)
    fields = {field for field in compared_fields(model_class) if not MARKS.fullmatch(field)}
    # some defaults name no token, which only checkpoints do
    named = fields | {field for field in config.to_dict() if KINDS.fullmatch(field)}
    for place, field in enumerate(field for field in sorted(named) if getattr(config, field, 0) is None):
        setattr(config, field, 7 + place)
    known = placeholder_ids(config)
    assert known
    assert {field: value for field in fields if (value := getattr(config, field, None)) not in (None, *known)} == {}
    assert all(getattr(config, field) in known for field in named if KINDS.fullmatch(field) and hasattr(config, field))
    vocab_size = max(known) + 1
    for token in {known[0], known[-1]}:
        row = {"input_ids": [5, token, 6], "labels": [5, -100, 6]}
        (problem,) = scan_dataset([row], "d", vocab_size, placeholders=known).problems
        assert problem.startswith(f"d row 0 has token {token}, which stands for an image, sound or video")


@pytest.mark.parametrize("name", IN_COLUMNS)
@pytest.mark.parametrize("column", ["pixel_values", "flattened_patches", "image_embeds_position_mask", "protein_input_ids"])
def test_classes_without_such_tokens_have_columns_that_are_refused(name: str, column: str) -> None:
    assert placeholder_ids(tiny_config(getattr(transformers, name))) == ()
    problem = token_column_problem({"input_ids": False, column: False}, "d")
    assert problem is not None and f"column {column!r}" in problem


def test_tokens_that_a_tower_of_gemma_3n_embeds_are_refused_although_they_are_no_placeholders() -> None:
    config = build_any("Gemma3nForConditionalGeneration", is_random=False).config
    # the begin and the end of images and sound, too
    assert placeholder_ids(config) == tuple(range(64, 72))

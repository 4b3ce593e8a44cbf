"""Every class and type that a family names is in its folder of transformers, and belongs to no other family."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import transformers
from helpers.models.any_model import class_names
from helpers.models.model_table import images_section
from helpers.models.versions import newest

from hf_longctx.families.family import Family, Modules
from hf_longctx.families.refused import REASONS
from hf_longctx.families.registry import FAMILIES, MODULES, family_of, family_of_type, traits_of
from hf_longctx.plan.model.layers import STATES

MODELS = Path(transformers.__file__).parent / "models"


@cache
def found_in(folder: str) -> tuple[set[str], set[str]]:
    """Names of the classes that a folder of transformers defines, and values of `model_type` in its configs."""
    texts = [path.read_text() for path in (MODELS / folder).glob("*.py")]
    classes = {node.name for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
    return classes, {kind for text in texts for kind in re.findall(r"model_type(?:: str)? = \"([^\"]+)\"", text)}


def module_names(modules: Modules) -> set[str]:
    return {name for each in fields(Modules) for name in getattr(modules, each.name)}


def named_classes(family: Family) -> set[str]:
    """Classes that must be in the folder of the family; text models and decoders may be those of others."""
    own = family.own_attention
    attention = () if own is None else (own.attention, own.layer)
    mixers = [name for mixer in family.mixers for name in (mixer.name, mixer.parent)]
    return {family.causal, family.wrapper, *family.refused, *module_names(family.modules), *attention, *mixers} - {""}


@pytest.mark.wide(
    "bailing_hybrid",
    "dots3_note",
    "gemma4",
    "longcat_flash",
    "pegasus",
    "vaultgemma",
    "ernie4_5_vl_moe",
    "hunyuan_vl",
    "molmo2",
    "qwen2_5_vl",
    "video_llama_3",
    "inkling",
    "udop",
)
@newest
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.folder)
def test_a_folder_has_all_that_its_family_names(family: Family) -> None:
    classes, types = found_in(family.folder)
    assert named_classes(family) <= classes
    assert {*family.model_types} <= types
    assert bool(family.wrapper) == bool(family.text)


@pytest.mark.quick
def test_each_class_and_each_type_belongs_to_one_family() -> None:
    classes = Counter(name for family in FAMILIES for name in (family.causal, family.wrapper, *family.refused) if name)
    types = Counter(name for family in FAMILIES for name in family.model_types)
    modules = Counter(name for family in FAMILIES for name in module_names(family.modules))
    for counted in (classes, types, modules, Counter(family.folder for family in FAMILIES)):
        assert {name for name, count in counted.items() if count > 1} == set()
    assert all(family_of(name).folder for name in classes) and all(family_of_type(name).folder for name in types)
    assert set(modules) == module_names(MODULES)


@newest
def test_every_causal_language_model_of_transformers_has_a_family() -> None:
    assert {name for name in class_names() if not family_of(name).folder} == set()


def test_families_name_rows_and_reasons_that_there_are() -> None:
    assert {family.traits.state for family in FAMILIES} - {""} <= STATES.keys()
    assert {reason for family in FAMILIES for reason in family.refused.values()} == REASONS.keys()


@pytest.mark.quick
def test_an_unknown_type_has_the_traits_of_llama_but_no_kernels() -> None:
    unknown = traits_of({"model_type": "unknown"})
    assert unknown == traits_of({}) == family_of("UnknownForCausalLM").traits
    assert unknown.gated_mlp and unknown.tiles_norms and not unknown.kernels and not unknown.cuts_heads


def test_pages_name_and_count_the_classes_with_images_and_videos() -> None:
    folder = Path(__file__).resolve().parents[2]
    assert "\n".join(images_section()) in (folder / "docs" / "models.md").read_text()
    images, videos = (sum(kind in family.media for family in FAMILIES) for kind in ("image", "video"))
    assert f" on text, {images} of them [with images, {videos} with video](" in (folder / "README.md").read_text()
    assert f"\n{images} multimodal classes give the loss" in (folder / "docs" / "guides" / "images.md").read_text()

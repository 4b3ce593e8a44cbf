"""Images in the self-test: the copy of every class with towers passes, and what its plans would do wrong is found by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.models.any_model import wide_floats
from helpers.models.media_rows import CASES, MediaCase
from transformers import TrainingArguments

import hf_longctx.hf.data.collator as collator_module
import hf_longctx.hf.models.media as media_module
from hf_longctx import LongContextConfig
from hf_longctx.hf.data.media.processors import FileReader
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.media import around_text, token_of
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.self_test import reduced_copy as copies
from hf_longctx.hf.self_test.check import SelfTest
from hf_longctx.hf.self_test.probe_images import ProbeImage, ProbeImages
from hf_longctx.hf.self_test.reduced_copy import ChosenLayers, reduced_copy
from hf_longctx.hf.self_test.specimen import RunPlace
from hf_longctx.hf.start.setup import choose_setup
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.patterns import AttentionPattern

CPU = torch.device("cpu")
HERE = sorted({*CASES} & {*dir(transformers)})
# positions of three kinds, a convolution with a state, a projector outside of towers, and images that see themselves both ways
DIFFERENT = {f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Lfm2Vl", "Llama4", "Gemma4")}
# layers of towers, more than a copy keeps
DEEP = 5


def deep(case: MediaCase) -> Any:
    """A model of the case whose towers have more layers than a copy keeps."""
    settings = CASES[case.name][0]
    vision = settings["vision_config"] | dict.fromkeys(("num_hidden_layers", "depth"), DEEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, case.name, (settings | {"vision_config": vision}, CASES[case.name][1]))
        return case.build()


def images_of(case: MediaCase, model: Any) -> ProbeImages:
    """Two images of the case in place of those of a processor."""
    _, reader = replace(case, layouts=(("i",), ("i",))).rows(model)
    found = []
    for each in reader.opened:
        grid = each.tensors.get("image_grid_thw")
        # a mark before and behind the features
        is_feature = (False, *[True] * each.num_features, False)
        found.append(ProbeImage(is_feature, each, () if grid is None else tuple(grid[0].tolist())))
    return ProbeImages(tuple(found), FileReader(None, {"image": token_of(model.config, "image")}, {}, None))  # type: ignore[arg-type, dict-item]


def self_tested(model: Any, images: ProbeImages, folder: Path) -> str:
    """Verdict of the self-test with these images on a model on one rank."""
    patch_model(model)
    facts = ModelFacts.of(model)
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    setup = choose_setup(LongContextConfig(tokens_per_rank=96), facts, args, (1,), None)
    with pytest.MonkeyPatch.context() as patch, wide_floats():
        patch.setattr(ProbeImages, "of", lambda *_: images)
        test = SelfTest.of(facts, setup, CPU, False, None, object())
        assert test is not None
        return test.run(RunPlace(GroupPool((1,), 1.0), None, CPU, False, lambda count: count))


@pytest.mark.daily("Llama4ForConditionalGeneration")
@pytest.mark.parametrize("name", HERE)
def test_copies_of_all_classes_pass_with_their_towers(name: str, tmp_path: Path) -> None:
    case = MediaCase(name)
    model = deep(case)
    images = images_of(case, model)
    line = self_tested(model, images, tmp_path)
    sizes = [len(each.is_feature) for each in images.images]
    assert "self-test passed" in line
    assert f"tokens with images of {sizes[0]} and {sizes[1]} tokens in float64" in line
    error = re.search(r"largest error (\S+) against", line)
    assert error is not None and float(error[1]) <= 1e-9


def without_levels(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Leaves out the features that layers add."""
    tables = media_module.feature_tables
    patch.setattr(media_module, "feature_tables", lambda *each: tables(*each)[:1])


def without_gradients(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Loses the gradients of towers."""
    tables = media_module.feature_tables
    patch.setattr(media_module, "feature_tables", lambda *each: [table.detach() for table in tables(*each)])


def from_the_first_row(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Gives the first tokens of a slice the first features of its images."""
    change_media(patch, lambda media: replace(media, rows=torch.arange(len(media.rows))))


def of_one_kind(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Counts tokens in place of positions in time, height and width."""
    change_media(patch, lambda media: replace(media, positions=None))


def change_media(patch: pytest.MonkeyPatch, change: Any) -> None:
    made = collator_module.chunk_media

    def changed(parts: Any) -> Any:
        found = made(parts)
        return None if found is None else change(found)

    patch.setattr(collator_module, "chunk_media", changed)


def in_its_own_forward(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Lets the class change pixels in its forward, which plans do not run."""
    kind: Any = type(around_text(model))

    class Changed(kind):  # type: ignore[misc]
        def forward(self, *args: Any, pixel_values: Any = None, **keywords: Any) -> Any:
            pixel_values = None if pixel_values is None else pixel_values / 2
            return super().forward(*args, pixel_values=pixel_values, **keywords)

    around_text(model).__class__ = Changed


def causal(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Hides the later tokens of an image from its earlier ones."""
    patch.setattr(AttentionPattern, "_block_tiles", lambda *_: ())


QWEN, GEMMA = "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
MERGED = "hidden states: what layers get, embeddings with features of images in place of some, is the first that differs, by"
SLICES = "- slices, one rank, recomputed: "
# mistake -> class, what is said of it
PLANTED: dict[Any, tuple[str, str]] = {
    without_levels: (QWEN, "- one rank: hidden states: layer 2 (full_attention) is the first that differs, by"),
    without_gradients: (QWEN, "- one rank: gradient per layer: of towers and projectors differs by"),
    from_the_first_row: (QWEN, f"{SLICES}{MERGED}"),
    of_one_kind: (QWEN, "- one rank: hidden states: layer 0 (full_attention) is the first that differs, by"),
    in_its_own_forward: (QWEN, f"- one rank: {MERGED}"),
    causal: (GEMMA, "- one rank: hidden states: layer 0 (sliding_attention, window 7) is the first that differs, by"),
}


@pytest.mark.wide
@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_with_images_are_found_by_name(mistake: Any, tmp_path: Path) -> None:
    name, said = PLANTED[mistake]
    case = MediaCase(name)
    model = case.build()
    images = images_of(case, model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="self-test failed before step 1") as refused:
        mistake(patch, model)
        self_tested(model, images, tmp_path)
    assert said in str(refused.value)


def test_a_copy_names_tokens_of_images_by_ids_that_it_has_and_leaves_layers_of_towers_out() -> None:
    case = MediaCase(QWEN)
    model = deep(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "NUM_TOKEN_IDS", 40)
        chosen = ChosenLayers.of(model, (0,), has_towers=True)
        copy = reduced_copy(chosen, 256, torch.float64)
        num_elements = copies.num_elements(chosen)
    inner = copy.model.model
    assert copy.num_token_ids == 40 > inner.config.image_token_id == copy.model.config.image_token_id
    assert inner.config.image_token_id not in (inner.config.video_token_id, inner.config.vision_start_token_id)
    assert [type(block).__name__ for block in inner.visual.blocks] == [
        *("Qwen3VLVisionBlock", "Identity", "Identity"),
        *["Qwen3VLVisionBlock"] * 2,
    ]
    assert model.config.image_token_id == 60
    assert num_elements == sum(parameter.numel() for parameter in copy.model.parameters())

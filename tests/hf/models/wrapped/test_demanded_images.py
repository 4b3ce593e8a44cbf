"""A model that demands images runs rows of text as with an image that no token reads, and counts all that such rows run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models.any_model import build_any, wide_floats
from helpers.models.versions import newest
from helpers.trainers.trainer_runs import problems_at_start

from hf_longctx.hf.models.heads import num_tokens
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.models.towers import tower_parameters
from hf_longctx.hf.rules.arguments import _more_tokens
from hf_longctx.hf.rules.rule import Facts

pytestmark = newest
NAME = "IdeficsForVisionText2Text"
IDS = torch.tensor([[5, 63, 7, 61, 9]])


def images(is_read: bool) -> dict[str, Any]:
    """An image, which all tokens read or none does."""
    mask = torch.full((1, IDS.shape[1], 1), int(is_read))
    return {"pixel_values": torch.ones(1, 1, 3, 28, 28, dtype=torch.float64), "image_attention_mask": mask}


@pytest.mark.parametrize("use_resampler", [True, False])
def test_forwards_without_a_plan_read_images_and_need_none_until_the_run_ends(use_resampler: bool) -> None:
    model = build_any(NAME, use_resampler=use_resampler)
    with wide_floats(), torch.no_grad():
        read, unread = (model(input_ids=IDS, **images(is_read)).logits for is_read in (True, False))
        patch_model(model)
        assert torch.equal(model(input_ids=IDS, **images(True)).logits, read) and not torch.allclose(read, unread)
        assert torch.equal(model(input_ids=IDS).logits, unread)
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(IDS)).logits, unread)
        restore_attention(model, "eager")
        with pytest.raises(ValueError, match="has to be not-None"):
            model(input_ids=IDS)


def test_images_under_a_plan_are_refused() -> None:
    model = build_any(NAME)
    patch_model(model)
    with pytest.raises(ValueError, match="IdeficsModel got pixel_values, image_attention_mask under a plan"):
        model(input_ids=IDS, **images(True), longctx=object())


def test_dropout_that_is_in_no_module_is_refused() -> None:
    problems = problems_at_start(build_any(NAME, is_random=False, dropout=0.2))
    assert problems == ["dropout is 0.2; set it to 0.0, dropout is not supported yet"]


def test_mlps_and_tokens_beside_the_usual_ones_are_counted() -> None:
    model = build_any(NAME, is_random=False)
    towers = sum(parameter.numel() for parameter in tower_parameters(model))
    spec = model_spec(model)
    assert spec.tower_parameters == towers and spec.idle_parameters == 0
    assert spec.num_parameters == pytest.approx(sum(parameter.numel() for parameter in model.parameters()) - towers, rel=0.02)
    assert spec.vocab_size == num_tokens(model.config) == model.config.vocab_size + 2 == 64


@pytest.mark.parametrize("count,is_refused", [(64, False), (65, True)])
def test_tokenizers_may_have_the_tokens_beside_the_usual_ones(count: int, is_refused: bool) -> None:
    model = build_any(NAME, is_random=False)
    facts = Facts(model_config=model.config, processing_class=range(count))
    assert bool(list(_more_tokens(facts))) == is_refused

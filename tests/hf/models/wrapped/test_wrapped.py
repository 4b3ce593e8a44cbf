"""Multimodal models train rows of text exactly; towers stay as they are, and rows with images are refused by name."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.measures.planted import replaced
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.trainers.trainer_runs import training_arguments
from transformers import DataCollatorWithFlattening, Gemma3ForConditionalGeneration, Trainer

from hf_longctx import LongContextCallback, LongContextConfig, LongContextTrainer
from hf_longctx.hf.data import scan
from hf_longctx.hf.data.scan import row_tokens, scan_dataset
from hf_longctx.hf.models.attention import attention_name
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.models.towers import freeze_towers, placeholder_ids, text_part, tower_names, tower_parameters

IMAGE = 63
# token ids below the one that stands for an image
ROWS = [{name: [min(item, IMAGE - 1) for item in items] for name, items in row.items()} for row in random_rows([30, 7, 17, 1])]
WITH_IMAGE = [*ROWS, {"input_ids": [5, 7, IMAGE, 6], "labels": [5, 7, -100, 6]}]
STEPS: dict[str, Any] = {
    **{"max_steps": 2, "per_device_train_batch_size": len(ROWS), "max_grad_norm": 0.0, "warmup_steps": 0},
    **{"lr_scheduler_type": "constant", "save_strategy": "no"},
}
SETTINGS = LongContextConfig(tokens_per_rank=64, report_steps=False, timeline_steps=0)


def gemma3() -> Any:
    model = build_any("Gemma3ForConditionalGeneration", "sdpa")
    model.config.image_token_id = IMAGE
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain_weights() -> dict[str, torch.Tensor]:
    """The weights after two steps of plain transformers, one document at a time, with torch's AdamW on all weights."""
    model = gemma3()
    decay, rest = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    with wide_floats():
        for _ in range(2):
            reference_step(model, ROWS)
            optimizer.step()
    return weights_of(model)


def check_towers(model: Any, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Every weight of the towers is bit-equal, and there are some; the text model has changed."""
    towers = {id(p) for p in tower_parameters(model)}
    names = [name for name, p in model.named_parameters() if id(p) in towers]
    assert any("vision_tower" in name for name in names) and any("projector" in name for name in names)
    assert not [name for name in names if not torch.equal(after[name], before[name])]
    assert not [name for name in before if name not in names and torch.equal(after[name], before[name])]


@pytest.mark.wide
def test_training_is_that_of_plain_transformers_and_leaves_towers_alone(plain_weights, tmp_path: Path) -> None:
    model = gemma3()
    before = weights_of(model)
    data, args = datasets.Dataset.from_list(ROWS), training_arguments(str(tmp_path), **STEPS)
    with wide_floats():
        trainer = LongContextTrainer(model=model, args=args, train_dataset=data, longctx_config=SETTINGS)
        trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    after = weights_of(model)
    # towers are frozen while a training lasts
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert max(relative_error(after[name], plain_weights[name]) for name in after) <= 1e-10
    check_towers(model, before, after)
    saved = weights_of(Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "saved", dtype=torch.float64))
    assert saved.keys() == after.keys() and all(torch.equal(saved[name], after[name]) for name in after)


@pytest.mark.wide
def test_the_callback_alone_trains_as_plain_transformers_does(plain_weights, tmp_path: Path) -> None:
    model = gemma3()
    before = weights_of(model)
    args = training_arguments(str(tmp_path), **STEPS, train_sampling_strategy="sequential")
    with wide_floats():
        Trainer(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_list(ROWS),
            data_collator=DataCollatorWithFlattening(),
            callbacks=[LongContextCallback(SETTINGS)],
        ).train()
    after = weights_of(model)
    assert max(relative_error(after[name], plain_weights[name]) for name in after) <= 1e-10
    check_towers(model, before, after)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.daily("Qwen3VL")
@pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3_5", "Glm4v", "Gemma4"])
def test_the_callback_alone_serves_classes_that_decline_the_number_of_label_tokens(name: str, tmp_path: Path) -> None:
    model, plain = (build_any(f"{name}ForConditionalGeneration", "sdpa") for _ in range(2))
    assert not model.accepts_loss_kwargs
    with wide_floats():
        reference_step(plain, ROWS)
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
    # two batches with unequal numbers of tokens, so that the mean of their means is another one
    batches = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "sgd"}
    batches |= {"learning_rate": 1.0, "weight_decay": 0.0}
    trainer = Trainer(
        model=model,
        args=training_arguments(str(tmp_path), **STEPS | batches, train_sampling_strategy="sequential"),
        train_dataset=datasets.Dataset.from_list(ROWS),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[LongContextCallback(SETTINGS)],
    )
    with wide_floats():
        trainer.train()
    assert not trainer.model_accepts_loss_kwargs
    before, after, expected = (weights_of(each) for each in (build_any(type(model).__name__, "sdpa"), model, plain))
    assert max(relative_error(after[key], expected[key]) for key in after) <= 1e-12
    assert max(relative_error(after[key], before[key]) for key in after) >= 1e-2


def refusal(folder: Path, alone: bool = False) -> str:
    """The error of a training on rows of which the last has an image's token; empty if it trains."""
    data, args = datasets.Dataset.from_list(WITH_IMAGE), training_arguments(str(folder), **STEPS | {"max_steps": 3})
    try:
        if alone:
            callbacks, collator = [LongContextCallback(SETTINGS)], DataCollatorWithFlattening()
            Trainer(model=gemma3(), args=args, train_dataset=data, data_collator=collator, callbacks=callbacks).train()
        else:
            LongContextTrainer(model=gemma3(), args=args, train_dataset=data, longctx_config=SETTINGS).train()
    except ValueError as error:
        return str(error)
    return ""


def test_a_row_with_an_image_is_refused_and_would_be_trained_as_text_otherwise(tmp_path: Path) -> None:
    assert "train_dataset row 4 has token 63, which stands for an image" in refusal(tmp_path)
    assert "the batch has token 63, which stands for an image" in refusal(tmp_path, alone=True)
    with replaced(scan, "_placeholder_problems", lambda *_: []):
        assert refusal(tmp_path) == ""


def test_rows_with_images_are_found_in_every_kind_of_dataset() -> None:
    for rows in (datasets.Dataset.from_list(WITH_IMAGE), WITH_IMAGE):
        assert not scan_dataset(rows, "d", 64).problems
        (problem,) = scan_dataset(rows, "d", 64, placeholders=(IMAGE, 10**6)).problems
        assert problem.startswith("d row 4 has token 63, which stands for an image, sound or video")
    assert not scan_dataset(datasets.Dataset.from_list(ROWS), "d", 64, placeholders=(IMAGE,)).problems
    with pytest.raises(ValueError, match="d row 9 has token 63"):
        row_tokens(WITH_IMAGE[-1], ["input_ids", "labels"], 9, "d", 64, (IMAGE,))
    row_tokens(ROWS[0], ["input_ids", "labels"], 9, "d", 64, (IMAGE,))


@pytest.mark.parametrize("column", ["pixel_values", "pixel_values_videos", "image_grid_thw", "image_sizes", "input_features"])
def test_a_column_with_inputs_of_towers_is_refused(column: str) -> None:
    rows = [{**row, column: [0.5]} for row in ROWS]
    (problem,) = scan_dataset(datasets.Dataset.from_list(rows), "d", 64).problems
    assert problem.startswith(f"d has a column {column!r}, an input for images, sound or video")


def test_a_forward_under_a_plan_refuses_images() -> None:
    model = gemma3()
    patch_model(model)
    with pytest.raises(ValueError, match="Gemma3Model got pixel_values under a plan"):
        model(input_ids=torch.tensor([[5]]), pixel_values=torch.zeros(1, 3, 2, 2), longctx=object())


def test_the_forward_keeps_its_signature_and_that_of_a_user_is_refused() -> None:
    model = gemma3()
    stock = inspect.signature(model.model.forward)
    model.model.forward = lambda **keywords: None
    with pytest.raises(ValueError, match=r"the forward of model \(Gemma3Model\) was replaced"):
        patch_model(model)
    del model.model.forward
    name = attention_name(model)
    patch_model(model)
    assert inspect.signature(model.model.forward) == stock
    assert pickle.loads(pickle.dumps(model.model)).forward is not None
    restore_attention(model, name)
    assert "forward" not in vars(model.model)


def test_parts_of_a_multimodal_model_are_told_apart() -> None:
    model = gemma3()
    assert type(text_part(model)).__name__ == "Gemma3TextModel"
    assert tower_names(model) == ["model.vision_tower", "model.multi_modal_projector"]
    assert placeholder_ids(model.config) == (IMAGE,)
    thaw = freeze_towers(model)
    assert {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad} == {
        *("vision_tower", "multi_modal_projector")
    }
    thaw()
    assert all(p.requires_grad for p in model.parameters())
    # a text model that has the head itself
    assert tower_names(build_any("Llama4ForConditionalGeneration")) == ["vision_model", "multi_modal_projector"]
    text = build_any("LlamaForCausalLM")
    assert text_part(text) is text and not tower_names(text) and not placeholder_ids(text.config)

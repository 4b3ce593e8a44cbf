"""The callback on a stock trainer whose rows have images: weights and losses of plain transformers, and refusals by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.any_model import wide_floats
from helpers.models.reference import relative_error
from helpers.trainers.trainer_runs import StepRecorder, check_equal_steps, training_arguments
from hf.trainer.test_media_training import (
    IMAGE,
    SETTINGS,
    STEPS,
    plain_loss,
    plain_training,
    qwen3_vl,
    row_of,
    rows_and_processor,
    with_lora,
)
from transformers import Trainer

from hf_longctx import LongContextCallback, LongContextTrainer
from hf_longctx.hf.data.media.processors import MediaTokens
from hf_longctx.hf.models.media import tower_arguments
from hf_longctx.hf.models.towers import tower_parameters


def stock(model: Any, rows: Any, processor: Any, folder: Path, given: Any = None, **arguments: Any) -> Trainer:
    """A stock trainer. given: its further arguments."""
    args = training_arguments(str(folder), **STEPS | arguments)
    return Trainer(model=model, args=args, train_dataset=rows, processing_class=processor, **given or {})


@pytest.mark.parametrize("kind", ["trained", "frozen", "lora"])
def test_an_attached_callback_trains_and_evaluates_rows_with_images_as_plain_transformers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, processor = rows_and_processor()
    plain, model = ((with_lora if kind == "lora" else lambda each: each)(qwen3_vl(processor)) for _ in range(2))
    for each in (plain, model) if kind == "frozen" else ():
        for parameter in tower_parameters(each):
            parameter.requires_grad_(False)
    expected = plain_training(plain, rows, processor)
    callback = LongContextCallback(SETTINGS)
    with wide_floats(), caplog.at_level(logging.WARNING):
        trainer = stock(model, rows, processor, tmp_path, {"eval_dataset": rows}, gradient_accumulation_steps=1)
        callback.attach(trainer)
        trainer.train()
        # alone, the trainer's own loader drops images, as a line of the log says
        assert "the trainer is stock again, whose own loops read no images of tokenised rows" in caplog.text
        callback.attach(trainer)
        loss = trainer.evaluate()["eval_loss"]
        with pytest.raises(ValueError, match="returns whole logits, which evaluation under plans never makes"):
            trainer.predict(rows)
        callback.detach()
    after = dict(model.named_parameters())
    assert type(trainer) is Trainer
    assert max(relative_error(after[name], expected[name]) for name in after) <= 1e-9
    assert any("visual" in name for name, p in after.items() if p.requires_grad) == (kind != "frozen")
    with torch.no_grad():
        assert loss == pytest.approx(float(plain_loss(plain, rows, processor)), rel=1e-9)


def steps_of(trainer: Any, callback: LongContextCallback | None = None) -> list[tuple[float, dict[str, torch.Tensor]]]:
    recorder = StepRecorder()
    with wide_floats():
        if callback is not None:
            callback.attach(trainer)
        recorder.attach(trainer)
        trainer.train()
    return [(step.loss, step.gradients) for step in recorder.steps]


def test_accumulated_steps_and_streams_of_a_stock_trainer_are_those_of_ours(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    arguments["train_sampling_strategy"] = "sequential"
    ours = LongContextTrainer(
        model=qwen3_vl(processor),
        args=training_arguments(str(tmp_path), **STEPS | arguments),
        train_dataset=rows,
        processing_class=processor,
        longctx_config=SETTINGS,
    )
    expected = steps_of(ours)
    for given in (rows, rows.to_iterable_dataset()):
        found = steps_of(stock(qwen3_vl(processor), given, processor, tmp_path, **arguments), LongContextCallback(SETTINGS))
        check_equal_steps(found, expected)


def test_images_that_only_a_stock_loader_would_see_are_refused_by_name(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    text = rows.filter(lambda row: not row["media"]).select_columns(["input_ids", "labels"])
    # images in the set to evaluate alone: plans evaluate it
    trainer, callback = (
        stock(qwen3_vl(processor), text, processor, tmp_path, {"eval_dataset": rows}),
        LongContextCallback(SETTINGS),
    )
    callback.attach(trainer)
    found = trainer.evaluate()["eval_loss"]
    callback.detach()
    ours = LongContextTrainer(
        model=trainer.model, args=trainer.args, train_dataset=rows, processing_class=processor, longctx_config=SETTINGS
    )
    assert found == pytest.approx(ours.evaluate(rows)["eval_loss"], rel=1e-9)
    ours.longctx_run.close()
    # a set that comes later, perhaps of rows in a list or a stream
    trainer = stock(qwen3_vl(processor), text, processor, tmp_path)
    callback.attach(trainer)
    for late in (rows, list(rows), rows.to_iterable_dataset()):
        with pytest.raises(ValueError, match="the rows to evaluate may have images, which the loader of a stock trainer drops"):
            trainer.evaluate(late)
        with pytest.raises(ValueError, match="the rows to evaluate may have images, which the loader of a stock trainer drops"):
            trainer.predict(late)
    callback.detach()


def test_collators_and_loaders_that_make_pixels_are_refused_by_name(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    model, tokens = qwen3_vl(processor), MediaTokens(processor)

    def with_pixels(given: list[Any]) -> dict[str, Any]:
        (row,) = given[:1]
        image = row["images"][0]
        ids = torch.tensor([tokens.of_size(*image.size, "an image").ids])
        pixels = processor.image_processor([image], return_tensors="pt")
        own = {name: each for name, each in pixels.items() if name in tower_arguments(model, "image")}
        return {"input_ids": ids, "labels": ids, **own}

    from helpers.models.tiny_processors import picture

    raw = [row_of(0, IMAGE, "what is this?") | {"images": [picture(40, 28)]}]
    arguments = {"remove_unused_columns": False, "per_device_train_batch_size": 1}
    trainer = stock(model, raw, processor, tmp_path, {"data_collator": with_pixels}, **arguments)
    with pytest.raises(
        ValueError, match=r"it returns 'pixel_values', which plans do not read.*give rows with images to tokenise_"
    ):
        LongContextCallback(SETTINGS).attach(trainer)
    alone = {"data_collator": with_pixels, "callbacks": [LongContextCallback(SETTINGS)]}
    with pytest.raises(
        ValueError, match="the batch holds pixel_values, image_grid_thw, and the callback alone plans rows of text"
    ):
        stock(model, raw, processor, tmp_path, alone, **arguments).train()
    # the trainer drops the columns of images, and leaves their tokens
    first = datasets.Dataset.from_list([rows[0]])
    alone = {"callbacks": [LongContextCallback(SETTINGS)]}
    with pytest.raises(
        ValueError, match=r"which stands for an image, sound or video, .* callback alone plans rows of text; attach"
    ):
        stock(model, first, processor, tmp_path, alone, per_device_train_batch_size=1).train()

"""TRL's `SFTTrainer` under plans with images: tokenised rows train as in plain transformers, others are refused by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.any_model import wide_floats
from helpers.models.reference import relative_error
from helpers.trainers.trainer_runs import training_arguments
from hf.trainer.test_media_training import IMAGE, SETTINGS, STEPS, plain_training, qwen3_vl, row_of, rows_and_processor

from hf_longctx import LongContextCallback, LongContextMixin

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)"),
]


def sft(processor: Any, rows: Any, folder: Path, is_planned: bool = True, model: Any = None, **changes: Any) -> Any:
    """An `SFTTrainer` of TRL on one process, with the mixin in front of it unless it is a stock one."""
    import trl

    given = training_arguments(str(folder), **STEPS).to_dict()
    own = {name: given[name] for name in (*STEPS, "learning_rate", "weight_decay", "optim", "seed", "report_to", "disable_tqdm")}
    args = trl.SFTConfig(str(folder), use_cpu=True, bf16=False, **own | {"max_length": None} | changes)
    kind: Any = type("Planned", (LongContextMixin, trl.SFTTrainer), {}) if is_planned else trl.SFTTrainer
    settings = {"longctx_config": SETTINGS} if is_planned else {}
    model = qwen3_vl(processor) if model is None else model
    return kind(model=model, args=args, train_dataset=rows, processing_class=processor, **settings)


def test_tokenised_rows_train_as_in_plain_transformers_and_are_saved_with_the_processor(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    # both made here, since rotary frequencies would be wider inside `wide_floats`
    plain, model = (qwen3_vl(processor) for _ in range(2))
    expected = plain_training(plain, rows, processor)
    with wide_floats():
        trainer = sft(processor, rows, tmp_path, model=model)
        trainer.train()
    after = dict(model.named_parameters())
    assert max(relative_error(after[name], expected[name]) for name in expected) <= 1e-9
    trainer.save_model(str(tmp_path / "saved"))
    assert {"tokenizer.json", "processor_config.json"} <= {path.name for path in (tmp_path / "saved").iterdir()}


@pytest.mark.parametrize("is_stream", [False, True])
def test_images_that_only_trls_collator_would_read_are_refused(is_stream: bool, tmp_path: Path) -> None:
    _, processor = rows_and_processor()
    rows: Any = datasets.Dataset.from_list([row_of(0, IMAGE, "what is this?"), row_of(1, IMAGE, "and")])
    said = "rows have a column of images, which SFTTrainer reads in its collator, and plans never call it; give the rows to token"
    with pytest.raises(ValueError, match=said):
        sft(processor, rows.to_iterable_dataset() if is_stream else rows, tmp_path)


def test_a_length_to_which_trl_cuts_rows_with_images_is_refused(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    with pytest.raises(
        ValueError, match=r"rows have images, but max_length=1024 of the SFTConfig cuts .* SFTConfig\(max_length=None"
    ):
        sft(processor, rows, tmp_path, max_length=1024)


def test_the_callback_trains_rows_with_images_of_a_stock_sft_trainer_unless_it_cuts_them(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    plain, model = (qwen3_vl(processor) for _ in range(2))
    expected = plain_training(plain, rows, processor)
    with pytest.raises(ValueError, match="rows have images, but max_length=1024 of the SFTConfig cuts"):
        LongContextCallback(SETTINGS).attach(sft(processor, rows, tmp_path, is_planned=False, model=model, max_length=1024))
    with wide_floats():
        trainer = sft(processor, rows, tmp_path, is_planned=False, model=model)
        LongContextCallback(SETTINGS).attach(trainer)
        trainer.train()
    after = dict(model.named_parameters())
    assert max(relative_error(after[name], expected[name]) for name in expected) <= 1e-9

"""A model that is one pipeline stage refuses what only a whole one can do, until it may; a failed training leaves such a part."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import make_trainer

from hf_longctx import LongContextTrainer
from hf_longctx.hf.models.refusing import allow_all, refuse_all, refuses


def test_refusals_are_taken_back_even_behind_autocast() -> None:
    model = build_model(ModelCase(dtype=torch.float32))
    refuse_all(model, 1, 2)
    with pytest.raises(RuntimeError, match="holds only stage 1 of 2 of LlamaForCausalLM"):
        model(torch.tensor([[1, 2]]))
    # do as accelerate, which binds autocast to a model that it prepares
    model._original_forward, refused = model.forward, model.forward.__func__
    model.forward = MethodType(lambda this, *args, **keywords: refused(this, *args, **keywords), model)
    model._is_accelerate_prepared = True
    allow_all(model)
    assert not refuses(model) and not refuses(model, "save_pretrained") and "_is_accelerate_prepared" not in vars(model)
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, model.config.vocab_size)


def test_a_part_that_a_failed_training_left_cannot_start(tmp_path) -> None:
    rows, model = random_rows([13, 5, 8, 21] * 2), build_model(ModelCase())
    refuse_all(model, 0, 2)
    trained = make_trainer(ModelCase(), rows, str(tmp_path), {})
    with pytest.raises(ValueError, match="left a part of LlamaForCausalLM on this rank; load the model again"):
        LongContextTrainer(
            model=model, args=trained.args, train_dataset=trained.train_dataset, longctx_config=quiet_config(tokens_per_rank=64)
        )
    assert refuses(model)

"""A model that was trained under autocast, which accelerate leaves around its forward, trains again."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from helpers.models.any_model import build_any
from helpers.models.classifiers import classifier_rows
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer

LENGTHS = [13, 13, 13, 5]


@pytest.mark.wide("LlamaForSequenceClassification", "MambaForCausalLM")
@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "BloomForCausalLM", "MambaForCausalLM"])
def test_a_second_training_under_autocast_runs_as_the_first(name: str) -> None:
    is_classifier = name.endswith("Classification")
    rows = classifier_rows("classes", LENGTHS) if is_classifier else random_rows(LENGTHS)
    model: Any = (build_model(ModelCase(head=(("num_labels", 3),))) if is_classifier else build_any(name)).float()
    arguments = {**PLAIN_DESCENT, "bf16": True, "max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 4}
    ids, losses = torch.arange(9).unsqueeze(0) + 3, []
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model.eval()(ids).logits.float()
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(ModelCase(), rows, folder, {"self_test": True}, arguments, model=model)
            losses.append(trainer.train().training_loss)
            trainer.longctx_run.close()
        with torch.no_grad():
            # autocast stays, which accelerate leaves on any trained model
            assert torch.equal(model.eval()(ids).logits, expected)
    assert losses[0] == losses[1]

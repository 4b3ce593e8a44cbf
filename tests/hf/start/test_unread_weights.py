"""Whole models on one rank whose weights are still to be read: nothing writes placeholders or resumes into them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers.models.mxfp4_checkpoints import save_gpt_oss, unpacked
from helpers.models.reference import random_rows
from helpers.trainers.trainer_runs import LossRecorder, training_arguments
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from hf_longctx import LongContextConfig, LongContextTrainer, load_sharded
from hf_longctx.hf.checkpoints.deferred import defer_weights, source_of

CONFIG = LongContextConfig(tokens_per_rank=96, report_steps=False, timeline_steps=0, self_test=False)


def make_trainer(model: Any, out: Path) -> Any:
    args = training_arguments(
        str(out), max_steps=2, save_strategy="steps", save_steps=1, per_device_train_batch_size=4, bf16=False
    )
    rows = datasets.Dataset.from_list(random_rows([61, 13, 5, 8, 21, 34, 3, 9]))
    return LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=CONFIG)


def unread(folder: str) -> Any:
    model = load_sharded(folder, CONFIG, dtype=torch.bfloat16)
    assert source_of(model) is not None
    return model


def losses(trainer: Any, resume: str | None = None) -> list[float]:
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return recorder.losses


def saved_llama(folder: Path) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return model


@pytest.mark.wide
def test_a_resumed_training_reads_the_checkpoint_after_the_model(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path / "model")
    expected = losses(make_trainer(unread(folder), tmp_path / "once"))
    assert losses(make_trainer(unread(folder), tmp_path / "again"), str(tmp_path / "once" / "checkpoint-1")) == expected[1:]


def test_a_model_without_its_weights_writes_no_file(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path / "model")
    model = unread(folder)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="would write NaN for weights that are still to be read"):
            each.save_pretrained(tmp_path / "early")
    assert not (tmp_path / "early").exists()
    trainer = make_trainer(model, tmp_path / "out")
    losses(trainer)
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "late")
    saved = load_file(tmp_path / "late" / "model.safetensors")
    assert saved and all(torch.equal(saved[name], weight) for name, weight in model.named_parameters())


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"trainable_token_indices": [1, 2]}])
def test_adapters_of_a_model_without_its_weights_write_no_nan(tmp_path: Path, settings: dict[str, Any]) -> None:
    real = saved_llama(tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["q_proj"], **settings)
    for copies in (False, True):
        early = get_peft_model(defer_weights(str(tmp_path / "model")), copy.deepcopy(config))
        with pytest.raises((RuntimeError, NotImplementedError)) as error:
            (copy.deepcopy(early) if copies else early).save_pretrained(tmp_path / "early")
        # the last are safetensors' own words for a tensor without values
        words = "lm_head.weight (modules_to_save) would be NaN" if "modules_to_save" in settings else "no data"
        assert words in str(error.value)
        assert not list((tmp_path / "early").glob("*.safetensors"))
    # all of a plain state dict that a file could have
    state = defer_weights(str(tmp_path / "model")).state_dict()
    assert state.keys() == real.state_dict().keys() and all(value.is_meta for value in state.values())


def test_an_adapter_is_read_over_weights_that_are_still_to_be_read(tmp_path: Path) -> None:
    real = saved_llama(tmp_path / "model")
    trained = get_peft_model(real, LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    trained.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(defer_weights(str(tmp_path / "model")), tmp_path / "adapter", is_trainable=True)
    adapter, expected = (dict(get_peft_model_state_dict(each)) for each in (again, trained))
    assert adapter.keys() == expected.keys() and all(torch.equal(adapter[name], expected[name]) for name in adapter)


def test_weights_are_read_before_they_are_saved(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path / "model")
    trainer = make_trainer(unread(folder), tmp_path / "out")
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = dict(unpacked(folder, dtype=torch.bfloat16).named_parameters())
    assert saved.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(saved[name], weight)] == []

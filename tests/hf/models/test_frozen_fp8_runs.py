"""Trainings over frozen weights in fp8: rounded while they are read, in any layout to the same bytes, saved as plain adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import trained_beside, training_arguments
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from hf_longctx import LongContextConfig, LongContextTrainer, load_sharded
from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.models.quantised import fp8_layers, round_frozen

ROWS = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 2)
SHARDED = {"tokens_per_rank": 48, "parameters": "sharded"}
STAGES = {"tokens_per_rank": 96, "stages": 2}


def with_adapters(model: Any) -> Any:
    torch.manual_seed(7)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def saved(folder: Path, family: str = "llama") -> str:
    build_model(ModelCase(family, dtype=torch.bfloat16)).save_pretrained(folder)
    return str(folder)


def packed(model: Any) -> dict[str, Tensor]:
    """Whole bytes and scales by name; those of this rank's stage."""
    layers = {name.replace("base_layer.", "").replace(".base_layer", ""): layer for name, layer in fp8_layers(model).items()}
    return {f"{name}.{key}": whole(each.detach()).clone() for name, own in layers.items() for key, each in own.named_parameters()}


def train(folder: str, out: str, config: dict[str, Any], is_deferred: bool, resume: str | None = None) -> Any:
    """Words at start, losses, bytes and scales before and after, and adapters of a run on this rank."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    args = training_arguments(
        out, max_steps=4, save_strategy="steps", save_steps=2, per_device_train_batch_size=8 // num_ranks, bf16=False
    )
    settings = LongContextConfig(**config, frozen_weights="fp8", report_steps=False, timeline_steps=0)
    if is_deferred:
        model: Any = load_sharded(folder, settings, dtype=torch.bfloat16)
        assert source_of(model) is not None
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rows = datasets.Dataset.from_list(ROWS)
    trainer = LongContextTrainer(model=with_adapters(model), args=args, train_dataset=rows, longctx_config=settings)
    found = trained_beside(trainer, packed, resume)
    return trainer.longctx_run.report.opening, *found


def expected_bytes(folder: str) -> dict[str, Tensor]:
    model = with_adapters(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    round_frozen(model)
    return packed(model)


def assert_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found and found.keys() <= expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in found.items())


@pytest.mark.wide
@resuming
def test_every_layout_has_the_same_bytes_and_resumes_from_the_others(ranks: Any, tmp_path: Path) -> None:
    folder, pair = saved(tmp_path / "model"), ranks(2)
    expected = expected_bytes(folder)
    shards = pair.run(train, folder, str(tmp_path / "shards"), SHARDED, True, timeout_s=280.0)
    checkpoint = str(tmp_path / "shards" / "checkpoint-2")
    stages = pair.run(train, folder, str(tmp_path / "stages"), STAGES, False, checkpoint, timeout_s=280.0)
    for opening, _, before, after, _ in (*shards, *stages):
        assert "tokens in float64 with fp8 weights unpacked and the run's precision" in opening
        assert_bytes(before, expected)
        assert_bytes(after, expected)
    assert set().union(*(before for _, _, before, _, _ in stages)) == expected.keys() == shards[0][2].keys()
    # rounding of bf16 and of fp8 differs where sums have another order
    assert stages[0][1] == pytest.approx(shards[0][1][2:], rel=0.02)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    plain = PeftModel.from_pretrained(base, tmp_path / "stages" / "checkpoint-4", autocast_adapter_dtype=False)
    own = {name: each for _, _, _, _, adapters in stages for name, each in adapters.items()}
    loaded = {name: each.detach() for name, each in plain.named_parameters() if "lora_" in name}
    assert own.keys() == loaded.keys() and all(torch.equal(each, loaded[name]) for name, each in own.items())
    # adapters merge into the bf16 checkpoint, not into bytes
    merged = plain.merge_and_unload()
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}
    assert max(relative_error(own[name], each) for name, each in shards[0][4].items()) < 0.2


def test_one_process_reads_a_model_one_matrix_at_a_time(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    opening, losses, before, after, _ = train(folder, str(tmp_path / "out"), {"tokens_per_rank": 96}, True)
    assert "with fp8 weights unpacked and the run's precision" in opening
    expected = expected_bytes(folder)
    assert before.keys() == expected.keys()
    assert_bytes(before, expected)
    assert_bytes(after, expected)
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
@pytest.mark.parametrize("safe_merge", [False, True])
def test_adapters_do_not_merge_into_bytes(merge: str, safe_merge: bool) -> None:
    model = with_adapters(build_model(ModelCase(dtype=torch.bfloat16)))
    round_frozen(model)
    before = packed(model)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="cannot be merged into weights in fp8; save the adapter"):
            getattr(each, merge)(safe_merge=safe_merge)
        assert_bytes(packed(each), before)


def test_bytes_are_not_saved_as_weights(tmp_path: Path) -> None:
    model = with_adapters(build_model(ModelCase(dtype=torch.bfloat16)))
    round_frozen(model)
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    for base in (model.get_base_model(), model.unload()):
        with pytest.raises(RuntimeError, match="would write frozen weights in fp8, which from_pretrained cannot read"):
            base.save_pretrained(tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_casts_leave_scales_in_fp32() -> None:
    model = with_adapters(build_model(ModelCase(dtype=torch.bfloat16)))
    round_frozen(model)
    before = packed(model)
    model.to(torch.float64).to(torch.bfloat16)
    assert_bytes(packed(model), before)

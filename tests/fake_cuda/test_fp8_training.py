"""Trainings over frozen weights in fp8 on the fake device, with and without activations on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from fake_cuda.test_training import slow_hardware, small_model
from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.models.quantised import fp8_layers, keep_blocks
from hf_longctx.hf.start.stages import load_stage
from hf_longctx.plan.core.types import LayerRange, StepPlan
from hf_longctx.runtime.core import fp8

STEPS, LENGTHS = 2, (1024, 512, 256)
# states, the workspace of a product in fp8, and less than all activations
DEVICE_GIB = 0.13


def losses(folder: Path, hardware: str, frozen: str, **settings: Any) -> tuple[list[float], list[StepPlan]]:
    """Losses of a training with adapters, and its plans."""
    row = torch.randint(0, 128, (max(LENGTHS),), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [row[:length] for length in LENGTHS] * STEPS})
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = small_model()
    torch.manual_seed(3)
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=len(LENGTHS), learning_rate=1e-3, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    config = LongContextConfig(
        timeline_steps=0, calibration_steps=0, hardware=hardware, self_test=False, frozen_weights=frozen, compile_layers=False,
        **settings,
    )  # fmt: skip
    trainer = LongContextTrainer(model=model, args=arguments, train_dataset=data, longctx_config=config)
    plans: list[StepPlan] = []
    done = trainer.longctx_run.report.step_done
    trainer.longctx_run.report.step_done = lambda plan, result: (plans.append(plan), done(plan, result))
    trainer.train()
    assert bool(fp8_layers(trainer.model)) == (frozen == "fp8")
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], plans


def test_losses_are_those_of_the_model_in_bf16_within_rounding(tmp_path: Path, device: FakeDevice, computing: Computing) -> None:
    hardware = slow_hardware(tmp_path)
    expected, _ = losses(tmp_path / "bf16", hardware, "unchanged")
    kept, _ = losses(tmp_path / "fp8", hardware, "fp8")
    moved, plans = losses(tmp_path / "offload", hardware, "fp8", host_gib=0.05, device_gib=DEVICE_GIB)
    stages = [stage for plan in plans for micro in plan.micro_batches for group in micro.groups for stage in group.stages]
    shares = [share for stage in stages for policy in stage.activations for layer in policy.layers for share in layer.shares]
    assert any(share.host for share in shares)
    assert kept == pytest.approx(expected, rel=2e-2) and kept != expected and kept[1] != kept[0]
    # sums in another order change some roundings
    assert moved == pytest.approx(kept, rel=1e-2)


def test_a_stage_of_a_checkpoint_in_fp8_keeps_its_bytes(tmp_path: Path, device: FakeDevice) -> None:
    block, ranges = (16, 16), ((LayerRange(0, 1),), (LayerRange(1, 2),))
    small_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    found = load_file(file)
    for name in [name for name in found if name.endswith("proj.weight")]:
        rows, columns = found[name].shape
        found[f"{name}_scale_inv"] = torch.rand(rows // 16, columns // 16) + 0.5
        found[name] = found[name].to(fp8.DTYPE)
    save_file(found, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    for stage, num_layers in ((0, 1), (1, 2)):
        model = load_stage(str(tmp_path), ranges, stage, torch.bfloat16)
        keep_blocks(model)
        layers = fp8_layers(model)
        assert len(layers) == 7 * num_layers
        for name, layer in layers.items():
            assert torch.equal(layer.weight, found[f"{name}.weight"].view(torch.uint8)) and layer.block == block
            assert torch.equal(layer.scale, found[f"{name}.weight_scale_inv"])

"""Training with offloading on the fake device: where the host waits, what is pinned when, and new layouts of attention."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice, HostWait
from hf_longctx import LongContextConfig, LongContextTrainer, recipes
from hf_longctx.runtime.activations.host_tier import HostTier

STEPS, FIRST_WATCHED = 5, 2


class Watch(TrainerCallback):
    """Notes what happened on the device before each step."""

    def __init__(self, device: FakeDevice, waits: list[HostWait], computing: Computing) -> None:
        self.device, self.waits, self.computing = device, waits, computing
        # before each step: memory pinned, waits of the host, layouts of cuDNN's attention
        self.pinned: list[int] = []
        self.num_waits: list[int] = []
        self.layouts: list[int] = []

    def note(self) -> None:
        self.pinned.append(self.device.count("cudaHostRegister"))
        self.num_waits.append(len(self.waits))
        self.layouts.append(self.computing.plans.num_layouts)

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        self.note()

    def on_train_end(self, *arguments: Any, **keywords: Any) -> None:
        self.note()


def small_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, attn_implementation="sdpa")
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def slow_hardware(folder: Path) -> str:
    """File with a machine that computes so slowly that every plan offloads what it can, whatever copies take."""
    profile = json.loads((Path(recipes.__file__).parent / "hardware" / "cpu.json").read_text())
    profile["hardware"] |= {"matmul_flops_per_s": 1e6, "attention_flops_per_s": 1e6, "name": "slow"}
    file = folder / "slow.json"
    file.write_text(json.dumps(profile))
    return str(file)


def train(folder: Path, device: FakeDevice, computing: Computing, lengths: list[int], **settings: Any) -> Watch:
    """Trains on documents of these lengths, one batch of them per step."""
    row = torch.randint(0, 128, (max(lengths),), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [row[:length] for length in lengths] * STEPS})
    with device.waits() as waits:
        watch = Watch(device, waits, computing)
        arguments = TrainingArguments(
            str(folder), max_steps=STEPS, per_device_train_batch_size=len(lengths), learning_rate=1e-3, logging_steps=100,
            report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        config = LongContextConfig(report_steps=False, timeline_steps=0, calibration_steps=0, **settings)
        trainer = LongContextTrainer(
            model=small_model(), args=arguments, train_dataset=data, longctx_config=config, callbacks=[watch]
        )
        trainer.train()
    return watch


def test_a_training_that_offloads(
    tmp_path: Path, device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, store = [0], HostTier.store
    monkeypatch.setattr(HostTier, "store", lambda tier, tensor: (stored.append(tensor.numel()), store(tier, tensor))[1])
    hardware, before = slow_hardware(tmp_path), device.count("cudaHostRegister")
    watch = train(tmp_path, device, computing, [1024], host_gib=0.05, device_gib=0.0065, hardware=hardware)
    assert len(stored) > STEPS
    # memory is pinned before the first step
    assert len(set(watch.pinned)) == 1 and device.count("cudaHostRegister") > before
    # the host waits at the end of a step only, for the loss and whether it is finite, and transformers for the same
    waits = watch.waits[watch.num_waits[FIRST_WATCHED] : watch.num_waits[-1]]
    files = {wait.place.split(":")[0] for wait in waits}
    ends = {"runtime/execution/results.py", "hf/trainer/nonfinite.py", "hf/planning/report.py"}
    assert files <= ends | {"site-packages/transformers/trainer.py"}, files
    assert len(waits) <= 7 * (STEPS - FIRST_WATCHED)
    # steps alike need no new plan of cuDNN
    assert 0 < watch.layouts[FIRST_WATCHED] == watch.layouts[-1]


class States(TrainerCallback):
    """Notes where optimizer states and weights lie, the weights, and the device's peak, after a step of the optimizer."""

    def __init__(self) -> None:
        self.states: set[str] = set()
        self.weights: list[torch.Tensor] = []
        self.peak_bytes = 0

    def on_optimizer_step(self, *arguments: Any, model: Any = None, optimizer: Any = None, **keywords: Any) -> None:
        states = getattr(optimizer, "optimizer", optimizer).state.values()
        self.states |= {value.device.type for state in states for value in state.values() if value.dim()}
        assert {weight.device.type for weight in model.parameters()} == {"cuda"}
        self.weights = [weight.detach().cpu() for weight in model.parameters()]
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())


def test_optimizer_states_lie_on_the_host(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[(7 * place) % 128 for place in range(64)]] * 4})
    found, peaks = {}, {}
    for where, resumed in (("device", None), ("host", None), ("host", "checkpoint-1")):
        folder = tmp_path / where
        arguments = TrainingArguments(
            str(folder), max_steps=3, per_device_train_batch_size=1, learning_rate=1e-3, logging_steps=100, report_to="none",
            save_strategy="steps", save_steps=1, disable_tqdm=True,
        )  # fmt: skip
        config = LongContextConfig(report_steps=False, timeline_steps=0, host_gib=0.05, optimizer_states=where)
        states = States()
        trainer = LongContextTrainer(
            model=small_model(), args=arguments, train_dataset=data, longctx_config=config, callbacks=[states]
        )
        trainer.train(resume_from_checkpoint=str(folder / resumed) if resumed else None)
        assert states.states == {"cpu" if where == "host" else "cuda"}
        found[where, resumed] = states.weights
        peaks[where] = states.peak_bytes
        del trainer
        gc.collect()
    # two moments and a copy of every weight, in fp32
    assert peaks["host"] + 11 * sum(map(torch.numel, states.weights)) < peaks["device"]
    for other in (("device", None), ("host", "checkpoint-1")):
        for weight, expected in zip(found[other], found["host", None], strict=True):
            assert torch.allclose(weight.float(), expected.float(), rtol=1e-2, atol=1e-4)

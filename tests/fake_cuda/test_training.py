"""Training with offloading on the fake device: where the host waits, what is pinned when, and new layouts of attention."""

from __future__ import annotations

import gc
import json
import math
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice, HostWait
from hf_longctx import LongContextConfig, LongContextTrainer, recipes
from hf_longctx.plan.core import sharding
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.attention import chunk as runs
from hf_longctx.runtime.tiles import cuda

STEPS, FIRST_WATCHED = 5, 2
# steps of skewed packs before new plans are counted, and in which they are; most of them that a step may need on average
WARM_UP, WATCHED, MOST_NEW = 6, 4, 3.0


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


def small_model(num_layers: int = 3) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
    heads = {"num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, attn_implementation="sdpa")
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def slow_hardware(folder: Path) -> str:
    """File with a machine that computes so slowly that every plan offloads what it can, whatever copies take."""
    profile = json.loads((Path(recipes.__file__).parent / "hardware" / "cpu.json").read_text())
    profile["hardware"] |= {"matmul_flops_per_s": 1e6, "attention_flops_per_s": 1e6, "name": "slow"}
    file = folder / "slow.json"
    file.write_text(json.dumps(profile))
    return str(file)


def train(
    folder: Path, device: FakeDevice, computing: Computing, steps: list[list[int]], num_layers: int = 3, **settings: Any
) -> Watch:
    """Trains on documents of these lengths, as many per step in every step; which of them is up to the sampler."""
    lengths = [length for step in steps for length in step]
    row = torch.randint(0, 128, (max(lengths),), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [row[:length] for length in lengths]})
    with device.waits() as waits:
        watch = Watch(device, waits, computing)
        arguments = TrainingArguments(
            str(folder), max_steps=len(steps), per_device_train_batch_size=len(steps[0]), learning_rate=1e-3, logging_steps=100,
            report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        config = LongContextConfig(report_steps=False, timeline_steps=0, calibration_steps=0, **settings)
        trainer = LongContextTrainer(
            model=small_model(num_layers), args=arguments, train_dataset=data, longctx_config=config, callbacks=[watch]
        )
        trainer.train()
    return watch


def test_a_training_that_offloads(
    tmp_path: Path, device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, store = [0], HostTier.store
    monkeypatch.setattr(HostTier, "store", lambda tier, tensor: (stored.append(tensor.numel()), store(tier, tensor))[1])
    hardware, before = slow_hardware(tmp_path), device.count("cudaHostRegister")
    watch = train(tmp_path, device, computing, [[1024]] * STEPS, host_gib=0.05, device_gib=0.0065, hardware=hardware)
    assert len(stored) > STEPS
    # memory is pinned before the first step
    assert len(set(watch.pinned)) == 1 and device.count("cudaHostRegister") > before
    # the host waits at the end of a step only, for the loss and whether it is finite, and transformers for the same
    waits = watch.waits[watch.num_waits[FIRST_WATCHED] : watch.num_waits[-1]]
    files = {wait.place.split(":")[0] for wait in waits}
    ends = {"runtime/execution/round.py", "hf/run/steps.py", "hf/planning/report.py"}
    assert files <= ends | {"site-packages/transformers/trainer.py"}, files
    assert len(waits) <= 7 * (STEPS - FIRST_WATCHED)
    # steps alike need no new plan of cuDNN
    assert 0 < watch.layouts[FIRST_WATCHED] == watch.layouts[-1]


def skewed(num_documents: int, seed: int) -> list[int]:
    """Lengths of a step's documents, with a long tail."""
    chance = random.Random(seed)
    return [int(min(1000, max(16, 450 * math.exp(chance.gauss(0.0, 0.35))))) for _ in range(num_documents)]


def test_packs_of_skewed_lengths_need_few_new_plans(
    tmp_path: Path, device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a sixteenth of the lengths of a GPU: cuDNN gets documents from 128 tokens on, in multiples of 8 and 16
    monkeypatch.setattr(cuda, "_LEAST_CAUSAL", cuda._LEAST_CAUSAL // 16**2)
    monkeypatch.setattr(runs, "PACKED_TOKENS", runs.PACKED_TOKENS // 16)
    monkeypatch.setattr(sharding, "LEAST_LENGTH_STEP", sharding.LEAST_LENGTH_STEP // 16)
    steps = [skewed(10, seed) for seed in range(WARM_UP + WATCHED)]
    num_long = sum(length >= 128 for step in steps for length in step) / len(steps)
    watch = train(tmp_path, device, computing, steps, num_layers=1)
    new = (watch.layouts[-1] - watch.layouts[WARM_UP]) / WATCHED
    print(f"{new:.1f} new plans per step after {WARM_UP} steps; {num_long:.1f} long documents")
    assert watch.layouts[0] < watch.layouts[WARM_UP]
    # without rounding, every long document has a plan of its own
    assert new <= MOST_NEW < num_long


class States(TrainerCallback):
    """Notes where optimizer states and weights lie, the weights after a step of the optimizer, and the device's peak bytes."""

    def __init__(self) -> None:
        self.states: set[str] = set()
        self.weights: list[torch.Tensor] = []
        self.peak_bytes = 0

    def on_step_begin(self, args: Any, state: Any, *others: Any, **keywords: Any) -> None:
        # from the second step on, when all states are there
        if state.global_step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        self.peak_bytes = torch.cuda.memory_stats()["active_bytes.all.peak"]

    def on_optimizer_step(self, *arguments: Any, model: Any = None, optimizer: Any = None, **keywords: Any) -> None:
        states = getattr(optimizer, "optimizer", optimizer).state.values()
        self.states |= {value.device.type for state in states for value in state.values() if value.dim()}
        assert {weight.device.type for weight in model.parameters()} == {"cuda"}
        self.weights = [weight.detach().cpu() for weight in model.parameters()]


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
        gc.collect()
        held = torch.cuda.memory_allocated()
        trainer = LongContextTrainer(
            model=small_model(), args=arguments, train_dataset=data, longctx_config=config, callbacks=[states]
        )
        trainer.train(resume_from_checkpoint=str(folder / resumed) if resumed else None)
        assert states.states == {"cpu" if where == "host" else "cuda"}
        found[where, resumed], peaks[where, resumed] = states.weights, states.peak_bytes - held
        # fp32 copies and two moments of the weights
        states_bytes = 12 * sum(weight.numel() for weight in states.weights)
        del trainer
    assert peaks["device", None] - peaks["host", None] >= 0.9 * states_bytes
    for other in (("device", None), ("host", "checkpoint-1")):
        for weight, expected in zip(found[other], found["host", None], strict=True):
            assert torch.allclose(weight.float(), expected.float(), rtol=1e-2, atol=1e-4)

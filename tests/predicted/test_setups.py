"""The setup that a forecast predicts is that of the run: the same memory, limits of plans, and longest sequence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.start import setup as start
from hf_longctx.plan import setup
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.cost.profiles import HardwareProfile, profile_to_json
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.setup import COMMUNICATOR_BYTES, Setup
from hf_longctx.sim.scenario import Request, build_scenario

# positions of the models, which are more than any device of these tests holds
POSITIONS = 2**20


class Machine:
    """A GPU, its host and a model for it, of which a run measures what a forecast is told."""

    def __init__(self, folder: Path, monkeypatch: Any, family: str, share: float, num_ranks: int, spare_gib: int = 0) -> None:
        self.num_ranks, self.folder = num_ranks, folder
        self.model = build_model(ModelCase(family=family, dtype=torch.bfloat16))
        self.model.config.max_position_embeddings = POSITIONS
        states = ByteModel(replace(model_spec(self.model), has_master_weights=True)).states()
        # four fifths of the device hold the states so many times, and have room for communicators if some is spared
        device_bytes = int((share * states + spare_gib * 2**30) / 0.8)
        hardware = replace(GENERIC_GPU, name="toy gpu", device_bytes=device_bytes, host_bytes=2**30)
        (folder / "hardware.json").write_text(profile_to_json(HardwareProfile(hardware, ())))
        (folder / "config.json").write_text(json.dumps(self.model.config.to_dict()))
        cluster = ClusterSpec(num_ranks, min(8, num_ranks), hardware)
        monkeypatch.setattr(start, "cluster_spec", lambda *_: cluster)
        # half of it may hold activations
        monkeypatch.setattr(start, "host_bytes", lambda: (2**30 * cluster.ranks_per_node, 2**31 * cluster.ranks_per_node))
        monkeypatch.setattr(start, "has_communicators", lambda device: True)
        if not spare_gib:
            monkeypatch.setattr(setup, "COMMUNICATOR_BYTES", 0)
        monkeypatch.setattr(start, "attention_problems", lambda *_: [])
        monkeypatch.setattr(start, "takes_packs", lambda device, dtype, head_dim, caps_scores: not caps_scores)

    def run(self, rows: start.TrainingRows | None = None, **settings: Any) -> Setup:
        arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cuda"), disable_tqdm=True)
        arguments.world_size, arguments.process_index, arguments.per_device_train_batch_size = self.num_ranks, 0, 1
        degrees = tuple(degree for degree in (1, 2, 4, 8, 16, 32) if degree <= self.num_ranks)
        return start.choose_setup(LongContextConfig(**settings), ModelFacts.of(self.model), arguments, degrees, None, rows)

    def forecast(self, **options: Any) -> Setup:
        request = Request(str(self.folder), str(self.folder / "hardware.json"), self.num_ranks, compile_layers=False, **options)
        return build_scenario(request).setup


# family, share of the states that the device holds, ranks, settings of the run that the forecast knows by the same names
RUNS: dict[str, tuple[str, float, int, dict[str, Any]]] = {
    "one rank": ("llama", 1.5, 1, {}),
    "one rank that is asked to share": ("llama", 1.5, 1, {"parameters": "sharded"}),
    "copies": ("qwen3", 1.3, 4, {"parameters": "replicated"}),
    "shards": ("qwen3", 1.3, 4, {"parameters": "sharded"}),
    "shards of two": ("gemma2", 1.3, 4, {"parameters": "gathered_per_round", "shard_ranks": 2}),
    "rings": ("llama", 1.2, 4, {"parameters": "sharded", "method": "ring"}),
    "a limit": ("llama", 1.5, 2, {"parameters": "replicated", "tokens_per_rank": 40}),
    "everything kept": ("llama", 1.5, 2, {"parameters": "replicated", "activations": "keep"}),
    "states in a place": ("llama", 1.1, 1, {"optimizer_states": "auto"}),
    "states and layers in a place": ("llama", 1.3, 4, {s: "auto" for s in ("optimizer_states", "layer_weights")}),
    "states on the host": ("llama", 1.0, 2, {"parameters": "sharded", "optimizer_states": "host"}),
    "stages": ("qwen3", 1.3, 4, {"parameters": "sharded", "stages": 2}),
    "stages of copies": ("llama", 1.5, 2, {"parameters": "replicated", "stages": 2}),
    "layers with a state": ("qwen3_5_few", 3.0, 1, {}),
}


@pytest.mark.daily("one rank that is asked to share", "rings", "a limit", "everything kept", "stages")
@pytest.mark.parametrize("name", RUNS)
def test_the_setup_of_a_forecast_is_that_of_the_run(name: str, tmp_path: Path, monkeypatch) -> None:
    family, share, num_ranks, settings = RUNS[name]
    machine = Machine(tmp_path, monkeypatch, family, share, num_ranks)
    settings = {**({"parameters": "sharded"} if "layer_weights" in settings else {}), **settings}
    run, forecast = machine.run(**settings), machine.forecast(**settings)
    assert run.costs.model == forecast.costs.model
    assert forecast.placement.sharing == run.placement.sharing and forecast.notes == run.notes
    # a run knows a limit, beyond which it does not look
    assert forecast.planner == replace(run.planner, longest_tokens=forecast.planner.longest_tokens)
    assert min(run.max_length, forecast.room_tokens) == min(run.max_length, run.room_tokens)


def test_an_index_of_keys_counts_the_ranks_of_the_largest_group(tmp_path: Path, monkeypatch) -> None:
    machine = Machine(tmp_path, monkeypatch, "glm_moe_dsa", 2.0, 4)
    run, forecast = (each(parameters="sharded").costs.model.index for each in (machine.run, machine.forecast))
    assert forecast == run and run.most_ranks == 4


def test_communicators_of_many_ranks_on_small_devices_count_in_forecasts_too(tmp_path: Path, monkeypatch) -> None:
    # a tenth of 10 GiB has room for two communicators, and a rank is in groups by default, of all ranks, of pairs, and of shards
    machine = Machine(tmp_path, monkeypatch, "llama", 1.0, 4, spare_gib=8)
    run, forecast = (each(parameters="sharded") for each in (machine.run, machine.forecast))
    device_bytes = forecast.memory.device_bytes
    assert forecast.memory.usable_bytes == run.memory.usable_bytes == int(device_bytes * 0.9 - 4 * COMMUNICATOR_BYTES)


@pytest.mark.daily("1.3")
@pytest.mark.parametrize("share", [0.9, 1.3, 4.0])
def test_a_forecast_and_a_run_share_parameters_alike_if_they_choose(tmp_path: Path, monkeypatch, share: float) -> None:
    machine = Machine(tmp_path, monkeypatch, "qwen3", share, 4)
    lengths = [40, 24, 8, 16]
    rows = start.TrainingRows(datasets.Dataset.from_list(random_rows(lengths)))
    run = machine.run(rows, parameters="auto")
    forecast = machine.forecast(parameters="auto", step_lengths=tuple(lengths), longest_tokens=40)
    assert run.placement.sharing == forecast.placement.sharing and run.notes == forecast.notes
    assert "fastest for a step" in run.notes[0]

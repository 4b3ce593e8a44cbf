"""Calibration on real ranks: which models can be built, what the profile says, and that it is read back unchanged."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model
from transformers import BambaConfig, FalconH1Config, LlamaConfig, NemotronHConfig, Qwen3_5TextConfig, Qwen3Config

from hf_longctx.hf.calibration import calibrate as module
from hf_longctx.hf.calibration.calibrate import (
    Calibration,
    CalibrationRequest,
    calibrate,
    calibration_text,
    chunk_samples,
    describe,
    few_layers,
    model_config,
)
from hf_longctx.hf.models import kernels as layer_kernels
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.start.setup import starting_costs
from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.cost.catalog import spec_name
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.fitting import relative_errors
from hf_longctx.plan.cost.profiles import profile_from_json, profile_to_json
from hf_longctx.plan.cost.weight_traffic import StageGathers, StageWeights
from hf_longctx.plan.model.config import kernel_fields
from hf_longctx.plan.model.model_spec import ModelSpec


def small_config(num_layers: int) -> dict[str, object]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return dict(config.to_dict())


def calibrated_on_rank(config_file: str, seconds: float) -> tuple[Calibration, str]:
    calibration = calibrate(CalibrationRequest(config_file, "float32", time.time() + seconds))
    return calibration, calibration_text(calibration)


@pytest.fixture(scope="module")
def calibrated(ranks, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Calibration, str]]:
    """Calibrations by two ranks of a model of eight layers, from which models of six and of zero layers are built."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(small_config(8)))
    found: list[tuple[Calibration, str]] = ranks(2).run(calibrated_on_rank, str(path), 4.0)
    return found


def test_all_ranks_return_the_same(calibrated) -> None:
    assert calibrated[0] == calibrated[1]


def test_predictions_from_the_file_are_those_of_the_fit(calibrated) -> None:
    calibration = calibrated[0][0]
    profile = profile_from_json(profile_to_json(calibration.profile))
    assert profile == calibration.profile
    measured = calibration.profile.models[0]
    whole = ModelSpec.from_config(small_config(8))
    assert measured.model == spec_name(whole) and profile.calibration(measured.model) == measured
    read = CostModel(whole, ClusterSpec(2, 2, profile.spec), measured.coefficients)
    # bytes, messages and tiles grow with the number of layers, and so does all cost except the head's
    fitted = calibration.costs
    shapes = {timing.probe.shape for timing in calibration.timings}
    assert shapes == {GroupShape(1), GroupShape(2, 2), GroupShape(2)}
    for timing in calibration.timings:
        chunk, shape = timing.probe.chunk, timing.probe.shape
        for name in ("forward_s", "backward_s"):
            six, eight = (getattr(costs, name)(chunk, shape, costs.model.num_layers) for costs in (fitted, read))
            assert six <= eight <= six * 8 / 6 * (1 + 1e-9)


@pytest.mark.wide
def test_a_model_of_few_layers_is_described_as_it_was_fitted(ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config(2)))
    # a folder with a config.json is allowed, too
    calibration, _ = ranks(2).run(calibrated_on_rank, str(tmp_path), 3.0)[0]
    profile = profile_from_json(profile_to_json(calibration.profile))
    read = CostModel(calibration.costs.model, ClusterSpec(2, 2, profile.spec), profile.models[0].coefficients)
    for is_held_out in (False, True):
        samples = chunk_samples(calibration.timings, calibration.costs, is_held_out)
        again = chunk_samples(calibration.timings, read, is_held_out)
        assert relative_errors(again, read.coefficients) == pytest.approx(
            relative_errors(samples, calibration.costs.coefficients), abs=1e-9
        )
    # the held-out error covers exactly the chunks that were not fitted
    errors = [abs(e) for e in relative_errors(chunk_samples(calibration.timings, read, True), read.coefficients)]
    assert calibration.held_out.mean == pytest.approx(sum(errors) / len(errors))
    assert dict(profile.residuals)["held out"] == pytest.approx(calibration.held_out.mean)


def test_the_profile_says_what_was_measured(calibrated) -> None:
    profile = calibrated[0][0].profile
    assert "2 ranks" in profile.spec.source and torch.__version__ in profile.spec.source
    assert profile.models[0].coefficients.is_measured
    for rates in (profile.spec.exchange_bytes_per_s, profile.spec.gather_bytes_per_s, profile.spec.scatter_bytes_per_s):
        assert [ranks for ranks, _ in rates] == [2]
    names = {name for name, _ in profile.residuals}
    assert {"fitted", "held out", "held out, ring of 2, backward", "fitted, 1 rank, forward"} <= names
    assert "device_bytes and saved_bytes_per_token are not measured" in profile.source


def test_plans_with_the_profile_count_its_gathers(calibrated) -> None:
    calibration = calibrated[0][0]
    profile = profile_from_json(profile_to_json(calibration.profile))
    hardware, model = profile.spec, calibration.costs.model
    part = model.num_layers, True, True
    costs = CostModel(model, ClusterSpec(2, 2, hardware), profile.models[0].coefficients, parameters="sharded", shard_ranks=2)
    gathers = StageGathers.of(costs, 2, part)
    weights, rate = StageWeights.of(model, *part), dict(hardware.gather_bytes_per_s)[2]
    layer_s = hardware.message_s + weights.layers / model.num_layers / 2 / rate
    assert gathers.of_pass(False, False).gather_s == pytest.approx(layer_s)
    without = replace(hardware, gather_bytes_per_s=(), scatter_bytes_per_s=())
    unknown = replace(costs, cluster=ClusterSpec(2, 2, without))
    assert StageGathers.of(unknown, 2, part) == StageGathers()


@pytest.mark.parametrize(("num_ranks", "per_node", "found"), [(2, 2, 8), (16, 16, 16), (8, 4, 4), (2, 1, 1)])
def test_the_profile_has_the_nodes_of_its_measurement(calibrated, num_ranks: int, per_node: int, found: int) -> None:
    """Plans would otherwise take a rate across nodes for one inside; a node may have more ranks than were measured."""
    costs = calibrated[0][0].costs
    cluster = replace(costs.cluster, num_ranks=num_ranks, ranks_per_node=per_node)
    assert describe(costs.model, cluster, costs.coefficients, (), "test").ranks_per_node == found


def test_the_text_has_a_line_per_chunk_and_the_errors(calibrated) -> None:
    calibration, text = calibrated[0]
    lines = text.splitlines()
    rows = [line for line in lines if " rank " in line or " of 2 " in line][: len(calibration.timings)]
    assert len(rows) == len(calibration.timings)
    assert sum(row.startswith("held out") for row in rows) == sum(t.probe.is_held_out for t in calibration.timings) > 0
    assert lines[-1].startswith(f"held-out chunks: mean absolute error {calibration.held_out.mean:.1%}")


def test_kernels_are_measured_as_a_run_has_them(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config(2)))
    bound: list[tuple[str, int]] = []

    class Counted(FusedLayers):
        def bind(self, model: Any) -> None:
            super().bind(model)
            bound.append((self.maker, sum("forward" in vars(module) for module in model.modules())))

    monkeypatch.setattr(layer_kernels, "FusedLayers", partial(Counted, backend="eager"))
    found = calibrate(CalibrationRequest(str(path), "float32", time.time() + 2.0, compile_layers=True))
    # norms of two layers and the last, their MLPs, and their attention, whose forward has another rotary embedding
    assert [maker for maker, _ in bound] == ["compile"] and bound[0][1] >= 5 + 2 + 2
    spec = replace(ModelSpec.from_config(small_config(2)), **kernel_fields("llama"))
    assert found.costs.model.fuses_norms and found.profile.models[0].model == spec_name(spec)
    # a run with kernels finds what was measured, one without does not
    cluster = ClusterSpec(1, 1, found.profile.spec)
    file = tmp_path / "hardware.json"
    file.write_text(profile_to_json(found.profile))
    measured = found.profile.models[0].coefficients
    assert starting_costs(str(file), spec, cluster, None)[1] == measured
    assert starting_costs(str(file), ModelSpec.from_config(small_config(2)), cluster, None)[1] != measured


@pytest.mark.parametrize(
    "name,config_class", [("qwen3-0.6b", Qwen3Config), ("qwen2.5-7b", LlamaConfig), ("gemma-3-1b", Qwen3Config)]
)
def test_the_catalogues_names_become_models_of_their_shapes(name: str, config_class: type) -> None:
    config = model_config(name.replace("-", " "))
    assert isinstance(config, config_class)
    assert spec_name(ModelSpec.from_config(config.to_dict(), bytes_per_element=2)) == name


def test_a_config_file_keeps_its_own_class(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(Qwen3Config(num_hidden_layers=3).to_json_string())
    assert isinstance(model_config(str(path)), Qwen3Config)


@pytest.mark.quick
@pytest.mark.parametrize("num_layers", [0, 1])
def test_layers_are_cut_off_with_their_types(num_layers: int) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8,
    )  # fmt: skip
    module.set_layers(config, num_layers)
    model = module.build_model(config, torch.device("cpu"), "bfloat16")
    assert len(model.model.layers) == num_layers and model_spec(model).bytes_per_element == 2


def test_layers_of_a_config_that_makes_their_types_are_cut_off() -> None:
    bamba = BambaConfig(num_hidden_layers=6, attn_layer_indices=[1, 4])
    falcon, nemotron = FalconH1Config(num_hidden_layers=3), NemotronHConfig()
    for config, num_layers in ((bamba, 3), (falcon, 2), (nemotron, 2), (bamba, 0)):
        module.set_layers(config, num_layers)
        assert config.num_hidden_layers == len(config.layer_types) == num_layers


# a hybrid whose layers only convolve, and one whose config makes the types of its layers
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "bamba": {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16, "attn_layer_indices": [1]},
}


@pytest.mark.daily("bamba")
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_are_calibrated(ranks, tmp_path: Path, model_type: str) -> None:
    sizes = small_config(2)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {"model_type": model_type, **{name: sizes[name] for name in names}, "pad_token_id": 0, **HYBRIDS[model_type]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    calibration, _ = ranks(2).run(calibrated_on_rank, str(tmp_path), 3.0)[0]
    assert calibration.costs.model.states.layers == (True, False)
    assert {timing.probe.shape for timing in calibration.timings} == {GroupShape(1), GroupShape(2, 2), GroupShape(2)}
    assert calibration.profile.models[0].coefficients.is_measured


REFUSED = {
    "unknown": ("gpt-9", "model 'gpt-9' is neither a config.json, nor a folder with one, nor a name that "),
    "another kind of layers": ("gpt-7b", "model 'gpt-7b' does not have the layers of a Llama"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_built_is_refused_by_name(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(ValueError) as refused:
        model_config(model)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no such"}', "[]"])
def test_a_broken_config_file_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not the config\.json of a causal language model"):
        model_config(str(path))


def test_a_model_whose_attention_is_not_tested_is_refused() -> None:
    config = build_model(ModelCase(family="mistral")).config
    config.own_dropout = 0.25
    with pytest.raises(ValueError, match=r"own_dropout is 0\.25"):
        module.build_model(config, torch.device("cpu"), "float32")


def test_the_measured_layers_of_a_hybrid_are_mixed_as_all_of_them_are() -> None:
    # one of four layers has attention, which the first six layers would not have
    assert few_layers(Qwen3_5TextConfig(num_hidden_layers=32)) == 4
    assert few_layers(Qwen3_5TextConfig(num_hidden_layers=3)) == 3
    assert few_layers(LlamaConfig(num_hidden_layers=32)) == 6
    with pytest.raises(ValueError, match="give its config"):
        model_config("qwen3.5-9b")

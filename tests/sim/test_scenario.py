"""A request becomes a scenario: it uses measured numbers if there are any, notes its choices, and refuses with numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.cost.catalog import named_model, with_kernels
from hf_longctx.plan.cost.cost_model import backward_share, default_coefficients, with_adapters
from hf_longctx.plan.cost.profiles import HardwareProfile, ModelCalibration, profile_to_json, read_profile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import most_tokens
from hf_longctx.plan.model.config import kernel_fields
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.setup import lora_adapters, remedies
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.models import read_model
from hf_longctx.sim.output.summary import forecast_summary, run_settings, summary_rows
from hf_longctx.sim.output.text import forecast_text
from hf_longctx.sim.scenario import MOMENT_BYTES, Request, build_scenario, slow_links
from hf_longctx.sim.workloads import Workload

GPT = Request("gpt-7b", "a100-40g", 64, method="ulysses")
SMALL = Request("llama-3.2-1b", "h100", 8)


def test_what_was_measured_of_a_model_on_the_hardware_is_used() -> None:
    calibration = read_profile("a100-40g").calibration("gpt-7b")
    assert calibration is not None
    scenario = build_scenario(GPT)
    assert scenario.costs.coefficients == calibration.coefficients
    assert scenario.memory.saved_bytes_per_token == calibration.saved_bytes_per_token
    assert scenario.tokens_per_rank == calibration.tokens_per_rank(scenario.costs.model, 64)
    assert scenario.longest_tokens == 64 * scenario.tokens_per_rank
    assert not any("not measured" in note for note in scenario.notes)


def test_rings_that_nobody_measured_are_said_so() -> None:
    assert any("--method ulysses" in note for note in build_scenario(replace(GPT, method="auto")).notes)


def test_without_measurements_the_formulas_are_used_and_said_so() -> None:
    scenario = build_scenario(SMALL)
    assert scenario.costs.coefficients == default_coefficients(scenario.costs.model, scenario.costs.cluster)
    assert scenario.memory.usable_bytes == int(0.8 * scenario.memory.device_bytes)
    assert any("was not measured on NVIDIA H100" in note for note in scenario.notes)
    assert scenario.costs.cluster.ranks_per_node == 8


def test_parameters_that_a_config_tells_wrong_are_said_to_be(tmp_path: Path) -> None:
    config = {"model_type": "jetmoe", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 99}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scenario = build_scenario(Request(str(tmp_path / "config.json"), "h200", 1))
    assert scenario.caveats == (
        "parameters are counted from the config, and experts of its attention are left out, which is more than 5%; a run counts "
        "its model's",
    )


def test_changes_that_hold_next_to_nothing_are_not_offered() -> None:
    with pytest.raises(ValueError, match=r"does not fit") as error:
        build_scenario(Request("ministral-3-14b", "l40s", 4))
    tokens = [int(number.replace(",", "")) for number in re.findall(r"up to ([\d,]+) tokens", str(error.value))]
    assert len(tokens) >= 3 and min(tokens) * 100 >= max(tokens)


def test_seconds_of_attention_to_compressed_keys_are_said_to_be_too_many() -> None:
    request = Request("deepseek-v4-flash", "b300", 64)
    note = "attention to compressed keys counts as attention to all keys, so long documents take less time"
    scenario = build_scenario(request, must_fit=False)
    assert note in scenario.notes and ("but", note) in summary_rows(make_forecast(scenario, None, 1, 1, 0), None)
    assert note not in build_scenario(replace(request, model="glm-4.5-air"), must_fit=False).notes


@pytest.mark.daily("llama-3.2-1b-h100--True", "llama-3.2-1b-cpu--False")
@pytest.mark.parametrize(
    "model,hardware,dtype,is_once",
    [
        ("llama-3.2-1b", "h100", "", True),
        ("llama-3.2-1b", "a100-40g", "bfloat16", True),
        ("llama-3.2-1b", "h100", "float32", False),
        ("llama-3.2-1b", "cpu", "", False),
    ],
)
def test_keys_and_values_are_saved_once_where_a_run_would_save_them_once(
    model: str, hardware: str, dtype: str, is_once: bool
) -> None:
    scenario = build_scenario(Request(model, hardware, 8, dtype=dtype), must_fit=False)
    assert scenario.costs.model.saves_kv_once == scenario.memory.model.saves_kv_once == is_once
    repeated = replace(scenario.memory, model=replace(scenario.memory.model, saves_kv_once=False))
    tokens = (scenario.placement.kept_tokens(memory) for memory in (scenario.memory, repeated))
    assert (next(tokens) > next(tokens)) == is_once


@pytest.mark.wide
def test_layers_have_the_kernels_of_a_run(tmp_path: Path) -> None:
    def fields(model: str, hardware: str = "h200", **changes: Any) -> list[bool]:
        spec = build_scenario(Request(model, hardware, 8, **changes), must_fit=False).costs.model
        return [spec.fuses_norms, spec.fuses_gates, spec.fuses_rotary]

    assert fields("llama-3.1-8b") == [True, True, True] and fields("qwen3.5-9b") == [False, True, False]
    # runs compile on GPUs, unless they are told not to
    assert fields("llama-3.1-8b", "cpu") == fields("llama-3.1-8b", compile_layers=False) == fields("gpt-7b") == [False] * 3
    assert fields("llama-3.1-8b", "cpu", compile_layers=True) == [True] * 3
    file = Path(mixture(tmp_path), "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "mixtral"}))
    assert fields(str(tmp_path)) == [True, False, True]
    # kernels save less, so that more tokens stay, and move less, which takes less time
    runs = [build_scenario(Request("llama-3.1-8b", "h200", 1, lora_rank=16, compile_layers=each)) for each in (True, False)]
    assert runs[0].kept_tokens > 1.2 * runs[1].kept_tokens
    seconds = [plan_step(0, [8192] * 4, run.costs, run.planner_config).estimate.step_s for run in runs]
    assert seconds[0] < 0.9 * seconds[1]


def test_measurements_with_kernels_come_before_those_without(tmp_path: Path) -> None:
    path, with_all = tmp_path / "gpu.json", with_kernels("llama-3.2-1b", kernel_fields("llama"))

    def measured(*names: str, compile_layers: bool | None = None) -> tuple[float, bool, str]:
        """Fixed seconds of a step, which tell the measurement, whether layers have kernels, and the notes."""
        costs = default_coefficients(named_model("llama-3.2-1b"), ClusterSpec(1, 1, read_profile("h200").spec))
        models = [ModelCalibration(name, replace(costs, step_s=1.0 + place), 1000, 2**36) for place, name in enumerate(names)]
        path.write_text(profile_to_json(HardwareProfile(read_profile("h200").spec, tuple(models))))
        found = build_scenario(Request("llama-3.2-1b", str(path), 1, compile_layers=compile_layers))
        return found.costs.coefficients.step_s, found.costs.model.fuses_norms, " ".join(found.notes)

    assert measured("llama-3.2-1b", with_all)[:2] == (2.0, True)
    assert measured("llama-3.2-1b", with_all, compile_layers=False)[:2] == (1.0, False)
    step_s, fuses, notes = measured("llama-3.2-1b")
    assert (step_s, fuses) == (1.0, False) and "measured without kernels" in notes
    # measurements with kernels say nothing of a run without them
    assert measured(with_all, compile_layers=False)[:2] == (0.0, False)


def test_states_are_replicated_where_they_fit_and_else_sharded_and_said_so() -> None:
    assert build_scenario(replace(SMALL, longest_tokens=1000)).placement.parameters == "replicated"
    scenario = build_scenario(GPT)
    assert (scenario.placement.parameters, scenario.placement.shard_ranks) == ("sharded", 64)
    assert scenario.costs.parameters == "sharded" and scenario.costs.shard_ranks == 64
    assert any("64 ranks, which holds the longest sequence; replicated, they would need 113" in note for note in scenario.notes)
    for_lengths = build_scenario(replace(GPT, longest_tokens=1000))
    assert any("states are sharded over 64 ranks: replicated, they would need 113" in note for note in for_lengths.notes)


@pytest.mark.wide
def test_without_lengths_the_way_that_holds_the_longest_sequence_is_taken() -> None:
    # replicated states fit an H200, and leave less room than shards
    request = Request("llama-3.1-8b", "h200", 8, bf16_updates=True)
    longest = build_scenario(request)
    replicated = build_scenario(replace(request, parameters="replicated"))
    assert longest.placement.parameters == "sharded" and longest.longest_tokens > replicated.longest_tokens > 0
    assert any(f"replicated, they would hold {replicated.longest_tokens:,} tokens" in note for note in longest.notes)
    # for sequences that fit beside them, whole states are quicker
    assert build_scenario(replace(request, longest_tokens=1000)).placement.parameters == "replicated"


def test_a_slow_network_is_shared_by_the_ranks_of_a_node() -> None:
    fast, slow = (build_scenario(replace(SMALL, num_ranks=16, network_gbit=gbit)) for gbit in (0.0, 25.0))
    # 25 Gbit/s are 3.125e9 bytes/s, of which eight ranks get an eighth each and exchanges reach four fifths
    assert slow.costs.cluster.hardware.network_bytes_per_s == pytest.approx(0.8 * 3.125e9 / 8)
    assert fast.costs.cluster.hardware.network_bytes_per_s == read_profile("h100").spec.network_bytes_per_s
    assert slow.costs.cluster.hardware.link_bytes_per_s == fast.costs.cluster.hardware.link_bytes_per_s
    measured = build_scenario(Request("llama-3.2-1b", "a100-40g", 16, network_gbit=25.0)).costs.cluster.hardware
    assert [ranks for ranks, _ in measured.exchange_bytes_per_s] == [2, 4, 8]
    with pytest.raises(ValueError, match="--slow-network has no effect"):
        build_scenario(replace(GPT, network_gbit=25.0))


def test_states_are_sharded_for_a_sequence_that_would_not_fit_beside_whole_ones() -> None:
    whole = 8 * build_scenario(replace(SMALL, parameters="replicated")).kept_tokens
    assert build_scenario(replace(SMALL, longest_tokens=whole)).placement.parameters == "replicated"
    longer = build_scenario(replace(SMALL, longest_tokens=whole + 1))
    assert longer.placement.parameters == "sharded" and longer.longest_tokens > whole


def test_asked_for_placements_are_kept() -> None:
    assert build_scenario(replace(SMALL, parameters="gathered_per_round")).costs.shard_ranks == 8
    shared = build_scenario(replace(SMALL, shard_ranks=4))
    assert (shared.costs.parameters, shared.costs.shard_ranks) == ("sharded", 4)


def test_a_hub_name_is_the_name_of_its_model() -> None:
    assert read_model("Qwen/Qwen3-0.6B", 2) == read_model("qwen3-0.6b", 2)


def config(tmp_path: Path, **changes: Any) -> Path:
    fields = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in (fields | changes).items() if value is not None}))
    return path


def test_a_config_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    path = config(tmp_path)
    spec = read_model(str(path), 4)
    assert (spec.num_layers, spec.head_dim, spec.bytes_per_element) == (3, 8, 4)
    assert read_model(str(tmp_path), 4) == spec
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "config.json").write_text(json.dumps({"text_config": json.loads(path.read_text()), "vision_config": {}}))
    assert read_model(str(nested), 4) == spec


def test_a_path_is_not_taken_for_the_measured_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt-7b").mkdir()
    config(tmp_path / "gpt-7b")
    monkeypatch.chdir(tmp_path)
    scenario = build_scenario(GPT)
    assert scenario.costs.model.num_layers == 3 and not scenario.memory.is_measured


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read as a model config: .*num_hidden_layers"):
        read_model(str(config(tmp_path, num_hidden_layers=None)), 2)
    for text, message in (("{", "Expecting"), ("[]", "holds list, not an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_model(str(tmp_path), 2)
    with pytest.raises(ValueError, match=r"'nowhere\.json' does not exist"):
        read_model("nowhere.json", 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_model(str(tmp_path / "empty"), 2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (replace(SMALL, num_ranks=0), "--gpus is 0"),
        (replace(SMALL, num_ranks=12, ranks_per_node=8), "12 ranks .* nodes of 8"),
        (replace(SMALL, ranks_per_node=16), "8 ranks .* nodes of 16"),
        (replace(SMALL, shard_ranks=3), "--shard-ranks 3 does not divide the 8 ranks"),
        (replace(SMALL, shard_ranks=4, parameters="replicated"), "--shard-ranks 4 has no effect"),
        (replace(SMALL, parameters="split"), "parameters 'split' is not one of"),
        (replace(SMALL, dtype="int8"), "dtype 'int8' is not one of bfloat16, float32"),
        (replace(GPT, dtype="float32"), "--dtype has no effect"),
        (replace(SMALL, solver="magic"), "solver 'magic' is not one of auto"),
        (replace(SMALL, degrees=(0, 1)), "give positive numbers of ranks"),
        (replace(SMALL, degrees=(1, 16)), "degree 16 needs 16 ranks"),
        (replace(SMALL, degrees=(3,), method="ulysses"), "degree 3 is neither a power of two"),
        (replace(SMALL, model="gpt-8b"), "gpt-7b"),
        (replace(SMALL, hardware="abacus"), "'abacus' is neither a shipped profile"),
    ],
)
def test_what_contradicts_itself_or_does_not_exist_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_scenario(request_)


def test_a_model_that_fits_at_no_degree_is_refused_with_numbers_and_a_remedy() -> None:
    # 64 layers of 487,587,840 parameters and 2 * 151,936 * 5120: half of 20 bytes for each, of which 2 are rounded gradients and
    # take more than those in flight, and 2 bytes for the embeddings and two layers that are gathered, are 332.7e9 bytes
    with pytest.raises(ValueError) as error:
        build_scenario(Request("qwen3-32b", "h100", 2))
    message = str(error.value)
    assert "qwen3-32b does not fit" in message and "(sharded over 2 ranks) take 309.8 GiB" in message
    assert "59.6 of the 74.5 GiB" in message
    assert "8 times the ranks: --gpus 16 (up to 1,974,560 tokens)" in message
    assert "adapters over weights of four bits, attention in one piece (QLoRA): --lora-rank 16 --quantize nf4 (up to" in message
    # the change that it proposes works
    assert build_scenario(Request("qwen3-32b", "h100", 16)).longest_tokens == 1_974_560
    assert build_scenario(Request("qwen3-32b", "h100", 2), must_fit=False).tokens_per_rank == 0


@pytest.mark.daily("rtx-pro-6000-2-50 GB/s")
@pytest.mark.parametrize(
    "hardware,num_ranks,rate", [("rtx-4090", 4, "10 GB/s"), ("rtx-pro-6000", 2, "50 GB/s"), ("l40s", 8, "20 GB/s")]
)
def test_links_over_pcie_are_said(hardware: str, num_ranks: int, rate: str) -> None:
    cluster = build_scenario(Request("llama-3.2-1b", hardware, num_ranks)).costs.cluster
    assert "PCIe" in slow_links(cluster) and rate in slow_links(cluster)


@pytest.mark.daily("h100-8")
@pytest.mark.parametrize("hardware,num_ranks", [("h100", 8), ("mi325x", 8), ("rtx-5090", 1), ("cpu", 2)])
def test_nothing_is_said_of_fast_links_of_one_gpu_and_of_cpus(hardware: str, num_ranks: int) -> None:
    assert not slow_links(build_scenario(Request("llama-3.2-1b", hardware, num_ranks, lora_rank=8), must_fit=False).costs.cluster)


@pytest.mark.wide
def test_the_answer_says_which_rates_of_a_device_were_measured() -> None:
    lines = {}
    for hardware in ("h200", "a100-40g", "h100"):
        scenario = build_scenario(Request("llama-3.2-1b", hardware, 1, lora_rank=8))
        lines[hardware] = dict(summary_rows(make_forecast(scenario, None, 1, 1, 0), None))["numbers"]
    assert "one H200 were measured" in lines["h200"] and "exchanges of 2 to 64 ranks were measured" in lines["a100-40g"]
    assert "not measured" in lines["h100"] and not any("not measured" in lines[name] for name in ("h200", "a100-40g"))


def test_superchips_are_nodes_of_one_rank_unless_said_otherwise() -> None:
    found = build_scenario(Request("llama-3.2-1b", "gh200", 2, lora_rank=8))
    assert found.costs.cluster.ranks_per_node == 1 and any("one NVIDIA GH200" in note for note in found.notes)
    linked = build_scenario(Request("llama-3.2-1b", "gh200", 2, lora_rank=8, ranks_per_node=2))
    assert linked.costs.cluster.ranks_per_node == 2 and not any("one NVIDIA GH200" in note for note in linked.notes)
    assert linked.setup.room_tokens == found.setup.room_tokens and not slow_links(linked.costs.cluster)
    assert build_scenario(Request("llama-3.2-1b", "h100", 16, lora_rank=8)).costs.cluster.ranks_per_node == 8


def test_plans_of_adapters_are_priced_and_counted_with_them() -> None:
    whole, lora = build_scenario(SMALL), build_scenario(replace(SMALL, lora_rank=8))
    assert lora.costs.model == lora.memory.model and lora.costs.model.adapters == lora_adapters(lora.costs.model, 8)
    assert lora.tokens_per_rank > whole.tokens_per_rank
    # half of the backward's products, and those of small matrices beside the others
    shares = [
        found.token_s / every.token_s
        for found, every in (
            (lora.costs.coefficients.forward, whole.costs.coefficients.forward),
            (lora.costs.coefficients.backward, whole.costs.coefficients.backward),
        )
    ]
    small = lora.costs.model.num_layers * lora.costs.model.adapters.layer_parameters / whole.costs.model.token_products
    assert shares == pytest.approx([1 + small, 0.5 + small])


def test_no_sequence_is_longer_than_a_position_table(tmp_path: Path) -> None:
    config = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 512, "n_inner": None, "vocab_size": 64}
    found = {}
    for kind in ("gpt2", "gpt_neox"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        found[kind] = build_scenario(Request(str(tmp_path), "h100", 2))
    table, rotary = found["gpt2"], found["gpt_neox"]
    assert table.longest_tokens == 512 < table.tokens_per_rank < min(table.held_tokens, rotary.longest_tokens)
    # more memory is no remedy
    assert not remedies(table.memory, table.placement)
    forecast = make_forecast(table, None, 1, 1, 0)
    assert forecast.at_limit.plan.lengths == (512,)
    said = f"the model has 512 positions, which nothing extends; memory alone would hold {table.held_tokens:,} tokens"
    assert said in forecast_text(forecast) and said in forecast_summary(forecast)
    assert run_settings(table)["max_length"] == "512" and "rope_scaling" not in run_settings(table)
    lengths = Workload("test", np.array([100, 600]), np.array([1, 1]), 600)
    with pytest.raises(ValueError, match=r"has 600 tokens, but .* has 512 positions, which nothing extends; .* --limit 512"):
        make_forecast(table, lengths, 1, 1, 0)
    # named shapes may be made with more
    assert build_scenario(GPT).placement.max_length == 0


def test_measured_seconds_are_halved_alike() -> None:
    whole, lora = (build_scenario(replace(GPT, lora_rank=rank)).costs for rank in (0, 8))
    assert whole.coefficients.is_measured and lora.coefficients == with_adapters(whole.coefficients, lora.model)
    found = lora.coefficients.backward.token_s / whole.coefficients.backward.token_s
    assert found == pytest.approx(backward_share(lora.model) * lora.model.token_products / whole.model.token_products)
    assert 0.5 < found < 0.52 and lora.coefficients.backward.pair_s == whole.coefficients.backward.pair_s


def test_attention_under_adapters_runs_in_pieces_but_not_over_weights_of_four_bits() -> None:
    found = {
        kind: build_scenario(Request("llama-3.1-8b", "h200", 1, lora_rank=16, host_bytes=112 << 30, quantize=kind))
        for kind in ("", "nf4")
    }
    assert [each.costs.model.cuts_heads for each in found.values()] == [True, False]
    plain = found[""]
    assert plain.budget is not None
    room = (plain.budget.device_bytes, plain.budget.host_bytes, plain.budget.tile_tokens)
    whole, pieces = (most_tokens(plain.costs.model, *room, reruns=True, head_pieces=count) for count in (1, 8))
    assert plain.tokens_per_rank == pieces > 1.05 * whole


@pytest.mark.wide
def test_weights_below_adapters_may_be_in_fp8() -> None:
    whole, packed = (
        build_scenario(Request("llama-3.1-70b", "h200", 8, lora_rank=16, frozen_weights=kind)) for kind in ("unchanged", "fp8")
    )
    layer = 2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192
    scales = 4 * (8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192)
    # gate and up in the other order, and rounded gradients
    beside = 2 * 28672 * 8192 + 2**27
    saved = 80 * (layer - scales) - beside
    assert whole.memory.state_bytes("replicated", 1) - packed.memory.state_bytes("replicated", 1) == saved
    note = next(note for note in packed.notes if "fp8" in note and "times as fast" in note)
    assert "count as 1.5 times as fast as in bf16, an assumption, not measured on this hardware" in note
    assert packed.costs.model.can_keep_qkv and not packed.costs.model.cuts_heads


def mixture(folder: Path) -> str:
    """Config of a small mixture of experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config = {**sizes, "max_position_embeddings": 512, "num_local_experts": 4, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_weights_below_adapters_may_be_of_four_bits(tmp_path: Path) -> None:
    whole, packed = (
        build_scenario(Request("llama-3.1-70b", "h200", 1, lora_rank=16, quantize=kind), must_fit=False) for kind in ("", "nf4")
    )
    # 80 layers of two matrices of 8192 by 8192, two of 1024 by 8192 and three of 28672 by 8192
    layer = 2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192
    scales = layer // 64 + 4 * -(-layer // (64 * 256))
    saved = 80 * (2 * layer - layer // 2 - scales) - 2 * 28672 * 8192
    assert whole.memory.state_bytes("replicated", 1) - packed.memory.state_bytes("replicated", 1) == saved
    # scales are replicated on every rank; embedding and head are unchanged
    for scenario, held in ((whole, 2 * layer), (packed, layer // 2)):
        weights = 80 * held + 2 * 2 * 128256 * 8192
        # LoRA of rank 16: two matrices beside each of the seven, in fp32, with gradients and two moments
        adapter = 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
        adapters = 80 * adapter * (4 + 4 + 8)
        # the weights and adapters of two layers; gradients of adapters: of two layers, received from others, and a share of sums
        gathered = 2 * held + 2 * 2 * 128256 * 8192 + 2 * adapter * 4 + 3 * adapter * 4 + -(-4 * adapter // 8)
        beside = 0 if held > layer else 80 * scales + 2 * 28672 * 8192
        assert scenario.memory.state_bytes("sharded", 8) == -(-(weights + adapters) // 8) + gathered + beside
    with pytest.raises(ValueError, match="--quantize mxfp4 packs experts"):
        build_scenario(Request("llama-3.1-70b", "h200", 1, lora_rank=16, quantize="mxfp4"), must_fit=False)
    # experts of a mixture alone: 48 layers of 128 experts of three matrices of 2048 by 768, at 4.25 bits; four are unpacked
    plain, fewer = (
        build_scenario(Request("qwen3-30b-a3b", "h200", 1, lora_rank=16, quantize=kind), must_fit=False) for kind in ("", "nf4")
    )
    experts = 128 * 3 * 2048 * 768
    unpacked = 4 * 2 * 768 * 2048 * 12
    spared = 48 * (2 * experts - experts * 17 // 32) - unpacked
    assert plain.memory.state_bytes("replicated", 1) - fewer.memory.state_bytes("replicated", 1) == spared
    assert fewer.costs.model.runs_mlps_whole and fewer.packed_experts == "nf4"
    rounded = build_scenario(Request("qwen3-30b-a3b", "h200", 1, lora_rank=16, quantize="fp8"), must_fit=False)
    spared = 48 * (2 * experts - experts * 33 // 32) - unpacked
    assert plain.memory.state_bytes("replicated", 1) - rounded.memory.state_bytes("replicated", 1) == spared
    assert rounded.packed_experts == "fp8"
    assert not packed.costs.model.can_keep_qkv and packed.tokens_per_rank > whole.tokens_per_rank == 0


def test_only_what_was_not_measured_is_recomputed_by_need() -> None:
    scenario = build_scenario(replace(SMALL, host_bytes=2**34, parameters="replicated"))
    budget, memory = scenario.planner_config.activations, scenario.memory
    assert budget is not None and budget == scenario.budget
    left = memory.usable_bytes - memory.state_bytes("replicated", 1)
    assert (budget.device_bytes, budget.host_bytes, budget.tile_tokens) == (left, 2**34, 8192)
    assert budget.kept_tokens == scenario.kept_tokens < scenario.tokens_per_rank
    byte_model = ByteModel(scenario.costs.model)
    assert byte_model.kept_bytes(budget.kept_tokens, True) <= left < byte_model.kept_bytes(budget.kept_tokens + 1, True)
    for kept in (build_scenario(GPT), build_scenario(replace(SMALL, activations="keep"))):
        assert kept.planner_config.activations is None and kept.tokens_per_rank == kept.kept_tokens
    with pytest.raises(ValueError, match="activations 'some' is not one of auto, keep"):
        build_scenario(replace(SMALL, activations="some"))


def test_a_plan_has_the_budget_and_the_room_of_the_engine_s_longest_document() -> None:
    scenario = build_scenario(replace(SMALL, num_ranks=1))
    assert scenario.budget is not None
    room = scenario.budget.device_bytes, scenario.budget.host_bytes, scenario.budget.tile_tokens
    assert scenario.tokens_per_rank == most_tokens(scenario.costs.model, *room, reruns=True, head_pieces=8)
    # exchanges within a group take memory
    shared = build_scenario(replace(SMALL, degrees=(1, 8), parameters="replicated"))
    # 32 query heads of 8 ranks go in 4 pieces
    most = most_tokens(scenario.costs.model, *room, is_shared=True, reruns=True, block_ranks=8, head_pieces=4)
    assert shared.tokens_per_rank == most < scenario.tokens_per_rank


def test_a_model_config_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"config\.json cannot be read as a model config: the file is nested too deeply"):
        read_model(str(tmp_path), 2)


def test_states_move_to_the_host_from_the_first_token_without_room() -> None:
    request = replace(SMALL, host_bytes=2**38, parameters="sharded")
    most = build_scenario(request).longest_tokens
    for longest, on_host in ((most, False), (most + 1, True)):
        chosen = build_scenario(replace(request, optimizer_states="auto", longest_tokens=longest))
        assert chosen.costs.model.updates_on_host == on_host
        assert f"the longest sequence has {longest:,} tokens, and {most:,} fit " in chosen.notes[-1]


def test_moments_of_few_bits_take_fewer_bytes_and_stay_on_the_device() -> None:
    request = Request("llama-3.1-8b", "h100", 8, parameters="sharded")
    plain, eight, four = (build_scenario(replace(request, optim=name)) for name in MOMENT_BYTES)
    count = plain.costs.model.num_parameters
    states = [each.memory.state_bytes("sharded", 8) for each in (plain, eight, four)]
    # per parameter of a rank, with an fp32 scale for 256 elements
    assert states[0] - states[1] == pytest.approx(count / 8 * (8 - 2 - 8 / 256), rel=1e-6)
    assert states[0] - states[2] == pytest.approx(count / 8 * (8 - 1 - 8 / 256), rel=1e-6)
    assert plain.longest_tokens < eight.longest_tokens < four.longest_tokens
    # bf16 weights without copies keep moments of as many bits
    narrow = [build_scenario(replace(request, optim=name, bf16_updates=True)) for name in ("adamw_torch", "adamw_torch_8bit")]
    states = [each.memory.state_bytes("sharded", 8) for each in narrow]
    assert states[0] - states[1] == pytest.approx(count / 8 * (4 - 2 - 8 / 256), rel=1e-6)
    for place in ("host", "auto"):
        with pytest.raises(ValueError, match=f"leave --optimizer-states {place} out, or use --optim adamw_torch"):
            build_scenario(replace(request, optim="adamw_torch_8bit", optimizer_states=place))


@pytest.mark.wide
def test_a_model_whose_shards_fill_the_device_trains_with_those_of_layers_on_the_host() -> None:
    request = Request("llama-3.1-70b", "h100", 8, optimizer_states="host", host_bytes=200 * 2**30, parameters="sharded")
    with pytest.raises(ValueError, match=r"(?s)does not fit.*--layer-weights host \(up to 4\d\d,\d\d\d tokens\)"):
        build_scenario(request)
    plain = build_scenario(request, must_fit=False)
    away = build_scenario(replace(request, layer_weights="host"))
    assert away.costs.model.layers_on_host and 4e5 < away.longest_tokens < 4.5e5
    # all layers but two, in bf16; states on the host have memory for them already
    spec, states = away.costs.model, [each.memory.state_bytes("sharded", 8) for each in (plain, away)]
    assert states[0] - states[1] == pytest.approx((spec.num_layers - 2) * spec.layer_weights * 2 / 8, rel=1e-6)
    assert plain.memory.host_bytes == away.memory.host_bytes
    # adapters have their own there
    frozen = [
        build_scenario(replace(request, optimizer_states="device", lora_rank=16, layer_weights=place))
        for place in ("device", "host")
    ]
    moved = spec.num_layers * spec.layer_weights * 2 / 8
    assert frozen[0].memory.host_bytes - frozen[1].memory.host_bytes == pytest.approx(moved, rel=0.02)
    assert frozen[1].memory.left_bytes("sharded", 8) > frozen[0].memory.left_bytes("sharded", 8)


KEPT_LAYERS = {
    "whole weights": ({"parameters": "replicated"}, "needs parameters that two or more ranks share"),
    "one rank": ({"num_ranks": 1}, "needs parameters that two or more ranks share"),
    "gathered at once": ({"parameters": "gathered_per_round"}, "needs parameters that two or more ranks share"),
    "four bits": ({"lora_rank": 8, "quantize": "nf4"}, "moves neither weights in four bits"),
    "no room on the host": ({"host_bytes": 2**30}, "--layer-weights host needs 1.6 GiB of host memory on each rank"),
    "no room between steps": (
        {"model": "llama-3.1-70b", "num_ranks": 2, "lora_rank": 8},
        "between steps, weights of layers come back from the host",
    ),
}


@pytest.mark.parametrize("name", KEPT_LAYERS)
def test_layers_that_cannot_lie_on_the_host_are_refused_with_the_reason(name: str) -> None:
    changes, message = KEPT_LAYERS[name]
    with pytest.raises(ValueError, match=message):
        build_scenario(replace(Request("llama-3.1-8b", "h100", 8, layer_weights="host"), **changes))


def test_layers_move_to_the_host_from_the_first_token_without_room() -> None:
    request = replace(SMALL, host_bytes=2**38, parameters="sharded", optimizer_states="host")
    most = build_scenario(request).longest_tokens
    for longest, on_host in ((most, False), (most + 1, True)):
        chosen = build_scenario(replace(request, layer_weights="auto", longest_tokens=longest))
        assert chosen.costs.model.layers_on_host == on_host
        assert f"the longest sequence has {longest:,} tokens, and {most:,} fit with all weights on the" in chosen.notes[-1]
    # without room on the host they stay, and the note says why
    kept = build_scenario(
        replace(request, layer_weights="auto", longest_tokens=most + 1, host_bytes=0, optimizer_states="device")
    )
    assert not kept.costs.model.layers_on_host and "layers cannot lie on the host: --layer-weights host needs" in kept.notes[-1]

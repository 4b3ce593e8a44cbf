"""Hardware profiles survive JSON, errors name file, field and value, and FlexSP's published terms are met to the digit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients, default_coefficients
from hf_longctx.plan.cost.profiles import (
    HardwareProfile,
    ModelCalibration,
    peak_of_device,
    profile_from_json,
    profile_of_device,
    profile_to_json,
    read_profile,
)
from hf_longctx.plan.model.model_spec import ModelSpec

SHIPPED = (
    *("a100-40g", "a100-80g", "a10g", "b200", "b300", "cpu", "gb200", "gh200", "h100", "h100-nvl", "h100-pcie", "h20", "h200"),
    *("l4", "l40s", "mi300x", "mi325x", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-6000-ada", "rtx-pro-6000"),
)

# FlexSP's artefact: a1 (ms per token^2), a2 (ms per token), b1 (ms), MB per token, layers, hidden size
FLEXSP = {
    "gpt-7b": (5.128e-6, 0.1839576, 629.3563, 4.480441895, 32, 4096),
    "gpt-13b": (9.2852e-6, 0.3060189, 1132.5632, 4.220439453, 40, 5120),
    "gpt-30b": (15.4262e-6, 0.8035742, 2789.3644, 3.417381836, 60, 6656),
}
# number of GPUs -> MB per ms and GPU of their all-to-all
BANDWIDTH = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
# a profile with required fields only
LEAST: dict[str, Any] = {
    "schema": 1,
    "source": "made up",
    "hardware": {
        "name": "x",
        "matmul_flops_per_s": 1e12,
        "attention_flops_per_s": 1e12,
        "device_bytes": 1000,
        "link_bytes_per_s": 1e9,
        "network_bytes_per_s": 1e9,
        "message_s": 0,
    },
}


def profile() -> HardwareProfile:
    """A profile with a different value in every field."""
    spec = HardwareSpec("box", 3e12, 2e12, 7, 5e9, 4e9, 1e-4, 2e-5, 2.1, 2.6, 9e9, 11, ((2, 1e9), (6, 2e8)), "bench", 8e11)
    coefficients = CostCoefficients(
        PassCoefficients(1e-9, 2e-6, 3e-2, 4e-5, 5e-10, 6e-10, 7e-5), PassCoefficients(2e-9, 3e-6, 4e-2), 0.5, "run 3"
    )
    models = (ModelCalibration("llama-3.1-8b", coefficients, 123, 456, 18),)
    return HardwareProfile(
        spec, models, (("forward", 0.03), ("backward", 0.04)), "two runs of the bench", "bf16, fp8", "copies", 4
    )


def edited(path: str, value: Any = None) -> str:
    """The JSON of `profile` with the value at `path` ("hardware.name", "models.0.model") replaced, or removed (None)."""
    data = json.loads(profile_to_json(profile()))
    *parents, last = path.split(".")
    node = data
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return json.dumps(data)


def test_a_profile_survives_json() -> None:
    assert profile_from_json(profile_to_json(profile())) == profile()
    bare = HardwareProfile(GENERIC_CPU)
    assert profile_from_json(profile_to_json(bare)) == bare


def test_every_field_is_checked() -> None:
    from hf_longctx.plan.cost import profiles

    nested = {
        HardwareSpec: set(profiles.RATE_TABLES),
        ModelCalibration: {"coefficients"},
        CostCoefficients: {"forward", "backward"},
    }
    for kind, rules in profiles._RULES.items():
        assert {field.name for field in dataclasses.fields(kind)} == set(rules) | nested.get(kind, set())


def test_fields_with_a_default_may_be_left_out() -> None:
    found = profile_from_json(json.dumps(LEAST))
    assert found == HardwareProfile(HardwareSpec("x", 1e12, 1e12, 1000, 1e9, 1e9, 0.0), source="made up")


@pytest.mark.parametrize(
    "path,value,words",
    [
        ("schema", 2, ("schema is 2", "schema 1")),
        ("schema", True, ("schema is True",)),
        ("source", 3, ("source is 3", "text")),
        ("hardware", [], ("hardware is []", "object")),
        ("hardware.speed", 3, ("'speed'", "value 3", "matmul_flops_per_s")),
        ("hardware.matmul_flops_per_s", 0, ("hardware.matmul_flops_per_s is 0", "above 0")),
        ("hardware.matmul_flops_per_s", None, ("'matmul_flops_per_s' is missing",)),
        ("hardware.attention_flops_per_s", -1e9, ("attention_flops_per_s is -1000000000.0",)),
        ("hardware.link_bytes_per_s", float("nan"), ("link_bytes_per_s is nan",)),
        ("hardware.network_bytes_per_s", float("inf"), ("network_bytes_per_s is inf",)),
        ("hardware.copy_bytes_per_s", 10**400, ("copy_bytes_per_s is 1000",)),
        ("hardware.copy_bytes_per_s", True, ("copy_bytes_per_s is True",)),
        ("hardware.message_s", -1e-9, ("message_s is -1e-09", "0 or more")),
        ("hardware.kernel_s", "1e-5", ("kernel_s is '1e-5'", "number")),
        ("hardware.device_bytes", 1.5, ("device_bytes is 1.5", "integer above 0")),
        ("hardware.device_bytes", 10**30, ("device_bytes is 1e+30", "at most 1e+17")),
        ("hardware.host_bytes", -1, ("host_bytes is -1", "integer of 0 or more")),
        ("hardware.name", 5, ("hardware.name is 5", "text")),
        ("hardware.exchange_bytes_per_s", [[2, 1e9]], ("exchange_bytes_per_s is [[2",)),
        ("hardware.exchange_bytes_per_s.1", 1e9, ("exchange_bytes_per_s", "'1'", "2 or more")),
        ("hardware.exchange_bytes_per_s.two", 1e9, ("exchange_bytes_per_s", "'two'")),
        ("hardware.exchange_bytes_per_s.2", 0.0, ("exchange_bytes_per_s.2 is 0.0",)),
        ("hardware.gather_bytes_per_s.2", -1, ("gather_bytes_per_s.2 is -1",)),
        ("hardware.scatter_bytes_per_s", 3, ("scatter_bytes_per_s is 3",)),
        ("measured", 3, ("measured is 3", "text")),
        ("ranks_per_node", 0, ("ranks_per_node is 0", "integer above 0")),
        ("models", {}, ("models is {}", "list")),
        ("models.0.model", None, ("models[0]", "'model' is missing")),
        ("models.0.saved_bytes_per_token", 0, ("models[0].saved_bytes_per_token is 0",)),
        ("models.0.coefficients", None, ("models[0]", "'coefficients' is missing")),
        ("models.0.coefficients.forward", None, ("models[0].coefficients", "'forward' is missing")),
        ("models.0.coefficients.forward.pair_s", -1, ("models[0].coefficients.forward.pair_s is -1",)),
        ("models.0.coefficients.backward.seconds", 1, ("models[0].coefficients.backward", "'seconds'", "pair_s")),
        ("residuals.forward", -0.1, ("residuals.forward is -0.1",)),
        ("residuals", 3, ("residuals is 3",)),
    ],
)
def test_errors_name_the_file_the_field_and_the_value(path: str, value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        profile_from_json(edited(path, value), "box.json")
    for word in ("box.json", *words):
        assert word in str(error.value)


def test_a_field_that_is_there_twice_is_refused() -> None:
    twice = json.dumps(LEAST).replace('"message_s": 0', '"message_s": 0, "message_s": 1')
    with pytest.raises(ValueError, match=r"box\.json: .*'message_s' is given twice"):
        profile_from_json(twice, "box.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"box\.json"):
        profile_from_json(text, "box.json")


@pytest.mark.parametrize(
    "spec",
    [
        dataclasses.replace(GENERIC_CPU, message_s=-1.0),
        dataclasses.replace(GENERIC_CPU, matmul_flops_per_s=math.nan),
        dataclasses.replace(GENERIC_CPU, exchange_bytes_per_s=((2, 1.0), (2, 2.0))),
    ],
)
def test_nothing_is_written_that_could_not_be_read(spec: HardwareSpec) -> None:
    with pytest.raises(ValueError):
        profile_to_json(HardwareProfile(spec))


def test_every_file_beside_the_recipes_is_a_shipped_profile() -> None:
    folder = Path(__file__).resolve().parents[3] / "recipes" / "hardware"
    assert {file.stem for file in folder.glob("*.json")} == set(SHIPPED)


def test_shipped_profiles_are_found_by_any_spelling_of_their_name() -> None:
    with pytest.raises(ValueError, match=re.escape(f"neither a shipped profile (known are {', '.join(sorted(SHIPPED))})")):
        read_profile("zzz")
    for name in SHIPPED:
        assert read_profile(name.upper().replace("-", "_")) == read_profile(name)
        assert read_profile(name).source


@pytest.mark.parametrize(
    "name,profile",
    [
        *[("H100 SXM", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("H100 PCIe 80GB", "h100-pcie"), ("a100-80gb", "a100-80g")],
        *[("NVIDIA A100-SXM4-40G", "a100-40g"), ("nvidia geforce rtx 3090", "rtx-3090"), ("H100-NVL", "h100-nvl")],
        *[("4090", "rtx-4090"), ("rtx4090", "rtx-4090"), ("RTX 5090 32GB", "rtx-5090"), ("6000 Ada", "rtx-6000-ada")],
        *[("h100sxm", "h100"), ("H100SXM5-80GB", "h100"), ("h100pcie", "h100-pcie"), ("a100-sxm-80gb", "a100-80g")],
        *[("NVIDIA GH200 480GB", "gh200"), ("GB200 NVL72", "gb200"), ("B200 192GB", "b200"), ("H200 141GB", "h200")],
        *[("B300 288GB", "b300"), ("A100-SXM4-80GB", "a100-80g")],
        ("RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_name_may_have_further_words(name: str, profile: str) -> None:
    assert read_profile(name) == read_profile(profile)


@pytest.mark.parametrize("name", ["a100", "a100-sxm", "a100sxm4"])
def test_a_name_of_several_devices_is_not_guessed(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is neither a shipped profile \(the nearest are a100-40g, a100-80g"):
        read_profile(name)


# devices, and the profile that is named as the nearest one
OTHER_DEVICES = {
    **{"H200 NVL": "h200", "h200nvl": "h200", "NVIDIA A100-PCIE-40GB": "a100-40g", "A100 80GB PCIe": "a100-40g"},
    **{"RTX 5090 Laptop GPU": "rtx-5090", "GH200 144GB": "gh200", "NVIDIA GH200 144G HBM3e": "gh200", "H100 64GB": "h100"},
    **{
        "RTX 4090 D": "rtx-4090",
        "rtx4090d": "rtx-4090",
        "RTX 3090 Ti": "rtx-3090",
        "3090ti": "rtx-3090",
        "4080 Super": "rtx-4090",
    },
    **{"RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000", "RTX 4090 48GB": "rtx-4090", "my cpu box": "cpu"},
    **{"mi455x": "mi325x", "H100 MIG 1g.10gb": "h100"},
}


@pytest.mark.parametrize("name,nearest", OTHER_DEVICES.items())
def test_other_devices_are_not_taken_for_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is neither a shipped profile \(the nearest are .*{nearest}\b.*path"):
        read_profile(name)


@pytest.mark.parametrize("path", ["nowhere/h100.json", "./my-h200.json", "h200.json", "a\\h100"])
def test_a_path_without_a_file_is_no_name(path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"hardware {path!r} does not exist")):
        read_profile(path)
    with pytest.raises(ValueError, match="is not a file"):
        read_profile(Path(__file__).parent)


@pytest.mark.parametrize(
    "name",
    [
        *("v100", "V100-32G", "t4", "Tesla T4", "RTX 2080 Ti", "2080ti", "P100", "GTX 1080", "gtx1080", "Titan V", "RTX 2060"),
        *("2070 Super", "Tesla P4", "Tesla K80", "M40", "Tesla V100-SXM2-32GB", "Quadro RTX 6000"),
    ],
)
def test_devices_without_bf16_on_tensor_cores_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="no tensor cores for bf16"):
        read_profile(name)


@pytest.mark.parametrize("name", ["p4d.24xlarge", "RTX 2000 Ada", "GT4", "AP100"])
def test_words_that_only_end_like_an_old_gpu_are_not_one(name: str) -> None:
    with pytest.raises(ValueError, match="neither a shipped profile"):
        read_profile(name)


@pytest.mark.parametrize(
    "device,num_gb,profile",
    [
        *[("NVIDIA A100-SXM4-40GB", 42, "a100-40g"), ("NVIDIA A100 80GB PCIe", 85, ""), ("NVIDIA A10G", 24, "a10g")],
        *[("NVIDIA B200", 190, "b200"), ("NVIDIA GB200", 190, "gb200"), ("NVIDIA L4", 24, "l4"), ("NVIDIA L40S", 48, "l40s")],
        *[("NVIDIA H20", 102, "h20"), ("NVIDIA H200", 150, "h200"), ("NVIDIA GeForce RTX 4090", 25, "rtx-4090")],
        *[("NVIDIA RTX 6000 Ada Generation", 51, "rtx-6000-ada"), ("AMD Instinct MI300X", 206, "mi300x")],
        *[
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 102, "rtx-pro-6000"),
            ("NVIDIA GeForce RTX 3090", 25, "rtx-3090"),
        ],
        *[("NVIDIA H100 80GB HBM3", 85, "h100"), ("NVIDIA H100 PCIe", 85, "h100-pcie"), ("NVIDIA H100 NVL", 100, "h100-nvl")],
        *[("NVIDIA GH200 480GB", 102, "gh200"), ("NVIDIA B300 SXM6 AC", 288, "b300"), ("AMD Instinct MI325X", 274, "mi325x")],
        *[("Quadro RTX 6000", 25, ""), ("NVIDIA GeForce RTX 4080", 16, ""), ("NVIDIA GH200 144G HBM3e", 151, "")],
        *[("NVIDIA H200 NVL", 150, ""), ("NVIDIA A100-PCIE-40GB", 42, ""), ("NVIDIA A100-SXM-64GB", 68, "")],
        *[("NVIDIA GeForce RTX 5090 Laptop GPU", 25, ""), ("NVIDIA GeForce RTX 4090 D", 25, ""), ("NVIDIA H20-3e", 150, "")],
        *[("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, ""), ("NVIDIA A100-SXM4-80GB", 85, "a100-80g"), ("NVIDIA B200", 192, "b200")],
    ],
)
def test_a_device_has_the_profile_of_its_own_name(device: str, num_gb: int, profile: str) -> None:
    found = profile_of_device(device, num_gb * 10**9)
    assert found == (read_profile(profile) if profile else None)


# memory of a device in GB, dense bf16 peak in TFLOP/s and bandwidth in TB/s, from data sheets
@pytest.mark.parametrize(
    "name,num_gb,peak,bandwidth",
    [
        *[("b200", 180, 2250, 8), ("gb200", 186, 2500, 8), ("h20", 96, 148, 4), ("l40s", 48, 362, 0.864), ("l4", 24, 121, 0.3)],
        *[("a10g", 24, 70, 0.6), ("rtx-4090", 24, 165, 1.008), ("rtx-5090", 32, 209.5, 1.792)],
        *[("rtx-6000-ada", 48, 364, 0.96), ("rtx-pro-6000", 96, 504, 1.792), ("mi300x", 192, 1307, 5.3)],
        *[("rtx-3090", 24, 71, 0.936), ("h100-pcie", 80, 756, 2), ("h100-nvl", 94, 835, 3.9), ("gh200", 96, 990, 4)],
        *[("b300", 288, 2250, 8), ("mi325x", 256, 1307, 6)],
    ],
)
def test_rates_are_what_a_data_sheet_allows(name: str, num_gb: int, peak: float, bandwidth: float) -> None:
    profile = read_profile(name)
    assert profile.spec.device_bytes == num_gb * 10**9
    assert profile.peak_flops_per_s == pytest.approx(peak * 1e12, rel=0.002)
    assert 0.45 * peak <= profile.spec.matmul_flops_per_s / 1e12 <= 0.8 * peak
    assert profile.spec.memory_bytes_per_s / 1e12 == pytest.approx(0.8 * bandwidth, rel=0.01)
    # every rate says where it is from
    rates = ("matmul_flops", "attention_flops", "copy_bytes", "link_bytes", "network_bytes", "memory_bytes")
    assert all(f"{rate}_per_s: " in profile.source for rate in rates)
    assert "device_bytes: " in profile.source and "host_bytes: " in profile.source


def test_peaks_are_those_of_whole_names() -> None:
    assert peak_of_device("NVIDIA H100 80GB HBM3") == 989e12 and peak_of_device("NVIDIA H100 PCIe") == 756e12
    assert peak_of_device("NVIDIA A100-SXM4-80GB") == 312e12 and peak_of_device("NVIDIA L40S") == 362e12
    assert peak_of_device("NVIDIA GB200") == 2500e12 and peak_of_device("NVIDIA GeForce RTX 4090") == 165.2e12
    assert peak_of_device("NVIDIA H800") == 989e12 and peak_of_device("NVIDIA A100-PCIE-40GB") == 312e12
    assert peak_of_device("NVIDIA RTX A4000") is None and peak_of_device("CPU x86_64") is None


def test_a_profile_is_read_from_a_path(tmp_path: Path) -> None:
    file = tmp_path / "box.json"
    file.write_text(profile_to_json(profile()))
    assert read_profile(file) == read_profile(str(file)) == profile()
    file.write_text(edited("hardware.kernel_s", -1))
    with pytest.raises(ValueError, match=r"box\.json: hardware\.kernel_s is -1"):
        read_profile(file)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ValueError, match=r"'zzz'.*a100-40g.*path"):
        read_profile("zzz")


def test_every_gpu_says_what_its_tensor_cores_multiply() -> None:
    formats = {name: read_profile(name).formats for name in SHIPPED}
    assert not formats.pop("cpu") and all(text.startswith("bf16") for text in formats.values())
    assert formats["a100-80g"] == "bf16" and formats["h100"] == "bf16, fp8" and formats["b300"] == "bf16, fp8, fp4"


def test_profiles_say_which_rates_were_measured_and_how_many_devices_a_node_has() -> None:
    profiles = {name: read_profile(name) for name in SHIPPED}
    assert {name for name in SHIPPED if profiles[name].measured} == {"a100-40g", "h200", "mi300x"}
    assert all(
        ("measured" in each.source.replace("Nothing was measured", "")) == bool(each.measured) for each in profiles.values()
    )
    assert {name: each.ranks_per_node for name, each in profiles.items() if each.ranks_per_node != 8} == {"gh200": 1}


def test_shipped_rates_are_guesses_until_a_run_measured_its_own() -> None:
    model = named_model("llama-3.1-8b")
    for name in SHIPPED:
        spec = read_profile(name).spec
        assert not default_coefficients(model, ClusterSpec(8, 8, spec)).is_measured
        assert spec.attention_flops_per_s <= spec.matmul_flops_per_s


@pytest.mark.parametrize("name", FLEXSP)
@pytest.mark.parametrize("degree", [1, *BANDWIDTH])
def test_the_a100_profile_gives_flexsps_terms_at_every_degree(name: str, degree: int) -> None:
    a1, a2, b1, _, num_layers, hidden_size = FLEXSP[name]
    found = read_profile("a100-40g")
    calibration = found.calibration(name)
    assert calibration is not None
    costs = CostModel(
        replace(named_model(name), exchange_parts=1), ClusterSpec(64, 8, found.spec), calibration.coefficients, "ulysses"
    )
    lengths = [1.0, 128.0, 4096.0, 100_000.0, 384_000.0]
    # eight exchanges per layer, two bytes per element; a single rank exchanges nothing
    volume = 8 * num_layers * hidden_size * 2 / 2**20
    exchange = volume / BANDWIDTH[degree] if degree > 1 else 0.0
    expected = [(a1 * s * s + a2 * s + exchange * s) / degree / 1e3 for s in lengths]
    shape = GroupShape(degree, degree)
    assert costs.sequences_s(lengths, shape).tolist() == pytest.approx(expected, rel=1e-12)
    assert costs.group_s(shape) == pytest.approx(b1 / 1e3, rel=1e-12)


@pytest.mark.parametrize("name,limit,params_gi", [("gpt-7b", 192_000, 7.1174468994), ("gpt-30b", 384_000, 32.7153244019)])
def test_tokens_per_rank_are_flexsps(name: str, limit: int, params_gi: float) -> None:
    # (E = 30 GB minus 16 bytes per parameter sharded over 64 GPUs) divided by the MB of a token
    expected = (30 * 1024 - params_gi * 16 * 1024 / 64) / FLEXSP[name][3]
    calibration = read_profile("a100-40g").calibration(name)
    assert calibration is not None
    model = dataclasses.replace(named_model(name), max_positions=limit)
    assert abs(calibration.tokens_per_rank(model, 64) - expected) <= 2


def test_a_model_that_fits_no_rank_says_so() -> None:
    calibration = read_profile("A100 40G").calibration("GPT_30B")
    assert calibration is not None and calibration.model == "gpt-30b"
    with pytest.raises(ValueError, match=r"gpt-30b.*8 ranks.*more ranks"):
        calibration.tokens_per_rank(named_model("gpt-30b"), 8)


def test_a_model_nobody_measured_has_no_calibration() -> None:
    assert read_profile("a100-40g").calibration("llama-3.1-8b") is None
    assert isinstance(named_model("llama-3.1-8b"), ModelSpec)


def test_gathers_of_other_nodes_are_left_out() -> None:
    rates = ((2, 3e9), (4, 2e9), (8, 1e9))
    spec = dataclasses.replace(profile().spec, gather_bytes_per_s=rates, scatter_bytes_per_s=rates[1:])
    found = dataclasses.replace(profile(), spec=spec)
    assert found.ranks_per_node == 4 and found.spec_on(4) == spec
    # four ranks were on one node, and eight on two
    smaller, larger = found.spec_on(2), found.spec_on(8)
    assert smaller.gather_bytes_per_s == (rates[0], rates[2]) and smaller.scatter_bytes_per_s == rates[2:]
    assert larger.gather_bytes_per_s == rates[:2] and larger.scatter_bytes_per_s == rates[1:2]
    assert smaller.exchange_bytes_per_s == spec.exchange_bytes_per_s

"""Weights of experts in files: found in every way in which families save them, and read to the bits that transformers reads."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.models.any_model import build_any
from helpers.models.mxfp4_checkpoints import save_gpt_oss, unpacked
from helpers.trainers.trainer_runs import training_arguments
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, convert_moe_packed_tensors

from hf_longctx import LongContextConfig, load_pipeline_stage, load_sharded, pack_experts
from hf_longctx.families.registry import FAMILIES
from hf_longctx.hf.checkpoints.deferred import defer_weights, read_deferred, source_of, without_placeholders
from hf_longctx.hf.checkpoints.expert_files import Files, find_experts, read_experts
from hf_longctx.hf.models.packed_experts import expert_modules, packed_parameters, packed_weights
from hf_longctx.hf.models.quantised import quantised_problems
from hf_longctx.hf.run.placement import ReplicatedPlacement, Shards
from hf_longctx.hf.start.stages import checkpoint_config, load_stage
from hf_longctx.plan.core.types import LayerRange
from hf_longctx.runtime.core.expert_products import PackedMatrices
from hf_longctx.runtime.parameters.sharded import shard_mesh

CPU = torch.device("cpu")
CLASSES = sorted({family.causal for family in FAMILIES if family.causal and family.modules.experts})
# read by transformers on the first rank: files have experts in a way that is none of these
OTHERS: tuple[str, ...] = ()


def states(model: Any) -> dict[str, torch.Tensor]:
    names = {name for name, module in expert_modules(model)}
    return {name: each for name, each in model.state_dict().items() if name.rpartition(".")[0] in names and each.dim() == 3}


@pytest.mark.wide("DeepseekV4ForCausalLM", "KimiLinearForCausalLM")
@pytest.mark.parametrize("name", CLASSES)
def test_experts_of_every_family_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    model: Any = build_any(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    expected = states(loaded)
    if not expected:
        pytest.skip("experts have no weights of three dimensions")
    with Files(str(tmp_path)) as files:
        found = find_experts(model, {name: each.shape for name, each in expected.items()}, files)
        assert (found.keys() == expected.keys()) == (name not in OTHERS)
        for each, weight in found.items():
            own = torch.full_like(expected[each], torch.nan)
            read_experts(files, weight, own)
            assert torch.equal(own, expected[each])


def read(folder: str, kind: Any, **settings: Any) -> Any:
    """The model with adapters, with experts in four bits if there is a kind, after its weights are read on one rank."""
    model = load_sharded(folder, LongContextConfig(), dtype=torch.bfloat16, **settings)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    if kind:
        pack_experts(model, kind)
    ReplicatedPlacement(None).prepare(model)
    assert source_of(model) is None
    return model.get_base_model()


@pytest.mark.wide("nf4")
@pytest.mark.parametrize("kind", ["", "mxfp4", "nf4"])
def test_blocks_are_read_packed_and_unpacked_to_the_bits_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path)
    model, expected = read(folder, kind), unpacked(folder, dtype=torch.bfloat16)
    for name, weight in expected.named_parameters():
        if kind != "nf4" or not name.endswith(("gate_up_proj", "down_proj")):
            place, _, own = name.rpartition(".")
            module = model.get_submodule(place.replace("q_proj", "q_proj.base_layer"))
            assert torch.equal(getattr(module, own), weight), name
    in_files = {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}
    names = {module: name for name, module in model.named_modules()}
    for module, own, found in packed_weights(model):
        blocks, scales = (in_files[f"{names[module]}.{own}_{each}"] for each in ("blocks", "scales"))
        if kind == "mxfp4":
            assert torch.equal(found.codes_ENH, blocks.flatten(2)) and torch.equal(found.scales_ENG, scales)
            plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            assert torch.equal(PackedMatrices(*found_parts(found), "mxfp4").unpacked(0, len(blocks), torch.bfloat16), plain)
    if kind == "nf4":
        pack_experts(expected, "nf4")
        for (_, _, own_bits), (_, _, true_bits) in zip(packed_weights(model), packed_weights(expected), strict=True):
            assert all(torch.equal(*pair) for pair in zip(found_parts(own_bits), found_parts(true_bits), strict=True))


def found_parts(found: PackedMatrices) -> tuple[torch.Tensor, torch.Tensor]:
    return found.codes_ENH, found.scales_ENG


def test_stages_read_their_own_blocks(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path)
    expected = unpacked(folder, dtype=torch.bfloat16).state_dict()
    for stage, layers in enumerate(((0, 1), (2,))):
        model: Any = load_stage(folder, ((LayerRange(0, 2),), (LayerRange(2, 1),)), stage, torch.bfloat16, defers_experts=True)
        assert {name for name, _ in expert_modules(model)} == {f"model.layers.{number}.mlp.experts" for number in layers}
        without_placeholders(model)
        read_deferred(model, CPU)
        assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


def test_loaders_of_four_bits_say_what_they_cannot_read(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path / "blocks")
    with pytest.raises(ValueError, match=r"are quantised, of which only .* experts in MXFP4 \(without quantization_config\)"):
        defer_weights(folder, quantization_config=transformers.Mxfp4Config())
    with pytest.raises(ValueError, match="which is not tested beside experts that are "):
        load_stage(folder, ((LayerRange(0, 3),),), 0, defers_experts=True, quantization_config=transformers.Mxfp4Config())
    config = checkpoint_config(folder)
    assert config.quantization_config["quant_method"] == "mxfp4"
    # a layer without its blocks
    first = min(Path(folder).glob("*.safetensors"))
    tensors = load_file(first)
    for ending in ("blocks", "scales"):
        del tensors[f"model.layers.0.mlp.experts.gate_up_proj_{ending}"]
    save_file(tensors, first)
    with pytest.raises(ValueError, match=r"lacks 1 weights .*model.layers.0.mlp.experts.gate_up_proj\b"):
        defer_weights(folder)
    with pytest.raises(ValueError, match=r"has no weights for 1 of the experts' weights \(the first is model.layers.0.mlp"):
        load_stage(folder, ((LayerRange(0, 3),),), 0, defers_experts=True)


def test_experts_of_transformers_kernels_are_refused_by_name(tmp_path: Path) -> None:
    model = unpacked(save_gpt_oss(tmp_path), dtype=torch.bfloat16)
    model.model.layers[1].mlp.experts = Mxfp4GptOssExperts(model.config)
    (problem,) = quantised_problems(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])))
    assert "model.layers.1.mlp.experts is a Mxfp4GptOssExperts, whose kernels for MXFP4 have no backward; load" in problem


MIB = 2**20


def peak_mib(folder: str, config: dict[str, Any], reads_whole: bool) -> tuple[float, float, float]:
    """MiB by which this process grew at most while it loaded and placed a model, MiB of its weights, and of unpacked experts."""
    # first, since it says how many ranks there are
    training_arguments(f"{folder}/out")
    settings = LongContextConfig(**config)
    gc.collect()
    # makes the present size the peak
    Path("/proc/self/clear_refs").write_text("5")
    before = host_mib("VmRSS")
    if reads_whole:
        model: Any = unpacked(folder, dtype=torch.bfloat16)
    elif "stages" in config:
        model = load_pipeline_stage(folder, settings, dtype=torch.bfloat16)
    else:
        model = load_sharded(folder, settings, dtype=torch.bfloat16)
    if reads_whole:
        return host_mib("VmHWM") - before, 0.0, sum(weight.nbytes for weight in states(model).values()) / MIB
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    pack_experts(model, "mxfp4")
    if config.get("parameters") == "sharded":
        Shards(shard_mesh("cpu", torch.distributed.get_world_size(), 60.0), CPU, True).divide(model)
    else:
        ReplicatedPlacement(None).prepare(model)
    peak = host_mib("VmHWM") - before
    weights = [getattr(weight, "_local_tensor", weight).nbytes for weight in model.parameters()]
    whole = sum(2 * codes.numel() * 2 for _, codes, _ in packed_parameters(model).values())
    return peak, sum(weights) / MIB, whole / MIB


def host_mib(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024  # type: ignore[union-attr]


WAYS = {"replicated": {"parameters": "replicated"}, "sharded": {"parameters": "sharded"}, "stages": {"stages": 2}}


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("way", WAYS)
def test_no_rank_holds_more_than_its_blocks_and_a_few_unpacked_experts(ranks: Any, tmp_path: Path, way: str) -> None:
    # 12 layers of 16 experts: 25 MiB each in bf16, 6.4 MiB in four bits
    folder = save_gpt_oss(tmp_path, num_layers=12, num_experts=16, size=512, num_files=24)
    for peak, own, whole in ranks(2).run(peak_mib, folder, WAYS[way], False, timeout_s=280.0):
        # pages of the largest file, and what Python and gloo take
        assert peak < own + 40, (peak, own, whole)
        assert own + 40 < 0.6 * whole
    if way == "replicated":
        assert all(peak > 0.9 * whole for peak, _, whole in ranks(2).run(peak_mib, folder, WAYS[way], True, timeout_s=280.0))

"""Checkpoints in fp8 with a scale for each block: kept or unpacked in shards, and unpacked by stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models.reference import random_rows
from helpers.models.staged_models import even_ranges
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import LossRecorder, training_arguments
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config

from hf_longctx import LongContextConfig, LongContextTrainer, load_sharded, pack_experts
from hf_longctx.hf.checkpoints.deferred import defer_weights, source_of
from hf_longctx.hf.models.packed_experts import expert_modules, packed_weight
from hf_longctx.hf.models.quantised import fp8_layers, rounding_problems
from hf_longctx.hf.run.placement import ReplicatedPlacement
from hf_longctx.hf.start.stages import load_stage
from hf_longctx.runtime.core import fp8

# matrices have 16, 32 or 48 rows and columns, so that shards of two ranks begin inside blocks, and blocks are cut off
BLOCK = (12, 20)
SHARDED = {"tokens_per_rank": 48, "parameters": "sharded"}
ROWS = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 2)


def saved(folder: Path, family: str = "llama", block: tuple[int, int] = BLOCK, **config: Any) -> str:
    """A checkpoint whose linear modules in layers are in fp8."""
    build_model(ModelCase(family, dtype=torch.bfloat16)).save_pretrained(folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    found = load_file(file)
    for name in [name for name in found if name.endswith("proj.weight")]:
        shape = [-(-size // own) for size, own in zip(found[name].shape, block, strict=True)]
        found[f"{name}_scale_inv"] = torch.rand(shape, generator=generator) + 0.5
        found[name] = found[name].to(fp8.DTYPE)
    save_file(found, file, {"format": "pt"})
    path = folder / "config.json"
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, **config}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantisation}))
    return str(folder)


def by_hand(folder: str, block: tuple[int, int] = BLOCK) -> dict[str, Tensor]:
    """The unpacked weights in bf16."""
    found = load_file(Path(folder) / "model.safetensors")
    scales = {name.removesuffix("_scale_inv"): found.pop(name) for name in [*found] if name.endswith("_scale_inv")}
    for name, scale in scales.items():
        rows, columns = (torch.arange(size) // own for size, own in zip(found[name].shape, block, strict=True))
        found[name] = (found[name].float() * scale[rows][:, columns]).bfloat16()
    return found


@pytest.mark.parametrize("kind", ["", "fp8"])
def test_experts_in_fp8_are_unpacked_or_keep_their_bytes(kind: Any, tmp_path: Path) -> None:
    # a scale of a block is that of all inputs of its rows
    block = (12, 64)
    folder = saved(tmp_path, "qwen3_moe", block)
    model: Any = load_sharded(folder, LongContextConfig(), dtype=torch.bfloat16, packs_experts=True)
    names = [name for name, _ in expert_modules(model)]
    source = source_of(model)
    # every rank reads its own
    assert names and source is not None and len(source.experts) == 2 * len(names)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    if kind:
        pack_experts(model, kind)
    ReplicatedPlacement(None).prepare(model)
    base, expected, in_file = model.get_base_model(), by_hand(folder, block), load_file(Path(folder) / "model.safetensors")
    for name in names:
        experts = base.get_submodule(name)
        for own, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for expert, weight in enumerate(getattr(experts, own)):
                assert torch.equal(weight, torch.cat([expected[f"{name}.{expert}.{part}_proj.weight"] for part in parts]))
                if kind:
                    found, files = packed_weight(experts, own), [in_file[f"{name}.{expert}.{part}_proj.weight"] for part in parts]
                    assert found is not None and torch.equal(found.codes_ENH[expert], torch.cat(files).view(torch.uint8))


def test_experts_in_fp8_whose_blocks_are_narrower_are_rounded_again(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe", (12, 20))
    model: Any = load_sharded(folder, LongContextConfig(), dtype=torch.bfloat16, packs_experts=True)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    pack_experts(model, "fp8")
    ReplicatedPlacement(None).prepare(model)
    expected = by_hand(folder, (12, 20))
    for name, experts in expert_modules(model.get_base_model()):
        for expert, weight in enumerate(experts.down_proj):
            true = expected[f"{name}.{expert}.down_proj.weight"]
            assert 0 < (weight - true).float().norm() <= 0.04 * true.float().norm()


def train(folder: str, out: str, unpacks: bool, frozen: str = "unchanged") -> Any:
    """Words at start, losses, whole weights and scales before and after training, and whether the layers keep blocks."""
    args = training_arguments(
        out, max_steps=2, save_strategy="no", per_device_train_batch_size=8 // dist.get_world_size(), bf16=False
    )
    settings = LongContextConfig(**SHARDED, frozen_weights=frozen, report_steps=False, timeline_steps=0)
    more = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if unpacks else {}
    model: Any = load_sharded(folder, settings, dtype=torch.bfloat16, **more)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(7)
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    if not unpacks:
        for name, each in model.named_parameters():
            each.data = each.data.bfloat16() if "lora_" in name else each.data
    trainer = LongContextTrainer(model=model, args=args, train_dataset=datasets.Dataset.from_list(ROWS), longctx_config=settings)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer._placed_model()
    before, blocks = weights(trainer.model), {each.block for each in fp8_layers(trainer.model).values()}
    trainer.train()
    return trainer.longctx_run.report.opening, recorder.losses, before, weights(trainer.model), blocks


def weights(model: Any) -> dict[str, Tensor]:
    """Whole frozen weights by their names in the checkpoint."""
    found = {name.removeprefix("base_model.model.").replace(".base_layer", ""): each for name, each in model.named_parameters()}
    return {name: whole(each.detach()).clone() for name, each in found.items() if "lora_" not in name}


@pytest.mark.wide("qwen2")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shards_keep_bytes_and_scales(ranks: Any, tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path / "model", family)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    for opening, losses, before, after, blocks in ranks(2).run(train, folder, str(tmp_path / "out"), False, timeout_s=280.0):
        assert "with fp8 weights unpacked and the run's precision" in opening and blocks == {BLOCK}
        assert before.keys() == {name.replace(".weight_scale_inv", ".scale") for name in expected}
        for found in (before, after):
            for name, each in expected.items():
                own = found[name.replace(".weight_scale_inv", ".scale")]
                assert torch.equal(own, each.view(torch.uint8) if each.dtype == fp8.DTYPE else each), name
        assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_shards_unpack_their_rows_or_round_them_again(ranks: Any, tmp_path: Path) -> None:
    folder, pair = saved(tmp_path / "model"), ranks(2)
    expected = by_hand(folder)
    (opening, losses, before, after, blocks), _ = pair.run(train, folder, str(tmp_path / "out"), True, timeout_s=280.0)
    assert "fp8" not in opening and not blocks and all(map(math.isfinite, losses))
    assert before.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for found in (before, after) for name, each in expected.items())
    (_, _, again, _, blocks), _ = pair.run(train, folder, str(tmp_path / "out"), True, "fp8", timeout_s=280.0)
    assert blocks == {None}
    for name, each in expected.items():
        if name.endswith("proj.weight"):
            values, scale = fp8.rows_in_fp8(each)
            assert torch.equal(again[name], values.view(torch.uint8))
            assert torch.equal(again[name.replace(".weight", ".scale")], scale)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_stages_and_whole_models_on_the_cpu_are_unpacked_by_transformers(tmp_path: Path, family: str) -> None:
    # transformers unpacks no blocks that are cut off
    folder = saved(tmp_path / "model", family, (16, 16))
    expected = by_hand(folder, (16, 16))
    models = [load_stage(folder, even_ranges(2, num_layers=2), stage, torch.bfloat16) for stage in range(2)]
    models.append(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    names = []
    for model in models:
        found = dict(model.named_parameters())
        names.append(set(found))
        assert all(torch.equal(each, expected[name]) for name, each in found.items())
    assert names[0] | names[1] == names[2] and not names[0] & names[1]


def refused(folder: str, **settings: Any) -> str:
    with pytest.raises(ValueError) as found:
        defer_weights(folder, dtype=torch.bfloat16, **settings)
    return str(found.value)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    one_scale = saved(tmp_path / "one", weight_block_size=None)
    assert "are quantised, of which only those in fp8 with scales of blocks" in refused(one_scale)
    static = saved(tmp_path / "static", activation_scheme="static")
    assert "are quantised, of which only those in fp8 with scales of blocks" in refused(static)
    wrong = saved(tmp_path / "wrong", weight_block_size=[12, 12])
    assert "layers.0.mlp.down_proj.weight of" in refused(wrong) and "is in fp8 without scales of its blocks" in refused(wrong)
    model = defer_weights(saved(tmp_path / "good"), dtype=torch.bfloat16)
    (problem,) = rounding_problems(model, torch.device("cpu"), is_autocast=False)
    assert "frozen_weights='fp8' would round weights a second time" in problem

"""Trainings over experts in four bits that were packed while they were read: the same bytes in any layout, resumed in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models.mxfp4_checkpoints import save_gpt_oss, unpacked
from helpers.models.reference import random_rows
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import trained_beside, training_arguments
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage, load_sharded, pack_experts
from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.models.packed_experts import packed_weights

ROWS = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 2)
ONE = {"tokens_per_rank": 96}
SHARDED = {"tokens_per_rank": 48, "parameters": "sharded"}
STAGES = {"tokens_per_rank": 96, "stages": 2}
STAGED_SHARDS = {**STAGES, "parameters": "sharded"}
LAYOUTS = {"copies": (2, ONE), "shards": (2, SHARDED), "stages": (2, STAGES), "shards of stages": (4, STAGED_SHARDS)}
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_adapters(model: Any) -> Any:
    torch.manual_seed(7)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], target_parameters=ON_EXPERTS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def packed(model: Any) -> dict[str, Tensor]:
    """Whole codes and scales by name; those of this rank's stage."""
    names = {module: name.replace(".base_layer", "") for name, module in model.named_modules()}
    found = {}
    for module, name, weight in packed_weights(model):
        found |= {f"{names[module]}.{name}.{key}": getattr(weight, key) for key in ("codes_ENH", "scales_ENG")}
    return {name: whole(each.detach()).clone() for name, each in found.items()}


def train(folder: str, out: str, config: dict[str, Any], kind: str, resume: str | None = None, is_deferred: bool = True) -> Any:
    """Losses, codes and scales before and after, and adapters of a run on this rank."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    args = training_arguments(
        out, max_steps=3, save_strategy="steps", save_steps=1, per_device_train_batch_size=8 // num_ranks, bf16=False
    )
    # once, over weights that are not read yet
    has_test = is_deferred and num_ranks == 1
    settings = LongContextConfig(**config, report_steps=False, timeline_steps=0, self_test=has_test)
    load = load_pipeline_stage if "stages" in config else load_sharded
    if is_deferred:
        model: Any = load(folder, settings, dtype=torch.bfloat16, packs_experts=kind == "nf4")
        assert source_of(model) is not None
    elif kind == "mxfp4":
        model = unpacked(folder, dtype=torch.bfloat16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = with_adapters(model)
    pack_experts(model, kind)
    rows = datasets.Dataset.from_list(ROWS)
    trainer = LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=settings)
    return trained_beside(trainer, packed, resume)


def blocks_in(folder: str) -> dict[str, Tensor]:
    """Codes and scales as files have them, by the names of `packed`."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        for name, value in load_file(file).items():
            if name.endswith(("_blocks", "_scales")):
                key = "codes_ENH" if name.endswith("_blocks") else "scales_ENG"
                found[f"base_model.model.{name[:-7]}.{key}"] = value.flatten(2)
    return found


def save(folder: Path, kind: str) -> str:
    """Saves GPT-OSS in MXFP4, or a Qwen3-MoE, whose files have the matrices of each expert."""
    if kind == "mxfp4":
        return save_gpt_oss(folder)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    return str(folder)


@pytest.mark.wide("nf4")
@pytest.mark.parametrize("kind", ["mxfp4", "nf4"])
@resuming
def test_every_layout_has_the_same_bytes_and_resumes_from_the_others(ranks: Any, tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "model", kind)
    true_losses, expected, _, true_adapters = train(folder, str(tmp_path / "true"), ONE, kind, is_deferred=False)
    losses, before, after, adapters = train(folder, str(tmp_path / "one"), ONE, kind)
    assert losses == true_losses and len(losses) == 3
    assert all(torch.equal(each, true_adapters[name]) for name, each in adapters.items())
    if kind == "mxfp4":
        # packed anew, the same numbers may have other codes
        assert before.keys() == expected.keys()
        expected = blocks_in(folder)
    runs, checkpoint = [before, after], str(tmp_path / "one" / "checkpoint-1")
    for name, (num_ranks, config) in LAYOUTS.items():
        resume = None if name == "copies" else checkpoint
        found = ranks(num_ranks).run(train, folder, str(tmp_path / name), config, kind, resume, timeout_s=280.0)
        runs += [each for _, *packed_ones, _ in found for each in packed_ones]
        if name == "shards":
            # stages need names of states, which the optimizer of whole weights has not saved
            checkpoint = str(tmp_path / name / "checkpoint-2")
        # rounding differs where sums have another order
        assert found[0][0] == pytest.approx(losses[-len(found[0][0]) :], rel=0.01)
    for run in runs:
        assert run and run.keys() <= expected.keys()
        assert [name for name, value in run.items() if not torch.equal(value, expected[name])] == []
    plain = PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        tmp_path / "one" / "checkpoint-3",
        autocast_adapter_dtype=False,
    )
    loaded = {name: each for name, each in plain.named_parameters() if "lora_" in name}
    assert loaded.keys() == adapters.keys() and all(torch.equal(each, loaded[name]) for name, each in adapters.items())
    # into the checkpoint that transformers unpacks
    merged = plain.merge_and_unload()
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}

"""Models whose class keeps some weights in fp32 beside bf16, as DeepSeek and GLM keep routers, equal plain transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.measures.class_sweep import (
    LENGTHS,
    SLICES,
    WHOLE,
    Refused,
    group_step,
    lone_step,
    patched,
    recomputed_step,
    rows,
    staged_step,
    worst,
)
from helpers.models.any_model import build_any
from helpers.models.reference import reference_step
from helpers.models.tiny_models import adapted, cast_as_kept
from helpers.models.versions import newest, resuming
from helpers.plans.sliced_plans import sliced_plan
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, training_arguments
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hf_longctx import LongContextConfig, load_pipeline_stage, load_sharded
from hf_longctx.hf.models.adapters import hidden_dtype
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import config_spec, model_spec
from hf_longctx.hf.models.towers import text_layers
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.runtime.core.torch_versions import trains_several_dtypes
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

pytestmark = newest
# admitted classes with a list that transformers obeys for bf16, and whose tiny model has such a weight
NAMES = [
    f"{name}ForCausalLM"
    for name in (
        *("AXK1", "AXK2", "Afmoe", "BailingHybrid", "Beam", "DeepseekV2", "DeepseekV3", "DeepseekV32", "DeepseekV4", "Dots1"),
        *("Dots3Note", "Ernie4_5_Moe", "ExaoneMoe", "Flint", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "HYV3", "HYV4"),
        *("KimiLinear", "MiMoV2Flash", "NemotronH", "SolarOpen"),
    )
]
# names of layers, norms and single parameters that are kept; a head in HYV4
SHARDED = ["DeepseekV4ForCausalLM", "Glm4MoeForCausalLM", "BailingHybridForCausalLM", "HYV4ForCausalLM"]
# products and sums in fp32
ROUNDING = 5e-5


def build(name: str, dtype: torch.dtype = torch.float32, wide: torch.dtype = torch.float64) -> Any:
    """A tiny model of two dtypes: fp32 and fp64 in place of bf16 and fp32, so that only real differences show."""
    return cast_as_kept(build_any(name), dtype, wide)


@pytest.mark.daily("Ernie4_5_MoeForCausalLM")
@pytest.mark.parametrize("name", NAMES)
def test_plans_equal_plain_transformers_in_the_same_dtypes(name: str) -> None:
    assert setup_problems(ModelFacts.of(build(name, torch.bfloat16, torch.float32)), None, LongContextConfig(), 2, (1, 2)) == []
    model = build(name)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32, torch.float64}
    assert hidden_dtype(model) == torch.float32
    expected = reference_step(model, rows())
    runs = [lambda each: lone_step(each, sliced_plan(LENGTHS, WHOLE)), lambda each: lone_step(each, sliced_plan(LENGTHS, SLICES))]
    for run in (*runs, recomputed_step):
        assert worst(run(patched(build(name))), expected) <= ROUNDING
    try:
        assert worst(staged_step(patched(build(name))), expected) <= ROUNDING
    except Refused as reason:
        assert "cannot be cut into pipeline stages" in str(reason)


def shard_error(name: str, loss: float, gradients: dict[str, Any]) -> tuple[float, bool]:
    model = build(name)
    expected = {key: torch.from_numpy(gradient) for key, gradient in gradients.items()}
    found = group_step(patched(model), 0, True)
    dtypes = {key: weight.dtype for key, weight in build(name).named_parameters()}
    return worst(found, (loss, expected)), all(weight.dtype == dtypes[key] for key, weight in model.named_parameters())


@pytest.mark.daily("Glm4MoeForCausalLM")
@pytest.mark.skipif(not trains_several_dtypes(), reason="FSDP2 of this torch has one dtype in a unit")
@pytest.mark.parametrize("name", SHARDED)
def test_shards_of_two_dtypes_equal_plain_transformers(ranks, name: str) -> None:
    loss, gradients = reference_step(build(name), rows())
    arrays = {key: gradient.numpy() for key, gradient in gradients.items()}
    for error, keeps_dtypes in ranks(2).run(shard_error, name, loss, arrays):
        assert error <= ROUNDING and keeps_dtypes


# settings, arguments, and how ranks read the checkpoint
RUNS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "whole": (1, {}, AutoModelForCausalLM.from_pretrained),
    "shards": (2, {"parameters": "sharded"}, load_sharded),
    "shards on the host": (2, {"parameters": "sharded", "layer_weights": "host", "optimizer_states": "host"}, load_sharded),
    "stages": (2, {"stages": 2, "interleave": 1}, load_pipeline_stage),
}


def train(checkpoint: str, folder: str, name: str, resumed: bool = False) -> tuple[list[float], dict[str, str], set[str]]:
    """Losses of a training from a checkpoint in bf16, its weights' dtypes, and dtypes of weights with fp32 copies."""
    _, settings, load = RUNS[name]
    config = {"tokens_per_rank": 64, "self_test": not resumed, **settings}
    given = (LongContextConfig(**config),) if load in (load_sharded, load_pipeline_stage) else ()
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0, "learning_rate": 1e-3}
    # arguments join the ranks, before the model is loaded
    training_arguments(folder)
    trainer = make_trainer(None, rows() * 2, folder, config, arguments, model=load(checkpoint, *given, dtype="auto"))
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumed else None)
    copied = {str(parameter.dtype) for parameter, state in trainer.optimizer.state.items() if MASTER_WEIGHT in state}
    return recorder.losses, {key: str(weight.dtype) for key, weight in trainer.model.named_parameters()}, copied


def saved(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as reader:
            found |= {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    return found


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("name", [each for each in RUNS if each == "whole" or trains_several_dtypes()])
def test_a_training_saves_what_it_loaded_and_resumes_bit_for_bit(ranks, tmp_path: Path, name: str) -> None:
    model = cast_as_kept(build_any("Glm4MoeForCausalLM"), torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path / "start")
    pool, folder = ranks(RUNS[name][0]), tmp_path / "run"
    runs = pool.run(train, str(tmp_path / "start"), str(folder), name)
    losses = runs[0][0]
    if name != "whole":
        plain = ranks(1).run(train, str(tmp_path / "start"), str(tmp_path / "whole"), "whole")[0][0]
        assert losses == pytest.approx(plain, rel=2e-3)
    assert losses[-1] < losses[0]
    # the first stage has no router
    dtypes = {key: dtype for _, found, _ in runs for key, dtype in found.items()}
    assert {key for key, dtype in dtypes.items() if dtype == "torch.float32"} == {key for key in dtypes if "gate.weight" in key}
    copied = set().union(*(each for _, _, each in runs))
    assert copied == ({"torch.bfloat16"} if "host" not in name else {"torch.bfloat16", "torch.float32"})
    before, after = saved(tmp_path / "start"), saved(folder / "checkpoint-4")
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    assert json.loads((folder / "checkpoint-4" / "config.json").read_text())["dtype"] == "bfloat16"
    again = pool.run(train, str(tmp_path / "start"), str(folder), name, True)[0][0]
    assert again == losses[2:]
    resumed = saved(folder / "checkpoint-4")
    assert all(torch.equal(value, resumed[key]) for key, value in after.items())


@pytest.mark.parametrize("name", SHARDED)
def test_fp32_parts_are_counted(name: str) -> None:
    model = build(name, torch.bfloat16, torch.float32)
    wide, narrow = model_spec(model), model_spec(build(name, torch.bfloat16, torch.bfloat16))
    layers = {id(weight) for layer in text_layers(model) for weight in layer.parameters()}
    kept = [weight.numel() for weight in model.parameters() if weight.dtype == torch.float32 and id(weight) in layers]
    assert wide.fp32_parameters == sum(kept) // wide.num_layers > 0 == narrow.fp32_parameters
    head = model.lm_head.weight
    assert wide.fp32_head is (head.dtype == torch.float32) is (name == "HYV4ForCausalLM")
    assert config_spec(model.config, 2).fp32_head == wide.fp32_head
    part = wide.num_layers, True, True
    added = wide.part_weight_bytes(*part) - narrow.part_weight_bytes(*part)
    count = wide.num_layers * wide.fp32_parameters + head.numel() * wide.fp32_head
    assert added == 2 * count
    # an fp32 weight takes 4 bytes, and 4 of its gradient; others 2 and 2, and 8 of an fp32 sum and copy
    both = [ByteModel(replace(spec, has_master_weights=True)).states("replicated", 1) for spec in (wide, narrow)]
    assert both[1] - both[0] == 4 * count


def test_weights_in_fp32_that_the_class_does_not_keep_are_refused_by_name() -> None:
    model = build("Glm4MoeForCausalLM", torch.bfloat16, torch.float32)
    model.model.layers[1].input_layernorm.float()
    (problem,) = setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2))
    assert problem == (
        "the model mixes weights of torch.bfloat16, torch.float32 (first model.layers.1.input_layernorm.weight, which "
        "Glm4MoeForCausalLM does not keep in fp32); load it in one dtype"
    )


def test_adapters_train_beside_frozen_weights_of_two_dtypes() -> None:
    model = adapted(build("DeepseekV4ForCausalLM", torch.bfloat16, torch.float32), target_modules=["q_b_proj"])
    assert setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2)) == []
    assert hidden_dtype(model) == torch.bfloat16

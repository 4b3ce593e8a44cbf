"""LoRA under the trainer: the trajectory of a plain loop, and one ordinary adapter folder, however the ranks share the work."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, adapted, build_model
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import SKEWED, LossRecorder, plain_training, train_with_norms, training_arguments
from safetensors.torch import load_file

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.memory.byte_model import ByteModel

TOLERANCE = 1e-10
NUM_STEPS, SAVE_STEPS = 6, 3
ROWS = random_rows(SKEWED)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = (
    ("r", 2),
    ("lora_alpha", 8),
    ("lora_dropout", 0.1),
    ("target_modules", ["q_proj", "v_proj", "down_proj"]),
    ("lora_bias", True),
)
DORA = (
    ("r", 2),
    ("use_rslora", True),
    ("use_dora", True),
    ("lora_dropout", 0.1),
    ("target_modules", PROJECTIONS),
    ("modules_to_save", ["lm_head"]),
)

# an adapter on the embedding, and one on single tokens of it
ENDS = (("r", 2), ("target_modules", ["q_proj", "embed_tokens", "lm_head"]))
# one with a name, which has a folder of its own; and two of three adapters that are active
NAMED = (("r", 2), ("target_modules", ["q_proj", "down_proj"]), ("names", ("mine",)))
SEVERAL = (*LORA[:4], ("names", ("first", "default", "idle")), ("num_active", 2))
# the copy of a tied embedding and head is one weight, too
TIED = (("r", 2), ("target_modules", ["q_proj"]), ("modules_to_save", ["embed_tokens"]), ("ensure_weight_tying", True))
TOKENS = (("r", 2), ("target_modules", ["q_proj", "down_proj"]), ("trainable_token_indices", [3, 5, 60]))
# weights of experts and of the router, which PEFT means by these names; and experts alone
MIXTURE = (("r", 2), ("lora_alpha", 3), ("target_modules", "all-linear"))
EXPERTS = (("r", 2), ("target_modules", ["q_proj"]), ("target_parameters", ["experts.gate_up_proj", "experts.down_proj"]))


def tight(lora: Any) -> dict[str, Any]:
    """A device that keeps everything of 30 tokens beside frozen weights and adapters, fewer than most rows have."""
    spec = model_spec(build_model(ModelCase(promoted=True, lora=lora)))
    return {"device_gib": (ByteModel(spec).states() + ByteModel(spec).kept_bytes(30)) / 2**30, "tile_tokens": 8}


# the longest row needs a group of two
SHARDED = {"tokens_per_rank": 48, "parameters": "sharded"}
GATHERED = {"tokens_per_rank": 48, "parameters": "gathered_per_round"}
STAGES = {"tokens_per_rank": 96, "stages": 2}
# name -> (adapters, settings of the whole run, settings under which it is resumed)
RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sharded, then stages": (DORA, SHARDED, STAGES),
    "stages, then gathered": (LORA, STAGES, GATHERED),
    "adapters on embedding and head": (ENDS, SHARDED, STAGES),
    "single tokens": (TOKENS, STAGES, SHARDED),
    "named": (NAMED, SHARDED, STAGES),
    "several": (SEVERAL, STAGES, SHARDED),
    "several, whole": (SEVERAL, {}, tight(SEVERAL)),
    "one copy of both ends": (TIED, SHARDED, {}),
    "recomputing": (DORA, tight(DORA), tight(DORA)),
    "experts": (MIXTURE, SHARDED, STAGES),
    "spread experts": (EXPERTS, {**SHARDED, "expert_ranks": 2}, STAGES),
    "experts in four bits": ((("r", 2), ("target_modules", ["q_proj", "v_proj"])), SHARDED, STAGES),
}
# runs of other models than a Llama
FAMILY_OF = {"experts": "qwen3_moe", "spread experts": "qwen3_moe_dense", "experts in four bits": "qwen3_moe"}


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("name", RUNS)
def test_clipped_steps_and_their_folder_are_those_of_one_plain_process(ranks, tmp_path: Path, name: str) -> None:
    lora, config, later = RUNS[name]
    case = ModelCase(FAMILY_OF.get(name, "llama"), promoted=True, lora=lora, tied=lora is TIED)
    case = replace(case, packed="nf4" if name == "experts in four bits" else "")
    losses, weights = plain_training(case, ROWS, NUM_STEPS)
    saving = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": SAVE_STEPS}
    whole = ranks(2).run(train_with_norms, case, ROWS, str(tmp_path / "whole"), config, saving)
    resume = {**saving, "resume": str(tmp_path / "whole" / f"checkpoint-{SAVE_STEPS}")}
    resumed = ranks(2).run(train_with_norms, case, ROWS, str(tmp_path / "again"), later, resume)
    for start, results in ((0, whole), (SAVE_STEPS, resumed)):
        for found, norms, final in results:
            assert found == pytest.approx(losses[start:], rel=TOLERANCE)
            assert norms == results[0][1]
            assert max(relative_error(weight, weights[key]) for key, weight in final.items()) <= TOLERANCE
    for folder in ("whole", "again"):
        assert_folder(tmp_path / folder / f"checkpoint-{NUM_STEPS}", case, weights)


def assert_folder(folder: Path, case: ModelCase, weights: dict[str, torch.Tensor]) -> None:
    """Assert that plain PEFT loads the expected weights onto the base model, and finds equal logits."""
    assert not list(folder.glob("model*")) and not list(folder.glob("*.partial"))
    assert (folder / "training_args.bin").exists()
    lora = dict(case.lora)
    folders = {name: folder if name == "default" else folder / name for name in lora.get("names", ("default",))}
    first, *others = folders
    plain = build_model(replace(case, lora=()))
    found = peft.PeftModel.from_pretrained(plain, folders[first], first, autocast_adapter_dtype=False)
    for name in others:
        found.load_adapter(folders[name], name, autocast_adapter_dtype=False)
    found.base_model.set_adapter(list(folders)[: lora.get("num_active", 1)])
    expected = build_model(case)
    expected.load_state_dict(weights, strict=False)
    loaded = dict(found.named_parameters())
    assert loaded.keys() == weights.keys()
    assert max(relative_error(loaded[key].detach(), weight) for key, weight in weights.items()) <= TOLERANCE
    ids = torch.arange(1, 20).unsqueeze(0)
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids).logits for model in (found, expected)]
        # PEFT merges no biases of adapters
        logits.append((found if lora.get("lora_bias") else found.merge_and_unload())(input_ids=ids).logits)
    assert max(relative_error(logits[place], logits[1]) for place in (0, 2)) <= TOLERANCE
    with tempfile.TemporaryDirectory() as own_folder:
        expected.save_pretrained(own_folder)
        files = [{path.relative_to(each) for path in Path(each).rglob("adapter_*")} for each in (own_folder, folder)]
        assert files[0] == files[1]
        for file in (path for path in files[0] if path.suffix == ".safetensors"):
            own, saved = (load_file(Path(each, file)) for each in (own_folder, folder))
            assert own.keys() == saved.keys()
            assert max(relative_error(saved[key], weight) for key, weight in own.items()) <= TOLERANCE


@pytest.mark.wide
def test_shards_inside_stages_follow_one_plain_process(ranks, tmp_path: Path) -> None:
    case, config = ModelCase(promoted=True, lora=DORA), {**GATHERED, "stages": 2}
    losses, weights = plain_training(case, ROWS, 3)
    for found, _, final in ranks(4).run(train_with_norms, case, ROWS, str(tmp_path), config, {"max_steps": 3}):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert max(relative_error(weight, weights[key]) for key, weight in final.items()) <= TOLERANCE


def with_adapters(model: Any, seed: int = 3) -> Any:
    """Adapters in fp32, as `get_peft_model` makes them, whose weights depend on their names alone."""
    model = adapted(model, autocast=True, r=2, target_modules="all-linear")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def mixed_run(folder: str, name: str, settings: dict[str, Any], is_loaded: bool) -> tuple[list[float], float, float, set[str]]:
    """Losses of bf16 weights under fp32 adapters, on rows after it and as the best model again, and dtypes of what is trained."""
    args = training_arguments(f"{folder}/{name}", max_steps=3, per_device_train_batch_size=4)
    config = LongContextConfig(report_steps=False, timeline_steps=0, **settings)
    base = load_pipeline_stage(folder, config) if is_loaded else transformers.AutoModelForCausalLM.from_pretrained(folder)
    if is_loaded:
        # imitate an earlier trainer of the base model
        patch_model(base)
    recorder = LossRecorder()
    rows = datasets.Dataset.from_list(ROWS)
    trainer = LongContextTrainer(
        model=with_adapters(base), args=args, train_dataset=rows, eval_dataset=rows.select(range(7)), longctx_config=config
    )
    recorder.attach(trainer)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.detach().zero_()
    trainer.state.best_model_checkpoint = args.output_dir
    trainer._load_best_model()
    return recorder.losses, loss, trainer.evaluate()["eval_loss"], {str(parameter.dtype) for parameter in trained}


def start_with_other_adapters(folder: str) -> str:
    """Why a run does not start whose ranks draw adapters of their own on a stage that they loaded."""
    args = training_arguments(f"{folder}/out")
    config = LongContextConfig(**STAGES)
    model = with_adapters(load_pipeline_stage(folder, config), seed=args.process_index)
    try:
        LongContextTrainer(model=model, args=args, train_dataset=datasets.Dataset.from_list(ROWS), longctx_config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_a_stage_with_other_adapters_are_told(ranks, tmp_path: Path) -> None:
    build_model(ModelCase(dtype=torch.float32)).save_pretrained(tmp_path)
    for error in ranks(4).run(start_with_other_adapters, str(tmp_path)):
        for stage in (0, 1):
            assert f"initial weights differ between the ranks of stage {stage}; call set_seed(...) with one number" in error


@pytest.mark.wide
def test_adapters_in_fp32_train_over_weights_in_bf16(ranks, tmp_path: Path) -> None:
    build_model(ModelCase(dtype=torch.bfloat16, tied=True)).save_pretrained(tmp_path)
    whole = ranks(2).run(mixed_run, str(tmp_path), "whole", STAGES, False)
    # the layers are the same, since they are dealt out by the same costs
    assert ranks(2).run(mixed_run, str(tmp_path), "loaded", STAGES, True) == whole
    sharded = ranks(2).run(mixed_run, str(tmp_path), "sharded", SHARDED, False)
    for losses, loss, best, dtypes in (*whole, *sharded):
        assert losses == pytest.approx(whole[0][0], rel=0.01)
        assert loss == best == pytest.approx(whole[0][1], rel=0.01)
        assert dtypes == {"torch.float32"}
    for name in ("whole", "loaded", "sharded"):
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        found = peft.PeftModel.from_pretrained(base, tmp_path / name, is_trainable=True)
        saved = load_file(tmp_path / name / "adapter_model.safetensors")
        weights = peft.get_peft_model_state_dict(found, save_embedding_layers=False)
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weights[key], value) for key, value in saved.items())
        assert reference_step(found, ROWS[:7])[0] == pytest.approx(whole[0][1], rel=0.01)

"""Adapters beside frozen weights of four bits (QLoRA): losses and gradients of plain transformers and PEFT on the same weights.

Products of four-bit weights are fp32 islands in these fp64 models: what differs in the last bit before one may differ by 6e-8
behind it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.measures.engine_steps import EngineStep
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, adapted, build_model, in_four_bits
from helpers.models.versions import resuming
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.pipeline_steps import stage_step_on_rank
from helpers.ranks.rank_steps import run_step, whole
from helpers.trainers.stock_runs import run_alone
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, plain_training
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import BitsAndBytesConfig

from hf_longctx import LongContextConfig
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.quantised import four_bit_layers, in_full, largest_packed
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.rules.models import model_problems
from hf_longctx.hf.start.stages import checkpoint_config, load_stage
from hf_longctx.hf.trainer.row_scores import plain_scores
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import LayerPolicy, LayerRange, TensorShare
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.model_spec import PackedSpec
from hf_longctx.recipes.sft import RecipeArguments, load_model, with_adapters

bitsandbytes = pytest.importorskip("bitsandbytes")

ISLANDS = 2e-6
LORA = (("r", 2), ("target_modules", "all-linear"))
DORA = (("r", 2), ("use_dora", True), ("use_rslora", True), ("target_modules", ["q_proj", "down_proj"]))
CASE = ModelCase(promoted=True, lora=LORA, four_bit="nf4")
LENGTHS = [13, 1, 31, 7]
ROWS = random_rows(LENGTHS)


def share(name: Any, recompute: float = 0.0) -> TensorShare:
    return TensorShare(name, recompute=recompute, device=1 - recompute)


POLICIES = {
    "recompute": LayerPolicy((share("attention_output", 1.0), share("qkv", 1.0), share("mlp", 1.0))),
    "half": LayerPolicy((share("attention_output", 0.25), share("qkv", 1.0), share("mlp", 0.5))),
}


@pytest.mark.parametrize(("kind", "name", "tile_tokens"), [("nf4", "recompute", 8), ("fp4", "half", 0)])
def test_with_products_in_fp64_all_gradients_are_exact(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, tile_tokens: int
) -> None:
    def product(x: Tensor, weight: Any, quant_state: Any, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, bitsandbytes.functional.dequantize_4bit(weight.data, quant_state).double(), bias)

    def build() -> Any:
        model = build_model(replace(CASE, four_bit=kind))
        for layer in four_bit_layers(model).values():
            layer.compute_dtype = torch.float64
        return model

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", product)
    step = EngineStep(None, LENGTHS, build)
    # their outputs are made again
    assert not step.engine.can_keep_qkv
    loss, _ = step.forward((POLICIES[name],) * 2, tile_tokens)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=1e-12)
    assert step.error() <= 1e-12


def ready() -> None:
    """Takes the package's time to import, which is no part of any step's time limit."""
    import bitsandbytes  # noqa: F401


@pytest.fixture
def pair(ranks) -> Any:
    pool = ranks(2)
    pool.run(ready, timeout_s=280.0)
    return pool


# name -> plan on two ranks
PLANS = {
    "groups": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2),
    "shards, a ring": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2, 1, parameters="sharded"),
    "gathered": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2, parameters="gathered_per_round"),
    "slices": sliced_plan(LENGTHS, [[(0, 0, 13), (1, 0, 1)], *([span] for span in cut(2, [9, 15, 7])), [(3, 0, 7)]], num_ranks=2),
}


def assert_equal(results: list[Any], case: ModelCase = CASE) -> None:
    loss, gradients = reference_step(build_model(case), ROWS)
    for found, own, *_ in results:
        assert found == pytest.approx(loss, rel=ISLANDS)
        assert own and own.keys() <= gradients.keys()
        assert max(relative_error(gradient, gradients[name]) for name, gradient in own.items()) <= ISLANDS
    assert set().union(*(own for _, own, *_ in results)) == gradients.keys()


@pytest.mark.parametrize("name", PLANS)
def test_plans_match_one_plain_process(pair, name: str) -> None:
    case = replace(CASE, lora=DORA) if name == "gathered" else CASE
    assert_equal(run_step(pair, case, PLANS[name], ROWS), case)


def test_stages_match_one_plain_process(pair) -> None:
    chunks = [[(0, 0, 13), (1, 0, 1)], *([span] for span in cut(2, [9, 15, 7])), [(3, 0, 7)]]
    plan = pipeline_plan(LENGTHS, [[(1, chunks)]], 2, num_layers=2)
    assert_equal(pair.run(stage_step_on_rank, CASE, plan_to_json(plan), ROWS))


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_step"])
def test_sharded_stages_match_one_plain_process(ranks, parameters: Any) -> None:
    slices = [[span] for span in cut(2, [9, 15, 7])]
    groups = [[(1, slices), (1, [[(0, 0, 13), (1, 0, 1)]])], [(2, [[(3, 0, 7)]])]]
    plan = pipeline_plan(LENGTHS, groups, 2, num_layers=2, parameters=parameters)
    pool = ranks(4)
    pool.run(ready, timeout_s=280.0)
    assert_equal(pool.run(stage_step_on_rank, CASE, plan_to_json(plan), ROWS, timeout_s=280.0))


def test_copies_of_nodes_match_one_plain_process(ranks) -> None:
    """Nodes of two ranks gather packed weights from parts of their copies."""
    groups = [[(2, [[span] for span in cut(2, [9, 15, 7])]), (1, [[(0, 0, 13), (1, 0, 1)]]), (1, [[(3, 0, 7)]])]]
    plan = pipeline_plan(LENGTHS, groups, 1, num_layers=2, parameters="gathered_per_node", node_ranks=2)
    pool = ranks(4)
    pool.run(ready, timeout_s=280.0)
    assert_equal(pool.run(stage_step_on_rank, CASE, plan_to_json(plan), ROWS, timeout_s=280.0))


def loaded(compute: torch.dtype = torch.float32, adapters: bool = True, **settings: Any) -> Any:
    """A tiny fp32 model as transformers loads it with such a quantization config, under LoRA if asked."""
    plain = build_model(ModelCase(dtype=torch.float32))
    quantised = BitsAndBytesConfig(**{"load_in_4bit": True, "bnb_4bit_compute_dtype": compute, **settings})
    weights = {name: weight.clone() for name, weight in plain.state_dict().items()}
    model = type(plain).from_pretrained(
        None, config=plain.config, state_dict=weights, dtype=torch.float32, quantization_config=quantised, device_map={"": "cpu"}
    )
    return get_peft_model(model, LoraConfig(**dict(LORA), task_type="CAUSAL_LM")).train() if adapters else model


def repacked() -> Any:
    """A model whose weights carry the mark of a forward for inference, which this CPU may not have."""
    model = loaded()
    next(iter(four_bit_layers(model).values())).weight.quant_state.packing_format_for_cpu = True
    return model


def bare() -> Any:
    model = loaded()
    layer = next(iter(four_bit_layers(model).values()))
    layer.weight.quant_state = None
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "eight bits": (lambda: loaded(load_in_4bit=False, load_in_8bit=True), "eight-bit weights (LLM.int8) are not supported"),
    "nothing to train": (lambda: loaded(adapters=False), "four-bit weights cannot be trained; put adapters beside them"),
    "fp64": (
        lambda: loaded(torch.float64),
        "products of four-bit weights are computed in torch.float64; load",
    ),
    "fp16": (lambda: loaded(torch.float16), "products of four-bit weights are computed in torch.float16"),
    "storage": (
        lambda: loaded(bnb_4bit_quant_storage=torch.bfloat16),
        "four-bit weights are stored as torch.bfloat16",
    ),
    "head": (lambda: loaded(llm_int8_skip_modules=["none"]), "the head is quantised, which is not tested; name it in llm_int8"),
    "repacked": (repacked, "a forward in evaluation mode has repacked the four-bit weights for inference on this CPU"),
    "no scales": (
        bare,
        "1 four-bit layers have no scales yet (the first is base_model.model.model.layers.0.self_attn.q_proj.base_layer)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_tested_or_silently_wrong_is_refused(name: str) -> None:
    build, said = REFUSED[name]
    (problem,) = model_problems(ModelFacts.of(build()))
    assert problem.startswith(said)


def test_other_checkpoints_are_refused_for_stages(tmp_path: Path) -> None:
    model = build_model(ModelCase(dtype=torch.float32))
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is quantised by gptq; only four bits by bitsandbytes, experts in MXFP4 and fp8"):
        checkpoint_config(str(tmp_path))


def test_a_model_prepared_as_peft_says_is_taken_but_for_its_checkpointing() -> None:
    def prepared(checkpointing: bool = False) -> Any:
        model = in_four_bits(build_model(ModelCase(dtype=torch.bfloat16)), "nf4")
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
        return adapted(model, autocast=True, **dict(LORA)).train()

    (problem,) = model_problems(ModelFacts.of(prepared(True)))
    assert "gradient_checkpointing_disable()" in problem
    model = prepared()
    assert model_problems(ModelFacts.of(model)) == []
    assert model_spec(model).bytes_per_element == 4
    step = EngineStep(None, LENGTHS, prepared)
    loss, _ = step.forward((POLICIES["half"],) * 2)
    loss.backward()
    # products round to bf16 what differs in the last bit of fp32
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=1e-3)
    assert step.error() <= 0.03


def test_stages_of_four_bit_weights_are_not_lent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lend_stages=True is not tested with four-bit weights; load them in bfloat16"):
        make_trainer(CASE, ROWS, str(tmp_path), {"stages": 2, "lend_stages": True})


def evaluate_patched(model: Any) -> None:
    patch_model(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([ROWS[0]["input_ids"]]))


def score_plain(model: Any) -> None:
    assert np.isfinite(plain_scores(model, ROWS, 0, 1, torch.device("cpu")).losses).all()


@pytest.mark.parametrize("evaluate", [evaluate_patched, score_plain])
def test_evaluating_leaves_weights_as_they_are(evaluate: Any) -> None:
    model, untouched = build_model(CASE), build_model(CASE)
    evaluate(model)
    assert model_problems(ModelFacts.of(model)) == []
    (_, found), (_, expected) = (reference_step(each.train(), ROWS) for each in (model, untouched))
    assert max(relative_error(found[name], gradient) for name, gradient in expected.items()) <= ISLANDS


def test_biases_get_the_dtype_of_products_before_the_first_one() -> None:
    model = build_model(ModelCase("qwen2", lora=LORA, four_bit="fp4"))
    biases = [layer.bias for layer in four_bit_layers(model).values() if layer.bias is not None]
    assert {bias.dtype for bias in biases} == {torch.float64}
    patch_model(model)
    assert len(biases) == 6 and {bias.dtype for bias in biases} == {torch.float32}
    assert model_problems(ModelFacts.of(model)) == []


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_in_full_are_those_of_the_products(kind: str) -> None:
    model = build_model(ModelCase("qwen2", lora=LORA, four_bit=kind, dtype=torch.float32))
    for layer in four_bit_layers(model).values():
        x = torch.randn(5, layer.in_features)
        assert relative_error(in_full(layer)(x), layer(x)) <= 1e-6


def test_a_stage_has_the_hidden_states_of_the_model_and_not_of_adapters() -> None:
    model = build_model(ModelCase(dtype=torch.bfloat16, four_bit="nf4"))
    model = adapted(model, autocast=True, **dict(LORA))
    ranges = ((LayerRange(0, 1),), (LayerRange(1, 1),))
    # its first weight that is no integer is one of the adapters, in fp32
    cut_model(model, ranges, 1)
    assert stage_model(model, ranges, 1).hidden_dtype == torch.bfloat16
    assert model_spec(model).bytes_per_element == 2


def test_plans_count_the_bytes_that_lie_in_memory() -> None:
    found = model_spec(build_model(replace(CASE, dtype=torch.float32)))
    plain = model_spec(build_model(ModelCase(dtype=torch.float32)))
    # q and o of 32 by 32, k and v of 16 by 32, three of 48 by 32
    matrices = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    # half a byte each, and two norms
    assert found.packed.layer_bytes == matrices // 2 + 2 * 32 * 4
    # seven matrices: a byte for 64 elements, one fp32 scale of these and an offset, tables of 16 and of 256 values
    assert found.packed.layer_scale_bytes == matrices // 64 + 7 * (4 + 4 + 16 * 4 + 256 * 4)
    assert found.packed.unpacked_bytes == 48 * 32 * 4
    assert (found.num_parameters, found.idle_parameters) == (plain.num_parameters, 0)
    trained, _ = found.adapters.sizes(2, True, True)
    weights = 2 * found.packed.layer_bytes + 2 * 64 * 32 * 4
    # on every rank, however weights live
    beside = 2 * found.packed.layer_scale_bytes + found.packed.unpacked_bytes
    assert ByteModel(found).states() == weights + trained * (4 + 4 + 8) + beside < ByteModel(plain).states()
    # adapters of one of two layers: gradients as they arise, as they are sent, as they are received, and half of their sum
    in_flight = trained // 2 * (4 + 4 + 4 + 4 // 2)
    shards = (weights + trained * (4 + 4 + 8)) // 2
    assert ByteModel(found).states("sharded", 2) == shards + weights + trained * 4 + in_flight + beside
    # the dtype of hidden states, not of bytes
    assert found.adapters.attention_saved_bytes + found.adapters.mlp_saved_bytes == 7 * 2 * 4
    assert largest_packed([PackedSpec(3, 1, 2), PackedSpec(1, 4, 2)]) == PackedSpec(3, 4, 2)


def test_a_stage_is_read_or_made_of_its_own_tensors(tmp_path: Path) -> None:
    plain = build_model(ModelCase(dtype=torch.float32))
    plain.save_pretrained(tmp_path)
    whole = in_four_bits(plain, "nf4")
    whole.save_pretrained(tmp_path / "packed")
    expected = whole.state_dict()
    ranges = ((LayerRange(0, 1),), (LayerRange(1, 1),))
    for folder, settings in ((tmp_path, {"quantization_config": whole.config.quantization_config}), (tmp_path / "packed", {})):
        for stage in (0, 1):
            found = load_stage(str(folder), ranges, stage, torch.float32, device_map={"": "cpu"}, **settings)
            assert len(four_bit_layers(found)) == 7
            weights = found.state_dict()
            assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
            assert not any(f"layers.{1 - stage}" in name for name in weights)


TRAINED = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 2)
TRAINING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
SHARDED = {"tokens_per_rank": 48, "parameters": "sharded"}
STAGES = {"tokens_per_rank": 96, "stages": 2}


def train(folder: str, config: dict[str, Any], resume: str | None) -> tuple[str, list[float], dict[str, Tensor]]:
    """Messages at start, losses and adapters of a run on this rank that evaluates before it trains."""
    trainer = make_trainer(CASE, TRAINED, folder, {"self_test": True, **config}, TRAINING, eval_dataset=held_out())
    before = trainer.evaluate()["eval_loss"]
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    found = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer.longctx_run.report.opening, [before, *recorder.losses], found


def held_out() -> datasets.Dataset:
    return datasets.Dataset.from_list(TRAINED[:3])


@resuming
def test_runs_follow_one_plain_process_and_plain_peft_loads_their_adapters(pair, tmp_path: Path) -> None:
    losses, weights = plain_training(CASE, TRAINED, 4)
    before = reference_step(build_model(CASE), TRAINED[:3])[0]
    whole_run = pair.run(train, str(tmp_path / "shards"), SHARDED, None)
    resumed = pair.run(train, str(tmp_path / "stages"), STAGES, str(tmp_path / "shards" / "checkpoint-2"))
    for start, results in ((0, whole_run), (2, resumed)):
        for opening, found, adapters in results:
            assert "tokens in float64 with four-bit weights unpacked and the run's precision" in opening
            # AdamW makes steps of one size of gradients that differ in their last bits
            assert found == pytest.approx([before, *losses[start:]], rel=1e-5)
            assert max(relative_error(weight, weights[name]) for name, weight in adapters.items()) <= 1e-4
    for folder in ("shards", "stages"):
        base = build_model(replace(CASE, lora=()))
        found = PeftModel.from_pretrained(base, tmp_path / folder / "checkpoint-4", autocast_adapter_dtype=False).train()
        assert max(relative_error(p.detach(), weights[name]) for name, p in found.named_parameters() if "lora_" in name) <= 1e-4


def test_products_that_depend_on_the_rows_of_a_call_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = bitsandbytes.matmul_4bit

    def dependent(x: Tensor, *rest: Any, **settings: Any) -> Tensor:
        # imitate a change by outliers of other documents
        return product(x, *rest, **settings) * (1.0 + 1e-2 * (x.shape[-2] > 80))

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", dependent)
    with pytest.raises(ValueError, match=r"one rank: hidden states: layer 0 .* is the first that differs"):
        make_trainer(CASE, TRAINED, str(tmp_path), {"self_test": True, "tokens_per_rank": 200})


def test_the_callback_on_a_stock_trainer_matches_one_plain_process(pair) -> None:
    stock = run_alone(CASE, TRAINED, None, {"max_steps": 2})
    for run in pair.run(run_alone, CASE, TRAINED, {"tokens_per_rank": 96}, {"max_steps": 2}):
        assert run.layouts
        assert max(relative_error(weight, stock.weights[name]) for name, weight in run.weights.items()) <= 1e-4


def test_the_recipe_loads_a_checkpoint_in_four_bits_under_adapters(tmp_path: Path) -> None:
    build_model(ModelCase(dtype=torch.float32)).save_pretrained(tmp_path)
    recipe = RecipeArguments(model_name_or_path=str(tmp_path), dataset="x", lora_rank=2, load_in_4bit=True, dtype="bfloat16")
    model = with_adapters(load_model(recipe, LongContextConfig()), recipe)
    assert model_problems(ModelFacts.of(model)) == []
    layers = four_bit_layers(model)
    assert len(layers) == 14 and {layer.compute_dtype for layer in layers.values()} == {torch.bfloat16}
    assert {layer.weight.quant_state.quant_type for layer in layers.values()} == {"nf4"}
    assert model_spec(model).bytes_per_element == 2

"""Frozen weights rounded to fp8 below adapters: plans against plain PEFT on the same rounded weights.

With unpacked weights and products in fp64, gradients are exact. In fp8 any difference of an input's last bit may change one of
its three bits of mantissa, so there plans are compared by their distance from fp64.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.measures.engine_steps import EngineStep
from helpers.models.fp8_in_full import exact_step_on_rank, in_fp64
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, adapted, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import replayed
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.trainers.trainer_runs import make_trainer
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8

from hf_longctx.hf.models.low_rank import bind_adapters
from hf_longctx.hf.models.packed_experts import pack_experts
from hf_longctx.hf.models.quantised import (
    ROUNDED,
    block_layers,
    fp8_layers,
    in_full,
    keep_blocks,
    packed_spec,
    quantised_problems,
    round_frozen,
    rounding_problems,
)
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import LayerPolicy, TensorShare
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.model_spec import PackedSpec
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core import fp8

CPU = torch.device("cpu")
LORA = (("r", 4), ("target_modules", "all-linear"))
CASE = ModelCase(promoted=True, lora=LORA)
BIASED = replace(CASE, family="qwen2")
LENGTHS = [13, 1, 31, 7]
ROWS = random_rows(LENGTHS)


def rounded_model(case: ModelCase = CASE) -> Any:
    model = build_model(replace(case, fp8=True))
    generator = torch.Generator().manual_seed(4)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            # the class makes them zero
            each.data = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype)
    return model


def share(name: Any, recompute: float = 0.0) -> TensorShare:
    return TensorShare(name, recompute=recompute, device=1 - recompute)


POLICIES = {
    "keep": LayerPolicy((share("attention_output"), share("qkv"), share("mlp"))),
    "recompute": LayerPolicy((share("attention_output", 1.0), share("qkv", 1.0), share("mlp", 1.0))),
    "half": LayerPolicy((share("attention_output", 0.25), share("qkv", 0.5), share("mlp", 0.5))),
    "host": replayed(0.25, 0.5, mlp=0.5, input_host=0.5),
}


@pytest.fixture(name="in_fp64")
def products_in_fp64() -> Any:
    with in_fp64():
        yield


def test_matrices_of_layers_are_rounded_and_no_others() -> None:
    before = build_model(replace(CASE, dtype=torch.bfloat16))
    model = rounded_model(replace(CASE, dtype=torch.bfloat16))
    found = fp8_layers(model)
    assert len(found) == 14 and {name.removesuffix(".base_layer").rpartition(".")[2] for name in found} == {*ROUNDED}
    own, rest = dict(before.named_modules()), dict(before.named_parameters())
    for name, layer in found.items():
        full = in_full(layer).weight
        assert full.dtype == torch.float32 and relative_error(full, own[name].weight.float()) < 0.04
        assert not layer.weight.requires_grad and not layer.scale.requires_grad
    packed = {id(each) for layer in found.values() for each in layer.parameters()}
    for name, weight in model.named_parameters():
        if id(weight) not in packed:
            assert torch.equal(weight, rest[name]) and weight.requires_grad == rest[name].requires_grad


def test_a_matrix_without_an_adapter_is_rounded_too() -> None:
    model = rounded_model(replace(CASE, dtype=torch.bfloat16, lora=(("r", 2), ("target_modules", ["q_proj"]))))
    assert len(fp8_layers(model)) == 14


@pytest.mark.daily("half-0")
@pytest.mark.parametrize(("name", "tile_tokens"), [("recompute", 8), ("half", 0), ("half", 5), ("host", 0), ("host", 5)])
def test_with_products_in_fp64_all_gradients_are_exact(in_fp64: None, name: str, tile_tokens: int) -> None:
    step = EngineStep(HostTier.on(CPU, 2**20) if name == "host" else None, LENGTHS, rounded_model)
    assert step.engine.can_keep_qkv
    undo = bind_adapters(step.model)
    loss, _ = step.forward((POLICIES[name],) * 2, tile_tokens)
    loss.backward()
    for each in undo:
        each()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=1e-12)
    assert step.error() <= 1e-12


@pytest.mark.daily("recompute-all")
@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("name", ["recompute", "half"])
def test_gradients_beside_biases_are_exact_whether_these_are_trained_or_not(in_fp64: None, name: str, bias: str) -> None:
    step = EngineStep(None, LENGTHS, lambda: rounded_model(replace(BIASED, lora=(*LORA, ("bias", bias)))))
    undo = bind_adapters(step.model)
    loss, _ = step.forward((POLICIES[name],) * 2, 5)
    loss.backward()
    for each in undo:
        each()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=1e-12)
    trained = [key for key, each in step.model.named_parameters() if key.endswith("bias") and each.grad is not None]
    assert len(trained) == (6 if bias == "all" else 0)
    assert step.error() <= 1e-12


@pytest.mark.daily("BIASED")
@pytest.mark.parametrize("case", ["CASE", "BIASED"])
def test_with_products_in_fp64_the_rounded_model_is_that_of_unpacked_weights(in_fp64: None, case: str) -> None:
    given = {"CASE": CASE, "BIASED": BIASED}[case]
    found_and_expected = (reference_step(each, ROWS) for each in (rounded_model(given), in_full_model(given)))
    (loss, found), (expected_loss, expected) = found_and_expected
    # these are unpacked to fp32
    assert loss == pytest.approx(expected_loss, rel=1e-7)
    assert max(relative_error(found[name], each) for name, each in expected.items()) <= 1e-6


def in_full_model(case: ModelCase) -> Any:
    """The rounded model in fp64, with plain linear modules."""
    model = rounded_model(case)
    for name, layer in fp8_layers(model).items():
        place, _, own = name.rpartition(".")
        setattr(model.get_submodule(place), own, in_full(layer))
    return model.double()


def gradients(model: Any, rows: Any = ROWS) -> dict[str, Tensor]:
    return {name: each.double() for name, each in reference_step(model, rows)[1].items()}


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    one, other = (torch.cat([each[name].flatten() for name in exact]) for each in (found, exact))
    return float((one - other).norm() / other.norm())


def test_gradients_in_fp8_are_close_to_the_rounded_model_in_fp64_and_adapters_share_inputs() -> None:
    case = replace(CASE, dtype=torch.bfloat16)
    model = rounded_model(case)
    expected = gradients(in_full_model(case))
    plain = distance(gradients(model), expected)
    undo = bind_adapters(model)
    ours = distance(gradients(model), expected)
    for each in undo:
        each()
    # this model has large gradients, of which bf16 loses a tenth
    assert 0.05 < plain < 0.5
    # one rounding of a sum in place of a sum of rounded ones
    assert ours <= 1.3 * plain


@pytest.mark.wide
def test_replays_repeat_the_same_bits_and_parts_are_as_close_to_fp64_as_the_whole() -> None:
    case = replace(CASE, dtype=torch.bfloat16)
    expected = gradients(in_full_model(case))
    found = []
    for name, tile_tokens in (("keep", 0), ("recompute", 0), ("half", 0), ("recompute", 7)):
        step = EngineStep(None, LENGTHS, lambda: rounded_model(case))
        loss, _ = step.forward((POLICIES[name],) * 2, tile_tokens)
        loss.backward()
        own = {key: each.grad.double() for key, each in step.model.named_parameters() if each.grad is not None}
        found.append((float(loss.detach()), own))
    (kept_loss, kept), (again_loss, again), *_ = found
    assert kept_loss == again_loss and all(torch.equal(kept[key], each) for key, each in again.items())
    distances = [distance(own, expected) for _, own in found]
    assert max(distances) <= 1.3 * distances[0]


def build(change: Any = None, **settings: Any) -> Any:
    model = build_model(ModelCase(**{"dtype": torch.bfloat16, **settings}))
    lora = settings.get("lora")
    model = model if lora is not None else adapted(model, **dict(LORA))
    if change is not None:
        change(model)
    return model


def layer_of(model: Any) -> Any:
    return model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")


REFUSED: dict[str, tuple[Any, str]] = {
    "no adapters": (lambda: build(lora=()), "frozen_weights='fp8' rounds weights that are not trained, but the model has no"),
    "a trained matrix": (
        lambda: build(lambda model: layer_of(model).weight.requires_grad_()),
        "frozen_weights='fp8' cannot round base_model.model.model.layers.0.self_attn.q_proj.base_layer, whose weight is trained",
    ),
    "a hook": (
        lambda: build(lambda model: layer_of(model).register_forward_hook(lambda *_: None)),
        "q_proj.base_layer, which has hooks",
    ),
    "a forward": (
        lambda: build(lambda model: setattr(layer_of(model), "forward", lambda x: x)),
        "q_proj.base_layer, which has a forward that is not its class's",
    ),
    "DoRA": (
        lambda: build(lora=(("r", 2), ("use_dora", True), ("target_modules", ["q_proj"]))),
        "q_proj.base_layer, from whose weight its adapter (DoRA or another variant) computes",
    ),
    "experts in four bits": (
        lambda: build(lambda model: pack_experts(model, "nf4"), family="qwen3_moe"),
        "frozen_weights='fp8' is not tested over packed experts (pack_experts); leave",
    ),
    "fp32": (
        lambda: build(dtype=torch.float32),
        "frozen_weights='fp8' computes in bf16, but the model is in torch.float32; load",
    ),
    "sizes": (
        lambda: build(num_heads=3, num_kv_heads=3),
        "q_proj.base_layer of shape (24, 24), since operators in fp8 take multiples of 16",
    ),
    "no such matrices": (
        lambda: build(family="mamba", lora=(("r", 2), ("target_modules", ["in_proj"]))),
        "frozen_weights='fp8' finds no matrix named q_proj, k_proj",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rounded_is_refused_by_name(name: str) -> None:
    make, said = REFUSED[name]
    (problem,) = rounding_problems(make(), CPU, is_autocast=False)
    assert said in problem


def test_autocast_lets_a_model_in_fp32_be_rounded() -> None:
    assert rounding_problems(build(dtype=torch.float32), CPU, is_autocast=True) == []
    assert rounding_problems(build(), CPU, is_autocast=False) == []


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_devices_without_operators_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = rounding_problems(build(), torch.device("cuda"), is_autocast=False)
    assert bool(found) == is_refused and all("compute capability 8.9 or later" in each and "8.6" in each for each in found)


def test_plans_count_the_bytes_that_lie_in_memory() -> None:
    model = build()
    plain = model_spec(model)
    round_frozen(model)
    found = model_spec(model)
    matrices, rows = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32, 2 * 32 + 2 * 16 + 2 * 48 + 32
    # a byte each, fp32 scales of rows, and two norms
    assert found.packed.layer_bytes == matrices + 4 * rows + 2 * 32 * 2
    assert found.packed.layer_scale_bytes == 0 and found.packed.unpacked_bytes == 2 * 48 * 32 + fp8.MULTIPLIED
    assert (found.num_parameters, found.idle_parameters) == (plain.num_parameters, 0)
    assert found.bytes_per_element == 2 and found.can_keep_qkv and not found.cuts_heads
    assert found.adapters == replace(plain.adapters, cut_bytes=0)
    # a forecast counts no norms
    forecast = PackedSpec.fp8(replace(plain, bytes_per_element=2))
    assert replace(forecast, layer_bytes=forecast.layer_bytes + 2 * 32 * 2) == found.packed
    beside = packed_spec(model).unpacked_bytes
    gained = 2 * (2 * matrices - matrices - 4 * rows - 2 * 32 * 2)
    assert ByteModel(plain).states() - (ByteModel(found).states() - beside) == gained


def test_the_error_of_inputs_in_fp64_names_the_remedy() -> None:
    model = rounded_model()
    with pytest.raises(ValueError, match="load the model in bfloat16, or train with bf16=True"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.fixture
def pair(ranks: Any) -> Any:
    return ranks(2)


CHUNKS = [[(0, 0, 13), (1, 0, 1)], *([span] for span in cut(2, [9, 15, 7])), [(3, 0, 7)]]
# name -> plan on two ranks
PLANS = {
    "groups": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2),
    "shards, a ring": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2, 1, parameters="sharded"),
    "gathered": plan_of([[(1, (0, 1)), (1, (3,))], [(2, (2,))]], LENGTHS, 2, parameters="gathered_per_step"),
    "slices": sliced_plan(LENGTHS, CHUNKS, num_ranks=2),
    "stages": pipeline_plan(LENGTHS, [[(1, CHUNKS)]], 2, num_layers=2),
}


def assert_equal(results: list[Any], case: ModelCase = CASE) -> None:
    with in_fp64():
        loss, expected = reference_step(build_model(replace(case, fp8=True)), ROWS)
    for found, own in results:
        assert found == pytest.approx(loss, rel=1e-12)
        assert own and max(relative_error(each, expected[name]) for name, each in own.items()) <= 1e-12
    assert set().union(*(own for _, own in results)) == expected.keys()


@pytest.mark.daily("stages")
@pytest.mark.parametrize("name", PLANS)
def test_plans_on_ranks_are_exact(pair: Any, name: str) -> None:
    case = replace(CASE, fp8=True)
    assert_equal(pair.run(exact_step_on_rank, case, plan_to_json(PLANS[name]), ROWS, name == "stages"))


@pytest.mark.daily("stages")
@pytest.mark.parametrize("name", ["shards, a ring", "stages"])
def test_plans_on_ranks_are_exact_beside_trained_biases(pair: Any, name: str) -> None:
    case = replace(BIASED, lora=(*LORA, ("bias", "all")))
    assert_equal(pair.run(exact_step_on_rank, replace(case, fp8=True), plan_to_json(PLANS[name]), ROWS, name == "stages"), case)


@pytest.mark.wide
def test_sharded_stages_are_exact(ranks: Any) -> None:
    groups = [[(1, [[span] for span in cut(2, [9, 15, 7])]), (1, [[(0, 0, 13), (1, 0, 1)]])], [(2, [[(3, 0, 7)]])]]
    plan = pipeline_plan(LENGTHS, groups, 2, num_layers=2, parameters="sharded")
    assert_equal(ranks(4).run(exact_step_on_rank, replace(CASE, fp8=True), plan_to_json(plan), ROWS, True, timeout_s=280.0))


def test_copies_of_nodes_are_exact(ranks: Any) -> None:
    groups = [[(2, [[span] for span in cut(2, [9, 15, 7])]), (1, [[(0, 0, 13), (1, 0, 1)]]), (1, [[(3, 0, 7)]])]]
    plan = pipeline_plan(LENGTHS, groups, 1, num_layers=2, parameters="gathered_per_node", node_ranks=2)
    assert_equal(ranks(4).run(exact_step_on_rank, replace(CASE, fp8=True), plan_to_json(plan), ROWS, True, timeout_s=280.0))


def of_blocks(dtype: torch.dtype = torch.bfloat16, lora: bool = True, family: str = "llama", **changes: Any) -> Any:
    """A model with linear modules of transformers in fp8, a scale for each block of 16 by 16, as it loads such checkpoints."""
    model = build_model(ModelCase(family, promoted=True, dtype=dtype))
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = FineGrainedFP8Config(weight_block_size=(16, 16), **changes)
    model = finegrained_fp8.replace_with_fp8_linear(model, ["lm_head"], config, True)
    generator = torch.Generator().manual_seed(9)
    for name, layer in block_layers(model).items():
        layer.weight = torch.nn.Parameter(weights[f"{name}.weight"].to(fp8.DTYPE), requires_grad=False)
        scale = torch.rand(layer.weight_scale_inv.shape, generator=generator) + 0.5
        layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
        if layer.bias is not None:
            drawn = torch.randn(layer.bias.shape, generator=generator).to(dtype)
            layer.bias = torch.nn.Parameter(drawn, requires_grad=False)
    # PEFT would give adapters the dtype of the bytes' numbers
    return adapted(model, autocast=True, **dict(LORA)).train() if lora else model


def dequantised(dtype: torch.dtype, family: str = "llama") -> Any:
    """That model with weights in plain modules, as transformers unpacks them."""
    model = of_blocks(dtype, family=family)
    for name, layer in block_layers(model).items():
        place, _, own = name.rpartition(".")
        full = finegrained_fp8._dequantize_fp8_weight(layer.weight, layer.weight_scale_inv, layer.block_size, dtype)
        linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype)
        linear.weight, linear.bias = torch.nn.Parameter(full, requires_grad=False), layer.bias
        setattr(model.get_submodule(place), own, linear)
    return model.to(dtype)


@pytest.mark.daily("qwen2")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_of_published_checkpoints_are_kept_and_unpacked_without_a_second_rounding(family: str) -> None:
    model = of_blocks(torch.float64, family=family)
    before = {name: layer.weight.view(torch.uint8).clone() for name, layer in block_layers(model).items()}
    assert quantised_problems(model) == []
    keep_blocks(model)
    found = fp8_layers(model)
    assert before.keys() == found.keys() and len(found) == 14 and not block_layers(model)
    assert all(torch.equal(layer.weight, before[name]) for name, layer in found.items())
    adapters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for each in adapters.values():
        each.data = each.data.double()
    loss, own = reference_step(model, ROWS)
    plain_loss, expected = reference_step(dequantised(torch.float64, family), ROWS)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    assert max(relative_error(own[name], each) for name, each in expected.items()) <= 1e-12


REFUSED_BLOCKS: dict[str, tuple[Any, str]] = {
    "no adapters": (lambda: of_blocks(lora=False), "weights in fp8 cannot be trained; put adapters beside them"),
    "one scale for inputs": (
        lambda: of_blocks(activation_scheme="static"),
        "or for all inputs, which is not tested",
    ),
    "a hook": (lambda: with_hook(of_blocks()), "q_proj.base_layer has hooks"),
}


def with_hook(model: Any) -> Any:
    layer_of(model).register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("name", REFUSED_BLOCKS)
def test_blocks_that_are_not_tested_are_refused(name: str) -> None:
    make, said = REFUSED_BLOCKS[name]
    (problem,) = quantised_problems(make())
    assert said in problem


def test_blocks_are_not_rounded_again() -> None:
    (problem,) = rounding_problems(of_blocks(), CPU, is_autocast=True)
    assert "q_proj.base_layer, which is a FP8Linear and no plain linear module" in problem


@pytest.mark.wide
def test_a_training_over_blocks_passes_the_self_test(tmp_path: Path) -> None:
    model = of_blocks()
    expected = {name: layer.weight.view(torch.uint8).clone() for name, layer in block_layers(model).items()}
    rows = random_rows([61, 13, 5, 8, 21, 34, 3, 9])
    settings = {"self_test": True, "tokens_per_rank": 96}
    trainer = make_trainer(CASE, rows, str(tmp_path), settings, {"max_steps": 2, "bf16": True}, model=model)
    assert "with fp8 weights unpacked and the run's precision" in trainer.longctx_run.report.opening
    trainer.train()
    layers = fp8_layers(trainer.model)
    assert expected.keys() == layers.keys() and all(torch.equal(expected[name], each.weight) for name, each in layers.items())
    spec = model_spec(trainer.model, is_autocast=True)
    assert spec.packed.fp8_parameters == 0 and not spec.packed.is_empty

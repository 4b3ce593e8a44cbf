"""Adapters on attention in pieces of heads: loss and gradients equal plain PEFT, or pieces are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, adapted, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import check_step
from runtime.activations.test_head_pieces import LENGTHS, LLAMA, ORDER, PIECES, check_equal, packed, step
from torch import Tensor, nn

from hf_longctx.hf.models.layers import cuts_heads
from hf_longctx.plan.core.types import LayerPolicy, TensorShare

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = ("target_modules", (*PROJECTIONS, "gate_proj", "down_proj"))
DROPS = ("lora_dropout", 0.3)
CASES: dict[str, tuple[tuple[str, Any], ...]] = {
    "all": (ALL,),
    "queries and values": (("target_modules", ("q_proj", "v_proj")),),
    "output": (("target_modules", ("o_proj",)),),
    "rank-stabilised": (ALL, ("use_rslora", True), ("r", 3), ("lora_alpha", 5)),
    "ranks by module": (ALL, ("rank_pattern", {"q_proj": 1, "o_proj": 7}), ("alpha_pattern", {"k_proj": 3})),
    "one layer": (("target_modules", PROJECTIONS), ("layers_to_transform", [1])),
    "dropout": (ALL, DROPS),
    "dropout of the output's input": (("target_modules", ("o_proj",)), DROPS),
}


def case(*lora: tuple[str, Any], **settings: Any) -> ModelCase:
    return replace(LLAMA, lora=(("r", 4), *lora), **settings)


@pytest.fixture(params=[0, 40], ids=["whole", "blocks"])
def elements(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of adapters' inputs that exist at a time: all, or those of one or two tokens."""
    if request.param:
        monkeypatch.setattr("hf_longctx.runtime.activations.adapted_projection.ADAPTER_ELEMENTS", request.param)
    return request.param


@pytest.mark.daily(
    "whole-queries and values",
    "whole-output",
    "whole-one layer",
    "whole-dropout of the output's input",
    "blocks-queries and values",
    "blocks-output",
    "blocks-one layer",
)
@pytest.mark.parametrize("name", CASES)
def test_adapters_in_pieces_get_the_gradients_of_plain_peft(name: str, elements: int) -> None:
    model = check_equal(lambda: build_model(case(*CASES[name])), packed(*PIECES), LENGTHS)
    assert any(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_A" in name)


@pytest.mark.daily("0-qwen2")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tile_tokens", [0, 8])
def test_other_families_run_adapters_in_pieces(family: str, tile_tokens: int) -> None:
    check_equal(lambda: build_model(case(ALL, DROPS, family=family)), packed(*PIECES, tile_tokens=tile_tokens), LENGTHS)


def biased() -> Any:
    """A model whose projections and second matrices have biases."""
    model = build_model(LLAMA)
    for layer in model.model.layers:
        for linear in (getattr(layer.self_attn, name) for name in PROJECTIONS):
            linear.bias = nn.Parameter(torch.linspace(-0.3, 0.4, linear.out_features, dtype=torch.float64))
    return adapted(model, r=3, lora_bias=True, lora_dropout=0.2, target_modules=list(PROJECTIONS)).train()


def test_biases_of_adapters_count_once() -> None:
    check_equal(biased, packed(*PIECES), LENGTHS)


def two_adapters() -> Any:
    """A model with two active adapters of other ranks and rates on other projections, the second of which is trained too."""
    model = build_model(case(("target_modules", ("q_proj", "o_proj")), DROPS))
    config = peft.LoraConfig(
        r=2, lora_alpha=7, lora_dropout=0.5, init_lora_weights=False, target_modules=["q_proj", "k_proj", "o_proj"]
    )
    torch.manual_seed(5)
    model.add_adapter("more", config, autocast_adapter_dtype=False)
    model.base_model.set_adapter(["default", "more"])
    return model.double().train()


def test_several_active_adapters_add_up() -> None:
    model = check_equal(two_adapters, packed(*PIECES), LENGTHS)
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None and ".more." in name]
    assert len(trained) == 12


def frozen_first(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name and "q_proj" not in name)


def trained_bases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)


@pytest.mark.daily("frozen_first")
@pytest.mark.parametrize("adapt", [frozen_first, trained_bases])
def test_frozen_and_trained_matrices_beside_adapters(adapt: Callable[[Any], None]) -> None:
    check_equal(lambda: build_model(case(ALL, DROPS)), packed(*PIECES), LENGTHS, adapt)


def test_disabled_adapters_add_nothing() -> None:
    def disable(model: Any) -> None:
        trained_bases(model)
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                # only the flag, since PEFT would freeze the adapters
                module._disable_adapters = True

    check_equal(lambda: build_model(case(ALL)), packed(*PIECES), LENGTHS, disable)


@pytest.mark.daily("layers1")
@pytest.mark.parametrize(
    "layers",
    [
        (replayed(0.0, head_pieces=4), replayed(0.0, host=1.0, input_host=1.0, head_pieces=2)),
        (replayed(0.5, host=0.25, input_host=0.5, mlp=0.5, head_pieces=4), LayerPolicy()),
        # an input that another run in pieces makes
        (PIECES[1], LayerPolicy((TensorShare("layer_input", recompute=1.0), *replayed(1.0).shares[1:]), 4)),
    ],
)
def test_policies_of_layers_with_adapters(layers: tuple[LayerPolicy, ...]) -> None:
    check_equal(lambda: build_model(case(ALL, DROPS)), packed(*layers), LENGTHS)


def test_slices_run_adapters_in_pieces() -> None:
    plan = sliced_plan([29, 5], [cut(0, [11, 9, 9])[:1], cut(0, [11, 9, 9])[1:2], [*cut(0, [11, 9, 9])[2:], *cut(1, [5])]], ORDER)
    check_equal(lambda: build_model(case(ALL, DROPS)), same_policy(plan, *PIECES, tile_tokens=8), [29, 5])


@pytest.mark.wide
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_groups_run_adapters_in_pieces(ranks, method: str) -> None:
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(2, (0, 1, 2, 3))]], lengths, 2, ulysses=1 if method == "ring" else 0)
    check_step(ranks(2), case(ALL, DROPS), same_policy(plan, *PIECES, tile_tokens=8), lengths)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_adapters_are_gathered_when_pieces_run(ranks, parameters: Any) -> None:
    lengths = [33, 9, 12]
    plan = plan_of([[(2, (0, 1))], [(1, (2,)), (1, ())]], lengths, 2, parameters=parameters)
    check_step(ranks(2), case(ALL, DROPS), same_policy(plan, *PIECES, tile_tokens=8), lengths)


def gradients(pieces: int, autocast: bool, half: bool, exact: bool, *lora: tuple[str, Any]) -> dict[str, Tensor]:
    """Gradients of adapters in fp32 over a model in bf16 or fp32, under autocast or not. exact: computed in fp64 instead."""
    model = build_model(ModelCase("qwen3", num_heads=8, num_kv_heads=4, dtype=torch.bfloat16 if half else torch.float32))
    model = adapted(model, autocast=True, r=4, target_modules=list(PROJECTIONS), **dict(lora)).train()
    model = model.double() if exact else model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not exact):
        step(model, packed(*(replayed(1.0, head_pieces=pieces),) * 2), random_rows(LENGTHS))
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.daily("-True-False")
@pytest.mark.parametrize("autocast,half", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("lora", [(), (DROPS,)], ids=["", "dropout"])
def test_adapters_in_fp32_are_rounded_as_peft_rounds_them(autocast: bool, half: bool, lora: Any) -> None:
    exact, whole, found = (
        gradients(*way, *lora) for way in ((1, False, half, True), *((n, autocast, half, False) for n in (1, 4)))
    )
    assert found.keys() == whole.keys() and len(found) == 16
    errors = [[float((each[name] - exact[name]).norm() / exact[name].norm()) for name in exact] for each in (whole, found)]
    # single gradients are luckier or less lucky
    assert max(after / before for before, after in zip(*errors, strict=True)) <= 2
    assert sum(errors[1]) <= 1.25 * sum(errors[0]) <= 0.05 * len(exact)
    assert {each.dtype for each in (*found.values(), *whole.values())} == {torch.float32}


def first(model: Any) -> Any:
    return model.base_model.model.model.layers[1].self_attn.k_proj


def merged(model: Any) -> None:
    model.merge_adapter()


class Doubled(nn.Linear):
    """A user's own first matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def own_matrix(model: Any) -> None:
    first(model).lora_A["default"].__class__ = Doubled


def own_dropout(model: Any) -> None:
    first(model).lora_dropout["default"] = nn.AlphaDropout(0.1)


def own_forward(model: Any) -> None:
    run = first(model).forward
    first(model).forward = lambda x: 2 * run(x)


def hook_on(find: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    return lambda model: find(model).register_forward_hook(lambda module, inputs, output: 2 * output)


CHANGED = {
    "hook on the projection": hook_on(first),
    "hook on its linear module": hook_on(lambda model: first(model).base_layer),
    "hook on the first matrix": hook_on(lambda model: first(model).lora_A["default"]),
    "hook on the second matrix": hook_on(lambda model: first(model).lora_B["default"]),
    "hook on the dropout": hook_on(lambda model: first(model).lora_dropout["default"]),
    "merged": merged,
    "own matrix": own_matrix,
    "own dropout": own_dropout,
    "own forward": own_forward,
}


@pytest.mark.parametrize("change", CHANGED)
def test_changed_adapters_are_not_cut(change: str) -> None:
    model = build_model(case(ALL, DROPS))
    assert cuts_heads(model)
    CHANGED[change](model)
    assert not cuts_heads(model)
    with pytest.raises(ValueError, match="pieces of heads, but attention of LlamaDecoderLayer cannot be cut"):
        step(model, packed(*PIECES), random_rows(LENGTHS))


def test_a_rate_that_is_raised_later_is_refused() -> None:
    model = build_model(case(ALL))
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.lora_dropout["default"] = nn.Dropout(0.0)

    def raise_rate() -> None:
        first(model).lora_dropout["default"].p = 0.2

    with pytest.raises(RuntimeError, match=r"dropout of rate 0\.2 runs in pieces of heads without tokens"):
        step(model, packed(*PIECES), random_rows(LENGTHS), raise_rate)

"""Adapters on weights of experts give PEFT's results and gradients without PEFT's copies, for every class of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import relative_error
from torch import Tensor, nn

from hf_longctx.families.registry import FAMILIES, MODULES
from hf_longctx.hf.models.expert_adapters import GroupedProducts, adapted_experts, bind_expert_adapters
from hf_longctx.runtime.core import expert_products

HIDDEN, NUM_EXPERTS, NUM_CHOSEN, TOKENS = 32, 4, 2, 23
BOTH = ("gate_up_proj", "down_proj")


class Holder(nn.Module):
    """A module that calls experts, as an MLP does."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.experts(*inputs)
        return result


def experts_of(name: str) -> Any:
    """A tiny module of a class of experts, with random weights in fp64."""
    model = build_any(next(family.causal for family in FAMILIES if name in family.modules.experts))
    return next(module for module in model.modules() if type(module).__name__ == name)


def adapted(name: str, weights: tuple[str, ...] = BOTH, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The experts with adapters that change their outputs, in a module that calls them."""
    experts = experts_of(name)
    weights = weights if experts.has_gate else tuple(each.replace("gate_up", "up") for each in weights)
    own: Any = {"r": 3, "lora_alpha": 5, "target_modules": [], "init_lora_weights": False, **settings}
    config = peft.LoraConfig(target_parameters=[f"experts.{each}" for each in weights], **own)
    model = peft.inject_adapter_in_model(config, Holder(experts).requires_grad_(False)).to(dtype)
    torch.manual_seed(2)
    for each, weight in model.named_parameters():
        if "lora_" in each:
            nn.init.normal_(weight, std=0.3)
    return model


def inputs(chosen_from: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts from number `chosen_from` on, and their weights."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(tokens, NUM_EXPERTS - chosen_from, generator=generator).argsort(dim=1)[:, :NUM_CHOSEN] + chosen_from
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return x, chosen, torch.rand(tokens, NUM_CHOSEN, generator=generator, dtype=torch.float64)


def results(model: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The output, and gradients of hidden states, weights of choices and trained weights."""
    dtype = next(model.parameters()).dtype
    x, weights = (each.to(dtype).requires_grad_() for each in (x, weights))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    # transformers rounds to fp32 inside
    with wide_floats() if dtype == torch.float64 else nullcontext():
        y = model(x, chosen, weights)
    gradients = torch.autograd.grad((y * torch.cos(x.detach())).sum(), [x, weights, *trained.values()])
    return dict(zip(["y", "x", "weights", *trained], [y.detach(), *gradients], strict=True))


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(relative_error(found[name].double(), expected[name].double()) for name in expected)


def bound(model: Any, is_grouped: bool = False) -> Any:
    model = copy.deepcopy(model)
    undo = bind_expert_adapters(model, lambda device, dtype: is_grouped)
    assert undo
    return model


def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights of which PEFT makes a copy from now on."""
    found: list[str] = []
    own = peft.tuners.lora.ParamWrapper._activate_lora
    monkeypatch.setattr(
        peft.tuners.lora.ParamWrapper,
        "_activate_lora",
        lambda self, active: (found.append(self.parameter_name), own(self, active))[1],
    )
    return found


@pytest.mark.parametrize("name", MODULES.experts)
def test_every_class_has_the_gradients_of_peft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = adapted(name), inputs()
    expected = results(model, *given)
    copied = copies(monkeypatch)
    assert worst(results(bound(model), *given), expected) <= 1e-14
    assert copied == []


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
@pytest.mark.parametrize("weights", [BOTH[:1], BOTH[1:], BOTH[::-1]], ids="+".join)
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"rank_pattern": {r".*\.(gate_)?up_proj": 6}, "alpha_pattern": {"down_proj": 1}}],
    ids=str,
)
def test_one_weight_patterns_and_rslora(name: str, weights: tuple[str, ...], settings: Any) -> None:
    model = adapted(name, weights, **settings)
    ranks = {each.parameter_name: each.r["default"] for each in next(adapted_experts(model)).wrappers}
    assert {name.replace("gate_", ""): rank for name, rank in ranks.items()} == {
        name.replace("gate_", ""): 6 if name != "down_proj" and "rank_pattern" in settings else 3 for name in weights
    }
    for given in (inputs(), inputs(chosen_from=2), inputs(tokens=1)):
        found = results(bound(model), *given)
        assert worst(found, results(model, *given)) <= 1e-14
    # nobody chose the others
    unused = found[next(each for each in found if "lora_A" in each)].view(NUM_EXPERTS, -1).abs().sum(1) == 0
    assert unused.sum() == NUM_EXPERTS - NUM_CHOSEN


def expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(products: Any) -> Tensor:
        raw = products.second
        own = raw.view(len(raw), products.matrices.num_all, -1).permute(1, 0, 2)
        return torch.nn.functional.pad(own, (0, expert_products._padding(own.shape[2], own.dtype))).contiguous()

    monkeypatch.setattr(expert_products._Products, "_second_ENR", property(second))


def no_adapter_in_dx(monkeypatch: pytest.MonkeyPatch) -> None:
    own = expert_products._Products.input_gradient
    monkeypatch.setattr(expert_products._Products, "input_gradient", lambda self, dy, dlow: own(self, dy, None))


def no_bias_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    own = expert_products.Rows.summed
    monkeypatch.setattr(expert_products.Rows, "summed", lambda self, rows, weights=None: own(self, rows))


@pytest.mark.parametrize("plant", [expert_by_expert, no_adapter_in_dx, no_bias_of_weights], ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = adapted("GptOssExperts"), inputs()
    expected = results(model, *given)
    plant(monkeypatch)
    assert worst(results(bound(model), *given), expected) >= 1e-2


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_grouped", [True, False], ids=["grouped", "one by one"])
def test_rounds_no_more_than_peft(name: str, dtype: torch.dtype, is_grouped: bool) -> None:
    assert GroupedProducts()(torch.device("cpu"), dtype)
    model = adapted(name, dtype=dtype)
    given = tuple(each.to(dtype).double() if each.is_floating_point() else each for each in inputs())
    exact = results(copy.deepcopy(model).double(), *given)
    of_peft, ours = worst(results(model, *given), exact), worst(results(bound(model, is_grouped), *given), exact)
    assert ours <= max(1.5 * of_peft, 4 * torch.finfo(dtype).eps)


def test_grouped_products_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.functional.grouped_mm

    def ignores_strides(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        is_view = weight.dim() == 3 and not weight.is_contiguous()
        return own(x, weight.transpose(1, 2).reshape(weight.shape) if is_view else weight, offs=offs)

    cpu = torch.device("cpu")
    assert GroupedProducts().problem(cpu, torch.float64) == "torch has no grouped products in torch.float64"
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", ignores_strides)
    assert "differ from single ones by 2 of a norm in torch.bfloat16" in GroupedProducts().problem(cpu, torch.bfloat16)


def test_adapters_that_are_switched_off_or_merged_stay_so() -> None:
    model, given = adapted("Qwen3MoeExperts"), inputs()
    ours, found = bound(model), next(iter(adapted_experts(model)))
    for wrapper in (*found.wrappers, *next(iter(adapted_experts(ours))).wrappers):
        wrapper.enable_adapters(False)
    with torch.no_grad(), wide_floats():
        assert torch.equal(ours(*given), model(*given))
        assert torch.equal(ours(*given), found.experts(*given))


def test_undone() -> None:
    model = adapted("Qwen3MoeExperts")
    for each in reversed(bind_expert_adapters(model, lambda device, dtype: False)):
        each()
    assert all("forward" not in vars(module) for module in model.modules())

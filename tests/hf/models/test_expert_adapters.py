"""Adapters on weights of experts give PEFT's results and gradients without PEFT's copies, for every class of experts."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import relative_error
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_longctx.families.registry import FAMILIES, MODULES
from hf_longctx.hf.models import expert_adapters, packed_experts
from hf_longctx.hf.models.expert_adapters import GroupedProducts, adapted_experts, bind_expert_adapters
from hf_longctx.hf.models.kernels import fused_layers
from hf_longctx.hf.models.packed_experts import pack_experts, unpacked_copy
from hf_longctx.runtime.core import expert_products
from hf_longctx.runtime.core.products import make_products

HIDDEN, NUM_EXPERTS, NUM_CHOSEN, TOKENS = 32, 4, 2, 23
BOTH = ("gate_up_proj", "down_proj")
ON_EXPERTS = {"target_parameters": [f"mlp.experts.{each}" for each in BOTH]}


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
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float64)
    x, weights = (each.detach().to(dtype, copy=True).requires_grad_() for each in (x, weights))
    model.zero_grad()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    # transformers rounds to fp32 inside
    with wide_floats() if dtype == torch.float64 else nullcontext():
        y = model(x, chosen, weights)
        (y * torch.cos(x.detach())).sum().backward()
    gradients = [each.grad for each in (x, weights, *trained.values())]
    return dict(zip(["y", "x", "weights", *trained], [y.detach(), *gradients], strict=True))


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(relative_error(found[name].double(), expected[name].double()) for name in expected)


def bound(model: Any, is_grouped: bool = False) -> Any:
    model = copy.deepcopy(model)
    undo = bind_expert_adapters(model, lambda device, dtype: is_grouped)
    assert undo
    return model


def unpack_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets products unpack `at_once` experts at a time."""

    def packed_weight(module: Any, name: str) -> Any:
        found = packed_experts.packed_weight(module, name)
        return None if found is None else replace(found, at_once=at_once)

    monkeypatch.setattr(expert_adapters, "packed_weight", packed_weight)


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
        raw = products.matrices.second
        own = raw.view(len(raw), products.matrices.num_all, -1).permute(1, 0, 2)
        return torch.nn.functional.pad(own, (0, expert_products._padding(own.shape[2], own.dtype))).contiguous()

    monkeypatch.setattr(expert_products._Products, "_second_ENR", property(second))


def no_adapter_in_dx(monkeypatch: pytest.MonkeyPatch) -> None:
    own = expert_products._Products.input_gradient
    monkeypatch.setattr(expert_products._Products, "input_gradient", lambda self, dy, dlow, part: own(self, dy, None, part))


def no_bias_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    own = expert_products.Part.add_to
    monkeypatch.setattr(expert_products.Part, "add_to", lambda self, sums, values, weights=None: own(self, sums, values))


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
    # processors differ in the order of their sums
    assert ours <= max(1.5 * of_peft, 8 * torch.finfo(dtype).eps)


def test_grouped_products_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.functional.grouped_mm

    def ignores_strides(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        is_view = weight.dim() == 3 and not weight.is_contiguous()
        return own(x, weight.transpose(1, 2).reshape(weight.shape) if is_view else weight, offs=offs)

    cpu = torch.device("cpu")
    assert GroupedProducts().problem(cpu, torch.float64) == "torch has no grouped products in torch.float64"
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", ignores_strides)
    assert "differ from single ones by 2 of a norm in torch.bfloat16" in GroupedProducts().problem(cpu, torch.bfloat16)


def warnings_at_start(dtype: torch.dtype, wrong_rank: int) -> list[str]:
    """Warnings of a run's start on this rank; on one rank torch has no grouped products."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hf_longctx.hf.models.expert_adapters")
    log.addHandler(handler)
    model, args = adapted("Qwen3MoeExperts", dtype=dtype), TrainingArguments(use_cpu=True, report_to="none")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == wrong_rank:
            patch.setattr(torch.nn.functional, "grouped_mm", no_products)
        fused, _ = fused_layers(model, args, False, dist.group.WORLD)
        before = dict(fused.grouped._problems)
        fused.bind(model)
        x, chosen, weights = inputs()
        model(x.to(dtype), chosen, weights.to(dtype))
        # no step compares them again
        assert fused.grouped._problems == before and len(before) == 1
    log.removeHandler(handler)
    return found


def no_products(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no kernel for this device\nand more")


@pytest.mark.parametrize(
    "dtype,wrong_rank,expected",
    [
        (torch.bfloat16, -1, []),
        (torch.bfloat16, 1, ["torch.bfloat16 on cpu:0 (no kernel for this device)"]),
        (torch.float64, -1, ["torch.float64 on cpu:0 (torch has no grouped products in torch.float64)"]),
    ],
)
def test_experts_without_grouped_products_are_named_once_before_the_first_step(
    ranks, dtype: torch.dtype, wrong_rank: int, expected: list[str]
) -> None:
    words = "experts run one after the other, which is slower, since grouped products cannot be used in "
    assert ranks(2).run(warnings_at_start, dtype, wrong_rank) == [[words + each for each in expected], []]


@pytest.mark.parametrize("packed", ["", "nf4"])
def test_no_tokens_have_gradients_of_zeros(packed: Any) -> None:
    model, given = adapted("Qwen3MoeExperts"), inputs()
    if packed:
        pack_experts(model, packed)
    expected = results(bound(model), *given)
    found = results(bound(model), *(each[:0] for each in given))
    assert {name: len(each) for name, each in found.items()} == {
        name: 0 if name in ("y", "x", "weights") else len(each) for name, each in expected.items()
    }
    assert not any(each.any() for each in found.values())


def test_whole_weights_may_be_beside_some_in_four_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    first, last = (torch.randn(5, *sizes, generator=generator).double() for sizes in ((16, 8), (8, 16)))
    codes, scales = expert_products.packed(last, "mxfp4")
    four_bits = expert_products.PackedMatrices(codes, scales, "mxfp4", 2)
    x = torch.randn(9, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 2, generator=generator, dtype=torch.float64)
    rows = expert_products.Rows(torch.rand(9, 5, generator=generator).argsort(dim=1)[:, :2], 5, False)
    found = []
    for weight in (four_bits, four_bits.unpacked(0, 5, torch.float64)):
        matrices = (expert_products.ExpertMatrices(each, torch.float64) for each in (first, weight))
        y = expert_products.run_experts(x, weights, expert_products.ExpertMLP(*matrices, torch.tanh), rows)
        found.append((y.detach(), *torch.autograd.grad(y, x, torch.cos(x.detach()))))
    assert max(map(relative_error, *found)) <= 1e-14


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
@pytest.mark.parametrize("packed", ["", "nf4"])
def test_gradients_need_no_output(name: str, packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack_at_once(3, monkeypatch)
    model, given = adapted(name), inputs()
    if packed:
        pack_experts(model, packed)
    model = bound(model)
    expected = results(model, *given)
    (found,) = adapted_experts(model)
    made: list[Tensor] = []

    def unread(x_TC: Tensor, num_features: int, first: Callable[[int], Tensor]) -> Tensor:
        made.append(x_TC.new_full((len(x_TC), num_features), math.nan))
        return made[-1]

    undo = make_products(found.experts, lambda: unread)
    without = results(model, *given)
    undo()
    assert len(made) == 1 and bool(without.pop("y").isnan().all())
    assert worst(without, {each: gradient for each, gradient in expected.items() if each != "y"}) <= 1e-14
    assert worst(results(model, *given), expected) <= 1e-14


def test_adapters_that_are_switched_off_or_merged_stay_so() -> None:
    model, given = adapted("Qwen3MoeExperts"), inputs()
    ours, found = bound(model), next(iter(adapted_experts(model)))
    for wrapper in (*found.wrappers, *next(iter(adapted_experts(ours))).wrappers):
        wrapper.enable_adapters(False)
    with torch.no_grad(), wide_floats():
        assert torch.equal(ours(*given), model(*given))
        assert torch.equal(ours(*given), found.experts(*given))


def test_trained_biases_are_refused() -> None:
    model = adapted("GptOssExperts")
    assert expert_adapters.expert_adapter_problems(model) == []
    next(iter(adapted_experts(model))).experts.down_proj_bias.requires_grad_(True)
    (problem,) = expert_adapters.expert_adapter_problems(model)
    assert "(GptOssExperts) are on experts whose own weights are trained too; freeze them with requires_grad_(False)" in problem


def test_undone() -> None:
    model = adapted("Qwen3MoeExperts")
    for each in reversed(bind_expert_adapters(model, lambda device, dtype: False)):
        each()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", ["mxfp4", "nf4"])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
@pytest.mark.parametrize("weights,at_once", [(BOTH, 4), (BOTH, 3), (BOTH, 1), ((), 2)], ids=["adapted", "3", "1", "frozen"])
def test_packed_experts_have_the_gradients_of_unpacked_ones(
    name: str, kind: Any, weights: tuple[str, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack_at_once(at_once, monkeypatch)
    model, given = adapted(name) if weights else Holder(experts_of(name)).requires_grad_(False), inputs()
    before = {each.data_ptr() for each in model.parameters() if each.dim() == 3}
    pack_experts(model, kind)
    assert not before & {each.data_ptr() for each in model.parameters()}
    # the class's own forward unpacks everything; PEFT's needs whole weights
    plain = copy.deepcopy(model)
    (owner,) = [module for module in plain.modules() if hasattr(module, "parametrizations")]
    outer = next((module for module in plain.modules() if getattr(module, "base_layer", None) is owner), None)
    if outer is not None:
        outer.base_layer = unpacked_copy(owner)
        names = [name for name, _ in model.named_modules()]
        for tried in (model, copy.deepcopy(model)):
            with pytest.raises(RuntimeError, match=f"PEFT's forward cannot add adapters to the packed weights of {name}"):
                tried(*given)
        # and changes nothing
        assert [name for name, _ in model.named_modules()] == names
    expected = results(plain, *given)
    found = results(bound(model), *given)
    assert worst(found, expected) <= 1e-14
    if at_once < NUM_EXPERTS:
        own = expert_products.Rows.ranges
        monkeypatch.setattr(expert_products.Rows, "ranges", lambda self, at_once: list(own(self, at_once))[:-1])
        assert worst(results(bound(model), *given), expected) >= 1e-2


@pytest.mark.parametrize("settings", [ON_EXPERTS, {}], ids=["on experts", "on attention"])
def test_packed_experts_refuse_merges_and_whole_files(settings: dict[str, Any], tmp_path: Path) -> None:
    model = peft.get_peft_model(build_any("Qwen3MoeForCausalLM"), peft.LoraConfig(target_modules=["q_proj"], **settings))
    pack_experts(model, "nf4")
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    for safe_merge in (False, True) if settings else ():
        # PEFT would add them to an unpacked copy that nothing reads
        with pytest.raises(RuntimeError, match="cannot be merged into weights in four bits; save the adapter"):
            copy.deepcopy(model).merge_and_unload(safe_merge=safe_merge)
    base = model.get_base_model() if settings else model.merge_and_unload()
    with pytest.raises(RuntimeError, match="would write frozen weights in four bits, which from_pretrained cannot read"):
        base.save_pretrained(tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("kind", ["mxfp4", "nf4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_some_experts_at_a_time_have_the_bits_of_whole_weights(kind: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes, scales = expert_products.packed(torch.randn(8, 64, 48, generator=generator), kind)
    chosen = torch.randint(0, 7, (50, 1), generator=generator)
    x, dy = (torch.randn(50, size, generator=generator).to(dtype) for size in (64, 48))
    rows = expert_products.Rows(chosen, 8, False)

    def products(weight: Any, at_once: int) -> list[Tensor]:
        found = torch.empty(50, 48, dtype=dtype), torch.empty(50, 64, dtype=dtype)
        for experts, parts in rows.ranges(at_once):
            each = expert_products._Products(expert_products.ExpertMatrices(weight, dtype), experts)
            for part in parts:
                own = part._order_M
                found[0][own], found[1][own] = each.forward(x[own], part)[0], each.input_gradient(dy[own], None, part)
        return list(found)

    packed = [
        expert_products.PackedMatrices(codes.view(torch.uint8), scales.view(torch.uint8), kind, at_once) for at_once in (8, 3, 1)
    ]
    whole_EKN = packed[0].unpacked(0, 8, dtype)
    for weight in packed:
        assert torch.equal(torch.cat([weight.unpacked(first, first + 2, dtype) for first in range(0, 8, 2)]), whole_EKN)
        # products of fewer rows may sum in another order
        errors = map(relative_error, products(weight, weight.at_once), products(whole_EKN, 8))
        assert max(errors) <= 4 * torch.finfo(dtype).eps


def test_blocks_of_gpt_oss_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    # [experts, outputs, blocks, 16 bytes] and [experts, outputs, blocks], as in its checkpoints
    blocks = torch.randint(0, 256, (2, 24, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (2, 24, 3), dtype=torch.uint8, generator=generator)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(expert_products.PackedMatrices(blocks.flatten(2), scales, "mxfp4").unpacked(0, 2, torch.bfloat16), plain)
    again = expert_products.PackedMatrices(*expert_products.packed(plain, "mxfp4"), "mxfp4")
    assert torch.equal(again.unpacked(0, 2, torch.bfloat16), plain)


def test_eight_bits_have_a_scale_for_some_inputs_of_a_row() -> None:
    weight = torch.randn(2, 192, 16, generator=torch.Generator().manual_seed(0))
    # one row has larger values in one block
    weight[1, 128:, 3] *= 1000
    codes, scales = expert_products.packed(weight, "fp8")
    assert codes.shape == (2, 16, 192) and scales.shape == (2, 16, 3) and scales.dtype == torch.float32
    found = expert_products.PackedMatrices(codes, scales.view(torch.uint8), "fp8")
    unpacked = found.unpacked(0, 2, torch.float32)
    assert found.num_inputs == 192 and (unpacked - weight).abs().max() <= 1000 * 6 / 16
    blocks = ((unpacked - weight).unflatten(1, (3, 64)).norm(dim=2), weight.unflatten(1, (3, 64)).norm(dim=2))
    assert float((blocks[0] / blocks[1]).max()) <= 0.04
    # by hand: bytes times scales
    by_hand = codes[1, 3].view(torch.float8_e4m3fn).float() * scales[1, 3].repeat_interleave(64)
    assert torch.equal(unpacked[1, :, 3], by_hand)
    # an odd number of inputs has a scale for each of them
    assert expert_products.packed(torch.randn(2, 7, 16), "fp8")[0].shape == (2, 16, 7)


def test_four_bits_round_to_the_nearest_value() -> None:
    weight = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
    for kind, most in (("mxfp4", 0.13), ("nf4", 0.1)):
        codes, scales = expert_products.packed(weight, kind)
        assert codes.shape == (2, 16, 32) and scales.shape == (2, 16, 64 // expert_products.PACKED_BLOCKS[kind])
        found = expert_products.PackedMatrices(codes, scales.view(torch.uint8), kind).unpacked(0, 2, torch.float32)
        assert float((found - weight).norm() / weight.norm()) <= most
    with pytest.raises(ValueError, match="have 7 inputs"):
        expert_products.packed(torch.randn(2, 7, 16), "nf4")


def test_nothing_is_packed_if_a_later_expert_cannot_be() -> None:
    first, last = experts_of("Qwen3MoeExperts"), experts_of("Qwen3MoeExperts")
    last.down_proj = nn.Parameter(last.down_proj[:, :, :-1])
    before = first.gate_up_proj
    with pytest.raises(ValueError, match=f"but experts have {last.down_proj.shape[2]} inputs; keep them in bfloat16"):
        pack_experts(nn.ModuleList([Holder(first), Holder(last)]), "nf4")
    assert first.gate_up_proj is before and before.requires_grad


def test_other_kinds_and_models_without_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be packed as 'int4'; give one of mxfp4, nf4"):
        pack_experts(Holder(experts_of("Qwen3MoeExperts")), "int4")
    with pytest.raises(ValueError, match="Linear has no experts of a class that can be packed"):
        pack_experts(nn.Linear(2, 2), "nf4")

"""Low-rank adapters while plans run: PEFT's results and gradients, fewer saved bytes, and PEFT's own code where hooks look."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from torch import Tensor, nn

from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.low_rank import SharedInput, calls_by_input
from hf_longctx.recipes.bench.one_document import saved_bytes

HIDDEN, TOKENS = 32, 24


class Layers(nn.Module):
    """Two branches and a projection back, as in an MLP, in which adapters stand beside frozen matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def adapted_layers(dtype: torch.dtype, wide: bool = True, **settings: Any) -> Any:
    """The layers in `dtype` with adapters that change what they return; wide: these are in at least fp32."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["gate_proj", "up_proj", "down_proj"], **settings)
    model = peft.get_peft_model(Layers().to(dtype), config, autocast_adapter_dtype=wide)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    return model


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def results(model: Any, dtype: torch.dtype, is_autocast: bool = False) -> list[Tensor]:
    """The output, and gradients of the input and of all trained weights."""
    x = inputs(dtype).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        y = model(x * 1)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *trained], torch.ones_like(y).cumsum(1))]


NODE = "_AdaptedProductsBackward"


def nodes(y: Tensor) -> dict[str, int]:
    """Number of nodes for adapters in a graph, by name."""
    seen, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [each for each, _ in node.next_functions]
    return dict(Counter(node.name() for node in seen if node.name() in (NODE, "_AddLowRankBackward")))


def bind(model: Any) -> Any:
    FusedLayers("").bind(model)
    return model


def test_exact_in_fp64_and_closed_again() -> None:
    expected = results(adapted_layers(torch.float64), torch.float64)
    model, fused = adapted_layers(torch.float64), FusedLayers("")
    fused.bind(model)
    layer = model.base_model.model.down_proj
    assert "forward" in vars(layer)
    # one node, also with a bias
    inputs_of = {"gate_proj": inputs(torch.float64), "down_proj": inputs(torch.float64).repeat(1, 1, 2)}
    assert [nodes(getattr(model.base_model.model, name)(x)) for name, x in inputs_of.items()] == [{NODE: 1}] * 2
    for found, right in zip(results(model, torch.float64), expected, strict=True):
        assert relative_error(found, right) <= 1e-14
    fused.close()
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("wide", [True, False])
def test_under_autocast_no_further_from_fp64_than_peft(wide: bool) -> None:
    exact = results(adapted_layers(torch.bfloat16, wide).to(torch.float64), torch.float64)
    # rounded as the input of the others
    own = results(adapted_layers(torch.bfloat16, wide), torch.bfloat16, is_autocast=True)
    found = results(bind(adapted_layers(torch.bfloat16, wide)), torch.bfloat16, is_autocast=True)
    assert [each.dtype for each in found] == [each.dtype for each in own]
    # largest errors, relative to the largest value of each tensor: rounding is of the same size
    of_peft, ours = ([relative_error(x.double(), right) for x, right in zip(each, exact, strict=True)] for each in (own, found))
    assert max(ours) <= 0.015
    assert sum(ours) <= 1.1 * sum(of_peft)


def test_projections_share_one_saved_input() -> None:
    def measured(model: Any) -> int:
        with torch.autocast("cpu", torch.bfloat16):
            x = inputs(torch.bfloat16).requires_grad_(True)
            return saved_bytes(model, lambda: model(x))[0]

    peft_s, ours = measured(adapted_layers(torch.bfloat16)), measured(bind(adapted_layers(torch.bfloat16)))
    # gate and up share one
    assert peft_s - ours == 2 * TOKENS * HIDDEN


def test_hooks_see_what_peft_shows_them() -> None:
    def seen(model: Any) -> list[Tensor]:
        layers, tensors = model.base_model.model, []
        layers.gate_proj.base_layer.register_forward_hook(lambda module, args, output: tensors.append(output.detach()))
        layers.up_proj.lora_A["default"].register_forward_hook(lambda module, args, output: tensors.append(args[0].detach()))
        layers.down_proj.register_forward_hook(lambda module, args, output: tensors.append(output.detach()))
        results(model, torch.bfloat16, is_autocast=True)
        return tensors

    expected, found = seen(adapted_layers(torch.bfloat16)), seen(bind(adapted_layers(torch.bfloat16)))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    # the output of the frozen module was not written over; the input of a first matrix is as wide as PEFT makes it
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert relative_error(found[2].float(), expected[2].float()) <= 0.02


def decoder(dtype: torch.dtype = torch.float64, family: str = "llama", std: float = 0.3, **settings: Any) -> Any:
    """A small model of two layers with adapters on all matrices. std: of second matrices."""
    torch.manual_seed(0)
    base = build_model(ModelCase(family, dtype=dtype))
    for name, weight in base.named_parameters():
        if name.endswith("_proj.bias"):
            nn.init.normal_(weight, std=0.3)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **settings)).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=std)
    return model.to(dtype) if dtype != torch.bfloat16 else model


def decoded(model: Any, is_autocast: bool = False) -> list[Tensor]:
    """Last hidden states, and gradients of all trained weights."""
    ids = torch.arange(TOKENS)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        y = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, trained, torch.ones_like(y).cumsum(1), allow_unused=True)]


def assert_equal(found: list[Tensor], expected: list[Tensor], limit: float = 1e-14) -> None:
    for one, right in zip(found, expected, strict=True):
        assert (one is None) == (right is None)
        assert one is None or relative_error(one, right) <= limit


@pytest.mark.wide("llama")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_projections_of_one_input_are_one_node(family: str) -> None:
    expected = decoded(decoder(family=family))
    model = bind(decoder(family=family))
    assert_equal(decoded(model), expected)
    y = model.get_base_model().model(input_ids=torch.arange(TOKENS)[None], use_cache=False).last_hidden_state
    # for queries, keys and values; output; gate and up; down
    assert nodes(y) == {NODE: 8}


# adapters that add little to the frozen products, and much more than these are
@pytest.mark.daily("0.3-1.15")
@pytest.mark.parametrize("std,limit", [(0.02, 0.95), (0.3, 1.15)])
def test_one_node_is_no_further_from_fp64_than_peft(std: float, limit: float) -> None:
    exact = decoded(decoder(torch.bfloat16, std=std).to(torch.float64))
    models = decoder(torch.bfloat16, std=std), bind(decoder(torch.bfloat16, std=std))
    own, found = (decoded(model, is_autocast=True) for model in models)
    of_peft, ours = ([relative_error(x.double(), right) for x, right in zip(each, exact, strict=True)] for each in (own, found))
    assert [each.dtype for each in found] == [each.dtype for each in own]
    assert sum(ours) <= limit * sum(of_peft)


def frozen(model: Any, word: str) -> None:
    for name, weight in model.named_parameters():
        if word in name:
            weight.requires_grad_(False)


def trained_base(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("k_proj.base_layer.weight") or name.endswith("q_proj.base_layer.bias"):
            weight.requires_grad_(True)


def attention(model: Any) -> Any:
    return model.get_base_model().model.layers[1].self_attn


def hooked(name: str, kind: str = "register_forward_hook") -> Callable[[Any], None]:
    def put(model: Any) -> None:
        module = attention(model).get_submodule(name)
        if kind == "register_forward_pre_hook":
            module.register_forward_pre_hook(lambda module, args: (3 * args[0],))
        elif kind == "register_full_backward_hook":
            module.register_full_backward_hook(lambda module, given, found: tuple(3 * each for each in given))
        else:
            module.register_forward_hook(lambda module, args, output: 3 * output)

    return put


def replaced(name: str) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        module = attention(model).get_submodule(name)
        run = module.forward
        module.forward = lambda x: 3 * run(x)

    return put


def replaced_attention(model: Any) -> None:
    inner = attention(model)
    run = inner.forward
    inner.forward = lambda *args, **keywords: tuple(None if each is None else 3 * each for each in run(*args, **keywords))


class Packed(Tensor):
    """A frozen weight of another type, such as those of quantised weights: products with it are larger."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
            is_kept = function is Tensor.detach
            return found.as_subclass(cls) if is_kept else 3 * found if function is nn.functional.linear else found


def packed(model: Any) -> None:
    base = attention(model).k_proj.base_layer
    base.weight = nn.Parameter(base.weight.detach().as_subclass(Packed), requires_grad=False)


def called_before(model: Any) -> None:
    """A user's hook calls one of the projections with the same tensor, without a graph."""

    def call(module: Any, args: Any, keywords: Any) -> None:
        with torch.no_grad():
            module.q_proj(keywords["hidden_states"])

    attention(model).register_forward_pre_hook(call, with_kwargs=True)


# changes after the start; whether the layer's projections still have one node for all others
CHANGES: dict[str, Callable[[Any], None]] = {
    "first matrices frozen": lambda model: frozen(model, "lora_A"),
    "second matrices frozen": lambda model: frozen(model, "lora_B"),
    "one adapter frozen": lambda model: frozen(model, "k_proj.lora"),
    "all but one adapter frozen": lambda model: [frozen(model, f"{each}_proj.lora") for each in ("q", "k", "gate", "up", "o")],
    "base weights trained": trained_base,
    "embedding trained": lambda model: model.get_input_embeddings().weight.requires_grad_(True),
    "hook on a projection": hooked("k_proj"),
    "hook on the first projection": hooked("q_proj"),
    "hook on a projection's input": hooked("q_proj", "register_forward_pre_hook"),
    "hook on a projection's gradient": hooked("v_proj", "register_full_backward_hook"),
    "hook on a frozen module": hooked("k_proj.base_layer"),
    "hook on the first frozen module": hooked("q_proj.base_layer"),
    "hook on a first matrix": hooked("q_proj.lora_A.default"),
    "hook on a second matrix": hooked("v_proj.lora_B.default"),
    "forward of a projection": replaced("v_proj"),
    "forward of the first projection": replaced("q_proj"),
    "forward of a frozen module": replaced("k_proj.base_layer"),
    "forward of attention": replaced_attention,
    "weight of another type": packed,
    "a projection called before": called_before,
    "no adapter on keys": lambda model: setattr(attention(model), "k_proj", attention(model).k_proj.base_layer),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_changes_by_a_user_have_their_effect(change: str, is_late: bool) -> None:
    def made(binds: bool) -> Any:
        model = decoder(family="qwen2")
        for step in (bind, CHANGES[change]) if is_late else (CHANGES[change], bind):
            if step is not bind or binds:
                step(model)
        return model

    assert_equal(decoded(made(True)), decoded(made(False)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_that_changes_between_two_projections_is_read_as_it_is(mode: Any) -> None:
    """Without gradients, since torch would refuse the change in backward."""

    class Changing(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            x.mul_(3)
            return y

    found = []
    for model in (decoder(), bind(decoder())):
        attention(model).k_proj = Changing(attention(model).k_proj)
        with mode():
            found.append(model.get_base_model().model(input_ids=torch.arange(TOKENS)[None], use_cache=False).last_hidden_state)
    assert relative_error(*found) <= 1e-14


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}], ids=str)
def test_other_adapters_run_as_ever(settings: dict[str, Any]) -> None:
    found = []
    for binds in (False, True):
        model = decoder(**settings)
        if binds:
            bind(model)
        torch.manual_seed(3)
        found.append(decoded(model))
        y = model.get_base_model().model(input_ids=torch.arange(TOKENS)[None], use_cache=False).last_hidden_state
        assert NODE not in nodes(y)
    assert_equal(*found)


def test_two_active_adapters_run_as_ever() -> None:
    found = []
    for binds in (False, True):
        model = decoder()
        model.add_adapter("more", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "more"])
        found.append(decoded(bind(model.double()) if binds else model.double()))
    assert_equal(*found)


def test_a_module_that_fails_leaves_nothing_for_the_next_call() -> None:
    model = bind(decoder())
    inner = attention(model)
    handle = inner.v_proj.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoded(model)
    handle.remove()
    shared = [each for each in gc.get_objects() if isinstance(each, SharedInput)]
    assert shared and all(each.outputs is None and not each.mode for each in shared)
    assert_equal(decoded(model), decoded(decoder()))


def test_nothing_is_shared_outside_of_the_module_that_calls_the_projections() -> None:
    model = bind(decoder())
    inner, x = attention(model), inputs(torch.float64)
    outputs = [getattr(inner, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    assert nodes(sum(each.sum() for each in outputs)) == {NODE: 3}


def test_calls_with_one_variable_are_found_in_code() -> None:
    found = {kind.__name__: calls_by_input(kind.forward) for kind in (Attention, Reassigned, Conditional, Early, Listed)}
    assert found == {
        "Attention": (("q", "k"), ("v", "w")),
        "Reassigned": (),
        "Conditional": (("q", "v"),),
        "Early": (("q", "k"),),
        "Listed": (),
    }
    assert calls_by_input(len) == ()


class Attention(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.q(x).view(-1)
        return first + self.k(x) + self.v(y) * self.w(y) + self.twice(x) + self.twice(x) + self.scaled(x, 2) + self.inner.q(x)


class Reassigned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = self.q(x)
        return self.k(x)


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        k = self.k(x) if self.has_keys else None
        if k is None:
            k = self.other(x)
        return self.q(x) + k + self.v(x)


class Early(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first = self.q(x) + self.k(x)
        if self.is_short:
            return first
        return first + self.v(x)


class Listed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, *_ = [self.q(x) for _ in range(self.count)]
        return first + self.k(x)


@pytest.mark.parametrize("case", ["disabled", "merged", "DoRA", "bias", "scaled by a hook", "keyword"])
def test_unusual_adapters_run_as_ever(case: str) -> None:
    def made() -> Any:
        model = adapted_layers(torch.float64, use_dora=case == "DoRA", lora_bias=case == "bias")
        layer = model.base_model.model.gate_proj
        if case == "disabled":
            model.base_model.disable_adapter_layers()
        elif case == "merged":
            model.merge_adapter()
        elif case == "scaled by a hook":
            layer.lora_B["default"].register_forward_hook(lambda module, args, output: 3 * output)
        return model

    def run(model: Any) -> Tensor:
        layer, x = model.base_model.model.gate_proj, inputs(torch.float64)
        result: Tensor = layer(x=x) if case == "keyword" else layer(x)
        return result

    model = made()
    expected, found = run(copy.deepcopy(model)), run(bind(model))
    assert torch.equal(found, expected)

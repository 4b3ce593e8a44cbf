"""Mixers with a state along the sequence: patched for one model alone, and refused by name where states would be lost."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from helpers.measures.class_sweep import self_tested
from helpers.models.any_model import build_any
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_longctx.families.registry import FAMILIES, MIXERS
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models import states as methods
from hf_longctx.hf.models.attention import attention_name
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.models.states import METHODS, STAND_INS, MixerCall, mixer_of, mixers_of, state_problems
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.execution.executor import no_mask
from hf_longctx.runtime.process_groups import GroupPool

pytestmark = newest
CASE, CONVOLUTIONS = ModelCase("qwen3_5", num_layers=4), ModelCase("lfm3", num_layers=4)
MIXER = "model.layers.0.linear_attn"
IDS = torch.arange(11).unsqueeze(0) + 3


def lone_context() -> GroupContext:
    return GroupPool((1,), 1.0).context(SequenceGroup((0,), "local", (), ()), Chunk(0, (Span(0, 0, 11),)))


@pytest.mark.parametrize("case", [CASE, CONVOLUTIONS, ModelCase("kimi_linear"), ModelCase("mamba")], ids=lambda case: case.family)
def test_without_a_plan_a_patched_model_computes_and_generates_as_before(case: ModelCase) -> None:
    plain, patched = build_model(case).eval(), build_model(case).eval()
    name, module = attention_name(patched), sys.modules[type(patched).__module__]
    before = dict(vars(module))
    patch_model(patched)
    assert torch.equal(patched(IDS).logits, plain(IDS).logits)
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(patched.generate(IDS, **settings), plain.generate(IDS, **settings))
    assert vars(module) == before and all("forward" in vars(mixer) for mixer in mixers_of(patched).values())
    restore_attention(patched, name)
    assert not any("forward" in vars(mixer) for mixer in mixers_of(patched).values())


def test_a_copy_has_doors_of_its_own() -> None:
    model = build_model(CASE)
    patch_model(model)
    twin = copy.deepcopy(model)
    assert all(mixer.forward.__self__ is mixer for mixer in mixers_of(twin).values())


def test_every_row_names_classes_and_functions_of_transformers() -> None:
    for family in FAMILIES:
        for mixer in family.mixers:
            model_class = getattr(transformers, family.causal or family.wrapper)
            forward = inspect.unwrap(getattr(sys.modules[model_class.__module__], mixer.name).forward)
            assert set(mixer.functions) <= set(forward.__code__.co_names) & STAND_INS.keys()
            assert set(mixer.methods) <= METHODS.keys()
            assert not mixer.heads or hasattr(model_class.config_class().get_text_config(), mixer.heads)


@pytest.mark.daily("qwen3_5")
@pytest.mark.parametrize("case", [CASE, ModelCase("bamba", num_layers=4)], ids=lambda case: case.family)
def test_plans_and_the_self_test_run_without_installed_kernels(monkeypatch, case: ModelCase) -> None:
    model = build_model(case)
    mixer, module = mixer_of(model), sys.modules[type(model).__module__]
    plain = model(IDS, use_cache=False).logits
    for name in filter(None, (*mixer.functions, mixer.fused)):

        @functools.wraps(inspect.unwrap(vars(module)[name]))
        def kernel(*args: Any, **keywords: Any) -> Any:
            raise AssertionError("a kernel takes neither fp32 nor fp64")

        monkeypatch.setattr(module, name, kernel)
    patch_model(model)
    planned = model(IDS, attention_mask=no_mask(IDS.device), use_cache=False, longctx=lone_context()).logits
    assert torch.allclose(planned, plain, rtol=0, atol=1e-6)
    assert self_tested(model).startswith("self-test passed")


class DtypesOf(TorchFunctionMode):
    """Notes the dtypes of tensors whose methods of some names are called: CPUs add up in wider formats than GPUs do."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.found = names, set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.names:
            self.found.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


def state_map_of(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    """The map that the stand-in `run` gives its scan, and the scan's weights."""
    found = []

    def keep(read: Any, own: Any, weights: Any, scan: Any, *others: Any) -> torch.Tensor:
        found.append((scan.state_map, weights))
        return own[0]

    monkeypatch.setattr(methods, "scan_documents", keep)
    run()
    return found[0]


def minimax_map(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    mixer = next(iter(mixers_of(build_model(ModelCase("minimax", num_layers=4))).values()))
    width = 3 * mixer.num_attention_heads * mixer.head_dim
    call = MixerCall(mixer, lone_context(), kept=[torch.zeros(1, 1, width)])
    return state_map_of(monkeypatch, lambda: methods.lightning_attention(call, lambda x: x, torch.zeros(1, 1, width)))


def gated_map(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    call, x = MixerCall(nn.Identity(), lone_context()), torch.zeros(1, 1, 2, 1)
    return state_map_of(monkeypatch, lambda: methods.gated_linear_scan(call, torch.add, x, x, x, None))


@pytest.mark.parametrize(
    "make,inputs",
    [
        (minimax_map, (torch.ones(1, 4096, 2, 2),)),
        (gated_map, (torch.ones(1, 4096, 2), torch.full((1, 4096, 2), 0.998))),
    ],
    ids=["rates", "gates"],
)
def test_decays_of_many_tokens_are_not_added_up_in_16_bits(monkeypatch, make: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    state_map, weights = make(monkeypatch)
    mine, rates = ([x.bfloat16() for x in each] for each in (inputs, weights))
    with DtypesOf("log", "cumsum") as seen:
        effect = state_map.effect(mine, rates, torch.zeros(1, 4096, 2, 2), torch.zeros(1, 2, 2, 2))
    assert seen.found and seen.found <= {torch.float32}
    assert effect.carry.dtype == torch.float32


class ForeignMamba(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def foreign(model: Any) -> None:
    model.model.layers[1].linear_attn = ForeignMamba()


def foreign_layer(model: Any) -> None:
    model.model.layers[1] = ForeignMamba()


def replaced_forward(model: Any) -> None:
    mixer = model.get_submodule(MIXER)
    mixer.forward = lambda *args, **keywords: type(mixer).forward(mixer, *args, **keywords)


@pytest.mark.parametrize(
    "change,said",
    [
        (foreign, "model.layers.1.linear_attn (ForeignMamba) carries a state along the sequence, and only"),
        (foreign_layer, "model.layers.1 (ForeignMamba) carries a state along the sequence, and only"),
        (replaced_forward, f"{MIXER} (Qwen3_5GatedDeltaNet) has a forward that is not its class's"),
    ],
)
def test_a_mixer_that_cannot_pass_states_on_is_refused_by_layer_and_class(change: Any, said: str) -> None:
    model = build_model(CASE)
    assert setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2)) == []
    change(model)
    (problem,) = setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2))
    assert problem.startswith(said)


def test_a_mixer_whose_forward_calls_other_functions_is_refused(monkeypatch) -> None:
    model = build_model(CASE)
    monkeypatch.setattr(type(model.get_submodule(MIXER)), "forward", lambda mixer, hidden_states: hidden_states)
    (problem,) = state_problems(model)
    assert problem.startswith(
        f"the forward of {MIXER} (Qwen3_5GatedDeltaNet) does not call causal_conv1d_fn and torch_chunk_gated_delta_rule in this"
    )


@pytest.mark.parametrize(
    "class_name,owner,kind",
    [
        ("MiniMaxForCausalLM", "act_fn", "forward_hook"),
        ("MiniMaxForCausalLM", "norm", "forward_pre_hook"),
        ("RecurrentGemmaForCausalLM", "conv_1d", "full_backward_hook"),
        ("ZayaForCausalLM", "conv_qk_grouped", "full_backward_pre_hook"),
    ],
)
def test_hooks_where_plans_pass_other_tensors_are_refused(class_name: str, owner: str, kind: str) -> None:
    model = build_any(class_name)
    name, mixer = next(iter(mixers_of(model).items()))
    mixer.register_forward_hook(lambda *_: None)
    if owner == "conv_1d":
        # plans replace a method of it that is not its forward
        mixer.rg_lru.register_forward_hook(lambda *_: None)
    patch_model(model)
    run = partial(model, IDS, attention_mask=no_mask(IDS.device), use_cache=False, longctx=lone_context())
    run()
    assert state_problems(model) == []
    getattr(mixer.get_submodule(owner), f"register_{kind}")(lambda *_: None)
    (problem,) = state_problems(model)
    assert problem.startswith(f"{name} ({type(mixer).__name__}) has a hook on its module {owner}, ")
    with pytest.raises(ValueError, match=f"{type(mixer).__name__} has a hook on its module {owner}, "):
        # a hook that is added after the start
        run()


def test_a_forward_that_leaves_a_function_out_is_noticed(monkeypatch) -> None:
    model = build_model(CASE)
    patch_model(model)
    mixer = replace(MIXERS["Qwen3_5GatedDeltaNet"], functions=("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "l2norm"))
    monkeypatch.setitem(MIXERS, "Qwen3_5GatedDeltaNet", mixer)
    with pytest.raises(RuntimeError, match="called causal_conv1d_fn, torch_chunk_gated_delta_rule in place of "):
        model(IDS, use_cache=False, longctx=lone_context())


def test_lent_stages_are_refused_and_rings_are_not() -> None:
    model = build_model(CASE)
    problems = setup_problems(ModelFacts.of(model), None, LongContextConfig(lend_stages=True, stages=2), 2, (1,))
    assert any(
        problem.startswith("lend_stages=True lets ranks") and "linear_attention layers of Qwen3_5ForCausalLM" in problem
        for problem in problems
    )
    for method in ("auto", "ring", "hybrid"):
        assert setup_problems(ModelFacts.of(model), None, LongContextConfig(method=method), 8, (3, 8)) == []
    # more ranks than heads with a state, but not than heads of attention
    assert (
        setup_problems(ModelFacts.of(build_model(ModelCase("qwen3_5_few"))), None, LongContextConfig(method="ulysses"), 4, (4,))
        == []
    )
    (problem,) = setup_problems(ModelFacts.of(model), None, LongContextConfig(method="ulysses"), 8, (8,))
    assert problem.startswith("degree 8 exceeds the model's 4 ")


def test_calls_that_a_plan_does_not_make_are_refused() -> None:
    model = build_model(CASE)
    patch_model(model)
    context, mixer, hidden = lone_context(), model.get_submodule(MIXER), torch.randn(1, 11, 32, dtype=torch.float64)
    for keywords, said in (
        ({"longctx": replace(context, lent_slice=object())}, "the slice is lent ranks of other stages"),
        ({"longctx": context, "seq_idx": IDS}, "got document boundaries"),
        ({"longctx": context, "chunk_size": 16}, "gives its scan chunk_size"),
        ({"longctx": context, "attention_mask": IDS}, "got attention_mask under a plan"),
        ({"longctx": context, "cache_params": transformers.DynamicCache(config=model.config)}, "got cache_params under a plan"),
    ):
        with pytest.raises(ValueError, match=said):
            mixer(hidden, **keywords)


def test_weights_that_a_class_divides_for_evaluation_stay_whole_under_plans() -> None:
    model = build_any("RwkvForCausalLM", rescale_every=1)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    plain = model(IDS, use_cache=False).logits
    name = attention_name(model)
    patch_model(model)
    planned = model.eval()(IDS, use_cache=False, longctx=lone_context()).logits
    # transformers computes decays in fp32
    assert torch.allclose(planned, plain, rtol=0, atol=1e-5) and torch.equal(model(IDS, use_cache=False).logits, plain)
    assert all(torch.equal(weight, weights[key]) for key, weight in model.named_parameters())
    restore_attention(model, name)
    assert attention_name(model) == name and state_problems(model) == []
    model(IDS, use_cache=False)
    (problem,) = state_problems(model)
    assert problem.startswith("rwkv (RwkvModel) has divided its weights in a forward in evaluation mode")
    model.train()(IDS, use_cache=False)
    assert state_problems(model) == []


def test_long_rows_that_a_class_cuts_in_evaluation_run_whole_under_plans() -> None:
    model = build_any("xLSTMForCausalLM", max_inference_chunksize=4)
    plain = model(IDS, use_cache=False).logits
    patch_model(model)
    planned = model.eval()(IDS, use_cache=False, longctx=lone_context()).logits
    assert torch.allclose(planned, plain, rtol=0, atol=1e-5)
    assert not any(module.training for module in model.modules())

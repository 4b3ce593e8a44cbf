"""Layers with kernels: gradients of plain transformers under every policy, and the model's own code where kernels do not fit."""

from __future__ import annotations

import copy
import logging
import tempfile
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.measures.engine_steps import EngineStep
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.policies import replayed
from helpers.trainers.trainer_runs import make_trainer, plain_training, train_on_rank
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from hf_longctx.hf.models import kernels as layer_kernels
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.kernel_places import fusable_modules, kernel_problems
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import layer_modules, tiles_norms
from hf_longctx.hf.models.states import mixers_of
from hf_longctx.plan.core.types import LayerPolicy
from hf_longctx.runtime.activations.host_tier import HostTier

CPU = torch.device("cpu")
LORA = (("r", 4), ("target_modules", ["q_proj", "up_proj", "down_proj"]))
# norms of a promoted model have a forward of their own, so that MLPs and rotary embeddings are compared to 1e-12
CASES = {
    "promoted": (ModelCase(promoted=True), 1e-12, 4),
    "norms": (ModelCase(), 1e-6, 6),
    "LoRA": (ModelCase(promoted=True, lora=LORA), 1e-12, 5),
}
HYBRID = ModelCase("qwen3_5", num_layers=4)
POLICIES: dict[str, LayerPolicy] = {
    "kept": LayerPolicy(),
    "recomputed": replayed(1.0),
    "some kept, some offloaded": replayed(0.3, 0.4, mlp=0.5, input_host=0.5),
}


def traced() -> FusedLayers:
    """Kernels that are traced and derived as ever, without the compiler of C++."""
    return FusedLayers("compile", backend="aot_eager")


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_plain_transformers_under_every_policy(case: str) -> None:
    settings, tolerance, num_compiled = CASES[case]
    fused = traced()
    plain, model = build_model(settings), build_model(settings)
    fused.bind(model)
    models = iter([plain, model])
    step = EngineStep(HostTier.on(CPU, 2**20), [5, 13, 8, 3], lambda: next(models))
    for policy in POLICIES.values():
        loss, _ = step.forward((policy, policy))
        loss.backward()
        assert step.error() <= tolerance
    step.engine.unbind()
    # forward and backward of each function; under adapters, the first layer's MLP is derived by one of its inputs alone, too
    assert sum(function.num_compiled for function in fused._functions.values()) == num_compiled
    fused.close()
    before, after = ([name for name, module in each.named_modules() if "forward" in vars(module)] for each in (plain, model))
    assert before == after


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_kernels_are_found_by_the_code_of_the_class(family: str) -> None:
    model = build_model(ModelCase(family))
    kinds = {found.kind for found in fusable_modules(model)}
    assert kinds == {"norm", "gated", "rotary"}
    assert all(found.is_centred == (family == "gemma") for found in fusable_modules(model) if found.kind == "norm")


# every code of a gated norm, with all that its classes set
GATED_NORMS: dict[str, Any] = {
    "Qwen3.5": lambda: Qwen3_5RMSNormGated(24),
    "Kimi": lambda: KimiLinearRMSNormGated(24),
    "Bamba, one group": lambda: BambaRMSNormGated(24, 24),
    "Nemotron H, groups": lambda: NemotronHRMSNormGated(24, group_size=8),
    "Mamba 2": lambda: MambaRMSNormGated(24, group_size=12),
    "Falcon H1, gate after": lambda: FalconH1RMSNormGated(24, n_groups=3, norm_before_gate=True),
    "Falcon H1, gate before": lambda: FalconH1RMSNormGated(24, n_groups=2, norm_before_gate=False),
}


@pytest.mark.daily("Qwen3.5-dtype0-1e-06")
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", GATED_NORMS)
def test_a_gated_norm_is_that_of_its_class(kind: str, dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(GATED_NORMS[kind]()).to(dtype)
    nn.init.normal_(plain[0].weight)
    fused_norm, fused = copy.deepcopy(plain), traced()
    assert [found.kind for found in fusable_modules(fused_norm)] == ["gated_norm"]
    assert fused.problem(fused_norm, CPU, dtype) == ""
    fused.bind(fused_norm)
    x, gate, gradient = (torch.randn(2, 7, 24, dtype=dtype) for _ in range(3))
    results = []
    for norm in (plain[0], fused_norm[0]):
        leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_(), norm.weight]
        y = norm(*leaves[:2])
        results.append([y.detach(), *torch.autograd.grad(y, leaves, gradient)])
    assert results[0][0].dtype == results[1][0].dtype
    assert sum(function.num_compiled for function in fused._functions.values()) > 0
    assert max(relative_error(found, right) for right, found in zip(*results, strict=True)) <= limit
    # a gate of another dtype; one of another shape runs the class's code, and so does another activation
    narrow = gate.to(torch.float16)
    assert relative_error(fused_norm[0](x, narrow), plain[0](x, narrow)) <= limit
    assert torch.equal(fused_norm[0](x, gate[:, :1]), plain[0](x, gate[:, :1]))
    other = copy.deepcopy(plain)
    other[0].activation = "relu"
    assert list(fusable_modules(other)) == []


def test_gated_norms_that_differ_have_kernels_of_their_own() -> None:
    fused = traced()
    for kind in GATED_NORMS:
        holder = nn.Sequential(GATED_NORMS[kind]())
        fused._function(next(iter(fusable_modules(holder))))
    assert len(fused._functions) == len(GATED_NORMS)


@pytest.mark.wide
def test_a_wrong_convolution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fused = build_model(HYBRID), traced()
    assert not fused.problem(model, CPU, torch.float64) and fused.covered(model)["fuses_convolutions"]
    fused = traced()
    compiled = layer_kernels.compiled_convolution
    monkeypatch.setattr(layer_kernels, "compiled_convolution", lambda activation, backend: compiled("", backend))
    problem = fused.problem(model, CPU, torch.float64)
    assert problem.startswith("Qwen3_5GatedDeltaNet: the kernel differs from the model's own code by ")
    # an activation without a kernel
    next(iter(mixers_of(model).values())).activation = "gelu"
    assert not traced().covered(model)["fuses_convolutions"]


def test_hybrids_are_told_about_gated_norms() -> None:
    model = build_model(HYBRID)
    assert traced().covered(model)["fuses_gated_norms"]
    assert not FusedLayers("liger").covered(model)["fuses_gated_norms"]
    mixer = next(module for module in model.modules() if isinstance(getattr(module, "norm", None), Qwen3_5RMSNormGated))
    mixer.norm.forward = lambda x, gate: x
    assert not traced().covered(model)["fuses_gated_norms"]


@pytest.mark.wide
@pytest.mark.parametrize("policy", POLICIES)
def test_hybrids_train_with_gated_norms_as_kernels(policy: str) -> None:
    gradients = []
    for binds in (False, True):
        model, fused = build_model(HYBRID), traced()
        if binds:
            fused.bind(model)
        step = EngineStep(HostTier.on(CPU, 2**20), [5, 13, 8, 3], lambda model=model: model)
        step.model.zero_grad()
        step.forward((POLICIES[policy],) * HYBRID.num_layers)[0].backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
        for kind in ("gated_norm", "convolution"):
            assert any(key[0] == kind for key in fused._functions) == binds
    assert max(relative_error(found, gradients[0][name]) for name, found in gradients[1].items()) <= 1e-5


def test_what_a_user_changed_runs_its_own_code() -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    models = [build_model(ModelCase()) for _ in range(2)]
    seen: list[int] = []
    for model in models:
        norm = model.model.norm
        model.model.norm = Doubled(norm.weight.numel(), norm.variance_epsilon).to(torch.float64)
        first, second = model.model.layers
        first.mlp.act_fn.register_forward_hook(lambda module, inputs, output: seen.append(1) or output * 3)
        second.mlp.act_fn = nn.Tanh()
    fused = traced()
    fused.bind(models[1])
    ids = torch.arange(9).unsqueeze(0)
    losses = [model(input_ids=ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    gradients = [[p.grad for p in model.parameters()] for model in models]
    assert max(relative_error(found, right) for found, right in zip(*gradients, strict=True)) <= 1e-5
    assert len(seen) == 2


ALL = {"fuses_norms": True, "fuses_gated_norms": False, "fuses_gates": True, "fuses_rotary": True, "fuses_convolutions": False}


def test_plans_are_told_what_all_layers_have_kernels_for() -> None:
    model = build_model(ModelCase("qwen3"))
    first, second = model.model.layers
    assert traced().covered(model) == ALL
    assert not any(FusedLayers("").covered(model).values())
    assert FusedLayers("liger").covered(model) == {**ALL, "fuses_rotary": False}
    # one of them alone runs its own code
    first.self_attn.q_norm.forward = lambda x: x
    handle = second.mlp.act_fn.register_forward_hook(lambda module, inputs, output: None)
    assert traced().covered(model) == {**ALL, "fuses_norms": False, "fuses_gates": False}
    handle.remove()
    assert traced().covered(model) == {**ALL, "fuses_norms": False}
    # experts, alone or beside an MLP that all tokens pass, keep their activations
    for family in ("mixtral", "qwen2_moe"):
        assert traced().covered(build_model(ModelCase(family))) == {**ALL, "fuses_gates": False}


def test_norms_that_are_kernels_run_whole() -> None:
    model, fused = build_model(ModelCase()), traced()
    norms = [modules.norms for modules in layer_modules(model)]
    assert all(len(each) == 2 for each in norms)
    fused.bind(model)
    assert not any(modules.norms for modules in layer_modules(model)) and tiles_norms(model)
    # a copy runs its own code
    assert all(len(modules.norms) == 2 for modules in layer_modules(copy.deepcopy(model)))
    fused.close()
    assert [modules.norms for modules in layer_modules(model)] == norms


@pytest.mark.parametrize(
    ("device", "compile_layers", "maker"),
    [("cpu", None, ""), ("cuda", None, "compile"), ("cuda", False, ""), ("cpu", True, "compile")],
)
def test_layers_are_compiled_on_cuda(
    device: str, compile_layers: bool | None, maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedLayers, "problem", lambda self, model, device, dtype: "")
    args: Any = SimpleNamespace(device=torch.device(device), use_liger_kernel=False, bf16=True, process_index=0)
    found, line = layer_kernels.fused_layers(build_model(ModelCase()), args, compile_layers, None)
    assert found.maker == maker and line.startswith("torch.compile runs 5 norms") == bool(maker)


def test_a_wrong_kernel_is_noticed() -> None:
    fused, model = traced(), build_model(ModelCase())
    assert fused.problem(model, CPU, torch.float64) == ""
    wrong = traced()
    wrong._made = lambda found: lambda *inputs: inputs[0] * inputs[1] * 1.001  # type: ignore[method-assign]
    assert "differs from the model's own code" in wrong.problem(model, CPU, torch.float64)


def train_compiled(config: dict[str, Any]) -> Any:
    made = layer_kernels.FusedLayers
    layer_kernels.FusedLayers = partial(made, backend="aot_eager")  # type: ignore[misc,assignment]
    try:
        return train_on_rank(ModelCase(promoted=True), random_rows([61, 13, 50, 5, 44, 8, 21, 34]), config, {"max_steps": 4})
    finally:
        layer_kernels.FusedLayers = made  # type: ignore[misc]


STAGES = {"stages": 2, "tokens_per_rank": 32}


@pytest.mark.wide
@pytest.mark.parametrize(
    "num_ranks,config",
    [
        (2, {"tokens_per_rank": 40, "degrees": [1, 2]}),
        (2, {"parameters": "sharded", "tile_tokens": 8}),
        (4, {"parameters": "sharded", **STAGES}),
        (4, {"parameters": "gathered_per_step", **STAGES}),
    ],
)
def test_training_on_groups_and_shards_follows_one_plain_process(ranks, num_ranks: int, config: dict[str, Any]) -> None:
    expected_losses, expected = plain_training(ModelCase(promoted=True), random_rows([61, 13, 50, 5, 44, 8, 21, 34]), 4)
    results = ranks(num_ranks).run(train_compiled, {"compile_layers": True, **config}, timeout_s=300.0)
    assert expected.keys() == set().union(*(weights for *_, weights in results))
    for losses, _, weights in results:
        assert losses == pytest.approx(expected_losses, rel=1e-9)
        assert max(relative_error(weight, expected[name]) for name, weight in weights.items()) <= 1e-9


def test_a_run_counts_what_its_kernels_save(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layer_kernels, "FusedLayers", partial(FusedLayers, backend="eager"))
    for settings, is_counted in (({"compile_layers": True}, True), ({}, False)):
        trainer = make_trainer(ModelCase(), random_rows([9, 5]), str(tmp_path), settings, {"max_steps": 1})
        model = trainer.longctx_run.setup.costs.model
        assert model.fuses_norms == model.fuses_gates == model.fuses_rotary == is_counted
        assert not model.fuses_gated_norms
        trainer = make_trainer(HYBRID, random_rows([9, 5]), str(tmp_path), settings, {"max_steps": 1})
        found = trainer.longctx_run.setup.costs.model
        assert found.fuses_gated_norms == found.fuses_convolutions == is_counted and not found.fuses_scans


def test_without_a_compiler_layers_run_their_own_code(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(layer_kernels, "FusedLayers", partial(FusedLayers, backend="no such backend"))
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(ModelCase(), random_rows([9, 5]), str(tmp_path), {"compile_layers": True}, {"max_steps": 1})
    assert "compile_layers is left out, and layers run their own code" in caplog.text
    trainer.train()
    assert trainer.longctx_run.fused.maker == ""


def test_kernels_that_a_user_put_into_the_model_are_refused() -> None:
    model = build_model(ModelCase())
    assert kernel_problems(ModelFacts.of(model)) == []
    compiled = copy.deepcopy(model)
    compiled.model.norm.forward = torch.compile(compiled.model.norm.forward, backend="eager")
    assert "model.norm was compiled by torch.compile" in kernel_problems(ModelFacts.of(compiled))[0]
    from_hub = copy.deepcopy(model)
    from_hub._use_kernels = True
    assert "use_kernels=True" in kernel_problems(ModelFacts.of(from_hub))[0]


class KernelOfHub(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight


def test_kernels_of_the_hub_that_stayed_in_the_model_are_refused(monkeypatch) -> None:
    model = build_model(ModelCase())
    norm: Any = model.model.layers[1].input_layernorm
    # the package `kernels` marks classes and binds forwards like this, also without transformers
    monkeypatch.setattr(type(norm), "kernel_layer_name", "RMSNorm", raising=False)
    norm.forward = MethodType(type(norm).forward, norm)
    assert kernel_problems(ModelFacts.of(model)) == []
    norm.forward = MethodType(KernelOfHub.forward, norm)
    (problem,) = kernel_problems(ModelFacts.of(model))
    assert "model.layers.1.input_layernorm (LlamaRMSNorm) is that of KernelOfHub.forward, a kernel of the hub" in problem


def test_liger_is_refused_where_it_cannot_be_exact(tmp_path) -> None:
    arguments = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}
    with pytest.raises(ValueError, match="its rotary embedding writes over queries and keys"):
        make_trainer(ModelCase(), random_rows([9, 5]), tempfile.mkdtemp(dir=tmp_path), {"compile_layers": True}, arguments)

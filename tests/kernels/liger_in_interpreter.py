"""Liger's norm and gated activations in Triton's interpreter against transformers; `test_liger.py` runs this file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from helpers.measures.engine_steps import EngineStep
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.policies import replayed
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer
from torch import Tensor
from transformers.models.llama import modeling_llama

from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.kernel_places import kernel_problems
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.plan.core.types import LayerPolicy
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core import kernels as liger

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> Iterator[None]:
    """Functions of CUDA's own library, which the interpreter lacks, in Triton's words."""
    tl = importlib.import_module("triton.language")
    monkeypatch.setattr(importlib.import_module("liger_kernel.ops.rms_norm"), "rsqrt", lambda x: tl.math.rsqrt(x))
    monkeypatch.setattr(
        importlib.import_module("liger_kernel.ops.geglu"), "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1, raising=False
    )
    yield


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_kernels_are_the_models_own_code(family: str) -> None:
    model = build_model(ModelCase(family, dtype=torch.float32))
    fused = FusedLayers("liger")
    assert set(fused.counts(model)) == {"norms", "gated MLPs"}
    assert fused.problem(model, CPU, torch.float32) == ""


def test_gradients_are_those_of_plain_transformers_under_every_policy() -> None:
    case = ModelCase(dtype=torch.float32)
    plain, model = build_model(case), build_model(case)
    fused = FusedLayers("liger")
    fused.bind(model)
    models = iter([plain, model])
    step = EngineStep(HostTier.on(CPU, 2**20), [5, 4], lambda: next(models))
    for policy in (LayerPolicy(), replayed(1.0), replayed(0.3, 0.4, mlp=0.5, input_host=0.5), replayed(0.0, mlp=0.0)):
        loss, _ = step.forward((policy, policy), tile_tokens=4)
        loss.backward()
        assert step.error() <= 1e-5
    step.engine.unbind()
    fused.close()


def test_a_second_backward_is_refused() -> None:
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    product = liger.gated("silu", gate * 1, up * 1).sum()
    product.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward ran through Liger's gated activation"):
        product.backward()


def test_gradients_of_outputs_are_not_overwritten() -> None:
    x, weight, gradient = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True), torch.randn(3, 8)
    before: Tensor = gradient.clone()
    liger.norm(x, weight, 1e-6, False).backward(gradient)
    assert torch.equal(gradient, before)


def test_a_model_to_which_liger_was_applied_before_is_refused() -> None:
    model = build_model(ModelCase(dtype=torch.float32))
    apply = importlib.import_module("liger_kernel.transformers.monkey_patch")
    apply._patch_rms_norm_module(model.model.norm)
    assert "Liger was applied to model.norm" in kernel_problems(ModelFacts.of(model))[0]


def test_a_training_has_the_weights_of_one_without_liger(tmp_path, caplog) -> None:
    weights, norm, rotary = [], modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb
    for use in (False, True):
        arguments = {**PLAIN_DESCENT, "max_steps": 2, "per_device_train_batch_size": 2, "use_liger_kernel": use}
        case, rows = ModelCase(dtype=torch.float32), random_rows([9, 5])
        trainer = make_trainer(case, rows, str(tmp_path / str(use)), {"self_test": True}, arguments)
        if use:
            assert "Liger runs 5 norms, 2 gated MLPs; left out: its rotary embedding" in trainer.longctx_run.report.opening
        trainer.train()
        assert trainer.args.use_liger_kernel is use
        assert not any("forward" in vars(module) for module in trainer.model.model.layers.modules())
        weights.append(dict(trainer.model.named_parameters()))
    # the trainer did not apply Liger to all models of the process
    assert (modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb) == (norm, rotary)
    assert max(relative_error(weights[1][name], weights[0][name]) for name in weights[0]) <= 1e-5

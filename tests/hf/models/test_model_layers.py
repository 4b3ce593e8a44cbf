"""Decoder layers and the output head are found in order and through wrappers; what has none is refused by name."""

from __future__ import annotations

import pytest
import torch
from helpers.models.tiny_models import FAMILIES, ModelCase, build_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.hf.models.layers import layer_modules, output_head, tiles_mlps, tiles_norms
from hf_longctx.hf.models.logits import head_problem


def test_heads_are_found_inside_wrappers_or_missed_by_name() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build_model(ModelCase()), config)
    assert output_head(adapted) is adapted.base_model.model.lm_head
    assert head_problem(adapted) == ""
    bare = build_model(ModelCase()).model
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        output_head(bare)
    with pytest.raises(ValueError, match="Linear has no output embeddings"):
        output_head(nn.Linear(1, 1))
    assert "no config of transformers" in head_problem(nn.Linear(1, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_come_in_order_with_their_mlp_and_norms(family: str) -> None:
    model = build_model(ModelCase(family))
    found = layer_modules(model)
    assert [modules.layer for modules in found] == list(model.model.layers)
    for modules, layer in zip(found, model.model.layers, strict=True):
        assert modules.mlps == (layer.mlp,) and modules.whole_mlp == ""
        assert modules.norms == (layer.input_layernorm, layer.post_attention_layernorm)
        attention = layer.self_attn
        assert modules.projections == (attention.q_proj, attention.k_proj, attention.v_proj)


def test_layers_are_found_through_wrappers() -> None:
    model = build_model(ModelCase())
    assert [modules.layer for modules in layer_modules(nn.Sequential(model))] == list(model.model.layers)


def test_norms_of_other_names_are_left_alone() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    (modules,) = layer_modules(model)
    assert modules.norms == modules.projections == () and modules.mlps == (model.transformer.h[0].mlp,)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no layer of class GradientCheckpointingLayer"):
        layer_modules(nn.Linear(2, 2))


class Bare(GradientCheckpointingLayer):
    """A layer that holds what it is given, by name."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class OwnAttention(nn.Linear):
    """Attention, by its name."""


class Residual(nn.Linear):
    """An MLP that takes a residual too."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + residual


def test_mlps_of_a_layer_are_those_that_may_run_alone() -> None:
    attention, linear, residual = OwnAttention(2, 2), nn.Linear(2, 2), Residual(2, 2)
    layers = {
        "nothing": Bare(norm=nn.LayerNorm(2), self_attn=attention),
        "two": Bare(self_attn=attention, block_sparse_moe=linear, shared_mlp=nn.Linear(2, 2)),
        "attention": Bare(mixer=attention),
        "residual": Bare(self_attn=attention, mlp=residual),
        "other name": Bare(self_attn=attention, fc1=linear),
    }
    found = {name: layer_modules(nn.Sequential(layer))[0] for name, layer in layers.items()}
    assert {name: (len(modules.mlps), modules.whole_mlp) for name, modules in found.items()} == {
        "nothing": (0, ""),
        "two": (2, ""),
        "attention": (0, ""),
        "residual": (0, "Residual takes more than hidden states"),
        "other name": (0, "Bare has no module that is its MLP"),
    }
    assert {name: tiles_mlps(nn.Sequential(layer)) for name, layer in layers.items()} == {
        name: not modules.whole_mlp for name, modules in found.items()
    }
    assert tiles_norms(nn.Sequential(layers["nothing"])) and not tiles_norms(nn.Sequential(layers["two"]))

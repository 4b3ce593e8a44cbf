"""Hooks and sharing that would be trained wrong are refused at start by name; harmless ones pass."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import problems_at_start
from torch import nn


def hooked(model: Any, kind: str) -> Any:
    weight = model.model.layers[1].mlp.down_proj.weight
    getattr(weight, kind)(lambda *_: None)
    return model


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_is_refused_by_its_name(kind: str) -> None:
    (problem,) = problems_at_start(hooked(build_model(ModelCase()), kind))
    assert problem.startswith("the weight model.layers.1.mlp.down_proj.weight has a hook")
    assert "on_pre_optimizer_step" in problem


def test_a_hook_that_was_removed_is_no_problem() -> None:
    model = build_model(ModelCase())
    model.lm_head.weight.register_hook(lambda gradient: gradient).remove()
    assert problems_at_start(model) == []


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_on_the_head_is_refused_unless_everything_is_kept(kind: str) -> None:
    model = build_model(ModelCase())
    getattr(model.lm_head, kind)(lambda *_: None)
    (problem,) = problems_at_start(model)
    assert problem.startswith("the output head (Linear) has a hook") and "activations='keep'" in problem
    assert problems_at_start(model, activations="keep") == []


def share(model: Any, what: str) -> Any:
    layers = model.model.layers
    if what == "module":
        layers[1].mlp = layers[0].mlp
    elif what == "norm":
        model.model.norm.weight = layers[0].input_layernorm.weight
    else:
        layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    return model


@pytest.mark.parametrize("what", ["norm", "layers"])
@pytest.mark.parametrize("config", [{"stages": 2}, {"parameters": "sharded"}])
def test_a_weight_of_two_owners_is_refused_where_they_part(what: str, config: dict[str, Any]) -> None:
    model = share(build_model(ModelCase()), what)
    problems = problems_at_start(model, num_ranks=2, **config)
    first, second = ("model.layers.0.input_layernorm.weight", "model.norm.weight")
    if what == "layers":
        first, second = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    assert any(problem.startswith(f"{first} and {second} are one weight") for problem in problems), problems
    assert problems_at_start(model, num_ranks=2) == []


def test_a_module_in_two_layers_is_refused_by_both() -> None:
    model = share(build_model(ModelCase()), "module")
    (problem,) = problems_at_start(model)
    assert problem.startswith("layer 0 (mlp) and layer 1 (mlp) are one module")
    assert problems_at_start(model, activations="keep") == []


@pytest.mark.parametrize("config", [{"stages": 2}, {"parameters": "sharded"}])
def test_tied_embeddings_and_shared_activations_are_no_problem(config: dict[str, Any]) -> None:
    model = build_model(ModelCase(tied=True))
    model.model.layers[1].mlp.act_fn = model.model.layers[0].mlp.act_fn = nn.SiLU()
    assert problems_at_start(model, num_ranks=2, **config) == []


def test_a_shared_weight_that_nobody_trains_is_no_problem() -> None:
    model = share(build_model(ModelCase()), "norm")
    model.model.norm.weight.requires_grad_(False)
    assert problems_at_start(model, num_ranks=2, parameters="sharded") == []


@pytest.mark.parametrize("config", [{"stages": 2}, {"stages": "auto"}, {"parameters": "sharded"}])
def test_adapters_on_a_tied_head_are_no_problem(config: dict[str, Any]) -> None:
    lora = (("r", 2), ("target_modules", ["q_proj", "lm_head"]))
    model = build_model(ModelCase(tied=True, lora=lora))
    assert not [problem for problem in problems_at_start(model, num_ranks=2, **config) if "one weight" in problem]

"""The weights that autocast rounds at every use are found by a watched forward, and no others."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.tiny_models import ModelCase, build_model

from hf_longctx.hf.self_test.rounded import find_rounded
from hf_longctx.runtime.parameters.rounded import note_rounded, rounded_weights

CPU = torch.device("cpu")
MLP = {f"model.layers.*.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
ATTENTION = {f"model.layers.*.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
HEAD = "lm_head.weight"


def plain(**settings: Any) -> Any:
    return build_model(ModelCase(dtype=torch.float32, **settings))


def test_products_round_their_weights_and_embeddings_and_norms_do_not() -> None:
    assert find_rounded(plain(), CPU, None) == MLP | ATTENTION | {HEAD}
    # one weight for the embedding and the head
    assert find_rounded(plain(tied=True), CPU, None) == MLP | ATTENTION
    assert not find_rounded(build_model(ModelCase(dtype=torch.bfloat16)), CPU, None)


def test_experts_are_found_and_their_biases_stay_if_they_are_added_in_fp32() -> None:
    found = find_rounded(plain(family="gpt_oss", attention="eager"), CPU, None)
    assert {"model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.router.weight"} <= found
    assert not any("bias" in name for name in found)


def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.up_proj.weight.norm()


def in_fp32(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        up = F.linear(x.float(), self.up_proj.weight)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def asks(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.to(self.up_proj.weight.dtype)))


@pytest.mark.parametrize("forward", [scaled, in_fp32, asks])
def test_weights_that_a_users_forward_reads_in_fp32_stay_in_fp32(forward: Any) -> None:
    model = plain()
    # in one layer only, but all layers share a name
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(forward, mlp)
    assert find_rounded(model, CPU, None) == MLP - {"model.layers.*.mlp.up_proj.weight"} | ATTENTION | {HEAD}


def test_a_hook_that_reads_a_weight_keeps_it_in_fp32() -> None:
    model = plain()
    model.lm_head.register_forward_hook(lambda head, args, output: output + head.weight.mean())
    assert find_rounded(model, CPU, None) == MLP | ATTENTION


def test_a_model_that_cannot_be_watched_gathers_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    model = plain()
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    assert not find_rounded(model, CPU, None)
    assert "weights are gathered in fp32, since a copy of the model could not be watched: ZeroDivisionError" in caplog.text


def test_watching_draws_no_random_numbers_and_leaves_the_model_alone() -> None:
    model = plain()
    before, state = {name: weight.clone() for name, weight in model.state_dict().items()}, torch.get_rng_state()
    find_rounded(model, CPU, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_weight_is_rounded_only_under_all_of_its_names() -> None:
    model = plain()
    note_rounded(model, [HEAD, "model.layers.*.mlp.up_proj.weight"])
    assert set(rounded_weights(model)) == {HEAD, *(f"model.layers.{number}.mlp.up_proj.weight" for number in range(2))}
    model.model.embed_tokens.weight = model.lm_head.weight
    assert HEAD not in rounded_weights(model)

"""Adapters under the activation engine, with frozen base weights and some layers without any gradient, match plain HF."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from helpers.measures.engine_steps import EngineStep, counted
from helpers.measures.late_copies import LateCopies
from helpers.models.reference import TOLERANCE
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.policies import random_layer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.plan.core.types import LayerPolicy, TensorShare
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core import products

LENGTHS = [13, 1, 31, 7]
NUM_TOKENS = sum(LENGTHS)
PAIRS = sum(n * n for n in LENGTHS)
PROJECTIONS = ["q_proj", "k_proj", "v_proj"]
ATTENTION, MLP = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]


def adapted(targets: Any, layers: tuple[int, ...] = (0, 1), **settings: Any) -> Any:
    """Function that builds a tiny fp64 Llama with adapters on `targets` of some layers; its own weights are frozen."""

    def build() -> Any:
        config = peft.LoraConfig(
            r=2,
            target_modules=targets,
            layers_to_transform=list(layers),
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **settings,
        )
        model = peft.get_peft_model(build_model(ModelCase(promoted=True)), config, autocast_adapter_dtype=False).double()
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
                # DoRA's magnitudes lie about one and must stay there
                parameter.data = parameter.data + noise if parameter.dim() == 1 else noise
        return model.train()

    return build


def tier() -> HostTier:
    return HostTier(2**20, LateCopies(True))


def share(name: Any, recompute: float = 0.0, host: float = 0.0) -> TensorShare:
    return TensorShare(name, recompute=recompute, host=host, device=1 - recompute - host)


RECOMPUTE = LayerPolicy((share("attention_output", 1.0), share("qkv", 1.0), share("mlp", 1.0)))
KEEP = LayerPolicy((share("mlp", 1.0),))
HOST = LayerPolicy(
    (share("layer_input", host=1.0), share("attention_output", host=1.0), share("qkv", host=1.0), share("mlp", 1.0))
)
MIXED = LayerPolicy(
    (share("layer_input", host=0.5), share("attention_output", 0.25, 0.25), share("qkv", 0.25, 0.5), share("mlp", 0.5, 0.25))
)
POLICIES = {"recompute": RECOMPUTE, "keep": KEEP, "host": HOST, "mixed": MIXED}


@pytest.mark.daily(
    "peft-0-recompute-attention",
    "peft-0-recompute-mlp",
    "peft-0-recompute-both",
    "peft-0-keep-attention",
    "peft-0-host-attention",
    "peft-0-mixed-attention",
    "peft-8-recompute-attention",
    "peft-8-mixed-both",
    "fused-0-recompute-attention",
    "fused-8-recompute-both",
    "fused-8-mixed-both",
)
@pytest.mark.parametrize("targets", [ATTENTION, MLP, [*ATTENTION, *MLP]], ids=["attention", "mlp", "both"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tile_tokens", [0, 8])
@pytest.mark.parametrize("fused", [False, True], ids=["peft", "fused"])
def test_adapter_gradients_are_those_of_plain_hf(targets: list[str], name: str, tile_tokens: int, fused: bool) -> None:
    step = EngineStep(tier(), LENGTHS, adapted(targets), fused)
    assert step.engine.can_keep_qkv
    loss, _ = step.forward((POLICIES[name],) * 2, tile_tokens)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=TOLERANCE)
    assert step.error() <= TOLERANCE
    del loss
    assert step.engine.tier.stored_bytes == 0


@pytest.mark.wide
@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_random_policies_match(data: st.DataObject) -> None:
    step = EngineStep(tier(), LENGTHS, adapted([*ATTENTION, *MLP]), fused=data.draw(st.booleans()))
    loss, _ = step.forward(tuple(random_layer(data) for _ in range(2)), data.draw(st.sampled_from([0, 5, 16])))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=TOLERANCE)
    assert step.error() <= TOLERANCE


def test_kept_projections_are_not_multiplied_again_beside_fused_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    step = EngineStep(tier(), LENGTHS, adapted(PROJECTIONS), fused=True)
    computed: list[int] = []
    first = products._first_outputs
    monkeypatch.setattr(products, "_first_outputs", lambda x_TC, *rest: (computed.append(rest[-1]), first(x_TC, *rest))[1])
    step.forward((MIXED,) * 2)[0].backward()
    assert step.error() <= TOLERANCE
    again = MIXED.share("qkv").cuts(NUM_TOKENS)[0]
    # queries, keys and values of two layers once, and the recomputed share again
    assert sorted(computed) == sorted(2 * 3 * [NUM_TOKENS, again])


def test_frozen_projections_multiply_once_and_adapters_again() -> None:
    step = EngineStep(tier(), LENGTHS, adapted(ATTENTION))
    adapter_tokens = []
    for layer in step.model.get_base_model().model.layers:
        inner = layer.self_attn.q_proj.lora_A["default"]
        inner.register_forward_hook(lambda module, inputs, output: adapter_tokens.append(output.shape[1]))
    with counted(step.model) as work:
        step.forward((KEEP,) * 2)[0].backward()
    assert step.error() <= TOLERANCE
    # the small products of the adapters save tensors for their own gradients, so they are replayed
    assert adapter_tokens == [NUM_TOKENS] * 4
    assert work.projected == 2 * 3 * NUM_TOKENS
    assert work.pairs == 2 * PAIRS


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("targets", [["q_proj"], ["o_proj"], MLP, ["down_proj"]], ids=str)
def test_layers_below_the_first_trained_weight_run_as_they_are(name: str, targets: list[str]) -> None:
    # the input of the second layer has no gradient, and nothing in the first layer has one
    step = EngineStep(tier(), LENGTHS, adapted(targets, (1,)))
    with counted(step.model) as work:
        loss, activations = step.forward((POLICIES[name],) * 2)
        first, second = activations.slots.values()
        assert first.held == [] and first.mlps[0].kept_bytes == first.whole_input_bytes == 0
        loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=TOLERANCE)
    assert step.error() <= TOLERANCE
    # only the second layer's attention is counted
    front = POLICIES[name].share("attention_output").cuts(NUM_TOKENS)[0]
    assert PAIRS <= work.pairs <= PAIRS + front**2
    assert [record.held for record in second.attention] == [()] and second.projections.held == ()
    del loss
    assert step.engine.tier.stored_bytes == 0


def test_inputs_that_are_made_to_have_gradients_match() -> None:
    # peft prepares models for checkpointing in this way: the embedding's output requires a gradient, its weights do not
    build = adapted(MLP, (1,))

    def prepared() -> Any:
        model = build()
        model.enable_input_require_grads()
        return model

    step = EngineStep(tier(), LENGTHS, prepared)
    step.forward((MIXED,) * 2)[0].backward()
    assert step.error() <= TOLERANCE


def test_an_adapter_that_reads_what_was_projected_matches() -> None:
    # DoRA scales the frozen product too, so it saves it
    step = EngineStep(tier(), LENGTHS, adapted([*ATTENTION, *MLP], use_dora=True))
    assert step.engine.can_keep_qkv
    loss, _ = step.forward((MIXED, KEEP))
    loss.backward()
    assert step.error() <= TOLERANCE


def test_only_the_frozen_product_is_taken_over() -> None:
    model = adapted(ATTENTION)()
    modules = layer_modules(model)[0]
    attention = model.get_base_model().model.layers[0].self_attn
    assert modules.projections == (attention.q_proj.base_layer, attention.k_proj, attention.v_proj.base_layer)


def test_planted_loss_of_the_frozen_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_longctx.runtime.activations import host_tier

    fetch = host_tier.SplitTensor.fetch

    def off(split: Any, front: Any = ()) -> Tensor:
        return fetch(split, front) * (1 + 1e-6)

    step = EngineStep(tier(), LENGTHS, adapted(ATTENTION))
    monkeypatch.setattr(host_tier.SplitTensor, "fetch", off)
    step.forward((KEEP,) * 2)[0].backward()
    assert not step.error() <= TOLERANCE

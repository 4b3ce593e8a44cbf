"""Kept queries, keys and values: nothing is multiplied twice, bytes are as planned, gradients equal plain HF.

Counted is what really runs: tokens that a projection multiplies by its weights while an engine keeps its output.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.measures.engine_steps import EngineStep, counted
from helpers.measures.late_copies import LateCopies
from helpers.models.reference import TOLERANCE, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.policies import random_layer, same_policy
from helpers.ranks.rank_steps import check_step
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy, TensorShare
from hf_longctx.plan.memory.saved_tensors import held_bytes
from hf_longctx.runtime.activations import host_tier
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.records import ProjectionRecord
from hf_longctx.runtime.core.host_copies import PlainCopies
from hf_longctx.runtime.core.products import _Product

# packed documents of odd lengths, one of a single token
LENGTHS = [13, 1, 31, 7]
NUM_TOKENS = sum(LENGTHS)
PAIRS = sum(n * n for n in LENGTHS)


def share(name: Any, recompute: float = 0.0, host: float = 0.0) -> TensorShare:
    return TensorShare(name, recompute=recompute, host=host, device=1 - recompute - host)


def keeping(recompute: float = 0.0, host: float = 0.0) -> LayerPolicy:
    """A replayed layer that keeps attention outputs and queries, keys and values, except for these shares."""
    return LayerPolicy((share("qkv", recompute, host), share("mlp", 1.0)))


MIXED = LayerPolicy(
    (share("layer_input", host=0.5), share("attention_output", 0.25, 0.25), share("qkv", 0.25, 0.5), share("mlp", 0.5, 0.25))
)


def tier(out_is_late: bool = False) -> HostTier:
    return HostTier(2**20, LateCopies(out_is_late))


def biased(family: str = "llama") -> Any:
    """A model builder whose projections have biases if the family allows them."""

    def build() -> Any:
        model = build_model(ModelCase(family, promoted=True))
        generator = torch.Generator().manual_seed(2)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                module.bias.data = torch.randn(module.bias.shape, generator=generator, dtype=torch.float64)
        return model

    return build


# families with norms on queries and keys, with biases, with neither
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("recompute,host", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.0), (0.5, 0.25), (0.25, 0.75)])
def test_projections_multiply_once_and_the_recomputed_share_again(family: str, recompute: float, host: float) -> None:
    step = EngineStep(tier(), LENGTHS, biased(family))
    with counted(step.model) as work:
        loss, _ = step.forward((keeping(recompute, host),) * 2)
        loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=TOLERANCE)
    assert step.error() <= TOLERANCE
    # q, k and v of each layer, once in full; if nothing is kept, the engine leaves projections alone
    again = round(recompute * NUM_TOKENS)
    assert work.projected == (0 if recompute == 1 else 2 * 3 * (NUM_TOKENS + again))
    assert work.pairs == 2 * PAIRS
    assert work.mlp_tokens == 2 * 2 * NUM_TOKENS


@pytest.mark.wide
@settings(max_examples=30, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_random_shares_of_all_classes_match_and_hold_the_planned_bytes(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["llama", "qwen3", "qwen2"]))
    # at least a few tokens: with one or two the gradients of queries are rounding noise
    lengths = [17, *data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 31]), max_size=3))]
    step = EngineStep(tier(data.draw(st.booleans())), lengths, biased(family))
    layers = tuple(random_layer(data) for _ in range(2))
    tokens = sum(lengths)
    with counted(step.model) as work:
        loss, activations = step.forward(layers, data.draw(st.sampled_from([0, 1, 5, 16, 100])))
        # layers that keep everything have no slot, so none of their bytes are counted by the engine
        split = tuple(layer for layer in layers if not layer.keeps_everything)
        planned = held_bytes(model_spec(step.model), ActivationPolicy(0, 0, split), len(split), tokens)
        assert activations.held_bytes() == planned
        assert step.engine.tier.stored_bytes == planned[1]
        loss.backward()
    assert float(loss.detach()) == pytest.approx(step.expected_loss, rel=TOLERANCE)
    assert step.error() <= TOLERANCE
    del loss
    assert step.engine.tier.stored_bytes == 0
    kept = [layer.share("qkv") for layer in split if layer.share("qkv").recompute < 1]
    assert work.projected == 3 * sum(tokens + qkv.cuts(tokens)[0] for qkv in kept)
    fronts = [layer.share("mlp").cuts(tokens)[0] for layer in split]
    assert work.mlp_tokens == 2 * tokens + sum(fronts)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("out_is_late", [False, True])
def test_two_forwards_in_flight_do_not_disturb_each_other(order: tuple[int, int], out_is_late: bool) -> None:
    step = EngineStep(tier(out_is_late), LENGTHS)
    losses = [step.forward(layers)[0] for layers in ((MIXED, keeping()), (keeping(0.5, 0.5), MIXED))]
    for place in order:
        losses[place].backward()
    assert step.error(2) <= TOLERANCE


def test_a_second_backward_multiplies_again_and_stays_right() -> None:
    step = EngineStep(tier(True), LENGTHS)
    with counted(step.model) as work:
        loss, activations = step.forward((keeping(0.25, 0.5),) * 2)
        loss.backward(retain_graph=True)
        assert step.error() <= TOLERANCE
        assert work.projected == 2 * 3 * (NUM_TOKENS + NUM_TOKENS // 4)
        loss.backward()
    assert step.error() <= TOLERANCE
    assert work.projected == 2 * 3 * (2 * NUM_TOKENS + NUM_TOKENS // 4)
    del loss
    assert activations.held_bytes()[1] == 0


def test_what_is_kept_is_the_storage_that_is_counted() -> None:
    step = EngineStep(None, LENGTHS)
    _, activations = step.forward((keeping(),) * 2)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for slot in activations.slots.values()
        for tensor in (held._device for held in slot.projections.held)
    }
    # fp64: 32 features for queries, 16 each for keys and values
    assert sum(storages.values()) == 2 * NUM_TOKENS * 8 * (32 + 2 * 16)


def test_the_layer_before_is_fetched_while_a_layer_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    to_device, fetch = LateCopies.to_device, host_tier.HostTensor.fetch
    monkeypatch.setattr(LateCopies, "to_device", lambda *arguments: (log.append("back"), to_device(*arguments))[1])
    monkeypatch.setattr(host_tier.HostTensor, "fetch", lambda *arguments: (log.append("read"), fetch(*arguments))[1])
    step = EngineStep(tier(), LENGTHS)
    step.forward((keeping(0.0, 0.5),) * 2)[0].backward()
    assert step.error() <= TOLERANCE
    # before the last layer reads its own q, k and v, those of the first layer are being fetched
    assert log == ["back", "back", "back", "read", "back", "read", "back", "read", "back", "read", "read", "read"]


@pytest.mark.daily("ulysses-qwen3")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_sequence_groups_match(ranks, method: str, family: str) -> None:
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(2, (0, 1, 2, 3))]], lengths, 2, ulysses=1 if method == "ring" else 0)
    layers = (keeping(0.25, 0.5), LayerPolicy((share("attention_output", 1.0), share("mlp", 0.5))))
    check_step(ranks(2), ModelCase(family), same_policy(plan, *layers, tile_tokens=8), lengths)


@pytest.mark.daily("gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_parameters_match(ranks, parameters: Any) -> None:
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], lengths, 2, parameters=parameters)
    layers = (keeping(0.5, 0.25), keeping())
    check_step(ranks(2), ModelCase("qwen2"), same_policy(plan, *layers, tile_tokens=8), lengths)


def half_precision(weights: torch.dtype, has_autocast: bool) -> Any:
    return lambda: build_model(ModelCase("qwen2", dtype=weights, autocast=has_autocast))


@pytest.mark.daily("weights1-False")
@pytest.mark.parametrize("weights,has_autocast", [(torch.float32, True), (torch.bfloat16, False)])
def test_half_precision_gives_the_very_gradients_of_recomputation(weights: torch.dtype, has_autocast: bool) -> None:
    def gradients(layer: LayerPolicy) -> dict[str, Tensor]:
        step = EngineStep(tier(), LENGTHS, half_precision(weights, has_autocast))
        step.forward((layer,) * 2, tile_tokens=0)[0].backward()
        return {name: p.grad for name, p in step.model.named_parameters()}

    kept, again = gradients(keeping(0.0, 0.5)), gradients(keeping(1.0))
    for name, gradient in again.items():
        assert kept[name].dtype == gradient.dtype == weights
        # equal numbers are multiplied in equal precision, so only the order of sums may differ
        assert relative_error(kept[name].double(), gradient.double()) <= 0.02, name


def test_autocast_leaves_double_precision_alone() -> None:
    step = EngineStep(tier(), LENGTHS, lambda: build_model(ModelCase(promoted=True, autocast=True)))
    step.forward((MIXED,) * 2)[0].backward()
    assert step.error() <= TOLERANCE


def test_kept_outputs_are_in_the_precision_of_autocast() -> None:
    step = EngineStep(tier(), LENGTHS, half_precision(torch.float32, True))
    _, activations = step.forward((keeping(),) * 2)
    held = [tensor for slot in activations.slots.values() for tensor in slot.projections.held]
    assert {tensor._device.dtype for tensor in held} == {torch.bfloat16}


def test_a_fused_projection_is_kept_too() -> None:
    config = transformers.Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=512,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = transformers.Phi3ForCausalLM(config)
    assert [modules.projections for modules in layer_modules(model)] == [
        (layer.self_attn.qkv_proj,) for layer in model.model.layers
    ]
    assert ActivationEngine(layer_modules(model)).can_keep_qkv


class Doubled(torch.nn.Linear):
    """A linear module with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_projection_of_another_make_is_refused_by_name_and_recomputed_rightly() -> None:
    def build() -> Any:
        model = build_model(ModelCase(promoted=True))
        for layer in model.model.layers:
            layer.self_attn.k_proj.__class__ = Doubled
        return model

    step = EngineStep(tier(), LENGTHS, build)
    assert not step.engine.can_keep_qkv
    with pytest.raises(ValueError, match=r"0\.75 of qkv is kept, but LlamaDecoderLayer does not make queries"):
        step.forward((keeping(0.25),) * 2)
    # the rest of the policy is executed as before
    step.forward((LayerPolicy(), keeping(1.0)))[0].backward()
    assert step.error() <= TOLERANCE


def test_outputs_that_are_clipped_in_place_are_not_kept() -> None:
    model = build_model(ModelCase())
    for layer in model.model.layers:
        layer.self_attn.config.clip_qkv = 8.0
    assert not ActivationEngine(layer_modules(model)).can_keep_qkv


def wrong_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, replacement: Any, *layers: LayerPolicy) -> bool:
    """Whether a bug changes gradients."""
    step = EngineStep(tier(), LENGTHS)
    with monkeypatch.context() as planted:
        planted.setattr(owner, name, replacement)
        step.forward(layers or (keeping(0.25, 0.5),) * 2)[0].backward()
    return not step.error() <= TOLERANCE


def test_planted_outputs_of_another_layer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take, records = ProjectionRecord.take, []

    def of_another(record: Any, place: int) -> Any:
        if record.is_replay and record not in records:
            records.append(record)
        if record.is_replay and len(records) == 2:
            return others.pop(place)
        found = take(record, place)
        if found is not None:
            others[place] = found
        return found

    others: dict[int, Any] = {}
    assert wrong_after(monkeypatch, ProjectionRecord, "take", of_another, *(keeping(),) * 2)


def test_planted_swap_of_front_and_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = host_tier.SplitTensor.fetch
    assert wrong_after(
        monkeypatch,
        host_tier.SplitTensor,
        "fetch",
        lambda split, front=(): torch.cat([fetch(split), *front]) if front else fetch(split),
    )


def test_planted_blank_instead_of_what_was_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = host_tier.SplitTensor.fetch

    def blank(split: Any, front: Any = ()) -> Tensor:
        whole = fetch(split, front)
        return torch.cat([*front, torch.zeros_like(whole[split.start :])]) if front else whole

    assert wrong_after(monkeypatch, host_tier.SplitTensor, "fetch", blank)


def test_planted_weight_gradient_of_recomputed_tokens_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_front(ctx: Any, gradient_TN: Tensor) -> Any:
        x_TC, weight_NC = ctx.saved_tensors
        front = len(gradient_TN) // 4
        return gradient_TN @ weight_NC, gradient_TN[:front].T @ x_TC[:front], None, None

    assert wrong_after(monkeypatch, _Product, "backward", staticmethod(of_the_front))


def test_planted_reuse_before_the_copy_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostTier.store

    def stored_and_given_back(tier: HostTier, tensor: Tensor) -> Any:
        stored = store(tier, tensor)
        for part in stored._parts:
            tier.slab.give(part.run, ())
        return stored

    assert wrong_after(monkeypatch, HostTier, "store", stored_and_given_back)


def test_unbinding_leaves_nothing_behind() -> None:
    model = build_model(ModelCase(promoted=True))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    engine = ActivationEngine(layer_modules(model), HostTier(1024, PlainCopies()))
    assert all("forward" in vars(linear) for modules in engine._bindings for linear in modules.modules.projections)
    engine.unbind()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before

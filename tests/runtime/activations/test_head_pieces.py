"""Attention in pieces of heads: loss and gradients equal plain HF, whatever else the plan does, or pieces are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import check_step, rank_inputs, run_step
from torch import Tensor, nn

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import cuts_heads, layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import LayerPolicy, StepPlan, TensorShare
from hf_longctx.plan.core.validate import PlanError, validate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
LENGTHS = [13, 1, 31, 7]
PIECES = (replayed(1.0, head_pieces=2), replayed(1.0, head_pieces=4))
LLAMA = ModelCase(num_heads=8, num_kv_heads=4, promoted=True)


def step(model: Any, plan: StepPlan, rows: list[dict[str, list[int]]], bind: Callable[[], None] | None = None) -> float:
    """Runs one step of one rank; leaves gradients on the model and returns the loss. bind: called before the engine binds."""
    patch_model(model)
    if bind is not None:
        bind()
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**24))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), timeout_s=1.0), CPU)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    try:
        result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    finally:
        engine.unbind()
    return float(result.loss)


def packed(*policies: LayerPolicy, tile_tokens: int = 8) -> StepPlan:
    return same_policy(plan_of([[(1, tuple(range(len(LENGTHS))))]], LENGTHS, 1), *policies, tile_tokens=tile_tokens)


def check_equal(
    build: Callable[[], Any], plan: StepPlan, lengths: list[int], adapt: Callable[[Any], None] = lambda _: None
) -> Any:
    """Asserts that a step of one rank gives the loss and gradients of plain HF; returns the model."""
    rows, plain, model = random_rows(lengths), build(), build()
    adapt(plain)
    adapt(model)
    expected_loss, _ = reference_step(plain, rows)
    assert step(model, plan, rows) == pytest.approx(expected_loss, rel=TOLERANCE)
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=TOLERANCE, atol=TOLERANCE * float(expected.grad.norm()))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_window", "granite", "qwen3_moe"])
@pytest.mark.parametrize("tile_tokens", [0, 8])
def test_pieces_give_the_same_gradients(family: str, tile_tokens: int) -> None:
    case = ModelCase(family, num_heads=8, num_kv_heads=4, promoted=True)
    model = check_equal(lambda: build_model(case), packed(*PIECES, tile_tokens=tile_tokens), LENGTHS)
    # nothing is left on the model
    assert "forward" not in vars(model.model.layers[0].self_attn) and len(list(model.modules())) == len(set(model.modules()))


def with_biases() -> Any:
    """A Llama with random biases of all projections."""
    model = build_model(LLAMA)
    for layer in model.model.layers:
        for linear in (getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")):
            linear.bias = nn.Parameter(torch.linspace(-0.3, 0.4, linear.out_features, dtype=torch.float64))
    return model


def test_biases_count_once() -> None:
    check_equal(with_biases, packed(*PIECES), LENGTHS)


@pytest.mark.parametrize(
    "layers",
    [
        (replayed(0.0, head_pieces=4), replayed(0.0, host=1.0, input_host=1.0, head_pieces=2)),
        (replayed(0.5, host=0.25, input_host=0.5, mlp=0.5, head_pieces=4), LayerPolicy()),
        (replayed(0.3), replayed(1.0, input_host=1.0, head_pieces=4)),
    ],
)
def test_pieces_keep_and_offload_what_the_policy_says(layers: tuple[LayerPolicy, ...]) -> None:
    check_equal(lambda: build_model(LLAMA), packed(*layers), LENGTHS)


def test_an_input_that_another_run_in_pieces_makes_is_the_same() -> None:
    again = LayerPolicy((TensorShare("layer_input", recompute=1.0), *replayed(1.0).shares[1:]), 4)
    check_equal(lambda: build_model(LLAMA), packed(PIECES[1], again), LENGTHS)


@pytest.mark.parametrize("frozen", [("q_proj",), ("k_proj", "o_proj"), ("embed_tokens", "layers.0"), ("norm",)])
def test_frozen_weights_get_no_gradient(frozen: tuple[str, ...]) -> None:
    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(word in name for word in frozen))

    case = ModelCase("qwen3", num_heads=8, num_kv_heads=4, promoted=True)
    check_equal(lambda: build_model(case), packed(*PIECES), LENGTHS, freeze)


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", ["llama", "qwen3_window"])
def test_slices_run_in_pieces(family: str) -> None:
    plan = sliced_plan([29, 5], [cut(0, [11, 9, 9])[:1], cut(0, [11, 9, 9])[1:2], [*cut(0, [11, 9, 9])[2:], *cut(1, [5])]], ORDER)
    case = ModelCase(family, num_heads=8, num_kv_heads=4, promoted=True)
    check_equal(lambda: build_model(case), same_policy(plan, *PIECES, tile_tokens=8), [29, 5])


ORDER = "0F0 0F1 0F2 0B2 0B1 0B0"


def test_autocast_rounds_pieces_as_it_rounds_layers() -> None:
    rows, case = random_rows(LENGTHS), ModelCase("qwen3", num_heads=8, num_kv_heads=4, dtype=torch.float32)
    gradients = []
    for head_pieces in (1, 4):
        model = build_model(case)
        with torch.autocast("cpu", torch.bfloat16):
            step(model, packed(*(replayed(1.0, head_pieces=head_pieces),) * 2), rows)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, whole in gradients[0].items():
        found = gradients[1][name]
        assert found.dtype == whole.dtype == torch.float32
        # processors with other vectors sum in another order: up to 0.0204 of the norm was seen
        assert float((found - whole).norm()) <= 3e-2 * float(whole.norm()), name


@pytest.mark.daily("qwen3-ulysses")
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_groups_run_in_pieces(ranks, method: str, family: str) -> None:
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(2, (0, 1, 2, 3))]], lengths, 2, ulysses=1 if method == "ring" else 0)
    case = ModelCase(family, num_heads=8, num_kv_heads=4, promoted=True)
    check_step(ranks(2), case, same_policy(plan, *PIECES, tile_tokens=8), lengths)


@pytest.mark.wide
def test_more_ranks_than_kv_heads_of_a_piece_run_in_pieces(ranks) -> None:
    # one KV head with two readers for each piece, and a hybrid of them
    for ulysses in (0, 2):
        plan = plan_of([[(4, (0, 1))]], [41, 18], 4, ulysses=ulysses)
        case = ModelCase(num_heads=16, num_kv_heads=4, promoted=True)
        check_step(ranks(4), case, same_policy(plan, *PIECES, tile_tokens=8), [41, 18])


@pytest.mark.daily("gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_weights_are_gathered_when_pieces_run(ranks, parameters: Any) -> None:
    lengths = [33, 9, 12]
    plan = plan_of([[(2, (0, 1))], [(1, (2,)), (1, ())]], lengths, 2, parameters=parameters)
    check_step(ranks(2), LLAMA, same_policy(plan, *PIECES, tile_tokens=8), lengths)


def test_a_copy_of_a_model_runs_by_itself() -> None:
    model = build_model(LLAMA)
    patch_model(model)
    engine = ActivationEngine(layer_modules(model))
    copied, rows = copy.deepcopy(model), random_rows(LENGTHS)
    engine.unbind()
    whole = step(copy.deepcopy(copied), packed(*(replayed(1.0),) * 2), rows)
    assert step(copied, packed(*PIECES), rows) == pytest.approx(whole, rel=TOLERANCE)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_kernels_of_rotary_embeddings_leave_pieces_alone() -> None:
    rows, model = random_rows(LENGTHS), build_model(LLAMA)
    expected_loss, _ = reference_step(build_model(LLAMA), rows)
    fused = FusedLayers("compile", backend="eager")
    assert step(model, packed(*PIECES), rows, lambda: fused.bind(model)) == pytest.approx(expected_loss, rel=TOLERANCE)
    fused.close()


def hooked(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


class Doubled(nn.Linear):
    """A user's own projection."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubled(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.__class__ = Doubled


def own_forward(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    run = attention.forward
    attention.forward = lambda *args, **keywords: run(*args, **keywords)


def own_class(model: Any) -> None:
    attention = model.model.layers[1].self_attn

    class Scaled(type(attention)):  # type: ignore[misc]
        def forward(self, *args: Any, **keywords: Any) -> Any:
            return super().forward(*args, **keywords)

    attention.__class__ = Scaled


CHANGED = {"hook": hooked, "projection": doubled, "forward": own_forward, "class": own_class}


@pytest.mark.parametrize("change", CHANGED)
def test_changed_attention_is_not_cut(change: str) -> None:
    model = build_model(LLAMA)
    assert cuts_heads(model)
    CHANGED[change](model)
    assert not cuts_heads(model)
    with pytest.raises(ValueError, match="attention in 4 pieces of heads, but attention of LlamaDecoderLayer cannot be cut"):
        step(model, packed(*PIECES), random_rows(LENGTHS))


OTHERS = {
    "olmo2": ModelCase("olmo2"),
    "gemma2": ModelCase("gemma2", attention="eager"),
    "dora": ModelCase(lora=(("use_dora", True), ("target_modules", ("v_proj",)))),
    "dropout": ModelCase(dropout=0.1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_is_not_cut(name: str) -> None:
    assert not cuts_heads(build_model(OTHERS[name]))


def test_a_hook_that_comes_later_is_refused() -> None:
    model = build_model(LLAMA)
    with pytest.raises(RuntimeError, match="k_proj of LlamaAttention has hooks, which would see some heads at a time; undo this"):
        patch_model(model)
        engine = ActivationEngine(layer_modules(model))
        hooked(model)
        executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), timeout_s=1.0), CPU)
        plan = packed(*PIECES)
        executor.run(plan.for_rank(0), rank_inputs(plan, random_rows(LENGTHS), 0)["chunks"], 48, engine=engine)


@pytest.mark.parametrize(
    "layer,message",
    [
        (replayed(1.0, head_pieces=3), "4 KV heads cannot be divided by that"),
        (LayerPolicy(head_pieces=2), "queries, keys and values are kept"),
    ],
)
def test_pieces_that_cannot_be_are_refused(layer: LayerPolicy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(build_model(LLAMA), packed(layer), random_rows(LENGTHS))


@pytest.mark.parametrize("layer", [LayerPolicy(head_pieces=2), replayed(1.0, head_pieces=0)])
def test_plans_with_pieces_that_cannot_be_are_invalid(layer: LayerPolicy) -> None:
    with pytest.raises(PlanError, match="pieces of heads; there must be at least 1"):
        validate_plan(packed(layer))


def test_a_group_with_more_ranks_than_heads_of_a_piece_is_refused(ranks) -> None:
    plan = plan_of([[(4, (0,))]], [41], 4)
    with pytest.raises(RankFailure, match="4 ranks share 2 heads"):
        run_step(ranks(4), LLAMA, same_policy(plan, *(replayed(1.0, head_pieces=4),) * 2), random_rows([41]))

"""The loss in token tiles: that of HF logits and summed cross-entropy, with its gradients, and no logits beyond a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import VOCAB_SIZE, ModelCase, build_model, relative_error
from torch import Tensor, nn

from hf_longctx.hf.layers import output_head
from hf_longctx.runtime.loss import IGNORE_INDEX, summed_cross_entropy
from hf_longctx.runtime.output_head import OutputHead, check_untouched

TOLERANCE = 1e-12
NUM_TOKENS = 23
MASKS: dict[str, tuple[int, ...]] = {
    "none": (),
    "some": (0, 4, 5, 6, 22),
    "front": tuple(range(14)),
    "middle": tuple(range(6, 15)),
    "back": tuple(range(9, 23)),
    "all": tuple(range(23)),
}


def tokens(mask: str = "some", num_tokens: int = NUM_TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and next-token labels, each [1, T]."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=generator)
    labels[0, list(MASKS[mask])] = IGNORE_INDEX
    return input_ids, labels


def logits_of(model: nn.Module, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids, use_cache=False).logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters' gradients, taken off the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def plain(model: nn.Module, mask: str = "some", scale: float = 0.37) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of scale * loss by HF logits and summed cross-entropy."""
    input_ids, labels = tokens(mask)
    loss = summed_cross_entropy(logits_of(model, input_ids), labels)
    (loss * scale).backward()
    return float(loss.detach()), gradients(model)


def tiled(
    model: nn.Module, tile_tokens: int, keep_gradients: bool, mask: str = "some", scale: float = 0.37
) -> tuple[float, dict[str, Tensor]]:
    """The same in tiles."""
    input_ids, labels = tokens(mask)
    head = OutputHead(output_head(model))
    with head.summing(labels, tile_tokens, keep_gradients):
        loss = logits_of(model, input_ids)
    head.unbind()
    check_untouched(loss)
    (loss * scale).backward()
    return float(loss.detach()), gradients(model)


def check_equal(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    errors = {name: relative_error(found[1][name], gradient) for name, gradient in expected[1].items()}
    assert max(errors.values()) <= TOLERANCE, errors


def with_bias(model: Any) -> Any:
    """The model with a bias on its head."""
    linear = model.lm_head
    model.lm_head = nn.Linear(linear.in_features, linear.out_features, dtype=linear.weight.dtype)
    model.lm_head.weight = linear.weight
    generator = torch.Generator().manual_seed(1)
    model.lm_head.bias.data.copy_(torch.randn(linear.out_features, generator=generator, dtype=torch.float64))
    return model


def with_adapters(targets: Any, **settings: Any) -> Any:
    """A model with adapters on `targets` that are not zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(build_model(ModelCase("qwen3")), config, autocast_adapter_dtype=False).double()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
    return model.train()


MODELS: dict[str, Any] = {
    "llama": lambda: build_model(ModelCase("llama")),
    "llama, tied": lambda: build_model(ModelCase("llama", tied=True)),
    "llama, bias": lambda: with_bias(build_model(ModelCase("llama"))),
    "qwen3": lambda: build_model(ModelCase("qwen3")),
    "qwen3, tied": lambda: build_model(ModelCase("qwen3", tied=True)),
    "qwen2": lambda: build_model(ModelCase("qwen2")),
    "mistral": lambda: build_model(ModelCase("mistral")),
    "frozen head": lambda: with_adapters(["q_proj", "down_proj"]),
    "adapters on the head": lambda: with_adapters(["q_proj", "lm_head"]),
    "a whole copy of the head": lambda: with_adapters(["q_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("tile_tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_logits(name: str, tile_tokens: int, keep_gradients: bool) -> None:
    model = MODELS[name]()
    check_equal(tiled(model, tile_tokens, keep_gradients), plain(model))


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_tokens_add_nothing_wherever_they_are(mask: str, keep_gradients: bool) -> None:
    model = build_model(ModelCase("llama", tied=True))
    found, expected = tiled(model, 5, keep_gradients, mask), plain(model, mask)
    check_equal(found, expected)
    if mask == "all":
        assert found[0] == 0.0
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found[1].values())


@pytest.mark.parametrize(
    "mask,expected", [("none", [5, 5, 5, 5, 3]), ("front", [5, 5, 3]), ("all", [5]), ("middle", [5, 5, 5, 3])]
)
def test_tiles_without_labels_are_not_computed(mask: str, expected: list[int]) -> None:
    model, seen = build_model(ModelCase()), []
    head_forward = model.lm_head.forward

    def counting(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return head_forward(x)

    model.lm_head.forward = counting
    tiled(model, 5, True, mask)
    # once: gradients are computed with the loss
    assert seen == expected

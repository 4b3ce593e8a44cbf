"""Every patch leaves a model as it was, changes nothing when it is applied twice, and works on a deep copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from helpers.models.any_model import build_any
from helpers.models.tiny_models import ModelCase, adapted, build_model
from torch import Tensor, nn

from hf_longctx.hf.models import forwards
from hf_longctx.hf.models.attention import AttentionSwitch, attention_name
from hf_longctx.hf.models.compressed import CompressedPatch
from hf_longctx.hf.models.context import ContextPatch
from hf_longctx.hf.models.document_rope import DocumentRopePatch
from hf_longctx.hf.models.dropout import DropoutPatch
from hf_longctx.hf.models.heads import HeadPatch
from hf_longctx.hf.models.index import IndexPatch
from hf_longctx.hf.models.media import MediaPatch
from hf_longctx.hf.models.own_attention import OwnAttentionPatch
from hf_longctx.hf.models.patch import PATCHES, patch_model, restore_attention
from hf_longctx.hf.models.positions import PaddingPatch, RowPositionsPatch
from hf_longctx.hf.models.quantised import QuantisedPatch
from hf_longctx.hf.models.states import MixerPatch
from hf_longctx.hf.models.towers import NoImagesPatch, TextPatch


class Linear4bit(nn.Linear):
    """Stands in for a four-bit layer of bitsandbytes, which runs on no CPU of old."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.compute_dtype = torch.bfloat16
        self.support_avx512bf16_for_cpu = True


Linear4bit.__module__ = "bitsandbytes.nn"


def with_four_bits() -> Any:
    model = build_model(ModelCase())
    model.model.layers[0].packed = Linear4bit()
    return model


# patch -> a model that needs it
MODELS: dict[type, Callable[[], Any]] = {
    TextPatch: lambda: build_any("LlavaForConditionalGeneration"),
    NoImagesPatch: lambda: build_any("IdeficsForVisionText2Text"),
    MediaPatch: lambda: build_any("LlavaForConditionalGeneration"),
    HeadPatch: lambda: build_model(ModelCase(head=(("num_labels", 3),))),
    OwnAttentionPatch: lambda: build_any("BloomForCausalLM"),
    DocumentRopePatch: lambda: build_model(ModelCase(rope_type="dynamic")),
    PaddingPatch: lambda: build_any("RobertaForCausalLM"),
    RowPositionsPatch: lambda: build_any("BartForCausalLM"),
    MixerPatch: lambda: build_any("RwkvForCausalLM"),
    IndexPatch: lambda: build_any("DeepseekV32ForCausalLM"),
    CompressedPatch: lambda: build_any("DeepseekV4ForCausalLM"),
    DropoutPatch: lambda: adapted(build_model(ModelCase(dropout=0.1)), lora_dropout=0.1),
    ContextPatch: lambda: build_any("MambaForCausalLM"),
    QuantisedPatch: with_four_bits,
    AttentionSwitch: lambda: build_model(ModelCase()),
}
EACH = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that patches could change: attributes of modules, by identity, with their class, hooks and tensors."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own, of_class = ({key: _content(value) for key, value in vars(each).items()} for each in (module, type(module)))
        # transformers notes on the class that it has looked whether attention can be switched
        of_class.pop("_can_set_attn_implementation_cached_value", None)
        found[name] = type(module), [*own], own, of_class
    config: Any = model.config
    return found | {"config": config.to_dict() | {"attention": config.get_text_config()._attn_implementation}}


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.detach().clone().tolist()
    if isinstance(value, dict):
        return {key: _content(each) for key, each in value.items()}
    return value if isinstance(value, bool | int | float | str | type(None)) else id(value)


@EACH
def test_a_patch_undoes_itself_to_the_bit_and_is_idempotent(kind: type) -> None:
    model, patch = MODELS[kind](), kind()
    assert patch.needed(model)
    before = state_of(model)
    patch.apply(model)
    patched = state_of(model)
    assert patched != before
    patch.apply(model)
    assert state_of(model) == patched
    for _ in range(2):
        patch.undo(model)
        assert state_of(model) == before


@EACH
def test_all_patches_together_undo_themselves_to_the_bit(kind: type) -> None:
    model = MODELS[kind]()
    before, name = state_of(model), attention_name(model)
    for _ in range(2):
        patch_model(model)
    # a caller that found the model patched leaves it so
    restore_attention(model, attention_name(model))
    assert state_of(model) != before
    for _ in range(2):
        restore_attention(model, name)
        assert state_of(model) == before


@pytest.mark.wide("MediaPatch")
@EACH
def test_a_deep_copy_has_methods_of_its_own_and_is_undone_alone(kind: type) -> None:
    model = MODELS[kind]()
    name = attention_name(model)
    patch_model(model)
    twin, patched = copy.deepcopy(model), state_of(model)
    owners = {id(module) for module in twin.modules()}
    methods = [method for module in twin.modules() for method in vars(module).values() if isinstance(method, MethodType)]
    assert all(id(method.__self__) in owners for method in methods)
    restore_attention(twin, name)
    assert not any("forward" in vars(module) for module in twin.modules())
    assert state_of(model) == patched


def test_every_patch_is_tested() -> None:
    assert [type(patch) for patch in PATCHES] == [*MODELS]


@pytest.mark.parametrize("kind", [TextPatch, HeadPatch, OwnAttentionPatch, DocumentRopePatch, MixerPatch, IndexPatch])
def test_a_forward_of_others_is_refused(kind: type) -> None:
    model, plain = MODELS[kind](), MODELS[kind]()
    kind().apply(plain)
    place = next(name for name, module in plain.named_modules() if "forward" in vars(module))
    vars(model.get_submodule(place))["forward"] = lambda *args, **keywords: None
    with pytest.raises(ValueError, match="was replaced"):
        kind().apply(model)


def test_a_dropout_of_others_is_refused() -> None:
    model = adapted(build_model(ModelCase()), lora_dropout=0.1)
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    vars(dropout)["forward"] = lambda x: x
    with pytest.raises(ValueError, match="the forward of Dropout was replaced"):
        DropoutPatch().apply(model)


@pytest.mark.parametrize("kind", [HeadPatch, OwnAttentionPatch, DocumentRopePatch, MixerPatch, IndexPatch, DropoutPatch])
def test_a_refused_model_is_as_it_was(kind: type) -> None:
    model, plain = MODELS[kind](), MODELS[kind]()
    kind().apply(plain)
    # the last one, so that other methods and patches come before it
    *_, place = (name for name, module in plain.named_modules() if "forward" in vars(module))
    vars(model.get_submodule(place))["forward"] = lambda *args, **keywords: None
    before = state_of(model)
    with pytest.raises(ValueError, match="was replaced"):
        patch_model(model)
    assert state_of(model) == before


def test_an_implementation_that_a_user_sets_meanwhile_is_switched_again() -> None:
    model = build_model(ModelCase())
    patch_model(model)
    model.set_attn_implementation("eager")
    assert attention_name(model) == "eager"
    patch_model(model)
    assert attention_name(model) == "longctx_eager"
    restore_attention(model, "eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", [TextPatch, HeadPatch, OwnAttentionPatch, ContextPatch])
def test_a_forward_that_accelerate_has_wrapped_stays_and_serves_again(kind: type) -> None:
    model, patch = MODELS[kind](), kind()
    patch.apply(model)
    owner = next(module for module in model.modules() if "forward" in vars(module))
    wrapper = torch.autocast("cpu", torch.bfloat16)(owner.forward)
    owner.forward = wrapper
    patch.undo(model)
    assert vars(owner)["forward"] is wrapper
    patch.apply(model)
    assert vars(owner)["forward"] is wrapper


def test_a_bias_that_was_trained_keeps_what_it_learnt() -> None:
    model = with_four_bits()
    bias = model.model.layers[0].packed.bias
    QuantisedPatch().apply(model)
    with torch.no_grad():
        bias.add_(1.0)
    learnt = bias.detach().clone()
    QuantisedPatch().undo(model)
    assert torch.equal(bias, learnt) and bias.dtype == torch.bfloat16


def test_a_method_has_the_name_and_signature_of_its_classs() -> None:
    def ours(module: Any, x: Any) -> str:
        return "ours"

    module = nn.Linear(2, 2)
    forwards.give(module, ours)
    assert (
        module.forward(1) == "ours" and module.forward.__name__ == "forward" and module.forward.__wrapped__ is nn.Linear.forward
    )
    assert forwards.has(module, ours) and not forwards.has(module, lambda module: None)
    assert forwards.take(module, ours) and not forwards.take(module, ours) and "forward" not in vars(module)

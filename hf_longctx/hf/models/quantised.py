"""Checks frozen four-bit weights under adapters (QLoRA), and keeps forwards from changing them in place.

Four-bit layers are bitsandbytes' `Linear4bit`. They are recognised by the name of their class, so that bitsandbytes is imported
only for a model that has such layers. Their `weight` is a column of bytes, two elements to a byte; `weight.quant_state` holds
the scales of its blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.hf.models.heads import head_of
from hf_longctx.hf.models.towers import text_layers
from hf_longctx.plan.model.model_spec import PackedSpec

# dtypes in which products may be computed: without loss scaling gradients would overflow fp16, and the kernels do not write fp64
_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
_SCALES = ("absmax", "code", "offset")
# attribute of a four-bit layer that lets forwards in evaluation mode repack it; its value before a run, with the bias
_REPACKS, _SETTLED = "support_avx512bf16_for_cpu", "_longctx_settled"


def is_four_bit(module: nn.Module) -> bool:
    """Whether `module` is a linear module with a four-bit weight (an eight-bit weight does not count)."""
    kind = type(module)
    return kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.")


def can_load(config: Any) -> bool:
    """Whether a checkpoint with this `quantization_config` can be loaded: it must be empty (not quantised), or four-bit."""
    return not config or (config.get("quant_method") == "bitsandbytes" and bool(config.get("load_in_4bit")))


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """All four-bit layers by name, including those inside adapters."""
    return {name: module for name, module in model.named_modules() if is_four_bit(module)}


def quantised_problems(model: Any) -> list[str]:
    """Returns why a model cannot be trained with its quantised weights; empty if it can, or if it has no such weights."""
    layers = four_bit_layers(model)
    if not layers:
        return _method_problems(model)
    if not any("lora_" in name for name, _ in model.named_parameters()):
        return [
            "four-bit weights cannot be trained; put adapters beside them with get_peft_model(model, LoraConfig(...)), or "
            "load the model in bfloat16"
        ]
    problems = []
    for name, end in (("embedding", model.get_input_embeddings()), ("head", head_of(model))):
        if isinstance(end, nn.Module) and four_bit_layers(end):
            problems.append(f"the {name} is quantised, which is not tested; name it in llm_int8_skip_modules when loading")
    found = {layer.compute_dtype for layer in layers.values()}
    if wrong := sorted(map(str, found - set(_COMPUTE_DTYPES))):
        problems.append(
            f"products of four-bit weights are computed in {', '.join(wrong)}; load with "
            f"bnb_4bit_compute_dtype=torch.bfloat16 or torch.float32"
        )
    if stored := sorted({str(layer.weight.dtype) for layer in layers.values()} - {"torch.uint8"}):
        problems.append(
            f"four-bit weights are stored as {', '.join(stored)}; leave out bnb_4bit_quant_storage, since weights stored as "
            f"bytes can be sharded too"
        )
    bare = [name for name, layer in layers.items() if getattr(layer.weight, "quant_state", None) is None]
    if bare:
        problems.append(
            f"{len(bare)} four-bit layers have no scales yet (the first is {bare[0]}); load the model with from_pretrained"
        )
    elif any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers.values()):
        problems.append(
            "a forward in evaluation mode has repacked the four-bit weights for inference on this CPU, so their products pass no "
            "gradient on any more; load the model again and give it to the trainer before any forward (the trainer's evaluate() "
            "does not repack)"
        )
    return problems


def _method_problems(model: Any) -> list[str]:
    """Problem with a model quantised by another method, naming the method; empty if there is none."""
    if not getattr(model, "is_quantized", False):
        return []
    method = getattr(model, "quantization_method", None)
    name = str(getattr(method, "value", method) or "an unknown method")
    if any(type(module).__name__ == "Linear8bitLt" for module in model.modules()):
        return [
            "eight-bit weights (LLM.int8) are not supported: which features of a product are outliers depends on all tokens of "
            "the call, so packs and slices would change the result; load with BitsAndBytesConfig(load_in_4bit=True)"
        ]
    return [
        f"weights quantised by {name} are not in the tested list; load the model with BitsAndBytesConfig(load_in_4bit=True), or "
        f"without quantisation"
    ]


class QuantisedPatch:
    """Keeps forwards from changing four-bit layers in place; results of training stay the same.

    In evaluation mode on a CPU with AVX-512 BF16, a layer would otherwise round and repack its weight permanently, and then pass
    no gradient on. Also, the first forward of a layer would cast its bias, in place, to the dtype of its products.
    """

    def needed(self, model: nn.Module) -> bool:
        """Whether `model` has four-bit layers."""
        return bool(four_bit_layers(model))

    def apply(self, model: nn.Module) -> None:
        """Stores the values that it changes on the layers."""
        for layer in four_bit_layers(model).values():
            own = vars(layer)
            bias = layer.bias if layer.compute_dtype is not None else None
            own.setdefault(_SETTLED, (own.get(_REPACKS), None if bias is None else bias.data))
            own[_REPACKS] = False
            if bias is not None:
                bias.data = bias.data.to(layer.compute_dtype)

    def undo(self, model: nn.Module) -> None:
        """Leaves a bias that was trained or sharded since as it is."""
        for layer in four_bit_layers(model).values():
            own = vars(layer)
            if (settled := own.pop(_SETTLED, None)) is None:
                continue
            repacks, before = settled
            del own[_REPACKS]
            if repacks is not None:
                own[_REPACKS] = repacks
            if before is None or type(layer.bias.data) is not Tensor or layer.bias.shape != before.shape:
                continue
            before = before.to(layer.bias.device)
            if torch.equal(layer.bias.data, before.to(layer.bias.dtype)):
                layer.bias.data = before


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Moves the scales of four-bit weights to `device`, where the shards of the weights will be."""
    for layer in four_bit_layers(model).values():
        layer.weight.quant_state.to(device)
        # both names refer to one object, except in a copied model
        layer.quant_state = layer.weight.quant_state


def own_elements(model: nn.Module) -> dict[str, int]:
    """Number of elements of every parameter by name; a four-bit weight counts its unpacked elements."""
    packed = {id(layer.weight): _num_elements(layer) for layer in four_bit_layers(model).values()}
    return {name: packed.get(id(parameter), parameter.numel()) for name, parameter in model.named_parameters()}


def packed_spec(model: nn.Module) -> PackedSpec:
    """The most bytes that the weights of a layer, its scales, and one unpacked weight take; zeros without four-bit weights.

    `model` may be one pipeline stage.
    """
    packed = four_bit_layers(model)
    if not packed:
        return PackedSpec()
    layers = text_layers(model)
    own = [{id(p): p.nbytes for name, p in layer.named_parameters() if "lora_" not in name} for layer in layers]
    scales = [sum(map(scale_bytes, four_bit_layers(layer).values())) for layer in layers]
    unpacked = max(map(unpacked_bytes, packed.values()))
    return PackedSpec(max(sum(sizes.values()) for sizes in own), max(scales), unpacked)


def largest_packed(specs: Sequence[PackedSpec]) -> PackedSpec:
    """The maximum of each number over `specs`."""
    return PackedSpec(*(max(getattr(spec, field.name) for spec in specs) for field in fields(PackedSpec)))


def scale_bytes(layer: Any) -> int:
    """Bytes of a four-bit layer's scales: those of its blocks, and the scales of these scales."""
    state = layer.weight.quant_state
    states = [each for each in (state, state.state2) if each is not None]
    tensors = [getattr(each, name) for each in states for name in _SCALES]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def unpacked_bytes(layer: Any) -> int:
    """Bytes of a four-bit layer's weight during a product: unpacked and, in backward, also cast if the dtypes differ."""
    stored, computed = layer.weight.quant_state.dtype, layer.compute_dtype
    return _num_elements(layer) * max(stored.itemsize + (computed.itemsize if computed != stored else 0), computed.itemsize)


def in_full(layer: Any) -> nn.Linear:
    """A plain linear module with the layer's unpacked weight, frozen and in fp32, and its bias."""
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(layer.weight.quant_state)
    state.dtype = torch.float32
    weight = dequantize_4bit(layer.weight.data, state)
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().clone().to(weight.dtype), layer.bias.requires_grad)
    return plain.train(layer.training)


def _num_elements(layer: Any) -> int:
    return int(layer.in_features * layer.out_features)

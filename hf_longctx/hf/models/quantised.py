"""Checks frozen weights of few bits under adapters, rounds them to fp8, and keeps forwards from changing four-bit ones in place.

Four-bit layers are bitsandbytes' `Linear4bit`. They are recognised by the name of their class, so that bitsandbytes is imported
only for a model that has such layers. Their `weight` is a column of bytes, two elements to a byte; `weight.quant_state` holds
the scales of its blocks.

`frozen_weights="fp8"` rounds the frozen matrices of layers once, at the start of a run, each row with a scale of its own
(`runtime.core.fp8`). Linear modules of transformers with weights in fp8 and scales of blocks, as DeepSeek and Qwen publish them,
become ours at the start of a run: the same bytes, unpacked to bf16 for each product, where transformers' run kernels of the Hub.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.hf.models.heads import head_of
from hf_longctx.hf.models.packed_experts import packed_elements, packed_weights
from hf_longctx.hf.models.packed_refusals import refuse_merges_and_files
from hf_longctx.hf.models.towers import text_layers
from hf_longctx.plan.model.model_spec import FP8_WORKSPACE_BYTES, PackedSpec
from hf_longctx.runtime.activations.adapted_projection import changed_problem, hook_problem
from hf_longctx.runtime.core import fp8
from hf_longctx.runtime.core.binding import own_forward
from hf_longctx.runtime.core.products import FP8Linear

# dtypes in which products may be computed: without loss scaling gradients would overflow fp16, and the kernels do not write fp64
_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
_SCALES = ("absmax", "code", "offset")
# attribute of a four-bit layer that lets forwards in evaluation mode repack it; its value before a run, with the bias
_REPACKS, _SETTLED = "support_avx512bf16_for_cpu", "_longctx_settled"
# names of the matrices that are rounded to fp8: not head, embedding or router
ROUNDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# first compute capability of CUDA with operators for fp8
_FIRST_CAPABILITY = (8, 9)
_WITHOUT = "or leave frozen_weights out"
# modules of transformers with its classes for weights in fp8, and for experts in MXFP4
_TRANSFORMERS_FP8, _TRANSFORMERS_MXFP4 = "transformers.integrations.finegrained_fp8", "transformers.integrations.mxfp4"
_IN_BF16 = "load the model in bfloat16 (FineGrainedFP8Config(dequantize=True))"


def is_four_bit(module: nn.Module) -> bool:
    """Whether `module` is a linear module with a four-bit weight (an eight-bit weight does not count)."""
    kind = type(module)
    return kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.")


def can_load(config: Any) -> bool:
    """Whether one stage of a checkpoint with this `quantization_config` can be loaded.

    The config must be empty (not quantised), of four bits, or of fp8 with scales of blocks.
    """
    is_four_bit = bool(config) and config.get("quant_method") == "bitsandbytes" and bool(config.get("load_in_4bit"))
    return not config or is_four_bit or block_size_of(config) is not None


def block_size_of(config: Any) -> tuple[int, int] | None:
    """Rows and columns of a block that shares a scale, by the `quantization_config` of a checkpoint in fp8; None for others."""
    found = config if isinstance(config, dict) and config.get("quant_method") == "fp8" else {}
    size = found.get("weight_block_size")
    if size is None or found.get("activation_scheme", "dynamic") != "dynamic":
        return None
    return int(size[0]), int(size[1])


def is_mxfp4(config: Any) -> bool:
    """Whether the config of a checkpoint says that its experts are in MXFP4."""
    quantised = getattr(config, "quantization_config", None) or {}
    quantised = quantised if isinstance(quantised, dict) else quantised.to_dict()
    return str(getattr(quantised.get("quant_method"), "value", quantised.get("quant_method"))) == "mxfp4"


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """All four-bit layers by name, including those inside adapters."""
    return {name: module for name, module in model.named_modules() if is_four_bit(module)}


def quantised_problems(model: Any, is_trained: bool = True) -> list[str]:
    """Returns why a model cannot run with its quantised weights; empty if it can, or if it has no such weights.

    is_trained: false for a model that only runs forward.
    """
    for name, module in model.named_modules():
        if type(module).__module__ == _TRANSFORMERS_MXFP4:
            return [
                f"{name} is a {type(module).__name__}, whose kernels for MXFP4 have no backward; load the model with "
                f"hf_longctx.load_sharded and call pack_experts(model, 'mxfp4') after get_peft_model, or unpack it with "
                f"quantization_config=Mxfp4Config(dequantize=True)"
            ]
    layers = four_bit_layers(model)
    if not layers and not any(packed_weights(model)):
        return block_problems(model) or ([] if block_layers(model) else _method_problems(model))
    if is_trained and not any("lora_" in name for name, _ in model.named_parameters()):
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
    elif is_trained and any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers.values()):
        problems.append(
            "a forward in evaluation mode has repacked the four-bit weights for inference on this CPU, so their products pass no "
            "gradient on any more; load the model again and give it to the trainer before any forward (the trainer's evaluate() "
            "does not repack)"
        )
    return problems


def _method_problems(model: Any) -> list[str]:
    """Problem with a model quantised by another method, naming the method; empty if there is none."""
    if not getattr(model, "is_quantized", False) or fp8_layers(model):
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


def fp8_layers(model: nn.Module) -> dict[str, FP8Linear]:
    """All linear modules with frozen weights in fp8 by name, including those inside adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """All linear modules with frozen weights of few bits by name."""
    return {**four_bit_layers(model), **fp8_layers(model), **block_layers(model)}


def block_layers(model: nn.Module) -> dict[str, Any]:
    """Linear modules of transformers with weights in fp8 by name, and experts; they are ours once a run has started."""
    return {name: module for name, module in model.named_modules() if type(module).__module__ == _TRANSFORMERS_FP8}


def block_problems(model: nn.Module) -> list[str]:
    """Returns why adapters cannot be trained over transformers' modules in fp8; empty if they can, or if there are none."""
    layers = block_layers(model)
    if (layers or fp8_layers(model)) and not any("lora_" in name for name, _ in model.named_parameters()):
        return [
            "weights in fp8 cannot be trained; put adapters beside them with get_peft_model(model, LoraConfig(...)), or load the "
            "model in bfloat16"
        ]
    for name, layer in layers.items():
        if type(layer).__name__ != "FP8Linear":
            return [f"{name} is a {type(layer).__name__}, of which only linear modules in fp8 are tested; {_IN_BF16}"]
        if layer.block_size is None or layer.activation_scheme != "dynamic" or layer.weight.dtype != fp8.DTYPE:
            return [f"{name} has one scale for all of its weight, or for all inputs, which is not tested; {_IN_BF16}"]
        if problem := hook_problem(layer) or ("has a forward that is not its class's" if own_forward(layer) is not None else ""):
            return [f"{name} {problem}; remove that, or load the model in bfloat16"]
        if getattr(_adapter_above(model, name), "lora_variant", {}):
            return [f"{name} is below an adapter (DoRA or another variant) that computes from its weight; use plain LoRA"]
    return []


def keep_blocks(model: nn.Module) -> None:
    """Replaces transformers' linear modules with weights in fp8 by ours, with the same bytes and scales."""
    for name, layer in block_layers(model).items():
        scale = layer.weight_scale_inv.detach().float()
        new = FP8Linear(layer.weight.detach().view(torch.uint8), scale, tuple(layer.block_size), layer.bias)
        put_in_place(model, name, new.train(layer.training))
    refuse_merges_and_files(model, fp8_layers(model).values(), "in fp8")


def _adapter_above(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None


def _named_for_rounding(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear modules in the layers of a model that have the name of a rounded matrix, also below an adapter."""
    inside = {id(module) for layer in text_layers(model) for module in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and id(module) in inside
        and name.removesuffix(".base_layer").rpartition(".")[2] in ROUNDED
        and not isinstance(module, FP8Linear)
    }


def rounding_problems(model: Any, device: torch.device, is_autocast: bool) -> list[str]:
    """Returns why the frozen matrices of `model` cannot be rounded to fp8; empty if they can.

    is_autocast: matrices are multiplied in bf16 for any dtype of the weights.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _FIRST_CAPABILITY:
        return [
            f"frozen_weights='fp8' needs a GPU of compute capability 8.9 or later, such as L4, H100 or H200, but this one has "
            f"{found[0]}.{found[1]}; use a later one, {_WITHOUT}"
        ]
    if four_bit_layers(model):
        return [f"frozen_weights='fp8' would round weights that are in four bits already; load them in bfloat16, {_WITHOUT}"]
    if any(packed_weights(model)):
        return [
            "frozen_weights='fp8' is not tested over packed experts (pack_experts); leave one of them out: frozen_weights, "
            "or pack_experts"
        ]
    named = _named_for_rounding(model)
    if any(layer.block is not None for layer in fp8_layers(model).values()):
        return [
            "frozen_weights='fp8' would round weights a second time, which are in fp8 with scales of blocks; leave "
            f"frozen_weights out, or {_IN_BF16} to round them again"
        ]
    if not any("lora_" in name for name, _ in model.named_parameters()):
        return [
            "frozen_weights='fp8' rounds weights that are not trained, but the model has no adapters; train adapters with "
            f"get_peft_model(model, LoraConfig(...)), {_WITHOUT}"
        ]
    if not named and not fp8_layers(model):
        return [
            f"frozen_weights='fp8' finds no matrix named {', '.join(ROUNDED)} in the layers of {type(model).__name__}; leave "
            f"frozen_weights out"
        ]
    stored = next(iter(named.values())).weight.dtype if named else torch.bfloat16
    if stored != torch.bfloat16 and not is_autocast:
        return [
            f"frozen_weights='fp8' computes in bf16, but the model is in {stored}; load it in bfloat16, or set bf16=True in the "
            f"training arguments"
        ]
    problems = (_matrix_problem(model, name, linear) for name, linear in named.items())
    first = next(filter(None, problems), "")
    return [f"frozen_weights='fp8' cannot round {first}"] if first else []


def _matrix_problem(model: nn.Module, name: str, linear: nn.Linear) -> str:
    """Returns why one matrix cannot be rounded, with the remedy; empty if it can be."""
    if type(linear) is not nn.Linear:
        return f"{name}, which is a {type(linear).__name__} and no plain linear module; use a plain one, {_WITHOUT}"
    if linear.weight.requires_grad:
        return f"{name}, whose weight is trained; freeze it, {_WITHOUT}"
    if problem := changed_problem(linear):
        return f"{name}, which {problem}; remove that, {_WITHOUT}"
    shape = tuple(linear.weight.shape)
    if any(size % fp8.SIZES for size in shape):
        return f"{name} of shape {shape}, since operators in fp8 take multiples of {fp8.SIZES}; {_WITHOUT.removeprefix('or ')}"
    if getattr(_adapter_above(model, name), "lora_variant", {}):
        return f"{name}, from whose weight its adapter (DoRA or another variant) computes; use plain LoRA, {_WITHOUT}"
    return ""


def round_frozen(model: nn.Module) -> None:
    """Rounds the frozen matrices of all layers to fp8, one after the other, in place of the model's own.

    A weight that is still to be read, one NaN expanded to its shape, becomes one in fp8.
    """
    for name, linear in _named_for_rounding(model).items():
        weight_NC = linear.weight
        if weight_NC.untyped_storage().nbytes() < weight_NC.nbytes:
            values_NC, scale_N1 = fp8.rows_in_fp8(weight_NC[:1, :1])
            bytes_NC, scale_N1 = values_NC.view(torch.uint8).expand(weight_NC.shape), scale_N1.expand(len(weight_NC), 1)
            new = FP8Linear(bytes_NC, scale_N1, None, linear.bias)
        else:
            new = FP8Linear.rounded(weight_NC, linear.bias)
        put_in_place(model, name, new.train(linear.training))
    refuse_merges_and_files(model, fp8_layers(model).values(), "in fp8")


def put_in_place(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replaces the module of this name."""
    place, _, own = name.rpartition(".")
    setattr(model.get_submodule(place), own, new)


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Moves the scales of four-bit weights to `device`, where the shards of the weights will be."""
    for layer in four_bit_layers(model).values():
        layer.weight.quant_state.to(device)
        # both names refer to one object, except in a copied model
        layer.quant_state = layer.weight.quant_state


def own_elements(model: nn.Module) -> dict[str, int]:
    """Number of elements of every parameter by name; a packed weight counts its unpacked elements, and scales count none."""
    packed = {id(layer.weight): _num_elements(layer) for layer in packed_layers(model).values()}
    packed |= {id(layer.scale): 0 for layer in fp8_layers(model).values()}
    packed |= packed_elements(model)
    return {name: packed.get(id(parameter), parameter.numel()) for name, parameter in model.named_parameters()}


def packed_spec(model: nn.Module) -> PackedSpec:
    """The most bytes that the weights of a layer, its scales, and one unpacked weight take; zeros without packed weights.

    `model` may be one pipeline stage. Scales of fp8 are weights of the layer.
    """
    packed, experts = packed_layers(model), list(packed_weights(model))
    if not packed and not experts:
        return PackedSpec()
    layers = text_layers(model)
    own = [{id(p): p.nbytes for name, p in layer.named_parameters() if "lora_" not in name} for layer in layers]
    scales = [sum(map(scale_bytes, four_bit_layers(layer).values())) for layer in layers]
    unpacked = max([*map(unpacked_bytes, packed.values()), *(each.unpacked_bytes for _, _, each in experts)])
    in_fp8 = [sum(_num_elements(each) for each in fp8_layers(layer).values() if each.block is None) for layer in layers]
    return PackedSpec(max(sum(sizes.values()) for sizes in own), max(scales), unpacked, max(in_fp8), bool(experts))


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
    """Bytes that a product takes beside a packed weight: unpacked and, in backward, also cast if the dtypes differ.

    For fp8 with scales of rows: the bytes in the other order, with those of a sibling, and rounded gradients; the copies with
    which plain torch rounds on the CPU do not count.
    """
    if isinstance(layer, FP8Linear):
        return 2 * _num_elements(layer) + (FP8_WORKSPACE_BYTES if layer.block is None else 12 * fp8.UNPACKED)
    stored, computed = layer.weight.quant_state.dtype, layer.compute_dtype
    return _num_elements(layer) * max(stored.itemsize + (computed.itemsize if computed != stored else 0), computed.itemsize)


def in_full(layer: Any) -> nn.Linear:
    """A plain linear module with the layer's unpacked weight, frozen and in fp32, and its bias."""
    if isinstance(layer, FP8Linear):
        weight = fp8.unpacked(layer.weight, layer.scale, layer.block, torch.float32)
    else:
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

"""Keeps the frozen weights of experts packed: in MXFP4 as in GPT-OSS's checkpoints, in NF4, or in fp8 as in DeepSeek's.

A packed weight is a parametrization of torch: the module still has `gate_up_proj` and `down_proj`, which are unpacked whole at
every access, so the class's own forward and copies work as before; PEFT's forward, which would add adapters to them, raises an
error. While plans run, products read the codes and unpack some experts at a time (`runtime.core.expert_products`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.packed_refusals import refuse_merges_and_files
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.core.expert_products import PackedKind, PackedMatrices, check_inputs, elements_of_codes, packed

# byte of codes and scales that are still to be read: a scale of such bytes is NaN
_UNREAD = 0xFF


class PackedWeight(nn.Module):
    """Unpacks the weights of experts from codes and scales, whole, in the dtype to which the module was cast last."""

    like: Tensor

    def __init__(self, kind: PackedKind, dtype: torch.dtype, is_transposed: bool) -> None:
        super().__init__()
        self.kind, self.is_transposed = kind, is_transposed
        # casts of the model reach it
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns the weight [E, K, N] of a transposed class, else [E, N, K]; NaN if it is still to be read."""
        if _is_unread(scales):
            num_experts, outputs, num_bytes = codes.shape
            sizes = num_experts, elements_of_codes(num_bytes, self.kind), outputs
            weight_EKN = torch.full((), math.nan, dtype=self.like.dtype).expand(sizes)
        else:
            weight_EKN = PackedMatrices(codes, scales, self.kind).unpacked(0, len(codes), self.like.dtype)
        return weight_EKN if self.is_transposed else weight_EKN.transpose(1, 2)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Packs a weight; one that is still to be read, a single NaN expanded, becomes a single byte expanded."""
        if weight.untyped_storage().nbytes() < weight.nbytes:
            num_experts, inputs, outputs = weight.shape if self.is_transposed else weight.transpose(1, 2).shape
            unread = torch.full((), _UNREAD, dtype=torch.uint8)
            sizes = (each.view(torch.uint8).shape[2] for each in packed(torch.zeros(1, inputs, 1), self.kind))
            first, second = (unread.expand(num_experts, outputs, size) for size in sizes)
            return first, second
        parts = [packed(part if self.is_transposed else part.transpose(1, 2), self.kind) for part in weight.detach().split(1)]
        codes, scales = zip(*parts, strict=True)
        scales = tuple(each.view(torch.uint8) for each in scales)
        return torch.cat(codes), torch.cat(scales)


def _is_unread(scales: Tensor) -> bool:
    """Whether scales, which otherwise are not NaN, stand for ones that are still to be read."""
    return bool((scales.flatten()[:4] == _UNREAD).all())


def pack_experts(model: nn.Module, kind: PackedKind) -> int:
    """Packs the weights of all experts of `model`, in place, and freezes them; returns the bytes that they take.

    kind: "mxfp4", which is exact for weights that were unpacked from it, "nf4", or "fp8", with a scale for 128 inputs of a row.
    Call it after `get_peft_model`, which finds no packed weights. Weights that `load_sharded` or `load_pipeline_stage` have not
    read yet are packed while they are read, a few experts at a time; a checkpoint's own MXFP4, or fp8 with scales of blocks, is
    then kept as it is. Raises ValueError for another kind, for a model without experts of a class that adapters may be on, and,
    in four bits, for experts with an odd number of inputs, before any weight is packed.

    Example:
        model = load_sharded("openai/gpt-oss-20b", config, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
        pack_experts(model, "mxfp4")
    """
    if kind not in get_args(PackedKind):
        raise ValueError(f"experts cannot be packed as {kind!r}; give one of {', '.join(get_args(PackedKind))}")
    found = [module for _, module in expert_modules(model)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts of a class that can be packed ({', '.join(sorted(MODULES.experts))}); leave "
            f"pack_experts out"
        )
    for experts in found:
        for weight in experts.parameters(recurse=False):
            if weight.dim() == 3:
                check_inputs(weight.shape[1 if experts.is_transposed else 2], kind)
    num_bytes = 0
    for experts in found:
        for name, weight in list(experts.named_parameters(recurse=False)):
            weight.requires_grad_(False)
            if weight.dim() == 3:
                unpack = PackedWeight(kind, weight.dtype, bool(experts.is_transposed))
                parametrize.register_parametrization(experts, name, unpack, unsafe=True)
        num_bytes += sum(weight.nbytes for weight in experts.parameters())
    refuse_merges_and_files(model, found, "in fp8" if kind == "fp8" else "in four bits")
    return num_bytes


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields names and modules of all experts of a class whose weights can be packed."""
    for name, module in model.named_modules():
        if class_name(module) in MODULES.experts and hasattr(module, "is_transposed"):
            yield name, module


# start of the names of buffers with the codes and scales of a whole weight, and attribute with their kind
_CODES, _SCALES, _KIND = "longctx_codes_", "longctx_scales_", "longctx_packed_as"


def unpacked_copy(experts: Any, memo: dict[int, Any] | None = None, dtype: torch.dtype | None = None) -> Any:
    """A copy of a module of experts with whole weights, frozen; PEFT's own forward cannot add adapters to packed ones.

    It keeps the codes beside, which products of plans read as those of packed weights. memo: of the copy of a model to which it
    belongs, so that both have one config. dtype: of the copy; None: that of `experts`.
    """
    copied = copy.deepcopy(experts, memo)
    if dtype is not None:
        copied.to(dtype)
    weights = {name: (getattr(copied, name).detach(), packed_weight(copied, name)) for name in experts.parametrizations}
    del copied.parametrizations
    # the class with properties belongs to both modules, so it stays as it is
    copied.__class__ = type(experts).__bases__[0]
    for name, (weight, codes) in weights.items():
        copied.register_parameter(name, nn.Parameter(weight.clone(), requires_grad=False))
        if codes is not None:
            copied.register_buffer(_CODES + name, codes.codes_ENH.detach(), persistent=False)
            copied.register_buffer(_SCALES + name, codes.scales_ENG.detach(), persistent=False)
            vars(copied)[_KIND] = codes.kind
    return copied


def pack_copies(model: nn.Module) -> None:
    """Packs the whole weights of copies that keep codes (`unpacked_copy`) anew, and rounds them to what the codes say."""
    for module in model.modules():
        for name in [name.removeprefix(_CODES) for name in module._buffers if name.startswith(_CODES)]:
            weight: Tensor = getattr(module, name)
            unpack = PackedWeight(vars(module)[_KIND], weight.dtype, bool(module.is_transposed))
            codes, scales = unpack.right_inverse(weight)
            weight.data = unpack(codes, scales)
            module._buffers[_CODES + name], module._buffers[_SCALES + name] = codes, scales


def packed_weights(model: nn.Module) -> Iterator[tuple[Any, str, PackedMatrices]]:
    """Yields modules of experts, names of their packed weights, and these."""
    for module in model.modules():
        beside = [name.removeprefix(_CODES) for name in module._buffers if name.startswith(_CODES)]
        for name in (*getattr(module, "parametrizations", {}), *beside):
            if (found := packed_weight(module, name)) is not None:
                yield module, name, found


def packed_weight(module: Any, name: str) -> PackedMatrices | None:
    """The packed weight `name`; None if it is not packed, nor a copy that keeps its codes (`unpacked_copy`)."""
    if (codes := module._buffers.get(_CODES + name)) is not None:
        return PackedMatrices(codes, module._buffers[_SCALES + name], vars(module)[_KIND])
    parts = module.parametrizations[name] if parametrize.is_parametrized(module, name) else ()
    if not parts or not isinstance(unpack := parts[0], PackedWeight):
        return None
    return PackedMatrices(parts.original0, parts.original1, unpack.kind)


def packed_parameters(model: nn.Module) -> dict[int, tuple[PackedWeight, nn.Parameter, nn.Parameter]]:
    """The parametrization, codes and scales of every packed weight by the id of the codes."""
    found = {}
    for module, name, _ in packed_weights(model):
        if parametrize.is_parametrized(module, name):
            parts = module.parametrizations[name]
            found[id(parts.original0)] = parts[0], parts.original0, parts.original1
    return found


def packed_elements(model: nn.Module) -> dict[int, int]:
    """Elements of packed weights by the ids of their parameters: scales have none."""
    counts: dict[int, int] = {}
    for _, _, found in packed_weights(model):
        counts |= {id(found.codes_ENH): elements_of_codes(found.codes_ENH.numel(), found.kind), id(found.scales_ENG): 0}
    return counts

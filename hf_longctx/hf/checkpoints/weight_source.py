"""Whole weights of a model in training, one tensor at a time, as a server for inference reads them from a checkpoint.

`WeightSource` yields what `save_pretrained` of the model would write: the same names, shapes and dtypes, tied weights once, fused
experts split. Adapters are added to a copy of each adapted layer: W + scaling * B A is sent, rounded once, while the frozen W is
only read. Merging into W and taking the product out again, as PEFT offers, would leave rounding errors in W with every update.

The class has the shape of vLLM's `WeightSource` (vllm/distributed/weight_transfer/base.py): `metadata` without communication, and
an iterator that may be started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from hf_longctx.hf.checkpoints.weights import groups_in_files, without_values
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.packed_experts import packed_weights
from hf_longctx.hf.models.quantised import packed_layers
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.parameters.gradients import HALF_DTYPES
from hf_longctx.runtime.parameters.sharded import free_gathered, is_sharded, layer_shards


class WeightInfo(NamedTuple):
    """Name in checkpoint files, dtype and shape of one whole tensor. The field names are vLLM's (`ParamMeta`)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Origin:
    """Origin of one weight: a tensor of the model, or that of an adapted layer with its adapters added.

    field: name inside the layer below the adapters; empty for a tensor without adapters.
    """

    tensor: Tensor
    layer: BaseTunerLayer | None = None
    field: str = ""


class WeightSource:
    """Yields (name, whole tensor) of every weight that a checkpoint of `model` has, with adapters added.

    Each iteration reads the weights as they then are. It is collective over the ranks that share a sharded model, which all walk
    to its end in the same order. At most one group of weights is whole at a time: one weight, or a layer where conversions of
    transformers need several. place: called before each group, brings weights to the device. Raises ValueError for a model of
    which that is not possible.

    Example:

        for name, tensor in WeightSource(model):
            ...  # send, or on other ranks only gather
    """

    def __init__(self, model: nn.Module, place: Callable[[], None] = lambda: None) -> None:
        if found := weight_problems(model):
            raise ValueError(found[0])
        self.model, self._place = model, place
        self._base = base_of(model)
        self._names = _unique(_origins(self._base))
        shapes = {name: without_values(origin.tensor) for name, origin in self._names.items()}
        self._groups = groups_in_files(self._base, shapes)

    def metadata(self) -> list[WeightInfo]:
        """Names, dtypes and shapes in the order of iteration, without communication."""
        return [
            WeightInfo(name, value.dtype, tuple(value.shape)) for _, tensors in self._groups for name, value in tensors.items()
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._place()
        if is_sharded(self.model):
            free_gathered(self.model)
        if (shards := layer_shards(self.model)) is not None:
            shards.come_back()
        # parameters become other objects when a model is sharded
        origins = _unique(_origins(self._base))
        merged: tuple[BaseTunerLayer, dict[str, Tensor]] | None = None
        for names, tensors in self._groups:
            self._place()
            whole = {}
            for name in names:
                origin = origins[name]
                if origin.layer is None:
                    # memory of its own, since that of the model may move to the host meanwhile
                    gathered = _whole(origin.tensor)
                    whole[name] = gathered.clone() if _share_memory(gathered, origin.tensor) else gathered
                    continue
                if merged is None or merged[0] is not origin.layer:
                    merged = origin.layer, _with_adapters(origin.layer)
                whole[name] = merged[1][origin.field].to(origin.tensor.dtype)
            found = revert_weight_conversion(self._base, whole)
            del whole
            for name in tensors:
                yield name, found.pop(name).contiguous()


def weight_problems(model: Any) -> list[str]:
    """Reasons why the weights of a model cannot be sent one at a time; empty if they can."""
    base = base_of(model)
    if packed_layers(model) or any(packed_weights(model)):
        return [
            f"weights of {class_name(base)} are packed into four or eight bits, and a server would need them unpacked; load the "
            f"model in bfloat16"
        ]
    origins = _origins(base)
    for name, origin in origins.items():
        twins = [each for each in origins.values() if each.tensor is origin.tensor]
        if any(_changed_by(each) != _changed_by(origin) for each in twins):
            return [
                f"{name} is one tied weight of embedding and head (tie_word_embeddings) with an adapter on one of them, which a "
                f"server that ties them cannot have; leave both out of target_modules, or train both by modules_to_save with "
                f"ensure_weight_tying=True"
            ]
    shapes = {name: without_values(origin.tensor) for name, origin in _unique(origins).items()}
    if not groups_in_files(base, shapes):
        return [
            f"transformers converts the weights of {class_name(base)} to those of files only all together, so they cannot be "
            f"sent one at a time; generate without a server"
        ]
    return []


def _origins(base: Any) -> dict[str, _Origin]:
    """The origin of every weight that the state of a transformers model has, by its name without adapters."""
    saved, ignored = set(base.state_dict()), set(base._keys_to_ignore_on_save or ())
    found: dict[str, _Origin] = {}

    def walk(module: nn.Module, path: str, name: str) -> None:
        if isinstance(module, ModulesToSaveWrapper):
            copy = module.active_adapters[0]
            return walk(module.modules_to_save[copy], f"{path}modules_to_save.{copy}.", name)
        layer: Any = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
        if isinstance(layer, BaseTunerLayer):
            for field, weight in layer.get_base_layer().named_parameters():
                found[f"{name}{field}"] = _Origin(weight, layer, field)
            return None
        kept: dict[str, Tensor] = dict(module.named_buffers(recurse=False))
        for own, tensor in (kept | dict(module.named_parameters(recurse=False))).items():
            if f"{path}{own}" in saved and f"{name}{own}" not in ignored:
                found[f"{name}{own}"] = _Origin(tensor)
        for own, child in module.named_children():
            walk(child, f"{path}{own}.", f"{name}{own}.")

    walk(base, "", "")
    return found


def _unique(origins: dict[str, _Origin]) -> dict[str, _Origin]:
    """Leaves out all names of a tied weight but the first."""
    first: dict[int, str] = {}
    for name, origin in origins.items():
        first.setdefault(id(origin.tensor), name)
    return {name: origins[name] for name in first.values()}


def _changed_by(origin: _Origin) -> int:
    """Identifies the adapter that changes a weight; 0 for none. Layers with tied adapters change it alike."""
    tied = getattr(origin.layer, "tied_adapter", None)
    return 0 if origin.layer is None else id(origin.layer if tied is None else tied)


def _with_adapters(layer: Any) -> dict[str, Tensor]:
    """Returns the weights of the layer below its adapters, whole, with the active ones added. Collective like a gather."""
    # adapters on several weights of one module wrap each other
    copies: list[Any] = [_whole_copy(layer)]
    while isinstance(copies[-1].base_layer, BaseTunerLayer):
        copies.append(copies[-1].base_layer)
    for each in copies:
        each.merged_adapters = []
        each.merge()
    return dict(copies[-1].base_layer.named_parameters())


def _whole_copy(module: nn.Module) -> Any:
    """Copies a module with whole tensors, those in half precision in fp32, so that a sum is rounded once."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))

    def whole(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return _whole(tensor).to(torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype, copy=True)

    weights = {name: whole(tensor) for name, tensor in module._parameters.items()}
    vars(copied)["_parameters"] = {
        name: None if tensor is None else nn.Parameter(tensor, requires_grad=False) for name, tensor in weights.items()
    }
    vars(copied)["_buffers"] = {name: whole(tensor) for name, tensor in module._buffers.items()}
    vars(copied)["_modules"] = {name: None if child is None else _whole_copy(child) for name, child in module._modules.items()}
    return copied


def _share_memory(one: Tensor, other: Tensor) -> bool:
    local = other.to_local() if isinstance(other, DTensor) else other
    return one.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

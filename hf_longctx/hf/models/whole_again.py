"""Restores a whole model that was cut into pipeline stages, for a stock trainer that continues with it afterwards.

`cut_model` replaces modules. `WholeModel` records the modules and parameters of the whole model before that and puts the same
objects back later; other stages send the weights that they have trained.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import Identity, StageLayers
from hf_longctx.hf.models.refusing import allow_all, refuse_all
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.runtime.core.binding import PUT
from hf_longctx.runtime.process_groups import GroupPool

# attributes that cutting and training set on instances: ties, forwards, and the forward that accelerate wraps
_TIES = ("_tied_weights_keys", "all_tied_weights_keys")
_FORWARDS = ("forward", "_original_forward", PUT)


class WholeModel:
    """The modules and weights that a model had before it was cut into stages.

    is_loaded: the model was loaded as one stage, so no rank ever had the whole model, and none gets it.
    """

    def __init__(self, model: nn.Module, is_loaded: bool) -> None:
        self.model, self.is_loaded = model, is_loaded
        allow_all(model)
        self._children = {module: dict(module._modules) for module in model.modules()}
        self._weights = {module: dict(module._parameters) for module in self._children}
        self._own = {module: _own_values(module, _TIES) for module in self._children}
        for module in (model, base_of(model)):
            self._own[module] |= _own_values(module, _FORWARDS)
        self._shapes: dict[Tensor, torch.Size] = {}

    @property
    def is_here(self) -> bool:
        """Whether this rank has all weights of the whole model."""
        return not self._shapes and not self.is_loaded

    def release(self) -> None:
        """Frees the weights that are not of this rank's stage; `gather` gets them back."""
        held = {id(parameter) for parameter in self.model.parameters()}
        for weights in self._weights.values():
            for parameter in weights.values():
                if parameter is not None and id(parameter) not in held and parameter not in self._shapes:
                    self._shapes[parameter] = parameter.shape
                    # keep the same object, to which hooks and users may refer
                    parameter.data = parameter.data.new_empty(0)

    def gather(self, pool: GroupPool) -> None:
        """Receives the trained weights of all stages and puts the model together. Collective over all ranks."""
        if self.is_loaded:
            return
        held = {id(tensor) for tensor in _tensors(self.model).values()}
        self._put_together()
        whole = _tensors(self.model)
        own = {name for name, tensor in whole.items() if id(tensor) in held}
        holders: dict[str, set[int]] = {}
        for stage, names in gather_objects((pool.stage, own), pool.control):
            for name in names:
                holders.setdefault(name, set()).add(stage)
        for name, tensor in whole.items():
            if len(holders[name]) < pool.num_stages:
                assert pool.links is not None
                self._send(tensor, min(holders[name]), pool.links.pipe)
        self._shapes.clear()

    @torch.no_grad()
    def _send(self, tensor: Tensor, stage: int, pipe: dist.ProcessGroup) -> None:
        """Sends a weight from its stage to the ranks at this rank's position in all other stages."""
        if (shape := self._shapes.get(tensor)) is not None:
            tensor.data = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        sent = tensor.data.contiguous()
        # sent as bytes, since backends do not send every dtype
        dist.broadcast(sent.view(-1).view(torch.uint8), group=pipe, group_src=stage)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(sent)

    def close(self, stage: int, num_stages: int) -> None:
        """Puts the model together if its weights are here; else the model refuses, by name, what needs a whole model."""
        if self.is_here:
            self._put_together()
            return
        for module in (self.model, base_of(self.model)):
            self._set_own(module, _FORWARDS)
        refuse_all(self.model, stage, num_stages)

    def _put_together(self) -> None:
        """Restores the children, weights and attributes that cutting has replaced in all modules. Idempotent."""
        allow_all(self.model)
        for module, children in self._children.items():
            for name, child in children.items():
                if isinstance(module._modules[name], Identity | StageLayers):
                    module._modules[name] = child
            for name, weight in self._weights[module].items():
                if module._parameters[name] is None:
                    module._parameters[name] = weight
            self._set_own(module, _TIES)
        for module in (self.model, base_of(self.model)):
            self._set_own(module, _FORWARDS)

    def _set_own(self, module: nn.Module, names: tuple[str, ...]) -> None:
        for name in names:
            vars(module).pop(name, None)
        vars(module).update({name: value for name, value in self._own[module].items() if name in names})


def _own_values(module: nn.Module, names: tuple[str, ...]) -> dict[str, object]:
    return {name: vars(module)[name] for name in names if name in vars(module)}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, a shared one once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())

"""Moves what a training keeps on its device to host memory, while a server for inference needs the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# weights with buffers and gradients; states of an optimizer
Kind = Literal["weights", "states"]


class Away:
    """Memory of tensors of `device` that was freed, with its contents on the host.

    The tensors stay the same objects, and must not be used before `restore`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: dict[Kind, list[tuple[torch.UntypedStorage, Tensor]]] = {}

    def holds(self, kind: Kind) -> bool:
        """Whether tensors of this kind are on the host."""
        return kind in self._moved

    def move(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """Frees the memory of these tensors, once; others than tensors are left out."""
        if kind in self._moved:
            return
        self._moved[kind] = []
        for storage in _storages(tensors, self.device):
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            copy.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            self._moved[kind].append((storage, copy))
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self, *kinds: Kind) -> None:
        """Gives tensors of these kinds their memory and contents back; does nothing for those that have them."""
        for kind in kinds:
            for storage, copy in self._moved.pop(kind, []):
                storage.resize_(len(copy))
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Weights, buffers and gradients of a model on this rank."""
    weights = list(model.parameters())
    return [*weights, *model.buffers(), *(weight.grad for weight in weights if weight.grad is not None)]


def states_of(optimizer: Any) -> list[Any]:
    """States of an optimizer on this rank; none without one."""
    return [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]


def _storages(tensors: Iterable[Any], device: torch.device) -> list[torch.UntypedStorage]:
    """The memory of tensors, once where several share it, unless it belongs to others, such as a mapped file."""
    own = [each.to_local() if isinstance(each, DTensor) else each.detach() for each in tensors if isinstance(each, Tensor)]
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in own if each.numel()}
    return [storage for storage in found.values() if storage.resizable() and storage.device.type == device.type]

"""Finds the weights that bf16 autocast rounds at every use, by watching a forward of a reduced copy.

Autocast rounds both factors of a matrix product at every use. A weight that nothing else reads can be rounded before its shards
are gathered (`runtime.parameters.rounded`): the products are the same, bit for bit. Which weights these are depends on the
model's code: embeddings, norms, and some routers and experts read theirs in fp32. So every operator of a forward is watched,
without autograd, for which autocast would keep rounded copies of weights.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import RANGES
from hf_longctx.hf.models.positions import absent_token_ids
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.self_test.independent import original_left_alone
from hf_longctx.hf.self_test.reduced_copy import ChosenLayers, reduced_copy
from hf_longctx.runtime.parameters.rounded import ROUNDED_DTYPE, without_numbers

logger = logging.getLogger(__name__)

# number of tokens in the watched forward
_NUM_TOKENS = 32


def find_rounded(model: Any, device: torch.device, control: dist.ProcessGroup | None) -> frozenset[str]:
    """Returns names (from `without_numbers`) of the matrices of `model` that autocast rounds to bf16 at every use in a forward.

    Empty if no copy of the model can run, which the first rank logs, or if each rank has loaded only its own stage. Collective
    over the ranks of `control`, which return the same names.
    """
    if hasattr(model, RANGES):
        return frozenset()
    found: frozenset[str] = frozenset()
    own = frozenset(map(without_numbers, dict(model.named_parameters(remove_duplicate=False))))
    problem = ""
    if any(weight.dtype == torch.float32 for weight in model.parameters()):
        try:
            copied = reduced_copy(ChosenLayers.of(model, (0,)), _NUM_TOKENS, None).model
            with original_left_alone(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                found = rounded_in_forward(copied, device)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        # models and hooks refer to each other, so only the collector frees the copy
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    everyone = gather_objects((found, own - found, problem), control)
    if problems := [each for _, _, each in everyone if each]:
        if control is None or dist.get_rank() == 0:
            logger.warning("weights are gathered in fp32, since a copy of the model could not be watched: %s", problems[0])
        return frozenset()
    return frozenset().union(*(each for each, _, _ in everyone)).difference(*(each for _, each, _ in everyone))


@torch.no_grad()
def rounded_in_forward(model: Any, device: torch.device) -> frozenset[str]:
    """Returns names (from `without_numbers`) of matrices that a forward under autocast reads, and always rounds first."""
    model.to(device)
    absent = set(absent_token_ids(base_of(model)))
    num_ids = base_of(model).get_input_embeddings().weight.shape[0]
    known = [token for token in range(min(num_ids, _NUM_TOKENS + len(absent))) if token not in absent]
    ids = torch.tensor([known * (-(-_NUM_TOKENS // len(known)))], device=device)[:, :_NUM_TOKENS]
    readers = _Readers(model)
    # evaluations may read weights differently
    for is_training in (True, False):
        model.train(is_training)
        with torch.autocast(device.type, dtype=ROUNDED_DTYPE), readers.watching():
            model(input_ids=ids, use_cache=False)
    return readers.always_rounded()


class _Readers:
    """The weights of a model by address, and those that operators round or read in any other way."""

    def __init__(self, model: nn.Module) -> None:
        # convolutions run in our own functions, which read their kernels without rounding
        left_out = {id(each) for module in model.modules() if isinstance(module, _ConvNd) for each in module.parameters()}
        self._names: dict[int, set[str]] = {}
        self._matrices: set[str] = set()
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(weight.untyped_storage().data_ptr(), set()).add(without_numbers(name))
            if weight.ndim > 1 and id(weight) not in left_out:
                self._matrices.add(without_numbers(name))
        self._rounded: set[str] = set()
        self._others: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward."""
        with _Properties(self), _Operators(self):
            yield

    def note(self, tensors: Any, output: Any, is_rounding: bool) -> None:
        """Records weights among the inputs of one operator, unless its output is a view of them."""
        views = {each.untyped_storage().data_ptr() for each in tree_leaves(output) if isinstance(each, Tensor)}
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and (place := tensor.untyped_storage().data_ptr()) not in views:
                (self._rounded if is_rounding else self._others).update(self._names.get(place, ()))

    def always_rounded(self) -> frozenset[str]:
        """Returns names of matrices that were rounded, and not read in any other way."""
        return frozenset((self._rounded & self._matrices) - self._others)


class _Operators(TorchDispatchMode):
    def __init__(self, readers: _Readers) -> None:
        super().__init__()
        self._readers = readers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_rounding = func is torch.ops.aten._to_copy.default and output.dtype == ROUNDED_DTYPE
        self._readers.note((args, kwargs), output, is_rounding)
        return output


class _Properties(TorchFunctionMode):
    """Records reads of a weight's dtype, to which code may cast its input."""

    def __init__(self, readers: _Readers) -> None:
        super().__init__()
        self._readers = readers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a new object at every access, so equal but not the same
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            self._readers.note(args, None, is_rounding=False)
        return func(*args, **(kwargs or {}))

"""Gathers fp32 weights in bf16 if autocast rounds them to bf16 at every use, which halves the bytes to send.

FSDP2 gathers all weights of a unit in one dtype, by its mixed-precision policy. But autocast leaves the weights of norms and
embeddings in fp32, and a layer has both kinds. So each weight gets its own dtype here; FSDP2 still sends those of a unit in one
message. Shards stay in fp32, and so do gradients that add up over several backwards. Gradients that are summed over ranks at once
(`sums.py`) stay in bf16, in which the backward makes them.

`hf.self_test.rounded` finds these weights and stores their names on the model, which copies and cut stages keep.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from hf_longctx.runtime.core.torch_versions import weight_groups
from hf_longctx.runtime.parameters.sums import sends_next

# dtype to which autocast rounds weights
ROUNDED_DTYPE = torch.bfloat16
# attribute of a model: the names of its rounded weights
_ROUNDED = "longctx_rounded"
# attribute of FSDP2's record of a weight that is gathered in bf16
_IS_ROUNDED = "longctx_is_rounded"


def without_numbers(name: str) -> str:
    """Replaces layer numbers in a weight's name by `*`, so that the name is common to all layers."""
    return re.sub(r"\d+", "*", name)


def note_rounded(model: nn.Module, names: Collection[str]) -> None:
    """Stores on `model` the names (from `without_numbers`) of weights that autocast rounds at every use."""
    vars(model).pop(_ROUNDED, None)
    if names:
        setattr(model, _ROUNDED, frozenset(names))


def noted_rounded(model: nn.Module) -> frozenset[str]:
    """Returns the names stored on `model`."""
    noted: frozenset[str] = getattr(model, _ROUNDED, frozenset())
    return noted


def rounded_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of `model` to gather in bf16, by name; one with several names only if all of them were noted."""
    noted = noted_rounded(model)
    if not noted:
        return {}
    named = list(model.named_parameters(remove_duplicate=False))
    read_elsewhere = {id(weight) for name, weight in named if without_numbers(name) not in noted}
    return {name: weight for name, weight in named if weight.dtype == torch.float32 and id(weight) not in read_elsewhere}


def gather_rounded(units: Collection[nn.Module], places: Collection[tuple[nn.Module, str]]) -> None:
    """Makes FSDP2's `units` gather in bf16 the weights at `places`: modules and names of their own weights.

    Call it before the first gather. FSDP2 has no public way to give weights of one unit different dtypes.
    """
    wanted = {(id(module), name) for module, name in places}
    for unit in units:
        for group in weight_groups(unit):
            for weight in group.fsdp_params:
                if (id(weight._module_info.module), weight._module_info.param_name) in wanted:
                    _round(weight, group)


def _round(weight: Any, group: Any) -> None:
    """Replaces two methods of FSDP2's record of one weight of a group: those that set its dtypes and make the gathered weight."""
    set_dtypes, make_gathered = weight.init_dtype_attrs, weight.init_unsharded_param

    def init_dtype_attrs(policy: Any) -> None:
        set_dtypes(policy)
        if weight.orig_dtype == torch.float32:
            weight.param_dtype = ROUNDED_DTYPE

    def init_unsharded_param() -> None:
        make_gathered()
        is_backward = group._training_state == type(group._training_state).PRE_BACKWARD
        _choose_dtype(weight, is_backward and sends_next(group))

    weight.init_dtype_attrs, weight.init_unsharded_param = init_dtype_attrs, init_unsharded_param
    setattr(weight, _IS_ROUNDED, True)


def rounded_records(groups: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Returns FSDP2's records of weights that are gathered in bf16, each with the one of these `groups` that it belongs to."""
    return [(weight, group) for group in groups for weight in group.fsdp_params if hasattr(weight, _IS_ROUNDED)]


def choose_gradient_dtypes(records: Iterable[tuple[Any, Any]]) -> None:
    """Chooses the dtypes of gradients of rounded weights that are gathered now, for the backward that comes next.

    records: from `rounded_records`. Weights that are gathered later get theirs then.
    """
    for weight, group in records:
        if hasattr(weight, "_unsharded_param"):
            _choose_dtype(weight, sends_next(group))


def _choose_dtype(weight: Any, is_sent: bool) -> None:
    """Leaves a gradient that is sent to other ranks at once as it is; FSDP2's own sums, and sums over backwards, are in fp32."""
    whole = weight._unsharded_param
    if weight.param_dtype != ROUNDED_DTYPE or not whole.requires_grad:
        return
    dtype = ROUNDED_DTYPE if is_sent and whole.grad is None else weight.orig_dtype
    if whole.grad_dtype != dtype:
        whole.grad_dtype = dtype

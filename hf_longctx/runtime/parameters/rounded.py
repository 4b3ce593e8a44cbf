"""Gathers in bf16 those fp32 weights that autocast rounds to bf16 at every use, so that half of their bytes travel.

FSDP2 gathers all weights of a unit in one dtype, by its policy for mixed precision. But autocast leaves the weights of norms and
embeddings in fp32, and a layer holds both kinds. So each weight gets a dtype of its own here; FSDP2 still sends those of a unit
in one message. Shards and the gradients of gathered weights stay in fp32.

`hf` finds out which weights these are (`hf.self_test.rounded`), and notes them on the model, so that its copies and cut stages
know them too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

# dtype to which autocast rounds weights
ROUNDED_DTYPE = torch.bfloat16
# name of the attribute by which a model holds the names of its rounded weights
_ROUNDED = "longctx_rounded"


def without_numbers(name: str) -> str:
    """The name of a weight with `*` for the number of its layer, which is common to all layers."""
    return re.sub(r"\d+", "*", name)


def note_rounded(model: nn.Module, names: Collection[str]) -> None:
    """Notes on `model` which weights autocast rounds wherever they are read; names are those of `without_numbers`."""
    vars(model).pop(_ROUNDED, None)
    if names:
        setattr(model, _ROUNDED, frozenset(names))


def noted_rounded(model: nn.Module) -> frozenset[str]:
    """The names that were noted on `model`."""
    noted: frozenset[str] = getattr(model, _ROUNDED, frozenset())
    return noted


def rounded_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of `model` that are gathered in bf16, by name; a weight with several names only if all of them were noted."""
    noted = noted_rounded(model)
    if not noted:
        return {}
    named = list(model.named_parameters(remove_duplicate=False))
    read_elsewhere = {id(weight) for name, weight in named if without_numbers(name) not in noted}
    return {name: weight for name, weight in named if weight.dtype == torch.float32 and id(weight) not in read_elsewhere}


def weight_groups(unit: Any) -> list[Any]:
    """FSDP2's records of the weights that one of its units gathers together: one, or with torch 2.12 or later several."""
    state = unit._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def gather_rounded(units: Collection[nn.Module], places: Collection[tuple[nn.Module, str]]) -> None:
    """Lets FSDP2's `units` gather in bf16 the weights at `places`: modules, and the names of their own weights.

    Call it before the first gather. FSDP2 has no public way to give weights of one unit different dtypes.
    """
    wanted = {(id(module), name) for module, name in places}
    for unit in units:
        for group in weight_groups(unit):
            for weight in group.fsdp_params:
                if (id(weight._module_info.module), weight._module_info.param_name) in wanted:
                    _round(weight)


def _round(weight: Any) -> None:
    """Binds two methods of FSDP2's record of one weight: that which sets its dtypes, and that which makes the gathered weight."""
    set_dtypes, make_gathered = weight.init_dtype_attrs, weight.init_unsharded_param

    def init_dtype_attrs(policy: Any) -> None:
        set_dtypes(policy)
        if weight.orig_dtype == torch.float32:
            weight.param_dtype = ROUNDED_DTYPE

    def init_unsharded_param() -> None:
        make_gathered()
        # reduce-scatters take gradients of one dtype, and those of many chunks must add up in fp32
        if weight.param_dtype == ROUNDED_DTYPE and weight._unsharded_param.grad_dtype != weight.orig_dtype:
            weight._unsharded_param.grad_dtype = weight.orig_dtype

    weight.init_dtype_attrs, weight.init_unsharded_param = init_dtype_attrs, init_unsharded_param

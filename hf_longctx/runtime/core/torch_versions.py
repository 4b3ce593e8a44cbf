"""Lists what differs between the versions of torch that `setup.cfg` allows, and for each how long it is needed.

Other modules ask for no version of torch, and read no name of it that only some of these versions have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import attention


def weight_groups(unit: Any) -> list[Any]:
    """Returns FSDP2's records of weights that the `FSDPModule` `unit` gathers together.

    Until torch 2.12 is the lowest: 2.11 has one record for a unit.
    """
    state = unit._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def trains_several_dtypes() -> bool:
    """Whether a unit of FSDP2 may train weights of several dtypes (`add_weight_group`).

    Until torch 2.12 is the lowest: 2.11 has one record of weights for a unit, whose gradients are summed in one dtype.
    """
    return not torch.__version__.startswith("2.11")


def add_weight_group(unit: Any, weights: list[Any], policy: MixedPrecisionPolicy) -> None:
    """Shards weights that `fully_shard` was told to ignore, in a second record of the `FSDPModule` `unit`, like its first.

    policy: that of the unit. FSDP2 makes several records itself, but only for weights of several meshes. Until torch 2.12 is the
    lowest: not in 2.11.
    """
    groups = unit._get_fsdp_state()._fsdp_param_groups
    first = groups[0]
    for weight in weights:
        if not weight.is_meta:
            weight.data = weight.data.to(first.device)
    places = first.modules, first.mesh_info, first.post_forward_mesh_info, first.device
    groups.append(type(first)(weights, *places, None, policy, first.offload_policy))


def drop_whole_gradients(weight: Any) -> None:
    """Drops gradients of a gathered weight that wait for a reduction. weight: FSDP2's record of it.

    Until torch 2.15 is the lowest: older versions keep those of earlier backwards in a field of their own.
    """
    if hasattr(weight, "_unsharded_param"):
        weight._unsharded_param.grad = None
    if weight.unsharded_accumulated_grad is not None:
        weight.unsharded_accumulated_grad = None


def fill_whole_gradient(weight: Any) -> None:
    """Gives a gathered weight zeros as its gradient, if it has none that waits for a reduction. weight: FSDP2's record of it.

    Until torch 2.15 is the lowest: as for `drop_whole_gradients`.
    """
    whole: Tensor = weight._unsharded_param
    if whole.requires_grad and whole.grad is None and weight.unsharded_accumulated_grad is None:
        whole.grad = whole.new_zeros(whole.shape)


def take_whole_gradients(group: Any) -> list[tuple[Any, Tensor]]:
    """Takes from the gathered weights of FSDP2's record `group` the gradients to sum: each weight's record, and its gradient.

    They are those of one backward in the dtype in which it made them, or sums of several. Call it in place of FSDP2's
    `post_backward`, before the weights are freed.

    Until torch 2.15 is the lowest: older versions keep sums of earlier backwards in a field of their own, and 2.15 widens
    gradients that wait for a sum.
    """
    group._training_state = type(group._training_state).POST_BACKWARD
    taken = []
    for weight in group.fsdp_params:
        if not hasattr(weight, "_unsharded_param"):
            continue
        adds_apart = hasattr(weight, "accumulate_unsharded_grad_if_needed")
        if adds_apart:
            weight.accumulate_unsharded_grad_if_needed()
        if adds_apart and weight.unsharded_accumulated_grad is not None:
            taken.append((weight, weight.unsharded_accumulated_grad_data))
            weight.unsharded_accumulated_grad = None
        elif weight._unsharded_param.grad is not None:
            taken.append((weight, weight.unsharded_grad_data))
            weight._unsharded_param.grad = None
    if hasattr(group, "_set_unsharded_grad_dtypes"):
        group._post_backward_pending = False
        group._set_unsharded_grad_dtypes(defer_upcast=False)
    return taken


def wait_for_passes(root: Any, groups: Iterable[Any]) -> None:
    """Makes the current stream wait for all reductions that FSDP2 has started, and drops its record of passes.

    root: FSDP2's state of the outermost module, after its first pass. groups: from `weight_groups` of all its units.
    Until torch 2.15 is the lowest: older versions have no function for all of it, and 2.11 and 2.12 keep the input of one sum.
    """
    if finish := getattr(root, "_end_backward_iteration", None):
        finish()
        return
    for group in groups:
        group.finalize_backward()
    context = root._comm_ctx
    context.post_forward_order.clear()
    # no reduction reads its input any more, since the records above have waited for their sums
    several: list[Any] | None = getattr(context, "reduce_scatter_states", None)
    if several is not None:
        several.clear()
    else:
        context.reduce_scatter_state = None


def gather_tensors(whole: list[Tensor], shards: list[Tensor], ranks: ProcessGroup) -> None:
    """Gathers flat tensors over `ranks` in one collective, each into its own; the current stream waits, on the CPU the host.

    whole: tensors of as many elements as the shards of all ranks. Until torch 2.13 is the lowest: 2.11 and 2.12 have another name
    for it. gloo takes tensors of one dtype.
    """
    if len({shard.dtype for shard in shards}) > 1:
        whole, shards = ([each.view(torch.uint8) for each in tensors] for tensors in (whole, shards))
    options = AllgatherOptions()
    options.asyncOp = False
    gather = getattr(ranks, "all_gather_single_coalesced", None) or ranks.allgather_into_tensor_coalesced
    work = gather(whole, shards, options)
    if work is not None:
        work.wait()


def fp8_product(
    x_TC: Tensor, weight_CN: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, bias_N: Tensor | None = None
) -> Tensor:
    """Returns the product of matrices in fp8, times scales of rows [T, 1] and of columns [1, N], plus a bias, in bf16 or fp32.

    A bias is added before the only rounding to bf16; CUDA's operator takes none beside a result in fp32.

    Until torch 2.12 is the lowest: on the CPU, 2.11 takes one scale for each matrix.
    """
    if x_TC.device.type == "cpu" and torch.__version__.startswith("2.11"):
        one = torch.ones(())
        found = torch._scaled_mm(x_TC, weight_CN, scale_a=one, scale_b=one, out_dtype=torch.float32)
        found = found * scales[0] * scales[1]
        return (found if bias_N is None else found + bias_N).to(dtype)
    inside, outside = (bias_N, None) if dtype != torch.float32 else (None, bias_N)
    result: Tensor = torch._scaled_mm(
        x_TC, weight_CN, scale_a=scales[0], scale_b=scales[1], bias=inside, out_dtype=dtype, use_fast_accum=True
    )
    return result if outside is None else result.add_(outside)


def is_replaced(name: str, device_type: str) -> bool:
    """Whether something other than torch's build registered the code of an operator (`aten::...`) for this device type.

    No version has a public way to ask. Takes some 50 microseconds.
    """
    key = device_type.upper()
    table = torch._C._dispatch_dump_table(name).splitlines()
    return any(line.startswith(f"{key}: ") and f"Register{key}" not in line for line in table)


def activation() -> tuple[str, Any] | None:
    """Returns the name and the handle of the active `torch.nn.attention.activate_flash_attention_impl`; None without one.

    torch makes a new tuple at every activation, also for an implementation that is registered again under its name. No version
    has a public way to tell two of them apart.
    """
    found: tuple[str, Any] | None = attention._registry._FLASH_ATTENTION_ACTIVE
    return found

"""Spreads the experts of a mixture over a block of ranks: tokens travel to the ranks of their experts, and weights never do.

Rank r of a block of R ranks holds experts r * E / R up to (r + 1) * E / R, whole, as its shard of one `DTensor`. So gradients,
optimizer states, norms and checkpoints are those of any other sharded weight, and only the gathers of FSDP2 leave experts out.

In a layer's forward every rank sends each of its tokens, once for every expert that the token chose, to the rank of this expert.
That rank runs its experts with the class's own forward, as if every row had one expert with weight 1. The results travel back,
and the rank of the token weighs and adds them. Backward goes the same way in the opposite direction, so the gradients of an
expert's weights are sums over the tokens of all ranks of the block without any reduction.

Every rank of the block must run the same layers forward and backward in the same order, however few tokens it has: ranks that
share sharded weights do so anyway. A layer's forward waits once for the host, which must know how many rows come from each rank.

Shapes: T tokens of this rank, k experts for each, S = T * k rows to send, N rows that all ranks send here, C hidden size, R
ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_longctx.runtime.attention.sequence_parallel import all_to_all
from hf_longctx.runtime.core.binding import bound, put

# name of the attribute by which a module of spread experts holds the group of their ranks
_GROUP = "longctx_spread"


def spread_experts(modules: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
    """Deals the experts of each module to the ranks of `mesh`, in place; call it before `shard_model`, which leaves them so.

    modules: modules whose parameters have one entry for each of `num_experts` experts, and whose forward takes hidden states
    [T, C], indices [T, k] and weights [T, k] of each token's experts. mesh: one dimension, the ranks of a block. Only this
    rank's experts move to `device`, and the others are dropped. Raises ValueError if the ranks do not divide the experts.
    """
    for module in modules:
        num_experts, num_ranks = int(module.num_experts), mesh.size()  # type: ignore[arg-type]
        if num_experts % num_ranks:
            raise ValueError(f"{type(module).__name__} has {num_experts} experts, which {num_ranks} ranks do not divide evenly")
        for name, parameter in list(module.named_parameters(recurse=False)):
            first = mesh.get_local_rank() * (num_experts // num_ranks)
            own = parameter.detach()[first : first + num_experts // num_ranks].to(device, copy=True)
            dealt = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))
        # the class's own forward runs on the experts of this rank
        module.num_experts = num_experts // num_ranks  # type: ignore[assignment]
        vars(module)[_GROUP] = mesh.get_group()
        put(module, "forward", bound(module, _spread_forward(module, module.forward, num_experts, mesh.get_group())))


def spread_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which `spread_experts` spread some experts in `model`; None if there are no such experts."""
    return next((vars(module)[_GROUP] for module in model.modules() if _GROUP in vars(module)), None)


def _spread_forward(module: nn.Module, run: Callable[..., Any], num_experts: int, group: dist.ProcessGroup) -> Callable[..., Any]:
    num_ranks = group.size()

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_chosen, hidden_size = top_k_index.shape[-1], hidden_states.shape[-1]
        chosen_S = top_k_index.reshape(-1)
        order_S = torch.argsort(chosen_S, stable=True)
        sent_RE = torch.zeros(num_experts, dtype=torch.int64, device=chosen_S.device)
        sent_RE = sent_RE.scatter_add_(0, chosen_S, torch.ones_like(chosen_S)).view(num_ranks, -1)
        received_RE = _exchanged_counts(sent_RE, group)
        send_rows, receive_rows = torch.stack([sent_RE.sum(dim=1), received_RE.sum(dim=1)]).tolist()
        send_sizes, receive_sizes = ([rows * hidden_size for rows in each] for each in (send_rows, receive_rows))
        rows_SC = hidden_states[order_S // num_chosen]
        rows_NC = all_to_all(rows_SC.reshape(-1), send_sizes, receive_sizes, group).view(-1, hidden_size)
        results_NC = _run_own(module, run, rows_NC, received_RE, sum(receive_rows))
        results_SC = all_to_all(results_NC.reshape(-1), receive_sizes, send_sizes, group).view(-1, hidden_size)
        # back in the order of the tokens and of their choices
        results_TkC = results_SC[torch.argsort(order_S)].view(-1, num_chosen, hidden_size)
        return (results_TkC * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    return forward


def _exchanged_counts(sent_RE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows that each rank sends here for each expert of this rank, given the rows that this rank sends for each of theirs."""
    received_RE, sizes = torch.empty_like(sent_RE), [sent_RE.shape[1]] * len(sent_RE)
    dist.all_to_all_single(received_RE.view(-1), sent_RE.view(-1), sizes, sizes, group=group)
    return received_RE


def _run_own(module: nn.Module, run: Callable[..., Any], rows_NC: Tensor, received_RE: Tensor, num_rows: int) -> Tensor:
    """Results [N, C] of this rank's experts for the rows it received, which come rank by rank and expert by expert."""
    num_ranks, num_own = received_RE.shape
    experts_N = torch.arange(num_own, device=rows_NC.device).repeat(num_ranks)
    experts_N = experts_N.repeat_interleave(received_RE.reshape(-1), output_size=num_rows)
    if not num_rows:
        # a row of zeros keeps the graph whole: backward must run both exchanges, and give the weights a gradient, of zeros
        rows_NC, experts_N = rows_NC.sum(dim=0, keepdim=True), experts_N.new_zeros(1)
    with _local_weights(module):
        results: Tensor = run(rows_NC, experts_N.unsqueeze(-1), rows_NC.new_ones((len(experts_N), 1)))
    return results[:num_rows]


@contextmanager
def _local_weights(module: nn.Module) -> Iterator[None]:
    """Context in which the module's parameters are this rank's shards; gradients reach the sharded ones."""
    # a mapping that torch declares to hold parameters only, although its modules read any tensor from it
    weights: dict[str, Any] = module._parameters
    held = dict(weights)
    weights.update({name: weight.to_local() for name, weight in held.items()})
    try:
        yield
    finally:
        weights.update(held)

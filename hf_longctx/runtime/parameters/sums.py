"""Sums the gradients of gathered weights over the ranks that share them, in place of FSDP2's reduce-scatters.

FSDP2 copies all gradients of a unit into one buffer in fp32, on the stream that computes, reduce-scatters it, and rounds the sums
to the dtype of the weights. Here each gradient is sent as it is, in the dtype of its gathered weight: an all-to-all gives every
rank its rows of all ranks' gradients, which it adds in fp32 or wider and hands on unrounded. So half-precision gradients take
half the bytes on the links, no buffer in fp32 exists beside them, and no bit of a sum is lost. Ranks are added in order, so that
sums are reproducible. Gradients that may have added up over several backwards, on any rank, are sent in fp32 (`is_wide`).

Over N nodes the ranks of each node exchange first, and add up: rank i of every node gets what the i-th N of all ranks will keep.
Then it sends each of these its sum in fp32. So each node sends every sum once, as in a ring, in place of one gradient for each of
its ranks.

Large gradients are sent from where they are, and their memory is given up when their sum has ended, before the sums of the next
unit start. Small ones are copied into one tensor first.

FSDP2 has no public way to do this. So one method of its record of weights is replaced, as in `gathers.py`. Outside of plans,
whose handler sets `add`, it sums by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.plan.core.sharding import summing_ranks
from hf_longctx.runtime.core.torch_versions import take_whole_gradients

# attribute of a sharded model
_SUMS = "longctx_sums"
# least bytes of a gradient that is exchanged apart from others: a fraction of a millisecond on the links of a node
APART_BYTES = 4 * 2**20


class ShardSums:
    """Sums of the gradients of all weights that a sharded model gathers; replaces those of FSDP2 while `add` is set.

    groups: FSDP2's records of weights (`weight_groups`). node_ranks: consecutive ranks on one node; 0 for all. add: takes a
    weight and the sum over ranks of a gradient of its shard, in fp32 or wider, on the stream of sums.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Any], node_ranks: int = 0) -> None:
        self.add: Callable[[nn.Parameter, Tensor], None] | None = None
        # whether gradients are sent in fp32 or wider; equal on all ranks
        self.is_wide = False
        self._node_ranks = node_ranks
        # records of running sums, their ends, and the gradients that they read
        self._running: list[tuple[Any, Any, Any]] = []
        for group in groups:
            group.post_backward = _PostBackward(self, group, group.post_backward)
        setattr(model, _SUMS, self)

    def start(self, group: Any) -> None:
        """Starts the sums of one record of weights, after the backward of their module."""
        taken = take_whole_gradients(group)
        if group.reshard_after_backward:
            group.reshard()
        # so that the gradients of at most one other unit wait for their sums
        self.settle(group.modules)
        if not taken:
            return
        ranks, device, stream = group._all_gather_process_group, group.device_handle, group.comm_ctx.reduce_scatter_stream
        node_ranks = exchanging_ranks(ranks, self._node_ranks)
        weights = [weight for weight, _ in taken]
        blocks = joined_blocks([gradient.to(self._dtype_of(weight)) for weight, gradient in taken], ranks.size())
        del taken
        stream.wait_stream(device.current_stream())
        with torch.profiler.record_function(group._with_fqn("FSDP::sum_gradients")), device.stream(stream):
            try:
                for blocks_RK, places in blocks:
                    sum_K = sum_blocks(blocks_RK, ranks, node_ranks)
                    own = [weights[place] for place in places]
                    sizes = [weight.padded_sharded_param_size.numel() for weight in own]
                    for weight, total in zip(own, sum_K.split(sizes), strict=True):
                        self._add(weight, total)
            finally:
                # a sum that raises leaves others that still read their gradients
                self._running.append((group, stream.record_event(), blocks))

    def _dtype_of(self, weight: Any) -> torch.dtype:
        """Returns the dtype in which all ranks send the gradient of a weight, whatever their backwards have left."""
        dtype: torch.dtype = weight.param_dtype or weight.orig_dtype
        return torch.promote_types(dtype, torch.float32) if self.is_wide else dtype

    def _add(self, weight: Any, total: Tensor) -> None:
        """Hands on the sum of a gradient of a shard; total: flat, with the rows by which the shard is filled up."""
        assert self.add is not None
        shape = weight.sharded_size
        self.add(weight.sharded_param, weight.to_sharded_dtensor(total[: shape.numel()].view(shape)))

    def settle(self, besides: Any = None) -> None:
        """Lets the current stream wait for the sums that run, and gives up their gradients. besides: modules whose sums stay."""
        staying = [each for each in self._running if each[0].modules is besides]
        for group, end, _ in self._running:
            if group.modules is not besides:
                group.device_handle.current_stream().wait_event(end)
        self._running = staying


class _PostBackward:
    """Replaces `post_backward` of one of FSDP2's records; `own` is the original."""

    def __init__(self, sums: ShardSums, group: Any, own: Callable[..., None]) -> None:
        self._sums, self._group, self._own = sums, group, own

    @property
    def is_replaced(self) -> bool:
        """Whether the next sums are those of `ShardSums`."""
        return self._sums.add is not None and bool(self._group.reduce_grads)

    @property
    def sends(self) -> bool:
        """Whether the next sums are those of `ShardSums`, of gradients in the dtypes of weights."""
        return self.is_replaced and not self._sums.is_wide

    def __call__(self, *unused: Any) -> None:
        if self.is_replaced:
            self._sums.start(self._group)
        else:
            self._own(*unused)


def sums_of(model: object) -> ShardSums | None:
    """Returns the sums of a model that was sharded over two ranks or more; None for others."""
    found: ShardSums | None = getattr(model, _SUMS, None)
    return found


def sends_next(group: Any) -> bool:
    """Whether `ShardSums` will send the gradients of the next backward on FSDP2's record `group` in the dtypes of weights."""
    return isinstance(group.post_backward, _PostBackward) and group.post_backward.sends


@torch.no_grad()
def joined_blocks(gradients: Sequence[Tensor], num_ranks: int) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Arranges gradients for `sum_blocks`: (their rows for every rank, [ranks, K], and which gradients these are), by dtype.

    Every rank gets ceil(R / ranks) rows of a gradient [R, ...]; missing ones are zeros. A large gradient is sent apart, and is
    not copied if it needs none; the others are copied into one tensor, so that few messages are sent.
    """
    flats = [gradient.reshape(-1) for gradient in gradients]
    sizes = [-(-len(gradient) // num_ranks) * gradient[:1].numel() for gradient in gradients]
    together: dict[Hashable, list[int]] = {}
    for place, flat in enumerate(flats):
        together.setdefault(flat.dtype if flat.nbytes < APART_BYTES else place, []).append(place)
    return [
        (_side_by_side([(flats[place], sizes[place]) for place in places], num_ranks), tuple(places))
        for places in together.values()
    ]


def _side_by_side(parts: Sequence[tuple[Tensor, int]], num_ranks: int) -> Tensor:
    """Puts flat tensors into [ranks, sum of sizes], each into `size` columns row by row, and fills up the last rows with zeros.

    Returns a view of a lone tensor in which nothing is missing.
    """
    (first, size), *others = parts
    if not others and len(first) == num_ranks * size:
        return first.view(num_ranks, size)
    blocks_RK = first.new_zeros(num_ranks, sum(size for _, size in parts))
    for columns, (flat, size) in zip(blocks_RK.split([size for _, size in parts], 1), parts, strict=True):
        whole, rest = divmod(len(flat), size) if size else (0, 0)
        columns[:whole] = flat[: whole * size].view(whole, size)
        if rest:
            columns[whole, :rest] = flat[whole * size :]
    return blocks_RK


@torch.no_grad()
def sum_blocks(blocks_RK: Tensor, ranks: dist.ProcessGroup, node_ranks: int) -> Tensor:
    """Returns the sum over all ranks of their row `rank` of `blocks_RK`, [K], in fp32 or wider. Collective.

    node_ranks: from `exchanging_ranks`.
    """
    (num_ranks, num_columns), rank = blocks_RK.shape, ranks.rank()
    num_nodes, first = num_ranks // node_ranks, rank // node_ranks * node_ranks
    wide = torch.promote_types(blocks_RK.dtype, torch.float32)
    neighbours = range(first, first + node_ranks)
    received = _exchange(blocks_RK.view(node_ranks, -1), neighbours, neighbours, ranks)
    sums_NK = received.sum(0, dtype=wide).view(num_nodes, num_columns)
    if num_nodes == 1:
        return sums_NK[0]
    keepers = range((rank - first) * num_nodes, (rank - first + 1) * num_nodes)
    return _exchange(sums_NK, keepers, range(rank // num_nodes, num_ranks, node_ranks), ranks).sum(0)


def _exchange(rows: Tensor, receivers: range, senders: range, ranks: dist.ProcessGroup) -> Tensor:
    """Sends one row to each of some ranks, in their order, and receives as many rows, one from each of others."""
    received = torch.empty_like(rows)
    row_bytes = rows[0].nbytes
    receives, sends = ([row_bytes * (rank in peers) for rank in range(ranks.size())] for peers in (senders, receivers))
    # bytes, since not every backend exchanges every dtype
    sent, arrived = (x.flatten().view(torch.uint8) for x in (rows, received))
    dist.all_to_all_single(arrived, sent, receives, sends, group=ranks)
    return received


def exchanging_ranks(ranks: dist.ProcessGroup, node_ranks: int) -> int:
    """Returns the number of consecutive ranks that exchange gradients first, if a node has `node_ranks` (0: any number)."""
    return summing_ranks(ranks.size(), node_ranks) if not dist.get_global_rank(ranks, 0) % max(1, node_ranks) else ranks.size()

"""Sums the gradients of gathered weights over the ranks that share them, in place of FSDP2's reduce-scatters.

FSDP2 copies all gradients of a unit into one buffer in fp32, on the stream that computes, reduce-scatters it, and rounds the sums
to the dtype of the weights. Here each gradient is sent as it is, in the dtype of its gathered weight: an all-to-all gives every
rank its rows of all ranks' gradients, which it adds in fp32 or wider and hands on unrounded. So half-precision gradients take
half the bytes on the links, no buffer in fp32 exists beside them, and no bit of a sum is lost. Ranks are added in order, so that
sums are reproducible. Gradients that may have added up over several backwards, on any rank, are sent in fp32 (`is_wide`).

Over N nodes the ranks of each node exchange first, and add up: rank i of every node gets what the i-th N of all ranks will keep,
its part of the node's sum. Then it sends each of these its sum in fp32. So each node sends every sum once, as in a ring, in place
of one gradient for each of its ranks. With `gathered_per_node` parameters, parts add up over the backwards of a step, and cross
nodes once: those of layers in the last backward, those of other weights after it.

Large gradients are sent from where they are, and their memory is given up when their sum has ended, before the sums of the next
unit start. Small ones are copied into one tensor first.

FSDP2 has no public way to do this. So one method of its record of weights is replaced, as in `gathers.py`. Outside of plans,
whose handler sets `add`, it sums by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.plan.core.sharding import node_part, summing_ranks
from hf_longctx.runtime.core.torch_versions import take_whole_gradients

# attribute of a sharded model
_SUMS = "longctx_sums"
# least bytes of a gradient that is exchanged apart from others: a fraction of a millisecond on the links of a node
APART_BYTES = 4 * 2**20


class ShardSums:
    """Sums of the gradients of all weights that a sharded model gathers; replaces those of FSDP2 while `add` is set.

    groups: FSDP2's records of weights (`weight_groups`). node_ranks: consecutive ranks on one node; 0 for all. node: the ranks
    of this node, for sums that add up there. add: takes a weight and the sum over ranks of a gradient of its shard, in fp32 or
    wider, on the stream of sums.
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[Any], node_ranks: int = 0, node: dist.ProcessGroup | None = None
    ) -> None:
        self.add: Callable[[nn.Parameter, Tensor], None] | None = None
        # whether gradients are sent in fp32 or wider; equal on all ranks
        self.is_wide = False
        # whether sums add up on nodes until `finish`
        self.stays_in_node = False
        # records whose sums cross nodes in their next backward, since it is their last one; equal on all ranks
        self.ending: Collection[Any] = ()
        self._node_ranks, self._node = node_ranks, node
        # parts of the node's sums by record, and the records whose parts have crossed nodes since their last backward
        self._parts: dict[Any, _SumPart] = {}
        self._sent: set[Any] = set()
        # the stream on which parts cross nodes; parts that do, with their ends; sums of weights that other nodes may have used
        self._across: Any = None
        self._crossing: list[tuple[Any, Any, _SumPart | None]] = []
        self._unsure: list[tuple[Any, Tensor, Tensor]] = []
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
                # its memory belongs to this stream, which goes on reading it when nothing else does
                part = self._part_of(group) if self.stays_in_node else None
                for blocks_RK, places in blocks:
                    own = [weights[place] for place in places]
                    if part is not None:
                        assert self._node is not None
                        part.add(own, sum_in_node(blocks_RK, self._node, range(self._node.size())))
                        continue
                    self._add(own, sum_blocks(blocks_RK, ranks, node_ranks))
            finally:
                # a sum that raises leaves others that still read their gradients
                self._running.append((group, end := stream.record_event(), blocks))
        if part is not None:
            part.end = end
            if group in self.ending:
                # the next layer waits for the sum on this node alone
                self._cross(group)

    def _dtype_of(self, weight: Any) -> torch.dtype:
        """Returns the dtype in which all ranks send the gradient of a weight, whatever their backwards have left."""
        dtype: torch.dtype = weight.param_dtype or weight.orig_dtype
        return torch.promote_types(dtype, torch.float32) if self.is_wide else dtype

    def _add(self, weights: Sequence[Any], sum_K: Tensor) -> None:
        """Hands on the sums of gradients of shards, side by side, each with the rows by which its shard is filled up."""
        assert self.add is not None
        for weight, total in zip(weights, sum_K.split(list(map(_padded_size, weights))), strict=True):
            shape = weight.sharded_size
            self.add(weight.sharded_param, weight.to_sharded_dtensor(total[: shape.numel()].view(shape)))

    def _part_of(self, group: Any) -> _SumPart:
        """Returns this rank's part of the sums of a record on its node, which its next backward adds to."""
        self._sent.discard(group)
        if group not in self._parts:
            assert self._node is not None
            self._parts[group] = _SumPart(group, group._all_gather_process_group.size() // self._node.size())
        return self._parts[group]

    def _cross(self, group: Any) -> None:
        """Sends a record's parts across nodes, and hands on the sums over all ranks. Collective over these."""
        assert self._node is not None
        if self._across is None:
            self._across = group.device_handle.Stream()
        ranks, across = group._all_gather_process_group, self._across
        with torch.profiler.record_function(group._with_fqn("FSDP::sum_nodes")), group.device_handle.stream(across):
            part = self._part_of(group)
            del self._parts[group]
            self._sent.add(group)
            if part.end is not None:
                across.wait_event(part.end)
            if part.weights:
                keepers, holders = node_part(ranks.rank(), ranks.size(), self._node.size())
                total = _exchange(part.sums_NK, keepers, holders, ranks).sum(0)
                counts = total[-len(part.weights) :]
                for weight, sum_K, count in zip(part.weights, total.split([*part.sizes, len(counts)]), counts, strict=False):
                    if id(weight) in part.added:
                        self._add([weight], sum_K)
                    else:
                        self._unsure.append((weight, sum_K, count))
            # the memory of the part belongs to another stream
            self._crossing.append((group, across.record_event(), part))

    def finish(self, groups: Iterable[Any]) -> None:
        """Sends what nodes have added up since it last crossed nodes; call it after a step's last backward and `settle`.

        Collective over all ranks, which give the same records in the same order; another `settle` ends it.
        """
        for group in groups:
            if group not in self._sent:
                self._cross(group)
        self._sent.clear()
        if not self._unsure:
            return
        unsure, self._unsure, group = self._unsure, [], self._crossing[0][0]
        with group.device_handle.stream(self._across):
            for weight, sum_K, count in unsure:
                # no rank may have used the weight, which then has no gradient
                if bool(count):
                    self._add([weight], sum_K)
            # hand-overs of now are later than the ends above
            self._crossing.append((group, self._across.record_event(), None))

    def forget(self) -> None:
        """Drops the sums of a step that raised."""
        self._parts.clear()
        self._sent.clear()
        self._unsure.clear()

    def settle(self, besides: Any = None) -> None:
        """Lets the current stream wait for the sums that run, and gives up their gradients.

        besides: modules whose sums stay; parts that cross nodes stay then, too.
        """
        for group, crossed, _ in self._crossing if besides is None else ():
            group.device_handle.current_stream().wait_event(crossed)
        self._crossing = self._crossing if besides is not None else []
        staying = [each for each in self._running if each[0].modules is besides]
        for group, end, _ in self._running:
            if group.modules is not besides:
                group.device_handle.current_stream().wait_event(end)
        self._running = staying


class _SumPart:
    """This rank's part of the sums of one record of weights on its node: rows for `num_nodes` ranks, [nodes, K].

    Its last columns say which weights a backward has added to, so that their sums count the nodes that have.
    """

    def __init__(self, group: Any, num_nodes: int) -> None:
        self.weights = [weight for weight in group.fsdp_params if weight.sharded_param.requires_grad]
        self.sizes = list(map(_padded_size, self.weights))
        self.added: set[int] = set()
        # end of the sum that was added last
        self.end: Any = None
        dtype = functools.reduce(torch.promote_types, [weight.orig_dtype for weight in self.weights], torch.float32)
        self.sums_NK = torch.zeros(num_nodes, sum(self.sizes) + len(self.sizes), dtype=dtype, device=group.device)
        *columns, counts = self.sums_NK.split([*self.sizes, len(self.sizes)], 1)
        self._columns = {
            id(weight): (each, counts[:, place]) for place, (weight, each) in enumerate(zip(self.weights, columns, strict=True))
        }

    def add(self, weights: Sequence[Any], sums_NK: Tensor) -> None:
        """Adds sums of one backward for some of the weights, side by side."""
        for weight, own in zip(weights, sums_NK.split(list(map(_padded_size, weights)), 1), strict=True):
            column, is_added = self._columns[id(weight)]
            column += own
            if id(weight) not in self.added:
                is_added.fill_(1)
                self.added.add(id(weight))


def _padded_size(weight: Any) -> int:
    """Returns the number of elements of a weight's shard, with those by which it is filled up."""
    found: int = weight.padded_sharded_param_size.numel()
    return found


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
    first = ranks.rank() // node_ranks * node_ranks
    sums_NK = sum_in_node(blocks_RK, ranks, range(first, first + node_ranks))
    if len(sums_NK) == 1:
        return sums_NK[0]
    return _exchange(sums_NK, *node_part(ranks.rank(), ranks.size(), node_ranks), ranks).sum(0)


@torch.no_grad()
def sum_in_node(blocks_RK: Tensor, ranks: dist.ProcessGroup, neighbours: range) -> Tensor:
    """Returns this rank's part of the sum of `blocks_RK` over the `neighbours` among `ranks`, [nodes, K], in fp32 or wider.

    Collective over these.
    """
    (num_ranks, num_columns), node_ranks = blocks_RK.shape, len(neighbours)
    wide = torch.promote_types(blocks_RK.dtype, torch.float32)
    received = _exchange(blocks_RK.view(node_ranks, -1), neighbours, neighbours, ranks)
    return received.sum(0, dtype=wide).view(num_ranks // node_ranks, num_columns)


@torch.no_grad()
def gather_part(shard_K: Tensor, ranks: dist.ProcessGroup, node_ranks: int) -> Tensor:
    """Returns this rank's part of its node's copy of a weight: the shards of its `node_part` in order, flat. Collective."""
    owners, holders = node_part(ranks.rank(), ranks.size(), node_ranks)
    return _exchange(shard_K.repeat(len(holders), 1), holders, owners, ranks).flatten()


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

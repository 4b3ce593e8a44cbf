"""Gathers shards of weights straight into the whole weights, in place of FSDP2's gathers.

FSDP2 gathers all weights of a unit into one buffer and copies each of them out of it, on the stream that computes. Here one
collective of several tensors receives every weight where it is used: shards are equal blocks of rows, with the last ones filled
up, so that gathered shards are the rows of the weight in order. Nothing is copied, and no buffer exists beside the weights.

With `gathered_per_node` parameters, a step first gathers each rank's part of its node's copy (`hold_part`); until `release`,
gathers read these parts, inside the node.

The memory of the whole weights belongs to the stream that computes, and a gather waits for all that this stream has been given
before. So a gather overlaps with what is given afterwards: start it before the layer that is to hide it (`sharded.py`).

FSDP2 gathers into buffers of its own only. So two methods of its record of weights are replaced here, as in `rounded.py` and
`host_layers.py`. Its `finalize_backward`, which drops gathers that nothing has read, knows nothing of those made here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hf_longctx.runtime.core.torch_versions import gather_tensors
from hf_longctx.runtime.parameters.sums import gather_part

# attribute of FSDP2's record of weights
_GATHER = "longctx_gather"


class DirectGather:
    """Gathers of the weights of one record of FSDP2 (`weight_groups`), of two ranks or more.

    node: the ranks of this node, for parts of its copy.
    """

    def __init__(self, group: Any, node: dist.ProcessGroup | None = None) -> None:
        self._group, self._node = group, node
        # parts of the node's copy, and the end of their gather
        self._held: tuple[list[Tensor], Any] | None = None
        # end of the gather that runs, and the shards that it reads
        self._running: tuple[Any, list[Tensor]] | None = None
        setattr(group, _GATHER, self)
        group.unshard, group.wait_for_unshard = self.start, self.finish

    @property
    def is_running(self) -> bool:
        """Whether a gather has started that nothing has waited for."""
        return self._running is not None

    @property
    def has_node(self) -> bool:
        """Whether parts of a node's copy can be held."""
        return self._node is not None

    @torch.no_grad()
    def hold_part(self, across: Any) -> None:
        """Starts to gather this rank's parts of the node's copy, on the stream `across`, unless it has them.

        Collective over all ranks that share the weights, once per step: weights must not change before `release`.
        """
        group = self._group
        if self._held is not None:
            return
        assert self._node is not None
        across.wait_stream(group.device_handle.current_stream())
        with torch.profiler.record_function(group._with_fqn("FSDP::hold_part")), group.device_handle.stream(across):
            shards = [shard for weight in group.fsdp_params for shard in weight.all_gather_inputs]
            parts = [gather_part(shard, group._all_gather_process_group, self._node.size()) for shard in shards]
            self._held = parts, across.record_event()

    def release(self) -> None:
        """Frees the parts of the node's copy; the next gathers read shards.

        No gather may run. The memory belongs to the stream that held the parts, which waits before it writes there again.
        """
        self._held = None

    @torch.no_grad()
    def start(self, async_op: bool = False) -> None:
        """Starts a gather, unless one runs or the weights are whole. async_op: FSDP2's name; makes no difference."""
        group = self._group
        if self.is_running or group.is_unsharded:
            return
        weights, ranks = group.fsdp_params, group._all_gather_process_group
        whole = []
        for weight in weights:
            shard = weight._sharded_param_data
            weight.init_all_gather_outputs([shard.numel()], [weight.param_dtype or shard.dtype], ranks.size(), group.device)
            weight.alloc_all_gather_outputs()
            whole += weight.all_gather_outputs
        # FSDP2 makes its streams in the first forward
        stream = getattr(group.comm_ctx, "all_gather_stream", group.device_handle.current_stream())
        stream.wait_stream(group.device_handle.current_stream())
        with torch.profiler.record_function(group._with_fqn("FSDP::all_gather")), group.device_handle.stream(stream):
            if self._held is None:
                shards = [shard for weight in weights for shard in weight.all_gather_inputs]
            else:
                shards, held = self._held
                stream.wait_event(held)
                assert self._node is not None
                ranks = self._node
            # backwards read weights that were freed and gathered again since their forward
            with _unsafe_preserve_version_counter(tuple(whole)):
                gather_tensors(whole, shards, ranks)
            self._running = stream.record_event(), shards

    def finish(self) -> None:
        """Lets the current stream wait for the gather that runs, and puts the whole weights into the model."""
        if self._running is None:
            return
        self._wait(self._running[0])
        for weight in self._group.fsdp_params:
            weight.init_unsharded_param()
        self._group._to_unsharded()

    def drop(self) -> None:
        """Frees the weights of a gather that runs."""
        if self._running is None:
            return
        self._wait(self._running[0])
        for weight in self._group.fsdp_params:
            weight.free_unsharded_param()

    def _wait(self, end: Any) -> None:
        self._group.device_handle.current_stream().wait_event(end)
        self._running = None


def gather_of(group: Any) -> DirectGather | None:
    """Returns the gathers of FSDP2's record `group`; None if it gathers nothing, or by itself."""
    found: DirectGather | None = getattr(group, _GATHER, None)
    return found

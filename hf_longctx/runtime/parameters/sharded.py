"""Shards a model with FSDP2, and decides when a micro-batch gathers weights and reduces gradients.

`hf` calls `shard_mesh` and `shard_model` at start-up; the executor drives `ShardedParameters`.

Parameters are sharded over all ranks of a stage, or over blocks of consecutive ranks with copies across blocks (HSDP), but never
over a sequence group: a plan moves tokens, not weights. Every backward reduce-scatters its gradients as a sum into shards
(`sums_every_backward`), or each rank accumulates whole gradients for the last backward of a micro-batch. With HSDP the sums of
the blocks are added once, after the last micro-batch of the step.
FSDP2 would add them in every micro-batch, which can deadlock: blocks may run different numbers of micro-batches, and a finished
block would wait in the shared group for one that waits for it elsewhere.

With `gathered_per_node` parameters, passes gather weights and backwards sum gradients inside a node. What crosses nodes does so
once per step (`DirectGather.hold_part`, `ShardSums.finish`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_longctx.plan.core.types import (
    Action,
    Parameters,
    frees_every_round,
    gathers_every_pass,
    keeps_node_copies,
    sums_every_backward,
)
from hf_longctx.runtime.core.clock import group_limit
from hf_longctx.runtime.core.torch_versions import (
    add_weight_group,
    drop_whole_gradients,
    fill_whole_gradient,
    wait_for_passes,
    weight_groups,
)
from hf_longctx.runtime.parameters.gathers import DirectGather, gather_of
from hf_longctx.runtime.parameters.gradients import HALF_DTYPES, EarlyGroup, GradientSum, ReplicatedParameters, Send, TiedWeight
from hf_longctx.runtime.parameters.host_layers import LayerShards
from hf_longctx.runtime.parameters.rounded import choose_gradient_dtypes, gather_rounded, rounded_records, rounded_weights
from hf_longctx.runtime.parameters.sums import ShardSums, sums_of

# description of the mesh's groups in torch's logs
MESH_GROUP = "parameter shards"
_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
# attribute of a sharded model: the group of ranks with equal shards
_COPIES = "longctx_copies"
# attribute of a sharded model: shards that are on the host while a step computes
_ON_HOST = "longctx_layer_shards"
# attribute of a mesh: the group of the ranks of this node, which keeps copies
_NODE = "longctx_node"


def shard_mesh(device_type: str, shard_ranks: int, timeout_s: float, num_stages: int = 1, node_ranks: int = 0) -> DeviceMesh:
    """Makes the mesh for sharding: blocks of `shard_ranks` consecutive ranks, with copies across a stage's blocks.

    Collective over all ranks, which create every group in the same order; call it before the sequence groups are made. The mesh
    has its own groups, so that a rank that waits longer than `timeout_s` fails. Repeated calls with equal arguments return the
    same mesh, since torch treats equal meshes as identical. node_ranks: consecutive ranks of a node, for plans with
    `gathered_per_node` parameters; 0 for others. Raises ValueError unless `shard_ranks` divides the ranks of a stage, and is
    several times `node_ranks`.
    """
    num_ranks = dist.get_world_size()
    ranks_per_stage = num_ranks // num_stages
    if shard_ranks < 1 or ranks_per_stage % shard_ranks:
        raise ValueError(
            f"shard_ranks is {shard_ranks}, which does not divide the {ranks_per_stage} ranks of a stage (without stages: of the "
            f"run); choose a divisor"
        )
    if node_ranks and (shard_ranks % node_ranks or shard_ranks == node_ranks):
        raise ValueError(
            f"nodes of {node_ranks} ranks cannot keep copies of weights whose shards lie on {shard_ranks} ranks; shard them over "
            f"several whole nodes, or set parameters='sharded'"
        )
    mesh = _new_mesh(dist.group.WORLD, device_type, shard_ranks, timeout_s, num_stages)
    setattr(mesh, _NODE, node_group(node_ranks, timeout_s) if node_ranks else None)
    return mesh


@functools.cache
def _new_mesh(world: dist.ProcessGroup, device_type: str, shard_ranks: int, timeout_s: float, num_stages: int) -> DeviceMesh:
    num_ranks, rank = world.size(), world.rank()
    # every rank creates the groups of all stages, not only those of its own
    stages = torch.arange(num_ranks).view(num_stages, -1, shard_ranks)
    shards = _own_group(stages.flatten(0, 1).tolist(), rank, timeout_s)
    blocks = stages[rank // (num_ranks // num_stages)]
    if len(blocks) == 1:
        return DeviceMesh.from_group(shards, device_type, mesh_dim_names=("shard",))
    copies = _own_group(stages.transpose(1, 2).flatten(0, 1).tolist(), rank, timeout_s)
    return DeviceMesh.from_group([copies, shards], device_type, mesh=blocks, mesh_dim_names=("replicate", "shard"))


def node_group(node_ranks: int, timeout_s: float) -> dist.ProcessGroup:
    """Makes the group of the `node_ranks` consecutive ranks of this node. Collective, and cached, as `shard_mesh`."""
    return _new_node_group(dist.group.WORLD, node_ranks, timeout_s)


@functools.cache
def _new_node_group(world: dist.ProcessGroup, node_ranks: int, timeout_s: float) -> dist.ProcessGroup:
    return _own_group(torch.arange(world.size()).view(-1, node_ranks).tolist(), world.rank(), timeout_s)


def block_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the ranks of `mesh` that share one copy of the parameters with this rank, as a 1-D mesh."""
    return mesh if mesh.ndim == 1 else mesh["shard"]


def shard_model(
    model: nn.Module,
    layer_classes: Sequence[str],
    mesh: DeviceMesh,
    fp32_gradients: bool = True,
    layers_on_host: bool = False,
    node_ranks: int = 0,
) -> None:
    """Shards `model` in place over `mesh`: each module of a class in `layer_classes` as one unit, then the rest as another.

    A nested module belongs to the outer one's unit. A module that shares a parameter with the rest of the model, such as a tied
    embedding, belongs to the last unit, so that the parameter stays shared. Weights that are already shards of a `DTensor`, such
    as spread experts, stay unchanged. Weights that autocast rounds (`note_rounded`) are gathered in bf16. Every rank's backward
    must reach the same parameters, or FSDP2 silently adds gradients of different ones; plans send at least one chunk per rank
    through the whole model. fp32_gradients: accumulate and sum gradients of half-precision weights in fp32. layers_on_host: keep
    shards of layers in host memory while forwards and backwards run (`host_layers.py`). node_ranks: see `ShardSums`. Raises
    ValueError if no module is of one of the classes, and for `layers_on_host` with blocks of one rank, whose shards are whole, or
    with a mesh for copies of nodes.
    """
    if layers_on_host and block_mesh(mesh).size() == 1:
        raise ValueError(
            "shards of layers can lie on the host only if two or more ranks share the parameters; use more ranks, or leave "
            "layers_on_host out"
        )
    node: dist.ProcessGroup | None = getattr(mesh, _NODE, None)
    if layers_on_host and node is not None:
        raise ValueError(
            "nodes keep copies of the weights on the device, so shards of layers cannot lie on the host; leave layers_on_host "
            "out, or set parameters='sharded'"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    layers = [
        module
        for path, module in model.named_modules()
        if type(module).__name__ in layer_classes
        and all(name.startswith(f"{path}.") for parameter in module.parameters() for name in names[id(parameter)])
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers of class {', '.join(layer_classes) or '(none named)'} to shard; name the "
            f"class of its layers"
        )
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    layers = [layer for layer in layers if id(layer) not in inner]
    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half and fp32_gradients else None)
    dealt: set[nn.Parameter] = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    # look up modules now, since shards are other objects
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in rounded_weights(model)]
    for parameter in model.parameters():
        # FSDP2 refuses transposed weights
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    for module in [*layers, model]:
        # a unit sums its gradients in one dtype, so weights that are trained in another get a group of their own
        wide = _in_second_dtype(module, dealt)
        fully_shard(module, mesh=block_mesh(mesh), mp_policy=policy, ignored_params={*dealt, *wide})
        if wide:
            add_weight_group(module, wide, policy)
    # `ShardedParameters` sums over the copies itself, without FSDP2
    setattr(model, _COPIES, mesh.get_group("replicate") if mesh.ndim > 1 else None)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        # otherwise FSDP2 scales fp32 sums by 1 inside the collective, which gloo does not support
        unit.set_force_sum_reduction_for_comms(True)
    gather_rounded([*layers, model], places)
    if block_mesh(mesh).size() > 1:
        for group in _groups(model):
            DirectGather(group, node)
        ShardSums(model, _groups(model), node_ranks, node)
    if layers_on_host:
        device = torch.device(mesh.device_type)
        setattr(model, _ON_HOST, LayerShards([layer for layer in layers if isinstance(layer, FSDPModule)], device))


def _in_second_dtype(unit: nn.Module, dealt: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the weights of a unit in the widest dtype that it trains, if it trains others too; else none."""
    weights = [weight for weight in unit.parameters() if weight not in dealt and not isinstance(weight, DTensor)]
    dtypes = {weight.dtype for weight in weights if weight.requires_grad}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return [weight for weight in weights if weight.dtype == widest] if len(dtypes) > 1 else []


def copies_group(model: object) -> dist.ProcessGroup | None:
    """Returns the group of ranks with the same shards as this rank; None if there are no others."""
    found: dist.ProcessGroup | None = getattr(model, _COPIES, None)
    return found


def layer_shards(model: object) -> LayerShards | None:
    """Returns the shards of a model's layers that are on the host while a step computes; None if there are none."""
    found: LayerShards | None = getattr(model, _ON_HOST, None)
    return found


class ShardedParameters:
    """Parameters of a model after `shard_model`, for plans with any `parameters` but "replicated".

    sharded: every forward and backward gathers a layer and frees it afterwards. gathered_per_round: the first forward of a
    micro-batch gathers each layer and its last backward frees it, so that the order of the actions in between is free.
    gathered_per_step: the first forward of an optimizer step gathers each layer. gathered_per_node: the first micro-batch of a
    step gathers a copy of all layers for each node, from which passes gather layers as if `sharded`. The unit of
    embedding and head stays gathered from the first forward of a step on. `free` frees what is still gathered.

    If every backward reduces (`sums_every_backward`), each adds to the sums of this rank's shards.

    Layers compute one after another; each gathers the next one while it computes, also the first layer of the pass that follows
    (`begin_pass`), and sums of gradients run beside the next layer, also beside the first one of the next pass: only the next
    backward, or `reduce`, waits for those of the last layer. If a pass ends with the layer with which the next one begins, it
    stays gathered.

    num_stages: pipeline stages of the model. range_layers: number of layers in each layer range of this stage. seldom: name of a
    weight that some ranks of a stage may not use in a micro-batch, such as that of a spread head; empty if there is none.
    """

    def __init__(
        self,
        model: FSDPModule,
        fp32_gradients: bool,
        num_stages: int = 1,
        range_layers: Sequence[int] = (),
        seldom: str = "",
    ) -> None:
        assert isinstance(model, nn.Module)
        self.model, self.num_stages = model, num_stages
        self.layers = [module for module in _units(model) if module is not model]
        self.copies = copies_group(model)
        self.on_host = layer_shards(model)
        self.sums = sums_of(model)
        # FSDP2's records of weights, and those of weights that are gathered in bf16
        self._groups = _groups(model)
        self._rounded = rounded_records(self._groups)
        free_gathered(self.model)
        self.gradients = GradientSum(list(model.parameters()), fp32_gradients)
        shard = model.get_parameter(seldom) if seldom else None
        # its record, with that of all weights that are gathered together
        self._seldom = [
            (group, weight) for group in self._groups for weight in group.fsdp_params if weight.sharded_param is shard
        ]
        self._parameters: Parameters = "sharded"
        # layers of each layer range; empty if the order of layers is not known
        self._ranges = _order_layers(model, range_layers)
        # gathers of layers, in order, and the stream of those that cross nodes for a whole step
        self._gathers = [gather for layer in self.layers for gather in map(gather_of, weight_groups(layer)) if gather is not None]
        self._across: Any = None
        # whether the running plan is the last of its step, and whether nodes have sums of the step that must leave them
        self._is_end, self._has_node_sums = True, False
        # the layer with which the running pass ends, and whether it stays gathered for the next pass
        self._last: FSDPModule | None = None
        self._keeps_last = False
        # whether sums of gradients may still run
        self._runs_sums = False
        # backwards of the micro-batch so far
        self._num_backwards = 0

    def check(self, parameters: Parameters) -> None:
        """Raises ValueError if a plan made for parameters of kind `parameters` cannot run on this model."""
        if parameters == "replicated":
            raise ValueError("the plan expects replicated parameters, but this model is sharded; plan with parameters='sharded'")
        if keeps_node_copies(parameters) and not (self._gathers and self._gathers[0].has_node):
            raise ValueError(
                "the plan keeps a copy of the weights on every node, but this model was sharded without groups of the ranks of a "
                "node; shard it over shard_mesh(..., node_ranks=...), or plan with parameters='sharded'"
            )
        if not gathers_every_pass(parameters) and self.on_host is not None:
            raise ValueError(
                "the plan gathers all layers at once, but their shards lie on the host to save memory; plan with "
                "parameters='sharded'"
            )

    def computing(self) -> AbstractContextManager[None]:
        """Context around all forwards and backwards of a plan, during which shards of layers may be on the host."""
        return nullcontext() if self.on_host is None else self.on_host.away(self.model)

    def in_step(
        self, is_end: bool, early_group: EarlyGroup | None = None, send: Send | None = None
    ) -> AbstractContextManager[None]:
        """Context around all forwards and backwards of a plan; is_end: it is the last of its step.

        FSDP2 sums early by itself, and nothing is sent early.
        """
        self._is_end = is_end
        return nullcontext()

    def enter_round(self, parameters: Parameters) -> None:
        """Sets when layers are gathered and freed; call it before the first action of a micro-batch."""
        self._parameters, self._num_backwards = parameters, 0
        for layer in self.layers:
            layer.set_reshard_after_forward(gathers_every_pass(parameters), recurse=False)
        if keeps_node_copies(parameters):
            self._hold_parts()

    def _hold_parts(self) -> None:
        """Starts to gather embedding and head, and this rank's parts of all layers, unless a step has them."""
        # FSDP2 makes its streams, and fills up shards, before its first gather
        self.model._get_fsdp_state()._lazy_init()
        if self._across is None:
            self._across = self._groups[0].device_handle.Stream()
        # messages of one communicator follow each other, and the first forward begins with the embedding
        for group in weight_groups(self.model):
            if gather := gather_of(group):
                gather.start()
        for gather in self._gathers:
            gather.hold_part(self._across)

    def begin_pass(self, action: Action, following: Action | None) -> None:
        """Prepares the end of a forward or backward for the one that this rank runs next; call it before each.

        The pass gathers the first layer of the next one while its last layer computes, or keeps it if the two are one layer. All
        ranks of a block must agree on both passes, since gathers are collective.
        """
        if not self._ranges or not gathers_every_pass(self._parameters):
            return
        is_forward = action.kind == "F"
        last = self._ranges[action.layer_range][-is_forward]
        first = None if following is None else self._ranges[following.layer_range][-(following.kind == "B")]
        self._last, self._keeps_last = last, first is last
        # a layer without a list of its own would gather what ran before it
        gathered = [first or self.model]
        if is_forward:
            last.set_reshard_after_forward(not self._keeps_last, recurse=False)
            last.set_modules_to_forward_prefetch(gathered)
        else:
            last.set_modules_to_backward_prefetch(gathered)

    def before_backward(self, is_last: bool, is_last_of_plan: bool = False) -> None:
        """Prepares a backward: the last one of a micro-batch (`is_last`), or every one, reduces gradients.

        All ranks must agree on which backward is the last, since the reduction is collective.
        """
        self._settle()
        sums_each = sums_every_backward(self._parameters, self.num_stages)
        self._runs_sums = is_last or sums_each
        if self.sums is not None:
            self.sums.add = self.gradients.add
            # ranks that meet in every pass have equally many backwards
            is_only = self._num_backwards == 0 and gathers_every_pass(self._parameters)
            self.sums.is_wide = not (sums_each or is_only)
            self.sums.stays_in_node = keeps_node_copies(self._parameters)
            self._has_node_sums |= self.sums.stays_in_node
            # the last backward of a step runs the first layer range, on all ranks
            ending = self._ranges[0] if self._is_end and is_last_of_plan and self._ranges else []
            self.sums.ending = [group for layer in ending for group in weight_groups(layer)]
        self._num_backwards += 1
        if is_last and not sums_each:
            # other ranks may sum a gradient that this one lacks
            for _, weight in self._seldom:
                fill_whole_gradient(weight)
        # `_settle` ends the backward in place of FSDP2, which would wait at its end
        self.model.set_is_last_backward(False)
        self.model.set_requires_gradient_sync(self._runs_sums)
        choose_gradient_dtypes(self._rounded)
        gathers = gathers_every_pass(self._parameters)
        self.model.set_reshard_after_backward(gathers or (frees_every_round(self._parameters) and is_last))
        self.model.set_reshard_after_backward(False, recurse=False)
        if gathers and self._last is not None and self._keeps_last:
            self._last.set_reshard_after_backward(False, recurse=False)

    def skip_backward(self) -> None:
        """Sums gradients that wait for a backward which would reach nothing, since a stage trains its output head alone."""
        for group, _ in self._seldom if self._runs_sums else ():
            group.post_backward()

    def after_backward(self) -> None:
        """Does nothing, since sums over ranks may still run; `_settle` collects their results."""

    def _settle(self) -> None:
        """Lets the current stream wait for sums over ranks, and collects half-precision gradients in fp32."""
        if self._runs_sums:
            self._runs_sums = False
            self._wait()
            self.gradients.absorb()

    def _wait(self) -> None:
        """Lets the current stream wait for all sums, and leaves those of later passes to FSDP2."""
        wait_for_passes(self.model._get_fsdp_state(), self._groups)
        if self.sums is not None:
            self.sums.add = None
            self.sums.settle()
            choose_gradient_dtypes(self._rounded)

    def reduce(self, group: dist.ProcessGroup | None, tied: TiedWeight | None = None) -> None:
        """Leaves the step's gradient sum of each shard in its `.grad`; backwards have already summed within blocks.

        Collective over the ranks with equal shards and, for `tied`, over the stages that hold it with equal shards.
        """
        self._settle()
        if self.sums is not None and self._has_node_sums:
            self.sums.add = self.gradients.add
            self.sums.finish(self._groups)
            self._runs_sums, self._has_node_sums = True, False
            self._settle()
        self.gradients.reduce(self.copies, tied)

    def free(self, keeps_ends: bool = False) -> None:
        """Frees weights that are still gathered: after an optimizer step, or after forwards without a backward.

        Passes outside of plans then gather, free and sum as FSDP2 does by default. keeps_ends: weights outside of the layers,
        such as those of the head, stay gathered.
        """
        self._settle()
        free_gathered(self.model, keeps_ends)
        self.model.set_is_last_backward(True)
        self.model.set_requires_gradient_sync(True)
        self.model.set_reshard_after_backward(True)
        for layer in self.layers:
            layer.set_reshard_after_forward(True, recurse=False)

    def forget(self) -> None:
        """Drops sums of a step that raised, and ends its passes.

        Otherwise FSDP2 would add gradients of weights that were gathered to those of the next step.
        """
        self.gradients.forget()
        if self.sums is not None:
            self.sums.forget()
        self._has_node_sums = False
        for group in self._groups:
            for weight in group.fsdp_params:
                drop_whole_gradients(weight)
        self._runs_sums = False
        self.end_passes()

    def end_passes(self) -> None:
        """Resets FSDP2's record of running passes after one of them raised, and frees gathered weights; gradients stay.

        Allocates nothing, since memory may have run out.
        """
        root = self.model._get_fsdp_state()
        if root._is_root is None:
            # no pass has run yet: FSDP2 makes its streams and records in the first one
            return
        running = root._state_ctx
        running.iter_forward_root, running.post_backward_final_callback_queued = None, False
        for unit in _units(self.model):
            state = unit._get_fsdp_state()
            state._training_state = type(state._training_state).IDLE
        for group in self._groups:
            group._training_state = root._training_state
        self._wait()
        self.free()


def is_sharded(model: object) -> bool:
    """Whether `shard_model` was applied to `model`."""
    return isinstance(model, FSDPModule)


def free_gathered(model: object, keeps_ends: bool = False) -> None:
    """Frees gathered weights, so that the model's parameters are shards again; does nothing for a model without shards.

    keeps_ends: frees only those of layers, and copies of nodes.
    """
    for unit in _units(model):
        if keeps_ends and unit is model:
            continue
        for group in weight_groups(unit):
            if gather := gather_of(group):
                gather.drop()
        unit.reshard()
    for group in _groups(model):
        if gather := gather_of(group):
            gather.release()


def parameters_of(
    model: nn.Module, fp32_gradients: bool, num_stages: int = 1, range_layers: Sequence[int] = (), seldom: str = ""
) -> ReplicatedParameters | ShardedParameters:
    """Returns the handler of the model's parameters: `ShardedParameters` after `shard_model`, else `ReplicatedParameters`.

    num_stages, range_layers, seldom: as in `ShardedParameters`.
    """
    if isinstance(model, FSDPModule):
        return ShardedParameters(model, fp32_gradients, num_stages, range_layers, seldom)
    return ReplicatedParameters(model, fp32_gradients)


def _units(model: object) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(model: object) -> list[Any]:
    """Returns FSDP2's records of all weights that the model gathers."""
    return [group for unit in _units(model) for group in weight_groups(unit)]


def _order_layers(model: FSDPModule, range_layers: Sequence[int]) -> list[list[FSDPModule]]:
    """Makes every layer gather the next one of its list and layer range, in forwards and backwards, and the last one none.

    Returns the layers of each range; none if lists of layers are not one, and differ from the ranges in length.
    FSDP2's own order is that of its forwards. Each backward that reduces clears it, and with several chunks the layer recorded
    before a first layer is the last layer of another chunk.
    """
    assert isinstance(model, nn.Module)
    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule) and module is not model}
    lists: dict[str, list[FSDPModule]] = {}
    for name, unit in units.items():
        lists.setdefault(_list_of(model, name, units), []).append(unit)
    # without a list of its own, a unit would look up what ran before; the unit of embedding and head is gathered by then
    model.set_modules_to_backward_prefetch([model])
    found = []
    for layers in lists.values():
        counts = range_layers if len(layers) == sum(range_layers) else [len(layers)]
        stops = [*itertools.accumulate(counts)]
        starts = [0, *stops[:-1]]
        for number, layer in enumerate(layers):
            layer.set_modules_to_backward_prefetch([model if number in starts else layers[number - 1]])
            layer.set_modules_to_forward_prefetch([model if number + 1 in stops else layers[number + 1]])
        if len(counts) == max(1, len(range_layers)):
            found.append([layers[start:stop] for start, stop in zip(starts, stops, strict=True)])
    return found[0] if len(found) == 1 else []


def _list_of(model: nn.Module, name: str, units: Iterable[str]) -> str:
    """Returns the path of the list that a unit of this name belongs to, although modules may be wrapped around the unit.

    The innermost container that has other units too; without one, the module that holds the unit.
    """
    above = parent = name.rpartition(".")[0]
    while above:
        if isinstance(model.get_submodule(above), _CONTAINERS) and sum(each.startswith(f"{above}.") for each in units) > 1:
            return above
        above = above.rpartition(".")[0]
    return parent


def _own_group(groups: list[list[int]], rank: int, timeout_s: float) -> dist.ProcessGroup:
    """Creates every group, in the same order on every rank; returns the one that `rank` is in."""
    timeout = group_limit(timeout_s)
    handles = {tuple(ranks): dist.new_group(ranks, timeout=timeout, group_desc=MESH_GROUP) for ranks in groups}
    return next(handle for ranks, handle in handles.items() if rank in ranks)

"""The activation engine: executes an `ActivationPolicy` layer by layer, through Hugging Face's own activation checkpointing.

`hf.models.activations` makes the engine for a model; the executor gets from it the slots of every chunk.

A transformers decoder layer can call `_gradient_checkpointing_func` in place of its forward. The engine sets it to torch's
non-reentrant checkpoint with a `context_fn`, whose two contexts distinguish the first run of a layer from its replay
(grad mode does not, since the first run is not under no_grad). The contexts carry one `LayerSlot` per layer and forward, so
any number of forwards may be in flight. The attention function finds the slot's attention record in the chunk's context; MLP and
projections find their records on the layer's binding. Per layer and step, then,

    attention runs forward once plus the recomputed share of its output, the query, key and value projections once plus their
    recomputed share, norms at most three times, and the MLP twice minus its kept share (a third time only if the layer saves
    tensors after it, as with a norm after the MLP, or with a second MLP).

The layer input is kept, or the layer before makes it again by another run from its own kept input, without a graph (`Rerun`);
two layers in a row cannot both do this. The other tensors that a policy names (attention output with its LSE, outputs of the
projections, inner tensors of the MLP) are kept for a share of the tokens. Kept tensors may wait on the host; those of a layer
are fetched during the backward of the layer after it. Layers that keep everything or need no gradient run unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hf_longctx.plan.core.types import TENSOR_CLASSES, ActivationPolicy, LayerPolicy, TensorShare
from hf_longctx.runtime.activations.adapted_projection import Reader, plain_projection
from hf_longctx.runtime.activations.head_pieces import PiecedAttention, num_kv_heads
from hf_longctx.runtime.activations.host_tier import HostTier, SplitTensor
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.activations.records import AttentionRecord, ProjectionRecord
from hf_longctx.runtime.activations.token_tiles import TileRecord, tokenwise
from hf_longctx.runtime.core.binding import bound, put
from hf_longctx.runtime.core.dropout import DropoutTokens
from hf_longctx.runtime.core.products import Maker, make_products


class Rerun:
    """Recomputes a layer's output, the next layer's input, from the layer's own input, without a graph.

    Owned by the next layer's graph. slot: slot of the layer that runs again. run: its forward without a graph.
    """

    def __init__(self, slot: LayerSlot, run: Callable[[Tensor], Tensor], output: Tensor) -> None:
        self.slot, self._run, self._output = slot, run, weakref.ref(output)

    def gives(self, hidden_1TC: Tensor) -> bool:
        """Whether a tensor is the output of the layer's first run, not a tensor derived from it."""
        return self._output() is hidden_1TC

    def __call__(self) -> Tensor:
        return self._run(self.slot.fetch_input())


class LayerSlot:
    """State of one layer in one forward, until its backward: its policy and the tensors it holds.

    previous: slot of the layer before, whose backward comes next; None if that layer has none. feeds_next: the next layer's
    input is recomputed from this layer's input.
    """

    feeds_next = False

    def __init__(
        self, policy: LayerPolicy, tile_tokens: int, tier: HostTier | None, previous: LayerSlot | None, num_mlps: int = 1
    ) -> None:
        self.tile_tokens, self._tier, self._previous = tile_tokens, tier, previous
        # records of all heads, or of each piece
        self.attention = tuple(AttentionRecord(policy.share("attention_output"), tier) for _ in range(policy.head_pieces))
        self.projections = ProjectionRecord(policy.share("qkv"), tier)
        self.mlps = tuple(TileRecord(policy.share("mlp"), tier) for _ in range(num_mlps))
        self._input_share = policy.share("layer_input")
        # hidden states first; weak, since the layer's graph owns them until after the layer's backward
        self._inputs: list[weakref.ref[SplitTensor]] = []
        self.whole_input_bytes = 0
        # rerun of the layer before, until the first run of this layer has packed its input
        self.rerun_before: Rerun | None = None

    @property
    def splits_mlp(self) -> bool:
        """Whether `tokenwise` runs the MLP, in tiles or with some tokens kept."""
        return self.tile_tokens > 0 or any(record.share.recompute < 1 for record in self.mlps)

    @property
    def held(self) -> list[SplitTensor]:
        """Tensors held now, except graphs of the MLP and a layer input that is entirely on the device."""
        inputs = [split for each in self._inputs if (split := each()) is not None]
        outputs = [tensor for record in self.attention for tensor in record.held]
        return [*outputs, *self.projections.held, *inputs]

    @property
    def head_pieces(self) -> int:
        """Number of pieces of heads in which attention runs."""
        return len(self.attention)

    @property
    def keeps_qkv(self) -> bool:
        """Whether queries, keys and values are kept for at least some tokens."""
        return self.projections.share.recompute < 1

    @property
    def recomputes_input(self) -> bool:
        """Whether the layer before runs again to recompute the layer input."""
        return self._input_share.recompute > 0

    @property
    def splits_input(self) -> bool:
        """Whether hooks pack the layer input: if it is partly on the host, recomputed, or needed by the next layer."""
        return self._input_share.host > 0 or self.recomputes_input or self.feeds_next

    def pack_input(self, hidden_1TC: Tensor) -> SplitTensor | Rerun | Tensor:
        """Packs the layer input for the graph; called for each tensor among the layer's positional arguments."""
        if not has_tokens(hidden_1TC):
            return hidden_1TC
        rerun, self.rerun_before = self.rerun_before, None
        if rerun is not None and rerun.gives(hidden_1TC):
            return rerun
        # if the layer before cannot make the input again, as below the first trained weight, the device keeps it
        share = TensorShare("layer_input", device=1.0) if self.recomputes_input else self._input_share
        split = SplitTensor(hidden_1TC[0], share, self._tier)
        self._inputs.append(weakref.ref(split))
        return split

    def fetch_input(self) -> Tensor:
        """Returns the layer input [1, T, C] for a run other than the replay; the caller owns a copy from the host."""
        split = self._inputs[0]() if self._inputs else None
        assert split is not None
        return split.fetch().unsqueeze(0)

    def unpack_input(self, packed: SplitTensor | Rerun | Tensor) -> Tensor:
        """Unpacks the layer input when the replay begins, and starts to fetch the tensors of the previous layer."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Rerun):
            hidden_1TC = packed()
            self.prefetch_previous()
            return hidden_1TC
        hidden_TC = packed.fetch()
        self.prefetch_previous()
        return hidden_TC.unsqueeze(0)

    def prefetch_previous(self) -> None:
        """Starts to copy back the tensors of the previous layer, whose backward comes next."""
        if self._previous is not None:
            self._previous.prefetch()

    def prefetch(self) -> None:
        """Starts to copy back the layer's tensors."""
        for tensor in self.held:
            tensor.prefetch()
        for record in self.mlps:
            for saved in record.on_host:
                saved.home.prefetch()

    def set_replay(self, is_replay: bool) -> None:
        """Sets, in all records of the slot, whether the layer is being replayed."""
        self.projections.is_replay = is_replay
        for record in self.attention:
            record.is_replay = is_replay
        for mlp in self.mlps:
            mlp.is_replay = is_replay


def has_tokens(argument: Any) -> bool:
    """Whether a positional argument of a layer is a tensor with one row of features for each token of the chunk, [1, T, C]."""
    return isinstance(argument, Tensor) and argument.dim() == 3 and argument.shape[0] == 1


@dataclass(frozen=True, slots=True)
class LayerModules:
    """A decoder layer that supports Hugging Face's checkpointing, with its modules that process tokens independently."""

    layer: nn.Module
    # modules that compute hidden states from hidden states alone: several if the layer adds their outputs, none if the layer is
    # replayed with its MLP
    mlps: tuple[nn.Module, ...]
    norms: tuple[nn.Module, ...]
    # linear modules for queries, keys and values; empty if other modules compute them
    projections: tuple[nn.Linear, ...] = ()
    # why the layer's MLP, which may be in `mlps`, never runs in tiles nor keeps some tokens; empty if it may, or if there is none
    whole_mlp: str = ""
    # the MLP returns its output and a second value, which the layer drops
    mlp_gives_more: bool = False
    # the MLP exchanges tokens with other ranks, so all ranks must run it equally often: never in tiles, and replayed by all
    # or by none
    meets_ranks: bool = False
    # module whose forward can run any number of heads (`head_pieces`); None if there is none
    attention: nn.Module | None = None
    # finds the parts of its projections
    read_projection: Reader = plain_projection


class ChunkActivations:
    """Slots of the layers in one forward of one chunk; travels in the chunk's context. Layers without a slot keep everything."""

    def __init__(self, policy: ActivationPolicy, bindings: Sequence[_LayerBinding], tier: HostTier | None = None) -> None:
        self._bindings, self._tier, self._leaving_layers = bindings, tier, policy.leaving_layers
        self.num_layers_seen = 0
        # keyed by the layer's index in the whole model, even if only some of its layers run
        self.slots: dict[int, LayerSlot] = {}
        previous: LayerSlot | None = None
        for binding, layer in zip(bindings, policy.layers, strict=False):
            if layer.keeps_everything:
                # the backward of the layer before fetches its tensors itself
                previous = None
            else:
                num_mlps = len(binding.modules.mlps)
                slot = self.slots[binding.index] = LayerSlot(layer, policy.tile_tokens, tier, previous, num_mlps)
                if slot.recomputes_input and (before := self.slots.get(binding.index - 1)) is not None:
                    before.feeds_next = True
                previous = slot

    def begin_layer(self) -> None:
        """Counts a layer whose forward comes next."""
        self.num_layers_seen += 1
        if self._tier is not None:
            self._tier.begin_layer()

    def end_layer(self) -> None:
        """After the last layer, lets the device wait until offloaded tensors have left, since the loss needs memory too.

        In a pipeline, some may leave beside the next pass.
        """
        if self._tier is not None and self.num_layers_seen == len(self._bindings):
            self._tier.end_chunk()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context around the model's forward, in which layers run under the policy.

        Raises RuntimeError if layers ran without the policy, since they then hold more than planned.
        """
        self.num_layers_seen = 0
        if self._tier is not None:
            self._tier.begin_chunk(self._leaving_layers)
        with ExitStack() as stack:
            for binding in self._bindings:
                stack.enter_context(binding.checkpointing())
            yield
        if self.num_layers_seen != len(self._bindings):
            raise RuntimeError(
                f"{self.num_layers_seen} of {len(self._bindings)} layers ran under the activation policy; the model must be in "
                f"training mode and pass the plan (keyword `longctx`) on to its decoder layers"
            )

    def held_bytes(self) -> tuple[int, int]:
        """Returns (device, host) bytes of layer inputs, projections, attention outputs, LSEs and MLP tensors for backward."""
        slots = self.slots.values()
        held = [tensor for slot in slots for tensor in slot.held]
        mlps = [record for slot in slots for record in slot.mlps]
        on_device = sum(slot.whole_input_bytes for slot in slots) + sum(record.kept_bytes for record in mlps)
        mlp_host = sum(saved.home.num_bytes for record in mlps for saved in record.on_host)
        return on_device + sum(x.device_bytes for x in held), sum(x.host_bytes for x in held) + mlp_host


class ActivationEngine:
    """Binds itself to the decoder layers of one model; `unbind` restores them.

    Layers run unchanged in a forward whose context has no activations or that makes no graph. tier: stores offloaded tensors;
    without it, policies that offload are refused. head: computes the loss in the tiles of a policy; without it, the executor
    computes the loss from whole logits. partners: the ranks over which experts are spread; if the policy of one of them replays
    a layer whose MLP exchanges tokens, all of them replay it.
    """

    def __init__(
        self,
        layers: Sequence[LayerModules],
        tier: HostTier | None = None,
        head: OutputHead | None = None,
        partners: dist.ProcessGroup | None = None,
    ) -> None:
        self.tier, self.head, self.partners = tier, head, partners
        for modules in layers:
            if not hasattr(type(modules.layer), "gradient_checkpointing"):
                raise ValueError(
                    f"{type(modules.layer).__name__} does not support gradient_checkpointing, which recomputation and offload "
                    f"need; use a model class whose decoder layers derive from transformers' GradientCheckpointingLayer"
                )
        self._bindings = [_LayerBinding(modules, index) for index, modules in enumerate(layers)]

    @property
    def num_layers(self) -> int:
        return len(self._bindings)

    @property
    def can_keep_qkv(self) -> bool:
        """Whether all layers may keep queries, keys and values for their replay."""
        return all(binding.modules.projections for binding in self._bindings)

    def begin(self, policy: ActivationPolicy, layers: range | None = None) -> ChunkActivations:
        """Makes slots for one forward over `layers` of the model (None: all) under `policy`; raises ValueError as `check` does.

        Collective over `partners`, if there are any.
        """
        self.check(policy, layers)
        if self.partners is not None:
            policy = self._agreed(policy, self._bindings_of(layers), self.partners)
        return ChunkActivations(policy, self._bindings_of(layers), self.tier)

    def _agreed(
        self, policy: ActivationPolicy, bindings: Sequence[_LayerBinding], partners: dist.ProcessGroup
    ) -> ActivationPolicy:
        """Returns `policy` with whole replays of each layer that exchanges tokens and that any partner replays. Collective."""
        own = [*policy.layers, *[LayerPolicy()] * (len(bindings) - len(policy.layers))]
        replays = torch.tensor([not layer.keeps_everything for layer in own], dtype=torch.uint8, device=self._device)
        dist.all_reduce(replays, op=dist.ReduceOp.MAX, group=partners)
        layers = (
            _replayed(layer) if is_replayed and binding.modules.meets_ranks else layer
            for layer, binding, is_replayed in zip(own, bindings, replays.tolist(), strict=True)
        )
        return replace(policy, layers=tuple(layers))

    def settle(self) -> None:
        """Lets the device wait for tensors that left beside a pass: before the next forward, or after the next backward."""
        if self.tier is not None:
            self.tier.settle()

    @property
    def _device(self) -> torch.device:
        return next(self._bindings[0].modules.layer.parameters()).device

    def check(self, policy: ActivationPolicy, layers: range | None = None) -> None:
        """Raises ValueError, naming chunk and layer, if `policy` cannot be executed over `layers` (None: all)."""
        bindings = self._bindings_of(layers)
        if len(policy.layers) > len(bindings):
            raise ValueError(
                f"the policy has {len(policy.layers)} layers, but the model has {len(bindings)}; make the plan for this model"
            )
        for index, (layer, binding) in enumerate(zip(policy.layers, bindings, strict=False)):
            where, modules = f"chunk {policy.chunk}, layer {index}", binding.modules
            before = policy.layers[index - 1] if index else None
            refuse_unsupported_policy(layer, where, before)
            if layer.share("layer_input").recompute and not _runs_alone(bindings[index - 1].modules):
                raise ValueError(
                    f"{where}: layer_input is recomputed by another run of the layer before, but that layer meets other ranks "
                    f"for its weights or experts, once in every pass; keep layer_input, or offload it to the host"
                )
            kept = 1 - layer.share("qkv").recompute
            if kept > 0 and not modules.projections and not layer.keeps_everything:
                raise ValueError(
                    f"{where}: {kept:g} of qkv is kept, but {type(modules.layer).__name__} does not make queries, keys and "
                    f"values with plain linear modules; recompute qkv, or keep everything in this layer"
                )
            kept = 1 - layer.share("mlp").recompute
            if kept > 0 and modules.whole_mlp and not layer.keeps_everything:
                raise ValueError(
                    f"{where}: {kept:g} of mlp is kept, but {modules.whole_mlp}, so a replay runs all of it; recompute mlp, or "
                    f"keep everything in this layer"
                )
            if problem := _pieces_problem(layer, modules):
                raise ValueError(f"{where}: attention in {layer.head_pieces} pieces of heads, but {problem}; use 1")
            if self.tier is None and any(share.host for share in layer.shares):
                raise ValueError(
                    f"{where}: the plan offloads saved tensors, but the engine was given no host memory; give it a host tier"
                )

    def _bindings_of(self, layers: range | None) -> Sequence[_LayerBinding]:
        return self._bindings if layers is None else self._bindings[layers.start : layers.stop]

    def unbind(self) -> None:
        """Restores the layers and the head."""
        for binding in self._bindings:
            binding.unbind()
        if self.head is not None:
            self.head.unbind()


def refuse_unsupported_policy(policy: LayerPolicy, where: str, before: LayerPolicy | None) -> None:
    """Raises ValueError naming the first setting of a layer's policy that cannot be executed.

    before: policy of the layer before; None for the first layer of a part.
    """
    if policy.keeps_everything or not (recomputed := policy.share("layer_input").recompute):
        return
    if recomputed < 1:
        raise ValueError(
            f"{where}: {recomputed:g} of layer_input is recomputed, but the layer before gives all of it or nothing; keep it, or "
            f"offload it to the host"
        )
    if before is None or before.keeps_everything or before.share("layer_input").recompute:
        raise ValueError(
            f"{where}: layer_input is recomputed, but the layer before "
            f"{'is on another part' if before is None else 'does not keep its own input for that'}; keep it, or offload it to "
            f"the host"
        )


def _runs_alone(modules: LayerModules) -> bool:
    """Whether a layer communicates in attention only: neither its weights nor its experts are spread over ranks."""
    return not modules.meets_ranks and not any(isinstance(parameter, DTensor) for parameter in modules.layer.parameters())


def _pieces_problem(policy: LayerPolicy, modules: LayerModules) -> str:
    """Describes why a layer cannot run attention in the pieces of its policy; empty if it can."""
    if policy.head_pieces == 1:
        return ""
    if modules.attention is None:
        return f"attention of {type(modules.layer).__name__} cannot be cut by heads"
    if policy.share("qkv").recompute < 1:
        return "queries, keys and values are kept"
    num_kv = num_kv_heads(modules.attention)
    return f"{num_kv} KV heads cannot be divided by that" if num_kv % policy.head_pieces else ""


def _hidden_states(output: Any) -> Any:
    """Returns the hidden states in a layer's output, which may be a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


def _replayed(policy: LayerPolicy) -> LayerPolicy:
    """Returns the policy with a replay of the whole MLP; if the layer kept everything, it also recomputes Q, K and V."""
    shares = [share for share in policy.shares if share.tensor_class != "mlp"]
    if policy.keeps_everything:
        shares = [TensorShare("qkv", recompute=1.0)]
    return replace(policy, shares=(*shares, TensorShare("mlp", recompute=1.0)))


class _LayerBinding:
    """Functions that the engine has bound to one layer: MLP, norms, projections and checkpointing.

    current: slot of the running forward or replay, if any.
    """

    def __init__(self, modules: LayerModules, index: int) -> None:
        self.modules, self.index = modules, index
        self.current: LayerSlot | None = None
        self._undo: list[Callable[[], None]] = []
        # an MLP that exchanges tokens with other ranks stays unchanged
        for number, mlp in enumerate(() if modules.meets_ranks else modules.mlps):
            self._bind_forward(mlp, number)
        for norm in modules.norms:
            self._bind_forward(norm, None)
        for number, linear in enumerate(modules.projections):
            self._bind_projection(linear, number)
        if modules.attention is not None:
            self._bind_attention(modules.attention)

    def unbind(self) -> None:
        """Restores the layer's modules."""
        while self._undo:
            self._undo.pop()()

    def _bind(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.append(put(module, "forward", bound(module, forward)))

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Context in which the layer runs its forwards through `_run`.

        Outside it the layer must not checkpoint, because transformers then drops its cache.
        """
        own = vars(self.modules.layer)
        settings = {"gradient_checkpointing": True, "_gradient_checkpointing_func": self._run}
        before = {name: own[name] for name in settings if name in own}
        own.update(settings)
        try:
            yield
        finally:
            for name in settings:
                del own[name]
            own.update(before)

    def _bind_forward(self, module: nn.Module, number: int | None) -> None:
        """Binds a norm (number None), or the MLP with this number."""
        run = module.forward
        gives_more = number is not None and self.modules.mlp_gives_more

        def forward(x: Tensor) -> Any:
            slot = self.current
            is_whole = number is not None and bool(self.modules.whole_mlp)
            if slot is None or not (slot.tile_tokens if number is None else slot.splits_mlp or is_whole):
                return run(x)
            # some mixtures of experts return [T, C] without the leading dimension
            alone = (lambda tile: run(tile)[0].view(tile.shape)) if gives_more else run
            tile_tokens = 0 if is_whole else slot.tile_tokens
            output = tokenwise(module, alone, x, tile_tokens, None if number is None else slot.mlps[number])
            return (output, None) if gives_more else output

        self._bind(module, forward)

    def _bind_projection(self, linear: nn.Linear, number: int) -> None:
        def current() -> Maker | None:
            slot = self.current
            return None if slot is None or not slot.keeps_qkv else partial(slot.projections.made, number)

        self._undo.append(make_products(linear, current))

    def _bind_attention(self, attention: nn.Module) -> None:
        run, pieced = attention.forward, PiecedAttention(attention, self.modules.read_projection)

        def forward(*args: Any, **keywords: Any) -> Any:
            slot = self.current
            return run(*args, **keywords) if slot is None or slot.head_pieces == 1 else pieced(slot.attention, *args, **keywords)

        self._bind(attention, forward)

    def _makes_graph(self, inputs: tuple[Any, ...]) -> bool:
        """Whether anything in the layer needs a gradient; false below the first trained weight."""
        tensors = (x for x in (*inputs, *self.modules.layer.parameters()) if isinstance(x, Tensor))
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def _run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Runs a layer's forward, which transformers passes as a partial with all keyword arguments."""
        assert isinstance(function, partial)
        context = function.keywords.get("longctx")
        if context is None or context.activations is None:
            return function(*inputs)
        context.activations.begin_layer()
        output = self._run_planned(function, inputs, context)
        context.activations.end_layer()
        return output

    def _run_planned(self, function: partial[Any], inputs: tuple[Any, ...], context: Any) -> Any:
        """Runs a layer's forward under the policy of its slot, if it has one."""
        slots = context.activations.slots
        slot, below = slots.get(self.index), slots.get(self.index - 1)
        if not self._makes_graph(inputs):
            return function(*inputs)
        if slot is None:
            output = function(*inputs)
            hidden = _hidden_states(output)
            if below is not None and isinstance(hidden, Tensor) and hidden.requires_grad:
                # runs when this layer's backward begins
                hidden.register_hook(lambda gradient: below.prefetch())
            return output
        if slot.recomputes_input and context.slices:
            raise ValueError(
                f"layer {self.index}: the layer input is recomputed, but the chunk has slices, whose keys and values another run "
                f"of the layer before would write again; keep the layer input, or offload it to the host"
            )
        layer_forward = _forward_with(function, context, slot)
        contexts = partial(_both_contexts, self, slot, context.tokens)
        # preserve_rng_state=False: nothing in a layer is random, since dropout draws by token
        # the hooks get only layer inputs, because checkpointing sets hooks of its own inside the layer
        hooks = saved_tensors_hooks(slot.pack_input, slot.unpack_input) if slot.splits_input else nullcontext()
        if not slot.splits_input:
            slot.whole_input_bytes = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, Tensor))
        with hooks:
            output = checkpoint(layer_forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        hidden = _hidden_states(output)
        if slot.feeds_next and isinstance(hidden, Tensor) and not any(map(has_tokens, inputs[1:])):
            following = slots[self.index + 1]
            following.rerun_before = Rerun(slot, self._rerun(function, inputs[1:], context, slot), hidden)
        return output

    def _rerun(
        self, function: partial[Any], others: tuple[Any, ...], context: Any, first: LayerSlot
    ) -> Callable[[Tensor], Tensor]:
        """Runs the layer's forward without a graph and without changes of its first run's records.

        others: positional arguments after the hidden states, such as a mask; none that `pack_input` packs.
        """
        device = next(self.modules.layer.parameters()).device.type
        autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        tile_tokens, head_pieces, num_mlps = first.tile_tokens, first.head_pieces, len(first.mlps)

        def run(hidden_1TC: Tensor) -> Tensor:
            # records that keep nothing
            slot = LayerSlot(replace(_NOTHING_KEPT, head_pieces=head_pieces), tile_tokens, None, None, num_mlps)
            # backward does not restore autocast by itself
            with torch.no_grad(), torch.autocast(*autocast), _Inside(self, slot, context.tokens, is_replay=False):
                made: Tensor = _hidden_states(_forward_with(function, context, slot)(hidden_1TC, *others))
            return made

        return run


_NOTHING_KEPT = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in TENSOR_CLASSES))


def _forward_with(function: partial[Any], context: Any, slot: LayerSlot) -> partial[Any]:
    """Returns a layer's forward whose attention uses the record of `slot`."""
    keywords = {**function.keywords, "longctx": replace(context, attention_record=slot.attention[0])}
    return partial(function.func, *function.args, **keywords)


def _both_contexts(binding: _LayerBinding, slot: LayerSlot, tokens: DropoutTokens | None) -> tuple[_Inside, _Inside]:
    return _Inside(binding, slot, tokens, is_replay=False), _Inside(binding, slot, tokens, is_replay=True)


class _Inside:
    """Context that marks a layer as in its first run or in a replay.

    A class, not a generator: with retain_graph torch enters a replay context several times, and it leaves the context by an
    exception if it stops a replay early.
    """

    def __init__(self, binding: _LayerBinding, slot: LayerSlot, tokens: DropoutTokens | None, is_replay: bool) -> None:
        self.binding, self.slot, self.tokens, self.is_replay = binding, slot, tokens, is_replay
        self.outer: LayerSlot | None = None
        self.running = ExitStack()

    def __enter__(self) -> None:
        self.outer = self.binding.current
        self.slot.set_replay(self.is_replay)
        if self.is_replay:
            self.slot.prefetch_previous()
        self.binding.current = self.slot
        if self.tokens is not None:
            # first run and replay both count calls of dropout modules from zero
            self.running.enter_context(self.tokens.part().running())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.running.close()
        self.binding.current = self.outer

"""The activation engine: executes an `ActivationPolicy` behind Hugging Face's own checkpointing door, layer by layer.

A decoder layer's `_gradient_checkpointing_func` becomes torch's non-reentrant checkpoint with a `context_fn`, whose two
contexts say whether the layer runs for the first time or is replayed (the first run is not no-grad, so grad mode cannot tell).
They carry one `LayerSlot` per layer and forward, so any number of forwards may be in flight. The attention function finds its
part of the slot in the chunk's context, MLP and projections on the layer's binding. So, per layer and step:

    attention runs forward once plus the recomputed share of its output, projections to queries, keys and values once plus
    their recomputed share, norms at most three times, the MLP twice less its kept share (a third time only where the layer
    saves tensors behind it, as with a norm after the MLP).

What a policy leaves to this engine: the layer input is kept; attention output with LSE, the outputs of the projections, and the
MLP's inner tensors are kept in shares of tokens. What is kept may wait on the host, from where one layer's tensors are fetched
while the layer behind it is replayed. Layers that keep everything run as they are, and so do those without any gradient.
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
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy
from hf_longctx.runtime.activations.attention_record import AttentionRecord
from hf_longctx.runtime.activations.host_tier import HostTier, SplitTensor
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.activations.projection_record import ProjectionRecord, project
from hf_longctx.runtime.activations.token_tiles import TileRecord, tokenwise
from hf_longctx.runtime.core.binding import bound


@dataclass(frozen=True, slots=True)
class LayerModules:
    """A decoder layer whose class has Hugging Face's checkpointing door, with those of its modules that treat tokens alone.

    projections: the linear modules that make queries, keys and values; none where they are made otherwise. mlp_gives_more: the
    MLP returns its output as the first of two values, the other of which the layer drops.
    """

    layer: nn.Module
    mlp: nn.Module
    norms: tuple[nn.Module, ...]
    projections: tuple[nn.Linear, ...] = ()
    mlp_gives_more: bool = False


class LayerSlot:
    """What one layer does and holds in one forward, until its backward."""

    def __init__(self, policy: LayerPolicy, tile_tokens: int, tier: HostTier | None, before: LayerSlot | None) -> None:
        self.tile_tokens, self._tier, self._before = tile_tokens, tier, before
        self.attention = AttentionRecord(policy.share("attention_output"), tier)
        self.projections = ProjectionRecord(policy.share("qkv"), tier)
        self.mlp = TileRecord(policy.share("mlp"), tier)
        self._input_share = policy.share("layer_input")
        # weak, since the layer's graph owns it: it goes when the layer's backward is done
        self._input: weakref.ref[SplitTensor] | None = None
        self.whole_input_bytes = 0

    @property
    def splits_mlp(self) -> bool:
        """Whether the MLP is run by us, in tiles or with some tokens kept."""
        return self.tile_tokens > 0 or self.mlp.share.recompute < 1

    @property
    def parts(self) -> list[SplitTensor]:
        """What the slot holds now, but for a layer input that is wholly on the device and the MLP's graphs."""
        held = None if self._input is None else self._input()
        return [*self.attention.parts, *self.projections.parts, *([held] if held is not None else [])]

    @property
    def keeps_qkv(self) -> bool:
        return self.projections.share.recompute < 1

    @property
    def splits_input(self) -> bool:
        return self._input_share.host > 0

    def pack_input(self, hidden_1TC: Tensor) -> SplitTensor | Tensor:
        """The layer input as the graph holds it; called once for every tensor among the layer's positional arguments."""
        if hidden_1TC.dim() != 3 or hidden_1TC.shape[0] != 1:
            return hidden_1TC
        split = SplitTensor(hidden_1TC[0], self._input_share, self._tier)
        self._input = weakref.ref(split)
        return split

    def unpack_input(self, packed: SplitTensor | Tensor) -> Tensor:
        """The layer input, as its replay begins; what the layer before it will need is sent for."""
        if isinstance(packed, Tensor):
            return packed
        hidden_TC = packed.fetch()
        self.prefetch_before()
        return hidden_TC.unsqueeze(0)

    def prefetch_before(self) -> None:
        """Starts the copies back of the layer before this one, whose backward comes next."""
        if self._before is not None:
            for part in self._before.parts:
                part.prefetch()
            for saved in self._before.mlp.on_host:
                saved.home.prefetch()

    def set_replay(self, is_replay: bool) -> None:
        self.attention.is_replay = self.projections.is_replay = self.mlp.is_replay = is_replay


class ChunkActivations:
    """The slots of one forward of one chunk; it travels in the chunk's context. Layers without a slot keep everything."""

    def __init__(self, policy: ActivationPolicy, bindings: Sequence[_LayerBinding], tier: HostTier | None = None) -> None:
        self._bindings = bindings
        self.num_layers_seen = 0
        # by the layer's place in the model, of which a part may run
        self.slots: dict[int, LayerSlot] = {}
        before: LayerSlot | None = None
        for binding, layer in zip(bindings, policy.layers, strict=False):
            if not layer.keeps_everything:
                before = self.slots[binding.index] = LayerSlot(layer, policy.tile_tokens, tier, before)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the forward of the model; opens the layers' doors.

        Raises RuntimeError if layers ran as they were, which would hold more than the policy says.
        """
        self.num_layers_seen = 0
        with ExitStack() as doors:
            for binding in self._bindings:
                doors.enter_context(binding.open_door())
            yield
        if self.num_layers_seen != len(self._bindings):
            raise RuntimeError(
                f"{self.num_layers_seen} of {len(self._bindings)} layers ran under the activation policy; the model must be in "
                f"training mode and hand the plan to its decoder layers"
            )

    def held_bytes(self) -> tuple[int, int]:
        """(device, host) bytes of layer inputs, projections, attention outputs, LSEs and MLP tensors that wait for backward."""
        slots = self.slots.values()
        parts = [part for slot in slots for part in slot.parts]
        on_device = sum(slot.whole_input_bytes + slot.mlp.kept_bytes for slot in slots) + sum(p.device_bytes for p in parts)
        mlp_host = sum(saved.home.num_bytes for slot in slots for saved in slot.mlp.on_host)
        return on_device, sum(part.host_bytes for part in parts) + mlp_host


class ActivationEngine:
    """Binds itself to the decoder layers of one model; `unbind` puts everything back.

    A forward whose context has no activations, or that makes no graph, runs the layers as they were. `tier` takes what policies
    send to the host; without one they are refused. `head` takes the loss in the tiles of a policy; without one the executor
    takes it from logits.
    """

    def __init__(self, layers: Sequence[LayerModules], tier: HostTier | None = None, head: OutputHead | None = None) -> None:
        self.tier, self.head = tier, head
        for modules in layers:
            if not hasattr(type(modules.layer), "gradient_checkpointing"):
                raise ValueError(
                    f"{type(modules.layer).__name__} has no gradient_checkpointing door, which recomputation and offload need; "
                    f"use a model class whose decoder layers derive from transformers' GradientCheckpointingLayer"
                )
        self._bindings = [_LayerBinding(modules, index) for index, modules in enumerate(layers)]

    @property
    def num_layers(self) -> int:
        return len(self._bindings)

    @property
    def can_keep_qkv(self) -> bool:
        """Whether a layer that is replayed may keep queries, keys and values."""
        return all(binding.modules.projections for binding in self._bindings)

    def begin(self, policy: ActivationPolicy, layers: range | None = None) -> ChunkActivations:
        """Fresh slots for one forward over `layers` of the model (None: all) under `policy`, which `check` must allow."""
        self.check(policy, layers)
        return ChunkActivations(policy, self._of(layers), self.tier)

    def check(self, policy: ActivationPolicy, layers: range | None = None) -> None:
        """Raises ValueError by name for what this version does not execute over `layers` (None: all)."""
        bindings = self._of(layers)
        if len(policy.layers) > len(bindings):
            raise ValueError(f"the policy has {len(policy.layers)} layers, the model {len(bindings)}; plan for this model")
        for index, (layer, binding) in enumerate(zip(policy.layers, bindings, strict=False)):
            where, modules = f"chunk {policy.chunk}, layer {index}", binding.modules
            refuse_unsupported_policy(layer, where)
            kept = 1 - layer.share("qkv").recompute
            if kept > 0 and not modules.projections and not layer.keeps_everything:
                raise ValueError(
                    f"{where}: {kept:g} of qkv is kept, but {type(modules.layer).__name__} does not make queries, keys and "
                    f"values by plain linear modules; recompute qkv, or keep everything in this layer"
                )
            if self.tier is None and any(share.host for share in layer.shares):
                raise ValueError(f"{where}: the plan sends saved tensors to the host, but the engine was given no host memory")

    def _of(self, layers: range | None) -> Sequence[_LayerBinding]:
        return self._bindings if layers is None else self._bindings[layers.start : layers.stop]

    def unbind(self) -> None:
        for binding in self._bindings:
            binding.unbind()
        if self.head is not None:
            self.head.unbind()


def refuse_unsupported_policy(policy: LayerPolicy, where: str) -> None:
    """Raises ValueError naming the first part of a layer's policy that is not executed yet."""
    for share in policy.shares:
        if share.nvme:
            raise ValueError(f"{where}: {share.nvme:g} of {share.tensor_class} on NVMe is not executed yet; send it to the host")
    if policy.keeps_everything:
        return
    if (recomputed := policy.share("layer_input").recompute) > 0:
        raise ValueError(
            f"{where}: {recomputed:g} of layer_input is recomputed, but a layer is replayed from its input; keep it, or move it "
            f"to the host"
        )


class _LayerBinding:
    """One layer's door and tiles. `current` is the slot of the forward or replay that is running, if any."""

    def __init__(self, modules: LayerModules, index: int) -> None:
        self.modules, self.index = modules, index
        self.current: LayerSlot | None = None
        # (module, attribute, what the instance had itself: nothing where the class's own came through)
        self._before: list[tuple[nn.Module, str, tuple[Any, ...]]] = []
        self._bind_forward(modules.mlp, is_mlp=True)
        for norm in modules.norms:
            self._bind_forward(norm, is_mlp=False)
        for place, linear in enumerate(modules.projections):
            self._bind_projection(linear, place)

    def unbind(self) -> None:
        while self._before:
            module, name, own = self._before.pop()
            vars(module).pop(name, None)
            vars(module).update((name, value) for value in own)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        own = vars(module)
        self._before.append((module, name, (own[name],) if name in own else ()))
        own[name] = value

    @contextmanager
    def open_door(self) -> Iterator[None]:
        """Inside, the layer hands its forwards to `_run`. Not longer, since a layer whose door is open drops its cache."""
        own = vars(self.modules.layer)
        door = {"gradient_checkpointing": True, "_gradient_checkpointing_func": self._run}
        before = {name: own[name] for name in door if name in own}
        own.update(door)
        try:
            yield
        finally:
            for name in door:
                del own[name]
            own.update(before)

    def _bind_forward(self, module: nn.Module, is_mlp: bool) -> None:
        run = module.forward
        gives_more = is_mlp and self.modules.mlp_gives_more

        def forward(x: Tensor) -> Any:
            slot = self.current
            if slot is None or not (slot.splits_mlp if is_mlp else slot.tile_tokens):
                return run(x)
            # some mixtures leave out the row
            alone = (lambda tile: run(tile)[0].view(tile.shape)) if gives_more else run
            output = tokenwise(module, alone, x, slot.tile_tokens, slot.mlp if is_mlp else None)
            return (output, None) if gives_more else output

        self._set(module, "forward", bound(module, forward))

    def _bind_projection(self, linear: nn.Linear, place: int) -> None:
        run = linear.forward

        def forward(x: Tensor) -> Tensor:
            slot = self.current
            return run(x) if slot is None or not slot.keeps_qkv else project(linear, x, slot.projections, place)

        self._set(linear, "forward", bound(linear, forward))

    def _makes_graph(self, inputs: tuple[Any, ...]) -> bool:
        """Whether anything in the layer has a gradient; it has not below the first of the weights that are trained."""
        tensors = (x for x in (*inputs, *self.modules.layer.parameters()) if isinstance(x, Tensor))
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def _run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """A layer's forward as its class calls it: `function` is a partial that holds every keyword argument."""
        assert isinstance(function, partial)
        context = function.keywords.get("longctx")
        if context is not None and context.activations is not None:
            context.activations.num_layers_seen += 1
        if context is None or context.activations is None or not self._makes_graph(inputs):
            return function(*inputs)
        slot = context.activations.slots.get(self.index)
        if slot is None:
            return function(*inputs)
        keywords = {**function.keywords, "longctx": replace(context, attention_record=slot.attention)}
        layer_forward = partial(function.func, *function.args, **keywords)
        contexts = partial(_both_contexts, self, slot)
        # nothing in a layer is random: dropout is refused
        # only the inputs meet these hooks: inside, checkpointing puts its own on top
        hooks = saved_tensors_hooks(slot.pack_input, slot.unpack_input) if slot.splits_input else nullcontext()
        if not slot.splits_input:
            slot.whole_input_bytes = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, Tensor))
        with hooks:
            return checkpoint(layer_forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _both_contexts(binding: _LayerBinding, slot: LayerSlot) -> tuple[_Inside, _Inside]:
    return _Inside(binding, slot, is_replay=False), _Inside(binding, slot, is_replay=True)


class _Inside:
    """Marks a layer as running for the first time or replayed.

    A class, because torch enters the same replay context again with retain_graph, and leaves it by an exception when it stops
    the replay early.
    """

    def __init__(self, binding: _LayerBinding, slot: LayerSlot, is_replay: bool) -> None:
        self.binding, self.slot, self.is_replay = binding, slot, is_replay
        self.before: LayerSlot | None = None

    def __enter__(self) -> None:
        self.before = self.binding.current
        self.slot.set_replay(self.is_replay)
        if self.is_replay:
            self.slot.prefetch_before()
        self.binding.current = self.slot

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.binding.current = self.before

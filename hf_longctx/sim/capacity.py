"""Answers where a rank's memory goes, how long a sequence may be, and which changes would allow a longer one, by one formula."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_longctx.plan.core.settings import GENERIC_GPU, USABLE_SHARE, ActivationBudget, ClusterSpec, GroupMethod, default_degrees
from hf_longctx.plan.core.types import GroupShape, Parameters
from hf_longctx.plan.cost.traffic import plainest_shape
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import may_rerun, most_tokens
from hf_longctx.plan.memory.lora import lora_adapters
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.model.model_spec import ModelSpec, PackedSpec
from hf_longctx.plan.policies.fit import longest_alone

_LEAST_GAIN = 1.05
# rank of the adapters that refusals propose
_LORA_RANK = 16
_MAX_DOUBLINGS = 10
# most pairs of settings that a refusal offers
_MOST_PAIRS = 3
# slices are tried for sequences of up to so many times the tokens of one chunk
_MOST_MORE = 4


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one kind of device for one model; `ByteModel` counts whatever was not measured on it.

    usable_bytes: bytes for states, saved tensors and workspace. saved_bytes_per_token: bytes that a token saves for backward;
    they decide how many tokens fit only where they were measured. state_bytes_per_parameter: measured bytes of weights,
    gradients and optimizer states (0: nothing was measured). lora_rank: rank of the model's adapters, for reports (0: all weights
    are trained). host_bytes: host memory of each rank for saved tensors (0: none is counted), of which they take at most
    `most_offloaded`. keeps_everything: plans recompute, offload and tile nothing, for example because the measured bytes per
    token already include recomputation.
    """

    model: ModelSpec
    device_bytes: int
    usable_bytes: int
    saved_bytes_per_token: int
    state_bytes_per_parameter: int = 0
    lora_rank: int = 0
    host_bytes: int = 0
    keeps_everything: bool = True
    most_offloaded: int = 2**62

    @classmethod
    def by_formula(cls, model: ModelSpec, device_bytes: int) -> DeviceMemory:
        """Memory without measurements: everything by formula, and four fifths of the device usable."""
        return cls(model, device_bytes, int(device_bytes * USABLE_SHARE), saved_token_bytes(model))

    @property
    def is_measured(self) -> bool:
        return self.state_bytes_per_parameter > 0

    def state_bytes(self, parameters: Parameters, shard_ranks: int) -> int:
        """Bytes that weights, gradients and optimizer states take on a rank, including weights gathered next to their shards."""
        if self.lora_rank or not self.is_measured:
            return self._byte_model.states(parameters, shard_ranks)
        whole = self.model.num_parameters * self.state_bytes_per_parameter
        if parameters == "replicated":
            return whole
        # weights that "sharded" gathers layer by layer are part of the measured bytes
        gathered = self.model.num_parameters * self.model.bytes_per_element if parameters == "gathered_per_round" else 0
        return -(-whole // shard_ranks) + gathered

    def host_states(self, parameters: Parameters, shard_ranks: int) -> int:
        """Bytes that optimizer states, and shards of layers, take in the host memory of a rank."""
        return self._byte_model.host_states(parameters, shard_ranks)

    @property
    def _byte_model(self) -> ByteModel:
        return ByteModel(self.model)

    def left_bytes(self, parameters: Parameters, shard_ranks: int) -> int:
        """Bytes that the states leave on a rank; 0 if they do not fit when nothing computes."""
        if self.resting_bytes(parameters, shard_ranks) > self.usable_bytes:
            return 0
        return max(0, self.usable_bytes - self.state_bytes(parameters, shard_ranks))

    def resting_bytes(self, parameters: Parameters, shard_ranks: int) -> int:
        """Bytes of the states on a rank when nothing computes, if shards of layers lie on the host otherwise; else 0."""
        return self._byte_model.resting(parameters, shard_ranks)

    def tokens_per_rank(self, parameters: Parameters, shard_ranks: int, is_shared: bool) -> int:
        """Most tokens that a rank can hold besides the states if everything is kept; 0 if the states alone do not fit.

        is_shared: ranks may share sequences.
        """
        left_bytes = self.left_bytes(parameters, shard_ranks)
        if self.is_measured:
            return left_bytes // self.saved_bytes_per_token
        return self._byte_model.kept_tokens(left_bytes, is_shared)

    def budget(self, parameters: Parameters, shard_ranks: int, is_shared: bool) -> ActivationBudget | None:
        """Bytes that policies may use besides the states, as in a run on these devices; None if everything is kept."""
        if self.keeps_everything:
            return None
        kept = self.tokens_per_rank(parameters, shard_ranks, is_shared)
        left_bytes = self.left_bytes(parameters, shard_ranks)
        host_bytes = min(self.host_bytes, self.most_offloaded)
        return ActivationBudget(kept, left_bytes, host_bytes, self._byte_model.tile_tokens(left_bytes))

    def most_tokens_per_rank(self, parameters: Parameters, shard_ranks: int, shape: GroupShape) -> int:
        """Most tokens that fit on a rank, with policies or with everything kept. shape: of the largest group of ranks."""
        is_shared = shape.degree > 1
        kept = self.tokens_per_rank(parameters, shard_ranks, is_shared)
        budget = self.budget(parameters, shard_ranks, is_shared)
        if budget is None:
            return kept
        room = budget.device_bytes, budget.host_bytes, budget.tile_tokens
        reruns = may_rerun(self.model, parameters)
        ways: dict[str, Any] = {"reruns": reruns, "head_pieces": self.model.head_pieces(shape.ulysses)}
        ways |= {"num_blocks": shape.num_blocks, "block_ranks": shape.ulysses}
        return max(kept, most_tokens(self.model, *room, **ways, is_shared=is_shared))

    def longest_alone(self, parameters: Parameters, shard_ranks: int, shape: GroupShape, known: int) -> int:
        """Tokens of the longest sequence that a group of this shape holds alone. known: those that fit in one chunk."""
        budget = self.budget(parameters, shard_ranks, shape.degree > 1)
        if budget is None or not known:
            return known
        return longest_alone(self.model, budget, shape, parameters, shard_ranks, known, _MOST_MORE * known)

    def kept_bytes(self, num_tokens: int, is_shared: bool) -> int:
        """Bytes besides the states on a rank that holds `num_tokens` tokens with everything kept."""
        if self.is_measured:
            return num_tokens * self.saved_bytes_per_token
        return self._byte_model.kept_bytes(num_tokens, is_shared)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a job; together with the model and its device it decides how long a sequence may be.

    max_tokens_per_rank: a limit set by the user, below what memory allows (0: none). ranks_per_node: as in `ClusterSpec`.
    most_positions: positions of a model that nothing extends (0: they can be extended, or the model needs none).
    """

    num_ranks: int
    parameters: Parameters
    shard_ranks: int
    degrees: tuple[int, ...]
    method: GroupMethod
    max_tokens_per_rank: int = 0
    ranks_per_node: int = 8
    most_positions: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether ranks may share sequences."""
        return self.degrees[-1] > 1

    def largest_shape(self, model: ModelSpec) -> GroupShape:
        """The shape of the largest group, in which the longest sequence is counted."""
        cluster = ClusterSpec(self.num_ranks, self.ranks_per_node, GENERIC_GPU)
        return plainest_shape(self.degrees[-1], self.method, model, cluster)

    def kept_tokens(self, memory: DeviceMemory) -> int:
        """Most tokens on a rank with everything kept."""
        return self._bounded(memory.tokens_per_rank(self.parameters, self.shard_ranks, self.is_shared))

    def tokens_per_rank(self, memory: DeviceMemory) -> int:
        """Most tokens on a rank that a plan may use."""
        return self._bounded(memory.most_tokens_per_rank(self.parameters, self.shard_ranks, self.largest_shape(memory.model)))

    def _bounded(self, fitting: int) -> int:
        return min(fitting, self.max_tokens_per_rank) if self.max_tokens_per_rank else fitting

    def longest_tokens(self, memory: DeviceMemory) -> int:
        """Tokens of the longest sequence that fits and has positions, alone in a group of the largest degree."""
        fitting = self.degrees[-1] * self.tokens_per_rank(memory)
        # a limit set by the user holds for sequences that are alone, too
        if not self.max_tokens_per_rank and not fitting >= self.most_positions > 0:
            fitting = memory.longest_alone(self.parameters, self.shard_ranks, self.largest_shape(memory.model), fitting)
        return min(fitting, self.most_positions) if self.most_positions else fitting


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that would lengthen the longest sequence, and the tokens that would then fit."""

    change: str
    tokens_per_rank: int
    longest_tokens: int

    @property
    def is_setting(self) -> bool:
        """Whether the same machine does."""
        return not re.search("--gpus|^devices of", self.change)


@dataclass(frozen=True, slots=True)
class Room:
    """Room for tokens on a rank, given one way of keeping weights, gradients and optimizer states; 0 tokens: it does not fit."""

    parameters: Parameters
    state_bytes: int
    tokens_per_rank: int
    longest_tokens: int


def rooms(memory: DeviceMemory, placement: Placement) -> tuple[Room, ...]:
    """Rooms for all ways of keeping the states, with equal groups; shards span all ranks unless the placement says otherwise."""
    names: tuple[Parameters, ...] = ("replicated", "sharded", "gathered_per_round")
    ways = []
    for parameters in names if placement.num_ranks > 1 else names[:1]:
        shard_ranks = placement.shard_ranks if placement.parameters != "replicated" else placement.num_ranks
        shard_ranks = 1 if parameters == "replicated" else shard_ranks
        other = replace(placement, parameters=parameters, shard_ranks=shard_ranks)
        ways.append(
            Room(
                parameters,
                memory.state_bytes(parameters, shard_ranks),
                other.tokens_per_rank(memory),
                other.longest_tokens(memory),
            )
        )
    return tuple(ways)


def remedies(memory: DeviceMemory, placement: Placement, may_recompute: bool = False) -> tuple[Remedy, ...]:
    """Single changes that let a longer sequence fit, the most effective first; each is computed with the change made.

    may_recompute: everything is kept by choice, so that recomputing is a change, too.
    """
    now = placement.longest_tokens(memory)
    options = (_tried(*each) for each in _changes(memory, placement, may_recompute))
    longer = [option for option in options if option.longest_tokens > now * _LEAST_GAIN]
    return tuple(sorted(longer, key=lambda option: -option.longest_tokens))


def fitting_remedies(
    memory: DeviceMemory, placement: Placement, num_tokens: int, may_recompute: bool = False
) -> tuple[Remedy, ...]:
    """Changes with which a sequence of `num_tokens` fits: single ones, or else pairs of settings; larger machines come last."""
    singles = remedies(memory, placement, may_recompute)
    enough = [one for one in singles if one.longest_tokens >= num_tokens]
    if not any(one.is_setting for one in enough):
        enough = [*_fitting_pairs(memory, placement, num_tokens, may_recompute), *enough]
    return tuple(sorted(enough, key=lambda one: not one.is_setting))


def _fitting_pairs(memory: DeviceMemory, placement: Placement, num_tokens: int, may_recompute: bool) -> list[Remedy]:
    """Pairs of settings with which a sequence of `num_tokens` fits; none that is a pair in another order."""
    pairs: dict[frozenset[str], Remedy] = {}
    for change, changed, other in _settings(memory, placement, may_recompute):
        for second, both, widened in _settings(changed, other, may_recompute):
            if (names := frozenset((change, second))) in pairs or len(names) < 2:
                continue
            tried = _tried(f"{change} and {second}", both, widened)
            if tried.longest_tokens >= num_tokens:
                pairs[names] = tried
    return sorted(pairs.values(), key=lambda one: -one.longest_tokens)[:_MOST_PAIRS]


def _tried(change: str, memory: DeviceMemory, placement: Placement) -> Remedy:
    return Remedy(change, placement.tokens_per_rank(memory), placement.longest_tokens(memory))


_Change = tuple[str, DeviceMemory, Placement]


def _changes(memory: DeviceMemory, placement: Placement, may_recompute: bool) -> list[_Change]:
    """Settings, more ranks and larger devices, each with the memory and the placement that it leads to."""
    changes = _settings(memory, placement, may_recompute)
    more = wider_job(memory, placement, 2 * placement.num_ranks, placement.longest_tokens(memory) + 1)
    changes.append((f"{more.num_ranks // placement.num_ranks} times the ranks: --gpus {more.num_ranks}", memory, more))
    device_bytes, usable_bytes = 2 * memory.device_bytes, 2 * memory.usable_bytes
    larger = replace(memory, device_bytes=device_bytes, usable_bytes=usable_bytes)
    changes.append((f"devices of {device_bytes / 2**30:.0f} GiB", larger, placement))
    return changes


def _settings(memory: DeviceMemory, placement: Placement, may_recompute: bool) -> list[_Change]:
    num_ranks, heads = placement.num_ranks, memory.model.num_heads
    changes: list[_Change] = []
    if placement.max_tokens_per_rank:
        changes.append(("leave --tokens-per-rank out", memory, replace(placement, max_tokens_per_rank=0)))
    if may_recompute and memory.keeps_everything:
        recomputing = replace(memory, keeps_everything=False)
        changes.append(("activations recomputed and offloaded: --activations auto", recomputing, placement))
    allowed = default_degrees(num_ranks, heads, placement.method)
    if allowed[-1] > placement.degrees[-1]:
        changes.append((f"groups of up to {allowed[-1]} ranks: --degrees", memory, replace(placement, degrees=allowed)))
    elif placement.degrees[-1] < num_ranks:
        wider = replace(placement, degrees=default_degrees(num_ranks, heads), method="auto")
        changes.append((f"groups of up to {num_ranks} ranks: --method auto", memory, wider))
    if placement.parameters != "sharded" and num_ranks > 1:
        sharded = replace(placement, parameters="sharded", shard_ranks=num_ranks)
        changes.append((f"states sharded over {num_ranks} ranks: --parameters sharded", memory, sharded))
    elif 1 < placement.shard_ranks < num_ranks and memory.model.experts.num_ranks == 1:
        whole = replace(placement, shard_ranks=num_ranks)
        changes.append((f"states sharded over all ranks: --shard-ranks {num_ranks}", memory, whole))
    if memory.model.bytes_per_element > 2 and not memory.is_measured:
        model = replace(memory.model, bytes_per_element=2)
        if memory.lora_rank:
            model = replace(model, adapters=lora_adapters(model, memory.lora_rank))
        halved = replace(memory, model=model, saved_bytes_per_token=saved_token_bytes(model))
        changes.append(("weights and activations in bf16: --dtype bfloat16", halved, placement))
    if not (memory.model.updates_on_host or memory.model.moment_bytes or memory.is_measured):
        option = "optimizer states in host memory: --optimizer-states host"
        changes.append(_on_host(option, memory, replace(memory.model, updates_on_host=True), placement))
    if _layers_may_leave(memory, placement):
        option = "weights of layers in host memory: --layer-weights host"
        changes.append(_on_host(option, memory, replace(memory.model, layers_on_host=True), placement))
    if memory.model.has_master_weights and memory.model.bytes_per_element == 2 and not memory.is_measured:
        narrow = replace(memory, model=replace(memory.model, has_master_weights=False))
        changes.append(("weights updated in bf16, which loses small updates: --bf16-updates", narrow, placement))
    return changes + [(change, frozen, placement) for change, frozen in _adapters(memory)]


def _on_host(option: str, memory: DeviceMemory, model: ModelSpec, placement: Placement) -> _Change:
    """The change to `model`, of which more lies in host memory; the option asks for more of that where too little is known."""
    away = replace(memory, model=model)
    sharing = placement.parameters, placement.shard_ranks
    # host memory of the states was left out before
    before, more = memory.host_states(*sharing), away.host_states(*sharing)
    left = memory.host_bytes + before - more
    if left < 0:
        gib = -(-more // 2**30)
        option, left = f"{option} --host-gib {gib}, if a rank has that many GiB", gib * 2**30 - more
    return option, replace(away, host_bytes=left), placement


def _layers_may_leave(memory: DeviceMemory, placement: Placement) -> bool:
    """Whether shards of layers may lie on the host while a step computes, and do not yet."""
    model = memory.model
    return placement.parameters == "sharded" and not (model.layers_on_host or memory.is_measured) and can_leave(model)


def can_leave(model: ModelSpec) -> bool:
    """Whether shards of the model's layers can lie on the host: those of weights in four bits and of spread experts cannot."""
    return model.packed.is_empty and not model.experts.are_spread


def _adapters(memory: DeviceMemory) -> Iterator[tuple[str, DeviceMemory]]:
    """Memory if only adapters are trained: over the weights as they are (LoRA), and over weights of four bits (QLoRA)."""
    rank = memory.lora_rank or _LORA_RANK
    frozen = replace(memory.model, has_master_weights=False, updates_on_host=False)
    frozen = replace(frozen, adapters=lora_adapters(frozen, rank))
    if not memory.lora_rank:
        yield f"adapters over frozen weights (LoRA): --lora-rank {rank}", replace(memory, model=frozen, lora_rank=rank)
    if frozen.packed.is_empty and not frozen.experts.num_experts:
        packed = replace(frozen, packed=PackedSpec.nf4(frozen), can_keep_qkv=False, cuts_heads=False)
        option = f"--lora-rank {rank} --quantize nf4"
        whole = ", attention in one piece" if frozen.head_pieces() > 1 else ""
        yield f"adapters over weights of four bits{whole} (QLoRA): {option}", replace(memory, model=packed, lora_rank=rank)


def wider_job(memory: DeviceMemory, placement: Placement, num_ranks: int, num_tokens: int) -> Placement:
    """The placement on `num_ranks` ranks, doubled until a sequence of `num_tokens` fits; at most doubled ten times.

    States that are sharded over all ranks, or held by a single rank, are sharded over all of the new ranks, unless experts are
    spread.
    """
    heads = memory.model.num_heads
    is_widest = placement.degrees[-1] == default_degrees(placement.num_ranks, heads, placement.method)[-1]
    is_shared = placement.shard_ranks == placement.num_ranks and memory.model.experts.num_ranks == 1
    wider = replace(
        placement,
        num_ranks=num_ranks,
        degrees=default_degrees(num_ranks, heads, placement.method) if is_widest else placement.degrees,
        shard_ranks=num_ranks if is_shared else placement.shard_ranks,
        parameters="sharded" if placement.num_ranks == 1 else placement.parameters,
    )
    wanted = min(num_tokens, placement.most_positions or num_tokens)
    if wider.longest_tokens(memory) >= wanted or num_ranks >= placement.num_ranks << _MAX_DOUBLINGS:
        return wider
    return wider_job(memory, placement, 2 * num_ranks, num_tokens)

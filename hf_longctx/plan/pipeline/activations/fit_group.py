"""The pass that makes room: chunks above what is wholly kept get activation policies, layer-first or slice-first.

Layer-first keeps a group's one chunk: every layer runs over all its tokens once, and linear programs choose for each layer what
is kept, waits on the host or is computed again. Slice-first cuts the longest sequence into slices with a K/V book, so that a
layer works on fewer tokens at a time; the program's slots are whole slices then. For every group the way of fewer predicted
seconds is taken, of those whose bytes fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hf_longctx.plan.activations.added_seconds import group_seconds, one_slot
from hf_longctx.plan.activations.shares import MemoryLimits, choose_policy
from hf_longctx.plan.activations.slots import Slot, layer_slots
from hf_longctx.plan.chunks.slices import slice_counts, sliced_group
from hf_longctx.plan.core.attention_pairs import SpanRates
from hf_longctx.plan.core.planner_config import ActivationBudget
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    TENSOR_CLASSES,
    ActivationPolicy,
    Chunk,
    LayerPolicy,
    SequenceGroup,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import lean_policy
from hf_longctx.plan.memory.round_bytes import RoundBytes
from hf_longctx.plan.memory.saved_tensors import class_bytes, held_bytes
from hf_longctx.plan.prediction.planning import Planning

# how many slices are tried, as far as SPPO's bounds allow them
_SLICE_COUNTS = (2, 4, 8, 16, 32, 64)
# how often a program is solved again with less room, where what works beside its policy takes more than it was told
_ATTEMPTS = 4
# groups of one plan for which programs are solved and slices tried; for more, the greedy order of layer-first policies is taken
_MOST_PROGRAMS = 24

# shares of all slots to policies of all chunks
_Policies = Callable[[Sequence[tuple[TensorShare, ...]]], tuple[ActivationPolicy, ...]]


def policy_reason(group: SequenceGroup, costs: CostModel, budget: ActivationBudget) -> str:
    """Why a group that `RoomMaker` made room for keeps, offloads and computes again what it does, in one sentence."""
    (stage,) = group.stages
    if not stage.activations:
        return "nothing is offloaded: everything fits on the device"
    if not any(policy.layers for policy in stage.activations):
        return "nothing is offloaded: everything but logits fits on the device"
    return RoomMaker(costs, budget).reason(group)


def make_room(plan: StepPlan, planning: Planning) -> StepPlan:
    """The plan on one stage with policies, and perhaps slices, for every group whose chunk has more than is wholly kept.

    Without a budget it is the plan itself. Raises ValueError naming the first group for which nothing fits.
    """
    budget = planning.config.activations
    if budget is None:
        return plan
    allows_slices = not planning.config.one_micro_batch
    return RoomMaker(planning.costs, budget, allows_slices, planning.known.fitted_groups).for_plan(plan)


class RoomMaker:
    """Groups with policies, and slices where `allows_slices`, for all plans of one step.

    known: groups that were solved before; groups alike are solved once.
    """

    def __init__(
        self,
        costs: CostModel,
        budget: ActivationBudget,
        allows_slices: bool = True,
        known: dict[object, tuple[Chunk, SequenceGroup]] | None = None,
    ) -> None:
        self.costs, self.budget, self.allows_slices = costs, budget, allows_slices
        self._byte_model = ByteModel(costs.model)
        self._known = {} if known is None else known

    def for_plan(self, plan: StepPlan) -> StepPlan:
        """The plan with room for every group whose chunk has more than is wholly kept.

        Raises ValueError naming the first group for which nothing fits.
        """
        # ranks that share parameters run one order of actions
        is_free = plan.parameters != "sharded"
        return replace(
            plan,
            micro_batches=tuple(
                replace(
                    micro_batch,
                    groups=tuple(
                        self.for_group(group, self.allows_slices and (is_free or len(micro_batch.groups) == 1))
                        for group in micro_batch.groups
                    ),
                )
                for micro_batch in plan.micro_batches
            ),
        )

    @property
    def _solves(self) -> bool:
        return len(self._known) < _MOST_PROGRAMS

    def for_group(self, group: SequenceGroup, allows_slices: bool) -> SequenceGroup:
        """The group with what it needs to fit; raises ValueError where nothing does."""
        (chunk,) = group.chunks
        if max(shard_tokens(chunk, group.shape)) <= self.budget.kept_tokens:
            return group
        key = (group.shape, tuple(span.num_tokens for span in chunk.spans), allows_slices)
        if key not in self._known:
            self._known[key] = chunk, self._choose(group, allows_slices)
        solved, found = self._known[key]
        numbers = {old.sequence: new.sequence for old, new in zip(solved.spans, chunk.spans, strict=True)}
        chunks = tuple(
            replace(part, spans=tuple(replace(span, sequence=numbers[span.sequence]) for span in part.spans))
            for part in found.chunks
        )
        return replace(found, positions=group.positions, chunks=chunks)

    def _choose(self, group: SequenceGroup, allows_slices: bool) -> SequenceGroup:
        options = list(self._layer_first(group))
        # a rank without sequences runs a dummy chunk, of which there is nothing to cut
        is_sliceable = group.shape.num_blocks == 1 and bool(group.chunks[0].spans)
        if allows_slices and is_sliceable and (self._solves or not options):
            options += self._slice_first(group)
        if not options:
            (chunk,) = group.chunks
            raise ValueError(
                f"{chunk.num_tokens} tokens on {group.degree} ranks do not fit beside the model in "
                f"{self.budget.device_bytes / 2**30:.2f} GiB of a device and {self.budget.host_bytes / 2**30:.2f} GiB of the "
                f"host for each, whatever is computed again; allow larger degrees, shorter sequences or more host memory "
                f"(host_gib), or set tile_tokens"
            )
        return min(options, key=lambda option: group_seconds(self.costs, option))

    def _layer_first(self, group: SequenceGroup) -> Iterator[SequenceGroup]:
        """Everything kept but logits, or else what the program chooses for every layer."""
        tiled = self._with(group, (ActivationPolicy(0, tile_tokens=self.budget.tile_tokens),))
        if self._fits(tiled):
            yield tiled
            return
        yield from self._solved(group, *self._layer_way(group))

    def _layer_way(self, group: SequenceGroup) -> tuple[Sequence[Slot], _Policies]:
        """Slots of the one chunk's layers, and the policy that their shares make."""
        (chunk,) = group.chunks

        def policies(shares: Sequence[tuple[TensorShare, ...]]) -> tuple[ActivationPolicy, ...]:
            # a ring has run its tiles for all of its tokens or for none
            chosen = [tuple(map(_all_or_none, layer)) for layer in shares] if group.shape.num_blocks > 1 else shares
            return (ActivationPolicy(0, 0, tuple(map(_layer_policy, chosen)), self.budget.tile_tokens),)

        return layer_slots(self.costs, chunk, group.shape), policies

    def _slice_first(self, group: SequenceGroup) -> Iterator[SequenceGroup]:
        """The longest sequence in slices, one slot of the program for each chunk."""
        (chunk,) = group.chunks
        forward, backward = self.costs.coefficients.forward, self.costs.coefficients.backward
        pairs = self.costs.model.attention_pairs()
        rates = SpanRates(forward.pair_s + backward.pair_s, forward.token_s + backward.token_s, pairs)
        longest = max(span.num_tokens for span in chunk.spans)
        for count in (count for count in _SLICE_COUNTS if count in slice_counts(longest, group.degree)):
            sliced = sliced_group(group, count, rates)
            yield from self._solved(sliced, *self._slice_way(sliced))

    def _slice_way(self, sliced: SequenceGroup) -> tuple[Sequence[Slot], _Policies]:
        """A slot of all layers for each chunk, and the policies that their shares make."""

        def policies(shares: Sequence[tuple[TensorShare, ...]]) -> tuple[ActivationPolicy, ...]:
            num_layers, tile_tokens = self.costs.model.num_layers, self.budget.tile_tokens
            return tuple(
                ActivationPolicy(index, 0, (_layer_policy(chosen),) * num_layers, tile_tokens)
                for index, chosen in enumerate(shares)
            )

        return [one_slot(self.costs, part, sliced.shape) for part in sliced.chunks], policies

    def reason(self, group: SequenceGroup) -> str:
        """Why the policies of a group that was chosen are as they are: its program is solved again, and says so."""
        slots, policies = self._slice_way(group) if len(group.chunks) > 1 else self._layer_way(group)
        solved = self._program(group, slots, policies, explains=True)
        return solved[1] if solved else "layer inputs alone are kept: the program found nothing else that fits"

    def _solved(self, group: SequenceGroup, slots: Sequence[Slot], policies: _Policies) -> Iterator[SequenceGroup]:
        """The group under the cheapest policies that fit; under those that need the least where the program finds none."""
        if (solved := self._program(group, slots, policies)) is not None:
            yield solved[0]
            return
        # what arrives from the host takes room too, so that less may need more
        options = self._lean(group, self.budget.host_bytes), self._lean(group, 0)
        yield from (option for option in options if self._fits(option))

    def _program(
        self, group: SequenceGroup, slots: Sequence[Slot], policies: _Policies, explains: bool = False
    ) -> tuple[SequenceGroup, str] | None:
        """The group under what the program chooses, and its reason if it `explains`; None where nothing that it finds fits."""
        lean = self._lean(group, 0)
        needed = self._bytes(lean)
        # what works beside saved tensors is about the same whatever the policy
        room_bytes = float(self.budget.device_bytes - (needed.peak - needed.saved))
        # the host has no more than its slab, and shares are cut at whole tokens: one for the cut, one for an uneven shard
        model, num_chunks = self.costs.model, len(group.chunks)
        token_bytes = num_chunks * model.num_layers * sum(class_bytes(model, name) for name in TENSOR_CLASSES)
        host_bytes = max(0.0, self.budget.host_bytes - 2.0 * token_bytes)
        rate = self.costs.cluster.hardware.copy_bytes_per_s
        for _ in range(_ATTEMPTS):
            try:
                limits = MemoryLimits(max(0.0, room_bytes), host_bytes, rate)
                choice = choose_policy(slots, limits, explains=explains, solves=self._solves)
            except ValueError:
                break
            option = self._with(group, policies(choice.shares))
            over_bytes = self._bytes(option).peak - self.budget.device_bytes
            if over_bytes <= 0:
                return option, choice.reason
            room_bytes = min(room_bytes, choice.outcome.device_bytes) - over_bytes
        return None

    def _lean(self, group: SequenceGroup, host_bytes: int) -> SequenceGroup:
        """The group with layer inputs kept alone, as many as `host_bytes` hold on the host."""
        policies = []
        for chunk in group.chunks:
            tokens = max(shard_tokens(chunk, group.shape))
            policy = lean_policy(self.costs.model, tokens, host_bytes, self.budget.tile_tokens)
            host_bytes -= held_bytes(self.costs.model, policy, len(policy.layers), tokens)[1]
            policies.append(replace(policy, chunk=chunk.index))
        return self._with(group, tuple(policies))

    def _with(self, group: SequenceGroup, policies: tuple[ActivationPolicy, ...]) -> SequenceGroup:
        (stage,) = group.stages
        return replace(group, stages=(replace(stage, activations=policies),))

    def _fits(self, group: SequenceGroup) -> bool:
        return self._bytes(group).peak <= self.budget.device_bytes

    def _bytes(self, group: SequenceGroup) -> RoundBytes:
        # ranks of a group hold as much as the first, which holds the most
        return self._byte_model.round(group, group.stages[0])


def _all_or_none(share: TensorShare) -> TensorShare:
    """The share, with all tokens of an attention output recomputed where some of them are."""
    is_partial = share.tensor_class == "attention_output" and share.recompute > 0
    return TensorShare("attention_output", recompute=1.0) if is_partial else share


def _layer_policy(shares: tuple[TensorShare, ...]) -> LayerPolicy:
    """Without the classes that stay, which need no name."""
    return LayerPolicy(tuple(share for share in shares if share.device != share.total))

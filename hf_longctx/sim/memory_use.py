"""Summarises how a plan's groups treat saved tensors: kept, in tiles, recomputed, on the host, or in slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_longctx.plan.core.settings import ActivationBudget
from hf_longctx.plan.core.sharding import fullest_share
from hf_longctx.plan.core.types import TENSOR_CLASSES, LayerPolicy, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import class_bytes, layer_class_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.pipeline_run import StageSeconds, run_alone
from hf_longctx.plan.room.room import policy_reason
from hf_longctx.plan.setup import DeviceMemory
from hf_longctx.sim.execution import Execution


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Counts of groups with sequences by how they treat saved tensors, and bytes of the fullest rank."""

    # groups that keep everything, that keep everything but the logits, and that have layers under policies
    num_kept: int
    num_tiled: int
    num_chosen: int
    # groups under policies that cut a sequence
    num_sliced: int
    # most slices of one sequence
    most_slices: int
    # share of each tensor class that groups under policies recompute
    recomputed: tuple[tuple[str, float], ...]
    # share of their saved bytes that waits on the host
    on_host: float
    # bytes of the fullest rank
    peak_bytes: int
    host_bytes: int
    # seconds that policies add to forward and backward of all their groups
    added_s: float
    # why the fullest group keeps, offloads and recomputes as it does
    reason: str

    @property
    def keeps_everything(self) -> bool:
        return not self.num_tiled and not self.num_chosen


def memory_use(
    plan: StepPlan, execution: Execution, costs: CostModel, memory: DeviceMemory, budget: ActivationBudget | None = None
) -> MemoryUse:
    """Summarises how `plan` uses memory. budget: that of the plan, without which no reason is given."""
    groups = [group for mb in plan.micro_batches for group in mb.groups if any(chunk.spans for chunk in group.chunks)]
    tiled = [group for group in groups if group.stages[-1].activations and not _has_layers(group)]
    chosen = [group for group in groups if _has_layers(group)]
    sliced = [group for group in chosen if _num_slices(group) > 1]
    recomputed, on_host = _shares(chosen, costs.model)
    reason = ""
    if budget is not None and groups and plan.num_stages == 1:
        # groups with layers under policies come first, then tiled ones, then those with the most tokens on a rank
        fullest = max(groups, key=lambda group: (_has_layers(group), bool(group.stages[0].activations), _tokens(group)))
        reason = policy_reason(fullest, costs, budget)
    return MemoryUse(
        num_kept=len(groups) - len(tiled) - len(chosen),
        num_tiled=len(tiled),
        num_chosen=len(chosen),
        num_sliced=len(sliced),
        most_slices=max((_num_slices(group) for group in sliced), default=1),
        recomputed=recomputed,
        on_host=on_host,
        peak_bytes=max(peak_bytes(plan, execution, costs, memory)),
        host_bytes=max(execution.host_bytes),
        added_s=sum(_added_s(plan, group, costs) for group in chosen),
        reason=reason,
    )


def peak_bytes(plan: StepPlan, execution: Execution, costs: CostModel, memory: DeviceMemory) -> tuple[int, ...]:
    """Returns the most bytes on each rank's device: measured if everything is kept and there are measurements, else predicted.

    States are those of `memory`, which may be measured or belong to adapters.
    """
    ranks = execution.ranks
    if plan.num_stages > 1:
        return execution.peak_bytes
    states = memory.state_bytes(plan.parameters, costs.shard_ranks)
    if memory.is_measured and not has_policies(plan):
        return tuple(states + memory.kept_bytes(rank.peak_tokens, is_shared=False) for rank in ranks)
    change = states - ByteModel(costs.model).states(costs.parameters, costs.shard_ranks)
    return tuple(num_bytes + change for num_bytes in execution.peak_bytes)


def has_policies(plan: StepPlan) -> bool:
    """Whether any group of the plan tiles, recomputes, offloads or slices."""
    groups = (group for micro_batch in plan.micro_batches for group in micro_batch.groups)
    return any(stage.activations or len(group.chunks) > 1 for group in groups for stage in group.stages)


def recomputed_share(plan: StepPlan) -> float:
    """Returns the share of the MLPs of all layers, by tokens, that run again in backward."""
    total = again = 0.0
    for tokens, layer in (
        entry for micro_batch in plan.micro_batches for group in micro_batch.groups for entry in _layers(group)
    ):
        total += tokens
        again += layer.share("mlp").recompute * tokens
    return again / total if total else 0.0


def _has_layers(group: SequenceGroup) -> bool:
    return any(policy.layers for stage in group.stages for policy in stage.activations)


def _added_s(plan: StepPlan, group: SequenceGroup, costs: CostModel) -> float:
    """Returns seconds that policies add to the group's passes; in a pipeline, recomputation on the stage with most of it."""
    kept = replace(group, stages=tuple(replace(stage, activations=()) for stage in group.stages))
    if plan.num_stages == 1:
        own_s, kept_s = (run_alone(each, costs).times[-1][1] for each in (group, kept))
        return own_s - kept_s
    own, plain = (StageSeconds(plan, each, costs).table for each in (group, kept))
    return float((own - plain).sum(axis=(0, 2, 3)).max())


def _tokens(group: SequenceGroup) -> int:
    return sum(fullest_share(chunk, group.shape) for chunk in group.chunks)


def _num_slices(group: SequenceGroup) -> int:
    sequences = [span.sequence for chunk in group.chunks for span in chunk.spans]
    return max(sequences.count(sequence) for sequence in set(sequences))


def _shares(groups: list[SequenceGroup], model: ModelSpec) -> tuple[tuple[tuple[str, float], ...], float]:
    """Returns the share of each tensor class that is recomputed, and the share of all saved bytes on the host."""
    again = dict.fromkeys(TENSOR_CLASSES, 0.0)
    host = total = 0.0
    for tokens, layer in (entry for group in groups for entry in _layers(group)):
        total += tokens
        for name in TENSOR_CLASSES:
            again[name] += layer.share(name).recompute * tokens
            host += layer.share(name).host * tokens * class_bytes(model, name)
    if not total:
        return (), 0.0
    shares = tuple((name, again[name] / total) for name in TENSOR_CLASSES if name != "layer_input")
    return shares, host / (total * layer_class_bytes(model))


def _layers(group: SequenceGroup) -> Iterator[tuple[int, LayerPolicy]]:
    """Yields tokens of the chunk and the policy of every layer, for every chunk of the group."""
    for stage in group.stages:
        policies = {(policy.chunk, policy.layer_range): policy.layers for policy in stage.activations}
        for chunk in group.chunks:
            for place, owned in enumerate(stage.layer_ranges):
                layers = policies.get((chunk.index, place), ())
                for layer in [*layers, *[LayerPolicy()] * (owned.num_layers - len(layers))]:
                    yield chunk.num_tokens, layer

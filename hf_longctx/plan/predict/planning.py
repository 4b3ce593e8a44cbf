"""Inputs of every pass of the planner besides the plan: costs, settings, and the predictions made so far.

Also predicts the seconds in which ranks gather sharded weights, sum gradients and update weights. They are separate from the
chunks of `evaluate` because the next layer is gathered while the present one computes, so that only a part of these seconds
lengthens a step, and because coefficients that were measured in a run already contain that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.orders import joined_stages
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import Blocks, Parameters, SequenceGroup, StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.weight_traffic import StageWeights, copies_traffic, shared_head_traffic
from hf_longctx.plan.memory.stage import host_state_bytes, layer_shard_bytes, part_state_bytes, trained_sizes, update_part_bytes
from hf_longctx.plan.memory.towers import TowerBytes
from hf_longctx.plan.policies.fit import FittedGroups
from hf_longctx.plan.predict.evaluate import Evaluation, RankUse, evaluate_plan, state_bytes
from hf_longctx.plan.predict.pipeline_run import PredictionCache, plan_gathers


@dataclass(frozen=True, slots=True)
class WeightSeconds:
    """Seconds of a step in which ranks move weights and gradients, as if nothing else ran meanwhile.

    Empty and 0 if the cost model was measured, except for the seconds of a teacher, which are never part of it.
    """

    # for every rank, gathers of sharded weights and sums of their gradients in all micro-batches, with copies of shards from the
    # host before gathers
    gathers_s: tuple[float, ...] = ()
    # the sum of gradients over copies, and of a weight that several stages have, once per step
    sum_s: float = 0.0
    # the optimizer
    update_s: float = 0.0
    # most seconds of that sum, or of an update on the host, that run beside the last backward
    hidden_s: float = 0.0
    # copies of shards that leave for the host and come back, once per step
    away_s: float = 0.0
    # most seconds in which a rank reads gradients to add them up
    copies_s: float = 0.0
    # seconds of the forwards of a teacher
    teacher_s: float = 0.0
    # factor by which idle stages at both ends of a pipeline lengthen what each of its chunks adds
    drains: float = 1.0

    @property
    def gather_s(self) -> float:
        """Seconds of the gathers and sums of the rank that has most of them."""
        return max(self.gathers_s, default=0.0)

    @property
    def left_s(self) -> float:
        """Seconds by which sums over copies, updates, shards that leave and come back, and a teacher lengthen a step at least."""
        return self.sum_s + self.update_s + self.away_s + self.teacher_s - self.hidden_s

    def _on_links_s(self, ranks: Sequence[RankUse]) -> float:
        """Most seconds for which exchanges and gathers keep a rank's links busy."""
        return max(rank.exchange_s + gather_s for rank, gather_s in zip(ranks, self.gathers_s, strict=True))

    def step_bounds_s(self, step_s: float, once_s: float, ranks: Sequence[RankUse]) -> tuple[float, float]:
        """Least and most seconds of a step that takes `step_s` without these.

        Least: gathers run beside all computing, but share links with the exchanges of sequence groups and experts; sums of
        replicated weights, or their copies to the host, run beside the last backward. Most: they run alone, for example if the
        step clips gradients or the user's code may change them. The update itself counts in full in both, and so do shards that
        leave and come back, and reads of gradients.
        """
        alone_s = self.sum_s + self.update_s + self.away_s + self.teacher_s
        if not self.gathers_s:
            return step_s + alone_s - self.hidden_s, step_s + alone_s
        alone_s += self.copies_s
        most_s = step_s + self.drains * self.gather_s + alone_s
        return max(step_s, once_s + self._on_links_s(ranks)) + alone_s - self.hidden_s, most_s


def weight_seconds(plan: StepPlan, costs: CostModel) -> WeightSeconds:
    """Seconds in which the ranks of `plan` gather, sum and update weights; none if measured coefficients contain them.

    See `CostModel.counts_weights`. Those of the forwards of a teacher count in any case.
    """
    teacher_s = teacher_seconds(plan, costs)
    if not plan.micro_batches or not costs.counts_weights:
        return WeightSeconds(teacher_s=teacher_s)
    found = [_of_stage(plan, place, costs) for place in range(plan.num_stages)]
    gathers_s = tuple(s for each in found for s in each.gathers_s)
    longest = max(found, key=lambda each: each.sum_s)
    # rest of the longest sum, but never less than of another stage's
    left_s = max(each.sum_s - each.hidden_s for each in found)
    update_s = _update_s(plan, costs)
    hidden_s = longest.sum_s - left_s + update_s - _update_s(plan, costs, is_early=True)
    away_s, copies_s, drains = (max(getattr(each, name) for each in found) for name in ("away_s", "copies_s", "drains"))
    return WeightSeconds(gathers_s, longest.sum_s, update_s, hidden_s, away_s, copies_s, teacher_s, drains)


def teacher_seconds(plan: StepPlan, costs: CostModel) -> float:
    """Seconds of the forwards of a teacher under a plan; 0 without one.

    A rank runs its groups one after the other, and stages run chunks one behind the other. Ranks that gather the same weights
    wait for the slowest group of every micro-batch.
    """
    if (teacher := costs.teacher) is None:
        return 0.0
    layers, num_stages, per_stage = teacher.model.num_layers, plan.num_stages, plan.ranks_per_stage
    clocks = [0.0] * per_stage
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            passes = [teacher.forward_s(chunk, group.shape, layers) / num_stages for chunk in group.chunks]
            end_s = max(clocks[place] for place in group.positions) + sum(passes) + (num_stages - 1) * max(passes)
            for place in group.positions:
                clocks[place] = end_s
        if (block := plan.meeting_ranks) > 1:
            for first in range(0, per_stage, block):
                clocks[first : first + block] = [max(clocks[first : first + block])] * block
    return max(clocks)


def counted_step_s(plan: StepPlan, costs: CostModel) -> float:
    """Seconds by which numbers of stages and ways to share weights are compared: gathers, sums and updates count."""
    return plan.estimate.counted_s + weight_seconds(plan, costs).left_s


def hidden_sums_s(layer_sums_s: float, backward_s: float, num_layers: int) -> float:
    """Seconds of early sums that run beside the last backward.

    layer_sums_s: seconds of the sums of all layers, which are equal. backward_s: of the backward of these layers. A layer's sum
    starts when its backward and the sum of the layer after it have ended, so that the sum of the first layer always remains, and
    more where sums take longer than backwards.
    """
    return (num_layers - 1) / num_layers * min(layer_sums_s, backward_s) if num_layers else 0.0


def _update_s(plan: StepPlan, costs: CostModel, is_early: bool = False) -> float:
    """Seconds of the optimizer, which reads and writes all states once: 0 if the rate of the device's memory is unknown.

    is_early: without the copies to the host that the last backward hides.
    """
    hardware = costs.cluster.hardware
    share = 1 if plan.parameters == "replicated" else plan.block_ranks
    counts = [stage.num_layers for stage in plan.micro_batches[0].groups[0].stages]
    stages = [(count, place == 0, costs.model.has_head(place, plan.num_stages)) for place, count in enumerate(counts)]
    whole = max(part_state_bytes(costs.model, *stage, "replicated", 1) for stage in stages)
    device_s = 2 * whole / share / hardware.memory_bytes_per_s if hardware.memory_bytes_per_s else 0.0
    on_host_s = []
    for place, stage in enumerate(stages):
        backward_s = _early_copies_s(plan, place, costs) if is_early else 0.0
        on_host_s.append(_host_update_s(costs, stage, plan.parameters, share, backward_s))
    return device_s + max(on_host_s)


def _early_copies_s(plan: StepPlan, place: int, costs: CostModel) -> float:
    """Seconds of the backward beside which a stage's gradients leave for the host; 0 if they leave only after its end."""
    model, has_head = costs.model, costs.model.has_head(place, plan.num_stages)
    # several stages hold the weight of the head
    is_shared = plan.num_stages > 1 and (model.tied_embeddings or model.num_head_stages > 1)
    is_tied = is_shared and (has_head or (model.tied_embeddings and not place))
    if plan.ranks_per_stage > 1 or costs.model.keeps_all_stages or is_tied:
        return 0.0
    return max(_last_backward_s(group, place, costs) for group in plan.micro_batches[-1].groups)


def _host_update_s(
    costs: CostModel, part: tuple[int, bool, bool], parameters: Parameters, share: int, backward_s: float = 0.0
) -> float:
    """Seconds of the updates of a stage's weights on the host; 0 if its states are on the device.

    part: number of layers, and whether the embedding and the head are there. backward_s: seconds of a backward during which
    weights and gradients of its layers leave.

    The CPU reads and writes all of the host's bytes once, at the rate of copies, which the memory of a host gives each of its
    devices. Gradients and weights come from the device and weights go back at that rate, too, in parts that follow one another.
    """
    # stages that lend their ranks update the weights of all
    stage = (costs.model.num_layers, True, True) if costs.model.keeps_all_stages else part
    states = host_state_bytes(costs.model, *stage, parameters, share)
    if not states:
        return 0.0
    _, trained_bytes = trained_sizes(costs.model, *stage)
    num_parts = max(1.0, trained_bytes / share / max(1, update_part_bytes(costs.model, *stage, share)))
    moved = 2 * trained_bytes / share, 2 * states, trained_bytes / share
    out_s, cpu_s, back_s = (num_bytes / costs.cluster.hardware.copy_bytes_per_s for num_bytes in moved)
    of_layers = trained_sizes(costs.model, part[0], False, False)[1] / max(1, trained_bytes)
    hidden_s = hidden_sums_s(of_layers * out_s, backward_s, part[0])
    return piped_s([out_s - hidden_s, cpu_s, back_s], num_parts)


def piped_s(seconds: Sequence[float], num_parts: float) -> float:
    """Seconds of work in several stages, each of which works on one of `num_parts` equal parts while others have the next ones.

    seconds: of every stage, for all parts. The longest works all the time, and the first part passes the others before and after.
    """
    return max(seconds) + (sum(seconds) - max(seconds)) / num_parts


def _of_stage(plan: StepPlan, place: int, costs: CostModel) -> WeightSeconds:
    cluster, block = costs.cluster, plan.block_ranks
    stage = plan.micro_batches[0].groups[0].stages[place]
    has_head = costs.model.has_head(place, plan.num_stages)
    weights = StageWeights.of(costs.model, stage.num_layers, place == 0, has_head)
    collectives = plan_gathers(plan, costs, stage.num_layers, place == 0, has_head)
    # a gather reads shards that were copied before it, while others compute
    copy_s = layer_shard_bytes(costs.model, stage.num_layers, plan.parameters, block) / cluster.hardware.copy_bytes_per_s
    once = collectives.once, collectives.to_nodes, collectives.across_nodes
    links = [sum(each.links_s for each in once)] * (plan.ranks_per_stage // block)
    copies, slots = [0.0] * len(links), [0] * len(links)
    # seconds of a layer that stays gathered from one pass to the next
    kept_s = collectives.of_pass(False, False).gather_s
    if plan.turns:
        joined = joined_stages(plan.micro_batches, plan.turns)[place]
        links = [seconds - kept_s * _num_kept(joined) for seconds in links]
    for micro_batch in plan.micro_batches:
        # blocks may leave out micro-batches; groups of a block that meet only at its ends may have different numbers of chunks
        chunks: dict[int, tuple[int, int]] = {}
        for group in micro_batch.groups:
            own = group.stages[place]
            found = _num_forwards(own), 0 if plan.turns else _num_kept(own)
            for index in {position // block for position in group.positions}:
                chunks[index] = max(chunks.get(index, (0, 0)), found)
        for index, (num_chunks, num_kept) in chunks.items():
            passes = collectives.in_round(num_chunks)
            links[index] += sum(count * each.links_s for count, each in passes) - num_kept * kept_s
            copies[index] += sum(count * each.copies_s for count, each in passes)
            slots[index] += num_chunks
    to_copies = copies_traffic(weights, cluster, block, plan.ranks_per_stage // block)
    gathers_s = tuple(links[position // block] for position in range(plan.ranks_per_stage))
    sum_s = costs.coefficients.forward.exchange_s(to_copies)
    hidden_s = _hidden_s(plan, place, costs, sum_s) if sum_s else 0.0
    if has_head:
        shared = shared_head_traffic(costs.model, cluster, block, plan.num_stages, plan.ranks_per_stage)
        shared_s = costs.coefficients.forward.exchange_s(shared)
        sum_s, hidden_s = sum_s + shared_s, hidden_s + min(shared_s, _drain_s(plan, costs))
    # a pipeline fills and drains in every micro-batch, or once if micro-batches follow one schedule
    num_drains = 1 if plan.turns else len(plan.micro_batches)
    drains = 1 + (plan.num_stages - 1) * num_drains / max(1, *slots)
    return WeightSeconds(gathers_s, sum_s, hidden_s=hidden_s, away_s=2 * copy_s, copies_s=max(copies), drains=drains)


def _hidden_s(plan: StepPlan, place: int, costs: CostModel, sum_s: float) -> float:
    """Most seconds of a stage's sum over copies that early sums hide; sums over shards, or of lent stages, start at the end."""
    groups = plan.micro_batches[-1].groups
    if plan.block_ranks > 1 or any(is_lent(group) for micro_batch in plan.micro_batches for group in micro_batch.groups):
        return 0.0
    num_layers = groups[0].stages[place].num_layers
    whole = StageWeights.of(costs.model, num_layers, place == 0, costs.model.has_head(place, plan.num_stages))
    layers = StageWeights.of(costs.model, num_layers, False, False)
    share = min(1.0, layers.gradients / whole.gradients)
    return hidden_sums_s(share * sum_s, max(_last_backward_s(group, place, costs) for group in groups), num_layers)


def _drain_s(plan: StepPlan, costs: CostModel) -> float:
    """Least seconds for which stages before those with the output head still run when these have ended.

    0 if the first stage has its weight, too: as its embedding, or since all stages share the head.
    """
    first = plan.num_stages - costs.model.num_head_stages
    if costs.model.tied_embeddings or first < 1:
        return 0.0
    groups = plan.micro_batches[-1].groups
    return sum(min(_last_backward_s(group, place, costs) for group in groups) for place in range(first))


def _last_backward_s(group: SequenceGroup, place: int, costs: CostModel) -> float:
    stage = group.stages[place]
    last = next((action for action in reversed(stage.actions) if action.kind == "B"), None)
    if last is None:
        return 0.0
    chunk = next(chunk for chunk in group.chunks if chunk.index == last.chunk)
    return costs.backward_s(chunk, group.shape, stage.layer_ranges[last.layer_range].num_layers)


def _num_forwards(stage: StagePlan) -> int:
    return sum(action.kind == "F" for action in stage.actions)


def _num_kept(stage: StagePlan) -> int:
    """Returns the number of passes that begin with the layer with which the one before ended."""
    passes = [(action.kind, action.layer_range) for action in stage.actions if action.kind in ("F", "B")]
    return sum(one[0] != other[0] and one[1] == other[1] for one, other in pairwise(passes))


@dataclass(frozen=True, slots=True)
class Planning:
    """Inputs for planning one step, and two caches that all plans of the step share."""

    costs: CostModel
    config: PlannerConfig
    # those of every sequence; (): none has any
    blocks: tuple[Blocks, ...] = ()
    # bytes and runs of groups predicted so far, those of pipelines with gathers
    known: PredictionCache = field(default_factory=lambda: PredictionCache(counts_gathers=True))
    # groups that were made to fit
    fitted: FittedGroups = field(default_factory=FittedGroups)
    _runs: dict[int, tuple[StepPlan, Evaluation]] = field(default_factory=dict)

    def predict(self, plan: StepPlan) -> Evaluation:
        """Predicts the plan's run, without events; once for each plan. Passes of pipelines include the gathers that count."""
        if id(plan) not in self._runs:
            # the plan is stored too, so that its id is not reused
            self._runs[id(plan)] = plan, evaluate_plan(plan, self.costs, with_events=False, known=self.known)
        return self._runs[id(plan)][1]

    def gathers_s(self, plan: StepPlan) -> float:
        """Seconds that the plan counts for gathers of sharded weights and reduce-scatters of gradients."""
        if plan.num_stages == 1 or plan.parameters == "replicated":
            return self.predict(plan).gathers_s
        without = evaluate_plan(plan, self.costs, with_events=False, known=self.known.without_gathers())
        return self.counted_s(plan) - without.step_s

    def counted_s(self, plan: StepPlan) -> float:
        """Seconds by which plans are compared: predicted ones, and those of gathers that count."""
        run = self.predict(plan)
        return run.step_s + run.gathers_s

    def limit_bytes(self, plan: StepPlan) -> int:
        """Most bytes that a rank may hold: the largest states of any stage, the budget, and what towers need; 0: no budget."""
        budget, byte_model = self.config.activations, self.known.byte_model(self.costs.model)
        if budget is None:
            return 0
        least = max(byte_model.model.towers_bytes(plan.media), TowerBytes(plan, byte_model).least)
        return budget.device_bytes + max(state_bytes(plan, self.costs, byte_model)) + least

    @property
    def host_limit_bytes(self) -> int | None:
        """Most host bytes of a rank for saved tensors; None means that no budget is set."""
        return None if self.config.activations is None else self.config.activations.host_bytes

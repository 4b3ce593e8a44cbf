"""Predicts a step under each of four systems alone, and under all together, with one cost model and memory limit.

    FlexSP (arXiv 2412.01523)      groups of different sizes, whole sequences
    Seq1F1B (arXiv 2406.03488)     equal groups, equal chunks of a quarter of the longest sequence, as many chunks in flight as
                                   1F1B allows
    InfiniPipe (arXiv 2509.21275)  equal groups, elastic chunks, as many in flight as 1F1B allows, layers recomputed if memory
                                   is short
    SPPO (arXiv 2503.10377)        equal groups, every sequence alone in slices of 2K to 16K tokens per rank, as much offloaded as
                                   the link to the host can hide

Each system with stages runs at the best number of stages that fits, and shares sequences inside a stage by Ulysses and weights by
ZeRO-3, as InfiniPipe does (section 3.1) and as it runs its baseline of the kind of Seq1F1B; Seq1F1B's own experiments have tensor
parallelism there (Megatron, 8 ranks), and SPPO's have Ulysses. All together share weights by ZeRO-3
or gather them once per step (of `plan/setup.py`, two of four ways), whichever is faster.
FlexSP and Seq1F1B choose nothing layer by layer, so each runs with everything kept, with selective and with full checkpointing,
and the fastest that fits is shown. InfiniPipe and SPPO choose what to recompute and to offload by our planner's programs. With
checkpointing, norms and MLPs of Seq1F1B also run in tiles, as in our plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_longctx.plan.chunks import elastic_chunks, fixed_chunks, slice_counts
from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import Chunk, GroupShape, MicroBatch, Parameters, Ranges, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.traffic import plainest_shape
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.pipeline.candidates import deal_sequences
from hf_longctx.plan.pipeline.stages import balanced_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.policies.fit import with_layers
from hf_longctx.plan.predict.evaluate import Evaluation, evaluate_plan
from hf_longctx.plan.predict.pipeline_run import PredictionCache
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import make_room
from hf_longctx.plan.stage_count import StageSetup, stage_counts, stage_options
from hf_longctx.sim.baselines import (
    CHECKPOINTINGS,
    KEPT,
    CheckpointedCosts,
    Checkpointing,
    document_load,
    group_bytes,
    most_tokens,
)

# (sequences of a group {number: tokens}, shape of the group, cost model) -> several ways of chunking them
_Chunking = Callable[[Mapping[int, int], GroupShape, CostModel], Sequence[tuple[Chunk, ...]]]

_SLICES = (2, 4, 8, 16)
_SEQ1F1B_SLICES = 4
# consecutive stage counts slower than the ones before them after which the search stops
_GIVEN_UP = 2
# layer ranges per stage in interleaved plans
_INTERLEAVE = 2


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One system alone, or all together: seconds of the step (0 if nothing fits), and how it runs or why it cannot.

    step_s: with the gathers of weights that count, as plans are compared.
    """

    name: str
    step_s: float
    detail: str

    @property
    def is_possible(self) -> bool:
        return self.step_s > 0


@dataclass(frozen=True, slots=True)
class _Option:
    """A plan under one checkpointing, with its costs, memory limits, and predicted run."""

    plan: StepPlan
    costs: CostModel
    budget: ActivationBudget
    run: Evaluation
    checkpointing: Checkpointing = KEPT

    @property
    def counted_s(self) -> float:
        return self.run.step_s + self.run.gathers_s

    def fitted(self, has_policies: bool) -> AblationRow:
        """Makes the plan fit, with policies if it may have any, and returns its row; zero seconds if it does not fit."""
        plan, run = self.plan, self.run
        if has_policies:
            try:
                plan = make_room(plan, Planning(self.costs, PlannerConfig(1, (1,), activations=self.budget)))
            except ValueError as error:
                return AblationRow("", 0.0, str(error))
            run = _run(plan, self.costs)
        stages = plan.micro_batches[0].groups[0].stages
        limit = self.budget.device_bytes + max(ByteModel(self.costs.model).stage_states(stage, plan) for stage in stages)
        if (needed := max(run.peak_bytes)) > limit:
            how = "" if has_policies else f" with {self.checkpointing.name}"
            text = f"does not fit{how}: {needed / 2**30:.1f} GiB of {limit / 2**30:.1f} on {plan.num_stages} stages"
            return AblationRow("", 0.0, text)
        how = describe(plan) if has_policies else f"{describe(plan)}, {self.checkpointing.name}"
        return AblationRow("", run.step_s + run.gathers_s, how)


def _run(plan: StepPlan, costs: CostModel) -> Evaluation:
    """Predicts a plan's run with the gathers of weights that count."""
    return evaluate_plan(plan, costs, with_events=False, known=PredictionCache(counts_gathers=True))


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of every row: costs and degrees of all ranks, bytes of a rank's device and of its host."""

    costs: CostModel
    config: PlannerConfig
    device_bytes: int
    host_bytes: int
    tile_tokens: int = 2048

    @property
    def num_nodes(self) -> int:
        return self.costs.cluster.num_ranks // self.costs.cluster.ranks_per_node

    def stage_counts(self) -> list[int]:
        """Returns numbers of pipeline stages that a run may have, at least two."""
        counts = stage_counts(self.costs.cluster.num_ranks, self.costs.model.num_layers, self.config.degrees)
        return [count for count in counts if count > 1]

    def staged_costs(self, num_stages: int, parameters: Parameters = "sharded") -> CostModel:
        """Returns costs on stages whose ranks share sequences by Ulysses, and weights in this way if they share any."""
        per_stage = self.costs.cluster.num_ranks // num_stages
        if per_stage == 1 or self.costs.parameters == "replicated":
            return replace(self.costs, method="ulysses", parameters="replicated", shard_ranks=1)
        return replace(self.costs, method="ulysses", parameters=parameters, shard_ranks=per_stage)

    def budget(self, costs: CostModel, ranges: Ranges, host_bytes: int) -> ActivationBudget:
        """Returns memory besides the states of the largest stage; raises ValueError if there is none."""
        byte_model = ByteModel(costs.model)
        held = byte_model.most_states(ranges, costs.parameters, costs.shard_ranks)
        if (left := self.device_bytes - held) <= 0:
            raise ValueError(f"states take {held / 2**30:.1f} GiB of {self.device_bytes / 2**30:.1f}")
        return byte_model.budget(left, host_bytes, self.tile_tokens)


def ablation(lengths: Sequence[int], machine: Machine) -> tuple[AblationRow, ...]:
    """Returns rows for one step of these sequences; the row of all systems together comes last."""
    # none of them exchanges heads beside attention
    alone = replace(machine, costs=replace(machine.costs, model=replace(machine.costs.model, exchange_parts=1)))
    return (
        _flexsp(lengths, alone),
        _quickest("Seq1F1B alone", _checkpointed(_options(lengths, alone, _quarters, 0), alone), has_policies=False),
        _quickest("InfiniPipe alone", _options(lengths, alone, _elastic, 0), has_policies=True),
        _quickest("SPPO alone", _options(lengths, alone, _sliced, machine.host_bytes), has_policies=True),
        *([row] if (row := lent_row(lengths, machine)) is not None else []),
        together(lengths, machine),
    )


def together(lengths: Sequence[int], machine: Machine) -> AblationRow:
    """Plans with all four systems at the best number of stages, trying numbers in turn until two in a row are slower."""

    def planned(parameters: Parameters) -> AblationRow:
        def setup_of(count: int, num_ranges: int, _: float) -> StageSetup:
            if count == 1:
                return StageSetup(machine.costs, machine.config)
            ranges = balanced_ranges(machine.costs, count, lengths, num_ranges)
            return _staged_setup(machine, machine.staged_costs(count, parameters), ranges)

        return _chosen("all together", lengths, [1, *machine.stage_counts()], setup_of, machine.num_nodes)

    ways: tuple[Parameters, ...] = ("sharded",) if machine.costs.parameters == "replicated" else ("sharded", "gathered_per_step")
    rows = [planned(parameters) for parameters in ways]
    return min(rows, key=lambda row: (not row.is_possible, row.step_s))


def lent_row(lengths: Sequence[int], machine: Machine) -> AblationRow | None:
    """Plans with all four systems and idle stages that lend ranks (`lend_stages=True`), at the best number of stages.

    None for a job without adapters or without stages, since a run refuses the setting for it.
    """
    if machine.costs.model.adapters.is_empty or not machine.stage_counts():
        return None
    model = replace(machine.costs.model, keeps_all_stages=True, exchange_parts=1)
    costs = replace(machine.costs, model=model, method="ulysses", parameters="replicated", shard_ranks=1)

    def setup_of(count: int, num_ranges: int, _: float) -> StageSetup:
        if num_ranges > 1:
            raise ValueError("stages of several layer ranges lend no ranks")
        setup = _staged_setup(machine, costs, balanced_ranges(costs, count, lengths))
        return replace(setup, config=replace(setup.config, lend_stages=True))

    return _chosen("lent stages", lengths, machine.stage_counts(), setup_of, machine.num_nodes)


def _staged_setup(machine: Machine, costs: CostModel, ranges: Ranges) -> StageSetup:
    degrees = tuple(d for d in machine.config.degrees if d <= costs.cluster.num_ranks // len(ranges))
    budget = machine.budget(costs, ranges, machine.host_bytes)
    most = max(1, budget.kept_tokens, machine.config.tokens_per_rank)
    config = replace(machine.config, activations=budget, degrees=degrees, stages=ranges, tokens_per_rank=most)
    if (budget, degrees) != (machine.config.activations, machine.config.degrees):
        # longer sequences were not tried in that memory
        config = replace(config, longest_tokens=0)
    return StageSetup(costs, config)


def _chosen(
    name: str, lengths: Sequence[int], counts: Sequence[int], setup_of: Callable[[int, int, float], StageSetup], num_nodes: int
) -> AblationRow:
    """Returns the planner's plan at the best of these numbers of stages."""
    try:
        best = stage_options(lengths, counts, setup_of, _GIVEN_UP, _INTERLEAVE, num_nodes).fitting[0]
    except ValueError as error:
        return AblationRow(name, 0.0, str(error))
    return AblationRow(name, best.plan.estimate.counted_s, describe(best.plan))


def _flexsp(lengths: Sequence[int], machine: Machine) -> AblationRow:
    """Plans FlexSP's groups at the fastest checkpointing that fits."""
    budget = machine.config.activations
    ways = [KEPT] if budget is None else CHECKPOINTINGS
    rows = [_flexsp_under(lengths, machine, checkpointing) for checkpointing in ways]
    possible = [row for row in rows if row.is_possible]
    # the last way needs the least memory, so give its reason
    return min(possible, key=lambda row: row.step_s) if possible else rows[-1]


def _flexsp_under(lengths: Sequence[int], machine: Machine, checkpointing: Checkpointing) -> AblationRow:
    name, budget = "FlexSP alone", machine.config.activations
    costs = CheckpointedCosts.of(machine.costs, checkpointing)
    byte_model = ByteModel(costs.model)
    kept = machine.config.tokens_per_rank
    if budget is not None:
        like = document_load(
            costs.model.num_layers, plainest_shape(machine.config.degrees[-1], costs.method, costs.model, costs.cluster)
        )
        kept = min(kept, most_tokens(byte_model, budget.device_bytes, checkpointing, like))
    how = checkpointing.name
    if kept < 1:
        return AblationRow(name, 0.0, f"states leave no room for a token with {how}")
    config = replace(machine.config, activations=None, tokens_per_rank=kept)
    try:
        plan = plan_step(0, lengths, costs, config)
    except ValueError as error:
        return AblationRow(name, 0.0, f"{error} ({how})")
    if budget is not None:
        groups = (group for micro_batch in plan.micro_batches for group in micro_batch.groups)
        needed = max(group_bytes(byte_model, group, checkpointing) for group in groups)
        if needed > budget.device_bytes:
            gib = f"{needed / 2**30:.1f} GiB of {budget.device_bytes / 2**30:.1f}"
            return AblationRow(name, 0.0, f"does not fit with {how}: {gib} beside the states")
    return AblationRow(name, plan.estimate.counted_s, f"{describe(plan)}, {how}")


def _checkpointed(options: Iterator[_Option | str], machine: Machine) -> Iterator[_Option | str]:
    """Yields each plan that keeps everything under every checkpointing, the same for all layers of all chunks."""
    for option in options:
        if isinstance(option, str):
            yield option
            continue
        for checkpointing in CHECKPOINTINGS:
            plan = replace(
                option.plan,
                micro_batches=tuple(
                    replace(mb, groups=tuple(_under(group, checkpointing, machine.tile_tokens) for group in mb.groups))
                    for mb in option.plan.micro_batches
                ),
            )
            run = _run(plan, option.costs)
            yield replace(option, plan=plan, run=run, checkpointing=checkpointing)


def _under(group: SequenceGroup, checkpointing: Checkpointing, tile_tokens: int) -> SequenceGroup:
    """Returns the group with every chunk on every stage under a checkpointing, and with its loss in tiles."""
    # stages and chunks with equally many layers share one tuple, so that its bytes are counted once
    layers = {
        count: checkpointing.policy(count).layers
        for stage in group.stages
        for count in {p.num_layers for p in stage.layer_ranges}
    }
    policies = {
        (stage.stage, chunk.index, layer_range): layers[owned.num_layers]
        for stage in group.stages
        for chunk in group.chunks
        for layer_range, owned in enumerate(stage.layer_ranges)
    }
    return with_layers(group, policies, tile_tokens)


def _options(lengths: Sequence[int], machine: Machine, chunking: _Chunking, host_bytes: int) -> Iterator[_Option | str]:
    """Yields plans of equal groups that keep everything, one per number of stages, or the reason why there is none."""
    for num_stages in machine.stage_counts():
        costs, ranges = machine.staged_costs(num_stages), balanced_ranges(machine.costs, num_stages, lengths)
        per_stage = costs.cluster.num_ranks // num_stages
        degree = max(d for d in machine.config.degrees if per_stage % d == 0)
        shape, num_groups = GroupShape(degree, degree), per_stage // degree
        try:
            budget = machine.budget(costs, ranges, host_bytes)
        except ValueError as error:
            yield str(error)
            continue
        dealt = deal_sequences(lengths, [costs.sequences_s(lengths, shape)] * num_groups, [max(lengths)] * num_groups)
        busy = [{i: lengths[i] for i in members} for members in dealt if members]
        for way in zip(*(chunking(members, shape, costs) for members in busy), strict=True):
            chunks_of = [*way, *[(Chunk(0),)] * (num_groups - len(way))]
            groups = tuple(
                pipelined(SequenceGroup.of(shape, range(first, first + degree), chunks), ranges, "1f1b")
                for first, chunks in zip(range(0, per_stage, degree), chunks_of, strict=True)
            )
            plan = StepPlan(
                0,
                tuple(lengths),
                num_stages,
                per_stage,
                costs.parameters,
                (MicroBatch(groups),),
                shard_ranks=costs.shards,
                node_ranks=costs.node_ranks,
            )
            yield _Option(plan, costs, budget, _run(plan, costs))


def _quickest(name: str, options: Iterator[_Option | str], has_policies: bool) -> AblationRow:
    """Returns the fastest option that fits. Policies only add seconds, so options that are slower without them are skipped."""
    found = list(options)
    best, reason = AblationRow(name, 0.0, ""), "there is no number of stages of two or more"
    for text in (each for each in found if isinstance(each, str)):
        reason = text
    for option in sorted((each for each in found if isinstance(each, _Option)), key=lambda each: each.counted_s):
        if best.is_possible and option.counted_s >= best.step_s:
            break
        row = option.fitted(has_policies)
        if row.is_possible and (not best.is_possible or row.step_s < best.step_s):
            best = replace(row, name=name)
        reason = row.detail
    return best if best.is_possible else replace(best, detail=reason)


def _quarters(members: Mapping[int, int], shape: GroupShape, costs: CostModel) -> Sequence[tuple[Chunk, ...]]:
    return [fixed_chunks(members, -(-max(members.values()) // _SEQ1F1B_SLICES))]


def _elastic(
    members: Mapping[int, int], shape: GroupShape, costs: CostModel, counts: Sequence[int] = _SLICES
) -> Sequence[tuple[Chunk, ...]]:
    pair_s = costs.coefficients.forward.pair_s + costs.coefficients.backward.pair_s
    token_s = costs.coefficients.forward.token_s + costs.coefficients.backward.token_s
    rates = SpanRates(pair_s, token_s, costs.attention_pairs())
    return [elastic_chunks(members, count, rates, max(members.values())) for count in counts]


def _sliced(members: Mapping[int, int], shape: GroupShape, costs: CostModel) -> Sequence[tuple[Chunk, ...]]:
    """Cuts every sequence alone into the fewest slices of equal tokens that SPPO's bounds allow."""
    families = [
        fixed_chunks({sequence: length}, -(-length // slice_counts(length, shape.degree)[0]))
        for sequence, length in sorted(members.items(), key=lambda item: (-item[1], item[0]))
    ]
    spans = [chunk.spans for family in families for chunk in family]
    return [tuple(Chunk(index, each) for index, each in enumerate(spans))]


def describe(plan: StepPlan) -> str:
    """Describes a plan in a few words: stages, groups, chunks, and which saved tensors are recomputed and offloaded."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    chunks = sum(len(group.chunks) for group in groups)
    policies = [policy for group in groups for stage in group.stages for policy in stage.activations if policy.layers]
    num_ranges = len(groups[0].stages[0].layer_ranges)
    stages = f"{plan.num_stages} stage(s)" + (f" of {num_ranges} layer ranges" if num_ranges > 1 else "")
    words = [stages, plan.micro_batches[0].layout, f"{chunks} chunks"]
    if num_lent := sum(map(is_lent, groups)):
        words.append(f"ranks lent to {num_lent} group(s)")
    if policies:
        shares = [layer.share("mlp") for policy in policies for layer in policy.layers]
        words.append(f"{sum(share.recompute > 0 for share in shares)} layers recomputed in {len(policies)} chunk(s)")
        if any(share.host > 0 for policy in policies for layer in policy.layers for share in layer.shares):
            words.append("offload")
    return ", ".join(words)

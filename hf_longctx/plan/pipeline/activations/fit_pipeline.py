"""The pass that makes room in pipelines: what a stage cannot hold is recomputed or offloaded, and the judge has the last word.

A group that fits as it is stays as it is. For another one the loss runs in tiles, and if that does not do, the program of
`joint_program.py` chooses for every chunk and stage. It knows workspaces and copies only roughly, so its answer counts when
the judge has run it and found it within the limits; what it is over is taken off the room, and the program is solved again. The
program without offload is asked too where copies turn out to be in the way. What is left when nothing of that fits: every layer
of every chunk recomputed, on the host what goes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_longctx.plan.core.planner_config import ActivationBudget
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import Action, LayerPolicy, SequenceGroup, StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import lean_policy
from hf_longctx.plan.memory.stage import message_bytes, most_in_flight
from hf_longctx.plan.pipeline.activations.cells import GroupCells, with_layers
from hf_longctx.plan.pipeline.activations.joint_program import choose_jointly
from hf_longctx.plan.prediction.pipeline_run import KnownRuns, run_pipeline
from hf_longctx.plan.prediction.planning import Planning

# how often a program is solved again with less room, where the judge finds more bytes than it was told, or with more
_ATTEMPTS = 6
# free bytes of every stage, of its limit, with which it is solved again with more room; how much of them it gets then
_WORTH, _REGAIN = 0.02, 0.8
# how much a stage's room shrinks for what it is over, and beside that, of its limit
_SHRINK, _MARGIN = 1.2, 0.002
# of a group's seconds that a better solution of the program is not worth a search
_TOLERANCE = 0.001
# seconds beyond what the program counts at which the one without offload is asked too
_SLACK = 1.005


def make_room(plan: StepPlan, planning: Planning) -> StepPlan:
    """The plan with activation policies for every group that does not fit as it is, by its predicted run.

    `device_bytes` of the budget is what the stage with the most weights and optimizer states has beside them; the others have
    more. Raises ValueError for the first group for which nothing fits, with what it needs, and without a budget.
    """
    budget = planning.config.activations
    if budget is None:
        raise ValueError("policies need a budget; set PlannerConfig.activations")
    room = PipelineRoom(plan, planning.costs, budget, known=planning.known)
    micro_batches = tuple(
        replace(micro_batch, groups=tuple(map(room.for_group, micro_batch.groups))) for micro_batch in plan.micro_batches
    )
    return replace(plan, micro_batches=micro_batches)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A group, its seconds alone, and by how many bytes each stage is over its limit."""

    group: SequenceGroup
    group_s: float
    over_bytes: tuple[float, ...]
    over_host_bytes: float

    @property
    def fits(self) -> bool:
        return max(self.over_bytes) <= 0 and self.over_host_bytes <= 0


class PipelineRoom:
    """Makes room for the groups of one step; groups alike are solved once.

    keeps_attention: recomputed layers keep attention's output wherever that fits.
    """

    def __init__(
        self,
        plan: StepPlan,
        costs: CostModel,
        budget: ActivationBudget,
        keeps_attention: bool = True,
        known: KnownRuns | None = None,
    ) -> None:
        self.plan, self.costs, self.budget, self.keeps_attention = plan, costs, budget, keeps_attention
        stages = plan.micro_batches[0].groups[0].stages
        states = [ByteModel(costs.model).stage_states(stage, plan) for stage in stages]
        self.limit_bytes = max(states) + budget.device_bytes
        self.room_bytes = tuple(float(self.limit_bytes - state) for state in states)
        self.known_runs = KnownRuns() if known is None else known
        self._known: dict[object, tuple[StagePlan, ...]] = {}

    def for_group(self, group: SequenceGroup) -> SequenceGroup:
        """The group with the policies that it needs to fit; raises ValueError where nothing fits."""
        spans = tuple(tuple((span.start, span.stop) for span in chunk.spans) for chunk in group.chunks)
        key = group.shape, spans, tuple(stage.actions for stage in group.stages)
        if key not in self._known:
            self._known[key] = self._choose(group).stages
        return replace(group, stages=self._known[key])

    def judge(self, group: SequenceGroup) -> _Judged:
        """What the group alone takes."""
        runs = run_pipeline(self.plan, group, self.costs, [0.0] * len(group.stages), self.known_runs)
        over = tuple(float(run.peak_bytes - self.limit_bytes) for run in runs)
        host = max(run.host_bytes for run in runs)
        return _Judged(group, max(run.times[-1][1] for run in runs), over, float(host - self.budget.host_bytes))

    def _choose(self, group: SequenceGroup) -> SequenceGroup:
        if self.judge(group).fits:
            return group
        tiled = self.judge(with_layers(group, {}, self.budget.tile_tokens))
        if tiled.fits:
            return tiled.group
        options = list(self._options(tiled))
        if not options:
            raise ValueError(self._nothing_fits(tiled.group))
        return min(options, key=lambda option: option.group_s).group

    def _options(self, tiled: _Judged) -> Iterator[_Judged]:
        for keeps_attention in (True, False) if self.keeps_attention else (False,):
            cells = GroupCells(
                tiled.group,
                self.costs,
                self.budget.tile_tokens,
                keeps_attention,
                self.known_runs.byte_model(self.costs.model),
                self.budget.host_bytes > 0,
            )
            found = [self._accepted(cells, tiled.group_s, self.budget.host_bytes)]
            # copies cost nothing in the program, and may be in the way all the same
            if self.budget.host_bytes and (found[0] is None or found[0][0].group_s > _SLACK * (tiled.group_s + found[0][1])):
                found.append(self._accepted(cells, tiled.group_s, 0))
            if options := [solved[0] for solved in found if solved is not None]:
                yield from options
                return
        for option in self._lean(tiled.group):
            if option.fits:
                yield option
                return

    def _accepted(self, cells: GroupCells, group_s: float, host_bytes: float) -> tuple[_Judged, float] | None:
        """The fastest that the judge accepts, and the seconds that the program counted for it; None if that is nothing.

        Room is taken away from stages that are over their limit, and given to all where there is some left.
        """
        group, tokens = cells.group, max(cells.tokens)
        messages = [message_bytes(self.costs.model, stage, len(group.stages), tokens) for stage in group.stages]
        room = [num_bytes - sent for num_bytes, sent in zip(self.room_bytes, messages, strict=True)]
        best: tuple[_Judged, float] | None = None
        for _ in range(_ATTEMPTS):
            choice = choose_jointly(cells.cells, cells.moments(room), host_bytes, _TOLERANCE * group_s)
            if choice is None:
                break
            judged = self.judge(cells.under(choice))
            if judged.fits:
                if best is None or judged.group_s < best[0].group_s:
                    best = judged, choice.cost_s
                # what recomputation may still win back
                if choice.cost_s <= 5 * _TOLERANCE * group_s or max(judged.over_bytes) > -_WORTH * self.limit_bytes:
                    break
                room = [num_bytes - _REGAIN * over for num_bytes, over in zip(room, judged.over_bytes, strict=True)]
                continue
            if best is not None:
                break
            # a little more than it is over, since copies that wait for each other add up
            less = [_SHRINK * over + _MARGIN * self.limit_bytes if over > 0 else 0.0 for over in judged.over_bytes]
            room = [num_bytes - taken for num_bytes, taken in zip(room, less, strict=True)]
            host_bytes -= max(0.0, judged.over_host_bytes)
        return best

    def _lean(self, group: SequenceGroup) -> Iterator[_Judged]:
        """Every layer recomputed, the least device memory last."""
        for keeps_attention in (True, False):
            for host_bytes in dict.fromkeys((0, self.budget.host_bytes)):
                yield self.judge(self._lean_group(group, host_bytes, keeps_attention))

    def _lean_group(self, group: SequenceGroup, host_bytes: int, keeps_attention: bool) -> SequenceGroup:
        # a chunk's part of the host is its part of the most tokens in flight
        tokens = [max(shard_tokens(chunk, group.shape)) for chunk in group.chunks]

        def layer_tokens(action: Action) -> int:
            return tokens[action.chunk] * group.stages[action.stage].parts[action.part].num_layers

        in_flight = max(most_in_flight(stage.actions, layer_tokens) for stage in group.stages)
        layers = {}
        # layers alike are one object, which is counted once
        known: dict[tuple[int, int], tuple[LayerPolicy, ...]] = {}
        for stage in group.stages:
            for chunk, num_tokens in zip(group.chunks, tokens, strict=True):
                for part, owned in enumerate(stage.parts):
                    size = num_tokens, owned.num_layers
                    if size not in known:
                        share = int(host_bytes * num_tokens * owned.num_layers / in_flight)
                        policy = lean_policy(self.costs.model, num_tokens, share, 0, owned.num_layers, keeps_attention)
                        known[size] = policy.layers
                    layers[stage.stage, chunk.index, part] = known[size]
        return with_layers(group, layers, self.budget.tile_tokens)

    def _nothing_fits(self, group: SequenceGroup) -> str:
        least = min(self._lean(group), key=lambda judged: max(judged.over_bytes))
        place = max(range(len(least.over_bytes)), key=lambda stage: least.over_bytes[stage])
        needed = self.limit_bytes + least.over_bytes[place]
        return (
            f"stage {place} of {len(group.stages)} needs {needed / 2**30:.2f} GiB on a rank for {len(group.chunks)} chunks of up "
            f"to {max(chunk.num_tokens for chunk in group.chunks)} tokens on {group.degree} rank(s) even if every layer is "
            f"recomputed, and {self.limit_bytes / 2**30:.2f} GiB are usable; use smaller chunks, more ranks per stage, shorter "
            f"sequences or more host memory (host_gib)"
        )

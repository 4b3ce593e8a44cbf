"""The pass that makes room in pipelines: stages that cannot hold everything recompute or offload until the prediction fits.

A group that fits is left unchanged. Otherwise these ways are tried, in this order, until one fits: the loss in tiles alone;
the program of `joint_program.py`, which chooses for every chunk and stage; every layer of every chunk recomputed. None of them is
tried for a group that needs more than there is even with every layer recomputed and all inputs on the host. Where that is so
without the host, most programs are left out, since they would have no answer. Stages that fit with everything kept are left so.

The program knows workspace and copies only roughly, so its answer is predicted, and it is solved again with less room while the
prediction is over the limit. Where more than copies that hide is needed, the program is also solved without offloading. An answer
that recomputes much is compared with recomputing all layers beside attention outputs on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from hf_longctx.plan.core.settings import ActivationBudget
from hf_longctx.plan.core.types import Action, SequenceGroup, StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.stage import message_bytes, most_in_flight
from hf_longctx.plan.policies.fit import (
    FittedGroups,
    Trial,
    first_fitting,
    in_tiles,
    lean_group,
    search_room,
    with_stages_of,
)
from hf_longctx.plan.policies.joint_program import choose_jointly
from hf_longctx.plan.predict.pipeline_run import PredictionCache, busiest_stage_s, kept_pipeline_s, run_pipeline
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.cells import GroupCells, hidden_share


@dataclass(frozen=True, slots=True)
class FitConstants:
    """Constants of the search for room.

    attempts: solutions of one program, each with another room. worth: share of the limit that must be free on every stage to try
    again with more room; regain: how much of the free bytes is given back then. shrink: how many times the excess of a stage is
    taken off its room, and margin: share of the limit that is taken off besides, since copies that wait for each other add up.
    tolerance: share of a group's seconds below which a better solution is not searched for. slack: factor on the
    group's seconds with everything kept, and with what the program recomputes of a single chunk, beyond which the program is
    solved without offloading too. hopeless: share of the limit by which the least bytes of a group may exceed it for anything to
    be tried, since policies of the program may need slightly less workspace. many_cells: chunks on parts of stages from which on
    offloading is left out where all else takes at most `little_lost` times as long as with everything kept. much_lost: factor on
    the seconds with everything kept beyond which a program's answer is compared with recomputing every layer but for attention.
    much_hidden: share of saved tensors whose copies hide, from which on they may free more than to recompute them.
    """

    attempts: int = 6
    worth: float = 0.02
    regain: float = 0.8
    shrink: float = 1.2
    margin: float = 0.002
    tolerance: float = 0.001
    slack: float = 1.005
    hopeless: float = 0.001
    many_cells: int = 4000
    little_lost: float = 1.02
    much_lost: float = 1.2
    much_hidden: float = 0.8


# repeat `recipes/bench/papers/infinipipe.py` and the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_ROOM = FitConstants()

# device bytes of every stage for saved tensors and workspace, and host bytes
_Room = tuple[tuple[float, ...], float]

# makes a group with every layer recomputed, given whether attention outputs are kept, and the host bytes for inputs
_Lean = Callable[[bool, int], SequenceGroup]


def make_room(plan: StepPlan, planning: Planning) -> StepPlan:
    """Gives activation policies to every group whose predicted run does not fit as it is.

    `device_bytes` of the budget is the room of the stage with the most weights and optimizer states; other stages have more.
    Raises ValueError without a budget, and for the first group for which nothing fits; the message says how much it needs.
    """
    budget = planning.config.activations
    if budget is None:
        raise ValueError("policies need a budget; set PlannerConfig.activations")
    room = PipelineRoom(plan, planning.costs, budget, known=planning.known, fitted=planning.fitted)
    return replace(
        plan,
        micro_batches=tuple(
            replace(micro_batch, groups=_fitting_groups(room, micro_batch.groups)) for micro_batch in plan.micro_batches
        ),
    )


def _fitting_groups(room: PipelineRoom, groups: Sequence[SequenceGroup]) -> tuple[SequenceGroup, ...]:
    """Groups with their policies.

    Those whose ranks have most tokens of one sequence come first: where nothing fits, it is mostly for them, and the program need
    not be solved for others.
    """
    fitting: dict[int, SequenceGroup] = {}
    for place in sorted(range(len(groups)), key=lambda place: -_longest_share(groups[place])):
        fitting[place] = room.for_group(groups[place])
    return tuple(fitting[place] for place in range(len(groups)))


def _longest_share(group: SequenceGroup) -> float:
    return max((span.stop for chunk in group.chunks for span in chunk.spans), default=0) / group.degree


class PipelineRoom:
    """Makes room for the groups of one plan.

    keeps_attention: recomputed layers keep the attention output wherever that fits. waiting_bytes: most bytes of
    gradients that wait whole on a rank while a group runs several backwards. known, fitted: caches that the plans of one
    step share; equal groups on equal stages are solved once, on whichever ranks and nodes.
    """

    def __init__(
        self,
        plan: StepPlan,
        costs: CostModel,
        budget: ActivationBudget,
        keeps_attention: bool = True,
        known: PredictionCache | None = None,
        fitted: FittedGroups | None = None,
    ) -> None:
        self.plan, self.costs, self.budget, self.keeps_attention = plan, costs, budget, keeps_attention
        stages = plan.micro_batches[0].groups[0].stages
        self.predictions = PredictionCache() if known is None else known
        self._byte_model = self.predictions.byte_model(costs.model)
        states = [self._byte_model.stage_states(stage, plan) for stage in stages]
        self.limit_bytes = max(states) + budget.device_bytes
        self.room_bytes = tuple(float(self.limit_bytes - state) for state in states)
        self.waiting_bytes = max(self._byte_model.stage_waiting(stage, plan) for stage in stages)
        # a stage holds at least as many chunks as any after it, so that of equal ones the first needs most; ends hold more
        sizes = {tuple(part.num_layers for part in stage.parts): stage.stage for stage in reversed(stages[1:-1])}
        self._fullest = sorted({0, *sizes.values(), len(stages) - 1})
        self._known = FittedGroups() if fitted is None else fitted
        # predictions of the latest group in least memory, which a refusal describes
        self._least: list[Trial] = []

    def for_group(self, group: SequenceGroup) -> SequenceGroup:
        """Gives the group the policies that it needs to fit; raises ValueError where nothing fits."""
        stages = self.plan.ranks_per_stage, tuple(stage.parts for stage in group.stages)
        return self._known.fit(group, self._fitting, self._nothing_fits, stages)

    def trial(self, group: SequenceGroup, counted_s: float = 0.0) -> Trial:
        """Predicts the run of the group alone and compares it with the limits."""
        runs = run_pipeline(self.plan, group, self.costs, [0.0] * len(group.stages), self.predictions)
        return Trial(
            group,
            seconds=max(run.times[-1][1] for run in runs),
            over_bytes=tuple(float(run.peak_bytes - self.limit_bytes) for run in runs),
            over_host_bytes=float(max(run.host_bytes for run in runs) - self.budget.host_bytes),
            counted_s=counted_s,
        )

    def over_bytes(self, group: SequenceGroup) -> tuple[float, ...]:
        """Bytes above the limit on each stage of a group under its policies."""
        return tuple(next(of_stage) for of_stage in self._over_bytes(group, [group]))

    def _short_trial(self, group: SequenceGroup, counted_s: float = 0.0) -> Trial:
        """The `trial` of a group, without its run, and so without seconds, if the bytes of its chunks alone exceed the limits."""
        over_bytes = self.over_bytes(group)
        on_host = max(self._byte_model.moments(group, stage).most.host for stage in group.stages)
        short = Trial(group, math.inf, over_bytes, float(on_host - self.budget.host_bytes), counted_s)
        return self.trial(group, counted_s) if short.fits else short

    def kept_s(self, group: SequenceGroup) -> float:
        """Predicted seconds of a group alone that recomputes and moves nothing."""
        return kept_pipeline_s(self.plan, group, self.costs, self.predictions)

    def takes(self, group: SequenceGroup, seconds: float) -> bool:
        """Whether a group takes at least so many seconds even if it recomputes and moves nothing."""
        return self.is_busy(group, seconds) or self.kept_s(group) >= seconds

    def is_busy(self, group: SequenceGroup, seconds: float) -> bool:
        """Whether a stage works at least so many seconds on a group that recomputes and moves nothing."""
        return busiest_stage_s(self.plan, group, self.costs, self.predictions) >= seconds

    def _fitting(self, group: SequenceGroup) -> list[Trial]:
        """Trials that fit, found in the order that the module describes."""
        if not self.exceeds(group) and (plain := self._short_trial(group)).fits:
            return [plain]
        self._least = []
        if self.is_hopeless(group):
            self._least.append(Trial(group, math.inf, self.least_over_bytes(group)))
            return []
        kept = self._kept_trial(group)
        if kept.fits:
            return [self.trial(kept.group)]
        lean = self._lean(kept)
        keeps = (True, False) if self.keeps_attention else (False,)
        hosts = tuple(dict.fromkeys((0, self.budget.host_bytes)))
        programs = [partial(self._programmed, kept, keeps_attention, lean) for keeps_attention in keeps]
        ways = ([lean(keeps_attention, host_bytes)] for keeps_attention in (True, False) for host_bytes in hosts)
        found = first_fitting(programs, ways, self._least_trial)
        # where little room is left, it may take less time to keep attention outputs on the host than to recompute some of them
        is_slow = min((trial.seconds for trial in found), default=0.0) > _ROOM.much_lost * kept.seconds
        if is_slow and self.budget.host_bytes and (whole := self._least_trial(lean(True, self.budget.host_bytes))).fits:
            found.append(whole)
        return found

    def _kept_trial(self, group: SequenceGroup) -> Trial:
        """The group in tiles with everything kept, as a trial that is not run.

        The last stage has no tiles where it fits only so: for chunks of few tokens, those of its loss take more than they save.
        """
        tiled = in_tiles(group, self.budget.tile_tokens)
        over, last = self.over_bytes(tiled), len(group.stages) - 1
        if over[last] > 0:
            plain = next(next(self._over_bytes(group, [group], [last])))
            if plain <= 0:
                tiled, over = with_stages_of(tiled, group, [last]), (*over[:last], plain)
        return Trial(tiled, self.kept_s(group), over)

    def least_over_bytes(self, group: SequenceGroup) -> tuple[float, ...]:
        """Bytes above the limit on each stage of a group without policies in the least memory.

        Every layer of every chunk is recomputed, as if the host had all of its bytes for each of them, or none is: chunks of few
        tokens hold little, and need less workspace without replays and tiles.
        """
        return tuple(min(of_stage) for of_stage in self._over_bytes(group, self._least_ways(group)))

    def may_recompute(self, group: SequenceGroup) -> bool:
        """Whether a group without policies is within the limit in the least memory, as `least_over_bytes` counts it."""
        found = self._over_bytes(group, self._least_ways(group), self._fullest)
        return all(any(over <= 0 for over in of_stage) for of_stage in found)

    def may_keep(self, group: SequenceGroup) -> bool:
        """Whether a group is within the limit under its policies."""
        return all(next(of_stage) <= 0 for of_stage in self._over_bytes(group, [group], self._fullest))

    def _least_ways(self, group: SequenceGroup) -> list[SequenceGroup]:
        """The group under each of the policies of `least_over_bytes`."""
        model, tile_tokens = self.costs.model, self.budget.tile_tokens
        least = lean_group(group, model, tile_tokens, lambda *_: self.budget.host_bytes)
        return [least, in_tiles(group, tile_tokens), group]

    def _over_bytes(
        self,
        group: SequenceGroup,
        ways: Sequence[SequenceGroup],
        places: Sequence[int] = (),
        peak: Callable[[SequenceGroup, StagePlan, int], int] | None = None,
    ) -> Iterator[Iterator[float]]:
        """Bytes above the limit for every stage under each of the policies of `ways`, counted when asked for.

        When actions run does not matter. places: stages to count, all by default. peak: what counts the bytes of a stage, all of
        its passes by default.
        """
        model, tokens = self.costs.model, max(self.predictions.seconds(group, self.costs).tokens)
        peak = self._peak if peak is None else peak
        for place in places or range(len(group.stages)):
            stage = group.stages[place]
            waiting = self._byte_model.stage_waiting(stage, self.plan)
            beside = message_bytes(model, stage, len(group.stages), tokens) - self.room_bytes[place]
            yield (peak(group, way.stages[place], waiting) + beside for way in ways)

    def _least_over(self, group: SequenceGroup, ways: Sequence[SequenceGroup]) -> Iterator[Iterator[float]]:
        """Lower bounds on the bytes above the limit, on those stages that probably need most, as in `_over_bytes`."""
        return self._over_bytes(group, ways, self._fullest, self._byte_model.least_peak)

    def _peak(self, group: SequenceGroup, stage: StagePlan, waiting: int) -> int:
        return self._byte_model.moments(group, stage, waiting=waiting).most.peak

    def exceeds(self, group: SequenceGroup) -> bool:
        """Whether a bound tells that the group does not fit as it is."""
        return self._is_over(group, lambda: [group], 0.0)

    def is_hopeless(self, group: SequenceGroup) -> bool:
        """Whether a bound tells that no policy makes the group fit: some stage needs clearly more in every way."""
        return self._is_over(group, lambda: self._least_ways(group), _ROOM.hopeless * self.limit_bytes)

    def _is_over(self, group: SequenceGroup, ways: Callable[[], list[SequenceGroup]], most: float) -> bool:
        """Whether some stage needs more than `most` bytes above the limit in each of these ways, by `ByteModel.least_peak`."""
        key = id(group.chunks), id(group.stages), group.shape, most
        if key not in self.predictions.over:
            is_over = any(all(over > most for over in of_stage) for of_stage in self._least_over(group, ways()))
            # the group is stored too, so that its ids are not reused
            self.predictions.over[key] = group, is_over
        return self.predictions.over[key][1]

    def _least_trial(self, group: SequenceGroup) -> Trial:
        """Predicts a group in least memory, unless a bound tells that it does not fit, and keeps it for a refusal."""
        over_bytes = tuple(next(of_stage) for of_stage in self._least_over(group, [group]))
        self._least.append(Trial(group, math.inf, over_bytes) if max(over_bytes) > 0 else self._short_trial(group))
        return self._least[-1]

    def _programmed(self, kept: Trial, keeps_attention: bool, lean: _Lean) -> list[Trial]:
        """The program's answers that fit: with offloading, and without it where that may be faster.

        A program of many cells is solved without offloading first, which may lose so little that the host is not asked.
        lean: see `_lean`. Where this does not fit without offloading, the program mostly has no answer.
        """

        def solved(offloads: bool) -> Trial | None:
            known, tile_tokens = self.predictions, self.budget.tile_tokens
            cells = GroupCells(kept.group, self.costs, tile_tokens, keeps_attention, known, offloads, _fitting_places(kept))
            return self._solve(cells, kept.seconds, self.budget.host_bytes if offloads else 0)

        @cache
        def is_in_vain() -> bool:
            leanest = lean(keeps_attention, 0)
            is_over = any(next(of_stage) > 0 for of_stage in self._least_over(leanest, [leanest]))
            return is_over and hidden_share(kept.group, self.costs, self.predictions) < _ROOM.much_hidden

        num_cells = len(kept.group.chunks) * sum(len(stage.parts) for stage in kept.group.stages)
        is_large = num_cells > _ROOM.many_cells
        # room is short where nothing fits with attention outputs, and many cells take long to make
        if (is_large or not keeps_attention) and is_in_vain():
            return []
        found = [solved(False)] if is_large or not self.budget.host_bytes else []
        if found == [None] and is_in_vain():
            return []
        lost = (trial.seconds / kept.seconds for trial in found if trial is not None)
        if self.budget.host_bytes and min(lost, default=math.inf) > _ROOM.little_lost:
            found.append(both := solved(True))
            # the program counts recomputation as if each of several chunks took as long as the largest beside it, so that copies
            # seem to save more than they do
            counted_s = both.counted_s if both is not None and len(kept.group.chunks) == 1 else 0.0
            is_slow = not is_in_vain() if both is None else both.seconds > _ROOM.slack * (kept.seconds + counted_s)
            if is_slow and not is_large:
                found.append(solved(False))
        return [trial for trial in found if trial is not None]

    def _solve(self, cells: GroupCells, plain_s: float, host_bytes: float) -> Trial | None:
        """The fastest answer of the program whose prediction fits. plain_s: seconds of the group with everything kept."""
        group, tokens, tolerance_s = cells.group, max(cells.tokens), _ROOM.tolerance * plain_s

        def propose(room: _Room) -> Trial | None:
            choice = choose_jointly(cells.cells, cells.moments(room[0]), room[1], tolerance_s)
            return None if choice is None else self._short_trial(cells.under(choice.layers, choice.offload), choice.cost_s)

        def next_room(room: _Room, trial: Trial) -> _Room | None:
            device_bytes, host_bytes = room
            if trial.fits:
                # more room helps only if it can save recomputation
                most_over = max(over for place, over in enumerate(trial.over_bytes) if place not in cells.kept)
                if trial.counted_s <= 5 * tolerance_s or most_over > -_ROOM.worth * self.limit_bytes:
                    return None
                taken = [_ROOM.regain * over for over in trial.over_bytes]
            else:
                margin_bytes = _ROOM.margin * self.limit_bytes
                taken = [_ROOM.shrink * over + margin_bytes if over > 0 else 0.0 for over in trial.over_bytes]
                host_bytes -= max(0.0, trial.over_host_bytes)
            return tuple(num_bytes - less for num_bytes, less in zip(device_bytes, taken, strict=True)), host_bytes

        beside = [
            message_bytes(self.costs.model, stage, len(group.stages), tokens)
            + (self._byte_model.stage_waiting(stage, self.plan) if len(group.chunks) > 1 else 0)
            for stage in group.stages
        ]
        free_bytes = tuple(num_bytes - taken for num_bytes, taken in zip(self.room_bytes, beside, strict=True))
        return search_room(propose, next_room, (free_bytes, host_bytes), _ROOM.attempts)

    def _lean(self, kept: Trial) -> _Lean:
        """Versions of a group with every layer of every chunk recomputed on the stages that do not fit if everything is kept.

        Host bytes are divided in proportion to tokens times layers, relative to the most that are in flight at once.
        """
        group = kept.group
        tokens = self.predictions.seconds(group, self.costs).tokens

        def layer_tokens(action: Action) -> int:
            return tokens[action.chunk] * group.stages[action.stage].parts[action.part].num_layers

        def host_share(host_bytes: int, num_tokens: int, num_layers: int) -> int:
            return int(host_bytes * num_tokens * num_layers / in_flight()) if host_bytes else 0

        @cache
        def in_flight() -> int:
            return max(most_in_flight(stage.actions, layer_tokens) for stage in group.stages)

        @cache
        def lean(keeps_attention: bool, host_bytes: int) -> SequenceGroup:
            share = partial(host_share, host_bytes)
            found = lean_group(group, self.costs.model, self.budget.tile_tokens, share, keeps_attention)
            return with_stages_of(found, group, _fitting_places(kept))

        return lean

    def _nothing_fits(self, group: SequenceGroup) -> str:
        least = min(self._least, key=lambda trial: max(trial.over_bytes))
        over_bytes = self.over_bytes(least.group) if any(stage.activations for stage in least.group.stages) else least.over_bytes
        place = max(range(len(over_bytes)), key=lambda stage: over_bytes[stage])
        needed = self.limit_bytes + over_bytes[place]
        return (
            f"stage {place} of {len(group.stages)} needs {needed / 2**30:.2f} GiB on a rank for {len(group.chunks)} chunks of up "
            f"to {max(chunk.num_tokens for chunk in group.chunks)} tokens on {group.degree} rank(s) even if every layer is "
            f"recomputed, and {self.limit_bytes / 2**30:.2f} GiB are usable; use smaller chunks, more ranks per stage, shorter "
            f"sequences or more host memory (host_gib)"
        )


def _fitting_places(kept: Trial) -> frozenset[int]:
    """Stages of a group with everything kept on which it fits."""
    return frozenset(place for place, over in enumerate(kept.over_bytes) if over <= 0)

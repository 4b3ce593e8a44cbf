"""Plans of several pipeline stages: the micro-batches that are predicted fastest among those that fit.

    lengths -> layouts of a stage, sequences to their groups, chunks, schedules -> the fastest by simulation
            -> activation policies for what does not fit

Where nothing fits even so, long sequences get a micro-batch of their own, and the others another one after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.planner_config import PlannerConfig, check_degrees
from hf_longctx.plan.core.types import MicroBatch, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.pipeline.activations.fit_pipeline import make_room
from hf_longctx.plan.pipeline.candidates import Candidate, PipelineStep
from hf_longctx.plan.pipeline.lending import lent_plans
from hf_longctx.plan.pipeline.orders import Schedule, layer_ranges
from hf_longctx.plan.pipeline.stage_seconds import Parts
from hf_longctx.plan.prediction.evaluate import Evaluation
from hf_longctx.plan.prediction.planning import Pass, Planning


@dataclass(frozen=True, slots=True)
class SearchConstants:
    """Constants of the search among candidates.

    equal: candidates whose seconds are within this factor of the fastest count as equal. most_fits: how many of these the search
    tries to make fit, fastest first.
    """

    equal: float = 1.01
    most_fits: int = 2


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_SEARCH = SearchConstants()


def stage_parts(model: ModelSpec, num_stages: int, num_parts: int = 1) -> Parts:
    """Layers of every stage. The output head counts as the number of layers with as much work in matrix products.

    The result depends on the model alone.
    """
    head_layers = model.num_layers * model.head_share / (1 - model.head_share)
    return layer_ranges(model.num_layers, num_stages, num_parts, head_layers)


def check_stages(num_stages: int, costs: CostModel, config: PlannerConfig) -> None:
    """Raises ValueError unless the ranks divide evenly into `num_stages` stages and an allowed degree fits into a stage."""
    num_ranks = costs.cluster.num_ranks
    if num_stages < 1 or num_ranks % num_stages:
        fitting = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0 and count <= costs.model.num_layers]
        raise ValueError(f"{num_ranks} ranks cannot form {num_stages} stages of equal size; use one of {fitting}")
    per_stage = num_ranks // num_stages
    degrees = tuple(degree for degree in config.degrees if degree <= per_stage)
    if not degrees:
        raise ValueError(
            f"no degree of {config.degrees} fits into a stage of {per_stage} rank(s) ({num_ranks} ranks in {num_stages} "
            f"stages); allow smaller degrees or use fewer stages"
        )
    check_degrees(degrees, per_stage, costs.model.num_heads, costs.method)


@dataclass(frozen=True, slots=True)
class _Row:
    """A plan of some of the sequences in one micro-batch, and its predicted run."""

    plan: StepPlan
    run: Evaluation


class PipelineSearch:
    """Finds micro-batches that fit: tries candidates in the order of their seconds and makes room where they need it.

    The configuration gives the stages and their layers. fit: the pass that makes room in plans that do not fit as they are.
    Raises ValueError for ranks that cannot form the stages and for empty sequences.
    """

    def __init__(
        self, step: int, lengths: Sequence[int], planning: Planning, fit: Pass = make_room, schedule: Schedule = "elastic"
    ) -> None:
        costs, config = planning.costs, planning.config
        check_stages(len(config.stages), costs, config)
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"sequence {index} has {length} tokens; remove empty sequences before planning")
        self.step, self.planning, self.costs, self.config, self.fit = step, planning, costs, config, fit
        self.pipelines = PipelineStep(lengths, costs, config.stages, config, schedule)

    def plan(self) -> StepPlan:
        """Plans all sequences; raises ValueError for a sequence for which nothing fits."""
        rows = self.rows(tuple(range(len(self.pipelines.lengths))))
        return self.with_micro_batches([micro_batch for row in rows for micro_batch in row.plan.micro_batches])

    def lent_plans(self, plan: StepPlan) -> Iterator[StepPlan]:
        """Plans that fit and whose idle stages lend ranks, to compare with `plan`; none unless `lend_stages` is set."""
        if not self.config.lend_stages:
            return

        def micro_batches_of(members: tuple[int, ...]) -> list[MicroBatch]:
            return [micro_batch for row in self.rows(members) for micro_batch in row.plan.micro_batches]

        yield from lent_plans(plan, self.pipelines, self.costs, self._fits, micro_batches_of)

    def lower_bound_s(self) -> float:
        """Lower bound on the seconds of any plan: each sequence at the degree of fewest rank-seconds, spread over all ranks."""
        pipelines, costs = self.pipelines, self.costs
        tokens = pipelines.lengths.tolist()
        work = [degree * pipelines.costs.sequences_s(tokens, shape) for degree, shape in pipelines.shapes.items()]
        return float(np.min(work, axis=0).sum()) / costs.cluster.num_ranks + costs.coefficients.step_s

    def with_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> StepPlan:
        """Builds the step plan of these micro-batches."""
        return StepPlan(
            step=self.step,
            lengths=tuple(self.pipelines.lengths.tolist()),
            num_stages=self.pipelines.num_stages,
            ranks_per_stage=self.pipelines.ranks_per_stage,
            parameters=self.costs.parameters,
            micro_batches=tuple(micro_batches),
            shard_ranks=self.pipelines.costs.shards,
        )

    def rows(self, members: tuple[int, ...]) -> tuple[_Row, ...]:
        """Micro-batches for these sequences: one, or several in a row where one does not fit."""
        if (row := self._quickest(members)) is not None:
            return (row,)
        longest = max(members, key=lambda i: (self.pipelines.lengths[i], -i))
        if (row := self._leanest((longest,))) is None:
            raise ValueError(self._nothing_fits(longest))
        if len(members) > 1:
            row = self._leanest(members)
        return self._apart(members) if row is None else (row,)

    def _apart(self, members: tuple[int, ...]) -> tuple[_Row, ...]:
        """Micro-batches of sequences longer than half of the longest, then of the others; two halves if all are that long."""
        lengths = self.pipelines.lengths
        ordered = sorted(members, key=lambda i: (-lengths[i], i))
        num_long = sum(2 * int(lengths[i]) > lengths[ordered[0]] for i in ordered)
        num_long = num_long if num_long < len(ordered) else -(-num_long // 2)
        return (*self.rows(tuple(ordered[:num_long])), *self.rows(tuple(ordered[num_long:])))

    def _quickest(self, members: tuple[int, ...]) -> _Row | None:
        """Finds the fastest single micro-batch of these sequences that fits; None where none does."""
        candidates = self.pipelines.candidates(members)
        rows = []
        for candidate in candidates:
            if candidate.seconds > _SEARCH.equal * candidates[0].seconds:
                break
            rows.append(self._row(candidate))
            # making room takes the planner longest, so a candidate that fits as it is beats one that is only slightly faster
            if self._fits(rows[-1].plan, rows[-1].run):
                return rows[-1]
        quickest = sorted(rows, key=lambda row: row.run.step_s)[: _SEARCH.most_fits]
        best = next(filter(None, map(self._made_to_fit, quickest)), None)
        for candidate in candidates[len(rows) :]:
            if best is not None and candidate.seconds + self.costs.coefficients.step_s >= best.run.step_s:
                break
            row = self._row(candidate)
            fitting = row if self._fits(row.plan, row.run) else self._made_to_fit(row) if best is None else None
            if fitting is not None and (best is None or fitting.run.step_s < best.run.step_s):
                best = fitting
        return best

    def _leanest(self, members: tuple[int, ...]) -> _Row | None:
        """Finds a micro-batch of the largest groups with as few slices as fit; None where even the most slices do not fit."""
        rows = [self._row(candidate) for candidate in self.pipelines.lean_candidates(members)]
        return next((row for row in rows if self._fits(row.plan, row.run)), None) or next(
            filter(None, map(self._made_to_fit, rows)), None
        )

    def _row(self, candidate: Candidate) -> _Row:
        plan = self.with_micro_batches([self.pipelines.micro_batch(candidate)])
        return _Row(plan, self.planning.predict(plan))

    def _made_to_fit(self, row: _Row) -> _Row | None:
        """Makes room in a plan; None where it does not fit even so, or without a budget."""
        if self.config.activations is None:
            return None
        try:
            plan = self.fit(row.plan, self.planning)
        except ValueError:
            return None
        made = _Row(plan, self.planning.predict(plan))
        return made if self._fits(made.plan, made.run) else None

    def _fits(self, plan: StepPlan, run: Evaluation) -> bool:
        """Whether every rank stays within the budget in bytes.

        Without a budget, tokens times layers of a rank are limited to `tokens_per_rank` times the model's layers.
        """
        stages = plan.micro_batches[0].groups[0].stages
        budget = self.config.activations
        if budget is not None:
            return max(run.peak_bytes) <= self.planning.limit_bytes(plan) and max(run.host_bytes) <= budget.host_bytes
        most = self.config.tokens_per_rank * self.costs.model.num_layers
        return all(rank.peak_tokens * stages[rank.rank // plan.ranks_per_stage].num_layers <= most for rank in run.ranks)

    def _nothing_fits(self, sequence: int) -> str:
        budget = self.config.activations
        room = f"{budget.device_bytes / 2**30:.3g} GiB beside the model" if budget else f"{self.config.tokens_per_rank} tokens"
        return (
            f"sequence {sequence} has {self.pipelines.lengths[sequence]} tokens and fits no pipeline of "
            f"{self.pipelines.num_stages} stages of {self.pipelines.ranks_per_stage} rank(s) with {room} on each; allow "
            f"larger degrees, more tokens_per_rank, more room or recomputation (activations)"
        )

"""Lending in a plan: ranks of stages that would idle take part in the first and last slices of another stage.

Says which stages run an action, in which order, and which tokens of a slice each rank holds; checks what plans with lenders must
keep to (SPPO's multiplexed sequence partitioning, arXiv 2503.10377, section 6). Lending has three more files: what it takes
(`plan/predict/lending.py`), where it pays (`plan/pipeline/lending.py`), and how it runs (`runtime/execution/lending.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hf_longctx.plan.core.sharding import Piece, block_pieces, even_shards
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, RankPlan, SequenceGroup, Span, StepPlan


def lent_pieces(num_tokens: int, num_positions: int, num_stages: int) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
    """Returns pieces by `[stage][position]` of a slice that several stages run: each position's shard, cut in zigzag.

    `start` counts from the start of the slice. Raises ValueError if a rank would get no token.
    """
    shards = even_shards(num_tokens, num_positions)
    if min(shards) < num_stages:
        raise ValueError(
            f"a slice of {num_tokens} tokens cannot be run by {num_stages} stages of {num_positions} rank(s); give it at "
            f"least {num_stages * num_positions} tokens, or lend it no ranks"
        )
    by_position = []
    for first, count in zip((0, *accumulate(shards)), shards, strict=False):
        blocks = block_pieces(Chunk(0, (Span(0, 0, count),)), GroupShape(num_stages))
        by_position.append(
            [tuple(replace(piece, start=first + piece.start, stop=first + piece.stop) for piece in block) for block in blocks]
        )
    return tuple(zip(*by_position, strict=True))


def is_lent(group: SequenceGroup) -> bool:
    """Whether ranks of other stages are lent to any chunk of the group."""
    return any(action.lenders for stage in group.stages for action in stage.actions)


def running_stages(action: Action) -> tuple[int, ...]:
    """Returns the stages whose ranks run an action together, in order."""
    return tuple(sorted({action.stage, *(stage for stage, _ in action.lenders)}))


def lent_order(group: SequenceGroup) -> tuple[tuple[Action, ...], ...]:
    """Returns forwards and backwards of every stage's ranks in order: their own and those to which they are lent.

    Slices with lenders from later stages come first, then slices without lenders, then those with lenders from earlier stages;
    the backwards run in reverse.
    """

    def order(action: Action) -> tuple[int, int, int]:
        phase = 1 if not action.lenders else 0 if action.lenders[0][0] > action.stage else 2
        return phase, action.stage, action.chunk

    actions = sorted((action for stage in group.stages for action in stage.actions), key=order)
    passes = [action for action in actions if action.kind == "F"] + [action for action in actions[::-1] if action.kind == "B"]
    return tuple(tuple(action for action in passes if stage.stage in running_stages(action)) for stage in group.stages)


def lender_fault(plan: StepPlan, action: Action) -> str:
    """Describe what is wrong with the lenders of an action; empty if nothing is."""
    if action.kind not in ("F", "B"):
        return "has lenders, but only F and B can be lent ranks"
    if len(set(action.lenders)) != len(action.lenders):
        return "names a lender twice"
    for stage, position in action.lenders:
        if stage == action.stage or not 0 <= stage < plan.num_stages:
            return f"names lender stage {stage}, which must be another stage of the plan"
        if not 0 <= position < plan.ranks_per_stage:
            return f"names lender position {position}, but a stage has {plan.ranks_per_stage}"
    return ""


def without_lending(group: SequenceGroup) -> SequenceGroup:
    """Returns the group with every stage running its own chunks alone."""
    stages = tuple(
        replace(stage, actions=tuple(replace(action, lenders=()) for action in stage.actions)) for stage in group.stages
    )
    return replace(group, stages=stages)


@dataclass(frozen=True, slots=True)
class Phases:
    """Stages that run a stage's chunks: `front` before chunk `first_alone`, `back` from `first_back` on, else its own."""

    front: tuple[int, ...]
    first_alone: int
    back: tuple[int, ...]
    first_back: int

    @classmethod
    def of(cls, actions: Sequence[Action], stage: int, num_chunks: int) -> Phases:
        """Reads the phases of a stage from its actions.

        Raises ValueError unless later stages are lent to the first chunks, earlier stages to the last, none to those in between,
        and the same stages run forward and backward of a chunk.
        """
        running = {(action.kind, action.chunk): running_stages(action) for action in actions if action.kind in ("F", "B")}
        forward = [running["F", chunk] for chunk in range(num_chunks)]
        front, back = forward[0], forward[-1]
        first_alone = next((chunk for chunk, stages in enumerate(forward) if stages != front), num_chunks)
        if front[-1] == stage:
            front, first_alone = (stage,), 0
        first_back = num_chunks - next((n for n, stages in enumerate(reversed(forward)) if stages != back), num_chunks)
        if back[0] == stage:
            back, first_back = (stage,), num_chunks
        phases = cls(front, first_alone, back, first_back)
        is_regular = phases.front[0] == phases.back[-1] == stage and first_alone <= first_back
        if not is_regular or any(running[kind, chunk] != phases.running(chunk, stage) for kind, chunk in running):
            found = {f"{chunk}": list(stages) for chunk, stages in enumerate(forward)}
            raise ValueError(
                f"the chunks of stage {stage} are run by stages {found}; only later stages can be lent to the first chunks, and "
                f"only earlier ones to the last chunks, the same ones forward and backward; let the planner choose them"
            )
        return phases

    def phase(self, chunk: int) -> int:
        """Returns 0 for a chunk at the front with lent ranks, 2 for one at the back, 1 in between."""
        return (chunk >= self.first_alone) + (chunk >= self.first_back)

    def running(self, chunk: int, stage: int) -> tuple[int, ...]:
        """Returns the stages that run `chunk` of `stage`."""
        return (self.front, (stage,), self.back)[self.phase(chunk)]


def check_lending(plan: RankPlan, group: SequenceGroup, has_all_stages: bool = True) -> None:
    """Raises ValueError naming the first setting of a group with lent ranks that cannot be executed.

    has_all_stages: whether every rank has the weights of all stages.
    """
    if not has_all_stages:
        raise ValueError(
            "the plan lends ranks to other stages, so every rank needs the weights of all stages; give the executor "
            "`all_stages`, or plan with lend_stages=False"
        )
    if plan.parameters != "replicated":
        raise ValueError(
            f"the plan lends ranks, so every rank needs all weights, but parameters={plan.parameters!r}; use 'replicated'"
        )
    if any(stage.activations for stage in group.stages):
        raise ValueError(
            "the plan lends ranks and has activation policies (recompute, offload, tiles), which cannot be executed together; "
            "plan without one of the two"
        )
    if group.shape.num_blocks != 1 or any(len(stage.layer_ranges) != 1 for stage in group.stages):
        raise ValueError(
            f"a {group.method} group with {len(group.stages[0].layer_ranges)} layer range(s) per stage lends ranks, but only "
            f"local and ulysses groups with one layer range per stage can; plan such groups, or set lend_stages=False"
        )
    if any(len(chunk.spans) != 1 or chunk.spans[0].sequence != group.chunks[0].spans[0].sequence for chunk in group.chunks):
        raise ValueError(
            "a group lends ranks, but its chunks hold several sequences; ranks can be lent only to slices of one sequence, so "
            "give the sequence a group of its own"
        )
    phases = [Phases.of(stage.actions, stage.stage, len(group.chunks)) for stage in group.stages]
    for chunk in range(len(group.chunks)):
        found = [stage_phases.phase(chunk) for stage_phases in phases]
        if found != sorted(found):
            raise ValueError(
                f"the stages that run chunk {chunk} would wait for each other forever: for some it is one of their first chunks, "
                f"after stages for which it is one of their last; let the planner choose to which chunks stages are lent"
            )
    for row, stage in zip(lent_order(group), group.stages, strict=True):
        own = [action for action in row if action.stage == stage.stage]
        planned = [action for action in stage.actions if action.kind in ("F", "B")]
        if own != planned:
            raise ValueError(
                f"stage {stage.stage} is planned to run {' '.join(map(str, planned))}; with lent ranks all forwards must come "
                f"first, then all backwards: {' '.join(map(str, own))}"
            )
        for action in planned:
            positions = sorted(position for _, position in action.lenders)
            if positions != sorted(group.positions * (len(running_stages(action)) - 1)):
                raise ValueError(f"action {action} must be run at the group's positions {group.positions} of every stage")
            lent_pieces(group.chunks[action.chunk].num_tokens, group.degree, len(running_stages(action)))

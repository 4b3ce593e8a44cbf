"""Lends ranks of idle stages to the slices with which a pipeline fills and drains (SPPO, arXiv 2503.10377, section 6).

A sequence in N slices on P stages leaves stages idle at both ends: while stage i runs its first slices, the later stages wait;
while it runs its last slices, the earlier stages have finished. So slices 0 .. P-2-i of stage i run on the ranks of stages
i .. P-1, and slices N-i .. N-1 on those of stages 0 .. i; the N-P+1 slices in between run on the stage's own ranks. Backward
finds the same stages idle in reverse order, so every slice has the same ranks there. The paper's definition counts one slice
more than its table 3; this module follows the table.

Every rank of a stage helps with the first slices of the earlier stages, then runs the first slices of its own stage, its steady
slices and its own last slices, and then helps with the last slices of the later stages; backward runs in exactly the reverse
order. This order is ours (the paper gives none) and cannot deadlock: no action waits for a rank that waits for it. The forward
of 8 equal slices on 4 stages takes 8.33 slots instead of 11; 8 slots are the work itself.

The lent ranks need a stage's weights and, for the last slices, all keys and values of the sequence; the paper does not say how
they get there. The table has the time that lending saves for a 7B model on 4 stages of 8 ranks, simulated
(`recipes/bench/papers/lending.py`) with none of these transfers overlapped with computation, at 25 GB/s between stages (a node's
network) and at 200 GB/s (inside a node):

    tokens, slices    nothing moves    25 GB/s    200 GB/s
    128K, 8           24.4 %           -21.4 %    18.7 %
    128K, 32          7.7 %            -45.2 %    1.1 %
    512K, 8           24.3 %           18.0 %     23.5 %
    512K, 32          7.6 %            0.6 %      6.8 %

So lending pays for long sequences in few slices, or where stages share a node. The runtime executes it where every rank has all
weights (`runtime/execution/lent_round.py`), and `lending.py` decides for which groups of a plan.
"""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.types import Action, SequenceGroup
from hf_longctx.plan.pipeline.orders import families


def lent_group(group: SequenceGroup, front: bool = True, back: bool = True) -> SequenceGroup:
    """Adds `lenders` to every F and B for which stages idle, at the group's positions; messages stay as they are.

    front, back: whether idle stages are lent to the first slices, and whether to the last ones. Raises ValueError unless the
    chunks are one family of at least P - 1 and every stage has one part.
    """
    num_stages, num_chunks = len(group.stages), len(group.chunks)
    num_families = len(families(group.chunks))
    if num_families != 1 or num_chunks < num_stages - 1:
        raise ValueError(
            f"{num_chunks} chunks of {num_families} sequence(s) on {num_stages} stages cannot lend ranks; give one sequence "
            f"a group of its own, in at least {num_stages - 1} slices"
        )
    if any(len(stage.parts) != 1 for stage in group.stages):
        raise ValueError("stages of several parts cannot lend ranks; use a schedule other than 'interleaved'")
    return replace(
        group,
        stages=tuple(
            replace(stage, actions=tuple(_with_lenders(action, group, front, back) for action in stage.actions))
            for stage in group.stages
        ),
    )


def stages_of_slice(stage: int, chunk: int, num_stages: int, num_chunks: int) -> range:
    """Stages whose ranks run `chunk` of `stage`; in the steady phase only the stage itself."""
    if chunk <= num_stages - 2 - stage:
        return range(stage, num_stages)
    if chunk >= num_chunks - stage:
        return range(stage + 1)
    return range(stage, stage + 1)


def _with_lenders(action: Action, group: SequenceGroup, front: bool, back: bool) -> Action:
    if action.kind not in ("F", "B"):
        return action
    stages = stages_of_slice(action.stage, action.chunk, len(group.stages), len(group.chunks))
    lenders = [stage for stage in stages if (stage > action.stage and front) or (stage < action.stage and back)]
    lent = tuple((stage, position) for stage in lenders for position in group.positions)
    return replace(action, lenders=lent)

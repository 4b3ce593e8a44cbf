"""Predicts a pipeline whose idle stages lend ranks: when every action runs, and how many bytes the ranks of every stage hold.

An action with lenders occupies all of its stages at once, in the order of `lent_order`, which is also the runtime's. Its
tokens are split evenly among the ranks, but every rank spends all of its fixed seconds. No communication overlaps with
computation: every rank sends its keys and values to the ranks of the other stages (in backward, its part of their gradients, in
at least fp32). Lent ranks get the keys and values of earlier tokens with the first chunk for which they lack them. The stage's
own ranks send out and collect hidden states.

Ranks of idle stages are lent to the slices with which a pipeline fills and drains (SPPO, arXiv 2503.10377, section 6). A sequence
in N slices on P stages leaves stages idle at both ends: while stage i runs its first slices, the later stages wait;
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

So lending pays for long sequences in few slices, or if stages share a node. The runtime executes it if every rank has all weights
(`runtime/execution/lending.py`), and `plan/pipeline/lending.py` chooses the groups of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hf_longctx.plan.core.lending import lent_order, running_stages
from hf_longctx.plan.core.orders import families
from hf_longctx.plan.core.sharding import fullest_share, head_shares
from hf_longctx.plan.core.types import Action, GroupShape, SequenceGroup, StepPlan
from hf_longctx.plan.core.validate import PlanError
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.stage import ChunkBytes, chunk_load, message_bytes
from hf_longctx.plan.model.layers import ATTENTION
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.event_loop import Times
from hf_longctx.plan.predict.pipeline_run import PredictionCache, StageRun, StageSeconds, check_action, near_ranks


def run_lent(
    order: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    hop_s: Callable[[Action], float],
    start_s: Sequence[float] = (),
) -> tuple[Times, ...]:
    """Returns (start, stop) of every F and B in every stage's row; an action that is in several rows runs in all at once.

    hop_s: seconds from the end of an action to the arrival of its result at the next stage. Raises PlanError when stages wait
    for each other.
    """
    clocks, rows = list(start_s) or [0.0] * len(order), [list(reversed(row)) for row in order]
    times: list[list[tuple[float, float]]] = [[] for _ in order]
    arrived_s: dict[tuple[str, int, int], float] = {}
    waiting = set(range(len(order)))
    while waiting:
        row = rows[waiting.pop()]
        while row:
            action = row[-1]
            stages = running_stages(action)
            source = action.stage + (-1 if action.kind == "F" else 1)
            came_s = arrived_s.get((action.kind, source, action.chunk), None if 0 <= source < len(order) else 0.0)
            if came_s is None or any(rows[stage][-1:] != [action] for stage in stages):
                break
            begin_s = max(came_s, *(clocks[stage] for stage in stages))
            stop_s = begin_s + seconds(action)
            arrived_s[action.kind, action.stage, action.chunk] = stop_s + hop_s(action)
            for stage in stages:
                clocks[stage] = stop_s
                times[stage].append((begin_s, stop_s))
                rows[stage].pop()
            # others may have waited for this result or for these ranks
            waiting |= {stage for stage, left in enumerate(rows) if left}
    if any(rows):
        heads = ", ".join(str(row[-1]) for row in rows if row)
        raise PlanError(f"deadlock: {heads} wait for ranks that wait for them")
    return tuple(map(tuple, times))


def run_lent_pipeline(
    plan: StepPlan, group: SequenceGroup, costs: CostModel, start_s: Sequence[float] = (), known: PredictionCache | None = None
) -> tuple[StageRun, ...]:
    """Predicts a group with lent stages; a stage's run includes the actions of other stages to which it is lent.

    Raises ValueError for interleaved layer ranges, activation policies, packs and hybrids.
    """
    for stage in group.stages:
        for action in stage.actions:
            check_action(replace(action, lenders=()), stage)
    if any(len(stage.layer_ranges) != 1 or stage.activations for stage in group.stages):
        raise ValueError("lent stages cannot be evaluated together with interleaving or activation policies; leave one out")
    if any(len(chunk.spans) != 1 for chunk in group.chunks):
        raise ValueError("lent stages cannot be evaluated for packs, hybrids and dummies; give one sequence a group of its own")
    known = PredictionCache() if known is None else known
    seconds, byte_model = _LentSeconds(plan, group, costs, known), known.byte_model(costs.model)
    order = lent_order(group)
    runs = []
    for stage, row, times in zip(group.stages, order, run_lent(order, seconds.of, seconds.hop_s, start_s), strict=True):
        peak_bytes = _peak_bytes(plan, group, byte_model, stage.stage, row)
        # all forwards come before all backwards
        most = sum(seconds.tokens(action) for action in row if action.kind == "F")
        runs.append(StageRun(row, times, tuple(map(seconds.exchange_s, row)), peak_bytes, 0, most))
    return tuple(runs)


class _LentSeconds:
    """Seconds of a group's actions, with and without lenders."""

    def __init__(self, plan: StepPlan, group: SequenceGroup, costs: CostModel, known: PredictionCache) -> None:
        self.plan, self.group, self.costs = plan, group, costs
        self.alone = StageSeconds(plan, group, costs, known)
        self.first_back = [
            min((a.chunk for a in stage.actions if a.lenders and a.lenders[0][0] < stage.stage), default=len(group.chunks))
            for stage in group.stages
        ]

    def tokens(self, action: Action) -> int:
        """Tokens that one rank computes in an action."""
        return -(-self.alone.tokens[action.chunk] // len(running_stages(action)))

    def hop_s(self, action: Action) -> float:
        return self.alone.hop_s(action)

    def of(self, action: Action) -> float:
        if not action.lenders:
            return self.alone.of(action)
        group, costs, num_stages = self.group, self.costs, len(running_stages(action))
        chunk, is_backward = group.chunks[action.chunk], action.kind == "B"
        degree = group.degree * num_stages
        # seconds of a pass over the whole model include those of the head, which only the last stage has
        pairs = costs.attention_pairs(group.stages[action.stage].layer_ranges)
        whole_s = costs.local_s(chunk, GroupShape(degree, degree), is_backward, pairs)
        token_s = (costs.coefficients.backward if is_backward else costs.coefficients.forward).token_s
        head_s = token_s * costs.head_share(is_backward) * chunk.num_tokens / degree
        body_s = (whole_s - head_s) * group.stages[action.stage].num_layers / costs.model.num_layers
        has_head = action.stage == len(group.stages) - 1
        return body_s + (head_s if has_head else 0.0) + self.exchange_s(action)

    def exchange_s(self, action: Action) -> float:
        """Seconds of an action that are communication between its ranks."""
        if not action.lenders:
            return self.alone.exchange_s(action)
        group, costs, stages = self.group, self.costs, running_stages(action)
        num_layers, is_backward = group.stages[action.stage].num_layers, action.kind == "B"
        per_node, per_stage = costs.cluster.ranks_per_node, self.plan.ranks_per_stage
        ranks = [stage * per_stage + group.positions[0] for stage in stages]
        coefficients = costs.coefficients.backward if is_backward else costs.coefficients.forward
        leaves = ranks[0] // per_node != ranks[-1] // per_node
        byte_s = coefficients.network_byte_s if leaves else coefficients.link_byte_s
        moves_front = action.chunk == self.first_back[action.stage]
        moved_s = byte_s * self.moved_bytes(action) + coefficients.message_s * (num_layers * (1 + moves_front) + 2)
        near = near_ranks([stages[0] * per_stage + position for position in group.positions], per_node)
        fixed_s, one_s = costs.exchange_line(group.shape, is_backward, near)
        inside_s = fixed_s + one_s * max(group.chunks[action.chunk].num_tokens / len(stages), group.degree)
        return inside_s * num_layers / costs.model.num_layers + moved_s

    def moved_bytes(self, action: Action) -> float:
        """Bytes that a rank of the action's own stage sends to ranks of other stages or receives from them."""
        group, model, chunk = self.group, self.costs.model, self.group.chunks[action.chunk]
        is_backward = action.kind == "B"
        others = 1 - 1 / len(running_stages(action))
        front = chunk.prefix_tokens if action.chunk == self.first_back[action.stage] else 0
        value_bytes = max(4, model.bytes_per_element) if is_backward else model.bytes_per_element
        num_tokens = (others * chunk.num_tokens + front) / group.shape.num_blocks
        kv_bytes = _kv_elements(model, group, action.stage) * num_tokens * value_bytes
        # hidden states are not handed out at the first stage nor collected at the last one
        num_ways = (action.stage > 0) + (action.stage < len(group.stages) - 1)
        return kv_bytes + num_ways * others * self.alone.tokens[action.chunk] * model.hidden_size * model.bytes_per_element


def _peak_bytes(plan: StepPlan, group: SequenceGroup, byte_model: ByteModel, stage: int, row: Sequence[Action]) -> int:
    """Upper bound on the bytes of a rank of `stage`: bytes held when all forwards are done, plus the largest workspace.

    Every rank holds the states of all stages. For each stage that a rank runs chunks of, it counts keys and values of all tokens
    up to the last of these chunks, and their gradients.
    """
    model = byte_model.model
    total = byte_model.states(plan.parameters, plan.block_ranks)
    most_tokens = max(fullest_share(chunk, group.shape) for chunk in group.chunks)
    total += message_bytes(model, group.stages[stage], len(group.stages), most_tokens)
    value_bytes = model.bytes_per_element + max(4, model.bytes_per_element)
    stops: dict[int, int] = {}
    workspace = 0
    for action in row:
        if action.kind == "F":
            held = _chunk_bytes(group, byte_model, action)
            total += held.device
            workspace = max(workspace, held.workspace)
            stops[action.stage] = max(stops.get(action.stage, 0), group.chunks[action.chunk].spans[0].stop)
    for served, stop in stops.items():
        total += _kv_elements(model, group, served) * value_bytes * stop
    return total + workspace


def _kv_elements(model: ModelSpec, group: SequenceGroup, stage: int) -> int:
    """Elements of a token's keys and values in all layers of a stage, on the first rank of the group."""
    found = 0
    for layer_range in group.stages[stage].layer_ranges:
        for kind in model.layer_kinds(layer_range) or (ATTENTION,) * layer_range.num_layers:
            own = model.of_kind(kind)
            found += head_shares(own.num_heads, own.num_kv_heads, group.shape.ulysses)[0].num_kv * own.kv_head_size
    return found


def _chunk_bytes(group: SequenceGroup, byte_model: ByteModel, action: Action) -> ChunkBytes:
    """Bytes that a rank holds for its share of an action."""
    num_stages, num_layers = len(running_stages(action)), group.stages[action.stage].num_layers
    load = chunk_load(group, group.chunks[action.chunk], 0, Load(0, (), num_layers))
    tokens = -(-load.num_tokens // num_stages)
    load = replace(
        load,
        num_tokens=tokens,
        documents=(tokens,),
        sliced_tokens=min(load.sliced_tokens, tokens),
        is_shared=group.degree * num_stages > 1,
        has_head=action.stage == len(group.stages) - 1,
        keeps_gradients=False,
    )
    return byte_model.chunk(load)


def lent_group(group: SequenceGroup, front: bool = True, back: bool = True) -> SequenceGroup:
    """Adds `lenders` to every F and B during which stages idle, at the group's positions; messages stay as they are.

    front, back: whether idle stages are lent to the first slices, and whether to the last ones. Raises ValueError unless the
    chunks are one family of at least P - 1 and every stage has one layer range.
    """
    num_stages, num_chunks = len(group.stages), len(group.chunks)
    num_families = len(families(group.chunks))
    if num_families != 1 or num_chunks < num_stages - 1:
        raise ValueError(
            f"{num_chunks} chunks of {num_families} sequence(s) on {num_stages} stages cannot lend ranks; give one sequence "
            f"a group of its own, in at least {num_stages - 1} slices"
        )
    if any(len(stage.layer_ranges) != 1 for stage in group.stages):
        raise ValueError("stages of several layer ranges cannot lend ranks; use a schedule other than 'interleaved'")
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

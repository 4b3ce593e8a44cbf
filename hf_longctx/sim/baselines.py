"""Makes layouts of other systems for the same sequences, with the same costs and memory as our own.

Forecasts and benchmarks compare them with our plans:

    static              best-fit packing into groups of one degree, the same for the whole run, which must hold the run's context
                        limit (DeepSpeed-Ulysses)
    BatchAda            static with the best degree for each batch (named in FlexSP, arXiv 2412.01523, section 6.1)
    Megatron hybrid-CP  the greedy method of Megatron-Core's `BalancedCPScheduler`
    FCP                 the two-stage planner of arXiv 2602.21788
    FlexSP              groups of different degrees (arXiv 2412.01523): powers of two, micro-batches of equal tokens, by our
                        greedy search in place of its integer program

Each keeps everything or recomputes layers, depending on costs and capacity of the problem. If an original would exceed memory or
leaves a choice open, the version here makes the choice that favours it, as noted in its docstring.

Activation checkpointing of other systems is one setting for a whole run, the same in every layer:

    everything kept           no checkpointing
    selective checkpointing   layer inputs and attention's outputs are kept, everything else is run again (`selective` of TRL,
                              "selective" of NeMo and axolotl)
    full checkpointing        layer inputs alone are kept (`gradient_checkpointing=True`)

Seconds and bytes come from the models for our own plans: a backward runs the layers' forward again, without attention if its
outputs are kept, and without the exchanges that a replay repeats. The loss runs in tiles (`LEAST_TILE_TOKENS`) if that takes
fewer bytes, since users of these systems would use Liger's fused loss or cut cross entropy; norms and MLPs run whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np

from hf_longctx.plan.core.types import (
    LEAST_TILE_TOKENS,
    ActivationPolicy,
    Chunk,
    FloatArray,
    GroupShape,
    LayerPolicy,
    SequenceGroup,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.cuts import micro_batch_ends
from hf_longctx.plan.groups.greedy import plan_greedy
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.stage import chunk_load
from hf_longctx.plan.model.attention_pairs import AttentionPairs

# share of a group's tokens that best-fit packing fills in one static layout, and shares to try for the best one
_FILL = 0.9
_FILLS = (1.0, 0.9, 0.5, 0.25)
# Megatron's limits: imbalance of a micro-batch as a share, and work of a queue as a multiple of an even share
_BALANCE_SLACK = 0.05
_QUEUE_SLACK = 1.1
# numbers of micro-batches that FCP tries, starting at the fewest that fit
_FCP_TRIALS = 5
# numbers of micro-batches that FlexSP tries
_FLEXSP_TRIALS = 5

BASELINES = ("static", "BatchAda", "Megatron hybrid-CP", "FCP", "FlexSP")


@dataclass(frozen=True, slots=True)
class Baseline:
    """One layout of a step and its seconds. If it cannot run: empty layout, infinite seconds, and the reason as `detail`."""

    name: str
    layout: tuple[tuple[Group, ...], ...]
    step_s: float
    detail: str

    @property
    def can_run(self) -> bool:
        return math.isfinite(self.step_s)


def all_baselines(problem: GroupingProblem, limit: int, names: Sequence[str] = BASELINES) -> tuple[Baseline, ...]:
    """Computes the named baselines for the sequences of one step; raises ValueError for a sequence above `limit`.

    limit: most tokens of a sequence in the whole run.
    """
    if problem.lengths and max(problem.lengths) > limit:
        raise ValueError(f"a sequence has {max(problem.lengths)} tokens, but the limit is {limit}; raise it or drop the sequence")
    found = []
    for name in names:
        try:
            layout = baseline_layout(name, problem, limit)
        except CannotRunError as error:
            found.append(Baseline(name, (), math.inf, f"{name} cannot run: {error}"))
            continue
        frozen = tuple(tuple(groups) for groups in layout)
        found.append(Baseline(name, frozen, problem.step_seconds(layout), _detail(layout)))
    return tuple(found)


def baseline_layout(name: str, problem: GroupingProblem, limit: int) -> Layout:
    """Makes the layout of one baseline, for any order of the sequences; raises CannotRunError if it has none."""
    if not problem.lengths:
        return []
    ordered, order = problem.longest_first()
    makers: dict[str, Callable[[], Layout]] = {
        "static": lambda: best_static_layout(ordered, limit),
        "BatchAda": lambda: best_static_layout(ordered, max(ordered.lengths)),
        "Megatron hybrid-CP": lambda: hybrid_cp_layout(ordered),
        "FCP": lambda: fcp_layout(ordered),
        "FlexSP": lambda: flexsp_layout(ordered),
    }
    return [[(degree, tuple(order[i] for i in some)) for degree, some in groups] for groups in makers[name]()]


class CannotRunError(ValueError):
    """Raised if a baseline has no layout for a problem, because no allowed degree holds the longest sequence."""


def _detail(layout: Layout) -> str:
    """Describes a layout, for example as "2 micro-batches: <8x2>, <4x3,2x2>"."""
    described = []
    for groups in layout:
        degrees = [degree for degree, members in groups if members]
        described.append(",".join(f"{degree}x{degrees.count(degree)}" for degree in sorted(set(degrees), reverse=True)))
    return f"{len(layout)} micro-batches: {', '.join(f'<{text}>' for text in described)}"


def best_static_layout(problem: GroupingProblem, limit: int) -> Layout:
    """Returns the fastest layout of `static_of_degree` over all degrees that divide the ranks and hold `limit` tokens.

    Raises CannotRunError if there is no such degree.
    """
    degrees = static_degrees(problem, limit)
    if not degrees:
        raise CannotRunError(
            f"no degree of {problem.degrees} that divides {problem.num_ranks} ranks holds {limit} tokens at {problem.capacity} "
            f"tokens per rank; raise the largest degree or tokens_per_rank"
        )
    return min((static_of_degree(problem, degree) for degree in degrees), key=problem.step_seconds)


def static_degrees(problem: GroupingProblem, limit: int) -> list[int]:
    """Returns degrees that divide the ranks and hold `limit` tokens."""
    return [d for d in problem.degrees if problem.num_ranks % d == 0 and limit <= d * problem.capacity]


def static_of_degree(problem: GroupingProblem, degree: int) -> Layout:
    """Returns the fastest `static_layout` of one degree over several sizes of micro-batches."""
    longest, room = max(problem.lengths), degree * problem.capacity
    # a pack holds at least the longest sequence, so smaller fills make equal layouts
    fills = {max(longest, int(fill * room)): fill for fill in reversed(_FILLS)}
    return min((static_layout(problem, degree, fill) for fill in fills.values()), key=problem.step_seconds)


def static_layout(problem: GroupingProblem, degree: int, fill: float = _FILL) -> Layout:
    """Makes groups of one degree: best-fit-decreasing packs of at most `fill` of a group's tokens, as many at once as fit.

    If the longest sequence has more tokens than that, packs may be as long as it. The last micro-batch may have too few packs, so
    its sequences are also dealt again, longest first, each to the group that finishes first; the faster of both is kept.
    Raises CannotRunError if the longest sequence fits no group.
    """
    longest, room = max(problem.lengths), degree * problem.capacity
    if longest > room:
        raise CannotRunError(f"a sequence of {longest} tokens does not fit {degree} ranks of {problem.capacity} tokens each")
    packs = best_fit(problem.lengths, max(longest, int(fill * room)))
    num_groups = problem.num_ranks // degree
    layout: Layout = [
        [(degree, tuple(pack)) for pack in packs[first : first + num_groups]] for first in range(0, len(packs), num_groups)
    ]
    dealt = _deal_out(problem, degree, sorted(i for _, pack in layout[-1] for i in pack))
    return [*layout[:-1], min(layout[-1], dealt, key=problem.micro_batch_seconds) if dealt else layout[-1]]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs sequence numbers, longest first, each into the fullest pack with room; returns packs in order of opening."""
    packs: list[list[int]] = []
    # (tokens left, pack), ascending
    left: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(left, (lengths[i], 0))
        if place < len(left):
            room_left, p = left.pop(place)
            packs[p].append(i)
            insort(left, (room_left - lengths[i], p))
        else:
            packs.append([i])
            insort(left, (room - lengths[i], len(packs) - 1))
    return packs


def _deal_out(problem: GroupingProblem, degree: int, members: Sequence[int]) -> list[Group]:
    """Makes one micro-batch of equal groups: each sequence, longest first, joins the first group to end; empty if one cannot."""
    seconds = problem.seconds[problem.degrees.index(degree)]
    num_groups = problem.num_ranks // degree
    loads, left = [0.0] * num_groups, [degree * problem.capacity] * num_groups
    chosen: list[list[int]] = [[] for _ in range(num_groups)]
    for i in sorted(members, key=lambda i: -problem.lengths[i]):
        fitting = [(loads[g], g) for g in range(num_groups) if left[g] >= problem.lengths[i]]
        if not fitting:
            return []
        g = min(fitting)[1]
        chosen[g].append(i)
        loads[g] += float(seconds[i])
        left[g] -= problem.lengths[i]
    return [(degree, tuple(some)) for some in chosen if some]


@dataclass(slots=True)
class _Team:
    """Ranks that share sequences in one micro-batch of Megatron's method, which counts work in tokens^2 per rank."""

    degree: int
    work: float = 0.0
    tokens: int = 0
    members: list[int] = field(default_factory=list)


def hybrid_cp_layout(problem: GroupingProblem) -> Layout:
    """Runs Megatron-Core's hybrid context parallelism (`BalancedCPScheduler`), with one micro-batch for each of its rounds.

    A sequence runs on the smallest power of two of ranks that holds it, and its work is tokens^2 per rank. Megatron runs the
    sequences of a team one by one and does not count their tokens. Here they are packed, which saves fixed costs, and a team
    takes no more tokens than its memory holds. Raises CannotRunError if a sequence needs a degree that is not allowed.
    """
    powers = [degree for degree in problem.degrees if degree & (degree - 1) == 0 and degree <= problem.num_ranks]
    needed = []
    for length in problem.lengths:
        fitting = [degree for degree in powers if length <= degree * problem.capacity]
        if not fitting:
            raise CannotRunError(
                f"a sequence of {length} tokens fits none of the powers of two among degrees {problem.degrees} at "
                f"{problem.capacity} tokens per rank"
            )
        needed.append(fitting[0])
    waiting = sorted(range(len(problem.lengths)), key=lambda i: -problem.lengths[i])
    layout: Layout = []
    while waiting:
        teams, waiting = _hybrid_cp_micro_batch(problem, needed, waiting)
        _widen(problem, teams)
        layout.append([(team.degree, tuple(team.members)) for team in teams])
    return layout


def _hybrid_cp_micro_batch(
    problem: GroupingProblem, needed: Sequence[int], waiting: Sequence[int]
) -> tuple[list[_Team], list[int]]:
    """Fills teams until their work is balanced; returns them and the sequences left for later micro-batches."""
    work = {i: problem.lengths[i] ** 2 / needed[i] for i in waiting}
    queues = _queues(waiting, work, len({needed[i] for i in waiting}))
    teams: list[_Team] = []
    first_degree = 0
    while queues:
        placed = _place_next(problem, needed, queues, teams)
        if placed is None:
            break
        i, team = placed
        team.members.append(i)
        team.work += work[i]
        team.tokens += problem.lengths[i]
        first_degree = first_degree or needed[i]
        while queues and not queues[0]:
            queues.pop(0)
        # check the balance only after a smaller degree has had its turn
        if needed[i] < first_degree and _slack(problem, teams) <= _BALANCE_SLACK:
            break
    left = [i for queue in queues for i in queue]
    return teams, left + _trim(problem, teams, work)


def _queues(waiting: Sequence[int], work: dict[int, float], number: int) -> list[list[int]]:
    """Cuts the waiting sequences, in order, into about `number` queues of similar work."""
    share = sum(work.values()) / number
    queues: list[list[int]] = [[]]
    filled = 0.0
    for position, i in enumerate(waiting):
        # Megatron's rule subtracts the finished queues twice, so the last queues may be missing
        must_leave = len(waiting) - position <= number - 2 * (len(queues) - 1)
        if queues[-1] and (filled + work[i] > share * _QUEUE_SLACK or must_leave):
            queues.append([])
            filled = 0.0
        queues[-1].append(i)
        filled += work[i]
    return queues


def _place_next(
    problem: GroupingProblem, needed: Sequence[int], queues: list[list[int]], teams: list[_Team]
) -> tuple[int, _Team] | None:
    """Takes the head of the first queue whose head fits; returns it with its team, a new one if enough ranks are free."""
    free = problem.num_ranks - sum(team.degree for team in teams)
    for queue in queues:
        if not queue:
            continue
        i = queue[0]
        if needed[i] <= free:
            teams.append(_Team(needed[i]))
            return queue.pop(0), teams[-1]
        room = needed[i] * problem.capacity - problem.lengths[i]
        fitting = [team for team in teams if team.degree == needed[i] and team.tokens <= room]
        if fitting:
            return queue.pop(0), min(fitting, key=lambda team: team.work)
    return None


def _slack(problem: GroupingProblem, teams: Sequence[_Team]) -> float:
    """Returns the share of the most loaded rank's work that the least loaded one lacks; ranks without a team have none."""
    most = max(team.work for team in teams)
    is_idle = sum(team.degree for team in teams) < problem.num_ranks
    return 1.0 if is_idle else 1 - min(team.work for team in teams) / most


def _trim(problem: GroupingProblem, teams: list[_Team], work: dict[int, float]) -> list[int]:
    """Removes sequences from the most loaded team, last first, while that evens out the work; returns them."""
    trimmed: list[int] = []
    while _BALANCE_SLACK < _slack(problem, teams) < 1:
        team = max(teams, key=lambda team: team.work)
        works = [other.work for other in teams]
        without = [other.work - work[team.members[-1]] * (other is team) for other in teams]
        if len(team.members) < 2 or max(without) - min(without) >= max(works) - min(works):
            break
        i = team.members.pop()
        team.work -= work[i]
        team.tokens -= problem.lengths[i]
        trimmed.append(i)
    return trimmed


def _widen(problem: GroupingProblem, teams: list[_Team]) -> None:
    """Doubles the first of the smallest teams while enough ranks are idle; Megatron would then fail, this stops."""
    while True:
        free = problem.num_ranks - sum(team.degree for team in teams)
        team = min(teams, key=lambda team: team.degree)
        wider = min(2 * team.degree, problem.num_ranks)
        if not 0 < wider - team.degree <= free or wider not in problem.degrees:
            return
        team.degree = wider


def fcp_layout(problem: GroupingProblem, trials: int = _FCP_TRIALS) -> Layout:
    """Runs FCP's two-stage planner: packs sequences by memory alone, then chooses degrees by dynamic programming.

    The paper does not specify how a batch becomes micro-batches. Here the sequences, longest first, are cut into consecutive runs
    of similar numbers of tokens. `trials` numbers of runs are tried, starting at the fewest that fit, and the fastest layout is
    kept. A run whose packs need too many ranks is cut in two. Raises CannotRunError for a sequence that fits no degree.
    """
    longest, room = max(problem.lengths), problem.degrees[-1] * problem.capacity
    if longest > room:
        raise CannotRunError(
            f"a sequence of {longest} tokens does not fit the largest degree, {problem.degrees[-1]}, which holds {room}"
        )
    order = sorted(range(len(problem.lengths)), key=lambda i: -problem.lengths[i])
    fewest = max(1, math.ceil(sum(problem.lengths) / (problem.capacity * problem.num_ranks)))
    layouts = [
        [groups for run in even_runs(problem.lengths, order, number) for groups in _fcp_micro_batches(problem, run)]
        for number in range(fewest, fewest + trials)
    ]
    return min(layouts, key=problem.step_seconds)


def _fcp_micro_batches(problem: GroupingProblem, run: Sequence[int]) -> Layout:
    groups = fcp_groups(problem, run)
    if groups:
        return [groups]
    # a single sequence always fits, so the run has at least two
    return [groups for half in even_runs(problem.lengths, run, 2) for groups in _fcp_micro_batches(problem, half)]


def even_runs(lengths: Sequence[int], order: Sequence[int], number: int) -> list[list[int]]:
    """Cuts `order` into at most `number` consecutive runs so that the largest run has as few tokens as possible."""
    ends = micro_batch_ends([lengths[i] for i in order], number)
    return [list(order[start:end]) for start, end in pairwise([0, *ends])]


def fcp_groups(problem: GroupingProblem, run: Sequence[int]) -> list[Group]:
    """Makes one micro-batch of FCP: packs with the degrees that end soonest, and idle ranks handed out; empty if impossible."""
    packs = pack_by_memory(problem, run)
    degrees = soonest_degrees(problem, packs)
    if not degrees:
        return []
    return [(degree, tuple(some)) for degree, (_, some) in zip(_hand_out(problem, packs, degrees), packs, strict=True)]


def pack_by_memory(problem: GroupingProblem, run: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Packs sequences, longest first, into the fullest pack with room or a new one; returns (least degree, sequences).

    A pack has the room of the least degree that holds its first and longest sequence.
    """
    packs: list[tuple[int, list[int]]] = []
    left: list[int] = []
    for i in sorted(run, key=lambda i: -problem.lengths[i]):
        length = problem.lengths[i]
        fitting = [(left[p], p) for p in range(len(packs)) if left[p] >= length]
        if fitting:
            p = min(fitting)[1]
            packs[p][1].append(i)
            left[p] -= length
        else:
            least = next(degree for degree in problem.degrees if length <= degree * problem.capacity)
            packs.append((least, [i]))
            left.append(least * problem.capacity - length)
    return packs


def soonest_degrees(problem: GroupingProblem, packs: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """Returns degrees, none below a pack's least, with which the last pack ends soonest; empty if they exceed the ranks.

    best[j]: least makespan of the packs so far on exactly j ranks.
    """
    best = np.full(problem.num_ranks + 1, math.inf)
    best[0] = 0.0
    choices = []
    for least, some in packs:
        extended, choice = np.full_like(best, math.inf), np.zeros(len(best), dtype=np.int64)
        for degree in problem.degrees:
            if least <= degree <= problem.num_ranks:
                ends = np.maximum(best[: len(best) - degree], problem.group_seconds((degree, tuple(some))))
                is_sooner = ends < extended[degree:]
                extended[degree:][is_sooner] = ends[is_sooner]
                choice[degree:][is_sooner] = degree
        best = extended
        choices.append(choice)
    used = int(np.argmin(best))
    if not math.isfinite(best[used]):
        return []
    degrees = []
    for choice in reversed(choices):
        degrees.append(int(choice[used]))
        used -= degrees[-1]
    return degrees[::-1]


def _hand_out(problem: GroupingProblem, packs: Sequence[tuple[int, Sequence[int]]], degrees: Sequence[int]) -> list[int]:
    """Hands out idle ranks: each pack in turn gets the next degree if ranks allow it and it is not slower."""
    widened = list(degrees)
    idle = problem.num_ranks - sum(widened)
    has_changed = True
    while has_changed:
        has_changed = False
        for p, (_, some) in enumerate(packs):
            wider = next((degree for degree in problem.degrees if degree > widened[p]), 0)
            if not 0 < wider - widened[p] <= idle:
                continue
            members = tuple(some)
            if problem.group_seconds((wider, members)) <= problem.group_seconds((widened[p], members)):
                idle -= wider - widened[p]
                widened[p] = wider
                has_changed = True
    return widened


def flexsp_layout(problem: GroupingProblem, trials: int = _FLEXSP_TRIALS) -> Layout:
    """Makes FlexSP's groups: powers of two of ranks, micro-batches cut by tokens alone, one after the other.

    Our greedy search replaces its integer program, with micro-batches that are about as fast. Raises CannotRunError for a
    sequence that fits no power of two.
    """
    powers = tuple(degree for degree in problem.degrees if degree & (degree - 1) == 0)
    longest = max(problem.lengths)
    if not powers or longest > powers[-1] * problem.capacity:
        raise CannotRunError(
            f"a sequence of {longest} tokens fits none of the powers of two among degrees {problem.degrees} at "
            f"{problem.capacity} tokens per rank"
        )
    return plan_greedy(problem.restricted(powers), trials, time_aware=False)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Classes of saved tensors that the backward of every layer computes again, and the name of this in tables."""

    name: str
    recomputed: tuple[TensorClass, ...] = ()

    @property
    def replays_attention(self) -> bool:
        return "attention_output" in self.recomputed

    def policy(self, num_layers: int, tile_tokens: int = 0) -> ActivationPolicy:
        """Makes the policy of a chunk; without `tile_tokens`, callers that count bytes tile the loss."""
        layer = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in self.recomputed))
        return ActivationPolicy(0, 0, (layer,) * num_layers if self.recomputed else (), tile_tokens)


KEPT = Checkpointing("everything kept")
SELECTIVE = Checkpointing("selective checkpointing", ("qkv", "mlp"))
FULL = Checkpointing("full checkpointing", ("attention_output", "qkv", "mlp"))
# fastest first, with the most memory
CHECKPOINTINGS = (KEPT, SELECTIVE, FULL)
# tiles sum the gradient of the head in fp32, which may take more than logits of few tokens
_LOSS_TILES = (0, LEAST_TILE_TOKENS)


@dataclass(frozen=True)
class CheckpointedCosts(CostModel):
    """Costs of chunks whose backward runs the forward of all layers again, under `checkpointing`."""

    checkpointing: Checkpointing = KEPT

    @classmethod
    def of(cls, costs: CostModel, checkpointing: Checkpointing) -> CheckpointedCosts:
        """Makes costs of the same model and cluster with these replays; other systems exchange all heads before attention."""
        values = {field.name: getattr(costs, field.name) for field in fields(CostModel)}
        values["model"] = replace(costs.model, exchange_parts=1)
        return cls(**values, checkpointing=checkpointing)

    def local_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        is_backward: bool,
        pairs: AttentionPairs | None = None,
        hidden_s: float | None = None,
    ) -> float:
        """Returns seconds of one pass of `chunk`, including the replay in its backward."""
        seconds = super().local_s(chunk, shape, is_backward, pairs, hidden_s)
        if not is_backward or not self.checkpointing.recomputed:
            return seconds
        pairs = self.attention_pairs() if pairs is None else pairs
        num_tokens = float(max(chunk.num_tokens, shape.degree))
        return seconds + self._replay_group_s + float(self.replay_s(num_tokens, pairs.of_chunk(chunk), shape))

    def sequences_s(self, lengths: Sequence[int] | FloatArray, shape: GroupShape) -> FloatArray:
        """Returns seconds that each whole sequence adds to a group of `shape`, forward plus backward, with its replay."""
        seconds = super().sequences_s(lengths, shape)
        if not self.checkpointing.recomputed:
            return seconds
        tokens = np.asarray(lengths, dtype=np.float64)
        pairs = tokens * self.attention_pairs().seen(np.zeros_like(tokens), tokens)
        return seconds + self.replay_s(tokens, pairs, shape)

    def group_s(self, shape: GroupShape) -> float:
        """Returns the fixed seconds of any chunk on a group of `shape`, forward plus backward, with its replay."""
        return super().group_s(shape) + (self._replay_group_s if self.checkpointing.recomputed else 0.0)

    @property
    def _replay_group_s(self) -> float:
        """Returns fixed seconds of messages to spread experts in a replay."""
        return self.expert_exchange_s(0.0) if self.model.experts.are_spread else 0.0

    def replay_s(self, num_tokens: float | FloatArray, num_pairs: float | FloatArray, shape: GroupShape) -> FloatArray:
        """Returns seconds of tokens and pairs if a group of `shape` runs all layers forward again, as in `layer_slot`."""
        forward = self.coefficients.forward
        own_tokens = np.asarray(num_tokens, dtype=np.float64) / shape.degree
        seconds = forward.token_s * (1 - self.head_share(is_backward=False)) * own_tokens
        if self.model.experts.are_spread:
            # tokens travel to experts once more
            seconds = seconds + (self.expert_exchange_s(1.0) - self.expert_exchange_s(0.0)) * own_tokens
        if self.checkpointing.replays_attention:
            seconds = seconds + forward.pair_s * np.asarray(num_pairs, dtype=np.float64) / shape.degree
        return seconds


def most_tokens(byte_model: ByteModel, device_bytes: int, checkpointing: Checkpointing, like: Load) -> int:
    """Returns the most tokens of one document on a rank, in `device_bytes` besides the states. like: how its group shares it."""
    policy = checkpointing.policy(byte_model.model.num_layers)
    return max(byte_model.longest(device_bytes, 0, lambda _: (policy,), like, tile) for tile in _LOSS_TILES)


def group_bytes(byte_model: ByteModel, group: SequenceGroup, checkpointing: Checkpointing) -> int:
    """Returns the most bytes besides the states on the first rank, the fullest, of a group with one chunk."""
    (chunk,) = group.chunks
    num_layers = byte_model.model.num_layers
    load = chunk_load(group, chunk, 0, Load(0, (), num_layers))
    found = (byte_model.chunk(load, checkpointing.policy(num_layers), tile) for tile in _LOSS_TILES)
    return min(one.device + one.workspace for one in found)


def document_load(num_layers: int, shape: GroupShape) -> Load:
    """Makes the load of a rank's share of a document in a group of this shape; callers set its tokens."""
    document = Load.document(1, num_layers)
    return replace(document, is_shared=shape.degree > 1, num_blocks=shape.num_blocks, block_ranks=shape.ulysses)

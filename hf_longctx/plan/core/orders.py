"""Orders forwards and backwards of a group's chunks on pipeline stages, and inserts the messages between stages.

A *family* is a run of consecutive chunks that slices of one long sequence link; a pack of whole sequences is a family of one.
Backwards run family by family, in each family from the last chunk to the first, since a slice's keys and values get gradients
from every later slice.

"1f1b" runs as many forwards ahead as the longest family needs; on slices this is Seq1F1B (arXiv 2406.03488, section 3), on
whole sequences plain 1F1B. "elastic" runs only as many forwards ahead as the families still waiting for their backward need, so
a stage never holds more chunks than with "1f1b". "gpipe" runs all forwards, then all backwards; on slices this is TeraPipe
(arXiv 2102.07988). "interleaved" gives every stage several layer ranges; the stage switches to the next range every P
chunks, where P is the number of stages.

In an elastic window each stage is one forward ahead of the next one, which is enough if all chunks take equal seconds. If they do
not, a stage waits for the slowest chunk of all stages in every slot. With a `lead` of more than one forward it computes
meanwhile, and holds that many more chunks: on eight stages, chunks whose seconds vary by a fifth leave a fifth of the time idle
with a lead of 1, and 2 % with a lead of 2.

Interleaving here supports any families and any number of chunks. Seq1F1B's warm-up is too short if a family does not end inside
its round of P chunks, so it is extended to what the backwards need. A remainder of fewer than P chunks joins the last round,
because a round shorter than P deadlocks on four or more stages. With equal times and at least P chunks, every stage is then idle
for at most P - 1 forwards and backwards of a layer range; this was checked by running all families of up to 11 chunks on up to 5
stages.

Backwards are not split into gradients of inputs and of weights (zero bubble, arXiv 2401.10241): attention has no weights, so
long contexts leave little to defer, and slices have already filled most of the idle time. The table has the share of the time of
"1f1b" that the split would save for 8 sequences of a 7B model on 4 stages, under assumptions in favour of the split
(`recipes/bench/papers/zero_bubble.py`) and with no more memory on any stage than the fullest stage needs:

    tokens      4 slices    8 slices    idle time with 4 and 8 slices
    32K         3.8 %       2.6 %       10.7 %, 6.4 %
    64K         2.7 %       1.9 %       10.4 %, 6.1 %
    128K        1.7 %       1.1 %       9.8 %, 5.6 %

Eight slices instead of four save more, take less memory, and do not change the modules' own backward.

Several micro-batches can follow one schedule (`in_turns`), in which no stage drains between them. Its slots are the places of the
chunks of all micro-batches, one micro-batch after the other; the chunks of a micro-batch's groups at one place share a slot. Two
slots are in one family if they are for any of these groups, since all of them run one order.

Whole layers cannot make up for the output head, with which the last stage is busier than the mean, so the head may be spread over
all stages (`output_shares`). Chunks take turns: the last stage sends the hidden states of most chunks to other stages, which send
back their gradients (H). So that it need not wait for these, every stage is one more forward ahead, as if the head were a further
stage. Vocabulary parallelism (arXiv 2411.05288) divides the vocabulary in place of chunks, with collectives over all stages for
each chunk.

A receive comes right before the action that needs the message, and a send right after the action that makes it. Sends do not
block. A stage sends over a link in the order of its own compute actions; these schedules give both ends of a link the same order
of chunks, so receives get messages in the order of sending, without deadlocks. Only gradients of the head come in the order of
forwards and are needed in that of backwards: the last stage takes those that came before from the link first, and keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, get_args

import numpy as np

from hf_longctx.plan.core.types import (
    PASSES,
    Action,
    ActionKind,
    Chunk,
    IntArray,
    LayerRange,
    MicroBatch,
    Ranges,
    SequenceGroup,
    StagePlan,
)

# codes of action kinds: those of F, B and H are the ones of passes; backwards are odd, receives come before sends
ACTION_CODES: dict[ActionKind, int] = {"F": 0, "B": 1, "RF": 2, "RB": 3, "SF": 4, "SB": 5, "H": 6}
_PASS_KINDS: dict[int, ActionKind] = {ACTION_CODES[kind]: kind for kind in PASSES}
# code, chunk and layer range of a pass, and whether another stage runs the head of its chunk
_Pass = tuple[int, int, int, bool]

# action -> (receive before it, send after it)
_AROUND: dict[str, tuple[ActionKind, ActionKind]] = {"F": ("RF", "SF"), "B": ("RB", "SB"), "H": ("RF", "SB")}


def _messaged(action: Action, num_stages: int, num_ranges: int, is_away: bool) -> tuple[Action, ...]:
    """Returns an F, B or H with the receive before it and the send after it, if its neighbours are on other stages.

    is_away: whether another stage than the last one runs the head of the chunk.
    """
    place = action.layer_range * num_stages + action.stage
    has_front = num_stages > 1 and place > 0
    has_behind = num_stages > 1 and place < num_ranges * num_stages - (not is_away)
    # a head gets hidden states from the stage in front of it, and sends their gradient back there
    around = {"F": (has_front, has_behind), "B": (has_behind, has_front), "H": (has_front, has_front)}
    receives, sends = around[action.kind]
    receive, send = _AROUND[action.kind]
    before = (Action(receive, action.stage, action.chunk, action.layer_range),) if receives else ()
    after = (Action(send, action.stage, action.chunk, action.layer_range),) if sends else ()
    return (*before, action, *after)


class MessagedPasses:
    """Cache of forwards and backwards with their messages for all groups of a step, most of whose actions are equal.

    stages: actions of all stages of groups, by everything on which their order depends.
    """

    def __init__(self) -> None:
        self.stages: dict[Hashable, list[tuple[Action, ...]]] = {}
        # by number of stages, number of layer ranges and stage
        self._known: dict[tuple[int, int, int], dict[_Pass, tuple[Action, ...]]] = {}

    def actions(self, stage: int, num_stages: int, num_ranges: int, passes: Iterable[_Pass]) -> tuple[Action, ...]:
        """Returns the actions of a stage that runs these passes."""
        known = self._known.setdefault((num_stages, num_ranges, stage), {})
        found: list[Action] = []
        for each in passes:
            if each not in known:
                code, chunk, layer_range, is_away = each
                action = Action(_PASS_KINDS[code], stage, chunk, layer_range)
                known[each] = _messaged(action, num_stages, num_ranges, is_away)
            found += known[each]
        return tuple(found)


Schedule = Literal["1f1b", "elastic", "gpipe", "interleaved"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

# chunk and layer range of one forward or backward of a stage
Unit = tuple[int, int]
# three arrays with an entry for every pass of a stage: its code, chunk and layer range
ComputeOrder = tuple[IntArray, IntArray, IntArray]


def families(*chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of every family's chunks, in order. Chunks between two slices of a sequence are in its family.

    chunks: those of one group, or equally many of each of several groups that run one order.
    """
    slots = [[span.sequence for chunk in slot for span in chunk.spans] for slot in zip(*chunks, strict=True)]
    last = {sequence: place for place, slot in enumerate(slots) for sequence in slot}
    found: list[tuple[int, ...]] = []
    first = stop = 0
    for place, slot in enumerate(slots):
        stop = max(stop, place, *(last[sequence] for sequence in slot))
        if stop == place:
            found.append(tuple(range(first, place + 1)))
            first = place + 1
    return tuple(found)


def compute_actions(
    chunks: Sequence[Chunk], num_stages: int, schedule: Schedule = "elastic", num_ranges: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Returns forwards and backwards of every stage in order, without messages."""
    return tuple(
        tuple(
            Action(_PASS_KINDS[code], stage, chunk, layer_range)
            for code, chunk, layer_range in zip(*(each.tolist() for each in order), strict=True)
        )
        for stage, order in enumerate(compute_orders(chunks, num_stages, schedule, num_ranges))
    )


def compute_orders(
    chunks: Sequence[Chunk],
    num_stages: int,
    schedule: Schedule = "elastic",
    num_ranges: int = 1,
    lead: float = 1.0,
) -> tuple[ComputeOrder, ...]:
    """Computes the order of `compute_actions` as arrays: kinds, chunks and layer ranges of every stage's actions.

    lead: forwards that a stage is ahead of the next one with the elastic schedule, at least 1, as a mean over the later stages.
    """
    return family_orders(families(chunks), num_stages, schedule, num_ranges, lead)


def family_orders(
    members: Sequence[Sequence[int]],
    num_stages: int,
    schedule: Schedule,
    num_ranges: int,
    lead: float,
    most_ahead: Sequence[int] = (),
    output_shares: Sequence[float] = (),
) -> tuple[ComputeOrder, ...]:
    """Computes the `compute_orders` of chunks in these families.

    most_ahead: most forwards before each backward with "1f1b" and "elastic"; (): as many as the schedule wants. output_shares:
    share of the output head's work that each stage does, for stages of one layer range; (): the last stage does all of it.
    """
    sizes = tuple(map(len, members))
    return _orders(sizes, num_stages, schedule, num_ranges, lead, tuple(most_ahead), tuple(output_shares))


# a search makes the orders of the same families several times, and times of heads take long
@lru_cache(maxsize=256)
def _orders(
    sizes: tuple[int, ...],
    num_stages: int,
    schedule: Schedule,
    num_ranges: int,
    lead: float,
    most_ahead: tuple[int, ...],
    output_shares: tuple[float, ...],
) -> tuple[ComputeOrder, ...]:
    """Computes the `family_orders` of families of so many chunks."""
    ends = list(accumulate(sizes, initial=0))
    num_chunks, members = ends[-1], [range(first, stop) for first, stop in pairwise(ends)]
    _check_request(num_chunks, num_stages, schedule, num_ranges, lead)
    heads = deal_output_heads(num_chunks, output_shares)
    if heads and (num_ranges > 1 or len(output_shares) != num_stages):
        raise ValueError(
            f"{len(output_shares)} shares of the output head for {num_stages} stages of {num_ranges} layer range(s); give a "
            f"share for every stage, and leave the head on the last one if stages have several layer ranges"
        )
    forwards: list[Unit] = [(place, 0) for family in members for place in family]
    backwards: list[Unit] = [(place, 0) for family in members for place in reversed(family)]
    longest = max(len(family) for family in members)
    # stages after each one, by which it runs ahead of the last, and the forward during which heads run on other stages
    later, beside = range(num_stages)[::-1], bool(heads)
    if schedule == "gpipe":
        backwards = forwards[::-1]
        ahead, leads = [num_chunks] * num_chunks, [0] * num_stages
    elif schedule == "1f1b":
        ahead, leads = _window(num_chunks, longest), [count + beside for count in later]
    elif schedule == "elastic":
        ahead, leads = _elastic_window(members), [math.ceil(lead * count) + beside for count in later]
    else:
        rounds = _rounds(num_chunks, num_stages)
        forwards = _in_rounds(forwards, rounds, range(num_ranges))
        backwards = _in_rounds(backwards, rounds, range(num_ranges)[::-1])
        ahead_of_last = max((num_ranges - 1) * num_stages + longest, _least_window(forwards, backwards))
        ahead, leads = _window(len(forwards), ahead_of_last), [2 * count for count in later]
    needed: IntArray = np.add.outer(np.array(leads, dtype=np.int64), ahead)
    if most_ahead and schedule in ("1f1b", "elastic"):
        needed = np.minimum(needed, most_ahead)
    orders = _merged(np.array(forwards, dtype=np.int64), np.array(backwards, dtype=np.int64), needed)
    return _with_heads(orders, heads) if heads else orders


def deal_output_heads(num_chunks: int, output_shares: Sequence[float]) -> Mapping[int, int]:
    """Deals the output heads of chunks to stages by their shares of the work; returns the stages of those not on the last one.

    Chunks are dealt one after the other, to the stage that lags behind its share the most, the last stage first.
    """
    return _dealt_heads(num_chunks, tuple(output_shares)) if sum(output_shares[:-1]) else {}


# the orders of every lead need them
@lru_cache(maxsize=256)
def _dealt_heads(num_chunks: int, output_shares: tuple[float, ...]) -> Mapping[int, int]:
    """Deals the heads of `deal_output_heads`, some of which another stage than the last one gets."""
    shares = [share / sum(output_shares) for share in output_shares]
    lags, last = [0.0] * len(shares), len(shares) - 1
    found: dict[int, int] = {}
    for chunk in range(num_chunks):
        lags = [lag + share for lag, share in zip(lags, shares, strict=True)]
        # equal but for rounding
        most = max(lags) - 1e-9
        stage = next(stage for stage in range(last, -1, -1) if lags[stage] >= most)
        lags[stage] -= 1
        if stage < last:
            found[chunk] = stage
    return found


def _with_heads(orders: Sequence[ComputeOrder], heads: Mapping[int, int]) -> tuple[ComputeOrder, ...]:
    """Inserts the output heads of chunks on these stages.

    A head runs where its stage is when the chunk's forward on the last stage ends, if a forward takes one unit of time, a
    backward two and a head none. All that it needs comes before it in time, and all that needs it comes after it, so that stages
    cannot wait for one another in a circle.
    """
    begins, ends = _unit_times(orders)
    # forwards of the last stage end in the order of chunks, in which heads are dealt
    dealt, stages = np.array(list(heads.items()), dtype=np.int64).T
    found = []
    for stage, (kinds, chunks, ranges) in enumerate(orders):
        own = dealt[stages == stage]
        places = np.searchsorted(begins[stage], ends[own], side="left")
        found.append(
            (
                np.insert(kinds, places, ACTION_CODES["H"]),
                np.insert(chunks, places, own),
                np.insert(ranges, places, 1),
            )
        )
    return tuple(found)


def _unit_times(orders: Sequence[ComputeOrder]) -> tuple[list[list[int]], IntArray]:
    """Returns when each pass of every stage of one layer range begins, and when every chunk's forward on the last stage ends.

    A forward takes one unit of time, and a backward two.
    """
    num_stages, num_chunks = len(orders), len(orders[0][0]) // 2
    # passes of a stage are numbered by chunk, first F, then B
    passes = [(2 * chunks + kinds).tolist() for kinds, chunks, _ in orders]
    begins: list[list[int]] = [[] for _ in orders]
    # when what each pass needs from another stage is there, -1 while it is not; the last two lists are for results of the last
    # stage and of the first one (as list -1), which no stage needs
    there = [[-1] * (2 * num_chunks) for _ in range(num_stages + 2)]
    there[0][::2] = there[num_stages - 1][1::2] = [0] * num_chunks
    # waits: the pass with which each stage waits
    clocks, waits, ready = [0] * num_stages, [-1] * (num_stages + 2), list(range(num_stages))[::-1]
    while ready:
        stage = ready.pop()
        order, own, clock, begun = passes[stage], there[stage], clocks[stage], begins[stage]
        for place in range(len(begun), len(order)):
            number = order[place]
            begin = own[number]
            if begin < 0:
                waits[stage] = number
                break
            if begin < clock:
                begin = clock
            begun.append(begin)
            is_backward = number % 2
            clock = begin + 1 + is_backward
            other = stage - 1 if is_backward else stage + 1
            there[other][number] = clock
            if waits[other] == number:
                waits[other] = -1
                ready.append(other)
        clocks[stage] = clock
    return begins, np.array(there[num_stages][::2], dtype=np.int64)


def pipelined(
    group: SequenceGroup,
    ranges: Sequence[tuple[LayerRange, ...]],
    schedule: Schedule = "elastic",
    known: MessagedPasses | None = None,
    lead: float = 1.0,
    output_shares: Sequence[float] = (),
) -> SequenceGroup:
    """Gives the group a stage plan (compute actions, messages) per entry of `ranges`; nothing is offloaded or recomputed.

    known: actions made for other groups. lead: see `compute_orders`. output_shares: see `family_orders`.
    """
    sizes = {len(own) for own in ranges}
    if len(sizes) != 1:
        raise ValueError(
            f"every stage needs the same number of layer ranges, at least one stage; found {[len(own) for own in ranges]}"
        )
    known, num_stages, num_ranges = MessagedPasses() if known is None else known, len(ranges), sizes.pop()
    members = families(group.chunks)
    # chunks in equal families run in the same order
    key = num_stages, num_ranges, schedule, lead, tuple(output_shares), *map(len, members)
    if key not in known.stages:
        orders = family_orders(members, num_stages, schedule, num_ranges, lead, (), output_shares)
        heads = deal_output_heads(len(group.chunks), output_shares)
        known.stages[key] = [
            known.actions(stage, num_stages, num_ranges, _passes(order, heads)) for stage, order in enumerate(orders)
        ]
    actions = zip(ranges, known.stages[key], strict=True)
    return replace(group, stages=tuple(StagePlan(stage, tuple(own), each) for stage, (own, each) in enumerate(actions)))


def in_turns(
    micro_batches: Sequence[MicroBatch],
    ranges: Ranges,
    schedule: Schedule = "elastic",
    known: MessagedPasses | None = None,
    lead: float = 1.0,
    reach: int | None = None,
    output_shares: Sequence[float] = (),
) -> tuple[tuple[MicroBatch, ...], tuple[tuple[int, ...], ...]]:
    """Gives all groups stage plans of one schedule through the micro-batches, and returns the turns of `StepPlan`.

    The groups of a micro-batch get one order of passes. A single micro-batch needs no turns, nor does a single stage. Nothing is
    offloaded or recomputed. known: actions made for other groups. lead: see `compute_orders`. reach: most forwards of later
    micro-batches before a backward with "1f1b" and "elastic", to limit what is in flight; None: any number. output_shares: see
    `family_orders`. Raises ValueError if the groups of a micro-batch have different numbers of chunks.
    """
    known, num_stages, num_ranges = MessagedPasses() if known is None else known, len(ranges), len(ranges[0])
    members: list[tuple[int, ...]] = []
    firsts = [0]
    for index, micro_batch in enumerate(micro_batches):
        counts = {len(group.chunks) for group in micro_batch.groups}
        if len(counts) != 1:
            raise ValueError(
                f"the groups of micro-batch {index} have {sorted(counts)} chunks; groups that run one order need equally many: "
                f"pad them with dummy chunks"
            )
        own = families(*(group.chunks for group in micro_batch.groups))
        members += [tuple(firsts[-1] + chunk for chunk in family) for family in own]
        firsts.append(firsts[-1] + counts.pop())
    stages: list[list[StagePlan]] = [[] for _ in micro_batches]
    turns: list[tuple[int, ...]] = []
    ends = [] if reach is None else [stop + reach for first, stop in pairwise(firsts) for _ in range(first, stop)]
    orders = family_orders(members, num_stages, schedule, num_ranges, lead, ends, output_shares)
    heads = deal_output_heads(firsts[-1], output_shares)
    for stage, (kinds, slots, of_ranges) in enumerate(orders):
        owners = np.searchsorted(firsts, slots, side="right") - 1
        turns.append(tuple(owners.tolist()))
        for index, first in enumerate(firsts[:-1]):
            own_passes = owners == index
            order = kinds[own_passes], slots[own_passes] - first, of_ranges[own_passes]
            away = {slot - first for slot in heads}
            actions = known.actions(stage, num_stages, num_ranges, _passes(order, away))
            stages[index].append(StagePlan(stage, tuple(ranges[stage]), actions))
    made = tuple(
        MicroBatch(tuple(replace(group, stages=tuple(own_stages)) for group in micro_batch.groups))
        for micro_batch, own_stages in zip(micro_batches, stages, strict=True)
    )
    return made, tuple(turns) if len(made) > 1 and num_stages > 1 else ()


def _passes(order: ComputeOrder, away: Container[int]) -> Iterator[_Pass]:
    """Yields passes for `MessagedPasses`. away: chunks whose head another stage than the last one runs."""
    for code, chunk, layer_range in zip(*(each.tolist() for each in order), strict=True):
        yield code, chunk, layer_range, chunk in away


def running_order(actions: Sequence[Sequence[Action]], turns: Sequence[int]) -> list[tuple[int, Action]]:
    """Returns every action with the index of its micro-batch, in running order on one stage.

    actions: those of each micro-batch in order. turns: micro-batch of each pass, (): one micro-batch after the other. A pass
    takes with it the receives before it and the sends after it.
    """
    if not turns:
        return [(index, action) for index, own in enumerate(actions) for action in own]
    blocks = [iter(_with_messages(own)) for own in actions]
    return [(index, action) for index in turns for action in next(blocks[index])]


def layer_turns(stages: Sequence[StagePlan], turns: Sequence[int]) -> list[int]:
    """Returns the turns of forwards and backwards alone, which are the passes of layers.

    stages: plans of one stage for each micro-batch. turns: micro-batch of each pass.
    """
    order = running_order([stage.actions for stage in stages], turns)
    return [index for index, action in order if action.kind in ("F", "B")]


def joined_stages(micro_batches: Sequence[MicroBatch], turns: Sequence[Sequence[int]]) -> tuple[StagePlan, ...]:
    """Returns stages with the actions of all micro-batches in running order, and their chunks renumbered as slots of the step.

    Actions are those of each micro-batch's first group; all its groups run one order.
    """
    groups = [micro_batch.groups[0] for micro_batch in micro_batches]
    firsts = list(accumulate((len(group.chunks) for group in groups), initial=0))
    stages = []
    for stage, own_turns in zip(groups[0].stages, turns, strict=True):
        order = running_order([group.stages[stage.stage].actions for group in groups], own_turns)
        stages.append(replace(stage, actions=tuple(replace(each, chunk=firsts[index] + each.chunk) for index, each in order)))
    return tuple(stages)


def _with_messages(actions: Sequence[Action]) -> list[list[Action]]:
    """Splits actions into one list per pass, which begins with its receives and ends with its sends."""
    blocks: list[list[Action]] = []
    has_pass = True
    for action in actions:
        if has_pass and action.kind not in ("SF", "SB"):
            blocks.append([])
            has_pass = False
        blocks[-1].append(action)
        has_pass |= action.kind in PASSES
    return blocks


def _check_request(num_chunks: int, num_stages: int, schedule: str, num_ranges: int, lead: float) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if num_chunks < 1 or num_stages < 1:
        raise ValueError(f"a pipeline needs at least one chunk and one stage, not {num_chunks} and {num_stages}")
    if (num_ranges > 1) != (schedule == "interleaved") or num_ranges < 1:
        raise ValueError(
            f"schedule {schedule!r} cannot run {num_ranges} layer range(s) per stage; 'interleaved' needs at least 2, "
            f"every other schedule has 1"
        )
    if lead < 1:
        raise ValueError(f"a lead of {lead} forwards leaves a stage behind the next one; use at least 1")


def _window(num_units: int, ahead: int) -> list[int]:
    """Returns the forwards before each backward, for a stage that runs `ahead` before the first one and then alternates."""
    return [ahead + place for place in range(num_units)]


def _elastic_window(members: Sequence[Sequence[int]]) -> list[int]:
    """Returns the forwards before each backward on the last stage, so that no later backward waits for two in a row.

    Backward i needs the forward of its family's last chunk. One forward can run before each later backward, so backward i needs
    at most j - i forwards fewer than a later backward j.
    """
    counts = [family[-1] + 1 for family in members for _ in family]
    for place in reversed(range(len(counts) - 1)):
        counts[place] = max(counts[place], counts[place + 1] - 1)
    return counts


def _rounds(num_chunks: int, num_stages: int) -> list[int]:
    """Returns bounds of the rounds of `num_stages` chunks; a remainder joins the last round."""
    return [*(place * num_stages for place in range(max(1, num_chunks // num_stages))), num_chunks]


def _in_rounds(units: list[Unit], rounds: list[int], ranges: Sequence[int]) -> list[Unit]:
    """Arranges `units` in rounds; each round goes through all `ranges` before the next begins."""
    return [(chunk, layer_range) for start, stop in pairwise(rounds) for layer_range in ranges for chunk, _ in units[start:stop]]


def _least_window(forwards: list[Unit], backwards: list[Unit]) -> int:
    """Returns the fewest forwards before the first backward with which every backward comes after its own forward."""
    done = {unit: place + 1 for place, unit in enumerate(forwards)}
    return max(done[unit] - place for place, unit in enumerate(backwards))


def _merged(forwards: IntArray, backwards: IntArray, needed: IntArray) -> tuple[ComputeOrder, ...]:
    """Merges both orders on every stage, with at least needed[stage, i] forwards before backward i, or all if there are fewer."""
    num_stages, num_units = needed.shape
    is_backward = np.zeros((num_stages, 2 * num_units), dtype=np.int64)
    before = np.minimum(np.maximum.accumulate(needed, axis=1), num_units)
    np.put_along_axis(is_backward, np.arange(num_units) + before, 1, axis=1)
    units = np.empty((num_stages, 2 * num_units, 2), dtype=np.int64)
    for kind, own in enumerate((forwards, backwards)):
        units[is_backward == kind] = np.tile(own, (num_stages, 1))
    return tuple((kinds, own[:, 0], own[:, 1]) for kinds, own in zip(is_backward, units, strict=True))

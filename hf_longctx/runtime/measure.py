"""Measures a machine for the cost model: a grid of chunks run by the executor, all-to-alls per degree, copies to the host.

`hf.calibration` calls it for `hf-longctx calibrate`. Every measurement is collective over the pool's ranks, which work at the
same time, as in a step: they share memory, links and the host's bus. Rank 0 decides what runs next and when time is up, so that
ranks never wait for each other in different collectives.

The first run of everything is discarded. The result is the lower quartile of the others, because disturbances only make runs
longer, and on a shared machine often most of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import rank_pieces, sum_bytes
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, LayerRange, RankPlan, SequenceGroup, Span, StagePlan
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.sums import exchanging_ranks, sum_blocks
from hf_longctx.runtime.process_groups import GroupPool

Value = TypeVar("Value")

# fewest tokens of a probe: smaller chunks take only start-up time
_LEAST_TOKENS = 16
# probes of up to this many tokens get a larger time limit: shorter ones hardly show which cost grows with tokens
_SHORT_TOKENS = 256
# runs of each length in the search for the largest probe
_GROWTH_RUNS = 3
# repetitions of every probe, time permitting: noise on a shared machine comes in phases of seconds
_NUM_REPEATS = 8
# CUDA events are hardly disturbed, and chunks must be longer there before attention takes a share of their time
_NUM_CUDA_REPEATS = 3
# repetitions of every exchange, copy or reduction
_RATE_REPEATS = 6
# mean seconds of the probes in `probe_grid`, as a fraction of the seconds of the largest
_MEAN_SHARE = 0.45
_ALONE = GroupShape(1)
# bytes per rank of a timed exchange, and of a first one that shows how many a slow link carries in the seconds below
_EXCHANGED_BYTES, _FIRST_BYTES = 8 * 2**20, 2**18
_MOST_EXCHANGE_S = 0.5
# bytes per rank of a timed copy to the host
_COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Probe:
    """A chunk to time: documents of these lengths on groups of one shape, on as many groups at once as fit the ranks.

    is_held_out: measured but not fitted, so that the fit can be judged by it.
    """

    lengths: tuple[int, ...]
    shape: GroupShape = _ALONE
    is_held_out: bool = False

    @property
    def chunk(self) -> Chunk:
        """The chunk that each group runs."""
        return Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(self.lengths)))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one probe: lower quartiles over ranks and repetitions."""

    probe: Probe
    forward_s: float
    backward_s: float
    num_repeats: int


@dataclass(frozen=True, slots=True)
class ExchangeRate:
    """Speed of an all-to-all over `num_ranks` ranks: seconds of a nearly empty one, and bytes per second and rank."""

    num_ranks: int
    message_s: float
    bytes_per_s: float


def probe_grid(max_tokens: int, max_length: int, shapes: Sequence[GroupShape]) -> tuple[Probe, ...]:
    """Makes probes that separate costs of tokens and of token pairs: one long document, packs of short ones, at halved sizes.

    max_tokens: most tokens of a rank. max_length: most tokens of a document. shapes: groups of two or more ranks; probes on one
    rank come first. Sizes in between are held out, as one document and as documents of very different lengths.
    """
    probes = []
    sizes = [max_tokens >> halving for halving in range(5) if max_tokens >> halving >= _LEAST_TOKENS]
    for shape in (_ALONE, *shapes):
        # packs fill the whole group, since a single document that long would have too many pairs
        for size in sizes if shape.degree == 1 else sizes[:3]:
            for count in (1, 8):
                tokens = shape.degree * size if count > 1 else max(shape.degree * size // 2, size)
                probes.append(Probe(_equal_lengths(tokens, count), shape))
        for size in sizes[:2]:
            tokens = shape.degree * size * 3 // 4
            probes.append(Probe(_halved_lengths(tokens), shape, is_held_out=True))
            if shape.degree == 1:
                probes.append(Probe((tokens,), shape, is_held_out=True))
    fitting = [probe for probe in probes if probe.lengths and max(probe.lengths) <= max_length]
    return tuple(dict.fromkeys(fitting))


def _equal_lengths(tokens: int, count: int) -> tuple[int, ...]:
    return (tokens // count,) * count if tokens // count >= _LEAST_TOKENS // 2 else ()


def _halved_lengths(tokens: int) -> tuple[int, ...]:
    """Splits tokens into a half, a quarter, an eighth and the rest."""
    lengths = (tokens // 2, tokens // 4, tokens // 8)
    return (*lengths, tokens - sum(lengths))


class ChunkBench:
    """Times probes of one model, run by its executor with random tokens, until a deadline.

    stop_at_s: the deadline, on rank 0's `time.monotonic`. repeats: counted runs per probe, time permitting (0: as many as a noisy
    machine needs).
    """

    def __init__(self, executor: StepExecutor, num_layers: int, vocab_size: int, stop_at_s: float, repeats: int = 0) -> None:
        self.executor, self.pool = executor, executor.pool
        self.num_layers, self.vocab_size, self.stop_at_s = num_layers, vocab_size, stop_at_s
        self.num_repeats = repeats or (_NUM_CUDA_REPEATS if executor.device.type == "cuda" else _NUM_REPEATS)
        self._inputs: dict[Probe, tuple[SequenceGroup, ChunkInputs]] = {}

    def run(self, probe: Probe, reduce: bool = False) -> dict[str, float]:
        """Returns seconds of this rank's forward "F", backward "B" and gradient reduction "reduce". Collective over the pool."""
        if probe not in self._inputs:
            self._inputs[probe] = self._prepare(probe)
        group, inputs = self._inputs[probe]
        stage = StagePlan(0, (LayerRange(0, self.num_layers),), (Action("F", 0, 0), Action("B", 0, 0)))
        plan = RankPlan(self.pool.rank, 0, "replicated", ((replace(group, stages=(stage,)), stage),))
        result = self.executor.run(plan, [[inputs]], sum(probe.lengths), reduce)
        return {interval.kind: interval.stop_s - interval.start_s for interval in result.intervals()}

    def largest_tokens(self, limit_tokens: int, target_s: float) -> int:
        """Returns the largest power of two up to `limit_tokens` that one rank runs as one document in about `target_s`.

        At least `_LEAST_TOKENS`, however slow the machine. Collective over the pool.
        """
        tokens = _LEAST_TOKENS
        while 2 * tokens <= limit_tokens:
            runs = [self.run(Probe((tokens,))) for _ in range(_GROWTH_RUNS)]
            # take the minimum: noise only adds, and one slow moment must not end the search
            own_s = min(passes["F"] + passes["B"] for passes in runs[1:])
            seconds = min(_gather(self.pool, own_s))
            # twice the tokens take at least twice as long; up to `_SHORT_TOKENS`, longer probes are worth having fewer runs
            allowed_s = target_s if 2 * tokens > _SHORT_TOKENS else 3 * target_s
            if 2 * seconds > allowed_s or self._is_over():
                break
            tokens *= 2
        return tokens

    def measure(self, probes: Sequence[Probe]) -> tuple[Timing, ...]:
        """Times all `probes`: equally many runs of each, then more runs of the fastest, until time is up.

        Each probe gets at least one run besides the first, which is discarded. Collective over the pool.
        """
        seconds: list[list[tuple[float, float]]] = [[] for _ in probes]
        spent_s = [0.0] * len(probes)
        num_runs, order = [0] * len(probes), random.Random(0)
        while (index := self._next(spent_s, num_runs, order)) >= 0:
            start_s = time.monotonic()
            passes = self.run(probes[index])
            spent_s[index] += time.monotonic() - start_s
            num_runs[index] += 1
            # the first run includes start-up
            if num_runs[index] > 1:
                seconds[index].append((passes["F"], passes["B"]))
        everyone = _gather(self.pool, seconds)
        timings = []
        for index, probe in enumerate(probes):
            active = range(self.pool.num_ranks // probe.shape.degree * probe.shape.degree)
            runs = [run for rank in active for run in everyone[rank][index]]
            forward_s, backward_s = (undisturbed(seconds) for seconds in zip(*runs, strict=True))
            timings.append(Timing(probe, forward_s, backward_s, num_runs[index] - 1))
        return tuple(timings)

    def reduction_s(self) -> float:
        """Returns seconds of this model's gradient reduction over all ranks, without waiting. Collective over the pool."""
        probe = Probe((_LEAST_TOKENS,))
        runs = [_gather(self.pool, self.run(probe, reduce=True)["reduce"]) for _ in range(1 + _RATE_REPEATS)]
        # take the minimum over ranks: the rank that arrived last did not wait
        return undisturbed([min(run) for run in runs[1:]])

    def _next(self, spent_s: Sequence[float], num_runs: Sequence[int], order: random.Random) -> int:
        """Returns the index of the next probe, decided by rank 0; -1 if time is up and every probe has run twice."""

        def choose() -> int:
            if self._seconds_left() <= 0 and min(num_runs) > 1:
                return -1
            # fewest runs first, in random order, so that a slow phase of the machine is spread over all probes
            if min(num_runs) <= self.num_repeats:
                return min(range(len(num_runs)), key=lambda i: (num_runs[i], order.random()))
            return min(range(len(num_runs)), key=lambda i: spent_s[i])

        return _from_first(self.pool, choose)

    def _is_over(self) -> bool:
        return bool(_from_first(self.pool, lambda: int(self._seconds_left() <= 0)))

    def _seconds_left(self) -> float:
        return self.stop_at_s - time.monotonic()

    def _prepare(self, probe: Probe) -> tuple[SequenceGroup, ChunkInputs]:
        """Makes this rank's group and shard; ranks outside of all groups run a dummy chunk alone."""
        shape, rank = probe.shape, self.pool.rank
        number, index_in_group = divmod(rank, shape.degree)
        chunk = probe.chunk
        if (number + 1) * shape.degree > self.pool.num_ranks:
            shape, index_in_group, chunk, number = _ALONE, 0, Chunk(0), rank
        group = SequenceGroup.of(shape, range(number * shape.degree, (number + 1) * shape.degree), (chunk,))
        pieces = rank_pieces(chunk, shape)[index_in_group]
        generator = torch.Generator().manual_seed(rank)
        num_tokens = sum(piece.num_tokens for piece in pieces)
        ids, labels = (torch.randint(0, self.vocab_size, (1, num_tokens), generator=generator) for _ in range(2))
        position_ids = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]).unsqueeze(0)
        return group, ChunkInputs(ids, position_ids, labels)


def undisturbed(seconds: Sequence[float]) -> float:
    """Returns the lower quartile of the times: disturbances only make runs longer, on a shared machine often most of them."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def target_seconds(num_probes: int, budget_s: float, num_repeats: int) -> float:
    """Returns the most seconds of the largest probe with which all probes run 1 + `num_repeats` times within `budget_s`."""
    return budget_s / ((1 + num_repeats) * _MEAN_SHARE * num_probes)


def exchange_rates(pool: GroupPool, degrees: Sequence[int], device: torch.device) -> tuple[ExchangeRate, ...]:
    """Measures all-to-alls of every degree, on all groups of the pool at once. Collective over the pool."""
    rates = []
    for degree in degrees:
        first = pool.rank // degree * degree
        positions = tuple(range(first, first + degree))
        group = pool.group(positions) if positions[-1] < pool.num_ranks else None

        def exchange_s(num_bytes: int, group: dist.ProcessGroup | None = group, degree: int = degree) -> float:
            send = torch.zeros(num_bytes // degree * degree, dtype=torch.uint8, device=device)
            received = torch.empty_like(send)

            def exchange() -> None:
                if group is not None:
                    dist.all_to_all_single(received, send, group=group)

            return _typical_s(pool, exchange, device)

        # a rank does not send its own block
        message_s = exchange_s(64 * degree)
        num_bytes, seconds = _longest_timed(exchange_s)
        sent_bytes = num_bytes // degree * (degree - 1)
        rates.append(ExchangeRate(degree, message_s, sent_bytes / max(seconds - message_s, 1e-9)))
    return tuple(rates)


def ring_rates(
    pool: GroupPool, counts: Sequence[int], device: torch.device, node_ranks: int = 0
) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
    """Measures gathers of weights and sums of gradients of so many consecutive ranks each, on all such groups at once.

    node_ranks: ranks of a node (0: all). Returns (number of ranks, bytes that each rank sends in a second) of both. Gathers count
    as rings. Collective over the pool.
    """
    rates: tuple[list[tuple[int, float]], list[tuple[int, float]]] = [], []
    for count in counts:
        first = pool.rank // count * count
        group = pool.group(tuple(range(first, first + count))) if first + count <= pool.num_ranks else None

        def seconds_of(num_bytes: int, gathers: bool, group: dist.ProcessGroup | None = group, count: int = count) -> float:
            shard = torch.zeros(max(1, num_bytes // 2 // count), dtype=torch.bfloat16, device=device)
            whole = torch.zeros(count * len(shard), dtype=torch.bfloat16, device=device)

            def collective() -> None:
                if group is not None and gathers:
                    dist.all_gather_into_tensor(whole, shard, group=group)
                elif group is not None:
                    sum_blocks(whole.view(count, -1), group, exchanging_ranks(group, node_ranks))

            return _typical_s(pool, collective, device)

        for found, gathers in zip(rates, (True, False), strict=True):
            message_s = seconds_of(4 * count, gathers)
            num_bytes, seconds = _longest_timed(partial(seconds_of, gathers=gathers))
            sent = num_bytes * (count - 1) / count if gathers else sum(sum_bytes(num_bytes, 2 * num_bytes, count, node_ranks))
            found.append((count, sent / max(seconds - message_s, 1e-9)))
    return tuple(rates[0]), tuple(rates[1])


def _longest_timed(seconds_of: Callable[[int], float]) -> tuple[int, float]:
    """Returns bytes and seconds of a timed exchange that is short enough on a slow link.

    seconds_of: returns the same number on all ranks, so that all exchange equally many bytes.
    """
    seconds = seconds_of(_FIRST_BYTES)
    num_bytes = min(_EXCHANGED_BYTES, int(_FIRST_BYTES * _MOST_EXCHANGE_S / seconds))
    return (num_bytes, seconds_of(num_bytes)) if num_bytes > _FIRST_BYTES else (_FIRST_BYTES, seconds)


def neighbour_rate(pool: GroupPool, device: torch.device) -> float:
    """Measures bytes per second that every rank sends to the next while receiving as many. Collective over the pool."""
    following, previous = (pool.rank + 1) % pool.num_ranks, (pool.rank - 1) % pool.num_ranks

    def pass_on_s(num_bytes: int) -> float:
        send = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(send)

        def pass_on() -> None:
            sends = dist.P2POp(dist.isend, send, following, group=pool.everyone)
            receives = dist.P2POp(dist.irecv, received, previous, group=pool.everyone)
            for request in dist.batch_isend_irecv([sends, receives]):
                request.wait()

        return _typical_s(pool, pass_on, device)

    num_bytes, seconds = _longest_timed(pass_on_s)
    return num_bytes / seconds


def copy_rate(pool: GroupPool, device: torch.device) -> float:
    """Measures bytes per second between device and pinned host memory, in the slower direction, all ranks at once.

    Without an accelerator it copies from memory to memory. Collective over the pool.
    """
    on_device = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy(target: Tensor, source: Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source, non_blocking=True)

    directions = (copy(on_host, on_device), copy(on_device, on_host))
    return _COPIED_BYTES / max(_typical_s(pool, direction, device) for direction in directions)


def _typical_s(pool: GroupPool, function: Callable[[], object], device: torch.device) -> float:
    """Returns the median over ranks of the `undisturbed` seconds of `function`, started on all ranks together."""
    seconds = []
    for _ in range(1 + _RATE_REPEATS):
        if pool.everyone is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=pool.everyone)
        _wait(device)
        start_s = time.perf_counter()
        function()
        _wait(device)
        seconds.append(time.perf_counter() - start_s)
    return max(median(_gather(pool, undisturbed(seconds[1:]))), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(pool: GroupPool, value: Value) -> list[Value]:
    """Gathers the `value` of every rank, in rank order, on every rank."""
    if pool.control is None:
        return [value]
    values: list[Value] = [value] * pool.num_ranks
    dist.all_gather_object(values, value, group=pool.control)
    return values


def _from_first(pool: GroupPool, decide: Callable[[], int]) -> int:
    """Returns rank 0's decision on every rank; only rank 0 calls `decide`."""
    decision = torch.tensor(decide() if pool.rank == 0 else 0)
    if pool.control is not None:
        dist.broadcast(decision, src=0, group=pool.control)
    return int(decision)

"""Agreement between ranks on the CPU: gather small values, and raise an error on all ranks or on none.

Every start-up check of `hf` uses it before work starts, and the trainer to explain collectives that broke.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.hf.ranks.heartbeats import Heartbeats
from hf_longctx.hf.ranks.lost_ranks import RollCall, connect, lost_message, rank_0_holds_store
from hf_longctx.hf.ranks.refusals import RefusedRun
from hf_longctx.runtime.process_groups.pool import sum_over_ranks

# beginnings of the messages with which gloo and NCCL end a collective; other errors may speak of connections too
_LOST_RANK = re.compile(
    r"(Gloo connectFullMesh failed|\[[^\]]*gloo/[^\]]*:\d+\] |\[Rank \d+\]: .*monitoredBarrier|NCCL (error|communicator))", re.I
)

# roll call of this launch, shared by all runs of the process
_roll_call: RollCall | None = None


def control_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Creates a CPU group of all ranks for messages about the run, apart from the groups that move tensors of the model.

    Once it has been called, `explain_lost_ranks` can name ranks. None for a single rank. Collective over all ranks.
    """
    global _roll_call
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    # a launcher that restarts its ranks may keep the store, and torchrun counts restarts on every node for itself
    attempt = gather_objects(uuid.uuid4().hex, group)[0]
    _roll_call = _roll_call or RollCall.of_launch(attempt)
    # every rank has written its process number, unless nobody reads it
    has_store = count_over_ranks(_roll_call is not None, group) == dist.get_world_size()
    if _roll_call is not None and has_store:
        _roll_call.meet()
    return group


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The `value` of every rank, on every rank, in rank order."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def count_over_ranks(count: int, group: dist.ProcessGroup | None) -> int:
    """The sum of a host-side integer over the ranks of `group`, of which no device learns. Collective over the group."""
    return int(sum_over_ranks(torch.tensor(count, dtype=torch.int64), group))


def sums_over_ranks(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """The sums of several host-side numbers over the ranks of `group`, in fp64 and in one message; exact for integers."""
    sums: list[float] = sum_over_ranks(torch.tensor(values, dtype=torch.float64), group).tolist()
    return sums


def raise_together(problems: list[str], group: dist.ProcessGroup | None, headline: str = "this run cannot start") -> None:
    """Raises RefusedRun on every rank, with the problems of all ranks, if any rank has one; so no rank waits for another."""
    lines: dict[str, list[int]] = {}
    for rank, found in enumerate(gather_objects(problems, group)):
        for problem in found:
            lines.setdefault(problem, []).append(rank)
    if not lines:
        return
    num_ranks = 1 if group is None else dist.get_world_size(group)
    text = [
        problem + ("" if len(ranks) == num_ranks else f" (on rank {', '.join(map(str, ranks))})")
        for problem, ranks in lines.items()
    ]
    raise RefusedRun.of(text, headline)


def differing_settings(settings: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """One problem per setting whose value differs between ranks; every rank gets an equal list."""
    everyone = gather_objects({name: repr(value) for name, value in settings.items()}, group)
    problems = []
    for name in sorted(set().union(*everyone)):
        values = [rank_settings.get(name, "missing") for rank_settings in everyone]
        if len(set(values)) > 1:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            problems.append(f"{name} differs between ranks ({shown}); start every rank with the same settings and data")
    return problems


@contextmanager
def explain_lost_ranks(step: int | Callable[[], int], rank: int, timeout_s: float) -> Iterator[None]:
    """Context that turns a backend's error about a broken or timed-out collective into one that names the lost ranks.

    After such an error it waits up to `timeout_s` to learn which ranks are lost. `step` may be a function, for contexts that
    last several steps.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST_RANK.match(str(error)):
            raise
        number = step() if callable(step) else step
        lost = _roll_call.lost(number, timeout_s) if _roll_call else []
        raise RuntimeError(lost_message(number, rank, lost, timeout_s)) from error


@contextmanager
def beating(step: Callable[[], int], timeout_s: float) -> Iterator[None]:
    """Context that tells the other ranks that this one is alive, and ends this process if one of them stands still.

    Does nothing for a single rank, or if no process serves the store of the process group. `step`: the present step, for the
    message.
    """
    try:
        store = None if _roll_call is None else connect()
    except RuntimeError:
        store = None
    if _roll_call is None or not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        yield
        return
    store = dist.PrefixStore(_roll_call.attempt, store)  # type: ignore[attr-defined]
    with Heartbeats(store, _roll_call.rank, _roll_call.num_ranks, timeout_s, step, rank_0_holds_store()) as hearts:
        _roll_call.still = hearts.still
        try:
            yield
        finally:
            _roll_call.still = list

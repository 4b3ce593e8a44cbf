"""Agreement between ranks on the CPU: gathers small values, and raises an error on all ranks or on none.

Used by every start-up check of `hf`, and by the trainer to explain broken collectives.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hf_longctx.hf.ranks.exit_message import RefusedRun
from hf_longctx.hf.ranks.heartbeats import Heartbeats, described, end_process, place_of_error
from hf_longctx.hf.ranks.lost_ranks import BROKEN, Lost, RollCall, connect, rank_0_holds_store
from hf_longctx.runtime.process_groups import sum_over_ranks

# beginnings of gloo's and NCCL's messages about a broken collective; other errors may mention connections too
_LOST_RANK = re.compile(
    r"(Gloo connectFullMesh failed|\[[^\]]*gloo/[^\]]*:\d+\] |\[Rank \d+\]: .*monitoredBarrier|NCCL (error|communicator))", re.I
)

# description of the work of a constructor or `attach`
START = "the start"

# time-out of a `Trainer`'s collectives by default
LONGEST_S = 1800.0

# roll call and beats of this launch, shared by all runs of the process, and its number of default process groups so far
_roll_call: RollCall | None = None
_hearts: Heartbeats | None = None
_num_groups = 0


def control_group(timeout_s: float, longest_s: float = LONGEST_S) -> dist.ProcessGroup | None:
    """Creates a CPU group of all ranks for messages about the run, separate from groups for tensors of the model.

    Its collectives wait up to `longest_s` for a working rank. From now on to the end of the process, a rank without any beat for
    `timeout_s` is named, and this process ends if it waits for it. None for a single rank. Collective over all ranks.
    """
    global _roll_call, _hearts
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest_s))
    # a launcher that restarts its ranks may keep the store, and torchrun counts restarts separately on every node
    begin_beats(timeout_s, longest_s)
    start_id = "" if _hearts is None else _hearts.start_id
    is_new = _roll_call is None or start_id not in _roll_call.start_ids
    attempts, start_ids, are_new = zip(*gather_objects((uuid.uuid4().hex, start_id, is_new), group), strict=True)
    if any(are_new):
        _roll_call = RollCall.of_launch(attempts[0])
    # every rank has written its process number, unless it is not read
    has_store = count_over_ranks(_roll_call is not None, group) == dist.get_world_size()
    if _roll_call is not None and has_store:
        _roll_call.meet()
        _roll_call.start_ids = start_ids
        if _hearts is not None and all(start_ids):
            _hearts.know(start_ids, _roll_call.store)
            _roll_call.still, _roll_call.is_over = _hearts.still, _hearts.is_over
            _roll_call.beats, _roll_call.fresh_beats = _hearts.beats, _hearts.fresh_beats
    return group


def begin_beats(timeout_s: float, longest_s: float) -> None:
    """Starts this rank's beats, which last until its process ends, and sets both limits of `control_group`.

    Does nothing for a single rank, or if no process serves the store of the process group. Not collective.
    """
    global _hearts, _num_groups
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _hearts is not None and _hearts.is_needed() and not _hearts.is_blind:
        _hearts.limit(timeout_s, longest_s)
        return
    try:
        store = connect()
    except RuntimeError:
        return
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return
    if _hearts is None or not _hearts.is_needed():
        _num_groups += 1
    if _hearts is not None:
        _hearts.leave()
    # a launcher may keep the store of a group that has ended
    store = dist.PrefixStore(str(_num_groups), store)  # type: ignore[attr-defined]
    rank, num_ranks, group = dist.get_rank(), dist.get_world_size(), weakref.ref(dist.group.WORLD)
    _hearts = Heartbeats(
        store,
        rank,
        num_ranks,
        timeout_s,
        longest_s,
        rank_0_holds_store(),
        _process_here,
        is_needed=lambda: dist.is_initialized() and dist.group.WORLD is group(),
    )
    _hearts.start()
    # unlike `atexit`, it also runs in a process started by `multiprocessing`
    Finalize(None, _leave, (_hearts,), exitpriority=100)


def _process_here(rank: int) -> psutil.Process | None:
    """Returns the rank's process if it is on this host; None before the roll call."""
    return None if _roll_call is None else _roll_call.process_here(rank)


def _leave(hearts: Heartbeats) -> None:
    """Publishes that this process ends, and why."""
    if hearts is not _hearts:
        # their process groups have ended
        return
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is not None and _is_broken_collective(error) and _roll_call is not None:
        # raised outside of the package, so without an explanation
        hearts.leave(BROKEN)
        found = _roll_call.search(hearts.num_calls, hearts.timeout_s, place_of_error(error))
        print(found.message("", _roll_call.rank, hearts.timeout_s, _waited_s(error)), file=sys.stderr, flush=True)
        return
    hearts.leave(described(error))


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the `value` of every rank, in rank order, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def count_over_ranks(count: int, group: dist.ProcessGroup | None) -> int:
    """Sums a host-side integer over the ranks of `group`, without any device. Collective over the group."""
    return int(sum_over_ranks(torch.tensor(count, dtype=torch.int64), group))


def sums_over_ranks(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Sums several host-side numbers over the ranks of `group`, in fp64 and in one message; exact for integers."""
    sums: list[float] = sum_over_ranks(torch.tensor(values, dtype=torch.float64), group).tolist()
    return sums


def raise_together(
    problems: list[str],
    group: dist.ProcessGroup | None,
    headline: str = "this run cannot start",
    alike: Mapping[str, Any] | None = None,
) -> None:
    """Raises RefusedRun on every rank, with the problems of all ranks, if any rank has one, so that none waits in vain.

    alike: values by name that must be equal on all ranks; one that is not is a problem too.
    """
    settings = {name: repr(value) for name, value in (alike or {}).items()}
    everyone, all_settings = zip(*gather_objects((problems, settings), group), strict=True)
    differing = _differing(all_settings)
    lines: dict[str, list[int]] = {}
    for rank, found in enumerate(everyone):
        for problem in (*found, *differing):
            lines.setdefault(problem, []).append(rank)
    if not lines:
        return
    num_ranks = 1 if group is None else dist.get_world_size(group)
    text = [
        problem + ("" if len(ranks) == num_ranks else f" (on rank {', '.join(map(str, ranks))})")
        for problem, ranks in lines.items()
    ]
    raise RefusedRun.of(text, headline)


@contextmanager
def failing_together(group: dist.ProcessGroup | None, timeout_s: float, headline: str) -> Iterator[None]:
    """Context for code of each rank, such as a user's function: if it raises on one rank, all ranks raise at the end.

    A rank whose code has raised raises that error, the others RefusedRun with its text. If they do not come to the end within
    `timeout_s`, because they wait inside for this rank, its process ends with the error. Collective over the group.
    """
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        waits_in_vain = threading.Timer(timeout_s, end_process, ["".join(traceback.format_exception(error))])
        waits_in_vain.daemon = True
        waits_in_vain.start()
        try:
            with suppress(RefusedRun):
                raise_together([text], group, headline)
        finally:
            waits_in_vain.cancel()
        raise
    raise_together([], group, headline)


def _differing(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns one problem per setting with several values. everyone: the settings of each rank."""
    problems = []
    for name in sorted(set().union(*everyone)):
        values = [rank_settings.get(name, "missing") for rank_settings in everyone]
        if len(set(values)) > 1:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            problems.append(f"{name} differs between ranks ({shown}); start every rank with the same settings and data")
    return problems


@contextmanager
def explain_lost_ranks(step: int | Callable[[], int], rank: int, timeout_s: float, what: str = "") -> Iterator[None]:
    """Context that turns a backend's error about a broken or timed-out collective into one that names the lost ranks.

    After such an error it waits up to `timeout_s` to find the lost ranks. step: may be a function, for contexts of several
    steps. what: description of collective work that is no step.
    """

    def number() -> int:
        return step() if callable(step) else step

    try:
        with nullcontext() if _hearts is None else _hearts.during(number, what):
            yield
    except RuntimeError as error:
        if not _is_broken_collective(error):
            raise
        found = _roll_call.search(number(), timeout_s, place_of_error(error)) if _roll_call else Lost()
        longest_s = _waited_s(error)
        raise RuntimeError(found.message(what or f"step {number()}", rank, timeout_s, longest_s)) from error


def joint_call(what: str, timeout_s: float, step: int = 0) -> AbstractContextManager[None]:
    """Context for a call of all ranks that is no step; see `explain_lost_ranks`. step: the last finished step."""
    return explain_lost_ranks(step, dist.get_rank() if dist.is_initialized() else 0, timeout_s, what)


def _is_broken_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or bool(_LOST_RANK.match(str(error))))


def _waited_s(error: BaseException) -> float:
    """Returns the seconds that a collective waited until its time-out; 0 if it broke for another reason."""
    return _hearts.longest_s if _hearts is not None and "timed out" in str(error).lower() else 0.0


@contextmanager
def beating(step: Callable[[], int], timeout_s: float) -> Iterator[None]:
    """Context for a training that ends this process as soon as another rank hangs.

    Does nothing for a single rank, or if no process serves the store of the process group. step: returns the current step, for
    the message.
    """
    if _hearts is None:
        yield
        return
    _hearts.limit(timeout_s, _hearts.longest_s)
    with _hearts.during(step):
        yield

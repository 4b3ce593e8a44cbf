"""Records the collectives that this rank takes part in, in their order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

# methods of a process group by which all collectives and messages of Python leave this rank
_METHODS = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier"),
    *("broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send", "all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
)
# functions that send pickled objects, in several messages whose sizes depend on what is in the objects
_OBJECTS = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
# functions by which sharded tensors are gathered and reduced without a method of Python
_FUNCTIONAL = (
    *("all_gather_single", "all_gather_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "all_gather_into_tensor_coalesced", "all_gather_single_coalesced", "all_reduce_coalesced"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)


@dataclass
class CollectiveRecord:
    """Names of collectives with their ranks, shapes and dtypes, by phase. `begin` opens the next phase.

    Collectives of other threads than the one that made the record have a sequence of their own, since their place among the
    others depends on time.
    """

    phases: dict[str, list[str]] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)
    _is_inside: bool = False

    def begin(self, phase: str) -> None:
        self.phases[phase] = []

    def note(self, entry: str) -> None:
        if threading.get_ident() != self._thread:
            self.beside.append(entry)
        elif not self._is_inside:
            next(reversed(self.phases.values())).append(entry)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Leaves out what this thread calls within a collective that is noted as a whole."""
        if threading.get_ident() != self._thread or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def runs(self) -> dict[str, list[str]]:
        """The sequence of each phase, with repetitions counted."""
        phases = self.phases | ({"other threads": self.beside} if self.beside else {})
        return {phase: _counted(entries) for phase, entries in phases.items()}


@contextmanager
def recorded() -> Iterator[CollectiveRecord]:
    """Records every collective, message and new process group of this rank while it lasts."""
    record = CollectiveRecord()
    with ExitStack() as undo:
        for name in _METHODS:
            if method := getattr(dist.ProcessGroup, name, None):
                undo.enter_context(patch.object(dist.ProcessGroup, name, _method(record, name, method)))
        for name in _OBJECTS:
            wrapper = _whole(record, f"objects {name}", getattr(c10d, name), lambda _, group: _ranks(group))
            for module in (c10d, dist):
                undo.enter_context(patch.object(module, name, wrapper))
        for name in _FUNCTIONAL:
            if function := getattr(functional, name, None):
                wrapper = _whole(record, f"functional {name}", function, lambda tensor, _: _shapes(tensor))
                undo.enter_context(patch.object(functional, name, wrapper))
        undo.enter_context(patch.object(c10d, "_new_group_with_tag", _new_group(record, c10d._new_group_with_tag)))
        yield record


def _method(record: CollectiveRecord, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(group: dist.ProcessGroup, *args: Any, **keywords: Any) -> Any:
        peer = [str(arg) for arg in args if isinstance(arg, int)][:1] if name in ("send", "recv") else []
        record.note(" ".join((name, *peer, _ranks(group), *filter(None, map(_shapes, args)))))
        return method(group, *args, **keywords)

    return noted


def _whole(
    record: CollectiveRecord, name: str, function: Callable[..., Any], described: Callable[[Any, Any], str]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **keywords: Any) -> Any:
        group = keywords.get("group", next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None))
        record.note(f"{name} {described(args[0] if args else None, group)}")
        with record.inside():
            return function(*args, **keywords)

    return noted


def _new_group(record: CollectiveRecord, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(ranks: Any = None, *args: Any, **keywords: Any) -> Any:
        record.note(f"new_group {list(ranks) if ranks is not None else 'all'}")
        with record.inside():
            return function(ranks, *args, **keywords)

    return noted


def _ranks(group: Any) -> str:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return f"[{','.join(map(str, ranks))}]"


def _shapes(value: Any) -> str:
    """Dtypes and shapes of the tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}".replace(" ", "")
    return ",".join(filter(None, map(_shapes, value))) if isinstance(value, list | tuple) else ""


def _counted(entries: list[str]) -> list[str]:
    runs = ((entry, len(list(same))) for entry, same in groupby(entries))
    return [entry if count == 1 else f"{count} x {entry}" for entry, count in runs]

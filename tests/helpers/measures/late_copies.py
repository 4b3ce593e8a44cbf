"""Copies between device and host that come as late as their contract allows, or whose sources stay as long as on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_longctx.runtime.core.host_copies import Leaving, PlainCopies


class LateCopies:
    """Makes every copy as late as the contract allows: back only when somebody waits for it, out likewise if `out_is_late`.

    A copy runs after the copies that it must follow. The source of a copy out is cloned, because its owner may overwrite it (on
    CUDA `Leaving` keeps the memory), unless it `is_kept`. Until a copy back is done, its target holds NaN.
    """

    def __init__(self, out_is_late: bool) -> None:
        self.out_is_late = out_is_late

    def to_host(
        self, source: Tensor, target: Tensor, after: tuple[Any, ...], is_kept: bool = False, room_bytes: int | None = None
    ) -> Any:
        kept = source if is_kept else source.clone()
        ticket = Late(lambda: target.copy_(kept), after)
        if not self.out_is_late:
            ticket.run()
        return ticket

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Any, ...], beside: bool = False) -> Any:
        target.fill_(float("nan"))
        return Late(lambda: target.copy_(source), after)

    def let_go(self) -> None:
        return

    def wait(self, ticket: Any) -> None:
        ticket.run()

    def wait_on_host(self, ticket: Any) -> None:
        ticket.run()


class SlowlyLeaving(PlainCopies):
    """Copies at once, but keeps sources as long as copies on CUDA do."""

    def __init__(self) -> None:
        self.leaving = Leaving(lambda ticket: None)

    def to_host(
        self, source: Tensor, target: Tensor, after: tuple[Any, ...], is_kept: bool = False, room_bytes: int | None = None
    ) -> Any:
        super().to_host(source, target, after)
        if not is_kept:
            self.leaving.add(source, None, room_bytes)

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Any, ...], beside: bool = False) -> Any:
        if not beside:
            self.leaving.drop_all()
        super().to_device(source, target, after, beside)

    def let_go(self) -> None:
        self.leaving.drop_all()


class Late:
    """One copy that has not been made yet."""

    def __init__(self, copy: Callable[[], Any], after: tuple[Any, ...]) -> None:
        self.copy, self.after, self.is_done = copy, after, False

    def run(self) -> None:
        if not self.is_done:
            self.is_done = True
            for ticket in self.after:
                ticket.run()
            self.copy()

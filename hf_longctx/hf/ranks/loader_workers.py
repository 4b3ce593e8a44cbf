"""Keeps workers of data loaders alive while a training stops after a signal, since its last step still needs their batches.

If Python starts processes by its fork server (the default from 3.14 on), workers end with that server, and a signal to all
processes of a job also reaches it. The server imports this module when it starts, and then ignores such signals.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any

from torch.utils.data import DataLoader

from hf_longctx.hf.ranks.stop_signals import listening_flag, outlive_signals

# variable that makes the server change its signals when it imports this module
_ASKED = "HF_LONGCTX_SHIELDS_FORK_SERVER"


def start_fork_server(method: Any = None) -> None:
    """Starts the fork server if a loader would start its workers by it; a running server stays unchanged.

    method: name of a start method, a context of `multiprocessing`, or None for the default.
    """
    context = multiprocessing.get_context(method) if method is None or isinstance(method, str) else method
    if context.get_start_method() != "forkserver":
        return
    preloaded = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if __name__ not in preloaded:
        context.set_forkserver_preload([*preloaded, __name__])
    os.environ[_ASKED] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_ASKED]


def _outlive_signals() -> None:
    found = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}

    def restore() -> None:
        for number, handler in found.items():
            signal.signal(number, handler)

    # processes forked from the server end as usual
    os.register_at_fork(after_in_child=restore)


if os.environ.pop(_ASKED, None):
    _outlive_signals()


def keep_workers(loader: Any) -> None:
    """Makes workers that a torch loader starts from now on survive a signal to all processes, like the rank. Idempotent."""
    # accelerate wraps the loader that starts the workers
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader) or not inner.num_workers:
        return
    start_fork_server(inner.multiprocessing_context)
    first = inner.worker_init_fn
    if not (isinstance(first, partial) and first.func is _begin_worker):
        inner.worker_init_fn = partial(_begin_worker, first=first, is_listening=listening_flag())


def _begin_worker(worker: int, first: Callable[[int], Any] | None, is_listening: Any) -> None:
    outlive_signals(is_listening)
    if first is not None:
        first(worker)

"""Workers of data loaders, kept alive while a training obeys a signal: its last step still needs their batches.

Python's server of forked processes, kept alive while a training obeys a signal.

Where Python starts processes by that server (its default from 3.14), workers of data loaders end when the server does, and a
signal to all processes of a job reaches the server, too. It imports this module when it starts, and ignores such signals then.
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

# tells the server that its import of this module is meant to change its signals
_ASKED = "HF_LONGCTX_SHIELDS_FORK_SERVER"


def start_fork_server(method: Any = None) -> None:
    """Starts the server if a loader would start its workers by it; a server that runs already is left as it is.

    method: the name of a start method, a context of `multiprocessing`, or None for the default.
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

    # processes that are forked from the server end as always
    os.register_at_fork(after_in_child=restore)


if os.environ.pop(_ASKED, None):
    _outlive_signals()


def keep_workers(loader: Any) -> None:
    """Lets workers that a loader of torch starts from now on outlive a signal to all processes, as the rank does. Idempotent."""
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

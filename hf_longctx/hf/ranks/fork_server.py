"""Python's server of forked processes, kept alive while a training obeys a signal.

Where Python starts processes by that server (its default from 3.14), workers of data loaders end when the server does, and a
signal to all processes of a job reaches the server, too. It imports this module when it starts, and ignores such signals then.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from typing import Any

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

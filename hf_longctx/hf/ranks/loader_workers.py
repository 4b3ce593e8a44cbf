"""Workers of data loaders, kept alive while a training obeys a signal: its last step still needs their batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from hf_longctx.hf.ranks.fork_server import start_fork_server
from hf_longctx.hf.ranks.stop_signals import listening_flag, outlive_signals


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

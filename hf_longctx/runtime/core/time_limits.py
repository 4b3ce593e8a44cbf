"""Time limits of process groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# on NCCL the limit counts from the call on the host, which may run many kernels ahead of the device
_ON_DEVICE_S = 600.0


def group_limit(timeout_s: float, backend: str | None = None) -> timedelta:
    """How long a collective of a group may take before it fails, if ranks that work may be `timeout_s` seconds late.

    On gloo, that long. On NCCL at least ten minutes, because its watchdog ends the whole process and would end healthy runs with
    long kernels. `backend`: that of the default group by default.
    """
    if backend is None:
        backend = dist.get_backend() if dist.is_initialized() else "gloo"
    return timedelta(seconds=timeout_s if backend == "gloo" else max(_ON_DEVICE_S, timeout_s))

"""Time limits of process groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# on NCCL the limit counts from the call on the host, which may run many kernels ahead of the device
_ON_DEVICE_S, _ON_DEVICE_FACTOR = 600.0, 10.0


def group_limit(timeout_s: float, backend: str | None = None) -> timedelta:
    """How long a collective of a group may take before it fails, if lost ranks are to be noticed after `timeout_s` seconds.

    On gloo, that long. On NCCL it is a last resort, at least ten minutes, because its watchdog ends the whole process and would
    end healthy runs with long kernels; the heartbeats of the training notice a lost rank in time. `backend`: that of the default
    group by default.
    """
    if backend is None:
        backend = dist.get_backend() if dist.is_initialized() else "gloo"
    return timedelta(seconds=timeout_s if backend == "gloo" else max(_ON_DEVICE_S, _ON_DEVICE_FACTOR * timeout_s))

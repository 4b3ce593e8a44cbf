"""Host memory that this process may use: the machine's, or less if its container has a limit.

Budgets of offloading and the self-test read it.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def host_bytes(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """(available, total) bytes of host memory, within the limit of the control group (version 2) in `cgroup`."""
    machine = psutil.virtual_memory()
    available_bytes, total_bytes = int(machine.available), int(machine.total)
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        used_bytes = int((cgroup / "memory.current").read_text())
        pages = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # there is no such group, or it says "max": no limit
        return available_bytes, total_bytes
    # the page cache of recently read files is counted as used, but given up when memory is needed
    used_bytes -= int(pages.get("inactive_file", 0))
    return min(available_bytes, max(0, limit_bytes - used_bytes)), min(total_bytes, limit_bytes)

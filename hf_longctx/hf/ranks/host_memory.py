"""Memory of the host that this process may have: the machine's, or less where a container has a limit of its own."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def host_bytes(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Bytes that are available, and that there are; under the limit of the control group (version 2) in `cgroup`."""
    machine = psutil.virtual_memory()
    available_bytes, total_bytes = int(machine.available), int(machine.total)
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        used_bytes = int((cgroup / "memory.current").read_text())
        pages = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # no such group, or "max": no limit
        return available_bytes, total_bytes
    # files that were read lately are counted, and given up where memory is needed
    used_bytes -= int(pages.get("inactive_file", 0))
    return min(available_bytes, max(0, limit_bytes - used_bytes)), min(total_bytes, limit_bytes)

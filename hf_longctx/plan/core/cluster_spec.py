"""Hardware of a run: one device, its links, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One rank's device, its links to ranks of its node, and its share of the network. Rates are sustained, not peak.

    message_s: seconds that one exchange costs beside its bytes. kernel_s: seconds to start one kernel. backward_matmul,
    backward_attention: backward's time over forward's at equal tokens. copy_bytes_per_s: to and from the host, whose memory
    has host_bytes for each rank (0: unknown). exchange_bytes_per_s: (ranks, rate) of all-to-alls that were measured; other
    sizes follow from links and network. source: where the numbers come from; none for a guess.
    """

    name: str
    matmul_flops_per_s: float
    attention_flops_per_s: float
    device_bytes: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    message_s: float
    kernel_s: float = 1e-5
    backward_matmul: float = 2.0
    backward_attention: float = 2.5
    copy_bytes_per_s: float = 1e10
    host_bytes: int = 0
    exchange_bytes_per_s: tuple[tuple[int, float], ...] = ()
    source: str = ""


# what formulas of bytes leave of a device for workspace, fragmentation and the process itself
USABLE_SHARE = 0.8


# a guess that only has to rank plans until the run has measured its own coefficients
GENERIC_CPU = HardwareSpec("generic cpu", 3e10, 2e10, 8 * 2**30, 1e9, 1e9, 2e-4)


GENERIC_GPU = HardwareSpec("generic gpu", 2e14, 1.5e14, 40 * 2**30, 1e11, 2.5e10, 3e-5)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All ranks of the job, `ranks_per_node` of them on each node."""

    num_ranks: int
    ranks_per_node: int
    hardware: HardwareSpec

"""The hardware that a run is planned for: one device with its links, and how many of them there are.

The cost model turns these rates into seconds. They come from a hardware profile (`plan/cost/profiles.py`), from a measurement,
or from the generic guesses below.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One rank's device, its links to other ranks of its node, and its share of the network. Rates are sustained, not peak.

    message_s: fixed seconds of one exchange, whatever its bytes. kernel_s: seconds to start one kernel. backward_matmul,
    backward_attention: time of the backward pass divided by that of the forward, for the same tokens. copy_bytes_per_s: copies
    between device and host. host_bytes: host memory available to each rank (0: unknown). exchange_bytes_per_s: measured
    all-to-alls as (number of ranks, rate); rates for other numbers of ranks follow from link and network. source: where the
    numbers come from; empty for a guess. memory_bytes_per_s: reads and writes of the device's own memory (0: unknown).
    elementwise_bytes_per_s: what operations without products read and write (0: matmul_flops_per_s counts their seconds in).
    tile_keys: keys that attention computes at once, hidden ones included; 0: only pairs that are seen count.
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
    memory_bytes_per_s: float = 0.0
    elementwise_bytes_per_s: float = 0.0
    tile_keys: int = 0


# share of a device that predicted bytes may fill; the rest is for fragmentation, communication and the process itself
USABLE_SHARE = 0.8


# keys that torch's flash attention for CPUs computes at once
CPU_TILE_KEYS = 512

# guessed rates, good enough to rank plans until the run has measured its own coefficients
GENERIC_CPU = HardwareSpec("generic cpu", 3e10, 2e10, 8 * 2**30, 1e9, 1e9, 2e-4, tile_keys=CPU_TILE_KEYS)
GENERIC_GPU = HardwareSpec("generic gpu", 2e14, 1.5e14, 40 * 2**30, 1e11, 2.5e10, 3e-5)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All ranks of the job, `ranks_per_node` on each node, all with the same hardware."""

    num_ranks: int
    ranks_per_node: int
    hardware: HardwareSpec

"""Settings of the planner, and the degrees that sequence groups may have.

`hf/` derives them from the user's `LongContextConfig`, and `sim/` from the options of the command line.

The hardware that a run is planned for: one device with its links, and how many of them there are.

The cost model turns these rates into seconds. They come from a hardware profile (`plan/cost/profiles.py`), from a measurement,
or from the generic guesses below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_longctx.plan.core.types import LayerRange

Solver = Literal["auto", "greedy", "lp", "milp", "static"]
SOLVERS: tuple[str, ...] = ("auto", "greedy", "lp", "milp", "static")

# how groups of two or more ranks share attention; "auto" picks the cheapest of the others for every degree and step
GroupMethod = Literal["auto", "ulysses", "ring", "hybrid"]
GROUP_METHODS: tuple[str, ...] = ("auto", "ulysses", "ring", "hybrid")

# ranks of a usual node
_NODE_RANKS = 8


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """Memory of one rank for saved activations and workspace, after weights, gradients and optimizer states.

    kept_tokens: a rank with at most this many tokens keeps all activations if they fit with their workspace; with more, layers
    are recomputed or offloaded. device_bytes, host_bytes: memory of one rank (host_bytes 0: nothing is offloaded). tile_tokens:
    chunks with more tokens than this run norms, MLP and loss in tiles of so many (0: untiled).
    """

    kept_tokens: int
    device_bytes: int
    host_bytes: int = 0
    tile_tokens: int = 2048

    def __post_init__(self) -> None:
        if min(self.kept_tokens, self.device_bytes, self.host_bytes, self.tile_tokens) < 0:
            raise ValueError(f"{self} has a negative number; every field must be 0 or more")


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Limits that a plan must keep, and how hard the planner searches within them.

    tokens_per_rank: most tokens a rank holds at once, so a group of d ranks takes at most d times as many. longest_tokens: most
    tokens of a sequence that is alone in a group of the largest degree, if that is more (`longest_alone` finds it); 0: no more
    than others. It holds where chunks may be cut into slices: on one stage, with `activations`. degrees: allowed sizes of
    sequence groups, ascending. static_degree: the one degree of solver "static" (0: the best one). micro_batch_trials: how many
    numbers of micro-batches are tried, starting at the fewest that fit. one_micro_batch: put everything into one micro-batch or
    fail, for a caller that makes one forward per plan. solver_time_limit_s: seconds that solvers "lp" and "milp" may take for one
    step, not counting the greedy layout that they start from. activations: memory that decides which activations are recomputed
    or offloaded (None: all are kept). stages: layer ranges of every pipeline stage, one range for each model part (empty: no
    pipeline). lend_stages: idle stages may lend their ranks to others, for which every rank must hold the weights of all stages.

    Three extensions of FlexSP can be switched off. time_aware: cut micro-batches by time as well as by tokens, and move
    sequences between them to fill idle time. nested: where parameters allow it, ranks change groups inside a step and wait
    for the partners of their next group only. node_aligned: a group that fits into a node stays inside one. The fourth
    extension, degrees that are not powers of two, is chosen by `degrees`.
    """

    tokens_per_rank: int
    degrees: tuple[int, ...]
    solver: Solver = "auto"
    static_degree: int = 0
    micro_batch_trials: int = 5
    one_micro_batch: bool = False
    time_aware: bool = True
    nested: bool = True
    node_aligned: bool = True
    solver_time_limit_s: float = 10.0
    activations: ActivationBudget | None = None
    stages: tuple[tuple[LayerRange, ...], ...] = ()
    lend_stages: bool = False
    longest_tokens: int = 0

    def __post_init__(self) -> None:
        if self.tokens_per_rank < 1:
            raise ValueError(f"tokens_per_rank is {self.tokens_per_rank}; it must be at least 1")
        if self.longest_tokens < 0:
            raise ValueError(f"longest_tokens is {self.longest_tokens}; it must be 0 or more")
        if not self.degrees or list(self.degrees) != sorted(set(self.degrees)) or self.degrees[0] < 1:
            raise ValueError(
                f"degrees {self.degrees} must be positive, ascending and without repeats; give, for example, (1, 2, 4)"
            )
        if self.solver not in SOLVERS:
            raise ValueError(f"solver {self.solver!r} is not one of {', '.join(SOLVERS)}; choose one of these")
        if self.static_degree and self.static_degree not in self.degrees:
            raise ValueError(f"static_degree {self.static_degree} is not among the degrees {self.degrees}; choose one of these")
        if self.micro_batch_trials < 1:
            raise ValueError(f"micro_batch_trials is {self.micro_batch_trials}; it must be at least 1")
        if self.lend_stages and (len(self.stages) < 2 or len(self.stages[0]) > 1):
            raise ValueError(
                "lend_stages needs at least two pipeline stages of one layer range each; set stages, or leave it out"
            )
        if not self.solver_time_limit_s > 0:
            raise ValueError(f"solver_time_limit_s is {self.solver_time_limit_s}; give a positive number of seconds")

    @property
    def room_tokens(self) -> int:
        """Most tokens of a sequence."""
        room = self.tokens_per_rank * self.degrees[-1]
        may_be_cut = self.activations is not None and not self.one_micro_batch and len(self.stages) < 2
        return max(room, self.longest_tokens) if may_be_cut else room


def check_degrees(degrees: tuple[int, ...], num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> None:
    """Raise ValueError unless groups of every degree can run `method` on `num_ranks` ranks.

    A ring works with any degree, and therefore so do "auto" and "hybrid". Ulysses needs a power of two or all ranks at once:
    its groups start at a multiple of their degree, so that a fixed pool of process groups serves every plan. It also needs at
    least one head for every rank.
    """
    for degree in degrees:
        if degree > num_ranks:
            raise ValueError(f"degree {degree} needs {degree} ranks, but the run has {num_ranks}; lower `degrees` or start more")
        if method == "ulysses" and degree & (degree - 1) and degree != num_ranks:
            raise ValueError(
                f"degree {degree} is neither a power of two nor all {num_ranks} ranks, as Ulysses requires; use method 'auto', "
                f"'hybrid' or 'ring'"
            )
        if method == "ulysses" and degree > num_heads:
            raise ValueError(
                f"degree {degree} exceeds the model's {num_heads} attention heads, but Ulysses needs at least one head for every "
                f"rank; lower `degrees` to {num_heads} or less, or use method 'auto', 'hybrid' or 'ring'"
            )


def default_degrees(num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> tuple[int, ...]:
    """Powers of two, and all ranks, that `check_degrees` allows."""
    powers = {1 << bit for bit in range(num_ranks.bit_length())} | {num_ranks}
    limit = min(num_ranks, num_heads) if method == "ulysses" else num_ranks
    return tuple(sorted(degree for degree in powers if degree <= limit))


def all_degrees(num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> tuple[int, ...]:
    """`default_degrees`, every number of ranks up to 8 (a usual node), and multiples of 8 up to 64.

    More degrees would take the planner longer and gain little. Ulysses supports the default degrees only; for the others
    `check_degrees` raises an error that says so.
    """
    inside, nodes = range(1, min(_NODE_RANKS, num_ranks) + 1), range(_NODE_RANKS, min(64, num_ranks) + 1, _NODE_RANKS)
    return tuple(sorted({*default_degrees(num_ranks, num_heads, method), *inside, *nodes}))


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

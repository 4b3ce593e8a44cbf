"""Settings of the planner, degrees of sequence groups, and the hardware for which a run is planned.

`hf/` derives settings from the user's `LongContextConfig`, and `sim/` from the options of the command line. Rates of hardware,
which the cost model turns into seconds, come from a profile (`plan/cost/profiles.py`), a measurement, or the guesses below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_longctx.plan.core.types import LayerRange

Solver = Literal["auto", "greedy", "lp", "milp", "static"]
SOLVERS: tuple[str, ...] = ("auto", "greedy", "lp", "milp", "static")

# how groups of two or more ranks share attention; "auto" is the cheapest of the others for every degree and step
GroupMethod = Literal["auto", "ulysses", "ring", "hybrid"]
GROUP_METHODS: tuple[str, ...] = ("auto", "ulysses", "ring", "hybrid")

# usual number of ranks of a node
_NODE_RANKS = 8


class NoRoom(ValueError):
    """Raised if sequences do not fit into the memory of an `ActivationBudget`, whatever is recomputed or offloaded."""


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """Memory of one rank for saved activations and workspace, after weights, gradients and optimizer states."""

    # up to this many tokens, a rank keeps all activations if they and their workspace fit; with more, layers are recomputed
    # or offloaded
    kept_tokens: int
    # memory of one rank (host_bytes 0: nothing is offloaded)
    device_bytes: int
    host_bytes: int = 0
    # tokens per tile of norms, MLP and loss, for chunks with more tokens than that (0: untiled)
    tile_tokens: int = 2048

    def __post_init__(self) -> None:
        if min(self.kept_tokens, self.device_bytes, self.host_bytes, self.tile_tokens) < 0:
            raise ValueError(f"{self} has a negative number; every field must be 0 or more")


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Limits of a plan, and the effort of the search within them.

    Three extensions of FlexSP can be switched off: `time_aware`, `nested` and `node_aligned`.
    """

    # most tokens a rank holds at once, so a group of d ranks takes at most d times as many
    tokens_per_rank: int
    # allowed sizes of sequence groups, ascending
    degrees: tuple[int, ...]
    solver: Solver = "auto"
    # degree of solver "static" (0: the best one)
    static_degree: int = 0
    # how many numbers of micro-batches are tried, starting at the fewest that fit
    micro_batch_trials: int = 5
    # put all sequences into one micro-batch or fail, for callers that run one forward per plan
    one_micro_batch: bool = False
    # cut micro-batches by time as well as by tokens, and move sequences between them to fill idle time
    time_aware: bool = True
    # if parameters allow it, let ranks change groups inside a step, waiting only for the partners of their next group
    nested: bool = True
    # keep a group that fits into a node inside one
    node_aligned: bool = True
    # seconds that solvers "lp" and "milp" may take per step, besides the greedy layout from which they start
    solver_time_limit_s: float = 10.0
    # memory that decides which activations are recomputed or offloaded (None: all are kept)
    activations: ActivationBudget | None = None
    # layer ranges of every pipeline stage (empty: no pipeline)
    stages: tuple[tuple[LayerRange, ...], ...] = ()
    # share of the output head's work that each stage does (empty: the last stage does all of it)
    output_shares: tuple[float, ...] = ()
    # let idle stages lend their ranks to others; every rank must then hold the weights of all stages
    lend_stages: bool = False
    # most tokens of a sequence alone in a group of the largest degree (from `longest_alone`), if more than that of others;
    # 0: no more. Used if chunks may be cut into slices: on one stage, with `activations`
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
        if self.output_shares and not (min(self.output_shares) >= 0 and 0 < sum(self.output_shares) < float("inf")):
            raise ValueError(f"output_shares are {self.output_shares}; give numbers of 0 or more, some of them above 0")
        if self.output_shares and (len(self.output_shares) != len(self.stages) or self.lend_stages or len(self.stages[0]) > 1):
            raise ValueError(
                f"{len(self.output_shares)} output_shares for {len(self.stages)} stages; give one for every stage of one layer "
                f"range, or none if stages lend their ranks"
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
    """Raises ValueError unless groups of every degree can run `method` on `num_ranks` ranks.

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
    """Returns powers of two, and all ranks, as far as `check_degrees` allows them."""
    powers = {1 << bit for bit in range(num_ranks.bit_length())} | {num_ranks}
    limit = min(num_ranks, num_heads) if method == "ulysses" else num_ranks
    return tuple(sorted(degree for degree in powers if degree <= limit))


def all_degrees(num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> tuple[int, ...]:
    """Returns `default_degrees`, every number of ranks up to 8 (a usual node), and multiples of 8 up to 64.

    More degrees would take the planner longer and gain little. Ulysses supports only the default degrees; for others
    `check_degrees` raises an error.
    """
    inside, nodes = range(1, min(_NODE_RANKS, num_ranks) + 1), range(_NODE_RANKS, min(64, num_ranks) + 1, _NODE_RANKS)
    return tuple(sorted({*default_degrees(num_ranks, num_heads, method), *inside, *nodes}))


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One rank's device, its links to other ranks of its node, and its share of the network. Rates are sustained, not peak."""

    name: str
    matmul_flops_per_s: float
    attention_flops_per_s: float
    device_bytes: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    # fixed seconds of one exchange, for any number of bytes
    message_s: float
    # seconds to start one kernel
    kernel_s: float = 1e-5
    # time of the backward pass divided by that of the forward, for the same tokens
    backward_matmul: float = 2.0
    backward_attention: float = 2.5
    # copies between device and host
    copy_bytes_per_s: float = 1e10
    # host memory available to each rank (0: unknown)
    host_bytes: int = 0
    # measured rates of all-to-alls as (number of ranks, rate); others follow from link and network
    exchange_bytes_per_s: tuple[tuple[int, float], ...] = ()
    # source of the numbers; empty for a guess
    source: str = ""
    # reads and writes of the device's own memory (0: unknown)
    memory_bytes_per_s: float = 0.0
    # reads and writes of operations without matrix products (0: matmul_flops_per_s includes their seconds)
    elementwise_bytes_per_s: float = 0.0
    # keys that attention computes at once, masked ones included (0: count visible pairs only)
    tile_keys: int = 0
    # rate of products in fp8 divided by matmul_flops_per_s (0: unknown, see `ASSUMED_FP8_RATIO`)
    fp8_ratio: float = 0.0
    # measured rates of gathers of weights, and of sums of gradients, as (number of ranks, rate): of the ranks of a node, and of
    # all ranks on several nodes; others are counted as exchanges
    gather_bytes_per_s: tuple[tuple[int, float], ...] = ()
    scatter_bytes_per_s: tuple[tuple[int, float], ...] = ()


# rate of products in fp8 with scales of rows divided by that in bf16, where it was not measured: others' measurements on H100 are
# 1.5 to 1.88 (FBGEMM#2546, torchao#2185)
ASSUMED_FP8_RATIO = 1.5

# share of a device that predicted bytes may fill; the rest is for fragmentation, communication and the process
USABLE_SHARE = 0.8
# share if torch's allocator has expandable segments: a freed block then leaves no gap but parts of pages of 2 MiB, and
# predicted peaks were 0.3 to 3.2 % above measured ones (docs/benchmarks/h200-2026-11-27.md), so that 8 % are twice the error
EXPANDABLE_SHARE = 0.92
# least bytes of a device for the process, whose context does not shrink with the device
LEAST_RESERVE_BYTES = 2 * 2**30


def usable_share_bytes(device_bytes: int, is_expandable: bool) -> int:
    """Returns the bytes of a device that predicted bytes may fill beside no communicators.

    is_expandable: torch's allocator has expandable segments.
    """
    usual = int(device_bytes * USABLE_SHARE)
    if not is_expandable:
        return usual
    return max(usual, min(int(device_bytes * EXPANDABLE_SHARE), device_bytes - LEAST_RESERVE_BYTES))


# keys that torch's flash attention for CPUs computes at once
CPU_TILE_KEYS = 512

# guessed rates, sufficient to rank plans until the run has measured its own coefficients
GENERIC_CPU = HardwareSpec("generic cpu", 3e10, 2e10, 8 * 2**30, 1e9, 1e9, 2e-4, tile_keys=CPU_TILE_KEYS)
GENERIC_GPU = HardwareSpec("generic gpu", 2e14, 1.5e14, 40 * 2**30, 1e11, 2.5e10, 3e-5)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All ranks of the job, `ranks_per_node` on each node, all with the same hardware."""

    num_ranks: int
    ranks_per_node: int
    hardware: HardwareSpec

"""Settings of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_longctx.plan.core.types import LayerRange

Solver = Literal["auto", "greedy", "lp", "milp", "static"]


SOLVERS: tuple[str, ...] = ("auto", "greedy", "lp", "milp", "static")


# how groups of two or more ranks share attention; "auto" is the cheapest of the others for every degree and step
GroupMethod = Literal["auto", "ulysses", "ring", "hybrid"]


GROUP_METHODS: tuple[str, ...] = ("auto", "ulysses", "ring", "hybrid")


_NODE_RANKS = 8


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """Room for what chunks save and work with, beside weights, gradients and optimizer states.

    kept_tokens: up to so many tokens on a rank everything is kept; beyond them layers are recomputed or offloaded.
    device_bytes, host_bytes: of one rank (0 on the host: nothing is offloaded). tile_tokens: token tile of norms, MLP and loss
    in chunks of more (0: untiled).
    """

    kept_tokens: int
    device_bytes: int
    host_bytes: int = 0
    tile_tokens: int = 2048

    def __post_init__(self) -> None:
        if min(self.kept_tokens, self.device_bytes, self.host_bytes, self.tile_tokens) < 0:
            raise ValueError(f"{self} must not have negative numbers")


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What a plan may use.

    tokens_per_rank: most tokens a rank holds at once, so a group of d ranks takes at most d times as many. activations: how
    chunks above what is wholly kept make room (None: everything is kept, whatever its size). stages: the layers of every
    pipeline stage, part by part (none: no pipeline).
    degrees: allowed sizes of sequence groups, ascending. static_degree: the one degree of solver "static" (0: the best).
    micro_batch_trials: how many numbers of micro-batches are tried, from the fewest that fit. solver_time_limit_s: what
    solvers "lp" and "milp" may take for one step, beside the greedy layout that they start from.
    one_micro_batch: everything runs at once or not at all, for a caller that makes one forward per plan.

    What goes beyond FlexSP can be switched off: time_aware (micro-batches are cut by time as well as by tokens, and
    sequences move between them to fill their slack), nested (where parameters allow it, ranks change groups inside a step
    and wait for their partners alone), node_aligned (a group that fits into a node does not leave it). The fourth, integer
    degrees, is a matter of `degrees`.
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

    def __post_init__(self) -> None:
        if self.tokens_per_rank < 1:
            raise ValueError(f"tokens_per_rank is {self.tokens_per_rank}; a rank must hold at least one token")
        if not self.degrees or list(self.degrees) != sorted(set(self.degrees)) or self.degrees[0] < 1:
            raise ValueError(f"degrees {self.degrees} must be positive, ascending and without repeats, for example (1, 2, 4)")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver {self.solver!r} is not one of {', '.join(SOLVERS)}")
        if self.static_degree and self.static_degree not in self.degrees:
            raise ValueError(f"static_degree {self.static_degree} is not among the degrees {self.degrees}")
        if self.micro_batch_trials < 1:
            raise ValueError(f"micro_batch_trials is {self.micro_batch_trials}; at least one is needed")
        if not self.solver_time_limit_s > 0:
            raise ValueError(f"solver_time_limit_s is {self.solver_time_limit_s}; give a positive number of seconds")


def check_degrees(degrees: tuple[int, ...], num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> None:
    """Raises ValueError unless groups of every degree can run `method` on `num_ranks` ranks.

    A ring takes any degree, so "auto" and "hybrid" do too. Ulysses groups start at a multiple of their degree, so that a
    fixed pool of process groups serves every plan, which needs powers of two or all ranks at once; and every rank gets at
    least one head.
    """
    for degree in degrees:
        if degree > num_ranks:
            raise ValueError(f"degree {degree} needs {degree} ranks, the run has {num_ranks}; lower `degrees` or start more")
        if method == "ulysses" and degree & (degree - 1) and degree != num_ranks:
            raise ValueError(
                f"degree {degree} is neither a power of two nor all {num_ranks} ranks, and Ulysses takes no other; use method "
                f"'auto', 'hybrid' or 'ring'"
            )
        if method == "ulysses" and degree > num_heads:
            raise ValueError(
                f"degree {degree} exceeds the model's {num_heads} attention heads, and Ulysses gives every rank at least one; "
                f"lower `degrees` to {num_heads} or less, or use method 'auto', 'hybrid' or 'ring'"
            )


def default_degrees(num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> tuple[int, ...]:
    """Powers of two and all ranks, as far as `check_degrees` allows them."""
    powers = {1 << bit for bit in range(num_ranks.bit_length())} | {num_ranks}
    limit = min(num_ranks, num_heads) if method == "ulysses" else num_ranks
    return tuple(sorted(degree for degree in powers if degree <= limit))


def all_degrees(num_ranks: int, num_heads: int, method: GroupMethod = "auto") -> tuple[int, ...]:
    """`default_degrees`, every number of ranks up to 8, and multiples of 8 (of a usual node) up to 64.

    More would take the planner longer and gain little. Ulysses takes no others than the default ones, which `check_degrees`
    says by name.
    """
    inside, nodes = range(1, min(_NODE_RANKS, num_ranks) + 1), range(_NODE_RANKS, min(64, num_ranks) + 1, _NODE_RANKS)
    return tuple(sorted({*default_degrees(num_ranks, num_heads, method), *inside, *nodes}))

"""SPPO's bounds for its search (arXiv 2503.10377): numbers of slices, and how ranks are split into sequence and pipeline groups.

Its shares of offload are in `activation.py` (`hidden_shares`), where the linear program finds them when only the link binds.

Its heuristic solver keeps sequence parallelism inside a node and gives a slice 2K to 16K tokens per device and layer. It also
says to avoid pipelines across nodes, but its own best runs have 8 x 4 on four nodes of eight; so the pipeline takes all ranks
that are left, wherever they stand. It orders slices by rising length with falling shares; a causal split by operations gives
falling lengths and rising shares. `hidden_shares` takes any order.
"""

from __future__ import annotations

LEAST_SLICE_TOKENS = 2 * 1024
MOST_SLICE_TOKENS = 16 * 1024


def slice_counts(num_tokens: int, degree: int) -> range:
    """Numbers of slices for which an even slice of a sequence has 2K to 16K tokens on each of `degree` ranks.

    A sequence that is too short for one such slice runs whole.
    """
    if num_tokens < 1 or degree < 1:
        raise ValueError(f"{num_tokens} tokens on {degree} ranks cannot be cut; give at least one of both")
    fewest = -(-num_tokens // (MOST_SLICE_TOKENS * degree))
    return range(fewest, max(fewest, num_tokens // (LEAST_SLICE_TOKENS * degree)) + 1)


def sppo_degrees(num_ranks: int, ranks_per_node: int) -> tuple[tuple[int, int], ...]:
    """(sequence, pipeline) sizes whose product is all ranks, the sequence part inside a node, the widest first."""
    if num_ranks < 1 or ranks_per_node < 1:
        raise ValueError(f"{num_ranks} ranks on nodes of {ranks_per_node} cannot be split; give at least one of both")
    widths = [width for width in range(min(num_ranks, ranks_per_node), 0, -1) if num_ranks % width == 0]
    # a sequence group that does not divide a node would reach into the next one
    return tuple((width, num_ranks // width) for width in widths if ranks_per_node % width == 0 or width == num_ranks)

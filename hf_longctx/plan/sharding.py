"""Which token of a chunk lies at which position of its group: one rule for collator, runtime and simulator.

Tokens are laid out in span order and cut into contiguous shards that differ by at most one token, longer shards first.
A rank without a token would crash HF layers (they reject empty tensors), so a chunk with fewer tokens than ranks is
padded with dummy tokens: each is a document of its own, carries no loss and lies behind the real tokens.
"""

from __future__ import annotations

from itertools import accumulate

from hf_longctx.plan.types import Chunk


def num_dummy_tokens(num_tokens: int, degree: int) -> int:
    """Dummy tokens that bring a chunk of `num_tokens` tokens to at least one token per rank."""
    return max(0, degree - num_tokens)


def shard_tokens(num_tokens: int, degree: int) -> tuple[int, ...]:
    """Tokens of every rank of a group of `degree` ranks, dummy tokens included; never zero."""
    total = num_tokens + num_dummy_tokens(num_tokens, degree)
    base, remainder = divmod(total, degree)
    return tuple(base + (index < remainder) for index in range(degree))


def shard_bounds(num_tokens: int, degree: int, index: int) -> tuple[int, int]:
    """Half-open range of the padded chunk that the rank at place `index` of the group holds."""
    shards = shard_tokens(num_tokens, degree)
    start = sum(shards[:index])
    return start, start + shards[index]


def document_bounds(chunk: Chunk, degree: int) -> tuple[int, ...]:
    """Cumulative document lengths of the padded chunk (`cu_seqlens`), starting at 0; dummy tokens stand alone."""
    lengths = [span.num_tokens for span in chunk.spans] + [1] * num_dummy_tokens(chunk.num_tokens, degree)
    return (0, *accumulate(lengths))

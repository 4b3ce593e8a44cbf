"""Attention of several documents that fill one length of plans in one call, each as heads of its own.

An operator computes every head by itself, so documents of n times the heads give each document the bits of a call of its own, if
the operator does not split its work otherwise. A larger grid fills a device better, but tokens are copied. So both are looked at
on the device itself (`StackChecks`), once for each number of documents and octave of lengths; without a gain, on CPUs, and where
one bit differs, documents have a call each.

Shapes: H query heads, G KV heads, S tokens of n documents one after the other, N tokens to which each is filled up with zeros, D
head size of queries and keys, E of values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import PACKED_ROWS, PACKED_TOKENS
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.tiles.cuda import device_capability, planned_tokens
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.tile import choose_backend, tile_backward, tile_forward

logger = logging.getLogger(__name__)

# numbers of documents in a call, largest first
_COUNTS = (4, 2)
# least share of the seconds of calls for each document that one call must save
_LEAST_GAIN = 0.03
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of which a verdict holds. head_dim: of queries and keys; value_dim: of values."""

    capability: tuple[int, int]
    dtype: torch.dtype
    num_heads: int
    num_kv: int
    head_dim: int
    value_dim: int


def stack_forward(q_HSD: Tensor, k_GSD: Tensor, v_GSE: Tensor, lengths: Sequence[int], scores: Scores) -> tuple[Tensor, Tensor]:
    """Returns output [H, S, E] and LSE [H, S] of causal documents with these lengths, which `planned_tokens` fills up alike."""
    out, lse = tile_forward(_tile(q_HSD, k_GSD, v_GSE, lengths, scores))
    return _unstacked(out, lengths), _unstacked(lse, lengths)


def stack_backward(
    gradient_HSE: Tensor,
    q_HSD: Tensor,
    k_GSD: Tensor,
    v_GSE: Tensor,
    out_HSE: Tensor,
    lse_HS: Tensor,
    *,
    lengths: Sequence[int],
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of q, k and v, given output and LSE, into which sinks may have been merged."""
    gradient, out, lse = (_stacked(x, lengths) for x in (gradient_HSE, out_HSE, lse_HS))
    dq, dk, dv = tile_backward(gradient, _tile(q_HSD, k_GSD, v_GSE, lengths, scores), out, lse)
    return _unstacked(dq, lengths), _unstacked(dk, lengths), _unstacked(dv, lengths)


def _tile(q_HSD: Tensor, k_GSD: Tensor, v_GSE: Tensor, lengths: Sequence[int], scores: Scores) -> TileInputs:
    q, k, v = (_stacked(x, lengths) for x in (q_HSD, k_GSD, v_GSE))
    return TileInputs(q, k, v, scores, causal=True)


def _stacked(x_HSD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Turns documents into heads, filled up with zeros: [H, S, ...] to [n * H, N, ...]."""
    num_tokens = planned_tokens(lengths[0])
    stacked = x_HSD.new_empty((len(lengths), x_HSD.shape[0], num_tokens, *x_HSD.shape[2:]))
    for own, document in zip(stacked, x_HSD.split(list(lengths), 1), strict=True):
        own[:, : document.shape[1]] = document
        own[:, document.shape[1] :] = 0
    return stacked.flatten(0, 1)


def _unstacked(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Inverse of `_stacked`."""
    each = x.unflatten(0, (len(lengths), -1))
    return torch.cat([own[:, :length] for own, length in zip(each, lengths, strict=True)], 1)


def stackable(lengths: Sequence[int], counts: Callable[[int], int]) -> list[int]:
    """Returns how many of the documents with these lengths, in their order, share each call; their sum is that of all documents.

    counts: most documents of so many tokens in one call, by the verdicts of the device.
    """
    found: list[int] = []
    place = 0
    while place < len(lengths):
        filled = planned_tokens(lengths[place])
        same = 1
        while place + same < len(lengths) and planned_tokens(lengths[place + same]) == filled:
            same += 1
        number = 1
        if same > 1 and filled > PACKED_TOKENS and 2 * filled <= PACKED_ROWS:
            most = min(same, PACKED_ROWS // filled, counts(filled))
            number = next((count for count in _COUNTS if count <= most), 1)
        found.append(number)
        place += number
    return found


@dataclass(frozen=True, slots=True)
class StackChecks:
    """Verdicts of a run's device on stacks, found at their first use. Documents that are compared need memory of their own."""

    verdicts: dict[tuple[HeadShape, int, int], bool] = field(default_factory=dict)

    def most(self, device: torch.device, shape: HeadShape, scores: Scores, num_tokens: int) -> int:
        """Returns the most documents of so many tokens, filled up, that one call should have; 1 where no gain is known."""
        width = max(shape.head_dim, shape.value_dim)
        is_planned = device.type == "cuda" and not scores.softcap
        if not is_planned or not choose_backend(device.type, shape.capability, shape.dtype, width).plans:
            return 1
        octave = num_tokens.bit_length() - 1
        for count in _COUNTS:
            if count * num_tokens > PACKED_ROWS:
                continue
            key = shape, octave, count
            if key not in self.verdicts:
                self.verdicts[key] = _pays(device, shape, scores, num_tokens, count)
            if self.verdicts[key]:
                return count
        return 1


def _pays(device: torch.device, shape: HeadShape, scores: Scores, num_tokens: int, count: int) -> bool:
    """Whether one call for `count` documents has the bits of a call for each, and is faster by `_LEAST_GAIN`."""
    # the longest that is filled up to this length, and a shorter one
    lengths = [num_tokens - place for place in range(count)]
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, size: int) -> Tensor:
        return torch.randn(sum(lengths), heads, size, generator=generator, device=device, dtype=shape.dtype).transpose(0, 1)

    q, k, v = drawn(shape.num_heads, shape.head_dim), drawn(shape.num_kv, shape.head_dim), drawn(shape.num_kv, shape.value_dim)
    gradient = drawn(shape.num_heads, shape.value_dim)

    def together() -> tuple[Tensor, ...]:
        out, lse = stack_forward(q, k, v, lengths, scores)
        return out, lse, *stack_backward(gradient, q, k, v, out, lse, lengths=lengths, scores=scores)

    def alone() -> tuple[Tensor, ...]:
        found = []
        for start, stop in pairwise(accumulate(lengths, initial=0)):
            tile = TileInputs(q[:, start:stop], k[:, start:stop], v[:, start:stop], scores, causal=True)
            out, lse = tile_forward(tile)
            found.append((out, lse, *tile_backward(gradient[:, start:stop], tile, out, lse)))
        return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))

    try:
        # the first calls make plans
        pairs = list(zip(together(), alone(), strict=True))
    except torch.OutOfMemoryError:
        return False
    if not all(torch.equal(one, other) for one, other in pairs):
        logger.info("documents of one length have a call each: %d in one call have other bits", count)
        return False
    del pairs
    return _seconds(device, together) < (1 - _LEAST_GAIN) * _seconds(device, alone)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the least seconds of the device for `run`."""
    clock = StepClock(device)
    for _ in range(_REPEATS):
        with clock.measure(0, "F", "attention"):
            run()
    return min(interval.stop_s - interval.start_s for interval in clock.intervals())


def stack_counts(
    q_HSD: Tensor, k_GSD: Tensor, v_GSE: Tensor, lengths: Sequence[int], scores: Scores, checks: StackChecks
) -> list[int]:
    """Returns how many of these causal documents share each call, see `stackable`. q, k, v: of heads as operators get them."""
    device = q_HSD.device
    shape = HeadShape(device_capability(device), q_HSD.dtype, q_HSD.shape[0], k_GSD.shape[0], q_HSD.shape[2], v_GSE.shape[2])
    return stackable(lengths, lambda num_tokens: checks.most(device, shape, scores, num_tokens))

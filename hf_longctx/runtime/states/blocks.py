"""Runs a scan in blocks of tokens, as one autograd node that saves the scan's inputs and the states between blocks.

Transformers' torch code of a scan saves many tensors for backward, fp32 matrices of every tile among them. Kernels of packages
save less, but their backward makes a state and its gradient for every tile of a row at once. Backward therefore runs each block
forward and backward, the last block first, so that these tensors live for one block only. The price is one more forward of the
scan. Blocks end where tiles of the scan end, so they compute the same numbers as a scan in one piece.

Shapes: H heads, N tokens of one document or slice, X and E sizes of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_longctx.runtime.activations.token_tiles import tiles_of
from hf_longctx.runtime.states.kernels import KernelScan, Row
from hf_longctx.runtime.states.passing import Scan

# like `Scan`, but returns None if nothing goes on from the state after the tokens
RowScan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor | None]]


def in_blocks(scan: Scan, num_inputs: int, num_tokens: int, block_tokens: int) -> Scan:
    """`scan` in blocks of `block_tokens` tokens, each recomputed in backward; `scan` itself for a chunk that has no more.

    num_inputs: tensors [1, N, H, X] of tokens that the scan takes, before weights of the heads. num_tokens: tokens of the chunk.
    block_tokens: whole tiles of the scan.
    """
    if num_tokens <= block_tokens:
        return scan

    def scan_blocks(tensors: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        blocks = [_Block(tokens, scan) for tokens in tiles_of(0, tensors[0].shape[1], block_tokens)]
        found: tuple[Tensor, Tensor] = _InBlocks.apply(blocks, num_inputs, before, *tensors)
        return found

    return scan_blocks


def row_in_blocks(kernel: KernelScan, row: Row, num_inputs: int, num_tokens: int, block_tokens: int, tile_tokens: int) -> RowScan:
    """`kernel` over the documents of a row, in blocks that backward recomputes; in one piece for a chunk that has no more tokens.

    A document of more than `block_tokens` tokens is cut, and shorter ones share blocks, in which each counts as whole tiles of
    `tile_tokens` tokens. The other arguments are those of `in_blocks`.
    """

    def of(part: Row) -> RowScan:
        return lambda tensors, state: kernel(tensors, state, part)

    if num_tokens <= block_tokens:
        return of(row)
    blocks, start = [], 0
    for part in row_blocks(row, block_tokens, tile_tokens):
        blocks.append(_Block(slice(start, start + part.boundaries[-1]), of(part)))
        start += part.boundaries[-1]

    def scan_blocks(tensors: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = _InBlocks.apply(blocks, num_inputs, before, *tensors)
        return found

    return scan_blocks


def row_blocks(row: Row, block_tokens: int, tile_tokens: int) -> list[Row]:
    """Blocks of a row, each a row of its own with no more tiles than `block_tokens` has: whole documents, or parts of one."""
    cuts, num_tiles = [0], 0
    for start, stop in pairwise(row.boundaries):
        for first in range(start, stop, block_tokens):
            own = -(-(min(first + block_tokens, stop) - first) // tile_tokens)
            if first and num_tiles + own > block_tokens // tile_tokens:
                cuts.append(first)
                num_tiles = 0
            num_tiles += own
    found = []
    for start, stop in pairwise([*cuts, row.boundaries[-1]]):
        inside = (bound - start for bound in row.boundaries if start < bound < stop)
        goes_on = row.goes_on if stop == row.boundaries[-1] else stop not in row.boundaries
        found.append(Row((0, *inside, stop - start), goes_on))
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens that run at once, and what scans them; it returns a state if the next block goes on from it."""

    tokens: slice
    scan: RowScan


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: Sequence[_Block], num_inputs: int, before: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        inputs, weights = tensors[:num_inputs], tensors[num_inputs:]
        num_tokens, device = inputs[0].shape[1], inputs[0].device.type
        output, state = None, before
        states = []
        for block in blocks:
            part, state = block.scan([*(x[:, block.tokens] for x in inputs), *weights], state)
            if output is None:
                output = part.new_empty((1, num_tokens, *part.shape[2:]))
            output[:, block.tokens] = part
            # a copy, since a state may be a view of something larger
            state = None if state is None else state.clone()
            states.append(state)
        assert output is not None
        ctx.save_for_backward(before, *tensors, *states[:-1])
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.settings = blocks, num_inputs, len(tensors)
        return output, state

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_after: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        blocks, num_inputs, num_tensors = ctx.settings
        before, *saved = ctx.saved_tensors
        tensors, states = saved[:num_tensors], [before, *saved[num_tensors:]]
        needs_before, *needs = ctx.needs_input_grad[2:]
        device, dtype, is_enabled = ctx.autocast
        sums = [_zeros(x, is_weight=place >= num_inputs) if needs[place] else None for place, x in enumerate(tensors)]
        d_state = d_after
        for place, block in reversed(list(enumerate(blocks))):
            parts = [*(x[:, block.tokens] for x in tensors[:num_inputs]), *tensors[num_inputs:]]
            leaves = [x.detach().requires_grad_(need) for x, need in zip(parts, needs, strict=True)]
            state = states[place]
            if state is not None:
                state = state.detach().requires_grad_(place > 0 or needs_before)
            # backward does not restore autocast by itself
            with torch.enable_grad(), torch.autocast(device, dtype, is_enabled):
                made = block.scan(leaves, state)
            ends = [x for x in (*leaves, state) if x is not None and x.requires_grad]
            ending = zip(made, (d_output[:, block.tokens], d_state), strict=True)
            given = [(y, dy) for y, dy in ending if y is not None and y.requires_grad]
            outputs, gradients = zip(*given, strict=True)
            found = iter(torch.autograd.grad(outputs, ends, gradients, materialize_grads=True))
            for index, total in enumerate(sums):
                if total is not None:
                    (total[:, block.tokens] if index < num_inputs else total).add_(next(found))
            d_state = next(found, None)
        own = (None if total is None else total.to(x.dtype) for total, x in zip(sums, tensors, strict=True))
        return None, None, d_state, *own


def _zeros(x: Tensor, is_weight: bool) -> Tensor:
    """Where gradients of `x` are collected: in at least fp32 for a weight, to which every block adds."""
    dtype = torch.promote_types(x.dtype, torch.float32) if is_weight else x.dtype
    return torch.zeros(x.shape, dtype=dtype, device=x.device)

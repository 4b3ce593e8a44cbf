"""Runs a scan in blocks of tokens, as one autograd node that saves the scan's inputs and the states between blocks.

Transformers' torch code of a scan saves many tensors for backward, fp32 matrices of every tile among them. Backward therefore
runs each block forward and backward, the last block first, so that these tensors live for one block only. The price is one more
forward of the scan. Blocks end where tiles of the scan end, so they compute the same numbers as a scan in one piece.

Shapes: H heads, N tokens of one document or slice, X and E sizes of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_longctx.runtime.activations.token_tiles import tiles_of
from hf_longctx.runtime.states.passing import Scan


def in_blocks(scan: Scan, num_inputs: int, num_tokens: int, block_tokens: int) -> Scan:
    """`scan` in blocks of `block_tokens` tokens, each recomputed in backward; `scan` itself for a chunk that has no more.

    num_inputs: tensors [1, N, H, X] of tokens that the scan takes, before weights of the heads. num_tokens: tokens of the chunk.
    block_tokens: whole tiles of the scan.
    """
    if num_tokens <= block_tokens:
        return scan

    def scan_blocks(tensors: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _InBlocks.apply(scan, block_tokens, num_inputs, before, *tensors)
        return found

    return scan_blocks


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scan: Scan, block_tokens: int, num_inputs: int, before: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, weights = tensors[:num_inputs], tensors[num_inputs:]
        num_tokens, device = inputs[0].shape[1], inputs[0].device.type
        blocks = list(tiles_of(0, num_tokens, block_tokens))
        output, state = None, before
        states = []
        for block in blocks:
            part, state = scan([*(x[:, block] for x in inputs), *weights], state)
            if output is None:
                output = part.new_empty((1, num_tokens, *part.shape[2:]))
            output[:, block] = part
            # a copy, since a state may be a view of something larger
            state = state.clone()
            states.append(state)
        assert output is not None and state is not None
        ctx.save_for_backward(before, *tensors, *states[:-1])
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.settings = scan, blocks, num_inputs, len(tensors)
        return output, state

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_after: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        scan, blocks, num_inputs, num_tensors = ctx.settings
        before, *saved = ctx.saved_tensors
        tensors, states = saved[:num_tensors], [before, *saved[num_tensors:]]
        needs_before, *needs = ctx.needs_input_grad[3:]
        device, dtype, is_enabled = ctx.autocast
        sums = [_zeros(x, is_weight=place >= num_inputs) if needs[place] else None for place, x in enumerate(tensors)]
        d_state: Tensor | None = d_after
        for place, block in reversed(list(enumerate(blocks))):
            parts = [*(x[:, block] for x in tensors[:num_inputs]), *tensors[num_inputs:]]
            leaves = [x.detach().requires_grad_(need) for x, need in zip(parts, needs, strict=True)]
            state = states[place]
            if state is not None:
                state = state.detach().requires_grad_(place > 0 or needs_before)
            # backward does not restore autocast by itself
            with torch.enable_grad(), torch.autocast(device, dtype, is_enabled):
                made = scan(leaves, state)
            ends = [x for x in (*leaves, state) if x is not None and x.requires_grad]
            given = [(y, dy) for y, dy in zip(made, (d_output[:, block], d_state), strict=True) if y.requires_grad]
            outputs, gradients = zip(*given, strict=True)
            found = iter(torch.autograd.grad(outputs, ends, gradients, materialize_grads=True))
            for index, total in enumerate(sums):
                if total is not None:
                    (total[:, block] if index < num_inputs else total).add_(next(found))
            d_state = next(found, None)
        own = (None if total is None else total.to(x.dtype) for total, x in zip(sums, tensors, strict=True))
        return None, None, None, d_state, *own


def _zeros(x: Tensor, is_weight: bool) -> Tensor:
    """Where gradients of `x` are collected: in at least fp32 for a weight, to which every block adds."""
    dtype = torch.promote_types(x.dtype, torch.float32) if is_weight else x.dtype
    return torch.zeros(x.shape, dtype=dtype, device=x.device)

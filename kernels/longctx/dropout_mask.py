"""Draws dropout masks by a counter-based generator: Philox4x32-10 gives four 32-bit words for each counter of four words.

`runtime.core.dropout` calls it for masks of tokens. The generator has no state, so any rank can draw the mask of any token at any
time. A counter is (four channels, position, document, step); the key of 64 bits encodes the seed and the module.

In plain torch, unsigned 32-bit words are held in int64: the product of two words keeps its low 64 bits when it wraps around, and
its high word is the upper half of these. The kernel works on words in registers and writes only the mask.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, which reports that ten rounds pass all
of TestU01's BigCrush.

Shapes: T tokens of this rank, C channels.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from hf_longctx.kernels.jit import device_of, jit, launches_directly, tl

NUM_ROUNDS = 10
WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
# tokens and counters of a token that one program works on
_BLOCK_T, _BLOCK_G = 4, 256

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: int, more: Tensor | int = 0) -> Words:
    """Returns the four words of every counter; tensors of words are int64 and broadcast with each other.

    key: 64 bits. more: added to its high word, so that one call may draw with several keys.
    """
    first, second = key & WORD, (key >> 32) + more & WORD
    for _ in range(NUM_ROUNDS):
        product, other = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = (
            (other >> 32 & WORD) ^ counter[1] ^ first,
            other & WORD,
            (product >> 32 & WORD) ^ counter[3] ^ second,
            product & WORD,
        )
        first, second = first + _KEY_STEPS[0] & WORD, second + _KEY_STEPS[1] & WORD
    return counter


@jit("step", "low", "high", "threshold", "num_tokens")
def _keep_kernel(
    keep, documents, positions, step, low, high, threshold, num_tokens,
    NUM_CHANNELS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Draws BLOCK_T tokens' values of 4 * BLOCK_G channels in each program."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    groups = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = rows < num_tokens
    zero = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.uint32)
    channels = zero + groups.to(tl.uint32)[None, :]
    place = zero + tl.load(positions + rows, mask=inside, other=0).to(tl.uint32)[:, None]
    document = zero + tl.load(documents + rows, mask=inside, other=0).to(tl.uint32)[:, None]
    words = tl.philox_impl(
        channels, place, document, zero + step.to(tl.uint32), zero + low.to(tl.uint32), zero + high.to(tl.uint32), ROUNDS
    )
    for word in tl.static_range(4):
        columns = groups * 4 + word
        kept = (words[word].to(tl.int64) >= threshold).to(tl.uint8)
        within = inside[:, None] & (columns < NUM_CHANNELS)[None, :]
        tl.store(keep + rows[:, None] * NUM_CHANNELS + columns[None, :], kept, mask=within)


def launch_keep_mask(
    documents_T: Tensor, positions_T: Tensor, step: int, key: list[int], threshold: int, num_channels: int
) -> Tensor:
    """Computes `_keep_mask` with the Triton kernel."""
    keep_TC = torch.empty(len(positions_T), num_channels, dtype=torch.uint8, device=positions_T.device)
    if keep_TC.numel():
        grid = -(-len(positions_T) // _BLOCK_T), -(-num_channels // (4 * _BLOCK_G))
        with device_of(keep_TC):
            _keep_kernel[grid](
                keep_TC, documents_T.contiguous(), positions_T.contiguous(), step, *key, threshold, len(positions_T),
                NUM_CHANNELS=num_channels, ROUNDS=NUM_ROUNDS, BLOCK_T=_BLOCK_T, BLOCK_G=_BLOCK_G,
            )  # fmt: skip
    return keep_TC.view(torch.bool)


def random_words(documents_T: Tensor, positions_T: Tensor, step: int, key: int, num_channels: int) -> Tensor:
    """Returns 32-bit words [T, C], int64, from which masks are drawn; documents and positions are int64, `key` 64 bits."""
    channels = torch.arange(-(-num_channels // 4), device=positions_T.device).unsqueeze(0)
    counter = channels, positions_T.unsqueeze(1), documents_T.unsqueeze(1) & WORD, torch.full_like(channels[:, :1], step & WORD)
    return torch.stack(philox(counter, key), dim=-1).flatten(1)[:, :num_channels]


@torch.library.custom_op("hf_longctx::keep_mask", mutates_args=(), device_types="cpu")
def _keep_mask(documents_T: Tensor, positions_T: Tensor, step: int, key: list[int], threshold: int, num_channels: int) -> Tensor:
    return random_words(documents_T, positions_T, step, key[1] << 32 | key[0], num_channels) >= threshold


_keep_mask.register_kernel("cuda")(launch_keep_mask)


def keep_mask(documents_T: Tensor, positions_T: Tensor, step: int, key: int, rate: float, num_channels: int) -> Tensor:
    """Returns the mask [T, C] of values to keep at a dropout of `rate`; documents and positions are int64, `key` 64 bits."""
    draw = launch_keep_mask if launches_directly(positions_T) else _keep_mask
    mask: Tensor = draw(
        documents_T, positions_T, step & WORD, [key & WORD, key >> 32 & WORD], round(rate * (WORD + 1)), num_channels
    )
    return mask

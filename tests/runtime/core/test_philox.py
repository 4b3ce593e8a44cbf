"""The generator gives the published answers, and its masks have the right rate and no pattern along any part of the key."""

from __future__ import annotations

import pytest
import torch
from helpers.models.dropout_truth import kept
from torch import Tensor

from hf_longctx.kernels.dropout_mask import keep_mask, philox
from hf_longctx.runtime.core.dropout import DropoutKeys

# counter, key -> answer: file kat_vectors of Random123, by the authors of the paper
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ANSWERS = [
    (((0,) * 4, (0,) * 2), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
RATE = 0.1
NUM_TOKENS, NUM_CHANNELS = 256, 254


@pytest.mark.parametrize("given,answer", ANSWERS)
def test_known_answers(given: tuple[tuple[int, ...], tuple[int, int]], answer: tuple[int, ...]) -> None:
    counter, (low, high) = given
    words = philox(tuple(torch.tensor([word]) for word in counter), high << 32 | low)
    assert tuple(int(word) for word in words) == answer


def mask(document: int = 0, step: int = 0, seed: int = 0, name: str = "a", first: int = 0, rate: float = RATE) -> Tensor:
    keys = DropoutKeys(seed, step)
    tokens = keys.of_pieces([(NUM_TOKENS, document)], torch.arange(first, first + NUM_TOKENS).unsqueeze(0))
    return keep_mask(tokens.documents_T, tokens.positions_T, tokens.step, keys.site_key(name), rate, NUM_CHANNELS)


def test_masks_are_those_of_plain_code() -> None:
    for document, step, seed, name in ((0, 0, 0, "a"), (2**31 + 3, 12345, 42, "layers.1.q_proj.lora_dropout.default")):
        expected = kept(name, document, NUM_TOKENS, NUM_CHANNELS, RATE, step, seed)
        assert torch.equal(mask(document, step, seed, name), expected)


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.5, 0.99])
def test_the_rate_is_right(rate: float) -> None:
    dropped = ~torch.stack([mask(document, rate=rate) for document in range(8)])
    count = dropped.numel()
    # five standard deviations, in all values and in every channel and every position
    assert abs(float(dropped.double().mean()) - rate) < 5 * (rate * (1 - rate) / count) ** 0.5
    for means in (dropped.double().mean((0, 1)), dropped.double().mean((0, 2))):
        assert float((means - rate).abs().max()) < 6 * (rate * (1 - rate) * len(means) / count) ** 0.5


def correlation(one: Tensor, other: Tensor) -> float:
    a, b = one.double() - one.double().mean(), other.double() - other.double().mean()
    return float((a * b).mean() / (a.std() * b.std()))


# pairs of masks that must not look alike, by the part of the key in which they differ
NEIGHBOURS = {
    "channels": lambda: (mask()[:, :-1], mask()[:, 1:]),
    "groups of four channels": lambda: (mask()[:, :-4], mask()[:, 4:]),
    "positions": lambda: (mask()[:-1], mask()[1:]),
    "documents": lambda: (mask(document=5), mask(document=6)),
    "steps": lambda: (mask(step=5), mask(step=6)),
    "seeds": lambda: (mask(seed=5), mask(seed=6)),
    "modules": lambda: (mask(name="layers.1.a"), mask(name="layers.2.a")),
    "document and step exchanged": lambda: (mask(document=5, step=6), mask(document=6, step=5)),
    "document and position exchanged": lambda: (mask(document=0, first=NUM_TOKENS)[:1], mask(document=NUM_TOKENS)[:1]),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_not_correlated(name: str) -> None:
    one, other = NEIGHBOURS[name]()
    assert abs(correlation(one, other)) < 5 / one.numel() ** 0.5

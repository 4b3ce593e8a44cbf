"""Draws dropout masks by keys: whether a value is dropped depends on seed, step, token, module and channel alone.

A token is identified by its document and its position there, a document by its number among the sequences of the optimizer step.
So the same values are dropped in every plan, on any number of ranks, in a replay, and after a resume. Masks are never saved:
backward draws them again.

`hf.models.dropout` lets a model's dropout modules read the tokens of the running forward, which are set by the stage
(`StageModel.forward`), replays (`ActivationEngine`) and tiles (`on_tiles`).

Shapes: T tokens of this rank, N of a block, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.kernels.dropout_mask import WORD, keep_mask, random_words
from hf_longctx.kernels.weight_mask import dropped_weights

# attribute of a dropout module that holds its site
SITE = "_longctx_dropout_site"
# values whose mask is drawn at a time: on CPUs few enough for the cache, elsewhere many, for few launches
_VALUES_ON_CPU, _VALUES = 1 << 17, 1 << 25
# numbers drawn at a time outside of CPUs; drawing takes up to 28 bytes each
_NUMBERS = 1 << 22


class DropoutKeys:
    """State shared by the dropout modules of one model.

    first_documents: for each plan of the step, the number of its first document; 0 for others. tokens: tokens of the running
    forward. is_training: whether a training is running, so that dropout without tokens is an error.
    """

    # not a dataclass, because FSDP traverses dataclasses among the arguments of a forward
    def __init__(self, seed: int = 0, step: int = 0) -> None:
        self.seed, self.step = seed, step
        self.first_documents: Mapping[int, int] = {}
        self.tokens: DropoutTokens | None = None
        self.is_training = False
        self._first_document, self._next_document = 0, 0
        self._known: dict[tuple[int, str], int] = {}

    def begin_step(self, step: int, first_documents: Mapping[int, int]) -> None:
        """Begins an optimizer step of a training, counted from 0."""
        self.step, self.first_documents, self.is_training = step, dict(first_documents), True

    def begin_forward(self, step: int, number: int, num_documents: int) -> None:
        """Begins a plan of one forward in the optimizer step `step`; its documents follow those of earlier forwards."""
        first = self._next_document if self.is_training and step == self.step else 0
        self.begin_step(step, {number: first})
        self.begin_plan(number)
        self._next_document = first + num_documents

    def begin_plan(self, number: int) -> None:
        """Begins a plan of the current step."""
        self._first_document = self.first_documents.get(number, 0)

    def rest(self) -> None:
        """Ends a training: forwards without a plan then use torch's dropout."""
        self.is_training = False

    def of_pieces(self, pieces: Sequence[tuple[int, int]], positions_1T: Tensor, lengths: Sequence[int] = ()) -> DropoutTokens:
        """Makes the tokens of a forward from (tokens, sequence of the plan, -1 for dummies) of every piece and their positions.

        lengths: tokens of the whole document of every piece; () if each piece is a whole document.
        """
        numbers = [sequence + self._first_document if sequence >= 0 else WORD for _, sequence in pieces]
        counts = [count for count, _ in pieces]
        both_2T = torch.tensor([numbers, list(lengths) or counts]).repeat_interleave(torch.tensor(counts), dim=1)
        documents_T, lengths_T = both_2T.to(positions_1T.device, non_blocking=True)
        return DropoutTokens(self, self.step, documents_T, positions_1T.view(-1), lengths_T, self._first_document)

    def site_key(self, name: str) -> int:
        """Returns 64 bits of the module `name` under the seed."""
        if (self.seed, name) not in self._known:
            digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
            self._known[self.seed, name] = int.from_bytes(digest, "little")
        return self._known[self.seed, name]


@dataclass(frozen=True, slots=True, eq=False)
class DropoutTokens:
    """The tokens of one forward, layer or tile, in order: document, position and tokens of the whole document of each, int64.

    first_document: number of the plan's first document. calls: number of calls of each module on these tokens, since every call
    draws another mask.
    """

    keys: DropoutKeys
    step: int
    documents_T: Tensor
    positions_T: Tensor
    lengths_T: Tensor
    first_document: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def part(self, tokens: slice = slice(None)) -> DropoutTokens:
        """Returns some of the tokens (default: all), with no calls counted."""
        documents_T, positions_T, lengths_T = (each[tokens] for each in (self.documents_T, self.positions_T, self.lengths_T))
        return DropoutTokens(self.keys, self.step, documents_T, positions_T, lengths_T, self.first_document)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model's dropout modules get these tokens."""
        outer, self.keys.tokens = self.keys.tokens, self
        try:
            yield
        finally:
            self.keys.tokens = outer

    def drop(self, x: Tensor, rate: float, name: str) -> Tensor:
        """Drops a share `rate` of the values of x, [1, T, C] or [T, C], and scales the rest by 1 / (1 - rate).

        name: the module. Raises RuntimeError if `x` does not have the forward's tokens.
        """
        num_tokens = len(self.positions_T)
        if x.dim() not in (2, 3) or x.shape[-2] != num_tokens or x.numel() != num_tokens * x.shape[-1]:
            raise RuntimeError(
                f"dropout {name} got a tensor of shape {tuple(x.shape)} for {num_tokens} tokens, so its masks cannot follow the "
                f"tokens; set its rate to 0"
            )
        dropped: Tensor = _Drop.apply(x, self, rate, self.call_key(name))
        return dropped

    def call_key(self, name: str) -> int:
        """Counts a call of the module `name` and returns 64 bits for it."""
        call = self.calls[name] = self.calls.get(name, 0) + 1
        return self.keys.site_key(f"{name}:{call}" if call > 1 else name)

    def drop_weights(self, weights_1HTU: Tensor, rate: float, name: str) -> Tensor:
        """Drops a share `rate` of attention weights [1, H, T, T] and scales the rest by 1 / (1 - rate). name: their site.

        For forwards of one document with the model's own attention. Raises RuntimeError for weights of other tokens.
        """
        num_tokens = len(self.positions_T)
        shape = 1, weights_1HTU.shape[1], num_tokens, num_tokens
        if weights_1HTU.shape != shape or bool((self.documents_T != self.documents_T[0]).any()):
            raise RuntimeError(
                f"dropout of {name} got a tensor of shape {tuple(weights_1HTU.shape)} for {num_tokens} "
                f"tokens of one document, so its masks cannot follow the tokens; set its rate to 0"
            )
        positions_1T, heads = self.positions_T.unsqueeze(0), (0, weights_1HTU.shape[1])
        settings = int(self.documents_T[0]), self.step, self.call_key(name), rate
        dropped_1HTU = dropped_weights(positions_1T, positions_1T, heads, *settings).unsqueeze(0)
        return weights_1HTU.masked_fill(dropped_1HTU, 0.0) * (1 / (1 - rate) if rate < 1 else 0.0)

    def uniform(self, num_channels: int, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yields blocks of tokens with uniform numbers in [0, 1) for the module `name`, [N, C].

        The numbers are fp64 on CPUs and fp32 elsewhere, and do not depend on the size of blocks.
        """
        key, is_cpu = self.keys.site_key(name), self.positions_T.device.type == "cpu"
        for block in self._blocks(num_channels, _VALUES_ON_CPU if is_cpu else _NUMBERS):
            words_NC = random_words(self.documents_T[block], self.positions_T[block], self.step, key, num_channels)
            yield block, (words_NC.to(torch.float64 if is_cpu else torch.float32) + 0.5) / (WORD + 1)

    def _blocks(self, num_channels: int, num_values: int) -> list[slice]:
        """Yields all tokens in blocks of at most `num_values` values, but at least one token."""
        rows = max(1, num_values // max(num_channels, 1))
        return [slice(first, first + rows) for first in range(0, len(self.positions_T), rows)]

    def masked(self, x_TC: Tensor, rate: float, key: int, first_channel: int = 0) -> Tensor:
        """Drops and scales values of x_TC, whose channels begin at `first_channel`; draws the mask for some tokens at a time."""
        if rate >= 1:
            return torch.zeros_like(x_TC)
        num_channels, y_TC = first_channel + x_TC.shape[-1], torch.empty_like(x_TC)
        for block in self._blocks(num_channels, _VALUES_ON_CPU if x_TC.device.type == "cpu" else _VALUES):
            keep_TC = keep_mask(self.documents_T[block], self.positions_T[block], self.step, key, rate, num_channels)
            y_TC[block] = (x_TC[block] * (1 / (1 - rate))).masked_fill_(~keep_TC[:, first_channel:], 0.0)
        return y_TC


class _Drop(torch.autograd.Function):
    """Saves nothing for backward, which draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: DropoutTokens, rate: float, key: int) -> Tensor:
        ctx.settings = tokens, rate, key
        return tokens.masked(x.reshape(-1, x.shape[-1]), rate, key).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, rate, key = ctx.settings
        masked: Tensor = tokens.masked(gradient.reshape(-1, gradient.shape[-1]), rate, key).view(gradient.shape)
        return masked, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class DropoutSite:
    """A dropout module's name in its model."""

    keys: DropoutKeys
    name: str


def keys_of(model: nn.Module) -> DropoutKeys | None:
    """Returns the keys shared by the dropout modules of `model`; None if it has no such module."""
    sites = (vars(module).get(SITE) for module in model.modules())
    site: DropoutSite | None = next((site for site in sites if site is not None), None)
    return None if site is None else site.keys


def on_tiles(module: nn.Module, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor, slice], Tensor]:
    """Returns `run`, the forward of `module`, for (tensor, tile) of the tokens of the running forward; may be called later."""
    keys = keys_of(module)
    tokens = None if keys is None else keys.tokens
    if tokens is None:
        return lambda x, tile: run(x)

    def run_tile(x: Tensor, tile: slice) -> Tensor:
        with tokens.part(tile).running():
            return run(x)

    return run_tile

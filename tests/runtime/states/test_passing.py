"""Ranks that share documents in any layout give the outputs and gradients of one rank that runs each document token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.reference import TOLERANCE, relative_error
from helpers.ranks.rank_steps import group_pool
from torch import Tensor

from hf_longctx.plan.core.sharding import Piece, rank_pieces
from hf_longctx.plan.core.types import Chunk, GroupShape, SequenceGroup, Span
from hf_longctx.plan.model.mixers import ScanSize
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.state_book import StateBook
from hf_longctx.runtime.states.book import LayerScan
from hf_longctx.runtime.states.convolution import compiled_convolution, convolve_documents
from hf_longctx.runtime.states.passing import Decay, DeltaRule, StateMap
from hf_longctx.runtime.states.recurrence import MixerScan, scan_documents

LENGTHS = (37, 5, 90, 1, 60)
FIRSTS = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
WIDTH, HEADS, GROUPS, KEY, VALUE = 4, 2, 1, 3, 5
Chunks = list[list[Span]]
WHOLE = [[Span(number, 0, length) for number, length in enumerate(LENGTHS)]]
# slices of one and two tokens, shorter than the convolution reads, and slices among other documents
SLICES = [
    *([Span(0, 0, 2)], [Span(0, 2, 3)], [Span(0, 3, 37), Span(1, 0, 5), Span(2, 0, 40)], [Span(2, 40, 90), Span(3, 0, 1)]),
    [Span(4, 0, 60)],
]
# in a ring a slice comes first in its chunk
RING_SLICES = [*SLICES[:2], SLICES[2][:2], SLICES[2][2:], *SLICES[3:]]
# inputs that have no tokens
WEIGHTS = ("weight", "filter")


def delta_rule(mine: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token: the state decays, and its value for a key moves towards the token's value."""
    q, k, v, decay, strength = mine
    q, k = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(1, HEADS, KEY, v.shape[3]) if state is None else state
    outputs = []
    for token in range(v.shape[1]):
        state = state * decay[:, token, :, None, None].exp()
        change = v[:, token] - torch.einsum("bhk,bhkv->bhv", k[:, token], state)
        state = state + strength[:, token, :, None, None] * k[:, token, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(outputs, 1), state


def decaying(mine: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token: the state decays by one number, and the token is added."""
    into, out, x, step, decay = mine
    into, out = (each.repeat_interleave(HEADS // each.shape[2], 2) for each in (into, out))
    state = x.new_zeros(1, HEADS, VALUE, KEY) if state is None else state
    outputs = []
    for token in range(x.shape[1]):
        left = (step[:, token] * decay).exp()
        state = state * left[..., None, None] + x[:, token, :, :, None] * into[:, token, :, None]
        outputs.append(torch.einsum("bhk,bhvk->bhv", out[:, token], state))
    return torch.stack(outputs, 1), state


@dataclass(frozen=True)
class Kind:
    """A scan, how it depends on states, and the names of its inputs: read by several heads, of each head, weights."""

    scan: Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
    state_map: StateMap
    own: tuple[str, ...]
    weights: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        return ("a", "b", "v", "filter", *self.own, *self.weights)


KINDS = {
    "delta rule": Kind(delta_rule, DeltaRule(), ("decay", "strength")),
    "decay": Kind(decaying, Decay(lambda mine, weights: mine[3] * weights[0], lambda mine: mine[1]), ("strength",), ("weight",)),
}


def made() -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of all documents in one row, and what each output counts in the loss."""
    torch.manual_seed(3)
    sizes = {"a": (GROUPS, KEY), "b": (GROUPS, KEY), "v": (HEADS, VALUE), "decay": (HEADS,), "strength": (HEADS,)}
    found = {name: torch.randn(1, sum(LENGTHS), *size, dtype=torch.float64) for name, size in sizes.items()}
    found |= {"decay": -0.3 * found["decay"].sigmoid(), "strength": found["strength"].sigmoid()}
    found["weight"] = torch.tensor([-0.5, -0.2], dtype=torch.float64)
    found["filter"] = torch.randn(HEADS * VALUE, 1, WIDTH, dtype=torch.float64)
    return found, torch.randn(1, sum(LENGTHS), HEADS, VALUE, dtype=torch.float64)


def reference(kind: Kind) -> dict[str, Tensor]:
    """All documents one after the other, each from its first token on."""
    inputs, counts = made()
    inputs, outputs = {name: x.requires_grad_() for name, x in inputs.items()}, []
    for first, length in zip(FIRSTS, LENGTHS, strict=True):
        mine = {name: x if name in WEIGHTS else x[:, first : first + length] for name, x in inputs.items()}
        rows = F.pad(mine["v"].reshape(1, length, -1).transpose(1, 2), (WIDTH - 1, 0))
        v = F.conv1d(rows, mine["filter"], groups=HEADS * VALUE).transpose(1, 2).reshape(1, length, HEADS, VALUE)
        outputs.append(kind.scan([mine["a"], mine["b"], v, *(mine[name] for name in (*kind.own, *kind.weights))], None)[0])
    output = torch.cat(outputs, 1)
    (output * counts).sum().backward()
    return {"output": output.detach()} | {name: inputs[name].grad for name in kind.trained}


def mixed(mine: dict[str, Tensor], kind: Kind, context: GroupContext, in_row: bool) -> Tensor:
    """Outputs of this rank's tokens, whose values are convolved before the scan, all documents in one call if `in_row`."""
    num_tokens, rows = mine["v"].shape[1], mine["v"].flatten(2).transpose(1, 2)

    def convolve(x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, (WIDTH - 1, 0)), mine["filter"], groups=HEADS * VALUE)

    whole = compiled_convolution("", backend="eager")

    def convolve_row(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return whole(x, mine["filter"].squeeze(1), None, lengths)

    found = convolve_documents(rows, WIDTH, convolve, "layer", context, in_row=convolve_row if in_row else None)
    v = found.transpose(1, 2).reshape(1, num_tokens, HEADS, VALUE)
    own, weights = [v, *(mine[name] for name in kind.own)], [mine[name] for name in kind.weights]
    scan = MixerScan(kind.scan, ScanSize(token_elements=8, tile_tokens=4), kind.state_map)
    return scan_documents((mine["a"], mine["b"]), own, weights, scan, LayerScan("layer"), context)


def run_on_rank(name: str, ulysses: int, chunks: Chunks, trained: tuple[str, ...], in_row: bool) -> dict[str, Tensor]:
    """Outputs and gradients of this rank in a run of all chunks, forward and then backward in reverse; zeros elsewhere."""
    pool, kind, book = group_pool(), KINDS[name], StateBook()
    shape, (inputs, counts) = GroupShape(pool.num_ranks, ulysses), made()
    group = SequenceGroup.of(shape, range(shape.degree), tuple(Chunk(index, tuple(each)) for index, each in enumerate(chunks)))
    runs = []
    for chunk in group.chunks:

        def places(piece: Piece, spans: tuple[Span, ...] = chunk.spans) -> list[int]:
            # dummy tokens get the inputs of any
            first = 0 if piece.document >= len(spans) else FIRSTS[spans[piece.document].sequence] + spans[piece.document].start
            return list(range(first + piece.start, first + piece.stop))

        pieces = rank_pieces(chunk, shape)[pool.position]
        at = torch.tensor([place for piece in pieces for place in places(piece)])
        is_real = torch.tensor([piece.document < len(chunk.spans) for piece in pieces for _ in range(piece.num_tokens)])
        mine = {name: (x.clone() if name in WEIGHTS else x[:, at]).requires_grad_(name in trained) for name, x in inputs.items()}
        runs.append((mixed(mine, kind, replace(pool.context(group, chunk), state_book=book), in_row), at, is_real, mine))
    found = {name: torch.zeros_like(inputs[name]) for name in trained} | {"output": torch.zeros_like(counts)}
    for output, at, is_real, mine in reversed(runs):
        (output * counts[:, at] * is_real[:, None, None]).sum().backward()
        found["output"][:, at[is_real]] = output.detach()[:, is_real]
        for name in trained:
            if name in WEIGHTS:
                found[name] += 0 if mine[name].grad is None else mine[name].grad
            else:
                found[name][:, at[is_real]] = mine[name].grad[:, is_real]
    assert not book.num_bytes
    return found


def check(
    ranks: Any, num_ranks: int, name: str, ulysses: int, chunks: Chunks, trained: tuple[str, ...] = (), in_row: bool = False
) -> None:
    expected = reference(KINDS[name])
    trained = trained or KINDS[name].trained
    found = ranks(num_ranks).run(run_on_rank, name, ulysses, chunks, trained, in_row)
    for each in ("output", *trained):
        assert relative_error(sum(one[each] for one in found), expected[each]) <= TOLERANCE, each


# rings of zigzag pieces, a ring of blocks, blocks of more ranks than heads
@pytest.mark.daily("decay-2-1")
@pytest.mark.parametrize("num_ranks,ulysses", [(2, 1), (3, 1), (4, 1), (4, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("name", KINDS)
def test_documents_that_ranks_share_match(ranks, name: str, num_ranks: int, ulysses: int) -> None:
    check(ranks, num_ranks, name, ulysses, WHOLE)


@pytest.mark.daily("delta rule-3-1")
@pytest.mark.parametrize("num_ranks,ulysses", [(3, 3), (3, 1)])
@pytest.mark.parametrize("name", KINDS)
def test_slices_that_ranks_share_match(ranks, name: str, num_ranks: int, ulysses: int) -> None:
    check(ranks, num_ranks, name, ulysses, RING_SLICES if ulysses < num_ranks else SLICES)


@pytest.mark.daily("1-1-True")
@pytest.mark.parametrize("num_ranks,ulysses,is_sliced", [(1, 1, True), (3, 1, False), (3, 1, True), (4, 2, False), (3, 3, True)])
def test_rows_of_documents_are_convolved_at_once(ranks, num_ranks: int, ulysses: int, is_sliced: bool) -> None:
    slices = RING_SLICES if ulysses < num_ranks else SLICES
    check(ranks, num_ranks, "delta rule", ulysses, slices if is_sliced else WHOLE, in_row=True)


def test_ranks_that_send_nothing_with_a_gradient_take_part_in_the_backward(ranks) -> None:
    # decays alone are trained: what the convolution sends has no gradient
    check(ranks, 3, "delta rule", 1, WHOLE, ("decay",))

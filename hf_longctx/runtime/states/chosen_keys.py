"""Chooses keys for every token of a chunk by an index, among all earlier tokens of its document (DeepSeek sparse attention).

An index scores the earlier tokens of a document by small index keys, one per token and shared by all heads, and keeps the best.
No gradient passes through the choice. Every rank scores its own tokens. For this it gets the index keys of all earlier tokens:
from the ranks of its group that hold them and, for slices, from the state book, where each slice leaves its index keys.

Scores are computed for whole documents, so that the choice between equal scores, which depends on the number of keys, is the same
as without a plan.

Shapes: T tokens of this rank, D size of index keys, N tokens of a document, R rows of a block, K chosen keys of a token.

Source: DeepSeek-V3.2-Exp (2025), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.plan.core.sharding import Piece
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.kv_book import Slice
from hf_longctx.runtime.states.book import check_not_lent, leave_state, slices_by_document
from hf_longctx.runtime.states.passing import fetch_tokens

# this rank's rows, index keys [1, N, D] of their document, mask of visible ones [1, R, N] -> chosen keys [1, R, K]
Choose = Callable[[slice, Tensor, Tensor], Tensor]

INDEX_KEYS = "index keys"
# most scores of a block of rows, over all heads of the index
BLOCK_SCORES = 2**25
# more tokens than any document has
_ALL = 2**62


@torch.no_grad()
def choose_keys(keys_1TD: Tensor, most: int, num_heads: int, choose: Choose, layer: Hashable, context: GroupContext) -> Tensor:
    """Returns positions in the document of the keys chosen for this rank's tokens, [1, T, K] in int32; -1 for no key.

    keys_1TD: index keys of this rank's tokens. most: keys that `choose` returns for each row, or all if a document has fewer.
    num_heads: heads of the index. Collective over the context's group. Raises ValueError for slices with lent ranks.
    """
    check_not_lent(context)
    slices, layout = slices_by_document(context), context.layout
    lengths = document_lengths(context)
    width = min(most, max(lengths.values()))
    going_on = [slice_ for slice_ in slices.values() if slice_.stop < slice_.end]
    # no gradient reaches them, so the book stores them directly
    ranges_1DN, _ = fetch_tokens(keys_1TD.transpose(1, 2), _ALL, tuple(slice_.document for slice_ in going_on), layout)
    chosen = []
    for run, before_1DN in zip(layout.own, ranges_1DN, strict=False):
        earlier = _earlier(slices.get(run.document), layer, context)
        known_1ND = torch.cat([*earlier, before_1DN.transpose(1, 2), keys_1TD[:, run.tokens]], dim=1)
        whole_1ND = F.pad(known_1ND, (0, 0, 0, lengths[run.document] - known_1ND.shape[1]))
        chosen += _of_run(run, known_1ND.shape[1] - run.num_tokens, whole_1ND, num_heads, width, choose)
    for slice_, end_1DN in zip(going_on, ranges_1DN[len(layout.own) :], strict=True):
        leave_state(slice_, INDEX_KEYS, layer, context, end_1DN.transpose(1, 2), end_1DN)
    return torch.cat(chosen, dim=1)


def document_lengths(context: GroupContext) -> dict[int, int]:
    """Returns the tokens of every document of the chunk, including those in other chunks."""
    ends = {slice_.document: slice_.end for slice_ in context.slices}
    lengths: dict[int, int] = {}
    for run in (run for runs in context.layout.runs for run in runs):
        lengths[run.document] = ends.get(run.document, max(run.stop, lengths.get(run.document, 0)))
    return lengths


def _earlier(slice_: Slice | None, layer: Hashable, context: GroupContext) -> list[Tensor]:
    """Returns index keys of the slices before this one, in order. Raises RuntimeError if some are not in the book."""
    if slice_ is None or not slice_.start:
        return []
    found = sorted(
        (place.position, keys_1ND)
        for place, keys_1ND in context.state_book.held().items()
        if (place.layer, place.function, place.sequence) == (layer, INDEX_KEYS, slice_.sequence)
        and place.position <= slice_.start
    )
    if sum(keys_1ND.shape[1] for _, keys_1ND in found) != slice_.start:
        raise RuntimeError(f"{slice_} ran forward without the index keys of the tokens before it; slices must run in order")
    return [keys_1ND for _, keys_1ND in found]


def _of_run(run: Piece, first: int, whole_1ND: Tensor, num_heads: int, width: int, choose: Choose) -> list[Tensor]:
    """Returns chosen keys [1, R, width] of a run's blocks; its first token is at position `first` of its document."""
    num_keys = whole_1ND.shape[1]
    positions = torch.arange(num_keys, device=whole_1ND.device)
    num_rows, chosen = max(1, BLOCK_SCORES // (num_heads * num_keys)), []
    for start in range(0, run.num_tokens, num_rows):
        stop = min(start + num_rows, run.num_tokens)
        row_positions = positions[first + start : first + stop].unsqueeze(1)
        found_1RK = choose(slice(run.first + start, run.first + stop), whole_1ND, (positions <= row_positions).unsqueeze(0))
        # a token that sees fewer keys than requested also gets later ones
        seen_1RK = found_1RK.to(torch.int32).masked_fill(found_1RK > row_positions, -1)
        chosen.append(F.pad(seen_1RK, (0, width - seen_1RK.shape[2]), value=-1))
    return chosen

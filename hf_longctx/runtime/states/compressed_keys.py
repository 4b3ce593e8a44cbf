"""Attends to compressed keys of a document beside a window of its last tokens (DeepSeek V4), over ranks and slices.

A layer closes every `rate` tokens of a document into one entry, which is key and value at once. A token attends to the tokens of
its window and to entries of whole blocks before it: to all of them, or to those that an index chooses. One softmax covers both.

Ranks exchange what tokens give to entries, so that each rank closes the entries of a document up to its own last token. A slice
leaves all entries so far in the state book, and the tokens that blocks not yet closed read. The window is that of a convolution.

Attention runs in blocks of rows, each recomputed in backward with its mask, since no operator of torch takes such keys. A block
reads the tokens of its windows and the entries before its last row.

Shapes: H query heads, T tokens of this rank, N tokens of one run, R rows of a block, C numbers that a token gives to entries, M
entries, D head size, K chosen entries of a token.

Source: DeepSeek-V4 (2026), section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.states.book import check_not_lent, leave_state, slices_by_document, state_before
from hf_longctx.runtime.states.chosen_keys import document_lengths
from hf_longctx.runtime.states.convolution import convolve_documents
from hf_longctx.runtime.states.passing import fetch_tokens, with_backward_of

# most scores of a block of rows, over all heads
BLOCK_SCORES = 2**25
# more tokens than any document has
_ALL = 2**62


@dataclass(frozen=True, slots=True)
class Compression:
    """Rule by which tokens of a document become entries."""

    # tokens of an entry's own block, and blocks before it that the entry reads too
    rate: int
    num_back: int
    # tokens of whole blocks, by what they give [1, N, C], and the position of the first -> entries [1, N / rate, D]; the first
    # `num_back` entries need not be right unless that position is 0
    close: Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of documents on this rank."""

    # tokens of a block
    rate: int
    # for every run of this rank, entries [1, M, D] of all whole blocks up to its last token
    runs: tuple[Tensor, ...]
    # gives the state book what later slices read; returns the layer's output [1, ...], whose backward reaches all that was read
    leave: Callable[[Tensor], Tensor]
    # those that tokens see (`choose_entries`), for every run; (): all of whole blocks up to a token
    chosen: tuple[Tensor, ...] = ()


def close_entries(given_1TC: Tensor, how: Compression, function: str, layer: Hashable, context: GroupContext) -> Entries:
    """Closes the entries of all documents of a chunk up to this rank's tokens.

    given_1TC: what this rank's tokens give to entries. function: name of these entries in the state book. Collective over the
    context's group, forward and, if anything has a gradient, backward. Raises ValueError for slices with lent ranks.
    """
    check_not_lent(context)
    layout, slices = context.layout, slices_by_document(context)
    going_on = [slice_ for slice_ in slices.values() if slice_.stop < slice_.end]
    found_1CN, received = fetch_tokens(given_1TC.transpose(1, 2), _ALL, tuple(each.document for each in going_on), layout)
    names = f"{function}: entries", f"{function}: open blocks"
    states = {each.document: [state_before(each, name, layer, context) for name in names] for each in slices.values()}

    def closed(document: int, tokens_1NC: Tensor) -> tuple[Tensor, Tensor, int]:
        """Entries up to the last of these tokens of the chunk, tokens with those before the slice, position of their first."""
        entries_1MD, open_1NC = states.get(document, (None, None))
        start = slices[document].start if document in slices else 0
        num_closed = start // how.rate
        first = max(0, num_closed - how.num_back)
        known_1NC = tokens_1NC if open_1NC is None else torch.cat([open_1NC, tokens_1NC], dim=1)
        whole = known_1NC.shape[1] // how.rate * how.rate
        new_1MD = how.close(known_1NC[:, :whole], first * how.rate)[:, num_closed - first :]
        return new_1MD if entries_1MD is None else torch.cat([entries_1MD, new_1MD], dim=1), known_1NC, first * how.rate

    runs = [
        closed(run.document, torch.cat([before_1CN.transpose(1, 2), given_1TC[:, run.tokens]], dim=1))[0]
        for run, before_1CN in zip(layout.own, found_1CN, strict=False)
    ]
    left = []
    for slice_, tokens_1CN in zip(going_on, found_1CN[len(layout.own) :], strict=True):
        entries_1MD, known_1NC, first = closed(slice_.document, tokens_1CN.transpose(1, 2))
        still_read = max(0, slice_.stop // how.rate - how.num_back) * how.rate
        left.append((slice_, entries_1MD, known_1NC[:, still_read - first :]))

    def leave(output: Tensor) -> Tensor:
        for slice_, *after in left:
            for name, state in zip(names, after, strict=True):
                output = leave_state(slice_, name, layer, context, state, output)
        # this rank may use neither the received tokens nor the states
        read = [state for pair in states.values() for state in pair if state is not None]
        return with_backward_of(output, *received, *read)

    return Entries(how.rate, tuple(runs), leave)


def attend_compressed(
    q_1HTD: Tensor,
    kv_1TD: Tensor,
    entries: Entries,
    context: GroupContext,
    *,
    window: int,
    scale: float,
    sinks_H: Tensor,
    layer: Hashable,
) -> Tensor:
    """Returns attention of this rank's tokens to their windows and to entries of whole blocks before them, [1, T, H, D]."""
    layout, slices = context.layout, slices_by_document(context)
    places = iter(enumerate(layout.own))
    num_heads = q_1HTD.shape[1]

    def attend(joined_1DN: Tensor) -> Tensor:
        number, run = next(places)
        num_read = joined_1DN.shape[-1] - run.num_tokens
        keys_ND, entries_MD = joined_1DN[0].transpose(0, 1), entries.runs[number][0]
        chosen_NK = entries.chosen[number] if entries.chosen else None
        first = run.start + (slices[run.document].start if run.document in slices else 0)
        outputs, start = [], 0
        while start < run.num_tokens:
            stop = min(run.num_tokens, start + _num_rows(BLOCK_SCORES // num_heads, window + (first + start) // entries.rate))
            # joined tokens of the rows and of their windows
            tokens = slice(max(0, num_read + start - window + 1), num_read + stop)
            block: Tensor = checkpoint(
                _attend_rows,
                q_1HTD[0, :, run.first + start : run.first + stop],
                keys_ND[tokens],
                entries_MD[: (first + stop) // entries.rate],
                None if chosen_NK is None else chosen_NK[start:stop],
                sinks_H,
                _Rows(first + start, first - num_read + tokens.start, window, entries.rate, scale),
                use_reentrant=False,
            )
            outputs.append(block)
            start = stop
        out_HND = torch.cat(outputs, dim=1)
        return F.pad(out_HND.transpose(1, 2).flatten(0, 1).unsqueeze(0), (num_read, 0))

    out_1CT = convolve_documents(kv_1TD.transpose(1, 2), window, attend, layer, context, "window")
    context.calls.count += 1
    return entries.leave(out_1CT.unflatten(1, (num_heads, -1)).permute(0, 3, 1, 2))


def _num_rows(most_scores: int, num_keys: int) -> int:
    """Returns the rows of a block with at most so many scores of a head; each row sees up to two further keys for each row."""
    return max(1, int((sqrt(num_keys**2 + 8 * most_scores) - num_keys) / 4))


class _Rows(NamedTuple):
    """Positions of the first row and of its first key in the document, and rules for all rows."""

    first: int
    first_key: int
    window: int
    rate: int
    scale: float


def _attend_rows(
    q_HRD: Tensor, keys_ND: Tensor, entries_MD: Tensor, chosen_RK: Tensor | None, sinks_H: Tensor, rows: _Rows
) -> Tensor:
    """Attention [H, R, D] of rows to keys that are values, too; a sink of each head takes a share of the weights.

    chosen_RK: entries that rows see, -1 for none; None: all of whole blocks up to them.
    """
    positions_R1 = torch.arange(rows.first, rows.first + q_HRD.shape[1], device=q_HRD.device).unsqueeze(1)
    # a slice shorter than the window leaves zeros for tokens before the document
    read_N = torch.arange(rows.first_key, rows.first_key + len(keys_ND), device=q_HRD.device)
    ages_RN = positions_R1 - read_N
    in_window_RN = (ages_RN >= 0) & (ages_RN < rows.window) & (read_N >= 0)
    num_entries = len(entries_MD)
    if chosen_RK is None:
        visible_RM = torch.arange(num_entries, device=q_HRD.device) < (positions_R1 + 1) // rows.rate
    else:
        # one column more takes those that are none
        marks_RM = torch.zeros(q_HRD.shape[1], num_entries + 1, dtype=torch.bool, device=q_HRD.device)
        marks_RM.scatter_(1, chosen_RK.masked_fill(chosen_RK < 0, num_entries).long(), True)
        visible_RM = marks_RM[:, :num_entries]
    seen_RN = torch.cat([in_window_RN, visible_RM], dim=1)
    keys_ND = torch.cat([keys_ND, entries_MD.to(keys_ND.dtype)])
    scores_HRN = (q_HRD.flatten(0, 1) @ keys_ND.T).view(*q_HRD.shape[:2], -1) * rows.scale
    scores_HRN = scores_HRN.masked_fill(~seen_RN, float("-inf"))
    sinks_HR1 = sinks_H.view(-1, 1, 1).expand(-1, q_HRD.shape[1], -1)
    wide = torch.promote_types(torch.promote_types(scores_HRN.dtype, sinks_H.dtype), torch.float32)
    weights_HRN = torch.cat([scores_HRN.to(wide), sinks_HR1.to(wide)], dim=-1).softmax(dim=-1)[..., :-1].to(keys_ND.dtype)
    out: Tensor = (weights_HRN.flatten(0, 1) @ keys_ND).view(q_HRD.shape)
    return out


@torch.no_grad()
def choose_entries(
    choose: Callable[[slice, Tensor], Tensor], keys: Entries, num_heads: int, context: GroupContext
) -> tuple[Tensor, ...]:
    """Returns numbers of the entries that an index chooses for the tokens of every run, [N, K] in int32; -1 for none.

    choose: rows of this rank and index entries [1, M, E] of the whole document, with zeros for those not yet closed -> chosen
    entries [1, R, K], none of which closes after its row. keys: index entries. num_heads: heads of the index.
    """
    lengths, found = document_lengths(context), []
    for run, known_1ME in zip(context.layout.own, keys.runs, strict=True):
        num_all = lengths[run.document] // keys.rate
        whole_1ME = F.pad(known_1ME, (0, 0, 0, num_all - known_1ME.shape[1]))
        num_rows = max(1, BLOCK_SCORES // (num_heads * max(1, num_all)))
        starts = range(run.first, run.first + run.num_tokens, num_rows)
        blocks = [slice(start, min(start + num_rows, run.first + run.num_tokens)) for start in starts]
        found.append(torch.cat([choose(rows, whole_1ME)[0].to(torch.int32) for rows in blocks]))
    return tuple(found)

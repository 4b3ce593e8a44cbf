"""Attention of the documents of one chunk as a single autograd node, for whole sequences and slices, with or without a record.

`sequence_parallel` calls it if torch's own attention does not suffice: for slices, activation policies, windows, sinks and
softcaps.

A document that is a slice reads the keys and values of earlier slices, its front, from the K/V book. Its queries see the whole
front and, causally, the slice itself. These are two tiles: their results are merged by their log-sum-exp (LSE), and the backward
of each uses the merged output and LSE. The front is not copied. A whole document is one causal tile. Other patterns divide the
keys into other tiles, and their K/V book holds the front as one run of keys per slice.

With an `AttentionRecord`, attention runs forward only once under activation checkpointing: the first run leaves output and LSE in
the record and the replay takes them back. The replay recomputes queries, keys and values, which backward needs anyway, and makes
a new autograd node from them. If only a share of the output is kept, the chunk's first rows are dropped. They are the cheapest to
recompute: besides the front they see only keys of the same rows, a causal square at the start of each document.

The node saves queries, output, LSE, and the keys and values of whole documents. Keys and values of slices are not saved but read
from the K/V book, so they are stored only once. The first run and the replay save tensors of equal number, shapes and dtypes,
because checkpointing compares these.

Short documents, of up to `PACKED_TOKENS` tokens, run together in one call (a `Run`) if the device has an operator for that.
Longer ones fill a device on their own, by faster operators. A run has at most `PACKED_ROWS` rows, since its backward needs
workspace for all of them at once; `plan.memory` counts this workspace by the same numbers. Neighbouring documents that fill one
length of plans share a call as heads, within the same rows, if the device was seen to gain by that (`tiles.stacks`).

Shapes: h query heads and g KV heads of this rank, S tokens of its block or of a run, T tokens of one document, U of its front,
D head size of queries and keys, E of values, W = D + E.

Source of slices: Seq1F1B (arXiv 2406.03488), which keeps the prefix as a list of slices and concatenates them for every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import PACKED_ROWS, PACKED_TOKENS, packed_rows
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.heads import KVReaders, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun, KVBook, Slice
from hf_longctx.runtime.attention.rows import (
    AttentionRule,
    KeyPiece,
    front_pieces,
    rows_backward,
    rows_forward,
    sinks_backward,
    with_sinks,
)
from hf_longctx.runtime.tiles.packs import PackInputs, pack_backward, pack_forward
from hf_longctx.runtime.tiles.patterns import CAUSAL
from hf_longctx.runtime.tiles.plain import TileInputs
from hf_longctx.runtime.tiles.stacks import stack_backward, stack_counts, stack_forward
from hf_longctx.runtime.tiles.tile import tile_backward


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens [start, stop) of a chunk: a slice of a sequence (`as_slice`) or a whole sequence (None).

    index: the document's index in the chunk.
    """

    start: int
    stop: int
    as_slice: Slice | None = None
    index: int = 0

    @property
    def tokens(self) -> slice:
        """Range of the document among the tokens of the chunk."""
        return slice(self.start, self.stop)

    @property
    def num_tokens(self) -> int:
        """Number of the document's tokens."""
        return self.stop - self.start


def documents_of(cu_seqlens: tuple[int, ...], slices: tuple[Slice, ...]) -> tuple[Document, ...]:
    """Returns the documents of a packed chunk with these boundaries; those in `slices` are slices, the others whole sequences."""
    by_document = {slice_.document: slice_ for slice_ in slices}
    bounds = enumerate(itertools.pairwise(cu_seqlens))
    return tuple(Document(start, stop, by_document.get(index), index) for index, (start, stop) in bounds)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive documents that are computed together.

    is_packed: by the operator for several documents, even for one; otherwise several documents are a stack, see `tiles.stacks`.
    """

    documents: tuple[Document, ...]
    is_packed: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether documents share a call as heads of their own."""
        return len(self.documents) > 1 and not self.is_packed

    @property
    def tokens(self) -> slice:
        """Range of the run among the tokens of the chunk."""
        return slice(self.documents[0].start, self.documents[-1].stop)

    @property
    def as_slice(self) -> Slice | None:
        """The slice that the run consists of; None for whole documents."""
        return self.documents[0].as_slice

    @property
    def place(self) -> tuple[int, int]:
        """Index of the run's first document in the chunk, and position of its first token in that document."""
        return self.documents[0].index, 0 if self.as_slice is None else self.as_slice.start

    def lengths(self, stop: int) -> list[int]:
        """Returns the number of tokens before token `stop` of the chunk, for each document that has any."""
        return [min(stop, document.stop) - document.start for document in self.documents if document.start < stop]


def lone_runs(documents: Sequence[Document]) -> tuple[Run, ...]:
    """Returns each document as a run of its own."""
    return tuple(Run((document,)) for document in documents)


def packed_runs(documents: Sequence[Document]) -> tuple[Run, ...]:
    """Returns the runs of a chunk: short documents together, each longer document and slice on its own."""
    runs: list[Run] = []
    rows = 0
    for document in documents:
        is_short = document.as_slice is None and document.num_tokens <= PACKED_TOKENS
        own = packed_rows(document.num_tokens)
        if is_short and runs and runs[-1].is_packed and rows + own <= PACKED_ROWS:
            runs[-1], rows = Run((*runs[-1].documents, document), True), rows + own
        else:
            runs.append(Run((document,), is_short))
            rows = own
    return tuple(runs)


def stacked_runs(runs: Sequence[Run], counts: Callable[[Sequence[int]], Sequence[int]]) -> tuple[Run, ...]:
    """Returns the runs with neighbouring long documents in stacks. counts: see `stacks.stack_counts`, given lengths."""
    found: list[Run] = []
    is_long = [not run.is_packed and run.as_slice is None for run in runs]
    for can_stack, group in itertools.groupby(zip(is_long, runs, strict=True), key=lambda pair: pair[0]):
        own = [run for _, run in group]
        if not can_stack or len(own) == 1:
            found += own
            continue
        documents = iter([document for run in own for document in run.documents])
        for number in counts([run.documents[0].num_tokens for run in own]):
            found.append(Run(tuple(itertools.islice(documents, number))))
    return tuple(found)


def run_inputs(q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, lengths: Sequence[int], rule: AttentionRule) -> PackInputs:
    """Prepares whole documents with these lengths for one call, under a rule with `bounds`."""
    assert rule.bounds is not None
    # the operator gets attention chunks as documents
    parts = [part for length in lengths for part in _parts(length, rule.pattern.chunk)]
    k, v = map(rule.readers.gather, (k_gSD, v_gSE))
    bounds = rule.bounds.on_device(parts, q_hSD.device)
    return PackInputs(q_hSD, k, v, bounds, max(parts), rule.scores.scale, rule.pattern.window)


def run_forward(inputs: PackInputs, sinks_h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns output [h, S, E] and LSE [h, S] of a run. sinks_h: see `rows.with_sinks`."""
    return _sunk(*pack_forward(inputs), sinks_h)


def _sunk(out_hSE: Tensor, lse_hS: Tensor, sinks_h: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns output and LSE of a run with the sinks, if there are any."""
    if sinks_h is None:
        return out_hSE, lse_hS
    wide, lse_hS = with_sinks(out_hSE.to(lse_hS.dtype), lse_hS, sinks_h)
    return wide.to(out_hSE.dtype), lse_hS


def _cut(runs: Sequence[Run], num_rows: int) -> Iterator[Run]:
    """Yields runs, and the documents of a stack one by one if only its first rows are computed."""
    for run in runs:
        if run.is_stacked and run.tokens.stop > num_rows:
            yield from lone_runs(run.documents)
        else:
            yield run


def run_backward(
    gradient_hSE: Tensor, inputs: PackInputs, out_hSE: Tensor, lse_hS: Tensor, readers: KVReaders
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a run's queries, keys and values."""
    dq, dk, dv = pack_backward(gradient_hSE, inputs, out_hSE, lse_hS)
    return dq, readers.fold(dk), readers.fold(dv)


def _parts(length: int, size: int) -> list[int]:
    """Cuts a length into parts of `size` tokens and a rest; one part if the size is 0."""
    whole, rest = divmod(length, size) if size else (0, length)
    return [size] * whole + [rest] * (rest > 0)


class SharedKeys:
    """Keys and values of slices that are read by several parts of a rank's query heads, one `ChunkAttention` each.

    The first part writes them into the K/V book. Its backward, which comes last, hands over the gradients of all parts. Make one
    for every call of a layer. num_parts: parts that read the same keys.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        # results of the first part's forward, and the number of parts that have not read them yet
        self._made: dict[Slice | None, tuple[Any, int]] = {}
        # for each slice, parts that have run backward, and what they read and add to
        self._opened: dict[Slice, tuple[int, Any]] = {}

    def made(self, slice_: Slice | None, make: Callable[[], Any]) -> Any:
        """Returns what `make` made of a slice (None: of whole documents) in the forward of the first part."""
        found, left = self._made.pop(slice_, (None, 0))
        found, left = (found, left - 1) if left else (make(), self.num_parts - 1)
        if left:
            self._made[slice_] = found, left
        return found

    def open(self, slice_: Slice, is_first: bool, opens: Callable[[], Any]) -> Any:
        """Returns what `opens` found for the backward of the last part; the first one must come after all others."""
        count, found = self._opened.pop(slice_, (0, None))
        found = found if count else opens()
        if is_first != (count + 1 == self.num_parts):
            raise RuntimeError(
                f"{count + 1} of {self.num_parts} parts of the heads of {slice_} ran backward, the first one "
                f"{'among them' if is_first else 'not among them'}, which must be the last; run backward in one thread"
            )
        if not is_first:
            self._opened[slice_] = count + 1, found
        return found


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention of one layer within one chunk.

    layer: key of the layer in the K/V book, the same object in every chunk. record: None in layers that are not replayed.
    """

    rule: AttentionRule
    documents: tuple[Document, ...]
    record: AttentionRecord | None
    kv_book: KVBook
    layer: Hashable
    # shared by parts of the query heads that read the same keys; is_first: this part is the first of them
    shared: SharedKeys | None = None
    is_first: bool = True

    def runs(self, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor) -> tuple[Run, ...]:
        """Documents that are computed together, if an operator takes several: short ones, and long ones of one length."""
        rule = self.rule
        if rule.bounds is None:
            return lone_runs(self.documents)
        runs = packed_runs(self.documents)
        stacks = rule.stacks
        if stacks is None or rule.pattern != CAUSAL or rule.needs_positions:
            return runs
        # shapes are enough, so no head is copied
        k, v = (rule.readers.gather(x[:, :1]) for x in (k_gSD, v_gSE))
        return stacked_runs(runs, lambda lengths: stack_counts(q_hSD, k, v, lengths, rule.scores, stacks))

    def __call__(self, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None = None) -> Tensor:
        """Attention inside each document, shape [S, h, E], differentiable. sinks_h: in fp32 or fp64, see `rows.with_sinks`."""
        # chosen keys are saved as tensors; backward gathers the block's again
        lean = replace(self, rule=replace(self.rule, chosen_TK=None))
        output: Tensor = _ChunkAttention.apply(q_hSD, k_gSD, v_gSE, sinks_h, self.rule.chosen_TK, lean)
        return output


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_hSD: Tensor,
        k_gSD: Tensor,
        v_gSE: Tensor,
        sinks_h: Tensor | None,
        chosen_TK: Tensor | None,
        call: ChunkAttention,
    ) -> Tensor:
        ctx.call, rule = call, call.rule.choosing(chosen_TK)
        kept = None if call.record is None else call.record.take()
        num_rows = q_hSD.shape[1] if kept is None else kept.start
        outs, lses = [], []
        ctx.runs = call.runs(q_hSD, k_gSD, v_gSE)
        for run in _cut(ctx.runs, num_rows):
            slice_, tokens = run.as_slice, run.tokens
            k, v = k_gSD[:, tokens], v_gSE[:, tokens]
            # a replay writes the keys and values that the K/V book already has, since no later slice has changed them
            front = () if slice_ is None else _front(slice_, k, v, call, any(ctx.needs_input_grad))
            rows = slice(tokens.start, min(tokens.stop, num_rows))
            if rows.start < rows.stop:
                if run.is_packed:
                    q, k, v = (x[:, rows] for x in (q_hSD, k_gSD, v_gSE))
                    out_hTE, lse_hT = run_forward(run_inputs(q, k, v, run.lengths(rows.stop), rule), sinks_h)
                elif run.is_stacked:
                    k, v = map(rule.readers.gather, (k, v))
                    found = stack_forward(q_hSD[:, rows], k, v, run.lengths(rows.stop), rule.scores)
                    out_hTE, lse_hT = _sunk(*found, sinks_h)
                else:
                    own_rule = rule.of_rows(rows, *run.place)
                    out_hTE, lse_hT = rows_forward(q_hSD[:, rows], k, v, front, own_rule, run.place[1], sinks_h)
                outs.append(out_hTE.transpose(0, 1))
                lses.append(lse_hT)
        if kept is not None:
            outs, lses = [*outs, kept.out_ShE], [*lses, kept.lse_hS]
        out_ShE, lse_hS = _joined(outs, 0), _joined(lses, 1)
        if call.record is not None:
            call.record.put(out_ShE, lse_hS)
        whole = partial(_whole_documents, k_gSD, v_gSE, call.documents)
        whole_kv = whole() if call.shared is None else call.shared.made(None, whole)
        ctx.save_for_backward(q_hSD, out_ShE, lse_hS, sinks_h, chosen_TK, *whole_kv)
        return out_ShE

    @staticmethod
    def backward(ctx: Any, gradient_ShE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_hSD, out_ShE, lse_hS, sinks_h, chosen_TK, *whole_kv = ctx.saved_tensors
        call: ChunkAttention = ctx.call
        whole_rule = call.rule.choosing(chosen_TK)
        dsinks_h = None
        if sinks_h is not None:
            dsinks_h = sinks_backward(gradient_ShE.transpose(0, 1), out_ShE.transpose(0, 1), lse_hS, sinks_h)
        runs: tuple[Run, ...] = ctx.runs
        # buffers that the loop fills run by run; not needed for one run, whose gradients are the chunk's
        num_tokens = q_hSD.shape[1] if len(runs) > 1 else 0
        num_kv, head_dim, value_dim = call.rule.readers.num_kv, q_hSD.shape[2], out_ShE.shape[2]
        shapes = ((q_hSD.shape[0], head_dim), (num_kv, head_dim), (num_kv, value_dim))
        dq_hSD, dk_gSD, dv_gSE = (q_hSD.new_empty(heads, num_tokens, size) for heads, size in shapes)
        num_whole = 0
        for run in runs:
            tokens = run.tokens
            gradient_hTE, out_hTE = gradient_ShE[tokens].transpose(0, 1), out_ShE[tokens].transpose(0, 1)
            q_hTD, lse_hT, rule = q_hSD[:, tokens], lse_hS[:, tokens], whole_rule.of_rows(tokens, *run.place)
            found: tuple[Tensor | None, ...]
            if run.as_slice is not None:
                found = _slice_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, run.as_slice, rule, call)
            else:
                saved = slice(num_whole, num_whole + tokens.stop - tokens.start)
                k, v = (x[:, saved] for x in whole_kv)
                if run.is_packed:
                    inputs = run_inputs(q_hTD, k, v, run.lengths(tokens.stop), rule)
                    found = run_backward(gradient_hTE, inputs, out_hTE, lse_hT, rule.readers)
                elif run.is_stacked:
                    k, v = map(rule.readers.gather, (k, v))
                    lengths = run.lengths(tokens.stop)
                    dq, dk, dv = stack_backward(gradient_hTE, q_hTD, k, v, out_hTE, lse_hT, lengths=lengths, scores=rule.scores)
                    found = dq, rule.readers.fold(dk), rule.readers.fold(dv)
                else:
                    found = _document_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, k, v, rule)
                num_whole = saved.stop
            if len(runs) == 1:
                return *(None if x is None else x.to(q_hSD.dtype) for x in found), dsinks_h, None, None
            for gradients, gradient in zip((dq_hSD, dk_gSD, dv_gSE), found, strict=True):
                gradients[:, tokens] = 0 if gradient is None else gradient
        return dq_hSD, dk_gSD, dv_gSE, dsinks_h, None, None


def _front(slice_: Slice, k_gTD: Tensor, v_gTE: Tensor, call: ChunkAttention, has_gradient: bool) -> tuple[KeyRun, ...]:
    """Writes a slice's keys and values into the K/V book and returns the earlier keys and values that it sees."""
    keeps_own = has_gradient and (call.record is None or call.record.is_replay)

    def write() -> tuple[KeyRun, ...]:
        return call.kv_book.write(call.layer, slice_, k_gTD, v_gTE, pattern=call.rule.pattern, keeps_own=keeps_own)

    found: tuple[KeyRun, ...] = write() if call.shared is None else call.shared.made(slice_, write)
    return found


def _document_backward(
    gradient_hTE: Tensor, q_hTD: Tensor, out_hTE: Tensor, lse_hT: Tensor, k_gTD: Tensor, v_gTE: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a whole document's queries, keys and values."""
    tiles, readers = rule.pattern.own_tiles(0, q_hTD.shape[1]), rule.readers
    if len(tiles) == 1 and tiles[0].num_blocks == 1:
        k, v = map(readers.gather, (k_gTD, v_gTE))
        dropout = None if rule.dropout is None else rule.dropout.of_tile(tiles[0], 0)
        tile = TileInputs(q_hTD, k, v, rule.scores, causal=True, chosen=rule.chosen_TK, dropout=dropout)
        dq, dk, dv = tile_backward(gradient_hTE, tile, out_hTE, lse_hT)
        return dq, readers.fold(dk), readers.fold(dv)
    dk_gTD, dv_gTE = (torch.zeros(x.shape, dtype=lse_hT.dtype, device=x.device) for x in (k_gTD, v_gTE))
    own = KeyPiece((k_gTD, v_gTE), tiles, (dk_gTD, dv_gTE))
    dq_hTD = rows_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, (own,), rule)
    return dq_hTD, dk_gTD, dv_gTE


def _slice_backward(
    gradient_hTE: Tensor,
    q_hTD: Tensor,
    out_hTE: Tensor,
    lse_hT: Tensor,
    slice_: Slice,
    rule: AttentionRule,
    call: ChunkAttention,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of a slice's queries, keys and values, with those that later slices left for its keys and values.

    Adds the gradients of the front to those in the K/V book. Of several parts that read the same keys, only the first returns
    gradients of keys and values; the others return None.
    """

    def opens() -> Any:
        return call.kv_book.read(call.layer, slice_), call.kv_book.gradients(call.layer, slice_)

    found = opens() if call.shared is None else call.shared.open(slice_, call.is_first, opens)
    ((front, own_gTW), (front_sum_gUW, own_sum_gTW)), num_tokens = found, slice_.stop - slice_.start
    head_dim = q_hTD.shape[2]
    own_sum, pattern = split_kv(own_sum_gTW, head_dim), rule.pattern
    pieces = [
        KeyPiece(split_kv(own_gTW, head_dim), pattern.own_tiles(slice_.start, num_tokens), own_sum, slice_.start),
        *front_pieces(front, front_sum_gUW, slice_.start, pattern, slice_.start, num_tokens, head_dim),
    ]
    dq_hTD = rows_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, pieces, rule)
    if not call.is_first:
        return dq_hTD, None, None
    call.kv_book.backward_done(call.layer, slice_)
    dk_gTD, dv_gTE = own_sum
    return dq_hTD, dk_gTD, dv_gTE


def _whole_documents(k_gSD: Tensor, v_gSE: Tensor, documents: tuple[Document, ...]) -> tuple[Tensor, ...]:
    """Concatenates keys and values of the documents that are not slices; returns an empty tuple if there are none."""
    whole = [document.tokens for document in documents if document.as_slice is None]
    if len(whole) == len(documents):
        return k_gSD, v_gSE
    # copies: views would keep the keys and values of the slices alive too
    return tuple(torch.cat([x[:, tokens] for tokens in whole], dim=1) for x in (k_gSD, v_gSE)) if whole else ()


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)

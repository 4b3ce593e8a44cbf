"""Attention of a run: short documents of a chunk, side by side, in one call where the device has an operator for that.

Documents of up to `PACKED_TOKENS` tokens share calls. Longer ones fill a device on their own, and faster operators than the one
for several documents compute them. A run ends before it has more than `PACKED_ROWS` rows, since its backward needs workspace for
all of them at once; `plan.memory` counts that by the same numbers.

Shapes: h query heads and g KV heads of this rank, S tokens of a run, D head size of queries and keys, E of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_longctx.plan.core.sharding import PACKED_ROWS, PACKED_TOKENS, packed_rows
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import Slice
from hf_longctx.runtime.attention.rows import AttentionRule, with_sinks
from hf_longctx.runtime.tiles.packs import PackInputs, pack_backward, pack_forward


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens [start, stop) of a chunk. If they are a slice of a sequence, `as_slice` describes it; None for a whole sequence.

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
    """Documents of a packed chunk with these boundaries: the ones named in `slices` are slices, the others whole sequences."""
    by_document = {slice_.document: slice_ for slice_ in slices}
    bounds = enumerate(itertools.pairwise(cu_seqlens))
    return tuple(Document(start, stop, by_document.get(index), index) for index, (start, stop) in bounds)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive documents that are computed together. is_packed: by the operator for several documents, even if it is one."""

    documents: tuple[Document, ...]
    is_packed: bool = False

    @property
    def tokens(self) -> slice:
        """Range of the run among the tokens of the chunk."""
        return slice(self.documents[0].start, self.documents[-1].stop)

    @property
    def as_slice(self) -> Slice | None:
        """The slice, if the run is one."""
        return self.documents[0].as_slice

    @property
    def place(self) -> tuple[int, int]:
        """Index of its first document in the chunk, and the position there of its first token."""
        return self.documents[0].index, 0 if self.as_slice is None else self.as_slice.start

    def lengths(self, stop: int) -> list[int]:
        """Tokens of each document before token `stop` of the chunk, for documents that have any."""
        return [min(stop, document.stop) - document.start for document in self.documents if document.start < stop]


def lone_runs(documents: Sequence[Document]) -> tuple[Run, ...]:
    """Each document as a run of its own."""
    return tuple(Run((document,)) for document in documents)


def packed_runs(documents: Sequence[Document]) -> tuple[Run, ...]:
    """Runs of the short documents of a chunk, and each longer document and slice as a run of its own."""
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


def run_inputs(q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, lengths: Sequence[int], rule: AttentionRule) -> PackInputs:
    """Whole documents with these lengths, for one call under a rule with `bounds`."""
    assert rule.bounds is not None
    # attention chunks are documents to the operator
    parts = [part for length in lengths for part in _parts(length, rule.pattern.chunk)]
    k, v = map(rule.readers.gather, (k_gSD, v_gSE))
    bounds = rule.bounds.on_device(parts, q_hSD.device)
    return PackInputs(q_hSD, k, v, bounds, max(parts), rule.scores.scale, rule.pattern.window)


def run_forward(inputs: PackInputs, sinks_h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [h, S, E] and LSE [h, S] of a run. sinks_h: see `rows.with_sinks`."""
    out_hSE, lse_hS = pack_forward(inputs)
    if sinks_h is None:
        return out_hSE, lse_hS
    wide, lse_hS = with_sinks(out_hSE, lse_hS, sinks_h)
    return wide.to(out_hSE.dtype), lse_hS


def run_backward(
    gradient_hSE: Tensor, inputs: PackInputs, out_hSE: Tensor, lse_hS: Tensor, readers: KVReaders
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of a run."""
    dq, dk, dv = pack_backward(gradient_hSE, inputs, out_hSE, lse_hS)
    return dq, readers.fold(dk), readers.fold(dv)


def _parts(length: int, size: int) -> list[int]:
    """The length cut into parts of `size` tokens and a rest; whole if the size is 0."""
    whole, rest = divmod(length, size) if size else (0, length)
    return [size] * whole + [rest] * (rest > 0)

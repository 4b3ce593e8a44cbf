"""Which tokens of a chunk the ranks of a sequence group hold, and what they must send each other where documents are cut.

Layers with a state along the sequence read it: a convolution needs the last tokens before each of a rank's own, and a recurrence
the states that earlier tokens leave, wherever the layout of the group (contiguous shards, zigzag pieces or both) has put them.

Every function here gives all ranks the same answer from the layout alone, so that both ends of a message know its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hf_longctx.plan.core.sharding import Piece, runs_of, state_readers


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start, stop) of a document of a chunk, counted like those of a `Piece`; perhaps none."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Messages by which every rank gets the token ranges that it wants.

    outgoing: for each rank, this rank's tokens that it gets. arriving: for each rank, the tokens that come from it, as (index of
    the wanted range, number of tokens). order: for each wanted range, its parts in the order of their tokens, as indices into
    all that arrives.
    """

    outgoing: tuple[tuple[slice, ...], ...]
    arriving: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Chains:
    """How states pass through the documents of a chunk.

    runs: for each document that this rank needs states of, (rank, index among its runs) of its runs, in the order of tokens.
    readers: for every run of every rank, the other ranks that need to know how it changes a state.
    """

    runs: dict[int, tuple[tuple[int, int], ...]]
    readers: tuple[tuple[frozenset[int], ...], ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The ranks of a sequence group and their tokens, as this rank sees them.

    process_group: a process group that connects them. is_block: it consists of them alone, in this order. ranks: their global
    ranks. index: this rank's among them. runs: for each rank its pieces of documents, neighbours joined. known_fetches,
    known_chains: caches of `fetch_before` and `chains`, shared by all layers of a chunk.
    """

    process_group: dist.ProcessGroup | None
    is_block: bool
    ranks: tuple[int, ...]
    index: int
    runs: tuple[tuple[Piece, ...], ...]
    known_fetches: dict[tuple[int, tuple[int, ...]], Fetch] = field(default_factory=dict)
    known_chains: dict[tuple[int, ...], Chains] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        is_block: bool,
        ranks: tuple[int, ...],
        index: int,
        pieces: Iterable[tuple[Piece, ...]],
    ) -> GroupLayout:
        """The layout of a group whose ranks hold these pieces."""
        return cls(process_group, is_block, ranks, index, tuple(map(runs_of, pieces)))

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def own(self) -> tuple[Piece, ...]:
        """This rank's runs of tokens, in the order of its tokens."""
        return self.runs[self.index]

    def chains(self, going_on: tuple[int, ...]) -> Chains:
        """How states pass through the documents of the chunk, of which `going_on` go on in a later chunk."""
        if going_on not in self.known_chains:
            mine = {*going_on, *(run.document for run in self.own if run.start)}
            found: dict[int, list[tuple[int, int, int]]] = {document: [] for document in mine}
            for rank, runs in enumerate(self.runs):
                for place, run in enumerate(runs):
                    if run.document in mine:
                        found[run.document].append((run.start, rank, place))
            runs_in_order = {
                document: tuple((rank, place) for _, rank, place in sorted(runs)) for document, runs in found.items()
            }
            self.known_chains[going_on] = Chains(runs_in_order, state_readers(self.runs, going_on))
        return self.known_chains[going_on]

    def fetch_before(self, num_tokens: int, going_on: tuple[int, ...]) -> Fetch:
        """Messages for the last `num_tokens` tokens before each own run, then for the last ones of the documents `going_on`."""
        key = num_tokens, going_on
        if key not in self.known_fetches:
            stops = {document: 0 for document in going_on}
            for run in (run for runs in self.runs for run in runs if run.document in stops):
                stops[run.document] = max(run.stop, stops[run.document])
            ends = [TokenRange(document, max(0, stop - num_tokens), stop) for document, stop in stops.items()]
            wanted = [
                [*(TokenRange(run.document, max(0, run.start - num_tokens), run.start) for run in runs), *ends]
                for runs in self.runs
            ]
            self.known_fetches[key] = self._fetch(wanted)
        return self.known_fetches[key]

    def _fetch(self, wanted: Sequence[Sequence[TokenRange]]) -> Fetch:
        outgoing = tuple(tuple(tokens for _, _, tokens in _overlaps(ranges, self.own)) for ranges in wanted)
        found = [_overlaps(wanted[self.index], runs) for runs in self.runs]
        parts = sorted(
            (index, start, place) for place, (index, start, _) in enumerate(part for overlaps in found for part in overlaps)
        )
        order: list[list[int]] = [[] for _ in wanted[self.index]]
        for index, _, place in parts:
            order[index].append(place)
        arriving = tuple(tuple(tokens.stop - tokens.start for _, _, tokens in overlaps) for overlaps in found)
        return Fetch(outgoing, arriving, tuple(map(tuple, order)))


def _overlaps(ranges: Sequence[TokenRange], runs: Sequence[Piece]) -> list[tuple[int, int, slice]]:
    """(index of the range, first position, tokens of the rank) of every part of a range that a rank with these runs holds."""
    by_document: dict[int, list[Piece]] = {}
    for run in runs:
        by_document.setdefault(run.document, []).append(run)
    found = []
    for index, wanted in enumerate(ranges):
        for run in by_document.get(wanted.document, ()):
            start, stop = max(run.start, wanted.start), min(run.stop, wanted.stop)
            if start < stop:
                first = run.first + start - run.start
                found.append((index, start, slice(first, first + stop - start)))
    return found

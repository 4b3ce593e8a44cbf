"""The tokens of a chunk on each rank of a sequence group, and the messages between ranks that hold parts of one document.

Used by layers with a state along the sequence: a convolution needs the last tokens before each of a rank's own, and a recurrence
the states after earlier tokens, on whichever rank the layout (contiguous shards, zigzag pieces or both) has put them.

All functions here depend on the layout alone, so that both ends of a message compute the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hf_longctx.plan.core.sharding import Piece, runs_of, state_readers


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start, stop) of a chunk's document, counted like those of a `Piece`; may be empty."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Messages that bring every rank the token ranges that it wants."""

    # for each rank, the tokens that this rank sends to it
    outgoing: tuple[tuple[slice, ...], ...]
    # for each rank, the tokens that this rank receives from it, as (index of the wanted range, number of tokens)
    arriving: tuple[tuple[int, ...], ...]
    # for each wanted range, its parts in token order, as indices into all that arrives
    order: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Chains:
    """Order in which states pass through the documents of a chunk.

    runs: for each document whose states this rank needs, (rank, index among the rank's runs) of its runs, in token order.
    readers: for every run of every rank, the other ranks that need its effect on a state.
    """

    runs: dict[int, tuple[tuple[int, int], ...]]
    readers: tuple[tuple[frozenset[int], ...], ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The ranks of a sequence group and their tokens."""

    # a process group that connects the ranks
    process_group: dist.ProcessGroup | None
    # the process group consists of exactly these ranks, in this order
    is_block: bool
    # global ranks
    ranks: tuple[int, ...]
    # index of this rank
    index: int
    # for each rank, its pieces of documents, neighbours joined
    runs: tuple[tuple[Piece, ...], ...]
    # caches of `fetch_before` and `chains`, shared by all layers of a chunk
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
        """Makes the layout of a group whose ranks hold these pieces."""
        return cls(process_group, is_block, ranks, index, tuple(map(runs_of, pieces)))

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def own(self) -> tuple[Piece, ...]:
        """This rank's runs of tokens, in token order."""
        return self.runs[self.index]

    def chains(self, going_on: tuple[int, ...]) -> Chains:
        """Returns the chains of the chunk's documents, of which `going_on` continue in a later chunk."""
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
        """Returns the messages for the last `num_tokens` tokens before each own run, then for those of documents `going_on`."""
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
    """Yields (index of the range, first position, tokens of the rank) for every part of a range on a rank with these runs."""
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

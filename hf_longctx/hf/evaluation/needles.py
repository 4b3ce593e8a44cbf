"""Needle tasks: documents with a hidden fact and a question about it at the end, over a grid of lengths and depths.

The documents are the same in every run. `LongContextEvaluation` measures how well the model answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_longctx.runtime.core.loss import IGNORE_INDEX

# (length in tokens, depth from 0 to 1, random generator) -> (token ids, number of answer tokens at the end)
MakeDocument = Callable[[int, float, random.Random], tuple[list[int], int]]

_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The river runs to the sea. "
    "The road goes on and on. "
)


@dataclass(frozen=True)
class NeedleTask:
    """A grid of documents: `num_documents` for each pair of a length in tokens and a depth, from 0 (start) to 1 (end).

    make: writes one document; `passkeys` returns such a function for a tokenizer.

    Example:

        NeedleTask(lengths=(4096, 32768), depths=(0, 0.5, 1), make=passkeys(tokenizer))
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    make: MakeDocument
    num_documents: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        # users may give lists, but cells are compared as tuples
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "depths", tuple(self.depths))
        if not self.lengths or not self.depths or self.num_documents < 1:
            raise ValueError(
                f"the needle task has {len(self.lengths)} lengths, {len(self.depths)} depths and {self.num_documents} documents "
                f"per pair; give at least one of each"
            )
        if len(set(self.lengths)) < len(self.lengths) or len(set(self.depths)) < len(self.depths):
            raise ValueError(f"needle lengths {self.lengths} or depths {self.depths} contain a value twice; give each once")
        if off := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise ValueError(f"needle depth {off[0]:g} is not a share of the length; give 0 (the start) to 1 (the end)")

    @property
    def cells(self) -> list[tuple[int, float]]:
        """Returns all (length, depth) pairs, in the order of the rows."""
        return [(length, depth) for length in self.lengths for depth in self.depths]

    def rows(self) -> list[dict[str, list[int]]]:
        """Makes all documents, cell by cell, with labels on the answers only.

        Raises ValueError if `make` returns a document of another length than requested.
        """
        rows = []
        for length, depth in self.cells:
            for number in range(self.num_documents):
                ids, num_answer = self.make(length, depth, random.Random(f"{self.seed} {length} {depth:g} {number}"))
                if len(ids) != length or not 0 < num_answer < length:
                    raise ValueError(
                        f"`make` was asked for {length} tokens and returned {len(ids)}, {num_answer} of them the answer; return "
                        f"exactly as many as asked for, with an answer after at least one token"
                    )
                rows.append({"input_ids": list(ids), "labels": [IGNORE_INDEX] * (length - num_answer) + ids[-num_answer:]})
        return rows


def passkeys(tokenizer: Any, num_digits: int = 5) -> MakeDocument:
    """Returns a function that writes filler documents with a pass key at the given depth and a question at the end.

    Works with any tokenizer; a document begins with the tokenizer's beginning-of-sequence token, if there is one.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def make(length: int, depth: float, chance: random.Random) -> tuple[list[int], int]:
        key = "".join(chance.choice("0123456789") for _ in range(num_digits))
        needle = tokens(f"\nThe pass key is {key}. Remember it: {key} is the pass key.\n")
        question = tokens("\nWhat is the pass key? The pass key is")
        asked = tokens(f"\nWhat is the pass key? The pass key is {key}")
        # a tokenizer may merge the end of the question with the answer, so compare tokens with and without it
        common = next((i for i, pair in enumerate(zip(question, asked, strict=False)) if pair[0] != pair[1]), len(question))
        room = length - len(first) - len(needle) - len(asked)
        if room < 0:
            raise ValueError(
                f"a pass key document needs at least {length - room} tokens, but the needle length is {length}; raise it"
            )
        unit = tokens(_FILLER)
        start = chance.randrange(len(unit))
        filler = (unit * (room // len(unit) + 2))[start : start + room]
        before = round(depth * room)
        return [*first, *filler[:before], *needle, *filler[before:], *asked], len(asked) - common

    return make
